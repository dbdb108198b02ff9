"""A cache without a model: "computing" a token writes a hash of all tokens up to it where its cache would lie."""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.formats.prefix_file import NAME
from engine.ground.errors import CapacityError
from engine.memory.blocks import Sequence
from engine.memory.host import HostTier
from engine.memory.kv import KVCache
from engine.memory.prefix import PrefixCache
from engine.memory.shape import DeltaShape, KVGroup
from engine.ops.host import HostDevice

FULL, FULL2, NARROW = KVGroup((0,), 1, 32), KVGroup((1,), 2, 32), KVGroup((2,), 1, 64, window=150)
SHAPE = DeltaShape(layers=(3,), kernel=2, n_channels=3, n_head_v=1, d_k=2, d_v=2)
CHUNK = 128
KINDS = {
    "full": ((FULL, FULL2), None),
    "windows": ((FULL, NARROW), None),
    "states": ((FULL,), SHAPE),
    "everything": ((FULL, NARROW, FULL2), SHAPE),
}


def saved(folder: Path) -> list[Path]:
    """The files of prefixes in a folder."""
    return sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name))


class LateDevice(HostDevice):
    """Copies happen when work behind them needs them; host arrays come back as they were left."""

    def __init__(self) -> None:
        self.queue: list[tuple[int, int, int]] = []
        self.free: dict[int, list[np.ndarray]] = {}
        self.full = False

    def host_array(self, n_bytes: int, keep_bytes: int) -> np.ndarray:
        if self.full:
            raise CapacityError("no more host memory")
        free = self.free.setdefault(n_bytes, [])
        held = free.pop() if free else np.full(n_bytes, 0xFF, np.uint8)
        lent = np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(self.pointer(held)))
        weakref.finalize(lent, free.append, held)
        return lent

    def copy(self, to: int, source: int, n_bytes: int) -> None:
        self.queue.append((to, source, n_bytes))

    def synchronize(self) -> None:
        for entry in self.queue:
            ctypes.memmove(*entry)
        self.queue.clear()


def make_cache(kind: str, n_tokens: int, kv_type: str = "f16", device: HostDevice | None = None) -> KVCache:
    groups, delta = KINDS[kind]
    own = {layer for g in groups for layer in g.layers}
    config = SimpleNamespace(n_layer=4, kv_groups=groups, kv_layer=lambda i: i if i in own else None, delta=delta)
    return KVCache(device or LateDevice(), config, n_tokens, kv_type, CHUNK, 4)


def prefix_cache(kv: KVCache, chunk: int, host_bytes: int, *options: Any, **named: Any) -> PrefixCache:
    """Prefixes with a budget of host memory."""
    kv.host = HostTier(kv.device, host_bytes)
    return PrefixCache(kv, chunk, *options, **named)


def hashes(tokens: np.ndarray) -> np.ndarray:
    """A number for each prefix, exact in a float16."""
    out, h = [], 7
    for token in tokens.tolist():
        h = (h * 31 + token + 1) % 2039
        out.append(h)
    return np.array(out, np.float64)


def arrays_of(kv: KVCache, layer: int) -> list[np.ndarray]:
    y = kv.layers[layer]
    return [a for a in (y.k, y.v, y.k_scale, y.v_scale) if a is not None]


def coded(values: np.ndarray, array: np.ndarray) -> np.ndarray:
    return (values % 127 if array.itemsize == 1 else values)[:, None, None]


def compute(kv: KVCache, sequence: Sequence, tokens: np.ndarray, n: int) -> None:
    """Feed the next n of `tokens`."""
    start = sequence.length
    values = hashes(tokens)[start : start + n]
    slots_of = sequence.extend(n)
    kv.device.synchronize()  # what the device computes, it computes behind all copies so far
    for group, slots in zip(kv.groups, slots_of, strict=True):
        for layer in group.layers:
            for array in arrays_of(kv, layer):
                array[slots] = coded(values, array)
    for layer in kv.delta:
        if layer is not None:
            layer.conv[sequence.state], layer.state[sequence.state] = values[-1], -values[-1]


def check(kv: KVCache, sequence: Sequence, tokens: np.ndarray) -> None:
    """Everything that the next token of a sequence sees is what was computed for exactly these tokens."""
    kv.device.synchronize()
    n, values = sequence.length, hashes(tokens)
    for group, blocks in zip(kv.groups, sequence.groups, strict=True):
        seen = np.arange(max(0, n + 1 - group.window) if group.window else 0, n)
        slots = np.asarray(blocks.held, np.int64)[seen // 64] * 64 + seen % 64
        assert (slots >= 0).all()
        for layer in group.layers:
            for array in arrays_of(kv, layer):
                assert (array[slots] == coded(values[seen], array)).all()
    for layer in kv.delta:
        if layer is not None and n:
            assert (layer.conv[sequence.state] == values[n - 1]).all()
            assert (layer.state[sequence.state] == -values[n - 1]).all()


def prompt(chunks: str, tail: int = 5) -> np.ndarray:
    """Tokens in chunks that are named by letters, and `tail` more."""
    parts = [np.arange(CHUNK) + 1000 * ord(c) for c in chunks]
    return np.concatenate([*parts, np.arange(tail)]).astype(np.int32)


def prefill(kv: KVCache, cache: PrefixCache, tokens: np.ndarray) -> tuple[Sequence, int]:
    """Serve a prompt as the engine does; the sequence, and how much of it was reused."""
    sequence = kv.sequence()
    try:
        reused = cache.attach(sequence, cache.match(tokens))
        assert reused == sequence.length and reused % CHUNK == 0 and reused < len(tokens)
        check(kv, sequence, tokens)
        while sequence.length < len(tokens):
            compute(kv, sequence, tokens, cache.step_tokens(sequence, tokens))
            cache.insert(sequence, tokens)
    except CapacityError:
        sequence.release()
        raise
    return sequence, reused


def serve(kv: KVCache, cache: PrefixCache, tokens: np.ndarray) -> int:
    sequence, reused = prefill(kv, cache, tokens)
    sequence.release()
    return reused


def nodes(cache: PrefixCache) -> list:
    return list(cache.tree.nodes())
