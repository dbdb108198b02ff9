"""When jobs of long steps are offered: by what came of them alone."""

from __future__ import annotations

from dataclasses import replace

from engine.placing.handed import WINDOW_JOBS, HandedGate, HandedTally
from engine.placing.misses import GOOD_WINDOWS, RETRY_S

W = WINDOW_JOBS


def plus(tally: HandedTally, done: int, taken: int = 0, waited_us: float = 0.0) -> HandedTally:
    return replace(tally, done=tally.done + done, taken=tally.taken + taken, waited_us=tally.waited_us + waited_us)


def test_what_is_taken_back_is_no_reason_unless_it_is_all() -> None:
    gate, tally = HandedGate(50.0), HandedTally()
    for i in range(10):
        tally = plus(tally, 1, W)
        assert not gate.look(tally, float(i)) and gate.state == "on" and not gate.why
    assert not gate.look(plus(tally, 0, W - 1), 10.0)
    assert gate.look(plus(tally, 0, W), 10.0)
    assert gate.state == "off" and f"none of {W} jobs" in gate.why


def test_who_waits_longer_than_pcie_takes_loses() -> None:
    gate = HandedGate(50.0)
    assert not gate.look(plus(HandedTally(), W - 1, waited_us=1e9), 0.0)
    assert not gate.look(tally := plus(HandedTally(), W, waited_us=49.0 * W), 0.0)
    assert gate.look(plus(tally, W, 3 * W, waited_us=50.0 * W), 0.0)
    assert gate.state == "off" and "waited for 50 us, PCIe takes 50" in gate.why


def test_it_is_tried_again_later_and_later_and_in_the_end_never() -> None:
    gate, tally, now_s = HandedGate(50.0), HandedTally(), 0.0
    for retry_s in RETRY_S:
        tally = plus(tally, 0, W)
        assert gate.look(tally, now_s) and gate.state == "off"
        assert not gate.look(tally, now_s + retry_s - 1)
        now_s += retry_s
        assert gate.look(tally, now_s) and gate.state == "on" and not gate.why
        assert not gate.look(tally, now_s)  # what came before is forgotten
    assert gate.look(plus(tally, 0, W), now_s) and gate.state == "off for good"
    assert not gate.look(plus(tally, 0, W), now_s + 1e9)


def test_good_windows_forgive() -> None:
    gate, tally, now_s = HandedGate(50.0), HandedTally(), 0.0
    for _ in range(2 * len(RETRY_S)):
        tally = plus(tally, 0, W)
        assert gate.look(tally, now_s) and gate.state == "off"
        now_s += RETRY_S[0]
        assert gate.look(tally, now_s)
        for _ in range(GOOD_WINDOWS):
            tally = plus(tally, W)
            assert not gate.look(tally, now_s)
