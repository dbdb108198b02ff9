"""Trees of drafts (benchmarks/draft_trees.py): the likeliest paths, and what stays of them, by trying all."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.draft_trees import Block, Written, accepted, chain, chosen, fixed, likeliest, tree, walk


def block_of(seed: int, places: int, choices: int) -> Block:
    """Random choices of each place; chances fall."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(29)[:choices] for _ in range(places)]).astype(np.int32)
    return Block(ids, -np.sort(rng.exponential(1.0, (places, choices)), axis=1))


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 5), st.integers(0, 90))
def test_a_tree_has_the_likeliest_paths(seed: int, places: int, choices: int, n: int) -> None:
    """Of all prefixes of all paths; whoever goes on comes behind what it goes on from."""
    block = block_of(seed, places, choices)
    every = [path for k in range(1, places + 1) for path in product(range(choices), repeat=k)]
    sums = sorted((sum(block.chances[i, c] for i, c in enumerate(path)) for path in every), reverse=True)
    found = tree(block, n)
    assert [chance for _, chance in found] == pytest.approx(sums[:n])
    paths = [path for path, _ in found]
    assert len(set(paths)) == len(paths) == min(n, len(every))
    for at, path in enumerate(paths):
        assert len(path) == 1 or path[:-1] in paths[:at]


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(0, 40), st.integers(0, 7))
def test_what_stays_is_the_longest_path_that_is_due(seed: int, choices: int, n: int, n_due: int) -> None:
    block, rng = block_of(seed, 4, choices), np.random.default_rng([seed, 1])
    due = [int(rng.choice([*block.ids[i % 4], 31])) for i in range(n_due)]
    paths = [path for path, _ in tree(block, n)]
    said = [tuple(int(block.ids[i, c]) for i, c in enumerate(path)) for path in paths]
    assert accepted(block, paths, due) == max((len(s) for s in said if s == tuple(due[: len(s)])), default=0)


def test_a_chain_is_the_likeliest_of_each_place() -> None:
    block = block_of(3, 4, 5)
    assert [path for path, _ in chain(block, 9)] == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    sums = [chance for _, chance in chain(block, 2)]
    assert sums == pytest.approx([block.chances[0, 0], block.chances[0, 0] + block.chances[1, 0]])


def test_the_likeliest_choices_have_their_chances() -> None:
    logits = np.random.default_rng(4).standard_normal((3, 41)).astype(np.float32) * 3
    block = likeliest(logits, 5)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    for place in range(3):
        assert block.ids[place].tolist() == sorted(range(41), key=lambda i: -logits[place, i])[:5]
        assert block.chances[place] == pytest.approx(exact[place, block.ids[place]])


def test_a_reply_is_walked_behind_what_stays() -> None:
    """Of nine tokens and places that are right once in two: each step has one token and what stays of the draft."""
    reply = tuple(range(9))
    right = np.array([[[n + 1 + place if (n + place) % 3 else 30] for place in range(4)] for n in range(8)])
    blocks = tuple(Block(ids.astype(np.int32), np.full((4, 1), -0.5)) for ids in right)
    got = walk([Written(reply, blocks)], fixed(chain, 3), lambda n: 1.0 + n)
    # Behind token 0 nothing stays (1 is missed). Then 2 and 3 come, and 4 by itself, and so on to the end.
    assert got["tokens"] == 8 and got["steps"] == 4
    assert got["drafted"] == 3 + 3 + 3 + 0 and got["seconds"] == 4 * 2.0 + got["drafted"]


def test_as_many_as_go_furthest() -> None:
    """Two sure tokens and then none: two, unless the second takes too long; none where no step with a draft pays."""
    block = Block(np.zeros((4, 2), np.int32), np.log([[0.9, 0.1], [0.9, 0.1], [0.01, 0.01], [0.01, 0.01]]))
    assert len(chosen(chain, lambda n: 1 + 0.1 * n)(block, 9)) == 2
    assert len(chosen(chain, lambda n: (0, 1, 1.1, 9, 9)[min(n, 4)])(block, 9)) == 1
    assert len(chosen(chain, lambda n: n)(block, 9)) == 0
    assert len(chosen(chain, lambda n: 1 + 0.1 * n)(block, 1)) == 1
