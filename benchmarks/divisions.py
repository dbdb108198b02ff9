"""What a layer takes that misses exactly so many experts, by what of them the CPU computes.

    python benchmarks/divisions.py MODEL.gguf --json data/results/divisions.json

Choices are imposed: each layer of each token misses n experts, which cross PCIe but for those, or the last rows of gate
and up of one, that a table gives to the CPU. The table is held, whatever the gate would make of it. A layer's time is
what a token takes longer than one that misses nothing, by the number of layers. Beside it: what the costs that the
engine measured as it began say (engine/placing/division.py), which choose the table in the beginning.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.driving import note, parse_list, shape_of, spread  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from benchmarks.kv_pool import at_depth, zeroed  # noqa: E402
from benchmarks.recall_speed import GREEDY  # noqa: E402
from engine.ground.config import EngineConfig  # noqa: E402
from engine.ops.cuda.workspace import Workspace  # noqa: E402
from engine.placing import policies  # noqa: E402
from engine.placing.division import Costs, makespan  # noqa: E402
from engine.placing.misses import NOTHING, MissGate  # noqa: E402
from engine.running.loaded import Loaded  # noqa: E402
from engine.running.misses import CpuMisses  # noqa: E402
from engine.running.reply import Reply  # noqa: E402
from engine.serving.scheduler import Engine  # noqa: E402
from spark.pipeline.bench import check_settings  # noqa: E402
from spark.results import write_json  # noqa: E402

STEP_ROWS = 128  # from one division to the next, of one expert; twice that of several
WORST = 1.6  # of the least predicted: what is predicted to take longer is not measured
N_TOKENS = 256  # of the imposed choices, which are repeated
BOUND_US = 1000.0  # of a claim: nothing is taken back


class Held(MissGate):
    """A gate that leaves its table as it is; lost: why it would not have, if so."""

    lost = ""

    def look(self, *_: Any, **__: Any) -> bool:
        """Nothing changes."""
        return False

    def lose(self, why: str, *_: Any, **__: Any) -> bool:
        """Notes why."""
        self.lost = why
        return False

    def hold(self, n: int, division: tuple[int, int]) -> None:
        """Layers that miss n are divided so; nothing else is the CPU's."""
        self.table = tuple(division if i == n else NOTHING for i in range(self.n_used + 1))
        self.state = "off" if division == NOTHING else "on"


def exactly(n_missed: int, resident: NDArray[np.bool_], n_used: int, n_tokens: int, seed: int) -> NDArray[np.int32]:
    """Choices [n_tokens, L, A] of which n_missed a layer are not resident, in any order; resident: [L, E]."""
    rng = np.random.default_rng(seed)
    made = np.empty((n_tokens, len(resident), n_used), np.int32)
    for layer, inside in enumerate(resident):
        for token in range(n_tokens):
            missed = rng.choice(np.flatnonzero(~inside), n_missed, replace=False)
            hits = rng.choice(np.flatnonzero(inside), n_used - n_missed, replace=False)
            made[token, layer] = rng.permutation(np.concatenate([missed, hits]))
    return made


def candidates(n_missed: int, costs: Costs) -> list[tuple[int, int]]:
    """Divisions worth measuring, the one that leaves all to PCIe first."""
    step = STEP_ROWS * (1 + (n_missed > 1))
    found = [
        (experts, rows)
        for experts in range(n_missed + 1)
        for rows in range(0, (costs.n_ff if experts < n_missed else 0) + 1, step)
    ]
    us = {each: makespan(n_missed, *each, costs) for each in found if each != NOTHING}
    return [NOTHING, *(each for each in us if us[each] <= WORST * min(us.values()))]


def token_us(loaded: Loaded, depth: int, n_tokens: int, runs: int) -> dict[str, float]:
    """Of a reply behind `depth` positions, whose first tokens are not timed."""
    took: list[float] = []
    for _ in range(1 + runs):
        sequence = at_depth(loaded, depth)
        reply = Reply([1] * (sequence.length + 1), GREEDY, n_tokens, sequence=sequence)
        steps, began, first = loaded.decoder.alone(reply), 0.0, 0
        while not steps.ended:
            steps.advance()
            if not first:
                began, first = time.perf_counter(), reply.made
        took.append(1e6 * (time.perf_counter() - began) / (n_tokens - first))
        sequence.release()
    return spread(took[1:])


