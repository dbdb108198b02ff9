"""What drafts are worth on a GPU at a real model's shapes: the real gate and steps, and acceptance that is imposed.

    python benchmarks/draft_speed.py MODEL.gguf --parts rates,missed,at-once --json FILE
    python benchmarks/draft_speed.py MODEL.gguf --parts sessions --tokens TOKENS.parquet --json FILE
    python benchmarks/draft_speed.py MODEL.gguf --parts drafter --draft DRAFTER.gguf|mtp --json FILE

Weights are random, so what a draft is worth cannot come from what the model says. A reply is generated without drafts
first; then again, with drafts whose tokens are those of the reply as often as they are said to be, and other ones else.
Everything besides is as served: index, gate, verification, steps ahead of the host. Both replies have the same tokens,
or the run fails. Experts are imposed (`--replay`), for random weights choose few of them once a reply repeats
itself: those of neighbors are independent, or repeat by a share (docs/routing-model.md has 43%).

`rates`: each token of a draft is right with one chance, given that all before it are: copying 95%, novel 0 to 16%; what
the source takes it for is learned. `missed`: the same at --residency percent, a share of experts missed. `drafter`:
that of the file or the model's block runs as always, and its tokens are right as often as --first says, by a factor of
0.8 less at each place behind. With --telling the first one is so in all, but 95% of the time in some drafts and 30% in
others, and where it is asked how sure it is it says so. `sessions`: real lookup in recorded sessions, all turns in
their order, and a draft's token is right where the session goes on with it; by what is written. `at-once`: replies that
share steps.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.decode import PCIE_GB_PER_S  # noqa: E402
from benchmarks.drafts import KINDS, MEMORY_BYTES, Beginning  # noqa: E402
from benchmarks.driving import Prompts, Shape, note, parse_list, shape_of, spread  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from benchmarks.routing import distinct_missed, imposed, repeated  # noqa: E402
from engine.drafting import lookup  # noqa: E402
from engine.drafting.lookup import Lookup, Memory  # noqa: E402
from engine.drafting.outcomes import MOST_TOKENS  # noqa: E402
from engine.drafting.source import Draft, Promise, Source  # noqa: E402
from engine.ground.config import EngineConfig  # noqa: E402
from engine.ground.protocol import Done, Error, Generate, Tokens  # noqa: E402
from engine.ground.sampling import Sampling  # noqa: E402
from engine.placing import placement  # noqa: E402
from engine.placing.policies import ALL, UNIFORM  # noqa: E402
from engine.running import mtp  # noqa: E402
from engine.running.drafts import Drafts  # noqa: E402
from engine.running.reply import Reply  # noqa: E402
from engine.serving.scheduler import Engine  # noqa: E402
from spark.pipeline.bench import check_settings  # noqa: E402
from spark.pipeline.tokens import Window, read_tokens  # noqa: E402
from spark.results import write_json  # noqa: E402

COPYING, NOVEL = 0.95, (0.0, 0.08, 0.16)
SURE, UNSURE, WORTH = 0.9, 0.15, 8.0  # what is taken for a rate at first, and so many outcomes' worth of it
FALLS = 0.8  # of a drafter's chance, with each place
TELLING = 0.95, 0.3  # chances of the first tokens of drafts that a drafter is sure of, and of others
EDITS = re.compile(r'\s*\{"name": "(Edit|Write|MultiEdit|NotebookEdit|apply_patch)"')
NAME_TOKENS = 24  # behind the mark of a call, in which its name is
SHARES = {"edit": 0.40, "call": 0.20, "text": 0.15, "reasoning": 0.25}  # of generated tokens, in public sessions
REPLAYED_TOKENS = 4096
WIDTHS = (1, 2, 4, 8, 16, 32)
Chance = Callable[[int], float]  # that the token at a place of a draft is right, given that all before it are


class Rated:
    """A source (`Source`) of drafts that are right by chance. told: what the reply says; n_prompt: tokens before it.

    rate: what it takes its tokens' chances for at first; like lookup, it learns from every draft how they fare.
    """

    def __init__(self, told: Sequence[int], n_prompt: int, chance: Chance, rate: float, seed: int) -> None:
        self.told, self.n_prompt, self.chance = told, n_prompt, chance
        self.rng = np.random.default_rng(seed)
        self.right, self.seen = WORTH * rate, WORTH
        self.at = 0

    def promise(self, history: Sequence[int], most: int, least: float = 0.0) -> Promise | None:
        """As `Source.promise`."""
        self.at = len(history) - self.n_prompt
        n = min(most, MOST_TOKENS, len(self.told) - self.at)
        chances = tuple((self.right / self.seen) ** k for k in range(1, n + 1))
        return Promise(lookup.NAME, 0, n, chances) if n > 0 and sum(chances) >= least else None

    def draft(self, n_tokens: int, sure: bool = False) -> Draft:
        """As `Source.draft`."""
        return Draft(lookup.NAME, 0, self.tokens(self.at, n_tokens))

    def tokens(self, at: int, n: int) -> tuple[int, ...]:
        """Right up to some place, from one of the reply on."""
        stay = next((k for k in range(n) if self.rng.random() >= self.chance(k)), n)
        self.right, self.seen = self.right + stay, self.seen + min(n, stay + 1)
        return told_or_not(self.told[at : at + n], [k < stay for k in range(n)])

    def close(self) -> None:
        """As `Source.close`."""


class Telling(Rated):
    """Drafts whose first token is right nearly always or seldom, and whose drafter knows: `claims` of the last one.

    first: how often their first tokens are right.
    """

    def __init__(self, told: Sequence[int], n_prompt: int, first: float, seed: int) -> None:
        super().__init__(told, n_prompt, self._chance, first, seed)
        self._sure_ones = (first - TELLING[1]) / (TELLING[0] - TELLING[1])
        self.claims: tuple[float, ...] = ()

    def tokens(self, at: int, n: int) -> tuple[int, ...]:
        """As of `Rated`."""
        chance = falling(TELLING[0 if self.rng.random() < self._sure_ones else 1])
        self.claims = tuple(chance(place) for place in range(n))
        return super().tokens(at, n)

    def _chance(self, place: int) -> float:
        return self.claims[place]


class OfSession:
    """A source that looks in a session, whose tokens from `begin` on stand for those of the reply."""

    def __init__(self, memory: Memory, session: list[int], begin: int, told: Sequence[int], n_prompt: int) -> None:
        self.inner, self.session, self.begin, self.told, self.n_prompt = Lookup(memory), session, begin, told, n_prompt
        self.at = 0

    def promise(self, history: Sequence[int], most: int, least: float = 0.0) -> Promise | None:
        """As `Source.promise`."""
        self.at = len(history) - self.n_prompt
        return self.inner.promise(Beginning(self.session, self.begin + self.at), most, least)

    def draft(self, n_tokens: int, sure: bool = False) -> Draft:
        """As `Source.draft`."""
        made, at = self.inner.draft(n_tokens), self.begin + self.at
        right = [a == b for a, b in zip(made.tokens, self.session[at : at + n_tokens], strict=True)]
        return replace(made, tokens=told_or_not(self.told[self.at : self.at + n_tokens], right))

    def close(self) -> None:
        """As `Source.close`."""
        self.inner.close()


def told_or_not(told: Sequence[int], right: list[bool]) -> tuple[int, ...]:
    """Tokens of a reply where they are right, and others where they are not."""
    return tuple(token if ok else token ^ 1 for token, ok in zip(told, right, strict=True))


@dataclass(frozen=True)
class Case:
    """What drafts for a reply. follower: whose tokens those of the file's drafter are; text: what is remembered."""

    source: Callable[[Memory], Source]
    follower: Rated | None = None
    text: Sequence[int] = ()


