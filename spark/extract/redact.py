"""Redaction: secrets in session text become `[REDACTED:kind]`.

Tokens of a known shape (API keys with a vendor's prefix, JSON web tokens) are replaced wherever they stand
(`secret_tokens.py`); by their place passwords in URLs, headers, commands and files of a known form (`secret_places.py`)
and values given to a name such as `password`, `token` or `api_key` (`secret_names.py`). The same text always gives the
same result, and redacting twice is redacting once: finders run until they find nothing, and none takes a placeholder.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from functools import lru_cache
from typing import Any

from spark.extract.secret_names import is_auth, is_secret, kind_of, names_no_secret, secret_name
from spark.extract.secret_places import find_by_place
from spark.extract.secret_tokens import Secret, find_tokens, one_byte_each


def redact(text: str, found: Counter[str] | None = None) -> str:
    """The text with every secret replaced by `[REDACTED:kind]`; `found` counts replacements by kind."""
    while secrets := _secrets(text):
        pieces, done = [], 0
        for begin, end, kind in secrets:
            if begin >= done:  # of overlapping ones the first; what is left of the others is found next time
                pieces += [text[done:begin], _placeholder(kind)]
                done = end
                if found is not None:
                    found[kind] += 1
        text = "".join(pieces) + text[done:]
    return text


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
    """A JSON value with its strings redacted, those under a key such as `password` by that key."""
    if isinstance(value, str):
        return redact(value, found)
    if isinstance(value, list):
        return [redact_value(item, found) for item in value]
    if isinstance(value, dict):
        return {key: _redact_entry(key, item, found) for key, item in value.items()}
    return value


_HEADER = re.compile(r"(?i)(?:cookie|^(?:proxy-)?authorization)$")


_KEY_LENGTH = 64  # of keys that are remembered: an object's are few and come again and again


def _read_key(key: str) -> tuple[str | None, bool]:
    """What makes a key that of a secret, or nothing, and whether it is a header's."""
    return secret_name(key), _HEADER.search(key) is not None


_key_kind = lru_cache(maxsize=1024)(_read_key)


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
