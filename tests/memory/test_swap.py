"""Sequences that are moved to host memory and back: the same bytes, nothing lost, nothing beyond the budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.ground.errors import CapacityError
from engine.memory.blocks import Sequence
from engine.memory.host import HostTier
from engine.memory.kv import KVCache
from engine.memory.swap import Swapped, drop, swap_in, swap_out
from tests.cached_prompts import CHUNK, KINDS, check, compute, make_cache, prefix_cache, prompt


def made(kind: str, n_blocks: int, host_bytes: int = 1 << 20, kv_type: str = "f16") -> KVCache:
    kv = make_cache(kind, n_blocks * 64, kv_type)
    kv.host = HostTier(kv.device, host_bytes)
    return kv


def computed(kv: KVCache, tokens: np.ndarray) -> Sequence:
    sequence = kv.sequence()
    for start in range(0, len(tokens), CHUNK):
        compute(kv, sequence, tokens, min(CHUNK, len(tokens) - start))
    return sequence


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0,f16", "q8_0,q4_0"])
@pytest.mark.parametrize("length", [0, 1, 64, 131, 192, 700])
def test_a_sequence_comes_back_as_it_left(kind: str, kv_type: str, length: int) -> None:
    """In other blocks, while others used its own; it goes on, and is taken back, as before."""
    kv = made(kind, 40, kv_type=kv_type)
    tokens = np.arange(length + 90, dtype=np.int32)
    sequence = computed(kv, tokens[:length])
    swapped = swap_out(kv, sequence)
    assert swapped is not None and swapped.length == length
    assert kv.free_blocks == kv.n_blocks and kv.host.n_bytes == swapped.nbytes == kv.host.bytes_by_kind()["sequences"]
    others = [computed(kv, np.arange(length, dtype=np.int32) + 3000 * i) for i in (1, 2)]
    sequence = kv.sequence()
    swap_in(kv, sequence, swapped)
    assert swapped.gone and kv.host.n_bytes == 0
    check(kv, sequence, tokens[:length])
    compute(kv, sequence, tokens, 40)
    assert sequence.reaches(length)
    compute(kv, sequence, tokens, 50)
    for each, expected in zip([sequence, *others], [tokens, *(tokens + 3000 * i for i in (1, 2))], strict=True):
        check(kv, each, expected[: each.length])
        each.release()
    assert kv.free_blocks == kv.n_blocks


def test_what_leaves_is_the_memory_that_chunks_use() -> None:
    """Arrays of one size serve both, so that nobody waits for memory to be locked."""
    kv = made("full", 40)
    sequence = computed(kv, np.arange(20 * 64 + 5, dtype=np.int32))
    swapped = swap_out(kv, sequence)
    assert swapped is not None
    assert [piece.nbytes // kv.block_bytes(0) for piece in swapped.pieces[0]] == [8, 8, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_budget_does_not_hold_stays(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    tokens = prompt("ab", 9)
    kv = made(kind, 20)
    probe = computed(kv, tokens)
    swapped = swap_out(kv, probe)
    assert swapped is not None
    for budget, full in ((swapped.nbytes - 1, False), (swapped.nbytes, True)):
        kv = made(kind, 20, budget)
        kv.device.full = full  # and then the machine has less than the budget
        sequence = computed(kv, tokens)
        assert swap_out(kv, sequence) is None
        check(kv, sequence, tokens)
        assert kv.host.n_bytes == 0 and len(caplog.records) == full
        kv.device.full = False
        assert (swap_out(kv, sequence) is None) or not full


@pytest.mark.parametrize("kind", KINDS)
def test_where_a_pool_is_short_nothing_changes(kind: str) -> None:
    kv = made(kind, 12)
    tokens = prompt("ab", 70)
    sequence = computed(kv, tokens)
    swapped = swap_out(kv, sequence)
    assert swapped is not None
    for pool in (kv.pools[0], kv.pools[-1]):
        taken = [pool.take() for _ in range(pool.free_blocks - 1)]
        sequence, free = kv.sequence(), kv.free_blocks
        with pytest.raises(CapacityError):
            swap_in(kv, sequence, swapped)
        assert sequence.length == 0 and kv.free_blocks == free and kv.host.n_bytes == swapped.nbytes
        pool.give_back(taken)
        sequence.release()
    sequence = kv.sequence()
    swap_in(kv, sequence, swapped)
    check(kv, sequence, tokens)


def test_prefixes_make_room_and_sequences_do_not() -> None:
    kv = make_cache("states", 12 * 64)
    unit = sum(prefix_cache(kv, CHUNK, 0)._data_bytes)
    cache = prefix_cache(kv, CHUNK, 2 * unit + 2 * kv.snapshot_bytes(CHUNK))
    for name in "ab":
        sequence = computed(kv, prompt(name, 0))
        cache.insert(sequence, prompt(name, 5))
        sequence.release()
    while cache.reclaim():
        pass
    assert cache.stats()["host_chunks"] == cache.stats()["snapshots"] == 2
    first = swap_out(kv, computed(kv, prompt("c", 0)))
    assert first is not None and cache.stats()["host_chunks"] == 1
    assert cache.match(prompt("a")).length == 0 < cache.match(prompt("b")).length
    second = swap_out(kv, computed(kv, prompt("d", 0)))
    assert second is not None and cache.stats()["host_chunks"] == cache.stats()["snapshots"] == 0
    third = computed(kv, prompt("e", 0))
    assert swap_out(kv, third) is None
    cache.insert(third, prompt("e", 5))
    assert cache.stats()["snapshots"] == 0
    for swapped, name in ((first, "c"), (second, "d")):
        sequence = kv.sequence()
        swap_in(kv, sequence, swapped)
        check(kv, sequence, prompt(name, 0))


class Swapping(RuleBasedStateMachine):
    """Sequences that grow, go and come in any order beside a tree of prefixes which gives up for them."""

    @initialize(kind=st.sampled_from(sorted(KINDS)), host=st.sampled_from([0, 20_000, 60_000, 1 << 20]))
    def start(self, kind: str, host: int) -> None:
        self.kv, self.host = make_cache(kind, 12 * 64), host
        self.cache = prefix_cache(self.kv, CHUNK, host)
        self.here: list[tuple[Sequence, np.ndarray]] = []
        self.there: list[tuple[Swapped, np.ndarray]] = []

    @rule(chunks=st.text("ab", max_size=3), tail=st.integers(1, 130), remember=st.booleans())
    def begin(self, chunks: str, tail: int, remember: bool) -> None:
        if len(self.here) == 4:
            return
        tokens = prompt(chunks, tail)
        sequence = self.kv.sequence()
        self.cache.attach(sequence, self.cache.match(tokens))
        try:
            while sequence.length < len(tokens):
                compute(self.kv, sequence, tokens, self.cache.step_tokens(sequence, tokens))
                if remember:
                    self.cache.insert(sequence, tokens)
        except CapacityError:
            sequence.release()
            return
        self.here.append((sequence, tokens))

    @precondition(lambda self: self.here)
    @rule(which=st.integers(0, 9), n=st.integers(1, 70))
    def decode(self, which: int, n: int) -> None:
        i = which % len(self.here)
        sequence, tokens = self.here[i]
        tokens = np.concatenate([tokens[: sequence.length], np.arange(n, dtype=np.int32) + 6000])
        self.here[i] = sequence, tokens
        try:
            for _ in range(n):
                compute(self.kv, sequence, tokens, 1)
        except CapacityError:
            pass

    @precondition(lambda self: self.here)
    @rule(which=st.integers(0, 9))
    def out(self, which: int) -> None:
        sequence, tokens = self.here[which % len(self.here)]
        length, free = sequence.length, self.kv.free_blocks
        swapped = swap_out(self.kv, sequence)
        if swapped is None:
            assert self.kv.free_blocks == free and sequence.length == length
            return
        self.here.remove((sequence, tokens))
        self.there.append((swapped, tokens[:length]))

    @precondition(lambda self: self.there)
    @rule(which=st.integers(0, 9))
    def back(self, which: int) -> None:
        if len(self.here) == 4:
            return
        entry = self.there[which % len(self.there)]
        sequence = self.kv.sequence()
        try:
            swap_in(self.kv, sequence, entry[0])
        except CapacityError:
            assert sequence.length == 0 and not entry[0].gone
            sequence.release()
            return
        self.there.remove(entry)
        self.here.append((sequence, entry[1]))

    @precondition(lambda self: self.there)
    @rule(which=st.integers(0, 9))
    def forget(self, which: int) -> None:
        swapped, _ = self.there.pop(which % len(self.there))
        for _ in range(2):
            drop(self.kv, swapped)

    @rule(which=st.integers(0, 9))
    def end(self, which: int) -> None:
        if self.here:
            self.here.pop(which % len(self.here))[0].release()

    @invariant()
    def all_are_what_was_computed(self) -> None:
        for sequence, tokens in getattr(self, "here", ()):
            check(self.kv, sequence, tokens)

    @invariant()
    def the_budget_is_kept(self) -> None:
        if hasattr(self, "kv"):
            held = sum(n.data_bytes + n.snapshot_bytes for n in self.cache.tree.nodes())
            held += sum(swapped.nbytes for swapped, _ in self.there)
            assert held == self.kv.host.n_bytes <= self.host

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for sequence, _ in self.here:
                sequence.release()
            for swapped, _ in self.there:
                drop(self.kv, swapped)
            self.cache.close()
            assert self.kv.free_blocks == self.kv.n_blocks and self.kv.host.n_bytes == 0


Swapping.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestSwapping = Swapping.TestCase