class Imposing(Drafts):
    """The drafts of an engine, but for who proposes: `cases`, by request."""

    cases: dict[int, Case]

    def begin(self, reply: Reply, prediction: Sequence[int] = ()) -> None:
        """As `Drafts.begin`."""
        super().begin(reply, prediction)
        assert reply.drafting is not None
        case, drafting = self.cases[reply.id], reply.drafting  # type: ignore[attr-defined]
        drafting.source.close()
        drafting.source = case.source(self._memory)
        if case.follower is None:
            return
        rated, inner = case.follower, drafting.follower
        if inner is None:  # it was found to be of no use lately
            return
        compute = inner.draft

        def draft(n_tokens: int, sure: bool = False) -> Draft | None:
            made = compute(n_tokens, sure)
            if made is None:
                return None
            tokens = rated.tokens(len(reply.history) - rated.n_prompt, len(made.tokens))
            if made.drawn is not None:  # the step reads them there
                self._steps.forward.device.write(made.drawn, np.array(tokens, np.int32))
            claims = rated.claims if isinstance(rated, Telling) and made.sure else made.sure
            return replace(made, tokens=tokens, sure=claims)

        inner.draft = draft  # type: ignore[method-assign]

    def remember(self, reply: Reply) -> None:
        """As `Drafts.remember`."""
        if text := self.cases[reply.id].text:  # type: ignore[attr-defined]
            self._memory.add(text)


