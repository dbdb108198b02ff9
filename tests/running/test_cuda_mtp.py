"""A model's own block drafts on a device: the emulated GPU by default, a real one with `pytest --gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.ground.config import EngineConfig
from engine.ground.errors import CapacityError
from engine.ground.sampling import Sampling
from engine.running import draft_files, dryrun
from engine.running.loaded import Loaded, load
from engine.running.mtp import Asked, Fed
from engine.running.stepping import Span
from engine.running.warm import warm_up
from tests.engine_runs import config
from tests.nextn_models import FAMILIES, apart, block_path
from tests.telling import Telling, said
from tests.tiny_models import nmse

pytestmark = [pytest.mark.usefixtures("on_the_device"), pytest.mark.slow]

TOKENS = np.random.default_rng(50).integers(0, 301, 60).astype(np.int32)


def drafted(loaded: Loaded, chunks: list[int]) -> tuple[tuple[int, ...], np.ndarray]:
    """Three tokens behind so many, and the logits of the last."""
    assert loaded.predictor is not None
    sequence = loaded.kv.sequence()
    for n in chunks:
        span = Span(sequence, TOKENS[sequence.length : sequence.length + n], np.ones(n, bool), (n - 1,))
        loaded.steps.run([span])
        loaded.predictor.follow([Fed(span, n, TOKENS)])
    history = TOKENS[: sequence.length + 1].tolist()
    (draft,) = loaded.predictor.drafts([Asked(sequence, history, 3)])
    assert draft is not None
    logits = np.array(loaded.backend.device.read(loaded.forward.buffers.logits)[0])
    sequence.release()
    return draft.tokens, logits


# A dense model brings nothing in, and a warm start takes a minute to emulate.
@pytest.mark.parametrize(("arch", "residency", "warm"), [
    ("qwen35", 100, False), ("qwen35moe", 40, False), pytest.param("qwen35moe", 40, True, marks=pytest.mark.on_a_gpu),
])  # fmt: skip
def test_drafts_are_near_those_of_the_cpu(arch: str, residency: int, warm: bool) -> None:
    """In long steps, small and captured ones, and where the model's own experts are brought in."""
    path, chunks = block_path(arch, own=False), [40, 8, 1, 1]
    cpu = load(config(path, device="cpu", draft="mtp"))
    (tokens, expected), options = drafted(cpu, chunks), {"residency_pct": residency}
    cuda = load(config(path, draft="mtp", **options))
    if warm:
        warm_up(cuda)
    found, logits = drafted(cuda, chunks)
    assert found == tokens and nmse(logits, expected) < 1e-2
    again = drafted(cuda, [40, 4, 4, 1, 1])
    assert again[0] == tokens and np.array_equal(again[1], logits)
    cuda.close()
    cpu.close()


@pytest.mark.parametrize("arch", FAMILIES)
def test_the_plan_has_the_block(arch: str) -> None:
    path = block_path(arch)
    options: dict[str, Any] = {"ctx_tokens": 130, "chunk_tokens": 40}
    plain, found = (dryrun.plan_only(EngineConfig(path, "cuda", draft=draft, **options)) for draft in ("off", "mtp"))
    loaded = load(config(path, draft="mtp"))
    assert loaded.source.block is not None
    block, size = loaded.source.block, found["plan"]
    assert size["dense_bytes"] >= plain["plan"]["dense_bytes"] + block.nbytes
    assert size["kv_bytes"] > plain["plan"]["kv_bytes"] and "blk.4 drafts" in found["reasons"][0]
    assert loaded.plan()["dense_bytes"] == size["dense_bytes"]
    loaded.close()


@pytest.mark.parametrize("residency", [100, 40])
def test_drafts_change_no_token(residency: int) -> None:
    loaded = load(config(block_path("qwen35moe"), residency_pct=residency, draft="mtp"))
    prompts, sampling = [TOKENS[:9], TOKENS[20:25]], [Sampling(), Sampling(0.9, seed=4)]
    expected = said(loaded, loaded.decoder, prompts, sampling, 6)
    for decoder in (Telling(loaded, 3), Telling(loaded, 3, expected)):
        assert said(loaded, decoder, prompts, sampling, 6) == expected
    assert decoder.n_right > 2
    loaded.close()


def test_a_block_in_a_file_of_its_own_has_the_bits_of_one_in_the_models(tmp_path: Path) -> None:
    model, path = apart(tmp_path, "qwen35moe")
    found = []
    for of, draft in ((block_path("qwen35moe"), "mtp"), (model, "mtp"), (model, str(path))):
        loaded = load(config(of, draft=draft, residency_pct=40))
        tokens, logits = drafted(loaded, [40, 8, 1])
        plan = loaded.plan()
        # What the driver takes for itself is measured, and another process on the GPU changes it.
        sizes = {key: n for key, n in plan.items() if key not in ("context_bytes", "device_bytes", "cap_bytes")}
        found.append((tokens, logits.tobytes(), sizes))
        loaded.close()
    assert found[0] == found[1] == found[2]


def test_auto_loads_without_a_block_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `auto` has blocks: what was left out when the device was shared out is nowhere afterwards."""
    monkeypatch.setattr(draft_files, "AUTO_HAS_BLOCKS", True)
    loaded = load(config(block_path("qwen35moe"), draft="auto"))
    assert loaded.predictor is not None and loaded.source.drafts.is_found
    drafts_bytes = loaded.plan()["drafts_bytes"]
    loaded.close()
    decide = dryrun.Sharing._decide

    def full(sharing: dryrun.Sharing, *arguments: Any) -> dryrun.Decision:
        if sharing.drafts.block is not None:
            raise CapacityError("it is too much")
        return decide(sharing, *arguments)

    monkeypatch.setattr(dryrun.Sharing, "_decide", full)
    loaded = load(config(block_path("qwen35moe"), draft="auto"))
    assert loaded.predictor is None and loaded.forward.block is None and loaded.drafts is not None
    assert loaded.source.warnings == ("no block drafts, since with it there is no plan: it is too much",)
    assert loaded.plan()["drafts_bytes"] == 0 < drafts_bytes
    loaded.close()
    with pytest.raises(CapacityError):
        load(config(block_path("qwen35moe"), draft="mtp"))
