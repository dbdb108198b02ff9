"""The sections of RESULTS.md about the KV cache: larger than its pool, and in other types."""

from __future__ import annotations

from functools import partial
from statistics import median

from benchmarks.markdown import Json, origin, table

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


SECTIONS = {
    "kv_pool.json": partial(pool, "Qwen3.6-35B-A3B's"),
    "kv_pool-qwen3.json": partial(pool, "Qwen3-30B-A3B's"),
    "kv_types.json": types,
}
