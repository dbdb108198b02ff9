"""What becomes of missed experts, on the page at `/` and in its events, in headless Chromium where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.test_page import Counted, browser, opened, read_events, wait_for
from tests.server.test_server import Running, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser"]  # a fixture
MET = """(() => [
  document.getElementById("met-figure").hidden,
  ...["met", "met-more"].map((id) => document.getElementById(id).textContent),
])()"""


class Met(Counted):
    """An engine that misses 10 experts each time it is asked: the CPU computes 3 of decoding and a part of one."""

    def __init__(self, made: Running) -> None:
        super().__init__(made)
        self.cpu: dict[str, Any] = {"computed": 7, "divided": 0, "taken_back": 2, "waited_s": 0.25}
        self.cpu["long"] = {"computed": 7}
        self.guesses: dict[str, Any] = {"useful": 0, "wasted": 0}
        self.has_cpu = False

    def __call__(self) -> dict[str, Any]:
        found = super().__call__()
        if self.has_cpu and self.busy:
            self.cpu["computed"] += 3
            self.cpu["divided"] += 1
        if self.busy:
            self.guesses = self.guesses | {"useful": self.guesses["useful"] + 2, "wasted": self.guesses["wasted"] + 5}
        more = {"cpu_experts": dict(self.cpu) if self.has_cpu else {}, "guesses": dict(self.guesses)}
        return found | more if found else {}


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Running, Met]]:
    with running() as made:
        counters = Met(made)
        monkeypatch.setattr(made.backend, "stats", counters)
        yield made, counters


def sample_of(made: Running) -> dict[str, Any]:
    with made.http.stream("GET", "/events") as response:
        _, (_, sample) = read_events(response.iter_lines(), 2)
    found: dict[str, Any] = sample["engine"]
    return found


def test_events_have_what_the_cpu_and_guesses_took(met: tuple[Running, Met]) -> None:
    made, counters = met
    counters.has_cpu = True
    assert sample_of(made)["met"] == {"computed": 3, "divided": 1, "taken_back": 2, "waited_s": 0.25}
    counters.guesses["on"] = True
    assert {"useful", "wasted", "computed"} <= set(sample_of(made)["met"])
    counters.has_cpu = False
    assert set(sample_of(made)["met"]) == {"useful", "wasted"}


def test_events_where_all_that_misses_crosses_the_link(met: tuple[Running, Met]) -> None:
    """Guesses that are only counted, on a host, bring nothing."""
    made, _ = met
    assert "met" not in sample_of(made)


@pytest.mark.slow
def test_misses_are_shown_where_they_need_not_cross_the_link(browser: Browser, met: tuple[Running, Met]) -> None:
    made, counters = met
    with opened(browser, f"http://127.0.0.1:{made.port}") as (shown, said):
        wait_for(shown, "Number(document.getElementById('written').textContent) > 0")
        assert shown.evaluate(MET)[0] is True
        counters.has_cpu = True
        wait_for(shown, f"(([hidden, share]) => !hidden && share === '40.0%')({MET})")
        assert shown.evaluate(MET)[2].endswith(" in part, 2 taken back, 0.3 s waited since the start")
        counters.guesses["on"] = True
        wait_for(shown, f"(([hidden, share, more]) => share === '60.0%' && / guessed, \\d+ in vain/.test(more))({MET})")
        assert shown.locator("#met-graph").is_visible()
        counters.busy = False
        wait_for(shown, f"(([hidden, share]) => !hidden && share === '–')({MET})")
        assert "NaN" not in shown.locator("body").inner_text() and not said
