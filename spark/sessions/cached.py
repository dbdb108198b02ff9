"""What lies in a server's `--cache-dir`: the conversations that its files hold, and how some of them are removed.

A chunk's file says which chunk is before it (engine/formats/prefix_file.py), so the files are a tree. A *leaf* is a
chunk that none follows: the end of a conversation, as far as it is saved. It needs the files of all chunks before it.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from engine.formats import prefix_file
from engine.formats.gguf import open_model
from engine.formats.prefix_file import LOCK, NAME, TEMPORARY, Head, OtherVersionError
from engine.ground.digest import code_digest
from engine.ground.errors import RequestError, SparkError, UsageError
from engine.ground.files import hold
from engine.text.tokenizer import Tokenizer, load

ID_CHARS = 12  # of an id, in tables
_TEXT_CHARS = 100  # of the beginning of a conversation
_CODE_CHARS = 8  # of a digest
_AGES = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_ID = re.compile(r"[0-9a-f]{1,64}")

Why = Literal["damaged", "unfinished", "alone", "version", "unreadable", "foreign"]
USELESS: tuple[Why, ...] = ("damaged", "unfinished", "alone", "version")  # Spark's, and of no use to a server
Progress = Callable[[int, int], None]
Seen = dict[str, tuple[tuple[int, int, int], "Head | Stray"]]  # by name: inode, bytes and time, and what it said then


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk's files. id: its hash. n_bytes: of its own file; state_bytes: of its state's, None where it has none."""

    id: str
    head: Head
    n_bytes: int
    state_bytes: int | None
    used_s: float

    @property
    def files(self) -> dict[str, int]:
        """Their names and bytes, what can be done without first."""
        state = {} if self.state_bytes is None else {f"{self.id}.state": self.state_bytes}
        return state | {f"{self.id}.blocks": self.n_bytes}

    @property
    def all_bytes(self) -> int:
        """Bytes of both."""
        return sum(self.files.values())

    @property
    def n_tokens(self) -> int:
        """How many its own tokens are."""
        return len(self.head.tokens)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A conversation. chunks: the first one first; own: how many of the last ones no other leaf needs.

    whole: its beginning is there. current: this version's code made it, None where that cannot be told. Where one of
    them is false, no server of this version can use it.
    """

    chunks: tuple[Chunk, ...]
    own: int
    whole: bool
    current: bool | None = None

    @property
    def id(self) -> str:
        """The hash of its last chunk."""
        return self.chunks[-1].id

    @property
    def used_s(self) -> float:
        """When it was used last, as `time.time` counts."""
        return self.chunks[-1].used_s

    @property
    def n_tokens(self) -> int:
        """How many it has."""
        return sum(chunk.n_tokens for chunk in self.chunks)

    @property
    def usable(self) -> bool:
        """Whether a server of this version may use it, as far as can be told."""
        return self.whole and self.current is not False

    @property
    def code(self) -> str:
        """The first digits of the digest of the code that made it."""
        return str(self.chunks[-1].head.key.get("code", ""))[:_CODE_CHARS]

    @property
    def resumes_tokens(self) -> int:
        """How many of its tokens a prompt can go on after."""
        needs = self.chunks[-1].head.model.get("needs_state")
        use = [i for i, chunk in enumerate(self.chunks, 1) if not needs or chunk.state_bytes is not None]
        return sum(chunk.n_tokens for chunk in self.chunks[: use[-1]]) if use and self.usable else 0

    @property
    def own_bytes(self) -> int:
        """Bytes of the files that no other leaf needs."""
        return sum(chunk.all_bytes for chunk in self.chunks[len(self.chunks) - self.own :])

    @property
    def all_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(chunk.all_bytes for chunk in self.chunks)

    @property
    def model_path(self) -> Path:
        """Where its model lay."""
        return Path(str(self.chunks[-1].head.model.get("path", "")))

    @property
    def file_id(self) -> str:
        """The file id of its model."""
        return str(self.chunks[-1].head.key.get("file_id", ""))

    @property
    def kv_types(self) -> list[str]:
        """The types of K and of V."""
        found = self.chunks[-1].head.key.get("kv_types")
        return [str(each) for each in found] if isinstance(found, list) else []

    def to_json(self) -> dict[str, Any]:
        """What `--json` has of it."""
        head = self.chunks[-1].head
        return {
            "id": self.id, "tokens": self.n_tokens, "resumes_tokens": self.resumes_tokens, "whole": self.whole,
            "current": self.current, "code": self.code,
            "chunks": len(self.chunks), "own_bytes": self.own_bytes, "bytes": self.all_bytes,
            "used_s": round(self.used_s, 3), "model": str(self.model_path),
            "architecture": head.model.get("architecture"), "key": head.key,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stray:
    """A file that belongs to no leaf. reason: `alone` is a state without its chunk; words: what is wrong with it."""

    name: str
    n_bytes: int
    reason: Why
    words: str

    def to_json(self) -> dict[str, Any]:
        """What `--json` has of it."""
        return {"name": self.name, "bytes": self.n_bytes, "reason": self.reason, "words": self.words}


@dataclass(frozen=True, slots=True)
class Cached:
    """A folder: its leaves, those used last first, and what else lies there."""

    folder: Path
    leaves: tuple[Leaf, ...]
    strays: tuple[Stray, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the leaves' files, each counted once."""
        return sum(chunk.all_bytes for chunk in {c.id: c for leaf in self.leaves for c in leaf.chunks}.values())

    def find(self, given: str) -> Leaf:
        """The leaf whose id begins so; UsageError where there is none, or several."""
        found = [leaf for leaf in self.leaves if leaf.id.startswith(given)] if _ID.fullmatch(given) else []
        if len(found) == 1:
            return found[0]
        if found:
            ids = ", ".join(leaf.id[: max(ID_CHARS, len(given) + 4)] for leaf in found[:4])
            raise UsageError(f"{given!r} begins the ids of {len(found)} sessions: {ids}", hint="give more of one")
        raise UsageError(
            f"{self.folder} has no session whose id begins with {given!r}", hint="`spark sessions list` shows the ids"
        )

    def to_go(self, ids: Sequence[str], limit_s: float | None, useless: bool) -> Dropped:
        """What `drop` has to remove, in an order that leaves shorter leaves to who is killed.

        limit_s: leaves that were not used since then.
        """
        stay = {self.find(given).id: 0 for given in ids}  # how many chunks of those that are chosen
        for leaf in self.leaves:
            if useless and not leaf.usable:
                stay[leaf.id] = 0
            elif limit_s is not None and leaf.used_s < limit_s:
                stay[leaf.id] = max((i for i, c in enumerate(leaf.chunks, 1) if c.used_s >= limit_s), default=0)
        kept = {chunk.id for leaf in self.leaves for chunk in leaf.chunks[: stay.get(leaf.id)]}
        going = [(i, c) for leaf in self.leaves for i, c in enumerate(leaf.chunks) if c.id not in kept]
        gone: dict[str, int] = {}
        for _, chunk in sorted(going, key=lambda each: -each[0]):
            gone |= chunk.files
        gone |= {stray.name: stray.n_bytes for stray in self.strays if useless and stray.reason in USELESS}
        return Dropped(tuple(stay), gone)

    def to_json(self) -> dict[str, Any]:
        """What `--json` has of it."""
        leaves, strays = ([each.to_json() for each in some] for some in (self.leaves, self.strays))
        return {"folder": str(self.folder), "bytes": self.n_bytes, "sessions": leaves, "other_files": strays}


