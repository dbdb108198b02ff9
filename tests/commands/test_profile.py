"""`spark profile`, as a user runs it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.formats import profile as files
from engine.formats.profile import Choice, Profile
from tests.command_line import refused, spark

CHOICE = Choice(60.0, 1.0, 6, 4.5, 4.25, 5.0, 5.75, 4.75, 7, 6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two profiles of one model, and one of another."""
    counts = np.array([[0] * 10, range(1, 11), [9] * 10], np.int64)
    one = Profile(counts, 2, "1f" * 32, 45, 3, "generated", "2026-11-01T00:00:00Z", (CHOICE,))
    files.save(one, tmp_path / "a.csv")
    files.save(replace(one, counts=counts[:, ::-1].copy(), tokens=45, choices=()), tmp_path / "b.csv")
    files.save(replace(one, model_id="2e" * 32), tmp_path / "other.csv")
    return tmp_path


def test_merge(folder: Path) -> None:
    arguments = ("profile", "merge", "a.csv", "b.csv", "--weights", "0.5,1", "--out", "c.csv")
    done = spark(*arguments, "--json", "c.json", cwd=folder)
    assert "what 1 of the profiles say of the slots" in done.stderr and "profile written to c.csv" in done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[3:5]] == [["a.csv", "1"], ["b.csv", "2"]]
    made, _ = files.load(folder / "c.csv")
    assert made.counts[1].tolist() == [n + 2 * (11 - n) for n in range(1, 11)] and made.tokens == 135
    report = json.loads((folder / "c.json").read_text())
    assert report["tokens"] == 135 and report["version"] and report["without_choices_of"] == ["a.csv"]
    again = spark(*arguments, "--json", "-", cwd=folder)  # over what is there
    assert json.loads(again.stdout)["sources"] == report["sources"] and "Merged profiles" in again.stderr


def test_a_profile_of_the_bundled_model_stays_one(folder: Path) -> None:
    """`plan` takes what was merged, as serving would."""
    from tests.command_line import NANO, ROOT

    own = ROOT / "tests" / "old" / "profile.csv"
    spark("profile", "merge", own, own, "--out", "c.csv", cwd=folder)
    done = spark("plan", NANO, "--vram", "4", "--spark", "--profile", "c.csv", cwd=folder)
    assert "error" not in done.stderr and "warning" not in done.stderr


def test_show(folder: Path) -> None:
    done = spark("profile", "show", "a.csv", "--json", "a.json", cwd=folder)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["layers", "3,", "2", "with", "counts"] in lines and ["tokens", "45,", "generated", "ones"] in lines
    assert ["1", "18.2%", "49.1%", "81.8%", "0.934", "9", "18.2%"] in lines
    assert ["2", "10.0%", "30.0%", "60.0%", "1.000", "0", "10.0%"] in lines
    report = json.loads((folder / "a.json").read_text())
    assert report["layers"][0]["coverage"]["10"] == pytest.approx(10 / 55) and report["command"].endswith("a.json")
    assert report["choices"][0]["residency_pct"] == 60.0 and report["coverage"]["60"] == pytest.approx(99 / 145)
    spark("profile", "merge", "a.csv", "b.csv", "--out", "c.csv", cwd=folder)
    assert "1 x b.csv: 45 tokens, 2026-11-01" in spark("profile", "show", "c.csv", cwd=folder).stdout


def test_diff(folder: Path) -> None:
    done = spark("profile", "diff", "a.csv", "b.csv", "--json", "d.json", cwd=folder)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["2", *["100.0%"] * 3] in [line[:4] for line in lines]
    assert ["1", "0.0%", "0.0%", "33.3%"] in [line[:4] for line in lines]
    report = json.loads((folder / "d.json").read_text())
    assert [layer["layer"] for layer in report["layers"]] == [1, 2] and report["layers"][1]["distance"] == 0.0
    assert report["layers"][0]["distance"] == pytest.approx(25 / 55) and report["a"]["profile"] == "a.csv"
    same = json.loads(spark("profile", "diff", "a.csv", "a.csv", "--json", "-", cwd=folder).stdout)["total"]
    assert same["distance"] == 0.0 and same["coverage"] == same["own"]


@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        ("merge a.csv other.csv --out c.csv", "other.csv is of model 2e", 1),
        ("merge a.csv no.csv --out c.csv", "cannot read the profile no.csv: No such file", 1),
        ("merge a.csv --out c.csv", "expected at least two profiles to merge, found 1", 2),
        ("merge a.csv b.csv", "Missing option '--out'", 2),
        ("merge a.csv b.csv --weights 1 --out c.csv", "--weights has 1 numbers, expected one for each of the 2", 2),
        ("merge a.csv b.csv --weights 1,0 --out c.csv", "found '0'\nhint: leave out a profile", 2),
        ("merge a.csv b.csv --weights -1,1 --out c.csv", "expected positive numbers", 2),
        ("merge a.csv b.csv --out b.csv", "--out b.csv would overwrite the profiles you gave", 2),
        ("merge a.csv b.csv --out c.csv --json c.csv", "--json c.csv would overwrite what --out writes", 2),
        ("merge a.csv b.csv --out no/c.csv", "there is no folder", 1),
        ("show no.csv", "cannot read the profile no.csv", 1),
        ("show a.csv --json a.csv", "--json a.csv would overwrite the profile you gave", 2),
        ("diff a.csv other.csv", "other.csv is of model 2e", 1),
        ("diff a.csv", "Missing argument 'B'", 2),
        ("diff a.csv b.csv --json b.csv", "--json b.csv would overwrite the second you gave", 2),
        ("join a.csv", "No such command 'join'", 2),
    ],
)  # fmt: skip
def test_refused(folder: Path, arguments: str, words: str, status: int) -> None:
    before = sorted(path.name for path in folder.iterdir())
    assert words in refused("profile", *arguments.split(), cwd=folder, status=status)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_without_a_command_it_says_what_there_is(folder: Path) -> None:
    assert "merge" in spark("profile", cwd=folder, status=2).stdout
