"""The tables of README.md: speed on a GPU, and what policies miss."""

from __future__ import annotations

from benchmarks.markdown import Json, spread, table
from engine.placing.policies import POLICIES

NAMES = {each.name: each.label for each in POLICIES} | {"belady": "bound (Belady)"}
FAMILIES = {"laguna": "Laguna-XS.2", "qwen36": "Qwen3.6-35B-A3B"}
QWEN3 = "Qwen3-30B-A3B"
DECODED = ((QWEN3, "decode.json"), *((name, f"decode-{key}.json") for key, name in FAMILIES.items()))


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
    return [
        *resident(made),
        *missed(made.get("decode-cpu_experts.json")),
        *real_policies(made.get("decode-policies.json")),
        *prompts(made.get("prefill.json")),
    ]


def resident(made: dict[str, Json]) -> list[str]:
    """Decoding with every expert resident, a row for each model, a column for each depth."""
    found = [(name, made[file]) for name, file in DECODED if made.get(file, {}).get("all_resident")]
    if not found:
        return []
    depths = [r["depth_tokens"] for r in found[0][1]["all_resident"]]
    rows = []
    for name, one in found:
        speeds = {r["depth_tokens"]: spread(r["decode_tokens_per_s"], 1) for r in one["all_resident"]}
        rows.append([f"{name} ({one['model_bytes'] / 2**30:.1f} GiB)", *(speeds.get(d, "") for d in depths), at(one)])
    return [
        f"On one {found[0][1]['host']['gpu']}, one reply at a time, weights made up in the shapes of each model. "
        "Decoding with every expert resident, tokens/s:",
        "",
        *table(["model", *(f"at depth {d:,}" for d in depths), "measured at"], rows),
    ]


def missed(made: Json | None) -> list[str]:
    """Decoding with a share of experts missed: over PCIe alone, and shared with the CPU."""
    if made is None:
        return []
    curve = [r for r in made["curve"] if r["guesses"] == "off"]
    by = {(round(r["miss_pct"], 1), r["cpu_experts"]): r["decode_tokens_per_s"] for r in curve}
    rows = []
    for pct in dict.fromkeys(pct for pct, _ in by):
        alone, shared = by[pct, "off"], by[pct, "auto"]
        ratio = f"{shared['median'] / alone['median']:.2f}"
        rows.append([f"{pct:g}%", spread(alone, 1), spread(shared, 1), ratio])
    percent = made["curve_settings"]["residency_pct"]
    return [
        f"{QWEN3}'s shapes with {percent:.0f}% of the experts resident, by the share of a token's experts that is "
        f"missed, tokens/s (measured at {at(made)}):",
        "",
        *table(["missed", "over PCIe alone", "shared with the CPU", "ratio"], rows),
    ]


def prompts(made: Json | None) -> list[str]:
    """Reading prompts, a column for each residency."""
    if made is None:
        return []
    by = {(r["prompt_tokens"], r["residency_pct"]): spread(r["prefill_tokens_per_s"]) for r in made["prompts"]}
    lengths, percents = (list(dict.fromkeys(key)) for key in zip(*by, strict=True))
    return [
        f"Reading a prompt with {QWEN3}'s shapes, tokens/s (measured at {at(made)}):",
        "",
        *table(
            ["prompt", *(f"{percent:.0f}% resident" for percent in percents)],
            [[f"{n:,} tokens", *(by.get((n, percent), "") for percent in percents)] for n in lengths],
        ),
    ]


def at(made: Json) -> str:
    """The commit of a result, shortened, and its day."""
    return f"{made['commit'][:8]}, {made['created'][:10]}"


def real_policies(made: Json | None) -> list[str]:
    """What policies make of sessions that they were not fitted to, on the GPU."""
    if made is None:
        return []
    speed = {(r["residency_pct"], r["policy"]): spread(r["decode_tokens_per_s"], 1) for r in made["policies"]}
    percents, served = (list(dict.fromkeys(key)) for key in zip(*speed, strict=True))
    text = (
        f"{QWEN3}'s shapes under real policies, on sessions of the model of routing that they were not fitted to, "
        "tokens/s:"
    )
    return [text, "", *table(
        ["policy", *(f"{percent:g}% resident" for percent in percents)],
        [[NAMES[policy], *(speed[percent, policy] for percent in percents)] for policy in served],
    )]  # fmt: skip
