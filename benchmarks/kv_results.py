"""The sections of RESULTS.md about the KV cache: larger than its pool, in other types, and of what comes back."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from statistics import median

from benchmarks.markdown import Json, origin, percent, table

POOL = """\
{model}, with {shape} shapes, cache in {kv_type}. Steps of one sequence at a depth, with a share of its blocks in the
pool and the others at home in host memory; medians of {runs} and extremes, in ms. *Line*: the same step with everything
on the GPU, and the absent bytes at {rate} GB/s. *100%*: homes, and nothing at home.{prefill}"""
PREFILL = """\
 A prompt of {tokens:,} tokens is read in {pooled_s:.2f} s under a pool of {pool_tokens:,}, in {whole_s:.2f} s without
one: {speed:.3f} of the speed."""


def pool(shape: str, name: str, made: Json) -> list[str]:
    plain = {(r["depth"], r["tokens"]): r["seconds"]["median"] for r in made["rows"] if not r["homes"]}
    rows = []
    for r in made["rows"]:
        if r["homes"]:
            s = r["seconds"]
            took = f"{1e3 * s['median']:.2f} ({1e3 * s['min']:.2f} to {1e3 * s['max']:.2f})"
            rows.append([
                f"{r['depth']:,}", f"{r['share']:.0%}", r["tokens"], f"{1e3 * plain[r['depth'], r['tokens']]:.2f}",
                f"{r['absent_bytes'] / 1e9:.2f}", took, f"{r['of_line']:.3f}",
            ])  # fmt: skip
    text = POOL.format(
        model=made["model"], shape=shape, kv_type=made["kv_type"], runs=made["rows"][0]["seconds"]["n"],
        rate=made["pcie_gb_per_s"], prefill=PREFILL.format(**made["prefill"]) if made["prefill"] else "",
    )  # fmt: skip
    columns = ["depth", "in the pool", "tokens", "all on the GPU", "GB absent", "ms a step", "of the line"]
    return [
        f"## A cache larger than its pool: {shape} shapes",
        "",
        *origin(name, made),
        text,
        "",
        *table(columns, rows),
    ]


TYPES = """\
Prompts of {shortest:,} to {longest:,} tokens, the last {each} positions of each, and {tokens} tokens decoded greedily
behind them, on the CPU backend; all beside a cache in f16. *NMSE* and *KL* (nats a token): of the logits. *Likeliest*:
positions whose likeliest token is the same. *Tokens*: of a reply until one differs, median of {n} and extremes. *Bits*:
of an element, keys and values together. Rows in italics are simulated in a cache of f16; that with the last bit of each
half flipped is the least that any change does, since of experts that are all but equal another is chosen.{random}"""
RANDOM = " The weights, and so the text, are random."


def types(name: str, made: Json) -> list[str]:
    lines = ["## Types of the KV cache", "", *origin(name, made)]
    for model in dict.fromkeys(r["model"] for r in made["rows"]):
        of = [r for r in made["rows"] if r["model"] == model]
        rows = []
        for r in sorted(of, key=lambda r: (r["bits"], r["kv_type"])):
            same = r["tokens_same"]
            rows.append([
                f"*{r['kv_type']}*" if r["simulated"] else f"`{r['kv_type']}`", f"{r['bits']:g}",
                f"{r['logits_nmse']:.1e}", f"{r['kl_nats']:.1e}", f"{r['likeliest_same']:.1%}",
                f"{median(same):g} ({min(same)} to {max(same)})",
            ])  # fmt: skip
        text = TYPES.format(
            shortest=min(of[0]["prompts"]), longest=max(of[0]["prompts"]), n=len(of[0]["prompts"]),
            each=of[0]["positions"] // len(of[0]["prompts"]), tokens=of[0]["tokens"],
            random="" if model == "spark-nano" else RANDOM,
        )  # fmt: skip
        columns = ["keys, values", "bits", "NMSE", "KL", "likeliest", "tokens"]
        lines += [f"### {model}", "", text, "", *table(columns, rows)]
    return lines


SOAK = """\
{clients} clients of one server, {device}, {minutes:.0f} minutes: conversations that grow to three times what the cache
of {ctx:,} tokens holds of all, under a pool of {pool:,}, host memory for few of them and the rest in files. {turns:,}
turns, each with the reply that a server gave that had room for everything; {kills} kills of the daemon, after which
{again} requests were sent again{disk}. {reused:.0%} of the prompts' tokens were reused; up to {away} of {total} blocks
were at home. The server grew by {grown:.1f} MiB from the second quarter to the last; daemons took {least:.0f} to
{most:.0f} MiB each.{more} Problems: {problems}."""
SOAK_RECALL = """\
 A third of the conversations read {blocks} blocks beside what need not be chosen, a third four and kept ranges, a third
