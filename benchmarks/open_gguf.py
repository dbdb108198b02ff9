"""Time and memory of opening a GGUF file, and of its ids.

Run from the repository root: python -m benchmarks.open_gguf [--json FILE] [--oracle]
Two files are made in a temporary folder: a vocabulary of 151,936 tokens with as many merges, and a sparse file
with the tensor table and routers of Qwen3-30B-A3B in Q4_K (17 GiB of holes, 50 MB on the disk). Each
measurement is a process of its own; `cold` means that the file's pages were dropped from memory before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as QType

from benchmarks.figures import json_option
from engine.formats.quants import row_bytes
from spark.results import write_json

VOCAB = 151_936
LAYERS, D, E, F, HEADS, KV_HEADS, HEAD_DIM = 48, 2048, 128, 768, 32, 4, 128
REPEATS = 5


def vocabulary(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_token_list([f"Ġtök{i}" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges([f"Ġa{i} b{i % 97}" for i in range(VOCAB)])
    writer.add_tensor("output_norm.weight", np.ones(D, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def qwen3_30b(path: Path) -> None:
    shapes: dict[str, tuple[tuple[int, ...], QType]] = {
        "token_embd.weight": ((VOCAB, D), QType.Q4_K),
        "output.weight": ((VOCAB, D), QType.Q6_K),
        "output_norm.weight": ((D,), QType.F32),
    }
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": ((D,), QType.F32),
            f"blk.{i}.attn_q.weight": ((HEADS * HEAD_DIM, D), QType.Q4_K),
            f"blk.{i}.attn_k.weight": ((KV_HEADS * HEAD_DIM, D), QType.Q4_K),
            f"blk.{i}.attn_v.weight": ((KV_HEADS * HEAD_DIM, D), QType.Q6_K),
            f"blk.{i}.attn_output.weight": ((D, HEADS * HEAD_DIM), QType.Q4_K),
            f"blk.{i}.ffn_norm.weight": ((D,), QType.F32),
            f"blk.{i}.ffn_gate_inp.weight": ((E, D), QType.F32),
            f"blk.{i}.ffn_gate_exps.weight": ((E, F, D), QType.Q4_K),
            f"blk.{i}.ffn_up_exps.weight": ((E, F, D), QType.Q4_K),
            f"blk.{i}.ffn_down_exps.weight": ((E, D, F), QType.Q6_K),
        }
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(LAYERS)
    writer.add_expert_count(E)
    sizes = {}
    for name, (shape, qtype) in shapes.items():
        sizes[name] = int(np.prod(shape[:-1])) * row_bytes(qtype, shape[-1], name)
        writer.add_tensor_info(name, shape, np.dtype(np.float32), sizes[name], raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    rng = np.random.default_rng(0)
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        at = -(-file.tell() // 32) * 32
        for name, size in sizes.items():
            if "ffn_gate_inp" in name:
                file.seek(at)
                file.write(rng.standard_normal(size // 4, np.float32).tobytes())
            at += -(-size // 32) * 32
        file.truncate(at)
        file.flush()
        os.fsync(file.fileno())


MEASURE = """
import resource, sys, time, tracemalloc
from pathlib import Path
from engine.formats.gguf import open_model
import gguf

path, what, trace = sys.argv[1:]
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
before = resident()
if trace == "1":
    tracemalloc.start()
start = time.perf_counter()
model = gguf.GGUFReader(path) if what == "oracle" else open_model(path)
if what in ("model_id", "file_id"):
    getattr(model, what)
seconds = time.perf_counter() - start
heap = tracemalloc.get_traced_memory()[1] if trace == "1" else 0
print(seconds, (resident() - before) / 2**20, heap / 2**20)
"""


def measure(path: Path, what: str, cold: bool) -> dict[str, float]:
    """Median seconds of new processes, and the memory that one more adds: resident (with file pages) and heap."""
    runs = []
    for trace in ["0"] * (1 if what == "oracle" else REPEATS) + ["1"]:
        if cold:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        command = [sys.executable, "-c", MEASURE, str(path), what, trace]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        runs.append([float(x) for x in output.split()])
    seconds = [run[0] for run in runs[:-1]]
    return {
        "seconds": statistics.median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "resident_mib": statistics.median(run[1] for run in runs[:-1]),
        "heap_mib": runs[-1][2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    json_option(parser)
    parser.add_argument("--oracle", action="store_true", help="measure the gguf package's reader too (10 s a run)")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        vocab, large = Path(folder) / "vocab.gguf", Path(folder) / "large.gguf"
        vocabulary(vocab)
        qwen3_30b(large)
        cases = [(vocab, "open"), (large, "open"), (large, "model_id"), (large, "file_id")]
        for path, what in cases + [(vocab, "oracle")] * options.oracle:
            for cold in (True, False):
                row = {"file": path.stem, "bytes": path.stat().st_size, "what": what, "cold": cold}
                rows.append(row | measure(path, what, cold))
                print(
                    "{file:6} {what:9} {0}  {seconds:7.3f} s ({seconds_min:.3f}-{seconds_max:.3f})  "
                    "+{resident_mib:.1f} MiB resident, {heap_mib:.1f} MiB heap".format(
                        "cold" if cold else "warm", **rows[-1]
                    )
                )
    if options.json:
        write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
