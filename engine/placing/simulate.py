"""Replacement policies replayed on a trace, and the bound that none of them can beat. Offline, pure.

A simulated trace is served as the engine would serve it: tokens that are not generated are prefill, in steps of
many tokens; a generated token is a step of its own. Hits and misses are counted over generated tokens only, one
unit being one active expert of one layer for one token.
"""

from __future__ import annotations

import ctypes
import heapq
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.ground import cpu_library
from engine.placing.placement import Placement
from engine.placing.policy import Rule

if TYPE_CHECKING:
    from engine.formats.trace import RoutingTrace

CHUNK_TOKENS = 512  # of a prefill step, the engine's default
_BLOCK_STEPS = 1024

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """Active experts of generated tokens: resident when their step began, or not; int64 [L]."""

    hits: Int64s
    misses: Int64s

    @property
    def hit_rate(self) -> float:
        """Hits among all uses, 0..1; 1 if there were none."""
        uses = int(self.hits.sum() + self.misses.sum())
        return int(self.hits.sum()) / uses if uses else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class SimResult(Uses):
    """What a policy did.

    root_misses, root_moves: int64 [R], misses of each root session (see `roots`), and the experts that entered slots in
    its decoding steps.
    """

    root_misses: Int64s
    root_moves: Int64s


@dataclass(frozen=True, slots=True, eq=False)
class Bound(Uses):
    """The most hits that any policy could have.

    The totals are the bound; the layers' shares are those of the schedule or relaxation that gave it.
    exact: a schedule exists that reaches it. root_misses: int64 [R] of that schedule; None where there is none.
    """

    exact: bool
    root_misses: Int64s | None


def roots(trace: RoutingTrace) -> tuple[Int32s, tuple[str, ...]]:
    """The root session of each token, int32 [T] into the ids, which are in order of appearance.

    What grew from one root (subagents, forks, segments, branches) is on one subject, and no evidence of its own.
    """
    names = [re.split("[/#~]", name, maxsplit=1)[0] for name in trace.session_ids]
    found = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([found[name] for name in names], np.int32)[trace.session], tuple(found)


