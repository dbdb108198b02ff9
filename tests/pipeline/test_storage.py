"""Inputs and outputs that lie elsewhere: folders, patterns and URLs, and nothing half-written at any of them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from engine.formats import profile as profiles
from engine.formats.trace import part_paths
from engine.ground.config import EngineConfig
from engine.ground.errors import FileFormatError, MissingExtraError, SparkError, UsageError, WrongModelError
from spark import storage
from spark.daemon.client import Deadlines
from spark.extract import ExtractOptions, extract
from spark.pipeline import calibrate, checkpoints, tokens
from spark.pipeline import profiles as beside
from spark.pipeline.tokens import TokensFile
from tests.command_line import NANO, SAMPLES, environment, refused, spark

MEMORY = MemoryFileSystem()


def nothing(*_: object) -> None:
    """A progress that nobody looks at."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sessions, the same in two halves, and the tokens of each half."""
    folder = tmp_path_factory.mktemp("made")
    options = ExtractOptions(folder, claude_dir=SAMPLES / "claude", codex_dir=SAMPLES / "codex", test_frac=0.3)
    extract(options, nothing)
    lines = sorted((folder / "train.jsonl").read_bytes().splitlines(keepends=True), key=len)[:6]
    for name, some in (("all", lines), ("halves/a", lines[:3]), ("halves/b", lines[3:])):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.jsonl").write_bytes(b"".join(some))
    (folder / "tokens").mkdir()
    tokens.tokenize(NANO, folder / "all.jsonl", folder / "all.parquet", 512)
    for name in "ab":
        tokens.tokenize(NANO, folder / f"halves/{name}.jsonl", folder / f"tokens/{name}.parquet", 512)
    return folder


@pytest.fixture
def memory(made: Path) -> Iterator[str]:
    """The URL of a folder in the memory of this process, with the tokens and the sessions."""
    MEMORY.store.clear()
    MEMORY.pseudo_dirs[:] = [""]
    for path in (*(made / "tokens").iterdir(), *(made / "halves").iterdir()):
        MEMORY.pipe_file(f"/team/{path.parent.name}/{path.name}", path.read_bytes())
    yield "memory://team"
    MEMORY.store.clear()


def rows(file: TokensFile) -> list[tuple[str, int, list[int], list[bool]]]:
    return [(w.session_id, w.window, w.tokens.tolist(), w.generated.tolist()) for w in file]


def kept() -> list[str]:
    return sorted(MEMORY.find("/"))


# --- reading ------------------------------------------------------------------------------------------


def given(made: Path) -> dict[str, str | Path]:
    return {
        "folder": made / "tokens",
        "folder as text": f"{made}/tokens/",
        "pattern": f"{made}/tokens/*.parquet",
        "pattern below": f"{made}/**/[ab].parquet",
        "file URL of a folder": (made / "tokens").as_uri(),
        "file URL of a pattern": f"file://{made}/tokens/?.parquet",
        "URL of a folder": "memory://team/tokens",
        "URL of a pattern": "memory://team/tokens/*.parquet",
    }


@pytest.mark.parametrize("how", given(Path("/")))
def test_several_token_files_are_read_as_one(made: Path, memory: str, how: str) -> None:
    with tokens.opened(NANO, given(made)[how], nothing) as file:
        assert rows(file) == rows(file) == rows(tokens.read_tokens(made / "all.parquet"))
        assert (file.n_windows, file.window) == (len(rows(file)), 512)
        assert file.n_tokens == sum(len(row[2]) for row in rows(file)) and file.name == str(given(made)[how])
        assert len(file.digest) == 64


