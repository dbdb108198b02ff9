"""Sections of RESULTS.md about files that other tools write; render.py puts them in their place."""

from __future__ import annotations

from benchmarks.markdown import Json, origin, table

CONVENTIONS = """\
Tiny models of random weights, saved by `transformers`, converted by llama.cpp's converter (llama-cpp-python {version})
and loaded as they are. Errors are NMSE of the logits of 60 tokens: beside `transformers` in float64 with the experts
imposed that Spark chose (routers of random weights have near ties; *same experts*: the share that it chooses, too), and
the median over tokens beside llama.cpp. F32 files are compared with the model that was saved, others with one of the
file's weights; llama.cpp rounds activations to the type of BF16 weights, Spark does not. *Fused*: `--fuse-qkv` and,
where the converter can, `--fuse-gate-up-exps`. *nextn*: with a block that predicts further tokens, which is left out.
llama.cpp does not read Laguna's `yarn_beta_fast` and computes with 32 (docs/models.md)."""
MIXTURES = """\
The same models, quantized by llama.cpp's own quantizer, IQ types with an importance matrix of ones; Gemma 4 with rows
that are no multiple of 256. A cell: NMSE of the logits beside llama.cpp's on the same file (the median over tokens;
both round activations to 8 bits, each in its own way) / beside `transformers` in float64 with the file's weights and
the same experts. In every cell with numbers 64 greedy tokens and all bits of their logits are those of the NumPy
twin{but}.
Otherwise: the type that Spark has no kernels for, or what llama.cpp said."""

SHAPES = """\
The types that the quantizer gives the tensors of the published shapes (a dry run): GiB of the file, and the types in it
that Spark has no kernels for."""


def conventions(name: str, made: Json) -> list[str]:
    """`conventions.py`."""
    rows = []
    for r in made["rows"]:
        if "refused" in r:
            rows.append([r["family"], r["file"], r["refused"], "", ""])
            continue
        same = f"{r['same_experts']:.1%}" if "same_experts" in r else ""
        theirs = f"{r['llama_cpp']:.1e}" if "llama_cpp" in r else "fails"
        rows.append([r["family"], r["file"], f"{r['transformers']:.1e}", same, theirs])
    text = CONVENTIONS.format(version=made["llama_cpp_python"])
    columns = ["family", "file", "beside transformers", "same experts", "beside llama.cpp"]
    return ["## Files of llama.cpp's converter", "", *origin(name, made), text, "", *table(columns, rows)]


def mixtures(name: str, made: Json) -> list[str]:
    """`mixtures.py`."""
    cells = {(r["mixture"], r["family"]): _cell(r) for r in made["rows"]}
    names, families = (list(dict.fromkeys(key)) for key in zip(*cells, strict=True))
    bad = [f"{r['mixture']} of {r['family']}" for r in made["rows"] if r.get("same_bits") is False]
    text = MIXTURES.format(but=f", but for {', '.join(bad)}" if bad else "")
    rows = [[mixture, *(cells.get((mixture, family), "") for family in families)] for mixture in names]
    head = ["## Files of llama.cpp's quantizer", "", *origin(name, made), text, ""]
    return [*head, *table(["mixture", *families], rows), SHAPES, "", *_shapes(made["shapes"])]


def _shapes(found: list[Json]) -> list[str]:
    """The mixtures of the full shapes."""
    cells = {
        (r["mixture"], r["shape"]): f"{r['bytes'] / 2**30:.1f}" + "".join(f", {name}" for name in sorted(r["lacking"]))
        for r in found
    }
    names, shapes = (list(dict.fromkeys(key)) for key in zip(*cells, strict=True))
    return table(["mixture", *shapes], [[mixture, *(cells[mixture, shape] for shape in shapes)] for mixture in names])


def _cell(row: Json) -> str:
    if "refused" in row:
        found = row["refused"].split(" has type ")[-1].split(",")[0]
        return f"{found}: refused"
    if "not_made" in row:
        return f"llama.cpp: {row['not_made'].split(': ')[-1]}"
    theirs = f"{row['llama_cpp']:.0e}" if "llama_cpp" in row else "fails"
    return f"{theirs} / {row['transformers']:.0e}"


SECTIONS = {"conventions.json": conventions, "mixtures.json": mixtures}
