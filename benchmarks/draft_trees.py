"""What trees of drafts would bring over chains: a block drafter's choices, walked along replies of its model.

    python benchmarks/draft_trees.py MODEL.gguf DRAFTER.gguf STEPS.json TOKENS.parquet... --json FILE

A block drafter says for each place of a draft what stands there, whatever stands before it. A chain takes the likeliest
choice of each place. A tree takes the paths that are likeliest as a whole, best first. A step that verifies it has a
row for each of its tokens, so it costs what a chain of as many costs; here it costs no more, though keys of paths that
were left would have to be moved or masked. Drafting costs nothing here either.

The engine decodes each reply once, on the CPU, and asks the drafter behind every token for the likeliest choices of all
places. Then the same replies are walked by each way of drafting, with steps that take what they were measured to take:
with every number of tokens fixed, and with the number that each draft's own chances make the best, for chains and for
trees alike; and chains by the real gate, with and without being told how sure the drafter is.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.drafts import Steps, prompts_of  # noqa: E402
from benchmarks.driving import note  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from engine.drafting.dflash import NAME, PRIORS  # noqa: E402
from engine.drafting.drafter import open_drafter  # noqa: E402
from engine.drafting.gate import Gate  # noqa: E402
from engine.drafting.outcomes import Record  # noqa: E402
from engine.drafting.source import Draft, Promise  # noqa: E402
from engine.ground.config import EngineConfig  # noqa: E402
from engine.ground.sampling import Sampling  # noqa: E402
from engine.ops import cpu  # noqa: E402
from engine.running.drafts import lay_out  # noqa: E402
from engine.running.loaded import load  # noqa: E402
from engine.running.sampling import sample  # noqa: E402
from engine.running.stepping import Span  # noqa: E402
from spark.results import write_json  # noqa: E402

CHOICES = 8  # of a place, that a tree may have
WIDTHS = (1, 2, 3, 5, 7, 15, 31)  # tokens of a draft

Chosen = tuple[int, ...]  # which choice of each place, from the first place on


@dataclass(frozen=True, slots=True)
class Block:
    """What a drafter says of the places behind a token: ids and log-chances [places, CHOICES], likeliest first."""

    ids: npt.NDArray[np.int32]
    chances: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Written:
    """A reply, and what was drafted behind each of its tokens but the last."""

    reply: tuple[int, ...]
    blocks: tuple[Block, ...]


def likeliest(logits: npt.NDArray[np.float32], n: int = CHOICES) -> Block:
    """The n likeliest choices of each place, of logits [places, V]."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :n]
    x = logits.astype(np.float64)
    top = x.max(axis=1, keepdims=True)
    chances = x - top - np.log(np.exp(x - top).sum(axis=1, keepdims=True))
    return Block(ids.astype(np.int32), np.take_along_axis(chances, ids, axis=1))


def chain(block: Block, n: int) -> list[tuple[Chosen, float]]:
    """The likeliest choice of each of the first n places, and the log-chance of all up to there."""
    sums = np.cumsum(block.chances[:, 0])
    return [((0,) * (place + 1), float(sums[place])) for place in range(min(n, len(sums)))]


def tree(block: Block, n: int) -> list[tuple[Chosen, float]]:
    """The n paths that are likeliest as a whole, best first; each comes behind those that it goes on from.

    A path's chance is the product of its places', as a block drafter knows no better. What comes next of a path are
    its likeliest continuation and the next choice at its last place, so the heap has two new entries a path.
    """
    places, choices = block.chances.shape
    found: list[tuple[Chosen, float]] = []
    heap = [(-float(block.chances[0, 0]), (0,))] if places else []
    while heap and len(found) < n:
        cost, path = heapq.heappop(heap)
        found.append((path, -cost))
        at = len(path)
        if at < places:
            heapq.heappush(heap, (cost - float(block.chances[at, 0]), (*path, 0)))
        last = path[-1]
        if last + 1 < choices:
            more = float(block.chances[at - 1, last] - block.chances[at - 1, last + 1])
            heapq.heappush(heap, (cost + more, (*path[:-1], last + 1)))
    return found


