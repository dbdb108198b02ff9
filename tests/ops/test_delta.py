"""Gated DeltaNet: the twin against float64 loops and `transformers`, the CPU's kernels against the twin bit for bit.

The CUDA kernels are in test_cuda_delta.py, with the inputs that are made here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.ops import DeltaInput, DeltaLayer, Limits, cpu, reference
from tests.op_cases import exact, floats, gain, rms, weights
from tests.ops.test_ops import same_bits

EPS = 1e-6
Span = tuple[int, int, int]  # sequence, first position, tokens


@dataclass(frozen=True)
class Shape:
    n_head_k: int
    n_head_v: int
    d_k: int
    d_v: int
    kernel: int = 4

    @property
    def n_z(self) -> int:
        return self.n_head_v * self.d_v

    @property
    def n_mixed(self) -> int:
        return 2 * self.n_head_k * self.d_k + self.n_z


SHAPES = {
    "ragged": Shape(2, 6, 64, 96),
    "whole": Shape(1, 2, 128, 128),
    "as many heads": Shape(3, 3, 96, 32),
    "odd": Shape(2, 4, 20, 7, 3),
}


def limits_of(shape: Shape, max_tokens: int = 300, n_embd: int = 512) -> Limits:
    return Limits(
        max_tokens, n_embd, 256, 256, 64, 0, 0, n_mixed=shape.n_mixed, n_z=shape.n_z, n_head_v=shape.n_head_v,
        d_k=shape.d_k, d_v=shape.d_v,
    )  # fmt: skip


@dataclass
class Step:
    """The arguments of `delta`; slots of the state that no sequence has hold NaN."""

    mixed: np.ndarray
    beta: np.ndarray
    alpha: np.ndarray
    conv: np.ndarray
    dt_bias: np.ndarray
    a: np.ndarray
    layer: DeltaLayer
    states: np.ndarray
    sequence: np.ndarray
    positions: np.ndarray
    slots: np.ndarray

    def run(self, ops: ModuleType, ws: Any) -> tuple[np.ndarray, DeltaLayer]:
        """The result and the states; this step's own stay as they are."""
        layer = DeltaLayer(self.layer.conv.copy(), self.layer.state.copy())
        out = np.full((len(self.mixed), self.layer.state.shape[1] * self.layer.state.shape[2]), np.nan, np.float32)
        ops.delta(
            ws, self.mixed, self.beta, self.alpha, self.conv, self.dt_bias, self.a, EPS, layer, self.states,
            self.sequence, self.positions, self.slots, out,
        )  # fmt: skip
        return out, layer

    def part(self, first: int, end: int, layer: DeltaLayer) -> Step:
        """Some rows, from other states."""
        names = ("mixed", "beta", "alpha", "sequence", "positions", "slots")
        return replace(self, layer=layer, **{name: getattr(self, name)[first:end].copy() for name in names})

    @property
    def there(self) -> np.ndarray:
        return self.slots >= 0


def make_step(shape: Shape, spans: list[Span], absent: int = 0, seed: int = 0, moves: bool = False) -> Step:
    """Rows of sequences, then `absent` rows of none; with `moves` states are written elsewhere than they were."""
    n_sequence = max(s for s, _, _ in spans) + 1
    T, n_states = sum(n for _, _, n in spans) + absent, 2 * n_sequence + 1
    conv = np.full((n_states, shape.kernel - 1, shape.n_mixed), np.nan, np.float32)
    state = np.full((n_states, shape.n_head_v, shape.d_v, shape.d_k), np.nan, np.float32)
    read = np.random.default_rng(seed).permutation(n_states)[:n_sequence].astype(np.int32)
    free = np.setdiff1d(np.arange(n_states, dtype=np.int32), read)[:n_sequence]
    for s, first, _ in spans:
        if first:
            conv[read[s]] = floats(seed + 8, shape.kernel - 1, shape.n_mixed)
            state[read[s]] = floats(seed + 9, shape.n_head_v, shape.d_v, shape.d_k, scale=0.3)
    return Step(
        mixed=floats(seed + 1, T, shape.n_mixed),
        beta=floats(seed + 2, T, shape.n_head_v),
        alpha=floats(seed + 3, T, shape.n_head_v),
        conv=floats(seed + 4, shape.n_mixed, shape.kernel, scale=0.5),
        dt_bias=floats(seed + 5, shape.n_head_v) - np.float32(3),
        a=-np.exp(floats(seed + 6, shape.n_head_v, scale=0.7)),
        layer=DeltaLayer(conv, state),
        states=np.stack([read, free if moves else read], 1),
        sequence=np.concatenate([*(np.full(n, s) for s, _, n in spans), np.zeros(absent)]).astype(np.int32),
        positions=np.concatenate([*(np.arange(p, p + n) for _, p, n in spans), np.full(absent, 9)]).astype(np.int32),
        slots=np.concatenate([np.arange(T - absent), np.full(absent, -1)]).astype(np.int32),
    )


