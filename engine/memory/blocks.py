"""Who holds which block of the cache: pools, tables of sequences, what windows give back. No tensor is looked at here.

Position and slot are separate things: a sequence's logical block b is any block of its group, which lies in any place
(engine/memory/places.py), and results do not depend on which. A table has -1 where a sequence holds no block, behind
its window and past its end: attention passes over these (docs/arithmetic.md), and no step is made that would have to
see one.
Full blocks can be shared (engine/memory/prefix.py); a block that is written has one holder.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from engine.ground.errors import CapacityError
from engine.memory.places import Places
from engine.ops import I32, KV_BLOCK_TOKENS, SMALL_TOKENS

# Positions behind a window that stay, so that a verified span can be taken back and steps enqueued ahead read them.
WINDOW_MARGIN_TOKENS = SMALL_TOKENS


class BlockPool:
    """Free blocks, and how many hold each of the others; one that is written has one holder.

    reclaim: called when no block is free; gives some back and returns True, or returns False. taken: told of
    every block that is taken, whose bytes are another's. places: where they lie; None: each in the place of its number.
    """

    def __init__(self, n_blocks: int, what: str = "blocks of the KV cache", places: Places | None = None) -> None:
        self.n_blocks, self.places = n_blocks, places
        self.reclaim: Callable[[], bool] | None = None
        self.taken: Callable[[int], None] | None = None
        self._what = what
        # A heap: the first ones are taken first, so that those of one piece are neighbors, which are copied at once.
        self._free = list(range(n_blocks))
        self._holders = [0] * n_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A free block; CapacityError when there is none and none can be reclaimed."""
        while not self._free:
            if self.reclaim is None or not self.reclaim():
                raise CapacityError(f"all {self.n_blocks} {self._what} are in use")
        if self.places is not None:
            self.places.enter(self._free[0])
        block = heappop(self._free)
        self._holders[block] = 1
        if self.taken is not None:
            self.taken(block)
        return block

    def share(self, block: int) -> None:
        """Add a holder to a block that has one, and that nobody writes any more."""
        assert self._holders[block] > 0
        self._holders[block] += 1
        if self.places is not None:
            self.places.seal([block])

    def holders(self, block: int) -> int:
        """How many hold a block."""
        return self._holders[block]

    def give_back(self, blocks: list[int]) -> None:
        """Take a holder from each block; it is free when it has none left."""
        for block in blocks:
            assert self._holders[block] > 0
            self._holders[block] -= 1
            if not self._holders[block]:
                heappush(self._free, block)
                if self.places is not None:
                    self.places.leave(block)


