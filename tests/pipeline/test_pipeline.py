"""The commands on the bundled model: calibration that can be killed, validation that tells the truth."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
from gguf import GGMLQuantizationType as QType

from benchmarks import readme_results, render
from engine.formats import profile as profiles
from engine.formats.gguf import open_model
from engine.formats.gguf_header import StringArray
from engine.formats.quants import dequantize
from engine.formats.trace import part_paths, read_routing
from engine.ground.config import EngineConfig
from engine.ground.errors import FileFormatError, UsageError, WrongModelError
from engine.placing import evidence, policies
from engine.placing.evidence import Interval
from engine.placing.simulate import Recording
from spark.daemon.client import Deadlines
from spark.extract import ExtractOptions, extract
from spark.pipeline import calibrate, checkpoints, replay, validate
from spark.pipeline import ladder as ladder_of
from spark.pipeline.tokens import Window, read_tokens, tokenize, write_windows
from spark.speech.sessions import root_of
from tests.gguf_files import write_gguf
from tests.tiny_models import tiny

ROOT = Path(__file__).parents[2]
NANO = ROOT / "data" / "nano" / "nano.gguf"
CONFIG = EngineConfig(model=NANO, device="cpu", threads=2)
WINDOW = 256  # tokens: several chunks, for what happens between them, and many windows in few tokens
MAX_TOKENS = 6000
DEADLINES = Deadlines(ready_s=60, silence_s=60, total_s=120)


def quiet(label: str, done: int, total: int) -> None:
    assert 0 <= done <= total, label


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train and test sessions of the samples, as JSONL and as tokens in short windows."""
    folder = tmp_path_factory.mktemp("sessions")
    samples = ROOT / "data" / "sessions"
    extract(ExtractOptions(folder, "both", samples / "claude", samples / "codex", 0.3), lambda a, b: None)
    for name in ("train", "test"):
        tokenize(NANO, folder / f"{name}.jsonl", folder / f"{name}.parquet", WINDOW)
    return folder


_KEPT: dict[EngineConfig, calibrate.Counting] = {}
_DAEMONS = contextlib.ExitStack()


@contextlib.contextmanager
def kept(config: EngineConfig, deadlines: Deadlines, progress: replay.Progress) -> Iterator[calibrate.Counting]:
    """A daemon that runs which nothing breaks off have one after the other; whoever resumes has it, too."""
    if config not in _KEPT:
        _KEPT[config] = _DAEMONS.enter_context(calibrate.here(config, deadlines, progress))
    yield _KEPT[config]


@pytest.fixture(scope="module", autouse=True)
def _no_daemon_is_left() -> Iterator[None]:
    with _DAEMONS:
        yield
    _KEPT.clear()


def run(files: Path, out: Path, config: EngineConfig = CONFIG, **options) -> calibrate.CalibrateReport:
    made = checkpoints.CalibrateOptions(files / "train.parquet", out, **options)
    return calibrate.calibrate(config, made, DEADLINES, quiet, kept if config == CONFIG else calibrate.here)


@pytest.fixture(scope="module")
def profile(files: Path) -> Path:
    made = checkpoints.CalibrateOptions(files / "train.parquet", files / "profile.csv", max_tokens=MAX_TOKENS)
    calibrate.calibrate(CONFIG, made, DEADLINES, quiet)
    return files / "profile.csv"


def same_counts(a: Path, b: Path) -> bool:
    return np.array_equal(profiles.load(a)[0].counts, profiles.load(b)[0].counts)


def test_calibration_counts_generated_tokens(files: Path, profile: Path) -> None:
    made, warnings = profiles.load(profile)
    assert not warnings
    assert (made.counts.shape, made.n_expert_used) == ((6, 32), 4)
    windows, read = [], 0
    for window in read_tokens(files / "train.parquet"):
        windows.append(window)
        read += len(window.tokens)
        if read >= MAX_TOKENS:
            break
    generated = sum(int(w.generated.sum()) for w in windows)
    assert made.tokens == generated
    assert made.counts.sum(axis=1).tolist() == [4 * generated] * 6
    assert made.sessions == len({w.session_id for w in windows})
    roots = {root_of(w.session_id) for w in windows if w.generated.any()}
    assert (made.choices == ()) == (len(roots) < evidence.MIN_ROOTS)
    assert not checkpoints.partial_path(profile).exists() and not checkpoints.routing_path(profile).exists()