class Recording:
    """A trace laid out for being replayed many times; several threads may replay it at once.

    root: int32 [T], the root session of each token; n_roots: how many there are. tokens: int64 [R], generated tokens.
    """

    def __init__(
        self,
        trace: RoutingTrace,
        root: Int32s | None = None,
        n_roots: int = 0,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        if root is None:
            root, names = roots(trace)
            n_roots = len(names)
        self.n_expert, self.n_used = trace.n_expert, trace.experts.shape[2]
        self.root, self.n_roots = np.ascontiguousarray(root, np.int32), n_roots
        self.tokens = np.bincount(self.root[trace.generated], minlength=n_roots).astype(np.int64)
        self._experts = [np.ascontiguousarray(trace.experts[:, i], np.uint16) for i in range(len(trace.layers))]
        self._spans = np.array(list(_spans(trace, chunk_tokens)), np.int64).reshape(-1, 3)

    def replay(self, placement: Placement, rule: Rule) -> SimResult:
        """Serve the trace under a rule, from a placement's first contents, and count; what `advance` decides is done.

        The placement is over the trace's layers.
        """
        n_layer = len(self._experts)
        misses, moves = np.zeros((n_layer, self.n_roots), np.int64), np.zeros((n_layer, self.n_roots), np.int64)
        for layer, experts in enumerate(self._experts):
            residents = placement.residents[layer]
            held = np.full(placement.slots_per_layer[layer], -1, np.int32)
            held[: len(residents)] = residents
            _simulate_layer(
                experts, self.n_expert, self._spans, self.root, held, len(placement.pinned[layer]), rule.memory,
                misses[layer], moves[layer],
            )  # fmt: skip
        uses = int(self.tokens.sum()) * self.n_used
        return SimResult(uses - misses.sum(axis=1), misses.sum(axis=1), misses.sum(axis=0), moves.sum(axis=0))

    def residents(self, layer: int, placement: Placement, rule: Rule, tokens: Int64s) -> npt.NDArray[np.bool_]:
        """Which experts of a layer are resident when the step of each token begins, as `replay` has it: bool [n, E].

        tokens: int64 [n], distinct indices into the trace.
        """
        experts, residents = self._experts[layer], placement.residents[layer]
        held = np.full(placement.slots_per_layer[layer], -1, np.int32)
        held[: len(residents)] = residents
        row = np.full(len(experts), -1, np.int64)
        row[tokens] = np.arange(len(tokens))
        found = np.zeros((len(tokens), self.n_expert), np.uint8)
        at = [array.ctypes.data_as(ctypes.c_void_p) for array in (experts, self._spans, held, row, found)]
        status = cpu_library.load().spark_residents(
            at[0], len(experts), self.n_used, self.n_expert, at[1], len(self._spans), at[2], held.size,
            len(placement.pinned[layer]), rule.memory, at[3], len(tokens), at[4],
        )  # fmt: skip
        assert status == 0, "the indices in a trace and a placement are of the model"
        return found.astype(np.bool_)


def _simulate_layer(
    experts: npt.NDArray[np.uint16], n_expert: int, spans: Int64s, root: Int32s, held: Int32s, n_pinned: int,
    memory: int, misses: Int64s, moves: Int64s,
) -> None:  # fmt: skip
    """`spark_simulate` of cpu/: one layer; adds to misses and moves [R]."""
    T, A = experts.shape
    assert root.shape == (T,)
    assert misses.shape == moves.shape
    arrays = (experts, spans, root, held, misses, moves)
    assert all(array.flags.c_contiguous for array in arrays)
    at = [array.ctypes.data_as(ctypes.c_void_p) for array in arrays]
    status = cpu_library.load().spark_simulate(
        at[0], T, A, n_expert, at[1], len(spans), at[2], misses.size, at[3], held.size, n_pinned, memory, at[4], at[5]
    )
    assert status == 0, "the indices in a trace and a placement are of the model"


def simulate(trace: RoutingTrace, placement: Placement, rule: Rule, *, chunk_tokens: int = CHUNK_TOKENS) -> SimResult:
    """Serve a trace once: `Recording.replay`.

    Consecutive tokens of one session that are not generated form prefill steps of at most `chunk_tokens`; a jump in
    position ends a step.
    """
    return Recording(trace, chunk_tokens=chunk_tokens).replay(placement, rule)


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
        return Bound(uses, uses, exact=True, root_misses=np.zeros(0, np.int64))
    step = np.zeros(n_token, np.int64)
    np.cumsum(trace.generated[1:] | trace.generated[:-1], out=step[1:])
    first, ends = _interval_ends(trace, step)
    sizes = [int(size) for size in expert_bytes]
    kept = _packed(step, first, ends, budget_bytes // min(sizes))
    hits = kept.sum(axis=0)
    exact = len(set(sizes)) == 1
    if not exact:
        area = _fitting_area(step, first, ends, sizes, budget_bytes)
        hits = min(hits, area, key=lambda by_layer: int(by_layer.sum()))
        return Bound(hits, uses - hits, exact, None)
    root, names = roots(trace)
    missed = n_layer * n_active - kept.sum(axis=1)[step[trace.generated]]
    of_root = np.bincount(root[trace.generated], weights=missed, minlength=len(names)).astype(np.int64)
    return Bound(hits, uses - hits, exact, of_root)


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
    """How many of the intervals that end in each step of a layer are kept, at most k open at once: [steps, L]."""
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
    kept: Int64s = closing - np.array(given_up).reshape(closing.shape)
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


def _fitting_area(step: Int64s, first: Int32s, ends: Int32s, sizes: Sequence[int], budget_bytes: int) -> Int64s:
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
