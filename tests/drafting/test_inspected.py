"""`spark inspect` of a drafter: what it is and asks for, and what is missing, by its header."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.drafting import drafter
from engine.formats.gguf import open_header
from engine.ground.errors import SparkError
from engine.running.inspection import inspect
from tests.command_line import NANO, environment, refused, spark
from tests.dflash_twin import DIALECTS, Shape, random_drafter, write_drafter
from tests.formats.test_gguf_malformed import mutate, rewrite

HIDDEN = environment(CUDA_VISIBLE_DEVICES="-1")
SHAPE = Shape(window=100, own={"output": np.zeros((45, 256), np.float32), "d2t": np.arange(45)})


def written(path: Path, arch: str = "dflash", shape: Shape = SHAPE, **options) -> Path:
    return write_drafter(path, shape, random_drafter(shape, np.random.default_rng(0)), arch, **options)


@pytest.mark.parametrize("arch", DIALECTS)
def test_a_drafter_says_what_it_is(tmp_path: Path, arch: str) -> None:
    written(tmp_path / "d.gguf", arch)
    done = spark("inspect", "d.gguf", "--json", "found.json", cwd=tmp_path, env=HIDDEN)
    for words in (arch, "is a drafter", "blocks of 7 tokens, 100 positions", "vocabulary of 301", "layers 1, 2, 0, 3"):
        assert words in done.stdout, (words, done.stdout)
    assert "Memory for" not in done.stdout
    figures = json.loads((tmp_path / "found.json").read_text())
    assert figures["kind"] == "drafter" and figures["missing"] == [] and figures["rows"] == []
    assert figures["sizes"]["embedding_length"] == 256 and figures["sizes"]["block_count"] == 3
    assert figures["drafter"] == {
        "captured_layers": [1, 2, 0, 3], "block_tokens": 7, "mask_token": 299, "vocabulary": 301, "window_tokens": 100,
    }  # fmt: skip
    assert any(row["role"] == "features" for row in figures["tensors"])
    planned = refused("plan", "d.gguf", "--vram", "12", cwd=tmp_path, env=HIDDEN)
    assert "d.gguf is a drafter, expected a model" in planned


def test_what_a_drafter_lacks(tmp_path: Path) -> None:
    written(tmp_path / "d.gguf", extra={"markov_w1.weight": np.zeros((4, 8), np.float32)})
    done = spark("inspect", "d.gguf", cwd=tmp_path, status=1, env=HIDDEN)
    assert "is of a DSpark drafter, which is not implemented" in done.stderr


def test_half_a_download_and_a_file_that_does_not_name_its_vocabulary(tmp_path: Path) -> None:
    shape = replace(SHAPE, own={})
    path = written(tmp_path / "d.gguf", shape=shape, keys={"dflash.vocab_size": None})
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with open_header(path) as file:
        report = inspect(file).report
    assert report["missing"] == [] and report["drafter"]["vocabulary"] is None and report["missing_bytes"] > 0


@pytest.mark.slow
def test_mutated_headers_are_explained(tmp_path: Path) -> None:
    """Whatever the header says, it is read as a drafter that would load, or refused with an explanation."""
    rng, path = np.random.default_rng(5), written(tmp_path / "d.gguf")
    whole = path.read_bytes()
    end = whole.index(b"blk.2.ffn_down.weight") + 100
    read = 0
    for _ in range(1500):
        rewrite(path, mutate(whole, end, rng))
        try:
            with open_header(path) as file:
                report = inspect(file).report
                if report["kind"] == "drafter" and not report["missing"]:
                    drafter.load(file, drafter.read(file))
                    read += 1
        except SparkError:
            continue
    assert read > 20


def test_a_plan_counts_a_drafter_and_says_what_it_takes(tmp_path: Path) -> None:
    with open_header(NANO) as file:
        n_embd, n_layer = (file.value(f"qwen3moe.{key}", int) for key in ("embedding_length", "block_count"))
    shape = Shape(n_embd=n_embd, n_vocab=6144, captured=(n_layer - 1, 0), mask=6143)
    written(tmp_path / "d.gguf", shape=shape)
    rows = []
    for draft in ("auto", "d.gguf"):
        done = spark(
            "plan", NANO, "--vram", "2", "--draft", draft, "--ctx", "512", "--json", "p.json", cwd=tmp_path, env=HIDDEN
        )
        (row,) = json.loads((tmp_path / "p.json").read_text())["rows"]
        rows.append(row)
        assert ("what drafts (d.gguf)" in done.stdout) == (draft == "d.gguf")
    plain, drafted = rows
    assert plain["draft"] == "auto" and plain["drafts_bytes"] == 0 < drafted["drafts_bytes"]
    taken = sum(drafted[key] - plain[key] for key in ("dense_bytes", "kv_bytes", "buffers_bytes"))
    assert taken == drafted["drafts_bytes"] and drafted["dense_bytes"] > plain["dense_bytes"]
    assert any("what drafts takes" in reason for reason in drafted["reasons"])
    other = refused("plan", NANO, "--draft", tmp_path / "no.gguf", cwd=tmp_path, status=2, env=HIDDEN)
    assert "expected auto, off, lookup, mtp or the file" in other
    written(tmp_path / "other.gguf")
    assert "the drafter is for" in refused("plan", NANO, "--draft", "other.gguf", cwd=tmp_path, env=HIDDEN)
