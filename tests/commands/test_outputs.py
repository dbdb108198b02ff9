"""What commands write: never over what they read, only what there is to write, and figures on stdout alone."""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
import subprocess
from pathlib import Path
from typing import Annotated

import pytest
import typer

from engine.ground.errors import UsageError
from spark.commands.outputs import Reads, Writes, checked
from tests.command_line import LOGS, NANO, SPARK, environment, refused, spark


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model, its profile, sessions, their tokens and a trace."""
    folder = tmp_path_factory.mktemp("files")
    shutil.copy(NANO, folder / "nano.gguf")
    for name in ("nano-00001-of-00002.gguf", "nano-00002-of-00002.gguf"):
        (folder / name).write_text(name)
    spark("extract-sessions", "--out-dir", ".", *LOGS, cwd=folder)
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "s.jsonl").write_text("".join(lines[:3]))
    spark("tokenize", NANO, "s.jsonl", "--out", "t.parquet", "--window", "512", cwd=folder)
    spark("calibrate", "nano.gguf", "t.parquet", "--trace", "trace", "--max-tokens", "600", cwd=folder)
    shutil.copy(folder / "nano.gguf.spark.csv", folder / "other.csv")
    (folder / "link.gguf").symlink_to("nano.gguf")
    return folder


def contents(folder: Path) -> dict[str, str]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.file_digest(path.open("rb"), "sha256").hexdigest() for path in found}


# --- no output over an input --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("tokenize nano.gguf s.jsonl --out nano.gguf", "--out nano.gguf would overwrite the model you gave"),
        ("tokenize nano.gguf s.jsonl --out s.jsonl", "--out s.jsonl would overwrite the sessions you gave"),
        ("tokenize nano.gguf s.jsonl --out a --export-tokenizer a", "--export-tokenizer a would overwrite what --out"),
        ("tokenize nano.gguf --export-tokenizer nano.gguf", "--export-tokenizer nano.gguf would overwrite the model"),
        ("calibrate nano.gguf t.parquet --out nano.gguf", "--out nano.gguf would overwrite the model you gave"),
        ("calibrate nano.gguf t.parquet --out ./t.parquet", "--out t.parquet would overwrite the data you gave"),
        ("calibrate nano.gguf s.jsonl --out s.jsonl", "--out s.jsonl would overwrite the data you gave"),
        ("calibrate nano.gguf t.parquet --out p --json p", "--json p would overwrite what --out writes"),
        ("calibrate nano.gguf t.parquet --json nano.gguf.spark.csv", "would overwrite the profile beside the model"),
        ("calibrate nano.gguf t.parquet --trace d --json trace/../d/part-000000.parquet", "what --trace writes"),
        ("calibrate nano.gguf t.parquet --trace nano.gguf", "--trace nano.gguf: that is a file, expected a folder"),
        ("validate nano.gguf t.parquet --json nano.gguf.spark.csv", "would overwrite the profile beside the model"),
        ("validate nano.gguf t.parquet --profile other.csv --json other.csv", "would overwrite the --profile you gave"),
        ("validate nano.gguf t.parquet --cross other.csv --json other.csv", "would overwrite the --cross you gave"),
        ("train-pregate nano.gguf trace --out nano.gguf", "--out nano.gguf would overwrite the model you gave"),
        ("train-pregate nano.gguf trace --out trace/part-000000.parquet", "would overwrite the trace you gave"),
        ("train-pregate nano.gguf trace --out p --json ./p", "--json p would overwrite what --out writes"),
        ("plan nano.gguf --json nano.gguf", "--json nano.gguf would overwrite the model you gave"),
        ("plan link.gguf --json nano.gguf", "--json nano.gguf would overwrite the model you gave"),
        ("plan nano.gguf --json link.gguf", "--json link.gguf would overwrite the model you gave"),
        ("plan nano-00001-of-00002.gguf --json nano-00002-of-00002.gguf", "would overwrite the model you gave"),
        ("plan nano.gguf --spark --json nano.gguf.spark.csv", "would overwrite the profile beside the model"),
        ("bench nano.gguf --json nano.gguf", "--json nano.gguf would overwrite the model you gave"),
        ("bench nano.gguf --tokens t.parquet --json t.parquet", "would overwrite the --tokens you gave"),
        ("bench nano.gguf --profile other.csv --json other.csv", "would overwrite the --profile you gave"),
        ("bench nano.gguf --draft other.csv --json other.csv", "would overwrite the --draft you gave"),
        ("extract-sessions --out-dir . --json train.jsonl", "--json train.jsonl would overwrite what --out-dir writes"),
        ("extract-sessions --out-dir d --claude-dir . --json s.jsonl", "would overwrite the --claude-dir you gave"),
        ("extract-sessions --out-dir . --claude-dir .", "train.jsonl is one of the logs to read"),
        ("demo --out-dir new --json new/train.parquet", "would overwrite what --out-dir writes"),
        ("demo --out-dir . --json train.parquet", "--json train.parquet would overwrite what --out-dir writes"),
    ],
)  # fmt: skip
def test_no_output_is_an_input_or_another_output(files: Path, arguments: str, words: str) -> None:
    before = contents(files)
    assert words in refused(*arguments.split(), cwd=files, status=2)
    assert contents(files) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("tokenize nano.gguf s.jsonl --out memory://x/a?b.parquet", "a name with '?' stands for several files"),
        ("extract-sessions --out-dir memory://run[1]", "a name with '[' stands for several files"),
        ("calibrate nano.gguf t.parquet --trace memory://t/*", "a name with '*' stands for several files"),
        ("calibrate nano.gguf t.parquet --out memory://x/", "memory://x/ is a folder, expected the name of a file"),
        ("calibrate nano.gguf t.parquet --out=", "--out: expected a name, found an empty one"),
        ("extract-sessions --out-dir=", "--out-dir: expected a name, found an empty one"),
        ("calibrate nano.gguf t.parquet --out memory://", "memory:// is a folder, expected the name of a file"),
    ],
)
def test_urls_to_write_name_a_file(files: Path, arguments: str, words: str) -> None:
    assert words in refused(*arguments.split(), cwd=files, status=2)


def test_outputs_may_be_beside_inputs_and_lie_where_they_lay(files: Path) -> None:
    for _ in range(2):
        spark("plan", "nano.gguf", "--vram", "4", "--json", "trace/plan.json", cwd=files)
        spark("tokenize", "nano.gguf", "s.jsonl", "--out", "u.parquet", "--json", "/dev/null", cwd=files)
    spark("tokenize", "nano.gguf", "s.jsonl", "--out", "/dev/null", "--json", "/dev/null", cwd=files)
    assert (files / "trace" / "plan.json").stat().st_size and (files / "u.parquet").stat().st_size


def test_what_a_new_command_reads_is_safe_without_being_marked(files: Path) -> None:
    def new(
        notes: Annotated[Path, typer.Argument(metavar="NOTES")],
        extra: Annotated[list[Path] | None, typer.Option(metavar="FILE")] = None,
        folder: Annotated[Path | None, typer.Option(), Reads(("*.txt",))] = None,
        out: Annotated[Path | None, typer.Option("--result"), Writes()] = None,
    ) -> None:
        raise AssertionError("it began")

    command = checked(new)
    assert inspect.signature(command) == inspect.signature(new)  # what typer makes options of
    for options, words in (
        ({"notes": files / "s.jsonl"}, "--result .* would overwrite the notes you gave"),
        ({"notes": files / "no", "extra": [files / "no", files / "s.jsonl"]}, "would overwrite the --extra you gave"),
    ):
        with pytest.raises(UsageError, match=words):
            command(**options, out=files / "s.jsonl")
    with pytest.raises(AssertionError, match="it began"):
        command(files / "s.jsonl", folder=files, out=files / "new.txt")


# --- nothing to write ---------------------------------------------------------------------------------


def test_no_logs_leave_earlier_sessions_alone(files: Path, tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(files / name, tmp_path / name)
    before = contents(tmp_path)
    (tmp_path / "home" / ".claude" / "projects").mkdir(parents=True)
    env = {k: v for k, v in environment(HOME=tmp_path / "home").items() if k not in ("CLAUDE_CONFIG_DIR", "CODEX_HOME")}
    found = refused("extract-sessions", "--out-dir", ".", cwd=tmp_path, env=env)
    assert f"no session logs (*.jsonl) in {tmp_path}/home/.claude" in found and "--claude-dir" in found
    (tmp_path / "home" / ".claude" / "projects" / "a.jsonl").write_text("{}\n")
    assert "the session logs hold no session" in refused("extract-sessions", "--out-dir", ".", cwd=tmp_path, env=env)
    (tmp_path / "home" / ".claude" / "projects" / "a.jsonl").unlink()
    assert contents(tmp_path) == before


def test_sessions_without_a_token_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    question = {"session_id": "a", "messages": [{"role": "user", "content": "why?"}]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(question) + "\n")
    half = question | {"session_id": "a\ud800"}
    (tmp_path / "half.jsonl").write_text(json.dumps(half) + "\n")
    for name, words in (
        ("empty.jsonl", "error: empty.jsonl holds no sessions"),
        ("questions.jsonl", "error: questions.jsonl: none of its 1 sessions has an assistant turn"),
        ("half.jsonl", r"error: half.jsonl, line 1: session_id is 'a\ud800', and half of a surrogate pair"),
    ):
        assert words in refused("tokenize", NANO, name, "--out", "t.parquet", cwd=tmp_path)
        assert words in refused("calibrate", NANO, name, "--out", "p.csv", cwd=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.jsonl", "half.jsonl", "questions.jsonl"]


# --- refused before the model is loaded ---------------------------------------------------------------


def test_what_a_header_shows_is_refused_before_loading(files: Path, tmp_path: Path) -> None:
    text = (files / "other.csv").read_text()
    (tmp_path / "foreign.csv").write_text(text.replace("model=", "model=0"))
    (tmp_path / "p.csv.partial").touch()
    kept = tmp_path / "t.parquet"
    shutil.copy(files / "t.parquet", kept)
    before = contents(tmp_path)
    for arguments, words, status in (
        (["calibrate", NANO, kept, "--out", "p.csv"], "p.csv.partial is not a checkpoint of this", 1),
        (["calibrate", NANO, files / "s.jsonl", "--out", "p.csv"], "p.csv.partial is not a checkpoint", 1),
        (["calibrate", NANO, kept, "--out", "q.csv", "--trace", files / "trace"], "has a trace already", 2),
        (["validate", NANO, files / "s.jsonl", "--profile", "no.csv"], "no.csv: No such file", 1),
        (["validate", NANO, kept, "--profile", "foreign.csv"], "foreign.csv is of model 0", 1),
        (["validate", NANO, kept, "--profile", files / "other.csv", "--cross", "foreign.csv"], "foreign.csv is of", 1),
    ):
        found = refused(*arguments, cwd=tmp_path, status=status)
        assert words in found
        assert "threads" not in found and "context of" not in found  # what a daemon says of itself
    assert contents(tmp_path) == before


# --- figures on stdout --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_figures_have_stdout_to_themselves(files: Path, tmp_path: Path, name: str) -> None:
    for arguments, key, words in (
        (["plan", NANO, "--vram", "4"], "rows", "expert slots"),
        (["tokenize", NANO, files / "s.jsonl", "--out", "t.parquet"], "tokens", "generated tokens"),
        (["extract-sessions", "--out-dir", "d", *LOGS], "files", "log files"),
    ):
        done = spark(*arguments, "--json", name, cwd=tmp_path)
        assert json.loads(done.stdout)[key]
        assert words in done.stderr and "figures written" not in done.stderr
    assert not (tmp_path / "-").exists()


def closed(redirection: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *SPARK, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_streams_that_are_closed(tmp_path: Path) -> None:
    plan = ["plan", str(NANO), "--vram", "4"]
    for redirection in (">&-", "2>&-", "<&-", "<&- >&- 2>&-"):
        done = closed(redirection, *plan, "--json", "p.json", cwd=tmp_path)
        assert done.returncode == 0 and "Traceback" not in done.stderr
        assert ("expert slots" in done.stdout) is (">&-" not in redirection.replace("2>&-", ""))
        assert json.loads((tmp_path / "p.json").read_text())["rows"]
    done = closed(">&-", *plan, "--json", "-", cwd=tmp_path)
    assert done.returncode == 2 and "error: nothing can be written to -: standard output is closed" in done.stderr
