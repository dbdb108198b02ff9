"""FFNs of a step of at most 32 tokens: of experts, over the active table that `route` leaves on the device; dense.

Kernels: experts.cu for one token and for dense FFNs, several.cu for the experts of more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as QType

from engine.formats import block_types
from engine.formats.block_types import FLOAT_TYPES
from engine.formats.quants import QTensor, row_bytes
from engine.ops import SMALL_TOKENS, Activation, Experts, Limits, SharedExpert
from engine.ops.cuda.cpu_experts import CpuExperts
from engine.ops.cuda.device import Array, Device, Module
from engine.ops.cuda.landing import Landing
from engine.ops.cuda.products import (
    STATIC_SHARED,
    WARP,
    WARPS,
    Products,
    Quantized,
    QuantizedScratch,
    grid_bytes,
    held_columns,
    shared_input_bytes,
    stage_bytes,
)
from engine.ops.cuda.routing import Choice
from engine.ops.cuda.several_jobs import SeveralJobs

Norm = tuple[Array, float]  # weight [D] and epsilon
Z_ROWS = 32  # rows of gate and up whose results one block quantizes
SPREAD_ROWS = 8  # the same where a dense FFN has fewer such blocks than there are multiprocessors
COPIERS = 8  # blocks that write the down part of a missed expert to its slot: as fast as others read gate and up
DOWN_ROWS = 8  # of the down matrix: a warp's
# Up to so many tokens a block folds a token's ranks, since hardly two of them have an expert in common; but two tokens'
# fold in a launch of its own is made up for where it makes the norm behind it, too.
FOUND_TOKENS = 2
COMBINE_THREADS = 512  # of combine_norm: four columns each of a row of 2,048
SEVERAL_WARPS = 4  # of a block, where a step has several
SEVERAL_BLOCKS = {"gate_up_several": 3, "down_several": 5}  # of a multiprocessor, as registers allow
SEVERAL_COPIERS = 16  # blocks that together write the down part of each missed expert to its slot
ROW_TOKENS = 4  # up to so many, a warp of down_several has eight rows, then sixteen
MANY_LOOKUPS = {QType.IQ3_XXS, QType.IQ3_S}  # each four weights are looked up, and terms wait for that
MANY_WARPS = 16  # of a block of gate_up then
FEW_TOKENS = 8  # a step of so many keeps fewer results of gate and up in shared memory


def runs_beside(shared: SharedExpert, bank: Experts) -> bool:
    """Whether the first half of a shared expert can be one more expert of the launch that does the chosen ones'."""
    types = (shared.gate.qtype, shared.up.qtype) == (bank.gate_type, bank.up_type)
    shapes = shared.gate.shape == shared.up.shape == (bank.n_ff, bank.n_embd)
    plain = shared.gate.scale == shared.up.scale == shared.down.scale == 1
    return plain and types and shapes and (shared.down.qtype in FLOAT_TYPES) == (bank.down_type in FLOAT_TYPES)


