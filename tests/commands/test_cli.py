"""The command line as a user meets it: what goes where, and what is said about bad input."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.formats import profile as profiles
from engine.formats.gguf import open_model
from spark.pipeline.tokens import read_tokens
from tests.command_line import LOGS, NANO, ROOT, SAMPLES, SPARK, environment, explained, refused, spark

PROVENANCE = {"command", "version", "commit", "host", "created"}
PERCENTILES = {"p50", "p90", "p99"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the whole pipeline was run, a command at a time; what each printed is in NAME.out, NAME.err."""
    folder = tmp_path_factory.mktemp("pipeline")

    def run(name: str, *arguments: str | Path) -> None:
        done = spark(name, *arguments, "--json", f"{name}.json", cwd=folder, fresh=True)
        (folder / f"{name}.out").write_text(done.stdout)
        (folder / f"{name}.err").write_text(done.stderr)

    run("extract-sessions", "--out-dir", ".", *LOGS)
    run("tokenize", NANO, "test.jsonl", "--out", "test.parquet", "--window", "512")
    run("calibrate", NANO, "test.parquet", "--out", "nano.csv", "--trace", "trace", "--hidden", "--max-tokens", "9000")
    run("validate", NANO, "test.parquet", "--profile", "nano.csv", "--max-tokens", "2000", "--prompts", "1",
        "--generate", "4")  # fmt: skip
    run("train-pregate", NANO, "trace", "--out", "pregate.safetensors", "--epochs", "1", "--profile", "nano.csv")
    return folder


def report(made: Path, name: str) -> dict:
    figures = json.loads((made / f"{name}.json").read_text())
    assert set(figures) >= PROVENANCE
    assert figures["command"].split()[1] == name
    assert set(figures["host"]) == {"cpu", "gpu", "driver"}
    return figures


# --- what is asked for is done ------------------------------------------------------------------------


def test_figures_of_extract_sessions(made: Path) -> None:
    figures = report(made, "extract-sessions")
    assert set(figures["sessions"]) == {"train", "test"}
    assert set(figures["prompt_tokens"]) == set(figures["context_tokens"]) == PERCENTILES
    assert figures["files"] > 24 and figures["messages"] > 1000 and figures["skipped_lines"]["invalid_json"] > 0
    lines = (made / "train.jsonl").read_text().splitlines()
    assert len(lines) == figures["sessions"]["train"]


def test_figures_of_tokenize(made: Path) -> None:
    figures = report(made, "tokenize")
    assert figures["tokens"] > figures["generated_tokens"] > figures["windows"] > 0
    assert read_tokens(made / "test.parquet").n_tokens == figures["tokens"]


def test_figures_of_calibrate(made: Path) -> None:
    figures = report(made, "calibrate")
    assert figures["model"] == str(NANO) and figures["profile"] == "nano.csv"
    assert figures["tokens"] >= 4000 and figures["tokens_per_s"] > 0 and figures["sessions"] > 0
    profile, warnings = profiles.load(made / "nano.csv")
    assert not warnings and profile.tokens == figures["generated_tokens"] > 0
    assert (made / "trace").is_dir() and "the trace takes up to" in (made / "calibrate.err").read_text()


def test_figures_of_validate(made: Path) -> None:
    figures = report(made, "validate")
    out = (made / "validate.out").read_text()
    assert [ladder["residency_pct"] for ladder in figures["residencies"]] == [10.0, 30.0, 60.0]
    ladder = figures["residencies"][-1]
    assert [row["policy"] for row in ladder["rows"]] == ["all", "uniform", "static", "lru", "spark", "belady"]
    assert f"Verdict at 60%: {ladder['verdict']}." in out and figures["tokens"] >= 2000
    assert "belady: the fewest misses" in " ".join(out.split())
    keys = {"policy", "hit_rate", "misses_per_token", "hit_rate_by_layer", "decode_tokens_per_s",
            "prefill_tokens_per_s", "device_bytes", "identical_tokens"}  # fmt: skip
    assert all(set(row) >= keys for row in ladder["rows"])


