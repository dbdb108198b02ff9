"""What /v1/responses keeps between requests: items by their ids, and which items a response's conversation was made of.

It is in memory alone, of bounded size and age: what was not used for longest is given up first, and all of it ends with
the server. Ids are made up of 96 random bits. Items of inputs have no ids that a client could name: they are found by a
digest of their contents, so that a conversation that comes whole in each request is there once.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

MAX_BYTES = 64 << 20
MAX_ITEM_BYTES = 8 << 20
MAX_AGE_S = 24 * 3600.0  # since it was last used
ENTRY_BYTES = 512  # of an entry, beside what is in it
_KEY_BYTES = 96  # of a key in a response's list

Key: TypeAlias = str | bytes  # the id that an item was given out with, or the digest of an item of an input


@dataclass(slots=True)
class _Entry:
    """What is kept under a key: an item's bytes, or the keys of a response's items. used_s: when it was last used."""

    value: bytes | tuple[Key, ...]
    n_bytes: int
    used_s: float


class Kept:
    """A bounded store; any thread may use it."""

    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        max_item_bytes: int = MAX_ITEM_BYTES,
        max_age_s: float = MAX_AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()  # the least recently used first
        self._lock = threading.Lock()
        self._n_bytes = 0
        self._max_bytes, self._max_item_bytes, self._max_age_s = max_bytes, max_item_bytes, max_age_s
        self._clock = clock

    @property
    def n_bytes(self) -> int:
        """What is counted as held."""
        return self._n_bytes

    def __len__(self) -> int:
        """How many items and responses there are."""
        return len(self._entries)

    def put_items(self, items: Iterable[tuple[Key, bytes]]) -> None:
        """Keep items, but for those that are too large by themselves."""
        with self._lock:
            for key, data in items:
                if len(data) <= self._max_item_bytes:
                    self._put(key, data, len(data))

    def put_response(self, response_id: str, keys: Sequence[Key]) -> None:
        """Keep which items a response and what came before it are made of; all count as used now.

        Where one of them is not kept, neither is the response: nobody could go on from it.
        """
        with self._lock:
            if len(self._used(keys)) == len(keys):
                self._put(response_id, tuple(keys), _KEY_BYTES * len(keys))

    def items(self, ids: Iterable[str]) -> dict[str, bytes]:
        """Those of some items that were given out and are kept."""
        with self._lock:
            self._give_up()
            return {item_id: data for item_id in set(ids) for data in self._used([item_id])}

    def response(self, response_id: str) -> tuple[tuple[Key, ...], list[bytes]] | None:
        """The keys and items of a response and of what came before it; None where one of them is not kept."""
        with self._lock:
            self._give_up()
            entry = self._entries.get(response_id)
            if entry is None or isinstance(entry.value, bytes):
                return None
            items = self._used(entry.value)
            if len(items) < len(entry.value):
                self._drop(response_id)
                return None
            self._touch(response_id, entry)
            return entry.value, items

    def drop(self, key: Key) -> bool:
        """Give up what a key stands for; whether there was anything."""
        with self._lock:
            return self._drop(key)

    def give_up(self) -> None:
        """Give up what is too old."""
        with self._lock:
            self._give_up()

    def _used(self, keys: Iterable[Key]) -> list[bytes]:
        """The items of keys that are there; they are used now."""
        items = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and isinstance(entry.value, bytes):
                self._touch(key, entry)
                items.append(entry.value)
        return items

    def _touch(self, key: Key, entry: _Entry) -> None:
        entry.used_s = self._clock()
        self._entries.move_to_end(key)

    def _put(self, key: Key, value: bytes | tuple[Key, ...], n_bytes: int) -> None:
        n_bytes += ENTRY_BYTES
        if n_bytes > self._max_bytes:
            return
        self._drop(key)
        self._entries[key] = _Entry(value, n_bytes, self._clock())
        self._n_bytes += n_bytes
        self._give_up()

    def _drop(self, key: Key) -> bool:
        entry = self._entries.pop(key, None)
        self._n_bytes -= 0 if entry is None else entry.n_bytes
        return entry is not None

    def _give_up(self) -> None:
        oldest_s = self._clock() - self._max_age_s
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if self._n_bytes <= self._max_bytes and entry.used_s > oldest_s:
                return
            self._drop(key)
