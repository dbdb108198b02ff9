"""Redaction measured on the set of secrets and decoys (`redaction_cases.py`)."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark.extract import secret_places, secret_tokens
from spark.extract.redact import redact, redact_value
from tests.redaction_cases import Case, leaks, load

SECRETS, DECOYS = load("secrets"), load("decoys")


@pytest.mark.parametrize(("cases", "least", "published"), [(SECRETS, 150, 100), (DECOYS, 120, 40)])
def test_the_set_is_large_and_split_in_half(cases: list[Case], least: int, published: int) -> None:
    assert len(cases) >= least
    assert len({case.text for case in cases}) == len(cases)
    assert 0.4 < sum(case.aside for case in cases) / len(cases) < 0.6
    assert all(bool(case.secrets) == (cases is SECRETS) for case in cases)
    assert sum(case.source != "own" for case in cases) >= published


def test_the_set_is_the_same_everywhere() -> None:
    """What is drawn depends on the text alone, so that the halves and the scores are those of any machine."""
    (case,) = (case for case in SECRETS if case.source == "gitleaks pulumi.go")
    assert case.secrets[0].startswith("pul-68733a14")


@pytest.mark.parametrize("halves", [(False, True), (True,)], ids=["all", "kept aside"])
def test_secrets_go_and_decoys_stay(halves: tuple[bool, ...]) -> None:
    """At least 97% of the secrets go, all parts of each; at most 2.5% of the decoys are touched."""
    secrets = [case for case in SECRETS if case.aside in halves]
    decoys = [case for case in DECOYS if case.aside in halves]
    total = Counter(case.kind for case in secrets)
    missed = Counter(case.kind for case in secrets if leaks(case, redact(case.text)))
    touched = Counter(case.kind for case in decoys if redact(case.text) != case.text)
    recall = {kind: f"{total[kind] - missed[kind]}/{total[kind]}" for kind in total}
    assert missed.total() <= 0.03 * len(secrets), recall
    assert touched.total() <= 0.025 * len(decoys), touched


def test_no_case_that_went_stays() -> None:
    """A share that may stay hides that a rule is gone: these stay, of which no rule is known, and no others."""
    stayed = [case.source for case in SECRETS if leaks(case, redact(case.text))]
    assert sorted(stayed) == [
        "Ansible documentation, connection variables",
        "Kubernetes documentation, organizing cluster access",
        "gitleaks sonar.go",
    ]
    assert [case.source for case in DECOYS if redact(case.text) != case.text] == []


def test_redacting_a_case_twice_is_redacting_it_once() -> None:
    for case in SECRETS + DECOYS:
        once = redact(case.text)
        assert redact(once) == once
        assert redact(f"{once}\n{once}") == f"{once}\n{once}"


@pytest.mark.parametrize("depth", [1, 2])
def test_json_stays_json(depth: int) -> None:
    """Text within JSON, and JSON within that: what was a string of an object still is, and the rest is as it was."""
    for case in SECRETS:
        block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": case.text, "is_error": False}
        text = json.dumps(block) if depth == 1 else json.dumps({"output": json.dumps(block)})
        redacted = json.loads(redact(text))
        inner = redacted if depth == 1 else json.loads(redacted["output"])
        assert {**inner, "content": ""} == {**block, "content": ""}
        value = redact_value(block)
        assert {**value, "content": ""} == {**block, "content": ""}
        assert not leaks(case, value["content"]) or leaks(case, redact(case.text))


def test_headers_go_by_their_keys() -> None:
    token = "77c5057f2ef954a4" + "9a02d08f2b263964d094bacc"
    value = {"Authorization": f"token {token}", "set-cookie": [f"sid={token}; Path=/"], "Accept": "*/*"}
    found: Counter[str] = Counter()
    redacted = redact_value(value, found)
    assert redacted == {
        "Authorization": "token [REDACTED:authorization]",
        "set-cookie": ["sid=[REDACTED:cookie]; Path=/"],
        "Accept": "*/*",
    }
    assert found == {"authorization": 1, "cookie": 1}
    assert redact_value(redacted) == redacted


def test_arguments_go_by_what_stands_before_them() -> None:
    """The words of a command, a variable's name and value, and keys that are secrets, as in the same JSON as text."""
    tokens = ["ghp_" + 9 * "a1B2", "ghp_" + 9 * "b1B2"]
    value = {
        "command": ["mysql", "--password", "hunter2Xq9zT41", "-h", "db"],
        "argv": ["curl", "-u", "me:Xq9zT41hunter2", "https://x.example/token", "reset"],
        "env": [{"name": "DB_PASSWORD", "value": "hunter2Xq9zT41"}, {"name": "PATH", "value": "/usr/bin"}],
        "headers": [{"key": "Authorization", "value": f"token {'77c5057f2ef954a4' + '9a02d08f2b263964d094bacc'}"}],
        tokens[0]: "x",
        tokens[1]: ["password reset", "is", "fine"],
    }
    found: Counter[str] = Counter()
    redacted = redact_value(value, found)
    assert redacted == {
        "command": ["mysql", "--password", "[REDACTED:password]", "-h", "db"],
        "argv": ["curl", "-u", "me:[REDACTED:authorization]", "https://x.example/token", "reset"],
        "env": [{"name": "DB_PASSWORD", "value": "[REDACTED:password]"}, {"name": "PATH", "value": "/usr/bin"}],
        "headers": [{"key": "Authorization", "value": "token [REDACTED:authorization]"}],
        "[REDACTED:github-token]": "x",
        "[REDACTED:github-token] 2": ["password reset", "is", "fine"],
    }
    assert found == {"password": 2, "authorization": 2, "github-token": 2}
    assert redact_value(redacted) == redacted