@dataclass(frozen=True, slots=True)
class Dropped:
    """What was removed: ids of leaves, and files, by their names and bytes."""

    ids: tuple[str, ...]
    files: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """What `--json` has of it."""
        return {"sessions": list(self.ids), "files": self.files, "bytes": sum(self.files.values())}


def read(
    folder: Path, checksums: bool = False, progress: Progress = lambda done, total: None, seen: Seen | None = None
) -> Cached:
    """Read what the files of a folder say, which a server may use meanwhile.

    checksums: read all of every file, and see that it is as it was written. progress: bytes. seen: what files said
    before, and gets what they say now; one that has not changed since is not read again. SparkError where the folder
    cannot be read.
    """
    found, seen = _files(folder), {} if seen is None else seen
    heads: dict[str, Head] = {}
    strays: list[Stray] = []
    done, total = 0, sum(status.st_size for status in found.values())
    for name, status in found.items():
        progress(done, total)
        done += status.st_size
        as_it_is = (status.st_ino, status.st_size, status.st_mtime_ns)
        if name not in seen or seen[name][0] != as_it_is:
            said = _said(folder / name, status, checksums)
            if said is None:
                continue
            seen[name] = (as_it_is, said)
        said = seen[name][1]
        if isinstance(said, Stray):
            strays.append(said)
        else:
            heads[name] = said
    chunks: dict[str, Chunk] = {}
    for name, head in heads.items():
        hash_, _, kind = name.partition(".")
        state = found.get(f"{hash_}.state") if f"{hash_}.state" in heads else None
        if kind == "blocks":
            size = None if state is None else state.st_size
            chunks[hash_] = Chunk(hash_, head, found[name].st_size, size, found[name].st_mtime)
        elif f"{hash_}.blocks" not in heads:
            strays.append(Stray(name, found[name].st_size, "alone", "the file of its chunk is not there"))
    return Cached(folder, tuple(_leaves(chunks)), tuple(sorted(strays, key=lambda stray: (stray.reason, stray.name))))


