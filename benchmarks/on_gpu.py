"""Measure on a GPU what RESULTS.md says of one: models are written when they are needed, and each benchmark runs.

    python benchmarks/on_gpu.py                      # everything, about two hours on an H200
    python benchmarks/on_gpu.py given_tokens decode  # these
    python benchmarks/on_gpu.py --list               # what there is, and how old its figures are
    python benchmarks/on_gpu.py --seconds 900        # what fits in a quarter of an hour, in the order of the list

A benchmark that fails or takes too long is said and passed over. Results are copied to `--out` as soon as they are
there, so an end in the middle loses one of them; what one wrote that failed is NAME.failed.json. Models lie in
`--folder`, one at a time: 17 GiB for most.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.figures import gpus  # noqa: E402

BENCHMARKS, RESULTS, DATA = ROOT / "benchmarks", ROOT / "data" / "results", ROOT / "data"
# Arguments of full_shape.py, by the name of the file.
MODELS = {
    "Q4_K_M.gguf": "qwen3-30b-a3b",
    "long.gguf": "qwen3-30b-a3b --context 262144",
    "Q3_K_M.gguf": "qwen3-30b-a3b --mixture Q3_K_M",
    "UD-IQ2_XXS.gguf": "qwen3-30b-a3b --mixture UD-IQ2_XXS",
    "laguna.gguf": "laguna-xs2",
    "qwen36.gguf": "qwen3.6-35b-a3b --nextn",
    "dense.gguf": "qwen3.6-27b --nextn",
    "gemma.gguf": "gemma-4-26b-a4b",
    "dflash.gguf": "dflash-2048",
}
MODEL_S = 25.0  # to write one
SPARK = "import sys; sys.path.insert(0, sys.argv.pop(1)); from spark.cli import main; main()"
SESSIONS = ("sessions", "sessions_other")  # folders of data/ with logs, and files of tokens made of them


@dataclass(frozen=True, slots=True)
class Measurement:
    """A result file's name without its suffix, the command that makes it, and about how long that takes, in seconds.

    gpus: that it takes at least.
    """

    name: str
    command: str
    seconds: float
    gpus: int = 1

    @property
    def files(self) -> list[str]:
        """The models of the command, and files of tokens."""
        return [word for word in self.command.split() if word.endswith((".gguf", ".parquet"))]

    @property
    def model(self) -> str:
        """The first of its models that is to be written; empty where there is none."""
        return next((word for word in self.files if word in MODELS), "")


MEASUREMENTS = (
    Measurement("handover", "handover.py", 60),
    Measurement("cuda_wide", "cuda_kernels.py --parts wide", 45),
    Measurement("cuda_kernels", "cuda_kernels.py --parts routing,delta,ffn,products,attention,flash,gemm", 150),
    Measurement("cuda_types", "cuda_kernels.py --parts types", 120),
    Measurement("compile_kernels", "compile_kernels.py", 60),
    Measurement("batched-16", "batched.py Q4_K_M.gguf --tokens 512 --rounds 2 --requests 1,2,4,8,16", 60),
    Measurement(
        "batched_misses",
        "batched_misses.py Q4_K_M.gguf --rates 0,5,20 --tokens 384 --runs 2 --cpu-experts off,auto",
        280,
    ),
    Measurement("first_token", "first_token.py Q4_K_M.gguf --device cuda --ctx 40000 --vram-gib 45", 120),
    Measurement("draft_speed-rates", "draft_speed.py Q4_K_M.gguf --parts rates --depths 512,32000 --runs 3", 90),
    Measurement("draft_speed-repeat", "draft_speed.py Q4_K_M.gguf --parts rates --repeat 0.43 --runs 2", 45),
    Measurement("draft_speed-missed", "draft_speed.py Q4_K_M.gguf --parts missed --runs 2", 60),
    Measurement("draft_speed-sampled", "draft_speed.py Q4_K_M.gguf --parts rates --runs 2 --temperature 1", 45),
    Measurement("draft_speed-drafter", "draft_speed.py Q4_K_M.gguf --parts drafter --draft dflash.gguf --runs 3", 45),
    Measurement(
        "draft_speed-telling", "draft_speed.py Q4_K_M.gguf --parts drafter --draft dflash.gguf --telling --runs 3", 45
    ),
    Measurement(
        "draft_speed-sessions",
        "draft_speed.py Q4_K_M.gguf --parts sessions --tokens sessions.parquet sessions_other.parquet "
        "--session-tokens 12000", 120,
    ),
    Measurement("profile_step", "profile_step.py Q4_K_M.gguf", 30),
    Measurement("decode", "decode.py Q4_K_M.gguf --tokens 128", 240),
    Measurement(
        "decode-cpu_experts",
        "decode.py Q4_K_M.gguf --depths= --policies= --rates 0,1,5,6.6,10,20,40 --tokens 128 --cpu-experts off,auto",
        80,
    ),
    Measurement(
        "decode-guesses",
        "decode.py Q4_K_M.gguf --depths= --policies= --rates 0,1,5,6.6,10,20 --tokens 128 --runs 3 "
        "--cpu-experts off,auto --guesses off,0.83:0.45,0.6:0.45",
        200,
    ),
    Measurement("divisions", "divisions.py Q4_K_M.gguf", 70),
    Measurement("never_below", "never_below.py Q4_K_M.gguf", 380),
    Measurement("predictions", "predictions.py Q4_K_M.gguf", 200),
    Measurement("prefill", "prefill.py Q4_K_M.gguf", 120),
    Measurement(
        "prefill-cpu_experts",
        "prefill.py Q4_K_M.gguf --residency 100,60 --lengths= --turns 64,128,256,512 --cpu-experts off,auto", 90,
    ),
    Measurement("memory_plan", "memory_plan.py Q4_K_M.gguf", 60),
    Measurement("exactness", "exactness.py Q4_K_M.gguf --cpu-experts auto --guess on", 120),
    Measurement("calibrate", "calibrate.py Q4_K_M.gguf", 90),
    Measurement("cluster_gpu", "cluster_gpu.py Q4_K_M.gguf --rounds 2 --repeats 1 --seconds 380", 400, gpus=2),
    Measurement("next_turn", "next_turn.py Q4_K_M.gguf", 60),
    Measurement("forms_speed", "forms_speed.py Q4_K_M.gguf --device cuda --rounds 3", 60),
    Measurement("soak", "soak.py Q4_K_M.gguf --cpu-experts auto --guess auto", 480),
    Measurement("decode-q4", "decode.py Q4_K_M.gguf --depths 512 --rates= --policies= --runs 5", 15),
    Measurement("decode-q3", "decode.py Q3_K_M.gguf --depths 512 --rates= --policies= --runs 5", 15),
    Measurement("decode-iq2", "decode.py UD-IQ2_XXS.gguf --depths 512 --rates= --policies= --runs 5", 15),
    Measurement("draft_speed-dense", "draft_speed.py dense.gguf --parts drafter --draft mtp --runs 2", 60),
    Measurement(
        "draft_speed-dense-short", "draft_speed.py dense.gguf --parts drafter --draft mtp --beyond 0.01 --runs 4", 75
    ),
    Measurement(
        "draft_speed-dense-telling", "draft_speed.py dense.gguf --parts drafter --draft mtp --telling --runs 3", 60
    ),
    Measurement("draft_phases-dense", "draft_phases.py dense.gguf --runs 2", 45),
    Measurement("given_tokens-dense", "given_tokens.py dense.gguf --depths 512 --tokens 1,2,4,8 --runs 20", 30),
    Measurement("draft_speed-mtp", "draft_speed.py qwen36.gguf --parts drafter --draft mtp --runs 3", 60),
    Measurement(
        "draft_speed-mtp-telling", "draft_speed.py qwen36.gguf --parts drafter --draft mtp --telling --runs 3", 60
    ),
    Measurement("draft_phases-qwen36", "draft_phases.py qwen36.gguf --runs 2", 45),
    Measurement("draft_speed-qwen36", "draft_speed.py qwen36.gguf --parts rates --depths 512 --runs 2", 45),
    Measurement("decode-qwen36", "decode.py qwen36.gguf --depths 512,32768 --rates= --policies= --tokens 128", 60),
    Measurement("prefill-qwen36", "prefill.py qwen36.gguf --turns=", 90),
    Measurement("kv_pool", "kv_pool.py qwen36.gguf", 150),
    Measurement("recall_speed", "recall_speed.py qwen36.gguf", 60),
    Measurement("recall_pool", "recall_pool.py qwen36.gguf", 90),
    Measurement("restored", "restored.py qwen36.gguf", 300),
    Measurement("warm_turns", "warm_turns.py qwen36.gguf", 150),
    Measurement(
        "warm_turns-q8_0",
        "warm_turns.py qwen36.gguf --depths 100000 --sessions 32 --kv-type q8_0 --prefix-gib 33.5 --files", 240,
    ),
    Measurement("soak_sessions-gpu", "soak_sessions.py nano.gguf --device cuda --seconds 480 --kill-every 60", 540),
    Measurement("given_tokens", "given_tokens.py long.gguf --depths 512,32000 --sequences 2,4,8 --runs 30", 40),
    Measurement("kv_pool-qwen3", "kv_pool.py long.gguf --depths 131072 --shares 0.5 --prefill 0 --runs 10", 60),
    Measurement("recall_speed-qwen3", "recall_speed.py long.gguf --runs 3", 60),
    Measurement("draft_speed-laguna", "draft_speed.py laguna.gguf --parts rates --depths 512 --runs 2", 45),
    Measurement("decode-laguna", "decode.py laguna.gguf --policies= --tokens 128", 150),
    Measurement("predictions-laguna", "predictions.py laguna.gguf", 200),
    Measurement("prefill-laguna", "prefill.py laguna.gguf --turns=", 90),
    Measurement("calibrate-gemma", "calibrate.py gemma.gguf --residency 100,60 --windows 6", 60),
)  # fmt: skip


def chosen(names: Sequence[str]) -> list[Measurement]:
    """The measurements of some names in the order of the list; all of them for none."""
    known = {m.name for m in MEASUREMENTS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no such measurement: {', '.join(unknown)}; --list says what there is")
    return [m for m in MEASUREMENTS if not names or m.name in names]


def note(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Folder:
    """Where benchmarks run, with the files that they need. results: where theirs appear."""

    def __init__(self, path: Path) -> None:
        self.path, self.results = path, path / "data" / "results"
        self.results.mkdir(parents=True, exist_ok=True)

    def need(self, files: Sequence[str]) -> None:
        """Have these files, of models no others: they would not fit beside each other."""
        for name in MODELS:
            if name not in files:
                (self.path / name).unlink(missing_ok=True)
        for name in files:
            if (self.path / name).exists():
                continue
            if name in MODELS:
                shape, *more = MODELS[name].split()
                self._run("full_shape", [sys.executable, str(BENCHMARKS / "full_shape.py"), shape, name, *more], 300)
            elif (DATA / "nano" / name).exists():
                shutil.copy(DATA / "nano" / name, self.path / name)
            elif name.removesuffix(".parquet") in SESSIONS:
                self._tokens(name.removesuffix(".parquet"))
            else:
                raise SystemExit(f"{name}: nobody knows how it is made")

    def written_at(self, measurement: Measurement) -> int:
        """When its result was written, in ns; 0: it was not."""
        path = self.results / f"{measurement.name}.json"
        return path.stat().st_mtime_ns if path.exists() else 0

    def measure(self, measurement: Measurement) -> None:
        """Run a benchmark, whose result appears in `results`. Raises CalledProcessError and TimeoutExpired."""
        script, *words = measurement.command.split()
        result = f"data/results/{measurement.name}.json"
        command = [sys.executable, str(BENCHMARKS / script), *words, "--json", result]
        self._run(measurement.name, command, 60 + 2 * measurement.seconds)

    def last_words(self) -> str:
        """The end of what the last command said, be it a benchmark or what makes its files."""
        logs = sorted(self.path.glob("*.log"), key=lambda path: path.stat().st_mtime)
        return logs[-1].read_text("utf-8", "replace")[-2000:] if logs else ""

    def _tokens(self, name: str) -> None:
        logs = ["--claude-dir", str(DATA / name / "claude"), "--codex-dir", str(DATA / name / "codex")]
        spark = [sys.executable, "-c", SPARK, str(ROOT)]
        self._run(name, [*spark, "extract-sessions", "--out-dir", name, "--test-frac", "1", *logs], 300)
        tokenize = ["tokenize", str(DATA / "nano" / "nano.gguf"), f"{name}/test.jsonl", "--out", f"{name}.parquet"]
        self._run(name, [*spark, *tokenize], 300)

    def _run(self, name: str, command: list[str], deadline_s: float) -> None:
        """A command in this folder; what it says goes to NAME.log there."""
        with (self.path / f"{name}.log").open("ab") as log:
            subprocess.run(
                command, cwd=self.path, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=deadline_s, check=True
            )


def run(measurements: Sequence[Measurement], folder: Folder, out: Path, seconds: float, n_gpus: int = 1) -> list[str]:
    """Measure one after the other as long as there is time; the names of those that failed."""
    until_s, failed = time.monotonic() + seconds, []
    for m in measurements:
        if m.gpus > n_gpus:
            note(f"{m.name}: left out, it takes {m.gpus} GPUs of one host, and here is {n_gpus}")
            continue
        missing = sum(MODEL_S for name in m.files if not (folder.path / name).exists())
        if time.monotonic() + missing + m.seconds > until_s:
            note(f"{m.name}: left out, it takes about {missing + m.seconds:.0f} s")
            continue
        began_s = time.monotonic()
        copied = out / f"{m.name}.json"
        result, before = folder.results / copied.name, folder.written_at(m)
        try:
            folder.need(m.files)
            folder.measure(m)
            note(f"{m.name}: {time.monotonic() - began_s:.0f} s")
        except (subprocess.SubprocessError, OSError) as error:
            failed.append(m.name)
            copied = out / f"{m.name}.failed.json"
            note(f"{m.name}: FAILED after {time.monotonic() - began_s:.0f} s: {error}\n{folder.last_words()}")
        if folder.written_at(m) != before and result.resolve() != copied.resolve():
            out.mkdir(parents=True, exist_ok=True)
            shutil.copy(result, copied)
    return failed


def listed(measurements: Sequence[Measurement]) -> str:
    """A line a measurement: its name, seconds, the commit of the figures that there are, and the command."""
    lines = []
    for m in measurements:
        path = RESULTS / f"{m.name}.json"
        commit = json.loads(path.read_text()).get("commit", "?")[:10] if path.exists() else "none"
        lines.append(f"{m.name:24}{m.seconds:5.0f} s  {commit:12}{m.command}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of results, without .json (default: all)")
    parser.add_argument("--list", action="store_true", help="say what there is, and measure nothing")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu", help="for models, results and logs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are copied to")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="what would take longer is left out")
    o = parser.parse_args()
    measurements = chosen(o.names)
    if o.list:
        print(listed(measurements))
        return
    n_gpus = max(1, len(gpus()))
    if failed := run(measurements, Folder(o.folder.absolute()), o.out.absolute(), o.seconds, n_gpus):
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
