"""Never below PCIe alone: whatever goes wrong, decoding with experts on the CPU and guesses, beside that without.

    python benchmarks/never_below.py model.gguf --json data/results/never_below.json

Two daemons are loaded: one with --cpu-experts off --guess off, one with both `auto`. Each case has a fault that
begins at a token of a reply, or with it, and both decode the same prompts with the same imposed misses
(docs/routing-model.md) in turns: off, on, off, on. Counted are the tokens from the fault on, by the clock of who
reads them, so all that a gate takes to see it is in the rate. Ratios are of the medians, with those of each pair as
extremes; the tokens of a pair have to be the same. What was imposed is checked against the misses that the daemon
reports.

The gates begin anew before each reply (benchmarks/watched_daemon.py): what a case found is not known to the next.
Where a case says nothing else guesses begin as off, as a gate leaves them that has seen no use in them, with one step
in 128 that has some. Steps of every kind are captured before, which a daemon does once, when a gate first changes
sides; how long that takes is reported apart. Before a reply nothing runs for SETTLE_S: for some 0.3 s who
follows another process on the GPU gets half of it. A case that fails is a row with its error, and one that takes too
long ends its daemon, which is loaded again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.batched import Reader  # noqa: E402
from benchmarks.driving import Prompts, Shape, note, settings, shape_of, spread  # noqa: E402
from benchmarks.faults import may_trace, nodes, threads_of  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from benchmarks.forms_speed import FORM  # noqa: E402
from benchmarks.neighbors import Neighbors  # noqa: E402
from benchmarks.never_below_cases import CASES, Case  # noqa: E402
from benchmarks.routing import guessed, imposed, missed  # noqa: E402
from benchmarks.watched_daemon import order  # noqa: E402
from engine.ground import protocol  # noqa: E402
from engine.ground.config import EngineConfig  # noqa: E402
from engine.ground.protocol import Done, Tokens  # noqa: E402
from engine.ground.sampling import Sampling  # noqa: E402
from engine.ops.cuda.landing import FIRST_TARGET, SLOTS  # noqa: E402
from engine.placing import placement  # noqa: E402
from engine.placing.policies import UNIFORM  # noqa: E402
from spark.daemon.client import DaemonClient, Deadlines  # noqa: E402
from spark.pipeline.bench import check_settings  # noqa: E402
from spark.results import write_json  # noqa: E402

DAEMON = ROOT / "benchmarks" / "watched_daemon.py"
LEAST = 0.99  # of the speed of PCIe alone
EXTRA = 8  # tokens more than are counted, since several may come at once
SPOILED = 8  # of so many predicted tokens one is another
WARM_TOKENS = 24
SETTLE_S = 0.5  # after 0.2 s nothing was left of the other process (H100, 60% resident: 274, then 614 tokens/s)
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=7)


@dataclass(frozen=True, slots=True)
class Run:
    """One side's part of a pair. counted: tokens from the fault on; misses: by layer, as imposed and as reported."""

    tokens_per_s: float
    counted: int
    tokens: list[int]
    misses: tuple[list[int], list[int]] | None = None
    how: str = ""


# --- what is imposed ----------------------------------------------------------------------------------