def _files(folder: Path) -> dict[str, os.stat_result]:
    """What lies in a folder, but its lock."""
    try:
        with os.scandir(folder) as entries:
            return {e.name: e.stat(follow_symlinks=False) for e in entries if e.name != LOCK and _there(e)}
    except OSError as error:
        raise SparkError(
            f"{folder} cannot be read: {error.strerror or error}", hint="name the --cache-dir of a server"
        ) from error


def _said(path: Path, status: os.stat_result, checksums: bool) -> Head | Stray | None:
    """What a file says, or what is wrong with it; None where it is gone: a server needed the room."""

    def stray(reason: Why, words: str) -> Stray:
        return Stray(path.name, status.st_size, reason, words)

    if not stat.S_ISREG(status.st_mode) or not _is_ours(path.name):
        return stray("foreign", "it is not one of Spark's")
    if not NAME.fullmatch(path.name):
        return stray("unfinished", "it is being written, or was left behind")
    try:
        return prefix_file.check(path) if checksums else prefix_file.read_head(path)
    except FileNotFoundError:
        return None
    except OtherVersionError as error:
        return stray("version", str(error))
    except ValueError as error:
        return stray("damaged", str(error))
    except OSError as error:
        return stray("unreadable", error.strerror or str(error))


def _is_ours(name: str) -> bool:
    return bool(NAME.fullmatch(name) or TEMPORARY.fullmatch(name))


def _there(entry: os.DirEntry[str]) -> bool:
    try:
        entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _own_code() -> str | None:
    """The digest of this version's code; None where the installation is not whole."""
    try:
        return code_digest()
    except (SparkError, OSError):
        return None


def _leaves(chunks: dict[str, Chunk]) -> Iterator[Leaf]:
    before = {chunk.id: _before(chunk) for chunk in chunks.values()}
    followed = set(before.values())
    paths: list[tuple[Chunk, ...]] = []
    for leaf in sorted((c for c in chunks.values() if c.id not in followed), key=lambda c: (-c.used_s, c.id)):
        back = [leaf]
        while before[back[-1].id] in chunks:
            back.append(chunks[before[back[-1].id]])
        paths.append(tuple(reversed(back)))
    needed = Counter(chunk.id for path in paths for chunk in path)
    mine = _own_code() if paths else None
    for path in paths:
        own = sum(needed[chunk.id] == 1 for chunk in path)  # the last ones: what precedes a shared one is shared
        code = path[-1].head.key.get("code")
        current = None if mine is None or code is None else code == mine
        yield Leaf(path, own, _before(path[0]) == prefix_file.root(path[0].head.key), current)


def _before(chunk: Chunk) -> str:
    assert chunk.head.place is not None  # of `.blocks`
    return chunk.head.place.before


def checked(folder: Path, leaf: Leaf, progress: Progress = lambda done, total: None) -> dict[str, str]:
    """What is wrong with each file of a leaf, by its name; empty where it is as it was written."""
    found, done = {}, 0
    for chunk in leaf.chunks:
        for name in chunk.files:
            try:
                prefix_file.check(folder / name)
                found[name] = ""
            except (OSError, ValueError) as error:
                found[name] = str(error)
        progress(done := done + chunk.all_bytes, leaf.all_bytes)
    return found


