"""Two installs of Spark on one machine, in turns: what a change of structure costs, and that it changes no token.

    python benchmarks/before_after.py data/nano/nano.gguf OTHER/.venv/bin/python --json data/results/before_after.json

The other install is a checkout of another commit with an environment of its own (`make setup`); its interpreter is
named. Both daemons are open at once and take the same fresh prompts in turns, the first of a pair changing from round
to round. Tokens must be equal. On a CPU the figure is the processor's time of a daemon, which what else runs on the
machine changes little; on a GPU it is the daemon's own timing. Reported is the ratio, this install's time over the
other's, of each pair.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.driving import DEADLINES, Prompts, generate, note, parse_list, shape_of
from benchmarks.figures import json_option
from engine.ground import protocol
from engine.ground.config import EngineConfig
from spark.daemon.client import DaemonClient
from spark.results import write_json

WARM_UPS = 2


class Install:
    """A daemon of one install; times are of everything since the last one asked for."""

    def __init__(self, python: str, config: EngineConfig) -> None:
        command = [python, "-P", "-m", "engine", *protocol.command_line(config)]
        self.client = DaemonClient(command, deadlines=DEADLINES)

    def seconds(self, prompt: list[int], n_tokens: int, device: str) -> tuple[list[int], float]:
        """Generate; the tokens, and what they took."""
        began = processor_s(self.client.pid)
        made = generate(self.client, prompt, n_tokens)
        used = processor_s(self.client.pid) - began
        timing = made.done.timing
        return made.tokens, used if device == "cpu" else timing.prefill_s if n_tokens == 1 else timing.decode_s


def processor_s(pid: int) -> float:
    """What the threads of a process have run; Linux keeps it in nanoseconds."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def compare(before: Install, after: Install, prompts: Prompts, lengths: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Pairs of runs on the same prompts. lengths: tokens of a prompt, and generated ones."""
    n_prompt, n_tokens = lengths
    device = after.client.ready.info["device"]
    times: dict[str, list[float]] = {"before": [], "after": []}
    for i in range(WARM_UPS + rounds):
        prompt, found = prompts.next(n_prompt), {}
        order = [("before", before), ("after", after)]
        for name, install in order if i % 2 else reversed(order):
            found[name], seconds = install.seconds(prompt, n_tokens, device)
            if i >= WARM_UPS:
                times[name].append(seconds)
        if found["before"] != found["after"]:
            raise SystemExit(f"prompt {i} of {n_prompt} tokens: the two installs generate different tokens")
    ratios = sorted(after / before for before, after in zip(times["before"], times["after"], strict=True))
    quarter = len(ratios) // 4
    return {
        "prompt_tokens": n_prompt,
        "generated_tokens": n_tokens,
        "rounds": rounds,
        "median_s": {name: statistics.median(values) for name, values in times.items()},
        "least_s": {name: min(values) for name, values in times.items()},
        "ratio": {"median": statistics.median(ratios), "quartiles": [ratios[quarter], ratios[-quarter - 1]]},
    }


def commit_of(python: str) -> str:
    """The commit of the checkout that an environment lies in; one with changes is refused."""
    folder = Path(python).absolute().parents[2]
    git = ["git", "-C", str(folder)]
    if subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout:
        raise SystemExit(f"{folder} has changes that are in no commit")
    return subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("python", help="the interpreter of the other install")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--residency", type=parse_list, default=[60.0, 100.0], metavar="PCT,...")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--generated-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    json_option(parser)
    o = parser.parse_args()
    before, rows = commit_of(o.python), []
    for pct in o.residency:
        config = EngineConfig(
            model=o.model, device=o.device, policy="lru", residency_pct=pct, threads=o.threads,
            ctx_tokens=o.prompt_tokens + o.generated_tokens + 64,
        )  # fmt: skip
        installs = [Install(python, config) for python in (o.python, sys.executable)]
        try:
            prompts = Prompts(shape_of(o.model).n_vocab)
            for lengths in ((32, o.generated_tokens), (o.prompt_tokens, 1)):
                row = compare(*installs, prompts, lengths, o.rounds)
                rows.append({"residency_pct": pct} | row)
                low, high = row["ratio"]["quartiles"]
                what = f"{pct:g}%, prompts of {lengths[0]}, {lengths[1]} generated"
                note(f"{what}: {row['ratio']['median']:.3f} of the time before (quartiles {low:.3f} to {high:.3f})")
        finally:
            for install in installs:
                install.client.close()
    if o.json:
        report = {"model": o.model.name, "device": o.device, "threads": o.threads, "before": before, "rows": rows}
        write_json(o.json, report)


if __name__ == "__main__":
    main()
