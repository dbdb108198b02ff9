"""`python -m engine MODEL.gguf ...`: the daemon with the real engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from engine import daemon
from engine.ground.config import EngineConfig


def _open_engine(config: EngineConfig, progress: daemon.Loading) -> daemon.Driven:
    # Imported only now: whatever the engine's libraries print when they load must not reach stdout.
    from engine.serving.scheduler import Engine

    engine = Engine(config, progress)
    try:
        engine.warm_up()
    except BaseException:
        engine.close()
        raise
    return engine


def _plan(config: EngineConfig) -> Mapping[str, Any]:
    from engine.running.dryrun import plan_only

    return plan_only(config)


if __name__ == "__main__":
    sys.exit(daemon.run(_open_engine, plan=_plan))