@given(st.lists(st.one_of(st.sampled_from([case.text for case in SECRETS]), st.text(max_size=12)), max_size=6))
def test_a_list_is_redacted_once(words: list[str]) -> None:
    once = redact_value(words)
    assert len(once) == len(words) and redact_value(once) == once
    for word, shown in zip(words, once, strict=True):
        assert shown == word or "[REDACTED:" in shown


LITERALS = sorted(
    {literal for literal, _ in (*secret_places._EXACT, *secret_places._FOLDED)}
    | {prefix for _, prefixes, _, _ in (*secret_tokens._PREFIXED, *secret_tokens._SOLID) for prefix in prefixes.split()}
)


@pytest.mark.slow
@pytest.mark.parametrize("fill", ["", "a", "A1", " ", "x=", '":"', "\n "])
def test_no_rule_is_slower_on_longer_text(fill: str) -> None:
    """Each rule's literal over and over: four times the text takes about four times the time, not sixteen times."""
    for literal in LITERALS:
        short, long = (seconds(literal + fill, size) for size in (5_000, 20_000))
        if long > 10 * short + 0.02:  # and then once more at 200 KB, where noise is small
            assert seconds(literal + fill, 200_000) < 8 * seconds(literal + fill, 50_000) + 0.1, literal


@pytest.mark.parametrize("option", [" -p", " -a", " -w", " -b"])
def test_an_option_far_from_any_command_is_not_looked_at_closely(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    """Patterns are tried where one of their commands' words is near: 50 KB of options took over a second without."""
    read: list[int] = []

    def line_before(text: str, at: int) -> str:
        read.append(at)
        return text[:at]

    monkeypatch.setattr(secret_places, "_line_before", line_before)
    redact((option + "x ") * 10_000)
    assert not read


COMMANDS = (
    "mysqldump|MARIADB-dump|my\N{LATIN SMALL LETTER LONG S}ql|7za|unrar|sshpass|docker login|podman  login|az login"
    "|oc login|cf login|registry login|twine upload|mongodump|sqlcmd|bcp|xfreerdp|ipmitool"
)


@pytest.mark.parametrize("command", COMMANDS.split("|"))
def test_every_command_with_a_password_option_has_its_word(command: str) -> None:
    assert any("hunter" not in redact(f"{command} -p{gap}hunter22xyz") for gap in ("", " "))


def test_letters_that_become_ascii_when_they_are_lowered_count_as_such() -> None:
    """Literals are looked for in a byte a character: those two letters of all are what their small one is."""
    lowered = [c for c in map(chr, range(0x80, 0x110000)) if any(s.isascii() for s in c.lower())]
    assert lowered == ["\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}", "\N{KELVIN SIGN}"]
    assert secret_tokens.one_byte_each("".join(lowered) + "é€🎉").lower() == b"ik\xe9??"
    assert (
        redact("to\N{KELVIN SIGN}en = 'a8f5f167f44f4964e6c998dee827110c'")
        == "to\N{KELVIN SIGN}en = '[REDACTED:secret]'"
    )


def seconds(unit: str, size: int) -> float:
    text = unit * (size // len(unit))
    started = time.process_time()
    redact(text)
    return time.process_time() - started
