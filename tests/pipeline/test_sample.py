"""Whose routing a calibration records: enough sessions, equal shares, whatever the length of the run."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.placing import evidence
from engine.placing.evidence import MIN_ROOTS
from spark.pipeline import sample
from spark.pipeline.sample import Sample
from spark.pipeline.tokens import Window
from spark.speech.sessions import root_of


def session(name: str, n_tokens: int, generated: int, window: int = 4096) -> list[Window]:
    marks = np.arange(n_tokens) * generated // n_tokens != (np.arange(n_tokens) + 1) * generated // n_tokens
    return [
        Window(name, i // window, np.zeros(len(part), np.int32), part)
        for i in range(0, n_tokens, window)
        for part in [marks[i : i + window]]
    ]


@pytest.mark.parametrize("shape", [(48, 8), (94, 8), (40, 8), (6, 4)])
@pytest.mark.parametrize("generated", [1000, 20_000, 60_000])
def test_long_sessions_are_enough_sessions(shape: tuple[int, int], generated: int) -> None:
    """Each used to be taken whole or not at all, and none of the long ones was."""
    found = Sample(*shape)
    windows = [w for i in range(50) for w in session(f"s{i}", 3 * generated, generated)]
    n_taken = Counter[str]()
    for window in windows:
        n_taken[window.session_id] += int(window.generated.sum()) * found.takes(window)
    most = evidence.affordable(*shape)
    assert len(found.tokens) >= 9 >= MIN_ROOTS
    assert sum(n_taken[name] for name in found.tokens) >= min(most, 50 * generated) * 0.9
    assert sum(found.tokens.values()) * found._row_bytes <= sample.SAMPLE_BYTES


def test_five_long_sessions_are_enough() -> None:
    found = Sample(48, 8)
    for i in range(5):
        for window in session(f"s{i}", 60_000, 30_000):
            found.takes(window)
    assert len(found.tokens) == 5


def test_windows_that_are_too_long_are_told() -> None:
    found = Sample(48, 8)
    assert not any(found.takes(window) for window in session("s", 1 << 20, 1000, 1 << 20))
    assert found.has_too_long and not found.tokens


lengths = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 900), st.integers(0, 60)), max_size=40)


@settings(deadline=None)
@given(lengths, st.integers(0, 60))
def test_what_comes_later_never_needs_what_was_not_recorded(sessions: list[tuple[int, int, int]], end: int) -> None:
    """The roots of a sample have their first windows recorded, so many tokens of them, wherever the file ends."""
    windows = [w for root, n, g in sessions for w in session(f"r{root}" + "/agent" * (n % 2), n, min(n, g), 100)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "SAMPLE_BYTES", 2000 * 80)
        patch.setattr(sample, "RECORDED_BYTES", 4000 * 80)
        patch.setattr(evidence, "affordable", lambda *_: 100)
        found = Sample(4, 4)
        taken = [(window, found.takes(window)) for window in windows[:end]]
    recorded: dict[str, int] = {}
    for name, n_tokens in found.tokens.items():
        mine = [(w, t) for w, t in taken if root_of(w.session_id) == name]
        assert [t for _, t in mine] == sorted([t for _, t in mine], reverse=True)
        recorded[name] = sum(len(w.tokens) for w, t in mine if t)
        assert recorded[name] == n_tokens
    assert sum(len(w.tokens) for w, t in taken if t) <= 4000 * 80 // found._row_bytes
    assert sum(recorded.values()) <= 2000 * 80 // found._row_bytes
