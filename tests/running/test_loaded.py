"""Loading: stages that leave nothing open when one fails, and what decides whether files of prefixes are used."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.ground import digest
from engine.ground.config import EngineConfig
from engine.ground.digest import code_files, kernels
from engine.ground.errors import CapacityError
from engine.memory.prefix import PrefixCache
from engine.memory.residency import MappedTier
from engine.ops.cpu_workspace import Workspace
from engine.ops.host import HostDevice
from engine.running import loaded, shares
from engine.running.backend import open_backend
from engine.running.loaded import load
from engine.running.source import Source
from engine.running.stepping import Graphs
from engine.text.forms import Forms
from tests.tiny_models import tiny_path

PARTS: list[tuple[type, str]] = [
    (Forms, "forms"), (PrefixCache, "prefixes"), (MappedTier, "tier"), (Workspace, "workspace"), (HostDevice, "device"),
]  # fmt: skip


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts that were closed, in order."""
    names: list[str] = []

    def watch(part: type, name: str) -> None:
        close: Callable[[Any], None] = part.close  # type: ignore[attr-defined]

        def watched(self: Any) -> None:
            names.append(name)
            close(self)

        monkeypatch.setattr(part, "close", watched)

    for part, name in PARTS:
        watch(part, name)
    return names


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"model": tiny_path("qwen3moe"), "device": "cpu", "threads": 2, "ctx_tokens": 200} | options)


def test_everything_is_closed_once_what_uses_a_part_before_the_part(closed: list[str]) -> None:
    made = load(config())
    assert not closed
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.threads = 3  # type: ignore[misc]
    made.close()
    made.close()
    assert closed == [name for _, name in PARTS]


@pytest.mark.parametrize(
    ("module", "name", "left"),
    [
        (loaded, "open_backend", []),
        (shares, "policies", ["device"]),
        (loaded, "Forward", ["workspace", "device"]),
        (loaded, "Residency", ["tier", "workspace", "device"]),
        (loaded, "PrefixCache", ["tier", "workspace", "device"]),
        (loaded, "Forms", ["prefixes", "tier", "workspace", "device"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_stage_that_fails_leaves_nothing_open(
    closed: list[str], monkeypatch: pytest.MonkeyPatch, module: Any, name: str, left: list[str]
) -> None:
    files: list[Source] = []
    open_source = loaded.open_source

    def opening(options: EngineConfig, *args: Any) -> Source:
        files.append(open_source(options, *args))
        return files[-1]

    class Failing:
        """As a function, a class and a module."""

        def __call__(self, *_: Any, **__: Any) -> None:
            raise CapacityError("too little")

        def __getattr__(self, _: str) -> None:
            raise CapacityError("too little")

    monkeypatch.setattr(loaded, "open_source", opening)
    with monkeypatch.context() as patched:
        patched.setattr(module, name, Failing())
        with pytest.raises(CapacityError, match="too little"):
            load(config())
    assert closed == left
    assert not files[0].file._parts
    closed.clear()
    load(config()).close()  # and the next one is whole
    assert closed == [name for _, name in PARTS]


def test_a_profile_that_does_not_fit_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from engine.formats.gguf import GGUFFile

    closed: list[GGUFFile] = []
    close = GGUFFile.close
    monkeypatch.setattr(GGUFFile, "close", lambda self: (closed.append(self), close(self))[1])
    (tmp_path / "p.csv").write_text("nothing of the kind\n")
    with pytest.raises(Exception, match=r"p\.csv"):
        load(config(profile=tmp_path / "p.csv"))
    assert len(closed) == 1


# --- which code made what is kept -----------------------------------------------------------------------


def test_all_that_decides_bits_is_in_the_digest() -> None:
    files = set(code_files())
    sources = {path for path in digest.ENGINE.rglob("*.*") if path.is_file() and path.suffix != ".pyc"}
    assert {path.relative_to(digest.ENGINE).parts[0] for path in sources - files} <= {"text", "lib", "cuda"}
    cuda = {path for path in kernels().iterdir() if path.suffix in (".cu", ".cuh", ".h")}
    assert len(cuda) > 10 and cuda <= files
    assert digest.library_path() in files


def test_the_digest_tells_one_code_from_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = tmp_path / "a.py", tmp_path / "b.py"
    a.write_text("one\n")
    b.write_text("two\n")
    expected = digest.digest([a, b])
    assert digest.digest([a, b]) == expected
    others = {digest.digest([a]), digest.digest([b, a])}
    shutil.move(a, tmp_path / "c.py")
    others.add(digest.digest([tmp_path / "c.py", b]))
    a.write_text("one\ntwo\n")
    b.write_text("")
    others.add(digest.digest([a, b]))
    with monkeypatch.context() as patched:
        patched.setattr(np, "__version__", "9")
        a.write_text("one\n")
        b.write_text("two\n")
        others.add(digest.digest([a, b]))
    assert len(others) == 5 and expected not in others


def test_files_of_other_code_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for code, compiler in (("one", "a"), ("one", "a"), ("another", "a"), ("one", "b")):
        monkeypatch.setattr(loaded, "code_digest", lambda code=code: code)
        monkeypatch.setattr(
            loaded, "open_backend", lambda *a, by=compiler: dataclasses.replace(open_backend(*a), compiler=by)
        )
        one = load(config(cache_dir=tmp_path))
        assert one.prefixes._files is not None
        made.append(one.prefixes._files.root)
        one.close()
    assert made[0] == made[1] and len(set(made)) == 3


def test_a_graph_is_captured_once_under_its_name() -> None:
    captured: list[str] = []

    class Capturing:
        def capture(self, work: Callable[[], None]) -> object:
            work()
            return object()

    graphs = Graphs(Capturing())  # type: ignore[arg-type]
    first = graphs.get("a", lambda: captured.append("a"))
    assert graphs.get("a", lambda: captured.append("again")) is first
    assert graphs.get(("a", 1), lambda: captured.append("other")) is not first
    assert captured == ["a", "other"]
    graphs.forget()
    assert graphs.get("a", lambda: captured.append("anew")) is not first and captured[-1] == "anew"


def test_more_memory_for_texts_than_there_is_is_refused() -> None:
    config = EngineConfig(model=tiny_path("qwen3moe"), device="cpu", threads=1, ctx_tokens=64, draft_memory_mib=9e5)
    with pytest.raises(CapacityError, match=r"--draft-memory 900000: \d+ MiB of host memory are free"):
        load(config)
