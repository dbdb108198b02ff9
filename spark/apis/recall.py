"""The field `kv_recall` of every API: how much of its context a reply reads, and what of it in any case."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from engine.ground import checks
from engine.ground.recall import MAX_BLOCKS, MAX_KEPT, MAX_POSITION, KVRecall
from spark.speech import conversation as c
from spark.speech.conversation import refusal
from spark.speech.sessions import Message
from spark.speech.spans import BEFORE, Span

_KEEP, _MESSAGES = "kv_recall.keep", "kv_recall.keep_messages"
_KNOWN = ("blocks", "from", "keep", "keep_messages", "left_out")


def kv_recall(body: Mapping[str, Any]) -> KVRecall | None:
    """What a request says but for `keep_messages`: "off", or an object of how much is read and of ranges of tokens."""
    given = body.get("kv_recall")
    if given is None:
        return None
    if type(given) is str and given == "off":
        return KVRecall(off=True)
    if type(given) is not dict:
        raise refusal("kv_recall", f"expected 'off' or an object, found {c.shown(given)}")
    if (unknown := next((key for key in given if key not in _KNOWN), None)) is not None:
        raise refusal(f"kv_recall.{unknown}"[:80], "unknown", hint=f"known: {', '.join(_KNOWN)}")
    blocks = c.integer(given, "blocks", 0, MAX_BLOCKS, "kv_recall.")
    left_out = checks.optional(checks.number(0.0, 1.0))("kv_recall.left_out", given.get("left_out"))
    start = c.integer(given, "from", 0, MAX_POSITION, "kv_recall.")
    ranges, messages = (c.get(given, name, list, [], "kv_recall.") for name in ("keep", "keep_messages"))
    if len(ranges) > MAX_KEPT:
        raise refusal(_KEEP, f"expected {MAX_KEPT} ranges at most, found {len(ranges)}")
    if len(ranges) + len(messages) > MAX_KEPT:
        found = f", found {len(messages)}" + (f" and {len(ranges)}" if ranges else "")
        raise refusal(_MESSAGES, f"expected {MAX_KEPT} entries at most, those of keep among them{found}")
    keep: list[Span] = []
    for i, pair in enumerate(ranges):
        is_pair = type(pair) is list and len(pair) == 2 and all(type(n) is int for n in pair)
        if not (is_pair and 0 <= pair[0] < pair[1] <= MAX_POSITION):
            raise refusal(f"{_KEEP}[{i}]", "expected [from, to) in tokens of the prompt, 0 <= from < to < 2^31")
        keep.append((pair[0], pair[1]))
    return KVRecall(blocks=blocks, keep=tuple(keep), left_out=left_out, start=start)


def kept_messages(body: Mapping[str, Any], places: Sequence[Span], messages: Sequence[Message]) -> tuple[Span, ...]:
    """Which of `messages` are kept whole, as `Conversation` has it; for a body that `kv_recall` has checked.

    places: by the request's own messages, which of `messages` each became.
    """
    made = []
    for i, entry in enumerate(_given(body)):
        if type(entry) is str and entry == "system":
            n_system = next((k for k, message in enumerate(messages) if message.role != "system"), len(messages))
            made.append((BEFORE, n_system))
        else:
            begin, end = _range(f"{_MESSAGES}[{i}]", entry, len(places))
            made.append((places[begin][0], max(to for _, to in places[begin:end])))
    return tuple(span for span in made if span[0] < span[1])


def no_messages(body: Mapping[str, Any]) -> None:
    """Refuse messages where there are none; for a body that `kv_recall` has checked."""
    if _given(body):
        raise refusal(_MESSAGES, "a prompt has no messages", hint="keep has ranges of its tokens")


def _given(body: Mapping[str, Any]) -> list[Any]:
    given = body.get("kv_recall")
    found: list[Any] = c.get(given, "keep_messages", list, []) if type(given) is dict else []
    return found


def _range(where: str, entry: Any, n: int) -> Span:
    """The messages [begin, end) of n that an entry names."""
    if type(entry) is int:
        if not -n <= entry < n:
            found = reprlib.repr(entry)
            raise refusal(where, f"expected {-n} to {n - 1} of the {n} messages that there are, found {found}")
        begin = entry % n
        return begin, begin + 1
    if type(entry) is list and len(entry) == 2 and type(entry[0]) is int and type(entry[1]) in (int, type(None)):
        begin, end = (n if at is None else at + n if at < 0 else at for at in entry)
        if 0 <= begin < end <= n:
            return begin, end
        raise refusal(where, f"expected [from, to) of the {n} messages that there are, from < to")
    raise refusal(where, "expected a message's number, negative from the end, [from, to), or 'system'")
