"""Where the time of one decoded token goes: every kernel of the captured step, its count, time and rate.

    python benchmarks/profile_step.py model.gguf --depth 512 --json data/results/profile_step.json
    python benchmarks/profile_step.py model.gguf --sequences 8
    python benchmarks/profile_step.py model.gguf --given 16
    python benchmarks/profile_step.py model.gguf --depth 16384 --recall-blocks 64

With --sequences, of a step that so many sequences share, a token each; with --given, of a step of so many tokens of one
sequence, whose length is set back after it. `the graph alone` is such a step without what the host does between two: it
is launched again and again on the same inputs.

Decoding runs for real, and what the engine captures into its graph is noted: the kernels, in order, with the weights
that they are given. Their times are CUPTI's, of every kernel inside the graph launches, read through torch's profiler
where torch can use the GPU. Elsewhere each kind of kernel is replayed by itself; then the experts' weights come from
the L2 cache, since all launches read the last layer's table, so their rates are too good.

Kernels overlap, so what one adds to a step is not how long it takes. *On the path* is the time from when its first
block has what it waits for until the next kernel's has; the kernels stamp it themselves (`stamp` of cuda/ptx.cuh).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cuda_kernels import time_launches
from benchmarks.driving import Prompts
from benchmarks.figures import json_option
from benchmarks.prefill import feed
from engine.ground.config import EngineConfig
from engine.ground.kv_types import KV_TYPES
from engine.ops.cuda.device import Module
from engine.placing import policies
from engine.running.ahead import AHEAD_STEPS, AheadOfHost
from engine.running.drawing import DeviceDrawer
from engine.running.forward import GRAPH_TOKENS
from engine.running.loaded import Loaded
from engine.running.recall import Part
from engine.running.reply import Reply
from engine.running.sampling import SamplingParams
from engine.running.stepping import Span
from engine.serving.scheduler import Engine
from spark.pipeline.bench import check_settings
from spark.results import write_json

CHOSEN_ONCE = "the kernels of a choice cannot run twice on the same arrays"
MATRIX_BYTES = 1 << 16  # a smaller array of bytes is a flag or a mask
CACHE_KERNELS = ("attention.cu", "rope.cu", "embed.cu", "flash.cu")  # their arrays are read in part


@dataclass(frozen=True)
class Launch:
    """One kernel of the step. again() enqueues it once more; n_bytes: weights that it reads, 0 where unknown."""

    module: Module
    name: str
    grid: Any
    block: Any
    again: Callable[[], None]
    n_bytes: int

    @property
    def kind(self) -> str:
        """What the table groups by: kernel and macros."""
        macros = ",".join(f"{name}={value}" for name, value in self.module.defines)
        return f"{self.module.file.removesuffix('.cu')}/{self.name}" + (f"({macros})" if macros else "")


@dataclass
class Recorder:
    """Notes the launches that a device makes while it captures; expert_bytes: [L, 3], A experts' gate, up, down."""

    device: Any
    expert_bytes: Sequence[Sequence[int]]
    steps: list[list[Launch]] = field(default_factory=list)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block, every capture adds a list of launches to `steps`."""
        kernel, capture = self.device.kernel, self.device.capture
        capturing: list[list[Launch]] = []

        def noting(module: Module, name: str) -> Any:
            real = kernel(module, name)
            if not capturing:
                return real

            def launch(
                grid: Any, block: Any, args: Sequence[Any], shared_bytes: int = 0, overlap: bool = False
            ) -> None:
                kept = list(args)

                def again() -> None:
                    real(grid, block, kept, shared_bytes, overlap)

                capturing[-1].append(
                    Launch(module, name, grid, block, again, self._bytes(capturing[-1], module, name, kept))
                )
                again()

            return launch

        def capture_noting(work: Callable[[], None]) -> Any:
            capturing.append([])
            try:
                return capture(work)
            finally:
                self.steps.append(capturing.pop())

        self.device.kernel, self.device.capture = noting, capture_noting
        try:
            yield
        finally:
            del self.device.kernel, self.device.capture  # the class's own are back

    def _bytes(self, before: list[Launch], module: Module, name: str, args: list[Any]) -> int:
        if module.file in ("experts.cu", "several.cu"):
            first = name.startswith("gate_up")
            layer = sum(launch.name.startswith("gate_up") for launch in before) - (not first)
            if not 0 <= layer < len(self.expert_bytes):
                return 0
            gate, up, down = self.expert_bytes[layer]
            return gate + up if first else down if name.startswith("down") else 0
        if module.file in CACHE_KERNELS:
            return 0
        weights = [int(a.nbytes) for a in args if getattr(a, "dtype", None) == np.uint8]
        return sum(n for n in weights if n >= MATRIX_BYTES)


def kernel_times(run: Callable[[], None]) -> list[tuple[str, float, float]]:
    """(kernel, begin, microseconds) of everything that `run` makes the GPU do, by CUPTI; empty without torch."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    torch.zeros(1, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
    with tempfile.TemporaryDirectory(prefix="spark-profile-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [(e["name"], float(e["ts"]), float(e["dur"])) for e in events if e.get("cat") == "kernel"]
    return sorted(found, key=lambda event: event[1])


def by_kind(step: list[Launch], times: list[tuple[str, float, float]]) -> tuple[dict[str, list[float]], str]:
    """Microseconds of each launch of each kind, over whole steps; and how they were told apart.

    The kernels of a step come in the order in which they were captured, unless streams run beside each other.
    """
    names = [launch.name for launch in step]
    known = set(names)
    own = [event for event in times if event[0] in known]
    order, at = [event[0] for event in own], 0
    found: dict[str, list[float]] = {}
    while at + len(names) <= len(own):
        if order[at : at + len(names)] != names:  # what prepares decoding
            at += 1
            continue
        for launch, (_, _, us) in zip(step, own[at : at + len(names)], strict=True):
            found.setdefault(launch.kind, []).append(us)
        at += len(names)
    if found:
        return found, "CUPTI, in order"
    for name, _, us in own:
        found.setdefault(name, []).append(us)
    return found, "CUPTI, by name"


STAMP_TICKS, TICK_NS = 1 << 22, 32  # of the ring of stamps: 134 ms


def path_times(loaded: Loaded, step: list[Launch], decode: Callable[[int], float]) -> dict[str, list[float]]:
    """Microseconds on the path of each kind of kernel, of one that does not wait in those of the one ahead of it.

    decode(n): n steps, well within the ring, from graphs that are captured again.
    """
    device, graphs = loaded.backend.device, loaded.steps.graphs
    assert graphs is not None
    log = device.cupy.zeros((STAMP_TICKS, 2), np.uint64)
    numbers: dict[Module, int] = {}

    def stamped(module: Module) -> Module:
        number = numbers.setdefault(module, len(numbers) + 1)
        macros = {"STAMPS": f"{log.data.ptr}ull", "STAMP_TICKS": STAMP_TICKS, "STAMP_ID": number}
        return Module(module.file, (*module.defines, *((name, str(value)) for name, value in macros.items())))

    kernel, samples = device.kernel, []
    for launch in step:
        kernel(stamped(launch.module), launch.name)  # nothing is loaded within a capture
    device.kernel = lambda module, name: kernel(stamped(module), name)
    graphs.forget()
    try:
        decode(2)
        for _ in range(12):
            device.runtime.deviceSynchronize()
            log.fill(0)
            device.runtime.deviceSynchronize()
            decode(6)
            device.runtime.deviceSynchronize()
            stamps = log.get()
            samples.append(stamps[stamps[:, 1] > 0])
    finally:
        del device.kernel  # the class's own is back
        graphs.forget()
    return on_path(step, numbers, samples)


def on_path(step: list[Launch], numbers: dict[Module, int], samples: list[Any]) -> dict[str, list[float]]:
    """`path_times` of stamps: uint64 [n, 2] of ns and number, in any order, for each sample; whole steps count."""
    found: dict[str, list[float]] = {}
    seen = {int(number) for stamps in samples for number in stamps[:, 1]}
    waiting = [launch for launch in step if numbers[launch.module] in seen]
    expected = [numbers[launch.module] for launch in waiting]
    for stamps in samples:
        stamps = stamps[np.argsort(stamps[:, 0])]
        times, numbered = stamps[:, 0].astype(np.int64), stamps[:, 1].astype(np.int64)
        first = np.ones(len(times), bool)  # some kernels wait twice
        first[1:] = (np.diff(numbered) != 0) | (np.diff(times) > 8 * TICK_NS)
        times, order = times[first], numbered[first].tolist()
        at, end = 0, len(order) - AHEAD_STEPS * len(expected)  # the steps after the last token do nothing
        while at < end:
            if order[at : at + len(expected)] != expected:
                at += 1
                continue
            us = np.diff(times[at : at + len(expected) + 1]) / 1e3
            for launch, value in zip(waiting, us.tolist(), strict=True):
                found.setdefault(launch.kind, []).append(value)
            at += len(expected)
    return found


def alone(device: Any, step: list[Launch]) -> dict[str, list[float]]:
    """Microseconds a launch of each kind replayed by itself, the launches of all layers in turn."""
    kinds: dict[str, list[Launch]] = {}
    for launch in step:
        kinds.setdefault(launch.kind, []).append(launch)

    def turns(group: list[Launch]) -> Callable[[int], None]:
        return lambda i: group[i % len(group)].again()

    return {kind: [1e6 * t for t in time_launches(device, turns(group))] for kind, group in kinds.items()}


def table(
    step: list[Launch], times: dict[str, list[float]], path: dict[str, list[float]], named: bool
) -> list[dict[str, Any]]:
    """Rows, the largest share first. path: of `path_times`; named: `times` are keyed by kernel names alone."""
    rows = []
    for kind, values in times.items():
        group = [launch for launch in step if (launch.name if named else launch.kind) == kind]
        us, n_bytes = statistics.median(values), sum(launch.n_bytes for launch in group)
        # The sum goes by the mean: a kind may have launches of several sizes.
        total = statistics.fmean(values) * len(group)
        rows.append({
            "kernel": kind, "count": len(group), "us": us, "us_min": min(values), "us_max": max(values),
            "total_us": total, "n_bytes": n_bytes, "gb_per_s": n_bytes / 1e3 / total if n_bytes else None,
            "path_us": statistics.fmean(path[kind]) * len(group) if kind in path else None,
            "grids": sorted({str(launch.grid) for launch in group}),
        })  # fmt: skip
    every = sum(row["total_us"] for row in rows)
    for row in rows:
        row["share"] = row["total_us"] / every
    return sorted(rows, key=lambda row: -row["total_us"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    json_option(parser)
    parser.add_argument("--depth", type=int, default=512, help="tokens in the cache")
    parser.add_argument("--sequences", type=int, default=1, choices=GRAPH_TOKENS, help="that share a step")
    parser.add_argument("--given", type=int, default=1, choices=GRAPH_TOKENS, help="tokens of one sequence in a step")
    parser.add_argument("--residency", type=float, default=100.0)
    parser.add_argument("--kv-type", default="f16", choices=KV_TYPES)
    parser.add_argument("--recall-blocks", type=int, help="N: a token reads so many blocks of its context")
    parser.add_argument("--steps", type=int, default=8, help="decoded tokens that are traced")
    parser.add_argument("--alone", action="store_true", help="replay each kind by itself, though CUPTI would do")
    o = parser.parse_args()
    if o.sequences > 1 < o.given:
        parser.error("--given is of one sequence")
    width = o.sequences * o.given
    if width > 1 and o.recall_blocks is not None:
        parser.error("--recall-blocks is of a step of one token")
    if o.alone and o.recall_blocks is not None:
        parser.error(f"--alone: {CHOSEN_ONCE}")
    config = EngineConfig(
        model=o.model, device="cuda", kv_type=o.kv_type, residency_pct=o.residency,
        policy=(policies.ALL if o.residency == 100 else policies.UNIFORM).name,
        ctx_tokens=o.sequences * (o.depth + o.steps + 1024), kv_recall_blocks=o.recall_blocks,
    )  # fmt: skip
    engine = Engine(config)
    check_settings(config, engine.ready())
    loaded = engine.loaded
    device, A = loaded.backend.device, loaded.source.config.n_expert_used
    graphs, drawer = loaded.steps.graphs, loaded.drawer
    assert graphs is not None and isinstance(drawer, DeviceDrawer)
    prompts = Prompts(loaded.source.config.n_vocab, seed=4)
    sequences = [loaded.kv.sequence() for _ in range(o.sequences)]
    histories = [prompts.next(o.depth) for _ in sequences]
    for sequence, history in zip(sequences, histories, strict=True):
        feed(loaded, sequence, history[:-1])
    sequence, history = sequences[0], histories[0]

    def decode(n: int) -> float:
        """Seconds of n tokens, or steps of several tokens, after whatever was decoded before."""
        if width > 1:
            began = time.perf_counter()
            for i in range(n):
                lengths = [s.length for s in sequences]
                first = i * o.given % (o.depth - o.given)
                tokens = [np.asarray(history[first:][: o.given], np.int32) for history in histories]
                wanted = np.zeros(o.given, np.bool_), tuple(range(o.given))
                loaded.steps.run([Span(s, t, *wanted) for s, t in zip(sequences, tokens, strict=True)])
                device.synchronize()
                if o.given > 1:
                    for s, length in zip(sequences, lengths, strict=True):
                        s.length = length
            return (time.perf_counter() - began) / n
        last = np.asarray(history[-1:], np.int32)
        result = loaded.steps.run([Span(sequence, last, np.zeros(1, np.bool_), (0,))])
        reply = Reply(history, SamplingParams(), n, sequence=sequence)
        reply.recall = None if o.recall_blocks is None else Part(o.recall_blocks)
        ahead = AheadOfHost(loaded.steps, drawer, reply, result)
        began = time.perf_counter()
        while not ahead.ended:
            ahead.advance()
        return (time.perf_counter() - began) / (n - 1)

    decode(16)
    step_us = 1e6 * statistics.median(decode(64) for _ in range(5))
    if width > 1:
        began = time.perf_counter()
        for _ in range(64):
            loaded.steps.launch(width, apart=o.given == 1)
        device.synchronize()
        print(f"{1e6 * (time.perf_counter() - began) / 64:24.1f}{'':16}the graph alone")
    graphs.forget()
    recorder = Recorder(device, [[A * n for n in e.part_bytes] for e in loaded.source.weights.experts])
    with recorder.recording():
        decode(2)
    step = recorder.steps[-1]
    path = path_times(loaded, step, decode)
    # CUPTI's time of a kernel that begins early contains its waiting: kernels are timed one after the other.
    device.launch_overlapping = None
    graphs.forget()
    decode(16)
    apart_us = 1e6 * statistics.median(decode(64) for _ in range(5))
    events = [] if o.alone else kernel_times(lambda: (decode(o.steps + 1), device.synchronize())[1])
    times, how = by_kind(step, events)
    if not times and o.recall_blocks is not None:
        raise SystemExit(f"error: no times by CUPTI, and {CHOSEN_ONCE}; torch is needed, with the GPU")
    if not times:
        times, how = alone(device, step), "each kind replayed by itself"
    rows = table(step, times, path, named=how == "CUPTI, by name")
    every = sum(row["total_us"] for row in rows)
    print(f"{'count':>6}{'us':>8}{'total us':>10}{'share':>7}{'path us':>9}{'GB/s':>7}  kernel ({how})")
    for row in rows:
        rate = "" if row["gb_per_s"] is None else f"{row['gb_per_s']:.0f}"
        on_path = "" if row["path_us"] is None else f"{row['path_us']:.1f}"
        columns = f"{row['count']:6}{row['us']:8.2f}{row['total_us']:10.1f}{row['share']:7.1%}{on_path:>9}{rate:>7}"
        print(f"{columns}  {row['kernel']}")
    print(f"{len(step):6}{'':8}{every:10.1f}{'':16}all kernels")
    print(f"{'':14}{apart_us:10.1f}{'':16}a step of kernels one after the other\n{'':14}{step_us:10.1f}{'':16}a step")
    if o.json:
        write_json(o.json, {
            "model": o.model.name, "depth_tokens": o.depth, "sequences": o.sequences,
            "tokens_each": o.given, "residency_pct": o.residency, "kv_type": o.kv_type,
            "recall_blocks": o.recall_blocks,
            "measured_by": how, "step_us": step_us, "apart_us": apart_us, "kernels_us": every, "launches": len(step),
            "rows": rows,
        })  # fmt: skip
    engine.close()


if __name__ == "__main__":
    main()
