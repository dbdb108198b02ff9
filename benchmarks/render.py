"""Render RESULTS.md, and the table in README.md, from data/results/*.json. Numbers are never typed.

python benchmarks/render.py           # write
python benchmarks/render.py --check   # exit 1 if what is there is not what would be written
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import (  # noqa: E402
    cluster_results,
    draft_results,
    files_results,
    guess_results,
    handover_results,
    kv_results,
    misses_results,
    mutant_results,
    readme_results,
    robustness,
    server_results,
)
from benchmarks.markdown import Json, origin, percent, spread, table  # noqa: E402
from benchmarks.readme_results import FAMILIES, NAMES, misses_of  # noqa: E402
from engine.placing.policies import UNIFORM  # noqa: E402

RESULTS = ROOT / "data" / "results"
BEGIN, END = "<!-- begin: results -->", "<!-- end: results -->"
FAULTS_BEGIN, FAULTS_END = "<!-- begin: mutants -->", "<!-- end: mutants -->"

LADDER = """\
Held-out sessions, replayed under each policy; the same accesses for all. One unit is one active expert of one layer
for one generated token (6 layers, 4 of 32 experts). The bound may divide the budget anew at every step and knows the
future. *Same tokens*: every policy served the prompts for real, and gave the tokens of the all-resident run."""
POLICIES = """\
Routing of sessions, replayed under each rule; placements, and what `spark` does, are from the sessions of `{chosen}`.
Intervals are from a bootstrap over root sessions. *Tried*: rules that the engine does not have (docs/residency.md)."""
KERNELS = """\
A product of one activation row against a plain parallel read of the same bytes, alternating in one run; medians and
extremes in GB/s."""
SERVED = """\
{model}, {size:.1f} GiB, batch 1, random prompts, each sent once; the daemon's own timing; medians and extremes."""
CURVE = """\
The share of active experts that miss is imposed (docs/routing-model.md), slots are fixed, and the daemon's count of
misses is checked layer by layer. *Line*: the time without misses plus the missed bytes at the rate of PCIe, which is
what a system takes that overlaps nothing."""
SESSIONS = """\
Sessions of the synthetic routing, one a request, under real policies; the profile is of other sessions. *Simulated*:
the misses of the same sessions by `engine/placing/simulate.py`, the warm-up included."""
TURNS = """\
New tokens on a prefix that is in the KV cache, and as many without one; in one process, on the engine itself."""
ROUTING = """\
Hit rates of the synthetic routing ([docs/routing-model.md](docs/routing-model.md)) at the published model's shapes."""
CUDA_KERNELS = """\
Each kernel in a graph of its own launches, rotating through more data than the L2 cache holds; bytes are the least
that a launch must move. A plain copy within the device moves {copy:,.0f} GB/s (read and written), one from page-locked
memory {host:.1f} GB/s."""
BATCHED = """\
{model}, {size:.1f} GiB: several requests at once, each with a prompt of {depth:,} random tokens and {tokens:,}
generated. The rate is of the stretch in which all decode; first token: of the last one, of prompts sent together."""
BESIDE = "Beside it llama.cpp's llama-batched-bench on the same file, in turns."
PROFILE = """\
All {launches} kernels of one {what} at depth {depth:,}, {how}; together {kernels:,.0f} us one after the other, of which
overlapping leaves a step of {step:,.0f} us."""
ON_THE_PATH = """\
*On the path*: from when a kernel's first block has what it waits for until the next kernel's has, summed over the
launches (the stamps make a step a few percent longer)."""
BEFORE_AFTER = """\
Two installs in turns on one machine: before the layer loop was written once and the modules moved into rooms, and after
(docs/design.md, "Layout"). Tokens are equal. On the CPU: the processor's time of the daemon."""
SOAK = """\
{minutes:.0f} minutes of {clients} clients at {residency:.0f}% residency: {requests:,} requests ({kinds}), {tokens:,}
generated tokens, {misses:.1%} of active experts missed. Problems: {problems}."""
HEAD = """\
# Results

Rendered by `make results` from `data/results/*.json`; see `benchmarks/`. The machines are shared: ratios within one
run hold, absolute times are of that day.
"""




