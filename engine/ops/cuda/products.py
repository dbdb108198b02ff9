"""Small-batch matrix products and what feeds them: norms, quantized activations, the router, the head.

Bits as docs/arithmetic.md; twins in engine/ops/arithmetic.py; kernels product.cu, wide.cu, norm.cu, router.cu. All
works for any number of rows within the limits, but past 32 the tensor-core products of gemm.py are faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as QType

from engine.formats import block_types
from engine.formats.block_types import FLOAT_TYPES
from engine.formats.grids import GRIDS
from engine.formats.quants import QTensor
from engine.ops import SMALL_TOKENS, Limits
from engine.ops.cuda.device import Argument, Array, Device, Module
from engine.ops.cuda.views import Views
from engine.ops.cuda.wide import PARTS, fewest_tokens, wide_shape

WARP = 32
WARPS = 8  # of a block
STAGE_SLACK = 32  # bytes that a warp's staged rows take besides their own (rows.cuh)
STATIC_SHARED = 1024  # bytes: a block's small arrays, or what the device keeps for itself
BLOCKS_PER_SM = 3  # that share the rows of a product: at most 24 warps to hide each other's latencies
MAX_STAGES = 6
MATRICES = 4  # of a launch, at most
SHARED_INPUT = 36864  # elements: so many quantized activations a block keeps in shared memory


@dataclass(frozen=True, slots=True)
class Quantized:
    """Rows of activations in 8 bits: q int8 [T, K], d float32 [T, K / 32], sums int32 [T, K / 32] of each block's q."""

    q: Array
    d: Array
    sums: Array


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of a product: rows of a unit, units in flight a warp, warps a block, blocks; shared memory of a unit."""

    rows: int
    stages: int
    warps: int
    blocks: int
    stage_bytes: int


class QuantizedScratch:
    """Memory for one `Quantized` of up to `n_rows` rows and `width` columns."""

    def __init__(self, device: Device, n_rows: int, width: int) -> None:
        self.n_rows, self.width = n_rows, width
        n_blocks = n_rows * -(-width // 32)
        self._q = Views(device.empty((n_blocks * 32,), np.int8))
        self._d = Views(device.empty((n_blocks,), np.float32))
        self._sums = Views(device.empty((n_blocks,), np.int32))

    def rows(self, n_rows: int, width: int) -> Quantized:
        """The memory as [n_rows, width]."""
        if n_rows > self.n_rows or width > self.width or width % 32:
            raise ValueError(f"[{n_rows}, {width}] activations in scratch for [{self.n_rows}, {self.width}]")
        blocks = n_rows, width // 32
        return Quantized(self._q((n_rows, width)), self._d(blocks), self._sums(blocks))


def stage_bytes(rows: int, row_bytes: int) -> int:
    """Shared memory for `rows` staged rows, a multiple of 16."""
    return -(-rows * row_bytes // 16) * 16 + STAGE_SLACK


def grid_bytes(*types: QType) -> int:
    """Shared memory of a block for the grids of types, where it multiplies one token (entries of grids.cuh)."""
    return sum(4 * len(GRIDS[t]) for t in set(types) & GRIDS.keys())


def held_columns(qtype: QType) -> int:
    """Columns of a row of activations that a warp can hold in registers for matrices of a type (n_held of rows.cuh)."""
    return 4096 if block_types.record(qtype).kind in ("PAIRS", "FOURS") else 2048


def _target_bytes(rows: int) -> int:
    """What a stage of a product takes besides its rows (TARGET_BYTES of product.cu)."""
    return -(-(8 * rows + 8) // 16) * 16


def shared_input_bytes(width: int, is_float: bool, tokens: int = 1) -> int:
    """Shared memory for rows of activations (shared_input_bytes of rows.cuh)."""
    return -(-tokens * (4 * width if is_float else width + width // 4) // 16) * 16


def _router_tokens(T: int) -> int:
    """Tokens that share a block's rows of a router; 0: each warp makes the norm for itself."""
    return 0 if T <= 4 else 1 if T <= 8 else 2


def _scales(ws: tuple[QTensor, ...]) -> list[float]:
    return [w.scale for w in ws] + [1.0] * (MATRICES - len(ws))


