"""Drafts on the page at `/` and in its events, in headless Chromium where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.test_page import Counted, browser, opened, read_events, wait_for
from tests.server.test_server import Running, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser"]  # a fixture
DRAFTS = """(() => [
  document.getElementById("drafts-figure").hidden,
  ...["drafts", "drafts-more"].map((id) => document.getElementById(id).textContent),
])()"""


class Drafting(Counted):
    """The counters of an engine that drafts 40 tokens each time it is asked, of which 25 are accepted."""

    def __init__(self, made: Running) -> None:
        super().__init__(made)
        self.drafts: dict[str, Any] = {"tokens": {}, "memory_bytes": 0, "step_ms": {}}
        self.drafting = False

    def __call__(self) -> dict[str, Any]:
        found = super().__call__()
        if self.drafting and self.busy:
            counts = self.drafts["tokens"].setdefault("lookup", {"drafted": 0, "accepted": 0})
            counts["drafted"] += 30
            counts["accepted"] += 25
            self.drafts["tokens"].setdefault("other", {"drafted": 0, "accepted": 0})["drafted"] += 10
        return found | {"drafts": self.drafts} if found else {}


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Running, Drafting]]:
    with running() as made:
        counters = Drafting(made)
        monkeypatch.setattr(made.backend, "stats", counters)
        yield made, counters


def test_events_have_what_was_drafted(drafting: tuple[Running, Drafting]) -> None:
    made, counters = drafting
    counters.drafting = True
    with made.http.stream("GET", "/events") as response:
        (_, model), (_, sample) = read_events(response.iter_lines(), 2)
    assert model["draft"] == "auto"
    assert sample["engine"]["drafts"] == {
        "lookup": {"drafted": 30, "accepted": 25}, "other": {"drafted": 10, "accepted": 0},
    }  # fmt: skip


def test_events_of_an_engine_without_drafts() -> None:
    with running() as made, made.http.stream("GET", "/events") as response:
        _, (_, sample) = read_events(response.iter_lines(), 2)
    assert "drafts" not in sample["engine"]


@pytest.mark.slow
def test_acceptance_is_shown_where_something_is_drafted(browser: Browser, drafting: tuple[Running, Drafting]) -> None:
    made, counters = drafting
    with opened(browser, f"http://127.0.0.1:{made.port}") as (shown, said):
        wait_for(shown, "Number(document.getElementById('written').textContent) > 0")
        assert shown.evaluate(DRAFTS)[0] is True
        counters.drafting = True
        wait_for(shown, f"(([hidden, share]) => !hidden && share === '62.5%')({DRAFTS})")
        wait_for(shown, f"(([, , more]) => /^[1-4]?[0-9]% of what is written; /.test(more))({DRAFTS})")
        assert " of " in shown.evaluate(DRAFTS)[2] and shown.locator("#drafts-graph").is_visible()
        counters.busy = False  # so nothing is drafted now, which is no share of anything
        wait_for(shown, f"(([hidden, share]) => !hidden && share === '–')({DRAFTS})")
        assert shown.evaluate(DRAFTS)[2].endswith(" since the start")
        wait_for(shown, f"(([, , more]) => /^[0-9,]+ of [0-9,]+ since the start$/.test(more))({DRAFTS})")
        assert "NaN" not in shown.locator("body").inner_text()
        shown.set_viewport_size({"width": 320, "height": 600})
        wait_for(shown, "document.documentElement.scrollWidth <= 320")
        assert said == []
