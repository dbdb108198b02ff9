"""`spark calibrate --ray`: a cluster that counts, opened and closed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from engine.formats.gguf import open_model
from engine.ground.config import EngineConfig
from spark.cluster.counting import ClusterCounting, refusal
from spark.cluster.driver import Driver, Patience
from spark.cluster.options import ClusterOptions
from spark.cluster.ray_pool import RayPool, connected, load_ray
from spark.cluster.worker import Counting, CountingWorker
from spark.daemon.client import Deadlines
from spark.pipeline import calibrate
from spark.pipeline.calibrate import CalibrateOptions, CalibrateReport
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

    @contextlib.contextmanager
    def opening(config: EngineConfig, deadlines: Deadlines, progress: Progress) -> Iterator[calibrate.Counting]:
        counting = Counting(options.count, options.generate_tokens, options.hidden)
        with open_model(config.model) as model:
            file_id = model.file_id

        def checked(first: Mapping[str, Any], info: Mapping[str, Any]) -> str:
            return refusal(first, info, file_id)

        with connected(cluster) as ray:
            pool = RayPool(ray, cluster, config, deadlines, counting, kind)
            try:
                patience = Patience(deadlines.ready_s, deadlines.silence_s)
                driver = Driver(pool, checked, patience, n_workers=cluster.n_workers)
                yield ClusterCounting(driver, driver.first())
            finally:
                pool.close()

    return calibrate.calibrate(config, options, deadlines, progress, opening)
