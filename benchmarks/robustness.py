"""Sections of RESULTS.md about what is hostile, long or secret; render.py puts them in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]
Rows: TypeAlias = tuple[str, list[str], list[Sequence[object]]]  # what stands before a table, its columns and rows

FORMS = """\
One client reads a stream while others ask for forms. The gap is the longest between two of its tokens; the memory is
that of the daemon and its processes together. {answers} answer of that client to the same question, whatever went on
beside it."""
HOSTILE = """\
One client reads a stream while others send what is listed, on two cores, one of them the daemon's: to a server without
drafts, to one with drafts, of which {accepted:,} tokens were accepted, and to one with recall beside them, where
{tokens:,} tokens read {read:.0%} of the blocks before them. The gap is the longest between two pieces of its stream,
which said the same throughout, with drafts what it says without; the memory is the most that a server and the process
that reads large bodies took. Replies that are left are long prompts that are served: their gap is a step of prompts.
Problems: {problems}."""
CONTEXTS = """\
Conversations of a length of their own take turns, or all ask at once, on a cache of {ctx:,} tokens. After its first
turn each asks {turns} times. What is reused is a share of the prompts' tokens."""
SECRETS = """\
Secrets as published rules' tests and vendors' documents have them, in the places where they turn up, and texts that
only resemble them. Half was kept aside while the rules were written: of that half {aside_gone} of {aside} secrets go
and {aside_touched} of {aside_decoys} decoys are touched."""


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.0f}"


def _mib(n_bytes: float) -> str:
    return f"{n_bytes / 2**20:,.0f}"


def forms(made: Json) -> Rows:
    """`forms.py`."""
    rows = [
        [kind, "" if r["longest_s"] is None else f"{r['longest_s']:.2f}", _ms(r["gap_s"]), _mib(r["peak_bytes"]),
         "; ".join(end.split(":")[0] if len(end) > 60 else end for end in r["ends"])]
        for kind, r in made["kinds"].items()
    ]  # fmt: skip
    return FORMS.format(answers=made["answers"]), ["forms", "s until answered", "gap, ms", "MiB", "answer"], rows


def hostile(made: Json) -> Rows:
    """`hostile.py`."""
    tried = made["configurations"]
    rows = []
    for name in next(iter(tried.values()))["scenarios"]:
        of = [one["scenarios"][name] for one in tried.values()]
        said = "; ".join(dict.fromkeys(_answered(r) for r in of))
        rows.append([name, *(_ms(r["longest_gap_s"]) for r in of), _mib(max(r["most_bytes"] for r in of)), said])
    drafts, recall = tried["drafts"]["drafts"], tried["drafts and recall"]["recall"]
    text = HOSTILE.format(
        accepted=sum(n["accepted"] for n in drafts.values()), tokens=recall["tokens"],
        read=recall["read"] / recall["blocks"], problems="; ".join(made["problems"]) or "none",
    )  # fmt: skip
    return text, ["what is sent", *(f"gap, ms: {name}" for name in tried), "MiB", "answered"], rows


def _answered(r: Json) -> str:
    """How the clients of a scenario were answered, times aside."""
    said = [", ".join(f"{n} x {status}" for status, n in sorted(r.get("answers", {}).items()))]
    said += [f"{key} {r[key]:,}" for key in ("opened", "held", "clients") if key in r]
    return ", ".join(filter(None, said))


def long_contexts(made: Json) -> Rows:
    """`long_contexts.py`."""
    one = made["rows"][0]
    rows = [
        [f"{r['conversations']}{' at once' if r['at_once'] else ''}, of {r['prompt_tokens']:,} tokens",
         f"{r['prefix_gib']:g}", f"{r['reused_share']:.0%}", f"{r['first_s']['p50']:.2f}", f"{r['first_s']['p95']:.2f}"]
        for r in made["rows"]
    ]  # fmt: skip
    text = CONTEXTS.format(ctx=made["ctx_tokens"], turns=one["turns"] // one["conversations"])
    return text, ["conversations", "`--prefix-gib`", "reused", "first token p50, s", "p95, s"], rows


def redaction(made: Json) -> Rows:
    """`redaction.py`."""
    rows = [[r["kind"], r["secrets"], r["gone"], f"{r['gone'] / r['secrets']:.0%}"] for r in made["rows"]]
    n, gone = (sum(r[key] for r in made["rows"]) for key in ("secrets", "gone"))
    rows.append(["all", n, gone, f"{gone / n:.1%}"])
    rows.append(["decoys (touched)", made["decoys"], made["touched"], f"{made['touched'] / made['decoys']:.1%}"])
    return SECRETS.format(**made), ["kind", "planted", "gone", "share"], rows


SECTIONS = {
    "forms.json": ("Forms that take long, and who waits for them", forms),
    "hostile.json": ("Hostile requests, and who waits for them", hostile),
    "long_contexts.json": ("Several long conversations", long_contexts),
    "redaction.json": ("Secrets in extracted sessions", redaction),
}
