"""What a cluster's calibration says of itself, and whom it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from spark.cluster.counting import progress_line, refusal
from spark.cluster.driver import Share


def test_a_line_of_progress_names_rates_and_what_is_left() -> None:
    shares = [Share("b", 0, 3, 3000, 2.0), Share("a", 1, 3, 1000, 2.0), Share("new", 0)]
    assert progress_line(shares, 1200, 200_000) == "1,200 windows left, 2,000 tokens/s, 1:40 left: a/1 500, b/0 1,500"
    many = [Share("n", i, 1, 100 + i, 1.0) for i in range(20)]
    line = progress_line(many, 7, 100)
    assert "n/0 100, n/1 101" in line and line.endswith("n/7 107, and 12 faster ones")
    assert progress_line([], 7, 100) == "7 windows left, 0 tokens/s: "


def said(**changes: Any) -> dict[str, Any]:
    info = {"model": {"file_id": "f" * 64}, "device": "cpu", "kv_type": "f16", "ctx_tokens": 512, "code": "1+a"}
    info |= changes
    code = info.pop("code")
    return {"ready": info, "code": code}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"model": {"file_id": "e" * 64}}, f"another model file lies there: found file id {'e' * 16}, expected ffff"),
        ({"code": "1+b"}, "other code is installed there: found 1+b, expected 1+a"),
        ({"device": "cuda"}, "its device is another: found cuda, expected cpu"),
        ({"ctx_tokens": 256}, "its ctx_tokens is another: found 256, expected 512"),
    ],
)
def test_a_worker_that_would_count_otherwise_is_refused(changes: dict[str, Any], words: str) -> None:
    assert refusal(said(), said(**changes), "f" * 64).startswith(words) and bool(words) == bool(
        refusal(said(), said(**changes))
    )
