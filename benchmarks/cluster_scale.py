"""What the driver costs at a thousand workers: the real one, its job and its checkpoints, on a simulated cluster.

A worker of this machine counts some windows first; what it counted, after the time that a GPU of --tokens-per-s takes,
is what the simulated workers answer. Counts are tiled to the shape of a large model (48 layers of 128 experts). Windows
are read from a token file, again and again under other session ids, so reading is part of what the driver does. Time
passes at once, but the driver's own: its share of a core is its CPU time, without that of the simulation, by the time
that the run would have taken.

    python benchmarks/cluster_scale.py --json data/results/cluster_scale.json
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.cluster_pool import SimulatedPool  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from engine.ground.config import EngineConfig  # noqa: E402
from spark.cluster.counting import ClusterCounting  # noqa: E402
from spark.cluster.driver import Driver, Patience  # noqa: E402
from spark.cluster.pool import Place, Ready, Task  # noqa: E402
from spark.cluster.worker import Counting, CountingWorker, Counts, Recorded  # noqa: E402
from spark.daemon.client import Deadlines  # noqa: E402
from spark.extract import ExtractOptions, extract  # noqa: E402
from spark.pipeline.calibrate import Run  # noqa: E402
from spark.pipeline.checkpoints import CalibrateOptions, Tally  # noqa: E402
from spark.pipeline.sample import Sample  # noqa: E402
from spark.pipeline.tokens import TokensFile, Window, read_tokens, tokenize  # noqa: E402
from spark.results import write_json  # noqa: E402

N_LAYER, N_EXPERT, N_USED = 48, 128, 8


class Repeated(TokensFile):
    """A token file over and over, under other session ids."""

    def __init__(self, file: TokensFile, n_windows: int) -> None:
        super().__init__(file.path, file.origin, file.window, n_windows, file.n_tokens * n_windows // file.n_windows)
        self._file = file

    def __iter__(self) -> Iterator[Window]:
        n = 0
        for round_ in range(1 + self.n_windows // self._file.n_windows):
            for window in self._file:
                if n == self.n_windows:
                    return
                n += 1
                yield replace(window, session_id=f"{round_}-{window.session_id}")


def recorded(model: Path, windows: Sequence[Window]) -> list[np.ndarray[Any, Any]]:
    """What a worker counts in some windows, in the shape of a large model."""
    worker = CountingWorker(EngineConfig(model=model, device="cpu", threads=2), Deadlines(), Counting())
    try:
        found = []
        for i, window in enumerate(windows):
            counts = worker.work([Task(i, len(window.tokens), "", Recorded(window))]).value.counts.astype(np.int64)
            counts = counts[counts.any(axis=1)]
            times = -(-N_LAYER // counts.shape[0]), -(-N_EXPERT // counts.shape[1])
            found.append(np.tile(counts, times)[:N_LAYER, :N_EXPERT])
        return found
    finally:
        worker.close()


class Simulated(SimulatedPool):
    """Its workers say as much of themselves as counting looks at."""

    def greeting(self, worker: str, place: Place) -> Ready:
        """See SimulatedPool."""
        return Ready(worker, {"ready": {}})


def memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "data" / "nano" / "nano.gguf")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--windows", type=int, default=10**7)
    parser.add_argument("--window", type=int, default=4096, help="tokens of a window, at most")
    parser.add_argument("--tokens-per-s", type=float, default=24_000.0, help="of a worker")
    json_option(parser)
    given = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        folder, samples = Path(name), ROOT / "data" / "sessions"
        extract(ExtractOptions(folder, "both", samples / "claude", samples / "codex", 0.0), lambda a, b: None)
        tokenize(given.model, folder / "train.jsonl", folder / "t.parquet", given.window)
        once = read_tokens(folder / "t.parquet")
        some = [window for _, window in zip(range(8), once, strict=False)]
        counted = recorded(given.model, some)
        file = Repeated(once, given.windows)

        def seconds(task: Task) -> float:
            return task.cost / given.tokens_per_s

        def made(tasks: Sequence[Task]) -> Counts:
            total = counted[tasks[0].number % len(counted)] * len(tasks)
            windows = [task.payload.window if task.payload.recorded else None for task in tasks]
            parts = tuple((bytes(28 * N_LAYER * len(each.tokens)),) if each else () for each in windows)
            return Counts(total.astype(np.min_scalar_type(int(total.max()))), parts)

        pool = Simulated({f"node{i}": 8 for i in range(-(-given.workers // 8))}, seconds, made)
        driver = Driver(pool, lambda first, info: "", Patience(), n_workers=given.workers, clock=pool.clock)
        before_bytes, began_s, began_cpu_s = memory_bytes(), time.monotonic(), time.process_time()
        info = driver.first()
        counting = ClusterCounting(driver, info)
        described = {"n_expert_used": N_USED, "model_id": "0" * 64}
        nothing = Tally(np.zeros((N_LAYER, N_EXPERT), np.int64))
        run = Run(
            file, CalibrateOptions("", folder / "p.csv"), nothing, file.n_tokens + 1, {}, {"model": described},
            Sample(N_LAYER, N_USED), folder / "routing", lambda label, done, total: None,
        )  # fmt: skip
        tally = counting.count(run)
        cpu_s = time.process_time() - began_cpu_s - pool.own_s
        assert tally.windows == given.windows, tally.windows
        virtual_s = pool.clock()
        idle_s = pool.idle_s + sum(virtual_s - (each.idle_since_s or virtual_s) for each in pool.workers.values())
        report = {
            "what": "the driver of a simulated cluster",
            "workers": given.workers, "windows": given.windows, "tokens": tally.tokens,
            "tokens_per_s_of_a_worker": given.tokens_per_s,
            "run_s": virtual_s, "driver_cpu_s": cpu_s, "driver_cores": cpu_s / virtual_s,
            "driver_us_per_window": 1e6 * cpu_s / given.windows,
            "leases": pool.sent, "idle_share": idle_s / (idle_s + pool.worked_s),
            "max_bytes": memory_bytes(), "max_bytes_before": before_bytes,
            "checkpoint_bytes": (folder / "p.csv.partial").stat().st_size,
            "simulation_cpu_s": pool.own_s, "real_s": time.monotonic() - began_s,
        }  # fmt: skip
    for key, value in report.items():
        print(f"{key}: {value:,.4f}" if isinstance(value, float) else f"{key}: {value}")
    if given.json is not None:
        write_json(given.json, report)


if __name__ == "__main__":
    main()
