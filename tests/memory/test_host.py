"""The host tier: its budget holds, the least recently used goes first, what is in use stays. No arrays."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.ground.errors import CapacityError
from engine.memory.host import SOON_BYTES, Claim, HostTier
from engine.ops.host import HostDevice

BUDGET = 100
KINDS = ("chunks", "snapshots", "forks", "sequences")


@dataclass(eq=False)
class Thing:
    """What an owner keeps, as a model of it."""

    kind: str
    n_bytes: int
    used: int
    depth: int
    fixed: bool
    busy: bool = False
    spare: bool = False
    claim: Claim | None = None

    @property
    def age(self) -> tuple[bool, int, int]:
        return not self.spare, self.used, -self.depth


class Claiming(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier(HostDevice(), BUDGET)
        self.budget = BUDGET
        self.there: list[Thing] = []
        self.gone: list[Thing] = []

    def give_up(self, thing: Thing) -> bool:
        assert not thing.fixed and thing in self.there
        if thing.busy:
            return False
        self.drop(thing)
        self.gone.append(thing)
        return True

    def drop(self, thing: Thing) -> None:
        assert thing.claim is not None
        self.tier.drop(thing.claim)
        self.there.remove(thing)

    @rule(
        kind=st.sampled_from(KINDS), n_bytes=st.integers(1, 110), ago=st.integers(0, 2), depth=st.integers(0, 3),
        fixed=st.booleans(), tick=st.booleans(),
    )  # fmt: skip
    def claim(self, kind: str, n_bytes: int, ago: int, depth: int, fixed: bool, tick: bool) -> None:
        if tick:
            self.tier.tick()
        before, self.gone = [*self.there], []
        thing = Thing(kind, n_bytes, self.tier.now - ago, depth, fixed)
        thing.claim = self.tier.claim(kind, n_bytes, None if fixed else lambda: self.give_up(thing), depth, thing.used)
        if thing.claim is not None:
            self.there.append(thing)
        loose = [t for t in before if not t.fixed and not t.busy]
        # Whoever stayed is in use, or was used no earlier than all that went.
        stayed = [t for t in loose if t not in self.gone]
        assert all(went.age <= stay.age for went in self.gone for stay in stayed)
        taken, least = sum(t.n_bytes for t in before), sum(t.n_bytes for t in before if t not in loose)
        assert (thing.claim is not None) == (least + n_bytes <= self.budget)
        if taken + n_bytes <= self.budget or sum(t.n_bytes for t in before if t.fixed) + n_bytes > self.budget:
            assert not self.gone
        elif thing.claim is not None:  # and none more than had to
            assert sum(t.n_bytes for t in before if t not in self.gone[:-1]) + n_bytes > self.budget

    @precondition(lambda self: self.there)
    @rule(which=st.integers(0, 99), how=st.sampled_from(["use", "drop", "busy", "spare"]))
    def change(self, which: int, how: str) -> None:
        thing = self.there[which % len(self.there)]
        if how == "drop":
            self.drop(thing)
        elif how == "busy":
            thing.busy = not thing.busy
        elif how == "spare" and thing.claim is not None:
            thing.spare = not thing.spare
            self.tier.spare(thing.claim, thing.spare)
        elif thing.claim is not None:
            thing.used = thing.claim.used = self.tier.tick()

    @rule()
    def run_short(self) -> None:
        self.tier.short()
        self.budget = sum(t.n_bytes for t in self.there)

    @invariant()
    def the_budget_is_kept_and_every_byte_counted(self) -> None:
        held = sum(t.n_bytes for t in self.there)
        assert held == self.tier.n_bytes <= self.tier.budget_bytes == self.budget
        assert self.tier.room_bytes == self.budget - sum(t.n_bytes for t in self.there if not t.spare)
        by_kind = {kind: sum(t.n_bytes for t in self.there if t.kind == kind) for kind in KINDS}
        assert self.tier.bytes_by_kind() == by_kind


Claiming.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestClaiming = Claiming.TestCase


def test_what_can_never_fit_makes_nobody_go() -> None:
    tier = HostTier(HostDevice(), 10)
    assert tier.claim("sequences", 6) is not None
    gone: list[str] = []
    assert tier.claim("chunks", 4, lambda: bool(gone.append("chunk"))) is not None
    assert tier.claim("snapshots", 5) is None and tier.claim("forks", 11) is None
    assert not gone and tier.n_bytes == 10


def test_the_budget_shrinks_to_what_there_is_once(caplog: pytest.LogCaptureFixture) -> None:
    tier = HostTier(HostDevice(), 10)
    claim = tier.claim("sequences", 6)
    tier.short()
    tier.short()
    assert tier.budget_bytes == 6 and len(caplog.records) == 1 and caplog.records[0].reason == "host_memory"
    assert claim is not None and tier.claim("forks", 1) is None
    tier.drop(claim)
    assert tier.claim("forks", 6) is not None


def test_the_memory_is_the_devices() -> None:
    class Full(HostDevice):
        def host_array(self, n_bytes: int, keep_bytes: int):
            assert keep_bytes == 10 + SOON_BYTES
            raise CapacityError("no more host memory")

    assert HostTier(HostDevice(), 10).array(7).nbytes == 7
    with pytest.raises(CapacityError):
        HostTier(Full(), 10).array(7)