def ladder(report: Json) -> list[str]:
    """The policies at one residency."""
    rows = []
    for row in report["rows"]:
        same = {True: "yes", False: "NO", None: ""}[row["identical_tokens"]]
        moves = "" if row["moves_per_token"] is None else f"{row['moves_per_token']:.2f}"
        rows.append([NAMES[row["policy"]], percent(row["hit_rate"]), misses_of(row), moves, same])
    return table(["policy", "hits", "misses a token (95%)", "moves a token", "same tokens"], rows)


def pipeline(name: str, made: Json) -> list[str]:
    results = made["results"]
    lines = ["## The pipeline on the reference model", "", *origin(name, made)]
    lines += [LADDER, ""]
    report = results["validate"]
    pcts = ",".join(f"{part['residency_pct']:g}" for part in report["residencies"])
    lines += [f"    spark validate MODEL.gguf test.parquet --profile train.csv --residency {pcts}", ""]
    for part in report["residencies"]:
        about = f"{report['generated_tokens']:,} generated tokens of {report['sessions']} sessions"
        title = f"### {part['residency_pct']:g}% of the expert bytes in slots"
        lines += [f"{title} ({about}; {report['prompts']} prompts served)", ""]
        lines += [*ladder(part), f"Verdict: {part['verdict']}.", ""]
    lines += ["### Calibrated on one kind of log, tested on the other (60% in slots)", ""]
    rows = []
    for family in ("claude", "codex"):
        (report,) = results[f"cross {family}"]["residencies"]
        rates = {r["policy"]: r for r in report["rows"]}
        for policy in dict.fromkeys(r["policy"] for r in report["cross"]):
            crossed = [r for r in report["cross"] if r["policy"] == policy]
            rows.append([f"{family} sessions, {policy}", *(percent(1 - r["hit_rate"]) for r in (
                rates[UNIFORM.name], rates[policy], *crossed))])  # fmt: skip
    columns = ["misses of active experts", UNIFORM.name, "own logs' profile", "the other's", "both logs' profile"]
    lines += table(columns, rows)
    lines += ["### Time and memory of each command", ""]
    lines += table(
        ["command", "seconds", "peak MiB", "tokens/s"],
        [[f"`{r['command']}`", f"{r['seconds']:.1f}", f"{r['peak_mib']:.0f}",
          spread(r["tokens_per_s"]) if "tokens_per_s" in r else ""] for r in made["rows"]],
    )  # fmt: skip
    serve = results["serve"]
    served = f"{made['decode_tokens_per_s']:,.0f} tokens/s, median over {results['validate']['prompts'] - 1} prompts"
    http = f"{spread(serve['tokens_per_s'])} tokens/s, first token after {1000 * serve['first_s']['median']:.0f} ms"
    lines += [f"`spark calibrate` read {results['calibrate']['tokens']:,} tokens. Decode, all resident: {served}.", ""]
    lines += [f"Over HTTP at 60% residency: {http}.", ""]
    lines += ["### Pre-gate: recall of the active experts, mean over layers, held-out sessions", ""]
    kinds: dict[tuple[int, str], list[Json]] = {}
    for row in results["train-pregate"]["rows"]:
        kinds.setdefault((int(row["target_layer"] > row["layer"]), row["predictor"]), []).append(row)
    rows = [[f"{'next' if offset else 'this'} layer, {predictor.replace('_', ' ')}",
             *(percent(sum(r[k] for r in found) / len(found)) for k in ("recall_1x", "recall_2x", "recall_3x"))]
            for (offset, predictor), found in sorted(kinds.items(), key=lambda item: item[0][0])]  # fmt: skip
    return lines + table(["from the residual entering a layer", "first A", "first 2A", "first 3A"], rows)


