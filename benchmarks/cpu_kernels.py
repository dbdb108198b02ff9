"""Matrix products of the CPU kernels against a plain read of the same memory.

A product of one activation row is bound by reading its weights. For each type and size this alternates plain
parallel reads with products over the same bytes and reports the medians and their ratio, so that a busy
machine slows both alike. Small batches are bound by arithmetic: the second table counts multiply-adds.

    python benchmarks/cpu_kernels.py --json data/results/cpu_kernels.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as QType
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.figures import json_option  # noqa: E402
from engine.formats.block_types import NATIVE_TYPES  # noqa: E402
from engine.formats.quants import QTensor, row_bytes  # noqa: E402
from engine.ops import Limits, cpu  # noqa: E402
from engine.running.loaded import physical_cores  # noqa: E402
from spark.results import write_json  # noqa: E402
from tests.gguf_files import random_blocks  # noqa: E402

COLS = 2048
MIB = 1 << 20
SIZES_MIB = (8, 64, 1024)
BATCHES = ((256, 256, 85), (2048, 2048, 32), (768, 2048, 512))  # rows, cols, T; the first is a nano expert's
LIMITS = Limits(max_tokens=512, n_embd=COLS, n_head_dim=COLS, n_ff=COLS, n_vocab=1, n_expert=1, n_expert_used=1)


def weights(qtype: QType, rows: int, cols: int) -> QTensor:
    """Random weights; a large matrix repeats its first rows, which costs less to make and the same to read."""
    few = random_blocks(qtype, min(rows, 4096), cols, np.random.default_rng(1)).reshape(-1)
    data = np.resize(few, rows * row_bytes(qtype, cols, "benchmark"))
    return QTensor("benchmark", qtype, (rows, cols), data)


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def rates(amount: float, times: list[float]) -> dict[str, float]:
    """Median rate and its extremes, in units of `amount` a second."""
    return {
        "median": amount / statistics.median(times), "min": amount / max(times), "max": amount / min(times),
        "runs": len(times),
    }  # fmt: skip


def activations(T: int, cols: int) -> NDArray[np.float32]:
    return np.random.default_rng(2).standard_normal((T, cols)).astype(np.float32)


def matrix_vector(qtype: QType, size_mib: int, threads: int, isa: str | None) -> dict[str, object]:
    """One type and size: GB/s of plain reads and of products, alternating."""
    ws = cpu.workspace(LIMITS, threads, isa)
    rows = size_mib * MIB // row_bytes(qtype, COLS, "benchmark")
    w, x, y = weights(qtype, rows, COLS), activations(1, COLS), np.empty((1, rows), np.float32)
    reads, products = [], []
    for i in range(11 if size_mib >= 512 else 41):
        read = seconds(lambda: cpu.read_bytes(ws, w.data))
        product = seconds(lambda: cpu.product(ws, w, x, y))
        if i:  # the first touches cold memory
            reads.append(read)
            products.append(product)
    ws.close()
    gigabytes = w.nbytes / 1e9
    return {
        "type": qtype.name, "size_mib": size_mib, "rows": rows, "cols": COLS,
        "read_gb_per_s": rates(gigabytes, reads), "product_gb_per_s": rates(gigabytes, products),
        "ratio": statistics.median(reads) / statistics.median(products),
    }  # fmt: skip


def batch(qtype: QType, rows: int, cols: int, T: int, threads: int, isa: str | None) -> dict[str, object]:
    """One type and shape: billions of multiply-adds a second with T activation rows."""
    ws = cpu.workspace(LIMITS, threads, isa)
    w, x, y = weights(qtype, rows, cols), activations(T, cols), np.empty((T, rows), np.float32)
    times = [seconds(lambda: cpu.product(ws, w, x, y)) for _ in range(22)][1:]
    ws.close()
    return {
        "type": qtype.name, "rows": rows, "cols": cols, "tokens": T,
        "gmac_per_s": rates(rows * cols * T / 1e9, times),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    json_option(parser)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--isa", choices=cpu.ISAS, default=cpu.supported_isas()[-1])
    parser.add_argument("--types", default=",".join(t.name for t in NATIVE_TYPES))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES_MIB)), help="MiB of weights")
    options = parser.parse_args()
    types = [QType[name] for name in options.types.split(",")]
    rows, batches = [], []
    print(f"{options.isa}, {options.threads} threads; one activation row, {COLS} columns; medians")
    print(f"{'type':8}{'MiB':>6}{'read GB/s':>11}{'product GB/s':>14}{'ratio':>7}")
    for qtype in types:
        for size in map(int, options.sizes.split(",")):
            row = matrix_vector(qtype, size, options.threads, options.isa)
            rows.append(row)
            read, product = row["read_gb_per_s"]["median"], row["product_gb_per_s"]["median"]  # type: ignore[index]
            print(f"{qtype.name:8}{size:6}{read:11.1f}{product:14.1f}{row['ratio']:7.2f}")
    print(f"\n{'type':8}{'rows':>6}{'cols':>6}{'T':>5}{'GMAC/s':>9}")
    for qtype in types:
        for n, cols, T in BATCHES:
            row = batch(qtype, n, cols, T, options.threads, options.isa)
            batches.append(row)
            print(f"{qtype.name:8}{n:6}{cols:6}{T:5}{row['gmac_per_s']['median']:9.1f}")  # type: ignore[index]
    if options.json:
        write_json(
            options.json,
            {"isa": options.isa, "threads": options.threads, "matrix_vector": rows, "batches": batches},
        )


if __name__ == "__main__":
    main()