all: {tokens:,} tokens were written with recall, and read {read:.0%} of the {there:,} blocks before them."""
SOAK_DRAFTS = " {drafted:,} tokens were drafted, {accepted:.0%} of them accepted; the other server had no drafts."


def soak(name: str, made: Json) -> list[str]:
    words = [*made["options"], ""]
    options = {a: b for a, b in pairwise(words) if a.startswith("--")}  # of a flag what follows means nothing
    blocks, daemons = made["left_over"]["kv_blocks"], [n / 2**20 for n in made["most_daemon_bytes"]]
    more = ""
    if recall := made.get("recall"):
        more += SOAK_RECALL.format(
            blocks=options["--kv-recall-blocks"], tokens=recall["tokens"], there=recall["blocks"],
            read=recall["read"] / recall["blocks"],
        )  # fmt: skip
    if drafts := made.get("drafts"):
        drafted, accepted = (sum(n[key] for n in drafts.values()) for key in ("drafted", "accepted"))
        more += SOAK_DRAFTS.format(drafted=drafted, accepted=accepted / drafted)
    text = SOAK.format(
        clients=made["clients"], device=made["device"], minutes=made["seconds"] / 60, ctx=int(options["--ctx"]),
        pool=int(options["--kv-pool"]), turns=made["turns"], kills=made["kills"], again=made["asked_again"],
        disk="; in the middle third the disk was full" if made["disk_was_filled"] else "", reused=made["reused_share"],
        away=made["most_blocks_away"], total=blocks["total"], grown=made["server_growth_bytes"] / 2**20,
        least=min(daemons), most=max(daemons), more=more, problems="; ".join(made["problems"]) or "none",
    )  # fmt: skip
    title = "## Conversations that do not fit together" + (", with recall and drafts" if recall else "")
    title += ", on a GPU" if made["device"] == "cuda" else ""
    return [title, "", *origin(name, made), text, ""]


WARM = """\
{model}, cache in {kv_type}. {sessions} conversations take turns of some new tokens, each read before the reply's only
token. *Own*: the turn of one that is alone, all of it on the device. *Line*: that, and the bytes that must come back
over their links."""


def warm(name: str, made: Json) -> list[str]:
    rows = []
    for r in made["rows"]:
        gb = {kind: median(t[kind] for t in r["turns"]) / 1e9 for kind in ("home", "host", "files")}
        ratio = r["ratio"]
        rows.append([
            f"{r['depth']:,}", f"{1e3 * r['own']['median']:.0f}", *(f"{n:.2f}" for n in gb.values()),
            f"{1e3 * median(t['seconds'] for t in r['turns']):.0f}",
            f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
        ])  # fmt: skip
    columns = ["depth", "own, ms", "GB at home", "GB in host memory", "GB in files", "first token, ms", "of the line"]
    text = WARM.format(**made)
    heading = "## Turns of conversations that lie elsewhere"
    heading += ", some in files" if any(t["files"] for r in made["rows"] for t in r["turns"]) else ""
    return [heading, "", *origin(name, made), text, "", *table(columns, rows)]


RESTORED = """\
{model}, cache in {kv_type}. A conversation that was written to files by an engine that ended, and a turn of {new}
tokens behind it, in a new one: tokens and log-probabilities beside those of a run that never stopped. Times of the
turn's reply."""


