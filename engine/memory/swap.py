"""Sequences that leave the device whole, to make room, and come back later with the bits that they left with.

Unlike a chunk of a prefix, what a sequence has computed is not given up for want of host memory: to have it again
would cost every step that made it. So its claim on the host tier stands until it is back, and where the budget does not
hold it the sequence stays where it is. Shared blocks are copied, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.ground.errors import CapacityError
from engine.memory.blocks import Sequence
from engine.memory.host import Claim
from engine.memory.kv import KVCache, Snapshot
from engine.ops import KV_BLOCK_TOKENS

PIECE_BLOCKS = 8  # that are copied to one array: as long as a chunk of a GPU's prefixes, whose place it may take


@dataclass(slots=True, eq=False)
class Swapped:
    """`length` positions of a sequence in host memory. pieces: of each group without a window. snapshot: all else.

    exact: as of `Sequence`.
    """

    length: int
    claim: Claim
    pieces: list[list[NDArray[np.uint8]]]
    snapshot: Snapshot | None = None
    gone: bool = False  # back, or dropped
    exact: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        held = sum(piece.nbytes for pieces in self.pieces for piece in pieces)
        return held + (0 if self.snapshot is None else self.snapshot.nbytes)


def swap_out(kv: KVCache, sequence: Sequence) -> Swapped | None:
    """Move a sequence to host memory; it is released. None, and it is as it was, where the budget does not hold it.

    Between two steps, the first of which is not taken back any more. In order with the device's other work: nobody
    waits.
    """
    length = sequence.length
    n_blocks = -(-length // KV_BLOCK_TOKENS)
    rest = length and (kv.shape is not None or len(kv.full_groups) < len(kv.groups))
    n_bytes = n_blocks * sum(map(kv.block_bytes, kv.full_groups)) + (kv.snapshot_bytes(length) if rest else 0)
    claim = kv.host.claim("sequences", n_bytes)
    if claim is None:
        return None
    swapped = Swapped(length, claim, [], exact=sequence.exact)
    try:
        for group in kv.full_groups:
            held = sequence.groups[group].held[:n_blocks]
            parts = (held[i : i + PIECE_BLOCKS] for i in range(0, n_blocks, PIECE_BLOCKS))
            swapped.pieces.append([kv.read_blocks(group, part, wait=False) for part in parts])
        if rest:
            swapped.snapshot = kv.save(sequence, windows=True, wait=False)
    except CapacityError:
        kv.host.drop(claim)
        kv.host.short()
        return None
    assert swapped.nbytes == n_bytes
    sequence.release()
    return swapped


def swap_in(kv: KVCache, sequence: Sequence, swapped: Swapped) -> None:
    """Let an empty sequence go on as the one that was moved out, which is then gone from host memory.

    CapacityError, with the sequence empty and all else as it was, where a pool is short.
    """
    assert not swapped.gone
    kv.hold(sequence, swapped.length, written=swapped.pieces)
    if swapped.snapshot is not None:
        kv.fill(sequence, swapped.snapshot)
    sequence.exact = swapped.exact
    drop(kv, swapped)


def drop(kv: KVCache, swapped: Swapped) -> None:
    """Give up what was moved out, if it is not gone."""
    if not swapped.gone:
        kv.host.drop(swapped.claim)
    swapped.gone, swapped.pieces, swapped.snapshot = True, [], None
