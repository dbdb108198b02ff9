"""The cache: keys and values in blocks of 64 tokens, recurrent states, and the copies of both in host memory.

Layers whose caches have one shape and one reach form a group, with a pool and a block table of its own. A group with a
window keeps only the blocks that the window, and what may be taken back, can still reach. A DeltaNet layer keeps one
state a sequence in place of keys and values. Who holds which block is engine/memory/blocks.py; here lie the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.ground.config import KVType
from engine.ground.errors import CapacityError
from engine.memory.blocks import WINDOW_MARGIN_TOKENS, BlockPool, Blocks, Sequence
from engine.memory.host import HostTier
from engine.ops import KV_BLOCK_TOKENS, DeltaLayer, KVLayer
from engine.ops.device import Memory

Data = tuple[NDArray[np.uint8], ...]  # the bytes of some blocks, an array a group without a window


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a block table: `layers` own caches of one shape. window: positions a query sees; 0: all."""

    layers: tuple[int, ...]
    n_head_kv: int
    head_dim: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The recurrent layers: taps and channels of their convolution, heads and sizes of their state."""

    layers: tuple[int, ...]
    kernel: int
    n_channels: int
    n_head_v: int
    d_k: int
    d_v: int

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state in all layers."""
        return 4 * len(self.layers) * ((self.kernel - 1) * self.n_channels + self.n_head_v * self.d_v * self.d_k)


class CacheShape(Protocol):
    """What a cache reads of a model's configuration."""

    @property
    def n_layer(self) -> int:
        """Layers of the model."""

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The layers that own a cache, by shape and reach."""

    @property
    def delta(self) -> DeltaShape | None:
        """The recurrent layers, if there are any."""

    def kv_layer(self, layer: int) -> int | None:
        """The layer whose cache a layer reads; None in a recurrent one."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What full groups do not hold of the first `length` positions: recurrent states, two arrays a layer.

    windows: the bytes of the blocks that the next position sees, an array a group with a window; empty in a snapshot
    for a sequence that still has them.
    """

    length: int
    states: list[NDArray[np.float32]]
    windows: list[NDArray[np.uint8]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(a.nbytes for a in self.states) + sum(a.nbytes for a in self.windows)


@dataclass(slots=True, eq=False)
class Fork:
    """What other sequences go on from, after the `length` positions of one that has gone on by itself since.

    shared: the full blocks of each group without a window, which the fork holds, too. rest: of each, a block of the
    fork's own with the positions behind those; none where there are none. snapshot: all else, with windows. gone: it
    was dropped, and holds nothing. exact: as of `Sequence`.
    """

    length: int
    shared: list[list[int]]
    rest: list[int]
    snapshot: Snapshot | None
    gone: bool = False
    exact: int | None = None

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return 0 if self.snapshot is None else self.snapshot.nbytes


def group_blocks(group: KVGroup, n_tokens: int, step_tokens: int, n_sequences: int) -> int:
    """Blocks of a group's pool: of n_tokens positions, or of what windows keep of them if that is less.

    step_tokens: of the longest step; one sequence at a time is in such a step, the others decode.
    """
    everything = -(-n_tokens // KV_BLOCK_TOKENS)
    if not group.window:
        return everything
    kept = group.window + WINDOW_MARGIN_TOKENS
    # A reach of n positions touches one block more than it fills when it begins inside one.
    longest, decoding = (-(-(kept + step) // KV_BLOCK_TOKENS) + 1 for step in (step_tokens, 1))
    return min(everything, longest + (n_sequences - 1) * decoding)


def group_bytes(group: KVGroup, n_blocks: int, kv_type: KVType) -> int:
    """Bytes of a group's keys and values; the one formula, for the plan and for the allocation."""
    per_head = group.head_dim * 2 if kv_type == "f16" else group.head_dim + group.head_dim // 32 * 2
    return 2 * len(group.layers) * n_blocks * KV_BLOCK_TOKENS * group.n_head_kv * per_head


