"""Products of experts with tiles of a few rows of activations, with the bits of docs/arithmetic.md.

Kernels: tiled.cu, on tensor cores, for activations in 8 bits; plain_tiles.cu for floats, and for rows that the other
has no room for: a warp multiplies a row of a matrix with one row of activations after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from gguf import GGMLQuantizationType as QType

from engine.formats import block_types
from engine.formats.block_types import FLOAT_TYPES
from engine.formats.grids import GRIDS
from engine.formats.quants import row_bytes
from engine.ops import Experts
from engine.ops.cuda.device import Array, Device, Module
from engine.ops.cuda.products import STATIC_SHARED, WARP, Quantized, grid_bytes, stage_bytes
from engine.ops.cuda.wide import FEW_TOKENS, GROUP, RESERVED, RUN_COLUMNS, TILE_ROWS, run_stage_bytes

FEW_PAIRS = 3.0  # of an expert, on average, up to which tiles have room for FEW_TOKENS
WARPS = 8  # of a block
Z_ROWS = 32  # of gate and up whose results one block quantizes
MAX_STAGES = 4
MOST_BLOCKS = 2  # of a multiprocessor, as registers allow
UNPACKED_BYTES = TILE_ROWS * RUN_COLUMNS  # where the weights of a run are put that a table has
MEET_BYTES = 4096  # where sums wait and meet, for each row of a tile

PLAIN_PAIRS = 32  # of a tile of plain_tiles.cu
_PLAIN_WARPS = 4
_RESULTS_BYTES = 2 * PLAIN_PAIRS * 33 * 4  # of gate and up, that a block keeps


@dataclass(frozen=True, slots=True)
class TiledShape:
    """Of a launch: whether four pairs are taken at a time or eight, runs in flight a warp, blocks, shared memory."""

    few: bool
    stages: int
    per_sm: int
    shared_bytes: int

    @property
    def tokens(self) -> int:
        """Pairs at a time."""
        return FEW_TOKENS if self.few else GROUP

    def defines(self) -> tuple[tuple[str, str], ...]:
        """The macros of tiled.cu that say so."""
        return (("FEW", str(int(self.few))), ("STAGES", str(self.stages)), ("PER_SM", str(self.per_sm)))


def tiled_shape(device: Device, types: tuple[QType, ...], columns: int, few: bool) -> TiledShape | None:
    """`_shape` on a device."""
    return _shape(types, columns, few, device.max_shared_bytes)


@cache
def _shape(types: tuple[QType, ...], columns: int, few: bool, most_bytes: int) -> TiledShape | None:
    """The most blocks at a time, then the most runs in flight; None: of types or columns that the kernel does not take.

    types: of gate and up, or of down, of rows of so many columns. few: most experts have at most FEW_TOKENS pairs.
    """
    if any(t in FLOAT_TYPES for t in types) or columns % 32:
        return None
    tokens, at_once = FEW_TOKENS if few else GROUP, 2 if columns <= 3 * RUN_COLUMNS else 1
    records = [block_types.record(t) for t in types]
    halves = any(r.halves for r in records)
    scales = not all(r.halves and t != QType.Q2_K for r, t in zip(records, types, strict=True))
    stride = (columns + 95) // 128 * 128 + 48
    of_block = tokens * (stride + MEET_BYTES) + columns // 32 * tokens * 8 * (1 + halves)
    constants = TILE_ROWS * (10 * 8 * scales + 9 * 16 * halves)
    of_warp = constants + (UNPACKED_BYTES if any(t in GRIDS for t in types) else 0)
    stage = max(run_stage_bytes(t, row_bytes(t, columns, "an expert")) for t in types)
    static = 4 * tokens * (2 + (2 * at_once * (Z_ROWS + 1) if len(types) == 2 else 0))
    most = min(MAX_STAGES, max(2, -(-columns // RUN_COLUMNS)))
    for per_sm in range(MOST_BLOCKS, 0, -1):
        for stages in range(most, 1 if per_sm > 1 else 0, -1):  # one is better than none
            used = of_block + WARPS * (of_warp + stages * stage)
            if per_sm * (used + static + RESERVED) <= most_bytes + RESERVED:
                return TiledShape(few, stages, per_sm, used)
    return None


class TiledExperts:
    """Both halves of an expert FFN over tiles (`gemm.Groups`) of at most `pairs_of` pairs."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def pairs_of(self, bank: Experts, each: float) -> int:
        """How many pairs tiles have at most, for experts that have `each` on average."""
        found = (self._shapes(bank, few) for few in ((True,) if each <= FEW_PAIRS else (False, True)))
        return next((shapes[0].tokens for shapes in found if shapes is not None), PLAIN_PAIRS)

    def _shapes(self, bank: Experts, few: bool) -> tuple[TiledShape, TiledShape] | None:
        """How both halves are launched on tensor cores; None: they are not."""
        first = tiled_shape(self.device, (bank.gate_type, bank.up_type), bank.n_embd, few)
        second = tiled_shape(self.device, (bank.down_type,), bank.n_ff, few)
        return None if first is None or second is None else (first, second)

    def gate_up(
        self,
        h: Quantized | Array,
        n_used: int,
        bank: Experts,
        source: Array,
        tiles: Array,
        n_tiles: Array,
        most_tiles: int,
        pairs: Array,
        each: int,
        z: Quantized | Array,
    ) -> None:
        """z[p] = act(gate h[t]) * (up h[t]) for each pair p = t * n_used + rank of the tiles.

        h [T, D] is `Quantized` where gate and up are of block types, else float32; z [T * A, F] where down is of one.
        source: uint64 [E, 3], where the matrices of each expert lie; tiles of one that has 0 there are passed over.
        tiles int32 [*, 4] and n_tiles int32 [1], at most most_tiles, of `each` pairs or less; pairs int32 [T * A].
        """
        gate_float, D = bank.gate_type in FLOAT_TYPES, bank.n_embd
        rows = (h.q if isinstance(h, Quantized) else h).shape[1]
        if gate_float != (bank.up_type in FLOAT_TYPES) or gate_float == isinstance(h, Quantized) or rows != D:
            raise ValueError(
                f"an FFN of types {bank.gate_type.name}, {bank.up_type.name} takes "
                f"{'float32' if gate_float else 'quantized'} rows of {D}, and both types must be alike"
            )
        defines = [("GATE", bank.gate_type.name), ("UP", bank.up_type.name)]
        defines += [("DOWN_FLOAT", str(int(not isinstance(z, Quantized)))), ("COLS", str(D))]
        defines += [("GELU", "1")] * (bank.activation == "gelu") + [("WEIGHTED", "1")] * (bank.gate_scale is not None)
        shapes = self._shapes(bank, each <= FEW_TOKENS) if each <= GROUP else None
        if shapes is not None and isinstance(h, Quantized):
            made = [source, tiles, n_tiles, pairs, n_used, bank.n_ff, h.q, h.d, h.sums, *_rows(z), bank.gate_scale]
            self._on_tensor_cores("gate_up_tiled", shapes[0], defines, made, most_tiles * -(-bank.n_ff // Z_ROWS))
            return
        widest = max(row_bytes(t, D, "gate and up") for t in (bank.gate_type, bank.up_type))
        args = [source, tiles, n_tiles, pairs, n_used, bank.n_ff, *_rows(h), *_rows(z), stage_bytes(1, widest)]
        grid = (-(-bank.n_ff // 32), most_tiles)
        self._launch("gate_up_plain", grid, defines, [*args, bank.gate_scale], widest, bank.gate_type, bank.up_type)

    def down(
        self,
        bank: Experts,
        source: Array,
        tiles: Array,
        n_tiles: Array,
        most_tiles: int,
        pairs: Array,
        each: int,
        z: Quantized | Array,
        y: Array,
        first: int,
        columns: int,
    ) -> None:
        """y[p] = rows first .. first + columns of down z[p], for each pair p of the tiles; y float32 [T * A, columns].

        The rest as of `gate_up`.
        """
        shapes = self._shapes(bank, each <= FEW_TOKENS) if each <= GROUP else None
        if shapes is not None and isinstance(z, Quantized):
            types = [("DOWN", bank.down_type.name), ("COLS", str(bank.n_ff))]
            made = [source, tiles, n_tiles, pairs, z.q, z.d, z.sums, y, first, columns]
            self._on_tensor_cores("down_tiled", shapes[1], types, made, most_tiles * -(-columns // TILE_ROWS))
            return
        row = row_bytes(bank.down_type, bank.n_ff, "down")
        defines = [("DOWN", bank.down_type.name), ("COLS", str(bank.n_ff))]
        args = [source, tiles, n_tiles, pairs, *_rows(z), y, first, columns, stage_bytes(1, row)]
        self._launch("down_plain", (-(-columns // 32), most_tiles), defines, args, row, bank.down_type)

    def _on_tensor_cores(
        self, name: str, shape: TiledShape, types: list[tuple[str, str]], args: list[object], most_blocks: int
    ) -> None:
        """Blocks that stay, no more than there is something for."""
        grid = min(most_blocks, shape.per_sm * self.device.n_sm)
        kernel = self.device.kernel(Module("tiled.cu", (*types, *shape.defines())), name)
        kernel(grid, WARPS * WARP, args, shape.shared_bytes)

    def _launch(
        self, name: str, grid: tuple[int, int], defines: list[tuple[str, str]], args: list[object], row: int,
        *types: QType,
    ) -> None:  # fmt: skip
        """As many warps a block as there is shared memory for the rows of."""
        room = self.device.max_shared_bytes - STATIC_SHARED - _RESULTS_BYTES - grid_bytes(*types)
        warps = next((n for n in (_PLAIN_WARPS, 2, 1) if n * stage_bytes(1, row) <= room), 0)
        if not warps:
            raise ValueError(f"an FFN's rows of {row} bytes do not fit into shared memory")
        module = Module("plain_tiles.cu", (*defines, ("WARPS", str(warps))))
        self.device.kernel(module, name)(grid, warps * WARP, args, warps * stage_bytes(1, row))


def _rows(h: Quantized | Array) -> list[Array | None]:
    """Rows as the kernels take them: x, or q, d, sums."""
    return [None, h.q, h.d, h.sums] if isinstance(h, Quantized) else [h, None, None, None]
