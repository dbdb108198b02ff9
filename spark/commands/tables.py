"""The table of each report, as commands and the demo print it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark.console import note, table, write

if TYPE_CHECKING:
    from spark.extract.report import Report as ExtractReport
    from spark.pipeline.bench import BenchReport
    from spark.pipeline.calibrate import CalibrateReport
    from spark.pipeline.ladder import Rung
    from spark.pipeline.plan import Report as PlanReport
    from spark.pipeline.pregate import PregateReport
    from spark.pipeline.tokens import Summary
    from spark.pipeline.validate import Ladder, ValidateReport

_GIB = 1 << 30
_KINDS_SHOWN = 8  # of records that gave nothing to a session; --json has more
_TERMS = """\
belady: the fewest misses that any policy could have that knew the future. A miss is an active expert of one layer that
is in no slot when a token needs it; a move, one that enters a slot. Intervals are of 95%, over sessions."""
_COLUMNS = 120  # of prose
# Sizes of a model file by the keys of GGUF, each with the words for it; those that a file does not have are left out.
_SIZES = (
    ("layers", (
        ("block_count", "{}"), ("leading_dense_block_count", "{} dense"), ("nextn_predict_layers", "{} not read"),
    )),
    ("width", (("embedding_length", "{}"),)),
    ("heads", (
        ("attention.head_count", "{}"), ("attention.head_count_kv", "{} of KV"), ("attention.key_length", "of {}"),
        ("attention.sliding_window", "window {}"),
    )),
    ("dense FFN", (("feed_forward_length", "{}"),)),
    ("experts", (
        ("expert_count", "{}"), ("expert_used_count", "{} active"), ("expert_feed_forward_length", "of {}"),
        ("expert_shared_feed_forward_length", "shared {}"),
    )),
    ("vocabulary", (("vocabulary", "{} tokens"),)),
    ("context", (("context_length", "{} tokens"),)),
)  # fmt: skip
_RECALLS = ("recall_1x", "recall_2x", "recall_3x")


def show_extraction(report: ExtractReport) -> None:
    """Print what was read, what was skipped and why."""
    percentiles = (("prompt", report.prompt_tokens), ("context", report.context_tokens))
    rows = [
        ("log files", report.files),
        *((f"sessions, {side}", n) for side, n in report.sessions.items()),
        ("messages", report.messages),
        *((f"tokens, {role}", n) for role, n in report.tokens.items()),
        *((f"{what} tokens, {name}", n) for what, found in percentiles for name, n in found.items()),
        *((f"skipped lines: {reason}", n) for reason, n in report.skipped_lines.items()),
        *((f"dropped blocks: {reason}", n) for reason, n in report.dropped_blocks.items()),
        *(
            (f"dropped text, characters: {kind} ({row['records']:,} records)", row["characters"])
            for kind, row in list(report.dropped_content.items())[:_KINDS_SHOWN]
            if row["characters"]
        ),
        *((f"redacted: {kind}", n) for kind, n in report.redacted.items()),
    ]
    _counts(f"Sessions (token counts by {report.token_counter})", rows)


def show_tokens(summary: Summary) -> None:
    """Print what was rendered, and which turns the template refused."""
    rows = [
        ("tokens", summary.tokens),
        ("generated tokens among them", summary.generated_tokens),
        ("windows", summary.windows),
        ("sessions", summary.sessions),
        *((f"skipped turns: {reason}", n) for reason, n in summary.skipped_turns.items()),
    ]
    _counts("Tokens", rows)


def show_calibration(report: CalibrateReport) -> None:
    """Print what a calibration read and counted, and how it would split the slots."""
    rows = [
        ("tokens read", f"{report.tokens:,}"),
        ("generated tokens among them", f"{report.generated_tokens:,}"),
        ("tokens counted", f"{report.counted_tokens:,}"),
        ("sessions", f"{report.sessions:,}"),
        ("tokens/s", f"{report.tokens_per_s:,.0f}"),
    ]
    table("Calibration", ["", ""], rows)
    if not report.choices:
        note(f"{report.no_choice}: the default is served.")
        return
    found = [
        [f"{c.residency_pct:g}%", c.words, *(f"{x:.2f}" for x in (c.misses, c.low, c.high, c.lru, c.static))]
        for c in report.choices
    ]
    first = report.choices[0]
    title = (
        f"What the slots should do, by {first.tokens:,} generated tokens of {first.sessions} sessions, each under the "
        "counts of others"
    )
    table(title, ["resident", "choice", "misses\n/token", "from", "to\n(95%)", "LRU", "fixed"], found)


def show_validation(report: ValidateReport) -> None:
    """Print what the words mean, and of each residency the ladder, the verdict, and cross-source rows if there are."""
    from engine.placing import policies

    def served(row: Rung) -> list[str]:
        if row.decode_tokens_per_s is None or row.prefill_tokens_per_s is None or row.device_bytes is None:
            return [""] * 4
        rates = [f"{row.decode_tokens_per_s:,.0f}", f"{row.prefill_tokens_per_s:,.0f}"]
        return [*rates, f"{row.device_bytes / 2**20:,.1f}", {True: "yes", False: "NO", None: ""}[row.identical_tokens]]

    words = " ".join([*(f"{each.name}: {each.words}." for each in policies.POLICIES), _TERMS.replace("\n", " ")])
    write(textwrap.fill(words, _COLUMNS, break_on_hyphens=False) + "\n\n")
    columns = ["policy", "hits", "misses\n/token", "95%", "moves\n/token", "decode\ntokens/s", "prefill\ntokens/s",
               "fast\nMiB", "same\ntokens"]  # fmt: skip
    for ladder in report.ladders:
        title = (
            f"Held-out sessions at {ladder.residency_pct:g}% residency: {report.generated_tokens:,} generated tokens "
            f"of {report.sessions} sessions, {report.prompts} served prompts"
        )
        table(title, columns, [[row.policy, *_misses(row), *_spread(row), *served(row)] for row in ladder.rows])
        write(f"Verdict at {ladder.residency_pct:g}%: {ladder.verdict}.\n\n")
        if ladder.cross:
            show_cross(report, ladder, "The same sessions, placed by profiles of other traffic")


def show_cross(report: ValidateReport, ladder: Ladder, title: str) -> None:
    """Print the rows of the own profile and of the others, side by side, below those of an even placement."""
    from engine.placing import policies

    placed = [each.name for each in policies.POLICIES if each.by_profile]
    own = [row for row in ladder.rows if row.policy in (policies.UNIFORM.name, *placed)]
    paths = [Path(report.profile), *(Path(row.profile) for row in ladder.cross if row.profile)]
    short = len({path.name for path in paths}) == len(set(paths))

    def placed_by(row: Rung) -> str:
        path = Path(row.profile or report.profile)
        return "" if row.policy not in placed else path.name if short else str(path)

    rows = [[row.policy, placed_by(row), *_misses(row)] for row in (*own, *ladder.cross)]
    table(title, ["policy", "placed by", "hits", "misses\n/token"], rows)


def show_pregate(report: PregateReport) -> None:
    """Print the recall of each predictor for the layer it looks from and for the next, averaged over layers."""
    kinds: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in report.to_json()["rows"]:
        kinds.setdefault((row["predictor"], row["target_layer"] - row["layer"]), []).append(row)
    rows = [
        [name.replace("_", " "), "this" if offset == 0 else "next", len(found)]
        + [f"{sum(row[key] for row in found) / len(found):.1%}" for key in _RECALLS]
        for (name, offset), found in kinds.items()
    ]
    title = "Active experts (A a token) found among the best guesses, mean over layers"
    table(title, ["predictor", "for\nlayer", "layers", "best A", "best 2A", "best 3A"], rows)
    _show_guesses(report)


def _show_guesses(report: PregateReport) -> None:
    """Print what guesses for the next layer find of what is not resident; those of other layers are in --json."""
    ahead = [row for row in report.guesses if row.ahead == 1]
    percents = sorted({row.residency_pct for row in ahead})
    ways = dict.fromkeys((row.predictor, row.budget, row.threshold) for row in ahead)
    of = {(row.residency_pct, row.predictor, row.budget, row.threshold): row for row in ahead}
    rows = []
    for predictor, budget, threshold in ways:
        cells = [predictor.replace("_", " "), f"{budget}" + (f", above {threshold:.0%}" if threshold else "")]
        for row in (of[percent, predictor, budget, threshold] for percent in percents):
            cells += [f"{row.precision:.0%}", f"{row.recall:.0%}", f"{row.wasted_bytes_per_token / 2**20:.2f}"]
        rows.append(cells)
    columns = ["predictor", "at most\na layer"]
    for percent in percents:
        columns += [f"{percent:.0f}%:\nright", "\nfound", "\nMiB"]
    title = "Guesses for the next layer at a residency: right ones, missing experts found, MiB a token of wrong ones"
    table(title, columns, rows)


def show_bench(report: BenchReport) -> None:
    """Print a row for each residency, with the extremes of the rates."""

    def rate(median: float, spread: tuple[float, float]) -> str:
        return f"{median:,.1f} ({spread[0]:,.1f} to {spread[1]:,.1f})"

    rows = [
        [
            f"{row.residency_pct:.1f}%", row.policy, f"{row.miss_pct:.1f}%",
            rate(row.decode_tokens_per_s, row.decode_spread), rate(row.prefill_tokens_per_s, row.prefill_spread),
            f"{row.device_bytes / 2**20:,.0f}", {True: "yes", False: "NO", None: ""}[row.identical_tokens],
        ]
        for row in report.rows
    ]  # fmt: skip
    title = (
        f"{report.model} on {report.device}: {report.generate_tokens} tokens after prompts of {report.prompt_tokens} "
        f"from {report.prompts}"
    )
    columns = ["resident", "policy", "misses", "decode\ntokens/s", "prefill\ntokens/s", "fast\nMiB", "same\ntokens"]
    table(title, columns, rows)
    _show_predictions(report)
    _show_drafts(report)


def _show_predictions(report: BenchReport) -> None:
    """Print what was predicted of the residencies that nothing was fitted to, beside what was measured."""
    if report.line is None or all(row.predicted_tokens_per_s is None for row in report.rows):
        return
    rows = []
    for row in report.rows:
        said, measured = row.predicted_tokens_per_s, row.decode_tokens_per_s
        cells = ["fitted", ""] if said is None else [f"{said:,.1f}", f"{said / measured:.2f}"]
        rows.append([f"{row.residency_pct:.1f}%", f"{row.missed_us / 1e3:.2f}", f"{measured:,.1f}", *cells])
    title = (
        f"A token takes {report.line.t0_ms:.2f} ms where nothing is missing, and {report.line.scale:.2f} times what "
        "its misses take alone"
    )
    table(title, ["resident", "misses\nms", "measured\ntokens/s", "predicted\ntokens/s", "of it"], rows)
    for costs in [s["cpu_experts"] for s in report.settings if s.get("cpu_experts")][:1]:
        alone, times = (", ".join(f"{us:.0f}" for us in costs[name]) for name in ("cpu_us", "layer_us"))
        note(
            f"an expert takes {costs['pcie_us']:.0f} us over PCIe, a hand-over {costs['handover_us']:.0f}, 1, 2, ... "
            f"experts on the CPU {alone}; 0, 1, ... misses of a layer, divided between both, {times}"
        )


def _show_drafts(report: BenchReport) -> None:
    """Print what drafts gave where each reply was known, and from which acceptance on longer steps are faster."""
    with_drafts = [
        (row, row.draft_decode_tokens_per_s, row.draft_decode_spread)
        for row in report.rows
        if row.draft_decode_tokens_per_s is not None and row.draft_decode_spread is not None
    ]
    if not with_drafts:
        return
    rows = [
        [
            f"{row.residency_pct:.1f}%", f"{row.decode_tokens_per_s:,.1f}",
            f"{rate:,.1f} ({spread[0]:,.1f} to {spread[1]:,.1f})", f"{rate / row.decode_tokens_per_s:.2f}",
            "nothing drafted" if row.accepted_pct is None else f"{row.accepted_pct:.1f}%",
            "yes" if row.draft_identical_tokens else "NO",
        ]
        for row, rate, spread in with_drafts
    ]  # fmt: skip
    columns = ["resident", "plain\ntokens/s", "drafted\ntokens/s", "times", "accepted", "same\ntokens"]
    table("The same prompts again, their replies given as predictions: drafts where text is copied", columns, rows)
    steps = [
        [
            f"{row.residency_pct:.1f}%", n, f"{ms:,.2f}",
            "" if n == "1" else _share(row.break_even_acceptance.get(n)),
        ]
        for row, *_ in with_drafts
        for n, ms in row.step_ms.items()
    ]  # fmt: skip
    title = "Steps of one reply, and the chance of each drafted token to be accepted from which on they are faster"
    table(title, ["resident", "tokens", "ms", "break even"], steps)


def show_inspection(report: PlanReport) -> None:
    """Print what a model file is, its tensors by role and type, and, where it can be planned, the memory it takes."""
    file, sizes = report.file, report.file["sizes"]
    there = file["bytes"] - file["missing_bytes"]
    if file["missing_bytes"]:
        note(f"still downloading: {there:,} of {file['bytes']:,} bytes are there, and the header says the rest")
    for path in file["absent_files"]:
        note(f"still to come: {path}; what is in it is not known yet")
    rows = [["architecture", _shown(file["architecture"])], ["name", _shown(file["name"] or "none")]]
    for label, parts in _SIZES:
        said = [words.format(_several(sizes[key])) for key, words in parts if sizes.get(key) not in (None, 0)]
        rows += [[label, ", ".join(said)]] if said else []
    if file["parameters"]:
        unit, name = (1e9, "B") if file["parameters"] >= 1e9 else (1e6, "M")
        all_of, active = (f"{file[key] / unit:,.2f} {name}" for key in ("parameters", "active_parameters"))
        rows.append(["parameters", f"{all_of}, {active} of them active"])
    split = f" in {len(file['files'])} files" if len(file["files"]) > 1 else ""
    size = f"{file['bytes'] / _GIB:,.2f} GiB" if file["bytes"] >= _GIB else f"{file['bytes'] / (1 << 20):,.2f} MiB"
    rows.append(["size", size + split])
    rows += _drafter_rows(file.get("drafter")) + _block_rows(file.get("block")) + _speech_rows(report)
    table(f"{report.model}", ["", ""], rows)
    tensors = [
        [row["role"], row["type"] + ("" if row["kernels"] else " (no kernels)"), f"{row['tensors']:,}",
         f"{row['bytes'] / _GIB:,.3f}"]
        for row in file["tensors"]
    ]  # fmt: skip
    table("Tensors", ["for", "type", "number", "GiB"], tensors)
    show_plan(report)


def _drafter_rows(drafter: dict[str, Any] | None) -> list[list[str]]:
    """What a drafter asks of the model that it drafts for."""
    if drafter is None:
        return []
    layers = ", ".join(map(str, drafter["captured_layers"]))
    tokens = "any size" if drafter["vocabulary"] is None else f"{drafter['vocabulary']:,}"
    return [
        ["is a drafter", f"of blocks of {drafter['block_tokens']} tokens, {drafter['window_tokens']:,} positions back"],
        ["for a model of", f"the same width and a vocabulary of {tokens}"],
        ["reads", f"what layers {layers} of that model give, counted from 0"],
    ]


def _block_rows(block: dict[str, Any] | None) -> list[list[str]]:
    """What a block in a file of its own asks of the model that it drafts for."""
    if block is None:
        return []
    tokens = "any size" if block["vocabulary"] is None else f"{block['vocabulary']:,}"
    width = f"width {block['embedding_length']:,}"
    return [
        ["is a block that drafts", f"blk.{block['number']}, {block['bytes'] / _GIB:,.2f} GiB, for --draft"],
        ["for a model of", f"{block['number']} layers of this architecture, {width} and a vocabulary of {tokens}"],
    ]


def _speech_rows(report: PlanReport) -> list[list[str]]:
    """Tokenizer, template, calls and reasoning."""
    found, dialect = report.tokenizer, report.dialect
    if found is None:
        return []
    ends = ", ".join(map(_shown, found["ends_of_turn"])) or "no known token"
    rows = [["tokenizer", f"{found['kind']}; a turn ends with {ends}"]]
    if dialect is None:
        return [*rows, ["chat template", "none: plain text with names of speakers"]]
    calls = dialect.calls if dialect.knows_calls else f"{dialect.calls}, of which the template knows nothing"
    marks = f"between {dialect.opens} and {dialect.shuts}" if dialect.thinks else "none"
    variables = {"enable_thinking": dialect.knows_thinking, "reasoning_effort": dialect.knows_effort}
    known = [name for name, knows in variables.items() if knows]
    return [*rows, ["tool calls", calls], ["reasoning", "; the template knows ".join([marks, *known])]]


def show_plan(report: PlanReport) -> None:
    """Print a column of memory for each cap; a cap that is too small is a note."""
    for column in report.columns:
        if column.refusal is not None:
            cap = "the GPU" if column.vram_gib is None else f"{column.vram_gib:g} GiB"
            note(f"{cap}: {column.refusal.message}; {column.refusal.hint}")
    infos = report.planned
    if not infos:
        return
    for warning in dict.fromkeys(text for info in infos for text in info["warnings"]):
        note(f"warning: {warning}")
    first = infos[0]
    parts: list[tuple[str, str]] = [
        ("weights outside experts", "dense_bytes"),
        (f"KV cache, {first['ctx_tokens']:,} tokens, {first['kv_type']}", "kv_bytes"),
        ("expert slots", "slots_bytes"),
        ("staging of missing experts", "staging_bytes"),
        ("buffers and tables", "buffers_bytes"),
        ("context and kernels" + ("" if first["plan"]["context_measured"] else ", estimated"), "context_bytes"),
        ("all of it on the GPU", "device_bytes"),
        ("page-locked in host memory", "host_bytes"),
        ("all experts, for comparison", "experts_bytes"),
    ]
    if any(info["plan"]["homes_bytes"] for info in infos):
        parts.insert(-1, ("of it, homes of KV blocks", "homes_bytes"))
    if any(info["plan"]["drafts_bytes"] for info in infos):
        parts.append((f"of it on the GPU, what drafts ({_shown(first['draft'])})", "drafts_bytes"))
    rows = [[name, *(f"{info['plan'][key] / _GIB:,.2f}" for info in infos)] for name, key in parts]
    if first["slots_per_layer"]:  # one a layer with experts
        rows.append(["experts resident", *(f"{info['residency_pct']:.1f}%" for info in infos)])
        rows.append(["slots of a layer", *(_range(info["slots_per_layer"]) for info in infos)])
    rows.append(["requests at a time", *(f"{info['parallel']}" for info in infos)])
    if any(info["pool_tokens"] for info in infos):
        pools = [info["pool_tokens"] or info["ctx_tokens"] for info in infos]
        rows.append(["tokens of the KV cache on it", *(f"{n:,}" for n in pools)])
    rows.append(["tokens of a prefill step", *(f"{info['chunk_tokens']:,}" for info in infos)])
    heads = ["GiB of a cap of", *(f"{info['plan']['cap_bytes'] / _GIB:,.2f}" for info in infos)]
    table(f"Memory for {report.model} on {first['gpu'] or 'a GPU that is not here'}", heads, rows)


def _share(share: float | None) -> str:
    return "never" if share is None else f"{share:.0%}"


def _shown(text: str) -> str:
    """A text of a model file, which may hold anything, as a terminal can take it."""
    return text[:_COLUMNS] if text.isprintable() else repr(text[:_COLUMNS])


def _several(value: int | Sequence[int]) -> str:
    return f"{value:,}" if isinstance(value, int) else " or ".join(f"{n:,}" for n in value)


def _range(slots: Sequence[int]) -> str:
    return str(slots[0]) if min(slots) == max(slots) else f"{min(slots)} to {max(slots)}"


def _counts(title: str, rows: Sequence[tuple[str, int]]) -> None:
    table(title, ["", ""], [(name, f"{n:,}") for name, n in rows])


def _spread(row: Rung) -> list[str]:
    low, high, moves = row.misses_low, row.misses_high, row.moves_per_token
    return ["" if low is None else f"{low:.2f} to {high:.2f}", "" if moves is None else f"{moves:.2f}"]


def _misses(row: Rung) -> list[str]:
    return [f"{100 * row.hit_rate:.1f}%", f"{row.misses_per_token:.2f}"]