def accepted(block: Block, paths: Sequence[Chosen], due: Sequence[int]) -> int:
    """How many of the tokens that are due some path has."""
    among, path = set(paths), ()
    for place, token in enumerate(due[: len(block.ids)]):
        choice = np.flatnonzero(block.ids[place] == token)
        if not len(choice) or (*path, int(choice[0])) not in among:
            return place
        path = (*path, int(choice[0]))
    return min(len(due), len(block.ids))


Shape = Callable[[Block, int], list[tuple[Chosen, float]]]
Times = Callable[[int], float]


def fixed(shape: Shape, n: int) -> Shape:
    """Drafts of n tokens, always."""
    return lambda block, room: shape(block, min(n, room))


def chosen(shape: Shape, times: Times) -> Shape:
    """Drafts of as many tokens as go furthest in a step's time, by the drafter's chances; of none where none pays."""

    def paths(block: Block, room: int) -> list[tuple[Chosen, float]]:
        found = shape(block, min(WIDTHS[-1], room))
        expected = 1 + np.cumsum([0.0, *(np.exp(chance) for _, chance in found)])
        rates = [expected[n] / times(1 + n) if n <= len(found) else 0.0 for n in (0, *WIDTHS)]
        return found[: (0, *WIDTHS)[int(np.argmax(rates))]]

    return paths


def walk(some: Sequence[Written], drafts: Shape, times: Times) -> dict[str, float]:
    """Replies drafted behind the token that is due after those that stayed: tokens, steps, drafted tokens, seconds."""
    n_tokens = n_steps = n_drafted = 0
    seconds = 0.0
    for one in some:
        at = 0
        while at < len(one.blocks):
            due = one.reply[at + 1 :]
            paths = [path for path, _ in drafts(one.blocks[at], max(0, len(due) - 1))]
            at += 1 + accepted(one.blocks[at], paths, due[:-1])
            n_steps, n_drafted, seconds = n_steps + 1, n_drafted + len(paths), seconds + times(1 + len(paths))
        n_tokens += len(one.blocks)
    return {"tokens": n_tokens, "steps": n_steps, "drafted": n_drafted, "seconds": seconds}


def gated(some: Sequence[Written], times: Times, sure: bool) -> dict[str, Any]:
    """Chains by the real gate, which learns as it goes; sure: whether it is told how sure the drafter is."""
    gate, fits = Gate({NAME: PRIORS}), lambda n: n <= 1 + places
    places = len(some[0].blocks[0].ids)
    gate.begin({n: times(1 + n) for n in range(1 + places)})
    n_steps = n_drafted = n_tokens = 0
    seconds = 0.0
    for one in some:
        record, at = Record(), 0
        n_tokens += len(one.blocks)
        while at < len(one.blocks):
            block, due = one.blocks[at], one.reply[at + 1 : -1]
            room = min(places, len(due))
            (n,) = gate.share([(Promise(NAME, 0, room, is_block=True), record)], fits, places) if room else (0,)
            chances = np.exp(block.chances[:n, 0])
            draft = Draft(NAME, 0, block.ids[:n, 0].tolist(), sure=tuple(chances) if sure else ()) if n else None
            if draft is not None and sure:
                draft = draft.first(gate.cut(draft, record, fits))
            n = 0 if draft is None else len(draft.tokens)
            stayed, taken_s = accepted(block, [(0,) * (k + 1) for k in range(n)], due), times(1 + n)
            if draft is None:
                gate.plain(1, taken_s)
            else:
                gate.note([(draft, record, n, stayed)], taken_s)
            at, n_steps, n_drafted, seconds = at + 1 + stayed, n_steps + 1, n_drafted + n, seconds + taken_s
    return {"tokens": n_tokens, "steps": n_steps, "drafted": n_drafted, "seconds": seconds}


def compared(some: Sequence[Written], times: Times) -> dict[str, Any]:
    """Each way's tokens a step, and its speed over that of decoding without drafts."""
    plain = walk(some, fixed(chain, 0), times)
    found: dict[str, Any] = {"tokens": plain["tokens"], "rows": []}
    for name, shape in (("chain", chain), ("tree", tree)):
        for n in (*WIDTHS, None):
            got = walk(some, chosen(shape, times) if n is None else fixed(shape, n), times)
            found["rows"].append({
                "shape": name, "width": n, "speed": plain["seconds"] / got["seconds"],
                "tokens_a_step": got["tokens"] / got["steps"], "drafted_a_step": got["drafted"] / got["steps"],
            })  # fmt: skip
    for sure in (False, True):
        got = gated(some, times, sure)
        found["rows"].append({
            "shape": "chain", "gate": "how sure" if sure else "by place", "speed": plain["seconds"] / got["seconds"],
            "tokens_a_step": got["tokens"] / got["steps"], "drafted_a_step": got["drafted"] / got["steps"],
        })  # fmt: skip
    return found


