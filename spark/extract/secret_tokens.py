"""Secrets by their shape: tokens that begin, or end, as their vendor's do.

The table says what gitleaks' published rules, detect-secrets, trufflehog and vendors' documents say of the formats.
All tokens contain, or end in, a run of 16 or more of the characters `A-Za-z0-9_+/~-`. A text is searched for such runs
once, by `bytes.find`, and the table is asked at a run's separators alone, so that a further rule costs next to nothing.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Secret(NamedTuple):
    """Characters `begin` to `end` of a text are a secret of this kind."""

    begin: int
    end: int
    kind: str


def before(text: str, at: int, reach: int) -> str:
    """The last `reach` characters before `at`, fewer at the beginning."""
    return text[max(at - reach, 0) : at]


Accept = Callable[[str], bool] | None


class _Shape(NamedTuple):
    kind: str
    prefix: str  # before the body, "" where the body has it all
    body: re.Pattern[str]
    accept: Accept  # asked about the prefix and the body


def is_mixed(secret: str) -> bool:
    """Whether it cannot be words joined by hyphens (a package, a class in a style sheet)."""
    digits = sum(c.isdigit() for c in secret)
    return digits >= 4 or (digits >= 1 and _has_both_cases(secret))


def _has_both_cases(secret: str) -> bool:
    return secret.lower() != secret and secret.upper() != secret


def _has_random_part(secret: str) -> bool:
    return any(len(part) >= 12 and is_mixed(part) for part in re.split("[-_]", secret))


def _is_mixed_or_both_cases(secret: str) -> bool:
    return is_mixed(secret) or _has_both_cases(secret.partition("_")[2])


_WORD = r"[A-Za-z0-9_-]"
_ALNUM = "[A-Za-z0-9]"
_HEX = "[0-9a-fA-F]"
_UUID = rf"{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}"

# Kind, prefixes that end in a separator, what follows, a test. The first that fits wins.
_PREFIXED: tuple[tuple[str, str, str, Accept], ...] = (
    ("anthropic-key", "sk-ant-", rf"{_WORD}{{16,}}", None),
    ("api-key", "sk-proj- sk-svcacct- sk-admin- sk-or-v1- sk-lf-", rf"{_WORD}{{20,}}", is_mixed),
    ("api-key", "sk-", rf"{_WORD}{{20,}}", _has_random_part),  # OpenAI, DeepSeek and others
    ("github-token", "ghp_ gho_ ghu_ ghs_ ghr_", rf"{_ALNUM}{{30,}}", None),
    ("github-token", "github_pat_", r"[A-Za-z0-9_]{22,}", None),
    (
        "gitlab-token",
        "glpat- gldt- glrt- glptt- glcbt- glagent- gloas- glft- glffct- glimt- glsoat-",
        rf"{_WORD}{{20,}}(?:\.[0-9a-z]{{9}}(?!{_ALNUM}))?",
        None,
    ),
    ("slack-token", "xoxa- xoxb- xoxc- xoxd- xoxe- xoxo- xoxp- xoxr- xoxs- xapp-", r"[A-Za-z0-9%-]{16,}", None),
    ("google-token", "GOCSPX- ya29.", rf"{_WORD}{{20,}}", None),
    (
        "stripe-key",
        "sk_live_ sk_test_ sk_prod_ rk_live_ rk_test_ rk_prod_ pk_live_ pk_test_",
        rf"{_ALNUM}{{10,}}",
        None,
    ),
    ("stripe-key", "whsec_", r"[A-Za-z0-9+/]{16,}={0,2}", is_mixed),
    ("huggingface-token", "hf_ api_org_", rf"{_ALNUM}{{30,}}", _is_mixed_or_both_cases),
    ("registry-token", "npm_ pypi-", rf"{_WORD}{{36,}}", is_mixed),
    ("registry-token", "rubygems_", rf"{_HEX}{{48}}", None),
    ("registry-token", "dckr_pat_ dckr_oat_", rf"{_WORD}{{20,}}", is_mixed),
    ("registry-token", "CLOJARS_ clojars_", rf"{_ALNUM}{{60}}", None),
    (
        "api-key",
        "gsk_ xai- r8_ pplx- ntn_ secret_ lin_ figd_ sbp_ sb_secret_ PMAK- key- pcsk_ csk- tvly- nfp_ napi_ CFPAT- pnu_"
        " pnb_ duffel_live_ duffel_test_ tfp_ pscale_pw_ pscale_tkn_ pscale_oauth_",
        r"[A-Za-z0-9_.=-]{30,}",
        is_mixed,
    ),
    ("api-key", "dop_v1_ doo_v1_ dor_v1_ shpat_ shpca_ shppa_ shpss_", rf"{_HEX}{{32,}}", None),
    ("api-key", "shippo_live_ shippo_test_ pul- bkua_ sqp_ squ_ sqa_", rf"{_HEX}{{40}}", None),
    ("api-key", "sgp_", rf"(?:(?:{_HEX}{{16}}|local)_)?{_HEX}{{40}}", None),
    ("api-key", "sntryu_ s-s4t2ud- s-s4t2af-", rf"{_HEX}{{64}}", None),
    ("api-key", "p8e-", rf"{_ALNUM}{{32}}(?!{_ALNUM})", is_mixed),
    ("api-key", "NRAK-", rf"{_ALNUM}{{27,}}", is_mixed),
    ("api-key", "NRII- NRIQ- NRAL- NRRA-", rf"{_WORD}{{32,}}", is_mixed),
    ("api-key", "NRJS-", rf"{_HEX}{{19}}", None),
    ("api-key", "glsa_", rf"{_ALNUM}{{32}}_{_HEX}{{8}}", None),
    ("api-key", "glc_", r"[A-Za-z0-9+/]{32,}={0,3}", is_mixed),
    ("api-key", "tskey-", r"[A-Za-z0-9-]{16,}", is_mixed),
    ("api-key", "lsv2_pt_ lsv2_sk_", rf"{_HEX}{{32}}_{_HEX}{{10}}", None),
    ("api-key", "re_", rf"{_ALNUM}{{8}}_{_ALNUM}{{20,}}", is_mixed),
    ("api-key", "ops_", r"eyJ[A-Za-z0-9+/_-]{60,}={0,3}", None),
    ("api-key", "fo1_", rf"{_WORD}{{43}}", is_mixed),
    ("api-key", "fm1r_ fm1a_ fm2_", r"[A-Za-z0-9+/]{40,}={0,3}", is_mixed),
    ("api-key", "A3-", r"[A-Z0-9]{6}-(?:[A-Z0-9]{11}|[A-Z0-9]{6}-[A-Z0-9]{5})(?:-[A-Z0-9]{5}){3}", is_mixed),
    ("api-key", "xkeysib- xsmtpsib-", rf"{_HEX}{{64}}-{_ALNUM}{{16}}", None),
    ("api-key", "rdme_", r"[a-z0-9]{70}", is_mixed),
    ("api-key", "tk-us- tk-eu-", rf"{_WORD}{{48}}", is_mixed),
    ("api-key", "sm_aat_ sm_pat_ sm_sat_", rf"{_ALNUM}{{16}}(?!{_ALNUM})", is_mixed),
    ("api-key", "sq0atp- sq0csp-", rf"{_WORD}{{22,60}}", is_mixed),
    ("api-key", "ico-", rf"{_ALNUM}{{32}}(?!{_ALNUM})", is_mixed),
    ("api-key", "HRKU-", rf"AA{_WORD}{{58}}", None),
    ("api-key", "API-", r"[A-Z0-9]{26}(?![A-Za-z0-9])", is_mixed),
    ("api-key", "access-sandbox- access-development- access-production-", _UUID, None),
    ("api-key", "v1.0-", rf"{_HEX}{{24}}-{_HEX}{{146}}", None),
    ("api-key", "dnkey-", r"[A-Za-z0-9=_-]{26}-[A-Za-z0-9=_-]{52}", is_mixed),
    ("api-key", "FLWSECK_TEST- FLWSECK-", r"[a-h0-9]{12,32}(?:-X)?", is_mixed),
    ("api-key", "fio-u-", r"[A-Za-z0-9=_-]{64}", is_mixed),
    ("api-key", "live_ test_", r"(?:pub_)?[a-f0-9]{31,35}(?![A-Za-z0-9])", is_mixed),
    ("api-key", "SG.", rf"{_WORD}{{16,}}\.{_WORD}{{16,}}", None),
    ("api-key", "hvs. hvb. hvr. sntrys_", r"[A-Za-z0-9_=+/-]{20,}", is_mixed),
    ("api-key", "s.", rf"{_ALNUM}{{24}}(?![A-Za-z0-9_.])", lambda s: is_mixed(s) and _has_both_cases(s[2:])),
    ("api-key", "sl.", r"[A-Za-z0-9=_-]{130,}", is_mixed),
    ("api-key", "dt0c01. dt0s01.", rf"{_ALNUM}{{24}}\.{_ALNUM}{{64}}", None),
    ("api-key", "sk. tk.", rf"eyJ{_WORD}{{20,}}\.{_WORD}{{20,}}", None),  # Mapbox
    ("api-key", "t1.", rf"{_WORD}{{16,}}={{0,2}}\.{_WORD}{{86}}={{0,2}}", None),  # Yandex
    ("api-key", "AGE-SECRET-KEY-", r"1[0-9A-Z]{40,}", None),
    ("api-key", "sha256~", rf"{_WORD}{{43}}(?!{_WORD})", is_mixed),  # OpenShift
)
_ID_AND_SECRET = r"A[A-Z]{3}[A-Z0-9]{16}[\s,\"':|]{1,8}(?P<secret>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+])"
_AWS_IDS = "AKIA ASIA ABIA ACCA"
# Kind, how they begin, the pattern from there.
_SOLID: tuple[tuple[str, str, str, Accept], ...] = (
    ("aws-key-id", _AWS_IDS, r"[A-Z0-9]{20}(?![A-Za-z0-9])", None),
    ("aws-secret-key", _AWS_IDS, _ID_AND_SECRET, None),  # follows the id in a credentials file or table
    ("google-key", "AIza", rf"{_WORD}{{39}}", None),
    ("google-token", "1//0", r"1//0[A-Za-z0-9_-]{30,}", is_mixed),
    ("api-key", "dapi", rf"dapi{_HEX}{{32}}(?:-\d)?", None),
    ("api-key", "ATATT3 ATCTT3", r"[A-Za-z0-9_=-]{36,}", None),
    ("api-key", "ATBB", rf"ATBB{_ALNUM}{{32}}(?!{_ALNUM})", is_mixed),
    ("api-key", "LTAI", rf"LTAI{_ALNUM}{{12,20}}(?!{_ALNUM})", is_mixed),  # Alibaba
    ("api-key", "EZAK EZTK", rf"{_ALNUM}{{58}}(?!{_ALNUM})", is_mixed),
    ("api-key", "EAA", rf"(?<!/)EAA[A-Z]{_ALNUM}{{100,}}", is_mixed),  # Facebook
    ("api-key", "AKCp", rf"{_ALNUM}{{73}}(?!{_ALNUM})", is_mixed),  # Artifactory
    ("api-key", "cmVmd", rf"{_ALNUM}{{64}}(?![A-Za-z0-9+/=])", is_mixed),
    ("api-key", "4b1d", rf"{_ALNUM}{{42}}(?!{_ALNUM})", _has_both_cases),  # ClickHouse
    ("api-key", "AQVN", rf"AQVN{_WORD}{{35,38}}(?!{_WORD})", is_mixed),
    ("gitlab-token", "GR1348941", rf"{_WORD}{{29}}", _has_both_cases),
    ("api-key", "eyJrIjoi", r"[A-Za-z0-9+/]{70,}={0,3}(?![.A-Za-z0-9_-])", None),  # Grafana
    ("jwt", "eyJ", rf"eyJ{_WORD}{{8,4000}}+\.{_WORD}{{8,20000}}+\.{_WORD}*", None),
    ("jwt", "ZXlKaGJHY2lP ZXlKMGVYQWlP ZXlKcmFXUWlP", r"[A-Za-z0-9+/_-]{60,}={0,2}", None),  # in base64 once more
    *(("api-key", "SK" + c, rf"SK{_HEX}{{32}}(?!{_ALNUM})", is_mixed) for c in "0123456789abcdefABCDEF"),  # Twilio
)
# What stands before a run that is a token's last part; the token begins where the match does.
_DOTTED = re.compile(
    rf"""(?<![A-Za-z0-9_-])(?:(?P<doppler>dp\.(?:pt|st|ct|sa|scim|audit)\.(?:[a-z0-9_-]{{2,35}}\.)?)
    |(?P<terraform>{_ALNUM}{{14}}\.atlasv1\.)|(?P<airtable>pat{_ALNUM}{{14}}\.)
    |(?P<harness>(?:pat|sat)\.{_WORD}{{22}}\.[A-Za-z0-9]{{24}}\.)|(?P<discord>[MNO]{_WORD}{{22,27}}\.{_WORD}{{6}}\.)
    |(?P<authress>(?:sc|ext|scauth|authress)_[a-z0-9]{{5,30}}\.[a-z0-9]{{4,6}}\.acc[_-][a-z0-9-]{{10,32}}\.))\Z""",
    re.VERBOSE,
)
_DOTTED_BODIES = {
    "doppler": re.compile(rf"{_ALNUM}{{40,44}}"),
    "terraform": re.compile(r"[A-Za-z0-9=_-]{60,70}"),
    "airtable": re.compile(r"[a-f0-9]{64}"),
    "harness": re.compile(rf"{_ALNUM}{{20}}"),
    "discord": re.compile(rf"{_WORD}{{27,38}}"),
    "authress": re.compile(r"[A-Za-z0-9+/_=-]{30,120}"),
}
_DOTTED_REACH = 110
_DIGIT = re.compile("[0-9]")
_AZURE = re.compile(r"[A-Za-z0-9_.~-]{3}\dQ~[A-Za-z0-9_.~-]{31,34}(?![A-Za-z0-9_~-])")
_ENDING = re.compile(rf"{_ALNUM}{{6}}_{_ALNUM}{{29}}_mmk|(?<!{_HEX}){_HEX}{{32}}-us\d{{1,2}}")  # MaxMind, Mailchimp
_TELEGRAM = re.compile(r"AA[A-Za-z0-9_-]{33}(?![\w-])")
_TELEGRAM_ID = re.compile(r"\d{8}:\Z")


def _by_separator() -> dict[str, list[_Shape]]:
    """The prefixed shapes by their prefix's last two characters."""
    table: dict[str, list[_Shape]] = {}
    for kind, prefixes, body, accept in _PREFIXED:
        for prefix in prefixes.split():
            table.setdefault(prefix[-2:], []).append(_Shape(kind, prefix, re.compile(body), accept))
    return table


