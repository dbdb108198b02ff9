"""Redaction at its bounds: the shortest that goes and the longest that stays, and each condition by itself.

A case is a text in which what goes stands between « and »; without such a part all of it stays.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

from spark.extract.redact import redact, redact_value

KEY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC"
CASES = """\
# Of two secrets that overlap the one that begins first; what stands before a placeholder goes, too.
password="«https://bob:pw9x8y7z@host»"
token=«abcd1234efgh5678» then [REDACTED:secret] and [REDACTED:password]
# A salt of WordPress by its name, and an entry of another table.
define('AUTH_SALT', '«these are words and 12 digits, more than 32»')
option('site_salt', 'these are words and 12 digits, more than 32')
# The value of a line of its own, by the case of its name and by what is between.
DB_PASSWORD=«a1b2;c3d4ef»
db_password=«a1b2»;c3d4ef
page_token: ab12(cd)34efgh
token: «ab12(cd)34efgh»
password: abcdef;ghijkl
password: «123456»;789012
password: ab1;c
password: «ab1;cd»
DB_PASSWORD=«$ecret99x»
password: $ecret99x
# XML, where the name stands behind a bracket and the end has one, too.
<secret>«kw9Secr3tXyz»</secret>
secret>kw9Secr3tXyz</b><
<a secret>kw9Secr3tXyz <b>
# The argument of an option and of a Dockerfile's instruction.
mytool --token «abcd1234efg-»
mytool --token -abcd1234efgh
ENV API_TOKEN «abcd1234»
ENV API_TOKEN abcd123
ENV DB_PASSWORD "«/abc9x»"
# Name and value side by side in a list: eight characters, no space.
["token", "«aB12cD34»"]
["token", "aB12cD3"]
["token", "aB12 cD34 eF56"]
# npm's settings, which are never code.
//registry.example.org/:_password=«somewords»
//registry.example.org/:password=somewords
x _password=somewords
/:_password=«somewords»
//registry.example.org/:_auth=«short»
x:_auth=short
_auth=«abcdefghijk=»
_auth=abcdefghijkl
# A call and an item.
token=make1token2value3(seed)
token=make1token2value3[seed]
x password=abc123, y
x password=«abc123»; y
# A line of a file of settings, with an equals sign alone.
[client]\\nhost=x\\npassword=«rootpw»\\n
[client]\\nhost=x\\npassword: rootpw\\n
x = 1\\n\\n[client]\\npassword=«rootpw»\\n
[client]\\nhost=x\\ntoken=abcd1234\\n
# A header as a string of its own.
'x-api-key: «abcd1234»', 1
'x-api-key: «abcd1234»'
'x-api-key=abcd1234'
\\nx-api-key: abcd1234\\n
'x-api-key: abcd1234,
xapikey('apikey: abcd1234')
# What begins as a path.
DB_PASSWORD=/srv/key9
DB_PASSWORD="«/srv/key9»"
password=«a/b/key9»
# Digits alone, and how many characters a bare value has.
token: 123456789012
token: abcdef-ghi1
token: «abcdef-ghij1»
# A key of AWS that begins with a slash: 40 characters, six capitals, six small letters.
secret_key = "«/ABCDEFabcdef012345678901234567890123456»"
secret_key = "/ABCDE0abcdef012345678901234567890123456"
secret_key = "/ABCDEFabcde0012345678901234567890123456"
secret_key = "/ABCDEFabcdef01234567890123456789012345"
secret_key = "/ABCDEFabcdef012345678901234567890123456!"
# Other schemes than basic and bearer, and parameters behind a scheme.
Authorization: Custom required-by-version-2-of-it
Authorization: Custom «aB3dE5gH7jK9mN1p»
Authorization: Custom realm=aB3dE5gH7jK9mN1p
Authorization: Custom aB3dE5gH7jK=9mN1p
Authorization: Custom «aB3dE5gH7jK9=mN1p»
Authorization: Basic <credentials9>
Authorization: Bearer «abcdefghijabcde7»
Authorization: Bearer abcdefghijabcdef
# Cookies: two digits, eight characters of a session and 16 of any other; attributes; where the header ends.
Cookie: sid=«abcdef12»
Cookie: sid=abcdef1
Cookie: sid=abcde12
Cookie: sid=abcdefg1
Cookie: other=«abcdefghijklmn12»
Cookie: other=abcdefghijklm12
Cookie: other=abcdefghijklmno1
Cookie: other=abcdefghijklmnopqrst
Cookie: theme=dark12
Cookie: a=b; Path=/v12/abcdef345678; sid=«abcd1234efgh»
Cookie: sid=<abcd1234efgh>; user=abcd1234efgh
Cookie: sid=your-session-12; user=«abcd1234efgh»
Cookie: sid=«abcd1234efgh» rest; sid2=abcd1234efgh
Set-Cookie: sid=«abcd1234efgh»; Secure; HttpOnly; user=«abcd1234efgi»
Set-Cookie: sid=«abcd1234efgh»; user=«abcd1234efgi»; Secure; x=y
# A user and a password, after a program that takes them so; a key in the user's place.
curl -u bob:«hunter22x» https://h
tar -u bob:hunter22x
curl -u http://proxy:80/
curl -u "«aB3dE5gH7jK9mN1p»:x" https://h
curl -u "bob:x" https://h
# Options.
mysql -p«hunter22» -u bob
mysql -p --force
mysql -p<password>
sqlcmd -P «hunter22x»
mysql -pxxxxxxxx
mysql -p«hunter22-» -u bob
sshpass -p -v ssh
# A password that is written to a program.
echo «hunter22x» | docker login --password-stdin
echo <password> | docker login --password-stdin
echo «hunter22x» | sudo -S true
echo <password> | sudo -S true
# Keys of several lines, from their header on.
-----BEGIN PRIVATE KEY-----«\\n{KEY}{KEY}\\n»-----END PRIVATE KEY-----
-----END PRIVATE KEY-----\\n{KEY}{KEY}\\n
PRIVATE KEY-----\\n{KEY}{KEY}\\n
-----BEGIN PUBLIC KEY-----\\n{KEY}{KEY}\\n-----END PUBLIC KEY-----
# A Secret of Kubernetes, in a file of its own; its kind above or below.
kind: Secret\\ndata:\\n  a: «c2VjcmV0LXZhbHVl»\\n
data:\\n  a: «c2VjcmV0LXZhbHVl»\\nkind: Secret\\n
kind: ConfigMap\\ndata:\\n  a: c2VjcmV0LXZhbHVl\\n
kind: Secret\\n---\\ndata:\\n  a: c2VjcmV0LXZhbHVl\\n
data:\\n  a: c2VjcmV0LXZhbHVl\\n---\\nkind: Secret\\n
kind: Secret\\nif data:\\n  a: c2VjcmV0LXZhbHVl\\n
kind: Secret\\nstringdata:\\n  a: «c2VjcmV0LXZhbHVl»\\n
# Tokens of a known form: a digit and both cases, or four digits; a random part of 12.
«sk-proj-abcdefghijklmnopqrA1»
sk-proj-abcdefghijklmnopqrst
sk-proj-abcdefghijklmnopqr-12
sk-proj-abcdefghijklmnopq-123
«sk-proj-abcdefghijklmnop-1234»
Authorization: Custom abcdefghij12kl
Authorization: Custom ABCDEFGHIJ12KL
Authorization: Custom «abcdefghiJ1KL»
Authorization: Custom «abcdefgh1234»
Authorization: Custom abcdefgh-123
«sk-ab-cd-ef-abcdefghijA1»
sk-ab-cd-ef-gh-abcdefghiA1

