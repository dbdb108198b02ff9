"""Which kernels of a captured step should let the next one begin late (docs/cuda.md, "When the next kernel may start").

    python benchmarks/releases.py model.gguf --rows 1,2,4,8

Each kernel of the step is compiled so that it lets the next one begin when what it waited for is there, not at once, by
itself; then those that made the step faster, the best first, as long as it becomes faster still. A step of so many rows
is one that as many sequences share. It is launched again and again on the same inputs, all experts resident. Kernels
whose code is late already differ by nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.driving import Prompts, note, parse_list
from benchmarks.prefill import feed
from benchmarks.profile_step import Recorder
from engine.ground.config import EngineConfig
from engine.ground.errors import SparkError
from engine.ops.cuda.device import Module
from engine.placing import policies
from engine.running.loaded import Loaded
from engine.running.stepping import Span
from engine.serving.scheduler import Engine

LAUNCHES = 60  # that are timed together
LEAST = 0.0005  # of a step: what is no gain

Kernel = tuple[Module, str]


class Late:
    """Some kernels of a device are compiled to be late. kernels: those that are now."""

    def __init__(self, device: Any) -> None:
        self.kernels: frozenset[Kernel] = frozenset()
        self._device, self._plain = device, device.kernel

    def compile(self, kernels: Iterable[Kernel]) -> None:
        """Have them both ways: nothing is loaded within a capture."""
        for module, name in kernels:
            self._plain(self._late(module), name)

    def __enter__(self) -> Late:
        def kernel(module: Module, name: str) -> Any:
            return self._plain(self._late(module) if (module, name) in self.kernels else module, name)

        self._device.kernel = kernel
        return self

    def __exit__(self, *_: object) -> None:
        del self._device.kernel  # the class's own is back

    @staticmethod
    def _late(module: Module) -> Module:
        return Module(module.file, (*module.defines, ("LATE", "1")))


class Steps:
    """Steps of a model that some sequences share, at a depth."""

    def __init__(self, loaded: Loaded, rows: int, depth: int) -> None:
        self.loaded, self.device = loaded, loaded.backend.device
        prompts = Prompts(loaded.source.config.n_vocab, seed=4)
        self._sequences = [loaded.kv.sequence() for _ in range(rows)]
        self._last = []
        for sequence in self._sequences:
            history = prompts.next(depth)
            feed(loaded, sequence, history[:-1])
            self._last.append(np.asarray(history[-1:], np.int32))

    def capture(self, rows: int) -> None:
        """Capture such a step anew, feed it, and leave the sequences as they were."""
        assert self.loaded.steps.graphs is not None
        self.loaded.steps.graphs.forget()
        some, wanted = self._sequences[:rows], (np.zeros(1, np.bool_), (0,))
        lengths = [sequence.length for sequence in some]
        self.loaded.steps.run([Span(s, token, *wanted) for s, token in zip(some, self._last, strict=False)])
        self.device.synchronize()
        for sequence, length in zip(some, lengths, strict=True):
            sequence.length = length
        self.seconds(rows)

    def seconds(self, rows: int) -> float:
        """Of one of the step that was captured."""
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            self.loaded.steps.launch(rows, apart=rows > 1)
        self.device.synchronize()
        return (time.perf_counter() - begin) / LAUNCHES


def faster_together(
    kinds: Iterable[str], time_of: Callable[[frozenset[str]], float]
) -> tuple[float, dict[str, float], frozenset[str], float]:
    """What a step takes; with each kind late; which are late together, and what it takes then. In any unit."""
    base = time_of(frozenset())
    each = {kind: time_of(frozenset({kind})) for kind in kinds}
    late, best = frozenset[str](), base
    for kind in sorted(each, key=lambda kind: each[kind]):
        if each[kind] > base * (1 - LEAST):
            break
        if (now := time_of(late | {kind})) < best * (1 - LEAST):
            late, best = late | {kind}, now
    return base, each, late, best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--rows", default="1,2,4,8", help="of a step")
    parser.add_argument("--depth", type=int, default=512, help="tokens of each sequence")
    parser.add_argument("--runs", type=int, default=7, help=f"of {LAUNCHES} launches, whose median counts")
    o = parser.parse_args()
    rows_of = [int(rows) for rows in parse_list(o.rows)]
    config = EngineConfig(
        model=o.model, device="cuda", residency_pct=100.0, policy=policies.ALL.name,
        ctx_tokens=max(rows_of) * (o.depth + 64),
    )  # fmt: skip
    try:
        engine = Engine(config)
    except SparkError as error:
        raise SystemExit(f"error: {error}") from None
    steps, late = Steps(engine.loaded, max(rows_of), o.depth), Late(engine.loaded.backend.device)
    for rows in rows_of:
        recorder = Recorder(steps.device, ())
        with recorder.recording():
            steps.capture(rows)
        kinds: dict[str, set[Kernel]] = {}
        for launch in recorder.steps[-1]:
            kinds.setdefault(launch.kind, set()).add((launch.module, launch.name))
        late.compile(kernel for some in kinds.values() for kernel in some)

        def time_of(some: frozenset[str], rows: int = rows, kinds: dict[str, set[Kernel]] = kinds) -> float:
            late.kernels = frozenset(kernel for kind in some for kernel in kinds[kind])
            steps.capture(rows)
            return 1e6 * statistics.median(steps.seconds(rows) for _ in range(o.runs))

        with late:
            base, each, best, together = faster_together(kinds, time_of)
            late.kernels = frozenset()
        note(f"{rows} rows: {base:.1f} us")
        for kind, us in sorted(each.items(), key=lambda item: item[1]):
            note(f"  {us - base:+8.1f}  {kind}")
        note(f"  together {together:.1f} us: {', '.join(sorted(best)) or 'none'}")
    engine.close()


if __name__ == "__main__":
    main()