@pytest.mark.parametrize(
    "several",
    [
        ["HERE/tokens/a.parquet", "HERE/tokens/b.parquet"],
        ["HERE/tokens/b.parquet", "HERE/tokens/a.parquet"],
        ["HERE/tokens/b.parquet", "HERE/tokens", "file://HERE/tokens/?.parquet"],
        ["HERE/halves/../tokens/b.parquet", "memory://team/tokens/a.parquet"],
    ],
)
def test_several_arguments_are_read_as_one_in_an_order_of_their_own(
    made: Path, memory: str, several: list[str]
) -> None:
    given = [each.replace("HERE", str(made)) for each in several]
    with tokens.opened(NANO, made / "tokens", nothing) as whole, tokens.opened(NANO, given, nothing) as file:
        swapped = "memory" in given[-1]  # a URL comes after paths: `memory:` is above `/`
        assert (file.digest == whole.digest) == (not swapped)
        assert file.n_tokens == whole.n_tokens and file.name == f"{given[0]} and {len(given) - 1} more"
        assert sorted(rows(file)) == sorted(rows(whole)) and (rows(file) == rows(whole)) == (not swapped)


@pytest.mark.parametrize("url", ["memory://team/tokens/a.parquet", "file://HERE/tokens/a.parquet"])
def test_a_url_of_one_file_is_that_file(made: Path, memory: str, url: str) -> None:
    with tokens.opened(NANO, url.replace("HERE", str(made)), nothing) as file:
        assert rows(file) == rows(tokens.read_tokens(made / "tokens/a.parquet"))
        assert file.digest == tokens.read_tokens(made / "tokens/a.parquet").digest
    assert file.path.exists() == url.startswith("file")  # a copy is gone


def test_sessions_in_several_files_are_tokenized_as_one(made: Path, memory: str) -> None:
    for where in (made / "halves", "memory://team/halves", "memory://team/halves/*.jsonl"):
        summary = tokens.tokenize(NANO, where, "memory://team/out.parquet", 512)
        with tokens.opened(NANO, "memory://team/out.parquet", nothing) as file:
            assert rows(file) == rows(tokens.read_tokens(made / "all.parquet")) and summary.sessions == 6
        with tokens.opened(NANO, where, nothing) as file:  # at once, in windows of another size
            assert {row[0] for row in rows(file)} == {row[0] for row in rows(tokens.read_tokens(made / "all.parquet"))}
    assert not [path for path in kept() if path.endswith(".tmp")]


def test_a_path_that_is_there_is_no_pattern(made: Path, tmp_path: Path) -> None:
    odd = tmp_path / "a[b]*.parquet"
    odd.write_bytes((made / "all.parquet").read_bytes())
    with tokens.opened(NANO, odd, nothing) as file:
        assert file.n_tokens and file.name == str(odd)