class Bench:
    """An engine that is measured. choices: of experts, which are imposed."""

    def __init__(self, engine: Engine, sampling: Sampling) -> None:
        self.engine, self.sampling, self.n, self.n_pairs = engine, sampling, 0, 0
        old = engine.loaded.drafts
        assert old is not None
        self.drafts = Imposing(engine.loaded.steps, MEMORY_BYTES, old._drafter, old._predictor)
        self.drafts._gate, self.drafts.cases = old._gate, {}
        object.__setattr__(engine.loaded, "drafts", self.drafts)
        engine.loaded.decoder.proposer = self.drafts

    def run(self, prompts: list[list[int]], n_tokens: int, cases: list[Case] | None) -> Ran:
        """Replies to prompts, at once, of n_tokens each; cases: what drafts for them, None: nothing."""
        replayed = self.engine.loaded.forward.replayed
        if replayed is not None:
            replayed.reset()
        ids = [self.n + i for i in range(1, 1 + len(prompts))]
        self.n += len(prompts)
        if cases is not None:
            self.drafts.cases = dict(zip(ids, cases, strict=True))
        for i, prompt in zip(ids, prompts, strict=True):
            request = Generate(i, tuple(prompt), n_tokens, self.sampling, stop_tokens=(), draft=cases is not None)
            self.engine.submit(request)
        told: dict[int, list[int]] = {i: [] for i in ids}
        seconds: dict[int, list[float]] = {i: [] for i in ids}
        done: list[Done] = []
        began = time.perf_counter()
        while self.engine.busy:
            events, now = self.engine.step(), time.perf_counter()
            for event in events:
                if isinstance(event, Tokens):
                    told[event.id] += event.tokens
                    seconds[event.id] += [now] * len(event.tokens)
                elif isinstance(event, Error):
                    raise SystemExit(f"request {event.id}: {event}")
                elif isinstance(event, Done):
                    done.append(event)
        # From when all decode until the first has ended.
        first = max(times[0] for times in seconds.values())
        last = min(times[-1] for times in seconds.values())
        made = sum(first < s <= last for times in seconds.values() for s in times)
        if not first < last or not began < first:
            raise SystemExit("the replies did not decode at the same time: give more --generate")
        counts = [n for d in done for n in d.usage.drafts.values()]
        drafted, accepted = (sum(n[key] for n in counts) for key in ("drafted", "accepted"))
        misses = sum(d.residency["misses"] for d in done)
        return Ran([told[i] for i in ids], [seconds[i] for i in ids], (last - first) / made, drafted, accepted, misses)

    def pair(self, prompts: list[list[int]], n_tokens: int, cases: Callable[[list[list[int]]], list[Case]]) -> Pair:
        """Without drafts, and with those that `cases` makes of what was told, in turns.

        What is told is found out first: those that come after it find their prompts read, and begin to decode together.
        """
        told = self.run(prompts, n_tokens, None).told
        self.n_pairs += 1
        if self.n_pairs % 2:
            plain, drafted = self.run(prompts, n_tokens, None), self.run(prompts, n_tokens, cases(told))
        else:
            drafted, plain = self.run(prompts, n_tokens, cases(told)), self.run(prompts, n_tokens, None)
        if not drafted.told == plain.told == told:
            raise SystemExit("a reply with drafts has other tokens than without")
        return Pair(plain, drafted)

    @property
    def step_ms(self) -> dict[int, float]:
        """What steps of so many tokens of a reply took, in ms, as the gate has it."""
        found = self.drafts.stats()["step_ms"]["0" if self.sampling.temperature else "1"]
        return {1 + int(n): ms for n, ms in found.items()}


