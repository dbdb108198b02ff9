"""Redaction measured on the set of secrets and decoys (`redaction_cases.py`)."""

from __future__ import annotations

import pytest
from redaction_cases import load


@pytest.mark.parametrize(("name", "least"), [("secrets", 150), ("decoys", 120)])
def test_the_set_is_large_and_split_in_half(name: str, least: int) -> None:
    cases = load(name)
    assert len(cases) >= least
    assert len({case.text for case in cases}) == len(cases)
    assert 0.4 < sum(case.aside for case in cases) / len(cases) < 0.6
    assert all(bool(case.secrets) == (name == "secrets") for case in cases)
    assert sum(case.source != "own" for case in cases) >= (100 if name == "secrets" else 40)


def test_the_set_is_the_same_everywhere() -> None:
    """What is drawn depends on the text alone, so that the halves and the scores are those of any machine."""
    (case,) = (case for case in load("secrets") if case.source == "gitleaks pulumi.go")
    assert case.secrets[0].startswith("pul-68733a14")
