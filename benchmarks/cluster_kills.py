"""Calibration on a cluster in which something is killed: is the profile that of one machine, byte for byte?

Runs with workers, daemons and nodes killed at random times, and runs whose driver is killed and that are gone on from.
A cluster of two nodes is made of processes of this machine; the tests do the same (tests/cluster/kills.py).

    python benchmarks/cluster_kills.py --json data/results/cluster_kills.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.figures import json_option  # noqa: E402
from spark.results import write_json  # noqa: E402
from tests.cluster import clusters, kills  # noqa: E402


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30, help="with workers, daemons and nodes killed")
    parser.add_argument("--drivers", type=int, default=10, help="drivers killed")
    json_option(parser)
    given = parser.parse_args()

    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = clusters.on_one_machine(folder)
        with clusters.machines(1, 1) as two:
            (folder / "random").mkdir()
            found = [kills.killed(expected, two, folder / "random", seed) for seed in range(given.runs)]
        with clusters.machines(1, 1) as two:
            (folder / "driver").mkdir()
            drivers = [kills.driver_killed(expected, two, folder / "driver", i) for i in range(given.drivers)]
    figures = {
        "what": "calibration on a cluster, killed",
        "tokens": expected.report.tokens,
        "runs": given.runs,
        "kills": dict(Counter(kill for each in found for kill in each.kills)),
        "workers_lost": sum(each.lost for each in found),
        "same": sum(each.same for each in found),
        "named": sum(each.aside > 0 and each.fewer and not each.same for each in found),
        "left_nothing": sum(each.clean for each in found),
        "drivers": given.drivers,
        "drivers_same": sum(each.same for _, each in drivers),
        "drivers_left_nothing": sum(each.clean for _, each in drivers),
        "counted_when_killed": [share for share, _ in drivers],
        "seconds": time.monotonic() - began_s,
    }
    for key, value in figures.items():
        print(f"{key}: {value}")
    if given.json is not None:
        write_json(given.json, figures)


if __name__ == "__main__":
    main()