@pytest.mark.parametrize(
    ("where", "error", "words"),
    [
        ("HERE/none.parquet", FileFormatError, r"none.parquet cannot be read as a token file: No such file"),
        ("HERE/none/*.parquet", FileFormatError, r"none/\*.parquet has no files \(\*.parquet, \*.jsonl\)"),
        ("HERE/empty", FileFormatError, "empty has no files"),
        ("HERE", UsageError, r"has files of several kinds \(.jsonl, .parquet\)"),
        (["HERE/x.parquet", "HERE/empty"], FileFormatError, "empty has no files"),
        (["HERE/x.jsonl", "HERE/x.parquet"], UsageError, r"x.jsonl and 1 more has files of several kinds"),
        ("HERE/twice", FileFormatError, "twice/b.parquet: session '.*' is also in .*twice/a.parquet"),
        ("HERE/foreign", WrongModelError, "b.parquet was made with .*, .*a.parquet with"),
        ("HERE/damaged", FileFormatError, "damaged/b.parquet cannot be read as a token file"),
        ("memory://team/none.parquet", SparkError, "cannot read memory://team/none.parquet: FileNotFoundError"),
        ("memory://team/*.none", FileFormatError, r"team/\*.none has no files"),
        ("memory://team/twice", FileFormatError, "memory://team/twice/b.parquet: session '.*' is also in memory://team"),
        ("memory://team/damaged.parquet", FileFormatError, "memory://team/damaged.parquet cannot be read as a token"),
        ("nowhere://team/a.parquet", UsageError, "Protocol not known: nowhere"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(
    made: Path, memory: str, tmp_path: Path, where: str | list[str], error: type[SparkError], words: str
) -> None:
    one = (made / "tokens/a.parquet").read_bytes()
    file = tokens.read_tokens(made / "tokens/b.parquet")
    with (tmp_path / "other").open("wb") as other:
        tokens.write_windows(other, file, tokens.Origin("ab" * 32, file.origin.tokenizer, file.origin.template), 512)
    for folder, second in (
        ("twice", one), ("foreign", (tmp_path / "other").read_bytes()), ("damaged", one[:-9]),
    ):  # fmt: skip
        (tmp_path / folder).mkdir()
        for name, data in (("a", one), ("b", second)):
            (tmp_path / folder / f"{name}.parquet").write_bytes(data)
            MEMORY.pipe_file(f"/team/{folder}/{name}.parquet", data)
    MEMORY.pipe_file("/team/damaged.parquet", one[:-9])
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.jsonl").touch()
    (tmp_path / "x.parquet").touch()
    given = [each.replace("HERE", str(tmp_path)) for each in storage.several(where)]
    with pytest.raises(error, match=words), tokens.opened(NANO, given if len(given) > 1 else given[0], nothing):
        pass


def test_a_session_that_two_files_hold_is_named(made: Path, memory: str) -> None:
    MEMORY.pipe_file("/team/halves/c.jsonl", (made / "halves/a.jsonl").read_bytes())
    with pytest.raises(FileFormatError, match=r"memory://team/halves/c.jsonl: session '.*' is also in .*/a.jsonl"):
        tokens.tokenize(NANO, "memory://team/halves", "memory://team/out.parquet", 512)
    MEMORY.pipe_file("/team/halves/c.jsonl", b"{}\n")
    with pytest.raises(FileFormatError, match=r"memory://team/halves/c.jsonl, line 1"):
        tokens.tokenize(NANO, "memory://team/halves", "memory://team/out.parquet", 512)
    assert "/team/out.parquet" not in kept() and not [path for path in kept() if path.endswith(".tmp")]


# --- writing ------------------------------------------------------------------------------------------


def send(url: str, data: bytes) -> None:
    with storage.writing(url, "a file") as file:
        file.write(data)


@pytest.mark.parametrize("broken", ["put_file", "mv", "middle"])
@pytest.mark.parametrize("error", [OSError("the line is down"), ValueError("odd"), KeyboardInterrupt()])
def test_a_broken_upload_leaves_what_was_there(
    memory: str, monkeypatch: pytest.MonkeyPatch, broken: str, error: BaseException
) -> None:
    send("memory://team/x", b"before")
    assert MEMORY.cat("/team/x") == b"before"
    before = kept()

    def fail(self: MemoryFileSystem, source: str, target: str, *_: object, **__: object) -> None:
        if broken == "middle":  # something is there, under a name that nobody reads
            MEMORY.pipe_file(target, b"hal")
        raise error

    monkeypatch.setattr(MemoryFileSystem, "put_file" if broken == "middle" else broken, fail)
    expected = SparkError if isinstance(error, Exception) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        send("memory://team/x", b"after")
    if isinstance(error, Exception):
        assert caught.match(f"cannot write memory://team/x: {type(error).__name__}: {error}")
    monkeypatch.undo()
    assert MEMORY.cat("/team/x") == b"before" and kept() == before
    send("memory://team/x", b"after")
    assert MEMORY.cat("/team/x") == b"after" and kept() == before


def test_a_file_that_was_not_finished_is_not_sent(memory: str, tmp_path: Path) -> None:
    before = kept()
    for url in ("memory://team/y", (tmp_path / "y").as_uri()):
        with pytest.raises(ZeroDivisionError), storage.writing(url, "a file") as file:
            file.write(b"half")
            raise ZeroDivisionError
    assert kept() == before and not list(tmp_path.iterdir())


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    with storage.writing((tmp_path / "a b").as_uri(), "a file", mode=0o600) as file:
        file.write(b"x")
    assert (tmp_path / "a b").stat().st_mode & 0o777 == 0o600  # as private as it would be by its path
    assert storage.local("s3://b/x") is None and storage.local(Path("s3://b/x")) == Path("s3:/b/x")
    assert storage.local("simplecache::s3://b/x") is None and storage.local("a::b") == Path("a::b")
    assert storage.joined("s3://b/x/", "y") == "s3://b/x/y" and storage.joined("x/", "y") == "x/y"


def test_extracted_sessions_are_sent_together_or_not_at_all(
    made: Path, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ExtractOptions(
        f"{memory}/sessions", claude_dir=SAMPLES / "claude", codex_dir=SAMPLES / "codex", test_frac=0.3
    )
    before, sent, real = kept(), [], MemoryFileSystem.put_file

    def second_fails(self: MemoryFileSystem, source: str, target: str, **more: object) -> None:
        sent.append(target)
        if len(sent) == 2:
            raise OSError("the line is down")
        real(self, source, target, **more)

    monkeypatch.setattr(MemoryFileSystem, "put_file", second_fails)
    with pytest.raises(SparkError, match="cannot write memory://team/sessions: OSError: the line is down"):
        extract(options, nothing)
    assert kept() == before and len(sent) == 2
    monkeypatch.undo()
    extract(options, nothing)
    for name in ("train.jsonl", "test.jsonl"):
        assert MEMORY.cat(f"/team/sessions/{name}") == (made / name).read_bytes()
    assert len(kept()) == len(before) + 2


# --- calibration --------------------------------------------------------------------------------------


def counted(data: str | Path, out: Path) -> profiles.Profile:
    config = EngineConfig(model=NANO, device="cpu", policy="uniform", ctx_tokens=512)
    calibrate.calibrate(config, checkpoints.CalibrateOptions(data, out), Deadlines(ready_s=60, total_s=100), nothing)
    return profiles.load(out)[0]


@pytest.mark.slow
def test_calibrating_on_several_files_is_calibrating_on_one_and_merging(
    made: Path, memory: str, tmp_path: Path
) -> None:
    one = counted(made / "all.parquet", tmp_path / "one")
    for where in (made / "tokens", "memory://team/tokens"):
        several = counted(where, tmp_path / "several")
        assert np.array_equal(several.counts, one.counts) and several.choices == one.choices
        assert (several.tokens, several.sessions) == (one.tokens, one.sessions)
    halves = [tmp_path / "a", tmp_path / "b"]
    for half in halves:
        counted(made / "tokens" / f"{half.name}.parquet", half)
    merged = beside.merge(halves, tmp_path / "merged", beside.weights("1,1", 2)).made
    assert np.array_equal(merged.counts, one.counts)
    assert (merged.tokens, merged.sessions) == (one.tokens, one.sessions)
    assert beside.diff(tmp_path / "merged", tmp_path / "one").total.distance == 0.0


@pytest.mark.slow
def test_a_trace_goes_to_a_url_whole_or_not_at_all(
    made: Path, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, url = tmp_path / "p.csv", "memory://team/trace"
    config = EngineConfig(model=NANO, device="cpu", policy="uniform", ctx_tokens=512)
    given = checkpoints.CalibrateOptions(made / "tokens/a.parquet", out, trace_dir=checkpoints.staging_path(out))
    given = replace(given, trace_url=url, max_tokens=1200)

    def run(options: checkpoints.CalibrateOptions) -> None:
        calibrate.calibrate(config, options, Deadlines(ready_s=60, total_s=100), nothing)

    def lost(source: str, target: str) -> None:
        whole(source, target)
        if "part-000001" in target:
            raise OSError("the connection was lost")

    whole = MEMORY.put_file
    with monkeypatch.context() as patch, pytest.raises(SparkError, match="cannot write memory://team/trace: OSError"):
        patch.setattr(MemoryFileSystem, "put_file", lambda self, source, target: lost(source, target))
        run(given)
    assert not MEMORY.find("/team/trace") and not out.exists(), "nothing is half there"
    assert {path.name for path in tmp_path.iterdir()} == {"p.csv.partial", "p.csv.partial.trace"}
    run(replace(given, resume=True))
    here = replace(given, out=tmp_path / "q.csv", trace_dir=tmp_path / "t", trace_url="")
    run(here)
    names = [path.name for path in part_paths(tmp_path / "t")]
    assert len(names) > 1 and storage.names(url) == names
    for name in names:
        assert MEMORY.cat_file(f"/team/trace/{name}") == (tmp_path / "t" / name).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"p.csv", "q.csv", "t"}
    with pytest.raises(UsageError, match="memory://team/trace has a trace already"):
        run(replace(given, out=tmp_path / "r.csv", trace_dir=checkpoints.staging_path(tmp_path / "r.csv")))
    assert not list(tmp_path.glob("r.csv*"))


@pytest.mark.parametrize(
    ("url", "lacks", "installs"),
    [
        ("gs://team/t.parquet", "gcsfs", "pip install gcsfs"),
        ("simplecache::gs://team/t.parquet", "gcsfs", "pip install gcsfs"),
        ("s3://team/t.parquet", "s3fs", "[storage]"),
    ],
)
def test_storage_whose_library_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, url: str, lacks: str, installs: str
) -> None:
    monkeypatch.setitem(sys.modules, lacks, None)  # as where it is not installed
    for name in ("s3", "gs"):
        monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, name, raising=False)
    with pytest.raises(MissingExtraError, match=lacks) as caught:
        storage.place(url)
    assert installs in caught.value.hint


# --- commands -----------------------------------------------------------------------------------------


def test_commands_take_folders_patterns_and_urls(made: Path, tmp_path: Path) -> None:
    out = (tmp_path / "t.parquet").as_uri()
    done = spark("tokenize", NANO, f"{made}/halves", "--out", out, "--window", "512", cwd=tmp_path)
    assert f"tokens written to {out}" in done.stderr and (tmp_path / "t.parquet").stat().st_mode & 0o777 == 0o600
    assert rows(tokens.read_tokens(tmp_path / "t.parquet")) == rows(tokens.read_tokens(made / "all.parquet"))
    spark("calibrate", NANO, f"{made}/tokens/*.parquet", "--out", "p.csv", "--max-tokens", "1000", cwd=tmp_path)
    few = ("--profile", "p.csv", "--max-tokens", "600", "--residency", "60", "--prompts", "1", "--generate", "2")
    done = spark("validate", NANO, (made / "tokens").as_uri(), *few, cwd=tmp_path)
    assert "Held-out sessions at 60% residency" in done.stdout
    logs = ("--claude-dir", SAMPLES / "claude", "--codex-dir", SAMPLES / "codex", "--test-frac", "0.3")
    done = spark("extract-sessions", "--out-dir", f"file://{tmp_path}/s", *logs, cwd=tmp_path)
    assert f"sessions written to {tmp_path}/s/train.jsonl and" in done.stderr
    assert (tmp_path / "s/test.jsonl").read_bytes() == (made / "test.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("tokenize M all.jsonl --out file://HERE/all.jsonl", "all.jsonl would overwrite the sessions you gave"),
        ("tokenize M halves --out halves/a.jsonl", "--out halves/a.jsonl would overwrite the sessions you gave"),
        ("tokenize M halves/?.jsonl --out halves/a.jsonl", "would overwrite the sessions you gave"),
        ("tokenize M memory://a --out memory://a", "--out memory://a would overwrite the sessions you gave"),
        ("tokenize M memory://a/ --out memory://a/b.jsonl", "--out memory://a/b.jsonl would overwrite the"),
        ("tokenize M memory://a/*.x --out memory://a/b.x", "--out memory://a/b.x would overwrite the"),
        ("tokenize M memory://a/**/*.x --out memory://a/b.x", "--out memory://a/b.x would overwrite the"),
        ("tokenize M memory://a/[^c].x --out memory://a/b.x", "--out memory://a/b.x would overwrite the"),
        ("tokenize M memory://a/b.x --out memory:///a/b.x", "--out memory:///a/b.x would overwrite the"),
        ("calibrate M tokens --out tokens/a.parquet", "--out tokens/a.parquet would overwrite the data you gave"),
        ("calibrate M file://HERE/tokens --json tokens/a.parquet", "would overwrite the data you gave"),
        ("calibrate M nowhere://a --out p.csv", "nowhere://a: Protocol not known: nowhere"),
        ("extract-sessions --out-dir nowhere://a", "nowhere://a: Protocol not known: nowhere"),
        ("extract-sessions --out-dir all.jsonl", "--out-dir all.jsonl: that is a file, expected a folder"),
        ("extract-sessions --out-dir file://HERE --json train.jsonl", "would overwrite what --out-dir writes"),
    ],
)
def test_no_output_is_an_input_wherever_they_lie(made: Path, arguments: str, words: str) -> None:
    given_arguments = arguments.replace("HERE", str(made)).replace(" M ", f" {NANO} ").split()
    before = {path: path.read_bytes() for path in made.rglob("*.*")}
    assert words in refused(*given_arguments, cwd=made, status=2)
    assert before == {path: path.read_bytes() for path in made.rglob("*.*")}


@pytest.mark.slow
def test_local_paths_need_no_fsspec(made: Path, tmp_path: Path) -> None:
    """And a URL says what to install."""
    without = "import sys; sys.modules['fsspec'] = None; from spark.cli import main; main()"

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", without, *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)

    done = run("tokenize", NANO, f"{made}/halves", "--out", f"file://{tmp_path}/t.parquet", "--window", "512")
    assert done.returncode == 0, done.stderr
    done = run("calibrate", NANO, "t.parquet", "--out", "p.csv", "--max-tokens", "1000")
    assert done.returncode == 0, done.stderr
    done = run("calibrate", NANO, "s3://team/t.parquet", "--out", "q.csv")
    assert done.returncode == 1 and "storage behind a URL takes fsspec" in done.stderr
    assert "pip install" in done.stderr and "[storage]" in done.stderr


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingExtraError, match=r"gs://team/x: .*gcsfs"):
        storage.place("gs://team/x")


