"""Redaction: secrets in session text become `[REDACTED:kind]`.

Known shapes (API keys with a vendor's prefix, AWS keys, JSON web tokens, private keys) are replaced
wherever they stand. Passwords in URLs, authorization headers and values given to a name such as
`password`, `token` or `api_key` are replaced by position, if the value looks like a secret: code is full
of `token = next(tokens)` and `password: str`, which stay. The same text always gives the same result,
and redacting twice is redacting once: finders run until they find nothing, and none takes a placeholder.

Most texts hold no secret, so the finders start from literals that `str.find` looks for (or, for keys of
the form prefix, separator, 16 characters, from the separators) and try a pattern only there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Secret(NamedTuple):
    """Characters `begin` to `end` of a text are a secret of this kind."""

    begin: int
    end: int
    kind: str


def redact(text: str, found: Counter[str] | None = None) -> str:
    """The text with every secret replaced by `[REDACTED:kind]`; `found` counts replacements by kind."""
    while secrets := sorted(_find(text)):
        pieces, done = [], 0
        for begin, end, kind in secrets:
            if begin >= done:  # of overlapping ones the first; what is left of the others is found next time
                pieces += [text[done:begin], _placeholder(kind)]
                done = end
                if found is not None:
                    found[kind] += 1
        text = "".join(pieces) + text[done:]
    return text


def redact_value(value: Any, found: Counter[str] | None = None) -> Any:
    """A JSON value with its strings redacted, those under a key such as `password` by that key."""
    if isinstance(value, str):
        return redact(value, found)
    if isinstance(value, list):
        return [redact_value(item, found) for item in value]
    if isinstance(value, dict):
        return {key: _redact_entry(key, item, found) for key, item in value.items()}
    return value


def _redact_entry(key: str, value: Any, found: Counter[str] | None) -> Any:
    name = _SECRET_NAME.search(key)
    if name and isinstance(value, str) and _is_secret(_kind_of(name[0]), value, quoted=True):
        if found is not None:
            found[_kind_of(name[0])] += 1
        return _placeholder(_kind_of(name[0]))
    return redact_value(value, found)


def _placeholder(kind: str) -> str:
    return f"[REDACTED:{kind}]"


def _find(text: str) -> Iterator[Secret]:
    yield from _separated_keys(text)
    for kind, literal, pattern, accept in _SOLID:
        if literal in text:
            for match in _matches(text, text, literal, pattern):
                if accept is None or accept(match["secret"]):
                    yield Secret(*match.span("secret"), kind)
    folded = text.replace("İ", "i").lower()  # the only letter that changes a text's length when it is lowered
    for literal, pattern in _HEADERS:
        if literal in folded:
            for match in _matches(text, folded, literal, pattern):
                if _is_header_value(match["secret"]):
                    yield Secret(*match.span("secret"), "authorization")
    for literal in _NAME_LITERALS:
        if literal in folded:
            for match in _matches(text, folded, literal, _ASSIGNMENT):
                if _is_assigned_secret(match):
                    yield Secret(*match.span("secret"), _kind_of(match["name"]))
    if "PRIVATE KEY" in text:
        yield from _private_keys(text)


def _matches(text: str, folded: str, literal: str, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """The pattern's matches in `text` that begin where `literal` stands in `folded`."""
    at = folded.find(literal)
    while at >= 0:
        if match := pattern.match(text, at):
            yield match
        at = folded.find(literal, at + 1)


# --- Shapes: a vendor's prefix and enough characters that look drawn at random ---


def _is_mixed(secret: str) -> bool:
    """Whether it cannot be words joined by hyphens (a package, a class in a style sheet)."""
    digits = sum(c.isdigit() for c in secret)
    return digits >= 4 or (digits >= 1 and secret.lower() != secret and secret.upper() != secret)


Accept = Callable[[str], bool] | None

