"""The twin of a gated DeltaNet layer: a short convolution and a recurrence instead of attention (docs/arithmetic.md).

A head keeps a matrix S, what to answer (d_v) to which key (d_k). Each token shrinks it and then corrects what S
answers to the token's key towards the token's value: Yang et al., "Gated Delta Networks", 2024.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.formats.quants import QTensor
from engine.ops import F32, I32, DeltaInput, DeltaLayer
from engine.ops.arithmetic import dot32, exp, fma, product, rms_norm, sigmoid, silu, softplus


def delta_input(
    ws: object,
    x: F32,
    w: DeltaInput,
    eps: float,
    mixed: F32,
    z: F32,
    beta: F32,
    alpha: F32,
) -> None:
    """Four products of the normed residual.

    x [T, D]; matrices of any native type; mixed [T, C], z [T, H_v * d_v], beta, alpha [T, H_v] are written.
    """
    h = rms_norm(x, w.norm, eps)
    for matrix, y in zip(w.matrices, (mixed, z, beta, alpha), strict=True):
        y[:] = product(matrix, h)


def delta(
    ws: object,
    mixed: F32,
    beta: F32,
    alpha: F32,
    conv: F32,
    dt_bias: F32,
    a: F32,
    eps: float,
    layer: DeltaLayer,
    states: I32,
    sequence: I32,
    positions: I32,
    slots: I32,
    out: F32,
) -> None:
    """Convolution, gates and the gated delta rule, token by token.

    mixed [T, C], its columns q [H_k, d_k], k [H_k, d_k], v [H_v, d_v]; V head h reads K head h mod H_k. beta, alpha
    [T, H_v] before their gates; conv [C, kernel]; dt_bias, a [H_v], a negative; eps of the L2 norms of q and k.
    states int32 [n_sequence, 2]: the slots of `layer` that a sequence's state is read from and written to; where they
    differ the first keeps its contents. sequence, positions, slots int32 [T]: the rows of a sequence follow one
    another, a row at position 0 begins with a state of zeros, and rows with slot -1 are not there. out
    [T, H_v * d_v] is written but for those.
    """
    for first, end in spans(sequence, slots):
        source, target = states[sequence[first]]
        _, n_head_v, d_v, d_k = layer.state.shape
        state, window = layer.state[source].copy(), layer.conv[source].copy()
        for t in range(first, end):
            if positions[t] == 0:
                state, window = np.zeros_like(state), np.zeros_like(window)
            taps = np.concatenate([window, mixed[t : t + 1]])
            window = taps[1:]
            y = silu(_convolve(taps, conv))
            q, k, v = _heads(y, n_head_v, d_v, d_k, eps)
            with np.errstate(all="ignore"):
                decay = exp(a * softplus(alpha[t] + dt_bias))
                state = state * decay[:, None, None]
                correction = (v - dot32(state, k[:, None])) * sigmoid(beta[t])[:, None]
            state = fma(k[:, None], correction[..., None], state)
            out[t] = dot32(state, q[:, None]).reshape(-1)
        layer.state[target], layer.conv[target] = state, window


def spans(sequence: I32, slots: I32) -> Iterator[tuple[int, int]]:
    """First row and end of each run of rows of one sequence."""
    first = 0
    for t in range(1, len(sequence) + 1):
        if t == len(sequence) or sequence[t] != sequence[first] or (slots[t] < 0) != (slots[first] < 0):
            if slots[first] >= 0:
                yield first, t
            first = t


def _convolve(taps: F32, conv: F32) -> F32:
    y = np.zeros(taps.shape[1], np.float32)
    for j in range(len(taps)):
        y = fma(taps[j], conv[:, j], y)
    return y


def _heads(y: F32, n_head_v: int, d_v: int, d_k: int, eps: float) -> tuple[F32, F32, F32]:
    """q, k of each V head, normed, q also scaled, and v: [H_v, d_k] twice, [H_v, d_v]."""
    v = y[len(y) - n_head_v * d_v :].reshape(n_head_v, d_v)
    q, k = y[: len(y) - v.size].reshape(2, -1, d_k)
    with np.errstate(all="ignore"):
        scale = np.float32(1) / np.sqrt(np.float32(d_k))
        q = (q * _inverse_length(q, eps)) * scale
        k = k * _inverse_length(k, eps)
    of = np.arange(n_head_v) % len(k)
    return q[of], k[of], v


def _inverse_length(x: F32, eps: float) -> F32:
    return np.asarray(np.float32(1) / np.sqrt(dot32(x, x) + np.float32(eps))[..., None], np.float32)


def delta_output(ws: object, y: F32, z: F32, norm: F32, eps: float, w_out: QTensor, x: F32) -> None:
    """x [T, D] += w_out [D, H_v * d_v] @ (the RMS norm of each head of y, times norm [d_v], times silu(z))."""
    T, d_v = len(y), len(norm)
    with np.errstate(all="ignore"):
        h = rms_norm(y.reshape(T, -1, d_v), norm, eps) * silu(z.reshape(T, -1, d_v))
        x += product(w_out, np.asarray(h.reshape(T, -1), np.float32))