def spread(files: Path, name: str, out: Path, n_tokens: int) -> Path:
    """A token file of about so many tokens, from the beginnings of all sessions of `name` that generate any."""
    source = read_tokens(files / f"{name}.parquet")
    by_root: dict[str, list[Window]] = {}
    for window in source:
        if window.generated.any():
            by_root.setdefault(root_of(window.session_id), []).append(window)
    each = -(-n_tokens // len(by_root))
    rows = [window for found in by_root.values() for window in found[: max(1, each // source.window)]]
    with out.open("wb") as file:
        write_windows(file, rows, source.origin, source.window)
    return out


@pytest.fixture(scope="module")
def evident(files: Path) -> calibrate.CalibrateReport:
    """A calibration on some of every training session."""
    tokens = spread(files, "train", files / "spread-train.parquet", 12_000)
    return calibrate.calibrate(CONFIG, checkpoints.CalibrateOptions(tokens, files / "evident.csv"), DEADLINES, quiet)


@pytest.mark.slow
def test_the_profile_carries_what_the_sessions_speak_for(evident: calibrate.CalibrateReport) -> None:
    choices = profiles.load(evident.profile)[0].choices
    assert choices == evident.choices
    assert [choice.residency_pct for choice in choices] == list(evidence.RESIDENCIES)
    assert {choice.tokens for choice in choices} == {evident.generated_tokens}
    assert min(choice.sessions for choice in choices) >= evidence.MIN_ROOTS
    assert all(0 < choice.low <= choice.misses <= choice.high for choice in choices)
    assert all(choice.misses < min(choice.lru, choice.static) * 1.02 for choice in choices)


@pytest.mark.slow
def test_the_engine_obeys_the_profile(evident: calibrate.CalibrateReport, tmp_path: Path) -> None:
    made, _ = profiles.load(evident.profile)
    chosen = replace(made.choices[-2], residency_pct=60.0, cache_fraction=0.25, memory=4)
    profiles.save(replace(made, choices=(chosen,)), tmp_path / "p.csv")
    asked = replace(CONFIG, policy="spark", residency_pct=60.0, profile=tmp_path / "p.csv")
    with replay.open_daemon(asked, DEADLINES, quiet) as client:
        info = client.ready.info
    slots, cache = sum(info["slots_per_layer"]), sum(info["cache_slots"])
    assert 0.2 < cache / slots < 0.3
    assert any("pin 75%, remember 16 steps" in reason for reason in info["reasons"])


@pytest.mark.slow
@pytest.mark.parametrize("judged_on", ["the samples' held-out sessions", "sessions on other subjects"])
def test_what_was_chosen_is_no_worse_than_lru_or_a_fixed_placement(
    files: Path, tmp_path: Path, evident: calibrate.CalibrateReport, judged_on: str
) -> None:
    """Chosen on some sessions, judged on others: at most noise above the better of the two."""
    folder = files
    if judged_on == "sessions on other subjects":
        other = ROOT / "data" / "sessions_other"
        if not other.exists():
            pytest.skip("no second set of sample sessions")
        folder = tmp_path
        extract(ExtractOptions(folder, "both", other / "claude", other / "codex", 1.0), lambda a, b: None)
        tokenize(NANO, folder / "test.jsonl", folder / "test.parquet", WINDOW)
    tokens = spread(folder, "test", tmp_path / "spread-test.parquet", 12_000)
    counted = checkpoints.CalibrateOptions(tokens, tmp_path / "unused.csv", trace_dir=tmp_path / "trace")
    calibrate.calibrate(CONFIG, counted, DEADLINES, quiet)
    made, _ = profiles.load(evident.profile)
    recording = Recording(read_routing(tmp_path / "trace", made.model_id or ""))
    draws = evidence.Draws(recording.tokens)
    for percent in (10.0, 30.0, 60.0):
        placed = {
            rung.name: ladder_of.place(rung, made.counts, made, [1] * 6, 4, percent)
            for rung in (policies.STATIC, policies.LRU, policies.SPARK)
        }
        missed = {name: recording.replay(p.placement, p.rule).root_misses for name, p in placed.items()}
        for name in ("static", "lru"):
            assert draws.against(missed["spark"], missed[name]).low <= 0, f"{name} at {percent:g}%"
        if percent == 60.0:
            assert missed["spark"].sum() <= 0.92 * missed["lru"].sum()


@pytest.fixture(scope="module")
def unbroken(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration with a trace that nothing interrupted: a.csv and ta/."""
    folder = tmp_path_factory.mktemp("unbroken")
    run(files, folder / "a.csv", max_tokens=MAX_TOKENS, trace_dir=folder / "ta")
    return folder


def test_counting_all_tokens_counts_all(files: Path, tmp_path: Path) -> None:
    report = run(files, tmp_path / "p.csv", count="all", max_tokens=1000)
    made, _ = profiles.load(tmp_path / "p.csv")
    assert made.tokens == report.tokens >= 1000
    assert made.count == "all"


@pytest.mark.slow
def test_own_continuations_are_counted_too(files: Path, tmp_path: Path) -> None:
    plain = run(files, tmp_path / "a.csv", max_tokens=3 * WINDOW)
    longer = run(files, tmp_path / "b.csv", max_tokens=3 * WINDOW, generate_tokens=7)
    n_windows = (longer.counted_tokens - plain.counted_tokens) / 6  # the last of seven is never fed back
    assert n_windows == int(n_windows) >= 2
    options = checkpoints.CalibrateOptions(
        files / "train.parquet", tmp_path / "c.csv", max_tokens=3 * WINDOW, generate_tokens=7
    )
    again = calibrate.calibrate(CONFIG, options, DEADLINES, quiet)  # by a daemon that has done nothing before
    assert again.counted_tokens == longer.counted_tokens
    assert same_counts(tmp_path / "b.csv", tmp_path / "c.csv")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["between windows", "inside the tally", "ctrl-c", "kill", "kill before"])
def test_interrupted_and_resumed_equals_unbroken(
    files: Path, tmp_path: Path, how: str, unbroken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KeyboardInterrupt at two places, and SIGINT and SIGKILL of the whole command from outside."""
    out, trace = tmp_path / "b.csv", tmp_path / "tb"
    options = checkpoints.CalibrateOptions(files / "train.parquet", out, max_tokens=MAX_TOKENS, trace_dir=trace)
    if how in ("between windows", "inside the tally"):
        calls = 0

        def interrupt(*args: object) -> int:
            nonlocal calls
            calls += 1
            if calls == (9 if how == "between windows" else 5):  # the fourth window is the first that counts 50 tokens
                raise KeyboardInterrupt
            return len(part_paths(trace))

        def progress(label: str, done: int, total: int) -> None:
            if label == "calibrating":
                interrupt()

        if how == "inside the tally":
            monkeypatch.setattr(calibrate, "n_parts", interrupt)
        with pytest.raises(KeyboardInterrupt):
            calibrate.calibrate(CONFIG, options, DEADLINES, progress if how == "between windows" else quiet)
        monkeypatch.undo()
    else:
        # Checkpoints after every window, since SIGKILL leaves no time to write one; or none for long behind the first.
        every_s = 1e9 if how == "kill before" else 0
        start = f"import spark.pipeline.calibrate as c; c.CHECKPOINT_EVERY_S = {every_s}; "
        start += "from spark.cli import main; main()"
        command = [sys.executable, "-c", start, "calibrate", str(NANO), str(files / "train.parquet")]
        command += ["--out", str(out), "--max-tokens", str(MAX_TOKENS), "--trace", str(trace), "--device", "cpu"]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True) as process:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                n_windows = (checkpoints.state_of(checkpoints.partial_path(out)) or {"windows": 0})["windows"]
                if n_windows >= 4 or (how == "kill before" and trace.exists() and len(part_paths(trace)) >= 4):
                    break
                time.sleep(0.005)
            daemons = psutil.Process(process.pid).children(recursive=True)
            os.killpg(process.pid, signal.SIGINT if how == "ctrl-c" else signal.SIGKILL)
        psutil.wait_procs(daemons, 30)  # one ends with the window that it is at
        assert process.returncode == (130 if how == "ctrl-c" else -signal.SIGKILL)
    assert not out.exists()
    partial, _ = profiles.load(checkpoints.partial_path(out))
    whole = profiles.load(unbroken / "a.csv")[0]
    assert 0 <= partial.counts.sum() < whole.counts.sum()
    with pytest.raises(UsageError, match="earlier run"):
        run(files, out, max_tokens=MAX_TOKENS, trace_dir=trace)
    resumed = run(files, out, max_tokens=MAX_TOKENS, trace_dir=trace, resume=True)
    assert 0 <= resumed.resumed_tokens < resumed.tokens and (how == "kill before" or resumed.resumed_tokens)
    assert replace(profiles.load(out)[0], created="") == replace(whole, created="")
    assert not checkpoints.partial_path(out).exists()
    ta, tb = (read_routing(folder, whole.model_id) for folder in (unbroken / "ta", trace))
    assert np.array_equal(ta.experts, tb.experts)
    assert np.array_equal(ta.position, tb.position)


@pytest.fixture(scope="module")
def broken_off(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a calibration to p.csv that was broken off after its first window."""

    def interrupt(label: str, done: int, total: int) -> None:
        if label == "calibrating" and done > WINDOW:
            raise KeyboardInterrupt

    out = tmp_path_factory.mktemp("broken") / "p.csv"
    with pytest.raises(KeyboardInterrupt):
        calibrate.calibrate(CONFIG, checkpoints.CalibrateOptions(files / "train.parquet", out), DEADLINES, interrupt)
    return out.parent


@pytest.fixture
def begun(broken_off: Path, tmp_path: Path) -> Path:
    """Where a calibration was to write that was broken off."""
    shutil.copytree(broken_off, tmp_path / "begun")
    return tmp_path / "begun" / "p.csv"


@pytest.mark.slow
def test_a_checkpoint_of_other_options_is_refused(files: Path, begun: Path) -> None:
    with pytest.raises(UsageError, match="another count"):
        run(files, begun, count="all", resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("first", [1500, 5000])
def test_a_calibration_goes_on_to_another_length(
    files: Path, tmp_path: Path, to_one_length: calibrate.CalibrateReport, first: int
) -> None:
    """Which sessions are chosen by does not depend on how far it was to go when it began."""
    first_run = checkpoints.CalibrateOptions(files / "short-train.parquet", tmp_path / "p.csv", max_tokens=first)

    def interrupt(label: str, done: int, total: int) -> None:
        if label == "calibrating" and done > 1000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate.calibrate(CONFIG, first_run, DEADLINES, interrupt)
    options = replace(first_run, max_tokens=3000, resume=True)
    resumed = calibrate.calibrate(CONFIG, options, DEADLINES, quiet, kept)
    assert 0 < resumed.resumed_tokens < resumed.tokens == to_one_length.tokens
    assert resumed.choices == to_one_length.choices != ()
    assert same_counts(tmp_path / "p.csv", to_one_length.profile)


@pytest.fixture(scope="module")
def to_one_length(files: Path) -> calibrate.CalibrateReport:
    """A calibration on a window of each of twelve training sessions, with a trace, that nothing broke off."""
    tokens = spread(files, "train", files / "short-train.parquet", 6000)
    asked = checkpoints.CalibrateOptions(tokens, files / "whole.csv", max_tokens=3000, trace_dir=files / "whole")
    return calibrate.calibrate(CONFIG, asked, DEADLINES, quiet, kept)


def test_other_sessions_are_named_in_words(files: Path, begun: Path) -> None:
    other = checkpoints.CalibrateOptions(files / "test.parquet", begun, count="all", resume=True)
    words = r"counted with another token file, another count \(found generated, expected all\)"
    with pytest.raises(UsageError, match=words):
        calibrate.calibrate(CONFIG, other, DEADLINES, quiet, kept)


@pytest.mark.slow
def test_a_checkpoint_of_another_quantization_is_refused(files: Path, tmp_path: Path, begun: Path) -> None:
    """A profile serves all of a model's quantizations, but what one has counted another does not go on with."""
    with open_model(NANO) as model:
        tensors = {name: model.tensor(name) for name in model.tensors}
        assert tensors["output.weight"].qtype != QType.Q8_0
        changed = {"output.weight": (dequantize(tensors["output.weight"]), QType.Q8_0)}
        metadata = {key: list(v) if isinstance(v, StringArray) else v for key, v in model.metadata.items()}
        (other,) = write_gguf(tmp_path / "other.gguf", metadata, tensors | changed)
        with open_model(other) as requantized:
            assert requantized.model_id == model.model_id
    counted = checkpoints.partial_path(begun).read_bytes()
    with pytest.raises(UsageError, match=r"counted with another model file$"):
        run(files, begun, replace(CONFIG, model=other), resume=True)
    assert checkpoints.partial_path(begun).read_bytes() == counted


@pytest.mark.slow
def test_a_model_without_experts_is_refused_as_such_with_a_trace_too(files: Path, tmp_path: Path) -> None:
    config, tensors = tiny("qwen35", n_vocab=6144)
    with open_model(NANO) as model:
        words = {key: v for key, v in model.metadata.items() if key.startswith("tokenizer.")}
    kept = {key: list(v) if isinstance(v, StringArray) else v for key, v in words.items()}
    (dense,) = write_gguf(tmp_path / "d.gguf", {"general.architecture": "qwen35"} | config.metadata() | kept, tensors)
    options = checkpoints.CalibrateOptions(files / "test.jsonl", tmp_path / "p.csv", trace_dir=tmp_path / "trace")
    with pytest.raises(UsageError, match="has no experts"):
        calibrate.calibrate(replace(CONFIG, model=dense), options, DEADLINES, quiet)
    assert not (tmp_path / "trace").exists()
    asked = validate.ValidateOptions(files / "test.jsonl", tmp_path / "no profile.csv")
    with pytest.raises(UsageError, match="has no experts"):  # rather than that a profile is missing
        validate.validate(replace(CONFIG, model=dense), asked, DEADLINES, quiet)


@pytest.mark.slow
def test_a_run_that_counted_nothing_stands_in_no_ones_way(files: Path, tmp_path: Path, unbroken: Path) -> None:
    """It was killed in its first window: its checkpoint is as none, but for the trace that it began."""
    out, partial = tmp_path / "p.csv", checkpoints.partial_path(tmp_path / "p.csv")
    began = checkpoints.CalibrateOptions(files / "train.parquet", out, max_tokens=3 * WINDOW, trace_dir=tmp_path / "t")

    def kill(label: str, done: int, total: int) -> None:
        if label == "calibrating" and done > 64:
            raise KeyboardInterrupt

    config = replace(CONFIG, chunk_tokens=64)

    def killed() -> None:
        with pytest.raises(KeyboardInterrupt):
            calibrate.calibrate(config, began, DEADLINES, kill)
        state = checkpoints.state_of(partial)
        assert state is not None and state["windows"] == 0
        for path in part_paths(tmp_path / "t"):  # the daemon may have been done with the window before it was killed
            path.unlink()

    killed()
    run(files, out, max_tokens=3 * WINDOW, count="all")
    assert profiles.load(out)[0].count == "all" and not partial.exists()
    killed()
    run(files, out, max_tokens=3 * WINDOW, trace_dir=tmp_path / "other", resume=True)
    killed()
    before = {path: path.read_bytes() for path in part_paths(unbroken / "ta")}
    for resume in (False, True):
        with pytest.raises(UsageError, match="has a trace already"):
            run(files, out, max_tokens=3 * WINDOW, trace_dir=unbroken / "ta", resume=resume)
    # Another run took the empty folder meanwhile; the checkpoint names it, and what is in it is not its own.
    for path in before:
        (tmp_path / "t").mkdir(exist_ok=True)
        (tmp_path / "t" / path.name).write_bytes(before[path])
    with pytest.raises(UsageError, match="more than the window"):
        run(files, out, max_tokens=3 * WINDOW, trace_dir=tmp_path / "t")
    assert [path.read_bytes() for path in part_paths(tmp_path / "t")] == list(before.values())
    assert {path: path.read_bytes() for path in part_paths(unbroken / "ta")} == before
    for path in part_paths(tmp_path / "t"):
        path.unlink()
    (tmp_path / "t" / "part-000000.parquet").write_bytes(next(iter(before.values())))  # of the first window, uncounted
    run(files, out, max_tokens=3 * WINDOW, trace_dir=tmp_path / "t")
    assert len(part_paths(tmp_path / "t")) == 3 and not partial.exists()


def test_a_resume_never_touches_another_trace(files: Path, begun: Path, unbroken: Path) -> None:
    before = part_paths(unbroken / "ta")
    with pytest.raises(UsageError, match="another trace"):
        run(files, begun, max_tokens=MAX_TOKENS, trace_dir=unbroken / "ta", resume=True)
    assert part_paths(unbroken / "ta") == before


def test_a_damaged_checkpoint_is_explained(files: Path, tmp_path: Path, profile: Path) -> None:
    made = replace(profiles.load(profile)[0], extra_lines=("# spark-checkpoint: {broken",))
    profiles.save(made, checkpoints.partial_path(tmp_path / "p.csv"))
    with pytest.raises(FileFormatError, match="not a checkpoint"):
        run(files, tmp_path / "p.csv", resume=True)


@pytest.mark.slow
def test_a_dead_daemon_loses_nothing(files: Path, tmp_path: Path, unbroken: Path) -> None:
    import psutil

    from engine.ground.errors import DaemonError

    others = {child.pid for child in psutil.Process().children(recursive=True)}

    def kill(label: str, done: int, total: int) -> None:
        if label == "calibrating" and done > 2000:
            for child in psutil.Process().children(recursive=True):
                if child.pid not in others:
                    child.kill()

    options = checkpoints.CalibrateOptions(files / "train.parquet", tmp_path / "p.csv", max_tokens=MAX_TOKENS)
    with pytest.raises(DaemonError):
        calibrate.calibrate(CONFIG, options, DEADLINES, kill)
    assert checkpoints.partial_path(tmp_path / "p.csv").exists()
    run(files, tmp_path / "p.csv", max_tokens=MAX_TOKENS, resume=True)
    assert same_counts(tmp_path / "p.csv", unbroken / "a.csv")


def test_hidden_states_are_in_the_trace(files: Path, tmp_path: Path) -> None:
    run(files, tmp_path / "p.csv", max_tokens=1000, trace_dir=tmp_path / "t", hidden=True)
    import pyarrow.parquet as pq

    table = pq.read_table(part_paths(tmp_path / "t")[0])
    assert table.schema.field("hidden").type.list_size == 256
    with pytest.raises(UsageError, match="--trace"):
        run(files, tmp_path / "p.csv", hidden=True)


@pytest.fixture(scope="module")
def ladder(files: Path, profile: Path) -> validate.ValidateReport:
    tokens = spread(files, "test", files / "spread.parquet", 6000)
    made = validate.ValidateOptions(tokens, profile, (profile,), (60.0, 30.0), prompts=2, generate_tokens=9)
    return validate.validate(CONFIG, made, DEADLINES, quiet)


@pytest.mark.slow
def test_the_ladder_is_in_order(ladder: validate.ValidateReport) -> None:
    assert [made.residency_pct for made in ladder.ladders] == [60.0, 30.0]
    assert ladder.ladders[0].rows[-1].misses_per_token < ladder.ladders[1].rows[-1].misses_per_token
    rows = {row.policy: row for row in ladder.ladders[0].rows}
    assert list(rows) == ["all", "uniform", "static", "lru", "spark", "belady"]
    assert rows["all"].misses_per_token == 0.0
    assert rows["static"].misses_per_token < rows["uniform"].misses_per_token
    assert rows["spark"].misses_per_token < rows["uniform"].misses_per_token
    for name in ("uniform", "static", "lru", "spark"):
        assert rows[name].hit_rate <= rows["belady"].hit_rate < 1.0
        assert rows[name].misses_per_token == pytest.approx(24 * (1 - rows[name].hit_rate))
        assert rows[name].device_bytes < rows["all"].device_bytes
        assert rows[name].misses_low < rows[name].misses_per_token < rows[name].misses_high
    assert rows["static"].moves_per_token == rows["uniform"].moves_per_token == 0
    assert 0 < rows["spark"].moves_per_token < rows["lru"].moves_per_token <= rows["lru"].misses_per_token
    # The share of a layer is the same everywhere, so it is what uniform hits by chance.
    assert 0.5 < rows["uniform"].hit_rate < 0.7


def test_every_policy_gave_the_same_tokens(ladder: validate.ValidateReport) -> None:
    for made in ladder.ladders:
        assert [row.identical_tokens for row in made.rows] == [None] + [True] * 4 + [None]


def test_cross_rows_of_the_same_profile_are_the_own_rows(ladder: validate.ValidateReport) -> None:
    for made in ladder.ladders:
        own = {row.policy: row.hit_rate for row in made.rows}
        assert [(row.policy, row.hit_rate) for row in made.cross] == [(p, own[p]) for p in ("static", "spark")]


def test_the_verdict_is_what_the_rows_say(ladder: validate.ValidateReport) -> None:
    for made in ladder.ladders:
        assert made.verdict.startswith("pin ")
        rows = {row.policy: row.misses_per_token for row in made.rows}
        fewer = 100 * (1 - rows["spark"] / rows["lru"])
        if "few to say" not in made.verdict:
            assert f"{fewer:.0f}% fewer misses" in made.verdict or "as many misses" in made.verdict


@pytest.mark.parametrize(
    ("more", "others", "words"),
    [
        (Interval(-0.12, -0.14, -0.1), 900, "12% fewer misses (10 to 14) than"),
        (Interval(0.03, 0.01, 0.06), 900, "3% more misses (1 to 6) than"),
        (Interval(-0.01, -0.03, 0.02), 900, "as many misses (-3% to +2%) as"),
        (Interval(-0.003, -0.004, -0.002), 900, "as many misses as"),
        (Interval(0.004, 0.001, 0.03), 900, "as many misses (+0% to +3%) as"),
        (Interval(0.0, 0.0, 0.0), 0, "as many misses as"),
        (Interval(24.0, 18.0, 30.0), 0, "more misses than"),
    ],
)
def test_comparisons_in_words(more: Interval, others: int, words: str) -> None:
    assert ladder_of.compared(more, others) == words


@pytest.mark.slow
@pytest.mark.parametrize("what", ["calibrating", "recording routing"])
def test_progress_comes_within_a_window(files: Path, tmp_path: Path, profile: Path, what: str) -> None:
    """A window of a slow model takes minutes; the bar must not stand still for it."""
    seen: list[int] = []

    def progress(label: str, done: int, total: int) -> None:
        if label == what:
            seen.append(done)
            if len(seen) > 8:
                raise KeyboardInterrupt  # enough

    config = replace(CONFIG, chunk_tokens=64)
    with pytest.raises(KeyboardInterrupt):
        if what == "calibrating":
            made = checkpoints.CalibrateOptions(files / "train.parquet", tmp_path / "p.csv", max_tokens=4000)
            calibrate.calibrate(config, made, DEADLINES, progress)
        else:
            judged = validate.ValidateOptions(files / "test.parquet", profile, max_tokens=4000)
            validate.validate(config, judged, DEADLINES, progress)
    assert seen == sorted(seen)
    assert max(b - a for a, b in pairwise(seen)) <= 64 < WINDOW  # chunks of windows


def test_report_has_the_keys_of_its_format(ladder: validate.ValidateReport) -> None:
    made = json.loads(json.dumps(ladder.to_json()))
    assert {"model", "profile", "tokens", "generated_tokens", "sessions", "prompts"} <= set(made)
    made = made["residencies"][0]
    assert {"residency_pct", "verdict", "rows", "cross"} == set(made)
    keys = {"policy", "hit_rate", "misses_per_token", "misses_low", "misses_high",
            "moves_per_token", "hit_rate_by_layer", "decode_tokens_per_s",
            "prefill_tokens_per_s", "device_bytes", "identical_tokens"}  # fmt: skip
    assert all(keys <= set(row) for row in made["rows"])
    assert [len(row["hit_rate_by_layer"]) for row in made["rows"][:5]] == [6] * 5


def test_the_readme_shows_every_residency(ladder: validate.ValidateReport) -> None:
    made = {"results": {"validate": json.loads(json.dumps(ladder.to_json()))}}
    text = "\n".join(readme_results.quality(made))
    assert "| policy | 60% resident | 30% resident | same tokens |" in text
    assert text.count("| yes |") == 4 and "NO" not in text
    spark = ladder.ladders[1].rows[4]
    assert f"{spark.misses_per_token:.2f} ({spark.misses_low:.2f} to {spark.misses_high:.2f})" in text
    assert f"At 30%: {ladder.ladders[1].verdict}." in text
    assert "moves a token" in render.ladder(made["results"]["validate"]["residencies"][0])[0]


@pytest.mark.slow
def test_wrong_files_are_explained(files: Path, profile: Path, tmp_path: Path) -> None:
    foreign = replace(profiles.load(profile)[0], model_id="f" * 64)
    profiles.save(foreign, tmp_path / "foreign.csv")
    options = validate.ValidateOptions(files / "test.parquet", tmp_path / "foreign.csv")
    with pytest.raises(WrongModelError, match="ffffffff"):
        validate.validate(CONFIG, options, DEADLINES, quiet)
    with pytest.raises(FileFormatError, match=r"foreign\.csv"):
        calibrate.calibrate(
            CONFIG, checkpoints.CalibrateOptions(tmp_path / "foreign.csv", tmp_path / "p.csv"), DEADLINES, quiet
        )
    with pytest.raises(UsageError, match="window"):
        run(files, tmp_path / "p.csv", replace(CONFIG, ctx_tokens=WINDOW // 2))