@dataclass(frozen=True)
class Ran:
    """Replies: tokens, when each came, seconds a token (of all) while all decoded, tokens of drafts, misses."""

    told: list[list[int]]
    times: list[list[float]]
    each_s: float
    drafted: int
    accepted: int
    misses: int


@dataclass(frozen=True)
class Pair:
    """The same replies without drafts and with them."""

    plain: Ran
    drafted: Ran


def row_of(pairs: list[Pair], **what: Any) -> dict[str, Any]:
    """A row of a result, the first of several pairs apart: it warms up."""
    kept = pairs[1:] or pairs
    row = what | {
        "plain_ms": spread([1e3 * p.plain.each_s for p in kept]),
        "drafted_ms": spread([1e3 * p.drafted.each_s for p in kept]),
        "speedup": spread([p.plain.each_s / p.drafted.each_s for p in kept]),
        "first_speedup": pairs[0].plain.each_s / pairs[0].drafted.each_s,
        "drafted": sum(p.drafted.drafted for p in kept), "accepted": sum(p.drafted.accepted for p in kept),
    }  # fmt: skip
    said = " ".join(f"{key} {value}" for key, value in what.items())
    note(
        f"{said}: {row['speedup']['median']:.3f} ({row['speedup']['min']:.3f} to {row['speedup']['max']:.3f}), "
        f"{row['plain_ms']['median']:.3f} ms plain, {row['drafted']} drafted, {row['accepted']} accepted"
    )
    return row


# --- imposed acceptance ---------------------------------------------------------------------------------


def constant(rate: float) -> Chance:
    return lambda place: rate


def falling(first: float) -> Chance:
    return lambda place: first * FALLS**place


def rated(bench: Bench, prompts: Prompts, o: argparse.Namespace, rate: float, depth: int, n: int = 1) -> list[Pair]:
    """Replies with drafts of a rate, n at once."""
    first = SURE if rate > 0.5 else UNSURE

    def cases(told: list[list[int]]) -> list[Case]:
        sources = [Rated(t, depth, constant(rate), first, seed=bench.n + i) for i, t in enumerate(told)]
        return [Case(lambda memory, source=source: source) for source in sources]  # type: ignore[misc]

    return [bench.pair([prompts.next(depth) for _ in range(n)], o.generate, cases) for _ in range(1 + o.runs)]


def rates(o: argparse.Namespace, shape: Shape, prompts: Prompts) -> list[dict[str, Any]]:
    """Copying and novel text with all experts resident, at each depth and way in which neighbors share experts."""
    rows = []
    for share in o.repeat:
        with opened(o, shape, replayed=True, share=share) as bench:
            for depth in o.depths:
                for rate in (COPYING, *(NOVEL if depth == o.depths[0] else ())):
                    pairs = rated(bench, prompts, o, rate, depth)
                    rows.append(row_of(pairs, part="rates", rate=rate, depth=depth, repeat=share))
            rows[-1]["step_ms"] = bench.step_ms
    return rows