def age(text: str) -> float:
    """Seconds of an age such as 90m, 12h, 7d or 2w; UsageError for anything else."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([mhdw])", text)
    if found is None:
        raise UsageError(f"--older-than is {text!r}: expected a number and m, h, d or w, as 90m, 12h or 7d")
    return float(found[1]) * _AGES[found[2]]


def drop(
    folder: Path,
    ids: Sequence[str] = (),
    older_s: float | None = None,
    useless: bool = False,
    progress: Progress = lambda done, total: None,
) -> Dropped:
    """Remove leaves, by the beginnings of their ids or those not used for so long, and what no other leaf needs.

    Of a leaf that was not used for so long, what was stays: its chunks up to the last one that was. useless: remove,
    too, what is of no use to a server of this version: damaged files, whose checksums are read for that, those of
    other versions, unfinished ones, and leaves without their beginning. Raises UsageError for an id that is none, and
    SparkError where a server uses the folder; then nothing is removed.
    """
    files = _files(folder) if folder.is_dir() else {}
    if not any(map(_is_ours, files)):
        if folder.is_dir() and not ids and (not files or (folder / LOCK).is_file()):
            return Dropped((), {})
        raise SparkError(f"{folder} holds no sessions", hint="name the --cache-dir of a server")
    limit_s = None if older_s is None else time.time() - older_s
    with _alone(folder):
        pass  # else all would be read in vain
    seen: Seen = {}
    read(folder, useless, progress, seen)
    with _alone(folder):  # no server can start now: what takes long is behind us
        dropped = read(folder, seen=seen).to_go(ids, limit_s, useless)
        _remove(folder, dropped.files)
    return dropped


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder while no server does."""
    hint = "stop the server first; while it runs, it removes what is over --cache-dir-gib itself"
    try:
        held = hold(folder / LOCK, alone=True)
    except BlockingIOError:
        raise SparkError(f"{folder} is in use by a server, so nothing was removed", hint=hint) from None
    except OSError as error:
        raise SparkError(f"nothing can be removed from {folder}: {error.strerror or error}") from error
    if held is None:
        raise SparkError(
            f"{folder} lies on a file system without locks, so a server that uses it would not be seen",
            hint="stop the server, and remove files by hand",
        )
    with held:
        yield


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise SparkError(f"{folder / name} cannot be removed: {error.strerror or error}") from error


class Texts:
    """The beginnings of conversations as text, by the tokenizers of their models, as far as these are found.

    model: a file that is looked at before those that the records name. missing: why there is no text, a line a model.
    """

    def __init__(self, model: Path | None = None) -> None:
        self._given = model
        self._tokenizers: dict[str, Tokenizer | None] = {}
        self.missing: list[str] = []

    def of(self, leaf: Leaf) -> str:
        """How a conversation begins, and its own part where it shares one, in one line; "" without its model."""
        if leaf.file_id not in self._tokenizers:
            self._tokenizers[leaf.file_id] = self._tokenizer(leaf)
        tokenizer = self._tokenizers[leaf.file_id]
        if tokenizer is None or not leaf.whole:
            return ""
        shared = len(leaf.chunks) - leaf.own
        if not shared:
            return _line(tokenizer, leaf.chunks, _TEXT_CHARS)
        begins = (_line(tokenizer, chunks, _TEXT_CHARS // 2) for chunks in (leaf.chunks, leaf.chunks[shared:]))
        return " ... ".join(begins)

    def _tokenizer(self, leaf: Leaf) -> Tokenizer | None:
        why = []
        for path in filter(None, (self._given, leaf.model_path)):
            try:
                with open_model(path) as file:
                    if file.file_id == leaf.file_id:
                        return load(file)
                why.append(f"{path} is another model")
            except (SparkError, OSError) as error:
                why.append(error.message if isinstance(error, SparkError) else f"{path}: {error.strerror}")
        self.missing.append(f"no text of sessions of {leaf.model_path.name}: {'; '.join(why)}")
        return None


def _line(tokenizer: Tokenizer, chunks: Iterable[Chunk], n_chars: int) -> str:
    """The first characters, without control tokens; "" where an id is none of the vocabulary's."""
    ids = (int(token) for chunk in chunks for token in chunk.head.tokens)  # no more than are needed are looked at
    try:
        text = tokenizer.decode(list(islice(ids, 4 * n_chars)), skip_special=True)
    except RequestError:
        return ""
    return " ".join(text.split())[:n_chars]
