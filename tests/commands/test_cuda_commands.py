"""Commands whose daemon computes on a GPU: the emulated one by default, a real one with `pytest --gpu`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.formats import profile as profiles
from engine.formats.gguf import open_model
from engine.formats.trace import iter_parts, read_routing
from engine.ground import protocol
from engine.ground.config import EngineConfig
from engine.placing import policies
from spark.daemon.client import DaemonClient, Deadlines
from spark.pipeline import bench, calibrate, checkpoints, replay, tokens, validate
from tests.tiny_models import k_quant_mix, write_tiny

N_LAYER, N_USED = 2, 3
LENGTHS, PROMPT_TOKENS = (40, 37, 20), 18
N_GENERATED = sum(LENGTHS) - len(LENGTHS) * PROMPT_TOKENS
DEADLINES = Deadlines(ready_s=100, silence_s=100, total_s=100)
DAEMON = [sys.executable, str(Path(__file__).parents[1].joinpath("emulated_daemon.py"))]


@pytest.fixture(autouse=True)
def on_the_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons find the device of the tests."""
    if request.config.getoption("--gpu"):
        return
    if not sys.platform.startswith("linux") or shutil.which("g++") is None:
        pytest.skip("the CUDA emulator takes g++ on Linux")
    monkeypatch.setattr(replay, "engine_command", lambda config: [*DAEMON, *protocol.command_line(config)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny(path, k_quant_mix, n_layer=N_LAYER, n_expert_used=N_USED, n_ctx_train=90)


@pytest.fixture(scope="module")
def sessions(model: Path) -> Path:
    """A token file: windows of a prompt and a turn."""
    rng, rows = np.random.default_rng(1), []
    for i, n in enumerate(LENGTHS):
        generated = np.arange(n) >= PROMPT_TOKENS
        rows.append(tokens.Window(f"session {i // 2}", i, rng.integers(0, 301, n).astype(np.int32), generated))
    with open_model(model) as file:
        origin = tokens.Origin(file.model_id, "0" * 64, "0" * 64)
    path = model.with_name("tokens.parquet")
    with path.open("wb") as out:
        tokens.write_windows(out, iter(rows), origin, 40)
    return path


def quiet(label: str, done: int, total: int) -> None:
    assert 0 <= done <= total, label


@pytest.mark.slow
def test_the_pipeline(model: Path, sessions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Calibration with a trace, then validation: every policy gives the tokens of the all-resident run."""
    replay._note_once.cache_clear()
    profile, trace = model.with_name("profile.csv"), model.with_name("trace")
    options = checkpoints.CalibrateOptions(sessions, profile, trace_dir=trace, hidden=True)
    config = EngineConfig(model, "auto", "uniform", threads=1)
    calibrated = calibrate.calibrate(config, options, DEADLINES, quiet)
    assert (calibrated.tokens, calibrated.counted_tokens) == (97, N_GENERATED)
    assert "\ndevice cuda: there is a GPU: " in capsys.readouterr().err
    counts = profiles.load(profile)[0].counts
    with open_model(model) as file:
        assert np.array_equal(read_routing(trace, file.model_id).counts(), counts)
        hidden = [part.values["hidden"] for part in iter_parts(trace, file.model_id, ("hidden",))]
    assert sum(map(len, hidden)) == 97 and all(np.isfinite(values).all() for values in hidden)

    made = validate.ValidateOptions(sessions, profile, (), (60.0,), prompts=1, generate_tokens=4)
    report = validate.validate(EngineConfig(model, "auto", threads=1), made, DEADLINES, quiet)
    (ladder,) = report.ladders
    assert [row.policy for row in ladder.rows] == [*policies.NAMES, "belady"]
    assert [row.identical_tokens for row in ladder.rows] == [None, True, True, True, True, None]
    assert all(row.device_bytes for row in ladder.rows[:-1])
    assert "device" not in capsys.readouterr().err  # said already


@pytest.mark.slow
def test_bench(model: Path) -> None:
    options = bench.BenchOptions((100.0, 50.0), prompts=1, prompt_tokens=34, generate_tokens=4)
    report = bench.bench(EngineConfig(model, "cuda", threads=1), options, DEADLINES, quiet)
    assert report.device == "cuda" and [row.identical_tokens for row in report.rows] == [None, True]
    assert report.rows[0].miss_pct == 0 < report.rows[1].miss_pct
    assert {settings["chunk_tokens"] for settings in report.settings} == {90}


@pytest.mark.slow
def test_a_daemon_learns_and_plans(model: Path, tmp_path: Path) -> None:
    """What a server asks of it: a profile written and read again, and loading in stages."""
    stages: list[tuple[str, int, int]] = []
    config = EngineConfig(model, "cuda", "spark", residency_pct=60.0, threads=1)
    command = replay.engine_command(config)
    with DaemonClient(command, deadlines=DEADLINES, on_loading=lambda *now: stages.append(now)) as client:
        client.generate(range(34), max_tokens=5, stop_tokens=[]).result()
        assert client.profile("write", tmp_path / "p.csv")["tokens"] == 4
        assert client.stats()["hits"] + client.stats()["misses"] == 4 * N_LAYER * N_USED
    assert profiles.load(tmp_path / "p.csv")[0].counts.sum() == 4 * N_LAYER * N_USED
    assert {stage for stage, _, _ in stages} == set(protocol.STAGES)
    assert stages[-1][0] == "loading" and stages[-1][1] == stages[-1][2] > 10**6
