"""Who holds which block: none has two owners unawares, none is lost, windows give back what nobody sees, no arrays."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.ground.errors import CapacityError
from engine.memory.blocks import WINDOW_MARGIN_TOKENS, BlockPool, Blocks, Sequence

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