# Kind, prefixes that end in a separator, what follows. The first that fits a separator wins.
_SEPARATED: tuple[tuple[str, str, str, Accept], ...] = (
    ("anthropic-key", "sk-", r"ant-[A-Za-z0-9_-]{16,}", None),
    ("api-key", "sk-", r"[A-Za-z0-9_-]{20,}", _is_mixed),  # OpenAI, OpenRouter, DeepSeek and others
    ("github-token", "ghp_ gho_ ghu_ ghs_ ghr_", r"[A-Za-z0-9]{30,}", None),
    ("github-token", "github_", r"pat_[A-Za-z0-9_]{22,}", None),
    ("gitlab-token", "glpat- gldt- glrt- glptt-", r"[A-Za-z0-9_-]{20,}", None),
    ("slack-token", "xoxa- xoxb- xoxe- xoxo- xoxp- xoxr- xoxs- xapp-", r"[A-Za-z0-9-]{16,}", None),
    ("google-token", "GOCSPX- ya29.", r"[A-Za-z0-9_-]{20,}", None),
    ("stripe-key", "sk_ rk_ pk_", r"(?:live|test)_[A-Za-z0-9]{16,}", None),
    ("stripe-key", "whsec_", r"[A-Za-z0-9+/]{16,}={0,2}", _is_mixed),
    ("huggingface-token", "hf_", r"[A-Za-z0-9]{30,}", _is_mixed),
    ("registry-token", "npm_ pypi-", r"[A-Za-z0-9_-]{36,}", _is_mixed),
    ("api-key", "gsk_ xai- r8_ pplx- ntn_ secret_ lin_ figd_ sbp_ PMAK- NRAK- key-", r"[A-Za-z0-9_-]{30,}", _is_mixed),
    ("api-key", "dop_ doo_ dor_", r"v1_[0-9a-f]{32,}", None),
    ("api-key", "shpat_ shpca_ shppa_ shpss_", r"[0-9a-f]{32,}", None),
    ("api-key", "SG.", r"[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}", None),
    ("api-key", "hvs. hvb. sntrys_", r"[A-Za-z0-9_=+/-]{20,}", _is_mixed),
    ("api-key", "AGE-", r"SECRET-KEY-1[0-9A-Z]{40,}", None),
)
_CASES = tuple(
    (kind, prefix, body, accept) for kind, prefixes, body, accept in _SEPARATED for prefix in prefixes.split()
)
_SEPARATOR = re.compile(
    r"[-_.](?=[A-Za-z0-9_-]{16})(?!---)(?:"
    + "|".join(
        rf"(?<={re.escape(prefix)})(?<![A-Za-z0-9]{re.escape(prefix)})(?P<c{i}>{body})"
        for i, (_, prefix, body, _) in enumerate(_CASES)
    )
    + ")"
)


def _separated_keys(text: str) -> Iterator[Secret]:
    for match in _SEPARATOR.finditer(text):
        assert match.lastgroup is not None
        kind, prefix, _, accept = _CASES[int(match.lastgroup[1:])]
        begin = match.start() + 1 - len(prefix)
        if accept is None or accept(text[begin : match.end()]):
            yield Secret(begin, match.end(), kind)


_TEMPLATE = re.compile(  # what stands for a secret in documentation, in code or in a redacted text
    r"\$\w+|%\(?\w*\)?[sdr]|[*.xX_-]+|<.*|.*(?:\{.*\}|\$\(|\$\{|\[REDACTED:).*", re.DOTALL
)


def _is_literal(secret: str) -> bool:
    return _TEMPLATE.fullmatch(secret) is None


_EDGE = "(?<![A-Za-z0-9])"
# Kind, the literal that a match begins with, the pattern there.
_SOLID: tuple[tuple[str, str, re.Pattern[str], Accept], ...] = (
    *(
        ("aws-key-id", prefix, re.compile(_EDGE + r"(?P<secret>A[A-Z]{3}[A-Z0-9]{16})(?![A-Za-z0-9])"), None)
        for prefix in ("AKIA", "ASIA", "ABIA", "ACCA")
    ),
    *(  # in a credentials file or table the secret key follows the id
        (
            "aws-secret-key",
            prefix,
            re.compile(r"A[A-Z]{3}[A-Z0-9]{16}[\s,\"':|]{1,8}(?P<secret>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+])"),
            None,
        )
        for prefix in ("AKIA", "ASIA")
    ),
    ("google-key", "AIza", re.compile(_EDGE + r"(?P<secret>AIza[A-Za-z0-9_-]{35})"), None),
    ("google-token", "1//0", re.compile(_EDGE + r"(?P<secret>1//0[A-Za-z0-9_-]{30,})"), _is_mixed),
    ("api-key", "dapi", re.compile(_EDGE + r"(?P<secret>dapi[0-9a-f]{32})"), None),
    ("api-key", "ATATT3", re.compile(_EDGE + r"(?P<secret>ATATT3[A-Za-z0-9_=-]{30,})"), None),
    ("telegram-token", ":AA", re.compile(r"(?<=\d{8}):(?P<secret>AA[A-Za-z0-9_-]{33})(?![\w-])"), None),
    ("slack-webhook", "hooks.slack.com/", re.compile(r"hooks\.slack\.com/\w+/(?P<secret>[A-Za-z0-9/]{20,})"), None),
    (
        "jwt",
        "eyJ",
        re.compile(_EDGE + r"(?P<secret>eyJ[A-Za-z0-9_-]{8,4000}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)"),
        None,
    ),
    (
        "url-password",
        "://",
        re.compile(r"""://[^\s/:@"'`<>]{0,100}:(?P<secret>[^\s/@"'`<>]{1,200})(?=@[\w\[])"""),
        _is_literal,
    ),
)

# --- Private keys: from the header to the footer, or as far as the base64 goes ---

