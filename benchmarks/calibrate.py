"""Calibration speed of a model on a GPU: all experts resident, and at a part of them.

Random tokens in windows of 4,096, half of them marked as generated, are counted by `spark.pipeline.calibrate`,
each residency on windows of its own. Routing of random tokens through random weights is nearly even, so every expert
that is not resident is streamed for every window: the hardest case.

    python benchmarks/calibrate.py MODEL.gguf --json data/results/calibrate.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.driving import note, shape_of  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from engine.formats.gguf import open_model  # noqa: E402
from engine.ground.config import EngineConfig  # noqa: E402
from engine.placing import policies  # noqa: E402
from spark.daemon.client import Deadlines  # noqa: E402
from spark.pipeline.calibrate import calibrate  # noqa: E402
from spark.pipeline.checkpoints import CalibrateOptions  # noqa: E402
from spark.pipeline.tokens import Origin, Window, write_windows  # noqa: E402
from spark.results import provenance, write_json  # noqa: E402

WINDOW_TOKENS = 4096


def windows(n: int, n_vocab: int, seed: int) -> Iterator[Window]:
    rng = np.random.default_rng(seed)
    for i in range(n):
        tokens = rng.integers(0, n_vocab, WINDOW_TOKENS).astype(np.int32)
        yield Window(f"session {seed}-{i}", 0, tokens, np.arange(WINDOW_TOKENS) % 512 >= 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    json_option(parser)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--residency", default="100,60", help="percentages of the expert bytes")
    parser.add_argument("--windows", type=int, default=24, help="of 4,096 tokens, for each residency")
    arguments = parser.parse_args()
    shape = shape_of(arguments.model)
    with open_model(arguments.model) as file:
        model_id = file.model_id
    rows = []
    with tempfile.TemporaryDirectory(prefix="spark-calibrate-") as folder:
        for seed, percent in enumerate(float(p) for p in arguments.residency.split(",")):
            tokens = Path(folder) / f"tokens-{percent:g}.parquet"
            with tokens.open("wb") as sink:
                origin = Origin(model_id, "0" * 64, "0" * 64)
                write_windows(sink, windows(arguments.windows, shape.n_vocab, seed), origin, WINDOW_TOKENS)
            config = EngineConfig(
                arguments.model, device=arguments.device, policy=policies.UNIFORM.name, residency_pct=percent,
                ctx_tokens=WINDOW_TOKENS,
            )  # fmt: skip
            options = CalibrateOptions(tokens, Path(folder) / f"{percent:g}.spark.csv")
            report = calibrate(config, options, Deadlines(ready_s=300), lambda label, done, total: None)
            rate = report.tokens / report.seconds
            note(f"{percent:g}% resident: {report.tokens} tokens, {rate:.0f} tokens/s")
            rows.append({
                "residency_pct": percent, "tokens": report.tokens, "generated_tokens": report.generated_tokens,
                "seconds": report.seconds, "tokens_per_s": rate,
            })  # fmt: skip
    if arguments.json:
        write_json(arguments.json, {"model": shape.name, "rows": rows} | provenance())


if __name__ == "__main__":
    main()