def policies(name: str, made: Json) -> list[str]:
    """Replacement rules, a table for each set and residency."""
    lines = ["## Replacement rules", "", *origin(name, made), POLICIES.format(chosen=made["chosen_on"]), ""]
    for key in dict.fromkeys((r["set"], r["residency_pct"]) for r in made["rows"]):
        rows = [r for r in made["rows"] if (r["set"], r["residency_pct"]) == key]
        about = f"{rows[0]['generated_tokens']:,} generated tokens of {rows[0]['sessions']} sessions"
        lines += [f"### {key[0]}, {key[1]:g}% resident ({about})", ""]
        lines += table(
            ["rule", "misses a token (95%)", "against LRU (95%)", "moves a token"],
            [[r["rule"], misses_of(r),
              f"{r['against_lru_pct']:+.1f}% ({r['against_lru_low']:+.1f} to {r['against_lru_high']:+.1f})",
              "" if r["moves_per_token"] is None else f"{r['moves_per_token']:.2f}"] for r in rows],
        )  # fmt: skip
    return lines


def kernels(name: str, made: Json) -> list[str]:
    lines = ["## CPU kernels", "", *origin(name, made)]
    lines += [KERNELS, ""]
    lines += table(
        ["type", "MiB", "plain read", "product", "share"],
        [[r["type"], r["size_mib"], spread(r["read_gb_per_s"], 1), spread(r["product_gb_per_s"], 1),
          percent(r["ratio"])] for r in made["matrix_vector"]],
    )  # fmt: skip
    lines += ["Small batches, billions of multiply-adds a second.", ""]
    return lines + table(
        ["type", "rows x cols, T", "GMAC/s"],
        [[r["type"], f"{r['rows']} x {r['cols']}, {r['tokens']}", spread(r["gmac_per_s"], 0)] for r in made["batches"]],
    )


def robust(title: str, rows: Callable[[Json], robustness.Rows]) -> Callable[[str, Json], list[str]]:
    """A section of benchmarks/robustness.py."""

    def section(name: str, made: Json) -> list[str]:
        text, columns, found = rows(made)
        return [f"## {title}", "", *origin(name, made), text, "", *table(columns, found)]

    return section


def rows_of(title: str):
    """A section whose JSON is `rows` of plain records."""

    def section(name: str, made: Json) -> list[str]:
        columns = list(made["rows"][0])
        shown = [[f"{v:,.3g}" if isinstance(v, float) else v for v in r.values()] for r in made["rows"]]
        return [f"## {title}", "", *origin(name, made), *table(columns, shown)]

    return section


def served(made: Json) -> str:
    return SERVED.format(model=made["model"], size=made["model_bytes"] / 2**30)


def family(name: str) -> str:
    """What a heading adds for another model than the one that is measured in full."""
    key = name.removesuffix(".json").partition("-")[2]
    return f": {(FAMILIES | PARTS | DENSE)[key]}" if key else ""


def decode(name: str, made: Json) -> list[str]:
    lines = [f"## Decoding{family(name)}", "", *origin(name, made), served(made), ""]
    if "all_resident" in made:
        lines += table(
            ["all resident, depth", "tokens/s", "tokens/s of the prompt"],
            [[f"{r['depth_tokens']:,}", spread(r["decode_tokens_per_s"], 1), spread(r["prefill_tokens_per_s"])]
             for r in made["all_resident"]],
        )  # fmt: skip
    if "curve" in made:
        lines += [CURVE, ""]
        lines += table(
            [f"missed, {made['curve_settings']['residency_pct']:.0f}% resident", "tokens/s", "ms", "missed MB a token",
             "line, ms", "of the line"],
            [[f"{r['miss_pct']:.1f}%", spread(r["decode_tokens_per_s"], 1), f"{r['ms_per_token']['median']:.3f}",
              f"{r['missed_bytes_per_token'] / 1e6:.1f}", f"{r['line_ms']:.3f}" if "line_ms" in r else "",
              f"{r['ratio']:.2f}" if "ratio" in r else ""]
             for r in made["curve"] if misses_results.is_plain(r)],
        )  # fmt: skip
        lines += misses_results.on_cpu(made)
    if "policies" in made:
        lines += [SESSIONS, ""]
        lines += table(
            ["policy", "missed", "simulated", "tokens/s", "missed MB a token"],
            [[f"{r['policy']}, {r['residency_pct']:g}% resident" + (f": {r['choice']}" if r.get("choice") else ""),
              f"{r['miss_pct']:.1f}%",
              f"{r['simulated_miss_pct']:.1f}%", spread(r["decode_tokens_per_s"], 1),
              f"{r['missed_bytes_per_token'] / 1e6:.1f}"] for r in made["policies"]],
        )  # fmt: skip
    return lines


