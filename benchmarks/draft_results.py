"""The sections of RESULTS.md about drafts: replayed sessions, prompts served with and without, the same tokens."""

from __future__ import annotations

from collections import defaultdict

from benchmarks.markdown import Json, origin, table

REPLAY = """\
Lookup drafts on recorded sessions in the bundled model's vocabulary, through the real index and the real gate, in the
order of the sessions; nothing is decoded. Steps take what they were measured to take on an H200 with Qwen3-30B-A3B's
shapes at depth {depth:,} (ms by tokens: {steps}), a token without a draft {plain}. Speed over that of decoding without
drafts. *Length 3*: every draft is cut at three tokens, and no gate is asked. *Oracle*: at every
step as many tokens as go furthest, which only who knows the session can say. *Least*: of a
session. In brackets: of the drafted tokens, those that stayed."""
SUFFIX_CACHE = """\
*Suffix cache*: that of ArcticInference in place of our index, with all that was said in it, and with its own limits of
a draft's length."""
SERVED = """\
{prompts} held-out prompts, {generate} tokens generated after each, greedily and sampled in turns, to two daemons in
turn, with drafts and without; the model writes what it writes, which repeats itself. Of each prompt the median of
{runs} runs, none of which was sent before. Speed over that without drafts: median {median:.3f}, {least:.3f} to
{most:.3f}; of {drafted:,} drafted tokens {share:.0%} stayed. All tokens the same: {same}."""
CHANCES = """\
Tokens of drafts for every generated token of recorded sessions in the bundled model's vocabulary, each reached where
all before it are right, by the chance that lookup gave it: how many, the chance in the middle, and how many were right;
those that are a draft's first, and later ones."""
AT_ONCE = """\
Replies that share steps, and a draft for each token, whose tokens are right with one chance, each given that all before
it are; the gate decides what steps get of them. Speed over that without drafts; the tokens are the same."""
SPEEDS = """\
{model}, {way}. Each token of a draft is right with one chance, given that all before it are; the real gate decides what
steps get of it, experts are imposed, those of a reply's neighbors {neighbors}. Speed over that without drafts, of
{generate} tokens; those are the same. *Of the line*: of the best over T of tokens(T) over the time of a step of T
tokens with all experts resident and of its distinct missed bytes over PCIe."""
IN_SESSIONS = """\
{model}, all experts resident, in recorded sessions of the bundled model's vocabulary ({n}): real lookup in what was
there until then, the real gate, real steps with independent experts; a draft's token is right where the session goes on
with it. Speed over that without drafts; *weighted*: edits 40%, other calls 20%, text 15%, reasoning 25% of tokens."""
PHASES = """\
{model}, drafts by {draft}, whose first token is right in {first:.0%}, 0.8 times with each place behind: {drafted:.3f}
ms a token for {plain:.3f} without, {tokens:.2f} tokens a step. *As served*: from when the host begins a phase until it
goes on. *Apart*: the device is waited for before and after each."""
TREES = """\
{model} with {drafter} on a CPU, {prompts} prompts a row, {generate} tokens generated after each; the drafter was asked
behind every token for the likeliest choices of all {places} places. Walked with steps that take what an H200 takes with
Qwen3-30B-A3B's shapes (ms by tokens: {steps}), drafting itself taking nothing: speed over that without drafts.
*Fixed*: every draft has so many tokens, which of these numbers goes furthest. *Chosen*: as many as go furthest by each
draft's own chances. A chain takes the likeliest choice of each place, a tree the likeliest paths as a whole.
*Gate*: chains by the real gate, which learns as it goes: by the places of tokens alone, and told how sure the drafter
is of each."""
FEW, SPREAD = 20, ("median", "min", "max")
IDENTITY = """\
Replies of {tokens} tokens by tiny models of every family with random weights, on the {device}, against the same without
drafts: {replies:,} replies in {rows} rows, each of a family, a source, a residency and a way to sample. *Forced*:
drafts of random lengths, right up to a random place."""


