"""Products with more than 32 tokens, on tensor cores: dense, grouped by expert, the output matrix.

Kernels: gemm.cu, gate_up.cu, down.cu, grouped.cu, halves.cu, float_product.cu. Weights of any native type are
dequantized to halves where they are multiplied, activations are halves with a power of two a row, sums are float32.
Everything is deterministic, and a token's result depends on nothing but the shapes and its own row. F32 and BF16
weights beyond a half's range (65504) become infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from gguf import GGMLQuantizationType as QType

from engine.formats import block_types
from engine.formats.block_types import FLOAT_TYPES
from engine.formats.quants import QTensor, row_bytes
from engine.ops import Activation, Experts, Limits
from engine.ops.cuda.device import Array, Device, Module
from engine.ops.cuda.views import Views

STEP = 64  # of cuda/gemm_tile.cuh: activations are padded to multiples
TILE_TOKENS = (128, 64, 32)  # that a block can hold
LEAST_TILE = 4  # tokens that anybody's tiles have room for
FOLD_COLUMNS = 128  # the results per (token, rank) that wait for their sum come in multiples of so many columns...
FOLD_BYTES = 64 << 20  # ... and in as many at once as take up to so much memory
FILLED = 0.75  # blocks per multiprocessor that a dense product should have, before its tiles are large


def _padded(n: int, multiple: int = STEP) -> int:
    return -(-n // multiple) * multiple


@cache
def tile_bytes(qtype: QType, matrices: int, tokens: int, warps: int) -> int:
    """Dynamic shared memory of a block: Tile::BYTES of cuda/gemm_tile.cuh and its tokens' rows."""
    record = block_types.record(qtype)
    rows, steps = 16 * warps * matrices, record.stage // STEP
    turn = 2 if warps == 8 and record.stage == record.elements == 256 else 1
    stages = max(2, min(2 if tokens > 64 else 3 if tokens > 32 else 4, steps // turn))
    pieces = (record.stage_bytes + 16 - record.align + 15) // 16
    raw = rows * pieces * 16 + (0 if pieces % 2 else rows // 4 * 16)
    return tokens * 4 + 2 * raw + stages * turn * tokens * STEP * 2 + 2 * record.scales * rows * 4


@dataclass(frozen=True, slots=True)
class Halves:
    """Activations [T, n_columns] for tensor cores: about values * scale.

    values: uint16 [T, n_columns rounded up to 64], halves in the order of cuda/halves.cu, zeros past the columns.
    scale: float32 [T], powers of two; NaN for a row that is not finite.
    """

    values: Array
    scale: Array
    n_columns: int

    def first(self, n_rows: int) -> Halves:
        """The first rows."""
        return self if n_rows == len(self.scale) else Halves(self.values[:n_rows], self.scale[:n_rows], self.n_columns)

    @property
    def stride(self) -> int:
        """Halves from row to row."""
        return int(self.values.shape[1])


@dataclass(frozen=True, slots=True)
class Groups:
    """Uses of experts, sorted by expert, and cut in tiles.

    pairs: int32 [T * A], token * A + rank. tiles: int32 [*, 4], (expert, first of its pairs, how many, 0), n_tiles
    int32 [1] of them.
    """

    pairs: Array
    tiles: Array
    n_tiles: Array


class _HalvesScratch:
    """Memory for one `Halves` of up to `n_rows` rows and `width` columns."""

    def __init__(self, device: Device, n_rows: int, width: int) -> None:
        self.n_rows, self.width = n_rows, _padded(width)
        self._values = Views(device.empty((n_rows * self.width,), np.uint16))
        self._scale = Views(device.empty((n_rows,), np.float32))

    def rows(self, n_rows: int, width: int) -> Halves:
        """New ones each time, as who has them is known by that (`newest`)."""
        stride = _padded(width)
        if n_rows > self.n_rows or stride > self.width:
            raise ValueError(f"[{n_rows}, {width}] activations in scratch for [{self.n_rows}, {self.width}]")
        return Halves(self._values((n_rows, stride)), self._scale((n_rows,)), width)


class Gemm:
    """Products on tensor cores, for any number of tokens within the limits.

    `to_halves`, `norm_to_halves` and `halves` share their memory: what they return is valid until one of them is called
    again, and is `newest` as long.
    """

    def __init__(self, device: Device, limits: Limits) -> None:
        self.device = device
        self.limits = limits
        T, E, A = limits.max_tokens, limits.n_expert, limits.n_expert_used
        self._halves = _HalvesScratch(device, T, max(limits.n_embd, limits.n_head_dim, limits.n_ff, limits.n_z))
        self.newest: Halves | None = None
        self._headed = _HalvesScratch(device, limits.max_rows, limits.n_embd)
        self._dense_z = _HalvesScratch(device, T, limits.n_ff)
        self._dense_exponents = device.empty((T * _padded(limits.n_ff) // 16,), np.int8)
        self._row_gate = device.empty((T,), np.float32)
        self._n_ff_exp = limits.n_ff_exp or limits.n_ff
        n_pairs = T * A
        if n_pairs:
            stride = _padded(self._n_ff_exp)
            self._pairs = device.empty((n_pairs,), np.int32)
            self._tiles = device.empty((-(-n_pairs // LEAST_TILE) + E, 4), np.int32)
            self._n_tiles = device.empty((1,), np.int32)
            self._z = device.empty((n_pairs * stride,), np.uint16)
            self._z_exponents = device.empty((n_pairs * stride // 16,), np.int8)
            self._z_scale = device.empty((n_pairs,), np.float32)
            columns = max(1, FOLD_BYTES // 2 // n_pairs // FOLD_COLUMNS) * FOLD_COLUMNS
            n_values = n_pairs * min(columns, _padded(limits.n_embd, FOLD_COLUMNS))
            self._y = device.empty((n_values,), np.uint16)
            self._y_exponents = device.empty((n_values // 16,), np.int8)

    def to_halves(self, x: Array) -> Halves:
        """x float32 [T, K] in halves (scratch)."""
        to = self.newest = self._halves.rows(*x.shape)
        self._to_halves(x, None, None, 0.0, to, None)
        return to

    def halves(self, n_rows: int, width: int) -> Halves:
        """The memory of `to_halves`, for whoever fills it."""
        to = self.newest = self._halves.rows(n_rows, width)
        return to

    def norm_to_halves(self, x: Array, weight: Array, eps: float, h: Array | None = None) -> Halves:
        """The RMS norm of x [T, D] in halves (scratch), and as float32 in `h` [T, D] where that is given."""
        to = self.newest = self._halves.rows(*x.shape)
        self._to_halves(x, None, weight, eps, to, h)
        return to

    def _to_halves(
        self, x: Array, rows: Array | None, weight: Array | None, eps: float, to: Halves, h: Array | None
    ) -> None:
        kernel = self.device.kernel(Module("halves.cu"), "to_halves")
        K = x.shape[1]
        args = (x, rows, weight, eps, K, to.stride, to.values, to.scale, h)
        kernel(to.values.shape[0], 256, args, shared_bytes=4 * K)

    def product(self, w: QTensor, x: Halves, y: Array, add: bool = False) -> None:
        """y float32 [T, N] = w [N, K] of x [T, K], or y += it."""
        N, K = w.shape
        T = x.values.shape[0]
        if x.n_columns != K or y.shape != (T, N):
            raise ValueError(f"{w.name}: [{N}, {K}] of [{T}, {x.n_columns}] into {tuple(y.shape)}")
        tokens, warps = self._dense_tile(w.qtype, N, T)
        module = _module("gemm.cu", tokens, warps, TYPE=w.qtype)
        self.device.kernel(module, "gemm")(
            (-(-N // (32 * warps)), -(-T // tokens)),
            32 * warps,
            (w.data, x.values, x.scale, y, T, N, K, x.stride, w.row_bytes, int(add), w.scale),
            shared_bytes=tile_bytes(w.qtype, 2, tokens, warps),
        )

    def _dense_tile(self, qtype: QType, n_rows: int, n_tokens: int) -> tuple[int, int]:
        """(tokens, warps) of a block: the largest that leaves enough blocks for all multiprocessors."""
        return _tile((qtype,), 2, 32, n_rows, n_tokens, self.device.n_sm, self.device.max_shared_bytes)

    def float_product(self, w: QTensor, x: Array, y: Array) -> None:
        """y [T, N] = w [N, K], a float type, of x [T, K], all float32 and in about its accuracy."""
        N, K = w.shape
        T = x.shape[0]
        if w.qtype not in FLOAT_TYPES or x.shape != (T, K) or y.shape != (T, N):
            raise ValueError(f"{w.name}: {w.qtype.name} [{N}, {K}] of {tuple(x.shape)} into {tuple(y.shape)}")
        kernel = self.device.kernel(Module("float_product.cu", (("TYPE", w.qtype.name),)), "float_product")
        kernel((-(-N // 32), -(-T // 32)), 256, (w.data, x, y, T, N, K))

    def head(
        self, x: Array, rows: Array, norm: Array, eps: float, output: QTensor, logits: Array, softcap: float = 0.0
    ) -> None:
        """Logits [R, V] of rows int32 [R] of x [T, D]: final norm and output matrix [V, D]; softcap as in Products."""
        h = self._headed.rows(rows.shape[0], x.shape[1])
        self._to_halves(x, rows, norm, eps, h, None)
        self.product(output, h, logits)
        if softcap > 0:
            n = logits.shape[0] * logits.shape[1]
            kernel = self.device.kernel(Module("norm.cu"), "softcap_all")
            kernel(-(-n // 256), 256, (logits, np.int64(n), float(softcap)))

    def dense(
        self,
        h: Halves,
        gate: QTensor,
        up: QTensor,
        down: QTensor,
        x: Array,
        activation: Activation,
        add: bool,
        shared: tuple[QTensor, Array] | None,
    ) -> None:
        """x [T, D] += down (act(gate h) * (up h)), or becomes it; `shared` as in SmallDense."""
        (T, D), F = x.shape, gate.shape[0]
        shapes = (gate.shape, up.shape, down.shape)
        if shapes != ((F, D), (F, D), (D, F)) or h.n_columns != D or h.values.shape[0] != T:
            raise ValueError(f"dense_ffn: x {x.shape}, h [{h.values.shape[0]}, {h.n_columns}], matrices {shapes}")
        z = self._dense_z.rows(T, F)
        types = (gate.qtype, up.qtype)
        matrices = 2 if gate.qtype == up.qtype else 1
        tokens, warps = self._gated_tile(types, matrices, z.stride, T)
        module = _module("gate_up.cu", tokens, warps, activation, TYPE=types[0], UP_TYPE=types[1])
        module = Module(module.file, (*module.defines, ("DENSE", "1")))
        sizes = (h.stride, D, F, gate.row_bytes, up.row_bytes)
        self.device.kernel(module, "gate_up_dense")(
            (-(-z.stride // (16 * warps)), -(-T // tokens)),
            32 * warps,
            (
                *(gate.data, up.data, T, h.values, h.scale, *sizes, z.values, z.stride, self._dense_exponents),
                *(gate.scale, up.scale),
            ),
            shared_bytes=max(tile_bytes(t, matrices, tokens, warps) for t in types),
        )
        gating = None
        if shared is not None:
            gating = self._row_gate[:T]
            self.float_product(*shared, gating.reshape(T, 1))
        self._join(z.values, self._dense_exponents, z.scale, T, z.stride, gating)
        self.product(down, z, x, add)

    def _gated_tile(self, types: tuple[QType, ...], matrices: int, n_rows: int, n_tokens: int) -> tuple[int, int]:
        """`_dense_tile` for gate_up.cu, whose blocks have half as many rows of each matrix."""
        return _tile(types, matrices, 16, n_rows, n_tokens, self.device.n_sm, self.device.max_shared_bytes)

    def _join(
        self, z: Array, exponents: Array, scale: Array, n_rows: int, stride: int, gate: Array | None = None
    ) -> None:
        """One exponent for each row of z, in `scale`, times the sigmoid of `gate` [n_rows]."""
        join = self.device.kernel(Module("grouped.cu"), "join_exponents")
        join(-(-n_rows // 8), 256, (z, exponents, scale, n_rows, stride, gate))

    def experts(
        self, h: Halves, experts: Array, weights: Array, bank: Experts, source: Array, x: Array, add: bool = True,
        short: Array | None = None,
    ) -> None:  # fmt: skip
        """x [T, D] += the weighted sum of each row's experts, folded in rank order; or becomes it.

        h [T, D]; experts int32, weights float32 [T, A]. source: uint64 [E, 3], addresses of each used expert's gate,
        up and down in memory of the device. short: uint8 [T], rows that have 1 there are left as they are.
        """
        T, A = experts.shape
        E, D, F = source.shape[0], bank.n_embd, bank.n_ff
        if h.n_columns != D or h.values.shape[0] != T or x.shape != (T, D) or self._n_ff_exp < F:
            raise ValueError(f"experts [{F}, {D}] of [{h.values.shape[0]}, {h.n_columns}] into {tuple(x.shape)}")
        tokens = self._expert_tokens(T * A / E, bank)
        self.group(experts, E, tokens, short, 0)
        self._gate_up(h, A, bank, source, tokens)
        self._down(weights, bank, source, tokens, x, add, short)

    def _expert_tokens(self, tokens_per_expert: float, bank: Experts) -> int:
        """Tokens of a tile: a tile half full takes about half the time, a second one dequantizes the weights again."""
        types = (bank.gate_type, bank.up_type, bank.down_type)
        worth = tuple(tokens for tokens in TILE_TOKENS if tokens_per_expert >= (90 if tokens > 64 else 20))
        return _tokens(types, worth, self.device.max_shared_bytes)

    def group(self, experts: Array, n_experts: int, tokens: int, mask: Array | None = None, kind: int = 1) -> Groups:
        """Sort the pairs (token, rank) by expert and cut them in tiles of so many (scratch).

        mask: uint8 [T]; only pairs of tokens that have `kind` there.
        """
        kernel = self.device.kernel(Module("grouped.cu"), "group_tokens")
        T, A = experts.shape
        at = (self._pairs, self._tiles, self._n_tiles)
        kernel(1, 1024, (experts, T * A, n_experts, tokens, *at, mask, kind, A), shared_bytes=128 * n_experts)
        return Groups(*at)

    @property
    def lent(self) -> tuple[Array, Array]:
        """Memory of what comes between the products of experts, z and y, for who computes some between two calls."""
        return self._z, self._y

    def _gate_up(self, h: Halves, n_ranks: int, bank: Experts, source: Array, tokens: int) -> None:
        """z of every pair, in halves with a scale a row."""
        n_pairs, stride = h.values.shape[0] * n_ranks, _padded(bank.n_ff)
        types = (bank.gate_type, bank.up_type)
        matrices = 2 if bank.gate_type == bank.up_type else 1
        warps = _warps(types, matrices, tokens, self.device.max_shared_bytes)
        at = (source, self._tiles, self._n_tiles, self._pairs, n_ranks)
        sizes = (h.stride, bank.n_embd, bank.n_ff, *(row_bytes(t, bank.n_embd, "an expert") for t in types))
        module = _module("gate_up.cu", tokens, warps, bank.activation, TYPE=types[0], UP_TYPE=types[1])
        self.device.kernel(module, "gate_up")(
            (-(-stride // (16 * warps)), n_pairs // tokens + source.shape[0]),
            32 * warps,
            (*at, h.values, h.scale, *sizes, self._z, stride, self._z_exponents, bank.gate_scale),
            shared_bytes=max(tile_bytes(t, matrices, tokens, warps) for t in types),
        )
        self._join(self._z, self._z_exponents, self._z_scale, n_pairs, stride)

    def _down(
        self, weights: Array, bank: Experts, source: Array, tokens: int, x: Array, add: bool = True,
        short: Array | None = None,
    ) -> None:  # fmt: skip
        """Add down of every z to x, as many columns at a time as `_y` can hold."""
        (T, A), D, F = weights.shape, bank.n_embd, bank.n_ff
        warps = _warps((bank.down_type,), 2, tokens, self.device.max_shared_bytes)
        module = _module("down.cu", tokens, warps, TYPE=bank.down_type)
        kernel, fold = self.device.kernel(module, "down"), self.device.kernel(Module("grouped.cu"), "fold_ranks")
        at = (source, self._tiles, self._n_tiles, self._pairs, self._z, self._z_scale)
        sizes = (_padded(F), F, row_bytes(bank.down_type, F, "an expert"))
        y = (self._y, self._y_exponents)
        at_once = self._y.shape[0] // (T * A) // FOLD_COLUMNS * FOLD_COLUMNS
        for first in range(0, D, at_once):
            columns = min(at_once, D - first)
            kernel(
                (-(-columns // (32 * warps)), T * A // tokens + source.shape[0]),
                32 * warps,
                (*at, *sizes, *y, first, columns),
                shared_bytes=tile_bytes(bank.down_type, 2, tokens, warps),
            )
            fold((-(-columns // 512), T), 128, (*y, weights, x, A, D, first, columns, int(add), short))


# Every launch asks how it is to be cut, and there are few answers: Python takes longer for one than small kernels run.


@lru_cache(4096)
def _tile(
    types: tuple[QType, ...], matrices: int, rows: int, n_rows: int, n_tokens: int, n_sm: int, most_bytes: int
) -> tuple[int, int]:
    """(tokens, warps) of a block with so many rows a warp: the largest that leaves enough blocks for n_sm."""

    def filled(tokens: int, warps: int) -> bool:
        return n_tokens > tokens // 2 and -(-n_rows // (rows * warps)) * -(-n_tokens // tokens) >= FILLED * n_sm

    tokens = _tokens(types, tuple(n for n in TILE_TOKENS if filled(n, 4)), most_bytes)
    return tokens, _warps(types, matrices, tokens, most_bytes) if filled(tokens, 8) else 4


@cache
def _tokens(types: tuple[QType, ...], worth: tuple[int, ...], most_bytes: int) -> int:
    """The largest tile that fits into shared memory and is worth it, else the smallest."""
    fitting = [n for n in TILE_TOKENS if all(tile_bytes(t, 2, n, 4) <= most_bytes for t in types)]
    return next((n for n in fitting if n in worth), min(TILE_TOKENS))


@cache
def _warps(types: tuple[QType, ...], matrices: int, tokens: int, most_bytes: int) -> int:
    """8 warps a block for the largest tiles, where their shared memory allows, else 4."""
    fits = all(tile_bytes(t, matrices, tokens, 8) <= most_bytes for t in types)
    return 8 if tokens == max(TILE_TOKENS) and fits else 4


@cache
def _module(file: str, tokens: int, warps: int, activation: Activation = "silu", **types: QType) -> Module:
    sizes = (("TOKENS", str(tokens)), ("WARPS", str(warps)), *((("GELU", "1"),) if activation == "gelu" else ()))
    return Module(file, (*((name, qtype.name) for name, qtype in types.items()), *sizes))
