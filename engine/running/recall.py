"""Recall: decoded rows read the blocks of their context that matter to them, and what that leaves out is told.

What a row reads follows from its sequence, its query and what its request says (docs/arithmetic.md, "Recall"), so no
token depends on who shares its step, on drafts, or on where blocks lie. Prompts read all.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.ground.errors import RequestError
from engine.ground.recall import MAX_BLOCKS, KVRecall
from engine.memory.blocks import Sequence
from engine.memory.kv import KVCache
from engine.memory.shape import CacheShape
from engine.memory.sketches import Sketches
from engine.models.layers import Recalled
from engine.ops import F32, I32, KV_BLOCK_TOKENS, MASS_UNITS, SMALL_TOKENS, TAIL_BLOCKS, U8, Limits
from engine.ops.cuda.recall import entry_of
from engine.ops.device import Array, Memory
from engine.ops.interface import Ops, Workspace

LACKING_BLOCKS = 256  # whose sketches are made at a time
RING_STEPS = 64  # of which the host knows what was read: more than run ahead of it


def part_of(asked: KVRecall | None, served: Part | None) -> Part | None:
    """What a reply reads; served: what the engine has where a request says nothing, None: it reads all of every one.

    RequestError where the request asks for what there is not.
    """
    if served is None:
        if asked is not None and not asked.off:
            raise RequestError(
                "field 'kv_recall': every token reads all of its context here",
                hint="serve with --kv-recall-blocks N or --kv-recall EPS, or leave the field out",
            )
        return None
    if asked is None:
        return served
    if asked.off:
        if asked.blocks is not None or asked.left_out is not None or asked.keep or asked.start is not None:
            raise RequestError("field 'kv_recall': 'off' reads all, so there is nothing to choose or to keep")
        return None
    if wrong := next((pair for pair in asked.keep if pair[0] >= pair[1]), None):
        raise RequestError(f"field 'kv_recall.keep': expected ranges [from, to) of tokens, found {list(wrong)}")
    start = served.start if asked.start is None else asked.start
    return replace(made_of(asked.blocks, asked.left_out) or served, keep=asked.keep, start=start)


def made_of(blocks: int | None, left_out: float | None, start: int = 0) -> Part | None:
    """Rows that read at most so many blocks, or as many as leave no more of the mass out; None: neither is said."""
    if blocks is None and left_out is None:
        return None
    if left_out == 1.0:  # nothing need be read, whatever units of shares add up to
        return Part(0, start=start)
    leave = -1 if left_out is None else int(left_out * MASS_UNITS)
    return Part(MAX_BLOCKS if blocks is None else blocks, leave=leave, start=start)


@dataclass(frozen=True, slots=True)
class Part:
    """What decoded rows of a reply read beside the first block and the tail: `most` blocks, and ranges [from, to).

    leave: as few of these blocks as leave no more of MASS_UNITS out; -1: all of them. start: the position of the first
    row that may read a part.
    """

    most: int
    keep: tuple[tuple[int, int], ...] = ()
    leave: int = -1
    start: int = 0

    def kept(self, n_blocks: int) -> U8:
        """Which of the first blocks lie in a range, uint8 [n_blocks]."""
        kept = np.zeros(n_blocks, np.uint8)
        for begin, end in self.keep:
            if begin < end:
                kept[begin // KV_BLOCK_TOKENS : -(-end // KV_BLOCK_TOKENS)] = 1
        return kept

    def left(self, position: int) -> int:
        """How many blocks the row at a position does not read, at least, in every layer and head."""
        return 0 if position < self.start else max(0, self._candidates(position) - self.most)

    def chooses(self, position: int) -> bool:
        """Whether the row at a position may not read all."""
        return position >= self.start and self._candidates(position) > (self.most if self.leave < 0 else 0)

    def _candidates(self, position: int) -> int:
        kept = self.kept(max(0, position // KV_BLOCK_TOKENS - TAIL_BLOCKS))
        kept[:1] = 1
        return int((kept == 0).sum())


@dataclass(slots=True)
class Tally:
    """What the decoded tokens of a reply have read. tokens: of them; blocks: that there were for each.

    read: of these, in all layers and KV heads together, of which there are `heads`. left_max, left_sum: the share of
    softmax mass that was left out, as estimated: the largest of any token, layer and head, and the sum of the tokens'
    means. first: the first position whose row may not have read all.
    """

    tokens: int = 0
    blocks: int = 0
    read: int = 0
    heads: int = 1
    left_max: float = 0.0
    left_sum: float = 0.0
    first: int | None = None

    def add(
        self, positions: range, part: Part, read: int, heads: int, left_max: float = 0.0, left_sum: float = 0.0
    ) -> None:
        """Count tokens whose rows read so many blocks in so many layers and KV heads; what they left out, as above."""
        blocks = sum(map(blocks_at, positions))
        self.tokens, self.blocks = self.tokens + len(positions), self.blocks + blocks
        self.read, self.heads = self.read + read, heads
        self.left_max, self.left_sum = max(self.left_max, left_max), self.left_sum + left_sum
        if self.first is None and read < blocks * heads:
            self.first = next(filter(part.chooses, positions), positions.start)

    @property
    def blocks_read(self) -> int:
        """Blocks that were read, the mean of layers and KV heads, rounded down."""
        return self.read // self.heads

    def to_json(self) -> dict[str, float]:
        """As `usage` has it."""
        return {
            "tokens": self.tokens, "blocks": self.blocks, "read": self.blocks_read, "left_out_max": self.left_max,
            "left_out_mean": self.left_sum / self.tokens if self.tokens else 0.0,
        }  # fmt: skip


def blocks_at(position: int) -> int:
    """Blocks up to a position's own."""
    return position // KV_BLOCK_TOKENS + 1