def missed(o: argparse.Namespace, shape: Shape, prompts: Prompts) -> list[dict[str, Any]]:
    """Copying and novel text at some residency, with the line that distinct missed bytes draw."""
    rows = []
    with opened(o, shape, replayed=True) as bench:
        rated(bench, prompts, o, COPYING, o.depths[0])
        step_ms = bench.step_ms
    for share in o.repeat:
        with opened(o, shape, replayed=True, share=share, miss_rate=o.missed / 100) as bench:
            for rate in (COPYING, 0.7, *NOVEL):
                row = row_of(
                    rated(bench, prompts, o, rate, o.depths[0]), part="missed", rate=rate, repeat=share,
                    residency_pct=o.residency, miss_pct=o.missed,
                )  # fmt: skip
                lines = {}
                for T, ms in step_ms.items():
                    n_bytes = float(distinct_missed(bench.choices, bench.resident, T) @ bench.sizes)
                    tokens = sum(rate**k for k in range(T))
                    lines[T] = tokens * row["plain_ms"]["median"] / (ms + n_bytes / (1e6 * o.pcie_gb_per_s))
                row["line"] = max(lines.values())
                row["of_line"] = row["speedup"]["median"] / max(1.0, row["line"])
                note(f"  {row['of_line']:.3f} of the best line, {row['line']:.3f}")
                rows.append(row)
    return rows


def at_once(o: argparse.Namespace, shape: Shape, prompts: Prompts) -> list[dict[str, Any]]:
    """Replies that share steps; experts are the router's own."""
    rows = []
    with opened(o, shape) as bench:
        for n in o.at_once:
            for rate in (COPYING, 0.08):
                pairs = rated(bench, prompts, o, rate, o.depths[0], n)
                rows.append(row_of(pairs, part="at-once", at_once=n, rate=rate))
    return rows


def drafter(o: argparse.Namespace, shape: Shape, prompts: Prompts) -> list[dict[str, Any]]:
    """A drafter or a block that is right as often as it is said to be."""
    rows = []
    with opened(o, shape, replayed=shape.n_expert > 0, draft=o.draft) as bench, ExitStack() as undo:
        if o.beyond is not None:  # random tokens have as many as the vocabulary
            told = mock.patch.object(mtp._Tail, "told", lambda tail, ids: setattr(tail, "beyond", o.beyond))
            undo.enter_context(told)
        for first in o.first:
            depth = o.depths[0]

            def cases(told: list[list[int]], first: float = first, depth: int = depth) -> list[Case]:
                rate = first * (1 - (o.beyond or 0.0))
                follower = Rated(told[0], depth, falling(rate), first, seed=bench.n)
                if o.telling:
                    follower = Telling(told[0], depth, rate, seed=bench.n)
                nothing = Rated((), depth, constant(0.0), 0.0, seed=0)
                return [Case(lambda memory: nothing, follower)]

            # The second has no drafter, so that it is known what a reply takes without.
            pairs = [bench.pair([prompts.next(depth)], o.generate, cases) for _ in range(2 + o.runs)][1:]
            name = o.draft if o.draft == "mtp" else Path(o.draft).name
            row = row_of(pairs, part="drafter", draft=name, first=first, depth=depth, beyond=o.beyond)
            rows.append(row | ({"telling": TELLING} if o.telling else {}))
    return rows


# --- sessions -------------------------------------------------------------------------------------------


def kinds_of(tokens: list[int], tokenizer: Tokenizer) -> list[str]:
    """What each token is written in: a call is an edit by its name, which the tokens behind its mark begin with."""
    marks = {tokenizer.token_to_id(mark): kind for mark, kind in KINDS.items()}
    kind, found = "text", []
    for i, token in enumerate(tokens):
        found.append(kind)
        kind = marks.get(token, kind)
        if marks.get(token) == "call":
            text = tokenizer.decode(tokens[i + 1 : i + 1 + NAME_TOKENS], skip_special_tokens=False)
            kind = "edit" if EDITS.match(text) else "call"
    return found


def turns_of(window: Window) -> list[tuple[int, int]]:
    """Where the model's turns begin and end."""
    edges = np.diff(np.concatenate([[0], window.generated.astype(np.int8), [0]]))
    return list(zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist(), strict=True))


