"""Conversations that take turns on a device that has not room for all: what leaves, and where what comes back lies."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from engine.ground.errors import CapacityError
from engine.memory.host import HostTier
from engine.ops import KV_BLOCK_TOKENS
from tests.cached_prompts import CHUNK, LateDevice, compute, make_cache, nodes, prefix_cache, prompt, serve


def test_conversations_in_turn_are_whole_and_cost_no_fork() -> None:
    """What one has begun after is given up for the other like anything else, though nothing was short in between."""
    kv = make_cache("full", 9 * CHUNK + KV_BLOCK_TOKENS)
    cache = prefix_cache(kv, CHUNK, 0)
    kv.host = cache._host = HostTier(kv.device, 8 * sum(cache._data_bytes))
    sequence = kv.sequence()
    compute(kv, sequence, prompt("z", 0), CHUNK)
    fork = cache.forks.make(sequence)
    sequence.release()
    assert fork is not None
    reused = [serve(kv, cache, prompt(name)) // CHUNK for name in ("abcdefg", "mnopqrs") * 3]
    assert reused == [0, 0, 7, 7, 7, 7] and not fork.gone


@pytest.mark.parametrize("spare", [0, 1 << 20])
def test_what_comes_back_has_neighboring_blocks(spare: int) -> None:
    """Where host memory has room for what leaves; and where it has none, nothing of what is there is given up."""
    kv = make_cache("full", 12 * CHUNK)
    cache = prefix_cache(kv, CHUNK, 0)
    chunk_bytes = sum(cache._data_bytes)
    kv.host = cache._host = HostTier(kv.device, 20 * chunk_bytes + spare)
    names = ["abcdefgh", "ijklmnop", "qrstuvwx"]
    for turn in range(4):
        for name in names:
            tokens = prompt(name, 5 + turn * (CHUNK // 3))
            assert serve(kv, cache, tokens) == (8 * CHUNK if turn else 0), (turn, name)
    held = [node.blocks[0] for node in nodes(cache) if node.blocks is not None]
    apart = sum(b != a + 1 for blocks in held for a, b in pairwise(blocks))
    assert CHUNK > KV_BLOCK_TOKENS and len(held) >= 8 and (not spare or apart <= 2), held


@pytest.mark.parametrize(("room", "copied"), [(12, [0, 6, 6, 0, 0, 0]), (10, [0, *[6] * 5]), (6, [0, *[6] * 5])])
def test_what_came_back_leaves_without_a_copy(monkeypatch: pytest.MonkeyPatch, room: int, copied: list[int]) -> None:
    """Six chunks leave for the other conversation. Copies are kept while there is room, and go before anything else."""
    kv = make_cache("full", 9 * CHUNK)
    cache = prefix_cache(kv, CHUNK, 0)
    kv.host = cache._host = HostTier(kv.device, room * sum(cache._data_bytes))
    read, n_read = kv.read_blocks, [0]

    def counted(group: int, blocks: Sequence[int], wait: bool = True) -> Any:
        n_read[-1] += group == cache._groups[0]
        return read(group, blocks, wait)

    monkeypatch.setattr(kv, "read_blocks", counted)
    for turn, name in enumerate(("abcdefg", "mnopqrs") * 3):
        assert serve(kv, cache, prompt(name)) == (7 * CHUNK if turn > 1 else 0)
        n_read.append(0)
    assert n_read[:-1] == copied
    host = cache._host
    assert host._spare_bytes == sum(n.data_bytes for n in nodes(cache) if n.blocks is not None)
    assert host.n_bytes == sum(n.data_bytes for n in nodes(cache)) <= host.budget_bytes


class Small(LateDevice):
    """Host memory of so many bytes."""

    def __init__(self, n_bytes: int) -> None:
        super().__init__()
        self.left = n_bytes

    def host_array(self, n_bytes: int, keep_bytes: int) -> np.ndarray:
        if n_bytes > self.left:
            raise CapacityError("no more host memory")
        lent = super().host_array(n_bytes, keep_bytes)
        self.left -= n_bytes
        weakref.finalize(lent, self.give_back, n_bytes)
        return lent

    def give_back(self, n_bytes: int) -> None:
        self.left += n_bytes


def test_copies_go_where_the_machine_has_less_than_the_budget() -> None:
    """Before a chunk is lost."""
    device = Small(1 << 40)
    kv = make_cache("full", 9 * CHUNK, device=device)
    cache = prefix_cache(kv, CHUNK, 0)
    kv.host = cache._host = HostTier(device, 1 << 30)
    device.left = 10 * sum(cache._data_bytes)
    assert [serve(kv, cache, prompt(name)) // CHUNK for name in ("abcdefg", "mnopqrs") * 4] == [0, 0, *[7] * 6]