def prefill(name: str, made: Json) -> list[str]:
    lines = [f"## Prefill{family(name)}", "", *origin(name, made), served(made), ""]
    lines += table(
        ["prompt, resident", "tokens/s", "seconds"],
        [[f"{r['prompt_tokens']:,} tokens, {r['residency_pct']:.0f}%", spread(r["prefill_tokens_per_s"]),
          f"{r['seconds']['median']:.3f}"] for r in made["prompts"]],
    )  # fmt: skip
    if not made.get("turns"):
        return lines
    lines += [TURNS, ""]
    return lines + table(
        ["new tokens, prefix, resident", "ms", "without a prefix, ms", "ratio"],
        [[f"{r['new_tokens']:,} on {r['prefix_tokens']:,}, {r['residency_pct']:.0f}%",
          spread({k: 1e3 * v for k, v in r["seconds"].items()}, 1), f"{1e3 * r['without_prefix_s']['median']:.1f}",
          f"{r['ratio']:.2f}"] for r in made["turns"]],
    )  # fmt: skip


def turns_beside(name: str, made: Json) -> list[str]:
    """New turns with and without experts on the CPU."""
    lines = ["## New turns, with missed experts on the CPU", "", *origin(name, made), served(made), "", TURNS, ""]
    return lines + misses_results.turns(made)


def bench(name: str, made: Json) -> list[str]:
    """`spark bench --json`."""
    rows = []
    for r in made["rows"]:
        same = {True: "yes", False: "NO", None: ""}[r["identical_tokens"]]
        decoding, prefilling = (
            f"{r[f'{part}_tokens_per_s']:,.{digits}f} ({', '.join(f'{x:,.{digits}f}' for x in r[f'{part}_spread'])})"
            for part, digits in (("decode", 1), ("prefill", 0))
        )
        rows.append([f"{r['residency_pct']:.1f}%, {r['policy']}", f"{r['miss_pct']:.1f}%", decoding, prefilling,
                     f"{r['device_bytes'] / 2**30:.2f}", same])  # fmt: skip
    prompts, generated = f"{made['prompt_tokens']} tokens of {made['prompts']}", made["generate_tokens"]
    about = f"{Path(made['model']).name} on {made['device']}: prompts of {prompts}, {generated} tokens generated."
    columns = ["resident", "missed", "decode tokens/s", "prefill tokens/s", "device GiB", "same tokens"]
    lines = ["## `spark bench`", "", *origin(name, made), about, "", *table(columns, rows)]
    for skipped in made["skipped"]:
        lines += [f"Left out: {skipped['residency_pct']:g}%, {skipped['reason']}.", ""]
    return lines


def routing(name: str, made: Json) -> list[str]:
    columns = ("static", "lru", "oracle", "previous_token")
    lines = ["## Synthetic routing", "", *origin(name, made), ROUTING, ""]
    return lines + table(
        ["resident", "placed by other sessions", "LRU", "best placement for each prompt", "token before"],
        [[f"{r['residency_pct']:g}%", *(percent(r[key]) for key in columns)] for r in made["rows"]],
    )


def cuda_kernels(name: str, made: Json, title: str = "CUDA kernels") -> list[str]:
    device = made["device"]
    lines = [f"## {title}", "", *origin(name, made)]
    lines += [CUDA_KERNELS.format(copy=device["copy_gb_per_s"], host=device["host_to_device_gb_per_s"]), ""]
    rows = []
    for r in made["rows"]:
        if "error" in r:
            rows.append([f"{r['part']}: {r['name']}", f"failed: {r['error'].splitlines()[0]}", "", "", ""])
            continue
        rows.append([f"{r['part']}: {r['name']}", spread(r["us"], 2), f"{r['gb_per_s']:,.0f}", percent(r["copy_share"]),
                     f"{r['tflop_per_s']:,.1f}" if r["n_flops"] else ""])  # fmt: skip
    return lines + table(["kernel", "us", "GB/s", "of a copy", "TFLOP/s"], rows)