def by_place(some: Sequence[Written]) -> list[list[float]]:
    """Of each place, behind every token: how often its likeliest choice is right, and one of the first 2, 4, all."""
    places = len(some[0].blocks[0].ids)
    right = np.zeros((places, 4))
    seen = np.zeros(places)
    for one in some:
        for at, block in enumerate(one.blocks):
            for place, token in enumerate(one.reply[at + 1 : at + 1 + places]):
                hit = block.ids[place] == token
                right[place] += [hit[:1].any(), hit[:2].any(), hit[:4].any(), hit.any()]
                seen[place] += 1
    found: list[list[float]] = (right / seen[:, None]).tolist()
    return found


def written(o: argparse.Namespace, prompts: Sequence[Sequence[int]], params: Sampling) -> list[Written]:
    """Replies of the model and the drafter's choices behind each of their tokens, by the engine on the CPU."""
    n_ctx = max(map(len, prompts)) + o.generate + 64
    loaded = load(EngineConfig(model=o.model, device="cpu", ctx_tokens=n_ctx, draft="off", threads=o.threads))
    found = []
    try:
        forward = loaded.forward
        file = open_drafter(o.drafter, forward.config)
        forward.capture_features(file.config.captured)
        made = lay_out(file, forward, lambda limits: cpu.workspace(limits, o.threads))
        places, chunk = file.config.block_tokens - 1, loaded.limits.max_tokens
        for prompt in prompts:
            ring, sequence = made.ring(), loaded.kv.sequence()
            assert ring is not None
            history, blocks = list(prompt), []
            while True:
                tokens = history[sequence.length :][:chunk]
                position, is_last = sequence.length, sequence.length + chunk >= len(history)
                want = (len(tokens) - 1,) if is_last else ()
                span = Span(sequence, np.array(tokens, np.int32), np.zeros(len(tokens), bool), want)
                result = loaded.steps.run([span])
                assert result.features is not None
                made.feed(ring, result.features[:, : len(tokens)], position)
                if not is_last:
                    continue
                history.append(sample(result.logits[0], params, len(history)))
                if len(history) == len(prompt) + o.generate:
                    break
                blocks.append(likeliest(np.asarray(made.logits(ring, history[-1], places))))
            made.give_back(ring)
            sequence.release()
            found.append(Written(tuple(history[len(prompt) :]), tuple(blocks)))
        made.close()
    finally:
        loaded.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("steps", type=Path, help="a result of given_tokens.py")
    parser.add_argument("tokens", type=Path, nargs="+")
    json_option(parser)
    parser.add_argument("--depth", type=int, default=512, help="of the steps")
    parser.add_argument("--plain-ms", type=float, help="what a token without a draft takes")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="most of a prompt")
    parser.add_argument("--generate", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    o = parser.parse_args()
    steps = Steps(o.steps, o.depth, o.plain_ms)
    rows = []
    for path in o.tokens:
        prompts = prompts_of(path, o.prompts, o.prompt_tokens)
        for temperature in (0.0, 1.0):
            some = written(o, prompts, Sampling(temperature=temperature, seed=7))
            rows.append({"sessions": path.name, "temperature": temperature, "right": by_place(some)})
            rows[-1] |= compared(some, steps)
            note(f"{path.name}, temperature {temperature}: {rows[-1]}")
    settings = {k: getattr(o, k) for k in ("depth", "prompts", "prompt_tokens", "generate", "threads")}
    step_ms = {str(n): steps(n) * 1e3 for n in steps.by_width}
    report = {"model": o.model.name, "drafter": o.drafter.name, "settings": settings, "step_ms": step_ms, "rows": rows}
    if o.json is not None:
        write_json(o.json, report)


if __name__ == "__main__":
    main()
