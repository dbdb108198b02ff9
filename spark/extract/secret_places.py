"""Secrets by their place: what follows a name, a header, an option of a command, or stands in a file of a known form.

Each finder starts from literals that `str.find` looks for, tries a pattern only there, and takes what looks like a
secret: code is full of `token = next(tokens)` and `password: str`, which stay. Patterns look at a bounded stretch of
text around their literal, so that no text takes more than a fixed time a character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from spark.extract.secret_names import QUOTE, assignments, is_literal, looks_random
from spark.extract.secret_tokens import Secret, before, is_mixed

Finder = Callable[[str, int], Iterator[Secret]]  # asked about a place where one of its literals begins


def find_by_place(text: str, data: bytes) -> list[Secret]:
    """Secrets in `text` that their surroundings give away; data: its characters, as `one_byte_each` makes them."""
    folded = data.lower()
    found: list[Secret] = []
    for gate, finders in _GATES:
        if gate in folded:
            for literal, exact, finder in finders:
                searched = data if exact else folded
                at = searched.find(literal)
                while at >= 0:
                    found += finder(text, at)
                    at = searched.find(literal, at + 1)
    return found


def _pattern(kind: str, pattern: str, accept: Callable[[str], bool] | None = None) -> Finder:
    """A finder of what the pattern's group `secret` takes, where the whole begins with the literal."""
    compiled = re.compile(pattern)

    def find(text: str, at: int) -> Iterator[Secret]:
        if (match := compiled.match(text, at)) and (accept is None or accept(match["secret"])):
            yield Secret(*match.span("secret"), kind)

    return find


# --- URLs: a password before the host, a key in the user's place, webhooks whose path is the secret ---

_URL_PASSWORD = re.compile(r"""://[^\s/:@"'`<>]{0,100}:(?!\d+/)(?P<secret>[^\s"'`<>\\]{1,200})(?=@(?:[\w\[]|tcp\())""")
_URL_USER = re.compile(r"""://(?P<secret>[A-Za-z0-9_-]{20,200})(?:@[\w\[]|:[^\s/:@"'`<>]{0,200}@[\w\[])""")
_WEBHOOK = re.compile(
    r"""://(?:[a-z0-9.-]{0,60}discord(?:app)?\.com/api/(?:v\d+/)?webhooks/\d{5,25}/(?P<discord>[A-Za-z0-9_-]{30,120})
    |[a-z0-9-]{1,60}\.webhook\.office\.com/webhookb2/(?P<teams>[A-Za-z0-9@/-]{60,400})
    |hooks\.zapier\.com/hooks/catch/(?P<zapier>[A-Za-z0-9/]{8,60}))""",
    re.VERBOSE,
)


def _in_url(text: str, at: int) -> Iterator[Secret]:
    if (user := _URL_USER.match(text, at)) and is_mixed(user["secret"]):
        yield Secret(*user.span("secret"), "url-password")
    password = _URL_PASSWORD.match(text, at)
    if password and is_literal(password["secret"]) and "://" not in password["secret"]:
        yield Secret(*password.span("secret"), "url-password")
    if hook := _WEBHOOK.match(text, at):
        yield Secret(*hook.span(hook.lastindex or 0), "webhook")


# --- Headers ---

_BEARER = r"(?i)bearer[ \t]+(?P<secret>[A-Za-z0-9._~+/-]{16,}={0,2})"
_AUTHORIZATION = re.compile(
    r"""(?i)authorization\\?["']?\]?\s{0,3}[:=,]\s{0,3}(?:\\?["'`])?(?:(?P<scheme>[A-Za-z][A-Za-z0-9-]{1,24})[ \t]+)?"""
    r"""(?P<secret>[A-Za-z0-9._~+/@=-]{8,4000})"""
)
_COOKIE = re.compile(r"""(?i)cookie(?:\\?["'])?\s{0,3}[:=]\s{0,3}\[?\s{0,3}(?:\\?["'])?""")
_COOKIE_PAIR = re.compile(
    r"""\s?(?P<name>[^\s=;,"'`\\<>(){}\[\]]{1,100})=(?P<secret>[^\s;,"'`\\<>(){}\[\]$]{1,4096})"""
)
_COOKIE_ATTRIBUTES = frozenset("path domain expires max-age samesite secure httponly priority version".split())  # noqa: SIM905
_COOKIE_NEXT = re.compile(r";[ \t]?")
_SESSION = re.compile(
    r"(?i)sess|sid$|^s$|auth|token|jwt|login|remember|csrf|xsrf|account|identity|__host-|__secure-|user|key"
)


