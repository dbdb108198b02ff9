"""`spark calibrate --ray`: a cluster that counts, opened and closed."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from engine.formats.gguf import open_model
from engine.ground.config import EngineConfig
from engine.ground.errors import SparkError
from spark.cluster.counting import PARTS, ClusterCounting, refusal
from spark.cluster.driver import Driver, Patience
from spark.cluster.options import ClusterOptions
from spark.cluster.ray_pool import RayPool, connected, load_ray
from spark.cluster.worker import Counting, CountingWorker
from spark.console import note
from spark.daemon.client import Deadlines
from spark.pipeline import calibrate, checkpoints, staged
from spark.pipeline.calibrate import CalibrateReport
from spark.pipeline.checkpoints import CalibrateOptions
from spark.pipeline.replay import Progress


def run(
    config: EngineConfig,
    options: CalibrateOptions,
    cluster: ClusterOptions,
    deadlines: Deadlines,
    progress: Progress,
    kind: type[CountingWorker] = CountingWorker,
) -> CalibrateReport:
    """Count the routing of token files on a cluster and write the profile, which is that of one machine.

    kind: what counts there. Raises what `pipeline.calibrate.calibrate` does; MissingExtraError without Ray; UsageError
    where no cluster answers, or has no GPU; the refusal where every node was refused; DeadlineError where no worker is
    ready in time.
    """
    load_ray()
    options, left = _staged(options)
    begun = False

    @contextlib.contextmanager
    def opening(config: EngineConfig, deadlines: Deadlines, progress: Progress) -> Iterator[calibrate.Counting]:
        nonlocal begun
        routing = options.trace_dir or checkpoints.routing_path(options.out)
        parts = routing.absolute() / f"{PARTS}{secrets.token_hex(8)}"
        mark = ""
        if options.staged:
            mark = staged.begin(options.staged, left)
            begun = True
        counting = Counting(options.count, options.generate_tokens, options.hidden, parts, options.staged, mark)
        with open_model(config.model) as model:
            file_id = model.file_id

        def checked(first: Mapping[str, Any], info: Mapping[str, Any]) -> str:
            return refusal(first, info, file_id)

        with connected(cluster) as ray:
            pool = RayPool(ray, cluster, config, deadlines, counting, kind)
            try:
                patience = Patience(deadlines.ready_s, deadlines.silence_s)
                driver = Driver(pool, checked, patience, n_workers=cluster.n_workers)
                yield ClusterCounting(driver, driver.first(), parts)
            finally:
                pool.close()
                shutil.rmtree(parts, ignore_errors=True)

    try:
        return calibrate.calibrate(config, options, deadlines, progress, opening)
    finally:
        state = checkpoints.state_of(checkpoints.partial_path(options.out))
        if begun and (state is None or state.get("staged") != options.staged):  # nobody goes on from there
            try:
                staged.remove(options.staged)
            except SparkError as error:
                note(f"{options.staged} is left, which nobody needs: {error.message}")


def _staged(options: CalibrateOptions) -> tuple[CalibrateOptions, str]:
    """Options with which workers leave the parts of a trace behind its URL themselves; where some wait for nothing.

    Where one machine has begun to gather them in a folder, that is gone on with.
    """
    if not options.trace_url:
        return options, ""
    state = checkpoints.state_of(checkpoints.partial_path(options.out)) or {"windows": 0}
    before = str(state.get("staged", ""))
    if not state["windows"]:
        return replace(options, trace_dir=None, staged=staged.place(options.trace_url)), before
    if not before:
        return options, ""
    return replace(options, trace_dir=None, staged=staged.place(options.trace_url, before)), ""
