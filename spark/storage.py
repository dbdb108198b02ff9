"""Inputs and outputs that may lie elsewhere: folders and patterns of files, and URLs that fsspec opens.

Everything behind this module reads and writes local files. What a URL names is fetched to a temporary folder for as
long as it is read; what is written there is made in one, whole, and then sent under a temporary name, which is
moved to its own. So a run that ends early leaves nothing half-written at either end. fsspec is imported for URLs alone.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import re
import secrets
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias
from urllib.parse import unquote

from engine.ground.errors import FileFormatError, MissingExtraError, SparkError, UsageError
from engine.ground.files import open_regular, replacing, scratch
from engine.ground.install import requirement

_URL = re.compile(r"[a-z][a-z0-9+.-]*(?:::[a-z][a-z0-9+.-]*)*://")  # `::` chains, as in simplecache::s3://
_LOCAL = re.compile(r"(?:file|local)://")  # no need of fsspec, and private files stay private
_HTTP = re.compile(r"https?://")  # whose names may have a query behind them
_EXTRA = ("s3fs", "aiobotocore", "botocore")  # what the extra `storage` brings beside fsspec
_MAGIC = re.compile(r"[*?[]")


Given: TypeAlias = str | Path | Sequence[str | Path]  # paths, folders, patterns or URLs of them, one or several


@dataclass(frozen=True, slots=True)
class Found:
    """A file to read. name: what messages call it; path: where it lies for now."""

    name: str
    path: Path


def local(given: str | Path) -> Path | None:
    """The path that is given, also as file://PATH; None for a URL of other storage."""
    text = str(given)
    if isinstance(given, Path) or not _URL.match(text):
        return Path(text)
    return Path(unquote(_LOCAL.sub("", text, count=1))) if _LOCAL.match(text) else None


def spread(path: Path, suffixes: Sequence[str]) -> list[Path]:
    """The files that a local path stands for: itself, those of a folder that end so, or those of a pattern, sorted.

    A path that is there is never a pattern. Where nothing matches, the list is empty.
    """
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in suffixes and not file.is_dir())
    if _MAGIC.search(str(path)) and not path.exists():
        return sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207  # from a root, or from here
    return [path]


@contextlib.contextmanager
def reading(given: Given, suffixes: Sequence[str]) -> Iterator[list[Found]]:
    """The files that paths, folders, patterns or URLs of them stand for, each once, at least one.

    suffixes: of what is read in a folder. The files are in the order of their absolute names, however they are given,
    and there while the context lasts. Raises FileFormatError where one stands for none, UsageError for files of several
    kinds, MissingExtraError where the storage's library is missing, SparkError where it cannot be read.
    """
    with contextlib.ExitStack() as stack:
        by_place: dict[str, Found] = {}
        for each in several(given):
            path = local(each)
            if path is not None:
                found = [Found(str(file), file) for file in spread(path, suffixes)]
            else:
                found = _fetched(str(each), suffixes, stack)
            if not found:
                raise FileFormatError(f"{each} has no files ({', '.join('*' + suffix for suffix in suffixes)})")
            for file in found:
                here = local(file.name)
                by_place.setdefault(file.name if here is None else str(here.absolute()), file)
        files = [by_place[where] for where in sorted(by_place)]
        if len(kinds := sorted({file.path.suffix for file in files})) > 1:
            raise UsageError(
                f"{named(given)} has files of several kinds ({', '.join(kinds)})",
                hint=f"name one kind by a pattern, as '.../*{kinds[0]}'",
            )
        yield files


def several(given: Given) -> Sequence[str | Path]:
    """What is given, one by one."""
    return [given] if isinstance(given, str | Path) else given


def named(given: Given) -> str:
    """What is given, in a message."""
    first, *others = several(given)
    return f"{first} and {len(others)} more" if others else str(first)


@contextlib.contextmanager
def fetched(given: str | Path) -> Iterator[Path]:
    """The file that a path or a URL names, for as long as the context lasts; a path is given as it is.

    Raises what `reading` does for a URL.
    """
    path = local(given)
    if path is not None:
        yield path
        return
    with contextlib.ExitStack() as stack:
        found = _fetched(str(given), (), stack)
        if len(found) != 1:
            raise UsageError(f"{given} is {len(found)} files, expected one")
        yield found[0].path


