"""Whose routing a calibration records: enough sessions, equal shares, whatever the length of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats.trace import RoutingTrace, TraceWriter
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


MODEL, CTX_TOKENS = "ab" * 32, 300
N_LAYER, N_EXPERT, A = 3, 7, 2


def write_trace(folder: Path, windows: Sequence[Window]) -> None:
    """Windows as a trace has them, each one's routing its own."""
    with TraceWriter(folder, MODEL, A, 5, False, n_layer=N_LAYER, n_expert=N_EXPERT) as writer:
        for window in windows:
            n_tokens = len(window.tokens)
            draws = np.random.default_rng([window.window, *window.session_id.encode()])
            experts = draws.random((n_tokens, N_LAYER, N_EXPERT)).argsort(axis=2)[:, :, :A]
            position = window.window * (CTX_TOKENS + 1) + np.arange(n_tokens)
            weights = np.ones(experts.shape, np.float32)
            writer.append(window.session_id, position, window.generated, range(N_LAYER), experts, weights, None)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(lengths.filter(len), st.randoms(use_true_random=False))
def test_what_is_chosen_by_does_not_depend_on_the_order_of_the_trace(
    tmp_path_factory: pytest.TempPathFactory, sessions: list[tuple[int, int, int]], random: Random
) -> None:
    """One machine names a session that was displaced first, a cluster with --trace ends one's last window first."""
    windows: list[Window] = []
    for i, (root, n, g) in enumerate(sessions):
        windows += session(f"r{root}" + f"/agent{i}" * (n % 2), n, min(n, g), 100)
    windows = list({(w.session_id, w.window): w for w in windows}.values())
    shuffled = random.sample(windows, len(windows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "SAMPLE_BYTES", 2000 * 80)
        patch.setattr(sample, "RECORDED_BYTES", 4000 * 80)
        patch.setattr(evidence, "affordable", lambda *_: 100)
        found = Sample(N_LAYER, A)
        taken = [window for window in windows if found.takes(window)]
        order = {(w.session_id, w.window): i for i, w in enumerate(windows) if w.session_id in found}

    def read(recorded: Sequence[Window]) -> RoutingTrace | None:
        folder = tmp_path_factory.mktemp("trace")
        write_trace(folder, recorded)
        return sample.recorded(folder, MODEL, found, order, CTX_TOKENS)

    expected = read(taken)
    for each in map(read, (shuffled, windows, [w for w in shuffled if any(w is each for each in taken)])):
        if expected is None or each is None or not expected.session.size:
            assert each is None or not each.session.size
            continue
        assert each.session_ids == expected.session_ids
        for name in ("session", "position", "generated", "experts"):
            np.testing.assert_array_equal(getattr(each, name), getattr(expected, name))
