"""Cases of cuda_kernels.py: the gated DeltaNet layers of Qwen3.6-35B-A3B (32 heads of 128 over 16 key heads)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.cuda_kernels import KernelCase
from engine.ops import SMALL_TOKENS, DeltaLayer, Limits
from engine.ops.cuda.delta import CHUNK, Delta
from engine.ops.cuda.gemm import Gemm

H_K, H, WIDTH, TAPS = 16, 32, 128, 4  # WIDTH: of the keys and values of a head
N_Z, C = H * WIDTH, (2 * H_K + H) * WIDTH
STATES = 64  # that steps rotate through: 134 MB
LIMITS = Limits(
    4096, 2048, 4096, 512, 248320, 0, 0, max_sequences=8, n_mixed=C, n_z=N_Z, n_head_v=H, d_k=WIDTH, d_v=WIDTH
)
EPS = 1e-6


class Cases:
    """Inputs and states that all cases share."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.delta = Delta(device, LIMITS)
        self.gemm = Gemm(device, LIMITS)
        rng = np.random.default_rng(0)
        self.mixed = device.upload(rng.standard_normal((4096, C), np.float32))
        self.gates = [device.upload(rng.standard_normal((4096, H), np.float32)) for _ in range(2)]
        self.conv = device.upload(0.5 * rng.standard_normal((C, TAPS), np.float32))
        self.heads = [device.upload(v.astype(np.float32)) for v in (np.full(H, -2.0), -rng.uniform(0.01, 16, H))]
        state = np.resize(rng.standard_normal(1 << 20, np.float32), (STATES, H, WIDTH, WIDTH))
        self.layer = DeltaLayer(
            device.upload(rng.standard_normal((STATES, TAPS - 1, C), np.float32)), device.upload(state)
        )
        self.norm = device.upload(np.ones(WIDTH, np.float32))
        self.out = device.empty((4096, N_Z), np.float32)

    def rule(self, T: int, n_sequence: int = 1) -> KernelCase:
        """Steps of T tokens in sequences of equal length, each with states of its own."""
        upload, each = self.device.upload, T // n_sequence
        first = np.arange(STATES // n_sequence * n_sequence, dtype=np.int32).reshape(-1, n_sequence)
        states = [upload(np.stack([row, row], 1)) for row in first]
        sequence = upload(np.repeat(np.arange(n_sequence, dtype=np.int32), each))
        positions = upload(np.tile(np.arange(7, 7 + each, dtype=np.int32), n_sequence))
        slots = upload(np.arange(T, dtype=np.int32))
        mixed, beta, alpha = (a[:T] for a in (self.mixed, *self.gates))
        bias, a = self.heads

        def launch(i: int) -> None:
            where = states[i % len(states)]
            self.delta(
                mixed, beta, alpha, self.conv, bias, a, EPS, self.layer, where, sequence, positions, slots, self.out[:T]
            )  # fmt: skip

        n_bytes = 4 * (T * (C + N_Z + 2 * H) + C * TAPS + n_sequence * 2 * (N_Z * WIDTH + (TAPS - 1) * C))
        flops = 7 * WIDTH * WIDTH * T * H  # token by token
        if T > SMALL_TOKENS:  # two products of keys for each key head; of a head, three with the state, two in a chunk
            flops = 2 * T * (2 * CHUNK * WIDTH * H_K + (3 * WIDTH * WIDTH + 2 * CHUNK * WIDTH) * H)
        name = f"delta T={T}" + (f" in {n_sequence} sequences" if n_sequence > 1 else "")
        return KernelCase(name, launch, n_bytes, flops)

    def gate(self, T: int) -> KernelCase:
        """Norm and gate before the product of the output."""
        y, z = (a.reshape(-1)[: 8 * 8 * N_Z].reshape(8, 8, N_Z) for a in (self.mixed, self.out))
        whole = self.mixed.reshape(-1)[: 4096 * N_Z].reshape(4096, N_Z)

        def launch(i: int) -> None:
            if T <= SMALL_TOKENS:
                self.delta.gate(y[i % 8][:T], z[i % 8][:T], self.norm, EPS, False)
            else:
                self.delta.gate_halves(whole[:T], self.out[:T], self.norm, EPS, self.gemm.halves(T, N_Z))

        return KernelCase(f"gate T={T}", launch, T * N_Z * (9 if T <= SMALL_TOKENS else 10))


def cases(device: Any) -> Iterator[KernelCase]:
    """Decoding, verification, prefill."""
    shared = Cases(device)
    for T, n_sequence in ((1, 1), (8, 1), (8, 8), (32, 1), (64, 1), (512, 1), (4096, 1), (4096, 8)):
        yield shared.rule(T, n_sequence)
    for T in (1, 8, 4096):
        yield shared.gate(T)
