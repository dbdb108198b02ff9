"""Redaction by name: values with quotes and punctuation in them go whole; what only resembles them stays."""

from __future__ import annotations

import json

import pytest

from spark.extract.redact import redact, redact_value


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


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("DB_PASSWORD=Ab1(cd)9x", "Ab1(cd)9x"),
        ("db:\n  password: ab,cd&ef;12\n", "ab,cd&ef;12"),
        ("PASSWORD=aa1<bb>cc2", "aa1<bb>cc2"),
        ("export DB_PASSWORD=abc{9}x1", "abc{9}x1"),
        ("DB_PASSWORD=$ecret99x", "ecret99x"),
        ("password: Xk9#mm;zz|Q2", "Xk9#mm;zz|Q2"),
        ("- API_TOKEN=ab12[cd]34,ef56", "ab12[cd]34,ef56"),
        ("HOST=x\nDB_PASSWORD=Ab1(cd)9x\nUSER=y", "Ab1(cd)9x"),
        ("    12→DB_PASSWORD=Ab1(cd)9x", "Ab1(cd)9x"),
    ],
)
def test_the_value_of_a_setting_goes_to_the_end_of_its_line(text: str, secret: str) -> None:
    check_gone(text, secret)


SETTINGS_LIKE = """\
password=get_password()
password=get_password2(a)
password: get_password2(user),
PASSWORD=${VAR}
PASSWORD=${VAR2:-x}y
PASSWORD=$VAR_2
PASSWORD=<placeholder1>
password: <your-password-2>
password: f"{user2}:{x}"
password: {user2}_suffix
password: string[2];
password: Option<[u8;32]>,
password: Vec<u8>
secret_key: Option<[u8;32]>
password: z.string().min(8),
password: data[0].pass2
token: opts.token1||other
password: hash2(pw + salt)
password: {{ vault_pw2 }}
password: 8,16
PASSWORD_KEY=foo(bar2)
token: &[u8;16]
secret: Buffer.from([1,2,3,4,5])
const x = { password: ab,c2d }
TOKEN=$(cat x2)
password: (v1,v2)
secret: ['a1', 'b2']"""


@pytest.mark.parametrize("line", SETTINGS_LIKE.split("\n"))
def test_code_that_looks_like_a_setting_stays(line: str) -> None:
    for form in forms(line):
        assert redact(form) == form


@pytest.mark.parametrize(("name", "least"), [("password: ", 6), ("API_TOKEN=", 8), ("token: ", 12)])
def test_how_long_the_value_of_a_setting_is_at_least(name: str, least: int) -> None:
    """With characters in it at which a value in code would end."""
    for size in range(least - 2, least + 3):
        value = "a1;" + "x" * (size - 3)
        found = redact(f"{name}{value}")
        assert (value not in found) == (size >= least), found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ENV API_TOKEN abcd1234efgh", "ENV API_TOKEN [REDACTED:secret]"),
        ("ENV api_token abcd1234efgh", None),
        ("x API_TOKEN abcd1234efgh", None),
        ("--token abcd1234efgh5678", "--token [REDACTED:secret]"),
        ("--token\nabcd1234efgh5678", None),
        ("//registry.npmjs.org/:_password=somewords", "//registry.npmjs.org/:_password=[REDACTED:password]"),
        ("[client]\npassword=rootpw\n", "[client]\npassword=[REDACTED:password]\n"),
        ("[client]\npassword=rootpw;\n", None),
        ("x password=rootpw\n", None),
        ("\nPASSWORD=rootpw\n", "\nPASSWORD=[REDACTED:password]\n"),
        ("  PASSWORD=rootpw", "  PASSWORD=[REDACTED:password]"),
        ("f(PASSWORD=rootpw)", None),
        ("f(a,PASSWORD=rootpw,b)", None),
        ("PASSWORD=rootpw,", None),
    ],
)
def test_what_stands_around_a_name_decides(text: str, expected: str | None) -> None:
    assert redact(text) == (expected or text)


@pytest.mark.parametrize(
    ("place", "value", "goes"),
    [
        *(("Authorization: Bearer {}", "abcdefghij" * 3 + "abcdefghij"[: n - 30], n >= 40) for n in (39, 40)),
        ("x bearer {}", "abcdefghijabcdefghijabcdefghijabcdefghi", False),
        ("x bearer {}", "abcdefghijabcdefghijabcdefghijabcdefghij", True),
        ("Authorization: Bearer {}", "abcdefghijabcd7", False),
        ("Authorization: Bearer {}", "abcdefghijabcde7", True),
        ("Authorization: Bearer {}", "YOUR_ACCESS_TOKEN_HERE1", False),
        ("Authorization: Basic {}", "QWxhZGRpbjpvcGVu", True),
        ('password="{}"', "ab1", False),
        ('password="{}"', "abc1", True),
        ("token: {}", "abcdefghij12", False),
        ("token: {}", "abcdefghi123", True),
        ("token: {}", "abcdef-ghijk1", True),
        ("token: {}", "abcdef-ghijkl", False),
    ],
)
def test_values_at_the_bounds_of_what_is_a_secret(place: str, value: str, goes: bool) -> None:
    assert (value not in redact(place.format(value))) == goes