def profile_step(name: str, made: Json) -> list[str]:
    shared, each = made.get("sequences", 1), made.get("tokens_each", 1)
    if each > 1:
        heading = f"A step of {each} given tokens"
    elif shared > 1:
        heading = f"A step that {shared} sequences share"
    else:
        heading = f"One decoded token{family(name)}"
    lines = [f"## {heading}", "", *origin(name, made)]
    lines += [PROFILE.format(launches=made["launches"], depth=made["depth_tokens"], how=made["measured_by"],
                             kernels=made["kernels_us"], step=made["step_us"],
                             what="token" if shared == each == 1 else "step")]  # fmt: skip
    stamped = any(row.get("path_us") for row in made["rows"])
    lines += [*([ON_THE_PATH] if stamped else []), ""]
    return lines + table(
        ["kernel", "launches", "us each", "us", "share", *(["us on the path"] if stamped else []), "GB/s"],
        [[f"`{r['kernel']}`", r["count"], f"{r['us']:.2f}", f"{r['total_us']:,.1f}", percent(r["share"]),
          *([f"{r['path_us']:,.1f}" if r["path_us"] else ""] if stamped else []),
          "" if r["gb_per_s"] is None else f"{r['gb_per_s']:,.0f}"] for r in made["rows"]],
    )  # fmt: skip


def batched(name: str, made: Json, what: str = "") -> list[str]:
    model, size = made["model"], made["model_bytes"] / 2**30
    text = BATCHED.format(model=model, size=size, depth=made["depth"], tokens=made["tokens"])
    if any("llama_cpp" in row for row in made["rows"]):
        text += " " + BESIDE
    return [f"## Requests at once: {model.partition(' ')[0]}{what}", "", *origin(name, made), text, "", *table(
        ["at once", "tokens/s", "llama.cpp", "ratio", "first token, ms"],
        [[r["requests"], spread(r["spark"]["tokens_per_s"]),
          spread(r["llama_cpp"]["tokens_per_s"]) if "llama_cpp" in r else "",
          f"{r['ratio']:.2f}" if "ratio" in r else "",
          f"{1e3 * r['spark']['first_token_s']['median']:.0f}"] for r in made["rows"]],
    )]  # fmt: skip


def milliseconds(seconds: Json, digits: int) -> str:
    return spread({key: value if key == "n" else 1e3 * value for key, value in seconds.items()}, digits)


def first_token(name: str, made: Json) -> list[str]:
    text = "Prompts that were never sent before, to a server and to a daemon in turn; milliseconds to the first token."
    return ["## The first token over HTTP", "", *origin(name, made), text, "", *table(
        ["tokens of prompt", "HTTP", "daemon", "added"],
        [[f"{r['tokens']:,}", milliseconds(r["http_s"], 1), milliseconds(r["daemon_s"], 1), f"{1e3 * r['added_s']:.1f}"]
         for r in made["rows"]],
    )]  # fmt: skip


def given_tokens(name: str, made: Json) -> list[str]:
    text = "Random tokens, all logits; from the call until the device is done."
    return [f"## Steps of several given tokens{family(name)}", "", *origin(name, made), text, "", *table(
        ["depth", "sequences", "tokens each", "ms"],
        [[f"{r['depth']:,}", r["sequences"], r["tokens_each"],
          milliseconds(r["seconds"], 2)] for r in made["rows"]],
    )]  # fmt: skip


def forms_speed(name: str, made: Json) -> list[str]:
    rows = [
        [kind, whose, spread(figure), percent(figure["of_free"])]
        for kind, figures in made["rows"].items()
        for whose, figure in figures.items()
    ]
    text = f"Replies of {made['tokens']} tokens under a JSON schema and without, the kinds in turns on one daemon."
    columns = ["requests at once", "of those that are", "tokens/s each", "of free"]
    return ["## Speed under a form", "", *origin(name, made), text, "", *table(columns, rows)]


