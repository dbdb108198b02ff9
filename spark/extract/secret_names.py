"""Secrets by the name that they are given to: `password = "..."` in code, JSON, a shell, a URL, a table or XML."""

from __future__ import annotations

import re
from collections.abc import Iterator

from spark.extract.secret_tokens import Secret, before, is_mixed

_TEMPLATE = re.compile(  # what stands for a secret in documentation, in code or in a redacted text
    r"\$\w+|%\(?\w*\)?[sdr]|%\w+%|[*.xX_-]+|<.*|\[[\w -]*\]|.*(?:\{.*\}|\$\(|\$\{|\[REDACTED:).*|(?i:your[-_ ].*)",
    re.DOTALL,
)


def is_literal(secret: str) -> bool:
    """Whether a value is itself, rather than what stands for one."""
    return _TEMPLATE.fullmatch(secret) is None


def looks_random(secret: str) -> bool:
    """Whether a value is no word of any language, nor words joined, nor a path or a version."""
    return is_literal(secret) and is_mixed(secret) and not _VERSION.search(secret)


_VERSION = re.compile(r"(?:^|[-_.v:@])\d+(?:\.\d+)+(?:[-+.]?[A-Za-z]{0,8}\d*)?$")


_SECRET_NAME = re.compile(  # at the end of a longer name: DB_PASSWORD, githubToken, x-api-key
    r"(?i)(?:password|passwd|passphrase|pwd|[_-]pass|secret|secret[_-]?(?:string|value)|token|cred(?:ential)?s?|authorization"
    r"|(?<![a-z])auth|(?:api|access|secret|private|account|encryption|signing|session|master|auth|app|client|shared|nonce"
    r"|logged[_-]in|webhook|storage|subscription|openai|deploy|admin|hmac|jwt|license)[_-]?key(?:[_-]?(?:id|data|base))?|_salt)$"
)
_BARE = r"""[^\s"'`,;&|<>(){}\[\]\\]{4,500}"""
QUOTE = r"""\\{0,3}["'`]"""  # a quote, in JSON within JSON too
_QUOTED = (  # up to the quote, over escaped backslashes and quotes, in JSON within JSON too; two quotes are one in YAML
    r"""(?:(?P=slashes){2}\\\\|(?P=slashes){2}\\(?P=mark)|(?<=\w)''(?=\w)|(?!(?P=quote))[^\n]){1,500}"""
)
_ASSIGNMENT = re.compile(
    r"""(?i)(?P<name>password|passwd|passphrase|pwd|pass|secret(?:[_-]?(?:string|value))?|token|key(?:[_-]?(?:id|data|base))?"""
    r"""|credentials?|creds?|authorization|auth|_salt)"""
    rf"""(?:(?:{QUOTE})?\]?\s{{0,3}}(?:=>|:=|==?|:)\s{{0,3}}(?:[bru]{{1,2}}(?={QUOTE}))?"""
    rf"""|{QUOTE}\s{{1,3}}value=(?={QUOTE})|{QUOTE},\s{{0,3}}{QUOTE}value{QUOTE}\s{{0,3}}:\s{{0,3}}|{QUOTE}?\s{{0,3}}\n\s{{0,20}}value:\s{{0,3}}"""
    rf"""|(?P<listed>{QUOTE}\s{{0,3}},\s{{0,3}}(?={QUOTE}))|(?P<gap>[ \t]+|>|\s{{1,8}}(?=\S)))"""
    rf"""(?P<quote>(?P<slashes>\\{{0,3}})(?P<mark>["'`]))?(?P<secret>(?(quote){_QUOTED}"""
    rf"""|{_BARE}))(?(quote)(?:(?P=quote)|(?=\n|\Z)))"""
)
_WORDS = frozenset(
    "none null true false undefined string bytes integer number boolean object any optional required default "  # noqa: SIM905
    "empty value prompt example changeme password passwd passphrase secret token".split()
)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_NETRC = re.compile(r"(?:^|\s)login\s{1,8}\S{1,100}\s{1,8}(?:account\s{1,8}\S{1,100}\s{1,8})?\Z")
_SALTED = re.compile(  # the keys of WordPress, whose values have spaces
    r"""(?i)(?:key|_salt)["']\s{0,3},\s{0,20}(?P<quote>["'])(?P<secret>(?:(?!(?P=quote))[^\n]){32,120})(?P=quote)\s{0,3}\)"""
)
_SALTED_NAME = re.compile(r"(?i)define\(\s{0,3}[\"'](?:auth|secure_auth|logged_in|nonce)_?\Z")


def kind_of(name: str) -> str:
    """Kind of the placeholder for the value of `name`."""
    return "password" if re.search("(?i)pass|pwd", name) else "secret"


def secret_name(name: str) -> str | None:
    """What makes `name` that of a secret, or nothing."""
    match = _SECRET_NAME.search(name)
    return match[0] if match and not _PLACE_IN_PAGES.search(name) else None