def restored(name: str, made: Json) -> list[str]:
    rows = [
        [f"{r['depth']:,}", r["pool"], f"{r['reused']:,}", f"{r['computed_s']:.2f}", f"{r['restored_s']:.2f}",
         "the same" if r["same"] else "OTHERS"]
        for r in made["rows"]
    ]  # fmt: skip
    columns = ["depth", "pool", "tokens reused", "s computed", "s restored", "bits"]
    text = RESTORED.format(**made)
    return ["## Conversations restored from files", "", *origin(name, made), text, "", *table(columns, rows)]


SUMMARIES = """\
Blocks of keys that a token reads, chosen by a summary of each, on {prompts} held-out prompts of the bundled model, of
up to {length:,} tokens, and on made-up keys: what is left out, for the shares of blocks that are read beside the first
and the last two. *Bytes*: of a block's summary, by those of its keys and values in f16. *Exact*: chosen by the true
masses. *Bound over true*: of the mass of what is not read, where 10% are. No mass was above its bound. Second tables:
blocks that are read, largest first, before no row of a group can have left out more than a share of its mass, by the
bounds (*certain*) or by estimates. What was read is known exactly."""


def times(ratio: float) -> str:
    return f"{ratio:.3g}" if ratio < 1e20 else "no bound"


def summaries(name: str, made: Json) -> list[str]:
    text = SUMMARIES.format(prompts=made["prompts"], length=made["length"])
    lines = ["## Summaries of keys", "", *origin(name, made), text, ""]
    for part in made["parts"]:
        rows = []
        for r in part["rows"]:
            bound = r.get("bound_over_true")
            rows.append([
                r["name"], "" if r["bytes_share"] is None else percent(r["bytes_share"]),
                *(f"{percent(left['mean'])} ({percent(left['p99'])})" for left in r["left_out"].values()),
                "" if bound is None else f"{times(bound['median'])} ({times(bound['p99'])})",
            ])  # fmt: skip
        shares = [f"left out at {percent(float(share))}" for share in part["rows"][0]["left_out"]]
        columns = [part["what"], "bytes", *shares, "bound over true"]
        lines += [f"{part['rows'][0]['cases']:,} cases, mean and 99th percentile.", "", *table(columns, rows)]
        most = list(part["rows"][0]["read_until_estimated"])
        rows = []
        for r in part["rows"]:
            if certain := r.get("read_until_certain"):
                rows.append([r["name"], "certain", *(percent(certain[m]) for m in most)])
            if found := r["read_until_estimated"]:
                cells = [f"{percent(found[m]['read'])} ({percent(found[m]['left_out'])})" for m in most]
                rows.append([r["name"], "estimated", *cells])
        columns = [part["what"], "until it is", *(percent(float(m)) for m in most)]
        text = "Blocks read until no more than that is left out; in brackets what is, then."
        lines += [text, "", *table(columns, rows)]
    return lines


RECALL = """\
Tokens that read the first block, the last four and N others, beside the same with the whole context: the last
{rows_each} of each of {n} held-out prompts of {shortest:,} to {longest:,} tokens, fed as replies are, on the
CPU backend with the bundled model. *Sketch*: the choice that is served; the others are made up in float64 over
all keys. *Exact*: chosen by the true masses. *One for two layers*: the sketch, but every second layer reads what the
one ahead of it chose, or as many of the latest blocks. *Bytes*: of a block's summary, by those of its keys and values
in f16. *Left out*: the share of softmax mass of what was not read, mean. *NMSE* and *KL* (nats a token): of the
logits. *Likeliest*: positions whose likeliest token is the same. As sketches estimate it,
{estimated} were left out on average with N = {least}, where it was {true}; of a query's share they say {ratio} at the
median. With as many blocks as there are the bits were those of the whole."""


