"""The cache: keys and values in blocks of 64 tokens, recurrent states, and the copies of both in host memory.

Where contexts can be larger than the pool on the device, every block of a group without a window has a home in
page-locked host memory (docs/kv.md): one that is not in the pool is read there, or brought through a staging area for a
long step.
Layers whose caches have one shape and one reach form a group, with a pool and a block table of its own. A group with a
window keeps only the blocks that the window, and what may be taken back, can still reach. A DeltaNet layer keeps one
state a sequence in place of keys and values. What a model keeps says engine/memory/shape.py, who holds which block
engine/memory/blocks.py; here lie the tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from engine.ground.errors import CapacityError
from engine.memory.blocks import BlockPool, Blocks, Sequence
from engine.memory.host import HostTier
from engine.memory.places import MOST_LEAVE, Places
from engine.memory.shape import CacheShape, DeltaShape, KVGroup, group_blocks, group_bytes
from engine.memory.stores import (
    HOST,
    Rows,
    Store,
    arrays_of,
    columns_of,
    copy_rows,
    make_layer,
    make_store,
    parallel_runs,
    runs_of,
)
from engine.ops import I32, KV_BLOCK_TOKENS, SMALL_TOKENS, DeltaLayer, KVLayer
from engine.ops.device import Memory

Data = tuple[NDArray[np.uint8], ...]  # the bytes of some blocks, an array a group without a window


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


@dataclass(slots=True)
class _Staging:
    """Where blocks of a group that are at home come to, a layer after the other, to be read.

    absent: int32 on the device, how many and which; told: which, as the host knows it.
    """

    area: KVLayer
    absent: Any
    told: I32


class KVCache:
    """Keys, values and recurrent states on `device`, and the pools of their blocks.

    config: a model's, which says what each layer keeps (`kv_groups`, `kv_layer`, `delta`). n_tokens: positions that the
    cache holds. step_tokens: of the longest step. n_sequences: that are alive at a time, each with a recurrent state
    where the model has such. pool_tokens: positions of each group without a window that are on the device; None: all.
    layers[i] is what layer i reads, its own cache, that of the layer it
    shares with, or None; group_of[i] its group; delta[i] its recurrent state or None. host: where copies in host memory
    come from; until it is given a tier with a budget, nothing is kept there.
    """

    def __init__(
        self, device: Memory, config: CacheShape, n_tokens: int, kv_type: str, step_tokens: int,
        n_sequences: int = 8, pool_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self.device = device
        self.host = HostTier(device)
        self.groups: tuple[KVGroup, ...] = config.kv_groups
        self.kv_type = kv_type
        self._block_bytes = [group_bytes(g, 1, kv_type) for g in self.groups]
        n_blocks = [group_blocks(g, n_tokens, step_tokens, n_sequences) for g in self.groups]
        n_pool = [
            n if g.window or pool_tokens is None else min(n, -(-pool_tokens // KV_BLOCK_TOKENS))
            for g, n in zip(self.groups, n_blocks, strict=True)
        ]
        self.pools = tuple(
            BlockPool(n, places=None if pool == n else Places(n, pool))
            for n, pool in zip(n_blocks, n_pool, strict=True)
        )
        self.nbytes = sum(group_bytes(g, n, kv_type) for g, n in zip(self.groups, n_pool, strict=True))
        self.home_bytes = 0
        self.moves = 0  # counts what changes tables
        self.moved_bytes = {"home": 0, "back": 0}
        self._as_if_away = False
        self._alive: WeakSet[Sequence] = WeakSet()
        self._stores: dict[int, Store] = {}
        self._staging: dict[int, _Staging] = {}
        self._homes: dict[int, KVLayer] = {}
        own: dict[int, KVLayer] = {}
        group_of: dict[int, int] = {}
        for number, (group, n, pool) in enumerate(zip(self.groups, n_blocks, n_pool, strict=True)):
            places, area = self.pools[number].places, None
            if places is not None:
                self.home_bytes += group_bytes(group, n, kv_type)
                places.make_room = partial(self._make_room, number)
                if device.name != HOST:
                    staged = min(n, n - pool + MOST_LEAVE + 2 * n_sequences)
                    area = make_layer(device, group.n_head_kv, group.head_dim, staged, kv_type)
                    absent = device.upload(np.zeros(1 + staged, np.int32))
                    self._staging[number] = _Staging(area, absent, np.zeros(0, np.int32))
                    self.nbytes += group_bytes(group, staged, kv_type) // len(group.layers)
            for layer in group.layers:
                store = make_store(device, group.n_head_kv, group.head_dim, n, pool, kv_type)
                self._stores[layer], own[layer], group_of[layer] = store, store.layer, number
                if area is not None and store.layer.homes is not None:
                    self._homes[layer] = store.layer.homes
                    own[layer] = replace(store.layer, homes=area)
        self._columns = [columns_of(device, [self._stores[i] for i in group.layers]) for group in self.groups]
        reads = self._reads = [config.kv_layer(i) for i in range(config.n_layer)]
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
        sequence = Sequence(tuple(Blocks(pool, group.window) for pool, group in pairs), self.states)
        self._alive.add(sequence)
        return sequence

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

    @property
    def needs_snapshots(self) -> bool:
        """Whether a sequence can go on only where a snapshot is, since full blocks do not hold all that it needs."""
        return self.shape is not None or len(self.full_groups) < len(self.groups)

    def block_bytes(self, group: int) -> int:
        """Bytes of a block of a group."""
        return self._block_bytes[group]

    def read_blocks(self, group: int, blocks: Many[int], wait: bool = True) -> NDArray[np.uint8]:
        """A copy in host memory of a group's blocks, uint8 [n_bytes].

        wait: until it is there; else the device alone may read it, behind what is enqueued.
        """
        data = self.host.array(len(blocks) * self.block_bytes(group))
        self._read_into(data, group, blocks)
        if wait:
            self.device.synchronize()
        return data

    def lent(self, *n_bytes: int) -> list[NDArray[np.uint8]]:
        """Host memory that may be written at once, and that `write_blocks` and `restore` take; CapacityError."""
        data = [self.host.array(n) for n in n_bytes]
        self.device.synchronize()  # it may still read what was here before
        return data

    def _read_into(self, data: NDArray[np.uint8], group: int, blocks: Many[int]) -> None:
        """Enqueue copies of blocks: of each layer in turn, of each of its arrays, one behind the other."""
        runs = self._runs(group, blocks)
        if any(is_home for *_, is_home in runs):
            self.device.synchronize()  # they may be on their way there
        at = self.device.pointer(data)
        for rows, behind, column, first, n_bytes, is_home in self._parts(group, runs, at):
            if is_home:
                for a, b in zip(rows.addresses, column.addresses, strict=True):
                    ctypes.memmove(a + behind, b + first, n_bytes)
            else:
                copy_rows(self.device, rows, behind, column, first, n_bytes)

    def write_blocks(self, group: int, blocks: Many[int], data: NDArray[np.uint8]) -> None:
        """Copy what `read_blocks` gave, or what was written to `lent` memory, into as many blocks of the same group.

        In order with the device's other work: nobody waits, and the data need not have arrived.
        """
        assert data.nbytes == len(blocks) * self.block_bytes(group)
        at = self.device.pointer(data)
        for rows, behind, column, first, n_bytes, is_home in self._parts(group, self._runs(group, blocks), at):
            assert not is_home, "a block at home would be written"
            copy_rows(self.device, column, first, rows, behind, n_bytes)
        if (places := self.pools[group].places) is not None:
            places.seal(blocks)

    def _runs(self, group: int, blocks: Many[int]) -> list[tuple[int, int, bool]]:
        """Neighbors among some blocks: where the first lies, how many, and whether that is at home."""
        places, n_pool = self.pools[group].places, self.pools[group].n_blocks
        where = blocks
        if places is not None:
            where, n_pool = places.where[list(blocks)].tolist(), places.n_pool
        return [
            (first - n_pool if first >= n_pool else first, n, first >= n_pool) for first, n in runs_of(where, n_pool)
        ]

    def _parts(
        self, group: int, runs: Many[tuple[int, int, bool]], at: int
    ) -> Iterator[tuple[Rows, int, Rows, int, int, bool]]:
        """Each run in each array of a group's layers, beside a copy of the blocks at an address of host memory.

        Rows of the copy, how far behind their beginnings the run lies; rows of the arrays, how far there; bytes of
        each; whether they are at home.
        """
        columns, n_blocks = self._columns[group], sum(n for _, n, _ in runs)
        layer_bytes = n_blocks * sum(column.block_bytes for column in columns)
        rows, behind = Rows.apart(at, layer_bytes, len(self.groups[group].layers)), 0
        for column in columns:
            for first, n, is_home in runs:
                there, n_bytes = column.homes if is_home else column.pool, n * column.block_bytes
                assert there is not None
                yield rows, behind, there, first * column.block_bytes, n_bytes, is_home
                behind += n_bytes

    # --- the pool and homes -----------------------------------------------------------------------

    def arrays(self) -> list[Any]:
        """Everything on the device: pools, staging areas, recurrent states."""
        pools = [array for store in self._stores.values() for array in store.pool]
        areas = [array for staging in self._staging.values() for array in arrays_of(staging.area)]
        return pools + areas + self._state_arrays()

    def send_home(self) -> None:
        """Let all blocks leave their pools that have a home and are not written any more."""
        for group, pool in enumerate(self.pools):
            if pool.places is not None:
                self._make_room(group, pool.n_blocks)

    def held_in_pool(self, group: int) -> list[int]:
        """The blocks of a group that somebody holds and that are in its pool."""
        pool = self.pools[group]
        held = (b for b in range(pool.n_blocks) if pool.holders(b))
        return [b for b in held if pool.places is None or pool.places.where[b] < pool.places.n_pool]

    def _make_room(self, group: int, most: int | None = None, read_stay: bool = False) -> bool:
        """Let blocks of a group leave its pool; whether any did. read_stay: those that somebody reads stay."""
        places = self.pools[group].places
        assert places is not None
        n = self.pools[group].n_blocks
        written, read = np.zeros(n, bool), np.zeros(n, bool)
        for sequence in self._alive:
            blocks = sequence.groups[group].blocks()
            # What was written last may be taken back and written again.
            first = max(0, sequence.length - SMALL_TOKENS) // KV_BLOCK_TOKENS
            read[blocks], written[blocks[first:]] = True, True
            places.seal(blocks[:first])
        leaving = places.leaving(written | read if read_stay else written, read, most)
        if not len(leaving):
            return False
        new, had = places.send_home(leaving)
        self.moves += 1
        self.moved_bytes["home"] += self._move(group, had, new, to_home=True)
        return True

    def _move(self, group: int, places: I32, homes: I32, to_home: bool) -> int:
        """Enqueue copies between places of the pool and homes; their bytes."""
        for column in self._columns[group]:
            assert column.homes is not None
            for place, at, n in parallel_runs(places, homes):
                pair = (column.pool, place * column.block_bytes), (column.homes, at * column.block_bytes)
                to, source = reversed(pair) if to_home else pair
                copy_rows(self.device, *to, *source, n * column.block_bytes)
        return len(places) * self.block_bytes(group)

    def recall(self, sequences: Many[Sequence]) -> None:
        """Bring back what these are about to read, as far as there are places that nobody else reads.

        Between steps, and in order with them: nobody waits. Some places are left for what is written next.
        """
        for group, pool in enumerate(self.pools):
            places = pool.places
            if places is None:
                continue
            blocks = np.concatenate([s.groups[group].blocks() for s in sequences] or [np.zeros(0, np.int32)])
            places.use(blocks)
            away = np.unique(places.away(blocks))
            if not len(away):
                continue
            kept = MOST_LEAVE if places.n_pool > MOST_LEAVE * 8 else 1  # free places, for what is written next
            if (short := len(away) + kept - places.free_places) > 0:
                self._make_room(group, short, read_stay=True)
            away = away[: max(0, places.free_places - kept)]
            if len(away):
                places.bring_back(away)
                self.moves += 1
                self.moved_bytes["back"] += self._move(group, places.where[away], away, to_home=False)

    def gather(self, tables: tuple[I32, ...]) -> tuple[I32, ...]:
        """Tables int32 [n, width] that find in the staging area what is at home; tells the device what to bring there.

        What is at home so comes to the device once a layer and step, however many rows read it.
        """
        if not self._staging:
            return tables
        found = list(tables)
        for group, staging in self._staging.items():
            places = self.pools[group].places
            assert places is not None
            away, blocks = tables[group] >= places.n_pool, np.zeros(0, np.int32)
            if away.any():
                blocks, index = np.unique(tables[group][away] - np.int32(places.n_pool), return_inverse=True)
                found[group] = tables[group].copy()
                found[group][away] = index.astype(np.int32) + np.int32(places.n_pool)
            if not np.array_equal(blocks, staging.told):
                if len(blocks) >= len(staging.absent):
                    raise CapacityError(f"{len(blocks)} blocks at home for a staging area of {len(staging.absent) - 1}")
                staging.told = blocks.copy()
                self.device.write(staging.absent[: 1 + len(blocks)], np.array([len(blocks), *blocks], np.int32))
                self.moves += 1
        return tuple(found)

    def staging(self, layer: int) -> tuple[I32, KVLayer, KVLayer] | None:
        """What the op `stage` takes for a layer; None where nothing is staged, or nothing is away."""
        staging, homes = self._staging.get(self.group_of[layer]), self.homes(layer)
        if not self.stages or staging is None or homes is None:
            return None
        return staging.absent, homes, staging.area

    def homes(self, layer: int) -> KVLayer | None:
        """A layer's cache at home, where blocks of it are staged."""
        own = self._reads[layer]
        return None if own is None else self._homes.get(own)

    @property
    def stages(self) -> bool:
        """Whether the next step has to bring blocks to a staging area, of the sequences whose tables were told last."""
        return self._as_if_away or any(len(staging.told) for staging in self._staging.values())

    @contextlib.contextmanager
    def as_if_away(self) -> Iterator[None]:
        """Let steps be those for which blocks are away, for who counts or captures them; none need be."""
        self._as_if_away = True
        try:
            yield
        finally:
            self._as_if_away = False

    @property
    def most_staged(self) -> int:
        """The longest list of blocks that `stage` takes, its length with it; 0 where nothing is staged."""
        return max((len(staging.absent) for staging in self._staging.values()), default=0)

    @property
    def is_pooled(self) -> bool:
        """Whether blocks have homes."""
        return any(pool.places is not None for pool in self.pools)

    @property
    def blocks_away(self) -> int:
        """Blocks that somebody holds and that are at home, of all groups."""
        return sum(pool.places.n_away for pool in self.pools if pool.places is not None)

    def save(self, sequence: Sequence, windows: bool = False, wait: bool = True) -> Snapshot:
        """The recurrent state after the sequence's last token, in host memory.

        windows: and the blocks of groups with a window that the next token sees, so that another sequence can begin.
        wait: as for `read_blocks`.
        """
        states = [array[sequence.state] for array in self._state_arrays()]
        seen = [(i, b.seen(sequence.length)) for i, b in enumerate(sequence.groups) if windows and b.window]
        sizes = [int(a.nbytes) for a in states] + [len(blocks) * self.block_bytes(i) for i, blocks in seen]
        data = self.host.array(sum(sizes))
        parts = [data[end - n : end] for n, end in zip(sizes, accumulate(sizes), strict=True)]
        for part, state in zip(parts, states, strict=False):
            self.device.copy(self.device.pointer(part), self.device.pointer(state), part.nbytes)
        for part, (group, blocks) in zip(parts[len(states) :], seen, strict=True):
            self._read_into(part, group, blocks)
        if wait:
            self.device.synchronize()
        copies = [part.view(np.float32).reshape(a.shape) for part, a in zip(parts, states, strict=False)]
        return Snapshot(sequence.length, copies, parts[len(states) :])

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

    def hold(
        self, sequence: Sequence, length: int, shared: Many[Many[int]] = (),
        written: Many[Many[NDArray[np.uint8]]] = (),
    ) -> None:  # fmt: skip
        """Let an empty sequence hold `length` positions: `shared` blocks of the full groups first, then its own.

        written: of each full group, what `read_blocks` gave of some blocks after the other, from the first on.
        CapacityError, with an empty sequence, where a pool is short.
        """
        of_group = dict(zip(self.full_groups, shared, strict=bool(shared)))
        sequence.length = length  # what it shares may leave the pool while it takes its own
        try:
            for i, blocks in enumerate(sequence.groups):
                if blocks.window or not written:
                    blocks.begin(length, of_group.get(i, ()))
            for group, pieces in zip(self.full_groups, written, strict=False):
                blocks = sequence.groups[group]
                for piece in pieces:  # what is written may leave the pool for what follows
                    begin = len(blocks.held)
                    sequence.length = begin * KV_BLOCK_TOKENS
                    end = begin + piece.nbytes // self.block_bytes(group)
                    blocks.reserve(begin * KV_BLOCK_TOKENS, min(length, end * KV_BLOCK_TOKENS))
                    self.write_blocks(group, blocks.held[begin:], piece)
                sequence.length = length
        except CapacityError:
            for blocks in sequence.groups:
                blocks.release()
            sequence.length = 0
            raise

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
                if (places := self.pools[group].places) is not None:
                    places.seal([fork.rest[len(fork.shared) - 1]])
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
        ((there, _, at_home),) = self._runs(group, [to])
        ((here, _, is_home),) = self._runs(group, [source])
        assert not at_home, "a block at home would be written"
        for column in self._columns[group]:
            read, n_bytes = column.homes if is_home else column.pool, column.block_bytes
            assert read is not None
            copy_rows(self.device, column.pool, there * n_bytes, read, here * n_bytes, n_bytes)

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


def _state(device: Memory, shape: DeltaShape, n_states: int) -> DeltaLayer:
    return DeltaLayer(
        device.empty((n_states, shape.kernel - 1, shape.n_channels), np.float32),
        device.empty((n_states, shape.n_head_v, shape.d_v, shape.d_k), np.float32),
    )
