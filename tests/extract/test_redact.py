"""Redaction: planted secrets go, code stays, and redacting twice is redacting once."""

from __future__ import annotations

import ast
import json
import string
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from spark.extract.redact import redact, redact_value

LETTERS = string.ascii_letters + string.digits
BASE64 = LETTERS + "+/"
URL64 = LETTERS + "-_"


def drawn(alphabet: str, size: int, most: int | None = None) -> st.SearchStrategy[str]:
    """Characters drawn at random, with digits, capitals and small letters among them as in any real key."""
    body = st.text(alphabet, min_size=size, max_size=most or size)
    return body.filter(
        lambda s: (
            sum(c.isdigit() for c in s) >= 4
            and (not set(string.ascii_uppercase) & set(alphabet) or s.lower() != s)
            and (not set(string.ascii_lowercase) & set(alphabet) or s.upper() != s)
        )
    )


def prefixed(prefix: str, alphabet: str, size: int, most: int | None = None) -> st.SearchStrategy[str]:
    return drawn(alphabet, size, most).map(lambda body: prefix + body)


HEX = "0123456789abcdef"
# Keys that are replaced wherever they stand, by the kind that the placeholder names.
SHAPES = {
    "anthropic-key": prefixed("sk-ant-api03-", URL64, 24, 90),
    "api-key": st.one_of(
        prefixed("sk-", LETTERS, 40, 48),
        prefixed("sk-proj-", URL64, 40, 120),
        prefixed("sk-or-v1-", HEX, 64),
        prefixed("gsk_", LETTERS, 52),
        prefixed("xai-", LETTERS, 60),
        prefixed("r8_", LETTERS, 37),
        prefixed("dop_v1_", HEX, 64),
        prefixed("shpat_", HEX, 32),
        prefixed("dapi", HEX, 32),
        prefixed("hvs.", URL64, 24, 90),
        st.tuples(drawn(LETTERS, 22), drawn(LETTERS, 43)).map(lambda pair: f"SG.{pair[0]}.{pair[1]}"),
    ),
    "github-token": st.one_of(
        *(prefixed(f"gh{kind}_", LETTERS, 36) for kind in "pousr"), prefixed("github_pat_", LETTERS + "_", 60)
    ),
    "gitlab-token": prefixed("glpat-", URL64, 20),
    "slack-token": prefixed("xoxb-", LETTERS + "-", 40),
    "aws-key-id": st.one_of(prefixed("AKIA", "ABCXYZ0123", 16), prefixed("ASIA", "ABC234567", 16)),
    "google-key": prefixed("AIza", URL64, 35),
    "stripe-key": st.one_of(prefixed("sk_live_", LETTERS, 24), prefixed("rk_test_", LETTERS, 24)),
    "huggingface-token": prefixed("hf_", LETTERS, 34),
    "registry-token": st.one_of(prefixed("npm_", LETTERS, 36), prefixed("pypi-AgEIcHlwaS5vcmc", URL64, 60)),
    "telegram-token": drawn(URL64, 33).map(lambda s: f"123456789:AA{s}"),
    "jwt": st.tuples(drawn(URL64, 20), drawn(URL64, 40), drawn(URL64, 43)).map(lambda t: "eyJ" + ".".join(t)),
}  # fmt: skip
PLACES = (
    "{}",
    "export KEY={}\n",
    'client = Client("{}")',
    "curl -H 'x-auth: {}' https://example.org/",
    '{{"value": "{}", "n": 1}}',
    "line before\n     7→{}\nline after",
    "see {}, then go on",
)


@pytest.mark.parametrize("kind", SHAPES)
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_key_of_a_known_shape_never_gets_through(kind: str, data: st.DataObject) -> None:
    secret = data.draw(SHAPES[kind])
    text = data.draw(st.sampled_from(PLACES)).format(secret)
    redacted = redact(text)
    assert secret[-12:] not in redacted
    assert "[REDACTED:" in redacted
    assert redact(redacted) == redacted