def expected(step: Step, shape: Shape) -> tuple[np.ndarray, DeltaLayer]:
    """The same in float64, one head, token and sequence after the other."""
    K, H, d_k, d_v = shape.n_head_k, shape.n_head_v, shape.d_k, shape.d_v
    states, convs = step.layer.state.astype(np.float64), step.layer.conv.astype(np.float64)
    out = np.full((len(step.mixed), shape.n_z), np.nan)
    for s in dict.fromkeys(step.sequence[step.there].tolist()):
        rows = np.flatnonzero((step.sequence == s) & step.there)
        read, write = step.states[s]
        fresh = step.positions[rows[0]] == 0
        window = np.zeros_like(convs[read]) if fresh else convs[read]
        inputs = np.concatenate([window, step.mixed[rows].astype(np.float64)])
        S = np.zeros_like(states[read]) if fresh else states[read].copy()
        for i, t in enumerate(rows):
            y = (inputs[i : i + shape.kernel] * step.conv.T.astype(np.float64)).sum(0)
            y = y / (1 + np.exp(-y))
            for h in range(H):
                at = h % K * d_k
                q, k = y[at : at + d_k], y[K * d_k + at : K * d_k + at + d_k]
                v = y[2 * K * d_k + h * d_v : 2 * K * d_k + (h + 1) * d_v]
                q, k = q / np.sqrt(q @ q + EPS) / np.sqrt(d_k), k / np.sqrt(k @ k + EPS)
                S[h] *= np.exp(float(step.a[h]) * np.logaddexp(0, float(step.alpha[t, h]) + float(step.dt_bias[h])))
                S[h] += np.outer((v - S[h] @ k) / (1 + np.exp(-float(step.beta[t, h]))), k)
                out[t, h * d_v : (h + 1) * d_v] = S[h] @ q
        states[write], convs[write] = S, inputs[len(inputs) - shape.kernel + 1 :]
    return out, DeltaLayer(convs, states)


def nmse(found: np.ndarray, wanted: np.ndarray) -> float:
    """NaN must be where it is wanted."""
    assert np.array_equal(np.isnan(found), np.isnan(wanted))
    found, wanted = found[~np.isnan(found)].astype(np.float64), wanted[~np.isnan(wanted)]
    return float(((found - wanted) ** 2).sum() / (wanted**2).sum())


@functools.cache
def workspace(shape: Shape, isa: str, threads: int = 2) -> Any:
    return cpu.workspace(limits_of(shape), threads, isa)


# name: shape, spans, rows that are not there, states that move
CASES: dict[str, tuple[str, list[Span], int, bool]] = {
    "one token": ("ragged", [(0, 77, 1)], 0, False),
    "the first token": ("ragged", [(0, 0, 1)], 0, False),
    "a step that ends": ("ragged", [(1, 5, 3)], 2, True),
    "several sequences": ("ragged", [(1, 0, 2), (0, 6, 5), (3, 9, 1)], 3, True),
    "heads of 128": ("whole", [(0, 2, 9)], 0, False),
    "as many heads": ("as many heads", [(2, 1, 2), (0, 4, 4)], 0, True),
    "no multiples of 32": ("odd", [(0, 3, 4), (1, 0, 1)], 1, False),
    "long": ("ragged", [(1, 30, 40), (0, 0, 27)], 2, True),
}


@functools.cache
def step_of(case: str) -> Step:
    shape, spans, absent, moves = CASES[case]
    return make_step(SHAPES[shape], spans, absent, len(case), moves)


