"""Experts of the short rows of a long step, with the bits of docs/arithmetic.md (docs/cuda.md, "Prefill").

The rows are quantized, their pairs sorted by expert and cut in tiles, the tiles multiplied (tiled.py), and the results
folded in rank order by fold_floats of grouped.cu. What comes between lies where gemm.py has the same of other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from engine.formats.block_types import FLOAT_TYPES
from engine.ops import Experts, Limits
from engine.ops.cuda.device import Array, Device, Module
from engine.ops.cuda.gemm import FOLD_COLUMNS, Gemm
from engine.ops.cuda.long_jobs import LongJobs
from engine.ops.cuda.products import Products, Quantized, QuantizedScratch
from engine.ops.cuda.tiled import TiledExperts
from engine.ops.cuda.views import Views

# Results that wait for their sum come in multiples of so many columns: gemm.py has halves of twice as many at least.
COLUMNS = FOLD_COLUMNS // 2
ALIGN_BYTES = 16  # of what shares memory


class ShortExperts:
    """x += the weighted experts of each row, for up to as many rows as a step has. Scratch for h is allocated here."""

    def __init__(self, device: Device, limits: Limits, products: Products, gemm: Gemm) -> None:
        self.device, self.products, self.gemm = device, products, gemm
        self.tiled = TiledExperts(device)
        self._h = QuantizedScratch(device, limits.max_tokens, limits.n_embd)
        self._z, self._y = map(Views, gemm.lent)

    def __call__(
        self,
        h: Array,
        experts: Array,
        weights: Array,
        bank: Experts,
        source: Array,
        x: Array,
        add: bool = True,
        mask: Array | None = None,
        rows: Quantized | Array | None = None,
        beside: LongJobs | None = None,
        n_short: int | None = None,
    ) -> None:
        """x float32 [T, D] += the fold over ranks of weights [T, A] times each expert's output; or becomes it.

        h: the normed residual, float32 [T, D]; experts int32 [T, A]; source: uint64 [E, 3], where each used expert's
        gate, up and down can be read. mask: uint8 [T], rows that have 0 there are left as they are.
        n_short: how many have not; None: all. rows: of h, where they are known. beside: who computes the experts whose
        source is 0.
        """
        (T, D), A = x.shape, experts.shape[1]
        if bank.n_embd != D or h.shape != (T, D) or not weights.shape == experts.shape == (T, A):
            raise ValueError(f"experts: x {x.shape}, h {h.shape}, weights {weights.shape}; {bank.n_embd} columns")
        of_pair = 4 * bank.n_ff if bank.down_type in FLOAT_TYPES else bank.n_ff + bank.n_ff // 4 + 2 * ALIGN_BYTES
        # Z of 8 bits fit whole, since there is room for halves; of floats half as many rows fit, or fewer.
        at_once = min(T, int(self.gemm.lent[0].nbytes) // (A * of_pair))
        values = self.rows(h, bank) if rows is None else rows
        each = self.tiled.pairs_of(bank, (n_short or T) * A / source.shape[0])
        if at_once == T:  # as a rule; views cost more than an argument
            collected = None if beside is None else partial(beside.collect, experts)
            self._run(values, experts, weights, bank, source, x, add, mask, each, collected)
            return
        for first in range(0, T, at_once):
            part = slice(first, min(T, first + at_once))
            some = None if mask is None else mask[part]
            collected = None if beside is None else partial(beside.collect, experts, first_token=first)
            own = _part(values, part), experts[part], weights[part]
            self._run(*own, bank, source, x[part], add, some, each, collected)

    def rows(self, h: Array, bank: Experts) -> Quantized | Array:
        """h float32 [T, D] as experts read it (scratch, unless it is h itself)."""
        return h if bank.gate_type in FLOAT_TYPES else self.products.quantize(h, self._h.rows(*h.shape))

    def _run(
        self, values: Quantized | Array, experts: Array, weights: Array, bank: Experts, source: Array, x: Array,
        add: bool, mask: Array | None, each: int, collect: Callable[..., None] | None,
    ) -> None:  # fmt: skip
        """As a call, of as many rows as z has room for. each: pairs of a tile."""
        (T, D), A, E = x.shape, experts.shape[1], source.shape[0]
        groups = self.gemm.group(experts, E, each, mask)
        tiles = groups.tiles, groups.n_tiles, T * A // each + min(E, T * A), groups.pairs, each
        z, room = self._z_of(bank, T * A), int(self._y.array.nbytes) // 4
        self.tiled.gate_up(values, A, bank, source, *tiles, z)
        fold = self.device.kernel(Module("grouped.cu"), "fold_floats")
        at_once = room // (T * A) // COLUMNS * COLUMNS
        for first in range(0, D, at_once):
            columns = min(at_once, D - first)
            y = self._y((T * A, columns), np.float32)
            self.tiled.down(bank, source, *tiles, z, y, first, columns)
            if collect is not None:
                collect(y, first=first)
            fold((-(-columns // 256), T), 256, (y, weights, x, A, D, first, columns, int(add), mask))

    def _z_of(self, bank: Experts, n_pairs: int) -> Quantized | Array:
        """Memory for the results of so many first halves."""
        F, z = bank.n_ff, self._z
        if bank.down_type in FLOAT_TYPES:
            return z((n_pairs, F), np.float32)
        scales = -(-n_pairs * F // ALIGN_BYTES) * ALIGN_BYTES  # where they begin, and the sums
        sums = scales + -(-n_pairs * F // 8 // ALIGN_BYTES) * ALIGN_BYTES
        blocks = n_pairs, F // 32
        return Quantized(z((n_pairs, F), np.int8), z(blocks, np.float32, scales), z(blocks, np.int32, sums))


def _part(values: Quantized | Array, rows: slice) -> Quantized | Array:
    if isinstance(values, Quantized):
        return Quantized(values.q[rows], values.d[rows], values.sums[rows])
    return values[rows]
