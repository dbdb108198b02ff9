"""`spark inspect`: what it prints and writes, its exit statuses, and files that are no model yet or never."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from engine.formats.gguf import open_header
from spark.pipeline import plan
from spark.speech.dialect import Dialect
from tests import published_headers
from tests.command_line import NANO, children, environment, explained, none_left, refused, spark, started, until
from tests.published_headers import HEADERS

HIDDEN = environment(CUDA_VISIBLE_DEVICES="-1")


def test_a_model_that_can_be_served(tmp_path: Path) -> None:
    done = spark("inspect", NANO, "--vram", "0.01", "--vram", "4", "--json", "found.json", cwd=tmp_path, env=HIDDEN)
    figures = json.loads((tmp_path / "found.json").read_text())
    assert figures["architecture"] == "qwen3moe" and figures["missing"] == [] and figures["kind"] == "model"
    assert figures["sizes"]["expert_count"] == 32 and figures["sizes"]["expert_used_count"] == 4
    assert figures["bytes"] == NANO.stat().st_size and figures["missing_bytes"] == 0
    assert figures["dialect"]["calls"] == "hermes" and figures["tokenizer"]["tokens"] == 6144
    small, large = figures["rows"]
    assert "GiB" in small["refusal"] and large["device_bytes"] < 4 << 30
    sizes = "42.91 M, 9.88 M of them active", f"{NANO.stat().st_size / (1 << 20):.2f} MiB"
    told = "qwen3moe", "experts: down", "Q6_K", "4,096 tokens", "hermes", "<think>", "a GPU that is not here"
    for words in told + sizes:
        assert words in done.stdout, words
    assert done.stderr.startswith("figures written to") and "\n0.01 GiB: " in done.stderr


def test_a_model_without_kernels_is_told_before_anything_else(tmp_path: Path) -> None:
    name = "Qwen3-30B-A3B-UD-IQ1_S"
    (path,) = published_headers.write(tmp_path, name, n_vocab=400)
    done = spark("inspect", path, "--json", "found.json", cwd=tmp_path, status=1, env=HIDDEN)
    explained(done.stderr)
    assert "IQ1_S (no kernels)" in done.stdout and "Memory for" not in done.stdout
    figures = json.loads((tmp_path / "found.json").read_text())
    assert any("48 tensors (experts: gate) have type IQ1_S" in each["message"] for each in figures["missing"])
    assert figures["rows"] == []
    errors = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "hint: "))]
    assert errors[0].startswith(f"error: {path} cannot be served: ") and errors[1].startswith("hint: use a file whose")
    planned = refused("plan", path, "--vram", "12", cwd=tmp_path, env=HIDDEN)
    assert planned.splitlines() == errors


@pytest.mark.slow
def test_a_model_without_experts_has_no_slots(tmp_path: Path) -> None:
    (path,) = published_headers.write(tmp_path, "Qwen3.6-27B-Q4_K_M")
    for command in ("inspect", "plan"):
        done = spark(command, path, "--vram", "40", cwd=tmp_path, env=HIDDEN)
        assert "Memory for" in done.stdout and "all of it on the GPU" in done.stdout
        assert "slots of a layer" not in done.stdout and "experts resident" not in done.stdout


def test_a_download_that_has_its_header(tmp_path: Path) -> None:
    (tmp_path / "half.gguf.part").write_bytes(NANO.read_bytes()[: NANO.stat().st_size // 2])
    done = spark("inspect", "half.gguf.part", "--vram", "4", cwd=tmp_path, env=HIDDEN)
    assert done.stderr.startswith(f"still downloading: {NANO.stat().st_size // 2:,} of {NANO.stat().st_size:,} bytes")
    assert "Memory for half.gguf.part" in done.stdout


def test_a_split_model_of_which_a_part_is_missing(tmp_path: Path) -> None:
    paths = published_headers.write(tmp_path, "Qwen3-235B-A22B-Q4_K_M", n_vocab=400)
    paths[2].unlink()
    done = spark("inspect", paths[1], cwd=tmp_path, env=HIDDEN)
    assert done.stderr == f"still to come: {paths[2]}; what is in it is not known yet\n"
    assert "in 2 files" in done.stdout and "Memory for" not in done.stdout
    planned = refused("plan", paths[0], "--vram", "12", cwd=tmp_path, env=HIDDEN)
    assert planned.startswith(f"error: {paths[2]}: this part of the model is missing")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (NANO.read_bytes()[:60_000], "60,000 bytes are there, and its header is longer: more are needed"),
        (b"GGML" + bytes(99), "is not a GGUF file: it begins with b'GGML'"),
        (b"", "is empty"),
        (None, "is a directory, expected a GGUF file"),
    ],
    ids=["begun", "magic", "empty", "directory"],
)
def test_what_is_no_model(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.mkdir() if content is None else path.write_bytes(content)
    assert words in refused("inspect", path, cwd=tmp_path)


def test_templates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def found(template: str) -> tuple[Dialect | None, list[str]]:
        model = HEADERS["Qwen3-30B-A3B-Q4_K_M"]
        other = replace(model, metadata={**model.metadata, "tokenizer.chat_template": template})
        with open_header(published_headers.write(tmp_path, "m", other, n_vocab=400)[0]) as file:
            _, dialect, missing = plan._speech(file)
        return dialect, [error.message for error in missing]

    plain, missing = found("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert plain is not None and not plain.knows_calls and not plain.thinks and missing == []
    assert found("{% for %}")[1][0].startswith("tokenizer.chat_template, line 1: ")
    monkeypatch.setattr(plan, "_TEMPLATE_S", 0.2)
    dialect, (message,) = found("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3)
    assert dialect is None and message.startswith("tokenizer.chat_template is not done")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.slow
def test_ctrl_c(tmp_path: Path) -> None:
    (path,) = published_headers.write(tmp_path, "Gemma-4-26B-A4B-Q8_0")
    (tmp_path / "tmp").mkdir()
    with started("inspect", path, cwd=tmp_path, tmp=tmp_path / "tmp") as process:
        until(lambda: children(process), process)
        found = children(process)
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=10)
    assert (process.returncode, stdout, stderr) == (130, "", "interrupted\n") and none_left(found)
