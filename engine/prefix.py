"""Reuse of prefixes: what was computed for the first tokens of one request is there for the next.

A node of the tree is a *chunk* of tokens: its key is their ids, its place all tokens before. A sequence goes on only
where a chunk ends, which is where a prefill step could have ended with the same bits (PIECE_TOKENS of engine.ops), and
where what is left is computed as a prefill: what follows gives the same bits as without reuse. Of a chunk there are

    blocks      of the groups without a window, on the device, shared with the sequences that use them
    data        the same bytes in host memory, when the pool needed the blocks
    snapshot    recurrent states and the windows' blocks after its last token, in host memory, of some chunks only

and any of it may be in a file. A model with recurrent layers or windows can go on only after a chunk with a snapshot.
Blocks are given up when a pool runs short, host memory when its budget does, always the least recently used first, and
never a chunk before those that follow it. A *fork* is a prompt of any length, whole, that requests which are known to
come go on from (engine/families.py). No tensor is looked at here.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import CapacityError
from engine.kv import BlockPool, Fork, KVGroup, Sequence, Snapshot
from engine.ops import I32, KV_BLOCK_TOKENS, SMALL_TOKENS
from engine.prefix_files import PrefixFiles

SNAPSHOT_TOKENS = 4096  # between two snapshots in the middle of a long prompt
_log = logging.getLogger(__name__)

Data = tuple[NDArray[np.uint8], ...]  # the bytes of a chunk, an array a group without a window


class Cache(Protocol):
    """What the tree asks of `engine.kv.KVCache`."""

    groups: tuple[KVGroup, ...]
    pools: tuple[BlockPool, ...]
    shape: Any

    @property
    def full_groups(self) -> tuple[int, ...]:
        """The groups without a window."""

    def block_bytes(self, group: int) -> int:
        """Bytes of a block."""

    def read_blocks(self, group: int, blocks: Many[int], wait: bool = True) -> NDArray[np.uint8]:
        """Copy blocks to host memory; CapacityError: there is none."""

    def write_blocks(self, group: int, blocks: Many[int], data: NDArray[np.uint8]) -> None:
        """Copy them into others."""

    def hosted(self, arrays: Many[NDArray[Any]]) -> list[NDArray[Any]]:
        """Copy arrays to memory from which they can be copied back; CapacityError: there is none."""

    def save(self, sequence: Sequence, windows: bool = False, wait: bool = True) -> Snapshot:
        """Copy what full groups do not hold to host memory; CapacityError: there is none."""

    def snapshot_bytes(self, length: int) -> int:
        """Bytes of such a snapshot."""

    def begin(
        self, sequence: Sequence, length: int, shared: Many[Many[int]], snapshot: Snapshot | None, rest: Many[int] = ()
    ) -> None:
        """Let an empty sequence go on after a prefix."""

    def fork(self, sequence: Sequence) -> Fork:
        """What others need to go on after all of a sequence; CapacityError: there is no room for it."""

    def drop(self, fork: Fork) -> None:
        """Give that back."""


@dataclass(eq=False, slots=True)
class Node:
    """One chunk. length: tokens up to its end. name: a hash of them all, for files. used: the time of the last use."""

    parent: Node | None
    key: bytes
    name: str
    length: int
    children: dict[bytes, Node] = field(default_factory=dict)
    blocks: tuple[tuple[int, ...], ...] | None = None
    data: Data | None = None
    snapshot: Snapshot | None = None
    used: int = 0
    snapshot_used: int = 0

    @property
    def data_bytes(self) -> int:
        """Host memory of the data."""
        return 0 if self.data is None else sum(a.nbytes for a in self.data)

    @property
    def snapshot_bytes(self) -> int:
        """Host memory of the snapshot."""
        return 0 if self.snapshot is None else self.snapshot.nbytes

    def subtree(self) -> Iterator[Node]:
        """The node and all below it, those below first."""
        stack, found = [self], []
        while stack:
            found.append(stack.pop())
            stack.extend(found[-1].children.values())
        return reversed(found)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of a prompt after which it can go on: `length` tokens, the keys of their chunks."""

    length: int
    keys: tuple[bytes, ...]