def test_figures_of_train_pregate(made: Path) -> None:
    figures = report(made, "train-pregate")
    assert all(set(row) >= {"predictor", "layer", "recall_1x", "recall_2x", "recall_3x"} for row in figures["rows"])
    assert (made / "pregate.safetensors").stat().st_size > 0
    rules = {(row["residency_pct"], row["budget"], row["threshold"]) for row in figures["guesses"]}
    assert rules == {(p, *rule) for p in (10, 30, 60) for rule in ((1, 0), (2, 0), (4, 0), (4, 0.5))}
    assert figures["profile"].endswith("nano.csv")


@pytest.mark.parametrize("name", ["extract-sessions", "tokenize", "calibrate", "validate", "train-pregate"])
def test_tables_go_to_stdout_and_messages_to_stderr(made: Path, name: str) -> None:
    out, err = ((made / f"{name}.{end}").read_text() for end in ("out", "err"))
    assert f"figures written to {name}.json" in err and "written" not in out
    assert len(out.splitlines()) >= 5
    assert not re.search(r"[…┏┃]", out)  # nothing cut, no boxes
    words = {"extract-sessions": "log files", "tokenize": "generated tokens", "calibrate": "tokens/s",
             "validate": "belady", "train-pregate": "previous token"}  # fmt: skip
    assert words[name] in out and words[name] not in err


def test_calibrate_takes_sessions_too(made: Path, tmp_path: Path) -> None:
    spark("calibrate", NANO, made / "test.jsonl", "--out", "p.csv", "--max-tokens", "500", cwd=tmp_path)
    assert profiles.load(tmp_path / "p.csv")[0].tokens > 0


def test_a_profile_without_a_model_id_is_used_with_a_warning(made: Path, tmp_path: Path) -> None:
    """At a residency at which no expert fits: everything is read where it lies, and no token changes."""
    nameless = dataclasses.replace(profiles.load(made / "nano.csv")[0], model_id=None)
    profiles.save(nameless, tmp_path / "nameless.csv")
    done = spark(
        "validate", NANO, made / "test.parquet", "--profile", "nameless.csv", "--cross", made / "nano.csv",
        "--residency", "0", "--max-tokens", "1000", "--prompts", "1", "--generate", "3", cwd=tmp_path,
    )  # fmt: skip
    assert "warning: nameless.csv does not name its model" in done.stderr
    assert re.search(r"static +nameless\.csv", done.stdout) and re.search(r"spark +nano\.csv", done.stdout)
    assert not re.search(r"\bNO\b", done.stdout)