def _by_beginning() -> dict[str, list[_Shape]]:
    """The solid shapes by their first three characters."""
    table: dict[str, list[_Shape]] = {}
    for kind, beginnings, pattern, accept in _SOLID:
        for beginning in beginnings.split():
            body = re.compile(f"(?={re.escape(beginning)})(?:{pattern})")
            table.setdefault(beginning[:3], []).append(_Shape(kind, "", body, accept))
    return table


_SEPARATED = _by_separator()
_BEGUN = _by_beginning()


def _candidates() -> re.Pattern[str]:
    """Where in a run a body, or a solid token, may begin: after what could be the end of a prefix."""
    ends = []
    for separator in "-_~":
        tails = [prefix for _, prefixes, _, _ in _PREFIXED for prefix in prefixes.split() if prefix[-1] == separator]
        before, last = ("".join(sorted({re.escape(tail[at]) for tail in tails})) for at in (-3, -2))
        ends.append(f"(?<=[{before}][{last}]{separator})")
    first = "".join(sorted({beginning[0] for beginning in _BEGUN}))
    return re.compile(rf"[-_/~](?:{'|'.join(ends)}|(?<=Q~)|(?=[{first}]{_ALNUM}{{8}}))")


_CANDIDATE = _candidates()
_RUN = 16
_RUN_CHARACTERS = frozenset((string.ascii_letters + string.digits + "-_+/~").encode())
_CLASSES = bytes(ord("a") if byte in _RUN_CHARACTERS else ord(".") for byte in range(256))
_FULL_RUN = b"a" * _RUN