def measured(
    loaded: Loaded, misses: CpuMisses, gate: Held, n: int, divisions: Sequence[tuple[int, int]],
    o: argparse.Namespace, base_us: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of layers that miss n."""
    rows, n_layers = list[dict[str, Any]](), len(loaded.residency.banks)
    for division in divisions:
        gate.hold(n, division)
        misses.cpu.divide(gate.table, BOUND_US)
        before = misses.cpu.tally
        us = token_us(loaded, o.depth, o.tokens, o.runs)
        seen = misses.cpu.tally.since(before).total
        if gate.lost:
            raise SystemExit(f"error: the CPU's threads were disturbed: {gate.lost}")
        rows.append({
            "missed": n, "experts": division[0], "rows": division[1], "token_us": us,
            "layer_us": (us["median"] - base_us) / n_layers, "predicted_us": makespan(n, *division, gate.begun),
            "waited_us": seen.waited_us / seen.layers if seen.layers else 0.0, "taken_back": seen.taken,
        })  # fmt: skip
        row = rows[-1]
        note(f"{n} missed, {division[0]} and {division[1]} rows: {row['layer_us']:.1f} us ({row['predicted_us']:.1f})")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--missed", default="1,2,3,4", help="experts of each layer")
    parser.add_argument("--cpu-experts", default="auto")
    parser.add_argument("--residency", type=float, default=60.0, help="percent of the expert bytes")
    parser.add_argument("--depth", type=int, default=512, help="positions before the reply")
    parser.add_argument("--tokens", type=int, default=64, help="of a reply")
    parser.add_argument("--runs", type=int, default=3)
    json_option(parser)
    o = parser.parse_args()
    shape = shape_of(o.model)
    with tempfile.TemporaryDirectory(prefix="spark-divisions-") as folder:
        config = EngineConfig(
            model=o.model, device="cuda", policy=policies.UNIFORM.name, residency_pct=o.residency, parallel=1,
            ctx_tokens=o.depth + o.tokens + 64, cpu_experts=o.cpu_experts, guess="off", draft="off",
            replay=Path(folder) / "replay.npy",
        )  # fmt: skip
        assert config.replay is not None
        first = np.arange(shape.n_expert_used, dtype=np.int32)  # until what is resident is known
        np.save(config.replay, np.broadcast_to(first, (N_TOKENS, len(shape.moe_layers), len(first))))
        engine = Engine(config)
    check_settings(config, engine.ready())
    loaded = engine.loaded
    misses, ws = loaded.steps.misses, loaded.steps.forward.ws
    assert isinstance(ws, Workspace)
    replay = ws.replay
    if misses is None:
        raise SystemExit("error: nothing is computed by the CPU: " + "; ".join(loaded.reasons))
    zeroed(loaded)
    resident = loaded.residency.state.slot_of[list(shape.moe_layers)] >= 0
    gate = misses.gate = Held(misses.gate.begun, misses.gate.n_used)
    rows, base_us = list[dict[str, Any]](), 0.0
    for n in (0, *(int(n) for n in parse_list(o.missed))):
        made = exactly(n, resident, gate.n_used, N_TOKENS, seed=n)
        assert replay is not None
        loaded.backend.device.write(replay.choices, made.astype(np.int16))
        replay.reset()
        if n == 0:
            gate.hold(0, NOTHING)
            base_us = token_us(loaded, o.depth, o.tokens, o.runs)["median"]
            continue
        rows += measured(loaded, misses, gate, n, candidates(n, gate.begun), o, base_us)
    if o.json:
        write_json(o.json, {"base_us": base_us, "cpu_experts": misses.settings(), "rows": rows})
    engine.close()


if __name__ == "__main__":
    main()
