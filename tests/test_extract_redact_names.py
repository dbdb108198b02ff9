"""Redaction by name: values with quotes and punctuation in them go whole; what only resembles them stays."""

from __future__ import annotations

import json

import pytest

from spark.extract.redact import redact


def forms(text: str) -> list[str]:
    """A text as it is, in other text, in JSON and in JSON within JSON."""
    return [text, f"1\tx\n{text}\ny", json.dumps({"o": text}), json.dumps({"o": json.dumps({"cmd": text})})]


def shows(secret: str, text: str) -> bool:
    """Whether more than three characters in a row of a secret are there."""
    return any(secret[i : i + 4] in text for i in range(len(secret) - 3))


def check_gone(text: str, secret: str) -> None:
    for form in forms(text):
        redacted = redact(form)
        assert not shows(secret, redacted), redacted
        assert "[REDACTED:" in redacted
        assert redact(redacted) == redacted
        if form[0] == "{" and text[0] != "{":
            json.loads(redacted)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ('{"password":"ab\\"cd9efgh"}', "cd9efgh"),
        ('password = "ab\\"cd9efgh"', "cd9efgh"),
        ('password = "ab9xyz\\\\", "after"', "ab9xyz"),
        ("password: 'it''s9secret'", "s9secret"),
        ('{"a": 1, "api_key": "k9\\\\\\"mm12345678", "b": 2}', "mm12345678"),
    ],
)
def test_a_quote_inside_a_quoted_value_does_not_end_it(text: str, secret: str) -> None:
    check_gone(text, secret)


def test_what_follows_a_quoted_value_stays() -> None:
    assert redact('f(password="ab\\"cd9", x="it")') == 'f(password="[REDACTED:password]", x="it")'
    assert redact('password = "ab9xyz\\\\"; y = "z"') == 'password = "[REDACTED:password]"; y = "z"'
    assert redact("x = {'password': 'ab9xyz', 'y': ''}") == "x = {'password': '[REDACTED:password]', 'y': ''}"
