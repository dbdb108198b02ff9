"""Calibration by the GPUs of one host: tokens/s of one worker, of one a GPU, and of `spark` alone.

Each run is a `spark calibrate` of its own, as a user starts it, on the sample sessions, again and again under other
session ids; the profiles must be the same byte for byte (the time when they were made aside). Speed is tokens by the
time from the first worker that is ready to the last window, and by the workers' own time: what each did by the time in
which it could have had work, added up, which leaves out how long one waited for another to load. The order is: a short
run that compiles the kernels and reads the file once (without it the first run was a tenth slower), one worker, as many
as there are GPUs, no cluster, numbers in between, then the first two again as often as the time allows. Figures are
written after each.

    python benchmarks/cluster_gpu.py MODEL.gguf --json data/results/cluster_gpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.driving import note  # noqa: E402
from benchmarks.figures import gpus, json_option  # noqa: E402
from engine.formats import profile as profiles  # noqa: E402
from engine.formats.gguf import open_model  # noqa: E402
from spark.extract import ExtractOptions, extract  # noqa: E402
from spark.pipeline.tokens import Origin, Window, read_tokens, tokenize, write_windows  # noqa: E402
from spark.results import write_json  # noqa: E402

NANO, SAMPLES = ROOT / "data" / "nano" / "nano.gguf", ROOT / "data" / "sessions"
WINDOW_TOKENS = 4096
WARM_UP_TOKENS = 8192
ALONE = 0  # in place of a number of workers: without a cluster
SPARE_S = 20.0  # a run is not begun that would end so close to the limit
END_S = 60.0  # for a run that is ended


def write_tokens(model: Path, path: Path, rounds: int, max_window: int) -> int:
    """Write the sample sessions as token windows for a model, some times over under other ids; the number of tokens.

    They are those of the bundled model's tokenizer, whose ids every larger vocabulary has.
    """
    with tempfile.TemporaryDirectory() as name, open_model(model) as file:
        folder, origin = Path(name), Origin(file.model_id, "0" * 64, "0" * 64)
        extract(ExtractOptions(folder, "both", SAMPLES / "claude", SAMPLES / "codex", 0.0), lambda done, total: None)
        tokenize(NANO, folder / "train.jsonl", folder / "once.parquet", max_window)
        once = read_tokens(folder / "once.parquet")

        def repeated() -> Iterator[Window]:
            for turn in range(rounds):
                for window in once:
                    yield replace(window, session_id=f"{turn}-{window.session_id}")

        with path.open("wb") as sink:
            write_windows(sink, repeated(), origin, max_window)
        return once.n_tokens * rounds


def order(n_gpus: int, repeats: int) -> list[int]:
    """Numbers of workers, the most telling runs first; see the module."""
    between = [n for n in (2, 4, 8) if n < n_gpus]
    return [1, n_gpus, ALONE, *between, *islice(cycle((1, n_gpus)), 2 * repeats)]


def calibrate(model: Path, tokens: Path, folder: Path, n_workers: int, more: Sequence[str], limit_s: float) -> Any:
    """Run `spark calibrate`; its figures, with `wall_s` of the whole command, and the profile without its time.

    more: arguments. Raises CalledProcessError with what it said, TimeoutExpired.
    """
    profile, figures = folder / "p.spark.csv", folder / "figures.json"
    spark = [sys.executable, "-m", "spark.cli", "calibrate", str(model), str(tokens)]
    words = [*spark, "--out", str(profile), "--json", str(figures), *more]
    if n_workers != ALONE:
        words += ["--ray", "auto", "--workers", str(n_workers)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))  # the workers', too
    began_s = time.monotonic()
    with subprocess.Popen(
        words, env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # which ends its cluster, too
            note(process.communicate(timeout=END_S)[0][-4000:])
            raise
        finally:
            process.kill()
    wall_s = time.monotonic() - began_s
    if process.returncode:
        note(said[-4000:])
        raise subprocess.CalledProcessError(process.returncode, words)
    made = json.loads(figures.read_text()) | {"wall_s": wall_s}
    return made, profiles.format(replace(profiles.load(profile)[0], created=""))


def row(n_workers: int, made: dict[str, Any]) -> dict[str, Any]:
    """What one run shows."""
    found: dict[str, Any] = {"workers": n_workers}
    found |= {key: made[key] for key in ("tokens", "tokens_per_s", "ready_s", "seconds", "wall_s")}
    found["tokens_per_s_in_all"] = made["tokens"] / made["wall_s"]
    if n_workers != ALONE:
        shares = made["workers"]
        own = [share["busy_s"] + share["idle_s"] for share in shares]
        # A worker that was never ready has no time of its own.
        found["own_tokens_per_s"] = sum(share["cost"] / s for share, s in zip(shares, own, strict=True) if s)
        found["shares"] = [share["cost"] / made["tokens"] for share in shares]
        found["worker_tokens_per_s"] = [share["tokens_per_s"] for share in shares]
        found["idle_share"] = sum(share["idle_s"] for share in shares) / (sum(own) or 1.0)
        found["late_share"] = 1.0 - sum(own) / (n_workers * made["seconds"])  # of the time, that workers were not ready
        found["lost"] = sum(share["lost"] for share in shares)
    return found


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each number of workers the medians, and how many times one worker's speed that is."""
    found: list[dict[str, Any]] = []
    for n_workers in sorted({each["workers"] for each in rows}):
        same = [each for each in rows if each["workers"] == n_workers]
        keys = [key for key, value in same[0].items() if isinstance(value, float) or key == "workers"]
        found.append({"runs": len(same)} | {key: statistics.median(each[key] for each in same) for key in keys})
    one = next((each for each in found if each["workers"] == 1), None)
    for each in found if one is not None else ():
        for key in ("tokens_per_s", "own_tokens_per_s", "tokens_per_s_in_all"):
            if key in each:
                each[f"{key}_of_one"] = each[key] / one[key]
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf", help="a file that all workers share")
    json_option(parser)
    parser.add_argument("--gpus", type=int, metavar="N", help="workers at most (default: a GPU each)")
    parser.add_argument("--worker-gpus", default="1", help="of each; 0: CPUs, to try this out without a GPU")
    parser.add_argument("--rounds", type=int, default=4, help="times that the sample sessions are read; 350,000 tokens")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of each run, for a short trial")
    parser.add_argument("--repeats", type=int, default=2, help="of the first two runs, if there is time")
    parser.add_argument("--seconds", type=float, default=500.0, help="what would take longer is left out")
    given = parser.parse_args()

    until_s = time.monotonic() + given.seconds
    names = gpus()
    n_gpus = given.gpus or len(names)
    if n_gpus < 2:
        raise SystemExit(f"{n_gpus} GPUs: this measures two and more of one host")
    on_cpu = float(given.worker_gpus) == 0
    figures: dict[str, Any] = {"what": "calibration by the GPUs of one host", "gpus": [] if on_cpu else names}
    rows: list[dict[str, Any]] = []
    expected: str | None = None
    with tempfile.TemporaryDirectory(prefix="spark-cluster-gpu-") as name:
        folder = Path(name)
        tokens = folder / "tokens.parquet"
        figures |= {"tokens": write_tokens(given.model, tokens, given.rounds, WINDOW_TOKENS)}
        note(f"{figures['tokens']:,} tokens written")
        device = ["--device", "cpu" if on_cpu else "cuda"]
        workers = ["--worker-gpus", given.worker_gpus]
        warm_up = [*device, *workers, "--max-tokens", str(WARM_UP_TOKENS)]
        calibrate(given.model, tokens, folder, 1, warm_up, given.seconds)
        (folder / "p.spark.csv").unlink()
        for n_workers in order(n_gpus, given.repeats):
            left_s = until_s - time.monotonic()
            took = [each["wall_s"] for each in rows if each["workers"] == n_workers] or [r["wall_s"] for r in rows]
            if took and max(took) + SPARE_S > left_s:
                note(f"{n_workers} workers: left out, {left_s:.0f} s are left")
                continue
            more = [*device, *(workers if n_workers != ALONE else [])]
            more += [] if given.max_tokens is None else ["--max-tokens", str(given.max_tokens)]
            try:
                made, profile = calibrate(given.model, tokens, folder, n_workers, more, left_s)
            except subprocess.TimeoutExpired:
                note(f"{n_workers} workers: not done when the time was over")
                break
            (folder / "p.spark.csv").unlink()
            expected = expected or profile
            if profile != expected:
                words = f"the profile of {n_workers} workers is another than that of {rows[0]['workers']}"
                pairs = zip(expected.splitlines(), profile.splitlines(), strict=False)
                differing = [f"{a[:200]}\n{b[:200]}" for a, b in pairs if a != b]
                raise SystemExit(f"{words}, in {len(differing)} lines; the first:\n{''.join(differing[:1])}")
            rows.append(row(n_workers, made))
            figures["tokens"] = made["tokens"]
            note(json.dumps(rows[-1]))
            figures |= {"summary": summary(rows), "rows": rows, "same_profiles": len(rows)}
            if given.json is not None:
                write_json(given.json, figures)
    for each in figures.get("summary", ()):
        note(json.dumps(each))


if __name__ == "__main__":
    main()
