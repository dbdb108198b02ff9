"""Blocks that predict a further token: what is loaded of them, what is refused, and that they compute what is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine import models
from engine.formats.gguf import open_model
from engine.formats.quants import QTensor
from engine.ground.config import EngineConfig
from engine.ground.errors import ModelFormatError, SparkError, UnsupportedModelError, UsageError
from engine.models import nextn
from engine.running.loaded import Loaded, load
from engine.running.mtp import Asked, Fed, Predictor
from engine.running.stepping import Span
from tests.gguf_files import write_gguf
from tests.nextn_models import FAMILIES, Twin, block_path, parts, states
from tests.tiny_models import ALL_F32, nmse, tiny_path

TOKENS = np.random.default_rng(7).integers(0, 301, 90).astype(np.int32)
CHUNKS = [29, 41, 1, 1]


def loaded_for(path: Path, device: str = "cpu", **options: Any) -> Loaded:
    config = EngineConfig(model=path, device=device, threads=2, ctx_tokens=130, chunk_tokens=57, draft="mtp", **options)
    return load(config)


def followed(loaded: Loaded, chunks: list[int]) -> tuple[Asked, np.ndarray]:
    """A sequence of TOKENS that was read in chunks, and the residuals [T, D] of the block at its positions."""
    assert loaded.predictor is not None
    sequence, start, residuals = loaded.kv.sequence(), 0, []
    for n in chunks:
        span = Span(sequence, TOKENS[start : start + n], np.ones(n, bool), (n - 1,))
        loaded.steps.run([span])
        loaded.predictor.follow([Fed(span, n, TOKENS)])
        residuals.append(residual(loaded, n))
        start += n
    return Asked(sequence, TOKENS[: start + 1].tolist(), 1), np.concatenate(residuals)


def residual(loaded: Loaded, n: int) -> np.ndarray:
    """What the block left of the last step's n tokens, [n, D]."""
    return np.array(loaded.forward.buffers.y[:n])


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False], ids=["own-ends", "model's-ends"])
@pytest.mark.parametrize("arch", FAMILIES)
def test_a_float_block_equals_the_twin(arch: str, own: bool) -> None:
    """At every position of a prompt, longer than a block of the cache, and in drafts behind it."""
    path = block_path(arch, ALL_F32, own)
    loaded = loaded_for(path)
    asked, residuals = followed(loaded, CHUNKS)
    config, T = loaded.source.config, sum(CHUNKS)
    twin = Twin(config, path)
    found = [twin.go_on(*pair) for pair in zip(states(config, twin.weights, TOKENS[:T]), TOKENS[1:], strict=False)]
    assert nmse(residuals, np.array([x for x, _, _ in found])) < 1e-6
    _, state, logits = found[-1]
    for n in range(1, 5):
        assert loaded.predictor is not None
        (draft,) = loaded.predictor.drafts([Asked(asked.sequence, asked.history, n)])
        assert draft is not None and draft.source == "mtp" and len(draft.tokens) == n
        assert nmse(loaded.forward.buffers.logits[:1], logits[None]) < 1e-6
        assert draft.tokens[-1] == logits.argmax()
        _, state, logits = twin.go_on(state, draft.tokens[-1])
    asked.sequence.release()
    loaded.close()


@pytest.mark.slow
@pytest.mark.parametrize("arch", FAMILIES)
def test_the_cpu_equals_the_twin_of_its_ops(arch: str) -> None:
    cpu, twin = (loaded_for(block_path(arch), device) for device in ("cpu", "reference"))
    (a, mine), (b, other) = (followed(loaded, [19, 1]) for loaded in (cpu, twin))
    assert np.array_equal(mine.view(np.uint32), other.view(np.uint32))
    drafts = [loaded.predictor.drafts([Asked(c.sequence, c.history, 3)]) for loaded, c in ((cpu, a), (twin, b))]
    assert drafts[0] == drafts[1] and drafts[0][0] is not None
    assert np.array_equal(cpu.forward.buffers.logits[0], twin.forward.buffers.logits[0])


