"""How fast a GPU's slow tier can be made: locking host memory, filling it from the page cache, loading a device.

    python benchmarks/cuda_memory.py [--gib 8] [--threads 1,4,8,16] [--json FILE]

Each way of locking is timed for the whole amount, unlocking apart. Copies are from a file that was
just written, so it is in the page cache. Rates are GB/s.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.figures import json_option
from engine.memory import slowtier
from engine.ops.cuda import gpu, memory
from spark.results import write_json

GIB = 1 << 30
PART_BYTES = 884_736  # gate of an expert of Qwen3-30B-A3B in Q4_K


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    made = work()
    return time.perf_counter() - start, made


def report(rows: list[dict[str, Any]], what: str, n_bytes: int, seconds: float, **more: Any) -> None:
    rows.append({"what": what, "bytes": n_bytes, "seconds": seconds, "gb_per_s": n_bytes / seconds / 1e9, **more})
    print(f"{what:58} {seconds:8.3f} s {n_bytes / seconds / 1e9:8.1f} GB/s", flush=True)


def locking(rows: list[dict[str, Any]], n_bytes: int, threads: list[int]) -> None:
    seconds, locked = timed(lambda: memory._allocate_by_driver(n_bytes))
    report(rows, "cudaHostAlloc", n_bytes, seconds, threads=1)
    seconds, _ = timed(locked.close)
    report(rows, "  cudaFreeHost", n_bytes, seconds)
    ways = [(piece, n, True) for piece in (64 << 20, 256 << 20, 1 << 30) for n in threads]
    ways += [(256 << 20, n, False) for n in threads]
    for piece, n, huge in ways:
        seconds, locked = timed(
            lambda n=n, piece=piece, huge=huge: memory.allocate(n_bytes, threads=n, piece_bytes=piece, huge_pages=huge)
        )
        what = f"touched and registered: {n} threads, {piece >> 20} MiB" + ("" if huge else ", small pages")
        report(rows, what, n_bytes, seconds, threads=n, piece_bytes=piece, huge_pages=huge)
        seconds, _ = timed(locked.close)
        report(rows, "  unregistered", n_bytes, seconds)


def copying(rows: list[dict[str, Any]], file: Path, threads: list[int], device: Any) -> None:
    n_bytes = file.stat().st_size
    locked = memory.allocate(n_bytes, threads=max(threads))
    target = locked.device_pointer
    on_device = device.pointer(device.empty(n_bytes, np.uint8))
    for populate in (True, False):
        for n in threads:
            pieces, mapping = _pieces(file)
            advice, slowtier._POPULATE_READ = slowtier._POPULATE_READ, slowtier._POPULATE_READ if populate else -1
            seconds, _ = timed(lambda p=pieces, n=n: slowtier.copy([(s, target + at) for s, at in p], n))
            slowtier._POPULATE_READ = advice
            how = "populated" if populate else "faulting"
            report(rows, f"page cache to page-locked, {n} threads, {how}", n_bytes, seconds, threads=n)
            seconds, _ = timed(lambda p=pieces: slowtier.forget([s for s, _ in p]))
            report(rows, "  pages given back", n_bytes, seconds)
            del pieces, mapping
    for n in threads:
        for half in (16 << 20, 64 << 20, 256 << 20):
            pieces, mapping = _pieces(file)
            uploader = slowtier.Uploader(device, n, half)
            seconds, _ = timed(lambda p=pieces, u=uploader: u.upload([(s, on_device + at) for s, at in p]))
            what = f"page cache to the device, {n} threads, 2 x {half >> 20} MiB"
            report(rows, what, n_bytes, seconds, threads=n, staging_bytes=half)
            del pieces, mapping
    seconds, _ = timed(lambda: (device.copy(on_device, target, n_bytes), device.synchronize()))
    report(rows, "page-locked to the device, one copy", n_bytes, seconds)
    locked.close()


def _pieces(file: Path) -> tuple[list[tuple[np.ndarray, int]], mmap.mmap]:
    """A fresh mapping of the file in parts of experts, with their offsets."""
    with file.open("rb") as opened:
        mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    data = np.frombuffer(mapping, np.uint8)
    return [(data[at : at + PART_BYTES], at) for at in range(0, data.size, PART_BYTES)], mapping


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0, help="how much to lock")
    parser.add_argument("--file-gib", type=float, default=4.0, help="size of the file to copy from")
    parser.add_argument("--threads", default="1,4,8,16")
    json_option(parser)
    o = parser.parse_args()
    threads = [int(n) for n in o.threads.split(",")]
    rows: list[dict[str, Any]] = []
    device = gpu.open_device()
    print(f"{device.name}, {os.cpu_count()} CPUs, {(memory.available_bytes() or 0) / GIB:.1f} GiB of host memory free")
    locking(rows, int(o.gib * GIB), threads)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights"
        block = np.random.default_rng(1).integers(0, 256, 64 << 20, dtype=np.uint8)
        with file.open("wb") as opened:
            for _ in range(int(o.file_gib * GIB) // block.nbytes):
                opened.write(block)
        copying(rows, file, threads, device)
    device.close()
    if o.json:
        write_json(o.json, {"gib": o.gib, "file_gib": o.file_gib, "rows": rows})


if __name__ == "__main__":
    main()