@functools.cache
def twin(case: str) -> tuple[np.ndarray, DeltaLayer]:
    return step_of(case).run(reference, None)


@pytest.mark.parametrize("case", CASES)
def test_the_twin_is_near_float64(case: str) -> None:
    step, (out, layer) = step_of(case), twin(case)
    wanted, states = expected(step, SHAPES[CASES[case][0]])
    assert nmse(out, wanted) < 1e-11
    assert nmse(layer.state, states.state) < 1e-11
    assert nmse(layer.conv, states.conv) == 0


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_written_stays(case: str) -> None:
    step, (_, layer) = step_of(case), twin(case)
    others = np.setdiff1d(np.arange(len(layer.state)), step.states[np.unique(step.sequence[step.there]), 1])
    assert same_bits(layer.state[others], step.layer.state[others])
    assert same_bits(layer.conv[others], step.layer.conv[others])


@pytest.mark.parametrize("isa", cpu.supported_isas())
@pytest.mark.parametrize("case", CASES)
def test_the_cpu_equals_the_twin_bit_for_bit(case: str, isa: str) -> None:
    out, layer = step_of(case).run(cpu, workspace(SHAPES[CASES[case][0]], isa))
    wanted, states = twin(case)
    there = step_of(case).there
    assert same_bits(out[there], wanted[there])
    assert same_bits(layer.state, states.state)
    assert same_bits(layer.conv, states.conv)


@pytest.mark.parametrize("splits", [(1, 1, 1, 1, 1), (2, 3), (3, 1, 1)])
def test_splits_of_a_step_change_no_bit(splits: tuple[int, ...]) -> None:
    shape = SHAPES["ragged"]
    for spans in ([(0, 0, 5)], [(0, 4, 5)]):
        step = make_step(shape, spans, seed=3)  # type: ignore[arg-type]
        ws = workspace(shape, cpu.supported_isas()[-1])
        whole, states = step.run(cpu, ws)
        layer, first = step.layer, 0
        for n in splits:
            out, layer = step.part(first, first + n, layer).run(cpu, ws)
            assert same_bits(out, whole[first : first + n])
            first += n
        assert same_bits(layer.state, states.state)
        assert same_bits(layer.conv, states.conv)


