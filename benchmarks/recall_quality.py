"""What reading a part of a context costs in answers: tasks of recall, by how blocks are chosen and how many are read.

    python benchmarks/recall_quality.py MODEL.gguf --length 8192 --json data/results/recall_quality.json

The model is one of data/recall/train.py, the tasks are those it was trained on (data/recall/tasks.py), of other seeds.
As in serving, contexts and questions are read with attention to all, and the tokens of replies are fed with recall: so
the first token of a reply never depends on it. Questions whose evidence lies in the first block or in the tail, which
every token reads, are not asked. All ways and shares of a question go on from forks of one reading of its context.

*Right*: every token of the answer is the likeliest behind those before it: greedy decoding says just that. Turns
of the agent are beside what full attention says, right or not: whether the whole reply is the same, and how many tokens
are until it differs. A share of blocks has the first, the tail and one more at least.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of small products threads spin longer than they compute

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.choosing import BYTES, CHOICES, Choice, Keys, choosing  # noqa: E402
from benchmarks.driving import note  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from data.recall.tasks import END, I32, TASKS, Asked, Case, drawn  # noqa: E402
from engine.ground.config import EngineConfig  # noqa: E402
from engine.memory.blocks import Sequence  # noqa: E402
from engine.memory.kv import Fork  # noqa: E402
from engine.ops import KV_BLOCK_TOKENS, SMALL_TOKENS, TAIL_BLOCKS  # noqa: E402
from engine.running.loaded import Loaded, load  # noqa: E402
from engine.running.recall import Part  # noqa: E402
from engine.running.stepping import Span  # noqa: E402
from spark.results import write_json  # noqa: E402

SHARES = (5, 10, 20, 50)  # % of the blocks of a context
QK_MEAN = "one mean"
NO_SUMMARY = ("exact", "recent", "random")
REPLAYED = "agent"
CHUNK, MOST_TOKENS = 512, 48  # of a prompt's steps; of a reply of the agent
SEED = 20_000  # no seed of training
CONTEXTS = 1000  # of a task, until enough questions are found


def chosen_of(share: float, n_tokens: int) -> int:
    """Blocks that are chosen where a token at the end of so many reads a share of all, in %: one at least."""
    return max(1, round(share / 100 * -(-n_tokens // KV_BLOCK_TOKENS)) - (TAIL_BLOCKS + 2))


def is_far(asked: Asked, context: int) -> bool:
    """Whether no evidence is in what every token reads behind a context of so many tokens."""
    tail = (context // KV_BLOCK_TOKENS - TAIL_BLOCKS) * KV_BLOCK_TOKENS
    return all(begin >= KV_BLOCK_TOKENS and end <= tail for begin, end in asked.evidence)


def cases(task: str, length: int, n: int, each: int) -> Iterator[tuple[Case, list[Asked]]]:
    """Contexts with questions that are asked about them, `each` or fewer, n in all."""
    kind = list(TASKS).index(task)
    for i in range(CONTEXTS):
        case = drawn(task, np.random.default_rng((SEED, kind, length, i)), length, each)
        asked = [a for a in case.asked if is_far(a, len(case.context))][:n]
        if asked:
            yield case, asked
        n -= len(asked)
        if n == 0:
            return
    raise SystemExit(f"{task}: no questions of far evidence in contexts of {length} tokens")


class Reader:
    """A model on the CPU backend that reads contexts, and says how far answers are what it would say."""

    def __init__(self, model: Path, length: int, threads: int | None = None) -> None:
        options = EngineConfig(
            model, device="cpu", ctx_tokens=length, kv_pool=str(2 * length + 16 * KV_BLOCK_TOKENS),
            chunk_tokens=CHUNK, draft="off", prefix_gib=0.0, kv_recall_blocks=0, threads=threads,
        )  # fmt: skip
        self.loaded: Loaded = load(options)
        self.loaded.forward.ws.repeat = lambda noted, work: work()  # type: ignore[attr-defined]
        self.keys = Keys(np.float32)

    def read(self, tokens: I32, behind: Fork | None = None) -> tuple[Fork, int]:
        """Read a prompt with attention to all, from its beginning or behind another; the likeliest next token."""
        sequence = self.loaded.kv.sequence() if behind is None else self.loaded.begin(behind)
        likeliest = -1
        for first in range(0, len(tokens), CHUNK):
            likeliest = int(self._likeliest(sequence, tokens[first : first + CHUNK], None, 1)[-1])
        fork = self.loaded.prefixes.forks.make(sequence)
        sequence.release()
        assert fork is not None, "the cache is too small for a fork"
        return fork, likeliest

    def drop(self, fork: Fork) -> None:
        """Nobody goes on from there any more."""
        self.loaded.prefixes.forks.drop(fork)

    def reply(self, fork: Fork, first: int) -> I32:
        """What it says with attention to all, greedily, up to END or MOST_TOKENS."""
        sequence, said = self.loaded.begin(fork), [first]
        while said[-1] != END and len(said) < min(MOST_TOKENS, self.loaded.limits.n_ctx - fork.length):
            said.append(int(self._likeliest(sequence, np.array(said[-1:], np.int32), None, 1)[0]))
        sequence.release()
        return np.array(said, np.int32)

    def same(self, fork: Fork, first: int, answer: I32, part: Part | None, choice: Choice | None = None) -> int:
        """How many tokens of an answer it says itself before the first that is another, reading a part."""
        if first != answer[0]:
            return 0
        sequence, n = self.loaded.begin(fork), 1
        with choosing(choice, 0 if part is None else part.most, self.keys):
            for begin in range(0, len(answer) - 1, SMALL_TOKENS):
                some = answer[begin : min(begin + SMALL_TOKENS, len(answer) - 1)]
                hit = self._likeliest(sequence, some, part, len(some)) == answer[begin + 1 : begin + 1 + len(some)]
                n += int(np.argmin(np.append(hit, False)))
                if not hit.all():
                    break
        sequence.release()
        return n

    def _likeliest(self, sequence: Sequence, tokens: I32, part: Part | None, n: int) -> I32:
        """The likeliest tokens behind the last n of some."""
        want = tuple(range(len(tokens) - n, len(tokens)))
        span = Span(sequence, tokens, np.zeros(len(tokens), bool), want, recall=part)
        return np.asarray(self.loaded.steps.run([span]).logits.argmax(axis=1), np.int32)


@dataclass(slots=True)
class Fared:
    """Answers under a way to choose and a share: of each, its tokens, and those until the first that is another."""

    tokens: list[int] = field(default_factory=list)
    same: list[int] = field(default_factory=list)
    read: list[float] = field(default_factory=list)

    def add(self, same: int, tokens: int, read: float) -> None:
        """An answer, and the share of blocks that its first token reads."""
        self.same.append(same)
        self.tokens.append(tokens)
        self.read.append(read)

    def row(self, task: str, choice: str, share: float | None) -> dict[str, Any]:
        """As the file has it; `differs_at` of those that differ."""
        whole = np.array(self.same) == np.array(self.tokens)
        differ = np.array(self.same)[~whole]
        return {
            "task": task, "choice": choice, "share": share, "cases": len(whole), "right": float(whole.mean()),
            "read": float(np.mean(self.read)), "bytes_share": BYTES.get(choice),
            "differs_at": float(np.median(differ)) if len(differ) else None,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: `cases` questions of each task, `each` about a context of `length` tokens."""

    model: Path
    length: int
    cases: int
    each: int
    choices: tuple[str, ...]
    threads: int | None


