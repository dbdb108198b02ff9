"""What the tables about llama.cpp's files are made of, where llama.cpp itself is not at hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import files_results
from benchmarks.full_shape import SHAPES, published, write_outline
from benchmarks.llama_files import (
    FailedError,
    LlamaCpp,
    file_weights,
    largest_difference,
    read_config,
    save_transformers,
)
from benchmarks.mixtures import likeliest, source_type
from engine import models
from engine.formats.gguf import open_model
from tests.tiny_models import ALL_F32, tiny_path

MADE: dict[str, Any] = {
    "command": "x.py", "commit": "0" * 40, "created": "2026-01-01T00:00:00Z", "versions": {"gguf": "1"},
    "host": {"cpu": "one", "gpu": None}, "llama_cpp_python": "0.3",
}  # fmt: skip


@pytest.mark.parametrize("arch", ["gemma4", "qwen35moe"])
def test_the_weights_of_a_file_are_apart_however_it_has_them(arch: str) -> None:
    path = tiny_path(f"{arch}-fused", ALL_F32)
    _, tensors = models.find(arch).tiny(np.random.default_rng(0))
    found = file_weights(path, read_config(path))
    assert largest_difference(found, tensors) == 0
    assert largest_difference(found | {"output_norm.weight": tensors["output_norm.weight"] * 1.01}, tensors) > 1e-3
    assert largest_difference({}, tensors) == float("inf")


def test_a_saved_model_may_have_a_block_for_further_tokens(tmp_path: Path) -> None:
    from safetensors import safe_open

    config, tensors = models.find("qwen35").tiny(np.random.default_rng(0), n_layer=3)
    save_transformers(tmp_path, config, tensors, mtp=True)
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        names = set(file.keys())
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= names
    assert '"mtp_num_hidden_layers": 1' in (tmp_path / "config.json").read_text()


def test_a_tool_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(FailedError, match=r"quantize ended with 1: .*(llama_cpp|No such file|failed)"):
        LlamaCpp(sys.executable, tmp_path).quantize(tmp_path / "none.gguf", tmp_path / "x.gguf", 15, importance=False)


def test_an_outline_has_all_but_the_weights(tmp_path: Path) -> None:
    arch, config = SHAPES["laguna-xs2"]
    offsets, n_bytes = write_outline(tmp_path / "x.gguf", config, source_type, "laguna-xs2", arch)
    taken = (tmp_path / "x.gguf").stat().st_blocks * 512
    assert n_bytes > 50 << 30 and taken < 20 << 20
    with open_model(tmp_path / "x.gguf") as file:
        assert {t.name: t.offset for t in file.tensors.values()} == offsets
        assert {t.name: t.shape for t in file.tensors.values()} == published(arch, config)


def test_the_likeliest_is_another_each_time() -> None:
    assert [likeliest(np.array([1.0, 3.0, 2.0]), without) for without in ([], [1], [1, 2])] == [1, 2, 0]


def test_tables_say_what_is_refused() -> None:
    cell = {"family": "gemma4", "mixture": "Q4_K_M", "types": {}}
    rows = [
        cell | {"refused": "tensor 'x' has type Q5_0, which has no kernels"},
        cell | {"mixture": "Q8_0", "transformers": 1e-3, "same_tokens": True, "same_bits": False, "llama_cpp": 2e-3},
        cell | {"mixture": "IQ2_XS", "not_made": "quantize ended with 1: ValueError: no"},
    ]
    shapes = [{"shape": "one", "mixture": "Q8_0", "bytes": 3 << 30, "types": {}, "lacking": ["Q5_0", "IQ4_NL"]}]
    text = "\n".join(files_results.mixtures("m.json", MADE | {"rows": rows, "shapes": shapes}))
    for expected in ("Q5_0: refused", "2e-03 / 1e-03", "llama.cpp: no", "but for Q8_0 of gemma4", "3.0, IQ4_NL, Q5_0"):
        assert expected in text
    row = {"family": "laguna", "file": "F32", "f32": True, "transformers": 3e-7, "same_experts": 0.998}
    rows = [row | {"llama_cpp": 2e-6}]
    text = "\n".join(files_results.conventions("c.json", MADE | {"rows": rows}))
    assert "| laguna | F32 | 3.0e-07 | 99.8% | 2.0e-06 |" in text
