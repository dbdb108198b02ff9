"""The tables of `spark sessions`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from spark.console import note, table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spark.sessions.cached import Cached, Dropped, Leaf
    from spark.sessions.stats import Report

_STRAYS_SHOWN = 20
_TOOLS_SHOWN = 12
_OF_CODE = {True: "of this version", False: "of another version", None: "which may be another version's"}


def mib(n_bytes: int) -> str:
    """Bytes as a table has them."""
    return f"{n_bytes / (1 << 20):,.1f}"


def show_cached(found: Cached, texts: Mapping[str, str] | None) -> None:
    """Print a line a session, and what else lies in the folder."""
    from spark.sessions.cached import ID_CHARS

    columns = ["id", "tokens", "goes on\nafter", "its own\nMiB", "in all\nMiB", "model", "K, V", "code", "last used"]
    rows = [
        [
            leaf.id[:ID_CHARS], f"{leaf.n_tokens:,}", _resumes(leaf), mib(leaf.own_bytes), mib(leaf.all_bytes),
            leaf.model_path.name, ", ".join(leaf.kv_types), leaf.code, _when(leaf.used_s),
            *([] if texts is None else [texts.get(leaf.id, "")]),
        ]
        for leaf in found.leaves
    ]  # fmt: skip
    if rows:
        n_files = len({name for leaf in found.leaves for chunk in leaf.chunks for name in chunk.files})
        title = (
            f"{found.folder}: {_counted(len(rows), 'session')}, {_counted(n_files, 'file')}, {mib(found.n_bytes)} MiB"
        )
        table(title, [*columns, *([] if texts is None else ["begins"])], rows)
        if unknown := sum(leaf.current is None for leaf in found.leaves):
            note(f"whether this version's code made them cannot be told of {_counted(unknown, 'session')}")
    else:
        note(f"{found.folder} holds no sessions")
    if found.strays:
        strays = [[stray.reason, stray.name, mib(stray.n_bytes), stray.words] for stray in found.strays]
        table("Files that are ignored", ["", "file", "MiB", "why"], strays[:_STRAYS_SHOWN])
        if more := strays[_STRAYS_SHOWN:]:
            note(f"and {len(more)} more")


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}" + ("" if n == 1 else "s")


def _resumes(leaf: Leaf) -> str:
    if not leaf.whole:
        return "no beginning"
    return f"{leaf.resumes_tokens:,}" if leaf.usable else "other version"


def _when(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, OSError, ValueError):  # a time that no calendar has
        return "?"


def show_leaf(leaf: Leaf, wrong: Mapping[str, str], text: str) -> None:
    """Print the files of a session, the first one first, and whether each is as it was written."""
    key = leaf.chunks[-1].head.key
    rows = [
        ["tokens", f"{leaf.n_tokens:,}"],
        ["goes on after", _resumes(leaf)],
        ["MiB, its own", mib(leaf.own_bytes)],
        ["MiB, in all", mib(leaf.all_bytes)],
        ["model", f"{leaf.model_path}"],
        ["file id", leaf.file_id],
        ["K, V", ", ".join(leaf.kv_types)],
        ["device", str(key.get("device", ""))],
        ["code", f"{leaf.code}, {_OF_CODE[leaf.current]}"],
        ["last used", _when(leaf.used_s)],
        *([["begins", text]] if text else []),
    ]
    table(f"Session {leaf.id}", ["", ""], rows)
    at, files = 0, []
    for i, chunk in enumerate(leaf.chunks):
        span = f"{at:,} to {at + chunk.n_tokens:,}"
        at += chunk.n_tokens
        shared = "no" if i >= len(leaf.chunks) - leaf.own else "yes"
        for name, n_bytes in reversed(chunk.files.items()):
            files.append([span, name, mib(n_bytes), shared, wrong[name] or "good"])
    table("Its files", ["tokens", "file", "MiB", "shared", "checksum"], files)


def show_dropped(dropped: Dropped) -> None:
    """Say what was removed."""
    n_bytes = sum(dropped.files.values())
    files = _counted(len(dropped.files), "file")
    note(f"{_counted(len(dropped.ids), 'session')} dropped: {files}, {mib(n_bytes)} MiB")


def show_stats(report: Report) -> None:
    """Print the percentiles of each figure, the tools, and what `--expect-ctx` is right."""
    from spark.sessions.stats import CHARS_A_TOKEN, MOSTLY, PERCENTS

    rows = [
        [row.name, *(f"{row.percentiles[n]:,}" for n in PERCENTS), f"{row.most:,}", f"{row.count:,}", f"{row.total:,}"]
        for row in report.rows
    ]
    columns = [report.unit, *(f"p{n}" for n in PERCENTS), "most", "of", "total"]
    table(_counted(report.sessions, "session"), columns, rows)
    if report.tools:
        shown = list(report.tools.items())
        cells = [[name, f"{n:,}"] for name, n in shown[:_TOOLS_SHOWN]]
        if more := shown[_TOOLS_SHOWN:]:
            cells.append([_counted(len(more), "other"), f"{sum(n for _, n in more):,}"])
        table("Calls of tools", ["tool", "calls"], cells)
    if report.skipped:
        note(f"{_counted(report.skipped, 'turn')} left out, which the model's template refuses")
    longest = next((row.most for row in report.rows if row.name == "context of a turn"), None)
    if longest is None:
        note("token files do not say how long contexts were: give sessions and --model for --expect-ctx")
        return
    if report.expect is None:
        note("no --expect-ctx follows: the model wrote nothing in these sessions")
        return
    about = f", at {CHARS_A_TOKEN} characters a token; --model counts" if report.guessed else ""
    note(
        f"--expect-ctx {report.expect}: {MOSTLY:.0%} of what the model writes is written in contexts no longer than "
        f"that{about}; the longest has {longest:,} {report.unit}"
    )
