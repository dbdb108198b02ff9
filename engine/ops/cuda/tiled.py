"""Products of experts with tiles of up to 32 rows of activations, with the bits of docs/arithmetic.md.

Kernels: tiled.cu. A stand-in, correct and slow: a warp multiplies a row of a matrix with one row of activations after
the other.
"""

from __future__ import annotations

from gguf import GGMLQuantizationType as QType

from engine.formats.block_types import FLOAT_TYPES
from engine.formats.quants import row_bytes
from engine.ops import Experts
from engine.ops.cuda.device import Array, Device, Module
from engine.ops.cuda.products import STATIC_SHARED, WARP, Quantized, grid_bytes, stage_bytes

TILE_ROWS = 32  # of activations
_WARPS = 4
_RESULTS_BYTES = 2 * TILE_ROWS * 33 * 4  # of gate and up, that a block keeps


class TiledExperts:
    """Both halves of an expert FFN over tiles (`gemm.Groups`) of at most TILE_ROWS pairs."""

    def __init__(self, device: Device) -> None:
        self.device = device

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
        z: Quantized | Array,
    ) -> None:
        """z[p] = act(gate h[t]) * (up h[t]) for each pair p = t * n_used + rank of the tiles.

        h [T, D] is `Quantized` where gate and up are of block types, else float32; z [T * A, F] where down is of one.
        source: uint64 [E, 3], where the matrices of each expert lie; tiles of one that has 0 there are passed over.
        tiles int32 [*, 4] and n_tiles int32 [1], at most most_tiles; pairs int32 [T * A].
        """
        gate_float, D = bank.gate_type in FLOAT_TYPES, bank.n_embd
        rows = (h.q if isinstance(h, Quantized) else h).shape[1]
        if gate_float != (bank.up_type in FLOAT_TYPES) or gate_float == isinstance(h, Quantized) or rows != D:
            raise ValueError(
                f"an FFN of types {bank.gate_type.name}, {bank.up_type.name} takes "
                f"{'float32' if gate_float else 'quantized'} rows of {D}, and both types must be alike"
            )
        widest = max(row_bytes(t, D, "gate and up") for t in (bank.gate_type, bank.up_type))
        defines = [("GATE", bank.gate_type.name), ("UP", bank.up_type.name)]
        defines += [("DOWN_FLOAT", str(int(not isinstance(z, Quantized)))), ("COLS", str(D))]
        defines += [("GELU", "1")] * (bank.activation == "gelu")
        defines += [("WEIGHTED", "1")] * (bank.gate_scale is not None)
        args = [source, tiles, n_tiles, pairs, n_used, bank.n_ff, *_rows(h), *_rows(z), stage_bytes(1, widest)]
        grid = (-(-bank.n_ff // 32), most_tiles)
        self._launch("tiled_gate_up", grid, defines, [*args, bank.gate_scale], widest, bank.gate_type, bank.up_type)

    def down(
        self,
        bank: Experts,
        source: Array,
        tiles: Array,
        n_tiles: Array,
        most_tiles: int,
        pairs: Array,
        z: Quantized | Array,
        y: Array,
        first: int,
        columns: int,
    ) -> None:
        """y[p] = rows first .. first + columns of down z[p], for each pair p of the tiles; y float32 [T * A, columns].

        The rest as of `gate_up`.
        """
        row = row_bytes(bank.down_type, bank.n_ff, "down")
        defines = [("DOWN", bank.down_type.name), ("COLS", str(bank.n_ff))]
        args = [source, tiles, n_tiles, pairs, *_rows(z), y, first, columns, stage_bytes(1, row)]
        self._launch("tiled_down", (-(-columns // 32), most_tiles), defines, args, row, bank.down_type)

    def _launch(
        self, name: str, grid: tuple[int, int], defines: list[tuple[str, str]], args: list[object], row: int,
        *types: QType,
    ) -> None:  # fmt: skip
        """As many warps a block as there is shared memory for the rows of."""
        room = self.device.max_shared_bytes - STATIC_SHARED - _RESULTS_BYTES - grid_bytes(*types)
        warps = next((n for n in (_WARPS, 2, 1) if n * stage_bytes(1, row) <= room), 0)
        if not warps:
            raise ValueError(f"an FFN's rows of {row} bytes do not fit into shared memory")
        module = Module("tiled.cu", (*defines, ("WARPS", str(warps))))
        self.device.kernel(module, name)(grid, warps * WARP, args, warps * stage_bytes(1, row))


def _rows(h: Quantized | Array) -> list[Array | None]:
    """Rows as the kernels take them: x, or q, d, sums."""
    return [None, h.q, h.d, h.sums] if isinstance(h, Quantized) else [h, None, None, None]