def recall(name: str, made: Json) -> list[str]:
    rows, served = [], next(r for r in made["rows"] if "estimated" in r)
    for r in made["rows"]:
        rows.append([
            r["policy"], "" if r["bytes_share"] is None else percent(r["bytes_share"]), r["blocks"],
            percent(r["read"]), percent(r["left_out"]), f"{r['logits_nmse']:.1e}", f"{r['kl_nats']:.3f}",
            percent(r["likeliest_same"]),
        ])  # fmt: skip
    text = RECALL.format(
        rows_each=made["rows_each"], n=len(made["prompts"]), shortest=min(made["prompts"]),
        longest=max(made["prompts"]), least=served["blocks"], estimated=percent(served["estimated"]),
        true=percent(served["left_out"]), ratio=percent(served["estimated_over_true"]),
    )  # fmt: skip
    columns = ["chosen by", "bytes", "N", "blocks read", "left out", "NMSE", "KL", "likeliest"]
    return ["## A part of the context", "", *origin(name, made), text, "", *table(columns, rows)]


RECALL_MASS = """\
Prompts and tokens as above, {rows_each} of each of {n} prompts, that read as few blocks as leave no more than a share
of the softmax mass out, as the served sketches estimate it (`--kv-recall`). *Left out*: of all keys, the mean of
rows, layers and heads, and the largest. *Above*: how many of these left out more than was asked for."""


def recall_mass(name: str, made: Json) -> list[str]:
    rows = [
        [
            f"{r['asked_left_out']:g}", percent(r["read"]), percent(r["left_out"]), percent(r["left_out_max"]),
            percent(r["above"]), percent(r["estimated_max"]), f"{r['logits_nmse']:.1e}", f"{r['kl_nats']:.3f}",
            percent(r["likeliest_same"]),
        ]
        for r in made["rows"]
    ]  # fmt: skip
    columns = ["EPS", "blocks read", "left out", "at most", "above", "at most, estimated", "NMSE", "KL", "likeliest"]
    text = RECALL_MASS.format(rows_each=made["rows_each"], n=len(made["prompts"]))
    return ["## A part of the context, by mass", "", *origin(name, made), text, "", *table(columns, rows)]


RECALL_SPEED = """\
A reply that decodes alone, {generate} tokens at each depth, which was reached without computing what came before; it
reads N blocks of 64 beside the first and the last four, or all. ms a token, median of runs. *Flat*: by the time at the
least depth. *Steps*: of so many given tokens, for which the host waits, ms."""


def recall_speed(of: str, name: str, made: Json) -> list[str]:
    """of: whose shapes."""
    rows, whole = [], {r["depth"]: r["seconds"]["median"] for r in made["rows"] if r["blocks"] is None}
    least, widths = min(whole), list(made["rows"][0]["steps"])
    for r in made["rows"]:
        first = next(one for one in made["rows"] if (one["depth"], one["blocks"]) == (least, r["blocks"]))
        seconds = r["seconds"]["median"]
        rows.append([
            f"{r['depth']:,}", "all" if r["blocks"] is None else r["blocks"], f"{1e3 * seconds:.3f}",
            f"{whole[r['depth']] / seconds:.2f}", f"{seconds / first['seconds']['median']:.3f}",
            *(f"{1e3 * r['steps'][n]['median']:.2f}" for n in widths),
        ])  # fmt: skip
    columns = ["depth", "N", "ms", "times all", "flat", *(f"steps of {n}" for n in widths)]
    text = RECALL_SPEED.format(generate=made["generate"])
    return [f"## Reading a part of the context: {of} shapes", "", *origin(name, made), text, "", *table(columns, rows)]


RECALL_POOL = """\
A reply that decodes alone, {generate} tokens at each depth, which was reached without computing what came before; it
reads N blocks of 64 beside the first and the last four. All blocks that nobody chooses are at home, and of the chosen
ones the share that is said; ms a token, median of runs and extremes. *Line*: the same with all on the GPU, and the
bytes of the chosen blocks that are at home at {rate} GB/s."""