def replay(name: str, made: Json) -> list[str]:
    steps = ", ".join(f"{width}: {ms:.2f}" for width, ms in made["step_ms"].items())
    plain = f"{made['step_ms']['1']:.2f} ms"
    rows = []
    for r in made["rows"]:
        by_kind = r["by_kind"]
        kinds = [_of_kind(by_kind[k]) if k in by_kind else "" for k in ("call", "text", "reasoning")]
        fixed = r["fixed"]
        how = "gate" if fixed is None else f"length {fixed}" if isinstance(fixed, int) else fixed
        how = how if r["index"] == "lookup" else f"{r['index']}, {how}"
        share, least = f"{r['accepted'] / r['drafted']:.0%}" if r["drafted"] else "", f"{r['sessions']['min']:.3f}"
        rows.append([r["tokens"].removesuffix(".parquet"), how, f"{r['speedup']:.3f}", *kinds, least, share])
    columns = ["sessions", "", "all", "calls", "text", "reasoning", "least", "stayed"]
    text = REPLAY.format(depth=made["depth"], steps=steps, plain=plain)
    if any(r["index"] != "lookup" for r in made["rows"]):
        text += " " + SUFFIX_CACHE
    return ["## Drafts: sessions replayed", "", *origin(name, made), text, "", *table(columns, rows)]


def _of_kind(r: Json) -> str:
    return f"{r['speedup']:.3f}" + (f" ({r['accepted'] / r['drafted']:.0%})" if r["drafted"] else "")


def at_once(name: str, made: Json) -> list[str]:
    rows = [
        [
            r["at_once"], f"{r['rate']:.0%}", f"{r['plain_ms']['median']:.3f}",
            *(f"{r['speedup'][k]:.3f}" for k in SPREAD), f"{r['drafted']:,}",
        ]
        for r in made["rows"]
    ]  # fmt: skip
    columns = ["replies", "right", "ms a token, plain", *(f"speed, {k}" for k in SPREAD), "drafted"]
    return [f"## Drafts: replies at once, {made['model']}", "", *origin(name, made), AT_ONCE, "", *table(columns, rows)]


def speeds(name: str, made: Json) -> list[str]:
    first = made["rows"][0]
    part = {"missed": "a share of experts missed", "drafter": f"drafts by {first.get('draft')}"}
    way = part.get(first["part"], "all experts resident") + (", sampled at 1.0" if made.get("temperature") else "")
    way += ", which says how sure it is" if "telling" in first else ""
    way += f", {beyond:.0%} of tokens beyond its short head" if (beyond := first.get("beyond")) is not None else ""
    share = first.get("repeat", 0.0)
    neighbors = f"the same in {share:.0%}" if share else "independent"
    rows = []
    for r in made["rows"]:
        right = f"{r['first']:.0%}, 0.8 times with each" if "first" in r else f"{r['rate']:.0%}"
        if "telling" in r:
            chances = " or ".join(f"{chance:.0%}" for chance in r["telling"])
            right = f"{r['first']:.0%} of first ones: {chances}, 0.8 times with each"
        depth = f"{r['residency_pct']:.0f}%, {r['miss_pct']:.0f}%" if "miss_pct" in r else f"{r['depth']:,}"
        line = [f"{r['of_line']:.3f}"] if "of_line" in r else []
        rows.append([
            right, depth, f"{r['plain_ms']['median']:.3f}", *(f"{r['speedup'][k]:.3f}" for k in SPREAD),
            f"{r['drafted']:,}", f"{r['accepted']:,}", *line,
        ])  # fmt: skip
    where = "resident, missed" if "miss_pct" in first else "depth"
    columns = ["right", where, "ms a token, plain", *(f"speed, {k}" for k in SPREAD), "drafted", "stayed"]
    columns += ["of the line"] if "of_line" in first else []
    text = SPEEDS.format(model=made["model"], way=way, neighbors=neighbors, generate=made["generate"])
    title = f"## Drafts on a GPU: {_shape(made)}, {way}" + (f", neighbors alike in {share:.0%}" if share else "")
    return [title, "", *origin(name, made), text, "", *table(columns, rows)]