@dataclass(slots=True)
class Blocks:
    """What a sequence holds of one group: physical blocks by logical order, -1 where the window has passed.

    Only leading entries are -1: `passed` of them.
    """

    pool: BlockPool
    window: int = 0
    held: list[int] = field(default_factory=list)
    passed: int = 0  # leading blocks that were given back
    _table: I32 = field(default_factory=lambda: np.empty(16, np.int32), repr=False, compare=False)
    _known: int = field(default=0, repr=False, compare=False)  # entries of _table that are as held
    _known_passed: int = field(default=0, repr=False, compare=False)

    def table(self) -> I32:
        """Where the held blocks lie, int32 [n], as attention takes it; the next call may write it."""
        held, places = self.blocks(), self.pool.places
        return held if places is None else places.where[held]

    def blocks(self) -> I32:
        """`held` as int32 [n], brought up to date; the next call may write it."""
        n = len(self.held)
        if n > len(self._table):
            self._table = np.empty(2 * n, np.int32)
            self._known = 0
        if n > self._known:
            self._table[self._known : n] = self.held[self._known :]
        if self.passed > self._known_passed:
            self._table[self._known_passed : self.passed] = -1
        self._known, self._known_passed = n, self.passed
        return self._table[:n]

    def reserve(self, length: int, end: int) -> None:
        """Give back what no position from `length` on can see, then take the blocks of positions up to `end`."""
        if self.window:
            first = max(0, length + 1 - self.window - WINDOW_MARGIN_TOKENS) // KV_BLOCK_TOKENS
            while self.passed < min(first, len(self.held)):
                self.pool.give_back([self.held[self.passed]])
                self.held[self.passed] = -1
                self.passed += 1
        while len(self.held) * KV_BLOCK_TOKENS < end:
            self.held.append(self.pool.take())

    def begin(self, length: int, shared: Many[int]) -> None:
        """Hold the first `length` positions: `shared` full blocks, and own ones for what lies behind them.

        With a window: own blocks of what is seen, and none are shared.
        """
        assert not self.held
        if self.window:
            self.passed = max(0, length + 1 - self.window) // KV_BLOCK_TOKENS
            self.held = [-1] * self.passed
            self.reserve(length, length)
            return
        assert len(shared) <= length // KV_BLOCK_TOKENS
        for block in shared:
            self.pool.share(block)
        self.held = list(shared)
        self.reserve(length, length)

    def seen(self, length: int) -> list[int]:
        """The blocks of the first `length` positions that the next one sees."""
        first = max(0, length + 1 - self.window) // KV_BLOCK_TOKENS if self.window else 0
        return self.held[first : -(-length // KV_BLOCK_TOKENS)]

    def slots(self, positions: I32) -> I32:
        """Where positions lie that are written, int32 of their shape: place * 64 + offset."""
        table, offsets = self.table(), positions % np.int32(KV_BLOCK_TOKENS)
        places = table[positions // KV_BLOCK_TOKENS]
        assert self.pool.places is None or places.max(initial=0) < self.pool.places.n_pool, "a block at home is written"
        slots: I32 = places * np.int32(KV_BLOCK_TOKENS) + offsets
        return slots

    def cut(self, n_blocks: int) -> None:
        """Give back those taken after the first n_blocks."""
        self.pool.give_back(self.held[n_blocks:])
        del self.held[n_blocks:]
        self._known = min(self._known, n_blocks)

    def release(self) -> None:
        """Give every block back."""
        self.pool.give_back(self.held[self.passed :])
        self.held, self.passed = [], 0
        self._known = self._known_passed = 0


class Sequence:
    """The cached tokens of one request: `length` positions in the blocks of every group, and a recurrent state.

    state: the state slot that holds the state after `length` tokens, or None for a model without recurrent layers.
    exact: how many positions at the beginning have the bits of a prompt that was read; None: all.
    """

    def __init__(self, groups: tuple[Blocks, ...], states: BlockPool | None = None) -> None:
        self.groups = groups
        self.length = 0
        self.exact: int | None = None
        self._states = states
        self.state = None if states is None else states.take()
        self._before: int | None = None  # the slot of the state before the last step, if it was kept

    def reserve(self, n_tokens: int) -> None:
        """Take the blocks that `n_tokens` more positions need, all or none; the length stays.

        What windows no longer reach is given back, also with n_tokens 0.
        """
        before = [len(blocks.held) for blocks in self.groups]
        try:
            for blocks in self.groups:
                blocks.reserve(self.length, self.length + n_tokens)
        except CapacityError:
            for blocks, n in zip(self.groups, before, strict=True):
                blocks.cut(n)
            raise

    @property
    def reserved_tokens(self) -> int:
        """Positions that the blocks held now have room for."""
        return min(len(blocks.held) for blocks in self.groups) * KV_BLOCK_TOKENS if self.groups else 1 << 62

    def reaches(self, length: int) -> bool:
        """Whether the sequence can go on after its first `length` positions: all that the next one sees is there."""
        return length <= self.length and all(
            not blocks.window or blocks.passed * KV_BLOCK_TOKENS <= max(0, length + 1 - blocks.window)
            for blocks in self.groups
        )

    def extend(self, n_tokens: int) -> list[I32]:
        """Slots int32 [n_tokens] of the next positions, one array a group; takes blocks as needed.

        Every step is made of these, so none is made that would see a position without a block.
        """
        self.reserve(n_tokens)
        assert self.reaches(self.length), "a step would see positions whose blocks are not there"
        end, first = self.length + n_tokens, self.length // KV_BLOCK_TOKENS
        positions = np.arange(self.length, end, dtype=np.int32)
        slots: list[I32] = []
        for blocks in self.groups:
            written = blocks.held[first : -(-end // KV_BLOCK_TOKENS)]
            assert all(blocks.pool.holders(b) == 1 for b in written), "a shared block would be written"
            if (places := blocks.pool.places) is not None:
                written = places.where[written].tolist()
                assert max(written) < places.n_pool, "a block at home would be written"
            if len(written) == 1:  # by far most steps
                slots.append(positions + np.int32((written[0] - first) * KV_BLOCK_TOKENS))
            else:
                table = np.asarray(written, np.int32)
                within = positions % np.int32(KV_BLOCK_TOKENS)
                slots.append(table[positions // KV_BLOCK_TOKENS - first] * np.int32(KV_BLOCK_TOKENS) + within)
        self.length = end
        return slots

    def next_states(self, keep: bool) -> tuple[int, int]:
        """The state slots that a step reads and writes, 0 without recurrent layers.

        keep: the state before the step stays, for `take_back`, until the next step.
        """
        if self._states is None or self.state is None:
            return 0, 0
        self._forget()
        read = self.state
        if keep:
            self._before, self.state = read, self._states.take()
        return read, self.state

    def take_back(self, n_tokens: int, step_tokens: int) -> tuple[int, int] | None:
        """Drop the last n_tokens of a kept step of step_tokens.

        Returns the state slots between which the tokens of the step that stay are to be replayed, or None where there
        is nothing to replay.
        """
        assert 0 <= n_tokens <= step_tokens <= self.length
        self.length -= n_tokens
        if n_tokens == 0 or self._before is None or self.state is None:
            assert n_tokens == 0 or self._states is None, "the step was not kept"
            return None
        if n_tokens == step_tokens:
            self._before, self.state = self.state, self._before
            self._forget()
            return None
        return self._before, self.state

    def settle(self) -> None:
        """Nothing of the last step is taken back any more: gives back the state before it."""
        self._forget()

    def _forget(self) -> None:
        if self._before is not None and self._states is not None:
            self._states.give_back([self._before])
        self._before = None

    def release(self) -> None:
        """Give every block and the states back."""
        for blocks in self.groups:
            blocks.release()
        self._forget()
        if self._states is not None and self.state is not None:
            self._states.give_back([self.state])
        self.state, self.length, self.exact = None, 0, None


def block_table(sequences: list[Sequence], group: int, width: int) -> I32:
    """The tables of several sequences in one group, int32 [n_sequence, width], padded with -1."""
    table = np.full((len(sequences), width), -1, np.int32)
    for row, sequence in zip(table, sequences, strict=True):
        held = sequence.groups[group].table()
        row[: len(held)] = held
    return table