# --- S3 -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_s3(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against moto's server, which is not of the extra `dev`: s3fs and moto[server] bring 50 packages."""
    library = Path(pytest.importorskip("s3fs").__file__).parents[1]
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in (
            ("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"), ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):  # fmt: skip
            monkeypatch.setenv(name, value)
        # Whatever another test's server had: they share what they keep.
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
        s3 = fsspec.filesystem("s3", skip_instance_cache=True)
        s3.mkdir("team")
        env = environment(**{name: os.environ[name] for name in os.environ if name.startswith("AWS_")})
        env["PYTHONPATH"] += f"{os.pathsep}{library}"  # wherever that is installed
        logs = ("--claude-dir", SAMPLES / "claude", "--codex-dir", SAMPLES / "codex", "--test-frac", "0.3")
        spark("extract-sessions", "--out-dir", "s3://team/s", *logs, cwd=tmp_path, env=env)
        assert s3.cat("team/s/train.jsonl") == (made / "train.jsonl").read_bytes()
        for name in "ab":
            s3.put_file(str(made / f"halves/{name}.jsonl"), f"team/halves/{name}.jsonl")
        arguments = ("--out", "s3://team/t/all.parquet", "--window", "512")
        spark("tokenize", NANO, "s3://team/halves", *arguments, cwd=tmp_path, env=env)
        spark("tokenize", NANO, "s3://team/halves/*.jsonl", *arguments, cwd=tmp_path, env=env)  # over what is there
        s3.invalidate_cache()
        assert s3.find("team") == [
            "team/halves/a.jsonl", "team/halves/b.jsonl", "team/s/test.jsonl", "team/s/train.jsonl",
            "team/t/all.parquet",
        ]  # fmt: skip
        spark("calibrate", NANO, "s3://team/t", "--out", "p.csv", "--max-tokens", "600", cwd=tmp_path, env=env)
        words = refused("calibrate", NANO, "s3://team/none.parquet", "--out", "q.csv", cwd=tmp_path, env=env)
        assert "cannot read s3://team/none.parquet: FileNotFoundError" in words
        words = refused("tokenize", NANO, made / "all.jsonl", "--out", "s3://none/t", cwd=tmp_path, env=env)
        assert "cannot write s3://none/t" in words
    finally:
        server.stop()


def test_a_question_mark_in_a_name_is_a_query_of_http_alone() -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe_file("/marks/n?x.jsonl", b"{}\n")
    with storage.reading("memory://marks", (".jsonl",)) as found:
        assert [(file.name, file.path.suffix) for file in found] == [("memory://marks/n?x.jsonl", ".jsonl")]
