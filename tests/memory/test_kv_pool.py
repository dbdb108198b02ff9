"""Blocks that move between a pool and their homes: what is read is what was written, whatever happened meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.ground.errors import CapacityError
from engine.memory.blocks import Sequence
from engine.memory.host import HostTier
from engine.memory.kv import KVCache
from engine.memory.places import Places
from engine.memory.shape import KVGroup, least_pool
from engine.memory.swap import swap_in, swap_out
from tests.cached_prompts import LateDevice

STEP, N_SEQUENCES = 100, 3
N_TOKENS = 64 * 29
POOL = least_pool(STEP, N_SEQUENCES)


class Elsewhere(LateDevice):
    """A device whose memory is not the host's: homes are arrays of their own, and are staged."""

    name = "elsewhere"


class Config:
    n_layer, delta = 3, None
    kv_groups = (KVGroup((0, 2), 2, 8), KVGroup((1,), 1, 16, window=130))

    def kv_layer(self, layer: int) -> int:
        return layer


class Writer:
    """A cache, and sequences that write the same numbers to every layer; `read` finds them as attention would."""

    def __init__(self, device: LateDevice, pool: int = POOL) -> None:
        self.kv = KVCache(device, Config(), N_TOKENS, "f16", STEP, N_SEQUENCES, pool)
        self.kv.host = HostTier(device, 1 << 24)
        self.device, self.written = device, dict[Sequence, np.ndarray]()

    def write(self, sequence: Sequence, n: int) -> None:
        values = np.random.default_rng(len(self.written[sequence]) + n).integers(1, 2000, n).astype(np.float16)
        slots = sequence.extend(n)
        self.device.synchronize()  # a kernel runs behind what is enqueued
        for layer in (0, 2):
            own = self.kv.layers[layer]
            own.k[slots[0]], own.v[slots[0]] = values[:, None, None], -values[:, None, None]
        self.written[sequence] = np.concatenate([self.written[sequence], values])

    def check(self) -> None:
        for sequence, expected in self.written.items():
            n = len(expected)
            assert sequence.length == n
            (table, *_) = self.kv.gather((sequence.groups[0].table()[None], np.zeros((1, 1), np.int32)))
            at = np.arange(n)
            slots = table[0][at // 64].astype(np.int64) * 64 + at % 64 if n else at
            self.device.synchronize()
            for layer in (0, 2):
                own, staging = self.kv.layers[layer], self.kv.staging(layer)
                keys, values = own.k, own.v
                if staging is not None:
                    absent, homes, area = staging
                    for j, block in enumerate(absent[1 : 1 + absent[0]].tolist()):
                        for to, home in zip(area.arrays[:2], homes.arrays[:2], strict=True):
                            to[64 * j : 64 * j + 64] = home[64 * block : 64 * block + 64]
                    keys, values = np.concatenate([own.k, area.k]), np.concatenate([own.v, area.v])
                assert (keys[slots] == expected[:, None, None]).all() and (
                    values[slots] == -expected[:, None, None]
                ).all()


@pytest.mark.parametrize("device", [LateDevice, Elsewhere])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_is_read_is_what_was_written(device: type[LateDevice], data: st.DataObject) -> None:
    writer = Writer(device(), data.draw(st.sampled_from([POOL, POOL + 128, N_TOKENS - 64])))
    kv, written = writer.kv, writer.written
    parked: list[tuple[object, np.ndarray]] = []
    for _ in range(data.draw(st.integers(5, 25))):
        what = data.draw(
            st.sampled_from(["begin", "write", "write", "write", "home", "recall", "park", "back", "fork", "end"])
        )
        some = list(written)
        sequence = some[data.draw(st.integers(0, len(some) - 1))] if some else None
        try:
            if what == "begin" and len(some) < N_SEQUENCES:
                written[kv.sequence()] = np.zeros(0, np.float16)
            elif what == "back" and parked and len(some) < N_SEQUENCES:
                new, (swapped, values) = kv.sequence(), parked[-1]
                swap_in(kv, new, swapped)  # type: ignore[arg-type]
                parked.pop()
                written[new] = values
            elif what == "home":
                kv._make_room(0, data.draw(st.integers(1, 9)))
            elif sequence is None:
                continue
            elif what == "write":
                sequence.reserve(n := data.draw(st.integers(1, STEP)))
                kv.recall([sequence])
                writer.write(sequence, n)
            elif what == "recall":
                kv.recall([sequence])
            elif what == "park" and (swapped_out := swap_out(kv, sequence)) is not None:
                parked.append((swapped_out, written.pop(sequence)))
            elif what == "fork" and len(some) < N_SEQUENCES:
                fork = kv.fork(sequence)
                kv._make_room(0, 5)
                new = kv.sequence()
                kv.begin(new, fork.length, fork.shared, fork.snapshot, fork.rest)
                written[new] = written[sequence].copy()
                kv.drop(fork)
            elif what == "end":
                sequence.release()
                del written[sequence]
        except CapacityError:
            pass
        writer.check()
    for sequence in written:
        sequence.release()
    assert kv.pools[0].free_blocks == kv.pools[0].n_blocks
    places = kv.pools[0].places
    assert places is None or (places.free_places == places.n_pool and not places.n_away)


def test_blocks_that_nobody_reads_leave_first_and_the_least_used_of_them() -> None:
    places = Places(9, 6)
    for block in range(6):
        places.enter(block)
    places.seal([0, 1, 2, 4, 5])
    places.use([0, 1])
    held, read = np.zeros(9, bool), np.zeros(9, bool)
    held[2], read[[4, 5]] = True, True
    assert places.leaving(held, read, 9).tolist() == [0, 1, 4, 5]  # 2 is held, and 3 is being written
    assert places.leaving(held, read, 1).tolist() == [0] and places.leaving(held, read).tolist() == [0]
    read[0] = True
    assert places.leaving(held, read, 1).tolist() == [1]


def test_what_is_at_home_already_is_not_copied_again() -> None:
    writer = Writer(LateDevice())
    sequence = writer.kv.sequence()
    writer.written[sequence] = np.zeros(0, np.float16)
    for _ in range(5):
        writer.write(sequence, STEP)
    writer.kv._make_room(0, 3)
    once = writer.kv.moved_bytes["home"]
    assert once == 3 * writer.kv.block_bytes(0)
    writer.kv.recall([sequence])
    assert writer.kv.moved_bytes["back"] == once and not writer.kv.blocks_away
    writer.kv._make_room(0, 3)
    assert writer.kv.moved_bytes["home"] == once and writer.kv.blocks_away == 3
    writer.check()


def test_homes_that_cannot_be_locked_are_said_with_what_to_do() -> None:
    class Short(Elsewhere):
        left = 3  # arrays that it has

        def page_locked(self, n_bytes: int) -> np.ndarray:
            self.left -= 1
            if self.left < 0:
                raise CapacityError("0.50 GiB of page-locked host memory are needed", hint="pin more experts")
            return super().page_locked(n_bytes)

    with pytest.raises(CapacityError, match="no place in host memory: 0") as found:
        Writer(Short())
    assert "--ctx" in str(found.value.hint) and "--kv-pool" in str(found.value.hint) and "ulimit" in found.value.hint
    Writer(Short(), N_TOKENS)  # all on the device: none is needed