def folders(given: str) -> list[str]:
    """The folders that a path, a pattern or a URL of one stands for, sorted; nothing is fetched.

    Raises what `place` does, SparkError where the storage cannot be listed.
    """
    path = local(given)
    if path is not None:
        if not _MAGIC.search(str(path)) or path.exists():
            return [str(path)]
        found = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207  # from a root, or from here
        return [each for each in found if Path(each).is_dir()]
    storage, target = _opened(given)
    if not _MAGIC.search(target):
        return [given]
    try:
        return [_url(given, each) for each in sorted(storage.glob(target.rstrip("/"))) if storage.isdir(each)]
    except Exception as error:
        raise _failed("cannot read", given, error) from error


@contextlib.contextmanager
def tree(given: str, suffix: str | tuple[str, ...]) -> Iterator[Path]:
    """The local folder that is given; of a URL a copy of the files below it that end so, while the context lasts."""
    path = local(given)
    if path is not None:
        yield path
        return
    storage, target = _opened(given)
    with scratch() as made:
        try:
            names = [str(each) for each in storage.find(target) if str(each).endswith(suffix)]
            copies = [(each, made / _below(each, target)) for each in names if ".." not in each.split("/")]
            for folder in {copy.parent for _, copy in copies}:
                folder.mkdir(parents=True, exist_ok=True)
            _get(storage, copies)
        except Exception as error:
            raise _failed("cannot read", given, error) from error
        yield made


