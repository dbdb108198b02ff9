"""Time to compile every kernel that a model needs, and to find them in the cache again. Needs no GPU.

The modules are those of a dry run over a model's shapes; each architecture has a cache of its own.

    python benchmarks/compile_kernels.py --json data/results/compile_kernels.json
    python benchmarks/compile_kernels.py --shape laguna-xs2 --arch sm_90
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.driving import note  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from benchmarks.full_shape import SHAPES, first_layers, mix_of, write_model  # noqa: E402
from engine import models  # noqa: E402
from engine.formats.gguf import open_model  # noqa: E402
from engine.ops.cuda import library  # noqa: E402
from engine.ops.cuda.counting import CountingDevice  # noqa: E402
from engine.running import dryrun  # noqa: E402
from engine.running.counted import count  # noqa: E402
from spark.results import write_json  # noqa: E402

N_LAYERS = {"laguna-xs2": 3, "qwen3.6-35b-a3b": 4, "qwen3.6-27b": 4, "gemma-4-26b-a4b": 6}  # others: 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    json_option(parser)
    parser.add_argument("--arch", default="sm_80,sm_86,sm_89,sm_90,sm_120")
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=SHAPES)
    o = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="spark-compile-") as name:
        # A few layers have every kind, type and shape that all have.
        model = Path(name) / "model.gguf"
        module, whole = SHAPES[o.shape]
        cut = first_layers(whole, N_LAYERS.get(o.shape, 2))
        write_model(model, cut, mix_of(cut), arch=module)
        with open_model(model) as file:
            arch = models.find(file.architecture)
            config = arch.Config.from_gguf(file)
            limits = dryrun.limits_of(config, 32768, 4096, 8)
            for target in o.arch.split(","):
                shared = (227 if target == "sm_90" else 99) << 10
                device = CountingDevice(target, 132, shared)
                counted = count(device, arch, config, arch.load(file, config), limits, "f16")
                modules = sorted({module for module, _ in counted.kernels})
                cache = Path(name) / target
                times = []
                for _ in range(2):
                    compiler = library.Compiler(target, library.find_nvrtc(13), cache)
                    began = time.perf_counter()
                    compiler.build(modules, lambda done, total: None)
                    times.append(time.perf_counter() - began)
                row = {
                    "shape": o.shape, "arch": target, "modules": len(modules), "kernels": len(counted.kernels),
                    "compile_s": times[0], "cached_s": times[1], "cpus": os.cpu_count(),
                }  # fmt: skip
                rows.append(row)
                note(f"{target}: {len(modules)} modules in {times[0]:.1f} s, from the cache in {times[1]:.2f} s")
    if o.json:
        write_json(o.json, {"rows": rows})


if __name__ == "__main__":
    main()