def test_tokenizer_is_exported(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    done = spark("tokenize", NANO, "--export-tokenizer", "tokenizer.json", cwd=tmp_path)
    assert done.stdout == "" and "tokenizer written to tokenizer.json" in done.stderr
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert made.decode(made.encode("def f(x):").ids) == "def f(x):"


def test_figures_may_go_to_a_pipe(tmp_path: Path) -> None:
    done = spark("extract-sessions", "--out-dir", ".", *LOGS, "--json", "/dev/stdout", cwd=tmp_path)
    assert json.loads(done.stdout)["files"] > 0
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", "pipe"], cwd=tmp_path, stdout=subprocess.PIPE) as reader:
        spark("extract-sessions", "--out-dir", ".", *LOGS, "--json", "pipe", cwd=tmp_path)
        assert json.loads(reader.stdout.read())["files"] > 0
    assert (tmp_path / "pipe").is_fifo()  # not replaced by a file


def test_version_and_help(tmp_path: Path) -> None:
    assert re.fullmatch(r"spark \d+\.\d+\S*\n", spark("--version", cwd=tmp_path, fresh=True).stdout)
    for arguments, status in (((), 2), (("--help",), 0)):
        assert "extract-sessions" in spark(*arguments, cwd=tmp_path, status=status).stdout


def test_the_page_of_commands_is_what_the_program_says() -> None:
    import runpy

    def forked(*arguments: str) -> str:
        said = spark(*arguments, "--help", cwd=ROOT, env=environment(COLUMNS="80", NO_COLOR="1")).stdout
        return said.replace("python -m spark.cli", "spark")

    script = runpy.run_path(str(ROOT / "docs" / "make_commands.py"))
    usage = script["usage"]()
    assert usage == forked()
    script["page"].__globals__["usage"] = forked
    assert script["PAGE"].read_text() == script["page"](), "run `python docs/make_commands.py`"
    listed = re.findall(r"^  ([a-z-]+)  +[A-Z]", usage, re.MULTILINE)
    assert listed[-len(script["COMMANDS"]) :] == list(script["COMMANDS"])


# --- terminals and pipes ------------------------------------------------------------------------------


def on_terminal(command: list[str], columns: int, cwd: Path) -> str:
    """What a command prints to a terminal so wide."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = environment(TERM="xterm") | {"PYTHONIOENCODING": "utf-8"}
    env = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(command, cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        parts = []
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError as error:
                assert error.errno == errno.EIO  # the other side is closed
                break
            if not part:
                break
            parts.append(part)
    os.close(ours)
    assert process.returncode == 0, b"".join(parts)
    return b"".join(parts).decode()


@pytest.mark.slow
def test_progress_on_a_terminal_has_a_bar_a_rate_and_the_time_left(made: Path, tmp_path: Path) -> None:
    command = [*SPARK, "tokenize", str(NANO), str(made / "train.jsonl"), "--out", "t.parquet"]
    text = on_terminal(command, 80, tmp_path)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    frames = [frame.strip() for frame in re.split(r"[\r\n]+", plain) if frame.startswith("tokenizing")]
    assert any(re.fullmatch(r"tokenizing [━╸╺]+ +\d+% [\d,]+ sessions/s \d+:\d\d left", frame) for frame in frames)
    assert all(len(frame) <= 80 for frame in frames)
    last = [line.strip() for line in plain.splitlines() if line.strip()]
    assert not last[-1].startswith("tokenizing")  # the bar is gone, the table stays


TABLE = """
from spark.console import table
path = "/a/path/that/is/rather/long" * 4 + "/[/b]profile.csv"
table("A title that is not cut", ["policy", "placed by", "misses\\n/token"], [["static", path, "1.25"], ["", "", "12"]])
"""


def test_tables_fold_on_a_terminal_and_not_in_a_pipe(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TABLE]
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", on_terminal(command, 60, tmp_path))
    lines = [line.rstrip() for line in plain.splitlines()]
    assert lines[0] == "A title that is not cut" and all(len(line) <= 60 for line in lines)
    assert "misses" in lines[1] and "/token" in lines[2] and "…" not in plain
    assert "[/b]profile.csv" in re.sub(r"\s", "", plain.replace("static", "").replace("1.25", ""))
    piped = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    row, second = piped.stdout.splitlines()[4:6]
    assert row.endswith("/[/b]profile.csv     1.25") and second.endswith("  12")


@pytest.mark.slow
def test_any_name_survives_an_ascii_terminal(made: Path, tmp_path: Path) -> None:
    env = environment(PYTHONIOENCODING="ascii", LC_ALL="C", FORCE_COLOR="1")
    done = spark("tokenize", NANO, made / "test.jsonl", "--out", "[b] é.parquet", cwd=tmp_path, env=env)
    assert done.stdout.isascii() and "tokens" in done.stdout
    assert (tmp_path / "[b] é.parquet").exists()
    assert "\\xe9" in refused("tokenize", "é.gguf", "--export-tokenizer", "t", cwd=tmp_path, env=env)


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error(made: Path, tmp_path: Path) -> None:
    command = [*SPARK, "tokenize", NANO, made / "test.jsonl", "--out", "t.parquet", "--json", "t.json"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        stderr = process.stderr.read()
    assert process.returncode == 141 and "Traceback" not in stderr and "BrokenPipe" not in stderr
    assert json.loads((tmp_path / "t.json").read_text())["tokens"] > 0


# --- bad input ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are no models we can run, each named for what ails it."""
    folder = tmp_path_factory.mktemp("models")
    whole = NANO.read_bytes()
    for size in (0, 3, 20, 1000, 400_000, len(whole) - 1):
        (folder / f"cut-{size}.gguf").write_bytes(whole[:size])
    at = whole.index(b"qwen3moe")
    (folder / "unknown.gguf").write_bytes(whole[:at] + b"quant3mo" + whole[at + 8 :])
    (folder / "random.gguf").write_bytes(bytes((i * i * 31 + 7 * i) % 251 for i in range(5000)))
    (folder / "folder.gguf").mkdir()
    (folder / "last-byte-missing.gguf").symlink_to(f"cut-{len(whole) - 1}.gguf")
    return folder


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "cannot be opened: No such file"),
        ("folder", "is a directory, expected a GGUF file"),
        ("cut-0", "is empty"),
        ("cut-3", "ends inside"),
        ("cut-20", "ends inside"),
        ("cut-1000", "remain"),
        ("cut-400000", "tensor '"),
        ("last-byte-missing", "tensor '"),
        ("random", "is not a GGUF file"),
    ],
)
def test_a_bad_model_is_named(models: Path, made: Path, tmp_path: Path, name: str, words: str) -> None:
    model = models / f"{name}.gguf"
    found = refused("tokenize", model, "--export-tokenizer", "t.json", cwd=tmp_path)
    assert f"error: {model}" in found and words in found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["missing", "cut-400000", "random", "unknown"])
