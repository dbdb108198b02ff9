"""Prefixes of decoded tokens, and sequences moved out, without a model: a sign tells how what is cached was made.

A prompt that is read writes hashes of its tokens, decoding their negatives, and so does whatever is read after decoded
tokens: on a GPU its bits follow from theirs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.ground.errors import CapacityError
from engine.memory import swap
from engine.memory.blocks import Sequence
from engine.memory.kv import KVCache
from engine.memory.prefix import PrefixCache
from engine.memory.prefix_files import PrefixFiles
from tests.cached_prompts import CHUNK, KINDS, arrays_of, compute, hashes, make_cache, prefix_cache, prompt

KEY = {"file_id": "f", "kv_type": "f16", "chunk_tokens": CHUNK}


def opened(kind: str, exact: bool = False, host: int = 1 << 20, blocks: int = 20) -> tuple[KVCache, PrefixCache]:
    kv = make_cache(kind, blocks * 64)
    return kv, prefix_cache(kv, CHUNK, host, decoded_differ=True, exact=exact)


def mark(kv: KVCache, sequence: Sequence, start: int) -> None:
    """What was written from a position on is of another arithmetic."""
    kv.device.synchronize()
    positions = np.arange(start, sequence.length)
    for group, blocks in zip(kv.groups, sequence.groups, strict=True):
        slots = np.asarray(blocks.held, np.int64)[positions // 64] * 64 + positions % 64
        for layer in group.layers:
            for array in arrays_of(kv, layer):
                array[slots] *= -1
    for layer in kv.delta:
        if layer is not None:
            layer.conv[sequence.state] *= -1
            layer.state[sequence.state] *= -1


def feed(kv: KVCache, sequence: Sequence, tokens: np.ndarray, n: int, decode: bool = False) -> None:
    start = sequence.length
    if decode and sequence.exact is None:
        sequence.exact = start
    compute(kv, sequence, tokens, n)
    if sequence.exact is not None:
        mark(kv, sequence, start)


def check(kv: KVCache, sequence: Sequence, tokens: np.ndarray) -> None:
    """All that the next token sees was computed for these tokens, and as `Sequence.exact` says."""
    kv.device.synchronize()
    n = sequence.length
    values = hashes(tokens)[:n]
    n_exact = n if sequence.exact is None else sequence.exact  # a chunk may begin with tokens that were read
    for group, blocks in zip(kv.groups, sequence.groups, strict=True):
        seen = np.arange(max(0, n + 1 - group.window) if group.window else 0, n)
        slots = np.asarray(blocks.held, np.int64)[seen // 64] * 64 + seen % 64
        for layer in group.layers:
            for array in arrays_of(kv, layer):
                assert (abs(array[slots]) == values[seen][:, None, None]).all()
                assert (array[slots][seen < n_exact] >= 0).all()
    for layer in kv.delta:
        if layer is not None and n:
            assert (abs(layer.conv[sequence.state]) == values[-1]).all()
            assert n > n_exact or (layer.conv[sequence.state] >= 0).all()


def read(kv: KVCache, cache: PrefixCache, tokens: np.ndarray, exact: bool = False) -> tuple[Sequence, int]:
    sequence = kv.sequence()
    try:
        reused = cache.attach(sequence, cache.match(tokens, exact))
        check(kv, sequence, tokens)
        while sequence.length < len(tokens):
            feed(kv, sequence, tokens, cache.step_tokens(sequence, tokens))
            cache.insert(sequence, tokens)
    except CapacityError:
        sequence.release()
        raise
    return sequence, reused


def reply(kv: KVCache, cache: PrefixCache, sequence: Sequence, tokens: np.ndarray) -> None:
    """Decode what is not there yet of `tokens`, and end."""
    while sequence.length < len(tokens):
        feed(kv, sequence, tokens, 1, decode=True)
        sequence.reserve(0)
    check(kv, sequence, tokens)
    cache.insert(sequence, tokens)
    sequence.release()


def reread(kv: KVCache, cache: PrefixCache) -> int:
    """What idle time does; how many tokens it reads."""
    n = 0
    while (tokens := cache.inexact()) is not None:
        sequence = kv.sequence()
        cache.attach(sequence, cache.match(tokens, exact=True), again=True)
        while sequence.length < len(tokens):
            step = min(cache.step_tokens(sequence, tokens), CHUNK - sequence.length % CHUNK)
            feed(kv, sequence, tokens, step)
            cache.insert(sequence, tokens, again=True)
            n += step
        assert sequence.exact is None
        sequence.release()
    return n


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_reply_is_reused_and_counted_until_it_has_been_read_again(kind: str) -> None:
    kv, cache = opened(kind)
    said, long = prompt("abcd", 0), prompt("abcde", 40)
    sequence, _ = read(kv, cache, said[: 2 * CHUNK + 70])
    reply(kv, cache, sequence, said)
    assert cache.stats()["inexact_chunks"] == 2
    sequence, reused = read(kv, cache, long)
    full = kind == "full"  # others can go on only where a snapshot is, and decoding leaves none
    assert reused == (4 * CHUNK if full else 2 * CHUNK)
    assert cache.stats()["inexact_tokens"] == (2 * CHUNK if full else 0)
    assert sequence.exact == (2 * CHUNK if full else None)
    check(kv, sequence, long)
    sequence.release()
    assert (cache.stats()["inexact_chunks"] > 0) == full  # else the prompt that was read has taken its place
    reread(kv, cache)
    assert cache.stats()["inexact_chunks"] == 0
    before = cache.stats()["inexact_tokens"]
    sequence, reused = read(kv, cache, long)
    assert reused >= 4 * CHUNK and sequence.exact is None and cache.stats()["inexact_tokens"] == before
    check(kv, sequence, long)
    sequence.release()
    cache.clear()
    assert kv.free_blocks == kv.n_blocks and cache.host_bytes == 0


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_exact_prefixes_end_before_a_reply_and_take_its_place(kind: str) -> None:
    kv, cache = opened(kind, exact=True)
    said = prompt("abcd", 0)
    sequence, _ = read(kv, cache, said[: 2 * CHUNK + 70])
    reply(kv, cache, sequence, said)
    long = prompt("abcde", 40)
    sequence, reused = read(kv, cache, long)
    assert reused == 2 * CHUNK and sequence.exact is None and cache.stats()["inexact_chunks"] == 0
    check(kv, sequence, long)
    sequence.release()
    sequence, reused = read(kv, cache, long)
    assert reused >= 4 * CHUNK
    check(kv, sequence, long)
    sequence.release()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_was_read_stays_where_the_same_tokens_are_decoded(kind: str) -> None:
    kv, cache = opened(kind)
    read(kv, cache, prompt("abcd", 40))[0].release()
    while cache.reclaim():  # to host memory
        pass
    sequence = kv.sequence()
    while sequence.length < CHUNK:
        feed(kv, sequence, prompt("abcd"), 64)
    reply(kv, cache, sequence, prompt("abcd"))
    assert cache.stats()["inexact_chunks"] == 0
    sequence, reused = read(kv, cache, prompt("abcd", 40))
    assert reused == 4 * CHUNK and sequence.exact is None
    check(kv, sequence, prompt("abcd", 40))
    sequence.release()


def test_a_reply_that_somebody_uses_is_replaced_too() -> None:
    kv, cache = opened("full")
    said, long = prompt("abcd", 0), prompt("abcde", 40)
    sequence, _ = read(kv, cache, said[: 2 * CHUNK + 70])
    reply(kv, cache, sequence, said)
    user, _ = read(kv, cache, long)
    assert user.exact == 2 * CHUNK
    reread(kv, cache)
    check(kv, user, long)  # it goes on with what it has
    sequence, reused = read(kv, cache, long)
    assert reused == 5 * CHUNK and sequence.exact is None
    check(kv, sequence, long)
    sequence.release()
    user.release()
    cache.clear()
    assert kv.free_blocks == kv.n_blocks


@pytest.mark.parametrize("kind", ["full", "everything"])
def test_files_have_prompts_alone(tmp_path: Path, kind: str) -> None:
    for turn in range(2):
        kv = make_cache(kind, 20 * 64)
        files = PrefixFiles(tmp_path, KEY, 1 << 20)
        cache = prefix_cache(kv, CHUNK, 1 << 20, files, decoded_differ=True)
        if not turn:
            sequence, _ = read(kv, cache, prompt("abcd")[: 2 * CHUNK + 70])
            reply(kv, cache, sequence, prompt("abcd", 0))
        else:
            sequence, reused = read(kv, cache, prompt("abcd", 40))
            assert reused == 2 * CHUNK and sequence.exact is None and cache.stats()["inexact_tokens"] == 0
            check(kv, sequence, prompt("abcd", 40))
            sequence.release()
        cache.close()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_where_snapshots_lie_follows_from_the_tokens(kind: str) -> None:
    """Read in one go, from a prefix on, moved out in between, or decoded and read again; ended by a reply or not."""
    wanted, ways = {}, ("once", "prefix", "moved", "decoded", "replied")
    tokens = prompt("abcdef", 50)
    for way in ways:
        kv, cache = opened(kind)
        if way == "prefix":
            read(kv, cache, tokens[: 2 * CHUNK + 60])[0].release()
        if way == "decoded":
            sequence, _ = read(kv, cache, tokens[: CHUNK + 60])
            reply(kv, cache, sequence, prompt("abcdef", 0))
            reread(kv, cache)
        sequence, _ = read(kv, cache, tokens[: len(tokens) // 2] if way == "moved" else tokens)
        if way == "moved":
            kept = swap.swap_out(kv, sequence)
            assert kept is not None
            swap.swap_in(kv, sequence := kv.sequence(), kept)
            while sequence.length < len(tokens):
                feed(kv, sequence, tokens, cache.step_tokens(sequence, tokens))
                cache.insert(sequence, tokens)
        if way == "replied":  # to where a chunk ends, and where it does not
            reply(kv, cache, sequence, np.concatenate([tokens, np.arange(CHUNK - 50)]).astype(np.int32))
        else:
            sequence.release()
        own = [n for n in cache.tree.nodes() if n.snapshot is not None and n.length >= 5 * CHUNK]
        wanted[way] = [n.length for n in own]
    assert all(lengths == wanted["once"] for lengths in wanted.values()), wanted
    assert wanted["once"] == ([] if kind == "full" else [6 * CHUNK])


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_conversations_of_several_turns(kind: str, exact: bool, seed: int) -> None:
    """At random: turns, idle time, blocks that are short, requests moved out; a cache says how it was made."""
    rng = np.random.default_rng(seed)
    kv, cache = opened(kind, exact, host=int(rng.choice([0, 40_000, 1 << 20])), blocks=24)
    said = [prompt(c, int(rng.integers(0, 90))) for c in "ab"]
    for _ in range(14):
        i = int(rng.integers(0, 2))
        if len(said[i]) > 18 * 64:
            said[i] = said[i][: int(rng.integers(1, len(said[i])))]
        asked = np.concatenate([said[i], rng.integers(5, 99, int(rng.integers(1, 150)))]).astype(np.int32)
        sequence, _ = read(kv, cache, asked)
        assert not exact or sequence.exact is None
        check(kv, sequence, asked)
        said[i] = np.concatenate([asked, rng.integers(5, 99, int(rng.integers(1, 150)))]).astype(np.int32)
        while sequence.length < len(said[i]) - 1:
            feed(kv, sequence, said[i], 1, decode=True)
            sequence.reserve(0)
            if rng.random() < 0.02:
                kept = swap.swap_out(kv, sequence)
                if kept is not None:
                    swap.swap_in(kv, sequence := kv.sequence(), kept)
                    check(kv, sequence, said[i])
        reply(kv, cache, sequence, said[i])
        if rng.random() < 0.3:
            reread(kv, cache)
            assert cache.inexact() is None
        for _ in range(int(rng.integers(0, 6))):
            cache.reclaim()
        kv.device.synchronize()
        for node in cache.tree.nodes():
            for group, blocks in zip(kv.full_groups, node.blocks or (), strict=node.blocks is not None):
                slots = (np.array(blocks)[:, None] * 64 + np.arange(64)).ravel()
                (array, _) = arrays_of(kv, kv.groups[group].layers[0])
                assert not node.exact or (array[slots] >= 0).all()
    assert not exact or cache.stats()["inexact_tokens"] == 0
    cache.clear()
    assert kv.free_blocks == kv.n_blocks and cache.host_bytes == 0
