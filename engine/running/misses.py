"""Missed experts that the CPU computes beside a GPU: threads for a loaded model, their worth, and when they are awake.

Threads and memory are engine/ops/cuda/cpu_experts.py, what is handed over engine/placing/misses.py says, from what is
measured here as the model loads and from what the GPU tells afterwards. Nothing here waits for the GPU between steps.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.ground import cores
from engine.ground.config import EngineConfig
from engine.ground.cores import Cores, Quota
from engine.ground.errors import CapacityError, DeviceLostError, UsageError
from engine.memory.residency import Residency
from engine.memory.slowtier import PageLockedTier
from engine.models.nextn import Block
from engine.ops import Experts, Limits
from engine.ops.cuda.cpu_experts import PATIENCE_S, CpuExperts
from engine.ops.cuda.device import Device
from engine.ops.cuda.handing import HandOver
from engine.ops.cuda.long_jobs import LongJobs
from engine.ops.cuda.several_jobs import SeveralJobs
from engine.ops.cuda.workspace import Workspace
from engine.ops.jobs import MAX_TOKENS, Bank
from engine.placing.division import BOTH_US, COPY_US, UNIT_ROWS, Costs
from engine.placing.handed import HandedTally
from engine.placing.misses import MissGate, said
from engine.placing.policy import LRU
from engine.running import long_misses
from engine.running.crowd import Crowd
from engine.running.long_misses import LongMisses
from engine.running.several_misses import SeveralMisses

SPARE_CORES = 1  # at least, for the thread that launches steps
AUTO_SPARE_CORES = 2  # and for the server, whose clients read what comes while threads look for work
SPIN_US = 20_000.0  # that threads look for work behind the last step of one token
NAP_US = 1e6  # of the one that looks now and then while nobody asks for anything
MOST_AT_ONCE = 4  # experts whose time is measured; that of more follows from these
MEASURE_S, MEASURE_RUNS, MEASURED_EXPERTS = 0.03, 12, 256  # for each number at once; what they take their turns among

_log = logging.getLogger(__name__)


class CpuMisses:
    """Who has the CPU compute a part of what misses in steps of one token. costs: that were measured; found: the cores.

    cpu: whose threads are started. n_layers: that may hand something over. several: what steps of 2 to 32 tokens hand
    over; long: what longer ones offer; None: nothing. `begin` before each such step, `look` behind it, `check` before a
    token of it counts.
    """

    def __init__(
        self, cpu: CpuExperts, costs: Costs, found: Cores, n_used: int, n_layers: int = 0,
        long: LongMisses | None = None, several: SeveralMisses | None = None,
    ) -> None:  # fmt: skip
        self.cpu, self.found, self.long, self.several = cpu, found, long, several
        self.crowd = Crowd(cpu.pool, Quota())
        self._is_crowded = False  # the gate is off for that
        self.gate = MissGate(costs, n_used, n_layers)
        self._state, self._left = self.gate.state, self.gate.left
        self._tell()

    @property
    def is_on(self) -> bool:
        """Whether anything is handed over."""
        return self.gate.state == "on"

    def look(self) -> None:
        """When a step of one token is enqueued: what those that follow hand over, by what is known of those before."""
        now_s = time.monotonic()
        changed = self.gate.look(self.cpu.tally, now_s, self.cpu.spans)
        self._is_crowded &= not self.is_on
        if self.is_on and (why := self.crowd.why(now_s)):
            changed = self.gate.lose(why, now_s, may_end=False)
            self._is_crowded = True
            self.cpu.pool.dismiss()
        if changed:
            self._tell()

    def begin(self) -> None:
        """Such a step is about to be enqueued: threads are awake for it."""
        if self.is_on:
            self.cpu.pool.wake()

    def begin_several(self) -> None:
        """The same of a step of 2 to 32 tokens."""
        if self.several is not None:
            self.several.begin(self.crowd.why(time.monotonic()) if self.several.is_on else "")

    def begin_long(self, n_tokens: int) -> None:
        """The same of a step of so many tokens."""
        self.check()
        if self.long is not None and self.long.takes(n_tokens):
            self.long.begin(self._is_crowded or bool(self.crowd.of_quota()))

    def check(self) -> None:
        """Raise where a job of a step before was never answered: what that step computed is nothing."""
        if number := self.cpu.failed:
            raise DeviceLostError(
                f"the CPU did not answer for an expert within {PATIENCE_S:g} s (job {number}), and the step that needs "
                "it is lost",
                hint="start again; was the process stopped, or are its cores taken? --cpu-experts off does without",
            )

    def _tell(self) -> None:
        gate = self.gate
        self.cpu.divide(gate.table, gate.bound_us)
        left, self._left = self._left, gate.left
        for n in self._left.keys() - left.keys():
            _log.info("experts on the CPU: none of layers that miss %d for now, %s", n, self._left[n])
        before, self._state = self._state, gate.state
        if gate.state == before or {gate.state, before} == {"on", "idle"}:  # comes and goes with what misses
            return
        if gate.state == "on":
            _log.info("experts on the CPU are tried again")
        else:
            _log.warning("experts on the CPU are %s: %s", gate.state, gate.why, extra={"reason": "cpu_experts"})

    def settings(self) -> dict[str, Any]:
        """What was chosen and measured: CPUs, us by path, how a layer's misses are divided."""
        costs = self.gate.begun
        return {
            "cpus": list(self.found.cpus),
            "pcie_us": round(costs.pcie_us, 2),
            "cpu_us": [round(us, 2) for us in costs.cpu_us],
            "handover_us": round(costs.handover_us, 2),
            "busy_handover_us": None if costs.busy_us is None else round(costs.busy_us, 2),
            "split_us": round(costs.split_us, 2),
            "layer_us": [round(us, 2) for us in self.gate.layer_us],
            **self._division(),
        }

    def stats(self) -> dict[str, Any]:
        """Counters since the start: whole and divided experts of the CPU, jobs taken back, seconds layers waited.

        Those of steps of several tokens are among it, and apart; so is what the CPU computed of long ones, whose jobs
        that were taken back are no fault.
        """
        found, long = self.cpu.tally.total, HandedTally() if self.long is None else self.long.jobs.tally
        several = HandedTally() if self.several is None else self.several.jobs.tally
        return {
            "state": self.gate.state,
            "why": self.gate.why,
            "computed": found.done + several.done + long.done,
            "divided": found.divided,
            "taken_back": found.taken + several.taken,
            "waited_s": round((found.waited_us + found.stalled_us + several.waited_us + long.waited_us) / 1e6, 6),
            **self._division(),
            "several": None if self.several is None else self.several.stats(),
            "long": None if self.long is None else self.long.stats(),
        }

    def _division(self) -> dict[str, list[int]]:
        experts, rows = zip(*self.gate.table, strict=True)
        return {"division": list(experts), "divided_rows": list(rows)}

    def close(self) -> None:
        """End the threads."""
        self.cpu.close()
        self.crowd.quota.close()