_KEY_HEADER = re.compile(r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----")
_KEY_FOOTER = re.compile(r"-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----")
_KEY_TEXT = re.compile(r"[A-Za-z0-9+/=]{16,}")
_KEY_LIMIT = 20_000  # characters; a 16384-bit RSA key has 13,000
_KEY_GAP = 100  # characters between two lines of base64: line ends, line numbers, headers


def _private_keys(text: str) -> Iterator[Secret]:
    for header in _KEY_HEADER.finditer(text):
        begin = end = header.end()
        if footer := _KEY_FOOTER.search(text, begin, begin + _KEY_LIMIT):
            if _KEY_TEXT.search(text, begin, footer.start()):
                end = footer.start()
        else:  # cut off
            while (line := _KEY_TEXT.search(text, end, end + 4096)) and line.start() - end <= _KEY_GAP:
                end = line.end()
        if end > begin:  # not the header alone, as in code that parses such files
            yield Secret(begin, end, "private-key")


# --- Headers: the credentials after `Bearer`, `Authorization: Basic` and curl's -u ---

_HEADERS = (
    ("bearer", re.compile(r"(?i)\bbearer[ \t]+(?P<secret>[A-Za-z0-9._~+/-]{16,}={0,2})")),
    (
        "authorization",
        re.compile(
            r"""(?i)authorization\\?["']?\s{0,3}[:=]\s{0,3}\\?["']?basic[ \t]+(?P<secret>[A-Za-z0-9+/]{8,}={0,2})"""
        ),
    ),
    (
        "curl",
        re.compile(
            r"""(?i)\bcurl\b[^\n|;]{0,400}?\s(?:-u|--user)[ =]?["']?[^\s"':]{1,100}:(?P<secret>[^\s"']{1,200})"""
        ),
    ),
)


def _is_header_value(secret: str) -> bool:
    return _is_literal(secret) and (len(secret) < 16 or len(secret) >= 40 or any(c.isdigit() for c in secret))


# --- Assignments: the value of a name such as `password`, in code, JSON, a shell, a URL or XML ---

_NAME_LITERALS = ("pass", "pwd", "secret", "token", "key", "credential", "authorization")
_SECRET_NAME = re.compile(  # at the end of a longer name: DB_PASSWORD, githubToken, x-api-key
    r"(?i)(?:password|passwd|passphrase|pwd|[_-]pass|secret|token|credentials?|authorization"
    r"|(?:api|access|secret|private|account|encryption|signing|session|master|auth)[_-]?key(?:[_-]?id)?)$"
)
_BARE = r"""[^\s"'`,;&|<>(){}\[\]\\]{4,500}"""
_ASSIGNMENT = re.compile(
    r"""(?i)(?P<name>password|passwd|passphrase|pwd|pass|secret|token|key(?:[_-]?id)?|credentials?|authorization)"""
    r"""(?:\\?["']?\]?\s{0,3}(?:=>|:=|==?|:)\s{0,3}(?:[bru]{1,2}(?=\\?["'`]))?|(?P<gap>[ \t]+|>))"""
    r"""(?P<quote>\\?["'`])?(?P<secret>(?(quote)(?:(?!(?P=quote))[^\n]){1,500}"""
    rf"""|{_BARE}))(?(quote)(?:(?P=quote)|(?=\n|\Z)))"""
)
_WORDS = frozenset(
    "none null true false undefined string bytes integer number boolean object any optional required default "  # noqa: SIM905
    "empty value prompt example changeme password passwd passphrase secret token".split()
)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def _kind_of(name: str) -> str:
    """Kind of the placeholder for the value of `name`."""
    return "password" if re.search("(?i)pass|pwd", name) else "secret"


def _is_assigned_secret(match: re.Match[str]) -> bool:
    text, begin, after = match.string, match.start("name"), match.string[match.end() : match.end() + 2]
    while begin > 0 and (text[begin - 1].isalnum() or text[begin - 1] in "_-"):
        begin -= 1
    name = text[begin : match.end("name")]
    if not _SECRET_NAME.search(name):
        return False
    kind, value = _kind_of(match["name"]), match["secret"]
    if gap := match["gap"]:
        argument = (begin > 0 and text[begin - 1] == "<" and after == "</") if gap == ">" else name.startswith("--")
        return argument and value[0] != "-" and _is_secret(kind, value, quoted=True)
    if match["quote"]:
        return _is_secret(kind, value, quoted=True)
    if after[:1] in ("(", "["):
        return False  # a call or an item: an expression
    before = text[max(begin - 40, 0) : begin].rstrip(" \t")[-1:]
    code = before in ("(", ",") or after[:1] in (",", ")")
    return _is_secret(kind, value, code=code, bold=before in ("?", "&") or (name == name.upper() and not code))


def _is_secret(kind: str, value: str, *, quoted: bool = False, code: bool = False, bold: bool = False) -> bool:
    """Whether a value looks like a secret rather than like code or prose.

    code: it stands where an expression may, so an identifier is a variable.
    bold: its name is in capitals or in a URL's query, so a plain word is a value.
    """
    if len(value) < 4 or value.lower() in _WORDS or not _is_literal(value) or any(c.isspace() for c in value):
        return False
    digits = sum(c.isdigit() for c in value)
    identifier = _IDENTIFIER.fullmatch(value) is not None
    if kind == "password":
        if value[0] in "/~" and not quoted:
            return False  # PWD, the working directory
        return quoted or bold or not identifier or (digits > 0 and not code)
    if digits == 0 or digits == len(value) or value[0] in "/.~":
        return False
    if quoted or bold:
        return len(value) >= 8
    return len(value) >= 12 and digits >= (3 if identifier else 1)
