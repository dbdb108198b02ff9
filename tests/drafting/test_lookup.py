"""Lookup drafts against a search through all earlier places, and what bounds the memory of texts."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafting.lookup import LENGTHS, MOST_RUN, TOKEN_BYTES, Lookup, Memory
from engine.drafting.outcomes import MOST_TOKENS
from engine.drafting.source import Draft


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory(1 << 20)
    yield made
    made.close()


def proposed(lookup: Lookup, history: Sequence[int], most: int) -> Draft | None:
    """All of what is promised."""
    promise = lookup.promise(history, most)
    draft = None if promise is None else lookup.draft(promise.n_tokens)
    assert promise is None or draft is None or (promise.grade, promise.n_tokens) == (draft.grade, len(draft.tokens))
    return draft


def run_at(text: Sequence[int], place: int, end: Sequence[int]) -> int:
    """How many tokens ahead of a place equal the last ones, 64 at most."""
    n = 0
    while n < min(place, len(end), MOST_RUN) and text[place - 1 - n] == end[-1 - n]:
        n += 1
    return n


def candidates(text: Sequence[int], end: Sequence[int], own: bool) -> set[int]:
    """The last place behind the last tokens, of each length, where they are in a text; not the end of the own one."""
    found = set()
    for length in LENGTHS:
        last = list(end[-length:])
        places = [p for p in range(length, len(text) + (not own)) if list(text[p - length : p]) == last]
        found |= {places[-1]} if len(last) == length and places else set()
    return found


def continued(text: Sequence[int], place: int, most: int) -> tuple[int, ...]:
    """What follows a place; beyond the end of the own text it repeats itself."""
    found = list(text[place : place + most])
    while len(found) < most:
        found.append(found[len(found) - (len(text) - place)])
    return tuple(found)


texts = st.lists(st.integers(0, 3), min_size=1, max_size=120)


def place_of(run: Sequence[int]) -> int:
    """Where the table of a short text has a run: the twin of `hash_each` and `Table::of` of cpu/lookup.cpp."""
    odd, words = 0x9E3779B97F4A7C15, 1 << 64

    def mixed(h: int) -> int:
        h = (h ^ h >> 32) * 0xD6E8FEB86659FD93 % words
        return h ^ h >> 32

    summed = sum((token + 1) * (mixed((i + 1) * odd % words) | 1) for i, token in enumerate(reversed(run)))
    return summed * odd % words >> 54


def noted(text: Sequence[int]) -> set[int]:
    """The last place of each length whose run lies where that of the end does, mostly as it is the same."""
    ends = {length: place_of(text[-length:]) for length in LENGTHS if length <= len(text)}
    places = {
        length: [p for p in range(length, len(text)) if place_of(text[p - length : p]) == end]
        for length, end in ends.items()
    }
    return {of[-1] for of in places.values() if of}


@settings(max_examples=300, deadline=None)
@given(texts, st.lists(st.integers(1, 9), max_size=12), st.integers(1, 40))
def test_a_draft_is_what_followed_the_longest_run(text: list[int], cuts: list[int], most: int) -> None:
    """Of the runs that the table has; one whose hash another has taken is not found (below)."""
    memory = Memory(0)
    lookup, known = Lookup(memory), 0
    for end in sorted({*np.cumsum([1, *cuts]).tolist(), len(text)}):
        if end > len(text):
            break
        history, known = text[:end], end
        draft = proposed(lookup, history, most)
        runs = {place: run_at(history, place, history) for place in noted(history)}
        best = max(runs.values(), default=0)
        assert (draft is not None) == (best >= LENGTHS[0])
        if draft is not None:
            assert lookup.run == best
            assert draft.tokens in {continued(history, p, most) for p, run in runs.items() if run == best}
    assert known == len(text)
    lookup.close()
    memory.close()


@pytest.mark.slow
def test_hardly_any_run_takes_another_s_place() -> None:
    rng = np.random.default_rng(6)
    found = []
    for n in range(200):
        text = rng.integers(0, 4, 2 + n % 119).tolist()
        for end in range(1, len(text), 7):
            history = text[:end]
            places = noted(history), candidates(history, history, own=True)
            best, wanted = (max((run_at(history, p, history) for p in each), default=0) for each in places)
            found.append(best == wanted)
    assert len(found) > 1500 and np.mean(found) > 0.99


@pytest.mark.slow
@settings(max_examples=150)
@given(st.lists(texts, min_size=1, max_size=5), texts, st.integers(1, 20))
def test_earlier_texts_are_looked_in_where_their_runs_are_longer(
    earlier: list[list[int]], text: list[int], most: int
) -> None:
    memory = Memory(1 << 18)
    for one in earlier:
        memory.add(one)
    lookup = Lookup(memory)
    draft = proposed(lookup, text, most)
    own = max((run_at(text, p, text) for p in candidates(text, text, own=True)), default=0)
    there = [run_at(one, p, text) for one in earlier for p in range(1, len(one) + 1)]
    assert (draft is None) or own >= 2 or max(there) >= 2
    if draft is not None:
        run = max([own, *there])
        assert lookup.run <= run
        whole = [continued(text, p, most) for p in range(1, len(text))]
        whole += [tuple(one[p : p + most]) for one in earlier for p in range(1, len(one))]
        assert draft.tokens in whole
    lookup.close()
    memory.close()


@settings(max_examples=150)
@given(texts, st.floats(0.0, 3.0))
def test_drafts_of_which_too_little_is_expected_are_not_wanted(text: list[int], least: float) -> None:
    memory, other = Memory(0), Memory(0)
    every, some = Lookup(memory), Lookup(other)
    for end in range(1, len(text) + 1):
        promise, wanted = every.promise(text[:end], 9), some.promise(text[:end], 9, least)
        assert (wanted is not None) == (promise is not None and sum(promise.chances or ()) >= np.float32(least))
        assert wanted is None or wanted == promise
    every.close()
    some.close()
    memory.close()
    other.close()


@settings(max_examples=150)
@given(texts, st.integers(1, 40))
def test_chances_are_of_each_token_and_all_before_it(text: list[int], most: int) -> None:
    memory = Memory(0)
    lookup = Lookup(memory)
    for end in range(1, len(text) + 1):
        promise = lookup.promise(text[:end], most)
        if promise is not None:
            assert promise.chances and len(promise.chances) <= min(promise.n_tokens, MOST_TOKENS)
            assert list(promise.chances) == sorted(promise.chances, reverse=True)
            assert promise.chances[-1] > 0.0 and promise.chances[0] < 1.0
            assert len(promise.chances) == min(promise.n_tokens, MOST_TOKENS) or promise.chances[-1] < 0.02
    lookup.close()
    memory.close()


def followed(context: list[int], next_tokens: list[int], budget: int) -> float:
    """The chance of the last next token to be the next one, where a context was followed by each of some."""
    new, text, memory = iter(range(1000, 90_000)), list[int](), Memory(budget)
    for token in next_tokens:
        text += [*context, token, *(next(new) for _ in range(5))]
    lookup = Lookup(memory)
    promise = lookup.promise([*text, *context], 1)
    assert promise is not None and promise.chances is not None
    assert lookup.draft(1).tokens == (next_tokens[-1],)
    lookup.close()
    memory.close()
    return promise.chances[0]


@pytest.mark.parametrize("budget", [0, 1 << 20])  # counts are the text's own, or the memory's
def test_what_followed_more_often_is_more_likely(budget: int) -> None:
    context, alike = list(range(9)), [7, 7, 7, 7]
    seldom, mostly = followed(context, [5, 6, 5, 8, 7], budget), followed(context, [5, *alike], budget)
    assert seldom < 0.35 < 0.7 < mostly < followed(context, 3 * alike, budget)
    assert followed([1, 2], [5, 6, 7], budget) < followed(context, [7], budget)  # so little in common says little


@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_what_drafts_are_worth_is_learned_from_what_came(budget: int) -> None:
    """Of pairs of tokens that come twice, the next token is always another one; then always the same."""
    memory, new = Memory(budget), iter(range(1_000_000))

    def chance(right: bool) -> float:
        lookup, (a, b, c, *others) = Lookup(memory), (next(new) for _ in range(9))
        promise = lookup.promise([a, b, c, *others, a, b], 2)
        assert promise is not None and promise.chances is not None
        lookup.promise([a, b, c, *others, a, b, c if right else next(new)], 2)
        lookup.close()
        return promise.chances[0]

    wrong = [chance(right=False) for _ in range(300)]
    right = [chance(right=True) for _ in range(300)]
    assert wrong[-1] < wrong[0] / 2 and right[-1] > 2 * right[0]
    assert wrong == sorted(wrong, reverse=True) and right == sorted(right)
    memory.close()


@pytest.mark.parametrize("n_before", [0, 40])  # tokens that make the index grow in between
def test_it_is_known_how_runs_went_on_before(memory: Memory, n_before: int) -> None:
    """By what followed a run each time: 0: once; then 2: the same, 3: twice the same; 1: then otherwise."""
    new = iter(range(100, 9000))
    text = [next(new) for _ in range(n_before)]
    expected = {"": None, "a": 0, "aa": 2, "aaa": 3, "aaaa": 3, "aab": 1, "aabb": 2, "ab": 1, "aba": 1, "abaa": 2}
    for run, (followed, seen) in enumerate(expected.items()):
        pair = [2 * run, 2 * run + 1]
        for token in followed:
            text += [next(new), *pair, 90 + "ab".index(token), *(next(new) for _ in range(n_before))]
        lookup = Lookup(memory)
        found = None
        for end in range(1, len(text) + 1, 3):  # with every token and in pieces alike
            lookup.promise(text[:end], 1)
        found = proposed(lookup, [*text, next(new), *pair], 1)
        assert (None if found is None else lookup.seen) == seen
        assert found is None or found.tokens == (90 + "ab".index(followed[-1]),)
        lookup.close()


def test_what_earlier_texts_went_on_with_counts(memory: Memory) -> None:
    for text, seen in (((1, 2, 3), 0), ((1, 2, 3, 4), 2), ((1, 2, 3), 3), ((1, 2, 5), 1)):
        memory.add(text)
        lookup = Lookup(memory)
        found = proposed(lookup, [1, 2], 1)
        assert found is not None and lookup.seen == seen and found.tokens == (text[2],)
        lookup.close()


def test_a_prediction_is_looked_in_first_of_all(memory: Memory) -> None:
    rng = np.random.default_rng(1)
    said = rng.integers(0, 50_000, 200).tolist()
    lookup = Lookup(memory, said)
    history = [*rng.integers(0, 50_000, 30).tolist(), *said[100:104]]
    draft = proposed(lookup, history, 31)
    assert draft is not None and draft.tokens == tuple(said[104:135])
    history += said[104:190]
    draft = proposed(lookup, history, 31)
    assert draft is not None and draft.tokens == tuple(said[190:]) and lookup.run == MOST_RUN
    lookup.close()
    memory.add(history)
    other = Lookup(memory)
    assert proposed(other, said[:20], 5) is None  # what was predicted, and never said, is no text of a request


def test_a_session_that_comes_again_is_kept_once(memory: Memory) -> None:
    rng = np.random.default_rng(2)
    turns = [rng.integers(0, 1000, n).tolist() for n in (3000, 700, 1500)]
    for n in (1, 2, 3, 3):
        memory.add([token for turn in turns[:n] for token in turn])
    lookup = Lookup(memory)
    draft = proposed(lookup, [*turns[0][-9:], *turns[1][:6]], 31)  # across the end of the first text
    assert draft is not None and draft.tokens == tuple(turns[1][6:37])
    # Twice the text, and it would not have fitted: the beginning is still there.
    few = Memory((sum(map(len, turns)) + 300) * TOKEN_BYTES)
    for n in (1, 2, 3, 3):
        few.add([token for turn in turns[:n] for token in turn])
    first = proposed(Lookup(few), turns[0][:12], 20)
    assert first is not None and first.tokens == tuple(turns[0][12:32])
    few.close()


def test_the_oldest_texts_go_when_there_is_no_room() -> None:
    memory = Memory(1200 * TOKEN_BYTES)
    rng = np.random.default_rng(3)
    each = [rng.integers(0, 50_000, n).tolist() for n in (500, 400, 600, 5000, 300)]
    drafts = []
    for one in each:
        memory.add(one)
        drafts.append([proposed(Lookup(memory), text[-30:-10], 9) for text in each])
    expected = [tuple(text[-10:-1]) for text in each]
    got = [[None if d is None else d.tokens for d in row] for row in drafts]
    assert got[1] == [*expected[:2], None, None, None]
    assert got[2][1:3] == expected[1:3] or got[2][2] == expected[2]
    assert got[3] == [None, None, None, expected[3], None]  # of one that is too long the end is kept
    assert got[4][4] == expected[4]
    memory.close()


@pytest.mark.parametrize("budget", [0, 1, 40 * TOKEN_BYTES])
def test_without_room_only_the_own_text_is_looked_in(budget: int) -> None:
    memory = Memory(budget)
    assert memory.n_tokens == 0
    memory.add(list(range(100)))
    assert proposed(Lookup(memory), list(range(50)), 5) is None
    draft = proposed(Lookup(memory), [1, 2, 3, 1, 2], 4)
    assert draft is not None and draft.tokens == (3, 1, 2, 3)
    memory.close()


class Counting:
    """A library that remembers what was destroyed."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.destroyed: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def spark_memory_destroy(self, handle: int) -> None:
        self.destroyed.append(handle)
        self._library.spark_memory_destroy(handle)


@pytest.mark.parametrize("closes", [False, True])
def test_memory_that_nobody_looks_in_is_given_back_once(closes: bool) -> None:
    memory = Memory(1 << 20)
    handle, library = memory.handle, Counting(memory._library)
    memory._library = library
    source = Lookup(memory)
    if closes:
        source.close()
        memory.close()
        assert library.destroyed == [handle]
    del memory
    assert library.destroyed == [handle] * closes  # who looks in it keeps it
    source.close()
    del source
    gc.collect()
    assert library.destroyed == [handle]
