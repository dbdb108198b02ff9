"""Who holds which block: none has two owners unawares, none is lost, windows give back what nobody sees, no arrays."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.ground.errors import CapacityError
from engine.memory.blocks import WINDOW_MARGIN_TOKENS, BlockPool, Blocks, Sequence, block_table

WINDOW, N_BLOCKS, N_STATES = 70, 14, 4


class Holding(RuleBasedStateMachine):
    """Sequences of a full group and one with a window: grow, are taken back, share, are released, as pools run dry."""

    def __init__(self) -> None:
        super().__init__()
        self.full, self.narrow = BlockPool(N_BLOCKS), BlockPool(N_BLOCKS // 2)
        self.states = BlockPool(N_STATES, "recurrent states")
        self.alive: list[Sequence] = []

    @rule()
    def begin(self) -> None:
        free = self.states.free_blocks
        try:
            self.alive.append(Sequence((Blocks(self.full), Blocks(self.narrow, WINDOW)), self.states))
        except CapacityError:
            assert not free

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 9), n=st.integers(1, 150), keep=st.booleans(), back=st.integers(0, WINDOW_MARGIN_TOKENS))
    def step(self, which: int, n: int, keep: bool, back: int) -> None:
        """Of n tokens, of which some are taken back where the step is kept."""
        sequence = self.alive[which % len(self.alive)]
        length = sequence.length
        held = [[*blocks.held] for blocks in sequence.groups]
        keep = keep and n <= WINDOW_MARGIN_TOKENS
        if keep and not self.states.free_blocks and sequence._before is None:
            return
        try:
            slots = sequence.extend(n)
        except CapacityError:
            assert sequence.length == length
            for blocks, before in zip(sequence.groups, held, strict=True):
                assert len(blocks.held) == len(before)
                assert all(now in (-1, then) for now, then in zip(blocks.held, before, strict=True))
            return
        for blocks, of_group in zip(sequence.groups, slots, strict=True):
            assert [blocks.held[p // 64] * 64 + p % 64 for p in range(length, length + n)] == of_group.tolist()
        sequence.next_states(keep)
        if keep:
            sequence.take_back(min(back, n), n)
            assert sequence.length == length + n - min(back, n)

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 9), n=st.integers(0, 9))
    def share(self, which: int, n: int) -> None:
        """Another sequence goes on from the full blocks of one."""
        first = self.alive[which % len(self.alive)]
        length = min(n, first.length // 64) * 64
        if not self.states.free_blocks:
            return
        second = Sequence((Blocks(self.full), Blocks(self.narrow, WINDOW)), self.states)
        try:
            for blocks, of_first in zip(second.groups, first.groups, strict=True):
                blocks.begin(length, () if blocks.window else of_first.held[: length // 64])
            second.length = length
        except CapacityError:
            second.release()
            return
        self.alive.append(second)

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 9))
    def end(self, which: int) -> None:
        self.alive.pop(which % len(self.alive)).release()

    @invariant()
    def blocks_have_the_holders_they_count(self) -> None:
        for g, pool in enumerate((self.full, self.narrow)):
            held = Counter(b for s in self.alive for b in s.groups[g].held if b >= 0)
            assert [pool.holders(b) for b in range(pool.n_blocks)] == [held[b] for b in range(pool.n_blocks)]
            assert pool.free_blocks == pool.n_blocks - len(held)
            if g:
                assert all(n == 1 for n in held.values())
        states = [s.state for s in self.alive] + [s._before for s in self.alive if s._before is not None]
        assert len(set(states)) == len(states) == N_STATES - self.states.free_blocks

    @invariant()
    def what_the_next_step_sees_is_there(self) -> None:
        for sequence in self.alive:
            assert sequence.reaches(sequence.length)
            for blocks in sequence.groups:
                begin = max(0, sequence.length + 1 - blocks.window) if blocks.window else 0
                assert min(blocks.held[begin // 64 :], default=0) >= 0
                assert set(blocks.held[: blocks.passed]) <= {-1} and -1 not in blocks.held[blocks.passed :]

    def teardown(self) -> None:
        for sequence in self.alive:
            sequence.release()
        for pool in (self.full, self.narrow, self.states):
            assert pool.free_blocks == pool.n_blocks


Holding.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHolding = Holding.TestCase


def test_a_window_keeps_what_its_queries_and_a_take_back_see() -> None:
    blocks = Blocks(BlockPool(9), window=70)
    blocks.reserve(0, 300)
    blocks.reserve(300, 301)
    first = 300 + 1 - 70 - WINDOW_MARGIN_TOKENS
    assert blocks.held[: first // 64] == [-1] * (first // 64) and min(blocks.held[first // 64 :]) >= 0
    blocks.release()
    assert blocks.pool.free_blocks == 9


def test_a_full_pool_says_so() -> None:
    with pytest.raises(CapacityError, match="all 2 blocks"):
        Sequence((Blocks(BlockPool(2)),)).extend(129)
    assert np.array_equal(Sequence((Blocks(BlockPool(2)),)).extend(128)[0], np.arange(128))


def test_a_shared_block_is_free_when_nobody_holds_it() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.share(block)
    pool.give_back([block])
    assert pool.holders(block) == 1 and pool.free_blocks == 1
    pool.give_back([block])
    assert pool.holders(block) == 0 and pool.free_blocks == 2
    with pytest.raises(AssertionError):
        pool.give_back([block])
    with pytest.raises(AssertionError):
        pool.share(block)


def test_an_empty_pool_asks_for_blocks_back() -> None:
    pool = BlockPool(2)
    held = [pool.take(), pool.take()]
    pool.reclaim = lambda: bool(held) and pool.give_back([held.pop()]) is None
    assert pool.take() == 1 and pool.take() == 0
    with pytest.raises(CapacityError):
        pool.take()


def test_a_step_that_would_see_a_missing_block_is_not_made() -> None:
    sequence = Sequence((Blocks(BlockPool(9), window=70),))
    sequence.extend(300)
    sequence.extend(1)
    sequence.length = 150  # as if more had been taken back than the margin allows
    with pytest.raises(AssertionError, match="not there"):
        sequence.extend(1)


# --- bounds, position by position -----------------------------------------------------------------


def seen_blocks(length: int, window: int) -> list[int]:
    """Logical blocks of the positions, of the first `length`, that the next one sees: itself and window - 1 before."""
    return sorted({p // 64 for p in range(length) if not window or p > length - window})


@pytest.mark.parametrize("length", [*range(3), 63, 64, 65, *range(97, 104), *range(130, 136), *range(160, 168), 293])
def test_which_blocks_a_window_keeps(length: int) -> None:
    """Those that a position from length - WINDOW_MARGIN_TOKENS on sees; of a new sequence those that the next sees."""
    grown, begun = Blocks(BlockPool(9), WINDOW), Blocks(BlockPool(9), WINDOW)
    grown.reserve(0, length)
    grown.reserve(length, length)
    kept = [b for b, block in enumerate(grown.held) if block >= 0]
    assert len(grown.held) == -(-length // 64) and grown.passed == len(grown.held) - len(kept)
    needed = {b for n in range(max(0, length - WINDOW_MARGIN_TOKENS), length + 1) for b in seen_blocks(n, WINDOW)}
    assert kept == sorted(needed)
    begun.begin(length, ())
    seen = seen_blocks(length, WINDOW)
    assert [b for b, block in enumerate(begun.held) if block >= 0] == seen and len(begun.held) == len(grown.held)
    assert begun.passed == len(begun.held) - len(seen) and begun.pool.free_blocks == 9 - len(seen)
    for blocks in (grown, begun):
        assert blocks.seen(length) == [blocks.held[b] for b in seen]
        held = blocks.pool.n_blocks - blocks.pool.free_blocks
        blocks.release()
        assert (blocks.held, blocks.passed) == ([], 0) and blocks.pool.free_blocks == held + 9 - held


@pytest.mark.parametrize(("length", "n_shared"), [(0, 0), (64, 1), (130, 2), (130, 1), (191, 2), (192, 3)])
def test_a_sequence_begins_with_shared_blocks_and_own_ones(length: int, n_shared: int) -> None:
    pool = BlockPool(9)
    shared = [pool.take() for _ in range(n_shared)]
    blocks = Blocks(pool)
    blocks.begin(length, shared)
    assert blocks.held[:n_shared] == shared and len(blocks.held) == -(-length // 64) and not blocks.passed
    assert [pool.holders(b) for b in blocks.held] == [2] * n_shared + [1] * (len(blocks.held) - n_shared)
    assert blocks.seen(length) == blocks.held
    assert blocks.seen(max(0, length - 64)) == blocks.held[: max(0, -(-length // 64) - 1)]


def test_a_sequence_reaches_back_to_where_its_windows_are_whole() -> None:
    sequence = Sequence((Blocks(BlockPool(9)), Blocks(BlockPool(9), WINDOW), Blocks(BlockPool(9), 200)))
    for n in (290, 1, 60):
        sequence.extend(n)
        for length in range(sequence.length + 3):
            there = length <= sequence.length and all(
                b >= blocks.passed
                for blocks in sequence.groups
                for b in [*seen_blocks(length, blocks.window), length // 64]  # the next one's own is there, too
            )
            assert sequence.reaches(length) == there, length


def test_how_many_tokens_the_blocks_have_room_for() -> None:
    sequence = Sequence((Blocks(BlockPool(9)), Blocks(BlockPool(9), WINDOW)))
    assert sequence.reserved_tokens == 0
    sequence.reserve(65)
    assert sequence.reserved_tokens == 128
    sequence.groups[0].reserve(0, 200)
    assert sequence.reserved_tokens == 128
    assert Sequence((), BlockPool(2)).reserved_tokens > 1 << 40  # states alone take any length


@pytest.mark.parametrize(("length", "n", "block", "refused"), [
    (100, 20, 0, False), (100, 20, 1, True), (100, 29, 2, True), (100, 28, 2, False), (128, 1, 1, False),
    (128, 1, 2, True), (60, 200, 3, True), (60, 200, 0, True),
])  # fmt: skip
def test_a_shared_block_is_not_written(length: int, n: int, block: int, refused: bool) -> None:
    sequence = Sequence((Blocks(BlockPool(9)),))
    sequence.extend(length)
    sequence.reserve(300 - length)
    sequence.groups[0].pool.share(sequence.groups[0].held[block])
    if refused:
        with pytest.raises(AssertionError, match="shared block"):
            sequence.extend(n)
    else:
        sequence.extend(n)


def test_the_states_of_kept_and_other_steps() -> None:
    states = BlockPool(3)
    sequence = Sequence((), states)
    first = sequence.state
    assert sequence.next_states(keep=False) == (first, first) and states.free_blocks == 2
    read, written = sequence.next_states(keep=True)
    assert read == first != written == sequence.state and states.free_blocks == 1
    read, third = sequence.next_states(keep=True)  # the state before the last step is not wanted any more
    assert read == written and third not in (None, written) and states.free_blocks == 1
    assert sequence.next_states(keep=False) == (third, third) and states.free_blocks == 2
    sequence.release()
    assert states.free_blocks == 3 and sequence.state is None and sequence.next_states(keep=True) == (0, 0)
    sequence.release()
    assert states.free_blocks == 3
    assert Sequence(()).next_states(keep=True) == (0, 0)


@pytest.mark.parametrize("back", [0, 1, 4, 5])
def test_what_is_taken_back_of_a_kept_step(back: int) -> None:
    """Nothing: the state after it stays. All: the state before it is the sequence's. Else the rest is replayed."""
    states = BlockPool(2)
    sequence = Sequence((Blocks(BlockPool(2)),), states)
    sequence.extend(7)
    sequence.extend(5)
    before, after = sequence.next_states(keep=True)
    assert sequence.take_back(back, 5) == ((before, after) if 0 < back < 5 else None)
    assert sequence.length == 12 - back
    assert sequence.state == (before if back == 5 else after)
    assert states.free_blocks == (back == 5)
    sequence.exact = 3
    sequence.release()
    assert states.free_blocks == 2 and (sequence.length, sequence.exact, sequence.state) == (0, None, None)


def test_a_step_without_states_is_taken_back_by_its_length() -> None:
    sequence = Sequence((Blocks(BlockPool(2)),))
    sequence.extend(9)
    assert sequence.take_back(4, 5) is None and sequence.length == 5
    kept = Sequence((Blocks(BlockPool(2)),), BlockPool(1))
    kept.extend(9)
    kept.next_states(keep=False)
    assert kept.take_back(0, 9) is None
    with pytest.raises(AssertionError, match="not kept"):
        kept.take_back(1, 9)


def test_tables_have_minus_one_where_nothing_is_held() -> None:
    pools = BlockPool(9), BlockPool(9)
    first, second = (Sequence((Blocks(pools[0]), Blocks(pools[1], WINDOW))) for _ in range(2))
    first.extend(300)
    first.extend(1)
    second.extend(65)
    for group in range(2):
        table = block_table([first, second], group, 6)
        assert table.dtype == np.int32 and table.shape == (2, 6)
        assert table[0].tolist() == [*first.groups[group].held, -1]
        assert table[1].tolist() == [*second.groups[group].held, *[-1] * 4]
    assert block_table([first], 1, 6)[0, 0] == -1 != block_table([first], 0, 6)[0, 0]
