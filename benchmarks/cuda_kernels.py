"""Time of each CUDA kernel against the least that its bytes could take.

Every `benchmarks/cuda_<part>.py` names cases; each is captured into a graph of many launches that rotate through
copies of their data, so that the L2 cache does not serve them. A sample is the wall time of enough replays to make the
end of the measurement negligible (10 ms or more); the median and the extremes of the samples are reported, beside
the rate of a plain copy within the device on the same day.

    python benchmarks/cuda_kernels.py --json data/results/cuda_kernels.json [--only SUBSTRING]
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

COPY_BYTES = 1 << 30
COPIES = 8
SAMPLES = 9
SAMPLE_S = 0.01
GRAPH_LAUNCHES = (16, 256)  # of one graph: at least, at most


@dataclass(frozen=True)
class KernelCase:
    """One thing to time. launch(i) enqueues repetition i on the device's current stream, nothing else.

    launch rotates through enough copies of its data to exceed the L2 cache. n_bytes: the least bytes that one
    launch must move; n_flops: its multiplications and additions, 0 where they do not matter.
    """

    name: str
    launch: Callable[[int], None]
    n_bytes: int
    n_flops: int = 0


def time_launches(device: Any, launch: Callable[[int], None], samples: int = SAMPLES) -> list[float]:
    """Seconds of one launch, once a sample: replays of one graph of launches, back to back."""
    for i in range(3):  # compiles and warms up; a launch that fails does so here
        launch(i)
    device.synchronize()
    began = time.perf_counter()
    for i in range(4):
        launch(i)
    device.synchronize()
    estimate = max((time.perf_counter() - began) / 4, 1e-7)
    low, high = GRAPH_LAUNCHES
    n = min(max(int(SAMPLE_S / 2 / estimate), low), high)

    def work() -> None:
        for i in range(n):
            launch(i)

    graph = device.capture(work)

    def replay(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            graph.launch()
        device.synchronize()
        return time.perf_counter() - began

    replay(1)
    times = max(1, int(SAMPLE_S / replay(2) * 2) + 1)
    return [replay(times) / times / n for _ in range(samples)]


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def bandwidths(device: Any, n_bytes: int = COPY_BYTES) -> dict[str, float]:
    """GB/s of plain copies: within the device (read and written bytes together), and from page-locked memory.

    They are enqueued one by one: a graph hands its copies to the copy engine, which moves two thirds of what the
    multiprocessors do. A copy takes milliseconds, so the way to the device is no part of it.
    """
    source, target = device.empty(n_bytes, np.uint8), device.empty(n_bytes, np.uint8)
    host = device.page_locked(n_bytes)
    to = device.pointer(target)
    found = {}
    for name, at, moved in (
        ("copy_gb_per_s", device.pointer(source), 2 * n_bytes),
        ("host_to_device_gb_per_s", device.pointer(host), n_bytes),
    ):
        times = []
        for _ in range(1 + SAMPLES):
            began = time.perf_counter()
            for _ in range(COPIES):
                device.copy(to, at, n_bytes)
            device.synchronize()
            times.append((time.perf_counter() - began) / COPIES)
        found[name] = moved / 1e9 / statistics.median(times[1:])  # the first warms up
    return found


def measure(device: Any, part: str, case: KernelCase, copy_gb_per_s: float) -> dict[str, Any]:
    """The row of one case; a case that fails has `error` in place of times."""
    row: dict[str, Any] = {"part": part, "name": case.name, "n_bytes": case.n_bytes, "n_flops": case.n_flops}
    try:
        times = time_launches(device, case.launch)
    except Exception as error:  # the rest of the table is worth having
        return {**row, "error": f"{type(error).__name__}: {error}"}
    seconds = statistics.median(times)
    rate = case.n_bytes / 1e9 / seconds
    return {
        **row,
        "us": spread([1e6 * t for t in times]),
        "gb_per_s": rate,
        "copy_share": rate / copy_gb_per_s,
        "tflop_per_s": case.n_flops / 1e12 / seconds,
    }


def rows_of_part(part: str, only: str, copy_gb_per_s: float) -> list[dict[str, Any]]:
    """The rows of one part, shown as they come."""
    rows: list[dict[str, Any]] = []
    try:
        cases = importlib.import_module(f"benchmarks.cuda_{part}").cases
        device = open_device()
        for case in cases(device):
            if only in f"{part} {case.name}":
                rows.append(measure(device, part, case, copy_gb_per_s))
                show(rows[-1])
        device.close()
    except Exception as error:  # one part's mistake is not the others'
        rows.append(failed(part, error))
        show(rows[-1])
    return rows


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own: a kernel that faults spoils the device for the whole process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def failed(part: str, error: BaseException) -> dict[str, Any]:
    return {"part": part, "name": "*", "error": f"{type(error).__name__}: {error}"}


def show(row: dict[str, Any]) -> None:
    name = f"{row['part']:10}{row['name']:48}"
    if "error" in row:
        print(f"{name}  {row['error'].strip().splitlines()[0]}", flush=True)
        return
    us = row["us"]
    flops = f"{row['tflop_per_s']:9.1f}" if row["n_flops"] else ""
    print(
        f"{name}{us['median']:9.2f}{us['min']:9.2f}{us['max']:9.2f}{row['gb_per_s']:9.0f}{row['copy_share']:7.0%}{flops}",
        flush=True,
    )


def open_device() -> Any:
    from engine.ops.cuda import gpu  # here, so that this file can be imported where there is no GPU

    return gpu.open_device(0)


def describe() -> dict[str, Any]:
    """The device, and its plain rates."""
    device = open_device()
    return {"name": device.name, "arch": device.arch, "n_sm": device.n_sm, **bandwidths(device)}


def main() -> None:
    from benchmarks.figures import json_option
    from spark.results import write_json

    found = sorted(path.stem.removeprefix("cuda_") for path in Path(__file__).parent.glob("cuda_*.py"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    json_option(parser)
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="cases whose part and name contain this")
    parser.add_argument("--parts", default=",".join(part for part in found if part != "kernels"))
    options = parser.parse_args()
    about = in_child(describe)
    print(
        f"{about['name']}, {about['arch']}; copy within the device {about['copy_gb_per_s']:.0f} GB/s (read + written), "
        f"from page-locked memory {about['host_to_device_gb_per_s']:.1f} GB/s"
    )
    print(f"{'part':10}{'case':48}{'us':>9}{'min':>9}{'max':>9}{'GB/s':>9}{'copy':>7}{'TFLOP/s':>9}", flush=True)
    rows: list[dict[str, Any]] = []
    for part in options.parts.split(","):
        try:
            rows += in_child(rows_of_part, part, options.only, about["copy_gb_per_s"])
        except Exception as error:  # the process died
            rows.append(failed(part, error))
            show(rows[-1])
        if options.json:
            write_json(options.json, {"device": about, "rows": rows})
    if wrong := [row for row in rows if "error" in row]:
        sys.exit(f"{len(wrong)} of {len(rows)} rows failed")


if __name__ == "__main__":
    main()