def memory_plan(name: str, made: Json) -> list[str]:
    def gib(n: int) -> str:
        return f"{n / 2**30:.3f}"

    return ["## Device memory: planned and measured", "", *origin(name, made), *table(
        ["--vram", "resident", "planned GiB", "measured GiB", "off by MiB", "decode tokens/s"],
        [[f"{r['vram_gib']:g}", f"{r['residency_pct']:.1f}%", gib(r["planned_bytes"]), gib(r["measured_bytes"]),
          f"{r['error_bytes'] / 2**20:+.0f}", f"{r['decode_tokens_per_s']:,.1f}"] for r in made["rows"]],
    )]  # fmt: skip


def next_turn(name: str, made: Json) -> list[str]:
    def ms(figure: Json) -> str:
        return f"{1e3 * figure['median']:.1f} ({1e3 * figure['min']:.1f} to {1e3 * figure['max']:.1f})"

    text = (
        f"A prompt of {made['prompt']:,} tokens, a reply of {made['reply']:,}, and both again with {made['more']:,} "
        "tokens more: time to the first token of that second turn. A reply was computed in the steps of decoding; "
        "`--exact-prefixes` reuses it only after idle time has read it again as a prompt."
    )
    return ["## The next turn", "", *origin(name, made), text, "", *table(
        ["reply", "first token, ms", "idle time used, ms", "inexact tokens", "logits as without prefixes"],
        [[r["way"], ms(r["seconds"]), f"{1e3 * r['idle_s']['median']:.1f}", f"{r['inexact_tokens']:,}", r["logits"]]
         for r in made["rows"]],
    )]  # fmt: skip


def before_after(name: str, made: Json) -> list[str]:
    on_gpu = made["device"] == "cuda"
    lines = [f"## Before and after the rooms, {'GPU' if on_gpu else 'CPU'}", "", BEFORE_AFTER, "", *origin(name, made)]
    installs = ("before", "after")
    if on_gpu:
        rows = [[r["what"], *(", ".join(map(spread, r[install])) for install in installs)] for r in made["speeds"]]
        return [*lines, *table(["tokens/s", *installs], rows)]
    rows = []
    for r in made["rows"]:
        quartiles = " to ".join(f"{q:.3f}" for q in r["ratio"]["quartiles"])
        times = [f"{1000 * r['median_s'][install]:.1f}" for install in installs]
        rows.append([f"{r['residency_pct']:g}%", r["prompt_tokens"], r["generated_tokens"], *times,
                     f"{r['ratio']['median']:.3f} ({quartiles})"])  # fmt: skip
    columns = ["resident", "prompt", "generated", "ms before", "ms after", "ratio of pairs (quartiles)"]
    return [*lines, *table(columns, rows)]


def soak(name: str, made: Json) -> list[str]:
    grown = ", ".join(f"{key.removesuffix('_bytes').replace('_', ' ')} {n / 2**20:+.0f} MiB"
                      for key, n in made["growth_bytes"].items() if n is not None)  # fmt: skip
    text = SOAK.format(
        minutes=made["seconds"] / 60, clients=made["clients"], residency=made["settings"]["residency_pct"],
        requests=sum(made["requests"].values()), tokens=made["generated_tokens"],
        kinds=", ".join(f"{n:,} {kind}" for kind, n in sorted(made["requests"].items())),
        misses=made["misses"] / max(1, made["hits"] + made["misses"]), problems="; ".join(made["problems"]) or "none",
    )  # fmt: skip
    return ["## Soak", "", *origin(name, made), text, "", f"Growth from the second quarter to the last: {grown}.", ""]


DENSE = {"dense": "Qwen3.6-27B"}
MIXTURES = {"q4": "Q4_K_M", "q3": "Q3_K_M", "iq2": "UD-IQ2_XXS"}
# Of a measurement that has a file of its own.
PARTS = {
    "policies": "real policies", "cpu_experts": "experts on the CPU", "guesses": "guessed experts", **MIXTURES,
}  # fmt: skip
SHARED = (2, 4, 8)  # sequences of a step
GIVEN = tuple(f"given-{n}" for n in (2, 16, 32))  # tokens of one sequence in a step