def refused(tmp_path: Path, arch: str, own: dict[str, Any]) -> SparkError:
    """What is said where a block has other tensors; None stands for none."""
    _, metadata, tensors = parts(arch)
    tensors = {name: values for name, values in (tensors | own).items() if values is not None}
    write_gguf(tmp_path / "x.gguf", metadata, tensors)
    with pytest.raises(SparkError) as caught:
        load(EngineConfig(model=tmp_path / "x.gguf", device="cpu", threads=1, ctx_tokens=64, draft="mtp"))
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("nextn.eh_proj.weight", (256, 256)), ("nextn.enorm.weight", (128,)), ("nextn.embed_tokens.weight", (300, 256)),
        ("attn_output.weight", (256, 640)), ("nextn.shared_head_head.weight", (301, 512)),
    ],
)  # fmt: skip
def test_another_width_is_refused(tmp_path: Path, arch: str, name: str, shape: tuple[int, ...]) -> None:
    error = refused(tmp_path, arch, {f"blk.4.{name}": np.ones(shape, np.float32)})
    assert isinstance(error, ModelFormatError) and f"blk.4.{name}" in str(error) and "shape" in str(error)


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, "qwen35", {"blk.4.nextn.bias.weight": np.ones(256, np.float32)})
    assert isinstance(error, UnsupportedModelError) and "blk.4.nextn.bias.weight is not part of qwen35" in str(error)


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("lost", ["nextn.eh_proj.weight", "attn_k.weight", "ffn_"])
def test_a_block_that_is_not_whole_is_refused_where_it_is_asked_for(tmp_path: Path, arch: str, lost: str) -> None:
    _, metadata, tensors = parts(arch)
    whole = {name: values for name, values in tensors.items() if not name.startswith(f"blk.4.{lost}")}
    write_gguf(tmp_path / "x.gguf", metadata, whole)
    with pytest.raises(UsageError, match=f"--draft mtp: blk.4 predicts further tokens, but lacks blk.4.{lost}"):
        loaded_for(tmp_path / "x.gguf")
    loaded = load(EngineConfig(model=tmp_path / "x.gguf", device="cpu", threads=1, ctx_tokens=64))
    assert loaded.predictor is None and "is left out" in loaded.source.warnings[0]
    loaded.close()
    module, config = models.find(arch), loaded.source.config
    with (
        open_model(tmp_path / "x.gguf") as file,
        pytest.raises(ModelFormatError, match=r"tensor blk\.4\.\S+ is missing"),
    ):
        nextn.load(file, module, config)


def test_a_block_of_a_type_without_kernels_is_refused(tmp_path: Path) -> None:
    _, metadata, tensors = parts("qwen35")
    name = "blk.4.nextn.eh_proj.weight"
    odd = QTensor(name, QType.F64, (256, 512), np.zeros(8 * 256 * 512, np.uint8))
    write_gguf(tmp_path / "x.gguf", metadata, tensors | {name: odd})
    with pytest.raises(UsageError, match="F64"):
        loaded_for(tmp_path / "x.gguf")


@pytest.mark.parametrize("arch", ["qwen35", "qwen3moe"])
def test_who_asks_hears_why_there_is_no_block(arch: str) -> None:
    with pytest.raises(UsageError, match="--draft mtp: the file has no block that predicts further tokens"):
        loaded_for(tiny_path(arch))


def test_of_several_blocks_the_first_is_run(tmp_path: Path) -> None:
    _, metadata, tensors = parts("qwen35")
    metadata |= {"qwen35.block_count": 6, "qwen35.nextn_predict_layers": 2}
    write_gguf(tmp_path / "x.gguf", metadata, tensors | {"blk.5.nextn.enorm.weight": np.ones(256, np.float32)})
    loaded = loaded_for(tmp_path / "x.gguf")
    assert isinstance(loaded.predictor, Predictor) and "1 behind it are left out" in loaded.source.drafts.reasons[0]
    loaded.close()


@pytest.mark.parametrize("arch", FAMILIES)
def test_a_block_takes_its_bytes_only_where_it_is_asked_for(arch: str) -> None:
    path = block_path(arch)
    plain, loaded = load(EngineConfig(model=path, device="cpu", threads=1, ctx_tokens=64)), loaded_for(path)
    assert plain.predictor is None and "is left out" in plain.source.warnings[-1]
    assert any("blk.4 drafts tokens and takes" in reason for reason in loaded.reasons) and not loaded.source.warnings
    block = loaded.source.block
    assert block is not None and (block.slots_bytes > 0) == bool(loaded.source.config.n_expert)
    assert loaded.plan()["dense_bytes"] == plain.plan()["dense_bytes"] + block.nbytes
    assert loaded.kv.groups[0].layers == (*plain.kv.groups[0].layers, 4)
    plain.close()
    loaded.close()
