"""The section of RESULTS.md about caches that are larger than their pool."""

from __future__ import annotations

from functools import partial

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


SECTIONS = {
    "kv_pool.json": partial(pool, "Qwen3.6-35B-A3B's"),
    "kv_pool-qwen3.json": partial(pool, "Qwen3-30B-A3B's"),
}
