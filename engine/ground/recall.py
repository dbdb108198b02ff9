"""How much of its context a reply reads: what a request says of it (docs/kv.md, "Reading a part of it")."""

from __future__ import annotations

from dataclasses import dataclass

from engine.ground import checks

MAX_BLOCKS = 1 << 24  # more than any context has
MAX_KEPT = 64  # ranges of one request
MAX_POSITION = (1 << 31) - 1
_POSITION = checks.integer(0, MAX_POSITION)


@dataclass(frozen=True, slots=True)
class KVRecall:
    """What a request asks for where a server reads a part of the context.

    off: all is read. blocks: that are read of those that need not be, at most; left_out: the share of softmax mass that
    may be left out, by estimate. Where both are None it is as the server says; one alone is all that matters. keep:
    ranges of tokens of the prompt, [from, to) each, whose blocks are read anyway. start: contexts of up to so many
    tokens are read whole; None: as the server says.
    """

    off: bool = False
    blocks: int | None = None
    keep: tuple[tuple[int, int], ...] = ()
    left_out: float | None = None
    start: int | None = None


CHECK = checks.record(
    KVRecall,
    {
        "off": checks.boolean,
        "blocks": checks.optional(checks.integer(0, MAX_BLOCKS)),
        "keep": checks.items(checks.pair(_POSITION, _POSITION), MAX_KEPT),
        "left_out": checks.optional(checks.number(0.0, 1.0)),
        "start": checks.optional(_POSITION),
    },
)
