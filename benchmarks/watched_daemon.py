"""The daemon, for measurements of its gates: `watched_daemon.py [the daemon's arguments]`.

It is the daemon of `python -m engine`, but obeys orders that come as requests for a profile whose path is in ORDERS
(`order`): between two steps its gates begin anew, or threads that compute experts are held within a job.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

ORDERS = "/orders"  # a folder that need not exist
_released = threading.Event()


def order(client: Any, **words: Any) -> dict[str, Any]:
    """Have a watched daemon do something, and wait for its answer."""
    found: dict[str, Any] = client.profile("read", Path(ORDERS) / json.dumps(words))
    return found


def obey(engine: Any, words: dict[str, Any]) -> dict[str, Any]:
    """Do what an order says, while no step is under way or between two."""
    if "begin" in words:
        return begin(engine, words["begin"], words.get("guesses", True), words.get("jobs", True))
    if "release" in words:
        _released.set()
        return {"held": 0}
    return hold(engine, words["hold"], words["threads"], words["seconds"])


def begin(engine: Any, at: int, with_guesses: bool, with_jobs: bool) -> dict[str, Any]:
    """Gates know nothing, and of imposed choices those `at` come next.

    with_guesses: whether most steps have some, until the gate knows better. with_jobs: whether any are handed over;
    False: none until the next order, as after a loss.
    """
    import numpy as np

    from engine.placing.guesses import Gate
    from engine.placing.handed import HandedGate
    from engine.placing.misses import NEVER_S, MissGate

    loaded = engine.loaded
    misses, guesses, replay = loaded.steps.misses, loaded.steps.guesses, loaded.forward.replayed
    if replay is not None:
        loaded.forward.device.synchronize()
        loaded.forward.device.write(replay.counter, np.array([at], np.int32))
    if misses is not None:
        gate = MissGate(misses.gate.begun, misses.gate.n_used, len(loaded.residency.banks))
        gate._from = gate._idle_from = misses.cpu.tally
        if not with_jobs:
            gate._stop("off", "asked for")
            gate._retry_s = NEVER_S
        misses.gate = gate
        misses._tell()
        if misses.long is not None:
            misses.long.gate = HandedGate(misses.long.gate.pcie_us)
            misses.long.gate._from = misses.long.jobs.tally
    if guesses is not None:
        guesses.gate = Gate()
        counts = guesses.counts
        guesses.gate._before = counts.timed
        guesses.gate._made, guesses.gate._useful = counts.made, counts.useful
        guesses.gate.with_guesses, guesses.gate._is_new = with_guesses, False  # as one is in the middle of a day
    return {"jobs": misses is not None and misses.is_on, "guesses": guesses is not None and with_guesses}


def hold(engine: Any, place: str, n: int, seconds: float) -> dict[str, Any]:
    """The next n threads that come to a place of a job (`jobs.HOLDS`) wait there until released, or for so long."""
    misses = engine.loaded.steps.misses
    if misses is None:
        return {"held": 0}
    pool = misses.cpu.pool

    _released.clear()

    def held() -> None:
        with pool.held(place, n):
            _released.wait(seconds)

    threading.Thread(target=held, daemon=True).start()
    return {"held": n}


def open_watched(config: Any, progress: Any) -> Any:
    """The engine, with orders."""
    from engine.__main__ import _open_engine

    engine: Any = _open_engine(config, progress)
    profile = engine.profile

    def obeying(action: str, path: Path | None) -> dict[str, Any]:
        if path is None or str(path.parent) != ORDERS:
            return profile(action, path)
        return obey(engine, json.loads(path.name))

    engine.profile = obeying
    return engine


if __name__ == "__main__":
    from engine import daemon
    from engine.__main__ import _plan

    sys.exit(daemon.run(open_watched, plan=_plan))