def banks_of(residency: Residency, block: Block | None) -> list[Bank]:
    """Experts that steps of one token compute. ValueError: types that the CPU's threads do not take."""
    tensors = [*residency.experts, *(() if block is None else block.experts)]
    return [
        Bank((t.gate.qtype, t.up.qtype, t.down.qtype), t.gate.shape[2], t.gate.shape[1], t.activation) for t in tensors
    ]


def share(
    options: EngineConfig, gpu: Device | None, bus: str | None, ws: Any, limits: Limits, residency: Residency,
    block: Block | None,
) -> tuple[CpuMisses | None, tuple[str, ...]]:  # fmt: skip
    """Start threads for what misses, if that is asked for and there is something to gain; and what is said of it.

    gpu, bus: beside which they compute, and its PCI address, where there is one and it is known. UsageError: a number
    of threads is asked for, and they cannot be had.
    """
    if options.cpu_experts == "off" or (options.cpu_experts == "auto" and gpu is None):
        return None, ()
    tier = residency.tier
    if gpu is not None and not tier.n_bytes:
        return None, ("experts on the CPU: none, all experts are resident",)
    why, found = _refused(options, gpu, bus, residency, block)
    if why:
        if options.cpu_experts != "auto":
            raise UsageError(f"--cpu-experts {options.cpu_experts}: {why}", hint="auto and off do without")
        return None, (f"experts on the CPU: none, {why}",)
    assert isinstance(ws, Workspace) and isinstance(tier, PageLockedTier) and gpu is not None
    cpu = CpuExperts(gpu, limits, banks_of(residency, block))
    jobs = long_misses.made(gpu, limits, cpu)
    handing = SeveralJobs(gpu, limits, cpu) if limits.max_tokens > 1 else None
    with contextlib.ExitStack() as undo:
        undo.callback(cpu.close)
        try:
            cpu.start(found.cpus, SPIN_US, NAP_US, 1 if limits.max_tokens == 1 else MAX_TOKENS)
        except CapacityError as error:
            if options.cpu_experts != "auto":
                raise
            return None, (f"experts on the CPU: none, {error.message}",)
        costs = measure(gpu, limits, cpu, residency, tier.memory)
        if costs is None:
            return None, ("experts on the CPU: none, its threads do not answer in time",)
        cpu.begin()
        long = None if jobs is None else LongMisses(jobs, costs.pcie_us)
        n_layers = len(residency.banks)
        several = None if handing is None else SeveralMisses(handing, costs, n_layers)
        made = CpuMisses(cpu, costs, found, limits.n_expert_used, n_layers, long, several)
        if not made.is_on and long is None and (several is None or not several.is_on):
            made.crowd.quota.close()
            return None, (f"experts on the CPU: none, {made.gate.why}",)
        undo.pop_all()
    ws.share_misses(cpu)  # several tokens' steps say so each (Steps.handing)
    ws.offer_misses(jobs)
    if not made.is_on:
        return made, (f"experts on the CPU: {found.why}; of steps of one token none, {made.gate.why}",)
    return made, (f"experts on the CPU: {found.why}; {said(costs)}",)