def _is_bearers(secret: str) -> bool:
    return is_literal(secret) and (len(secret) >= 40 or any(c.isdigit() for c in secret))


def _authorization(text: str, at: int) -> Iterator[Secret]:
    match = _AUTHORIZATION.match(text, at)
    if not match:
        return
    value = match["secret"]
    basic = (match["scheme"] or "").lower() == "basic"
    if is_literal(value) if basic else looks_random(value) and "=" not in value.rstrip("=")[:12]:
        yield Secret(*match.span("secret"), "authorization")


def _cookies(text: str, at: int) -> Iterator[Secret]:
    """The values of a `Cookie` or `Set-Cookie` header, by which a session could be taken over."""
    if header := _COOKIE.match(text, at):
        yield from _cookie_pairs(text, header.end())


def _cookie_pairs(text: str, at: int) -> Iterator[Secret]:
    while pair := _COOKIE_PAIR.match(text, at):
        name, value = pair["name"], pair["secret"]
        if name.lower() not in _COOKIE_ATTRIBUTES and is_literal(value):
            digits = sum(c.isdigit() for c in value)
            if digits >= 2 and len(value) >= (8 if _SESSION.search(name) else 16):
                yield Secret(*pair.span("secret"), "cookie")
        after = _COOKIE_NEXT.match(text, pair.end())
        if not after:
            return
        at = after.end()
        while flag := _COOKIE_FLAG.match(text, at):  # Secure; HttpOnly;
            at = flag.end()


_COOKIE_FLAG = re.compile(r"(?i)(?:secure|httponly|partitioned);[ \t]?")

# --- Commands: the option that is a password depends on the command before it ---

_ARGUMENT = r"""(?P<quote>\\?["'])?(?P<secret>(?(quote)[^\n"'\\]{1,200}(?=(?P=quote))|[^\s"'`;|&<>()\\]{1,200}))"""
_USER_PASSWORD = (
    r"""(?:\\?["'](?P<user>[^\s"':[]{0,100}):(?P<secret>[^\n"'\\]{1,200}?)(?=\\?["'](?:[\s,)\]]|\Z))"""
    r"""|\\?["']?[^\s"':[]{1,100}["']?:(?P<mark>["'])?(?P<plain>(?(mark)[^"'\n\\]{1,200}|[^\s"'\\]{1,200})))"""
)
_COMMAND_WORDS = {  # of which one is in every command that the option's patterns take
    " -p": ("mysql", "mariadb", "7z", "unrar", "sshpass", "login", "upload", "mongo", "sqlcmd", "bcp", "rdp", "ipmi"),
    " -a": ("redis",),
    " -w": ("ldap",),
    " -b": ("curl",),
    " -k": ("openssl",),
}
_REACH = 400  # characters before an option in which its command is looked for
_COMMANDS: tuple[tuple[str, str, str], ...] = (  # the option, the commands, what follows the option
    (" -p", r"(?:mysql\w*|mariadb[\w-]*|7z\w?|unrar)(?:\s|\Z)", rf"p(?=[^\s=]){_ARGUMENT}"),
    (" -p", r"sshpass\Z", rf"p ?{_ARGUMENT}"),
    (
        " -p",
        r"(?:(?:docker|podman|az|oc|cf|registry)\s+login|twine\s+upload|mongo\w*|sqlcmd|bcp|xfreerdp|ipmitool)(?:\s|\Z)",
        rf"[pP][ =]{_ARGUMENT}",
    ),
    (" -a", r"redis-cli(?:\s|\Z)", rf"a {_ARGUMENT}"),
    (" -w", r"ldap\w+(?:\s|\Z)", rf"w {_ARGUMENT}"),
    (" -b", r"curl(?:\s|\Z)", r"b ?"),
    (" -k", r"openssl\s+(?:enc|aes|des|cms)", rf"k {_ARGUMENT}"),
)


