"""Redaction: secrets in session text become `[REDACTED:kind]`.

Tokens of a known shape (API keys with a vendor's prefix, JSON web tokens) are replaced wherever they stand
(`secret_tokens.py`); by their place passwords in URLs, headers, commands and files of a known form (`secret_places.py`)
and values given to a name such as `password`, `token` or `api_key` (`secret_names.py`). The same text always gives the
same result, and redacting twice is redacting once: finders run until they find nothing, and none takes a placeholder.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, count
from typing import Any

from spark.extract.secret_names import is_auth, is_secret, kind_of, names_no_secret, secret_name
from spark.extract.secret_places import find_by_place
from spark.extract.secret_tokens import Secret, find_tokens, one_byte_each


def redact(text: str, found: Counter[str] | None = None) -> str:
    """The text with every secret replaced by `[REDACTED:kind]`; `found` counts replacements by kind."""
    while secrets := _secrets(text):
        text = _without(text, secrets, found)
    return text


def _without(text: str, secrets: Sequence[Secret], found: Counter[str] | None) -> str:
    """The text with placeholders for secrets that are in order."""
    pieces, done = list[str](), 0
    for begin, end, kind in secrets:
        if begin >= done:  # of overlapping ones the first; what is left of the others is found next time
            pieces += [text[done:begin], _placeholder(kind)]
            done = end
            if found is not None:
                found[kind] += 1
    return "".join(pieces) + text[done:]


def _secrets(text: str) -> list[Secret]:
    """The secrets in `text` in order, but for what would cut a placeholder in two or is nothing else.

    So every round leaves fewer characters that are not a placeholder's: the rounds end, whatever the finders find.
    """
    data = one_byte_each(text)
    secrets = sorted(find_tokens(text, data) + find_by_place(text, data))
    if not secrets or "[REDACTED:" not in text:
        return secrets
    placeholders = [match.span() for match in _PLACEHOLDER.finditer(text)]
    starts = [start for start, _ in placeholders]

    def inside(at: int) -> bool:
        index = bisect_left(starts, at) - 1
        return index >= 0 and at < placeholders[index][1]

    return [
        secret
        for secret in secrets
        if not inside(secret.begin) and not inside(secret.end) and _PLACEHOLDER.sub("", text[secret.begin : secret.end])
    ]


_PLACEHOLDER = re.compile(r"\[REDACTED:[a-z-]{1,30}\]")


def redact_value(value: Any, found: Counter[str] | None = None) -> Any:
    """A JSON value with its strings redacted, keys too; those under a key such as `password` by that key.

    Strings of a list are read as the words of a command, and `{"name": "PASSWORD", "value": ...}` as that name's value.
    """
    if isinstance(value, str):
        return redact(value, found)
    if isinstance(value, list):
        return [redact_value(item, found) for item in _redact_words(value, found)]
    if isinstance(value, dict):
        return _redact_object(value, found)
    return value


def _redact_words(words: list[Any], found: Counter[str] | None) -> list[Any]:
    """A list of strings without what the ones before give away, as `--password` does."""
    if len(words) < 2 or not all(isinstance(word, str) for word in words):
        return words
    while True:
        ends = list(accumulate(len(word) + 1 for word in words))
        inside: dict[int, list[Secret]] = {}
        for secret in _secrets(" ".join(words)):
            i = bisect_right(ends, secret.begin)
            if secret.end < ends[i]:  # none that goes on in the next one
                inside.setdefault(i, []).append(secret)
        if not inside:
            return words
        words = list(words)
        for i, secrets in inside.items():
            begin = ends[i] - len(words[i]) - 1
            words[i] = _without(words[i], [Secret(s.begin - begin, s.end - begin, s.kind) for s in secrets], found)


def _redact_object(value: dict[str, Any], found: Counter[str] | None) -> dict[str, Any]:
    names, values = ([key for key in value if key.lower() in of] for of in (_NAMES, _VALUES))
    named = value[names[0]] if len(names) == len(values) == 1 else None
    made: dict[str, Any] = {}
    for key, item in value.items():
        by = named if isinstance(named, str) and key == values[0] else key
        known = shown = key if len(key) <= _KEY_LENGTH and _is_plain(key) else redact(key, found)
        for n in count(2):  # two keys that were secrets are two keys still
            if known not in made:
                break
            known = f"{shown} {n}"
        made[known] = _redact_entry(by, item, found)
    return made


_NAMES = frozenset({"name", "key", "variable", "header"})
_VALUES = frozenset({"value", "val"})
_HEADER = re.compile(r"(?i)(?:cookie|^(?:proxy-)?authorization)$")


_KEY_LENGTH = 64  # of keys that are remembered: an object's are few and come again and again


def _read_key(key: str) -> tuple[str | None, bool]:
    """What makes a key that of a secret, or nothing, and whether it is a header's."""
    return secret_name(key), _HEADER.search(key) is not None


_key_kind = lru_cache(maxsize=1024)(_read_key)


@lru_cache(maxsize=1024)
def _is_plain(key: str) -> bool:
    """Whether a key is no secret itself."""
    return not _secrets(key)


def _redact_entry(key: str, value: Any, found: Counter[str] | None) -> Any:
    if isinstance(value, list) and _HEADER.search(key):
        return [_redact_entry(key, item, found) for item in value]
    if isinstance(value, str):
        name, header = _key_kind(key) if len(key) <= _KEY_LENGTH else _read_key(key)
        if (
            name
            and not names_no_secret(key, value)
            and (is_auth(value) if name.lower() == "auth" else _is_secret(name, value))
        ):
            if found is not None:
                found[kind_of(name)] += 1
            return _placeholder(kind_of(name))
        if header:
            return redact(f"{key}: {value}", found).removeprefix(f"{key}: ")
    return redact_value(value, found)


def _is_secret(name: str, value: str) -> bool:
    return is_secret(kind_of(name), value, quoted=True)


def _placeholder(kind: str) -> str:
    return f"[REDACTED:{kind}]"
