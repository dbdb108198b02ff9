"""What is left out of the sessions, by kind: how many records, and how much text was in them.

A kind of record that a program adds is bookkeeping until somebody looks. The text in it says whether looking is
worth it, so kinds are counted by that rather than by name.
"""

from __future__ import annotations

import re
from collections import Counter

OTHER = "other kinds"
_TRACKED = 256  # names come from the logs, so there may be any number of them
_LISTED = 24
_NAME_LENGTH = 64
_NOT_IN_NAMES = re.compile(r"[^\w./:+-]")


class Dropped:
    """Counts of dropped records, with bounded memory."""

    def __init__(self) -> None:
        self._records: Counter[str] = Counter()
        self._characters: Counter[str] = Counter()

    def add(self, kind: str, value: object) -> None:
        """Count a record, or a block of one, of which nothing went into a session; value: what it held."""
        name = _NOT_IN_NAMES.sub("_", kind[:_NAME_LENGTH])
        if name not in self._records and len(self._records) >= _TRACKED:
            name = OTHER
        self._records[name] += 1
        self._characters[name] += text_size(value)

    def join(self, other: Dropped) -> None:
        """Add what another counted."""
        for kind, records in other._records.items():
            name = kind if kind in self._records or len(self._records) < _TRACKED else OTHER
            self._records[name] += records
            self._characters[name] += other._characters[kind]

    def largest(self) -> dict[str, dict[str, int]]:
        """Records and characters by kind, most text first; what is beyond the list's length is one kind, the last."""
        names = sorted(self._records, key=lambda name: (-self._characters[name], -self._records[name], name))
        listed = [name for name in names if name != OTHER][:_LISTED]
        rest = [name for name in names if name not in listed]
        found = {name: self._row([name]) for name in listed}
        return {**found, OTHER: self._row(rest)} if rest else found

    def _row(self, names: list[str]) -> dict[str, int]:
        return {
            "records": sum(self._records[name] for name in names),
            "characters": sum(self._characters[name] for name in names),
        }


def text_size(value: object) -> int:
    """Characters of text in a JSON value: of strings with white space or letters beyond ASCII.

    Ids, paths, names and encoded data have neither.
    """
    size, rest = 0, [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            if " " in item or "\n" in item or not item.isascii():
                size += len(item)
        elif isinstance(item, list):
            rest.extend(item)
        elif isinstance(item, dict):
            rest.extend(item.values())
    return size