SECRETS = drawn(LETTERS + "!@%^*+-_/~", 12, 40).filter(lambda s: s[0] in LETTERS)
WORDS = drawn(LETTERS, 12, 30)
# Values replaced for where they stand; None: any characters may follow.
POSITIONS = (
    ('password = "{}"', SECRETS),
    ("passwd: '{}'\n", SECRETS),
    ('{{"password": "{}"}}', SECRETS),
    ('{{\\"api_key\\": \\"{}\\"}}', SECRETS),
    ("DB_PASSWORD={}\nDB_HOST=x", WORDS),
    ("export GITHUB_TOKEN={}", WORDS),
    ("apiKey: '{}',", SECRETS),
    ("x-api-key: {}\r\n", WORDS),
    ("aws_secret_access_key = {}\n", drawn(BASE64, 40).filter(lambda s: s[0] in LETTERS)),
    ("https://api.example.org/v1?page=2&access_token={}&x=1", WORDS),
    ("mysql --password {} --host db", WORDS),
    ("<secret>{}</secret>", WORDS),
    ("postgres://app:{}@db.example.org:5432/app", WORDS),
    ("curl -s -u admin:{} https://example.org", WORDS),
    ("Authorization: Bearer {}", drawn(URL64, 20, 60)),
    ("'Authorization': 'Basic {}=='", drawn(LETTERS, 22)),
    ("secret='{}'", SECRETS),
    ("client_secret={}\n", WORDS),
    ("https://hooks.slack.com/services/T0A/B0B/{}", drawn(LETTERS, 24)),
)


@pytest.mark.parametrize("position", range(len(POSITIONS)))
@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_secret_never_gets_through_where_its_name_is(position: int, data: st.DataObject) -> None:
    place, strategy = POSITIONS[position]
    secret = data.draw(strategy)
    redacted = redact(place.format(secret))
    assert secret not in redacted
    assert "[REDACTED:" in redacted
    assert redact(redacted) == redacted


# What may begin a host: a letter of either case or of another alphabet, a digit, an underscore, an IPv6 address, Go's
# form of a TCP address.
HOSTS = st.one_of(
    st.tuples(
        st.sampled_from([*string.ascii_letters, *string.digits, "_", "é", "數"]),
        st.text(LETTERS + "-", max_size=12),
        st.sampled_from(["", ".internal", ".0.0.5", ".Example.ORG"]),
    ).map("".join),
    st.sampled_from(["[::1]", "[2001:db8::7]", "tcp(10.0.0.7)", "10.20.0.5"]),
)


@pytest.mark.slow
@given(
    scheme=st.sampled_from(["postgres", "https", "mongodb+srv", "redis", "S3", "jdbc:mysql"]),
    user=st.sampled_from(["", "app", "App.User-1", "a%40b", "7"]),
    password=st.text(LETTERS + "!%^*+-_~.,;=#?/:@", min_size=1, max_size=199).map(lambda s: "x" + s.rstrip("@") + "9"),
    host=HOSTS,
    rest=st.sampled_from(["", ":5432/app", "/x?y=1", ", then", '"', "'", "\n"]),
)
@settings(max_examples=400, deadline=None)
def test_a_password_before_any_host_goes(scheme: str, user: str, password: str, host: str, rest: str) -> None:
    assume("://" not in password)
    assert (
        redact(f"{scheme}://{user}:{password}@{host}{rest}")
        == f"{scheme}://{user}:[REDACTED:url-password]@{host}{rest}"
    )


@given(
    drawn(URL64, 20, 60),
    HOSTS.filter(lambda host: not host.startswith("tcp")),
    st.sampled_from(["", ":", ":x-oauth-basic"]),
)
@settings(deadline=None)
def test_a_key_in_the_place_of_a_user_goes(key: str, host: str, password: str) -> None:
    assert key not in redact(f"git clone https://{key}{password}@{host}/acme/app.git")


@given(
    drawn(BASE64, 64 * 6), st.sampled_from(["RSA PRIVATE KEY", "PRIVATE KEY", "OPENSSH PRIVATE KEY"]), st.integers(0, 3)
)
@settings(deadline=None)
def test_private_keys_never_get_through(key: str, name: str, form: int) -> None:
    lines = [key[i : i + 64] for i in range(0, len(key), 64)]
    text = "\n".join([f"-----BEGIN {name}-----", *lines, f"-----END {name}-----", "after"])
    if form == 1:
        text = json.dumps(text)
    elif form == 2:
        text = "\n".join(f"{n:6}→{line}" for n, line in enumerate(text.split("\n"), 1))
    elif form == 3:
        text = text[: text.index("-----END") - 30] + "\n... cut"
    redacted = redact(text)
    assert not any(line[:20] in redacted for line in lines)
    assert f"BEGIN {name}-----[REDACTED:private-key]" in redacted
    assert redacted.endswith(("after", 'after"', "cut"))
    assert redact(redacted) == redacted