def in_sessions(name: str, made: Json) -> list[str]:
    kinds = ("edit", "call", "text", "reasoning")
    rows = []
    for r in made["rows"]:
        by, of = r["by_kind"], r["sessions"]
        rows.append([
            r["tokens"].removesuffix(".parquet"), f"{r['weighted_speedup']:.3f}", f"{r['speedup']:.3f}",
            *(f"{by[k]['speedup']:.3f}" if k in by else "" for k in kinds),
            *(f"{of[k]:.3f}" for k in SPREAD), f"{r['drafted']:,}", f"{r['accepted'] / max(1, r['drafted']):.0%}",
        ])  # fmt: skip
    columns = ["sessions", "weighted", "all", "edits", "calls", "text", "reasoning"]
    columns += [f"of a session, {k}" for k in SPREAD] + ["drafted", "stayed"]
    n = ", ".join(f"{r['n_sessions']} with {r['generated']:,} generated tokens" for r in made["rows"])
    text = IN_SESSIONS.format(model=made["model"], n=n)
    return [f"## Drafts on a GPU: {_shape(made)}, sessions", "", *origin(name, made), text, "", *table(columns, rows)]


def phases(name: str, made: Json) -> list[str]:
    ways = made["phases_ms"]
    rows = [
        [way, *(f"{each['median']:.3f}" for each in ms.values()), f"{sum(each['median'] for each in ms.values()):.3f}"]
        for way, ms in ways.items()
    ]
    text = PHASES.format(
        model=made["model"], draft=made["draft"], first=made["first"], plain=made["plain_ms"]["median"],
        drafted=made["drafted_ms"]["median"], tokens=made["tokens_a_step"]["median"],
    )  # fmt: skip
    title = f"## Drafts on a GPU: {_shape(made)}, where a step's time goes"
    return [title, "", *origin(name, made), text, "", *table(["ms a step", *next(iter(ways.values())), "all"], rows)]


def _shape(made: Json) -> str:
    return str(made["model"]).split(" ")[0].rstrip(",")


def served(name: str, made: Json) -> list[str]:
    counts = [counts for r in made["rows"] for counts in r["drafts"].values()]
    drafted, accepted = (sum(c[key] for c in counts) for key in ("drafted", "accepted"))
    s = made["speedup"]
    text = SERVED.format(
        prompts=s["n"], generate=made["generate"], runs=made["runs"], median=s["median"], least=s["min"], most=s["max"],
        drafted=drafted, share=accepted / max(1, drafted), same="yes" if made["identical_tokens"] else "no",
    )  # fmt: skip
    steps = made["drafts"]["step_ms"].get("1", {})  # of greedy replies
    return [
        f"## Drafts: served by {made['model']}", "", *origin(name, made), text, "",
        *table(["tenth of the prompts", *map(str, range(1, 11))], [["speed", *(f"{t:.3f}" for t in made["tenths"])]]),
        "", *table(["tokens of a draft", *steps], [["ms a step", *(f"{ms:.2f}" for ms in steps.values())]]),
    ]  # fmt: skip


def identity(name: str, made: Json) -> list[str]:
    sums = ("replies", "identical", "drafted", "rejected")
    cells: dict[tuple[str, str], Json] = defaultdict(lambda: dict.fromkeys(sums, 0))
    for r in made["rows"]:
        for key in sums:
            cells[r["family"], r["source"]][key] += r[key]
    device = made["device"].upper().replace("CUDA", "GPU")
    text = IDENTITY.format(
        tokens=made["tokens_each"], device=device, replies=made["replies"], rows=len(made["rows"])
    )  # fmt: skip
    rows = [[*key, f"{c['identical']} of {c['replies']}", c["drafted"], c["rejected"]] for key, c in cells.items()]
    return [f"## Drafts: the same tokens on a {device}", "", *origin(name, made), text, "", *table(
        ["family", "source", "identical", "drafted by it", "rejected"], rows
    )]  # fmt: skip


