"""Speed and error of the quantizers, on one thread.

Run from the repository root: python -m benchmarks.quantize [--json FILE]
The error is the root mean square of (dequantized - weight) over that of the weights, for normal weights and for
Student's t with 4 degrees of freedom (heavy tails).
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from gguf import GGMLQuantizationType as QType

from benchmarks.figures import json_option
from data.nano.quantizer import quantize
from engine.formats.quants import QTensor, dequantize
from spark.results import write_json

ROWS, COLS, REPEATS = 1024, 4096, 5
TYPES = (QType.BF16, QType.Q8_0, QType.Q6_K, QType.Q5_K, QType.Q4_K, QType.IQ4_XS, QType.Q4_0)


def relative_rmse(values: np.ndarray, qtype: QType, packed: np.ndarray) -> float:
    found = dequantize(QTensor("t", qtype, values.shape, packed.reshape(-1)))
    return float(np.sqrt(np.square(found - values).mean() / np.square(values).mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    json_option(parser)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    normal = (rng.standard_normal((ROWS, COLS)) * 0.02).astype(np.float32)
    heavy = (rng.standard_t(4, (ROWS, COLS)) * 0.02).astype(np.float32)
    rows = []
    for qtype in TYPES:
        seconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            packed = quantize(normal, qtype)
            seconds.append(time.perf_counter() - start)
        row = {
            "type": qtype.name,
            "bits_per_weight": 8 * packed.nbytes / normal.size,
            "weights_per_s": normal.size / statistics.median(seconds),
            "rmse_normal": relative_rmse(normal, qtype, packed),
            "rmse_heavy_tails": relative_rmse(heavy, qtype, quantize(heavy, qtype)),
        }
        rows.append(row)
        print(
            f"{qtype.name:7} {row['bits_per_weight']:6.3f} bits  {row['weights_per_s'] / 1e6:6.1f} M weights/s  "
            f"error {row['rmse_normal']:.5f} normal, {row['rmse_heavy_tails']:.5f} heavy tails"
        )
    if options.json:
        write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