@contextlib.contextmanager
def writing(given: str | Path, what: str, *, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """A binary file that appears at a path or URL when the block ends without an exception.

    As `engine.ground.files.replacing`, which writes local ones; mode: of those, other storage has rules of its own.
    """
    path = local(given)
    if path is not None:
        with replacing(path, what, mode=mode) as file:
            yield file
        return
    storage, target = _opened(str(given))
    with scratch() as made:
        with (made / "file").open("wb") as file:
            yield file
        _send(storage, [(made / "file", target)], str(given))


@contextlib.contextmanager
def folder(given: str | Path, names: Sequence[str]) -> Iterator[Path]:
    """A local folder whose files of these names appear at a URL when the block ends without an exception.

    A local folder is given as it is: who writes there sees to it that files appear whole. To other storage all are sent
    before one gets its name.
    """
    path = local(given)
    if path is not None:
        yield path
        return
    storage, target = _opened(str(given))
    with scratch() as made:
        yield made
        _send(storage, [(made / name, f"{target.rstrip('/')}/{name}") for name in names], str(given))


def send(files: Sequence[Path], url: str) -> None:
    """Make local files appear in a folder behind a URL, under their names: all are sent before one gets its name."""
    storage, target = _opened(url)
    _send(storage, [(file, f"{target.rstrip('/')}/{file.name}") for file in files], url)


def names(url: str) -> list[str]:
    """The names of the files in a folder behind a URL, sorted; none of one that is not there."""
    storage, target = _opened(url)
    try:
        storage.invalidate_cache()  # others write there, too
        return sorted(Path(each).name for each in storage.ls(target, detail=False))
    except FileNotFoundError:
        return []
    except Exception as error:
        raise _failed("cannot read", url, error) from error


def put(files: Sequence[tuple[Path, str]], url: str) -> None:
    """Send local files to names in a folder behind a URL, many at a time; what has such a name is written over.

    Names that nobody reads before it is known that all are there: of a broken one, half may be left.
    """
    storage, target = _opened(url)
    try:
        storage.put([str(file) for file, _ in files], [f"{target.rstrip('/')}/{name}" for _, name in files])
    except Exception as error:
        raise _failed("cannot write", url, error) from error


def put_bytes(data: bytes, url: str) -> None:
    """As `put`, of one that is in memory."""
    with scratch() as made:
        (made / "file").write_bytes(data)
        folder, _, name = url.rpartition("/")
        put([(made / "file", name)], folder)


def get_bytes(url: str) -> bytes:
    """All that a URL names."""
    storage, target = _opened(url)
    try:
        return bytes(storage.cat_file(target))
    except Exception as error:
        raise _failed("cannot read", url, error) from error


def copy(pairs: Sequence[tuple[str, str]], url: str) -> None:
    """Copy files of a folder behind a URL to other names in it, many at a time, without fetching them."""
    storage, target = _opened(url)
    there = [[f"{target.rstrip('/')}/{name}" for name in names] for names in zip(*pairs, strict=True)]
    try:
        if there:
            storage.copy(*there)
    except Exception as error:
        raise _failed("cannot write", url, error) from error


def remove(url: str, names: Sequence[str] | None = None) -> None:
    """Remove files of a folder behind a URL, those that are there; without names the folder, and all that is in it."""
    storage, target = _opened(url)
    try:
        storage.invalidate_cache()
        found = [target] if names is None else [f"{target.rstrip('/')}/{name}" for name in names]
        found = [each for each in found if storage.exists(each)]
        if found:
            storage.rm(found, recursive=names is None)
    except Exception as error:
        raise _failed("cannot remove", url, error) from error


def opened(given: str) -> IO[bytes]:
    """A file to read here and there, without fetching all of it; of other storage, some of it at a time.

    Raises SparkError where it cannot be read.
    """
    path = local(given)
    try:
        if path is not None:
            return open_regular(path)
        storage, target = _opened(given)
        found: IO[bytes] = storage.open(target, "rb")
        return found
    except SparkError:
        raise
    except Exception as error:
        raise _failed("cannot read", given, error) from error


def joined(folder: str | Path, name: str) -> str:
    """The name in a folder or below a URL, for messages."""
    path = local(folder)
    return f"{str(folder).rstrip('/')}/{name}" if path is None else str(path / name)


def place(url: str) -> tuple[str, str]:
    """What kind of storage a URL is of, and the path there; nothing is connected to.

    Raises MissingExtraError or UsageError for one that nothing here can open.
    """
    storage, path = _opened(url)
    return type(storage).__name__, path


def _opened(url: str) -> tuple[Any, str]:
    """A file system, and the URL's path in it."""
    hint = f"{shlex.quote(sys.executable)} -m pip install {requirement('storage')}"
    try:
        fsspec = importlib.import_module("fsspec")
    except ImportError as error:
        raise MissingExtraError(f"{url}: storage behind a URL takes fsspec ({error})", hint=hint) from error
    try:
        storage, path = fsspec.core.url_to_fs(url)
    except ImportError as error:  # of the library of that storage
        lacks = str(getattr(error.__cause__, "name", None) or "")
        if lacks and not lacks.startswith(_EXTRA):
            hint = f"{shlex.quote(sys.executable)} -m pip install {lacks.partition('.')[0]}"
        raise MissingExtraError(f"{url}: {error}", hint=hint) from error
    except ValueError as error:
        raise UsageError(f"{url}: {error}", hint="expected a path, or a URL as s3://BUCKET/FILE") from error
    except Exception as error:  # each library has its own
        raise _failed("cannot open", url, error) from error
    return storage, str(path)


def _fetched(url: str, suffixes: Sequence[str], stack: contextlib.ExitStack) -> list[Found]:
    """Copies of what a URL stands for, in a folder that lasts as long as the stack."""
    storage, path = _opened(url)
    made = stack.enter_context(scratch())
    try:
        if _MAGIC.search(path) and not storage.exists(path):
            paths = sorted(storage.glob(path))
        elif storage.isdir(path):
            paths = sorted(each for each in storage.ls(path, detail=False) if Path(each).suffix in suffixes)
        else:
            paths = [path]
        found = []
        for i, each in enumerate(paths):
            query = each.partition("?")[0] if _HTTP.match(url) else each
            found.append(Found(url if each == path else _url(url, each), made / f"{i:06}{Path(query).suffix}"))
        _get(storage, [(each, file.path) for each, file in zip(paths, found, strict=True)])
    except Exception as error:
        raise _failed("cannot read", url, error) from error
    return found


def _get(storage: Any, copies: Sequence[tuple[str, Path]]) -> None:
    """Fetch files, many at a time where the storage can: each takes a round trip, and logs are small."""
    if copies:
        storage.get([source for source, _ in copies], [str(copy) for _, copy in copies])


def _below(path: str, folder: str) -> str:
    """The rest of a path in a folder."""
    return path.removeprefix(folder.rstrip("/")).lstrip("/")


def _url(given: str, path: str) -> str:
    """The URL of a path in the storage of another URL."""
    return f"{given[: len(given) - len(given.partition('://')[2])]}{str(path).lstrip('/')}"


def _send(storage: Any, files: Sequence[tuple[Path, str]], url: str) -> None:
    """Send files under temporary names, then give them their own; nothing is left of what did not get there."""
    sent = []
    try:
        for source, target in files:
            parent, _, name = target.rpartition("/")
            sent.append((f"{parent}/.{name}.{secrets.token_urlsafe(6)}.tmp", target))
            storage.put_file(str(source), sent[-1][0])
        while sent:
            storage.mv(*sent[0])
            del sent[0]
    except BaseException as error:
        for temporary, _ in sent:
            with contextlib.suppress(Exception):
                storage.rm_file(temporary)
        if isinstance(error, Exception):
            raise _failed("cannot write", url, error) from error
        raise


def _failed(verb: str, url: str, error: Exception) -> SparkError:
    said = " ".join(str(error).split()) or "no reason given"
    return SparkError(
        f"{verb} {url}: {type(error).__name__}: {said}",
        hint="is the address right, can it be reached from here, and may you do that there?",
    )
