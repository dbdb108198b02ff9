"""What was measured of misses that the CPU computes or that were guessed, as tables (benchmarks/render.py).

By decode.py, batched_misses.py, prefill.py, never_below.py, divisions.py and predictions.py.
"""

from __future__ import annotations

from benchmarks.markdown import Json, origin, spread, table

PREDICTED = """\
What `spark bench` predicts (spark/pipeline/predict.py): a line through two places, at {fit}% missed of the first
residency, says what a token takes at all others. *Of it*: predicted by measured tokens/s; promised is {least:.2f} to
{most:.2f}. {worst}"""
BELOW = """\
Replies with `--cpu-experts {cpu} --guess auto` beside those with both off, in turns, {pairs} of each; {tokens:,} tokens
from the fault on, {rate:g}% of active experts missed where the case does not say otherwise. Gates begin anew with each
reply. *Of PCIe alone*: medians, and the least and the largest of a pair. Promised is {least:g}; below it: {below}.
The daemon said: {said}. The first reply of a kind, whose steps are captured, takes up to {once:.0f} ms more, once a
start."""

SHARED = """\
Steps that requests share, {resident:g}% of the experts resident, misses imposed on each row. *The line*: the step
without misses, and the bytes of distinct missed experts at {rate:g} GB/s. *Faster*: over PCIe by with the CPU. The
table of what the CPU gets follows what layers wait, so the first steps of a start have less of it."""


DIVIDED = """\
Each layer of each token misses exactly so many experts; what of them the CPU computes is held: whole experts, and last
rows of gate and up of one more. *Us*: what a layer takes longer than one that misses nothing. *Predicted*: by the costs
that were measured as the model loaded, by which the table begins ({costs}). *Waited*: for the CPU's answers when copies
had ended. Nothing missed: a token takes {base:.3f} ms."""


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
        back += f" ({row['cpu_off']})" if row.get("cpu_off") else ""
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


def divisions(name: str, made: Json) -> list[str]:
    """Rows of divisions.py; the best division of each number of misses in bold."""
    lines, by_missed = list[list[str]](), dict[int, list[Json]]()
    for row in made["rows"]:
        by_missed.setdefault(row["missed"], []).append(row)
    for missed, rows in by_missed.items():
        best = min(row["layer_us"] for row in rows)
        for row in rows:
            us = f"{row['layer_us']:.1f}"
            lines.append([
                str(missed), str(row["experts"]), str(row["rows"]), f"**{us}**" if row["layer_us"] == best else us,
                f"{row['predicted_us']:.1f}", f"{row['waited_us']:.1f}",
            ])  # fmt: skip
    return [
        "## Misses of a layer, divided between PCIe and the CPU", "", *origin(name, made),
        DIVIDED.format(costs=_said(made["cpu_experts"]), base=made["base_us"] / 1e3), "",
        *table(["missed", "experts by the CPU", "rows of one more", "us", "predicted", "waited"], lines),
    ]  # fmt: skip


def shared_steps(name: str, made: Json) -> list[str]:
    """Rows of batched_misses.py, those over PCIe alone beside those with experts on the CPU."""
    plain, others = ([r for r in made["rows"] if (r["cpu_experts"] == "off") == is_off] for is_off in (True, False))
    beside = {(r["requests"], r["asked_miss_pct"]): r for r in others}
    rows = []
    for row in plain:
        other = beside.get((row["requests"], row["asked_miss_pct"]))
        jobs = ["", "", ""]
        if other is not None:
            gain = row["ms_per_step"]["median"] / other["ms_per_step"]["median"]
            jobs = [spread(other["ms_per_step"], 2), f"{gain:.2f}", f"{other.get('computed', 0):,}"]
            jobs[2] += f" ({other['taken_back']:,} taken back)" if other.get("taken_back") else ""
        rows.append([
            f"{row['requests']} at once, {row['asked_miss_pct']:g}%", spread(row["ms_per_step"], 2),
            f"{row['ratio']:.2f}", *jobs,
        ])  # fmt: skip
    found = [
        f"`--cpu-experts {cpu}`: {_said(settings['cpu_experts'] or settings['reasons'])}"
        for cpu, settings in made["settings"].items() if cpu != "off"
    ]  # fmt: skip
    text = SHARED.format(resident=made["residency_pct"], rate=made["pcie_gb_per_s"])
    columns = ["missed", "over PCIe, ms a step", "of the line", "with the CPU, ms", "faster", "experts by the CPU"]
    return ["## Misses of shared steps", "", *origin(name, made), text, *found, "", *table(columns, rows)]


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


