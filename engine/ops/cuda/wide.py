"""Products of 2 to 32 rows of activations in 8 bits on tensor cores (wide.cu): how a launch is cut.

Bits as docs/arithmetic.md; twin `product` of engine/ops/arithmetic.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from gguf import GGMLQuantizationType as QType

from engine.formats import block_types
from engine.formats.grids import GRIDS
from engine.formats.quants import QTensor, row_bytes
from engine.ops.cuda.device import Device

TILE_ROWS = 16  # of a matrix, that four warps share
PARTS = 4
FEWEST_TOKENS = 3  # one and two have product.cu
LONG_COLUMNS = 5120  # but two of longer rows have not: product.cu cannot keep their activations in registers
MANY_ROWS = 65536  # of heads, mostly: in a type with halves four tokens of them take product.cu fewer instructions
GROUP = 8  # tokens of a product of the tensor cores
FOLD_BYTES = 16384  # where the four warps' sums meet, of few tokens half of it, unless weights are unpacked there
QUADS_PER_SM = {1: 4, 2: 3, 4: 2}  # by groups of tokens: what registers allow
MAX_STAGES = 4
FEW_TOKENS = 4  # up to which two blocks of columns share a product
STAGED_BYTES = 368  # of a token's activations of a run, with their scales and sums
RUN_COLUMNS = 256
RESERVED = 1024  # bytes that the device keeps of each block's shared memory


@dataclass(frozen=True, slots=True)
class WideShape:
    """Of a launch: groups of tokens, quads of warps a block, runs in flight a warp, blocks, shared memory.

    few: there are so few tokens that two blocks of columns share a product. shared: the activations are in shared
    memory. staged: those of at most so many tokens come to it with each run of the weights, and their scales with them;
    with neither they are read from global memory each time.
    """

    groups: int
    few: bool
    quads: int
    stages: int
    shared: bool
    staged: int
    blocks: int
    shared_bytes: int

    @property
    def in_flight(self) -> int:
        """Runs of weights under way in all blocks: what hides memory's latency, more than activations at hand do."""
        return self.blocks * self.quads * self.stages

    def rounds(self, units: int) -> int:
        """Units of a quad, one after the other."""
        return -(-units // (self.blocks * self.quads))

    def per_sm(self, device: Device) -> int:
        """Quads that share a multiprocessor."""
        return -(-self.blocks // device.n_sm) * self.quads


def fewest_tokens(ws: tuple[QTensor, ...]) -> int:
    """From how many tokens on products of some matrices are faster on tensor cores."""
    rows, columns = sum(w.shape[0] for w in ws), ws[0].shape[1]
    if rows >= MANY_ROWS and columns <= LONG_COLUMNS and _has_halves(ws):
        return FEW_TOKENS + 1
    return FEWEST_TOKENS - (columns > LONG_COLUMNS)


def run_stage_bytes(qtype: QType, row_bytes_of: int) -> int:
    """Shared memory for a run of 256 columns of 16 rows, of so many bytes each (Runs of fragments.cuh)."""
    run = row_bytes(qtype, RUN_COLUMNS, "a run")
    align = gcd(run, row_bytes_of, 16)
    pieces = (run + 63 - align) // 32 * 2
    pitch = 16 * pieces + (96 - 16 * pieces % 64) % 64 if align == 16 else 16 * (pieces | 1)
    return TILE_ROWS * pitch + 16


def stage_bytes(w: QTensor) -> int:
    """The same of a matrix."""
    return run_stage_bytes(w.qtype, w.row_bytes)


def _activation_bytes(tokens: int, columns_of: int, columns: int, halves: bool, shared: bool) -> int:
    """Of a block, for `tokens` rows of activations; columns_of: tokens that products have columns for."""
    stride = (columns + 95) // 128 * 128 + 48
    return tokens * stride * shared + _prepared_bytes(columns_of, columns, halves)


def _prepared_bytes(columns_of: int, columns: int, halves: bool) -> int:
    """Of what terms need of activations (`prepare` of wide.cu)."""
    return columns // 32 * columns_of * 8 * (1 + halves)


def wide_shapes(device: Device, ws: tuple[QTensor, ...], tokens: int) -> dict[str, WideShape]:
    """The ways to launch the products of some matrices of block types: those that shared memory is large enough for.

    "shared": the activations stay in shared memory; "staged": they come to it with each run; "global": neither. Each
    with as many quads as fit, and then with as many stages.
    """
    columns = ws[0].shape[1]
    halves = _has_halves(ws)
    weights = max(map(stage_bytes, ws))
    groups = next(n for n in QUADS_PER_SM if n * GROUP >= tokens)
    few = tokens <= FEW_TOKENS
    columns_of = FEW_TOKENS if few else groups * GROUP
    fold = FOLD_BYTES // (2 if few and not any(w.qtype in GRIDS for w in ws) else 1)
    constants = TILE_ROWS * (10 * 8 + 9 * 16 * halves)
    units = _units(ws)
    most = min(QUADS_PER_SM[groups], -(-units // device.n_sm))
    rounds = -(-columns // (RUN_COLUMNS * PARTS))

    def cut(shared: bool, staged: int) -> WideShape | None:
        # Blocks of the same kernel whatever the number of tokens of a group.
        fixed = 0 if staged else _activation_bytes(columns_of, columns_of, columns, halves, shared)
        of_warp = constants + (_prepared_bytes(columns_of, RUN_COLUMNS, halves) if staged else 0)
        for n_quads in range(most, 0, -1):
            stages_most = min(MAX_STAGES, max(rounds * -(-units // (n_quads * device.n_sm)), 1))
            for stages in range(stages_most, min(2, stages_most) - 1, -1):
                of_quad = fold + PARTS * (of_warp + stages * (weights + staged * STAGED_BYTES))
                for quads in (q for q in range(1, n_quads + 1) if n_quads % q == 0):
                    if n_quads // quads * (fixed + quads * of_quad + RESERVED) > device.max_shared_bytes:
                        continue
                    blocks = min(n_quads // quads * device.n_sm, units)
                    used = quads * of_quad
                    used += 0 if staged else _activation_bytes(tokens, columns_of, columns, halves, shared)
                    return WideShape(groups, few, quads, stages, shared, staged, blocks, used)
        return None

    ways = {"shared": cut(True, 0), "global": cut(False, 0)}
    if columns % RUN_COLUMNS == 0:
        ways["staged"] = cut(False, columns_of)
    return {name: shape for name, shape in ways.items() if shape is not None}


def wide_shape(device: Device, ws: tuple[QTensor, ...], tokens: int) -> WideShape | None:
    """How to launch the products of some matrices of block types; None where shared memory is too small for it."""
    ways, units = wide_shapes(device, ws, tokens), _units(ws)
    most = min(QUADS_PER_SM[next(n for n in QUADS_PER_SM if n * GROUP >= tokens)], -(-units // device.n_sm))
    shared, other, staged = (ways.get(name) for name in ("shared", "global", "staged"))
    found = shared
    if found is None or found.per_sm(device) < min(2, most):
        found = other
        # To stage it takes instructions and shared memory for each unit; it pays where more is in flight by that.
        if found is None or (staged is not None and staged.in_flight > found.in_flight):
            found = staged
    found = found or shared
    if found is not None and found.few and found.rounds(units) > 1 and units <= most * device.n_sm:
        return other if other is not None and other.rounds(units) == 1 else found
    return found


def _has_halves(ws: tuple[QTensor, ...]) -> bool:
    return any(block_types.record(w.qtype).halves for w in ws)


def _units(ws: tuple[QTensor, ...]) -> int:
    """Of 16 rows, of all matrices."""
    return sum(-(-w.shape[0] // TILE_ROWS) for w in ws)