@pytest.mark.parametrize("rule", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
def test_the_twin_is_near_transformers(rule: str) -> None:
    """Which repeats a K head for consecutive V heads; in GGUF files and here K head h mod H_k is V head h's."""
    torch = pytest.importorskip("torch")
    model = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    shape = SHAPES["ragged"]
    K, H, d_k, d_v, T = shape.n_head_k, shape.n_head_v, shape.d_k, shape.d_v, 70
    step = make_step(shape, [(0, 0, T)], seed=5)
    out, layer = step.run(reference, None)
    mixed = torch.from_numpy(step.mixed).T[None]
    y = model.causal_conv1d_fn(mixed, torch.from_numpy(step.conv), None, activation="silu")[0].T
    q, k, v = torch.split(y, [K * d_k, K * d_k, H * d_v], dim=-1)
    theirs = np.arange(H).reshape(H // K, K).T.reshape(-1)  # their V head i is ours theirs[i]
    g = step.a * np.logaddexp(0, step.alpha + step.dt_bias).astype(np.float32)
    result, state = getattr(model, rule)(
        q.reshape(1, T, K, d_k),
        k.reshape(1, T, K, d_k),
        v.reshape(1, T, H, d_v)[:, :, theirs],
        torch.from_numpy(g[None, :, theirs]),
        torch.sigmoid(torch.from_numpy(step.beta[None, :, theirs])),
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    assert nmse(out.reshape(T, H, d_v)[:, theirs], result[0].numpy()) < 1e-9
    assert nmse(layer.state[step.states[0, 1]][theirs], state[0].transpose(1, 2).numpy()) < 1e-9


# --- the products around it -----------------------------------------------------------------------

D = 256
TYPES: dict[str, tuple[QType, QType, QType, QType]] = {  # qkv, z, beta and alpha, out
    "quantized": (QType.Q4_K, QType.Q5_K, QType.Q8_0, QType.Q6_K),
    "gates of floats": (QType.Q4_K, QType.Q4_K, QType.F32, QType.Q4_K),
    "floats": (QType.F16, QType.BF16, QType.F32, QType.F16),
}
AROUND = Shape(1, 4, 96, 64)  # rows of 256 for every type


def input_step(types: str, T: int) -> dict[str, Any]:
    qkv, z, gates, _ = TYPES[types]
    H = AROUND.n_head_v
    rows = (AROUND.n_mixed, AROUND.n_z, H, H)
    ws = [weights(t, n, D, 30 + i) for i, (t, n) in enumerate(zip((qkv, z, gates, gates), rows, strict=True))]
    return {"x": floats(34, T, D), "norm": gain(35, D), "ws": ws, "rows": rows}


def run_input(ops: ModuleType, ws: Any, step: dict[str, Any]) -> list[np.ndarray]:
    outputs = [np.full((len(step["x"]), n), np.nan, np.float32) for n in step["rows"]]
    ops.delta_input(ws, step["x"], DeltaInput(step["norm"], *step["ws"]), EPS, *outputs)
    return outputs


def output_step(types: str, T: int) -> dict[str, Any]:
    w = weights(TYPES[types][3], 320, AROUND.n_z, 36)
    y, z = floats(37, T, AROUND.n_z), floats(38, T, AROUND.n_z)
    return {"y": y, "z": z, "norm": gain(39, AROUND.d_v), "w": w, "x": floats(40, T, 320)}


def run_output(ops: ModuleType, ws: Any, step: dict[str, Any]) -> np.ndarray:
    x = step["x"].copy()
    ops.delta_output(ws, step["y"], step["z"], step["norm"], EPS, step["w"], x)
    return x


def expected_output(step: dict[str, Any]) -> np.ndarray:
    T, d_v = len(step["y"]), len(step["norm"])
    z = step["z"].astype(np.float64)
    h = rms(step["y"].reshape(T, -1, d_v), step["norm"], EPS).reshape(T, -1) * z / (1 + np.exp(-z))
    return step["x"] + h @ exact(step["w"]).T


@pytest.mark.parametrize("T", [1, 19])
@pytest.mark.parametrize("types", TYPES)
def test_the_products_around_it(types: str, T: int) -> None:
    isas = cpu.supported_isas()
    bound = 1e-12 if types == "floats" else 2e-3  # what 8-bit activations cost
    step = input_step(types, T)
    twins = run_input(reference, None, step)
    h = rms(step["x"], step["norm"], EPS)
    for found, w in zip(twins, step["ws"], strict=True):
        assert nmse(found, h @ exact(w).T) < bound
    for isa in isas:
        outputs = run_input(cpu, workspace(AROUND, isa), step)
        assert all(map(same_bits, outputs, twins))
    step = output_step(types, T)
    found = run_output(reference, None, step)
    assert nmse(found, expected_output(step)) < bound
    for isa in isas:
        assert same_bits(run_output(cpu, workspace(AROUND, isa), step), found)


def test_threads_change_no_bit() -> None:
    for threads in (1, 3, 5):
        step = step_of("several sequences")
        out, layer = step.run(cpu, workspace(SHAPES["ragged"], cpu.supported_isas()[-1], threads))
        assert same_bits(out[step.there], twin("several sequences")[0][step.there])
        assert same_bits(layer.state, twin("several sequences")[1].state)


def test_what_does_not_fit_is_refused() -> None:
    shape = SHAPES["ragged"]
    ws = workspace(shape, cpu.supported_isas()[-1])
    step = make_step(shape, [(0, 4, 2), (1, 3, 1)])
    for name, row, value in (("sequence", 1, 2), ("sequence", 0, -1), ("states", (1, 0), -1), ("states", (0, 1), 5)):
        array = getattr(step, name).copy()
        array[row] = value
        with pytest.raises(IndexError, match="states"):
            replace(step, **{name: array}).run(cpu, ws)
    with pytest.raises(ValueError, match="channels"):
        make_step(Shape(4, 6, 64, 96), [(0, 4, 2)]).run(cpu, ws)
    with pytest.raises(ValueError, match="beta"):
        replace(step, beta=step.beta[:, :5]).run(cpu, ws)