class KVCache:
    """Keys, values and recurrent states on `device`, and the pools of their blocks.

    config: a model's, which says what each layer keeps (`kv_groups`, `kv_layer`, `delta`). n_tokens: positions that the
    cache holds. step_tokens: of the longest step. n_sequences: that are alive at a time, each with a recurrent state
    where the model has such. layers[i] is what layer i reads, its own cache, that of the layer it
    shares with, or None; group_of[i] its group; delta[i] its recurrent state or None. host: where copies in host memory
    come from; until it is given a tier with a budget, nothing is kept there.
    """

    def __init__(
        self, device: Memory, config: CacheShape, n_tokens: int, kv_type: KVType, step_tokens: int, n_sequences: int = 8
    ) -> None:
        self.device = device
        self.host = HostTier(device)
        self.groups: tuple[KVGroup, ...] = config.kv_groups
        self.kv_type: KVType = kv_type
        n_blocks = [group_blocks(g, n_tokens, step_tokens, n_sequences) for g in self.groups]
        self.pools = tuple(BlockPool(n) for n in n_blocks)
        self.nbytes = sum(group_bytes(g, n, kv_type) for g, n in zip(self.groups, n_blocks, strict=True))
        own: dict[int, KVLayer] = {}
        group_of: dict[int, int] = {}
        for number, (group, n) in enumerate(zip(self.groups, n_blocks, strict=True)):
            for layer in group.layers:
                own[layer], group_of[layer] = _layer(device, group, n * KV_BLOCK_TOKENS, kv_type), number
        reads = [config.kv_layer(i) for i in range(config.n_layer)]
        self.layers = tuple(None if i is None else own[i] for i in reads)
        self.group_of = tuple(0 if i is None else group_of[i] for i in reads)
        self.shape: DeltaShape | None = config.delta
        self.states: BlockPool | None = None
        states: dict[int, DeltaLayer] = {}
        if self.shape is not None:
            n_states = max(n_sequences, 2)  # one alone can keep what it had before a step with a draft
            self.states = BlockPool(n_states, "recurrent states")
            self.nbytes += n_states * self.shape.state_bytes
            states = {layer: _state(device, self.shape, n_states) for layer in self.shape.layers}
        self.delta = tuple(states.get(i) for i in range(config.n_layer))

    def sequence(self) -> Sequence:
        """An empty sequence; CapacityError when no recurrent state is free."""
        pairs = zip(self.pools, self.groups, strict=True)
        return Sequence(tuple(Blocks(pool, group.window) for pool, group in pairs), self.states)

    @property
    def n_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(pool.n_blocks for pool in self.pools)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds, of all groups."""
        return sum(pool.free_blocks for pool in self.pools)

    @property
    def full_groups(self) -> tuple[int, ...]:
        """The groups without a window, whose blocks can be shared."""
        return tuple(i for i, group in enumerate(self.groups) if not group.window)

    def block_bytes(self, group: int) -> int:
        """Bytes of a block of a group."""
        return group_bytes(self.groups[group], 1, self.kv_type)

    def read_blocks(self, group: int, blocks: Many[int], wait: bool = True) -> NDArray[np.uint8]:
        """A copy in host memory of a group's blocks, uint8 [n_bytes].

        wait: until it is there; else the device alone may read it, behind what is enqueued.
        """
        return self._to_host(list(self._pieces(group, blocks)), wait)

    def hosted(self, arrays: Many[NDArray[Any]]) -> list[NDArray[Any]]:
        """Copies of arrays in memory that the device reads by itself, as `write_blocks` and `restore` take them."""
        data = self.host.array(sum(a.nbytes for a in arrays))
        self.device.synchronize()  # it may still read what was here before
        copies, at = [], 0
        for array in arrays:
            copy = data[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
            copy[...] = array
            copies.append(copy)
            at += array.nbytes
        return copies

    def _to_host(self, arrays: list[Any], wait: bool) -> NDArray[np.uint8]:
        """Contiguous arrays one behind the other."""
        data = self.host.array(sum(int(a.nbytes) for a in arrays))
        at = self.device.pointer(data)
        for array in arrays:
            self.device.copy(at, self.device.pointer(array), int(array.nbytes))
            at += int(array.nbytes)
        if wait:
            self.device.synchronize()
        return data

    def write_blocks(self, group: int, blocks: Many[int], data: NDArray[np.uint8]) -> None:
        """Copy what `read_blocks` gave, or of the same size `hosted`, into as many blocks of the same group.

        In order with the device's other work: nobody waits, and the data need not have arrived.
        """
        at = self.device.pointer(data)
        end = at + data.nbytes
        for piece in self._pieces(group, blocks):
            self.device.copy(self.device.pointer(piece), at, int(piece.nbytes))
            at += int(piece.nbytes)
        assert at == end

    def _pieces(self, group: int, blocks: Many[int]) -> Iterator[Any]:
        """Contiguous views of the blocks in every array of a group, neighbors in one."""
        cuts = [0, *(i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1] + 1), len(blocks)]
        runs = [(blocks[a] * KV_BLOCK_TOKENS, (b - a) * KV_BLOCK_TOKENS) for a, b in pairwise(cuts) if a < b]
        for layer in self.groups[group].layers:
            own = self.layers[layer]
            assert own is not None
            for array in (own.k, own.v, own.k_scale, own.v_scale):
                if array is not None:
                    yield from (array[first : first + n] for first, n in runs)

    def save(self, sequence: Sequence, windows: bool = False, wait: bool = True) -> Snapshot:
        """The recurrent state after the sequence's last token, in host memory.

        windows: and the blocks of groups with a window that the next token sees, so that another sequence can begin.
        wait: as for `read_blocks`.
        """
        arrays = [a[sequence.state] for a in self._state_arrays()]
        seen = [
            list(self._pieces(i, blocks.seen(sequence.length)))
            for i, blocks in enumerate(sequence.groups)
            if windows and blocks.window
        ]
        data = self._to_host([*arrays, *chain.from_iterable(seen)], wait)
        sizes = [int(a.nbytes) for a in arrays] + [sum(int(a.nbytes) for a in pieces) for pieces in seen]
        parts = [data[end - n : end] for n, end in zip(sizes, accumulate(sizes), strict=True)]
        states = [part.view(np.float32).reshape(a.shape) for part, a in zip(parts, arrays, strict=False)]
        return Snapshot(sequence.length, states, parts[len(arrays) :])

    def snapshot_bytes(self, length: int) -> int:
        """Bytes of a snapshot with windows."""
        total = 0 if self.shape is None else self.shape.state_bytes
        for group in self.groups:
            if group.window:
                n = -(-length // KV_BLOCK_TOKENS) - max(0, length + 1 - group.window) // KV_BLOCK_TOKENS
                total += group_bytes(group, n, self.kv_type)
        return total

    def begin(
        self, sequence: Sequence, length: int, shared: Many[Many[int]], snapshot: Snapshot | None, rest: Many[int] = ()
    ) -> None:
        """Let an empty sequence go on after `length` positions.

        shared: full blocks of the full groups, which the sequence then holds too. rest: a block of each with the
        positions behind them, which is copied. snapshot: all else, with windows; None for a model that has nothing
        else. CapacityError, with an empty sequence, where a pool is short.
        """
        assert all(len(blocks) == length // KV_BLOCK_TOKENS for blocks in shared)
        self.hold(sequence, length, shared)
        for group, block in zip(self.full_groups, rest, strict=bool(rest)):
            self._copy_block(group, block, sequence.groups[group].held[-1])
        if snapshot is not None:
            self.fill(sequence, snapshot)

    def hold(self, sequence: Sequence, length: int, shared: Many[Many[int]] = ()) -> None:
        """Let an empty sequence hold `length` positions: `shared` blocks of the full groups first, then its own.

        CapacityError, with an empty sequence, where a pool is short.
        """
        of_group = dict(zip(self.full_groups, shared, strict=bool(shared)))
        try:
            for i, blocks in enumerate(sequence.groups):
                blocks.begin(length, of_group.get(i, ()))
        except CapacityError:
            for blocks in sequence.groups:
                blocks.release()
            raise
        sequence.length = length

    def fill(self, sequence: Sequence, snapshot: Snapshot) -> None:
        """Copy a snapshot with windows to a sequence that holds as many positions."""
        windowed = [i for i, group in enumerate(self.groups) if group.window]
        for i, data in zip(windowed, snapshot.windows, strict=True):
            self.write_blocks(i, sequence.groups[i].seen(snapshot.length), data)
        self.restore(sequence, snapshot)

    def fork(self, sequence: Sequence) -> Fork:
        """What others need to go on after all that a sequence holds now, as `begin` takes it.

        In order with the device's other work; CapacityError where a pool or host memory is short.
        """
        n_full, length = sequence.length // KV_BLOCK_TOKENS, sequence.length
        fork = Fork(length, [], [], None, exact=sequence.exact)
        try:
            if length % KV_BLOCK_TOKENS:
                for group in self.full_groups:
                    fork.rest.append(self.pools[group].take())
            if self.shape is not None or len(self.full_groups) < len(self.groups):
                fork.snapshot = self.save(sequence, windows=True, wait=False)
        except CapacityError:
            self.drop(fork)
            raise
        for group in self.full_groups:
            fork.shared.append(sequence.groups[group].held[:n_full])
            for block in fork.shared[-1]:
                self.pools[group].share(block)
            if fork.rest:
                self._copy_block(group, sequence.groups[group].held[n_full], fork.rest[len(fork.shared) - 1])
        return fork

    def drop(self, fork: Fork) -> None:
        """Give back what a fork holds, once."""
        if not fork.gone:
            for group, blocks in zip(self.full_groups, fork.shared, strict=False):
                self.pools[group].give_back(blocks)
            for group, block in zip(self.full_groups, fork.rest, strict=False):
                self.pools[group].give_back([block])
        fork.gone, fork.shared, fork.rest, fork.snapshot = True, [], [], None

    def _copy_block(self, group: int, source: int, to: int) -> None:
        for there, here in zip(self._pieces(group, [to]), self._pieces(group, [source]), strict=True):
            self.device.copy(self.device.pointer(there), self.device.pointer(here), int(here.nbytes))

    def restore(self, sequence: Sequence, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this sequence, or of one whose first positions its blocks hold."""
        if not sequence.reaches(snapshot.length):
            raise CapacityError(
                f"position {snapshot.length} of a sequence of {sequence.length} is out of reach: blocks that its "
                "window covers were given back"
            )
        for array, values in zip(self._state_arrays(), snapshot.states, strict=True):
            state = array[sequence.state]
            assert values.shape == state.shape and values.dtype == state.dtype
            self.device.copy(self.device.pointer(state), self.device.pointer(values), values.nbytes)
        sequence.length = snapshot.length

    def _state_arrays(self) -> list[Any]:
        return [array for layer in self.delta if layer is not None for array in (layer.conv, layer.state)]


def _layer(device: Memory, group: KVGroup, n_slots: int, kv_type: KVType) -> KVLayer:
    shape = (n_slots, group.n_head_kv, group.head_dim)
    if kv_type == "f16":
        return KVLayer(device.empty(shape, np.float16), device.empty(shape, np.float16))
    scales = (*shape[:2], group.head_dim // 32)
    k, v = (device.empty(shape, np.int8) for _ in range(2))
    return KVLayer(k, v, device.empty(scales, np.float16), device.empty(scales, np.float16))


def _state(device: Memory, shape: DeltaShape, n_states: int) -> DeltaLayer:
    return DeltaLayer(
        device.empty((n_states, shape.kernel - 1, shape.n_channels), np.float32),
        device.empty((n_states, shape.n_head_v, shape.d_v, shape.d_k), np.float32),
    )