class Reads(Protocol):
    """A span of a step, as far as it matters here."""

    @property
    def sequence(self) -> Sequence:
        """Whose; as long as it is after the step."""

    @property
    def tokens(self) -> I32:
        """Its rows."""

    @property
    def recall(self) -> Part | None:
        """What they read; None: all."""


@dataclass(slots=True)
class Recalling:
    """What a model has whose decoded rows may read a part: sketches, inputs of a step, scratch for SMALL_TOKENS rows.

    served: what is read where a request says nothing.
    """

    served: Part
    device: Memory
    sketches: Sketches
    kv: KVCache
    arrays: Recalled
    lacking: I32  # [2, n]: where blocks lie whose sketches are to be made, and their numbers
    heads: I32  # [2, n_layer]: query and KV heads of layers that choose
    left_out: F32  # [max_sequences, 2], of replies that run ahead of the host: the largest share, the sum of means
    read: NDArray[np.uint64]  # [max_sequences], of these: blocks that were read in all layers, by KV heads
    ring: NDArray[np.uint64]  # page-locked [max_sequences, RING_STEPS, 2]: both, behind each of their last steps
    totals: Tally = field(default_factory=Tally)
    _last: int = 0  # rows of the last step, if any of them read a part
    _fed: list[NDArray[Any]] = field(default_factory=list)

    @classmethod
    def made(cls, served: Part, device: Memory, config: CacheShape, kv: KVCache, limits: Limits) -> Recalling:
        """Allocate it for steps within `limits`."""
        S, W, T = limits.max_sequences, -(-limits.n_ctx // KV_BLOCK_TOKENS), min(SMALL_TOKENS, limits.max_tokens)
        sketches, f32 = Sketches(device, config, kv), np.float32
        arrays = Recalled(
            sketches.layers,
            tuple(device.empty((S, W), np.int32) for _ in kv.groups),
            device.empty(limits.max_tokens, np.int32),
            device.empty(limits.max_tokens, np.int32),
            device.empty((S, W), np.uint8),
            device.empty(T * limits.n_head_kv * W, np.uint8),
            device.empty(T * limits.n_head * 2, f32),
            device.empty((config.n_layer, T * limits.n_head), f32),
            device.empty((config.n_layer, T * limits.n_head_kv), np.int32),
            device.empty(T * limits.n_head * 2 * W, f32),
            device.empty(T * limits.n_head_kv * W, f32),
            device.empty(T * limits.n_head_kv, np.int32),
            device.empty(limits.n_head_kv * kv.most_staged, np.int32),
        )
        lacking, heads = device.empty((2, LACKING_BLOCKS), np.int32), device.empty((2, config.n_layer), np.int32)
        locked = device.page_locked(16 * S * RING_STEPS).view(np.uint64).reshape(S, RING_STEPS, 2)
        ahead = device.empty((S, 2), f32), device.empty(S, np.uint64), locked
        return cls(served, device, sketches, kv, arrays, lacking, heads, *ahead)

    @property
    def buffers_bytes(self) -> int:
        """Bytes of all but the sketches."""
        a = self.arrays
        arrays: tuple[Array, ...] = (
            a.most, a.leave, a.keep, a.chosen, a.left, a.missed, a.read, a.masses, a.scores, a.last, a.absent,
            self.lacking, self.heads, self.left_out, self.read,
        )  # fmt: skip
        return sum(int(array.nbytes) for array in (*a.blocks, *arrays))

    @property
    def said(self) -> str:
        """What it says of itself among the reasons of a plan."""
        read = []
        if self.served.leave >= 0:
            read.append(f"what leaves {self.served.leave / MASS_UNITS:.3g} of their mass out")
        if self.served.most < MAX_BLOCKS:
            read.append(f"{self.served.most} blocks of {KV_BLOCK_TOKENS}")
        start = f", where there are more than {self.served.start} tokens" if self.served.start else ""
        return (
            f"decoded tokens read {', at most '.join(read)} beside the first block and the last {TAIL_BLOCKS + 1}"
            f"{start}: asked for; sketches of keys take {self.sketches.nbytes / 2**20:.1f} MiB, and choosing "
            f"{self.buffers_bytes / 2**20:.1f}"
        )

    def stats(self) -> dict[str, float]:
        """Counters since the start, of all replies that may read a part: tokens; blocks there were, and those read.

        left_out_max, left_out_sum: as of `Tally`.
        """
        t = self.totals
        return {
            "tokens": t.tokens, "blocks": t.blocks, "read": t.blocks_read, "left_out_max": t.left_max,
            "left_out_sum": t.left_sum,
        }  # fmt: skip

    def prepare(self, spans: Many[Reads], width: int, ops: Ops, ws: Workspace) -> Recalled | None:
        """Feed what a step of `width` rows, of spans that were extended, has more, and make the sketches that it lacks.

        None where every row reads all.
        """
        self._last = 0
        if not any(s.recall is not None and s.recall.chooses(s.sequence.length - 1) for s in spans):
            return None
        self._last = width
        reads = [(s.sequence, s.recall, s.sequence.length - len(s.tokens), len(s.tokens)) for s in spans]
        return self.feed(reads, width, ops, ws)

    def feed(
        self, reads: Many[tuple[Sequence, Part | None, int, int]], width: int, ops: Ops, ws: Workspace
    ) -> Recalled:
        """Feed what a step of `width` rows reads, and make the sketches that it lacks.

        reads: of each sequence what its rows read, the position of the first and how many there are. What fills a step
        up is the last row again.
        """
        S, W, at = len(reads), self.arrays.keep.shape[1], 0
        most, leave, keep = np.full(width, -1, np.int32), np.full(width, -1, np.int32), np.zeros((S, W), np.uint8)
        tables = [np.full((S, W), -1, np.int32) for _ in self.kv.groups]
        for i, (sequence, part, start, n) in enumerate(reads):
            first, end = at, at + n
            at = end
            if part is None or start + n <= part.start:
                continue
            rows = slice(first + max(0, part.start - start), end if i < S - 1 else width)
            most[rows], leave[rows], keep[i] = part.most, part.leave, part.kept(W)
            behind = max(0, (start + n - 1) // KV_BLOCK_TOKENS - TAIL_BLOCKS)
            for group in self.kv.full_groups:
                tables[group][i, :behind] = sequence.groups[group].blocks()[:behind]
        for group in self.kv.full_groups:
            self._summarize(group, np.unique(tables[group][tables[group] >= 0]), ops, ws)
        views = self.arrays.first(S, width)
        fed: list[NDArray[Any]] = [*tables, most, leave, keep]
        if not self._fed or not all(np.array_equal(a, b) for a, b in zip(fed, self._fed, strict=True)):
            arrays = *views.blocks, views.most, views.leave, views.keep
            ws.feed(list(zip(arrays, fed, strict=True)))
            self._fed = fed
        return views

    def _summarize(self, group: int, blocks: I32, ops: Ops, ws: Workspace) -> None:
        """Make the sketches of those blocks of a group that have none."""
        lacking = self.sketches.lacking(group, blocks)
        places = self.kv.pools[group].places
        for i in range(0, len(lacking), LACKING_BLOCKS):
            some = lacking[i : i + LACKING_BLOCKS]
            where, number = (row[: len(some)] for row in self.lacking)
            ws.feed([(where, some if places is None else places.where[some]), (number, some)])
            for layer in self.sketches.owners[group]:
                kv, homes = self.kv.layers[layer], self.kv.homes(layer)
                assert kv is not None
                if homes is not None:  # what is at home is read there
                    kv = replace(kv, homes=homes)
                ops.summarize(ws, kv, where, number, self.sketches.of[layer])

    def fared(self, fed: Many[tuple[Reads, int, Tally]]) -> None:
        """Count the last step: spans, how many of their rows stay, whose they are; sequences are as they are then."""
        at, missed, read, heads = 0, None, None, self.n_heads
        if self._last:
            missed = self.arrays.missed_of(self._last, self.device.read(self.arrays.missed))
            read = self.arrays.read_of(self._last, self.device.read(self.arrays.read))
        for span, stay, tally in fed:
            if span.recall is None:
                at += len(span.tokens)
                continue
            for row in range(stay):
                position = span.sequence.length - stay + row
                n_read = read[at + row] if read else heads * (blocks_at(position) - span.recall.left(position))
                left = (0.0,) if missed is None or not missed.shape[1] else missed[at + row]
                for one in (tally, self.totals):
                    where = range(position, position + 1)
                    one.add(where, span.recall, n_read, heads, float(np.max(left)), float(np.mean(left, dtype=float)))
            at += len(span.tokens)

    def rehearse(self, ops: Ops, ws: Workspace) -> None:
        """Make sketches of no matter what: for who counts what is launched."""
        for group in self.kv.full_groups:
            self._summarize(group, np.zeros(1, np.int32), ops, ws)
            self.sketches.forget(group, 0)

    @property
    def n_heads(self) -> int:
        """KV heads of all layers that choose."""
        return max(1, sum(int(s.shape[1]) for s in self.sketches.layers if s is not None))

    def tell_heads(self) -> None:
        """Tell the device how many heads choose in each layer, which is known when a step was run or captured."""
        self.device.write(self.heads, self.arrays.heads_of(self.heads.shape[1]))


class Ahead:
    """What replies read that decode ahead of the host, a row each of steps of `width` rows that the device feeds.

    reads: what each reads, None: all; its sequence; its tally; the position of the first token that is fed so.
    """

    def __init__(
        self,
        recalling: Recalling,
        reads: Many[tuple[Part | None, Sequence, Tally, int]],
        width: int,
        ops: Ops,
        ws: Workspace,
    ) -> None:
        self._recalling, self._reads, self._width, self._ops, self._ws = recalling, reads, width, ops, ws
        self._counted = [0] * len(reads)
        self._known: list[tuple[int, float, float]] = [(0, 0.0, 0.0)] * len(reads)  # of the device, and counted
        self._alike: list[tuple[int, bool]] = []  # of the last step that was asked for
        self._in_part = self._told = False
        self._parts = bytearray()  # of each step that was asked for: whether a row read a part
        recalling.device.write(recalling.left_out[: len(reads)], np.zeros((len(reads), 2), np.float32))
        recalling.device.write(recalling.read[: len(reads)], np.zeros(len(reads), np.uint64))

    def next(self, n: int) -> bool:
        """Whether any row of step n = 0, 1 ... reads a part; feeds what it needs."""
        ends = [start + n for _, _, _, start in self._reads]
        alike = [  # steps that are alike are fed the same
            (end // KV_BLOCK_TOKENS, part is not None and end >= part.start)
            for (part, _, _, _), end in zip(self._reads, ends, strict=True)
        ]
        if alike != self._alike:
            self._alike = alike
            parts = (part and part.chooses(end) for (part, _, _, _), end in zip(self._reads, ends, strict=True))
            self._in_part = any(parts)
            if self._in_part:
                reads = [(s, part, end, 1) for (part, s, _, _), end in zip(self._reads, ends, strict=True)]
                self._recalling.feed(reads, self._width, self._ops, self._ws)
        assert n == len(self._parts)
        self._parts.append(self._in_part)
        return self._in_part

    def captured(self) -> None:
        """The step of `next` is captured, and about to be launched."""
        if not self._told:
            self._told = True
            self._recalling.tell_heads()

    def fed(self, i: int, n: int) -> None:
        """Count the first n tokens that were fed of a reply."""
        part, _, tally, start = self._reads[i]
        begin = self._counted[i]
        if part is None or n <= begin:
            return
        recalling, known, heads = self._recalling, self._known[i], self._recalling.n_heads
        self._counted[i] = n
        # Steps that read all come first, and are not counted by the device: whoever may choose once may do so later.
        whole = self._parts.count(False, begin, n)
        read = heads * sum(blocks_at(start + step) for step in range(begin, begin + whole))
        if begin + whole < n:
            self._known[i] = entry_of(recalling.ring, i, n - 1)
            read += self._known[i][0] - known[0]
        left_max, left_sum = self._known[i][1], self._known[i][2] - known[2]
        for one in (tally, recalling.totals):
            one.add(range(start + begin, start + n), part, read, heads, left_max, left_sum)
