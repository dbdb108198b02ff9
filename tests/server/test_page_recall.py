"""What is read of the cache, on the page at `/` and in its events, in headless Chromium where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.test_page import Counted, browser, opened, read_events, wait_for
from tests.server.test_server import Running, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser"]  # a fixture
RECALL = """(() => [
  document.getElementById("recall-figure").hidden,
  ...["recall", "recall-more"].map((id) => document.getElementById(id).textContent),
])()"""


class Recalling(Counted):
    """The counters of an engine that writes 10 tokens each time it is asked, which read 30 of 80 blocks."""

    def __init__(self, made: Running) -> None:
        super().__init__(made)
        self.recall: dict[str, Any] = {"tokens": 0, "blocks": 0, "read": 0, "left_out_max": 0.0, "left_out_sum": 0.0}
        self.recalling = False

    def __call__(self) -> dict[str, Any]:
        found = super().__call__()
        if self.recalling and self.busy:
            for name, n in (("tokens", 10), ("blocks", 80), ("read", 30), ("left_out_sum", 1.5)):
                self.recall[name] += n
            self.recall["left_out_max"] = 0.625
        return found | {"recall": dict(self.recall)} if found else {}


@pytest.fixture
def recalling(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Running, Recalling]]:
    with running() as made:
        counters = Recalling(made)
        monkeypatch.setattr(made.backend, "stats", counters)
        yield made, counters


def test_events_have_what_was_read(recalling: tuple[Running, Recalling]) -> None:
    made, counters = recalling
    counters.recalling = True
    with made.http.stream("GET", "/events") as response:
        _, (_, sample) = read_events(response.iter_lines(), 2)
    assert sample["engine"]["recall"] == {
        "tokens": 10, "blocks": 80, "read": 30, "left_out_max": 0.625, "left_out_sum": 1.5,
    }  # fmt: skip


def test_events_of_an_engine_that_reads_all() -> None:
    with running() as made, made.http.stream("GET", "/events") as response:
        _, (_, sample) = read_events(response.iter_lines(), 2)
    assert "recall" not in sample["engine"]


@pytest.mark.slow
def test_what_is_read_is_shown_where_a_part_is(browser: Browser, recalling: tuple[Running, Recalling]) -> None:
    made, counters = recalling
    with opened(browser, f"http://127.0.0.1:{made.port}") as (shown, said):
        wait_for(shown, "Number(document.getElementById('written').textContent) > 0")
        assert shown.evaluate(RECALL)[0] is True
        counters.recalling = True
        wait_for(shown, f"(([hidden, share]) => !hidden && share === '37.5%')({RECALL})")
        more = shown.evaluate(RECALL)[2]
        assert more.startswith("37.5% of ") and more.endswith("; about 15.0% of attention left out, 62.5% at most")
        assert shown.locator("#recall-graph").is_visible()
        counters.busy = False  # so nothing is read now, which is no share of anything
        wait_for(shown, f"(([hidden, share]) => !hidden && share === '–')({RECALL})")
        assert "NaN" not in shown.locator("body").inner_text() and not said
