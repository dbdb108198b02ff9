"""Minutes of mixed requests at partial residency: no error, no leak, the same answer to the same question.

    python benchmarks/soak.py model.gguf --seconds 480 --json data/results/soak.json

Several clients of one daemon send, by a seeded plan, prompts of all lengths, greedy and sampled, some cancelled in the
middle, some scored, some that must be refused, and now and then a question that was asked before, whose answer must be
the same tokens. Every 10 s the daemon's own memory (without mapped files) and the device's are noted; the run fails
if either has grown between the second quarter and the last by more than the tolerance, or if anything else went wrong.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.driving import (
    PARTIAL,
    device_process_bytes,
    device_used_bytes,
    note,
    open_checked,
    rss_bytes,
    settings,
    shape_of,
)
from benchmarks.figures import json_option
from engine.ground.config import EngineConfig
from engine.ground.errors import CancelledError, ContextOverflowError
from engine.ground.protocol import Done, Tokens
from engine.ground.sampling import Sampling
from engine.placing import policies
from spark.daemon.client import DaemonClient
from spark.results import write_json

EVERY_S = 10.0
PREFIX_GIB = 1 / 16  # host memory for prefixes, so little that it is used up at once and used again and again
KINDS = {"greedy": 35, "sampled": 25, "cancelled": 15, "scored": 10, "asked again": 10, "refused": 5}
QUESTIONS = 4  # that are asked again and again
QUESTION_TOKENS, ANSWER_TOKENS = 96, 48


class Client(threading.Thread):
    """One source of requests, by a plan of its own; stops at the first thing that is wrong."""

    def __init__(self, client: DaemonClient, number: int, n_vocab: int, ctx: int, longest: int, end_s: float) -> None:
        super().__init__(daemon=True)
        self.counts: collections.Counter[str] = collections.Counter()
        self.generated = 0
        self.failure: str | None = None
        self._client, self._n_vocab, self._ctx, self._longest, self._end_s = client, n_vocab, ctx, longest, end_s
        self._rng = np.random.default_rng((11, number))
        self._answers: dict[int, list[int]] = {}

    def run(self) -> None:
        """Send requests until the time is over."""
        names, weights = list(KINDS), np.array(list(KINDS.values())) / sum(KINDS.values())
        while time.monotonic() < self._end_s and self.failure is None:
            kind = str(self._rng.choice(names, p=weights))
            try:
                self._send(kind)
            except Exception as error:  # whatever it is, it is what a soak is for
                self.failure = f"{kind}: {type(error).__name__}: {error}"
            self.counts[kind] += 1

    def _prompt(self, n: int, rng: np.random.Generator) -> list[int]:
        return rng.integers(0, self._n_vocab, n).tolist()

    def _length(self) -> int:
        """Mostly short, sometimes as long as is allowed: log-uniform."""
        return int(np.exp(self._rng.uniform(0, np.log(self._longest))))

    def _send(self, kind: str) -> None:
        rng = self._rng
        if kind == "refused":
            try:
                self._client.generate(self._prompt(self._ctx, rng), max_tokens=4).result()
            except ContextOverflowError:
                return
            raise AssertionError("a prompt as long as the context was taken")
        if kind == "scored":
            done = self._client.score(self._prompt(self._length(), rng), logprobs=True).result()
            assert done.nll is not None and np.isfinite(done.nll), done
            return
        if kind == "asked again":
            question = int(rng.integers(QUESTIONS))
            prompt = self._prompt(QUESTION_TOKENS, np.random.default_rng((12, question)))
            answer = self._generate(prompt, ANSWER_TOKENS, Sampling())
            known = self._answers.setdefault(question, answer)
            assert answer == known, f"question {question} got {answer[:8]}... after {known[:8]}..."
            return
        sampling = Sampling()
        if kind == "sampled":
            sampling = Sampling(0.8, top_k=40, top_p=0.95, repetition_penalty=1.1, seed=int(rng.integers(1 << 40)))
        n = min(int(rng.integers(1, 300)), self._ctx - self._longest)
        stop_after = int(rng.integers(0, n)) if kind == "cancelled" else None
        self._generate(self._prompt(self._length(), rng), n, sampling, stop_after)

    def _generate(self, prompt: list[int], n: int, sampling: Sampling, stop_after: int | None = None) -> list[int]:
        made: list[int] = []
        stream = self._client.generate(prompt, max_tokens=n, sampling=sampling, stop_tokens=[])
        try:
            if stop_after == 0:
                stream.cancel()
            for event in stream:
                if isinstance(event, Tokens):
                    made += event.tokens
                    if stop_after is not None and len(made) >= stop_after:
                        stream.cancel()
                        stop_after = None
                elif isinstance(event, Done):
                    assert len(made) == n == event.usage.completion_tokens, (len(made), event.usage)
        except CancelledError:
            assert stop_after is None or stop_after == 0
        assert all(0 <= token < self._n_vocab for token in made)
        self.generated += len(made)
        return made


def growth(samples: list[dict[str, Any]], name: str) -> int | None:
    """Bytes by which a column grew from the second quarter of the run to the last; None without figures."""
    values = [s[name] for s in samples if s[name] is not None]
    quarter = len(values) // 4
    if quarter == 0:
        return None
    return int(statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    json_option(parser)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--residency", type=float, default=60.0)
    parser.add_argument("--policy", default=policies.SPARK.name, choices=PARTIAL)
    parser.add_argument("--cpu-experts", default="off", help="off, auto, a number of threads")
    parser.add_argument("--guess", default="off", help="off, auto, on")
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--longest", type=int, default=6000, help="tokens of the longest prompt")
    parser.add_argument("--ctx", type=int, default=8192)
    parser.add_argument("--tolerance-mib", type=float, default=64.0, help="growth that is noise")
    o = parser.parse_args()
    if o.longest >= o.ctx:
        parser.error("--longest must leave room in --ctx")
    shape = shape_of(o.model)
    config = EngineConfig(
        model=o.model, device=o.device, policy=o.policy, residency_pct=o.residency, ctx_tokens=o.ctx,
        prefix_gib=PREFIX_GIB, cpu_experts=o.cpu_experts, guess=o.guess,
    )  # fmt: skip
    samples: list[dict[str, Any]] = []
    with open_checked(config) as daemon:
        began = time.monotonic()
        threads = [Client(daemon, i, shape.n_vocab, o.ctx, o.longest, began + o.seconds) for i in range(o.clients)]
        for thread in threads:
            thread.start()
        interval = min(EVERY_S, o.seconds / 8)
        while any(thread.is_alive() for thread in threads):
            time.sleep(interval)
            if not daemon.alive:
                break
            samples.append({
                "seconds": time.monotonic() - began, "ping_s": daemon.ping(), "host_bytes": rss_bytes(daemon.pid),
                "device_process_bytes": device_process_bytes(daemon.pid), "device_used_bytes": device_used_bytes(),
                "requests": sum(sum(t.counts.values()) for t in threads),
            })  # fmt: skip
        for thread in threads:
            thread.join(60)
        stats = daemon.stats() if daemon.alive else {}
        made = settings(daemon)
        stderr = daemon.stderr_tail()
    counts = sum((t.counts for t in threads), collections.Counter())
    grown = {name: growth(samples, name) for name in ("host_bytes", "device_process_bytes", "device_used_bytes")}
    hits, misses = stats.get("hits", 0), stats.get("misses", 0)
    most = o.tolerance_mib * 2**20
    problems = [t.failure for t in threads if t.failure]
    problems += [f"{name} grew by {n / 2**20:.0f} MiB" for name, n in grown.items() if n is not None and n > most]
    if blocks := stats.get("kv_blocks"):
        held = stats["prefixes"]["device_blocks"]
        if blocks["free"] + held != blocks["total"]:
            problems.append(f"KV blocks are not free at the end, nor held by prefixes ({held}): {blocks}")
    if misses == 0:
        problems.append("nothing missed, so misses were not tested")
    report = {
        "model": o.model.name, "seconds": samples[-1]["seconds"] if samples else 0.0, "clients": o.clients,
        "requests": dict(counts), "generated_tokens": sum(t.generated for t in threads), "hits": hits,
        "misses": misses, "guesses": stats.get("guesses"), "growth_bytes": grown, "tolerance_mib": o.tolerance_mib,
        "problems": problems, "samples": samples, "settings": made,
    }  # fmt: skip
    if o.json:
        write_json(o.json, report)
    note(f"{sum(counts.values())} requests {dict(counts)}, {report['generated_tokens']} tokens, growth {grown}")
    if problems:
        note(stderr)
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
