"""The section of RESULTS.md about guessed experts."""

from __future__ import annotations

from benchmarks.markdown import Json, origin, table

COUNTED = """\
The bundled model; beginnings of {prompts} held-out sessions and {generate} tokens decoded greedily behind each, on
the CPU backend, under the policy `spark` without a profile. Guesses are counted and nothing is fetched. *Right*:
guesses of an expert that was missing and used, of all guesses, with 95% intervals over prompts; *found*: such
guesses a token, and of the misses in the layers that can be guessed for; *wasted*: KiB a token of all other guesses.
A token has 24 uses. *This*: from the residual that enters the layer, *next* and *after*: one and two MoE layers
earlier. *At most*: guesses a layer, and the chance that each has to exceed. `router`: the target layer's router,
applied early; `previous`: what the last tokens used; `draft`: with lookup drafts, what the tokens of a draft used
that was rejected, for the step behind it. Tokens, and without drafts slots, are those of decoding without guesses:
{same}."""
JUDGED = """\
What `spark train-pregate` says of the same on {tokens:,} held-out tokens of the sessions that it was given, each
with the experts resident that a replay has; *said*: the mean chance of the guesses."""
LAYERS = ("this", "next", "after")


def guesses(name: str, made: Json) -> list[str]:
    percents = list(dict.fromkeys(r["residency_pct"] for r in made["rows"]))
    ways = list(dict.fromkeys(map(way_of, made["rows"])))
    of = {(r["residency_pct"], *way_of(r)): r for r in made["rows"]}
    lines = ["## Guessed experts, counted", "", *origin(name, made)]
    same = all(r["same_tokens"] and (r["same_slots"] or r["draft"] != "off") for r in made["rows"])
    text = COUNTED.format(prompts=made["prompts"], generate=made["generate"], same="yes" if same else "NO")
    columns = ["predictor", "layer", "at most"]
    for percent in percents:
        columns += [f"{percent:g}%: right", "found", "wasted"]
    rows = []
    for way in ways:
        cells = [way[0], "all" if way[0] == "draft" else LAYERS[way[1]], at_most(way[2], way[3])]
        for percent in percents:
            r = of[percent, *way]
            right = r["precision"]
            cells += [
                f"{right['value']:.0%} ({100 * right['low']:.0f} to {100 * right['high']:.0f})",
                f"{r['useful_per_token']:.2f}, {r['recall']['value']:.0%}",
                f"{r['wasted_bytes_per_token'] / 1024:.0f}",
            ]
        rows.append(cells)
    lines += [text, "", *table(columns, rows)]
    trained = made["trained"]
    rows = [
        [f"{r['residency_pct']:g}%", r["predictor"].replace("_", " "), LAYERS[r["ahead"]],
         at_most(r["budget"], r["threshold"]), f"{r['precision']:.1%}", f"{r['promised']:.1%}",
         f"{r['useful_per_token']:.2f} of {r['misses_per_token']:.2f}, {r['recall']:.0%}",
         f"{r['wasted_bytes_per_token'] / 1024:.0f}"]
        for r in trained["guesses"] if r["ahead"] and r["predictor"] in ("mlp", "router")
    ]  # fmt: skip
    columns = ["resident", "predictor", "layer", "at most", "right", "said", "found", "wasted"]
    return [*lines, JUDGED.format(tokens=trained["held_out_tokens"]), "", *table(columns, rows)]


def way_of(row: Json) -> tuple[str, int, int, float]:
    return row["source"], row["ahead"], row["budget"], row["threshold"]


def at_most(budget: int, threshold: float) -> str:
    return f"{budget}, above {threshold:.0%}" if threshold else f"{budget}"


SECTIONS = {"guesses.json": guesses}