def recall_pool(of: str, name: str, made: Json) -> list[str]:
    """of: whose shapes."""
    rows, whole = [], {(r["depth"], r["blocks"]): r for r in made["rows"] if r["away"] is None}
    for r in made["rows"]:
        if r["away"] is not None:
            s = r["seconds"]
            rows.append([
                f"{r['depth']:,}", r["blocks"], f"{1e3 * whole[r['depth'], r['blocks']]['seconds']['median']:.3f}",
                f"{r['away']:.0%}", f"{r['absent_bytes'] / 1e6:.1f}",
                f"{1e3 * s['median']:.3f} ({1e3 * s['min']:.3f} to {1e3 * s['max']:.3f})", f"{r['of_line']:.3f}",
            ])  # fmt: skip
    columns = ["depth", "N", "all on the GPU", "chosen, at home", "MB a token", "ms a token", "of the line"]
    text = RECALL_POOL.format(generate=made["generate"], rate=made["pcie_gb_per_s"])
    title = f"## Reading a part of a context that is at home: {of} shapes"
    return [title, "", *origin(name, made), text, "", *table(columns, rows)]


QUALITY = """\
Answers about contexts of {length:,} tokens by {model} ({size:.1f} MB, trained by data/recall/train.py), {cases}
questions a task on the CPU backend, whose evidence lies behind the first block and before the tail. Contexts and
questions are read with attention to all; replies read a share of the blocks, the first and the last four among it and
one more at least. Answers that are right in every token; of the agent, replies that are those of all blocks in every
token, and tokens to the first that is another, median of those that differ. *All*: right with all blocks. 95% of such
shares are within {error:.0%} of the truth where it is a half."""


def recall_quality(name: str, made: Json) -> list[str]:
    rows, shares = [], sorted({r["share"] for r in made["rows"] if r["share"] is not None})
    cases = min(r["cases"] for r in made["rows"])
    by = {(r["task"], r["choice"], r["share"]): r for r in made["rows"]}
    for task, choice in dict.fromkeys((r["task"], r["choice"]) for r in made["rows"] if r["share"] is not None):
        of = [by[task, choice, share] for share in shares]
        differs = [f" ({r['differs_at']:.0f})" if task == "agent" and r["differs_at"] is not None else "" for r in of]
        rows.append([
            task, percent(by[task, "all", None]["right"]), choice,
            *(percent(r["right"]) + at for r, at in zip(of, differs, strict=True)),
        ])  # fmt: skip
    text = QUALITY.format(
        length=made["length"], model=made["model"], size=made["bytes"] / 1e6, cases=cases, error=0.98 / cases**0.5
    )
    lines = [f"{task}: {one['choice']} is {one['points']:+.1f} points from one mean at 10%."
             for task, one in made["ahead"].items()]  # fmt: skip
    agree = [f"{choice} {'at no share' if share is None else f'{share}%'}" for choice, share in made["agree"].items()]
    if agree:
        lines.append(f"99% of the agent's replies are those of all blocks from: {', '.join(agree)}.")
    columns = ["task", "all", "chosen by", *(f"{share}%" for share in shares)]
    of = {"recall_quality-cpu.json": ": a small model", "recall_quality-16k.json": ", 16,384 tokens"}.get(name, "")
    head = [f"## Answers from a part of the context{of}", "", *origin(name, made), text, ""]
    return [*head, *table(columns, rows), *lines, ""]


SECTIONS = {
    "kv_pool.json": partial(pool, "Qwen3.6-35B-A3B's"),
    "kv_pool-qwen3.json": partial(pool, "Qwen3-30B-A3B's"),
    "kv_types.json": types,
    "warm_turns.json": warm,
    "warm_turns-q8_0.json": warm,
    "restored.json": restored,
    "soak_sessions.json": soak,
    "soak_sessions-recall.json": soak,
    "soak_sessions-gpu.json": soak,
    "summaries.json": summaries,
    "recall.json": recall,
    "recall_mass.json": recall_mass,
    "recall_quality.json": recall_quality,
    "recall_quality-16k.json": recall_quality,
    "recall_quality-cpu.json": recall_quality,
    "recall_speed.json": partial(recall_speed, "Qwen3.6-35B-A3B's"),
    "recall_speed-qwen3.json": partial(recall_speed, "Qwen3-30B-A3B's"),
    "recall_pool.json": partial(recall_pool, "Qwen3.6-35B-A3B's"),
}