def sessions(o: argparse.Namespace, shape: Shape, prompts: Prompts) -> list[dict[str, Any]]:
    """Real lookup: every turn of recorded sessions, in their order, until so many tokens were generated."""
    tokenizer, rows = Tokenizer.from_file(str(o.tokenizer)), []
    for path in o.tokens:
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])  # plain, drafted, tokens
        ratios, n_drafted, n_accepted, n_tokens = [], 0, 0, 0
        with opened(o, shape, replayed=True, share=o.repeat[0]) as bench:
            rated(bench, prompts, replace_runs(o, 1), COPYING, o.depths[0])  # warms up; the gate has learned little
            for window in read_tokens(path):
                if n_tokens >= o.session_tokens:
                    break
                session, own = window.tokens.tolist(), [0.0, 0.0]
                kinds = kinds_of(session, tokenizer)
                for begin, end in turns_of(window):
                    if end - begin < 3:
                        continue

                    def cases(
                        told: list[list[int]], session: list[int] = session, at: int = begin, end: int = end
                    ) -> list[Case]:
                        # Only what has been said is remembered: the session goes on.
                        return [Case(lambda m: OfSession(m, session, at, told[0], o.depths[0]), text=session[:end])]

                    pair = bench.pair([prompts.next(o.depths[0])], end - begin, cases)
                    for k, ran in enumerate((pair.plain, pair.drafted)):
                        for kind, s in zip(kinds[begin + 1 : end], each_s(ran.times[0]), strict=True):
                            sums[kind][k] += s
                            own[k] += s
                    for kind in kinds[begin + 1 : end]:
                        sums[kind][2] += 1
                    n_tokens += end - begin
                    n_drafted, n_accepted = n_drafted + pair.drafted.drafted, n_accepted + pair.drafted.accepted
                if own[1]:
                    ratios.append(own[0] / own[1])
            step_ms = bench.step_ms
        by_kind = {kind: {"speedup": a / b, "tokens": int(n)} for kind, (a, b, n) in sorted(sums.items())}
        there = {kind: share for kind, share in SHARES.items() if kind in by_kind}
        weighted = sum(there.values()) / sum(share / by_kind[kind]["speedup"] for kind, share in there.items())
        plain_s, drafted_s, n = (sum(s[k] for s in sums.values()) for k in range(3))
        rows.append({
            "part": "sessions", "tokens": path.name, "generated": int(n), "speedup": plain_s / drafted_s,
            "weighted_speedup": weighted, "by_kind": by_kind, "sessions": spread(ratios), "n_sessions": len(ratios),
            "drafted": n_drafted, "accepted": n_accepted, "plain_ms": 1e3 * plain_s / n, "step_ms": step_ms,
        })  # fmt: skip
        note(f"{path.name}: {plain_s / drafted_s:.3f}, weighted {weighted:.3f}, {by_kind}, sessions {spread(ratios)}")
    return rows


def each_s(times: list[float]) -> NDArray[np.float64]:
    """Seconds of each token but the first; those that came together share what they took."""
    found = np.diff(times)
    groups = np.cumsum(found > 0)
    sizes = np.bincount(groups)
    return np.asarray(np.bincount(groups, found)[groups] / sizes[groups])


def replace_runs(o: argparse.Namespace, runs: int) -> argparse.Namespace:
    return argparse.Namespace(**vars(o) | {"runs": runs})


# --- engines --------------------------------------------------------------------------------------------


class Measured(Bench):
    """With what was imposed. resident: bool [L, E]; sizes: bytes of an expert, by layer."""

    choices: NDArray[np.int32]
    resident: NDArray[np.bool_]
    sizes: NDArray[np.int64]