_PLACE_IN_PAGES = re.compile(r"(?i)(?:page|next|previous|prev|continuation|pagination|cursor)[_-]?token$")
_FOLDER_NAME = re.compile(r"(?i)(?:old)?pwd")
_NAMED = re.compile(  # a key made of words and numbers, the name of a stored secret
    r"[a-z][a-z_-]*(?::(?:[a-z][a-z_-]*|\d{1,10}))+|projects/[^\s/]{1,60}/[^\s]{0,120}|arn:aws[\w-]*:[^\s]{1,200}"
)


def names_no_secret(name: str, value: str) -> bool:
    """Whether the value of a name such as a secret has is a folder, or only says where a secret is."""
    return (value[:1] in ("/", "~") and _FOLDER_NAME.fullmatch(name) is not None) or (
        kind_of(name) == "secret" and _NAMED.fullmatch(value) is not None
    )


def assignments(text: str, at: int) -> Iterator[Secret]:
    """Secrets given to the name that ends in the word at `at`."""
    line = _LINE.match(text, at)
    if line is not None and (end := _end_of_line_value(line)):
        yield Secret(line.start("secret"), end, kind_of(line["name"]))
        return
    match = _ASSIGNMENT.match(text, at)
    if match and _is_assigned_secret(match):
        yield Secret(*match.span("secret"), kind_of(match["name"]))
    elif (match := _SALTED.match(text, at)) and _SALTED_NAME.search(before(text, at, 40)):
        yield Secret(*match.span("secret"), "secret")


# --- Settings, a line each: the value is all of the line, whatever characters are in it ---

_NAMES = r"(?P<name>password|passwd|passphrase|pwd|pass|secret|token|key|credentials?|creds?)"
_LINE = re.compile(  # with a character in the value at which it would end in code
    rf"""(?i){_NAMES}(?P<is>=|:[ ]{{1,3}})"""
    r"""(?P<secret>[^\s"'`\\,;&|<>(){}\[\]$]{0,200}[,;&|<>(){}\[\]$][^\s"'`\\]{0,200})"""
    r"""(?=\s|\\{1,3}[nrt"']|["'`]|\Z)"""
)
_LINE_BEGIN = re.compile(  # of a file, of one with numbers, of a difference, in a string
    r"""(?:\A|\n|\\n|\\{0,3}["'])[ \t]*(?:\d{1,6}(?:→|\\{1,3}u2192|\t|\\{1,3}t))?[ \t]*[-+]?[ \t]*"""
    r"""(?:(?:export|set|ENV)[ \t]+)?\Z"""
)
_LINE_END = re.compile(
    r"&&|\|\||[&;,]\w+=|;(?:export|then|do|done|fi)\b|;\Z"
)  # of a value that another command follows
_CODE = re.compile(  # references, templates and placeholders; calls, items and types at the end or before what goes on
    r"""[<&*|>!%@({\[].*|.*(?:\$\(|\$\{|\{\{|\{[A-Za-z_$%]|\[REDACTED:).*|\$\w+|.*[,;({\[<&|]"""
    r"""|.*(?:=>|->|\w\([^()]*\)|\w\[[^\[\]]*\]|\w<[^<>]*>)(?:[.,;:?)\]}].*)?|.*\w\([^)]*"""
)
_ESCAPE = re.compile(r"[nrt]|u2192")
_NO_VARIABLE = re.compile(r"\$[A-Za-z]+\d{2,}[A-Za-z]{1,2}")


def _end_of_line_value(match: re.Match[str]) -> int:
    """Where the value of a setting that has a line of its own ends; 0 if it is none, or no secret."""
    begin = _begin_of_name(match)
    if begin and match.string[begin - 1] == "\\" and (escape := _ESCAPE.match(match.string, begin, match.end("name"))):
        begin = escape.end()  # in JSON, after the end of the line before
    name = match.string[begin : match.end("name")]
    capitals = name == name.upper()
    if not (capitals or match["is"][0] == ":") or not secret_name(name):
        return 0
    if not _LINE_BEGIN.search(before(match.string, begin, 60)):
        return 0
    value = match["secret"]
    if cut := _LINE_END.search(value):
        value = value[: cut.start()]
    digits, letters = sum(c.isdigit() for c in value), any(c.isalpha() for c in value)
    least = 6 if kind_of(match["name"]) == "password" else 8 if capitals else 12
    if not digits or not letters or len(value) < least or not (set(value) & set("&|;,<>(){}[]$")):
        return 0
    if _CODE.fullmatch(value) and not (capitals and _NO_VARIABLE.fullmatch(value)):
        return 0
    return match.start("secret") + len(value)


