"""What is made of the runs of calibration by several GPUs: their order, rates, and times one worker's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cluster_gpu, cluster_results
from benchmarks.cluster_gpu import ALONE, order, row, summary, write_tokens
from engine.formats.gguf import open_model
from spark.pipeline.tokens import read_tokens
from tests.command_line import NANO


def made(seconds: float, *shares: tuple[int, float, float]) -> dict[str, object]:
    """Figures of a `spark calibrate`. shares: of each worker, cost, busy_s and idle_s."""
    tokens = sum(cost for cost, _, _ in shares) or 1200
    workers = [
        {"cost": cost, "busy_s": busy_s, "idle_s": idle_s, "tokens_per_s": cost / busy_s if busy_s else 0, "lost": 0}
        for cost, busy_s, idle_s in shares
    ]
    about = {"tokens": tokens, "tokens_per_s": tokens / seconds, "ready_s": 7.0, "seconds": seconds}
    return about | {"wall_s": seconds + 10} | ({"workers": workers} if shares else {})


def test_the_most_telling_runs_come_first() -> None:
    assert order(2, 2) == [1, 2, ALONE, 1, 2, 1, 2]
    assert order(8, 1) == [1, 8, ALONE, 2, 4, 1, 8]


def test_rates_are_by_the_run_and_by_the_workers_own_time() -> None:
    """The second worker is ready 4 s after the first, and the first waits for a second in all."""
    two = row(2, made(12.0, (700, 11.0, 1.0), (500, 8.0, 0.0)))
    assert two["tokens_per_s"] == 100 and two["tokens_per_s_in_all"] == pytest.approx(1200 / 22)
    assert two["own_tokens_per_s"] == pytest.approx(700 / 12 + 500 / 8)
    assert two["idle_share"] == pytest.approx(1 / 20) and two["late_share"] == pytest.approx(4 / 24)
    assert two["shares"] == pytest.approx([700 / 1200, 500 / 1200])
    assert "idle_share" not in row(ALONE, made(20.0))


def test_medians_are_compared_with_those_of_one_worker() -> None:
    runs = [row(1, made(20.0, (1200, 19.0, 1.0))), row(2, made(10.0, (600, 9.0, 0.0), (600, 9.0, 0.0)))]
    runs += [row(ALONE, made(16.0)), row(1, made(30.0, (1200, 30.0, 0.0))), row(1, made(24.0, (1200, 24.0, 0.0)))]
    alone, one, two = summary(runs)
    assert (alone["runs"], one["runs"], two["runs"]) == (1, 3, 1)
    assert one["tokens_per_s"] == 50 and one["tokens_per_s_of_one"] == 1
    assert two["tokens_per_s_of_one"] == pytest.approx(120 / 50) and alone["tokens_per_s_of_one"] == 1.5
    figures = {
        "gpus": ["NVIDIA H200"] * 2, "tokens": 1200, "same_profiles": 5, "rows": runs, "summary": [alone, one, two],
        "command": "cluster_gpu.py", "commit": "0" * 40, "created": "2026-11-25", "versions": {},
        "host": {"cpu": "a CPU", "gpu": "NVIDIA H200"},
    }  # fmt: skip
    text = "\n".join(cluster_results.gpu("cluster_gpu.json", figures))
    assert "2 x NVIDIA H200" in text and "| 2 | 1 | 120 (2.40x) |" in text and "2 workers: 50.0%, 50.0%" in text
    assert "| no cluster | 1 | 75 (1.50x) |  |" in text


def test_sessions_are_read_again_under_other_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_gpu, "SAMPLES", cluster_gpu.SAMPLES.parent / "sessions_other")
    n_tokens = write_tokens(NANO, tmp_path / "t.parquet", 3, 1024)
    file = read_tokens(tmp_path / "t.parquet")
    with open_model(NANO) as model:
        assert file.origin.model_id == model.model_id and file.n_tokens == n_tokens
    windows = list(file)
    third = len(windows) // 3
    for first, second in zip(windows[:third], windows[third : 2 * third], strict=True):
        assert second.session_id == f"1-{first.session_id.removeprefix('0-')}"
        assert second.window == first.window and second.tokens.tolist() == first.tokens.tolist()
    assert len(file.session_ids()) == 3 * len({window.session_id for window in windows[:third]})