def _line_before(text: str, at: int) -> str:
    """The command that `at` is in, as far back as it is looked for, over lines that a backslash continues."""
    line = re.sub(r"\\\r?\n", " ", before(text, at, _REACH))
    return re.split(r"[\n;|]|&&|\\n(?![a-z])", line)[-1]


def _option(option: str) -> Finder:
    rules = [
        (re.compile(rf"(?:^|[\s/\"'`$(])(?:{commands})", re.IGNORECASE), re.compile(value))
        for own, commands, value in _COMMANDS
        if own == option
    ]
    words = _COMMAND_WORDS[option]

    def find(text: str, at: int) -> Iterator[Secret]:
        line = None
        near = before(text, at, _REACH).casefold()  # as the patterns take any case
        for command, value in rules if any(word in near for word in words) else ():
            match = value.match(text, at + 2)
            if not match:
                continue
            line = _line_before(text, at) if line is None else line
            if not command.search(line):
                continue
            if option == " -b":
                quote = re.compile(r"\\?[\"']").match(text, match.end())
                yield from _cookie_pairs(text, quote.end() if quote else match.end())
            elif is_literal(match["secret"]) and not match["secret"].startswith("-"):
                yield Secret(*match.span("secret"), "password")
                return
        if option == " -a":  # HTTPie's
            yield from _user_and_password(text, at)

    return find


_CURL_USER = re.compile(r"(?:-u|--user|-a|--auth|-U|--proxy-user)[ =]{0,3}" + _USER_PASSWORD)
_CURL = re.compile(r"(?:^|[\s/\"'`$(])(?:curl|https?|wget|xh)(?:\.exe)?\s", re.IGNORECASE)
_SMB_USER = re.compile(r"""-U[ =]?["']?[^\s"'%]{1,60}%(?P<secret>[^\s"'\\]{1,100})""")


def _user_and_password(text: str, at: int) -> Iterator[Secret]:
    if (match := _CURL_USER.match(text, at + 1)) and _CURL.search(_line_before(text, at) + " "):
        group = "secret" if match["secret"] is not None else "plain"
        if is_literal(match[group]) and not match[group].startswith("//"):
            yield Secret(*match.span(group), "authorization")
        elif match["user"] and is_mixed(match["user"]):
            yield Secret(*match.span("user"), "authorization")
    elif (match := _SMB_USER.match(text, at + 1)) and is_literal(match["secret"]):
        yield Secret(*match.span("secret"), "password")


_OPENSSL = re.compile(r"-pass(?:in|out)?\s{1,3}[\"']?\Z")


def _openssl(text: str, at: int) -> Iterator[Secret]:
    if (match := _PASS.match(text, at)) and _OPENSSL.search(before(text, at, 16)) and is_literal(match["secret"]):
        yield Secret(*match.span("secret"), "password")


_PASS = re.compile(r"""(?i:pass):(?P<secret>[^\s"'\\]{1,200})""")
_SUDO = re.compile(
    r"""(?:echo|printf)\s{1,3}(?:-n\s)?["']?(?P<secret>[^\s"'|$`\\]{4,100})["']?\s{0,3}\|\s{0,3}(?:\S{0,20}/)?\Z"""
)
_HTPASSWD = (
    r"passwd\s(?:-\w+\s(?:\d+\s)?){0,4}?-\w*b\w*\s(?:-\w+\s(?:\d+\s)?){0,4}(?:[^\s|;-][^\s|;]{0,200}\s)?"
    r"""[^\s|;-][^\s|;]{0,60}\s(?P<secret>[^\s|;&"'\\]{3,100})"""
)


def _sudo(text: str, at: int) -> Iterator[Secret]:
    if (match := _SUDO.search(text, max(at - 160, 0), at)) and is_literal(match["secret"]):
        yield Secret(*match.span("secret"), "password")


