"""What commands write: looked at before there is any work to lose, and never what they read.

A parameter that is a path is read, unless its annotation has a `Writes`; so a command that is new is checked as well.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, get_args, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from engine.ground.errors import SparkError, UsageError
from spark import storage
from spark.console import is_stdout

_PART = re.compile(r"(.+)-\d{5}-of-(\d{5}\.gguf)")


@dataclass(frozen=True, slots=True)
class Reads:
    """What a parameter's path is read as.

    files: of a folder, the patterns of what is read in it. beside_model: a path that is not given is the profile's
    beside the model. words: of a text that is a path unless it is one of these. urls: of a text that may be a URL, a
    file, a folder or a pattern (spark/storage.py).
    """

    files: tuple[str, ...] = ()
    beside_model: bool = False
    words: tuple[str, ...] = ()
    urls: bool = False


@dataclass(frozen=True, slots=True)
class Writes:
    """What a parameter's path is written as; the fields are those of Reads that it has."""

    files: tuple[str, ...] = ()
    beside_model: bool = False
    urls: bool = False


@dataclass(frozen=True, slots=True)
class _Named:
    """A path of a command line. words: which it is, in a message; flag: what it was given with, or would have been."""

    path: Path
    use: Reads | Writes
    words: str
    flag: str


def checked(function: Callable[..., None]) -> Callable[..., None]:
    """A command that first looks at its outputs, and has stdout to itself where figures go there."""
    parameters = {name: _declared(name, hint) for name, hint in get_type_hints(function, include_extras=True).items()}

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> None:
        values = inspect.signature(function).bind(*args, **kwargs).arguments
        _check(list(_named(parameters, values)))
        _check_urls(parameters, values)
        json_file = values.get("json_file")
        with contextlib.redirect_stdout(sys.stderr) if is_stdout(json_file) else contextlib.nullcontext():
            function(*args, **kwargs)

    return command


def writable(path: Path) -> None:
    """Refuse a file that could not be written in the end."""
    if is_stdout(path):
        if sys.__stdout__ is None:
            raise UsageError(f"nothing can be written to {path}: standard output is closed", hint="name a file")
        return
    if path.exists() and not path.is_file() and not path.is_dir():
        return  # a device or a pipe is written to as it is
    target = path.resolve()
    if target.is_dir():
        raise UsageError(f"{path} is a folder, expected the name of a file to write")
    if not target.parent.is_dir():
        raise SparkError(f"{path} cannot be written: there is no folder {target.parent}", hint="make it first")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise SparkError(f"{path} cannot be written: no permission in {target.parent}", hint="write somewhere else")


def _declared(name: str, hint: Any) -> tuple[Reads | Writes, str, str]:
    """How a parameter is used, and what it is called: see _Named."""
    notes = get_args(hint)[1:]
    use = next((note for note in notes if isinstance(note, Reads | Writes)), Reads())
    option = next((note for note in notes if isinstance(note, OptionInfo | ArgumentInfo)), None)
    if isinstance(option, ArgumentInfo):
        return use, f"the {name} you gave", name
    declared = getattr(option, "default", None)  # where typer puts the name, if one is given, in an annotation
    flag = declared if isinstance(declared, str) else f"--{name.replace('_', '-')}"
    return use, f"what {flag} writes" if isinstance(use, Writes) else f"the {flag} you gave", flag


def _named(parameters: Mapping[str, tuple[Reads | Writes, str, str]], values: Mapping[str, Any]) -> Iterator[_Named]:
    """Every path of a command line, those that were not given and have a default included."""
    for name, (use, words, flag) in parameters.items():
        value = values.get(name)
        if value is None and use.beside_model and isinstance(values.get("model"), Path):
            from engine.formats.profile import default_path

            yield _Named(default_path(values["model"]), use, "the profile beside the model", flag)
        for path in value if isinstance(value, list | tuple) else [value]:
            if path == "" and use.urls:  # of a shell variable that is not set; as a path it is the folder one is in
                raise UsageError(f"{flag}: expected a name, found an empty one")
            if isinstance(path, str) and use.urls:
                for there, read_as in _local(path, use):
                    yield _Named(there, read_as, words, flag)
                continue
            if isinstance(path, str) and isinstance(use, Reads) and use.words and path not in use.words:
                path = Path(path)
            if isinstance(path, Path):
                yield _Named(path, use, words, flag)


