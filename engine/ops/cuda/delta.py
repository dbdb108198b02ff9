"""Gated DeltaNet layers on the device: the recurrence, and norm and gate before the output's product.

Kernels: delta_step.cu for steps of up to 32 tokens, delta_chunks.cu for longer ones, delta_output.cu. With `overlap`
delta_step loads the state before the kernel ahead of it has ended: a layer's states were last written a step ago, and
a step begins with a launch without overlap, a replay of one with a copy.
"""

from __future__ import annotations

import numpy as np

from engine.ops import SMALL_TOKENS, DeltaLayer, Limits
from engine.ops.cuda.device import Array, Device, Kernel, Module
from engine.ops.cuda.gemm import Halves
from engine.ops.cuda.products import Quantized, QuantizedScratch

CHUNK = 64  # of cuda/delta_chunks.cu
SEGMENT = 16  # chunks whose intermediate results are in memory at once
THREADS = 256
SLICE = 32  # rows of a state that a block does
MAX_D_K = 128
PREPARED_BYTES = 1024  # of static shared memory


def _chunks(n_tokens: int, n_sequence: int) -> int:
    """The most chunks that so many sequences with so many tokens in all can have."""
    return (n_tokens + (CHUNK - 1) * n_sequence) // CHUNK


def _shared_bytes(d_k: int, stages: int) -> tuple[int, int]:
    """Dynamic shared memory of delta_prepare and of delta_scan."""
    pitch = d_k + 8
    keys = CHUNK * pitch
    return 8 * max(keys, 2 * CHUNK * 68), 4 * ((stages + 1) * keys + SLICE * pitch + CHUNK * 40)


