"""JSON from outside: what it would become is counted before it is read, in a whole body with the JSON in its strings.

Reading keeps the interpreter's lock for as long as it takes, and so does whatever handles the objects at once:
pickling, writing them as JSON again, giving them up. So there is a limit of objects, not of bytes alone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

from engine.ground.errors import RequestError

MAX_DEPTH = 64
MAX_CONTAINERS = 1 << 16  # lists and objects of one body
MAX_VALUES = 1 << 19  # beside the tokens of a prompt
MAX_READ_VALUES = 3 << 19  # with them: 2^20 tokens, and half as much
_SLICE = 1 << 20
_TOO_DEEP = f"the body is nested more than {MAX_DEPTH} levels deep"

_counted: ContextVar[list[int] | None] = ContextVar("counted", default=None)  # containers and values so far


@contextlib.contextmanager
def one_body(containers: int = 0, values: int = 0) -> Iterator[None]:
    """Have everything that is read within count as one body, which refers to so much elsewhere."""
    before = _counted.set([containers, values])
    try:
        yield
    finally:
        _counted.reset(before)


def parse_object(body: bytes) -> dict[str, Any]:
    """Read a body as a JSON object of bounded depth and contents; raises RequestError."""
    containers = values = 0
    before = _counted.get() or (0, 0)
    if len(body) + before[1] > MAX_CONTAINERS:  # a byte opens no more than one
        containers, values = count(body)
        _refuse(before[0] + containers, before[1] + values, MAX_READ_VALUES)
    try:
        # Text of models and users may hold halves of surrogate pairs, in UTF-8 too.
        text = body.decode("utf-8-sig", "surrogatepass")
        made = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise RequestError(_TOO_DEEP) from None
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {_without_text(error)}") from None
    if type(made) is not dict:
        raise RequestError("the body is not a JSON object")
    if too_deep(made):
        raise RequestError(_TOO_DEEP)
    values = max(0, values - _tokens(made.get("prompt")))
    _refuse(before[0] + containers, before[1] + values, MAX_VALUES)
    _charge(containers, values)
    return made


def parse_string(text: str) -> Any:
    """Read the JSON in a string of a body, None for what is none or too deep; raises RequestError for too much."""
    so_far = _counted.get() or (0, 0)
    containers, values = count(text.encode("utf-8", "surrogatepass"))
    _refuse(so_far[0] + containers, so_far[1] + values, MAX_VALUES, ", with the calls' arguments")
    try:
        made = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    _charge(containers, values)
    return None if type(made) is dict and too_deep(made) else made


def _refuse(containers: int, values: int, most_values: int, what: str = "") -> None:
    if containers > MAX_CONTAINERS:
        raise RequestError(f"the body's JSON{what} has {containers} lists and objects; the limit is {MAX_CONTAINERS}")
    if values > most_values:
        raise RequestError(f"the body's JSON{what} has {values} values; the limit is {most_values}")


def _charge(containers: int, values: int) -> None:
    so_far = _counted.get()
    if so_far is not None:
        so_far[0] += containers
        so_far[1] += values


def _tokens(prompt: Any) -> int:
    """How many numbers a prompt, or a list of prompts, has."""
    if type(prompt) is not list:
        return 0
    return sum(len(one) if type(one) is list else type(one) is int for one in prompt)


def count(body: bytes) -> tuple[int, int]:
    """Lists and objects of a JSON text, and values: what follows `[`, `{`, `,` or `:`, keys too.

    Of a text that is not JSON: at least as many as come before the place where that shows.
    """
    # An escaped backslash escapes nothing, and an escaped quote ends nothing; backslashes are in strings alone.
    if b"\\" in body:
        body = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    containers = values = 0
    inside = np.uint8(0)  # a string, at the beginning of the slice
    for at in range(0, len(body), _SLICE):
        piece = np.frombuffer(body, np.uint8, min(_SLICE, len(body) - at), at)
        quotes = (piece == ord('"')).view(np.uint8)
        shut = (np.bitwise_xor.accumulate(quotes) ^ inside) == 0
        inside ^= np.bitwise_xor.reduce(quotes)
        opened = int(np.count_nonzero(((piece == ord("[")) | (piece == ord("{"))) & shut))
        containers += opened
        values += opened + int(np.count_nonzero(((piece == ord(",")) | (piece == ord(":"))) & shut))
    return containers, values


def too_deep(made: dict[str, Any]) -> bool:
    """Whether lists and objects are nested more than MAX_DEPTH levels deep: what walks them calls itself for each."""
    level: list[Any] = [made]
    for _ in range(MAX_DEPTH):
        level = [
            inner for value in level for inner in (value.values() if type(value) is dict else value)
            if type(inner) is dict or type(inner) is list
        ]  # fmt: skip
    return bool(level)


class _NumberError(ValueError):
    """What is no number, in words of ours."""


def _without_text(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at character {error.pos}"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return f"{error}" if isinstance(error, _NumberError) else "an integer has too many digits"  # Python's own limit


def _no_number(name: str) -> None:
    raise _NumberError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise _NumberError("a number is too large")
    return value
