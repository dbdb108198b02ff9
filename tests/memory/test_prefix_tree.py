"""The tree of prefixes by itself: its choices against a literal reading, on trees of a few chunks and no bytes."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.memory.blocks import BlockPool
from engine.memory.prefix_tree import SNAPSHOT_TOKENS, Node, PrefixTree, short_rows
from engine.ops import KV_BLOCK_TOKENS, SHORT_ROWS, SMALL_TOKENS

CHUNK = 64
words = st.text("ab", max_size=4)


def ids(word: str, tail: int = 0) -> np.ndarray:
    """A chunk a letter, and some tokens more."""
    return np.concatenate(
        [np.full(CHUNK, ord(letter), np.int32) for letter in word] + [np.arange(tail, dtype=np.int32)]
    )


def snapshot(nbytes: int = 7) -> Any:
    return SimpleNamespace(nbytes=nbytes)


def grown(tree: PrefixTree, prompts: list[str]) -> dict[str, Node]:
    """The nodes of prompts, by their letters."""
    found = {}
    for word in prompts:
        node = tree.root
        for n, key in enumerate(tree.keys(ids(word)), 1):
            node = found[word[:n]] = tree.child(node, key)
    return found


@pytest.mark.parametrize(("chunk", "expected"), [(1, 64), (64, 64), (96, 192), (128, 128), (512, 512)])
def test_a_chunk_is_whole_blocks(chunk: int, expected: int) -> None:
    tree = PrefixTree(chunk, 512, (), False)
    assert (tree.chunk_tokens, tree.chunk_blocks) == (expected, expected // KV_BLOCK_TOKENS)
    tokens = np.arange(5 * expected + 17)
    keys = list(tree.keys(tokens))
    assert len(keys) == 5 and b"".join(keys) == tokens[: 5 * expected].astype(np.int32).tobytes()
    assert len(list(tree.keys(tokens[: 5 * expected]))) == 5 and len(list(tree.keys(tokens[: 5 * expected - 1]))) == 4


@given(st.lists(words, max_size=5), words)
def test_nodes_are_made_once_and_know_their_place(prompts: list[str], word: str) -> None:
    tree = PrefixTree(CHUNK, 128, (), False, root="files")
    found = grown(tree, prompts)
    again = grown(tree, prompts)
    assert all(again[name] is node for name, node in found.items())
    for name, node in found.items():
        assert node.length == CHUNK * len(name)
        assert node.parent is (found[name[:-1]] if len(name) > 1 else tree.root)
        expected = "files"
        for key in tree.keys(ids(name)):
            expected = hashlib.sha256(expected.encode() + key).hexdigest()
        assert node.name == expected
    order = list(tree.root.subtree())
    assert set(order) == {tree.root, *found.values()} and len(order) == len(found) + 1
    assert all(order.index(child) < order.index(node) for node in order for child in node.children.values())
    assert list(tree.nodes()) == order[:-1] and order[-1] is tree.root
    path = list(tree.path(list(tree.keys(ids(word)))))
    assert path == [found[word[:n]] for n in range(1, len(word) + 1) if word[:n] in found]
    unnamed = PrefixTree(CHUNK, 128, (), False)
    assert all(node.name == "" for node in grown(unnamed, prompts).values())


def test_bytes_are_those_that_are_there() -> None:
    node = Node(None, b"", "", 0)
    assert (node.data_bytes, node.snapshot_bytes, node.used) == (0, 0, 0)
    node.data, node.snapshot = [np.zeros(3, np.int32), np.zeros((2, 5), np.uint8)], snapshot(99)
    assert (node.data_bytes, node.snapshot_bytes) == (22, 99)


def may_begin(length: int, n_tokens: int, step: int) -> bool:
    rest = n_tokens - length
    return rest > SMALL_TOKENS or (rest > 0 and length % step == 0)


@given(st.integers(1, 700), st.sampled_from([64, 128, 192, 256]))
def test_the_last_place_is_the_last_of_all(n_tokens: int, step: int) -> None:
    tree = PrefixTree(CHUNK, step, (), False)
    allowed = [n for n in range(n_tokens + 2 * CHUNK) if may_begin(n, n_tokens, step)]
    assert [n for n in range(n_tokens + 2 * CHUNK) if tree.may_begin(n, n_tokens)] == allowed
    assert tree.last_begin(n_tokens) == max([n for n in allowed if n % CHUNK == 0], default=0)


@given(st.integers(1, 1600), st.sampled_from([64, 256, 320, 512, 640]), st.data())
def test_short_rows_are_the_same_wherever_a_prompt_begins_and_is_cut(n: int, chunk: int, data: st.DataObject) -> None:
    begin, last = chunk * data.draw(st.integers(0, (n - 1) // chunk)), n // chunk * chunk
    first = last if n - last <= SHORT_ROWS else n
    if chunk > SHORT_ROWS and n - begin <= SHORT_ROWS:  # few rows that are read are all short
        assert first == begin
    cuts = sorted(data.draw(st.sets(st.integers(begin + 1, n))) | {begin, n})
    found: list[int] = []
    for start, end in pairwise(cuts):
        found += range(end - short_rows(start, end, n, chunk), end)
    assert found == list(range(first, n))
    assert not short_rows(n, n + 9, n, chunk)  # what is drawn behind it
    # A chunk that others may go on after is whole, so none of its rows are short.
    assert not found or found[0] >= last


@given(
    st.lists(words, max_size=4), words, st.integers(0, 70), st.sampled_from([64, 128, 192]), st.booleans(),
    st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)),
)  # fmt: skip
def test_the_longest_prefix_that_can_be_gone_on_from_is_found(
    prompts: list[str], word: str, tail: int, step: int, needs: bool, stated: set[int], filed: set[int]
) -> None:
    """In the tree or in files, chunk after chunk; with a state at its end where a model needs one; never all of it."""
    files: set[str] = set()
    tree = PrefixTree(CHUNK, step, (), needs, "root", files.__contains__)
    found = grown(tree, prompts)
    for i, node in enumerate(found.values()):
        node.snapshot = snapshot() if i in stated else None
    name, state = "root", {}
    for n, key in enumerate(tree.keys(ids(word)), 1):
        name = hashlib.sha256(name.encode() + key).hexdigest()
        in_tree = found.get(word[:n])
        if n in filed:
            files.add(f"{name}.blocks")
        if n + 10 in filed:
            files.add(f"{name}.state")
        has_state = n + 10 in filed or (in_tree is not None and in_tree.snapshot is not None)
        state[n] = (in_tree is not None or n in filed, has_state)
    tokens, best = ids(word, tail), 0
    for n in range(1, len(word) + 1):
        if not state[n][0]:
            break
        if may_begin(n * CHUNK, len(tokens), step) and (not needs or state[n][1]):
            best = n
    match = tree.match(tokens)
    assert match.length == best * CHUNK
    assert match.keys == tuple(tree.keys(tokens))[:best]


@given(st.lists(words, max_size=4), words, st.integers(0, 70), st.sampled_from([128, 192, 256]), st.integers(0, 300))
@example(["a"], "abb", 5, 256, 0)  # nobody went on from where this one does
@example(["aa"], "abb", 5, 256, 0)
@example(["abba"], "abb", 5, 256, 0)
def test_a_step_ends_where_steps_do_or_where_a_snapshot_is_wanted(
    prompts: list[str], word: str, tail: int, step: int, begin: int
) -> None:
    tree, tokens = PrefixTree(CHUNK, step, (), True), ids(word, tail)
    grown(tree, prompts)
    begin = min(begin, max(len(tokens) - 1, 0))
    end = min(len(tokens), (begin // step + 1) * step)
    assert tree.step_end(begin, tokens, cuts=False) == end
    shared = max((n for p in prompts for n in range(len(word) + 1) if p[:n] == word[:n]), default=0)
    # Where the prompt has a chunk that nobody had after chunks that somebody did, and they went on otherwise.
    goes_on = any(len(p) > shared and p[:shared] == word[:shared] for p in prompts)
    parting = shared * CHUNK if goes_on and shared < len(tokens) // CHUNK else 0
    cuts = [n for n in (parting, tree.last_begin(len(tokens))) if begin < n < end and may_begin(n, len(tokens), step)]
    assert tree.step_end(begin, tokens, cuts=True) == min(cuts, default=end)


@given(st.lists(words, max_size=3), words.filter(bool), st.integers(0, 63), st.data())
def test_snapshots_are_wanted_where_the_next_prompt_is_likely_to_go_on(
    prompts: list[str], word: str, tail: int, data: st.DataObject
) -> None:
    tree, tokens = PrefixTree(CHUNK, 128, (), True), ids(word, tail)
    found = grown(tree, [*prompts, word[: data.draw(st.integers(1, len(word)))]])
    for n in range(1, len(word) + 1):
        if (node := found.get(word[:n])) is None:
            break
        parts = bool(node.children) and n < len(word) and found.get(word[: n + 1]) is None
        ends = n * CHUNK >= tree.last_begin(len(tokens))
        assert tree.wants_snapshot(node, tokens) == (ends or parts)
        node.snapshot = snapshot()
        assert not tree.wants_snapshot(node, tokens)
    plain = PrefixTree(CHUNK, 128, (), False)
    assert not any(plain.wants_snapshot(node, tokens) for node in grown(plain, [word]).values())


@pytest.mark.parametrize(("step", "every"), [(64, 4096), (512, 4096), (192, 4224), (4096, 4096), (3072, 6144)])
def test_snapshots_are_wanted_now_and_then_in_a_long_prompt(step: int, every: int) -> None:
    """At the first place from SNAPSHOT_TOKENS on where steps end and chunks do."""
    assert SNAPSHOT_TOKENS == 4096
    tree, tokens, node = PrefixTree(CHUNK, step, (), True), np.zeros(13_000, np.int32), None
    node = tree.root
    wanted = []
    for key in tree.keys(tokens[:12_800]):
        node = tree.child(node, key)
        if tree.wants_snapshot(node, tokens):
            wanted.append(node.length)
    assert wanted == list(range(every, 12_801, every))


@given(
    st.lists(words.filter(bool), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), *[st.booleans()] * 4), min_size=14, max_size=14),
    st.booleans(),
)  # fmt: skip
def test_what_is_given_up_is_the_least_used_and_never_before_what_follows_it(
    prompts: list[str], states: list[tuple[int, bool, bool, bool, bool]], needs: bool
) -> None:
    pools, files = (BlockPool(60), BlockPool(60)), set()
    tree = PrefixTree(CHUNK, 128, pools, needs, "root", files.__contains__)
    found = grown(tree, prompts)
    for node, (used, held, others, in_use, stated) in zip(found.values(), states, strict=False):
        node.used = used
        if held:
            tree.hold(node, tuple((pool.take(),) for pool in pools))
            if others:
                pools[used % 2].share(node.blocks[used % 2][0])
        if in_use:
            tree.in_use.add(node)
        if stated:
            files.add(f"{node.name}.state")
    alone = {
        n
        for n in found.values()
        if n.blocks and all(p.holders(b[0]) == 1 for p, b in zip(pools, n.blocks, strict=True))
    }
    assert tree.reclaimable_tokens == CHUNK * len(alone)
    useful = {n for n in found.values() if not needs or any(f"{m.name}.state" in files for m in n.subtree())}
    assert {n for n in found.values() if tree.useful(n)} == useful

    def order(node: Node) -> tuple[int, int]:  # of equals the longest
        return node.used, -node.length

    # To ask changes nothing; then another sequence begins, after half of them, and then nobody does.
    for begins in (None, None, set(list(found.values())[::2]), set()):
        if begins is not None:
            tree.in_use = begins
        free = [n for n in tree.root.subtree() if n in alone and n not in tree.in_use]
        ends = [n for n in free if all(child.blocks is None for child in n.children.values())]
        over = [n for n in free if not any(below in tree.in_use for below in n.subtree())]
        least = tree.least_used()
        assert (least is None) == (not ends and not over)
        if least is not None:
            node, is_useful = least
            assert node in (ends or over) and order(node) == min(map(order, ends or over))
            assert is_useful == (node in useful and bool(ends))


def test_what_a_snapshot_of_the_tree_makes_useful() -> None:
    tree = PrefixTree(CHUNK, 128, (), True)
    found = grown(tree, ["ab", "b"])
    found["ab"].snapshot = snapshot()
    assert [tree.useful(found[name]) for name in ("a", "ab", "b")] == [True, True, False]
    assert tree.free(found["a"])
    tree.in_use.add(found["a"])
    assert not tree.free(found["a"]) and tree.free(found["ab"])