SECTIONS = {
    "pipeline.json": pipeline,
    "policies.json": policies,
    **guess_results.SECTIONS,
    "decode.json": decode,
    "prefill.json": prefill,
    "prefill-cpu_experts.json": turns_beside,
    **{f"decode-{key}.json": decode for key in (*PARTS, *FAMILIES)},
    **{f"prefill-{key}.json": prefill for key in FAMILIES},
    "bench.json": bench,
    "batched.json": batched,
    "batched-16.json": partial(batched, what=", up to sixteen"),
    **{f"batched-{key}.json": batched for key in ("gemma", *FAMILIES)},
    **{
        f"batched-cpu{key}.json": partial(batched, what=f" on the CPU, {threads}")
        for key, threads in (("", "two threads"), ("-nano", "two threads"), ("-nano-1", "one thread"))
    },
    "given_tokens.json": given_tokens,
    "given_tokens-dense.json": given_tokens,
    **draft_results.SECTIONS,
    **kv_results.SECTIONS,
    **cluster_results.SECTIONS,
    "forms_speed.json": forms_speed,
    "first_token.json": first_token,
    "cuda_kernels.json": cuda_kernels,
    "cuda_wide.json": partial(cuda_kernels, title="CUDA kernels: ways to make products of a few rows"),
    "cuda_types.json": partial(cuda_kernels, title="CUDA kernels: every block type"),
    **handover_results.SECTIONS,
    **misses_results.SECTIONS,
    "profile_step.json": profile_step,
    **{f"profile_step-{key}.json": profile_step for key in (*FAMILIES, *SHARED, *GIVEN)},
    "next_turn.json": next_turn,
    "memory_plan.json": memory_plan,
    "exactness.json": rows_of("Exactness on the GPU"),
    "calibrate.json": rows_of("Calibration on the GPU"),
    "calibrate-gemma.json": rows_of("Calibration on the GPU: Gemma-4-26B-A4B's shapes"),
    "compile_kernels.json": rows_of("Compiling the CUDA kernels"),
    "soak.json": soak,
    "before_after.json": before_after,
    "before_after-gpu.json": before_after,
    "load.json": server_results.load,
    "agent_replay.json": server_results.agent_replay,
    "agent_replay-35k.json": server_results.agent_replay,
    "agent_replay-94k.json": server_results.agent_replay,
    "clients.json": server_results.clients,
    "other_clients.json": server_results.other_clients,
    "routing_model.json": routing,
    "cpu_kernels.json": kernels,
    "extract_memory.json": rows_of("Extraction of large logs"),
    "open_gguf.json": rows_of("Opening GGUF files"),
    **files_results.SECTIONS,
    **{name: robust(*section) for name, section in robustness.SECTIONS.items()},
}


def documents() -> dict[Path, str]:
    """The files that are rendered, and what they should hold."""
    made = {name: json.loads((RESULTS / name).read_text()) for name in SECTIONS if (RESULTS / name).exists()}
    lines = [HEAD]
    for name, section in SECTIONS.items():
        if name in made:
            lines += section(name, made[name])
    readme, faults = ROOT / "README.md", ROOT / "docs" / "mutation.md"
    rendered = {
        ROOT / "RESULTS.md": "\n".join(lines),
        readme: between(readme, BEGIN, END, readme_results.tables(made)),
    }
    if (planted := RESULTS / "mutants.json").exists():
        lines = mutant_results.page(json.loads(planted.read_text()))
        rendered[faults] = between(faults, FAULTS_BEGIN, FAULTS_END, lines)
    return rendered


def between(path: Path, begin: str, end: str, lines: list[str]) -> str:
    """A file's text with other lines between two marks."""
    before, _, rest = path.read_text().partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n" + "\n".join(lines) + f"{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    for path, text in documents().items():
        if args.check and path.read_text() != text:
            sys.exit(f"{path.name} is not what data/results holds: run `make results`")
        path.write_text(text)


if __name__ == "__main__":
    main()
