"""Lists of replies that are written as JSON while they grow.

What a reply says of its tokens may be thousands of times as long as its text. Written all at once at the end, it would
keep the server from everybody else for seconds; written as it comes, it is only put in its place then.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from typing import Any


class Written:
    """A list in what `dumps` takes, of values that are JSON text already."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []  # all of it, but the brackets

    def add(self, values: Iterable[Any]) -> None:
        """Write further values."""
        for value in values:
            if self.pieces:
                self.pieces.append(b", ")
            self.pieces.append(json.dumps(value).encode())


def dumps(made: Any) -> bytes:
    """Write JSON as `json.dumps` does, with what is Written in its places."""
    mark, found = secrets.token_hex(16), []  # no text of a client's holds it

    def place(value: Any) -> str:
        if not isinstance(value, Written):
            raise TypeError(f"{type(value).__name__} is nothing of JSON's")
        found.append(value)
        return mark

    first, *rest = json.dumps(made, default=place).encode().split(f'"{mark}"'.encode())
    pieces = [first]
    for value, after in zip(found, rest, strict=True):
        pieces += [b"[", *value.pieces, b"]", after]
    return b"".join(pieces)  # once, since it may be long