class Delta:
    """The gated delta rule of one layer at a time; scratch memory for the widest."""

    def __init__(self, device: Device, limits: Limits) -> None:
        self._device = device
        self._limits = limits
        self.overlap = True
        T, H = limits.max_tokens, limits.n_head_v
        key_width = (limits.n_mixed - limits.n_z) // 2
        n_head_k = key_width // limits.d_k
        self._gated = QuantizedScratch(device, min(T, SMALL_TOKENS), limits.n_z)
        self._plain = device.empty((min(T, SMALL_TOKENS) * limits.n_z,), np.float32)
        self._arrivals = device.empty((limits.max_sequences * n_head_k,), np.int32)
        device.set_bytes(device.pointer(self._arrivals), 0, self._arrivals.nbytes)
        if T > SMALL_TOKENS:
            n_chunks = _chunks(T, limits.max_sequences)
            n_kept = min(n_chunks, SEGMENT)
            self._table = device.empty((n_chunks, 4), np.int32)
            self._n_chunks = device.empty((1,), np.int32)
            self._keys = device.empty((n_kept * 2 * CHUNK * key_width,), np.float32)
            self._inverse = device.empty((n_kept * H * CHUNK * CHUNK,), np.float32)
            self._scores = device.empty((n_kept * H * CHUNK * CHUNK,), np.float32)
            self._scalars = device.empty((n_kept * H * 2 * CHUNK,), np.float32)

    def __call__(
        self,
        mixed: Array,
        beta: Array,
        alpha: Array,
        conv: Array,
        dt_bias: Array,
        a: Array,
        eps: float,
        layer: DeltaLayer,
        states: Array,
        sequence: Array,
        positions: Array,
        slots: Array,
        out: Array,
    ) -> None:
        """As `reference.delta`; the positions of a sequence ascend by one.

        ValueError: heads that the kernels do not take, or more than the scratch memory was made for.
        """
        (T, C), n_sequence = mixed.shape, states.shape[0]
        (_, kept, _), (_, H, d_v, d_k) = layer.conv.shape, layer.state.shape
        n_head_k = (C - H * d_v) // (2 * d_k)
        if d_k % 32 or d_v % 32 or d_k > MAX_D_K or kept < 1 or n_head_k < 1 or H % n_head_k:
            raise ValueError(f"gated DeltaNet of {H} heads of {d_v} over {n_head_k} of {d_k}, {kept} inputs kept")
        if conv.shape != (C, kept + 1) or layer.conv.shape[2] != C or out.shape != (T, H * d_v):
            raise ValueError(f"convolution {conv.shape} of {C} channels, result {out.shape}")
        limits = self._limits
        most = (limits.max_tokens, limits.max_sequences, limits.n_mixed, limits.n_head_v)
        if any(n > m for n, m in zip((T, n_sequence, C, H), most, strict=True)):
            raise ValueError(f"[{T}, {C}], {H} heads and {n_sequence} sequences in scratch for {limits}")
        heads = (("DK", str(d_k)), ("DV", str(d_v)), ("TAPS", str(kept + 1)))
        inputs = (mixed, beta, alpha, conv, dt_bias, a, eps)
        if T <= SMALL_TOKENS:
            self._device.kernel(Module("delta_step.cu", heads), "delta_step")(
                (d_v // SLICE, H, n_sequence),
                THREADS,
                (
                    *inputs,
                    layer.conv,
                    layer.state,
                    states,
                    sequence,
                    positions,
                    slots,
                    self._arrivals,
                    out,
                    T,
                    n_head_k,
                ),
                4 * T * (2 * d_k + SLICE),
                overlap=self.overlap,
            )
        else:
            self._long(inputs, heads, layer, states, (sequence, positions, slots), out, n_head_k)

    def _long(
        self,
        inputs: tuple[Array, Array, Array, Array, Array, Array, float],
        heads: tuple[tuple[str, str], ...],
        layer: DeltaLayer,
        states: Array,
        rows: tuple[Array, Array, Array],
        out: Array,
        n_head_k: int,
    ) -> None:
        mixed, T = inputs[0], inputs[0].shape[0]
        _, H, d_v, d_k = layer.state.shape
        stages = 2 if _shared_bytes(d_k, 2)[1] + PREPARED_BYTES <= self._device.max_shared_bytes else 1
        prepare_bytes, scan_bytes = _shared_bytes(d_k, stages)
        module = Module("delta_chunks.cu", (*heads, ("STAGES", str(stages))))
        table, prepare, scan = (
            self._device.kernel(module, name) for name in ("delta_table", "delta_prepare", "delta_scan")
        )
        n_chunks = _chunks(T, states.shape[0])
        made = (self._keys, self._inverse, self._scores, self._scalars)
        table(1, 32, (*rows, T, self._table, n_chunks, self._n_chunks))
        for first in range(0, n_chunks, SEGMENT):
            end = min(first + SEGMENT, n_chunks)
            where = (states, self._table, self._n_chunks, first)
            prepare((n_head_k, end - first), THREADS, (*inputs, layer.conv, *where, H, *made, out), prepare_bytes)
            scan(
                (d_v // SLICE, H),
                THREADS,
                (mixed, layer.conv, layer.state, *where, end, n_head_k, *made, out),
                scan_bytes,
            )

    def gate(self, y: Array, z: Array, norm: Array, eps: float, is_float: bool) -> Quantized | Array:
        """rms(y) * norm * silu(z) by heads, y and z [T, n_z], as a product of few tokens takes it (scratch)."""
        T, n_z = y.shape
        to = None if is_float else self._gated.rows(T, n_z)
        plain = self._plain[: T * n_z].reshape(T, n_z) if is_float else None
        quantized = (None, None, None) if to is None else (to.q, to.d, to.sums)
        n_heads = T * (n_z // norm.shape[0])
        args = (y, z, norm, eps, n_heads, *quantized, plain)
        self._kernel("gate_quantize", norm)(-(-n_heads // 8), THREADS, args, overlap=True)
        return plain if to is None else to

    def gate_halves(self, y: Array, z: Array, norm: Array, eps: float, to: Halves) -> None:
        """The same in halves."""
        T, n_z = y.shape
        args = (y, z, norm, eps, n_z // norm.shape[0], to.stride, to.values, to.scale)
        self._kernel("gate_halves", norm)(T, THREADS, args, 4 * n_z)

    def _kernel(self, name: str, norm: Array) -> Kernel:
        d_v = norm.shape[0]
        if d_v % 32:
            raise ValueError(f"gated heads of {d_v}, not a multiple of 32")
        return self._device.kernel(Module("delta_output.cu", (("DV", str(d_v)),)), name)