def test_kinds_and_names_of_stored_secrets() -> None:
    assert redact_value({"db_pass": "hunter22x"}) == {"db_pass": "[REDACTED:password]"}
    assert redact_value({"session_key": "user:42:prefs"}) == {"session_key": "user:42:prefs"}
    assert redact_value({"session_key": "user:42:Zk9fQ2mmX8vL"}) == {"session_key": "[REDACTED:secret]"}


def test_what_follows_a_setting_on_its_line_stays() -> None:
    assert redact("API_TOKEN=ab12;cd34ef56&&run it") == "API_TOKEN=[REDACTED:secret]&&run it"
    assert redact("PASSWORD=ab1;cd9&USER=bob") == "PASSWORD=[REDACTED:password]&USER=bob"


STAYS = [
    {"PWD": "/home/u1"},
    {"OLDPWD": "~/x2"},
    {"pageToken": "CAUQAA1234"},
    {"next_token": "abcd1234efgh"},
    {"page_token": "abcd1234efgh"},
    {"nextPageToken": "abcd1234efgh"},
    {"cursor": "abcd1234efgh"},
    {"session_key": "user:42:prefs"},
]


@pytest.mark.parametrize("value", STAYS, ids=str)
def test_names_like_a_secrets_whose_values_are_none(value: dict[str, str]) -> None:
    assert redact_value(value) == value
    for form in forms(json.dumps(value)):
        assert redact(form) == form


@pytest.mark.parametrize(
    "text",
    [
        "--page-token CAUQAA1234",
        "--page-token=CAUQAA1234",
        "--secret=projects/acme-1/secrets/db-pass/versions/1",
        "password = random_password.db.result",
        "token: 0.0012345678901",
        "password = hunter.two",
    ],
)
def test_text_that_is_all_of_a_string_is_no_header(text: str) -> None:
    for form in forms(text):
        assert redact(form) == form


def test_names_beside_those_still_name_secrets() -> None:
    assert redact('"DB_PWD": "/x9secret"') == '"DB_PWD": "[REDACTED:password]"'
    assert redact_value({"DB_PWD": "/x9secret"}) == {"DB_PWD": "[REDACTED:password]"}
    assert redact('{"refresh_token": "abcd1234efgh"}') == '{"refresh_token": "[REDACTED:secret]"}'
    assert redact("'X-Auth-Token: abcd1234efgh'") == "'X-Auth-Token: [REDACTED:secret]'"
    check_gone('MNEMONIC="test walk nut penalty hip pave soap entry language right filter choice"', "penalty hip")


HEX, WORD = "9f3c" * 10, "kw9Secr3tXyz"
COMMANDS = """\
CREATE USER 'app'@'%' IDENTIFIED BY '{w}';
ALTER ROLE app WITH PASSWORD '{w}';
ENV API_KEY {h}
set -x API_TOKEN {h}
AWS Secret Access Key [None]: {h}
AZURE_OPENAI_KEY: {h}
    DEPLOY_KEY: {h}
 psk="{w}"
echo "{w}" | docker login -u bob --password-stdin ghcr.io
wandb login {h}
gpg --batch --passphrase 'my long key 9x8y' -d f.gpg
openssl enc -aes-256-cbc -k {w} -in a
gh secret set PROD_TOKEN --body "{w}"
net use Z: //srv/share /user:corp/bob {w}"""


@pytest.mark.parametrize("line", COMMANDS.split("\n"))
def test_secrets_in_statements_and_commands_go(line: str) -> None:
    secret = WORD if "{w}" in line else HEX if "{h}" in line else "long key 9x8y"
    check_gone(line.format(w=WORD, h=HEX), secret)


@pytest.mark.parametrize(
    "line",
    [
        "ENV API_KEY ${API_KEY}",
        "IDENTIFIED BY '<password>'",
        "wandb login --relogin",
        "set -x PATH_KEY value",
        "echo $PASS | docker login --password-stdin",
        "gpg --passphrase-file key1",
        "curl -k https://example.org/a1",
        "ALTER ROLE app WITH PASSWORD '%s'",
    ],
)
def test_such_commands_without_a_secret_stay(line: str) -> None:
    for form in forms(line):
        assert redact(form) == form


def test_a_word_in_a_file_of_settings_is_a_password() -> None:
    """And in a call of a function, whose arguments have lines of their own, it is a variable."""
    settings = "[client]\n# mine\nuser=root\npassword=rootpw\nhost=x\n"
    assert redact(settings) == settings.replace("rootpw", "[REDACTED:password]")
    for code in ("f(\nuser=root\npassword=rootpw\n)", "[a]\nf(x,\npassword=rootpw\n)", "[client]\npassword=none\n"):
        assert redact(code) == code


def test_the_keys_of_accounts_go() -> None:
    check_gone(f"accounts: ['0x{HEX[:32] * 2}']", HEX[:32] * 2)
    assert redact("accounts: ['0xabc', 'x']") == "accounts: ['0xabc', 'x']"