def one_byte_each(text: str) -> bytes:
    """The text with a byte for each character, `?` for those beyond Latin-1 but the two whose small letter is ASCII."""
    if text.isascii():
        return text.encode()
    return text.replace("İ", "i").replace("\N{KELVIN SIGN}", "k").encode("latin-1", "replace")


def find_tokens(text: str, data: bytes) -> list[Secret]:
    """Secrets in `text` that their own characters give away; data: its characters, as `one_byte_each` makes them."""
    found: list[Secret] = []
    classes = data.translate(_CLASSES)
    begin = classes.find(_FULL_RUN)
    while begin >= 0:
        end = classes.find(b".", begin)
        if end < 0:
            end = len(classes)
        places = [place.end() for place in _CANDIDATE.finditer(text, begin, end)]
        last = text[begin - 1 : begin]
        if last == "." or text[begin : begin + 3] in _BEGUN:
            places.insert(0, begin)
        if places:
            found += _at_places(text, begin, last, places)
        if last == ".":
            found += _dotted(text, begin, end)
        if last == ":" and (match := _TELEGRAM.match(text, begin)) and _TELEGRAM_ID.search(before(text, begin, 9)):
            found.append(Secret(*match.span(), "telegram-token"))
        if text.endswith("_mmk", begin, end) or "-us" in text[end - 5 : end]:
            for match in _ENDING.finditer(text, max(end - 60, begin), end):
                found.append(Secret(*match.span(), "api-key"))
        begin = classes.find(_FULL_RUN, end)
    return found