PIECES = """\
sk- ghp_ AKIA eyJ :// : @ " token = PRIVATE KEY----- -----BEGIN -----END [REDACTED:password] Bearer <password> </
curl -u a: password --token {} $X \\ İ Ab3Ab3Ab3Ab3Ab3Ab3Ab3Ab3 99999999999999999999"""
fragments = st.sampled_from(
    ["\n", " ", *PIECES.split(), *(place.format("S3cretS3cretS3cret99") for place, _ in POSITIONS)]
)


@pytest.mark.slow
@given(st.lists(fragments | st.text(max_size=5), max_size=12).map("".join))
@settings(max_examples=500, deadline=None)
@example("password=[REDACTED:password]")
@example("https://u:[REDACTED:url-password]@h")
def test_redacting_twice_is_redacting_once(text: str) -> None:
    once = redact(text)
    assert redact(once) == once
    found: Counter[str] = Counter()
    assert redact(once, found) == once
    assert not found


CODE = """\
token = next(tokens)
token: str = "identifier"
tokens = tokenize(source); max_tokens = 4096; n_tokens=12
def login(user, password=None, *, token: str | None = None): ...
connect(user=user, password=password, secret=self.secret_2)
password = getpass.getpass("Password: ")
password = os.environ["DB_PASSWORD"]
api_key=settings.api_key_v2, token=get_token()
if token == "->": return parse_token(token)
url = "https://user:{password}@example.org"; other = f"redis://:{pw}@{host}"
git clone https://github.com/python/cpython.git; ssh git@github.com:python/cpython
http://localhost:8080/path@2
sorted(x, key=lambda v: v.key, reverse=True); key="name"
{"type": "password", "label": "Enter your password", "required": true}
PWD=/home/dev/project1
sk-learn-model-selection-cross-validation
the secret: use a smaller batch; password: required
--token-count 12 --password-file /run/secrets/db1
"-----BEGIN PRIVATE KEY-----" in text
Basic authentication; bearer of bad news
Authorization: Bearer <token>
sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
commit 3a9d1d29f1c2b4e5d6a7b8c9d0e1f2a3b4c5d6e7
"""


@pytest.mark.parametrize("line", CODE.splitlines())
def test_ordinary_code_stays(line: str) -> None:
    assert redact(line) == line


def test_the_standard_library_stays_but_for_its_passwords() -> None:
    found: Counter[str] = Counter()
    for path in sorted(Path(ast.__file__).parent.glob("*.py")):
        redact(path.read_text("utf-8"), found)
    # Where it has examples: a proxy with a password in urllib's comments and the like; no other kind.
    assert set(found) <= {"password", "url-password"}
    assert found.total() <= 10


def test_values_go_by_their_keys() -> None:
    value = {"password": "swordfish", "x": [{"api_key": "abcd1234efgh", "n": 5}, "hf_" + "aB3" * 12], "token": None}
    found: Counter[str] = Counter()
    redacted = redact_value(value, found)
    assert redacted == {
        "password": "[REDACTED:password]",
        "x": [{"api_key": "[REDACTED:secret]", "n": 5}, "[REDACTED:huggingface-token]"],
        "token": None,
    }
    assert found == {"password": 1, "secret": 1, "huggingface-token": 1}
    assert redact_value(redacted) == redacted


def test_one_letter_changes_its_length_when_lowered() -> None:
    """The finders look for names in the lowered text and match in the original one: places must agree."""
    longer = [chr(c) for c in range(sys.maxunicode + 1) if len(chr(c).lower()) != 1]
    assert longer == ["İ"]
    assert redact('İİİ password="hunter2"') == 'İİİ password="[REDACTED:password]"'


@pytest.mark.parametrize(
    "text",
    [
        "eyJ-" * 20_000,
        "-----BEGIN PRIVATE KEY-----" * 3_000,
        "://" * 30_000,
        "://a:" * 20_000,
        "token token= " * 10_000,
        "curl " * 20_000,
        "key" * 40_000,
        "sk-" * 40_000,
        "a" * 200_000 + "=",
        "password='" * 10_000,
        "{" * 400 + "password=" + "{" * 400,
    ],
)
def test_hostile_text_takes_no_longer(text: str) -> None:
    started = time.process_time()
    redact(text)
    assert time.process_time() - started < 5