class PrefixCache:
    """The tree, over the pools of `kv`.

    chunk_tokens: the least multiple of it that is whole blocks is a chunk. host_bytes: budget for data and snapshots;
    with 0 a model that needs snapshots reuses nothing that is not in files. files: None without `--cache-dir`.
    step_tokens: where prefill steps end by themselves, multiples of it; None: of chunk_tokens. cuts: whether one may
    end earlier for a snapshot, which costs a step more; not worth it where every step brings in experts.
    """

    def __init__(
        self,
        kv: Cache,
        chunk_tokens: int,
        host_bytes: int,
        files: PrefixFiles | None = None,
        step_tokens: int | None = None,
        cuts: bool = True,
    ) -> None:
        self._kv, self._files, self._host_budget = kv, files, host_bytes
        # Steps of an odd length end where a block does now and then.
        self.chunk_tokens = math.lcm(chunk_tokens, KV_BLOCK_TOKENS)
        self._step_tokens = step_tokens or chunk_tokens
        self._groups = kv.full_groups
        self._needs_snapshot = kv.shape is not None or len(self._groups) < len(kv.groups)
        self._cuts = cuts and self._needs_snapshot
        grid = math.lcm(self.chunk_tokens, self._step_tokens)  # where steps end and chunks do
        self._snapshot_tokens = -(-SNAPSHOT_TOKENS // grid) * grid
        self._n_blocks = self.chunk_tokens // KV_BLOCK_TOKENS
        self._data_bytes = [self._n_blocks * kv.block_bytes(group) for group in self._groups]
        self._root = Node(None, b"", "" if files is None else files.root, 0)
        self._pinned: dict[Node, None] = {}  # the path that is being attached, as far as it is on the device
        self._wanted: set[Node] = set()  # all of it that is in the tree
        self._forks: list[Fork] = []  # the oldest first
        self._begun: Fork | None = None  # that a sequence is being begun from
        self._clock = 0
        self.host_bytes = 0
        for group in self._groups:
            kv.pools[group].reclaim = self.reclaim

    # --- looking up -------------------------------------------------------------------------------

    def match(self, tokens: I32) -> Match:
        """Find the longest prefix of `tokens`, not all of them, after which a sequence can go on."""
        keys, length = [], 0
        node: Node | None = self._root
        name = self._root.name
        for key in self._keys(tokens[:-1]):
            name, node = self._name(name, key), None if node is None else node.children.get(key)
            if node is None and not self._in_files(name, "blocks"):
                break
            keys.append(key)
            end = len(keys) * self.chunk_tokens
            if not self._may_begin(end, len(tokens)):
                continue
            if not self._needs_snapshot or (node and node.snapshot) or self._in_files(name, "state"):
                length = end
        return Match(length, tuple(keys[: length // self.chunk_tokens]))

    def _may_begin(self, length: int, n_tokens: int) -> bool:
        """Whether the rest of a prompt, fed after `length` of its tokens, has the bits of one fed from the first on.

        A rest that is short is computed otherwise, unless it would have been a step of its own anyway.
        """
        return n_tokens - length > SMALL_TOKENS or (length < n_tokens and length % self._step_tokens == 0)

    def _last_begin(self, n_tokens: int) -> int:
        """The last place where a prompt may go on."""
        length = (n_tokens - 1) // self.chunk_tokens * self.chunk_tokens
        return length if self._may_begin(length, n_tokens) else max(0, length - self.chunk_tokens)

    def step_tokens(self, sequence: Sequence, tokens: I32) -> int:
        """How many tokens the next prefill step of a prompt has: less than it could, where a snapshot is wanted."""
        begin = sequence.length
        end = min(len(tokens), begin + self._step_tokens - begin % self._step_tokens)
        if self._cuts and (self._files or self._kv.snapshot_bytes(end) <= self._host_budget):
            wanted = (self._parting(tokens), self._last_begin(len(tokens)))
            end = min((n for n in wanted if begin < n < end and self._may_begin(n, len(tokens))), default=end)
        return end - begin

    def _parting(self, tokens: I32) -> int:
        """Where a prompt parts from others that are remembered; 0: nowhere."""
        node = self._root
        for key in self._keys(tokens):
            if key not in node.children:
                return node.length if node.children else 0
            node = node.children[key]
        return 0

    def attach(self, sequence: Sequence, match: Match) -> int:
        """Let an empty sequence begin after the matched prefix, or a shorter one where that turns out to be gone.

        Returns its length; with 0 the sequence is still empty.
        """
        self._pinned = {}
        self._wanted = set(self._path(match.keys))
        try:
            node = self._root
            for i, key in enumerate(match.keys):
                child = self._fetched(node, key)
                if child is None:
                    self._doubt(node.name, match.keys[i:])
                    break
                node = child
            path = list(self._pinned)
            while path:
                node = path[-1]
                snapshot = self._snapshot(node) if self._needs_snapshot else None
                if self._needs_snapshot and snapshot is None:
                    path.pop()
                    continue
                blocks = [[b for n in path for b in (n.blocks or ())[i]] for i in range(len(self._groups))]
                self._kv.begin(sequence, node.length, blocks, snapshot)
                self._touch(path, node)
                return node.length
        except CapacityError:  # the pool of a window is short
            pass
        finally:
            self._pinned, self._wanted = {}, set()
        return 0

    def _path(self, keys: Many[bytes]) -> Iterator[Node]:
        node: Node | None = self._root
        for key in keys:
            node = node.children.get(key) if node else None
            if node is None:
                return
            yield node

    def _free(self, node: Node) -> bool:
        """Whether a node may be given up now."""
        return node not in self._pinned and node not in self._wanted

    def _fetched(self, parent: Node, key: bytes) -> Node | None:
        """The node of a chunk with its blocks on the device, pinned, or None where they cannot be had."""
        node = parent.children.get(key)
        if node is not None and node.blocks is not None:
            self._pinned[node] = None
            return node
        name = self._name(parent.name, key)
        data: Many[NDArray[Any]] | None = None
        if node is not None:
            self._pinned[node] = None
            data = node.data
        elif self._files is not None:
            data = self._hosted(f"{name}.blocks", self._data_bytes)
        blocks = None if data is None else self._on_device(data)
        if blocks is None:
            if node is not None:
                del self._pinned[node]
            return None
        if node is None:
            node = parent.children[key] = Node(parent, key, name, parent.length + self.chunk_tokens)
            self._pinned[node] = None
        node.blocks = blocks
        self._drop_data(node)
        return node

    def _doubt(self, name: str, keys: Many[bytes]) -> None:
        """Let files be written again that lie behind one that is damaged: nobody has looked at them."""
        names = [name := self._name(name, key) for key in keys]
        if self._files is not None and not self._in_files(names[0], "blocks"):
            self._files.doubt(f"{name}.{kind}" for name in names for kind in ("blocks", "state"))

    def _on_device(self, data: Many[NDArray[np.uint8]]) -> tuple[tuple[int, ...], ...] | None:
        taken: list[list[int]] = [[] for _ in self._groups]
        try:
            for group, blocks in zip(self._groups, taken, strict=True):
                for _ in range(self._n_blocks):
                    blocks.append(self._kv.pools[group].take())
        except CapacityError:
            for group, blocks in zip(self._groups, taken, strict=True):
                self._kv.pools[group].give_back(blocks)
            return None
        for group, blocks, part in zip(self._groups, taken, data, strict=True):
            self._kv.write_blocks(group, blocks, part)
        return tuple(map(tuple, taken))

    def _snapshot(self, node: Node) -> Snapshot | None:
        if node.snapshot is not None or self._files is None:
            return node.snapshot
        arrays = self._hosted(f"{node.name}.state", [self._kv.snapshot_bytes(node.length)])
        if arrays is None:
            return None
        n_windows = len(self._kv.groups) - len(self._groups)
        cut = len(arrays) - n_windows
        snapshot = Snapshot(node.length, arrays[:cut], arrays[cut:])
        if self._make_room(snapshot.nbytes):
            self._keep(node, snapshot)
        return snapshot

    def _hosted(self, name: str, n_bytes: list[int]) -> list[NDArray[Any]] | None:
        """The arrays of a file, where they have these sizes, or all together the only one of these."""
        assert self._files is not None
        arrays = self._files.get(name)
        if arrays is None or n_bytes not in ([a.nbytes for a in arrays], [sum(a.nbytes for a in arrays)]):
            return None
        try:
            return self._kv.hosted(arrays)
        except CapacityError:
            self._too_little()
            return None

    # --- remembering ------------------------------------------------------------------------------

    def insert(self, sequence: Sequence, tokens: I32) -> None:
        """Remember the whole chunks of a sequence, whose blocks are shared from now on.

        tokens: those of the sequence, and those that are known to follow: they tell where a snapshot is worth its
        memory. Call it after every prefill step and at the end, but not between a kept step and its taking back.
        """
        assert len(tokens) >= sequence.length
        if not self._groups:  # blocks are what is counted; no model has windows and recurrent layers alone
            return
        path: list[Node] = []
        node = self._root
        for i, key in enumerate(self._keys(tokens[: sequence.length])):
            child = node.children.get(key)
            if child is None:
                length = node.length + self.chunk_tokens
                child = node.children[key] = Node(node, key, self._name(node.name, key), length)
            part = slice(i * self._n_blocks, (i + 1) * self._n_blocks)
            held = [sequence.groups[g].held[part] for g in self._groups]
            # Blocks of its own, of a sequence that read the chunk again: those would be kept twice, and for long, as
            # long as the chunks below are in use.
            if child.blocks is not None and child.blocks != tuple(map(tuple, held)) and self._alone(child):
                self._give_back(child)
            if child.blocks is None:
                for group, blocks in zip(self._groups, held, strict=True):
                    for block in blocks:
                        self._kv.pools[group].share(block)
                child.blocks = tuple(map(tuple, held))
                self._drop_data(child)
            path.append(child)
            node = child
        if not path:
            return
        self._touch(path, None)
        if sequence.length == node.length and self._wants_snapshot(node, tokens):
            self._take_snapshot(node, sequence)
        self._write_files(path)

    def _wants_snapshot(self, node: Node, tokens: I32) -> bool:
        """Where the next prompt is likely to go on: at the end of this one, where two part, and now and then."""
        if not self._needs_snapshot or node.snapshot is not None:
            return False
        if node.length >= self._last_begin(len(tokens)) or node.length % self._snapshot_tokens == 0:
            return True
        return bool(node.children) and next(self._keys(tokens[node.length :])) not in node.children

    def _take_snapshot(self, node: Node, sequence: Sequence) -> None:
        n_bytes = self._kv.snapshot_bytes(node.length)
        name = f"{node.name}.state"
        room = self._make_room(n_bytes)
        if room or (self._files is not None and self._files.wants(name, n_bytes)):
            try:  # a file's writer reads it; else nobody does but the device
                snapshot = self._kv.save(sequence, windows=True, wait=self._files is not None)
            except CapacityError:
                self._too_little()
                return
            if room:
                self._keep(node, snapshot)
            if self._files is not None:
                self._files.put(name, [*snapshot.states, *snapshot.windows])

    def _write_files(self, path: list[Node]) -> None:
        """Save what is not in files yet, as far as the writing keeps up."""
        if self._files is None:
            return
        for node in path:
            if node.snapshot is not None:
                self._files.put(f"{node.name}.state", [*node.snapshot.states, *node.snapshot.windows])
            if self._files.wants(f"{node.name}.blocks", sum(self._data_bytes)):
                try:
                    self._files.put(f"{node.name}.blocks", self._read(node, wait=True))
                except CapacityError:
                    return

    def _read(self, node: Node, wait: bool) -> Data:
        assert node.blocks is not None
        pairs = zip(self._groups, node.blocks, strict=True)
        return tuple(self._kv.read_blocks(group, blocks, wait) for group, blocks in pairs)

    def _keep(self, node: Node, snapshot: Snapshot) -> None:
        """Keep a snapshot for which there is room."""
        node.snapshot, node.snapshot_used = snapshot, self._clock
        self.host_bytes += node.snapshot_bytes

    def _touch(self, path: list[Node], resumed: Node | None) -> None:
        self._clock += 1
        for node in path:
            node.used = self._clock
        if resumed is not None:
            resumed.snapshot_used = self._clock
        if self._files is not None:
            states = [] if resumed is None else [f"{resumed.name}.state"]
            self._files.touch([*(f"{n.name}.blocks" for n in path), *states])

    def _keys(self, tokens: I32) -> Iterator[bytes]:
        """The ids of each whole chunk."""
        ids = np.ascontiguousarray(tokens, np.int32)
        for start in range(0, len(ids) - self.chunk_tokens + 1, self.chunk_tokens):
            yield ids[start : start + self.chunk_tokens].tobytes()

    def _name(self, before: str, key: bytes) -> str:
        """A hash of all tokens up to the end of a chunk and of what they were computed with."""
        return "" if self._files is None else hashlib.sha256(before.encode() + key).hexdigest()

    def _in_files(self, name: str, kind: str) -> bool:
        return self._files is not None and self._files.has(f"{name}.{kind}")

    # --- forks ------------------------------------------------------------------------------------

    def fork(self, sequence: Sequence) -> Fork | None:
        """What others go on from, after all tokens of a sequence; None where there is no room for it.

        It is held until `drop`, or until blocks are short and no chunk can be given up.
        """
        n_bytes = self._kv.snapshot_bytes(sequence.length) if self._needs_snapshot else 0
        if n_bytes and not self._make_room(n_bytes):
            return None
        try:
            fork = self._kv.fork(sequence)
        except CapacityError:
            return None
        self._forks.append(fork)
        self.host_bytes += fork.host_bytes
        return fork

    def begin(self, sequence: Sequence, fork: Fork) -> None:
        """Let an empty sequence go on from a fork that is not gone; CapacityError where a pool is short."""
        self._begun = fork
        try:
            self._kv.begin(sequence, fork.length, fork.shared, fork.snapshot, fork.rest)
        finally:
            self._begun = None

    def drop(self, fork: Fork) -> None:
        """Give up a fork, if that has not been done."""
        if not fork.gone:
            self._forks.remove(fork)
            self.host_bytes -= fork.host_bytes
            self._kv.drop(fork)

    # --- giving up --------------------------------------------------------------------------------

    def reclaim(self) -> bool:
        """Give up the least recently used chunk's blocks that no sequence uses, else a fork; False: there is none."""
        held = [n for n in self._root.subtree() if n.blocks is not None and self._free(n)]
        held.sort(key=lambda n: (n.used, -n.length))
        node = next(filter(self._idle, held), None)
        if node is None:
            # Of chunks that sequences use, those that they read for themselves above: the tree can do without.
            over = next((n for n in held if self._alone(n) and all(map(self._free, n.subtree()))), None)
            if over is not None:
                self._drop(over)
                return True
            fork = next((fork for fork in self._forks if fork is not self._begun), None)
            if fork is not None:
                self.drop(fork)
            return fork is not None
        if self._useful(node) and self._make_room(sum(self._data_bytes)) and self._useful(node):
            try:
                node.data = self._read(node, wait=False)
                self.host_bytes += node.data_bytes
                self._give_back(node)
                return True
            except CapacityError:
                self._too_little()
        self._drop(node)
        return True

    def _too_little(self) -> None:
        """The machine has less host memory than the budget: what is kept now is all that there will be."""
        if self._host_budget > self.host_bytes:
            _log.warning(
                "host memory is short: prefixes keep %.2f GiB of the %.2f that they may",
                self.host_bytes / 2**30, self._host_budget / 2**30, extra={"reason": "host_memory"},
            )  # fmt: skip
            self._host_budget = self.host_bytes

    def clear(self) -> None:
        """Give up everything but files; sequences keep what they use."""
        for node in list(self._root.children.values()):
            self._drop(node)
        for fork in list(self._forks):
            self.drop(fork)

    def close(self) -> None:
        """Give up everything and wait until files are written."""
        self.clear()
        if self._files is not None:
            self._files.close()

    def _idle(self, node: Node) -> bool:
        """Whether the tree alone holds the blocks, and none of a chunk that follows."""
        return all(child.blocks is None for child in node.children.values()) and self._alone(node)

    def _alone(self, node: Node) -> bool:
        """Whether no sequence holds the blocks."""
        assert node.blocks is not None
        pairs = zip(self._groups, node.blocks, strict=True)
        return all(self._kv.pools[group].holders(b) == 1 for group, blocks in pairs for b in blocks)

    def _useful(self, node: Node) -> bool:
        """Whether a sequence could go on after the chunk or one that follows, were they in host memory."""
        return not self._needs_snapshot or any(n.snapshot or self._in_files(n.name, "state") for n in node.subtree())

    def _make_room(self, n_bytes: int) -> bool:
        """Bring host memory n_bytes below its budget, the least recently used out first; False where it cannot be."""
        if n_bytes > self._host_budget:
            return False
        while self.host_bytes + n_bytes > self._host_budget:
            nodes = [n for n in self._root.subtree() if self._free(n)]
            snapshots = [(n.snapshot_used, -n.length, 0, n) for n in nodes if n.snapshot is not None]
            data = [(n.used, -n.length, 1, n) for n in nodes if n.data is not None and not n.children]
            _, _, is_data, node = min(snapshots + data, key=lambda entry: entry[:3], default=(0, 0, 0, self._root))
            if node is self._root:
                return False
            if is_data:
                self._drop(node)
                continue
            self._drop_snapshot(node)
            # What can only be reached through that snapshot is worth nothing any more.
            while node.parent is not None and node.blocks is None and self._free(node) and not self._useful(node):
                above = node.parent
                self._drop(node)
                node = above
        return True

    def _drop(self, node: Node) -> None:
        """Take a node and all below it out of the tree."""
        for below in node.subtree():
            self._give_back(below)
            self._drop_data(below)
            self._drop_snapshot(below)
        assert node.parent is not None
        del node.parent.children[node.key]

    def _give_back(self, node: Node) -> None:
        for group, blocks in zip(self._groups, node.blocks or (), strict=node.blocks is not None):
            self._kv.pools[group].give_back(list(blocks))
        node.blocks = None

    def _drop_data(self, node: Node) -> None:
        self.host_bytes -= node.data_bytes
        node.data = None

    def _drop_snapshot(self, node: Node) -> None:
        self.host_bytes -= node.snapshot_bytes
        node.snapshot = None

    @property
    def reclaimable_blocks(self) -> int:
        """Blocks, of all groups, that nobody but the tree holds and that `reclaim` would free."""
        return self.reclaimable_tokens // KV_BLOCK_TOKENS * len(self._groups)

    @property
    def reclaimable_tokens(self) -> int:
        """Positions that `reclaim` would make room for, one call after the other."""
        return self.chunk_tokens * sum(n.blocks is not None and self._alone(n) for n in self._root.subtree())

    def stats(self) -> dict[str, int]:
        """What is held: chunks on the device and in host memory, snapshots, bytes of host memory and of files.

        chunk_tokens: of a chunk. device_blocks: KV blocks of those on the device.
        """
        nodes = list(self._root.subtree())
        return {
            "chunk_tokens": self.chunk_tokens,
            "device_chunks": sum(n.blocks is not None for n in nodes),
            "device_blocks": sum(len(blocks) for n in nodes for blocks in n.blocks or ()),
            "host_chunks": sum(n.data is not None for n in nodes),
            "snapshots": sum(n.snapshot is not None for n in nodes),
            "host_bytes": self.host_bytes,
            "file_bytes": 0 if self._files is None else self._files.n_bytes,
        }
