"""Every family on a device: against `transformers`, the CPU backend, and itself at other residencies and step sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine import models
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
    write_tiny,
)

pytestmark = [pytest.mark.usefixtures("on_the_device"), pytest.mark.slow]

PROMPT = np.random.default_rng(50).integers(0, 301, 104).astype(np.int32)
OPTIONS = {"ctx_tokens": 200, "chunk_tokens": 70}
# Every kind of layer, and no more of it than emulation has time for.
VARIANTS: dict[str, dict[str, Any]] = {
    "laguna": {"n_layer": 3, "n_head": (20, 12, 12), "windowed": (False, True, True), "n_expert_used": 2, "n_ff": 768},
    "gemma4": {
        "n_layer": 4, "n_head_kv": (3, 1, 3, 1), "windowed": (True, False) * 2, "n_ff": (768,) * 4, "n_expert_used": 2,
    },
    "qwen35": {"n_layer": 3, "n_ff": 512},
    "qwen35moe": {"n_layer": 3, "n_expert_used": 2, "n_ff_shared": 256},
}  # fmt: skip


NVFP4 = everything(QType.NVFP4)


@pytest.fixture(scope="module", params=[name for name in models.known() if name != "qwen3moe"])
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(arch: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny(path, k_quant_mix, arch=models.find(arch), variant=VARIANTS[arch])


@pytest.mark.parametrize(
    ("name", "types"),
    [*((name, k_quant_mix) for name in MODELS), ("laguna", NVFP4)],
    ids=lambda v: v if isinstance(v, str) else "" if v is k_quant_mix else "NVFP4",
)
def test_prefill_is_near_transformers(name: str, types: Any) -> None:
    path = tiny_path(name, types)
    loaded = load(config(path, **OPTIONS))
    logits, experts = feed(loaded, PROMPT[:41], [41])
    oracle, _ = transformers_choices(loaded.source.config, read_weights(path), PROMPT[:41], imposed=experts)
    loaded.close()
    assert nmse(logits, oracle) < 1e-3


def test_decoding_with_the_same_routing_is_near_the_cpu_backends(model: Path, tmp_path: Path) -> None:
    decoding_is_near_the_cpu_backends(model, tmp_path)


def test_decoding_with_factors_is_near_the_cpu_backends(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", NVFP4, arch=models.find("laguna"), variant=VARIANTS["laguna"])
    decoding_is_near_the_cpu_backends(path, tmp_path)


def decoding_is_near_the_cpu_backends(model: Path, tmp_path: Path) -> None:
    cpu = load(config(model, device="cpu", **OPTIONS))
    tokens = PROMPT[:24]
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


def test_tokens_do_not_depend_on_residency(model: Path) -> None:
    found = {}
    for percent in (100, 30, 10):
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
def test_no_block_type_depends_on_residency_or_steps(qtypes: tuple[QType, ...]) -> None:
    """Matrices have three types in turn, so that those of an expert differ; a long step and short ones."""
    found = {}
    for percent, steps in ((100, [35, 1, 2, 3]), (40, [35, 3, 2, 1])):
        loaded = load(config(random_path("qwen3moe", qtypes), residency_pct=percent, **OPTIONS))
        found[percent] = feed(loaded, PROMPT[:41], steps)[0]
        assert np.isfinite(found[percent]).all()
        loaded.close()
    assert np.array_equal(found[100].view(np.uint32), found[40].view(np.uint32))
