"""Which windows of a file are counted, where they are not simply its first ones: a bit each, in any order.

A ledger of 10^7 windows is 1.2 MB, and goes into the comment lines of a checkpoint, compressed, since it is mostly ones
and then zeros.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.formats.profile import MAX_COMMENT_CHARS

_BITS = "# spark-ledger: "
_ASIDE = "# spark-set-aside: "
_LINE = MAX_COMMENT_CHARS - len(_BITS)


@dataclass(slots=True)
class Ledger:
    """The windows that are counted, by number, and those that are set aside, with the reason why."""

    bits: bytearray = field(default_factory=bytearray)
    aside: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of_first(cls, n_windows: int) -> Ledger:
        """The ledger of a run that counted the first so many."""
        made = cls(bytearray(b"\xff" * (n_windows // 8)))
        made.add(range(n_windows // 8 * 8, n_windows))
        return made

    def __contains__(self, number: int) -> bool:
        """Whether a window is counted."""
        byte = number >> 3
        return byte < len(self.bits) and bool(self.bits[byte] >> (number & 7) & 1)

    def __len__(self) -> int:
        """How many are."""
        return int.from_bytes(self.bits, "little").bit_count()

    def add(self, numbers: Iterable[int]) -> None:
        """Count windows in; those that are in it stay there."""
        for number in numbers:
            byte = number >> 3
            if byte >= len(self.bits):
                self.bits.extend(bytes(byte + 1 - len(self.bits) + 4096))
            self.bits[byte] |= 1 << (number & 7)

    @property
    def end(self) -> int:
        """A number above all that are in it, or set aside."""
        return max([8 * len(self.bits.rstrip(b"\0")), *(number + 1 for number in self.aside)])

    def lines(self) -> tuple[str, ...]:
        """As comment lines of a profile."""
        text = base64.b64encode(zlib.compress(bytes(self.bits.rstrip(b"\0")))).decode()
        parts = [text[i : i + _LINE] for i in range(0, len(text), _LINE)]
        aside = [_ASIDE + json.dumps(each) for each in self.aside.items()] if self.aside else []
        return (*(_BITS + part for part in parts), *(line[:MAX_COMMENT_CHARS] for line in aside))

    @classmethod
    def parse(cls, lines: Sequence[str]) -> Ledger | None:
        """What `lines` wrote among other comment lines; None where there is none. ValueError for a damaged one."""
        parts = [line.removeprefix(_BITS) for line in lines if line.startswith(_BITS)]
        if not parts:
            return None
        try:
            bits = bytearray(zlib.decompress(base64.b64decode("".join(parts), validate=True)))
        except zlib.error as error:
            raise ValueError(f"a ledger that cannot be read: {error}") from error
        found = (json.loads(line.removeprefix(_ASIDE)) for line in lines if line.startswith(_ASIDE))
        return cls(bits, {int(number): str(reason) for number, reason in found})