@contextmanager
def opened(
    o: argparse.Namespace, shape: Shape, replayed: bool = False, share: float = 0.0, miss_rate: float = 0.0,
    draft: str = "lookup",
) -> Iterator[Measured]:  # fmt: skip
    """An engine with all experts resident, or at --residency percent where some are missed."""
    resident, policy, residency = np.ones((len(shape.moe_layers), shape.n_expert), np.bool_), ALL.name, 100.0
    if miss_rate:
        budget = placement.residency_budget(shape.n_expert, shape.expert_bytes, o.residency)
        slots = placement.uniform(shape.n_expert, shape.expert_bytes, budget).slots_per_layer
        resident = np.arange(shape.n_expert) < np.array(slots)[:, None]  # `uniform` pins those of lowest index
        policy, residency = UNIFORM.name, o.residency
    most = max(o.at_once) * (max(o.depths) + max(o.generate, 2048) + 128)
    config = EngineConfig(
        model=o.model, device=o.device, policy=policy, residency_pct=residency, prefix_gib=0.0, draft=draft,
        ctx_tokens=o.ctx or most, threads=o.threads,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="spark-drafts-") as folder:
        choices = np.zeros((0, 0, 0), np.int32)
        if replayed and o.device == "cuda":
            choices = imposed(resident, REPLAYED_TOKENS, shape.n_expert_used, miss_rate, seed=17)
            choices = repeated(choices, share, seed=18)
            np.save(file := Path(folder) / "replay.npy", choices)
            config = replace(config, replay=file)
        engine = Engine(config)
        try:
            check_settings(config, engine.ready())
            engine.warm_up()
            bench = Measured(engine, Sampling(o.temperature, top_p=0.95, seed=7) if o.temperature else Sampling())
            bench.choices, bench.resident = choices, resident
            bench.sizes = np.array(shape.expert_bytes)
            yield bench
        finally:
            engine.close()


PARTS: dict[str, Callable[[argparse.Namespace, Shape, Prompts], list[dict[str, Any]]]] = {
    "rates": rates, "missed": missed, "at-once": at_once, "drafter": drafter, "sessions": sessions,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--parts", default="rates", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="on a CPU nothing is imposed")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--depths", type=_ints, default=[512], help="tokens of a prompt; novel text at the first alone")
    parser.add_argument("--ctx", type=int, help="tokens of the KV cache")
    parser.add_argument("--generate", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0, help="of all replies, with a top_p of 0.95")
    parser.add_argument("--runs", type=int, default=5, help="measured replies of each kind, after one more")
    parser.add_argument("--repeat", type=parse_list, default=[0.0], help="shares of experts that a neighbor has, too")
    parser.add_argument("--residency", type=float, default=60.0, help="percent of the expert bytes")
    parser.add_argument("--missed", type=float, default=5.0, help="percent of a token's experts")
    parser.add_argument("--pcie-gb-per-s", type=float, default=PCIE_GB_PER_S)
    parser.add_argument("--at-once", type=_ints, default=[2, 4], help="replies that share steps")
    parser.add_argument("--draft", default="mtp", help="mtp, or a drafter's file")
    parser.add_argument(
        "--beyond", type=float, help="share of tokens that a block's short head has not, which are never right"
    )
    parser.add_argument("--first", type=parse_list, default=[0.74], help="chances of a drafter's first token")
    parser.add_argument("--telling", action="store_true", help="a drafter is sure of some drafts, and knows which")
    parser.add_argument("--tokens", type=Path, nargs="+", default=[], metavar="TOKENS.parquet")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "data/nano/tokenizer.json", help="of these")
    parser.add_argument("--session-tokens", type=int, default=30000, help="generated in sessions, at least")
    json_option(parser)
    o = parser.parse_args()
    shape = shape_of(o.model)
    prompts = Prompts(shape.n_vocab, seed=23)
    report: dict[str, Any] = {
        "model": shape.name, "model_bytes": shape.file_bytes, "generate": o.generate, "temperature": o.temperature,
        "rows": [],
    }  # fmt: skip
    for part in o.parts.split(","):
        report["rows"] += PARTS[part](o, shape, prompts)
        if o.json:
            write_json(o.json, report)


def _ints(text: str) -> list[int]:
    return [int(n) for n in parse_list(text)]


if __name__ == "__main__":
    main()
