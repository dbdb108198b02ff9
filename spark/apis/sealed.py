"""Reasoning that a client keeps without reading it, and sends back: the text itself, in base64 behind a mark."""

from __future__ import annotations

import base64
import binascii

_MARK = "spark1."


def seal(text: str) -> str:
    """Write reasoning as something that clients take for opaque."""
    return _MARK + base64.b64encode(text.encode(errors="replace")).decode()


def unseal(sealed: object) -> str:
    """The reasoning that was given out so; empty for anything else."""
    if type(sealed) is not str or not sealed.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(sealed[len(_MARK) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
