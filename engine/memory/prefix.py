"""Reuse of prefixes: what was computed for the first tokens of one request is there for the next.

A sequence goes on after a chunk of the tree (engine/memory/prefix_tree.py), in steps of which what follows has the same
bits as without reuse. Of a chunk there are

    blocks      of the groups without a window, on the device, shared with the sequences that use them
    data        the same bytes in host memory, since the pool needed the blocks; when they are back, as long as there is
                room, so that they can leave again without a copy
    snapshot    recurrent states and the windows' blocks after its last token, in host memory, of some chunks only

and any of it may be in a file. A model with recurrent layers or windows can go on only after a chunk with a snapshot.
Where decoded tokens have other bits than a prompt's, chunks with them are *inexact* until they have been read again.
Blocks are given up when a pool runs short, host memory when its budget does (engine/memory/host.py), always the least
recently used first, and never a chunk before those that follow it; forks (engine/memory/forks.py) go last. No tensor
is looked at here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.formats.prefix_file import Place
from engine.ground.errors import CapacityError, SparkError
from engine.memory.blocks import Sequence
from engine.memory.forks import Forks
from engine.memory.host import Claim
from engine.memory.kv import Data, KVCache, Snapshot
from engine.memory.prefix_files import ROOM_S, PrefixFiles
from engine.memory.prefix_tree import Match, Node, PrefixTree, short_rows
from engine.ops import I32, KV_BLOCK_TOKENS
from engine.ops.cuda.failures import translated

BACK_CHUNKS = 32  # that come back, for which others leave at a time
LAST_S = 4.0  # how long an engine that ends saves what was missed

_log = logging.getLogger(__name__)


class PrefixCache:
    """The tree, over the pools of `kv` and its host memory.

    chunk_tokens: the least multiple of it that is whole blocks is a chunk. With no budget in `kv.host` a model that
    needs snapshots reuses nothing that is not in files. files: None without `--cache-dir`. step_tokens: where prefill
    steps end by themselves, multiples of it; None: of chunk_tokens. cuts: whether one may end earlier for a snapshot,
    which costs a step more; not worth it where every step brings in experts. decoded_differ: whether decoded tokens
    have other bits than those of a prompt. exact: then, chunks with them are not gone on after. has_short: whether the
    last rows of a prompt are short ones.
    """

    def __init__(
        self,
        kv: KVCache,
        chunk_tokens: int,
        files: PrefixFiles | None = None,
        step_tokens: int | None = None,
        cuts: bool = True,
        decoded_differ: bool = False,
        exact: bool = False,
        has_short: bool = False,
    ) -> None:
        self.has_short = has_short
        self._kv, self._host, self._files = kv, kv.host, files
        self._groups = kv.full_groups
        self._needs_snapshot = kv.needs_snapshots
        self._cuts = cuts and self._needs_snapshot
        self.decoded_differ, self._exact = decoded_differ, exact
        self._inexact_tokens = 0
        pools = [kv.pools[group] for group in self._groups]
        self.tree = PrefixTree(
            chunk_tokens, step_tokens or chunk_tokens, pools, self._needs_snapshot,
            *(() if files is None else (files.root, files.has)),
        )  # fmt: skip
        self.chunk_tokens = self.tree.chunk_tokens
        self._n_blocks = self.tree.chunk_blocks
        self._data_bytes = [self._n_blocks * kv.block_bytes(group) for group in self._groups]
        self.forks = Forks(kv)
        for pool in pools:
            pool.reclaim = self.reclaim

    # --- looking up -------------------------------------------------------------------------------

    def match(self, tokens: I32, exact: bool = False) -> Match:
        """Find the longest prefix of `tokens`, not all of them, after which a sequence can go on.

        exact: it ends before the first chunk that is not exact, whatever the cache was told.
        """
        return self.tree.match(tokens, exact or self._exact)

    def step_tokens(self, sequence: Sequence, tokens: I32, most: int | None = None) -> int:
        """How many tokens the next prefill step of a prompt has: less than it could, where a snapshot is wanted.

        most: that there may be; 0 where the step cannot be cut to that with no bit changed.
        """
        begin = sequence.length
        end = self.tree.step_end(begin, tokens, cuts=False)
        if self._cuts and (self._files or self._kv.snapshot_bytes(end) <= self._host.budget_bytes):
            end = self.tree.step_end(begin, tokens, cuts=True)
        if most is not None and end - begin > most:
            end = self.tree.cut(begin, begin + most, len(tokens))
        return end - begin

    def short_rows(self, begin: int, end: int, n_tokens: int) -> int:
        """How many of the positions begin .. end of a prompt are short rows, the last of these."""
        return short_rows(begin, end, n_tokens, self.chunk_tokens) if self.has_short else 0

    def last_begin(self, n_tokens: int) -> int:
        """The last place where a prompt of so many tokens may go on after what is remembered."""
        return self.tree.last_begin(n_tokens)

    def attach(self, sequence: Sequence, match: Match, again: bool = False) -> int:
        """Let an empty sequence begin after the matched prefix, or a shorter one where that turns out to be gone.

        Returns its length; with 0 the sequence is still empty. again: as of `insert`.
        """
        self.tree.in_use = set(self.tree.path(match.keys))
        path: list[Node] = []  # as far as it is on the device
        missing = len(match.keys) - sum(node.blocks is not None for node in self.tree.in_use)
        try:
            if self._files is not None:
                self._files.expect(self._in_files(match), self._kv.lent)
            node = self.tree.root
            for i, key in enumerate(match.keys):
                held = node.children.get(key)
                if held is None or held.blocks is None:
                    self._make_room(missing)
                    missing -= 1
                child = self._fetched(node, key)
                if child is None:
                    self._doubt(node.name, match.keys[i:])
                    break
                path.append(node := child)
            while path:
                node = path[-1]
                snapshot = self._snapshot(node) if self._needs_snapshot else None
                if self._needs_snapshot and snapshot is None:
                    path.pop()
                    continue
                blocks = [[b for n in path for b in (n.blocks or ())[i]] for i in range(len(self._groups))]
                self._kv.begin(sequence, node.length, blocks, snapshot)
                odd = next((n for n in path if not n.exact), None)
                if odd is not None:
                    sequence.exact = odd.length - self.chunk_tokens
                    self._inexact_tokens += node.length - sequence.exact
                if not again:
                    self._touch(path, node)
                return node.length
        except CapacityError:  # the pool of a window is short
            pass
        finally:
            self.tree.in_use = set()
            if self._files is not None:
                self._files.expect_nothing()
        return 0

    def _in_files(self, match: Match) -> Iterator[tuple[str, list[int]]]:
        """What of a match is in files alone, with the sizes: the snapshot, which takes longest, and the chunks."""
        node: Node | None = self.tree.root
        name, found = self.tree.root.name, []
        for key in match.keys:
            name = self.tree.name(name, key)
            node = None if node is None else node.children.get(key)
            if node is None or (node.blocks is None and node.data is None):
                found.append((f"{name}.blocks", self._data_bytes))
        if self._needs_snapshot and match.keys and (node is None or node.snapshot is None):
            yield f"{name}.state", [self._kv.snapshot_bytes(match.length)]
        yield from found

    def _make_room(self, n_chunks: int) -> None:
        """Have blocks free for the next of some chunks that come back, as long as what leaves for it is kept.

        If one left for each that comes, chunks would have blocks of several, and by and by no two would be neighbors.
        """

        def free() -> int:
            return min(self._kv.pools[group].free_blocks for group in self._groups)

        if free() >= self._n_blocks:
            return
        room = self._host.room_bytes // max(1, sum(self._data_bytes))
        n = min(n_chunks, room, BACK_CHUNKS) * self._n_blocks
        while free() < n and self._reclaim_chunk():
            pass

    def _fetched(self, parent: Node, key: bytes) -> Node | None:
        """The node of a chunk with its blocks on the device, in use, or None where they cannot be had."""
        node = parent.children.get(key)
        if node is not None and node.blocks is not None:
            return node
        data: Many[NDArray[Any]] | None = None
        if node is not None:
            data = node.data
        elif self._files is not None:
            data = self._hosted(f"{self.tree.name(parent.name, key)}.blocks", self._data_bytes)
        blocks = None if data is None else self._on_device(data)
        if blocks is None:
            return None
        node = self.tree.child(parent, key)
        self.tree.in_use.add(node)
        self.tree.hold(node, blocks)
        if node.data_claim is not None:
            self._host.spare(node.data_claim, True)
        return node

    def _doubt(self, name: str, keys: Many[bytes]) -> None:
        """Let files be written again that lie behind one that is damaged: nobody has looked at them."""
        names = [name := self.tree.name(name, key) for key in keys]
        if self._files is not None and not self._files.has(f"{names[0]}.blocks"):
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
        claim = self._claim_snapshot(node, snapshot.nbytes)
        if claim is not None:
            node.snapshot, node.snapshot_claim = snapshot, claim
        return snapshot

    def _claim_snapshot(self, node: Node, n_bytes: int) -> Claim | None:
        return self._host.claim("snapshots", n_bytes, partial(self._give_up_snapshot, node), node.length)

    def _hosted(self, name: str, n_bytes: list[int]) -> list[NDArray[Any]] | None:
        """The arrays of a file, where they have these sizes, or all together the only one of these."""
        assert self._files is not None
        try:
            return self._files.get(name, n_bytes, self._kv.lent)
        except CapacityError:
            self._host.short()
            return None

    # --- remembering ------------------------------------------------------------------------------

    def insert(self, sequence: Sequence, tokens: I32, again: bool = False, most: int | None = None) -> None:
        """Remember the whole chunks of a sequence, whose blocks are shared from now on.

        tokens: those of the sequence, and those that are known to follow: they tell where a snapshot is worth its
        memory. Call it after every prefill step and at the end, but not between a kept step and its taking back.
        What is exact takes the place of what is not, and never the other way round. again: nobody asked for this, so it
        is no use of the chunks, and whoever comes goes on behind all of `tokens`. most: of the first so many positions
        alone; None: of all.
        """
        assert len(tokens) >= sequence.length
        if not self._groups:  # blocks are what is counted; no model has windows and recurrent layers alone
            return
        path: list[Node] = []
        node = self.tree.root
        n_read = sequence.length if sequence.exact is None else sequence.exact
        n_exact = n_read if self.decoded_differ else sequence.length
        for i, key in enumerate(self.tree.keys(tokens[: sequence.length][:most])):
            child = self.tree.child(node, key)
            node = child
            path.append(child)
            exact = child.length <= n_exact
            held_any = child.blocks is not None or child.data is not None
            if held_any and child.exact and not exact:
                continue
            if exact and not child.exact:
                self._forget(child)
            child.exact = exact
            part = slice(i * self._n_blocks, (i + 1) * self._n_blocks)
            held = [sequence.groups[g].held[part] for g in self._groups]
            # Blocks of its own, of a sequence that read the chunk again: those would be kept twice, and for long, as
            # long as the chunks below are in use.
            if child.blocks is not None and child.blocks != tuple(map(tuple, held)) and self.tree.alone(child):
                self._give_back(child)
            if child.blocks is None:
                for group, blocks in zip(self._groups, held, strict=True):
                    for block in blocks:
                        self._kv.pools[group].share(block)
                self.tree.hold(child, tuple(map(tuple, held)))
                self._drop_data(child)
        if not path:
            return
        if not again:
            self._touch(path, None)
        # Decoding leaves none, wherever it ends: where snapshots lie follows from the tokens.
        if sequence.length == node.length == n_read and self.tree.wants_snapshot(node, tokens, again):
            self._take_snapshot(node, sequence)
        self._write_files(path)

    def _take_snapshot(self, node: Node, sequence: Sequence) -> None:
        n_bytes = self._kv.snapshot_bytes(node.length)
        name = f"{node.name}.state"
        claim = self._claim_snapshot(node, n_bytes)
        if claim is None and (self._files is None or not self._files.wants(name, n_bytes)):
            return
        try:  # a file's writer reads it; else nobody does but the device
            snapshot = self._kv.save(sequence, windows=True, wait=self._files is not None)
        except CapacityError:
            if claim is not None:
                self._host.drop(claim)
            self._host.short()
            return
        if claim is not None:
            node.snapshot, node.snapshot_claim = snapshot, claim
        if self._files is not None:
            self._files.put(name, [*snapshot.states, *snapshot.windows])

    def _write_files(self, path: list[Node]) -> None:
        """Save what is not in files yet, as far as the writing keeps up; the rest is missed."""
        if self._files is None:
            return
        for node in path:
            if node.exact and node.blocks is not None:
                self._save_state(node)
                try:
                    self._save_blocks(node)
                except CapacityError:
                    return

    def _save_state(self, node: Node) -> bool:
        """Have a snapshot written; whether it is now."""
        assert self._files is not None
        name = f"{node.name}.state"
        if node.snapshot is None or not self._files.wants(name, node.snapshot.nbytes):
            return False
        self._files.put(name, [*node.snapshot.states, *node.snapshot.windows])
        return True

    def _save_blocks(self, node: Node) -> bool:
        """The same of a chunk; CapacityError where there is no host memory for a copy."""
        assert self._files is not None and node.parent is not None
        name = f"{node.name}.blocks"
        if not self._files.wants(name, sum(self._data_bytes)):
            return False
        if node.data is not None:
            self._kv.device.synchronize()  # what was moved out may be on its way
        data = self._read(node, wait=True) if node.data is None else node.data
        self._files.put(name, data, Place(node.parent.name, node.key))
        return True

    @property
    def missed_s(self) -> float | None:
        """Seconds after which `save_missed` may save something that the writing has not kept up with; None: all is."""
        return None if self._files is None else self._files.missed_s

    def save_missed(self) -> bool:
        """Have something written that was missed, if there is room for it to wait; whether there was.

        Of what was used last the chunks, the first ones first, then the snapshots, the last ones first: a prompt goes
        on after whole chunks from the beginning, where there is a snapshot. CapacityError: no host memory for a copy.
        """
        if self._files is None:
            return False
        missed = self._files.missed
        held = [n for n in self.tree.nodes() if n.exact and (n.blocks is not None or n.data is not None)]
        found = [(-n.used, False, n.length, n) for n in held if f"{n.name}.blocks" in missed]
        found += [(-n.used, True, -n.length, n) for n in held if n.snapshot and f"{n.name}.state" in missed]
        self._files.forget_missed(but=[f"{n.name}.{'state' if is_state else 'blocks'}" for _, is_state, _, n in found])
        for _, is_state, _, node in sorted(found, key=lambda each: each[:3]):
            if self._save_state(node) if is_state else self._save_blocks(node):
                return True
        return False

    def forget_missed(self) -> None:
        """Save nothing of what was missed."""
        if self._files is not None:
            self._files.forget_missed()

    def _read(self, node: Node, wait: bool) -> Data:
        assert node.blocks is not None
        pairs = zip(self._groups, node.blocks, strict=True)
        return tuple(self._kv.read_blocks(group, blocks, wait) for group, blocks in pairs)

    def _touch(self, path: list[Node], resumed: Node | None) -> None:
        now = self._host.tick()
        for node in path:
            node.used = now
        if resumed is not None and resumed.snapshot_claim is not None:
            resumed.snapshot_claim.used = now
        if self._files is not None:
            states = [] if resumed is None else [f"{resumed.name}.state"]
            self._files.touch([*(f"{n.name}.blocks" for n in path), *states])

    # --- giving up --------------------------------------------------------------------------------

    def reclaim(self) -> bool:
        """Give up the least recently used chunk's blocks that no sequence uses, else a fork; False: there is none."""
        return self._reclaim_chunk() is not None or self.forks.give_up()

    def _reclaim_chunk(self) -> bool | None:
        """Give up the blocks of a chunk; whether its bytes were kept. None: there is none."""
        found = self.tree.least_used()
        if found is None:
            return None
        node, worth_keeping = found
        is_kept = worth_keeping and self._move_out(node)
        if not is_kept:
            self._drop(node)
        return is_kept

    def _move_out(self, node: Node) -> bool:
        """Move a chunk from the device to host memory; False where there is no room for it."""
        if node.data_claim is not None:  # it came from there
            node.data_claim.used = node.used
            self._host.spare(node.data_claim, False)
            self._give_back(node)
            return True
        claim = self._host.claim(
            "chunks", sum(self._data_bytes), partial(self._give_up_data, node), node.length, node.used
        )
        if claim is None:
            return False
        if not self.tree.useful(node):  # for lack of a snapshot that went to make that room
            self._host.drop(claim)
            return False
        try:
            node.data = self._read(node, wait=False)
        except CapacityError:
            self._host.drop(claim)
            self._host.short()
            return False
        node.data_claim = claim
        self._give_back(node)
        return True

    def _give_up_data(self, node: Node) -> bool:
        if node.blocks is not None:  # it is a copy
            self._drop_data(node)
            return True
        if not self.tree.free(node) or node.children:
            return False
        self._drop(node)
        return True

    def _give_up_snapshot(self, node: Node) -> bool:
        if not self.tree.free(node):
            return False
        self._drop_snapshot(node)
        # What can only be reached through that snapshot is worth nothing any more.
        while node.parent is not None and node.blocks is None and self.tree.free(node) and not self.tree.useful(node):
            above = node.parent
            self._drop(node)
            node = above
        return True

    def inexact(self) -> I32 | None:
        """The tokens of chunks to be read again, of those used last, and all before; None: there are none."""
        node = self.tree.inexact()
        return None if node is None else node.tokens

    def clear(self) -> None:
        """Give up everything but files; sequences keep what they use."""
        for node in list(self.tree.root.children.values()):
            self._drop(node)
        self.forks.clear()

    def close(self) -> None:
        """Give up everything and wait until files are written, for some seconds also what was missed."""
        if self._files is not None:
            self._save_last()
        self.clear()
        if self._files is not None:
            self._files.close()

    def _save_last(self) -> None:
        """Save what was missed, as far as there is time; nothing while no file can be written."""
        until_s = time.monotonic() + LAST_S
        try:
            while (wait_s := self.missed_s) is not None and wait_s <= ROOM_S and time.monotonic() < until_s:
                with translated("reading the cache"):
                    saved = self.save_missed()
                if not saved:
                    time.sleep(ROOM_S)
        except SparkError as error:  # the device is lost, or memory is short
            _log.info("what was missed is not saved: %s", error)

    def _drop(self, node: Node) -> None:
        """Take a node and all below it out of the tree."""
        for below in node.subtree():
            self._forget(below)
            below.gone = True
        assert node.parent is not None
        del node.parent.children[node.key]

    def _give_back(self, node: Node) -> None:
        for group, blocks in zip(self._groups, node.blocks or (), strict=node.blocks is not None):
            self._kv.pools[group].give_back(list(blocks))
        self.tree.let_go(node)

    def _forget(self, node: Node) -> None:
        """Give up what is held of a node that stays."""
        self._give_back(node)
        self._drop_data(node)
        self._drop_snapshot(node)

    def _drop_data(self, node: Node) -> None:
        if node.data_claim is not None:
            self._host.drop(node.data_claim)
        node.data = node.data_claim = None

    def _drop_snapshot(self, node: Node) -> None:
        if node.snapshot_claim is not None:
            self._host.drop(node.snapshot_claim)
        node.snapshot = node.snapshot_claim = None

    # --- what there is ----------------------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        """Host memory that is claimed, by whomever."""
        return self._host.n_bytes

    @property
    def reclaimable_blocks(self) -> int:
        """Blocks, of all groups, that nobody but the tree holds and that `reclaim` would free."""
        return self.reclaimable_tokens // KV_BLOCK_TOKENS * len(self._groups)

    @property
    def reclaimable_tokens(self) -> int:
        """Positions that `reclaim` would make room for, one call after the other."""
        return self.tree.reclaimable_tokens

    def stats(self) -> dict[str, int]:
        """What is held: chunks on the device and in host memory alone, snapshots, bytes of host memory and of files.

        chunk_tokens: of a chunk. device_blocks: KV blocks of those on the device. inexact_chunks: to be read again;
        inexact_tokens: reused of such chunks since the start. missed_files: to be written when there is time.
        """
        nodes = list(self.tree.nodes())
        return {
            "chunk_tokens": self.chunk_tokens,
            "device_chunks": sum(n.blocks is not None for n in nodes),
            "device_blocks": sum(len(self.tree.blocks(group)) for group in range(len(self._groups))),
            "host_chunks": sum(n.data is not None and n.blocks is None for n in nodes),
            "snapshots": sum(n.snapshot is not None for n in nodes),
            "inexact_chunks": sum(not n.exact for n in nodes),
            "inexact_tokens": self._inexact_tokens,
            "host_bytes": self.host_bytes,
            "file_bytes": 0 if self._files is None else self._files.n_bytes,
            "missed_files": 0 if self._files is None else len(self._files.missed),
        }