_GIVEN = rf"""(?:(?P<quote>{QUOTE})(?P<secret>(?:(?!(?P=quote))[^\n]){{4,200}})(?P=quote))"""  # in quotes
_PIPED = re.compile(
    r"""(?:echo|printf)\s{1,3}(?:-n\s)?(?:\\{0,3}["'])?(?P<secret>[^\s"'|$`\\]{4,100})(?:\\{0,3}["'])?\s{0,3}\|[^\n|;]{1,200}\Z"""
)
_NET_USE = r"net\s+use\s(?:[^\n]{0,120}?\s)?/user:\S{1,80}\s+(?P<secret>[^\s/*\"'\\]{3,100})"
_WANDB = r"wandb login\s+(?:--\S+\s+){0,3}(?P<secret>[0-9a-fA-F]{40,80})(?![0-9A-Za-z])"
_NUGET = r"nuget\s+push\s[^\n|;&]{0,200}?(?P<secret>oy2[a-z2-7]{43})(?![a-z0-9])"
_GITHUB_SECRET = rf"gh secret set\s[^\n|;&]{{0,120}}?(?:--body|-b)[ =]{_GIVEN}"
_AWS_PROMPT = r"secret access key \[[^\]\n]{0,40}\]:[ \t]{0,3}(?P<secret>[A-Za-z0-9/+=]{16,100})"
_FERNET = rf"fernet\(\s{{0,3}}b?(?:{QUOTE})(?P<secret>[A-Za-z0-9_-]{{43}}=)"
_PSK = rf"psk[ \t]?=[ \t]?(?:(?P<quote>{QUOTE})(?P<secret>(?:(?!(?P=quote))[^\n]){{8,63}})(?P=quote))"


def _piped(text: str, at: int) -> Iterator[Secret]:
    """A password that is written to a command which reads it from its input."""
    if (match := _PIPED.search(text, max(at - 300, 0), at)) and is_literal(match["secret"]):
        yield Secret(*match.span("secret"), "password")


# --- Hashes of passwords, and words that are a wallet's key ---

_CRYPT = re.compile(
    r"\$(?:(?:1|5|6|apr1|y|gy|7|md5)\$[A-Za-z0-9./=,$-]{0,40}\$?[A-Za-z0-9./]{20,90}"
    r"|2[abxy]\$\d\d\$[A-Za-z0-9./]{53}|argon2(?:id?|d)\$[A-Za-z0-9+/=,$]{40,300}"
    r"|\d{3,8}\$[A-Za-z0-9+/.]{4,60}\$[A-Za-z0-9+/]{20,90}={0,2})"
)
_PBKDF2 = re.compile(r"(?:pbkdf2_sha\d+|bcrypt_sha256|scrypt)\Z")


def _crypt(text: str, at: int) -> Iterator[Secret]:
    if match := _CRYPT.match(text, at):
        if text[at + 1 : at + 4].isdigit():
            if head := _PBKDF2.search(before(text, at, 16)):
                yield Secret(at - len(head[0]), match.end(), "password-hash")
        elif any(c.isdigit() for c in match[0][8:]) or match[0].upper() != match[0]:
            yield Secret(at, match.end(), "password-hash")


_WORDS_12_TO_24 = r"(?:[a-z]{3,8} ){11}(?:[a-z]{3,8}(?: [a-z]{3,8} [a-z]{3,8} [a-z]{3,8}){0,4})"
_SEED_PHRASE = (
    r"(?i:mnemonic|phrase|seed[ _-]?words|seed)s?(?:"
    + QUOTE
    + r")?\s{0,3}[:=]\s{0,3}(?:"
    + QUOTE
    + r")?(?P<secret>"
    + _WORDS_12_TO_24
    + r")(?![ ]?[A-Za-z])"
)
_LISTED_KEYS = re.compile(r"(?i)private[ _-]?keys?\b[^\n]{0,20}\n?[\s=-]{0,60}")
_ACCOUNTS = rf"(?i:accounts)\s{{0,3}}[:=]\s{{0,3}}\[\s{{0,20}}{QUOTE}(?P<secret>0x[0-9a-fA-F]{{64}})(?![0-9a-zA-Z])"
_LISTED_KEY = re.compile(r"\s{0,4}(?:\(?\d{1,3}[).]\s{0,4})?(?P<secret>(?:0x)?[0-9a-fA-F]{64})(?![0-9a-zA-Z])")


def _listed_keys(text: str, at: int) -> Iterator[Secret]:
    """Keys of 64 digits in a list with a heading, as test networks print."""
    if heading := _LISTED_KEYS.match(text, at):
        end = heading.end()
        while key := _LISTED_KEY.match(text, end):
            yield Secret(*key.span("secret"), "private-key")
            end = key.end()


