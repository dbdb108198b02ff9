"""What goes wrong in each case of benchmarks/never_below.py, and how it is done."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.batched import Reader
from benchmarks.driving import Prompts
from benchmarks.faults import moved, quota, stopped, threads_of
from benchmarks.watched_daemon import order

WITHIN_S = 0.01  # that threads are held within a job
SECOND_TOKENS = 128  # of each reply of a second daemon
_prompts = itertools.count(1)  # that are read beside a reply: none comes twice

# With the Bench and the Side of never_below.py: while the fault lasts; how it was done.
Fault = Callable[[Any, Any], AbstractContextManager[str]]


@contextmanager
def nothing(bench: Any, side: Any) -> Iterator[str]:
    """What the case is about is in what is asked for."""
    yield ""


# --- threads ------------------------------------------------------------------------------------------


@contextmanager
def stopped_before(bench: Any, side: Any) -> Iterator[str]:
    """All threads are stopped while none has a job."""
    threads = side.threads()
    if not threads:
        yield ""
    elif bench.traces:
        with stopped(threads):
            yield "each thread by ptrace"
    else:
        order(side.client, hold="before claim", threads=len(threads), seconds=bench.o.case_seconds)
        try:
            yield "threads held before they claim, as ptrace is not permitted"
        finally:
            order(side.client, release=True)


@contextmanager
def stopped_within(bench: Any, side: Any) -> Iterator[str]:
    """Threads that have an item of a job are held. For longer than `patience_s` the step would be lost."""
    if threads := side.threads():
        order(side.client, hold="item", threads=len(threads), seconds=WITHIN_S)
    yield "held at items of jobs by the pool's own hook" if threads else ""


@contextmanager
def slowed(bench: Any, side: Any) -> Iterator[str]:
    """The rate of a CPU at a quarter of its clock: three threads of four are stopped while none has a job."""
    threads = side.threads()
    some = threads[: 3 * len(threads) // 4]
    if not some:
        yield ""
    elif bench.traces:
        with stopped(some):
            yield f"{len(some)} of {len(threads)} threads stopped by ptrace"
    else:
        with moved(some, sorted(os.sched_getaffinity(some[0]))[:1]):
            yield f"{len(some)} of {len(threads)} threads on one core, as ptrace is not permitted"


@contextmanager
def one_core(bench: Any, side: Any) -> Iterator[str]:
    threads = side.threads()
    with moved(threads, bench.cpus[-1:]):
        yield f"affinity of {len(threads)} threads" if threads else ""


@contextmanager
def one_core_quota(bench: Any, side: Any) -> Iterator[str]:
    with quota(side.client.pid) as how:
        yield how


@contextmanager
def far(bench: Any, side: Any) -> Iterator[str]:
    """Threads on another node than their memory; on a machine with one node, two of their cores are taken."""
    threads = side.threads()
    own = {cpu for thread in threads for cpu in os.sched_getaffinity(thread)}
    others = [node & set(bench.cpus) for node in bench.nodes if not node & own]
    if len(bench.nodes) > 1 and any(others):
        with moved(threads, set().union(*others)):
            yield "threads on another NUMA node" if threads else ""
    else:
        with bench.neighbors("busy", cpus=taken(bench)).at_work():
            yield "one NUMA node here: busy loops on two of the threads' cores instead"


def taken(bench: Any) -> list[int]:
    """Cores that threads are bound to, two of the last ones, which `cores.find` takes first."""
    return list(bench.cpus[-2:])


# --- neighbors ----------------------------------------------------------------------------------------


def beside(kind: str, n: int = 0) -> Fault:
    """So many processes of a kind are at work; 0: one a core."""

    @contextmanager
    def fault(bench: Any, side: Any) -> Iterator[str]:
        neighbors = bench.neighbors(kind, n)
        with neighbors.at_work():
            yield f"{len(neighbors.pids)} processes"

    return fault


@contextmanager
def second_daemon(bench: Any, side: Any) -> Iterator[str]:
    """Another daemon generates all the time. RuntimeError: it did not."""
    client, stop, wrong = bench.second.client, threading.Event(), list[BaseException]()

    def go_on() -> None:
        try:
            while not stop.is_set():
                prompt = Prompts(bench.shape.n_vocab, seed=next(_prompts)).next(3)
                with client.generate(prompt, max_tokens=SECOND_TOKENS, stop_tokens=[], draft=False) as stream:
                    any(stop.is_set() for _ in stream)  # to its end, or until it is not wanted
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield f"{len(threads_of(client.pid))} threads"
    finally:
        stop.set()
        thread.join(bench.o.case_seconds)
    if wrong or thread.is_alive():
        raise RuntimeError(f"the second daemon failed: {wrong or 'it does not end'}")


@contextmanager
def prompt_beside(bench: Any, side: Any) -> Iterator[str]:
    """A prompt is read by the same daemon. RuntimeError: it was not."""
    prompt = Prompts(bench.shape.n_vocab, seed=next(_prompts)).next(bench.o.beside)
    reader = Reader(side.client, prompt, 1, draft=False)
    yield f"{len(prompt)} tokens"
    reader.join(bench.o.case_seconds)
    if reader.done is None:
        raise RuntimeError("the prompt beside was not read")


# --- the list -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """What goes wrong. fault: a block while it lasts; with_reply: it begins before the first token, not in the middle.

    rates: of misses, each for as many tokens, instead of the usual one. guesses: "wrong", or "right, then wrong" from
    the fault on; empty: none, and they begin as off. at_once: replies that share steps; each: tokens of short ones.
    """

    name: str
    what: str
    fault: Fault = nothing
    with_reply: bool = False
    rates: tuple[float, ...] = ()
    guesses: str = ""
    at_once: int = 1
    each: int = 0
    is_deep: bool = False
    is_sampled: bool = False
    has_form: bool = False
    has_drafts: bool = False
    needs: tuple[str, int] | None = None  # neighbors, and how many

    def begins(self, before: int) -> str:
        """When, in words."""
        if self.at_once > 1:
            return "when the last reply has begun"
        return "with the reply" if self.with_reply or self.each else f"at token {before}"

    @property
    def is_checked(self) -> bool:
        """Whether what the reply misses is known beforehand: its tokens alone count, none taken back or given."""
        return not (self.has_drafts or self.has_form or self.has_prompt_beside)

    @property
    def has_prompt_beside(self) -> bool:
        """Whether the daemon reads another prompt meanwhile."""
        return self.fault is prompt_beside

    @property
    def has_second_daemon(self) -> bool:
        """Whether there is another one on the host."""
        return self.fault is second_daemon

    def prepare(self, bench: Any) -> None:
        """Begin what takes time to be there."""
        if self.needs is not None:
            bench.neighbors(*self.needs)
        elif self.fault is far and len(bench.nodes) < 2:
            bench.neighbors("busy", cpus=taken(bench))


CASES = (
    Case("quiet", "nothing goes wrong: what the others are to be seen beside", with_reply=True),
    Case("stopped-before", "all CPU threads are stopped before a job, for good", stopped_before, with_reply=True),
    Case("stopped-within", f"CPU threads are stopped within a job for {1e3 * WITHIN_S:.0f} ms", stopped_within),
    Case("slowed", "the CPU computes experts at a quarter of its rate", slowed, with_reply=True),
    Case("one-core", "all CPU threads share one core", one_core),
    Case("quota", "the daemon has the time of one core", one_core_quota),
    Case("busy-cores", "a neighbor burns every core", beside("busy"), needs=("busy", 0)),
    Case("busy-memory", "a neighbor copies memory on every core", beside("copies"), needs=("copies", 0)),
    Case("far-memory", "CPU threads compute from another NUMA node's memory", far),
    Case("busy-pcie", "PCIe is busy with copies of host memory, as of prefixes", beside("pcie", 1), needs=("pcie", 1)),
    Case("second-daemon", "a second daemon on the host generates, with CPU threads on the same cores", second_daemon),
    Case("prefill", "a long prompt is read beside the reply", prompt_beside),
    Case("several", "four replies share their steps", at_once=4),
    Case("drafts", "steps are wide, as seven of eight drafted tokens are right", has_drafts=True, with_reply=True),
    Case("wrong-guesses", "guesses, right until then, are all wrong, one a layer", guesses="right, then wrong"),
    Case("useless-guesses", "nothing is missing, and one expert a layer is guessed", with_reply=True,
         rates=(0.0,), guesses="wrong"),
    Case("rate-changes", "nothing is missing; then 40% for a fifth of the tokens, then nothing again",
         rates=(0.0, 0.0, 0.4, 0.0, 0.0)),
    Case("deep", "the reply is at depth 16K", with_reply=True, is_deep=True),
    Case("short", "replies have 16 tokens each, prompts three", each=16),
    Case("sampled", "the reply is sampled", with_reply=True, is_sampled=True),
    Case("form", "the reply is bound by a form", with_reply=True, is_sampled=True, has_form=True),
)  # fmt: skip
