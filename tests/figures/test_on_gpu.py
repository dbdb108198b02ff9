"""The list of what is measured on a GPU, and the program that goes through it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import on_gpu
from benchmarks.on_gpu import MEASUREMENTS, Folder, Measurement
from benchmarks.render import SECTIONS


def test_what_is_listed_is_there_and_has_a_section() -> None:
    for m in MEASUREMENTS:
        script = m.command.split()[0]
        assert (on_gpu.BENCHMARKS / script).exists(), m.name
        assert f"{m.name}.json" in SECTIONS, m.name
        for name in m.files:
            is_bundled = (on_gpu.DATA / "nano" / name).exists()
            assert is_bundled or name in on_gpu.MODELS or name.removesuffix(".parquet") in on_gpu.SESSIONS
    names = [m.name for m in MEASUREMENTS]
    assert len(names) == len(set(names))
    needed = [m.model for m in MEASUREMENTS if m.model]
    assert len(list(itertools.groupby(needed))) == len(set(needed)), "no model is written twice"


@pytest.mark.parametrize("m", MEASUREMENTS, ids=lambda m: m.name)
def test_commands_are_understood(m: Measurement) -> None:
    """As far as options go: the file is another one that none of them reads."""
    script, *words = m.command.split()
    text = (on_gpu.BENCHMARKS / script).read_text()
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        assert f'"{option}"' in text, option


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Benchmarks that write what they were given, and one that fails."""
    for name, last in (("full_shape.py", "open(sys.argv[2], 'w').write('m')"), ("good.py", ""), ("bad.py", "1 / 0")):
        write = "" if name == "full_shape.py" else "open(sys.argv[-1], 'w').write(json.dumps(sys.argv[1:]))"
        (tmp_path / name).write_text(f"import json, sys\n{last}\n{write}\n")
    monkeypatch.setattr(on_gpu, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(on_gpu, "MODELS", {"a.gguf": "shape-a --layers 2", "b.gguf": "shape-b"})
    return tmp_path


def test_results_are_copied_and_failures_passed_over(
    made_up: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = Folder(tmp_path / "work"), tmp_path / "out"
    asked = [
        Measurement("one", "good.py a.gguf --runs 3", 1),
        Measurement("two", "bad.py a.gguf", 1),
        Measurement("three", "good.py b.gguf", 1),
        Measurement("four", "good.py b.gguf", 4000),
        Measurement("five", "good.py b.gguf", 1, gpus=2),
    ]
    assert on_gpu.run(asked, folder, out, 3600) == ["two"]
    assert sorted(path.name for path in out.iterdir()) == ["one.json", "three.json"]
    found = json.loads((out / "one.json").read_text())
    assert found == ["a.gguf", "--runs", "3", "--json", "data/results/one.json"]
    assert not (folder.path / "a.gguf").exists() and (folder.path / "b.gguf").exists()
    said = capsys.readouterr().err
    assert "two: FAILED" in said and "ZeroDivisionError" in said and "four: left out, it takes about 4000 s" in said
    assert "five: left out, it takes 2 GPUs of one host, and here is 1" in said
    assert on_gpu.run(asked[4:], folder, out, 3600, n_gpus=2) == [] and (out / "five.json").exists()


def test_what_a_benchmark_wrote_before_it_failed_is_kept_apart(made_up: Path, tmp_path: Path) -> None:
    """The result of an earlier run stays what it was."""
    folder, out = Folder(tmp_path / "work"), tmp_path / "out"
    asked = [Measurement("one", "good.py b.gguf", 1)]
    assert on_gpu.run(asked, folder, out, 3600) == []
    good = (out / "one.json").read_text()
    script = made_up / "good.py"
    script.write_text(script.read_text() + "\nsys.exit('the bits are other ones')\n")
    asked = [Measurement("one", "good.py b.gguf --runs 2", 1)]
    assert on_gpu.run(asked, folder, out, 3600) == ["one"]
    assert (out / "one.json").read_text() == good
    assert "--runs" in json.loads((out / "one.failed.json").read_text())


def test_a_model_that_cannot_be_written_fails_its_benchmarks_alone(
    made_up: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "import sys\nassert sys.argv[2] != 'a.gguf', 'no room'\nopen(sys.argv[2], 'w')\n"
    (made_up / "full_shape.py").write_text(script)
    asked = [Measurement("one", "good.py a.gguf", 1), Measurement("two", "good.py b.gguf", 1)]
    assert on_gpu.run(asked, Folder(tmp_path / "work"), tmp_path / "out", 3600) == ["one"]
    assert "AssertionError: no room" in capsys.readouterr().err and (tmp_path / "out" / "two.json").exists()


@pytest.mark.slow
def test_token_files_are_made_of_the_samples(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.need(["sessions_other.parquet"])
    assert (tmp_path / "sessions_other.parquet").stat().st_size > 10_000


def test_an_unknown_name_is_refused() -> None:
    command = [sys.executable, on_gpu.ROOT / "benchmarks" / "on_gpu.py", "decode", "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "no such measurement: nonsense" in done.stderr
