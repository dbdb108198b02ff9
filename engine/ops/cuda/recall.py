"""Which blocks of their contexts the rows of a step read, and what follows from it, on a device.

Kernels: summarize.cu, weigh.cu, recall.cu, chosen.cu. Twins: summarize, choose, find_absent of engine/ops/reference.py.

Attention that reads a part (attention.py) goes by arrays of `Recall` that `choose` leaves: `scores`, which by then has
the numbers of the blocks that are read one after the other, int32 [T, K, W], and `last`; what was left out it counts by
`masses` and `left`, which has the masses of all blocks before the tail until then.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine.ops import CHUNK_BLOCKS, KV_BLOCK_TOKENS, SMALL_TOKENS, KVLayer, Recall
from engine.ops.cuda.attention import MAX_GROUP, home_macros, kind_macros
from engine.ops.cuda.device import Array, Device, Module
from engine.ops.sketches import n_kept, sketch_bytes

CHOSEN = Module("chosen.cu")
WARP = 32
THREADS = 512  # WARPS of recall.cu and chosen.cu
SUMMING_THREADS = 256
MAX_HEAD_DIM = 512
BLOCK_SHARED = 1 << 10  # shared memory that the driver takes beside a block's, and has beside max_shared_bytes
SHARED_ALIGN = 128  # of what a block asks for, behind what the kernel has by itself
# Warps of a block of weigh, sketches of each under way, and blocks of a multiprocessor.
WEIGHERS = ((8, 2, 2), (8, 1, 2), (8, 1, 1), (4, 1, 1), (2, 1, 1))
STEP_AT = 3  # of a control block (cuda/step.cuh)


def summarize(device: Device, kv: KVLayer, places: Array, blocks: Array, sketches: Array) -> None:
    """The sketches of full blocks of keys; shapes as in `reference.summarize`."""
    (_, K, _), (n,), head_dim = kv.k.shape, places.shape, kv.head_dim
    if sketches.shape[1:] != (K, sketch_bytes(head_dim)) or head_dim > MAX_HEAD_DIM or blocks.shape != (n,):
        raise ValueError(f"sketches {sketches.shape} of {n} blocks of {K} heads of {head_dim}")
    homes: tuple[object, ...] = ()
    if kv.homes is not None:
        k, scale = (None if a is None else np.uint64(device.pointer(a)) for a in (kv.homes.k, kv.homes.k_scale))
        homes = kv.k.shape[0] // KV_BLOCK_TOKENS, k, k, scale, scale
    threads = ("SUMMING_THREADS", str(SUMMING_THREADS))
    macros = (("HEAD_DIM", str(head_dim)), threads, kind_macros(kv)[0], *home_macros(kv))
    kernel = device.kernel(Module("summarize.cu", macros), "summarize")
    kernel((n, K), SUMMING_THREADS, (kv.k, kv.k_scale, places, blocks, sketches, *homes))


def choose(
    device: Device,
    q: Array,
    sketches: Array,
    blocks: Array,
    sequence: Array,
    positions: Array,
    most: Array,
    leave: Array,
    keep: Array,
    scale: float,
    recall: Recall,
) -> None:
    """Which blocks each row reads, of those that have sketches.

    Shapes as in `reference.choose`, T at most SMALL_TOKENS.
    """
    (T, H, head_dim), (_, K, n_bytes), W = q.shape, sketches.shape, blocks.shape[1]
    if H % K or H // K > MAX_GROUP or T > SMALL_TOKENS or n_bytes != sketch_bytes(head_dim):
        raise ValueError(f"a choice of {T} rows of {H} heads of {head_dim} by sketches {sketches.shape}")
    warps, stages, resident, shared = _weighing(head_dim, H // K, device.max_shared_bytes)
    group, width = ("GROUP", str(H // K)), ("HEAD_DIM", str(head_dim))
    of_weigh = ("WEIGHERS", str(warps)), ("STAGES", str(stages)), ("RESIDENT", str(resident))
    of, shape = (blocks, sequence, positions, most), (H, W)
    n_blocks = min(-(-W // CHUNK_BLOCKS), max(1, resident * device.n_sm // (K * T)))
    device.kernel(Module("weigh.cu", (width, group, *of_weigh)), "weigh")(
        (K, n_blocks, T), WARP * warps, (q, sketches, *of, *shape, float(scale), recall.masses), shared, overlap=True
    )
    launch = partial(device.kernel, Module("recall.cu", (group,)))
    launch("score")(
        (-(-W // THREADS), K, T), THREADS,
        (*of, keep, *shape, recall.masses, recall.left, recall.scores), overlap=True,
    )  # fmt: skip
    launch("choose")(
        (K, T), THREADS,
        (*of[1:], leave, *shape, recall.masses, recall.chosen, recall.left, recall.read, recall.scores, recall.last),
        overlap=True,
    )  # fmt: skip


def _weighing(head_dim: int, group: int, most: int) -> tuple[int, int, int, int]:
    """The first of WEIGHERS for which `most` bytes of shared memory are enough, and what a block asks for."""
    words, planes = -(-n_kept(head_dim) // 16), -(-group // 4)
    stage = -(-(sketch_bytes(head_dim) + 32 * words) // 16) * 16
    counted = 8 * 64 * (-(-words // 4) | 1)  # eight heads of a warp
    for warps, stages, resident in WEIGHERS:
        shared = 16 * head_dim * planes + warps * (counted + stages * stage)
        static = 64 * planes * CHUNK_BLOCKS + 2 * warps * n_kept(head_dim)
        static = -(-static // SHARED_ALIGN) * SHARED_ALIGN
        if resident * (shared + static + BLOCK_SHARED) <= most + BLOCK_SHARED:
            return warps, stages, resident, shared
    raise ValueError(f"{group} heads of {head_dim} for {most} bytes of shared memory")


def find_absent(
    device: Device, kv: KVLayer, block_table: Array, sequence: Array, recall: Recall, absent: Array, wanted: Array
) -> None:
    """Which blocks of the staging area the rows of a choice read; shapes as in `reference.find_absent`."""
    T, K, W = recall.scores.shape
    if kv.k.shape[1] != K or wanted.shape != (K, len(absent)) or len(sequence) != T:
        raise ValueError(f"{T} rows of {K} heads, of {wanted.shape} blocks in the staging area")
    kernel = device.kernel(CHOSEN, "find_absent")
    n_pool = kv.k.shape[0] // KV_BLOCK_TOKENS
    places = block_table, sequence, absent
    kernel(
        K, THREADS,
        (recall.scores, recall.last, *places, T, W, block_table.shape[1], n_pool, wanted, wanted.shape[1]),
        overlap=True,
    )  # fmt: skip


def tally(
    device: Device, n_rows: int, missed: Array, reads: Array, heads: Array, controls: Array, total: Array, read: Array,
    ring: NDArray[np.uint64],
) -> None:  # fmt: skip
    """Add what each row of a step read and left out to what its reply did, unless the reply has ended.

    missed float32 [n_layer, n] and reads int32 [n_layer, m], of which layer i has heads[0, i] and heads[1, i] a row,
    int32 [2, n_layer]; controls int32 [n_rows, any]: they begin with 0 where a reply has ended; total float32 [n_rows,
    2]: the largest share, the sum of steps' means; read uint64 [n_rows]: blocks, of all layers and KV heads. ring
    page-locked uint64 [any, n, 2]: both as they were behind a row's steps, where `entry_of` finds them.
    """
    kernel = device.kernel(CHOSEN, "tally")
    of = missed, *missed.shape, reads, reads.shape[1], heads, controls, controls.shape[1], STEP_AT
    kernel(n_rows, 32, (*of, total, read, np.uint64(device.pointer(ring)), ring.shape[1]), overlap=True)


def entry_of(ring: NDArray[np.uint64], row: int, step: int) -> tuple[int, float, float]:
    """What `tally` had of a row behind step 0, 1 ...: blocks that were read, the largest share, the sum of means."""
    read, left = ring[row, step % ring.shape[1]].tolist()
    largest, total = np.array([left & 0xFFFFFFFF, left >> 32], np.uint32).view(np.float32).tolist()
    return read, largest, total
