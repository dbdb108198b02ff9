"""What `spark validate` is asked in the tests of clusters, and what one machine answers."""

from __future__ import annotations

import json
from typing import Any

from spark.pipeline import validate
from spark.pipeline.validate import ValidateOptions
from tests.cluster.clusters import CONFIG, DEADLINES, Expected, quiet

# What one machine does not find twice either: slots adapt when nothing runs, which is a matter of time.
TIMED = ("decode_tokens_per_s", "prefill_tokens_per_s", "served_hit_rate")


def options(expected: Expected, **more: Any) -> ValidateOptions:
    profile = expected.tokens.parent / "one.csv"
    given: dict[str, Any] = {"residencies": (25.0,), "max_tokens": 4_000, "prompts": 2, "generate_tokens": 5}
    return ValidateOptions(expected.tokens, profile, (profile,), **(given | more))


def on_one(expected: Expected, **more: Any) -> dict[str, Any]:
    return untimed(validate.validate(CONFIG, options(expected, **more), DEADLINES, quiet).to_json())


def untimed(report: dict[str, Any]) -> dict[str, Any]:
    """A report without what depends on time, and without what a cluster adds."""
    made: dict[str, Any] = json.loads(json.dumps(report))
    for ladder in made["residencies"]:
        for row in (*ladder["rows"], *ladder["cross"]):
            for key in TIMED:
                assert row[key] is None or row.pop(key) > 0
    return {key: value for key, value in made.items() if key not in ("workers", "climbers", "set_aside", "refused")}
