"""The expert FFN of several tokens on tensor cores (tiled.cu): how its launches are cut.

Bits as docs/arithmetic.md; twin `expert_ffn` of engine/ops/reference.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as QType

from engine.formats import block_types
from engine.formats.block_types import FLOAT_TYPES
from engine.formats.grids import GRIDS
from engine.formats.quants import row_bytes
from engine.ops import Experts
from engine.ops.cuda.device import Array, Device, Module
from engine.ops.cuda.products import Quantized
from engine.ops.cuda.wide import FEW_TOKENS, GROUP, RESERVED, RUN_COLUMNS, TILE_ROWS, run_stage_bytes

WARP, WARPS = 32, 8  # lanes, and warps of a block
Z_ROWS = 32  # of gate and up that an item has
ITEM_ROWS = WARPS // 2 * TILE_ROWS  # of down
MAX_STAGES = 4
MOST_BLOCKS = 2  # of a multiprocessor, as registers allow
MOST_RECORDS = 512  # of an active table
UNPACKED_BYTES = TILE_ROWS * RUN_COLUMNS  # where the weights of a run are put that a table has
MEET_BYTES = 4096  # where the sums of two warps meet, for each token of a tile


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
    """The most blocks at a time, then the most runs in flight; None: of types or columns that the kernel does not take.

    types: of gate and up, or of down, of rows of so many columns. few: most experts have at most FEW_TOKENS pairs.
    """
    if any(t in FLOAT_TYPES for t in types) or columns % 32:
        return None
    tokens, is_down = FEW_TOKENS if few else GROUP, len(types) == 1
    records = [block_types.record(t) for t in types]
    halves = any(r.kind == "HALVES" for r in records)
    scales = not all(r.kind == "HALVES" and t != QType.Q2_K for r, t in zip(records, types, strict=True))
    stride = (columns + 95) // 128 * 128 + 48
    of_block = tokens * (stride + MEET_BYTES) + columns // 32 * tokens * 8 * (1 + halves)
    constants = TILE_ROWS * (10 * 8 * scales + 9 * 16 * halves)
    of_warp = constants + (UNPACKED_BYTES if any(t in GRIDS for t in types) else 0)
    stage = max(run_stage_bytes(t, row_bytes(t, columns, "an expert")) for t in types)
    static = 4 * (MOST_RECORDS + 1 + 2 * tokens + 2 * tokens * (Z_ROWS + 1) * (not is_down))
    most = min(MAX_STAGES, max(2, -(-columns // RUN_COLUMNS)))
    for per_sm in range(MOST_BLOCKS, 0, -1):
        for stages in range(most, 1, -1):
            used = of_block + WARPS * (of_warp + stages * stage)
            if per_sm * (used + static + RESERVED) <= device.max_shared_bytes + RESERVED:
                return TiledShape(few, stages, per_sm, used)
    return None


@dataclass(frozen=True, slots=True)
class Table:
    """Experts and the pairs t * A + a that use them, on the device.

    entries: the active table (`Routing`), or with `source` tiles int32 [n, 4] of grouped.cu, of `TiledShape.tokens` pairs
    at most; n: int32 [1], how many there are, at most `most`. pairs: int32, those of an entry in a row. source: uint64
    [E, 3], where each expert's matrices are; of an expert whose are 0 nothing is computed.
    """

    entries: Array
    n: Array
    pairs: Array
    most: int
    source: Array | None = None


@dataclass(frozen=True, slots=True)
class Beside:
    """An expert more, that all tokens use. gating: its shared gate, h as float32, and where the sigmoids go; or Nones."""

    gate: Array
    up: Array
    n_tokens: int
    gating: Sequence[Array | None]


class TiledExperts:
    """Both halves of the FFN of a table's experts; types and shapes are those of a bank that `tiled_shape` takes."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def gate_up(
        self, shape: TiledShape, bank: Experts, n_used: int, table: Table, h: Quantized, z: Quantized | Array,
        beside: Beside | None = None, copiers: int = 0, more: tuple[tuple[str, str], ...] = (),
    ) -> None:  # fmt: skip
        """z [T * A, F] of each pair of h [T, D], then of each token of `beside`: in 8 bits, or float32.

        copiers: blocks that copy down parts which enter slots. more: macros.
        """
        numbers = {"DOWN_FLOAT": int(not isinstance(z, Quantized)), "COLS": bank.n_embd, "TILES": int(table.source is not None)}
        defines = (("GATE", bank.gate_type.name), ("UP", bank.up_type.name), *_numbers(numbers), *shape.defines(), *more)
        if bank.activation == "gelu":
            defines = (*defines, ("GELU", "1"))
        if bank.gate_scale is not None:
            defines = (*defines, ("WEIGHTED", "1"))
        n_entries, shared_bytes = table.most, shape.shared_bytes
        args: list[object] = [table.entries, table.n, table.source, table.pairs, n_used, bank.n_ff, h.q, h.d, h.sums]
        args += [None, z.q, z.d, z.sums] if isinstance(z, Quantized) else [z, None, None, None]
        if beside is None:
            args += [None, None, 0, None, None, None]
        else:
            n_entries += -(-beside.n_tokens // shape.tokens)
            args += [beside.gate, beside.up, beside.n_tokens, *beside.gating]
            if copiers:
                shared_bytes = max(shared_bytes, 8 * bank.n_embd)
        args += [copiers, np.int64(bank.part_bytes[2]), bank.gate_scale]
        grid = copiers + min(n_entries * -(-bank.n_ff // Z_ROWS), shape.per_sm * self.device.n_sm)
        kernel = self.device.kernel(Module("tiled.cu", defines), "gate_up_tiled")
        kernel(grid, WARPS * WARP, args, shared_bytes, overlap=table.source is None)

    def down(
        self, shape: TiledShape, bank: Experts, table: Table, z: Quantized, y: Array, first: int, columns: int
    ) -> None:
        """y float32 [T * A, columns]: of each pair rows first .. first + columns of down z."""
        numbers = {"COLS": bank.n_ff, "TILES": int(table.source is not None)}
        module = Module("tiled.cu", (("DOWN", bank.down_type.name), *_numbers(numbers), *shape.defines()))
        args = [table.entries, table.n, table.source, table.pairs, z.q, z.d, z.sums, y, first, columns]
        grid = min(table.most * -(-columns // ITEM_ROWS), shape.per_sm * self.device.n_sm)
        self.device.kernel(module, "down_tiled")(
            grid, WARPS * WARP, args, shape.shared_bytes, overlap=table.source is None
        )


def _numbers(numbers: dict[str, int]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(n)) for name, n in numbers.items())