12345678:«AAaB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zAb»
1234567:AAaB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zAb
«AKIAABCDEFGHIJ234567»
aGVsbG8+AKIAABCDEFGHIJ234567
«ghp_abababababababababababababababababab»
ghp_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
«s.aBcdefghijklmnopqrst1234»
s.abcdefghijklmnopqrst1234
# The last part of a token with dots has a digit.
«dp.pt.abcdefghijklmnopqrstuvwxyzabcdefghijklmnopq1»
dp.pt.abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqr
# Hashes of passwords.
«$1$abcd1234$abcdefghijklmnopqrstuv»
$1$ABCDEFGH$ABCDEFGHIJKLMNOPQRSTUV
«$1$ABCDEFGH$ABCDEFGHIJKLMNOPQRSTUv»
«$1$ABCDEFGH$ABCDEFGHIJKLMNOPQRSTU1»
«pbkdf2_sha256$260000$saltsaltsalt$9f3c9f3c9f3c9f3c9f3c9f3c9f3c=»
other_sha256$260000$saltsaltsalt$9f3c9f3c9f3c9f3c9f3c9f3c9f3c=
# Where a URL has its password.
https://bob:«hunter22x»@host/x
https://bob:8080/a@b
https://bob:<password>@host
https://«aB3dE5gH7jK9mN1pQ2rS»@host
https://abcdefghijklmnopqrst@host
""".replace("{KEY}", KEY)


def cases() -> list[str]:
    lines = CASES.replace("«x» «y»\n", "").splitlines()
    return [line.replace("\\n", "\n") for line in lines if not line.startswith("#")]


def plain(text: str) -> str:
    """Placeholders without their kinds."""
    return re.sub(r"\[REDACTED:[a-z-]+\]", "[]", text)


@pytest.mark.parametrize("case", cases())
def test_what_goes_and_what_stays(case: str) -> None:
    text, found = re.sub("[«»]", "", case), Counter[str]()
    redacted = redact(text, found)
    assert plain(redacted) == plain(re.sub("«.*?»", "[]", case, flags=re.DOTALL))
    assert found.total() == plain(redacted).count("[]") - plain(text).count("[]")


@pytest.mark.parametrize(
    ("before", "far", "after"),
    [
        ("mysql ", 400, " -p«hunter22x»"),
        ("[client]\n", 400, "password=«rootpw»\n"),
        ("kind: Secret\n", 4000, "data:\n  a: «c2VjcmV0LXZhbHVl»\n"),
    ],
)
def test_how_far_is_looked_back(before: str, far: int, after: str) -> None:
    """What says that something is a secret stands so many characters before it, and not further."""
    filler = "y" if before[-1] != "\n" else "#" * 99 + "\n"
    for n, goes in ((far - len(before), True), (far + 1 - len(before), False)):
        text = before + (filler * n)[-n:] + after
        expected = re.sub("«.*?»", "[]", text) if goes else text
        assert plain(redact(re.sub("[«»]", "", text))) == re.sub("[«»]", "", expected), n


def test_values_by_their_keys() -> None:
    long = "x" * 60 + "_token"
    for value, goes in (("abcd1234efgh", True), ("abcdefghijkl", False)):
        for key in ("token", long):
            assert (redact_value({key: value})[key] == "[REDACTED:secret]") == goes