def _refused(
    options: EngineConfig, gpu: Device | None, bus: str | None, residency: Residency, block: Block | None
) -> tuple[str, Cores]:
    """Why there are none, whatever misses; nothing, and the cores that are taken."""
    nothing = Cores((), "")
    if gpu is None:
        return "they are computed beside a GPU, and this is the CPU", nothing
    if residency.rule == LRU and not residency.state.pinned.all():
        return "all that misses enters a slot (LRU), so PCIe brings it anyway; serve with --spark", nothing
    try:
        banks_of(residency, block)
    except ValueError as error:
        return f"its threads do not compute these types: {error}", nothing
    found = cores.find(gpu=bus, spare=AUTO_SPARE_CORES if options.cpu_experts == "auto" else SPARE_CORES)
    n = len(found.cpus) if options.cpu_experts == "auto" else int(options.cpu_experts)
    if not found.cpus:
        return f"no core can be spared for them ({found.why})", nothing
    if n > len(found.cpus):
        return f"{len(found.cpus)} can be spared ({found.why})", nothing
    return "", Cores(found.cpus[-n:], found.why if n == len(found.cpus) else f"{n} asked for, of {found.why}")


# --- measuring ----------------------------------------------------------------------------------------


def measure(
    device: Device, limits: Limits, cpu: CpuExperts, residency: Residency, memory: NDArray[np.uint8]
) -> Costs | None:
    """What an expert takes over PCIe and on the CPU, and a hand-over; None: the threads do not answer in time.

    memory: of all places of the slow tier. It takes about 0.2 s.
    """
    turns, n_bytes, first_share = _experts(residency)
    cpu_us: list[float] = []
    for n in range(1, min(MOST_AT_ONCE, limits.n_expert_used) + 1):
        took_us = _timed(cpu, turns, n)
        if took_us is None:
            return None
        cpu_us.append(max(took_us, *cpu_us[-1:], 0.0))
    half = cpu.n_ff // (2 * UNIT_ROWS) * UNIT_ROWS
    half_us = _timed(cpu, turns, 1, half) if half else 0.0  # 0: experts differ, or have nothing to divide
    if half_us is None:
        return None
    found = HandOver(device, limits, cpu).measure(memory)
    if found.handover_us is None or found.pcie_gb_per_s is None:
        return None
    busy_us = None if found.busy_us is None else max(found.handover_us, found.busy_us)
    pcie_us = n_bytes / found.pcie_gb_per_s / 1e3
    costs = Costs(pcie_us, cpu_us, found.handover_us, busy_us=busy_us, both_us=BOTH_US)
    if not half:
        return costs
    divided = replace(costs, n_ff=cpu.n_ff, first_share=first_share)
    more_us = half_us - divided.of_cpu(divided.amount(half))  # threads that share few rows have not all as many
    return replace(divided, split_us=COPY_US + max(0.0, more_us))


Turns = Iterator[tuple[Experts, list[tuple[int, int, int]]]]  # a layer, and experts of it that have places


def _experts(residency: Residency) -> tuple[Turns, float, float]:
    """Layers and their experts in turn, so many that no cache holds them; bytes of an expert, and gate and up of them.

    Both on average.
    """
    homes, layers = residency.state.home_ptr, []
    each = -(-MEASURED_EXPERTS // len(residency.banks))
    for bank in residency.banks:
        placed = np.flatnonzero(homes[bank.layer, :, 0])[:each]
        if placed.size:
            layers.append((bank, [tuple(row) for row in homes[bank.layer, placed].tolist()]))
    gate, up, down = (sum(bank.part_bytes[part] for bank, _ in layers) for part in range(3))
    n_bytes = gate + up + down
    return itertools.cycle(layers), n_bytes / len(layers), (gate + up) / n_bytes


def _timed(cpu: CpuExperts, turns: Turns, n: int, n_rows: int = 0) -> float | None:
    """us of n experts at once on the CPU, the median; None: not in time. n_rows: as of `CpuExperts.timed`."""
    took: list[float] = []
    until_s = time.perf_counter() + MEASURE_S
    for i in range(MEASURE_RUNS):
        bank, sources = next(turns)
        first = i * n % len(sources)
        us = cpu.timed(bank, [sources[(first + k) % len(sources)] for k in range(n)], n_rows=n_rows)
        if us is None:
            return None
        took.append(us)
        if len(took) > 2 and time.perf_counter() > until_s:
            break
    return median(took)


def count(
    device: Device, limits: Limits, residency: Residency, block: Block | None
) -> tuple[CpuExperts, SeveralJobs | None, LongJobs | None] | None:
    """What `share` allocates, for the memory plan; None where it refuses the model's types."""
    try:
        cpu = CpuExperts(device, limits, banks_of(residency, block))
    except ValueError:
        return None
    HandOver(device, limits, cpu)
    several = SeveralJobs(device, limits, cpu) if limits.max_tokens > 1 else None
    return cpu, several, long_misses.made(device, limits, cpu)
