"""Which windows are counted, in any order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats.profile import MAX_COMMENT_CHARS
from spark.pipeline.ledger import Ledger


@settings(max_examples=200)
@given(st.sets(st.integers(0, 3000)), st.dictionaries(st.integers(0, 3000), st.text(max_size=20), max_size=3))
def test_a_ledger_says_what_was_added_also_when_it_is_read_again(numbers: set[int], aside: dict[int, str]) -> None:
    ledger = Ledger(aside=aside)
    for number in numbers:
        ledger.add([number])
    ledger.add(numbers)
    found = Ledger.parse(["# another comment", *ledger.lines()])
    assert found is not None
    for each in (ledger, found):
        assert {n for n in range(3100) if n in each} == numbers and len(each) == len(numbers)
        assert all(n < each.end for n in {*numbers, *aside}) and each.aside == aside
        assert each.end <= max([0, *(n + 8 for n in {*numbers, *aside})])


def test_the_ledger_of_a_run_in_order_has_its_first_windows() -> None:
    for n in (0, 1, 7, 8, 1001):
        assert [i in Ledger.of_first(n) for i in range(n + 20)] == [True] * n + [False] * 20


def test_ten_million_windows_fit_in_a_checkpoint() -> None:
    ledger = Ledger.of_first(10**7)
    ledger.add(range(10**7 + 3, 10**7 + 100_000, 7))
    lines = ledger.lines()
    assert all(len(line) <= MAX_COMMENT_CHARS for line in lines) and sum(map(len, lines)) < 1 << 20
    found = Ledger.parse(lines)
    assert found is not None and len(found) == len(ledger) and found.end == ledger.end


@pytest.mark.parametrize("line", ["# spark-ledger: !", "# spark-ledger: AAAA"])
def test_a_damaged_ledger_is_an_error(line: str) -> None:
    with pytest.raises(ValueError):
        Ledger.parse([line])
    assert Ledger.parse(["# spark-checkpoint: {}"]) is None
