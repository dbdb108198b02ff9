"""What decode.py measured of misses that the CPU computes or that were guessed, as tables (benchmarks/render.py)."""

from __future__ import annotations

from benchmarks.markdown import Json, spread, table


def is_plain(row: Json) -> bool:
    """Whether a row of the curve is of misses that cross PCIe when they are asked for."""
    return str(row.get("cpu_experts", "off")) == str(row.get("guesses", "off")) == "off"


def on_cpu(made: Json) -> list[str]:
    """The curve with experts on the CPU, and with guesses, beside the one without; nothing where there is none."""
    curves: dict[str, dict[float, Json]] = {}
    for row in made["curve"]:
        cpu, guesses = row.get("cpu_experts", "off"), row.get("guesses", "off")
        name = f"`{cpu}`" if guesses == "off" else f"`{cpu}`, guesses {guesses}"
        curves.setdefault(name, {})[row["asked_miss_pct"]] = row
    if len(curves) < 2:
        return []
    others = dict.fromkeys(r["cpu_experts"] for r in made["curve"] if r.get("cpu_experts", "off") != "off")

    def cell(row: Json | None) -> str:
        if row is None:
            return ""
        handed = f", {row['cpu_computed']:,} to the CPU" if row.get("cpu_computed") else ""
        handed += f", {row['cpu_divided']:,} divided" if row.get("cpu_divided") else ""
        back = f" ({row['cpu_taken_back']:,} taken back)" if row.get("cpu_taken_back") else ""
        came = ""
        if row.get("guess_made"):
            taken = row["guess_useful_bytes"] / max(1, row["guess_useful_bytes"] + row["guess_wasted_bytes"])
            came = f", {row['guess_useful']:,} of {row['guess_made']:,} guesses right, {taken:.0%} of their bytes taken"
        return f"{row.get('share', 0):.3f}{handed}{back}{came}"

    found = [f"`--cpu-experts {name}`: {_said(made.get('cpu_experts', {}).get(name))}" for name in others]
    return [
        "Shares of the speed without misses, by who computes what misses; the tokens are the same.", "",
        *found, *([""] if found else []),
        *table(
            ["missed", *curves],
            [[f"{pct:g}%", *(cell(rows.get(pct)) for rows in curves.values())] for pct in next(iter(curves.values()))],
        ),
    ]  # fmt: skip


def _said(settings: Json | list[str] | None) -> str:
    if not isinstance(settings, dict):
        return "; ".join(reason for reason in settings or () if "experts on the CPU" in reason)
    times = ", ".join(f"{us:.0f}" for us in settings["cpu_us"])
    return (
        f"{len(settings['cpus'])} threads; an expert takes {settings['pcie_us']:.0f} us over PCIe, 1 to "
        f"{len(settings['cpu_us'])} take {times} us on the CPU, a hand-over {settings['handover_us']:.0f} us"
    )


def turns(made: Json) -> list[str]:
    """New turns of prefill.py, by who computes what misses; the engine's counters go on from row to row."""
    rows, before = [], (0, 0)
    for r in made["turns"]:
        found, share = r.get("cpu_experts"), ""
        if found is not None:
            now = found["computed"], found["taken_back"]
            before = (0, 0) if now < before else before
            done, taken = (a - b for a, b in zip(now, before, strict=True))
            before, share = now, f"{done / (done + taken):.0%}" if done + taken else "nothing"
        rows.append([
            f"{r['new_tokens']:,} on {r['prefix_tokens']:,}, {r['residency_pct']:.0f}%",
            "`off`" if found is None else "`auto`", spread({k: 1e3 * v for k, v in r["seconds"].items()}, 1),
            f"{1e3 * r['without_prefix_s']['median']:.1f}", share,
        ])  # fmt: skip
    return table(
        ["new tokens, prefix, resident", "experts on the CPU", "ms", "without a prefix, ms", "it took of the offer"],
        rows,
    )
