"""Two workers of one core each against one machine's daemon of two: what handing windows out costs.

The same tokens of the bundled model, in turn, some times over; counted are tokens/s once all daemons are ready, and
profiles must be the same. A cluster of two nodes is made of processes of this machine.

    python benchmarks/cluster_cpu.py --json data/results/cluster_cpu.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.figures import json_option  # noqa: E402
from engine.formats import profile as profiles  # noqa: E402
from engine.ground.config import EngineConfig  # noqa: E402
from spark.cluster import calibrating  # noqa: E402
from spark.cluster.options import ClusterOptions  # noqa: E402
from spark.daemon.client import Deadlines  # noqa: E402
from spark.extract import ExtractOptions, extract  # noqa: E402
from spark.pipeline.calibrate import calibrate  # noqa: E402
from spark.pipeline.checkpoints import CalibrateOptions  # noqa: E402
from spark.pipeline.tokens import tokenize  # noqa: E402
from spark.results import write_json  # noqa: E402

STORE_BYTES = 80 << 20


def quiet(label: str, done: int, total: int) -> None:
    """A progress that nobody looks at."""


def main() -> None:
    """See the module."""
    from ray.cluster_utils import Cluster

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=150_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=int, default=1024)
    json_option(parser)
    given = parser.parse_args()

    model, samples = ROOT / "data" / "nano" / "nano.gguf", ROOT / "data" / "sessions"
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            extract(ExtractOptions(folder, "both", samples / "claude", samples / "codex", 0.0), lambda a, b: None)
            tokenize(model, folder / "train.jsonl", folder / "t.parquet", given.window)
            config = EngineConfig(model=model, device="cpu", threads=2)
            rates: dict[str, list[float]] = {"one daemon of two cores": [], "two workers of one core": []}
            made = []
            for _ in range(given.rounds):
                options = CalibrateOptions(folder / "t.parquet", folder / "p.csv", max_tokens=given.max_tokens)
                report = calibrate(config, options, Deadlines(), quiet)
                rates["one daemon of two cores"].append(report.tokens_per_s)
                made.append(replace(profiles.load(options.out)[0], created=""))
                where = ClusterOptions(cluster.address, None, 0)
                report = calibrating.run(replace(config, threads=1), options, where, Deadlines(), quiet)
                rates["two workers of one core"].append(report.tokens_per_s)
                made.append(replace(profiles.load(options.out)[0], created=""))
            assert all(profiles.format(each) == profiles.format(made[0]) for each in made), "the profiles differ"
    finally:
        cluster.shutdown()
    medians = {name: statistics.median(found) for name, found in rates.items()}
    one, two = medians.values()
    figures: dict[str, object] = {"what": "two workers on two cores", "tokens": given.max_tokens, "tokens_per_s": rates}
    figures["share"] = two / one
    best_one, best_two = (max(found) for found in rates.values())
    figures["share_of_best"] = best_two / best_one  # what other work on the machine changes least
    for name, found in rates.items():
        print(f"{name}: {medians[name]:,.0f} tokens/s ({min(found):,.0f} to {max(found):,.0f})")
    print(f"share: {two / one:.3f}, of the best {best_two / best_one:.3f}; profiles are the same")
    if given.json is not None:
        write_json(given.json, figures)


if __name__ == "__main__":
    main()
