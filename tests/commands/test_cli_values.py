"""Values that no run could do anything with, and how what nobody thought of ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import NANO, SPARK, environment, explained, refused, spark


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", NANO, "--vram", "inf"], "'--vram': Input should be less than or equal to 100000; found 'inf'"),
        (["plan", NANO, "--vram", "1e30"], "found '1e30'"),
        (["plan", NANO, "--vram", "nan"], "found 'nan'"),
        (["plan", NANO, "--vram", "some"], "found 'some'"),
        (["plan", NANO, "--ready-timeout", "inf"], "found 'inf'"),
        (["serve", NANO, "--gen-timeout", "1e30"], "found '1e30'"),
        (["serve", NANO, "--vram", "inf"], "found 'inf'"),
        (["serve", NANO, "--prefix-gib", "inf"], "found 'inf'"),
        (["serve", NANO, "--cache-dir-gib", "inf"], "found 'inf'"),
        (["extract-sessions", "--out-dir", ".", "--test-frac", "nan"], "found 'nan'"),
        (["bench", NANO, "--threads", "100000"], "less than or equal to 1024; found '100000'"),
        (["bench", NANO, "--prompts", "10000000000"], "less than or equal to 1000; found '10000000000'"),
        (["bench", NANO, "--prompt-tokens", "10000000000"], "do not fit in a context of 4096 tokens"),
        (["bench", NANO, "--prompt-tokens", "200", "--ctx", "256"], "context of 256 tokens\nhint: ask for fewer, or a"),
        (["serve", NANO, "--draft", "some"], "--draft is 'some': expected auto, off, lookup, mtp or the file of a"),
        (["launch", "codex", NANO, "--draft", "some.gguf"], "--draft is 'some.gguf': expected auto"),
        (["bench", NANO, "--draft", ""], "--draft is ''"),
        (["bench", NANO, "--draft-memory", "inf"], "found 'inf'"),
        (["serve", NANO, "--draft-memory", "-1"], "found '-1'"),
        (["serve", NANO, "--profile", "no.csv"], "--profile no.csv goes with --spark"),
        (["launch", "claude", NANO, "--profile", "no.csv"], "--profile no.csv goes with --spark"),
        (["plan", NANO, "--profile", "no.csv"], "--profile no.csv goes with --spark"),
    ],
    ids=lambda value: " ".join(map(str, value)).replace(str(NANO), "NANO") if isinstance(value, list) else "",
)
def test_values_are_refused_by_name(tmp_path: Path, arguments: list, words: str) -> None:
    assert words in refused(*arguments, cwd=tmp_path, status=2)
    assert not list(tmp_path.iterdir())


def test_a_choice_that_is_none_is_named_once(tmp_path: Path) -> None:
    assert refused("calibrate", NANO, "t", "--count", "some", cwd=tmp_path, status=2).count("'some'") == 1


def test_plan_says_that_there_is_no_profile_yet(tmp_path: Path) -> None:
    done = spark("plan", NANO, "--vram", "4", "--spark", "--profile", "no.csv", cwd=tmp_path)
    assert "no profile at no.csv yet" in done.stderr
    assert "no profile" not in spark("plan", NANO, "--vram", "4", cwd=tmp_path).stderr


def test_nothing_need_be_resident(tmp_path: Path) -> None:
    """As `serve --residency 0`: everything is read where it lies."""
    done = spark(
        "bench", NANO, "--residency", "100,0", "--prompts", "1", "--prompt-tokens", "20", "--generate", "3",
        "--device", "cpu", cwd=tmp_path,
    )  # fmt: skip
    assert "100.0%" in done.stdout and "NO" not in done.stdout


def failing(error: str, folder: Path, tmp: Path) -> str:
    """What a command says that ends with the error; tmp: its temporary folder."""
    code = f"from spark.pipeline import plan\ndef f(*_): {error}\nplan.plan = f\nfrom spark.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", NANO], cwd=folder, env=environment(TMPDIR=tmp), capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == ""
    return done.stderr


def test_a_bug_is_one_line_and_a_file_to_report(tmp_path: Path) -> None:
    said = failing("raise ValueError('not\\nthis')", tmp_path, tmp_path)
    explained(said)
    assert said.startswith("error: this is a bug in spark: ValueError: not this\n") and "Traceback" not in said
    (report,) = tmp_path.iterdir()
    assert f"hint: please report it, with {report}, which has the traceback" in said
    assert re.match(r"spark \d.*Python 3.*\nTraceback", report.read_text()) and "not\nthis" in report.read_text()


@pytest.mark.slow
def test_too_little_memory_is_no_bug(tmp_path: Path) -> None:
    for error, words in (
        ("raise MemoryError", "error: there is not enough memory\n"),
        ("import numpy; numpy.ones(1 << 50)", "error: there is not enough memory: Unable to allocate"),
    ):
        assert failing(error, tmp_path, tmp_path).startswith(words)
    assert not list(tmp_path.iterdir())


# --- output that nobody reads, or that there is no room for ---------------------------------------------


def unread(*arguments: str | Path, cwd: Path, both: bool = False) -> tuple[int, str]:
    """Status and stderr of a command whose stdout, or stdout and stderr, nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(
        [*SPARK, *arguments], cwd=cwd, env=environment(), stdin=subprocess.DEVNULL, stdout=writer,
        stderr=writer if both else subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        os.close(writer)
        return process.wait(150), "" if both else process.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["inspect", NANO], ["inspect", NANO, "--json", "-"]])
def test_of_output_that_nobody_reads_the_status_tells(arguments: list[str | Path], tmp_path: Path) -> None:
    assert unread(*arguments, cwd=tmp_path) == (141, "")
    assert unread(*arguments, cwd=tmp_path, both=True) == (141, "")


@pytest.mark.slow
def test_an_error_that_nobody_reads_is_no_traceback(tmp_path: Path) -> None:
    status, said = unread("inspect", "none.gguf", cwd=tmp_path)
    assert status == 1 and said.startswith("error: ")  # stdout was not needed
    assert unread("inspect", "none.gguf", cwd=tmp_path, both=True)[0] == 141
    assert unread("bogus", cwd=tmp_path, both=True)[0] == 141


def test_a_pipe_of_another_kind_that_breaks_is_explained(tmp_path: Path) -> None:
    code = "from spark.pipeline import plan\ndef f(*_): raise BrokenPipeError(32, 'Broken pipe')\nplan.plan = f\n"
    command = [sys.executable, "-c", code + "from spark.cli import main; main()", "plan", NANO]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "error: Broken pipe\n")


@pytest.mark.slow
def test_what_was_measured_is_shown_where_its_file_cannot_be_written(tmp_path: Path) -> None:
    code = "import errno\nfrom spark import results\ndef f(*_): raise OSError(errno.ENOSPC, 'No space')\n"
    command = [sys.executable, "-c", code + "results.write_json = f\nfrom spark.cli import main; main()"]
    command += ["bench", NANO, "--prompts", "1", "--prompt-tokens", "16", "--generate", "2", "--residency", "100"]
    command += ["--device", "cpu", "--draft", "off", "--json", "b.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.endswith("error: No space\n"), done.stderr
    assert "decode" in done.stdout and "100" in done.stdout
