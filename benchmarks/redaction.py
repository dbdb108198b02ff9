"""How many planted secrets go from extracted sessions, by kind, and how many texts that only resemble them are touched.

    python benchmarks/redaction.py --json data/results/redaction.json

The set is tests/redaction/, written down before the rules; half of it was kept aside while they were tuned.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.driving import note  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from spark.extract.redact import redact  # noqa: E402
from spark.results import write_json  # noqa: E402
from tests.redaction_cases import leaks, load  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    json_option(parser)
    o = parser.parse_args()
    secrets, decoys = load("secrets"), load("decoys")
    gone = [not leaks(case, redact(case.text)) for case in secrets]
    touched = [redact(case.text) != case.text for case in decoys]
    planted = Counter(case.kind for case in secrets)
    went = Counter(case.kind for case, is_gone in zip(secrets, gone, strict=True) if is_gone)
    report = {
        "rows": [{"kind": kind, "secrets": n, "gone": went[kind]} for kind, n in planted.items()],
        "decoys": len(decoys),
        "touched": sum(touched),
        "aside": sum(case.aside for case in secrets),
        "aside_gone": sum(is_gone for case, is_gone in zip(secrets, gone, strict=True) if case.aside),
        "aside_decoys": sum(case.aside for case in decoys),
        "aside_touched": sum(was for case, was in zip(decoys, touched, strict=True) if case.aside),
    }
    note(f"{sum(gone)} of {len(secrets)} secrets go, {sum(touched)} of {len(decoys)} decoys are touched")
    if o.json is not None:
        write_json(o.json, report)


if __name__ == "__main__":
    main()