def chances(name: str, made: Json) -> list[str]:
    columns, cells = ["promised"], []
    for r in made["rows"]:
        columns += [f"{r['tokens'].removesuffix('.parquet')}, {r['which']}", "right"]
        of = zip(r["reached"], r["promised"], r["right"], strict=True)
        cells.append([(f"{n:,.0f}", f"{p / n:.0%}, {k / n:.0%}") if n >= FEW else ("", "") for n, p, k in of])
    tenths = [f"{10 * k} to {10 * k + 10}%" for k in range(len(cells[0]))]
    rows = [[tenth, *(c for each in cells for c in each[k])] for k, tenth in enumerate(tenths)]
    return ["## Drafts: how often lookup is right", "", *origin(name, made), CHANCES, "", *table(columns, rows)]


def trees(name: str, made: Json) -> list[str]:
    places = len(made["rows"][0]["right"])
    text = TREES.format(
        model=made["model"], drafter=made["drafter"], places=places, prompts=made["settings"]["prompts"],
        generate=made["settings"]["generate"], steps=", ".join(f"{n}: {ms:.2f}" for n, ms in made["step_ms"].items()),
    )  # fmt: skip
    rows, right = [], []
    for r in made["rows"]:
        which = [r["sessions"].removesuffix(".parquet"), "sampled" if r["temperature"] else "greedy"]
        cells = []
        for shape in ("chain", "tree"):
            of = [row for row in r["rows"] if row["shape"] == shape and "gate" not in row]
            best = max((row for row in of if row["width"] is not None), key=lambda row: row["speed"])
            (chosen,) = (row for row in of if row["width"] is None)
            cells += [f"{best['speed']:.3f} ({best['width']})", f"{chosen['speed']:.3f}"]
            cells += [f"{chosen['tokens_a_step']:.2f} of {chosen['drafted_a_step']:.2f}"]
        cells += [f"{row['speed']:.3f}" for row in r["rows"] if "gate" in row]
        rows.append([*which, *cells])
        right.append([*which, *(f"{one:.0%}, {two:.0%}, {most:.0%}" for one, two, _, most in r["right"])])
    columns = ["sessions", ""]
    for shape in ("chain", "tree"):
        columns += [f"{shape}, fixed", f"{shape}, chosen", "tokens a step, of drafted"]
    columns += ["gate, by place", "gate, how sure"]
    return [
        "## Drafts: trees, and how sure a drafter is", "", *origin(name, made), text, "", *table(columns, rows),
        "How often the likeliest choice of a place, one of two, and one of eight is right, whatever comes before:", "",
        *table(["sessions", "", *map(str, range(1, places + 1))], right),
    ]  # fmt: skip


SECTIONS = {
    "draft_trees.json": trees,
    "drafts-chances.json": chances,
    "drafts-at-once.json": at_once,
    "drafts-replay.json": replay,
    "drafts-nano.json": served,
    "draft_identity.json": identity,
    "draft_identity-gpu.json": identity,
    "draft_speed-rates.json": speeds,
    "draft_speed-repeat.json": speeds,
    "draft_speed-sampled.json": speeds,
    "draft_speed-missed.json": speeds,
    "draft_speed-drafter.json": speeds,
    "draft_speed-telling.json": speeds,
    "draft_speed-mtp-telling.json": speeds,
    "draft_speed-dense-telling.json": speeds,
    "draft_speed-laguna.json": speeds,
    "draft_speed-qwen36.json": speeds,
    "draft_speed-mtp.json": speeds,
    "draft_speed-dense.json": speeds,
    "draft_speed-dense-short.json": speeds,
    "draft_speed-sessions.json": in_sessions,
    "draft_phases-dense.json": phases,
    "draft_phases-qwen36.json": phases,
}
