"""The daemon with the fake engine: `fake_daemon.py STEP_S LOAD_S [the daemon's arguments]`."""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine import daemon
from tests.fake_engine import FakeEngine

if __name__ == "__main__":
    step_s, load_s, *arguments = sys.argv[1:]
    sys.exit(daemon.run(functools.partial(FakeEngine, step_s=float(step_s), load_s=float(load_s)), arguments))