def _at_places(text: str, begin: int, last: str, places: list[int]) -> Iterator[Secret]:
    """Secrets whose body, or which themselves, begin at one of the places in the run that begins at `begin`.

    last: the character before the run.
    """
    done, rejected = 0, dict[str, int]()
    for at in places:
        if at < done:
            continue
        found: list[Secret] = []
        if (at > begin or last == ".") and (shapes := _SEPARATED.get(text[at - 2 : at])):
            found = _prefixed(text, at, shapes, rejected)
        if not found and text[at : at + 3] in _BEGUN:
            found = _solid(text, at)
        if not found and text[at - 2 : at] == "Q~" and (azure := _AZURE.match(text, max(at - 6, 0))):
            found = [Secret(*azure.span(), "api-key")]
        for secret in found:
            yield secret
            done = secret.end


def _prefixed(text: str, at: int, shapes: list[_Shape], rejected: dict[str, int]) -> list[Secret]:
    """The token whose body begins at `at`, if its prefix stands before it.

    rejected: where the last body ended that did not look random; what ends there too does not either.
    """
    for kind, prefix, body, accept in shapes:
        begin = at - len(prefix)
        if begin < 0 or not text.startswith(prefix, begin) or (begin and _is_alnum(text[begin - 1])):
            continue
        if at < rejected.get(prefix, 0) or not (match := body.match(text, at)):
            continue
        if _is_drawn(match[0]) and (accept is None or accept(prefix + match[0])):
            return [Secret(begin, match.end(), kind)]
        rejected[prefix] = match.end()
    return []


def _solid(text: str, at: int) -> list[Secret]:
    """What begins at `at` as tokens without a separator do: one, or two where a secret follows its id."""
    return [
        Secret(*match.span("secret" if pattern.groups else 0), kind)
        for kind, _, pattern, accept in _BEGUN[text[at : at + 3]]
        if (match := pattern.match(text, at)) and (accept is None or accept(match[0]))
    ]


def _dotted(text: str, at: int, end: int) -> Iterator[Secret]:
    """The token whose last part, of several with dots between, is the run from `at` to `end`."""
    if _DIGIT.search(text, at, end) and (head := _DOTTED.search(before(text, at, _DOTTED_REACH))):
        assert head.lastgroup is not None
        if body := _DOTTED_BODIES[head.lastgroup].match(text, at):
            yield Secret(at - len(head[0]), body.end(), "api-key")


def _is_alnum(character: str) -> bool:
    return character.isascii() and character.isalnum()


def _is_drawn(body: str) -> bool:
    """Whether a body is more than one character many times over, as in documentation."""
    return len(set(body.lower()) - set("-_.")) >= 2