def _begin_of_name(match: re.Match[str]) -> int:
    text, begin = match.string, match.start("name")
    limit = max(begin - 100, 0)
    while begin > limit and (text[begin - 1].isalnum() or text[begin - 1] in "_-"):
        begin -= 1
    return begin


def _is_assigned_secret(match: re.Match[str]) -> bool:
    text, begin, after = match.string, _begin_of_name(match), match.string[match.end() : match.end() + 2]
    name = text[begin : match.end("name")]
    if not secret_name(name) or names_no_secret(name.lstrip("-"), match["secret"]):
        return False
    kind, value = kind_of(match["name"]), match["secret"]
    if gap := match["gap"]:
        if name.lower() in ("password", "passwd") and _NETRC.search(before(text, begin, 240)):
            return is_literal(value)
        near = before(text, begin, 40)
        if _DECLARED.search(near) and name == name.upper():
            return "\n" not in gap and is_secret(kind, value, quoted=bool(match["quote"]), bold=True)
        if kind == "password" and match["quote"] and _IN_SQL.search(near):
            return is_secret(kind, value, quoted=True)
        argument = (begin > 0 and text[begin - 1] == "<" and after == "</") if gap == ">" else name.startswith("--")
        return argument and "\n" not in gap and value[0] != "-" and is_secret(kind, value, quoted=True)
    if match["listed"]:
        return len(value) >= 8 and not any(c.isspace() for c in value) and looks_random(value)
    if name.lower().endswith("auth"):
        return is_auth(value) or text.endswith("/:", 0, begin)
    if match["quote"]:
        return is_secret(kind, value, quoted=True)
    if after[:1] in ("(", "["):
        return False  # a call or an item: an expression
    last = before(text, begin, 40).rstrip(" \t")[-1:]
    if text.endswith("/:", 0, begin) and name.startswith("_"):
        return is_literal(value)  # npm's settings, which are never code
    code = last in ("(", ",") or after[:1] in (",", ")")
    assigned = text[match.end("name") : match.start("secret")]
    if kind == "password" and assigned == "=" and last == "\n" and after[:1] in ("", "\n", "\r"):
        bare = _SECTION.search(before(text, begin, 400)) is not None
        return is_secret(kind, value, bold=bare or (name == name.upper() and not code))
    whole = "-" in name and ":" in assigned and last in ("'", '"') and after[:1] == last  # "X-Api-Key: value", a header
    return is_secret(kind, value, code=code, bold=last in ("?", "&") or whole or (name == name.upper() and not code))


_SECTION = re.compile(  # of a file of settings: its title, and nothing but settings without quotes up to here
    r"""(?:\A|\n)\[[\w.:-]{1,40}\]\r?\n(?:[\w.-]{1,40}[ \t]?=[^\n"'(),;]{0,120}\n|[#;][^\n]{0,120}\n|\r?\n){0,12}\Z"""
)
_DECLARED = re.compile(r"""(?:\A|[\n"'`;&|]|\\n)[ \t]*(?:ENV|ARG|setenv|set(?:[ \t]+-\w+)+)[ \t]+\Z""")
_IN_SQL = re.compile(r"(?i)\b(?:with|login|encrypted|superuser|createdb|createrole)\s{1,8}\Z")
_AUTH = re.compile(r"[A-Za-z0-9+/_-]{8,}={0,2}")


def is_auth(value: str) -> bool:
    """Whether the value of `auth` is a user and a password in base64, or a key."""
    return _AUTH.fullmatch(value) is not None and is_literal(value) and (is_mixed(value) or value[-1] == "=")


def is_secret(kind: str, value: str, *, quoted: bool = False, code: bool = False, bold: bool = False) -> bool:
    """Whether a value looks like a secret rather than like code or prose.

    code: it stands where an expression may, so an identifier is a variable.
    bold: its name is in capitals or in a URL's query, so a plain word is a value.
    """
    if len(value) < 4 or value.lower() in _WORDS or not is_literal(value) or any(c.isspace() for c in value):
        return False
    digits = sum(c.isdigit() for c in value)
    identifier = _IDENTIFIER.fullmatch(value) is not None
    if kind == "password":
        if value[0] in "/~" and not quoted:
            return False  # PWD, the working directory
        return quoted or bold or not identifier or (digits > 0 and not code)
    if digits == 0 or digits == len(value) or (value[0] in "/.~" and not _is_base64_key(value)):
        return False
    if quoted or bold:
        return len(value) >= 8
    return len(value) >= 12 and digits >= (3 if identifier else 1) and not _VERSION.search(value)


def _is_base64_key(value: str) -> bool:
    """Whether what begins as a path does is a key of 40 or more characters, as AWS has them."""
    capitals, small = sum(c.isupper() for c in value), sum(c.islower() for c in value)
    return re.fullmatch(r"[A-Za-z0-9+/]{40,}={0,2}", value) is not None and capitals >= 6 and small >= 6
