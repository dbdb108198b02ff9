"""The expert FFN of a step of at most 32 tokens, over the active table that `route` leaves on the device."""

from __future__ import annotations

import numpy as np

from engine.ops import SMALL_TOKENS, Experts, Limits
from engine.ops.cuda.device import Array, Device, Module
from engine.ops.cuda.products import (
    FLOAT_TYPES,
    STATIC_SHARED,
    WARP,
    WARPS,
    Quantized,
    QuantizedScratch,
    shared_input_bytes,
    stage_bytes,
)
from engine.quants import row_bytes

Z_ROWS = 32  # rows of gate and up whose results one block quantizes
COPIERS = 8  # blocks that write the down part of a missed expert to its slot: as fast as others read gate and up
DOWN_ROWS = 8  # of the down matrix: a warp's
TOKENS = 4  # of an expert at a time, where a step has several


class SmallExperts:
    """x += the weighted experts of each row. Kernels in experts.cu; scratch for 32 tokens is allocated here."""

    def __init__(self, device: Device, limits: Limits) -> None:
        self.device = device
        self.limits = limits
        n_pairs = SMALL_TOKENS * limits.n_expert_used
        self._z = device.empty((n_pairs * limits.n_ff,), np.float32)
        self._zq = QuantizedScratch(device, n_pairs, limits.n_ff)
        self._y = device.empty((n_pairs * limits.n_embd,), np.float32)

    def __call__(
        self,
        h: Quantized | Array,
        experts: Array,
        weights: Array,
        bank: Experts,
        active: Array,
        n_active: Array,
        pairs: Array,
        x: Array,
    ) -> None:
        """x float32 [T, D] += the fold over ranks of weights [T, A] times each expert's output.

        h: the normed residual [T, D], `Quantized` where gate and up are of block types, else float32. experts int32
        [T, A]; active uint64 [n, 8], n_active int32 [1], pairs int32 [T * A] as `Routing` describes them.
        """
        T, D = x.shape
        A = experts.shape[1]
        gate_float = bank.gate_type in FLOAT_TYPES
        if T > SMALL_TOKENS or bank.n_embd != D or weights.shape != (T, A):
            raise ValueError(f"experts: x {x.shape}, weights {weights.shape}, a bank of width {bank.n_embd}")
        if gate_float != (bank.up_type in FLOAT_TYPES) or gate_float == isinstance(h, Quantized):
            raise ValueError(
                f"experts of types {bank.gate_type.name}, {bank.up_type.name} take "
                f"{'float32' if gate_float else 'quantized'} rows, and both types must be alike"
            )
        active_pairs = [active, n_active, pairs]
        n_records = min(active.shape[0], T * A)
        z = self._z_of(bank, T * A)
        self.gate_up(h, bank, A, active_pairs, n_records, z)
        self.down(weights, bank, active_pairs, n_records, z, x)

    def _z_of(self, bank: Experts, n_pairs: int) -> list[Array | None]:
        """z, zq, zd, zsums as the kernels take them."""
        if bank.down_type in FLOAT_TYPES:
            return [self._z, None, None, None]
        z = self._zq.rows(n_pairs, bank.n_ff)
        return [None, z.q, z.d, z.sums]

    def gate_up(
        self,
        h: Quantized | Array,
        bank: Experts,
        n_used: int,
        active: list[Array],
        n_records: int,
        z: list[Array | None],
    ) -> None:
        """The first half: z of each pair; `active` is the table, its length and the pairs."""
        inputs = [None, h.q, h.d, h.sums] if isinstance(h, Quantized) else [h, None, None, None]
        T, D = (h.q if isinstance(h, Quantized) else h).shape
        widest = max(row_bytes(t, D, "gate and up") for t in (bank.gate_type, bank.up_type))
        tokens = 1 if T == 1 else TOKENS
        fixed = shared_input_bytes(D, bank.gate_type in FLOAT_TYPES) if tokens == 1 else 0
        results = 0 if tokens == 1 else 2 * SMALL_TOKENS * (Z_ROWS + 1) * 4
        # With one token, all rows of a block at once, if two blocks then share a multiprocessor.
        half = self.device.max_shared_bytes // 2 - 2 * STATIC_SHARED
        rows = next(
            n for n in (4, 2, 1) if n == 1 or (tokens == 1 and fixed + 2 * WARPS * stage_bytes(n, widest) <= half)
        )
        stage = stage_bytes(rows, widest)
        stages, warps = self._stages_and_warps(2 * stage, fixed + results, -(-Z_ROWS // (WARPS * rows)))
        module = _module(
            ("GATE", bank.gate_type.name),
            ("UP", bank.up_type.name),
            DOWN_FLOAT=int(bank.down_type in FLOAT_TYPES),
            COLS=D,
            ROWS=rows,
            STAGES=stages,
            WARPS=warps,
            TOKENS=tokens,
        )
        args = [*active, n_used, bank.n_ff, *inputs, *z, COPIERS, np.int64(bank.part_bytes[2]), stage]
        grid = (COPIERS + -(-bank.n_ff // Z_ROWS), n_records)
        shared_bytes = fixed + 2 * warps * stages * stage
        self.device.kernel(module, "gate_up")(grid, warps * WARP, args, shared_bytes, overlap=True)

    def down(
        self, weights: Array, bank: Experts, active: list[Array], n_records: int, z: list[Array | None], x: Array
    ) -> None:
        """The second half: x += the fold over ranks of weights times down z."""
        (T, A), D, F = weights.shape, bank.n_embd, bank.n_ff
        qtype = bank.down_type
        row = row_bytes(qtype, F, "down")
        stage = stage_bytes(4, row)
        each = shared_input_bytes(F, qtype in FLOAT_TYPES) + -(-F // 2 // 16) * 16
        stages = self._stages(A * stage, A * each, DOWN_ROWS // 4)
        if T == 1 and stages:
            module = _module(("DOWN", qtype.name), COLS=F, STAGES=stages, TOKENS=1, USED=A)
            args = [*active[:2], weights, D, *z, x, stage]
            shared_bytes = A * (each + stages * stage)
            self.device.kernel(module, "down_one")(-(-D // DOWN_ROWS), A * WARP, args, shared_bytes, overlap=True)
            return
        stage = stage_bytes(2, row)
        stages, warps = self._stages_and_warps(stage, 0, DOWN_ROWS // 2)
        module = _module(("DOWN", qtype.name), COLS=F, STAGES=stages, TOKENS=TOKENS)
        grid = (-(-D // (DOWN_ROWS * warps)), n_records)
        args = [*active, D, *z, self._y, stage]
        self.device.kernel(module, "down")(grid, warps * WARP, args, warps * stages * stage, overlap=True)
        self.device.kernel(module, "combine")((-(-D // 256), T), 256, [self._y, weights, A, D, x], overlap=True)

    def _stages_and_warps(self, stage: int, fixed: int, most: int) -> tuple[int, int]:
        """At most so many stages of `stage` bytes a warp and warps a block, beside `fixed` bytes of shared memory."""
        for warps in (WARPS, WARPS // 2, WARPS // 4, 1):
            if stages := self._stages(warps * stage, fixed, most):
                return stages, warps
        raise ValueError(f"experts: rows of {stage} bytes do not fit into shared memory")

    def _stages(self, n_bytes: int, fixed: int, most: int) -> int:
        """How many times n_bytes fit, so that two blocks share a multiprocessor if one stage allows it; 0: not once."""
        memory = self.device.max_shared_bytes - STATIC_SHARED
        half = (memory // 2 - STATIC_SHARED - fixed) // n_bytes
        return min(most, half) if half > 0 else int(fixed + n_bytes <= memory)


def _module(*types: tuple[str, str], **numbers: int) -> Module:
    return Module("experts.cu", (*types, *((name, str(n)) for name, n in numbers.items())))
