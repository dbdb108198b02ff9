"""Page-locked memory that is lent: whole, nobody else's, used again, and no more of it locked than there must be."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.ground.errors import CapacityError
from engine.ops.cuda import lending
from engine.ops.cuda.lending import Lending
from tests.memory.test_slowtier import Runtime, runtime  # noqa: F401

MiB = 1 << 20


def locked(runtime: Runtime) -> list[int]:  # noqa: F811
    return sorted(n // MiB for n in runtime.registered.values())


def test_arrays_are_used_again_when_nobody_has_a_view_of_them(runtime: Runtime) -> None:  # noqa: F811
    pool = Lending(0, lambda: None)
    first = pool.take(4 * MiB, 8 * MiB)
    first[:] = 5
    at, view = first.ctypes.data, first[MiB:].view(np.float32).reshape(3, -1)
    del first
    other = pool.take(4 * MiB, 8 * MiB)  # there is a view of the first
    assert other.ctypes.data == at + 4 * MiB and locked(runtime) == [8] and (view.view(np.uint8) == 5).all()
    del view
    again = pool.take(3 * MiB, 8 * MiB)
    assert again.ctypes.data == at and locked(runtime) == [8] and not pool.take(0, 8 * MiB).size
    del other, again
    assert pool.take(8 * MiB, 8 * MiB).ctypes.data == at  # neighbors are one again
    pool.close()
    assert not runtime.registered and not runtime.driver


def test_more_is_locked_at_a_time_the_more_there_is(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    monkeypatch.setattr(lending, "LEAST_BYTES", 4 * MiB)
    monkeypatch.setattr(lending, "MOST_BYTES", 8 * MiB)
    pool = Lending(0, lambda: None)
    held = [pool.take(3 * MiB, 24 * MiB) for _ in range(4)]
    assert locked(runtime) == [4, 4, 8]
    held += [pool.take(3 * MiB, 24 * MiB) for _ in range(2)]
    assert locked(runtime) == [4, 4, 8, 8]
    held.append(pool.take(3 * MiB, 24 * MiB))  # more than may be kept, by no more than must be
    assert locked(runtime) == [4, 4, 4, 8, 8] and pool.n_bytes == 28 * MiB
    pool.close()


def test_what_nobody_holds_goes_where_more_would_be_locked_than_is_kept(runtime: Runtime) -> None:  # noqa: F811
    settled: list[list[int]] = []
    pool = Lending(0, lambda: settled.append(locked(runtime)))
    small, other = pool.take(4 * MiB, 4 * MiB), pool.take(2 * MiB, 4 * MiB)
    assert locked(runtime) == [2, 4] and not settled
    del small
    large = pool.take(6 * MiB, 9 * MiB)
    assert locked(runtime) == [2, 6] and settled == [[2, 4]]
    runtime.limit = 8 * MiB
    with pytest.raises(CapacityError):
        pool.take(5 * MiB, 100 * MiB)
    del other
    assert pool.take(2 * MiB, 100 * MiB).nbytes == 2 * MiB
    del large
    assert pool.take(7 * MiB, 100 * MiB).nbytes == 7 * MiB and locked(runtime) == [8]
    pool.close()


def test_what_a_burst_took_goes_back(runtime: Runtime) -> None:  # noqa: F811
    """As copies of a whole cache do, when its memory was away."""
    pool = Lending(0, lambda: None)
    held = [pool.take(16 * MiB, 8 * MiB) for _ in range(8)]
    assert pool.n_bytes == 128 * MiB
    held.clear()
    kept = pool.take(4 * MiB, 8 * MiB)
    assert pool.n_bytes <= 16 * MiB and kept.nbytes == 4 * MiB
    pool.close()


def test_what_is_given_back_late_is_gone_already(runtime: Runtime) -> None:  # noqa: F811
    pool = Lending(0, lambda: None)
    kept = pool.take(3 * MiB, 0)
    pool.close()
    del kept
    assert not runtime.registered
    assert pool.take(3 * MiB, 0).nbytes == 3 * MiB and locked(runtime) == [4]
    pool.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(0, 5 * MiB)), max_size=60))
def test_nobody_has_what_another_holds(
    runtime: Runtime, what: list[tuple[bool, int, int]]  # noqa: F811
) -> None:
    """Whatever comes and goes; in the end all of it is one free range a piece."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lending, "LEAST_BYTES", 2 * MiB)
        patch.setattr(lending, "MOST_BYTES", 8 * MiB)
        pool = Lending(0, lambda: None)
        held: list[tuple[int, np.ndarray]] = []
        for number, (take, which, n_bytes) in enumerate(what):
            if take or not held:
                held.append((number % 251, pool.take(n_bytes, 30 * MiB)))
                held[-1][1][:] = number % 251
            else:
                del held[which % len(held)]
            spans = sorted((a.ctypes.data, a.nbytes) for _, a in held if a.size)
            assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
        assert all((array == number).all() for number, array in held)
        held.clear()
        pool._join()
        assert pool._free == sorted((at, piece.array.nbytes) for at, piece in pool._pieces.items())
        pool.close()