class SmallExperts:
    """x += the weighted experts of each row. Kernels in experts.cu; scratch for 32 tokens is allocated here."""

    def __init__(self, device: Device, limits: Limits, products: Products) -> None:
        self.device = device
        self.limits = limits
        self.products = products
        n_pairs, n_ff = SMALL_TOKENS * limits.n_expert_used, limits.n_ff_exp or limits.n_ff
        n_rows = n_pairs + SMALL_TOKENS  # a shared expert's behind the others'
        self._z = device.empty((n_rows * n_ff,), np.float32)
        self._zq = QuantizedScratch(device, n_rows, n_ff)
        self._row_scale = device.empty((SMALL_TOKENS,), np.float32)
        self._y = device.empty((n_pairs * limits.n_embd,), np.float32)
        self.cpu: CpuExperts | None = None  # of a step of one token
        self.several: SeveralJobs | None = None  # of a step of more
        self.landing: Landing | None = None  # of a step of one token

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
        add: bool = True,
        beside: tuple[SharedExpert, Array] | None = None,
        then: Norm | None = None,
        choice: Choice | None = None,
    ) -> Quantized | None:
        """x float32 [T, D] += the fold over ranks of weights [T, A] times each expert's output; or becomes it.

        h: the normed residual [T, D], `Quantized` where gate and up are of block types, else float32. experts int32
        [T, A]; active uint64 [n, 8], n_active int32 [1], pairs int32 [T * A] as `Routing` describes them. beside: a
        shared expert that `runs_beside` these, whose output is added last, and h as float32. Returns the norm `then` of
        x in 8 bits (scratch of `norm_quantize`), where the last kernel can make it.
        """
        T, D = x.shape
        A = experts.shape[1]
        if T > SMALL_TOKENS or bank.n_embd != D or weights.shape != (T, A):
            raise ValueError(f"experts: x {x.shape}, weights {weights.shape}, a bank of width {bank.n_embd}")
        _check_types(bank.gate_type, bank.up_type, h)
        active_pairs = [active, n_active, pairs]
        n_records = min(active.shape[0], T * A)
        z = self.z_of(bank, T * A + (T if beside else 0))
        settled = self.gate_up(h, bank, A, active_pairs, n_records, z, beside, choice)
        shared = None if beside is None else beside[0]
        return self.down(weights, bank, active_pairs, n_records, z, x, add, shared, then, settled)

    def z_of(self, bank: Experts, n_rows: int) -> Quantized | Array:
        """Scratch for the results of so many rows' first halves."""
        if bank.down_type in FLOAT_TYPES:
            return self._z[: n_rows * bank.n_ff].reshape(n_rows, bank.n_ff)
        return self._zq.rows(n_rows, bank.n_ff)

    def gate_up(
        self,
        h: Quantized | Array,
        bank: Experts,
        n_used: int,
        active: list[Array],
        n_records: int,
        z: Quantized | Array,
        beside: tuple[SharedExpert, Array] | None = None,
        choice: Choice | None = None,
    ) -> Array | None:
        """The first half: z of each pair, then of each token; `active` is the table, its length and the pairs.

        choice: of few tokens, which is made first or meanwhile; then `settled` is returned, which `down` waits for.
        """
        down_float = bank.down_type in FLOAT_TYPES
        T = (h.q if isinstance(h, Quantized) else h).shape[0]
        if T == 1:
            types = bank.gate_type, bank.up_type
            warps = MANY_WARPS if {*types} <= MANY_LOOKUPS else WARPS
            shape = _first_half(self.device, h, *types, down_float, bank.activation, most_warps=warps)
        else:
            shape = _first_half_of_several(self.device, h, bank)
        defines, shared_bytes = shape.defines, shape.shared_bytes
        more: list[object] = [None, None, 0, None, None, None]
        if beside is not None:
            expert, floats = beside
            defines = (*defines, ("BESIDE", "1"))
            more = [expert.gate.data, expert.up.data, len(floats), None, None, None]
            if expert.shared_gate is not None:
                defines = (*defines, ("SHARED", _gate_type(expert.shared_gate, bank.n_embd)))
                shared_bytes = max(shared_bytes, 8 * bank.n_embd)
                more[3:] = [expert.shared_gate.data, floats, self._row_scale]
        args = [*active, n_used, bank.n_ff, *_rows(h), *_rows(z), *more]
        if bank.gate_scale is not None:
            defines = (*defines, ("WEIGHTED", "1"))
        copiers = COPIERS if T == 1 else SEVERAL_COPIERS
        args += [copiers, np.int64(bank.part_bytes[2]), shape.stage_bytes, bank.gate_scale]
        if self.cpu is not None and T == 1:
            defines = (*defines, ("JOBS", "1"))
            args += [self.cpu.words, self.cpu.number_of(bank)]
        if self.several is not None and T > 1:
            defines = (*defines, ("JOBS", "2"))
            args += [*self.several.of_experts, self.several.cpu.number_of(bank)]
        if self.landing is not None and T == 1:
            defines = (*defines, ("GUESSES", "1"))
            args += self.landing.units_of(bank)
        n_blocks, n_records = -(-bank.n_ff // Z_ROWS), n_records + (beside is not None)
        if choice is not None and not choice.fits(shape.warps * WARP):
            choice.launch()
            choice = None
        elif choice is not None:
            defines = (*defines, *(d for d in choice.defines if d not in defines))
            args += [*choice.args, choice.settled]
            shared_bytes = max(shared_bytes, choice.shared_bytes)
        settles = int(choice is not None)
        if T == 1:
            shared_bytes = max(shared_bytes, _crowding(self.device, n_records * n_blocks))
            kernel = self.device.kernel(Module("experts.cu", defines), "gate_up")
            grid: int | tuple[int, int] = (n_records, settles + copiers + n_blocks)
        else:
            kernel = self.device.kernel(Module("several.cu", defines), "gate_up_several")
            grid = settles + copiers + n_records * n_blocks
        kernel(grid, shape.warps * WARP, args, shared_bytes, overlap=True)
        return None if choice is None else choice.settled

    def down(
        self,
        weights: Array,
        bank: Experts,
        active: list[Array],
        n_records: int,
        z: Quantized | Array,
        x: Array,
        add: bool = True,
        beside: SharedExpert | None = None,
        then: Norm | None = None,
        settled: Array | None = None,
    ) -> Quantized | None:
        """The second half: x += the fold over ranks of weights times down z, or becomes it; `beside` is added last.

        settled: where the active table is only made by the kernel ahead.
        """
        (T, A), D, F = weights.shape, bank.n_embd, bank.n_ff
        qtype = bank.down_type
        row = row_bytes(qtype, F, "down")
        scale = None if beside is None or beside.shared_gate is None else self._row_scale[:T]
        widest = row if beside is None else max(row, beside.down.row_bytes)
        stage, n_warps = stage_bytes(4, widest), A + (beside is not None)
        each = _z_bytes(F, qtype in FLOAT_TYPES)
        grids = grid_bytes(qtype, *((beside.down.qtype,) if beside else ()))
        stages = _stages(self.device, n_warps * stage, n_warps * each + grids, DOWN_ROWS // 4)
        makes_norm = then is not None and T > 1 and beside is None and D % 32 == 0
        makes_norm &= self.device.max_shared_bytes >= 8 * D
        if T <= FOUND_TOKENS and stages and not makes_norm and (T == 1 or self.several is None):
            defines = _defines(("DOWN", qtype), COLS=F, STAGES=stages, TOKENS=1, USED=A)
            if T > 1:
                defines = (*defines, ("FOUND", "1"))
            if beside is not None:
                defines = (*defines, ("BESIDE_DOWN", beside.down.qtype.name))
            args = [*active, weights, D, *_rows(z), x, int(add), beside and beside.down.data, scale, stage]
            if self.cpu is not None and T == 1:
                defines = (*defines, ("JOBS", "1"))
                args.append(self.cpu.words)
            if settled is not None:
                defines = (*defines, ("SETTLES", "1"))
                args.append(settled)
            module = Module("experts.cu", defines)
            blocks = -(-D // DOWN_ROWS)
            shared_bytes = max(n_warps * (each + stages * stage), _crowding(self.device, blocks * T))
            self.device.kernel(module, "down_one")((blocks, T), n_warps * WARP, args, shared_bytes, overlap=True)
            return None
        rows, stages, warps = self._whole(row, F, qtype, T)
        stage = stage_bytes(rows, row)
        shared_bytes = warps * (_z_bytes(F, qtype in FLOAT_TYPES) + stages * stage)
        blocks = _at_once(self.device, shared_bytes + grids, "down_several")
        defines = _defines(("DOWN", qtype), COLS=F, ROWS=rows, STAGES=stages, WARPS=warps, PER_SM=blocks)
        args = [*active, D, *_rows(z), self._y, stage]
        if self.several is not None and T > 1:
            defines = (*defines, ("JOBS", "2"))
            args += self.several.of_experts
        if settled is not None:
            defines = (*defines, ("SETTLES", "1"))
            args.append(settled)
        grid = (-(-D // (rows * stages * warps)), n_records)
        kernel = self.device.kernel(Module("several.cu", defines), "down_several")
        kernel(grid, warps * WARP, args, shared_bytes, overlap=True)
        return self._fold(weights, x, add, beside, scale, z, then if makes_norm else None)

    def _fold(
        self, weights: Array, x: Array, add: bool, beside: SharedExpert | None, scale: Array | None,
        z: Quantized | Array, then: Norm | None,
    ) -> Quantized | None:  # fmt: skip
        """x += the fold over ranks of weights times `_y`, or becomes it; and what `down` has besides."""
        (T, A), D = weights.shape, x.shape[1]
        module = Module("several.cu", (("FOLD", "1"),))
        folded = [self._y, weights, A, D, x, int(add)]
        if then is not None:
            to = self.products.normed(T, D)
            self.device.kernel(module, "combine_norm")(
                T, COMBINE_THREADS, [*folded, then[0], float(then[1]), to.q, to.d, to.sums], 8 * D, overlap=True
            )
            return to
        self.device.kernel(module, "combine")((-(-D // 256), T), 256, folded, overlap=True)
        if beside is not None:
            own = Quantized(z.q[T * A :], z.d[T * A :], z.sums[T * A :]) if isinstance(z, Quantized) else z[T * A :]
            self.products.product(beside.down, own, x, True, scale)
        return None

    def _whole(self, row: int, n_ff: int, qtype: QType, T: int) -> tuple[int, int, int]:
        """Rows at a time, how many times, warps a block: of a down matrix whose rows have `row` bytes."""
        # Where experts have several tokens, a warp has more rows for each that it loads.
        for rows, stages in (*(((4, 4),) if T > ROW_TOKENS else ()), (4, 2), (1, 2), (1, 1)):
            for warps in (SEVERAL_WARPS, 2, 1):
                n_bytes = warps * (_z_bytes(n_ff, qtype in FLOAT_TYPES) + stages * stage_bytes(rows, row))
                if _stages(self.device, n_bytes, grid_bytes(qtype), 1):
                    return rows, stages, warps
        raise ValueError(f"an FFN's rows of {row} bytes do not fit into shared memory")


class SmallDense:
    """The dense FFN of a step of at most 32 tokens.

    Of one token gate_up_dense of experts.cu, then a product; of several, gate and up are products, too, with `gated` of
    experts.cu between them.
    """

    def __init__(self, device: Device, limits: Limits, products: Products) -> None:
        self.device = device
        self.products = products
        self._gate_and_up = [device.empty((SMALL_TOKENS * limits.n_ff,), np.float32) for _ in range(2)]
        self._z = device.empty((SMALL_TOKENS * limits.n_ff,), np.float32)
        self._zq = QuantizedScratch(device, SMALL_TOKENS, limits.n_ff)
        self._row_scale = device.empty((SMALL_TOKENS,), np.float32)

    def __call__(
        self,
        h: Quantized | Array,
        gate: QTensor,
        up: QTensor,
        down: QTensor,
        x: Array,
        activation: Activation,
        add: bool,
        shared: tuple[QTensor, Array] | None,
    ) -> None:
        """x float32 [T, D] += the FFN of h [T, D]: `Quantized` where gate and up are of block types, else float32.

        shared: the shared gate [1, D] and h as float32, if there is one.
        """
        (T, D), F = x.shape, gate.shape[0]
        shapes = (gate.shape, up.shape, down.shape)
        if T > SMALL_TOKENS or shapes != ((F, D), (F, D), (D, F)):
            raise ValueError(f"dense_ffn: x {x.shape}, matrices {shapes}")
        _check_types(gate.qtype, up.qtype, h)
        # One token and few rows: small blocks, and the second half quantizes what it reads.
        n_blocks = -(-F // Z_ROWS)
        rows = SPREAD_ROWS if T == 1 and n_blocks < self.device.n_sm else Z_ROWS
        is_float = down.qtype in FLOAT_TYPES or rows < Z_ROWS
        z: Quantized | Array = self._z[: T * F].reshape(T, F) if is_float else self._zq.rows(T, F)
        more: tuple[tuple[str, str], ...] = ()
        gating: list[Array | None] = [None, None, None]
        if shared is not None:
            more = (("SHARED", _gate_type(shared[0], D)),)
            gating = [shared[0].data, shared[1], self._row_scale]
        if T == 1:
            self._of_one(h, gate, up, z, activation, more, gating, rows)
        else:
            self._of_several(h, gate, up, z, activation, more, gating)
        self.products.product(down, z, x, add, self._row_scale[:T] if shared else None)

    def _of_one(
        self, h: Quantized | Array, gate: QTensor, up: QTensor, z: Quantized | Array, activation: Activation,
        more: tuple[tuple[str, str], ...], gating: list[Array | None], rows: int,
    ) -> None:  # fmt: skip
        """The first half in one launch, of blocks of so many rows. gating: of a shared gate, and what to write."""
        F, D = gate.shape
        more = (("DENSE", "1"), *more)
        if (gate.scale, up.scale) != (1, 1):
            more = (*more, ("WEIGHTED", "1"))
        shape = _first_half(self.device, h, gate.qtype, up.qtype, not isinstance(z, Quantized), activation, rows)
        args = [gate.data, up.data, F, *_rows(h), *_rows(z), *gating, shape.stage_bytes, gate.scale, up.scale]
        is_shared = gating[0] is not None
        grid = -(-F // rows) + is_shared
        shared_bytes = max(shape.shared_bytes, 8 * D if is_shared else 0)
        kernel = self.device.kernel(Module("experts.cu", (*shape.defines, *more)), "gate_up_dense")
        kernel(grid, shape.warps * WARP, args, shared_bytes, overlap=True)

    def _of_several(
        self, h: Quantized | Array, gate: QTensor, up: QTensor, z: Quantized | Array, activation: Activation,
        more: tuple[tuple[str, str], ...], gating: list[Array | None],
    ) -> None:  # fmt: skip
        """The first half as products, and what is made of them."""
        (T, D), F = (h.q if isinstance(h, Quantized) else h).shape, gate.shape[0]
        g, u = (array[: T * F].reshape(T, F) for array in self._gate_and_up)
        self.products.several((gate, up), h, (g, u))
        numbers = {"APART": 1, "DOWN_FLOAT": int(not isinstance(z, Quantized)), "WARPS": WARPS, "COLS": D}
        numbers |= {"GELU": 1} if activation == "gelu" else {}
        kernel = self.device.kernel(Module("experts.cu", (*_defines(("GATE", QType.F32), **numbers), *more)), "gated")
        n_blocks = -(-T * F // (4 * WARPS * WARP))
        is_shared = gating[0] is not None
        grid = n_blocks + (T if is_shared else 0)
        kernel(grid, WARPS * WARP, [g, u, T * F, n_blocks, *_rows(z), *gating], 8 * D * is_shared, overlap=True)


@dataclass(frozen=True, slots=True)
class _FirstHalf:
    """How a block of gate_up is compiled and launched; stage_bytes of one of the two matrices."""

    defines: tuple[tuple[str, str], ...]
    warps: int
    stage_bytes: int
    shared_bytes: int


def _first_half(
    device: Device,
    h: Quantized | Array,
    gate: QType,
    up: QType,
    down_float: bool,
    activation: Activation,
    z_rows: int = Z_ROWS,
    most_warps: int = WARPS,
) -> _FirstHalf:
    D = (h.q if isinstance(h, Quantized) else h).shape[1]
    widest = max(row_bytes(t, D, "gate and up") for t in (gate, up))
    held = gate not in FLOAT_TYPES and _held_alike(gate, up) and held_columns(gate) >= D
    fixed, grids = 0 if held else shared_input_bytes(D, gate in FLOAT_TYPES), grid_bytes(gate, up)
    # All rows of a block at once, if two blocks then share a multiprocessor.
    half, most = device.max_shared_bytes // 2 - 2 * STATIC_SHARED - fixed - grids, z_rows // most_warps
    rows = next(n for n in (4, 2, 1) if n == 1 or (n <= most and 2 * most_warps * stage_bytes(n, widest) <= half))
    stage = stage_bytes(rows, widest)
    stages, warps = _stages_and_warps(device, 2 * stage, fixed + grids, z_rows, rows, most_warps)
    numbers = {"DOWN_FLOAT": int(down_float), "COLS": D, "ROWS": rows, "STAGES": stages}
    numbers |= {"WARPS": warps} | ({"GELU": 1} if activation == "gelu" else {})
    numbers |= {} if z_rows == Z_ROWS else {"Z_ROWS": z_rows}
    defines = _defines(("GATE", gate), ("UP", up), **numbers)
    return _FirstHalf(defines, warps, stage, fixed + 2 * warps * stages * stage)


def _first_half_of_several(device: Device, h: Quantized | Array, bank: Experts) -> _FirstHalf:
    """The most rows at a time with which three blocks share a multiprocessor; else whatever fits."""
    T, D = (h.q if isinstance(h, Quantized) else h).shape
    types = bank.gate_type, bank.up_type
    widest = max(row_bytes(t, D, "gate and up") for t in types)
    tokens = FEW_TOKENS if T <= FEW_TOKENS else SMALL_TOKENS
    results = 2 * tokens * (Z_ROWS + 1) * 4 + grid_bytes(*types)
    for least in (3, 2, 1):
        for rows, warps in ((4, SEVERAL_WARPS), (2, SEVERAL_WARPS), (1, SEVERAL_WARPS), (1, 2), (1, 1)):
            stage = stage_bytes(rows, widest)
            blocks = _at_once(device, 2 * warps * stage + results, "gate_up_several")
            if blocks < least or (warps < SEVERAL_WARPS and least > 1):
                continue
            numbers = {"DOWN_FLOAT": int(bank.down_type in FLOAT_TYPES), "COLS": D, "ROWS": rows}
            numbers |= {"WARPS": warps, "TOKENS": tokens, "KEPT": 2, "PER_SM": blocks}
            numbers |= {"GELU": 1} if bank.activation == "gelu" else {}
            defines = _defines(("GATE", types[0]), ("UP", types[1]), **numbers)
            return _FirstHalf(defines, warps, stage, 2 * warps * stage)
    raise ValueError(f"an FFN's rows of {widest} bytes do not fit into shared memory")


def _at_once(device: Device, n_bytes: int, kernel: str) -> int:
    """Blocks with n_bytes of shared memory that a multiprocessor runs at a time."""
    each = n_bytes + STATIC_SHARED
    return min(SEVERAL_BLOCKS[kernel], (device.max_shared_bytes + STATIC_SHARED) // each)


def _check_types(gate: QType, up: QType, h: Quantized | Array) -> None:
    gate_float = gate in FLOAT_TYPES
    if gate_float != (up in FLOAT_TYPES) or gate_float == isinstance(h, Quantized):
        raise ValueError(
            f"an FFN of types {gate.name}, {up.name} takes "
            f"{'float32' if gate_float else 'quantized'} rows, and both types must be alike"
        )


def _held_alike(a: QType, b: QType) -> bool:
    """Whether a warp keeps activations in registers in the same way for rows of both (held_alike of rows.cuh)."""
    kinds = {block_types.record(t).kind for t in (a, b)}
    return len(kinds) == 1 or not kinds & {"PAIRS", "FOURS"}


def _gate_type(gate: QTensor, D: int) -> str:
    if gate.shape != (1, D) or gate.qtype not in FLOAT_TYPES:
        raise ValueError(f"{gate.name}: a shared gate {gate.qtype.name} {gate.shape}")
    return str(gate.qtype.name)


def _rows(h: Quantized | Array) -> list[Array | None]:
    """Rows as the kernels take them, to read or to write: x, or q, d, sums."""
    return [None, h.q, h.d, h.sums] if isinstance(h, Quantized) else [h, None, None, None]


def _z_bytes(n_ff: int, is_float: bool) -> int:
    """Shared memory of a warp of the second half beside its rows: a row of z, and the terms of four rows."""
    return shared_input_bytes(n_ff, is_float) + -(-n_ff // 2 // 16) * 16


def _stages_and_warps(
    device: Device, stage: int, fixed: int, z_rows: int, rows: int, most_warps: int
) -> tuple[int, int]:
    """Stages of `stage` bytes and `rows` rows a warp, and warps a block, beside `fixed` bytes of shared memory."""
    for warps in (most_warps, WARPS, WARPS // 2, WARPS // 4, 1):
        if stages := _stages(device, warps * stage, fixed, -(-z_rows // (most_warps * rows))):
            return stages, warps
    raise ValueError(f"an FFN's rows of {stage} bytes do not fit into shared memory")


def _stages(device: Device, n_bytes: int, fixed: int, most: int) -> int:
    """How many times n_bytes fit, so that two blocks share a multiprocessor if one stage allows it; 0: not once."""
    memory = device.max_shared_bytes - STATIC_SHARED
    half = (memory // 2 - STATIC_SHARED - fixed) // n_bytes
    return min(most, half) if half > 0 else int(fixed + n_bytes <= memory)


def _crowding(device: Device, n_blocks: int) -> int:
    """Bytes of shared memory with which no multiprocessor takes more blocks than if all take as many.

    Blocks that start while another kernel occupies the device go where there is room first, and would meet there.
    """
    fair = -(-n_blocks // device.n_sm)
    return (device.max_shared_bytes + STATIC_SHARED) // (fair + 1) - STATIC_SHARED


def _defines(*types: tuple[str, QType], **numbers: int) -> tuple[tuple[str, str], ...]:
    return (*((name, t.name) for name, t in types), *((name, str(n)) for name, n in numbers.items()))
