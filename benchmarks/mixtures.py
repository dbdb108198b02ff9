"""Files of every mixture of llama.cpp's quantizer: which load, and what they compute beside the twin and llama.cpp.

    python -m benchmarks.mixtures --source LLAMA_CPP [--llama PYTHON] [--family NAME] [--mixture NAME] [--json FILE]

Options as those of `benchmarks.conventions`. A tiny model of each family is converted to F32, quantized by llama.cpp's
quantizer to each mixture (IQ types with an importance matrix, in which all weights matter alike) and loaded.
Where it loads: are 64 greedy tokens, and their logits, those of the NumPy twin, and what is the error of the logits of
60 tokens beside llama.cpp's on the same file, and beside `transformers` in float64 with the file's weights? Activations
are rounded to 8 bits here and there, each in its own way. Gemma 4 has rows of 352 and 1,056, no multiple of 256, as
published models have. Exits 1 if a token differs.

The same mixtures of the full shapes, whose weights need not be there: the types that the quantizer gives their tensors,
and which of them have no kernels here.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as QType

from benchmarks.figures import json_option
from benchmarks.full_shape import SHAPES, is_vector, write_outline
from benchmarks.llama_files import (
    F32_FILE,
    FailedError,
    Ids,
    LlamaCpp,
    Logits,
    beside_transformers,
    file_weights,
    llama_of,
    llama_options,
    opened,
    read_config,
    save_transformers,
    spark_run,
    step,
    tiny,
)
from engine.formats.block_types import NATIVE_TYPES
from engine.formats.gguf import open_model
from engine.formats.quants import row_bytes
from engine.ground.errors import SparkError
from engine.models import known
from spark.results import write_json

# llama.cpp's numbers of file types.
MIXTURES = {
    "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_0": 2, "Q4_1": 3, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_0": 8,
    "Q5_1": 9, "Q5_K_M": 17, "Q6_K": 18, "Q8_0": 7, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ2_M": 29, "IQ3_XXS": 23,
    "IQ3_M": 27, "IQ4_NL": 25, "IQ4_XS": 30, "MXFP4_MOE": 38,
}  # fmt: skip
PROMPT, GREEDY, MEASURED = 8, 64, 60


def greedy(path: Path, prompt: Ids) -> tuple[list[int], Logits]:
    """The tokens after a prompt, one by one, and the logits [GREEDY, V] that they are from.

    Each is the likeliest that was not there yet: a model of random weights would soon say one for ever.
    """
    loaded = opened(path, PROMPT + GREEDY)
    try:
        sequence, tokens, made, fed = loaded.kv.sequence(), list[int](), [], prompt
        while len(tokens) < GREEDY:
            made.append(np.array(step(loaded, sequence, fed).logits[-1]))
            tokens.append(likeliest(made[-1], tokens))
            fed = np.array(tokens[-1:], np.int32)
        return tokens, np.array(made)
    finally:
        loaded.close()


def likeliest(logits: Logits, without: list[int]) -> int:
    """The token of the largest logit, some left out."""
    left = logits.copy()
    left[without] = -np.inf
    return int(np.argmax(left))


def beside_the_twin(path: Path, prompt: Ids) -> dict[str, bool]:
    """Whether tokens one by one are those of the NumPy twin, which reads them at once; whether all logits' bits are."""
    tokens, logits = greedy(path, prompt)
    theirs = spark_run(path, np.array([*prompt, *tokens[:-1]], np.int32), "reference")[0][PROMPT - 1 :]
    same = [likeliest(row, tokens[:i]) == tokens[i] for i, row in enumerate(theirs)]
    return {"same_tokens": all(same), "same_bits": bool(np.array_equal(logits, theirs))}


def measure(llama: LlamaCpp, row: dict[str, Any], whole: Path, folder: Path) -> dict[str, Any]:
    """A cell of the table: `row` says the family and the mixture."""
    mixture = row["mixture"]
    tokens = np.random.default_rng(1).integers(0, 301, MEASURED).astype(np.int32)
    try:
        path = llama.quantize(whole, folder / "mixed.gguf", MIXTURES[mixture], importance=mixture.startswith("IQ"))
    except FailedError as error:
        return row | {"not_made": str(error)}
    with open_model(path) as file:
        row["types"] = dict(collections.Counter(t.qtype.name for t in file.tensors.values() if len(t.shape) > 1))
    try:
        logits, experts = spark_run(path, tokens)
    except SparkError as error:
        return row | {"refused": error.message}
    config = read_config(path)
    row |= beside_transformers(config, file_weights(path, config), tokens, logits, experts)
    row |= beside_the_twin(path, tokens[:PROMPT])
    return row | llama.beside(path, tokens, logits)


def full_shape(llama: LlamaCpp, shape: str, mixture: str, outline: Path) -> dict[str, Any]:
    """What a mixture of a published model has: its bytes, its types by their tensors, those without kernels."""
    types = llama.types(outline, MIXTURES[mixture], importance=mixture.startswith("IQ"))
    with open_model(outline) as file:
        n_bytes = sum(
            prod(t.shape[:-1]) * row_bytes(QType[types[name]], t.shape[-1], name) for name, t in file.tensors.items()
        )
    found = collections.Counter(types.values())
    lacking = [name for name in found if QType[name] not in NATIVE_TYPES]
    return {"shape": shape, "mixture": mixture, "bytes": n_bytes, "types": dict(found), "lacking": lacking}


def source_type(name: str) -> QType:
    """The types of a file before it is quantized."""
    return QType.F32 if is_vector(name) or "ffn_gate_inp" in name else QType.BF16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    llama_options(parser)
    parser.add_argument("--mixture", choices=MIXTURES, action="append", help="only this one")
    json_option(parser)
    options = parser.parse_args()
    llama, rows = llama_of(options), []
    for arch in options.family or known():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            whole = llama.convert(save_transformers(folder / "hf", *tiny(arch)), folder / "whole.gguf", *F32_FILE)
            for mixture in options.mixture or MIXTURES:
                rows.append(measure(llama, {"family": arch, "mixture": mixture}, whole, folder))
                print(rows[-1], flush=True)
    shapes = []
    for shape, (module, config) in SHAPES.items():
        if options.family and module.ARCH not in options.family:
            continue
        with tempfile.TemporaryDirectory() as name:
            outline = Path(name) / "outline.gguf"
            write_outline(outline, config, source_type, shape, module)
            for mixture in options.mixture or MIXTURES:
                shapes.append(full_shape(llama, shape, mixture, outline))
                print(shapes[-1], flush=True)
    if options.json:
        write_json(options.json, {"llama_cpp_python": llama.version(), "rows": rows, "shapes": shapes})
    if bad := [f"{row['family']} {row['mixture']}" for row in rows if row.get("same_tokens") is False]:
        sys.exit(f"tokens differ from the twin's: {', '.join(bad)}")


if __name__ == "__main__":
    main()