def _local(given: str, use: Reads | Writes) -> Iterator[tuple[Path, Reads | Writes]]:
    """What lies here of a text that may be a URL, a pattern or a folder, and how each is used."""
    path = storage.local(given)
    if path is None:
        return
    if isinstance(use, Writes) or path.is_dir():
        yield path, use
    else:
        yield from ((each, Reads()) for each in storage.spread(path, ()))


def _check_urls(parameters: Mapping[str, tuple[Reads | Writes, str, str]], values: Mapping[str, Any]) -> None:
    """Refuse a URL that nothing here can open, and one to write that is read, or written, too."""
    seen: list[tuple[tuple[str, str], Reads | Writes, str]] = []
    for name, (use, words, flag) in sorted(parameters.items(), key=lambda item: isinstance(item[1][0], Writes)):
        value = values.get(name)
        for given in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(given, str) or not use.urls or storage.local(given) is not None:
                continue
            kind, path = storage.place(given)
            if isinstance(use, Writes):
                _check_name(given, path, use, flag)
            for (kind_read, other), read_as, which in seen if isinstance(use, Writes) else ():
                folder, _, file = path.rpartition("/")
                inside = folder == other.rstrip("/") and any(fnmatch(file, pattern) for pattern in read_as.files)
                if kind == kind_read and (inside or _matches(path, other)):  # if it is there, which the storage knows
                    raise UsageError(f"{flag} {given} would overwrite {which}", hint="name another file")
            seen.append(((kind, path), use, words))


def _check_name(given: str, path: str, use: Writes, flag: str) -> None:
    """Refuse a URL to write that names no file, or would name several."""
    if not use.files and given.endswith("/"):
        raise UsageError(f"{flag} {given} is a folder, expected the name of a file to write")
    if found := re.search(r"[*?[]", path):
        message = f"{flag} {given}: behind a URL a name with {found[0]!r} stands for several files"
        raise UsageError(message, hint="choose a name without '*', '?' and '['")


def _matches(path: str, pattern: str) -> bool:
    """Whether a pattern of paths, in which `**` may stand for no folder, may mean a path, or is that path."""
    patterns = (pattern, pattern.replace("**/", ""))
    return path == pattern or any(fnmatch(path, each.replace("[^", "[!")) for each in patterns)


def _check(paths: Sequence[_Named]) -> None:
    outputs = [named for named in paths if isinstance(named.use, Writes)]
    for i, output in enumerate(outputs):
        others = [named for named in paths if isinstance(named.use, Reads)] + outputs[:i]
        if other := next((other for other in others if _meet(output, other)), None):
            raise UsageError(f"{output.flag} {output.path} would overwrite {other.words}", hint="name another file")
    for named in outputs:
        if not named.use.files:
            writable(named.path)
        elif named.path.exists() and not named.path.is_dir():
            raise UsageError(f"{named.flag} {named.path}: that is a file, expected a folder")


def _meet(output: _Named, other: _Named) -> bool:
    """Whether writing the one would overwrite a file of the other."""
    if output.use.files and other.use.files:
        return False  # the command knows which files of folders it reads and writes
    if output.use.files:
        return isinstance(other.use, Writes) and _inside(other.path, output)
    if is_stdout(output.path) or (output.path.exists() and not output.path.is_file()):
        return False
    if other.use.files:
        return _inside(output.path, other) and (isinstance(other.use, Writes) or output.path.exists())
    return any(_same(output.path, path) for path in _parts(other.path))


def _inside(path: Path, folder: _Named) -> bool:
    there = Path(os.path.realpath(path))
    return there.is_relative_to(os.path.realpath(folder.path)) and any(map(there.match, folder.use.files))


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them is not there
        return os.path.realpath(one) == os.path.realpath(other)


def _parts(path: Path) -> list[Path]:
    """The file, or all parts of a split model of which it is one."""
    part = _PART.fullmatch(path.name)
    return [path, *path.parent.glob(f"{glob.escape(part[1])}-?????-of-{part[2]}")] if part else [path]
