"""Every family on a device: against `transformers`, the CPU backend, and itself at other residencies and step sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine import models
from engine.ops.cuda import gpu
from engine.running.loaded import load
from engine.running.stepping import Span
from engine.serving.scheduler import Engine
from tests.engine_runs import config, feed, generate
from tests.tiny_models import (
    BLOCK_TYPES,
    MODELS,
    everything,
    k_quant_mix,
    nmse,
    random_path,
    read_weights,
    tiny_path,
    transformers_choices,
)

pytestmark = [pytest.mark.usefixtures("on_the_device"), pytest.mark.slow]

PROMPT = np.random.default_rng(50).integers(0, 301, 104).astype(np.int32)
OPTIONS = {"ctx_tokens": 200, "chunk_tokens": 70}
NVFP4 = everything(QType.NVFP4)


@pytest.fixture(scope="module", params=[name for name in models.known() if name != "qwen3moe"])
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(arch: str) -> Path:
    return tiny_path(arch, small=True)


@pytest.mark.parametrize(
    ("name", "types"),
    [*((name, k_quant_mix) for name in MODELS), ("laguna", NVFP4)],
    ids=lambda v: v if isinstance(v, str) else "" if v is k_quant_mix else "NVFP4",
)
def test_prefill_is_near_transformers(name: str, types: Any) -> None:
    path = tiny_path(name, types, small=True)
    loaded = load(config(path, **OPTIONS))
    logits, experts = feed(loaded, PROMPT[:41], [41])
    oracle, _ = transformers_choices(loaded.source.config, read_weights(path), PROMPT[:41], imposed=experts)
    loaded.close()
    assert nmse(logits, oracle) < 1e-3


def test_decoding_with_the_same_routing_is_near_the_cpu_backends(model: Path, tmp_path: Path) -> None:
    decoding_is_near_the_cpu_backends(model, tmp_path)


def test_decoding_with_factors_is_near_the_cpu_backends(tmp_path: Path) -> None:
    decoding_is_near_the_cpu_backends(tiny_path("laguna", NVFP4, small=True), tmp_path)


def decoding_is_near_the_cpu_backends(model: Path, tmp_path: Path) -> None:
    cpu = load(config(model, device="cpu", **OPTIONS))
    tokens = PROMPT[:17]  # more than a window
    expected, experts = feed(cpu, tokens, [1] * len(tokens))
    replay = None
    if experts.size:
        replay = tmp_path / "choices.npy"
        np.save(replay, experts.swapaxes(0, 1))
    cuda = load(config(model, replay=replay, **OPTIONS))
    sequence, found = cuda.kv.sequence(), []
    for token in tokens:
        found.append(cuda.steps.run([Span(sequence, token[None], np.ones(1, bool), (0,))]).logits[0].copy())
    assert nmse(np.stack(found), expected) < 1e-3
    cpu.close()
    cuda.close()


def test_a_row_of_a_step_is_a_row_alone(model: Path) -> None:
    alone, together = load(config(model, **OPTIONS)), load(config(model, **OPTIONS))
    a = feed(alone, PROMPT[:48], [35, *[1] * 13])[0]
    b = feed(together, PROMPT[:48], [35, 8, 2, 3])[0]
    assert np.array_equal(a[35:].view(np.uint32), b[35:].view(np.uint32))
    alone.close()
    together.close()


def test_tokens_do_not_depend_on_residency(arch: str, model: Path) -> None:
    found = {}
    for percent in (100, 10) if arch == "qwen35" else (100, 30, 10):  # a dense model has nothing to divide
        engine = Engine(config(model, policy="lru", residency_pct=percent, **OPTIONS))
        found[percent] = generate(engine, tuple(PROMPT[:33].tolist()), max_tokens=4)[0]
        if engine.loaded.source.config.n_expert:
            assert (engine.loaded.residency.totals()["misses"] == 0) == (percent == 100)
        engine.close()
    assert len(found[100]) == 4
    assert all(tokens == found[100] for tokens in found.values()), found


def test_tokens_taken_back_never_were(model: Path) -> None:
    loaded = load(config(model, **OPTIONS))

    def after(fed: list[int], dropped: int) -> np.ndarray:
        sequence, at = loaded.kv.sequence(), 0
        for n in fed:
            span = Span(sequence, PROMPT[at : at + n], np.ones(n, bool), (n - 1,), keep=n == 5)
            loaded.steps.run([span])
            at += n
        if dropped:
            loaded.steps.take_back([span], [dropped])
        logits = loaded.steps.run([Span(sequence, PROMPT[95:98], np.ones(3, bool), (2,))]).logits[0].copy()
        sequence.release()
        return logits

    expected = after([37, 7, 3], 0)
    assert np.array_equal(after([37, 7, 5], 2), expected)
    loaded.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "qtypes", [BLOCK_TYPES[i : i + 3] for i in range(0, len(BLOCK_TYPES), 3)], ids=lambda v: "-".join(t.name for t in v)
)
def test_no_block_type_depends_on_residency_or_steps(
    device: Any, monkeypatch: pytest.MonkeyPatch, qtypes: tuple[QType, ...]
) -> None:
    """Matrices have three types in turn, so that those of an expert differ; a long step and short ones.

    Each type is one of every matrix of an expert and of an attention's output. Those of a layer's first product are
    all in it wherever it is: it multiplies the rows of each by themselves, so that one order of them will do.
    """
    if device.name == "emulated":  # each kernel runs a few times, so that compiling is most of what it takes
        monkeypatch.setattr(gpu, "open_device", lambda _: type(device)(effort="-O0"))
    path = random_path("qwen3moe", qtypes, steady=("attn_q", "attn_k", "attn_v"), n_expert=7, n_expert_used=2)
    found = {}
    for percent, steps in ((100, [35, 1, 2, 3]), (40, [35, 3, 2, 1])):
        loaded = load(config(path, residency_pct=percent, **OPTIONS))
        found[percent] = feed(loaded, PROMPT[:41], steps)[0]
        assert np.isfinite(found[percent]).all()
        loaded.close()
    assert np.array_equal(found[100].view(np.uint32), found[40].view(np.uint32))