@pytest.mark.parametrize("command", ["calibrate", "serve"])
def test_a_bad_model_is_named_by_what_runs_it(
    models: Path, made: Path, tmp_path: Path, command: str, name: str
) -> None:
    model = models / f"{name}.gguf"
    tokens = made / ("test.jsonl" if name == "unknown" else "test.parquet")  # the latter are of the bundled model
    rest = [tokens, "--out", "p.csv"] if command == "calibrate" else ["--port", "0"]
    found = refused(command, model, *rest, cwd=tmp_path)
    assert "architecture is 'quant3mo'; this engine implements" in found if name == "unknown" else str(model) in found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", [".", "..", "/"])
def test_a_folder_is_no_model(made: Path, tmp_path: Path, model: str) -> None:
    """Also one without a name, which a profile beside it would have."""
    for command in (
        ["plan"], ["inspect"], ["bench"], ["serve", "--port", "0"], ["calibrate", made / "test.parquet"],
        ["validate", made / "test.parquet"],
    ):  # fmt: skip
        said = refused(command[0], model, *command[1:], cwd=tmp_path)
        assert "is a directory, expected a GGUF file" in said or "cannot be written: no permission" in said
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def bad(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Profiles, token files and sessions, each named for what ails it."""
    folder = tmp_path_factory.mktemp("bad")
    text = (made / "nano.csv").read_text()
    (folder / "foreign.csv").write_text(re.sub("model=[0-9a-f]+", "model=" + "f" * 64, text))
    (folder / "cut.csv").write_text(text[: len(text) // 2])
    (folder / "bytes.csv").write_bytes(b"\xff\x00\x80" * 100)
    (folder / "empty.csv").touch()
    table = pq.read_table(made / "test.parquet")
    metadata = table.schema.metadata | {b"spark.model_id": b"e" * 64}
    pq.write_table(table.replace_schema_metadata(metadata), folder / "foreign.parquet")
    pq.write_table(pa.table({"a": [1]}), folder / "other.parquet")
    whole = (made / "test.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    damaged = bytearray(whole)
    damaged[2000:2300] = bytes(300)
    (folder / "damaged.parquet").write_bytes(damaged)
    lines = (made / "test.jsonl").read_text().splitlines(keepends=True)
    (folder / "broken.jsonl").write_text("".join([*lines[:2], '{"session_id": 3\n', *lines[2:]]))
    (folder / "bytes.jsonl").write_bytes(b"\xff\x00\x80" * 100)
    (folder / "empty.jsonl").touch()
    (folder / "folder.jsonl").mkdir()
    return folder


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("foreign.csv", "f" * 64),
        ("cut.csv", "expected 6 rows"),
        ("bytes.csv", "expected UTF-8"),
        ("empty.csv", "hotness table"),
        ("missing.csv", "No such file"),
    ],
)
def test_a_bad_profile_is_named(made: Path, bad: Path, tmp_path: Path, name: str, words: str) -> None:
    command = ["validate", NANO, made / "test.parquet", "--profile", bad / name]
    found = refused(*command, cwd=tmp_path)
    assert str(bad / name) in found and words in found
    if name == "foreign.csv":
        with open_model(NANO) as file:
            assert file.model_id in found
        assert words in refused("serve", NANO, "--port", "0", "--spark", "--profile", bad / name, cwd=tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("foreign.parquet", "e" * 64),
        ("other.parquet", "not one of tokens"),
        ("cut.parquet", "cannot be read as a token file"),
        ("damaged.parquet", "cannot be read as a token file"),
        ("missing.parquet", "No such file"),
        ("broken.jsonl", "line 3: not JSON"),
        ("bytes.jsonl", "line 1: not JSON"),
        ("empty.jsonl", "holds no sessions"),
        ("folder.jsonl", "has no files"),
        ("missing.jsonl", "No such file"),
    ],
)
def test_bad_tokens_and_sessions_are_named(made: Path, bad: Path, tmp_path: Path, name: str, words: str) -> None:
    found = refused("calibrate", NANO, bad / name, "--out", "p.csv", cwd=tmp_path)
    assert words in found and str(bad / name) in found
    assert list(tmp_path.iterdir()) == []
    if name == "broken.jsonl":
        assert words in refused("tokenize", NANO, bad / name, "--out", "t.parquet", cwd=tmp_path)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["calibrate", NANO, "test.parquet", "--out", "no/p.csv"],
        ["calibrate", NANO, "test.parquet", "--json", "no/p.json"],
        ["validate", NANO, "test.parquet", "--profile", "nano.csv", "--json", "no/v.json"],
        ["tokenize", NANO, "test.jsonl", "--out", "no/t.parquet"],
        ["tokenize", NANO, "--export-tokenizer", "no/t.json"],
        ["train-pregate", NANO, "trace", "--out", "no/p.safetensors"],
        ["serve", NANO, "--spark", "--profile", "no/p.csv"],
    ],
    ids=lambda arguments: " ".join(map(str, arguments[0:1] + arguments[-2:])),
)
def test_an_output_in_a_missing_folder_is_refused_before_any_work(made: Path, arguments: list) -> None:
    found = refused(*arguments, cwd=made)
    assert arguments[-1] in found and "there is no folder" in found


def test_a_folder_is_no_output(made: Path) -> None:
    for arguments in (["calibrate", NANO, "test.parquet", "--out", "."], ["tokenize", NANO, "--export-tokenizer", "."]):
        assert "is a folder" in refused(*arguments, cwd=made, status=2)


def test_a_folder_of_sessions_that_cannot_be(made: Path, tmp_path: Path) -> None:
    assert "nano.csv/x cannot be written" in refused(
        "extract-sessions", "--out-dir", made / "nano.csv" / "x", *LOGS, cwd=tmp_path
    )
    assert "--claude-dir" in refused("extract-sessions", "--out-dir", ".", "--claude-dir", "no", cwd=tmp_path)
    env = environment(HOME=tmp_path, CODEX_HOME=tmp_path / "codex", CLAUDE_CONFIG_DIR=tmp_path / "claude")
    assert f"{tmp_path}/codex" in refused("extract-sessions", "--out-dir", "out", cwd=tmp_path, env=env)


def test_a_trace_is_not_added_to_another(made: Path) -> None:
    parts = sorted((made / "trace").iterdir())
    arguments = ["calibrate", NANO, "test.parquet", "--out", "again.csv", "--trace", "trace"]
    assert "has a trace already" in refused(*arguments, cwd=made, status=2)
    assert sorted((made / "trace").iterdir()) == parts


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tokenize"], "Missing argument 'MODEL.gguf'"),
        (["tokenize", NANO], "expected SESSIONS.jsonl with --out"),
        (["tokenize", NANO, "test.jsonl"], "expected SESSIONS.jsonl with --out"),
        (["token"], "No such command 'token'"),
        (["calibrate", NANO, "test.parquet", "--count", "some"], "'some' is not one of"),
        (["calibrate", NANO, "test.parquet", "--hidden"], "--trace is missing"),
        (["validate", NANO, "test.parquet", "--residency", "101"], "--residency"),
        (["validate", NANO, "test.parquet", "--residency", "nan"], "--residency"),
        (["extract-sessions", "--out-dir", ".", "--test-frac", "2"], "--test-frac"),
        (["serve", NANO, "--cache-slots", "some"], "--cache-slots"),
        (["serve", NANO, "--host", "0.0.0.0"], "--api-key"),
        (["serve", NANO, "--vram", "8", "--residency", "50"], "--vram and --residency"),
        (["serve", NANO, "--kv-recall-from", "9"], "--kv-recall-from says which contexts"),
        (["serve", NANO, "--device", "cpu", "--vram", "8"], "--vram caps the memory of a GPU"),
        (["plan", NANO, "--vram", "0"], "--vram"),
        (["plan", NANO, "--vram", "4", "--ctx", "100000000"], "100000000"),
        (["bench", NANO, "--residency", "half"], "--residency is 'half'"),
        (["bench", NANO, "--residency", "-1"], "--residency -1"),
        (["serve", NANO, "--port", "0", "--ctx", "100000000"], "100000000"),
    ],
    ids=lambda value: " ".join(map(str, value)).replace(str(NANO), "NANO") if isinstance(value, list) else "",
)
def test_usage_errors(made: Path, arguments: list, words: str) -> None:
    assert words in refused(*arguments, cwd=made, status=2)


def test_cuda_is_refused_with_what_to_do(made: Path) -> None:
    hidden = environment(CUDA_VISIBLE_DEVICES="-1")
    for arguments in (["calibrate", NANO, "test.parquet", "--out", "cuda.csv"], ["serve", NANO, "--port", "0"]):
        found = refused(*arguments, "--device", "cuda", cwd=made, env=hidden)
        assert "no GPU to compute on" in found and "use --device cpu" in found
    assert not (made / "cuda.csv").exists()


def test_plans_need_no_gpu(tmp_path: Path) -> None:
    hidden = environment(CUDA_VISIBLE_DEVICES="-1")
    done = spark("plan", NANO, "--json", "plan.json", cwd=tmp_path, env=hidden)
    assert "a GPU that is not here" in done.stdout and "estimated" in done.stdout
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert set(figures) >= PROVENANCE and [row["vram_gib"] for row in figures["rows"]] == [12, 24]
    parts = ("context", "dense", "kv", "buffers", "staging", "slots")
    for row in figures["rows"]:
        assert row["device_bytes"] == sum(row[f"{part}_bytes"] for part in parts) < row["cap_bytes"]
    spark("plan", NANO, "--vram", "12", "--kv-recall-blocks", "4", "--json", "recall.json", cwd=tmp_path, env=hidden)
    (with_sketches,) = json.loads((tmp_path / "recall.json").read_text())["rows"]
    assert with_sketches["device_bytes"] > figures["rows"][0]["device_bytes"]


def test_a_cap_that_is_too_small_names_one_that_does(tmp_path: Path) -> None:
    found = refused("plan", NANO, "--vram", "0.2", "--ctx", "512", cwd=tmp_path)
    least = re.search(r"hint: --vram ([\d.]+) is the least", found)
    assert least
    done = spark("plan", NANO, "--vram", "0.2", "--vram", least[1], "--ctx", "512", "--spark", cwd=tmp_path)
    assert "\n0.2 GiB: " in done.stderr and "experts resident" in done.stdout


def test_bench_measures_each_residency(tmp_path: Path) -> None:
    done = spark(
        "bench", NANO, "--residency", "100,50", "--prompts", "1", "--prompt-tokens", "40", "--generate", "4",
        "--device", "cpu", "--json", "bench.json", cwd=tmp_path,
    )  # fmt: skip
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert set(figures) >= PROVENANCE and [row["identical_tokens"] for row in figures["rows"]] == [None, True]
    assert figures["rows"][0]["miss_pct"] == 0 < figures["rows"][1]["miss_pct"]
    assert "lru" in done.stdout and "NO" not in done.stdout
    for row in figures["rows"]:
        assert row["draft_identical_tokens"] and row["draft_decode_tokens_per_s"] > 0 and row["step_ms"]["1"] > 0
        assert row["break_even_acceptance"].keys() == row["step_ms"].keys() - {"1"}
    assert re.search(r"plain +drafted", done.stdout) and "break even" in done.stdout


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from spark.cli import main; main()"


@pytest.mark.slow
def test_without_torch_the_pip_line_is_named(made: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, "train-pregate", NANO, "trace", "--out", "none.safetensors"]
    done = subprocess.run(command, cwd=made, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    explained(done.stderr)
    assert re.search(r"hint: \S+ -m pip install .*\[train\]\S* torch==[\d.]+$", done.stderr)
    version = re.search(r"torch==\S+", done.stderr)[0]
    assert version in (ROOT / "constraints.txt").read_text().split()


# --- disks that do not take it ------------------------------------------------------------------------


def on_disk(mount: str, command: list, cwd: Path, tmp: str = "/tmp") -> tuple[int, str, list[str]]:
    """Status, stderr and what is left on a small file system at cwd/disk that only the command sees."""
    words = " ".join(f"'{word}'" for word in (*SPARK, *command))
    script = (
        f"mount -t tmpfs {mount} tmpfs disk && {{ TMPDIR={tmp} {words}; status=$?; ls -A disk >left; exit $status; }}"
    )
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    (cwd / "disk").mkdir()
    done = subprocess.run(
        [*unshare, "sh", "-c", script], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr, (cwd / "left").read_text().split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["extract-sessions", "--out-dir", "disk", *LOGS],
        ["tokenize", NANO, "test.jsonl", "--out", "disk/t.parquet"],
        ["tokenize", NANO, "--export-tokenizer", "disk/t.json"],
        ["calibrate", NANO, "test.parquet", "--out", "p.csv", "--max-tokens", "1500", "--trace", "disk/trace"],
    ],
    ids=lambda arguments: " ".join(map(str, arguments[:1] + arguments[-2:])),
)
def test_a_full_disk_is_explained(made: Path, tmp_path: Path, arguments: list) -> None:
    for name in ("test.jsonl", "test.parquet", "trace"):
        (tmp_path / name).symlink_to(made / name)
    status, stderr, left = on_disk("-o size=16k", arguments, tmp_path)
    assert status == 1 and "Traceback" not in stderr
    explained(stderr)
    assert "No space left on device" in stderr and "disk" in stderr
    assert not [name for name in left if name != "trace"]


@pytest.mark.slow
def test_a_full_disk_under_a_calibration_names_what_it_wrote_unasked(made: Path, tmp_path: Path) -> None:
    (tmp_path / "test.parquet").symlink_to(made / "test.parquet")
    command = ["calibrate", NANO, "test.parquet", "--out", "disk/p.csv", "--max-tokens", "1500"]
    status, stderr, left = on_disk("-o size=16k", command, tmp_path)
    assert status == 1 and "Traceback" not in stderr and not [name for name in left if name == "p.csv"]
    explained(stderr)
    assert f"{tmp_path}/disk/p.csv.partial.routing/part-000000.parquet: No space left on device" in stderr
    assert "cannot write the routing" in stderr and "trace" not in stderr
    assert "make room there" in stderr and "--resume" in stderr and "--out" in stderr
    command[4] = "p.csv"
    spark(*command, "--resume", cwd=tmp_path)  # though nothing was counted


@pytest.mark.slow
def test_a_full_temporary_folder_is_explained(made: Path, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").symlink_to(made / "test.jsonl")
    command = ["calibrate", NANO, "test.jsonl", "--out", "p.csv"]
    status, stderr, left = on_disk("-o size=16k", command, tmp_path, tmp=f"{tmp_path}/disk")
    assert status == 1 and not left
    explained(stderr)
    assert "No space left on device" in stderr


def test_a_read_only_folder_is_explained(made: Path, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").symlink_to(made / "test.jsonl")
    status, stderr, left = on_disk("-o ro", ["tokenize", NANO, "test.jsonl", "--out", "disk/t.parquet"], tmp_path)
    assert status == 1 and not left
    explained(stderr)
    assert "disk/t.parquet" in stderr


# --- the demo -----------------------------------------------------------------------------------------


def test_samples_are_where_the_demo_looks() -> None:
    from spark.commands.demo import bundled

    assert bundled() == (NANO, SAMPLES)
