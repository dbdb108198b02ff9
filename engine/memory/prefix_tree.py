"""The tree of prefixes: which chunks of tokens are remembered, where a prompt may go on, what is given up first.

A node is a *chunk* of tokens: its key is their ids, its place all tokens before. A sequence goes on only where a chunk
ends, which is where a prefill step could have ended with the same bits (PIECE_TOKENS of engine.ops), and where what is
left is computed as a prefill. What a chunk holds is opaque here: engine/memory/prefix.py moves the bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from engine.formats import prefix_file
from engine.memory.blocks import BlockPool
from engine.memory.host import Claim
from engine.memory.kv import Data, Snapshot
from engine.memory.order import Oldest
from engine.ops import I32, KV_BLOCK_TOKENS, SHORT_ROWS, SMALL_TOKENS

SNAPSHOT_TOKENS = 4096  # between two snapshots in the middle of a long prompt


def short_rows(begin: int, end: int, n_tokens: int, chunk_tokens: int) -> int:
    """How many of the positions begin .. end of a prompt of n_tokens are *short rows*, always the last of these.

    They are what follows the last multiple of chunk_tokens, if that is no more than SHORT_ROWS. A prompt goes on after
    such multiples alone, so where it is begun, and how it is cut, changes none of them; all of the rows that are read
    are short where there are no more than that.
    """
    first = n_tokens // chunk_tokens * chunk_tokens
    return max(0, min(end, n_tokens) - max(begin, first)) if n_tokens - first <= SHORT_ROWS else 0


@dataclass(eq=False, slots=True)
class Node:
    """One chunk. length: tokens up to its end. name: a hash of them all, for files. used: the time of the last use.

    exact: what is held of it has the bits of a prompt that was read; else some of its tokens, or before, were decoded.
    """

    parent: Node | None
    key: bytes
    name: str
    length: int
    exact: bool = True
    children: dict[bytes, Node] = field(default_factory=dict)
    blocks: tuple[tuple[int, ...], ...] | None = None  # of each group without a window
    data: Data | None = None  # the same bytes in host memory, since the pool needed the blocks once
    snapshot: Snapshot | None = None
    used: int = 0
    data_claim: Claim | None = None
    snapshot_claim: Claim | None = None
    reached: Node | None = None  # one that had a snapshot, of those that follow or this
    gone: bool = False  # out of the tree

    @property
    def data_bytes(self) -> int:
        """Host memory of the data."""
        return 0 if self.data is None else sum(a.nbytes for a in self.data)

    @property
    def snapshot_bytes(self) -> int:
        """Host memory of the snapshot."""
        return 0 if self.snapshot is None else self.snapshot.nbytes

    @property
    def tokens(self) -> I32:
        """The ids of all tokens up to its end."""
        keys, node = [], self
        while node.parent is not None:
            keys.append(node.key)
            node = node.parent
        return np.frombuffer(b"".join(reversed(keys)), np.int32)

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


class PrefixTree:
    """Chunks, and the choice among them.

    chunk_tokens: the least multiple of it that is whole blocks is a chunk. step_tokens: where prefill steps end by
    themselves, multiples of it. pools: of the groups without a window, of which nodes hold blocks. needs_snapshot: a
    model can go on only after a chunk with a snapshot. root: the name of no tokens, "" where there are no files. saved:
    whether there is a file of a name.
    """

    def __init__(
        self,
        chunk_tokens: int,
        step_tokens: int,
        pools: Many[BlockPool],
        needs_snapshot: bool,
        root: str = "",
        saved: Callable[[str], bool] = lambda _: False,
    ) -> None:
        # Steps of an odd length end where a block does now and then.
        self.chunk_tokens = math.lcm(chunk_tokens, KV_BLOCK_TOKENS)
        self.chunk_blocks = self.chunk_tokens // KV_BLOCK_TOKENS
        self.step_tokens = step_tokens
        self.needs_snapshot = needs_snapshot
        grid = math.lcm(self.chunk_tokens, step_tokens)  # where steps end and chunks do
        self._snapshot_tokens = -(-SNAPSHOT_TOKENS // grid) * grid
        self._pools, self._saved = pools, saved
        self.root = Node(None, b"", root, 0)
        self._in_use: set[Node] = set()
        self._held = Oldest[Node](lambda node: (node.used, -node.length))  # that have blocks, but for those
        self._aside = list[Node]()  # that are in use

    # --- where a prompt goes on -------------------------------------------------------------------

    def keys(self, tokens: I32) -> Iterator[bytes]:
        """The ids of each whole chunk."""
        ids = np.ascontiguousarray(tokens, np.int32)
        for start in range(0, len(ids) - self.chunk_tokens + 1, self.chunk_tokens):
            yield ids[start : start + self.chunk_tokens].tobytes()

    def name(self, before: str, key: bytes) -> str:
        """A hash of all tokens up to the end of a chunk and of what they were computed with."""
        return prefix_file.following(before, key) if self.root.name else ""

    def path(self, keys: Many[bytes]) -> Iterator[Node]:
        """The nodes of chunks that follow one another, as far as they are there."""
        node: Node | None = self.root
        for key in keys:
            node = node.children.get(key) if node else None
            if node is None:
                return
            yield node

    def child(self, node: Node, key: bytes) -> Node:
        """The node of the chunk that follows, which is made where it is not there."""
        if key not in node.children:
            node.children[key] = Node(node, key, self.name(node.name, key), node.length + self.chunk_tokens)
        return node.children[key]

    def match(self, tokens: I32, exact: bool = False) -> Match:
        """Find the longest prefix of `tokens`, not all of them, after which a sequence can go on.

        exact: it ends before the first chunk that is not exact.
        """
        keys, length = [], 0
        node: Node | None = self.root
        name = self.root.name
        for key in self.keys(tokens[:-1]):
            name, node = self.name(name, key), None if node is None else node.children.get(key)
            if not self._saved(f"{name}.blocks") if node is None else exact and not node.exact:
                break
            keys.append(key)
            end = len(keys) * self.chunk_tokens
            if not self.may_begin(end, len(tokens)):
                continue
            if not self.needs_snapshot or (node and node.snapshot) or self._saved(f"{name}.state"):
                length = end
        return Match(length, tuple(keys[: length // self.chunk_tokens]))

    def may_begin(self, length: int, n_tokens: int) -> bool:
        """Whether the rest of a prompt, fed after `length` of its tokens, has the bits of one fed from the first on.

        A rest that is short is computed otherwise, unless it would have been a step of its own anyway.
        """
        return n_tokens - length > SMALL_TOKENS or (length < n_tokens and length % self.step_tokens == 0)

    def last_begin(self, n_tokens: int) -> int:
        """The last place where a prompt may go on."""
        length = (n_tokens - 1) // self.chunk_tokens * self.chunk_tokens
        return length if self.may_begin(length, n_tokens) else max(0, length - self.chunk_tokens)

    def step_end(self, begin: int, tokens: I32, cuts: bool) -> int:
        """Where the prefill step of a prompt that begins at `begin` ends; cuts: earlier, too, for a snapshot."""
        end = min(len(tokens), begin + self.step_tokens - begin % self.step_tokens)
        if not cuts:
            return end
        wanted = (self._parting(tokens), self.last_begin(len(tokens)))
        return min((n for n in wanted if begin < n < end and self.may_begin(n, len(tokens))), default=end)

    def cut(self, begin: int, limit: int, n_tokens: int) -> int:
        """The last place up to `limit` where a step of a prompt may end with no bit changed; `begin`: there is none."""
        end = limit // self.chunk_tokens * self.chunk_tokens
        while end > begin and not self.may_begin(end, n_tokens):
            end -= self.chunk_tokens
        return max(begin, end)

    def _parting(self, tokens: I32) -> int:
        """Where a prompt parts from others that are remembered; 0: nowhere."""
        node = self.root
        for key in self.keys(tokens):
            if key not in node.children:
                return node.length if node.children else 0
            node = node.children[key]
        return 0

    def wants_snapshot(self, node: Node, tokens: I32, more: bool = False) -> bool:
        """Where the next prompt is likely to go on: at the end of this one, where two part, and now and then.

        more: that is, behind all of these tokens.
        """
        if not self.needs_snapshot or node.snapshot is not None:
            return False
        last = len(tokens) if more else self.last_begin(len(tokens))
        if node.length >= last or node.length % self._snapshot_tokens == 0:
            return True
        return bool(node.children) and next(self.keys(tokens[node.length :])) not in node.children

    def inexact(self) -> Node | None:
        """The last of the chunks that are not exact and were used last."""
        return max((n for n in self.nodes() if not n.exact), key=lambda n: (n.used, n.length), default=None)

    # --- what is given up -------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """All chunks, those below first."""
        return (node for node in self.root.subtree() if node is not self.root)

    @property
    def in_use(self) -> set[Node]:
        """Nodes that a sequence is about to begin after."""
        return self._in_use

    @in_use.setter
    def in_use(self, nodes: set[Node]) -> None:
        self._in_use = nodes
        for node in filter(lambda node: node.blocks is not None, self._aside):
            self._held.add(node)
        self._aside.clear()

    def free(self, node: Node) -> bool:
        """Whether a node may be given up now."""
        return node not in self.in_use

    def alone(self, node: Node) -> bool:
        """Whether blocks are free once the node has given up its own.

        Its last ones are: chunks after one parent may begin with the same blocks, where forks went on from within a
        chunk, but they end with different tokens. Who holds a last block has the whole chunk.
        """
        assert node.blocks is not None
        return all(pool.holders(of[-1]) == 1 for pool, of in zip(self._pools, node.blocks, strict=True))

    def useful(self, node: Node) -> bool:
        """Whether a sequence could go on after the chunk or one that follows, were they in host memory."""
        if not self.needs_snapshot:
            return True
        # Chunks are asked about from the last one on, so what is looked for is mostly known of those that follow.
        known = (node.reached, node, *(child.reached for child in node.children.values()))
        found = (n for n in known if n is not None and self._begins_after(n))
        node.reached = next(found, None) or next(filter(self._begins_after, node.subtree()), None)
        return node.reached is not None

    def _begins_after(self, node: Node) -> bool:
        """Whether there is a snapshot behind a chunk."""
        return not node.gone and (node.snapshot is not None or self._saved(f"{node.name}.state"))

    def hold(self, node: Node, blocks: tuple[tuple[int, ...], ...]) -> None:
        """Let a node have blocks."""
        node.blocks = blocks
        self._held.add(node)

    def let_go(self, node: Node) -> None:
        """Let a node have none any more."""
        node.blocks = None
        self._held.remove(node)

    def least_used(self) -> tuple[Node, bool] | None:
        """The chunk whose blocks are given up next, and whether its bytes may be kept; None: blocks of none can be.

        That is the least recently used one that no sequence uses, and none of those that follow. Else, of chunks that
        sequences use, one that they have read for themselves above: the tree can do without it and all below.
        """
        for node in self._held:
            if not self.free(node):  # as long as a sequence begins, one look at it is enough
                self._held.remove(node)
                self._aside.append(node)
            elif all(c.blocks is None for c in node.children.values()) and self.alone(node):
                return node, self.useful(node)
        over = next((n for n in self._held if self.alone(n) and all(map(self.free, n.subtree()))), None)
        return None if over is None else (over, False)

    def blocks(self, group: int) -> Counter[int]:
        """The blocks of a group without a window, and how many chunks begin with each."""
        return Counter(b for n in self.root.subtree() if n.blocks is not None for b in n.blocks[group])

    @property
    def reclaimable_tokens(self) -> int:
        """Positions of blocks that are free once all chunks have given up theirs; every group has as many."""
        chunks = self.blocks(0)
        ended = [n.blocks for n in self.root.subtree() if n.blocks is not None and self.alone(n)]
        free = {b for blocks in ended for b in blocks[0] if self._pools[0].holders(b) == chunks[b]}
        return KV_BLOCK_TOKENS * len(free)