def measure(plan: Plan, task: str) -> list[dict[str, Any]]:
    """The rows of a task: attention to all first, then each way to choose at each share."""
    reader, fared = Reader(plan.model, plan.length, plan.threads), dict[tuple[str, float | None], Fared]()
    began, spent = time.perf_counter(), 0.0
    for case, asked in cases(task, plan.length, plan.cases, plan.each):
        begin = time.perf_counter()
        context, _ = reader.read(case.context)
        spent += time.perf_counter() - begin
        reader.keys.forget(len(case.context) // KV_BLOCK_TOKENS)
        for a in asked:
            fork, first = reader.read(a.prompt, context)
            said = reader.reply(fork, first) if task == REPLAYED else a.answer
            there = len(case.context) + len(a.prompt)
            blocks = there // KV_BLOCK_TOKENS + 1
            fared.setdefault(("all", None), Fared()).add(reader.same(fork, first, a.answer, None), len(a.answer), 1.0)
            for name in plan.choices:
                for share in SHARES:
                    part = Part(chosen_of(share, there))
                    same = reader.same(fork, first, said, part, CHOICES[name])
                    read = (blocks - part.left(there)) / blocks
                    fared.setdefault((name, share), Fared()).add(same, len(said), read)
            reader.drop(fork)
        reader.drop(context)
        seconds, done = time.perf_counter() - began, len(fared["all", None].same)
        note(f"{task}: {done} of {plan.cases} in {seconds:.0f} s, of which contexts took {spent:.0f}")
    reader.loaded.close()
    return [of.row(task, name, share) for (name, share), of in fared.items()]


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the tables say: how far the best summary is ahead of one mean, and what replayed turns take.

    ahead: by task, at 10% of the blocks: the best of the summaries, and its points above one mean. agree: of each way
    to choose, the least share at which 99% of the agent's replies are those of all blocks; None where there is none.
    """
    ahead, agree = {}, {}
    for task in ("keys", "turns"):
        right = {r["choice"]: r["right"] for r in rows if r["task"] == task and r["share"] == 10}
        others = {c: v for c, v in right.items() if c != QK_MEAN and c not in NO_SUMMARY}
        if QK_MEAN in right and others:
            name = max(others, key=lambda c: others[c])
            ahead[task] = {"choice": name, "points": 100 * (others[name] - right[QK_MEAN])}
    for r in rows:
        if r["task"] == REPLAYED and r["share"] is not None:
            least = agree.setdefault(r["choice"], None)
            if r["right"] >= 0.99 and (least is None or r["share"] < least):
                agree[r["choice"]] = r["share"]
    return {"ahead": ahead, "agree": agree}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    json_option(parser)
    parser.add_argument("model", type=Path)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a context with its questions")
    parser.add_argument("--cases", type=int, default=200, help="questions of a task")
    parser.add_argument("--each", type=int, default=10, help="questions about one context")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--choices", default=",".join(CHOICES))
    parser.add_argument("--threads", type=int, help="of the engine, in each job")
    parser.add_argument("--jobs", type=int, default=1, help="tasks that are measured at a time")
    o = parser.parse_args()
    choices, tasks, begin = tuple(o.choices.split(",")), o.tasks.split(","), time.perf_counter()
    plan = Plan(o.model, o.length, o.cases, o.each, choices, o.threads)
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(o.jobs, mp_context=get_context("spawn")) as pool:
        for task, table in zip(tasks, pool.map(partial(measure, plan), tasks), strict=True):
            note(f"{task}: all {table[0]['right']:.1%}")
            for name in choices:
                note(f"  {name}: " + ", ".join(f"{r['share']}% {r['right']:.1%}" for r in table if r["choice"] == name))
            rows += table
            found, seconds = verdict(rows), time.perf_counter() - begin
            note(f"{found}, {seconds:.0f} s")
            if o.json:  # what there is: a run may take hours
                made = {"model": o.model.name, "bytes": o.model.stat().st_size, "length": o.length, "seconds": seconds}
                write_json(o.json, made | {"rows": rows} | found)


if __name__ == "__main__":
    main()
