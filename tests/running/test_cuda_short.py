"""Short rows in whole models: a prompt has the bits that it has alone, however it is cut and whoever is beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from engine.memory import prefix_tree
from engine.memory.blocks import Sequence
from engine.ops.cuda import flash, ops, short
from engine.running import loaded as loaded_model
from engine.running.loaded import Loaded, load
from engine.running.stepping import Span, short_rows
from tests.engine_runs import config
from tests.tiny_models import SMALL, tiny_path

CHUNK, SHORT = 64, 40
TOKENS = np.random.default_rng(21).integers(0, 301, 3 * CHUNK).astype(np.int32)
RESTS = (1, 31, 33, 40, 41, 63)
Open = Callable[..., Loaded]
pytestmark = [pytest.mark.usefixtures("on_the_device"), pytest.mark.timeout(600)]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Models with short pieces and few short rows, closed at the end."""
    for module in (flash, loaded_model):
        monkeypatch.setattr(module, "PIECE_TOKENS", CHUNK)
    monkeypatch.setattr(prefix_tree, "SHORT_ROWS", SHORT)
    every: list[Loaded] = []

    def open_model(arch: str = "qwen3moe", **options: Any) -> Loaded:
        given = {"ctx_tokens": 600, "chunk_tokens": 4 * CHUNK, "cpu_experts": "auto"} | options
        every.append(load(config(tiny_path(arch, small=True), **given)))
        return every[-1]

    yield open_model
    for loaded in every:
        loaded.close()


def span(loaded: Loaded, sequence: Sequence, tokens: np.ndarray, n: int) -> Span:
    """The next n tokens of a prompt, as a task feeds them."""
    begin = sequence.length
    rows = loaded.prefixes.short_rows(begin, begin + n, len(tokens))
    return Span(sequence, tokens[begin : begin + n], np.zeros(n, bool), (n - 1,), short=rows)


def read(loaded: Loaded, tokens: np.ndarray, steps: tuple[int, ...], begin: int = 0) -> np.ndarray:
    """The last logits of a prompt, `begin` tokens of which are reused, in steps of so many."""
    sequence, length = loaded.resume(tokens)
    assert length == begin and begin + sum(steps) == len(tokens)
    for n in steps:
        result = loaded.steps.run([span(loaded, sequence, tokens, n)])
        loaded.prefixes.insert(sequence, tokens)
    logits = result.logits[0].copy()
    sequence.release()
    return logits


def alone(loaded: Loaded, n: int) -> np.ndarray:
    """The last logits of n tokens in one step, of which nothing is reused."""
    loaded.prefixes.clear()
    return read(loaded, TOKENS[:n], (n,))


@pytest.mark.slow
@pytest.mark.parametrize("rest", RESTS)
def test_a_prompt_has_its_bits_in_any_cut_and_after_any_prefix(opened: Open, rest: int) -> None:
    loaded, n = opened(), 2 * CHUNK + rest
    expected = alone(loaded, n)
    # A rest that would be a short step by itself stays with the piece before it.
    cuts = [(CHUNK, CHUNK + rest), *([(2 * CHUNK, rest), (CHUNK, CHUNK, rest)] if rest > 32 else [])]
    for steps in cuts:
        loaded.prefixes.clear()
        assert np.array_equal(read(loaded, TOKENS[:n], steps), expected), steps
    # After what a longer prompt, all of whose rows there are long, and a shorter one have left.
    begin = loaded.prefixes.last_begin(n)
    assert begin == (2 * CHUNK if rest > 32 else CHUNK)
    for before in (3 * CHUNK, begin + CHUNK // 2):
        alone(loaded, before)
        end = min(before // CHUNK * CHUNK, begin)
        assert np.array_equal(read(loaded, TOKENS[:n], (n - end,), end), expected), before


@pytest.mark.slow
@pytest.mark.parametrize("ahead_tokens", [128, 33])
def test_no_residency_changes_a_bit(opened: Open, ahead_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "AHEAD_TOKENS", ahead_tokens)
    found = []
    for percent in (100, 60, 10):
        loaded = opened(policy="lru", residency_pct=percent)
        found.append([alone(loaded, n) for n in (SHORT, CHUNK + 35, 2 * CHUNK + 39)])
        assert (min(loaded.shares.placement.slots_per_layer) == loaded.source.config.n_expert) == (percent == 100)
    for others in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(others, found[0], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe", "gemma4", "laguna"])
def test_prompts_beside_each_other_have_the_bits_that_they_have_alone(opened: Open, arch: str) -> None:
    """Short rows of several in a step, with long ones between them."""
    loaded = opened(arch)
    lengths = (CHUNK + 35, SHORT, CHUNK + 50) if arch == "qwen3moe" else (SHORT, CHUNK + 35)
    expected = [alone(loaded, n) for n in lengths]
    loaded.prefixes.clear()
    sequences = [loaded.kv.sequence() for _ in lengths]
    spans = [span(loaded, s, TOKENS[:n], n) for s, n in zip(sequences, lengths, strict=True)]
    rows = short_rows(spans)
    first = CHUNK if arch == "qwen3moe" else 0
    assert rows is not None and rows.mask is not None and (rows.n, rows.first) == (35 + SHORT, first)
    found = loaded.steps.run(spans).logits.copy()
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)
    for sequence in sequences:
        sequence.release()


def test_short_rows_have_other_bits_than_long_ones_and_a_whole_step_of_them_no_long_products(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, seen = opened(), list[tuple[int, bool]]()
    run = short.ShortExperts.__call__

    def noted(self: Any, h: Any, *more: Any) -> None:
        seen.append((len(h), more[-2] is not None))  # jobs beside it
        run(self, h, *more)

    monkeypatch.setattr(short.ShortExperts, "__call__", noted)
    found = {n: alone(loaded, n) for n in (SHORT, SHORT + 1)}
    assert seen == [(SHORT, False)] * SMALL["qwen3moe"]["n_layer"]  # the other has none
    monkeypatch.setattr(prefix_tree, "SHORT_ROWS", 0)
    for n, logits in found.items():
        assert np.array_equal(alone(loaded, n), logits) == (n > SHORT)
