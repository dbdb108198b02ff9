"""Calls of the CPU kernels that are noted and made again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.ground.cpu_library import SIGNATURES
from engine.ops import cpu
from engine.ops.cpu_repeat import Noted
from engine.ops.cpu_workspace import Workspace, kernels
from engine.running.loaded import Loaded, load
from engine.running.stepping import Span
from tests.engine_runs import config
from tests.op_cases import LIMITS, gain, weights
from tests.tiny_models import MODELS, tiny_path

T, N, K = 3, 5, 64


@pytest.fixture
def ws() -> Iterator[Workspace]:
    made = cpu.workspace(LIMITS, 1)
    yield made
    made.close()


def test_every_operation_can_be_called_again() -> None:
    numbers = [kernels().spark_operation(name.encode()) for name in SIGNATURES]
    assert sorted(numbers) == list(range(len(SIGNATURES)))
    assert kernels().spark_operation(b"spark_read") == -1


def test_what_was_noted_reads_and_writes_where_it_did(ws: Workspace) -> None:
    rng = np.random.default_rng(0)
    w, norm = weights(QType.Q8_0, N, K, 1), gain(2, K)
    x, h, y = (np.zeros((T, n), np.float32) for n in (K, K, N))
    noted = None
    for turn in range(3):
        x[...] = rng.standard_normal((T, K))
        expected = [np.empty_like(h), np.empty_like(y)]
        cpu.norm(ws, x, norm, 1e-6, expected[0])
        cpu.product(ws, w, expected[0], expected[1])

        def work() -> None:
            cpu.norm(ws, x, norm, 1e-6, h)
            cpu.product(ws, w, h, y)

        noted = ws.repeat(noted, work if turn == 0 else pytest.fail)
        np.testing.assert_array_equal(h, expected[0])
        np.testing.assert_array_equal(y, expected[1])


def test_what_was_forgotten_is_noted_anew(ws: Workspace) -> None:
    x, h = np.ones((T, K), np.float32), np.zeros((T, K), np.float32)
    norm, turns = np.ones(K, np.float32), []

    def work() -> None:
        turns.append(1)
        cpu.norm(ws, x, norm, 1e-6, h)

    noted = ws.repeat(None, work)
    assert ws.repeat(noted, work) is noted and len(turns) == 1
    for _ in range(1100):  # arrays that nobody will use again
        cpu.norm(ws, np.ones((1, K), np.float32), norm, 1e-6, np.zeros((1, K), np.float32))
    again = ws.repeat(noted, work)
    assert again is not noted and len(turns) == 2
    assert ws.repeat(again, work) is again and len(turns) == 2


def test_a_refused_call_says_which_and_ends_the_step(ws: Workspace) -> None:
    table, norm = weights(QType.F32, N, K, 3), np.ones(K, np.float32)
    tokens, x = np.zeros(T, np.int32), np.zeros((T, K), np.float32)
    later = np.zeros((T, K), np.float32)

    def work() -> None:
        cpu.embed(ws, table, tokens, x)
        cpu.norm(ws, x, norm, 1e-6, later)

    noted = ws.repeat(None, work)
    tokens[1] = N
    later[...] = 7
    with pytest.raises(IndexError, match="spark_embed"):
        ws.repeat(noted, pytest.fail)
    assert (later == 7).all()
    tokens[1] = 0
    assert ws.repeat(noted, pytest.fail) is noted and (later != 7).all()


def steps(loaded: Loaded) -> list[np.ndarray]:
    """Logits of steps of several shapes, each taken more than once."""
    rng, found = np.random.default_rng(3), []
    sequences = [loaded.kv.sequence() for _ in range(3)]
    for lengths in ((20,), (1,), (1,), (3, 1), (1, 1, 1), (3, 1), (1, 1, 1), (1,), (40,), (1, 1, 1)):
        spans = [
            Span(s, rng.integers(0, 60, n).astype(np.int32), np.ones(n, bool), (n - 1,))
            for s, n in zip(sequences, lengths, strict=False)
        ]
        found.append(loaded.steps.run(spans).logits.copy())
    return found


@pytest.mark.parametrize("name", sorted(MODELS))
def test_steps_have_the_bits_of_steps_that_are_not_repeated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    run = Noted.run

    def counted(self: Noted, *given: Any) -> tuple[int, str]:
        runs.append(1)
        return run(self, *given)

    monkeypatch.setattr(Noted, "run", counted)
    options = config(tiny_path(name), device="cpu", policy="lru", residency_pct=50.0, ctx_tokens=250)
    repeated = load(options)
    found, uses = steps(repeated), (repeated.residency.totals(), repeated.residency.map())
    repeated.close()
    assert len(runs) == 5
    monkeypatch.setattr(Workspace, "repeat", lambda self, noted, work: work())
    plain = load(options)
    for a, b in zip(found, steps(plain), strict=True):
        np.testing.assert_array_equal(a, b)
    assert uses == (plain.residency.totals(), plain.residency.map())
    plain.close()
