"""The tables of README.md: speed on a GPU, and what policies miss."""

from __future__ import annotations

from benchmarks import misses_results
from benchmarks.markdown import Json, spread, table
from engine.placing.policies import POLICIES

NAMES = {each.name: each.label for each in POLICIES} | {"belady": "bound (Belady)"}
FAMILIES = {"laguna": "Laguna-XS.2", "qwen36": "Qwen3.6-35B-A3B"}


def tables(made: dict[str, Json]) -> list[str]:
    """All that README.md shows of results, by the names of their files."""
    return [*speed(made), *quality(made["pipeline.json"])]


def misses_of(row: Json) -> str:
    """Misses a token, and the interval around them."""
    if row["misses_low"] is None or not row["misses_per_token"]:
        return f"{row['misses_per_token']:.2f}"
    return f"{row['misses_per_token']:.2f} ({row['misses_low']:.2f} to {row['misses_high']:.2f})"


def quality(made: Json) -> list[str]:
    """Misses a token of each policy, a column for each residency."""
    report = made["results"]["validate"]
    parts = report["residencies"]
    rows = []
    for i, row in enumerate(parts[0]["rows"]):
        same = [part["rows"][i]["identical_tokens"] for part in parts]
        rows.append([NAMES[row["policy"]], *(misses_of(part["rows"][i]) for part in parts),
                     "" if None in same else "yes" if all(same) else "NO"])  # fmt: skip
    return [
        f"Misses a token on held-out sessions of the bundled model ({report['generated_tokens']:,} generated tokens of "
        f"{report['sessions']} sessions, 24 uses each; 95% intervals; {report['prompts']} prompts served; "
        "[RESULTS.md](RESULTS.md)):",
        "",
        *table(["policy", *(f"{part['residency_pct']:g}% resident" for part in parts), "same tokens"], rows),
        *(f"At {part['residency_pct']:g}%: {part['verdict']}.  " for part in parts),
        "",
    ]


def speed(made: dict[str, Json]) -> list[str]:
    """Speed on the GPU for the README, of what has been measured."""
    rows = []
    if "decode.json" in made:
        report = made["decode.json"]
        rows += [[f"decode at depth {r['depth_tokens']:,}, all resident", spread(r["decode_tokens_per_s"], 1)]
                 for r in report.get("all_resident", [])]  # fmt: skip
        rows += [
            [f"decode, {report['curve_settings']['residency_pct']:.0f}% resident, {r['miss_pct']:.1f}% missed, by PCIe",
             spread(r["decode_tokens_per_s"], 1)]
            for r in report.get("curve", [])
            if round(r["miss_pct"], 1) in (0, 1, 6.6, 20) and misses_results.is_plain(r)
        ]  # fmt: skip
    if "decode-cpu_experts.json" in made:
        report = made["decode-cpu_experts.json"]
        rows += [
            [f"the same, {r['miss_pct']:.1f}% missed, with the CPU", spread(r["decode_tokens_per_s"], 1)]
            for r in report["curve"]
            if round(r["miss_pct"], 1) in (1, 6.6, 20) and r["cpu_experts"] == "auto" and r["guesses"] == "off"
        ]
    if "prefill.json" in made:
        rows += [[f"prefill of {r['prompt_tokens']:,}, {r['residency_pct']:.0f}% resident",
                  spread(r["prefill_tokens_per_s"])] for r in made["prefill.json"]["prompts"]]  # fmt: skip
    for key, model in FAMILIES.items():
        for r in made.get(f"decode-{key}.json", {}).get("all_resident", []):
            rows.append([f"{model}, decode at depth {r['depth_tokens']:,}", spread(r["decode_tokens_per_s"], 1)])
    if not rows:
        return []
    one = made.get("decode.json") or made["prefill.json"]
    about = f"{one['model']} ({one['model_bytes'] / 2**30:.1f} GiB) on one {one['host']['gpu']}, batch 1:"
    return [about, "", *table(["", "tokens/s"], rows), *real_policies(made.get("decode-policies.json"))]


def real_policies(made: Json | None) -> list[str]:
    """What policies make of sessions that they were not fitted to, on the GPU."""
    if made is None:
        return []
    speed = {(r["residency_pct"], r["policy"]): spread(r["decode_tokens_per_s"], 1) for r in made["policies"]}
    percents, served = (list(dict.fromkeys(key)) for key in zip(*speed, strict=True))
    text = "The same, tokens/s under real policies on sessions of the model of routing that they were not fitted to:"
    return [text, "", *table(
        ["policy", *(f"{percent:g}% resident" for percent in percents)],
        [[NAMES[policy], *(speed[percent, policy] for percent in percents)] for policy in served],
    )]  # fmt: skip
