"""The tree of prefixes without a model: what is attached is what was computed, and nothing is lost or kept twice.

The cache is the real one over host memory. "Computing" a token writes a hash of all tokens up to it where its keys,
values and state would lie, so a wrong block, a stale one or a wrong state is seen at once.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from engine.ground.errors import CapacityError
from engine.memory.blocks import Sequence
from engine.memory.kv import Fork
from engine.memory.prefix_files import PrefixFiles
from tests.cached_prompts import (
    CHUNK,
    KINDS,
    check,
    compute,
    make_cache,
    nodes,
    prefill,
    prefix_cache,
    prompt,
    saved,
    serve,
)

KEY = {"file_id": "f", "kv_types": ["f16", "f16"], "chunk_tokens": CHUNK}


def keys(letter: str) -> list[bytes]:
    return [prompt(letter, 0).tobytes()]


class Serving(RuleBasedStateMachine):
    """Requests that share prefixes, begin, decode, end and are cut off; files that break; daemons that restart."""

    running = Bundle("running")

    @initialize(
        kind=st.sampled_from(sorted(KINDS)), host=st.sampled_from([0, 60_000, 1 << 20]),
        disk=st.sampled_from([None, 100_000, 1 << 20]), steps=st.integers(1, 3),
    )  # fmt: skip
    def start(self, kind: str, host: int, disk: int | None, steps: int) -> None:
        self.kind, self.host, self.disk, self.steps = kind, host, disk, steps
        self.folder = tempfile.TemporaryDirectory()
        self.open()

    def open(self) -> None:
        self.alive: list[tuple[Sequence, np.ndarray]] = []
        self.forks: list[tuple[Fork, np.ndarray]] = []
        self.kv = make_cache(self.kind, 12 * 64)
        self.files = None if self.disk is None else PrefixFiles(Path(self.folder.name), KEY, self.disk)
        self.cache = prefix_cache(self.kv, CHUNK, self.host, self.files, self.steps * CHUNK)

    def flush(self) -> None:
        if self.files is not None:
            self.files.flush()

    def end(self, sequence: Sequence) -> None:
        if any(s is sequence for s, _ in self.alive):
            sequence.release()
        self.alive = [pair for pair in self.alive if pair[0] is not sequence]

    @rule(target=running, chunks=st.text("ab", max_size=5), tail=st.integers(0, 130), remember=st.booleans())
    def begin(self, chunks: str, tail: int, remember: bool) -> tuple[Sequence, np.ndarray] | None:
        tokens = prompt(chunks, tail)
        if not len(tokens):
            return None
        match = self.cache.match(tokens)
        assert match.length < len(tokens) and match.length % CHUNK == 0
        assert len(tokens) - match.length > 32 or match.length % (self.steps * CHUNK) == 0
        assert b"".join(match.keys) == tokens[: match.length].tobytes()
        try:
            sequence = self.kv.sequence()
        except CapacityError:
            assert len(self.alive) == 4
            return None
        assert self.cache.attach(sequence, match) == sequence.length <= match.length
        check(self.kv, sequence, tokens)
        self.alive.append((sequence, tokens))
        try:
            while sequence.length < len(tokens):
                compute(self.kv, sequence, tokens, self.cache.step_tokens(sequence, tokens))
                if remember:
                    self.cache.insert(sequence, tokens)
                    self.flush()
        except CapacityError:
            self.end(sequence)
        return sequence, tokens

    @rule(entry=consumes(running), n=st.integers(1, 140), seed=st.integers(0, 1))
    def decode_and_end(self, entry: tuple[Sequence, np.ndarray] | None, n: int, seed: int) -> None:
        if entry is None or not any(s is entry[0] for s, _ in self.alive):
            return
        sequence, tokens = entry
        tokens = np.concatenate([tokens, np.arange(n, dtype=np.int32) + 5000 * seed])
        try:
            for _ in range(n):
                compute(self.kv, sequence, tokens, 1)
                if sequence.length % CHUNK == 0:
                    self.cache.insert(sequence, tokens[: sequence.length])
        except CapacityError:
            pass
        check(self.kv, sequence, tokens)
        self.cache.insert(sequence, tokens)
        self.flush()
        self.end(sequence)

    @rule(entry=consumes(running))
    def cancel(self, entry: tuple[Sequence, np.ndarray] | None) -> None:
        if entry is not None:
            self.end(entry[0])

    @rule(entry=running)
    def fork(self, entry: tuple[Sequence, np.ndarray] | None) -> None:
        if entry is not None and any(s is entry[0] for s, _ in self.alive) and entry[0].length:
            fork = self.cache.forks.make(entry[0])
            if fork is not None:
                assert fork.length == entry[0].length
                self.forks.append((fork, entry[1][: fork.length]))

    @rule(target=running, which=st.integers(0, 9), n=st.integers(1, 70))
    def go_on_from_a_fork(self, which: int, n: int) -> tuple[Sequence, np.ndarray] | None:
        live = [pair for pair in self.forks if not pair[0].gone]
        if not live or len(self.alive) == 4:
            return None
        fork, tokens = live[which % len(live)]
        sequence = self.kv.sequence()
        try:
            self.cache.forks.begin(sequence, fork)
        except CapacityError:
            assert not fork.gone
            sequence.release()
            return None
        check(self.kv, sequence, tokens)
        tokens = np.concatenate([tokens, np.arange(n, dtype=np.int32) + 7000])
        self.alive.append((sequence, tokens))
        try:
            for _ in range(n):
                compute(self.kv, sequence, tokens, 1)
        except CapacityError:
            self.end(sequence)
        return sequence, tokens

    @rule(which=st.integers(0, 9))
    def drop_a_fork(self, which: int) -> None:
        if self.forks:
            fork, _ = self.forks.pop(which % len(self.forks))
            self.cache.forks.drop(fork)
            assert fork.gone

    @rule()
    def reclaim(self) -> None:
        before, forks = self.kv.free_blocks, sum(not fork.gone for fork, _ in self.forks)
        if self.cache.reclaim():  # a fork's blocks may be a sequence's, too
            assert self.kv.free_blocks > before or sum(not fork.gone for fork, _ in self.forks) == forks - 1
        else:
            assert all(fork.gone for fork, _ in self.forks)

    @rule(which=st.integers(0, 50), how=st.sampled_from(["flip", "cut", "remove"]))
    def break_a_file(self, which: int, how: str) -> None:
        found = saved(Path(self.folder.name))
        if found:
            damage(found[which % len(found)], how)

    @rule()
    def restart(self) -> None:
        for sequence, _ in list(self.alive):
            self.end(sequence)
        self.cache.close()
        assert self.kv.free_blocks == self.kv.n_blocks and self.cache.host_bytes == 0
        self.open()

    @invariant()
    def running_sequences_have_what_they_computed(self) -> None:
        for sequence, tokens in self.alive:
            check(self.kv, sequence, tokens)

    @invariant()
    def every_block_has_the_holders_it_counts(self) -> None:
        for g, pool in enumerate(self.kv.pools):
            holders = Counter(b for s, _ in self.alive for b in s.groups[g].held if b >= 0)
            if g in self.kv.full_groups:
                at = self.kv.full_groups.index(g)
                chunks = [n.blocks[at] for n in nodes(self.cache) if n.blocks is not None]
                assert len({chunk[-1] for chunk in chunks}) == len(chunks)
                holders.update(b for chunk in chunks for b in chunk)
                live = [fork for fork, _ in self.forks if not fork.gone]
                holders.update(b for fork in live for b in [*fork.shared[at], *fork.rest[at : at + 1]])
            assert {b: pool.holders(b) for b in holders} == holders
            assert pool.free_blocks == pool.n_blocks - len(holders)

    @invariant()
    def budgets_are_kept(self) -> None:
        held = sum(n.data_bytes + n.snapshot_bytes for n in nodes(self.cache))
        held += sum(fork.host_bytes for fork, _ in self.forks)
        assert held == self.cache.host_bytes <= self.host
        if self.files is not None:
            self.flush()
            on_disk = {f.name: f.stat().st_size for f in saved(Path(self.folder.name))}
            assert sum(on_disk.values()) <= self.disk

    @invariant()
    def a_chunk_holds_something_and_so_do_those_before_it(self) -> None:
        for node in nodes(self.cache):
            assert node.blocks is not None or node.data is not None
            if node.data_claim is not None:
                assert node.data is not None and node.data_claim.spare == (node.blocks is not None)
            if node.blocks is not None and node.data is not None:
                self.kv.device.synchronize()
                same = zip(self.cache._read(node, wait=True), node.data, strict=True)
                assert all(np.array_equal(a, b) for a, b in same)
            above = node.parent
            assert above is self.cache.tree.root or node.blocks is None or above.blocks is not None

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.restart()
            self.cache.close()
            self.folder.cleanup()


Serving.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestServing = Serving.TestCase


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data[: len(data) // 2] if how == "cut" else data)
    if how == "remove":
        path.unlink()


# --- one property a test --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_prefix_on_the_grid_is_reused(kind: str) -> None:
    kv = make_cache(kind, 40 * 64)
    cache = prefix_cache(kv, CHUNK, 1 << 20)
    assert serve(kv, cache, prompt("abc")) == 0
    assert serve(kv, cache, prompt("abc")) == 3 * CHUNK
    assert serve(kv, cache, prompt("abcd")) == 3 * CHUNK
    assert serve(kv, cache, prompt("xbc")) == 0
    serve(kv, cache, prompt("abc", 0))
    assert serve(kv, cache, prompt("abc", 0)) == 2 * CHUNK  # one token at least is computed
    # Where windows or states have to be saved, two prompts that part leave a snapshot there, for the next that does.
    serve(kv, cache, prompt("pqrrr"))
    assert serve(kv, cache, prompt("pqsss")) == (2 * CHUNK if kind == "full" else 0)
    assert serve(kv, cache, prompt("pqttt")) == 2 * CHUNK


def test_a_running_sequences_blocks_are_shared_and_stay() -> None:
    kv = make_cache("full", 8 * 64)
    cache = prefix_cache(kv, CHUNK, 0)
    first, _ = prefill(kv, cache, prompt("ab"))
    second, reused = prefill(kv, cache, prompt("ab", 9))
    assert reused == 2 * CHUNK and kv.pools[0].free_blocks == 2
    assert not cache.reclaim()
    first.release()
    assert not cache.reclaim()
    assert cache.reclaimable_tokens == cache.reclaimable_blocks == 0
    second.release()
    assert cache.reclaimable_tokens == 2 * CHUNK and cache.reclaimable_blocks == 2 * 2 * CHUNK // 64
    assert kv.pools[0].free_blocks == 4 and cache.reclaim() and cache.reclaim() and not cache.reclaim()


def test_reclaimable_blocks_are_those_that_reclaiming_frees() -> None:
    """Of all groups, and none that a running sequence holds."""
    kv = make_cache("everything", 40 * 64)
    cache = prefix_cache(kv, CHUNK, 1 << 20)
    for letters in ("abc", "abd", "x"):
        prefill(kv, cache, prompt(letters, 9))[0].release()
    running, _ = prefill(kv, cache, prompt("ab", 9))
    expected, free = cache.reclaimable_blocks, kv.free_blocks
    while cache.reclaim():
        pass
    assert 0 < expected == kv.free_blocks - free
    assert cache.reclaimable_blocks == 0 < cache.stats()["device_blocks"]
    running.release()
    assert cache.reclaimable_blocks == cache.stats()["device_blocks"]


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_read_again_are_not_kept_twice(kind: str) -> None:
    """By a prompt that begins before chunks which the tree has, with others below them."""
    kv = make_cache(kind, 8 * 64)
    cache = prefix_cache(kv, CHUNK, 0)
    tokens = prompt("abc", 9)
    serve(kv, cache, tokens[: 2 * CHUNK])
    sequence = kv.sequence()
    while sequence.length < len(tokens):
        compute(kv, sequence, tokens, cache.step_tokens(sequence, tokens))
        cache.insert(sequence, tokens)
    assert cache.reclaimable_tokens == 0
    held = sequence.groups[cache._groups[0]].held
    assert all(set(node.blocks[0]) <= set(held) for node in nodes(cache))
    sequence.release()
    assert cache.reclaimable_tokens == 3 * CHUNK


def test_what_a_sequence_holds_below_does_not_hold_what_is_above() -> None:
    kv = make_cache("full", 20 * 64)
    cache = prefix_cache(kv, CHUNK, 0)
    sequence, _ = prefill(kv, cache, prompt("abc"))
    (first,) = cache.tree.root.children.values()
    own = []
    for group, blocks in zip(cache._groups, first.blocks, strict=True):
        own.append(tuple(kv.pools[group].take() for _ in blocks))
        kv.pools[group].give_back(list(blocks))
    first.blocks = tuple(own)  # as if another had remembered the chunk
    expected, free = cache.reclaimable_blocks, kv.free_blocks
    assert cache.reclaim() and not cache.reclaim()
    assert 0 < expected == kv.free_blocks - free and not nodes(cache)
    sequence.release()
    assert kv.free_blocks == kv.n_blocks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [60_000, 1 << 20])
def test_choices_that_part_within_a_chunk_leave_nothing_that_stays(kind: str, budget: int) -> None:
    """Their chunks begin with the same block, which is free when the last of them is given up."""
    kv = make_cache(kind, 9 * 64)
    cache = prefix_cache(kv, CHUNK, budget)
    sequence, _ = prefill(kv, cache, prompt("", 70))
    fork = cache.forks.make(sequence)
    assert fork is not None
    for last in range(3):
        choice = kv.sequence()
        cache.forks.begin(choice, fork)
        tokens = np.append(prompt("", CHUNK - 1), np.int32(last))
        compute(kv, choice, tokens, CHUNK - 70)
        cache.insert(choice, tokens)
        choice.release()
    sequence.release()
    cache.forks.drop(fork)
    n_groups = len(cache._groups)
    assert cache.reclaimable_blocks == cache.stats()["device_blocks"] == (1 + 3) * n_groups
    assert kv.free_blocks == kv.n_blocks - (1 + 3) * n_groups
    while cache.reclaim():
        pass
    assert kv.free_blocks == kv.n_blocks and cache.reclaimable_blocks == 0


def test_what_was_used_last_stays_longest() -> None:
    kv = make_cache("full", 20 * 64)
    cache = prefix_cache(kv, CHUNK, 0)
    for chunks in ("ab", "ac", "d"):
        serve(kv, cache, prompt(chunks))
    assert serve(kv, cache, prompt("ab", 3)) == 2 * CHUNK
    for gone in ("ac", "d"):
        assert cache.match(prompt(gone)).length == len(gone) * CHUNK
        assert cache.reclaim()
        assert cache.match(prompt(gone)).length == (len(gone) - 1) * CHUNK
    cache.reclaim()
    assert cache.match(prompt("ab")).length == CHUNK


@pytest.mark.parametrize("kind", ["states", "windows", "everything"])
def test_the_snapshot_used_last_stays_longest(kind: str) -> None:
    """Of snapshots for which there is no room the one that was used first goes, be it the oldest or not."""
    kv = make_cache(kind, 60 * 64)
    cache = prefix_cache(kv, CHUNK, 3 * kv.snapshot_bytes(2 * CHUNK) + 1)
    kept = lambda: [c for c in "abcde" if cache.match(prompt(c + "x")).length]  # noqa: E731
    for name in "abc":
        serve(kv, cache, prompt(name + "x"))
    assert kept() == ["a", "b", "c"]
    serve(kv, cache, prompt("dx"))
    assert kept() == ["b", "c", "d"]
    assert serve(kv, cache, prompt("bx", 7)) == 2 * CHUNK
    serve(kv, cache, prompt("ex"))
    assert kept() == ["b", "d", "e"]


@pytest.mark.parametrize("kind", ["states", "windows"])
def test_a_fork_keeps_the_budget_where_its_blocks_send_chunks_to_host_memory(kind: str) -> None:
    kv = make_cache(kind, 5 * 64)
    unit = sum(prefix_cache(kv, CHUNK, 0)._data_bytes)
    budget = kv.snapshot_bytes(CHUNK) + max(unit, kv.snapshot_bytes(CHUNK + 5))
    cache = prefix_cache(kv, CHUNK, budget)
    serve(kv, cache, prompt("b", 5))
    sequence = kv.sequence()
    compute(kv, sequence, prompt("a", 5), CHUNK + 5)
    assert kv.pools[0].free_blocks == 0
    fork = cache.forks.make(sequence)
    assert fork is not None
    held = sum(n.data_bytes + n.snapshot_bytes for n in nodes(cache))
    assert held + fork.host_bytes == cache.host_bytes <= budget
    sequence.release()
    cache.clear()
    assert kv.free_blocks == kv.n_blocks and cache.host_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0,f16", "q8_0,q4_0"])
def test_evicted_chunks_come_back_from_host_memory(kind: str, kv_type: str) -> None:
    kv = make_cache(kind, 8 * 64, kv_type)
    cache = prefix_cache(kv, CHUNK, 1 << 20)
    serve(kv, cache, prompt("abc"))
    serve(kv, cache, prompt("xyz", 60))
    assert cache.stats()["host_chunks"] >= 2 and cache.stats()["host_bytes"] == cache.host_bytes
    assert serve(kv, cache, prompt("abc")) == 3 * CHUNK
    cache.clear()
    assert kv.free_blocks == kv.n_blocks and cache.host_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_files_outlive_the_process(kind: str, tmp_path: Path) -> None:
    for expected in (0, 3 * CHUNK):
        kv = make_cache(kind, 8 * 64)
        cache = prefix_cache(kv, CHUNK, 1 << 20, PrefixFiles(tmp_path, KEY, 1 << 30))
        assert serve(kv, cache, prompt("abc")) == expected
        cache.close()
    for other in ({"file_id": "g"}, {"kv_types": ["f16", "q8_0"]}, {"chunk_tokens": 64}):
        kv = make_cache(kind, 8 * 64)
        cache = prefix_cache(kv, CHUNK, 1 << 20, PrefixFiles(tmp_path, KEY | other, 1 << 30))
        assert cache.match(prompt("abc")).length == 0


@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_ignored_with_one_warning(
    kind: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def reopen() -> None:
        nonlocal kv, cache
        kv = make_cache(kind, 8 * 64)
        cache = prefix_cache(kv, CHUNK, 1 << 20, PrefixFiles(tmp_path, KEY, 1 << 30))

    kv = cache = None
    reopen()
    serve(kv, cache, prompt("ab"))
    serve(kv, cache, prompt("abc"))
    cache.close()
    reopen()
    third = cache.tree.name(cache.tree.name(cache.tree.name(cache.tree.root.name, *keys("a")), *keys("b")), *keys("c"))
    damage(tmp_path / f"{third}.blocks", how)
    assert serve(kv, cache, prompt("abc")) == 2 * CHUNK
    assert len(caplog.records) == (how != "remove")
    assert all(record.reason == "damaged_file" for record in caplog.records)
    cache.close()
    reopen()
    assert serve(kv, cache, prompt("abc")) == 3 * CHUNK  # it was written again
    cache.close()
    for path in saved(tmp_path):
        damage(path, how)
    caplog.clear()
    reopen()
    assert serve(kv, cache, prompt("abc")) == 0
    assert len(caplog.records) == (how != "remove")


def test_windows_without_room_are_a_full_prefill() -> None:
    kv = make_cache("windows", 40 * 64)
    cache = prefix_cache(kv, CHUNK, 1 << 20)
    serve(kv, cache, prompt("abc"))
    taken = [kv.pools[1].take() for _ in range(kv.pools[1].free_blocks - 1)]
    sequence = kv.sequence()
    assert cache.match(prompt("abc")).length == 3 * CHUNK
    assert cache.attach(sequence, cache.match(prompt("abc"))) == 0
    assert sequence.length == 0 and not any(blocks.held for blocks in sequence.groups)
    kv.pools[1].give_back(taken)
    assert serve(kv, cache, prompt("abc")) == 3 * CHUNK


def test_without_host_memory_only_full_attention_is_reused() -> None:
    for kind, reused in (("full", CHUNK), ("windows", 0), ("states", 0)):
        kv = make_cache(kind, 8 * 64)
        cache = prefix_cache(kv, CHUNK, 0)
        serve(kv, cache, prompt("a"))
        assert serve(kv, cache, prompt("a")) == reused


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_prompt_goes_on_at_any_chunk_whatever_the_steps(kind: str) -> None:
    kv = make_cache(kind, 60 * 64)
    cache = prefix_cache(kv, CHUNK, 1 << 20, step_tokens=4 * CHUNK)
    assert serve(kv, cache, prompt("abcdef", 40)) == 0
    assert serve(kv, cache, prompt("abcdef", 33)) == 6 * CHUNK
    short = serve(kv, cache, prompt("abcdef", 32))  # 32 tokens are computed in another way than 160
    assert short == (5 * CHUNK if kind == "full" else 0)
    assert serve(kv, cache, prompt("abcdefg", 0)) == 6 * CHUNK
    # Where two part a snapshot is wanted as soon as it is known; the next one goes on there.
    assert serve(kv, cache, prompt("abxyz", 50)) == (2 * CHUNK if kind == "full" else 0)
    assert serve(kv, cache, prompt("abuvw", 60)) == 2 * CHUNK


@pytest.mark.parametrize("kind", ["states", "windows"])
def test_steps_are_left_whole_where_one_more_costs_too_much(kind: str) -> None:
    kv, tokens = make_cache(kind, 60 * 64), prompt("abcdef", 50)
    for cuts, expected in ((True, [4, 2]), (False, [4, 3])):
        cache, sequence, found = prefix_cache(kv, CHUNK, 1 << 20, step_tokens=4 * CHUNK, cuts=cuts), kv.sequence(), []
        for _ in expected:
            found.append(-(-cache.step_tokens(sequence, tokens) // CHUNK))
            compute(kv, sequence, tokens, cache.step_tokens(sequence, tokens))
        assert found == expected
        sequence.release()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_without_host_memory_chunks_are_given_up_and_no_more_is_asked_for(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    kv = make_cache(kind, 12 * 64)
    cache = prefix_cache(kv, CHUNK, 1 << 20)
    serve(kv, cache, prompt("ab"))
    kv.device.full = True
    serve(kv, cache, prompt("cdef"))
    assert cache.host_bytes == sum(n.data_bytes + n.snapshot_bytes for n in nodes(cache))
    assert len(caplog.records) == 1 and "host memory is short" in caplog.text
    kv.device.full = False
    serve(kv, cache, prompt("ghij"))
    assert cache.host_bytes <= kv.snapshot_bytes(2 * CHUNK) or kind == "full"
    assert len(caplog.records) == 1


@pytest.mark.parametrize("tail", [1, 32, 33, 128])
def test_steps_end_where_they_did_without_snapshots(tail: int) -> None:
    kv, tokens = make_cache("full", 60 * 64), prompt("abcdef", tail)
    cache, sequence = prefix_cache(kv, CHUNK, 1 << 20, step_tokens=4 * CHUNK), kv.sequence()
    assert cache.step_tokens(sequence, tokens) == 4 * CHUNK
    compute(kv, sequence, tokens, 4 * CHUNK)
    assert cache.step_tokens(sequence, tokens) == 2 * CHUNK + tail
    sequence.release()


@pytest.mark.parametrize(("chunk", "reused"), [(64, 192), (96, 192), (100, 0)])
def test_steps_of_any_length_end_where_blocks_do(chunk: int, reused: int) -> None:
    kv = make_cache("full", 40 * 64)
    cache = prefix_cache(kv, chunk, 0)
    tokens = np.arange(230, dtype=np.int32)
    sequence = kv.sequence()
    compute(kv, sequence, tokens, 230)
    cache.insert(sequence, tokens)
    assert cache.match(tokens).length == reused


@pytest.mark.parametrize("kind", ["states", "windows", "everything"])
@pytest.mark.parametrize("units", [3.0, 3.25, 3.5, 3.75])
def test_no_block_is_lost_when_host_memory_runs_short_while_a_prefix_is_brought_back(kind: str, units: float) -> None:
    kv = make_cache(kind, 7 * 64)
    unit = sum(prefix_cache(kv, CHUNK, 0)._data_bytes)
    cache = prefix_cache(kv, CHUNK, int(unit * units) + 3 * kv.snapshot_bytes(2 * CHUNK))
    for name in ("ab", "cd", "ef", "ab"):
        serve(kv, cache, prompt(name))
    cache.clear()
    assert kv.pools[0].free_blocks == kv.pools[0].n_blocks