def never_below(name: str, made: Json) -> list[str]:
    """Faults, and what decoding has left of its speed without experts on the CPU and guesses."""
    below = [row["case"] for row in made["rows"] if row.get("ratio", 1.0) < made["least"]]
    words = made["command"].split()
    captures = [ms for kind, ms in made["first_of_a_kind_ms"].items() if kind.startswith("on: greedy")]
    text = BELOW.format(
        cpu=words[words.index("--cpu-experts") + 1] if "--cpu-experts" in words else "auto", pairs=made["pairs"],
        tokens=made["tokens"], rate=made["rate_pct"], least=made["least"], below=", ".join(below) or "none",
        said=made["said"], once=max([0.0, *captures]),
    )  # fmt: skip
    return [
        "## Never below PCIe alone", "", *origin(name, made), text, "",
        *table(
            ["case", "off, tokens/s", "on, tokens/s", "of PCIe alone", "jobs done (taken back)", "gates in the end"],
            [[f"{r['case']}: {r['what']}, {r['begins']}" + (f" ({r['how']})" if r.get("how") else ""), *_case(r)]
             for r in made["rows"]],
        ),
    ]  # fmt: skip


def _case(row: Json) -> list[str]:
    failed = f"failed: {row['error'].splitlines()[0]}" if "error" in row else ""
    if "ratio" not in row:
        return [failed, "", "", "", ""]
    low, high = row["ratios"]
    same = "" if row["identical"] else ", OTHER TOKENS"
    jobs, guesses = row.get("jobs"), row.get("guesses")
    done = f"{jobs['computed'] + jobs['divided']:,} ({jobs['taken_back']:,})" if jobs else ""
    gates = [f"jobs {row['gate']}" + (f" ({row['why']})" if row["why"] else "")] if jobs else []
    if guesses is not None:
        made = f", {guesses['useful']:,} of {guesses['made']:,} right" if guesses["made"] else ""
        gates.append(f"guesses {'on' if row['guesses_on'] else 'off'}{made}")
    return [
        spread(row["off_tokens_per_s"], 1), spread(row["on_tokens_per_s"], 1),
        f"{row['ratio']:.3f} ({low:.3f} to {high:.3f}){same}", done, "; ".join([*gates, *([failed] if failed else [])]),
    ]  # fmt: skip


def predictions(name: str, made: Json) -> list[str]:
    """Predicted speeds beside those that were measured."""
    of = {"predictions-laguna.json": ": Laguna-XS.2"}.get(name, "")
    found = [
        f"{'`spark bench`' if what == 'bench' else f'`--cpu-experts {what}`'} {ratio:.3f}"
        for what, ratio in made["worst"].items() if ratio is not None
    ]  # fmt: skip
    off = made["most_wrong"]
    text = PREDICTED.format(
        fit=" and ".join(f"{pct:g}" for pct in made["fit_pct"]), least=1 - off, most=1 + off,
        worst=f"Furthest from 1: {', '.join(found)}.",
    )  # fmt: skip
    rows = [
        [f"`{r['cpu_experts']}`, {r['residency_pct']:g}%, {r['miss_pct']:.1f}%", spread(r["decode_tokens_per_s"], 1),
         *(["fitted", ""] if r["fitted"] else _said_of(r))]
        for r in made["rows"]
    ]  # fmt: skip
    for r in made.get("bench", {}).get("rows", []):
        low, high = r["decode_spread"]
        measured = f"{r['decode_tokens_per_s']:,.1f} ({low:,.1f} to {high:,.1f})"
        place = f"`spark bench`, {r['residency_pct']:.1f}%, {r['miss_pct']:.1f}%"
        rows.append([place, measured, *(["fitted", ""] if r["predicted_of_measured"] is None else _said_of(r))])
    columns = ["experts on the CPU, resident, missed", "measured tokens/s", "predicted", "of it"]
    return [f"## Predicted speed{of}", "", *origin(name, made), text, "", *table(columns, rows)]


def _said_of(row: Json) -> list[str]:
    return [f"{row['predicted_tokens_per_s']:,.1f}", f"{row['predicted_of_measured']:.3f}"]


SECTIONS = {
    "batched_misses.json": shared_steps,
    "divisions.json": divisions,
    "never_below.json": never_below,
    **{f"predictions{model}.json": predictions for model in ("", "-laguna")},
}