@dataclass
class Routes:
    """Choices and guesses of all cases in one array each, and where those of a case begin; resident: bool [L, E]."""

    resident: NDArray[np.bool_]
    n_used: int
    places: dict[Any, int] = field(default_factory=dict)
    choices: list[NDArray[np.int32]] = field(default_factory=list)
    guesses: list[NDArray[np.int32]] = field(default_factory=list)

    def add(self, case: Case, tokens: int, before: int, rate: float) -> None:
        """The choices of a case, unless another one has the same."""
        key = self._key(case)
        if key in self.places:
            return
        n = before + tokens + EXTRA
        self.places[key] = sum(map(len, self.choices))
        if case.at_once > 1:  # whose rows come in an order that nobody knows: each has the same choices
            one = imposed(self.resident, 1, self.n_used, rate, seed=len(self.places))
            chosen = np.repeat(one, n + case.at_once * (before + EXTRA), axis=0)
        else:
            chosen = self._changing(case.rates or (None,), n, before, rate)
        self.choices.append(chosen)
        found = np.full((*chosen.shape[:2], SLOTS), -1, np.int32)
        if case.guesses == "right, then wrong":
            found[:before] = guessed(chosen[:before], self.resident, 0.83, 0.45, SLOTS, 1)
        if case.guesses:
            first = before if case.guesses == "right, then wrong" else 0
            found[first:, :, :1] = wrong(chosen[first:], self.resident, seed=2)
        found[:, :FIRST_TARGET] = -1
        self.guesses.append(found)

    def _changing(self, rates: Sequence[float | None], n: int, before: int, rate: float) -> NDArray[np.int32]:
        """The first of the rates for what comes before the fault, too; None: the usual one."""
        ends = [before + (n - before) * (i + 1) // len(rates) for i in range(len(rates))]
        lengths = np.diff([0, *ends])
        parts = [
            imposed(self.resident, int(length), self.n_used, rate if share is None else share, seed)
            for seed, (share, length) in enumerate(zip(rates, lengths, strict=True))
        ]
        return np.concatenate(parts)

    def _key(self, case: Case) -> Any:
        return case.rates, case.guesses, case.at_once > 1

    def place(self, case: Case) -> int:
        """Where a case's choices begin."""
        return self.places[self._key(case)]

    def misses(self, case: Case, steps: int) -> list[int]:
        """Of the first steps of a case, by layer."""
        at, before = self.place(case), 0
        for part in self.choices:
            if before == at:
                found: list[int] = missed(part[:steps], self.resident).sum(axis=0).tolist()
                return found
            before += len(part)
        raise KeyError(case.name)

    def save(self, folder: Path) -> tuple[Path, Path]:
        """The files that the daemons read."""
        paths = folder / "replay.npy", folder / "guesses.npy"
        for path, parts in zip(paths, (self.choices, self.guesses), strict=True):
            np.save(path, np.concatenate(parts).astype(np.int32))
        return paths


def wrong(chosen: NDArray[np.int32], resident: NDArray[np.bool_], seed: int) -> NDArray[np.int32]:
    """A guess for each token and layer that is not resident and not chosen, int32 [n, L, 1]."""
    chances = np.random.default_rng(seed).random((len(chosen), *resident.shape), np.float32)
    chances[:, resident] = 2.0
    np.put_along_axis(chances, chosen.astype(np.int64), 2.0, axis=2)
    return chances.argmin(axis=2)[..., None].astype(np.int32)


# --- the daemons --------------------------------------------------------------------------------------


class Side:
    """A daemon that is loaded when it is needed, and again if it has ended."""

    def __init__(self, name: str, config: EngineConfig, deadline_s: float) -> None:
        self.name, self.config = name, config
        self.deadlines = Deadlines(ready_s=300, silence_s=deadline_s, total_s=deadline_s)
        self._client: DaemonClient | None = None

    @property
    def client(self) -> DaemonClient:
        """The daemon, ready."""
        if self._client is not None and not self._client.alive:
            note(f"{self.name}: loaded again")
            self.close()
        if self._client is None:
            command = [sys.executable, str(DAEMON), *protocol.command_line(self.config)]
            client = DaemonClient(command, deadlines=self.deadlines)
            try:
                check_settings(self.config, client.ready.info)
            except BaseException:
                client.close()
                raise
            self._client = client
        return self._client

    @property
    def is_on(self) -> bool:
        """Whether it has experts on the CPU, or guesses."""
        return self.config.cpu_experts != "off" or self.config.guess != "off"

    def threads(self) -> list[int]:
        """Of those that compute experts; none on the side that has none. RuntimeError: there should be some."""
        if not self.is_on:
            return []
        found = threads_of(self.client.pid)
        if not found:
            raise RuntimeError(f"no threads compute experts: {self.why_none()}")
        return found

    def why_none(self) -> str:
        """What the daemon said of experts on the CPU."""
        said = [r for r in self.client.ready.info["reasons"] if r.startswith("experts on the CPU")]
        return "; ".join(said) or "it did not say why"

    def close(self) -> None:
        """End it."""
        if self._client is not None:
            self._client.close()
            self._client = None


class Bench:
    """What the cases have in common: both sides, neighbors, a second daemon, what is imposed."""

    def __init__(self, o: argparse.Namespace, shape: Shape, config: EngineConfig, routes: Routes | None) -> None:
        self.o, self.shape, self.routes = o, shape, routes
        self.off = Side("off", config, o.case_seconds)
        on = replace(config, cpu_experts=o.cpu_experts, guess=o.guess)
        if o.guess != "off":
            on = replace(on, replay_guesses=o.guesses_file)
        self.on = Side("on", on, o.case_seconds)
        self.second = Side("second", replace(on, ctx_tokens=512), o.case_seconds)
        self.cpus = sorted(os.sched_getaffinity(0))
        self.nodes = nodes()
        self.traces = False
        self._neighbors: dict[tuple[str, tuple[int, ...]], Neighbors] = {}
        self._known: dict[tuple[str, int], list[int]] = {}

    def neighbors(self, kind: str, n: int = 0, cpus: Sequence[int] | None = None) -> Neighbors:
        """Processes that wait until they are wanted; n: of them, 0: as many as there are cores."""
        key = kind, tuple(cpus or (n,))
        if key not in self._neighbors:
            self._neighbors[key] = Neighbors(kind, n or len(self.cpus), cpus)
        return self._neighbors[key]

    def load(self, wants_second: bool) -> None:
        """Load all daemons: that with experts on the CPU alone, since it measures what they take as it loads."""
        errors: list[BaseException] = []

        def opened(side: Side) -> None:
            try:
                _ = side.client
            except BaseException as error:
                errors.append(error)

        first = [self.off, self.second] if wants_second else [self.off]
        threads = [threading.Thread(target=opened, args=(side,)) for side in first]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:  # what is wrong with the side that is off is wrong again, and its case tells of the second one
            note(f"a daemon has to be loaded again: {errors[0]}")
        for neighbors in self._neighbors.values():
            with suppress(RuntimeError):  # so will theirs
                neighbors.ready()
        _, _ = self.off.client, self.on.client
        self.traces = may_trace(self.on.client.pid)

    def prompt(self, case: Case, pair: int, number: int = 0) -> list[int]:
        """The same on both sides, and never again."""
        n = self.o.depth if case.is_deep else 3
        return Prompts(self.shape.n_vocab, seed=1000 * CASES.index(case) + 100 * pair + number).next(n)

    def begin(self, side: Side, case: Case) -> dict[str, Any]:
        """Gates that know nothing, and this case's choices next; the other side's last step is long over."""
        time.sleep(SETTLE_S)
        at = 0 if self.routes is None else self.routes.place(case)
        return order(side.client, begin=at, guesses=bool(case.guesses))

    def prediction(self, case: Case, pair: int) -> list[int]:
        """What a reply is going to be, but for one in so many tokens, from the side that is off."""
        if (case.name, pair) not in self._known:
            self.begin(self.off, case)
            n = self.o.before + self.o.tokens + EXTRA
            stream = self.off.client.generate(
                self.prompt(case, pair), max_tokens=n, stop_tokens=[], draft=False
            )  # fmt: skip
            self._known[case.name, pair] = [t for event in stream if isinstance(event, Tokens) for t in event.tokens]
        known = self._known[case.name, pair]
        return [(t + 1) % self.shape.n_vocab if i % SPOILED == SPOILED - 1 else t for i, t in enumerate(known)]

    def close(self) -> None:
        """End all of it."""
        for neighbors in self._neighbors.values():
            neighbors.close()
        for side in (self.off, self.on, self.second):
            side.close()


# --- one side of a pair -------------------------------------------------------------------------------


def one_reply(bench: Bench, side: Side, case: Case, pair: int) -> Run:
    """A reply in which the fault begins, timed from there on."""
    o, prediction = bench.o, bench.prediction(case, pair) if case.has_drafts else None
    first = 1 if case.with_reply else o.before
    n, tokens, how = first + o.tokens + EXTRA, list[int](), ""
    bench.begin(side, case)
    began_s = last_s = 0.0
    base, done = 0, None
    with ExitStack() as stack:
        if case.with_reply:
            how = stack.enter_context(case.fault(bench, side))
        stream = stack.enter_context(
            side.client.generate(
                bench.prompt(case, pair), max_tokens=n, sampling=SAMPLED if case.is_sampled else None, stop_tokens=[],
                grammar=FORM if case.has_form else None, draft=prediction is not None, prediction=prediction,
            )
        )  # fmt: skip
        for event in stream:
            if isinstance(event, Tokens):
                last_s = time.perf_counter()
                tokens += event.tokens
                if not base and len(tokens) >= first:
                    base, began_s = len(tokens), last_s
                    if not case.with_reply:
                        how = stack.enter_context(case.fault(bench, side))
            elif isinstance(event, Done):
                done = event
    if done is None or len(tokens) != n:
        raise RuntimeError(f"asked for {n} tokens, got {len(tokens)}")
    if base == n or last_s <= began_s:
        raise RuntimeError(f"all {n} tokens came at once, before the fault")
    misses = None
    if bench.routes is not None and case.is_checked:
        misses = bench.routes.misses(case, n - 1), list(done.residency["misses_by_layer"])
    return Run((n - base) / (last_s - began_s), n - base, tokens, misses, how)


def several(bench: Bench, side: Side, case: Case, pair: int) -> Run:
    """Replies that share steps, from when the last has begun until the first has ended."""
    o = bench.o
    n = -(-o.tokens // case.at_once) + o.before
    bench.begin(side, case)
    with case.fault(bench, side) as how:
        readers = [Reader(side.client, bench.prompt(case, pair, i), n, draft=False) for i in range(case.at_once)]
        for reader in readers:
            reader.join(o.case_seconds)
            if reader.done is None or reader.done.usage.completion_tokens != n:
                raise RuntimeError(f"asked for {n} tokens of each, got {reader.done}")
    start = max(r.arrivals[0][0] for r in readers)
    end = min(r.arrivals[-1][0] for r in readers)
    counted = sum(count for r in readers for at, count in r.arrivals if start < at <= end)
    if not counted:
        raise RuntimeError("the first reply was complete before the last one began")
    return Run(counted / (end - start), counted, [t for r in readers for t in r.tokens], None, how)


def short_replies(bench: Bench, side: Side, case: Case, pair: int) -> Run:
    """One after the other, their prompts among what is timed."""
    o, tokens = bench.o, list[int]()
    bench.begin(side, case)
    with case.fault(bench, side) as how:
        began_s = time.perf_counter()
        for i in range(max(1, o.tokens // case.each)):
            stream = side.client.generate(
                bench.prompt(case, pair, i), max_tokens=case.each, stop_tokens=[], draft=False
            )  # fmt: skip
            with stream:
                tokens += [t for event in stream if isinstance(event, Tokens) for t in event.tokens]
        took_s = time.perf_counter() - began_s
    return Run(len(tokens) / took_s, len(tokens), tokens, None, how)


def runner(case: Case) -> Callable[[Bench, Side, Case, int], Run]:
    if case.each:
        return short_replies
    return several if case.at_once > 1 else one_reply


# --- a case -------------------------------------------------------------------------------------------


def row_of(case: Case, pairs: Sequence[tuple[Run, Run]], before: dict[str, Any], after: dict[str, Any]) -> Any:
    """A row from pairs of runs, off and on, and the counters of the side that is on. ValueError: no pair is whole."""
    if not pairs:
        raise ValueError("no pair was measured")
    off, on = ([pair[i].tokens_per_s for pair in pairs] for i in (0, 1))
    ratios = [b / a for a, b in zip(off, on, strict=True)]
    return {
        "counted": min(run.counted for pair in pairs for run in pair),
        "off_tokens_per_s": spread(off), "on_tokens_per_s": spread(on),
        "ratio": statistics.median(on) / statistics.median(off), "ratios": [min(ratios), max(ratios)],
        "identical": all(a.tokens == b.tokens for a, b in pairs),
        "how": "; ".join(dict.fromkeys(run.how for pair in pairs for run in pair if run.how)),
        **came_of(before, after),
    }  # fmt: skip


def came_of(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What was handed over and guessed between two looks at the counters, and what the gates say in the end."""
    a, b = before.get("cpu_experts") or {}, after.get("cpu_experts") or {}
    found: dict[str, Any] = {}
    if b:
        found["jobs"] = {name: b[name] - a.get(name, 0) for name in ("computed", "divided", "taken_back", "waited_s")}
        found["gate"], found["why"] = b["state"], b["why"]
        if b.get("long"):
            found["long_gate"] = b["long"]["state"]
    a, b = before.get("guesses") or {}, after.get("guesses") or {}
    if b:
        found["guesses"] = {name: b[name] - a.get(name, 0) for name in ("made", "useful")}
        found["guesses_on"] = b["on"]
    return found


def summed(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What came of several runs: counters added, gates as they were in the end."""
    made: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, dict):
                known = made.get(name, {})
                made[name] = {key: known.get(key, 0) + n for key, n in value.items()}
            else:
                made[name] = value
    return made


def measure(bench: Bench, case: Case, pairs: int, deadline_s: float) -> dict[str, Any]:
    """A case's row, with the error of one that failed beside what was measured until then."""
    made: list[tuple[Run, Run]] = []
    came: list[dict[str, Any]] = []
    row: dict[str, Any] = {"case": case.name, "what": case.what, "begins": case.begins(bench.o.before)}
    began_s, run = time.monotonic(), runner(case)
    try:
        for pair in range(pairs):
            if time.monotonic() - began_s > deadline_s:
                raise TimeoutError(f"{pair} of {pairs} pairs within {deadline_s:g} s")
            off = run(bench, bench.off, case, pair)
            before = bench.on.client.stats()
            on = run(bench, bench.on, case, pair)
            came.append(came_of(before, bench.on.client.stats()))
            for side, one in (("off", off), ("on", on)):
                if one.misses is not None and one.misses[0] != one.misses[1]:
                    wanted, found = map(sum, one.misses)
                    raise RuntimeError(f"{side}: {wanted} misses were imposed, {found} are reported, by layer others")
            made.append((off, on))
    except (Exception, SystemExit) as error:
        row["error"] = f"{type(error).__name__}: {error}"
    with suppress(ValueError):
        row |= row_of(case, made, {}, {}) | summed(came)
    return row | {"seconds": round(time.monotonic() - began_s, 2)}


def told(row: dict[str, Any]) -> str:
    """A row in a line."""
    said = f"{row['case']}: "
    if "ratio" in row:
        off, on, (low, high) = row["off_tokens_per_s"], row["on_tokens_per_s"], row["ratios"]
        said += f"{off['median']:.1f} off, {on['median']:.1f} on, {row['ratio']:.3f} ({low:.3f} to {high:.3f})"
        said += "" if row["identical"] else ", OTHER TOKENS"
        if "jobs" in row:
            jobs = row["jobs"]
            said += f", {jobs['computed'] + jobs['divided']:.0f} jobs done, {jobs['taken_back']:.0f} taken back"
            said += f", {row['gate']}"
        if "guesses" in row:
            said += f", {row['guesses']['useful']} of {row['guesses']['made']} guesses right"
            said += f", {'on' if row['guesses_on'] else 'off'}"
    return said + (f" FAILED: {row['error']}" if "error" in row else "") + f" [{row['seconds']:.1f} s]"


def warm_up(bench: Bench, chosen: Sequence[Case]) -> dict[str, float]:
    """Have steps of every kind captured; ms that a first reply of a kind took more than a second one."""
    found: dict[str, float] = {}
    kinds: list[tuple[str, dict[str, Any]]] = [("greedy", {}), ("sampled", {"sampling": SAMPLED})]
    kinds += [("formed", {"sampling": SAMPLED, "grammar": FORM})] if any(c.has_form for c in chosen) else []
    for side in (bench.off, bench.on):
        states = [(a, b) for a in (True, False) for b in (True, False)] if side.is_on else [(False, False)]
        for jobs, guesses in states:
            for name, more in kinds:
                took = []
                for i in range(2):
                    order(side.client, begin=0, jobs=jobs, guesses=guesses)
                    prompt = Prompts(bench.shape.n_vocab, seed=i).next(3)
                    began_s = time.perf_counter()
                    with suppress(Exception):  # a model without a tokenizer has no forms: its case will tell
                        side.client.generate(
                            prompt, max_tokens=WARM_TOKENS, stop_tokens=[], draft=False, **more
                        ).result()  # fmt: skip
                    took.append(1e3 * (time.perf_counter() - began_s))
                states_of = f"jobs {'on' if jobs else 'off'}, guesses {'on' if guesses else 'off'}"
                found[f"{side.name}: {name}, {states_of}"] = round(took[0] - took[1], 2)
    return found


def write(o: argparse.Namespace, report: dict[str, Any]) -> None:
    if o.json:
        write_json(o.json, report)


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    json_option(parser)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: the program alone, no figures")
    parser.add_argument("--cases", default="", help="names, as a,b; default: all")
    parser.add_argument("--pairs", type=int, default=2, help="of each case: a reply without and one with")
    parser.add_argument("--tokens", type=int, default=1024, help="counted from the fault on")
    parser.add_argument("--before", type=int, default=32, help="tokens of a reply before the fault")
    parser.add_argument("--rate", type=float, default=5.0, help="percent of active experts that miss")
    parser.add_argument("--depth", type=int, default=16384, help="prompt tokens of the deep case")
    parser.add_argument("--beside", type=int, default=8192, help="tokens of the prompt that is read beside a reply")
    parser.add_argument("--residency", type=float, default=60.0, help="percent of the expert bytes")
    parser.add_argument("--cpu-experts", default="auto", help="of the side that is on: auto, a number of threads, off")
    parser.add_argument("--guess", default="auto", choices=("auto", "on", "off"), help="of the same side")
    parser.add_argument("--case-seconds", type=float, default=60.0, help="for a request, and to begin pairs of a case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no case begins")
    parser.add_argument("--list", action="store_true", help="say what the cases are, and measure nothing")
    return parser.parse_args(arguments)


def chosen_of(names: str) -> list[Case]:
    known = {case.name: case for case in CASES}
    if unknown := [name for name in names.split(",") if name and name not in known]:
        raise SystemExit(f"no such case: {', '.join(unknown)}; --list says what there is")
    return [case for case in CASES if not names or case.name in names.split(",")]


def run_all(o: argparse.Namespace) -> dict[str, Any]:
    """Measure the cases that were asked for."""
    began_s, chosen, shape = time.monotonic(), chosen_of(o.cases), shape_of(o.model)
    longest = [o.depth] * any(case.is_deep for case in chosen) + [o.beside] * any(c.has_prompt_beside for c in chosen)
    config = EngineConfig(
        model=o.model, device=o.device, policy=UNIFORM.name, residency_pct=o.residency, prefix_gib=0.0, draft="lookup",
        ctx_tokens=max([0, *longest]) + 2 * (o.before + o.tokens + 128),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="spark-never-below-") as folder:
        routes, o.guesses_file = None, None
        if o.device == "cuda":
            budget = placement.residency_budget(shape.n_expert, shape.expert_bytes, o.residency)
            slots = placement.uniform(shape.n_expert, shape.expert_bytes, budget).slots_per_layer
            routes = Routes(np.arange(shape.n_expert) < np.array(slots)[:, None], shape.n_expert_used)
            for case in chosen:
                routes.add(case, o.tokens, o.before, o.rate / 100)
            file, o.guesses_file = routes.save(Path(folder))
            config = replace(config, replay=file)
        with closing(Bench(o, shape, config, routes)) as bench:
            for case in chosen:
                case.prepare(bench)
            bench.load(any(case.has_second_daemon for case in chosen))
            info = bench.on.client.ready.info
            if routes is not None and tuple(info["slots_per_layer"]) != slots:
                raise SystemExit("the daemon places other slots than the misses are made for")
            report: dict[str, Any] = {
                "model": shape.name, "model_bytes": shape.file_bytes, "tokens": o.tokens, "before": o.before,
                "rate_pct": o.rate, "pairs": o.pairs, "least": LEAST, "cores": len(bench.cpus),
                "numa_nodes": len(bench.nodes), "ptrace": bench.traces, "cpu_experts": info["cpu_experts"],
                "said": bench.on.why_none(), "settings": settings(bench.on.client), "rows": [],
            }  # fmt: skip
            note(f"loaded after {time.monotonic() - began_s:.0f} s; {report['said']}")
            report["first_of_a_kind_ms"] = warm_up(bench, chosen)
            note(f"warm after {time.monotonic() - began_s:.0f} s")
            for case in chosen:
                if time.monotonic() - began_s > o.seconds:
                    row: dict[str, Any] = {"case": case.name, "what": case.what, "begins": case.begins(o.before)}
                    row |= {"error": f"left out: {o.seconds:g} s are over", "seconds": 0.0}
                else:
                    row = measure(bench, case, o.pairs, o.case_seconds)
                report["rows"].append(row)
                note(told(row))
                write(o, report)
            report["seconds"] = round(time.monotonic() - began_s, 1)
    write(o, report)
    return report


def main() -> None:
    o = options()
    if o.list:
        for case in CASES:
            print(f"{case.name}: {case.what}, {case.begins(o.before)}")
        return
    report = run_all(o)
    below = [row["case"] for row in report["rows"] if row.get("ratio", 1.0) < LEAST]
    failed = [row["case"] for row in report["rows"] if "error" in row]
    note(f"below {LEAST:g}: {', '.join(below) or 'none'}; failed: {', '.join(failed) or 'none'}")
    if others := [row["case"] for row in report["rows"] if row.get("identical") is False]:
        raise SystemExit(f"other tokens: {', '.join(others)}")


if __name__ == "__main__":
    main()
