"""Published figures are of a commit: the writer refuses others, and what is rendered is what was measured."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import render
from benchmarks.figures import json_option
from engine.ground.errors import UsageError
from spark import results


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree with one commit, which the writer takes for its own."""
    (tmp_path / "data" / "results").mkdir(parents=True)
    (tmp_path / "code.py").write_text("a = 1\n")
    (tmp_path / "README.md").write_text("figures\n")
    (tmp_path / "data" / "results" / "old.json").write_text("{}\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    monkeypatch.setattr(results, "_ROOT", tmp_path)
    monkeypatch.setattr(results, "_PUBLISHED", tmp_path / "data" / "results")
    return tmp_path


def test_figures_of_a_commit_are_written(tree: Path) -> None:
    (tree / "README.md").write_text("other figures\n")  # which are rendered from other results
    (tree / "data" / "results" / "old.json").write_text('{"new": 1}\n')
    results.write_json(tree / "data" / "results" / "x.json", {"a": 1})
    made = json.loads((tree / "data" / "results" / "x.json").read_text())
    assert made["a"] == 1 and len(made["commit"]) == 40


@pytest.mark.parametrize("name", ["code.py", "new.py"])
def test_figures_of_no_commit_are_refused(
    tree: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / name).write_text("a = 2\n")
    target = tree / "data" / "results" / "x.json"
    with pytest.raises(UsageError, match=name):
        results.write_json(target, {"a": 1})
    assert not target.exists()
    parser = argparse.ArgumentParser()
    json_option(parser)
    monkeypatch.chdir(tree)
    with pytest.raises(SystemExit):
        parser.parse_args(["--json", "data/results/x.json"])
    assert name in capsys.readouterr().err
    elsewhere = parser.parse_args(["--json", "x.json"]).json
    results.write_json(elsewhere, {"a": 1})
    assert json.loads((tree / "x.json").read_text())["commit"].endswith("+changes")


def test_figures_of_no_clone_are_refused(tree: Path) -> None:
    (tree / ".git").rename(tree / "gone")
    with pytest.raises(UsageError, match="git names none"):
        results.write_json(tree / "data" / "results" / "x.json", {"a": 1})


def test_what_is_published_is_of_a_commit() -> None:
    found = {path.name: json.loads(path.read_text())["commit"] for path in render.RESULTS.glob("*.json")}
    assert found and not [name for name, commit in found.items() if commit is None or "+" in commit]


def test_what_is_rendered_is_what_was_measured() -> None:
    for path, text in render.documents().items():
        assert path.read_text() == text, f"{path.name}: run `make results`"
