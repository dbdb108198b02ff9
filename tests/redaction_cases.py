"""The set that redaction is measured on: secrets in their surroundings, and text that only resembles them.

    python tests/redaction_cases.py        scores by kind; -v: what is wrong in the half for tuning

`redaction/secrets.txt` and `redaction/decoys.txt` hold cases, each `## kind | source` and then its text. A secret
stands between « and ». Nothing in the files is a whole secret, so that scanners and hosting sites leave them alone:
`<n:36>` stands for 36 characters drawn at random (always the same ones), and a broken bar, which cuts published
examples in two, is removed. Sources are published rules' own tests (gitleaks `cmd/generate/config/rules`,
detect-secrets `tests/plugins`, trufflehog `pkg/detectors`: their examples, or draws from the pattern that their tests
draw from), vendors' documents, and our own. Examples of rules' false positives are decoys unless the value is a
password all the same (`-u test:test`).

Half of the cases are kept aside: which half is decided by a hash of the text as written. Rules are made by looking at
the other half only; this program never shows a case of the half that is kept aside.
"""

from __future__ import annotations

import hashlib
import random
import re
import string
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "redaction"
LETTERS = string.ascii_letters + string.digits
ALPHABETS = {
    "h": "0123456789abcdef",
    "d": string.digits,
    "l": string.ascii_letters,
    "n": LETTERS,
    "a": string.ascii_lowercase + string.digits,
    "A": string.ascii_uppercase + string.digits,
    "B": string.ascii_uppercase + "234567",
    "w": LETTERS + "_-",
    "b": LETTERS + "+/",
    "c": LETTERS + "./",
    "Y": "qpzry9x8gf2tvdw0s3jn54khce6mua7l",
    "Z": "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L",
}


class Case(NamedTuple):
    """One text. secrets: the parts of it that must go, none for a decoy. aside: not for tuning."""

    kind: str
    source: str
    text: str
    secrets: tuple[str, ...]
    aside: bool


def load(name: str) -> list[Case]:
    """The cases of `secrets` or `decoys`."""
    cases = []
    for block in re.split(r"^## ", (FOLDER / f"{name}.txt").read_text("utf-8"), flags=re.MULTILINE)[1:]:
        title, _, written = block.removesuffix("\n").partition("\n")
        kind, _, source = title.partition(" | ")
        rng = random.Random(written)
        drawn = re.sub(r"<([a-zA-Z]):(\d+)>", lambda m: "".join(rng.choices(ALPHABETS[m[1]], k=int(m[2]))), written)  # noqa: B023
        drawn = drawn.replace("¦", "")
        aside = hashlib.sha256(written.encode()).digest()[0] % 2 == 1
        text = drawn.replace("«", "").replace("»", "")
        cases.append(Case(kind, source, text, tuple(re.findall("«(.*?)»", drawn, re.DOTALL)), aside))
    return cases


def leaks(case: Case, redacted: str) -> bool:
    """Whether a secret, or 12 characters in a row of one, is still there."""
    left = re.sub(r"\[REDACTED:[a-z-]+\]", "[]", redacted)  # which may name what it stands for, as a bad password does
    parts = (secret[i : i + 12] for secret in case.secrets for i in range(max(len(secret) - 11, 1)))
    return any(part in left for part in parts)


def main() -> None:
    """Print the scores."""
    sys.path.insert(0, str(FOLDER.parent.parent))
    from spark.extract.redact import redact

    for name in ("secrets", "decoys"):
        cases = load(name)
        wrong = [leaks(case, redact(case.text)) if case.secrets else redact(case.text) != case.text for case in cases]
        for half, aside in (("for tuning", False), ("kept aside", True)):
            marks = [bad for bad, case in zip(wrong, cases, strict=True) if case.aside == aside]
            right = 100 * (1 - sum(marks) / len(marks))
            print(f"{name} {half}: {sum(marks)} wrong of {len(marks)}, {right:.1f}% right")
        total = Counter(case.kind for case in cases)
        missed = Counter(case.kind for bad, case in zip(wrong, cases, strict=True) if bad)
        print(f"all {name}: {missed.total()} wrong of {len(cases)}")
        print("  by kind: " + ", ".join(f"{kind} {missed[kind]}/{total[kind]}" for kind in total))
        for bad, case in zip(wrong, cases, strict=True):
            if bad and not case.aside and "-v" in sys.argv:
                print(f"--- {case.kind} | {case.source}\n{case.text}\n=>\n{redact(case.text)}")


if __name__ == "__main__":
    main()
