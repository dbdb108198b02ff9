"""Things in the order in which they are given up, which is kept: to sort all of them for each takes longer."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Iterator
from itertools import count
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)
_STALE_ROWS = 64  # that there may be beside as many as there are things, before all go at once


class Oldest(Generic[T]):
    """Things by a key, the least first. key: of a thing; it may grow while the thing is here, and nobody has to say so.

    What has grown is found, and put where it belongs, when its turn comes.
    """

    def __init__(self, key: Callable[[T], Any]) -> None:
        self._key = key
        self._rows: list[tuple[Any, int, T]] = []  # of which some are stale
        self._numbers: dict[T, int] = {}  # of the row that is a thing's own
        self._next = count()

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, thing: T) -> bool:
        return thing in self._numbers

    def add(self, thing: T) -> None:
        """Let a thing be here; once, if it is here already. Not while somebody goes through them."""
        if len(self._rows) > 2 * len(self._numbers) + _STALE_ROWS:
            self._rows = [row for row in self._rows if self._numbers.get(row[2]) == row[1]]
        if thing not in self._numbers:
            self._put(thing)

    def remove(self, thing: T) -> None:
        """Let a thing be here no more, if it was."""
        self._numbers.pop(thing, None)

    def __iter__(self) -> Iterator[T]:
        """All of them, in their order, while any may be removed."""
        at = 0
        while at < len(self._rows):
            key, number, thing = self._rows[at]
            if self._numbers.get(thing) != number:
                del self._rows[at]
            elif self._key(thing) != key:
                del self._rows[at]
                self._put(thing)
            else:
                yield thing
                if at < len(self._rows) and self._rows[at][1] == number:
                    at += 1

    def _put(self, thing: T) -> None:
        number = self._numbers[thing] = next(self._next)
        insort(self._rows, (self._key(thing), number, thing), key=lambda row: row[:2])