def _defines(
    ws: tuple[QTensor, ...], numbers: dict[str, int], row_scale: Array | None, softcap: float
) -> tuple[tuple[str, str], ...]:
    """Macros of a product's kernel: types, of three matrices at least, numbers, and what is done to the results."""
    types = [block_types.record(w.qtype, w.name).name for w in ws]
    types += types[:1] * (max(len(ws), 3) - len(ws))
    defines = [(f"TYPE{i}", name) for i, name in enumerate(types)] + [(name, str(n)) for name, n in numbers.items()]
    defines += [("WEIGHTED", "1")] * (_scales(ws) != [1.0] * MATRICES)
    defines += [("SCALED", "1")] * (row_scale is not None) + [("CAPPED", "1")] * (softcap > 0)
    return tuple(defines)


def _matrices(ws: tuple[QTensor, ...], ys: tuple[Array, ...]) -> list[object]:
    """A product's first arguments: three matrices at least, with their rows and results."""
    args: list[object] = []
    for i in range(max(len(ws), 3)):
        args += [ws[i].data, ws[i].shape[0], ys[i]] if i < len(ws) else [None, 0, None]
    return args


class Products:
    """Products with small batches of activations.

    Results called scratch below stay valid until the same method is called again: `quantize` has its own memory,
    `norm_quantize` another, `router` and `norm_routed` a third, `head` a fourth, `add_norm` two, so all can be alive at
    once.
    """

    def __init__(self, device: Device, limits: Limits) -> None:
        self.device = device
        self.limits = limits
        width = max(limits.n_embd, limits.n_head_dim, limits.n_ff)
        self._quantized = QuantizedScratch(device, SMALL_TOKENS, width)
        self._normed = QuantizedScratch(device, SMALL_TOKENS, limits.n_embd)
        self._routed = QuantizedScratch(device, SMALL_TOKENS, limits.n_embd)
        self._added = [QuantizedScratch(device, SMALL_TOKENS, limits.n_embd) for _ in range(2)]
        self._headed = QuantizedScratch(device, limits.max_rows, limits.n_embd)
        self._head_h = device.empty((limits.max_rows * limits.n_embd,), np.float32)

    def norm(self, x: Array, weight: Array, eps: float, h: Array) -> None:
        """h [T, D] = RMS norm of x [T, D] times weight [D]; any T."""
        self._norm(x, None, weight, eps, h, None)

    def quantize(self, x: Array, to: Quantized | None = None) -> Quantized:
        """x float32 [T, K] in 8 bits: scratch, for up to 32 rows, unless it says where to."""
        T, K = x.shape
        to = self._quantized.rows(T, K) if to is None else to
        grid = -(-T * K // (128 * WARPS))
        kernel = self.device.kernel(Module("norm.cu"), "quantize")
        kernel(grid, WARPS * WARP, (x, T * K, to.q, to.d, to.sums), overlap=True)
        return to

    def normed(self, T: int, D: int) -> Quantized:
        """The scratch of `norm_quantize` for T rows."""
        return self._normed.rows(T, D)

    def norm_quantize(self, x: Array, weight: Array, eps: float, h: Array | None = None) -> Quantized:
        """The RMS norm of x [T, D] in 8 bits (scratch), and as float32 in `h` where that is given."""
        to = self.normed(*x.shape)
        self._norm(x, None, weight, eps, h, to)
        return to

    def norm_routed(self, x: Array, weight: Array, eps: float, h: Array) -> Quantized | None:
        """h [T, D] = the RMS norm of x [T, D], T at most 32; and in 8 bits (scratch), where D is a multiple of 32."""
        to = self._routed.rows(*x.shape) if x.shape[1] % 32 == 0 else None
        self._norm(x, None, weight, eps, h, to)
        return to

    def add_norm(
        self, y: Array, weight: Array, eps: float, x: Array, scale: float, then: Sequence[tuple[Array, Array]] = ()
    ) -> list[Quantized | None]:
        """x [T, D] = scale * (x + the RMS norm of y [T, D] times weight [D]); any T.

        then: up to two weights and arrays [T, D] that become norms of x, T at most 32. Returns them in 8 bits
        (scratch), where D is a multiple of 32.
        """
        T, D = y.shape
        if weight.shape != (D,) or x.shape != (T, D) or len(then) > len(self._added):
            raise ValueError(f"a norm of shape {weight.shape} of {y.shape} added to {x.shape}, then {len(then)} norms")
        made = [to.rows(T, D) if D % 32 == 0 else None for to, _ in zip(self._added, then, strict=False)]
        args: list[object] = [y, weight, float(eps), D, x, float(scale)]
        for (norm, out), to in zip(then, made, strict=True):
            args += [norm, out, *((None,) * 3 if to is None else (to.q, to.d, to.sums))]
        args += [None] * (16 - len(args))
        kernel = self.device.kernel(Module("norm.cu"), "add_norm")
        kernel(T, 2 * WARPS * WARP, args, 8 * (-(-D // 4) * 4), overlap=T <= SMALL_TOKENS)
        return made

    def add_norms(
        self, a: Array, a_norm: Array, b: Array, b_norm: Array, norm: Array, eps: float, x: Array, scale: float
    ) -> bool:
        """x [T, D] = scale * (x + rms(rms(a) * a_norm + rms(b) * b_norm) * norm); False where rows are too long."""
        T, D = a.shape
        if {w.shape for w in (a_norm, b_norm, norm)} != {(D,)} or {v.shape for v in (b, x)} != {(T, D)}:
            raise ValueError(f"norms of {a.shape} and {b.shape} added to {x.shape}")
        n_bytes = 20 * (-(-D // 4) * 4)
        if n_bytes + STATIC_SHARED > self.device.max_shared_bytes:
            return False
        kernel = self.device.kernel(Module("norm.cu"), "add_norms")
        args = (a, a_norm, b, b_norm, norm, float(eps), D, x, float(scale))
        kernel(T, 2 * WARPS * WARP, args, n_bytes, overlap=T <= SMALL_TOKENS)
        return True

    def product(
        self, w: QTensor, x: Quantized | Array, y: Array, add: bool = False, row_scale: Array | None = None
    ) -> None:
        """y float32 [T, N] = w [N, K] of x, or y += it, by one plain addition.

        x: `Quantized`, or float32 [T, K], which is quantized first (scratch of `quantize`) unless w is of a float type.
        row_scale: float32 [T], multiplies each row of the product.
        """
        self._product((w,), x, (y,), add, row_scale=row_scale)

    def several(self, ws: tuple[QTensor, ...], x: Quantized | Array, ys: tuple[Array, ...]) -> None:
        """Up to four products of the same x, in one launch unless some are of float types and some are not."""
        floats = {w.qtype in FLOAT_TYPES for w in ws}
        if len(floats) == 1:
            self._product(ws, x, ys, False)
        else:
            for w, y in zip(ws, ys, strict=True):
                self._product((w,), x, (y,), False)

    def norm_several(
        self, x: Array, weight: Array, eps: float, ws: tuple[QTensor, ...], ys: tuple[Array, ...], h: Array,
        ready: Quantized | None = None, enters: tuple[Argument, ...] = (),
    ) -> None:  # fmt: skip
        """Products of the RMS norm of x [T, D], made by themselves where T is 1; h [T, D] is scratch for float types.

        ready: the norm, if it was made already, for matrices of block types. enters: who is told that a layer has
        x, where T is 1 (landing.py).
        A launch does matrices that are all of float types or all of block types.
        """
        floats = {w.qtype in FLOAT_TYPES for w in ws}
        values: dict[bool, Quantized | Array] = {True: h, False: x}
        if len(x) == 1:
            values[True] = x
        elif floats == {True}:
            self.norm(x, weight, eps, h)
        elif ready is not None and floats == {False}:
            values[False] = ready
        else:
            values[False] = self.norm_quantize(x, weight, eps, h if True in floats else None)
        for is_float in sorted(floats):
            chosen = [i for i, w in enumerate(ws) if (w.qtype in FLOAT_TYPES) == is_float]
            n = -(-len(chosen) // -(-len(chosen) // MATRICES))  # of a launch
            for some in (chosen[i : i + n] for i in range(0, len(chosen), n)):
                matrices, outputs = tuple(ws[i] for i in some), tuple(ys[i] for i in some)
                norm = (weight, eps) if len(x) == 1 else None
                self._product(matrices, values[is_float], outputs, False, norm, enters=enters)
                enters = ()

    def router(
        self, x: Array, norm: Array, eps: float, gate: QTensor, h: Array, logits: Array, settled: Array | None = None
    ) -> Quantized | None:
        """The normed residual h [T, D] of x [T, D] and the logits [T, E] of gate [E, D], a float type.

        settled: the word of settled.cuh, which becomes 0.

        Returns h in 8 bits (scratch), where T is at most 32 and D a multiple of 32.
        """
        T, D = x.shape
        E = gate.shape[0]
        if gate.qtype not in FLOAT_TYPES:
            raise ValueError(f"{gate.name}: a router of type {gate.qtype.name}, not a float type")
        if T > SMALL_TOKENS:
            self.norm(x, norm, eps, h)
            self.product(gate, h, logits)
            return None
        to = self._routed.rows(T, D) if D % 32 == 0 else None
        defines = (("TYPE", gate.qtype.name), ("COLS", str(D)))
        own = (None,) * 3 if to is None else (to.q, to.d, to.sums)
        args = (x, norm, eps, gate.data, E, h, logits, *own, settled)
        units, row_bytes = E + -(-D // 128), 4 * (-(-D // 4) * 4)
        # Of a few tokens each warp makes the norm for itself sooner than a block's warps share one.
        most = min((self.device.max_shared_bytes - STATIC_SHARED) // row_bytes - 1, _router_tokens(T))
        if most > 0:
            shape = ("WARPS", str(WARPS)), ("TOKENS", str(most))
            kernel = self.device.kernel(Module("router.cu", (*defines, *shape)), "router_several")
            grid = (-(-units // WARPS), -(-T // most))
            kernel(grid, WARPS * WARP, (*args, T), (1 + most) * row_bytes, overlap=True)
        else:
            warps = min(T, 4)  # of one token: what they load of it comes once to a multiprocessor
            grid = (-(-units // warps), T)
            self.device.kernel(Module("router.cu", defines), "router")(grid, warps * WARP, args, overlap=True)
        return to

    def head(
        self, x: Array, rows: Array, norm: Array, eps: float, output: QTensor, logits: Array, softcap: float = 0.0
    ) -> None:
        """logits [R, V] = output [V, D] of the RMS norm of rows `rows` (int32 [R], on the device) of x [T, D].

        softcap > 0: each becomes softcap * tanh(logit / softcap).
        """
        R, D = logits.shape[0], x.shape[1]
        if rows.dtype != np.int32 or rows.shape != (R,):
            raise ValueError(f"rows {rows.dtype} {rows.shape} for {R} rows of logits")
        if output.qtype in FLOAT_TYPES:
            h = self._head_h[: R * D].reshape(R, D)
            self._norm(x, rows, norm, eps, h, None)
            self._product((output,), h, (logits,), False, softcap=softcap)
        else:
            to = self._headed.rows(R, D)
            self._norm(x, rows, norm, eps, None, to)
            self._product((output,), to, (logits,), False, softcap=softcap)

    def _norm(
        self, x: Array, rows: Array | None, weight: Array, eps: float, h: Array | None, to: Quantized | None
    ) -> None:
        D = x.shape[1]
        n_rows = len(x) if rows is None else len(rows)
        if weight.shape != (D,):
            raise ValueError(f"a norm of shape {weight.shape} for rows of {D}")
        q, d, sums = (to.q, to.d, to.sums) if to is not None else (None, None, None)
        kernel = self.device.kernel(Module("norm.cu"), "rms_norm")
        args = (x, rows, weight, eps, D, h, q, d, sums)
        kernel(n_rows, 2 * WARPS * WARP, args, 8 * (-(-D // 4) * 4), overlap=True)

    def _product(
        self,
        ws: tuple[QTensor, ...],
        x: Quantized | Array,
        ys: tuple[Array, ...],
        add: bool,
        norm: tuple[Array, float] | None = None,
        row_scale: Array | None = None,
        softcap: float = 0.0,
        enters: tuple[Argument, ...] = (),
    ) -> None:
        is_float = ws[0].qtype in FLOAT_TYPES
        if not is_float and not isinstance(x, Quantized) and len(x) > 1:
            x = self.quantize(x)
        quantized = isinstance(x, Quantized)
        T, K = (x.q if isinstance(x, Quantized) else x).shape
        for w, y in zip(ws, ys, strict=True):
            if w.shape[1] != K or y.shape != (T, w.shape[0]) or (is_float and quantized):
                raise ValueError(f"{w.name}: {w.qtype.name} {w.shape} of [{T}, {K}] to {y.shape}")

        small = not is_float and fewest_tokens(ws) <= T <= SMALL_TOKENS
        if isinstance(x, Quantized) and small and self._wide(ws, x, ys, add, row_scale, softcap):
            return
        tokens = next(n for n in (1, 2, 4, 8) if n >= min(T, 8))
        fixed = 0
        n_rows = [w.shape[0] for w in ws]
        # Two rows of activations in registers, for matrices whose rows are dealt one at a time.
        kept = tokens == 2 and not is_float and not self._are_many(n_rows) and held_columns(ws[0].qtype) >= K
        shared = tokens >= T and not is_float and not kept and tokens * K <= SHARED_INPUT
        if tokens == 1 or shared:
            fixed = shared_input_bytes(K, is_float, tokens)
        repeated = not is_float and not quantized  # every block quantizes the row: few large ones
        single = tokens == 1 or kept
        besides = fixed + (grid_bytes(*(w.qtype for w in ws)) if single else 0)
        shape = self._shape(n_rows, max(w.row_bytes for w in ws), besides, 1 if kept else tokens, repeated)

        numbers = {"COLS": K, "ROWS": shape.rows, "STAGES": shape.stages, "TOKENS": tokens, "SHARED": int(shared)}
        numbers |= {"WARPS": shape.warps, "KEPT": int(kept)}
        defines = _defines(ws, numbers | ({"ENTERS": 1} if enters else {}), row_scale, softcap)
        kernel = self.device.kernel(Module("product.cu", defines), "product")
        args = _matrices(ws, ys)
        if isinstance(x, Quantized):
            inputs = [None, x.q, x.d, x.sums]
        else:
            inputs = [x, None, None, None]
        weight, eps = norm if norm else (None, 0.0)
        args += [*inputs, weight, eps, T, int(add), row_scale, float(softcap), shape.stage_bytes, *_scales(ws), *enters]
        grid = (shape.blocks, -(-T // WARP))
        shared_bytes = fixed + shape.warps * shape.stages * shape.stage_bytes
        kernel(grid, shape.warps * WARP, args, shared_bytes, overlap=True)

    def _wide(
        self,
        ws: tuple[QTensor, ...],
        x: Quantized,
        ys: tuple[Array, ...],
        add: bool,
        row_scale: Array | None,
        softcap: float,
    ) -> bool:
        """`_product` on tensor cores, for 2 to 32 rows; False where shared memory does not allow it."""
        T, K = x.q.shape
        shape = wide_shape(self.device, ws, T)
        if shape is None:
            return False
        numbers = {"COLS": K, "GROUPS": shape.groups, "QUADS": shape.quads}
        numbers |= {"STAGES": shape.stages, "SHARED": int(shape.shared)}
        numbers |= {"STAGED": shape.staged} if shape.staged else {}
        numbers |= {"FEW": 1} if shape.few else {}
        kernel = self.device.kernel(Module("wide.cu", _defines(ws, numbers, row_scale, softcap)), "wide")
        args = [*_matrices(ws, ys), x.q, x.d, x.sums, T, int(add), row_scale, float(softcap), *_scales(ws)]
        kernel(shape.blocks, shape.quads * PARTS * WARP, args, shape.shared_bytes, overlap=True)
        return True

    def _are_many(self, matrices: list[int]) -> bool:
        return sum(matrices) >= 128 * self.device.n_sm

    def _shape(self, matrices: list[int], row_bytes: int, fixed: int, tokens: int, repeated: bool) -> _Shape:
        """How the rows of some matrices are dealt to warps, which share `fixed` bytes of shared memory a block.

        repeated: each block has much work besides, the same for all.
        """
        n_sm, memory = self.device.n_sm, self.device.max_shared_bytes
        # A row at a time spreads few rows best; more share the fold and what is read of the activations.
        if self._are_many(matrices):
            rows = 4 if tokens >= 4 else 2
        else:
            rows = 1 if tokens == 1 else 2
        units = sum(-(-n // rows) for n in matrices)
        stage = _target_bytes(rows) + stage_bytes(rows, row_bytes)
        if repeated:
            per_sm, warps = 1, 2 * WARPS
        else:
            per_sm, warps = BLOCKS_PER_SM if rows == 1 else BLOCKS_PER_SM - 1, WARPS
        while True:
            blocks = min(per_sm * n_sm, -(-units // warps))
            stages = min(-(-units // (blocks * warps)), MAX_STAGES)
            while stages > 1 and per_sm * (fixed + warps * stages * stage + STATIC_SHARED) > memory:
                stages -= 1
            if per_sm * (fixed + warps * stages * stage + STATIC_SHARED) <= memory:
                return _Shape(rows, stages, warps, blocks, stage)
            if per_sm > 1:
                per_sm -= 1
            elif warps > 1:
                warps //= 2
            else:
                raise ValueError(f"a row of {row_bytes} bytes does not fit into shared memory")
