"""The daemon on an emulated GPU: `emulated_daemon.py [the daemon's arguments]`.

It does not warm up, which takes longer there than what the tests ask of it (tests/running/test_warm.py does).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine import __main__, daemon
from engine.ops.cuda import gpu
from engine.running import probe
from engine.serving.scheduler import Engine
from tests.emulated_device import EmulatedDevice


def found() -> probe.Found:
    """What a probe says of the emulated GPU."""
    device = EmulatedDevice()
    return probe.Found(0, device.name, (8, 0), device.n_sm, device.max_shared_bytes, "", 1 << 34, None, (12, 8))


if __name__ == "__main__":
    probe.probe = found
    gpu.open_device = lambda index: EmulatedDevice()
    Engine.warm_up = lambda engine: None
    sys.exit(daemon.run(__main__._open_engine, plan=__main__._plan))