# --- Keys of several lines: from the header to the footer, or as far as the base64 goes ---

_KEY_HEADER = re.compile(r"PRIVATE KEY(?: BLOCK)?-----")
_KEY_BEGIN = re.compile(r"-----BEGIN (?:[A-Z0-9]+ )*\Z")
_KEY_FOOTER = re.compile(r"-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----")
_KEY_TEXT = re.compile(r"[A-Za-z0-9+/=]{16,}")
_KEY_LIMIT = 20_000  # characters; a 16384-bit RSA key has 13,000
_KEY_GAP = 100  # characters between two lines of base64: line ends, line numbers, headers
_PUTTY_LINES = re.compile(r"Private-Lines: \d+")
_PUTTY_MAC = re.compile(r"Private-MAC: (?P<secret>[0-9a-f]{40,64})")


def _private_key(text: str, at: int) -> Iterator[Secret]:
    header = _KEY_HEADER.match(text, at)
    if not header or not _KEY_BEGIN.search(before(text, at, 60)):
        return
    begin = end = header.end()
    if footer := _KEY_FOOTER.search(text, begin, begin + _KEY_LIMIT):
        if _KEY_TEXT.search(text, begin, footer.start()):
            end = footer.start()
    else:  # cut off
        end = _end_of_base64(text, end, end + _KEY_LIMIT)
    if end > begin:  # not the header alone, as in code that parses such files
        yield Secret(begin, end, "private-key")


def _end_of_base64(text: str, end: int, limit: int) -> int:
    while (line := _KEY_TEXT.search(text, end, min(end + 4096, limit))) and line.start() - end <= _KEY_GAP:
        end = line.end()
    return end


def _putty_key(text: str, at: int) -> Iterator[Secret]:
    if header := _PUTTY_LINES.match(text, at):
        begin = header.end()
        mac = _PUTTY_MAC.search(text, begin, begin + _KEY_LIMIT)
        limit = mac.start() if mac else begin + _KEY_LIMIT
        if line := _KEY_TEXT.search(text, begin, min(begin + _KEY_GAP, limit)):
            yield Secret(begin, _end_of_base64(text, line.start(), limit), "private-key")
        if mac:
            yield Secret(*mac.span("secret"), "private-key")


# --- Files whose form says what is secret: a Kubernetes Secret, a password file of PostgreSQL ---

_KIND = re.compile(r"""(?i)\bkind["']?:[ \t]*["']?secret["']?[ \t]*\r?$""", re.MULTILINE)
_BLOCK = re.compile(r"data:[ \t]*\r?\n(?P<body>(?:[ \t]+\S[^\n]*(?:\n|\Z)|[ \t]*\n){1,500})")
_ENTRY = re.compile(
    r"""^[ \t]+[\w.-]+:[ \t]*(?:[|>][+-]?[ \t]*\r?\n[ \t]+)?["']?(?P<secret>[A-Za-z0-9+/]{10,}={0,2})["']?[ \t]*\r?$""",
    re.MULTILINE,
)
_SECRET_FILE = 4000  # characters before and after `data:` in which `kind: Secret` is looked for
_PGPASS = re.compile(r"""(?:\d{2,5}|\*):[\w*-]{1,64}:[\w*-]{1,64}:(?P<secret>[^\s:"'\\,]{4,100})""")


def _kubernetes_data(text: str, at: int) -> Iterator[Secret]:
    """The values under `data:` of a Kubernetes Secret, before or after its kind is said."""
    if text[text.rfind("\n", 0, at) + 1 : at].strip().lower() not in ("", "string"):
        return  # `if data:`
    above, below = before(text, at, _SECRET_FILE), text[at : at + _SECRET_FILE]
    file = above.rpartition("\n---")[2] + below.partition("\n---")[0]
    if "kind" in file and _KIND.search(file) and (block := _BLOCK.match(text, at)):
        for entry in _ENTRY.finditer(text, block.start("body"), block.end("body")):
            yield Secret(*entry.span("secret"), "secret")


def _pgpass(text: str, at: int) -> Iterator[Secret]:
    """The last field of `host:5432:database:user:password`."""
    if (match := _PGPASS.match(text, at + 1)) and is_literal(match["secret"]):
        yield Secret(*match.span("secret"), "password")


