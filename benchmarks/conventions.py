"""Files straight from llama.cpp's converter: do they load, and compute what `transformers` and llama.cpp compute?

    python -m benchmarks.conventions --source LLAMA_CPP [--llama PYTHON] [--json FILE]

--source: the source tree with convert_hf_to_gguf.py, such as vendor/llama.cpp of the `llama-cpp-python` source package.
--llama: an interpreter that has `llama-cpp-python` (default: this one). Tiny models of random weights of every family
are saved by `transformers`, converted, and loaded here and there; errors are of the logits of 60 tokens. Exits 1 unless
every F32 file is within 1e-6 (NMSE) of the `transformers` model that was saved.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import json_option
from benchmarks.llama_files import (
    F32_FILE,
    YARN,
    FailedError,
    LlamaCpp,
    beside_transformers,
    file_weights,
    largest_difference,
    llama_of,
    llama_options,
    read_config,
    save_transformers,
    spark_run,
    tiny,
)
from engine.ground.errors import SparkError
from engine.models import known
from engine.models.scaling import Scaling
from spark.results import write_json

MUST = 1e-6  # NMSE of F32 files beside transformers
LINEAR = Scaling("linear", factor=3.0)
FUSE = ("--fuse-qkv", "--fuse-gate-up-exps")
FUSES_EXPERTS = ("gemma4", "qwen35moe")  # of what families the converter knows how


@dataclass(frozen=True)
class Case:
    """A file: its name in the table, the converter's options, fields that the model has otherwise.

    mtp: it has a block that predicts further tokens.
    """

    name: str
    options: tuple[str, ...] = F32_FILE
    changes: dict[str, Any] = field(default_factory=dict)
    mtp: bool = False


def cases(arch: str) -> list[Case]:
    """The files of a family."""
    found = [
        Case("F32"),
        Case("F32, fused", (*F32_FILE, *FUSE[: 2 if arch in FUSES_EXPERTS else 1])),
        Case("BF16", ("--outtype", "bf16")),
        Case("Q8_0", ("--outtype", "q8_0")),
    ]
    if arch == "laguna":  # all of its published models have YaRN
        return [
            Case("F32, no scaling", changes={"scaling": None}),
            Case("F32, `yarn_beta_fast` 8", changes={"scaling": Scaling("yarn", 4.0, 200, beta_fast=8.0)}),
            *(replace(case, name=f"{case.name}, YaRN") for case in found),
        ]
    if arch != "gemma4":  # its full layers have frequencies of their own
        found += [Case("F32, YaRN", changes={"scaling": YARN}), Case("F32, linear", changes={"scaling": LINEAR})]
    if arch.startswith("qwen35"):
        found.append(Case("F32, `nextn`", mtp=True))
    return found


def measure(llama: LlamaCpp, arch: str, case: Case, folder: Path) -> dict[str, Any]:
    """A row of the table."""
    config, tensors = tiny(arch, **case.changes)
    tokens = np.random.default_rng(1).integers(0, config.n_vocab, 60).astype(np.int32)
    f32 = case.options[:2] == F32_FILE
    row: dict[str, Any] = {"family": arch, "file": case.name, "options": " ".join(case.options), "f32": f32}
    try:
        saved = save_transformers(folder / "hf", config, tensors, mtp=case.mtp)
        path = llama.convert(saved, folder / "x.gguf", *case.options)
        logits, experts = spark_run(path, tokens)
    except (SparkError, FailedError) as error:
        return row | {"refused": str(error)}
    weights = file_weights(path, read_config(path))
    if f32:
        row["tensors"] = largest_difference(weights, tensors)
        weights = tensors
    row |= beside_transformers(config, weights, tokens, logits, experts)
    return row | llama.beside(path, tokens, logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    llama_options(parser)
    json_option(parser)
    options = parser.parse_args()
    llama, rows = llama_of(options), []
    for arch in options.family or known():
        for case in cases(arch):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(measure(llama, arch, case, Path(folder)))
            print(rows[-1], flush=True)
    if options.json:
        write_json(options.json, {"llama_cpp_python": llama.version(), "rows": rows})
    if bad := [row for row in rows if row["f32"] and not row.get("transformers", 1.0) < MUST]:
        sys.exit(f"{len(bad)} F32 files are not within {MUST} of transformers")


if __name__ == "__main__":
    main()
