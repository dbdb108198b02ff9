"""Attention around the paged KV cache: what enters it (rope.cu), small batches of queries (attention.cu, combine.cu).

`input` follows docs/arithmetic.md bit for bit. `decode` sums in another order than the page, split by position, and
rounds probabilities to halves: a row's result depends on its query, its position and the cached values alone, not on
the other rows, the size of the context or where blocks lie; against the page its NMSE is below 1e-7.

With `overlap` these kernels begin before the ones ahead of them have ended and load what those do not write: positions,
slots, the block table, older keys and values. So none of these may be written in the same graph after its last
launch without overlap. Attention to chosen blocks waits first, so behind it the choice may be read as early.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from engine.ground.kv_types import KVKind, KVPair
from engine.ops import KV_BLOCK_TOKENS, SMALL_TOKENS, KVLayer, Limits, Recall
from engine.ops.cuda.device import Array, Device, Module, Stream
from engine.ops.cuda.products import Quantized

MAX_TOKENS = 32  # of a launch of attention_splits, if partial results of so many have room
ROOM_SPLITS = 32  # of each, that have: what four kv heads make; with fewer heads, half as many tokens
TARGET_BLOCKS = 128  # of attention_splits for one long sequence: about the multiprocessors of a large GPU
SPLITS = (16, 64)  # at least, at most: of a sequence, for each kv head
MAX_STAGES = 4  # tiles in flight: enough for the latency of memory
MAX_BLOCKS = 3  # of a multiprocessor, as registers allow where rows and heads are small
MANY = 4  # splits of a multiprocessor; with more of them, more blocks are better than more tiles of each in flight
COMBINE_THREADS = 256
FEW_ROWS = 8  # up to so many, a lane of attention_combine has one element: there are few blocks anyway
INPUT_HEADS = 4  # of a block of attention_input
MAX_HEAD_DIM = 512
PLAIN_HEAD_DIM = 256  # up to which a block of keys and values is one tile; beyond, multiples of LARGE_HEADS
LARGE_HEADS = 128
MAX_GROUP = 16  # query heads of a kv head
MAX_STAGED_HEADS = 128  # MOST_HEADS of stage.cu
AHEAD_BLOCKS = 16  # that bring what is wanted later: 256 KiB under way, twice what the link to the host has in 2 us
GATE_KINDS = {"softplus": "SOFTPLUS", "sigmoid": "SIGMOID"}  # names in cuda/gate.cuh
ONLY_QUERIES = (("K_TYPE", "KV_F16"), ("V_TYPE", "KV_F16"))  # nothing is stored
STATIC_SHARED_BYTES = 6 << 10  # at most, with what a block takes besides


class _Plan(NamedTuple):
    """Of a launch of attention_splits: shared bytes, macros ROWS, STAGES and TILE, and blocks per multiprocessor."""

    shared_bytes: int
    rows: int
    stages: int
    tile: int
    per_sm: int


class Attention:
    """Attention input for any number of tokens, attention for small batches; scratch memory for the latter."""

    def __init__(self, device: Device, limits: Limits) -> None:
        self.device = device
        self.limits = limits
        self.splits = 0  # of a sequence at most; 0: as many as suit a layer's kv heads
        self.max_stages = MAX_STAGES
        self.overlap = True
        # Layers may have fewer kv heads than the limit, and so more splits.
        n_blocks = -(-limits.n_ctx // KV_BLOCK_TOKENS)
        rows = max(min(limits.max_tokens, MAX_TOKENS) * min(ROOM_SPLITS, n_blocks), min(SPLITS[1], n_blocks))
        self._partial_o = device.empty((rows * limits.n_head_dim,), np.float32)
        self._partial_ml = device.empty((rows * limits.n_head * 2,), np.float32)
        self._staging: Stream | None = None  # where blocks are brought ahead, made when there are any
        self._ahead = 0  # whose, by the address of their homes; 0: nobody's

    def input(
        self,
        q_raw: Array,
        k_raw: Array | None,
        v_raw: Array | None,
        q_norm: Array | None,
        k_norm: Array | None,
        eps: float,
        rope: Array,
        positions: Array,
        kv: KVLayer,
        slots: Array,
        q: Array,
        v_norm: Array | None = None,
    ) -> None:
        """Norm and rotate the heads of Q and K; Q goes to `q`, keys and values to the cache. Any T.

        q_raw float32 [T, H * head_dim]; k_raw, v_raw [T, K * head_dim], maybe the same, or None: only Q, and kv and
        slots do not matter; q_norm, k_norm, v_norm [head_dim] or None; rope [n_positions, 2, n_rot / 2]; positions,
        slots int32 [T], a slot of -1 stores nothing; q [T, H, head_dim].
        """
        T, H, head_dim = q.shape
        K = 0 if k_raw is None else kv.k.shape[1]
        if K:
            _check_cache(kv, head_dim)
        for name, raw, n in (("q", q_raw, H), ("k", k_raw, K), ("v", v_raw, K)):
            if raw is not None and raw.shape != (T, n * head_dim):
                raise ValueError(f"{n} heads of {head_dim} for {T} tokens in {name} {raw.shape}")
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f"q of {q.shape}: heads of at most {MAX_HEAD_DIM}")
        if 2 * rope.shape[2] > head_dim:
            raise ValueError(f"{2 * rope.shape[2]} dimensions to rotate, {head_dim} in a head")
        cache = kv.arrays if K else (None,) * 4
        module = Module("rope.cu", (("HEAD_DIM", str(head_dim)), *(kind_macros(kv) if K else ONLY_QUERIES)))
        kernel = self.device.kernel(module, "attention_input")
        kernel(
            (-(-(H + 2 * K) // INPUT_HEADS), T),
            INPUT_HEADS * 32,
            (
                *(q_raw, k_raw, v_raw, q_norm, k_norm, v_norm, float(eps), rope, rope.shape[2], positions),
                *(slots if K else None, H, K, q, *cache),
            ),
            overlap=self.overlap and T <= SMALL_TOKENS,
        )

    def decode(
        self,
        q: Array,
        kv: KVLayer,
        block_table: Array,
        sequence: Array,
        positions: Array,
        scale: float,
        out: Array,
        quantized: Quantized | None = None,
        window: int = 0,
        gate: Array | None = None,
        gate_kind: str = "",
        apart: bool = False,
        as_block: bool = False,
        recall: Recall | None = None,
    ) -> None:
        """Causal attention of small batches over cached blocks.

        q float32 [T, H, head_dim]; block_table int32 [n_sequence, max_blocks]; sequence, positions int32 [T]: row t
        sees positions 0..positions[t] of sequence[t], or the last `window` of them; out [T, H * head_dim], also in 8
        bits where `quantized` of that shape is given. gate float32 [T, H] or [T, H * head_dim]: out is multiplied by
        gate_kind ("softplus", "sigmoid") of it. Any T, best up to 32. Tokens of one sequence should be neighbors: they
        read its cache together, unless they are taken `apart`, which is faster where each is of its own. as_block: what
        this step stores begins before the smallest of `positions`. recall: what `choose` (recall.py) left; rows then
        read the blocks that it lists.
        """
        limits = self.limits
        T, H, head_dim = q.shape
        K, max_blocks = kv.k.shape[1], block_table.shape[1]
        _check_cache(kv, head_dim)
        if H % K or H // K > MAX_GROUP or H * head_dim > limits.n_head_dim or limits.n_head < H:
            raise ValueError(f"attention of {H} heads of {head_dim} over {K} kv heads")
        if -(-limits.n_ctx // KV_BLOCK_TOKENS) < max_blocks:
            raise ValueError(f"a table of {max_blocks} blocks for a context of {limits.n_ctx} tokens")
        most = self.splits or min(max(TARGET_BLOCKS // K, SPLITS[0]), SPLITS[1])
        max_splits = min(most, max_blocks)
        splits: tuple[tuple[str, str], ...] = (("SPLITS", str(most)), *((("LISTED", "1"),) if recall else ()))
        if window:
            max_splits = min(_window_splits(window, most), max_blocks)
            splits = (*splits, ("WINDOW", str(window)))
        if out.shape != (T, H * head_dim) or (quantized is not None and H * head_dim % 32):
            raise ValueError(f"attention of q {q.shape} into {out.shape}")
        gating = gate_macros(gate, gate_kind, (T, H, head_dim))
        each = max_splits if window else most
        at_once = min(self._partial_o.shape[0] // (H * head_dim), self._partial_ml.shape[0] // (H * 2)) // max_splits
        at_once = min(at_once, MAX_TOKENS)
        overlap = self.overlap and (apart or at_once >= T)  # else a launch would read what tokens of another one store
        if recall is not None:
            apart, positions = True, recall.last  # every row has blocks of its own
        for first in range(0, T, at_once):
            rows = slice(first, min(first + at_once, T))
            n = rows.stop - first
            plan = self._plan(1, H // K, head_dim, kv, n * each) if apart else self._plan(n, H // K, head_dim, kv, each)
            workers = max(min(plan.per_sm * self.device.n_sm // K, n * max_splits), 1)
            flags = [("HEAD_DIM", str(head_dim)), *kind_macros(kv)]
            if plan.tile < KV_BLOCK_TOKENS:
                flags.append(("TILE", str(plan.tile)))
            sharing = (("ROWS", str(plan.rows)), ("STAGES", str(plan.stages)))
            module = Module("attention.cu", (*flags, *sharing, *splits, *home_macros(kv)))
            sizes = (n, H, K, max_blocks, max_splits)
            partial = (self._partial_o, self._partial_ml)
            self.device.kernel(module, "attention_splits")(
                (K, workers),
                128 if plan.rows <= 16 else 256,
                (
                    *(q[rows], *kv.arrays, block_table, sequence[rows], positions[rows], *sizes, float(scale)),
                    *(*partial, recall and recall.scores[rows], *home_arguments(self.device, kv)),
                ),
                plan.shared_bytes,
                # It would read ahead of who writes them: a block's own keys, and what has just been staged.
                overlap and not as_block and kv.homes is None,
            )
            more = [None, None, None, None if gate is None else gate[rows], None, None, None, None]
            if recall is not None:
                more[4:] = recall.masses[rows], recall.scores[rows], recall.left[rows], recall.missed[rows]
            if quantized is not None:
                more[:3] = quantized.q[rows], quantized.d[rows], quantized.sums[rows]
            each_has = 4 if n > FEW_ROWS and head_dim % 4 == 0 else 1
            combine = Module("combine.cu", (flags[0], *splits, *gating, ("EACH", str(each_has))))
            self.device.kernel(combine, "attention_combine")(
                (-(-H * head_dim // (32 * each_has)), n),
                COMBINE_THREADS,
                (*partial, positions[rows], H, H // K, max_blocks, max_splits, out[rows], *more),
                overlap=overlap,
            )

    def stage(self, absent: Array, homes: KVLayer, staging: KVLayer, wanted: Array | None = None) -> None:
        """Bring blocks to the staging area: absent int32 [1 + n] says how many, and which of `homes` on the host.

        wanted: as of `reference.stage`. What was brought ahead of these homes is waited for.
        """
        if self._ahead:
            self._wait()
            if self._ahead == self.device.pointer(homes.k) and wanted is None:
                self._ahead = 0
                return
            self._ahead = 0
        self._stage(absent, homes, staging, wanted, 2 * self.device.n_sm)

    def stage_ahead(self, absent: Array, homes: KVLayer, staging: KVLayer) -> None:
        """Begin to bring blocks, when all that is enqueued has read the staging area; beside what is enqueued next."""
        if self._staging is None:
            self._staging = self.device.stream(priority=-1)
        self.device.wait(self._staging, None)
        with self.device.on(self._staging):
            self._stage(absent, homes, staging, None, AHEAD_BLOCKS)
        self._ahead = self.device.pointer(homes.k)

    def abandon(self) -> None:
        """Nobody asks for what was brought ahead: the step ended before."""
        if self._ahead:
            self._wait()
            self._ahead = 0

    def _wait(self) -> None:
        assert self._staging is not None
        self.device.wait(None, self._staging)

    def _stage(self, absent: Array, homes: KVLayer, staging: KVLayer, wanted: Array | None, n_blocks: int) -> None:
        alike = homes.kinds == staging.kinds and homes.k.shape[1:] == staging.k.shape[1:]
        if not alike or len(absent) - 1 > len(staging.k) // KV_BLOCK_TOKENS:
            raise ValueError(f"{len(absent) - 1} blocks of {homes.k.shape} for a staging area {staging.k.shape}")
        of_block = [0 if a is None else a[:KV_BLOCK_TOKENS].nbytes for a in staging.arrays]
        sources = (None if a is None else np.uint64(self.device.pointer(a)) for a in homes.arrays)
        arguments = absent, *sources, *staging.arrays, *map(int, of_block)
        macros: tuple[tuple[str, str], ...] = ()
        if wanted is not None:
            if (K := homes.k.shape[1]) > MAX_STAGED_HEADS or wanted.shape != (K, len(absent)):
                raise ValueError(f"blocks of {K} heads to stage, of {wanted.shape} that are wanted")
            arguments, macros = (*arguments, wanted, wanted.shape[1]), (("N_HEAD", str(K)),)
        self.device.kernel(Module("stage.cu", macros), "stage")(n_blocks, 256, arguments)

    def _plan(self, n_tokens: int, group: int, head_dim: int, kv: KVLayer, splits: int) -> _Plan:
        """How a block of attention_splits works, for n_tokens that may share a tile; splits: of all, at most."""
        # The tile decides how a row's positions are summed, so it follows from the layer alone.
        tile = KV_BLOCK_TOKENS
        if head_dim > PLAIN_HEAD_DIM:
            tile = 32 if group <= 8 else 16
        slot = sum(_tile_bytes(kind, tile, head_dim) for kind in kv.kinds)
        units, n_sm = splits * kv.k.shape[1], self.device.n_sm
        per_sm = min(-(-units // n_sm), 2 if units <= MANY * n_sm else MAX_BLOCKS)
        least = 8 if group <= 8 else 16
        most = next((n for n in (8, 16, 32) if n_tokens * group <= n), 64 if head_dim <= 128 else 32)  # registers
        for rows, n in product((n for n in (64, 32, 16, 8) if least <= n <= most), range(per_sm, 0, -1)):
            if n > (1 if rows > 16 else 2 if rows > 8 or head_dim > 128 else MAX_BLOCKS):
                continue  # registers
            merged = -(-head_dim // 32) * 32 if rows <= 16 and head_dim <= 128 else 32  # dimensions at a time
            besides = 2 * rows * (-(-head_dim // 16) * 16 + 8) * 2 + 4 * rows * (merged + 8) * 4
            memory = self.device.max_shared_bytes // n - STATIC_SHARED_BYTES
            fit = (memory - besides) // slot
            stages = max(min(fit, self.max_stages), 1)
            if stages > 1 or (n > 2 and fit > 0):
                break
        return _Plan(stages * slot + besides, rows, stages, tile, n)


def _window_splits(window: int, most: int) -> int:
    """MOST_SPLITS of cuda/splits.cuh."""
    blocks = (window + KV_BLOCK_TOKENS - 2) // KV_BLOCK_TOKENS + 1
    of_split = max(blocks - 2, 0) // max(most - 1, 1) + 1
    return (blocks + of_split - 2) // of_split + 1


def gate_macros(gate: Array | None, kind: str, shape: tuple[int, int, int]) -> tuple[tuple[str, str], ...]:
    """The macros of cuda/gate.cuh for the gate of a result [T, H, head_dim]; ValueError if it does not fit."""
    if gate is None:
        return ()
    T, H, head_dim = shape
    if kind not in GATE_KINDS or gate.dtype != np.float32 or gate.shape not in ((T, H), (T, H * head_dim)):
        raise ValueError(f"a gate {kind!r} {gate.dtype} {gate.shape} for heads {shape}")
    return (("GATE", GATE_KINDS[kind]), ("GATE_BY_HEAD", str(int(gate.shape == (T, H)))))


def home_macros(kv: KVLayer) -> tuple[tuple[str, str], ...]:
    """The macro of cuda/homes.cuh for a cache some of whose blocks lie elsewhere."""
    return () if kv.homes is None else (("HOMES", "1"),)


def home_arguments(device: Device, kv: KVLayer) -> tuple[object, ...]:
    """HOME_PARAMETERS of cuda/homes.cuh; homes may lie on the device or in page-locked memory."""
    if kv.homes is None:
        return ()
    homes = (None if a is None else np.uint64(device.pointer(a)) for a in kv.homes.arrays)
    return (kv.k.shape[0] // KV_BLOCK_TOKENS, *homes)


def kind_macros(kv: KVLayer) -> tuple[tuple[str, str], ...]:
    """The macros of cuda/kv_types.cuh."""
    return _macros_of(kv.kinds)


@cache
def _macros_of(kinds: KVPair) -> tuple[tuple[str, str], ...]:
    return tuple((f"{of}_TYPE", f"KV_{kind.name.upper()}") for of, kind in zip("KV", kinds, strict=True))


def _tile_bytes(kind: KVKind, tile: int, head_dim: int) -> int:
    """Of a tile of keys or values and its scales: halves, or bytes where there are scales."""
    row_bytes = head_dim * (1 if kind.block else 2)
    return tile * (-(-row_bytes // 64) * 64 + 16 + 4 * -(-kind.n_scales(head_dim) // 2))


def _check_cache(kv: KVLayer, head_dim: int) -> None:
    multiple = LARGE_HEADS if head_dim > PLAIN_HEAD_DIM else 32 if any(kind.block for kind in kv.kinds) else 8
    elements = [kind.n_elements(head_dim) for kind in kv.kinds]
    if [kv.k.shape[2], kv.v.shape[2]] != elements or head_dim % multiple or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"a cache {kv.k.dtype} {kv.k.shape} for heads of {head_dim}")