# --- Assignments: the value of a name such as `password`, in code, JSON, a shell, a URL or XML ---

_SIGNATURE = r"(?<![\w=%.])(?i:sig|signature)=(?P<secret>[A-Za-z0-9%+/_=-]{20,1200})"
_FOLDED: tuple[tuple[str, Finder], ...] = (
    *((literal, assignments) for literal in ("pass", "pwd", "secret", "token", "key", "cred", "auth", "_salt")),
    ("bearer", _pattern("authorization", _BEARER, _is_bearers)),
    ("authorization", _authorization),
    ("cookie", _cookies),
    *((option, _option(option)) for option in (" -p", " -a", " -w", " -b", " -k")),
    *((option, _user_and_password) for option in (" -u", " --user", " --proxy-user", " --auth")),
    ("pass:", _openssl),
    ("identified by", _pattern("password", rf"(?i:identified by)\s+(?i:password\s+)?{_GIVEN}", is_literal)),
    ("--password-stdin", _piped),
    ("--passphrase", _pattern("password", rf"(?i:--passphrase)[ =]{_GIVEN}", is_literal)),
    ("psk", _pattern("password", f"(?i:{_PSK})", is_literal)),
    ("wandb login", _pattern("secret", f"(?i:{_WANDB})")),
    ("nuget", _pattern("api-key", f"(?i:{_NUGET})")),
    ("net use", _pattern("password", f"(?i:{_NET_USE})", is_literal)),
    ("gh secret set", _pattern("secret", f"(?i:{_GITHUB_SECRET})", is_literal)),
    ("secret access key [", _pattern("secret", f"(?i:{_AWS_PROMPT})")),
    ("fernet(", _pattern("secret", f"(?i:{_FERNET})")),
    ("| sudo -s", lambda text, at: _sudo(text, at + 2)),
    ("passwd -", _pattern("password", "(?i:" + _HTPASSWD + ")", is_literal)),
    (
        "securestring",
        _pattern(
            "password", r"""(?i:securestring)\s+(?:-String\s+)?["'](?P<secret>[^"'\n]{4,200})["']\s+-As""", is_literal
        ),
    ),
    *((literal, _pattern("seed-phrase", _SEED_PHRASE)) for literal in ("mnemonic", "phrase", "seed")),
    ("private key", _listed_keys),
    ("accounts", _pattern("private-key", _ACCOUNTS)),
    ("data:\n", _kubernetes_data),
    ("sig=", _pattern("signature", _SIGNATURE, is_mixed)),
    ("signature=", _pattern("signature", _SIGNATURE, is_mixed)),
    ("{sha}", _pattern("password-hash", r"(?P<secret>\{[shaSHA]{3}\}[A-Za-z0-9+/]{27}=)")),
    ("{ssha", _pattern("password-hash", r"(?P<secret>\{(?i:ssha)\d{0,3}\}[A-Za-z0-9+/]{30,120}={0,2})")),
)
_EXACT: tuple[tuple[str, Finder], ...] = (
    ("://", _in_url),
    ("hooks.slack.com/", _pattern("slack-webhook", r"hooks\.slack\.com/\w+/(?P<secret>[A-Za-z0-9/]{20,})")),
    ("PRIVATE KEY", _private_key),
    ("Private-Lines: ", _putty_key),
    ("$", _crypt),
    (":5432:", _pgpass),
)
_SHARED = (" -", "sig", "{s")  # what several literals have in common and text seldom has


def _gates() -> tuple[tuple[bytes, tuple[tuple[bytes, bool, Finder], ...]], ...]:
    """The literals, each behind what is to be looked for first: a text with no `key` has no `private key` either."""
    rules = [(literal, True, finder) for literal, finder in _EXACT]
    rules += [(literal, False, finder) for literal, finder in _FOLDED]
    beginnings = sorted({*_SHARED, *(literal.lower() for literal, _, _ in rules)}, key=len)
    table: dict[str, list[tuple[bytes, bool, Finder]]] = {}
    for literal, exact, finder in rules:
        gate = next(beginning for beginning in beginnings if beginning in literal.lower())
        table.setdefault(gate, []).append((literal.encode(), exact, finder))
    return tuple((gate.encode(), tuple(finders)) for gate, finders in table.items())


_GATES = _gates()
