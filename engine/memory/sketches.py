"""Sketches of the keys of full blocks, by which decoded rows choose what they read (docs/arithmetic.md, "Recall").

They are by the block's number, wherever it lies, and stay on the device when its keys go home. A block's sketches
follow from its keys alone, so they are made when somebody first needs them, and again when the number has been taken
anew: prefixes, forks, files and sequences that were moved out know nothing of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from engine.memory.kv import KVCache
from engine.memory.shape import CacheShape
from engine.ops import I32, U8
from engine.ops.device import Memory
from engine.ops.sketches import sketch_bytes


class Sketches:
    """The sketches of a cache. layers[i]: what layer i chooses by, uint8 [n_blocks, K, sketch_bytes]; None in others.

    owners[g]: the layers of a group whose keys they are of; of[layer]: theirs. config: of the model, without a block
    that predicts further tokens, which reads all.
    """

    def __init__(self, device: Memory, config: CacheShape, kv: KVCache) -> None:
        own: dict[int, Any] = {}
        self._made: dict[int, np.ndarray[Any, np.dtype[np.bool_]]] = {}  # by group, of which blocks there are any
        self.owners: dict[int, tuple[int, ...]] = {}
        for number in kv.full_groups:
            group, pool = kv.groups[number], kv.pools[number]
            self._made[number] = np.zeros(pool.n_blocks, bool)
            self.owners[number] = tuple(layer for layer in group.layers if layer < config.n_layer)
            pool.taken = partial(self.forget, number)
            for layer in self.owners[number]:
                own[layer] = device.empty((pool.n_blocks, group.n_head_kv, sketch_bytes(group.head_dim)), np.uint8)
        self.of: dict[int, Any] = own
        reads = [config.kv_layer(i) for i in range(config.n_layer)]
        self.layers: tuple[U8 | None, ...] = tuple(None if i is None else own.get(i) for i in reads)
        self.nbytes = sum(int(array.nbytes) for array in own.values())

    def lacking(self, group: int, blocks: I32) -> I32:
        """Those of some blocks of a group that have no sketches yet, which whoever asks makes now."""
        made = self._made[group]
        found = blocks[~made[blocks]]
        made[found] = True
        return found

    def forget(self, group: int, block: int) -> None:
        """The number of a block is taken anew."""
        self._made[group][block] = False
