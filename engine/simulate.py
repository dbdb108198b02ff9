"""Replacement policies replayed on a trace, and the bound that none of them can beat. Offline, pure.

A simulated trace is served as the engine would serve it: tokens that are not generated are prefill, in steps of
many tokens; a generated token is a step of its own. Hits and misses are counted over generated tokens only, one
unit being one active expert of one layer for one token.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.placement import Placement, greedy
from engine.policy import LRU, Rule, SlotState, advance, fill

if TYPE_CHECKING:
    from engine.trace import RoutingTrace

CHUNK_TOKENS = 512  # of a prefill step, the engine's default
CACHE_FRACTIONS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0)  # what best_split tries
_BLOCK_STEPS = 1024
_NEVER = int(np.iinfo(np.int64).max)

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SimResult:
    """Active experts of generated tokens: resident when their step began, or not; int64 [L]."""

    hits: Int64s
    misses: Int64s

    @property
    def hit_rate(self) -> float:
        """Hits among all uses, 0..1; 1 if there were none."""
        uses = int(self.hits.sum() + self.misses.sum())
        return int(self.hits.sum()) / uses if uses else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Bound(SimResult):
    """The most hits that any policy could have.

    The totals are the bound; the layers' shares are those of the schedule or relaxation that gave it.
    exact: a schedule exists that reaches it.
    """

    exact: bool


@dataclass(frozen=True, slots=True)
class Split:
    """How to share the slots between pinned and cache.

    cache_fraction: cache slots / slots, 0..1; table: (cache_fraction, hit rate) of every candidate; reason: one line.
    """

    cache_fraction: float
    table: tuple[tuple[float, float], ...]
    reason: str


def simulate(
    trace: RoutingTrace, placement: Placement, rule: Rule, *, chunk_tokens: int = CHUNK_TOKENS
) -> SimResult:
    """Serve a trace under a rule, from a placement's first contents, and count.

    The placement is over the trace's layers. Consecutive tokens of one session that are not generated form
    prefill steps of at most `chunk_tokens`; a jump in position ends a step.
    """
    state = SlotState.empty(placement.slots_per_layer, trace.n_expert)
    fill(state, placement)
    spans = list(_spans(trace, chunk_tokens))
    for layer in range(len(trace.layers)):
        experts = np.ascontiguousarray(trace.experts[:, layer])
        for begin, end, generated in spans:
            if generated:
                decode(state, layer, experts[begin:end], rule)
            else:
                counted = trace.generated[begin:end]
                advance(state, layer, experts[begin:end], counted, rule.gain, rule.cap)
    return SimResult(state.hits, state.misses)


def decode(state: SlotState, layer: int, experts: npt.NDArray[np.integer], rule: Rule) -> None:
    """Take a run of single-token steps of one layer: `advance` on each row in turn, only faster.

    experts: [n, A], each row a counted token with A distinct experts. Leaves the state that n calls of
    `advance` leave, addresses aside (a simulated state has none).
    """
    span = state.slots(layer)
    evictable = state.pinned[span] == 0
    is_pinned = np.zeros(state.slot_of.shape[1], np.bool_)
    is_pinned[state.expert_of[span][~evictable]] = True
    loose = ~is_pinned[experts]  # [n, A]: the uses that can miss or move a score
    flat = experts[loose].tolist()
    per_step = loose.sum(axis=1)
    steps = np.flatnonzero(per_step)
    ends = np.cumsum(per_step[steps]).tolist()
    clocks = (steps + state.clock[layer] + 1).tolist()
    state.clock[layer] += len(experts)
    state.counts[layer] += np.bincount(experts.ravel(), minlength=is_pinned.size)

    misses = len(flat)
    if evictable.any():
        misses = 0
        # Plain lists: on a few experts at a time they are many times faster than arrays.
        slot_of = (state.slot_of[layer] - span.start).tolist()  # negative: not resident
        expert_of = state.expert_of[span].tolist()
        score = np.where(evictable, state.score[span], _NEVER).tolist()
        gain, begin = rule.gain, 0
        for clock, end in zip(clocks, ends, strict=True):
            row, begin = flat[begin:end], end
            full, missing = clock + rule.cap, []
            for expert in row:
                slot = slot_of[expert]
                if slot < 0:
                    missing.append(expert)
                else:
                    level = score[slot]
                    level = (level if level > clock else clock) + gain
                    score[slot] = level if level < full else full
            if not missing:
                continue
            misses += len(missing)
            missing.sort()
            for expert in missing:
                lowest = min(score)
                slot = score.index(lowest)
                if expert_of[slot] in row:  # rare: the lowest score is that of an expert of this step
                    others = ((score[i], i) for i, holds in enumerate(expert_of) if holds not in row)
                    lowest, slot = min(others, default=(_NEVER, -1))
                if lowest > clock + gain:
                    break
                if expert_of[slot] >= 0:
                    slot_of[expert_of[slot]] = -1
                slot_of[expert] = slot
                expert_of[slot] = expert
                score[slot] = min(clock + gain, full)
        where = np.array(slot_of, np.int32)
        state.slot_of[layer] = np.where(where < 0, -1, where + span.start)
        state.expert_of[span] = expert_of
        state.score[span] = np.where(evictable, score, state.score[span])
    state.misses[layer] += misses
    state.hits[layer] += experts.size - misses


def _spans(trace: RoutingTrace, chunk_tokens: int) -> Iterator[tuple[int, int, bool]]:
    """A trace cut in (begin, end, generated): runs of generated tokens, and the prefill steps between them."""
    generated = trace.generated
    if not generated.size:
        return
    follows = (np.diff(trace.session) == 0) & (np.diff(trace.position) == 1)
    cut = (generated[1:] != generated[:-1]) | ~(generated[1:] | follows)
    bounds = [0, *(np.flatnonzero(cut) + 1).tolist(), generated.size]
    for begin, end in pairwise(bounds):
        if generated[begin]:
            yield begin, end, True
        else:
            for chunk in range(begin, end, chunk_tokens):
                yield chunk, min(chunk + chunk_tokens, end), False


def best_split(
    trace: RoutingTrace,
    expert_bytes: Sequence[int],
    budget_bytes: int,
    *,
    counts: Int64s | None = None,
    rule: Rule = LRU,
    max_tokens: int = 16_384,
) -> Split:
    """Choose the share of cache slots under a byte budget by simulating CACHE_FRACTIONS on a trace.

    expert_bytes: [L]; counts: [L, E], from other traffic than the trace, to place by. Without counts the first
    half of the trace (whole sessions, where there are several) places and the second is simulated: no placement
    is judged on what it was made from. At most `max_tokens` tokens are simulated. Of equals the smallest share
    wins: pinned slots move no bytes.
    """
    if counts is None:
        half = _half(trace)
        counts, trace = trace.part(0, half).counts(), trace.part(half, len(trace.session))
    trace = trace.part(0, max_tokens)
    n_active = trace.experts.shape[2]
    table = []
    for fraction in CACHE_FRACTIONS:
        placement = greedy(
            counts, expert_bytes, budget_bytes, n_expert_used=n_active, cache_fraction=fraction
        )
        table.append((fraction, simulate(trace, placement, rule).hit_rate))
    best, hit_rate = max(table, key=lambda row: (row[1], -row[0]))
    others = ", ".join(f"{fraction:.1%}: {rate:.2%}" for fraction, rate in table if fraction != best)
    n_generated = int(trace.generated.sum())
    reason = f"{best:.1%} cache slots hit {hit_rate:.2%} in {n_generated} simulated tokens ({others})"
    return Split(best, tuple(table), reason)


def _half(trace: RoutingTrace) -> int:
    """The token where the second half begins: at the session boundary nearest to the middle, if there is one."""
    middle = len(trace.session) // 2
    boundaries = np.flatnonzero(np.diff(trace.session)) + 1
    if not boundaries.size:
        return middle
    return int(boundaries[np.abs(boundaries - middle).argmin()])


def belady(trace: RoutingTrace, expert_bytes: Sequence[int], budget_bytes: int) -> Bound:
    """The most hits that `budget_bytes` of slots, shared by all layers, could give (Belady's MIN).

    expert_bytes: [L], of the trace's layers. The optimum begins with any contents, may let a missed expert pass
    without keeping it, and may divide the budget anew at every step; but an expert enters only when it is
    used, as `advance` does from any placement under any rule. (Exchanges between requests are not covered.)

    A hit is an interval: the expert stays from one use to its next, or from before the first step to its first
    use. The intervals that are open between two steps must fit in the budget. One that ends in a prefill step is
    worth nothing and is left out. A run of prefill tokens is one step here, however the engine cuts it into
    chunks: what is open inside the run is also open at its end, so the bound is the same for every cut.

    With one expert size, at most k = budget / size intervals are open at a time, and the most are kept by
    admitting each as it begins and giving up, whenever k + 1 are open, the one that ends last; this is exact
    (Faigle and Nawijn 1995; Carlisle and Lloyd 1995). With several sizes the result is the smaller of two upper
    bounds: the same with k = budget / smallest size, and the number of intervals that fit into budget x time,
    those of the least bytes x time first.
    """
    n_token, n_layer, n_active = trace.experts.shape
    uses = np.full(n_layer, int(trace.generated.sum()) * n_active, np.int64)
    if n_token == 0:
        return Bound(uses, uses, exact=True)
    step = np.zeros(n_token, np.int64)
    np.cumsum(trace.generated[1:] | trace.generated[:-1], out=step[1:])
    first, ends = _interval_ends(trace, step)
    sizes = [int(size) for size in expert_bytes]
    hits = _packed(step, first, ends, budget_bytes // min(sizes))
    exact = len(set(sizes)) == 1
    if not exact:
        area = _fitting_area(step, first, ends, sizes, budget_bytes)
        hits = min(hits, area, key=lambda by_layer: int(by_layer.sum()))
    return Bound(hits, uses - hits, exact)


def _interval_ends(trace: RoutingTrace, step: Int64s) -> tuple[Int32s, Int32s]:
    """The step of each expert's next use if it is by a generated token, else -1.

    step: [T], of each token. Returns it as seen from before the first step [L, E], and from each use [T, L, A].
    """
    n_token, n_layer, n_active = trace.experts.shape
    first = np.full((n_layer, trace.n_expert), -1, np.int32)
    ends = np.full((n_token, n_layer, n_active), -1, np.int32)
    end_of_token = np.where(trace.generated, step, -1).astype(np.int32)
    for layer in range(n_layer):
        experts = trace.experts[:, layer].ravel()
        order = np.argsort(experts, kind="stable")  # uses by expert, each expert's by time
        expert, end = experts[order], end_of_token[order // n_active]
        again = expert[1:] == expert[:-1]
        from_use = np.full(experts.size, -1, np.int32)
        from_use[order[:-1][again]] = end[1:][again]
        ends[:, layer] = from_use.reshape(n_token, n_active)
        is_first = np.concatenate(([True], ~again))
        first[layer, expert[is_first]] = end[is_first]
    return first, ends


def _packed(step: Int64s, first: Int32s, ends: Int32s, k: int) -> Int64s:
    """How many intervals of each layer can be kept with at most k open at once: [L]."""
    n_layer, n_step = len(first), int(step[-1]) + 1
    closing = np.zeros((n_step, n_layer), np.int64)
    for layer in range(n_layer):
        for at in (first[layer], ends[:, layer]):
            closing[:, layer] += np.bincount(at[at >= 0], minlength=n_step)
    # A moment is a layer of a step: step * n_layer + layer. The heap holds minus the moments at which the kept
    # intervals end, so that its top is the last of them; ends in the past sink to its bottom.
    closes = closing.ravel().tolist()
    given_up = [0] * len(closes)
    heap: list[int] = []
    n_open = 0
    at_start = -(first * n_layer + np.arange(n_layer)[:, None])[first >= 0]
    for now, beginning in enumerate(chain([at_start.tolist()], _beginning(step, ends)), start=-1):
        if now >= 0:
            n_open -= closes[now] - given_up[now]
        for end in beginning:
            if n_open < k:
                heapq.heappush(heap, end)
                n_open += 1
            else:
                given_up[-heapq.heappushpop(heap, end)] += 1
        if len(heap) > 2 * k + 4096:
            heap = [end for end in heap if -end > now]
            heapq.heapify(heap)
    kept: Int64s = (closing - np.array(given_up).reshape(closing.shape)).sum(axis=0)
    return kept


def _beginning(step: Int64s, ends: Int32s) -> Iterator[list[int]]:
    """For each moment in order, minus the moments at which the intervals that begin there end."""
    n_layer, n_step = ends.shape[1], int(step[-1]) + 1
    for block in range(0, n_step, _BLOCK_STEPS):
        past = min(block + _BLOCK_STEPS, n_step)
        begin, end = np.searchsorted(step, (block, past))
        token, layer, active = np.nonzero(ends[begin:end] >= 0)
        moment = (step[begin + token] - block) * n_layer + layer
        order = np.argsort(moment, kind="stable")
        closes = -(ends[begin + token, layer, active].astype(np.int64) * n_layer + layer)[order]
        bounds = np.searchsorted(moment[order], np.arange((past - block) * n_layer + 1))
        block_closes = closes.tolist()
        for left, right in pairwise(bounds.tolist()):
            yield block_closes[left:right]


def _fitting_area(
    step: Int64s, first: Int32s, ends: Int32s, sizes: Sequence[int], budget_bytes: int
) -> Int64s:
    """How many intervals of each layer fit into budget x time, least bytes x moments first: [L]."""
    n_layer = len(sizes)
    areas, numbers = [], []
    for layer, size in enumerate(sizes):
        is_hit = ends[:, layer] >= 0
        inner = (ends[:, layer] - step[:, None])[is_hit] * n_layer
        outer = first[layer][first[layer] >= 0].astype(np.int64) * n_layer + layer + 1
        area, number = np.unique(np.concatenate((inner, outer)) * float(size), return_counts=True)
        areas.append(area)
        numbers.append(number)
    layers = np.repeat(np.arange(n_layer), [area.size for area in areas])
    area, number = np.concatenate(areas), np.concatenate(numbers)
    order = np.argsort(area, kind="stable")
    area, number, layers = area[order], number[order], layers[order]
    n_moment = (int(step[-1]) + 1) * n_layer
    room = float(budget_bytes) * n_moment * (1 + 1e-9)  # rounding must not lower the bound
    left = room - np.concatenate(([0.0], np.cumsum(area * number)[:-1]))
    fitting = np.clip(np.floor(left / area), 0, number)
    return np.bincount(layers, weights=fitting, minlength=n_layer).astype(np.int64)
