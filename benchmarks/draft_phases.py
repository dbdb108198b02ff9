"""Where a step with a computed draft spends its time: drafting, the step, draws, what is taken back, following.

    python benchmarks/draft_phases.py dense.gguf --draft mtp --json FILE
    python benchmarks/draft_phases.py Q4_K_M.gguf --draft lookup --first 0.9 --tokens 3 --every 8 --json FILE

As `draft_speed.py --parts drafter`: the model's block or a drafter runs as always, and its tokens are right as often as
--first says. With `lookup` the last --tokens of every --every tokens are copied, and drafted, and between these the
reply goes on ahead of the host: *ahead* is when it waits for that, *begin* when it begins it. --every 1: all are.

Each phase is timed twice. *As served*: from when the host begins it until it goes on, so that what the device still
does is counted where the host waits for it. *Apart*: the device is waited for before and after, so that a phase has all
of its own time, and none of another's; what the sum of these has beyond a step as served is overlap.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.draft_speed import Case, Measured, Rated, constant, falling, opened  # noqa: E402
from benchmarks.driving import Prompts, note, shape_of, spread  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from engine.drafting import lookup  # noqa: E402
from engine.drafting.source import Promise  # noqa: E402
from engine.running.ahead import AheadOfHost  # noqa: E402
from spark.results import write_json  # noqa: E402

PHASES = ("draft", "step", "draw", "take back", "follow", "rest", "begin", "ahead")


class Copying(Rated):
    """As `Rated`, of a reply that copies `n_tokens` tokens of every `every`, the last ones, which are drafted."""

    n_tokens, every = 1, 1

    def promise(self, history: Sequence[int], most: int, least: float = 0.0) -> Promise | None:
        """As `Source.promise`."""
        left = self.every - (len(history) - self.n_prompt) % self.every
        left = self.n_tokens if self.every == 1 else left
        return super().promise(history, min(most, left), least) if left <= self.n_tokens else None


class Clock:
    """Seconds of each phase, less those of phases within it, and how often it was. wait: called at both ends of each.

    Steps of a prompt are none of a reply's: they are within no other phase.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.times: dict[str, int] = defaultdict(int)
        self._wait, self._inner = wait, [0.0]

    def timed(self, phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same work, whose time is added."""

        def run(*args: Any, **more: Any) -> Any:
            self._wait()
            began_s = time.perf_counter()
            self._inner.append(0.0)
            try:
                return work(*args, **more)
            finally:
                self._wait()
                taken_s = time.perf_counter() - began_s
                own_s = taken_s - self._inner.pop()
                self._inner[-1] += taken_s
                if phase != "step" or len(self._inner) > 1:
                    self.seconds[phase] += own_s
                    self.times[phase] += 1

        return run


@contextmanager
def phased(bench: Measured, apart: bool) -> Iterator[Clock]:
    """A clock of what the engine does within the block. apart: the device is waited for between phases."""
    loaded = bench.engine.loaded
    clock = Clock(loaded.forward.device.synchronize if apart else lambda: None)
    places = (
        (bench.drafts, "propose", "draft"), (loaded.steps, "run", "step"), (loaded.decoder, "accept", "draw"),
        (loaded.steps, "take_back", "take back"), (bench.drafts, "fed", "follow"), (loaded.decoder, "step", "rest"),
        (AheadOfHost, "_begin", "begin"), (AheadOfHost, "advance", "ahead"),
    )  # fmt: skip
    with ExitStack() as undo:
        # Waiting makes drafts dearer than they are, and these replies are to go on with them.
        undo.enter_context(mock.patch.object(bench.drafts, "_drop", lambda drafting: None))
        for on, name, phase in places:
            undo.enter_context(mock.patch.object(on, name, clock.timed(phase, getattr(on, name))))
        bench.drafts._resting = 0
        yield clock


def case(told: list[int], o: argparse.Namespace, seed: int) -> Case:
    """Drafts of one source alone, right as often as is said."""
    if o.draft == lookup.NAME:
        source = Copying(told, o.depth, constant(o.first), 1.0, seed=seed)
        source.n_tokens, source.every = o.tokens, o.every
        return Case(lambda memory: source)
    nothing = Rated((), o.depth, constant(0.0), 0.0, seed=0)
    return Case(lambda memory: nothing, Rated(told, o.depth, falling(o.first), o.first, seed=seed))


def measure(bench: Measured, prompts: Prompts, o: argparse.Namespace) -> dict[str, Any]:
    """Phases of each step, in ms, and what the same reply takes without drafts."""
    found: dict[str, dict[str, list[float]]] = {"as served": defaultdict(list), "apart": defaultdict(list)}
    plain_ms, drafted_ms, per_step = [], [], []
    for run in range(1 + o.runs):
        prompt = prompts.next(o.depth)
        plain = bench.run([prompt], o.generate, None)
        for way, phases in found.items():
            with phased(bench, way == "apart") as clock:
                ran = bench.run([prompt], o.generate, [case(plain.told[0], o, seed=run)])
            if ran.told != plain.told:
                raise SystemExit("a reply with drafts has other tokens than without")
            n_steps = clock.times["rest"]
            if not n_steps:
                raise SystemExit("there was no step with a draft: --first promises too little")
            if run:  # the first warms up
                for phase in PHASES:
                    phases[phase].append(1e3 * clock.seconds[phase] / n_steps)
                if way == "as served":
                    drafted_ms.append(1e3 * ran.each_s)
                    per_step.append(o.generate / n_steps)
        if run:
            plain_ms.append(1e3 * plain.each_s)
    return {
        "plain_ms": spread(plain_ms), "drafted_ms": spread(drafted_ms), "tokens_a_step": spread(per_step),
        "phases_ms": {way: {phase: spread(ms) for phase, ms in phases.items()} for way, phases in found.items()},
        "step_ms": bench.step_ms,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--draft", default="mtp", help="mtp, a drafter's file, or lookup")
    parser.add_argument("--first", type=float, default=0.74, help="chance of a draft's first token; lookup: of each")
    parser.add_argument("--tokens", type=int, default=7, help="of a draft of lookup, at most")
    parser.add_argument("--every", type=int, default=1, help="of so many tokens the last ones are copied; 1: all")
    parser.add_argument("--depth", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--generate", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3, help="measured replies, after one more")
    json_option(parser)
    o = parser.parse_args()
    shape = shape_of(o.model)
    # What `opened` reads of the options of draft_speed.py.
    o.depths, o.at_once, o.residency, o.temperature = [o.depth], [1], 100.0, 0.0
    o.ctx = 2 * (o.depth + o.generate + 64)
    with opened(o, shape, replayed=shape.n_expert > 0, draft=o.draft) as bench:
        report = {"model": shape.name, "draft": o.draft, "first": o.first, "depth": o.depth, "generate": o.generate}
        report |= {"tokens": o.tokens, "every": o.every} if o.draft == lookup.NAME else {}
        report |= measure(bench, Prompts(shape.n_vocab, seed=29), o)
    for way, phases in report["phases_ms"].items():
        whole = sum(each["median"] for each in phases.values())
        note(f"{way}: {whole:.3f} ms a step: " + ", ".join(f"{k} {v['median']:.3f}" for k, v in phases.items()))
    note(f"plain {report['plain_ms']['median']:.3f} ms, drafted {report['drafted_ms']['median']:.3f} ms a token")
    if o.json:
        write_json(o.json, report)


if __name__ == "__main__":
    main()
