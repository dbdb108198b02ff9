"""The page at `/` and its events: over HTTP, and in headless Chromium where there is one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import psutil
import pytest

from engine.memory.residency import Residency
from engine.placing.placement import Placement
from engine.placing.policy import SlotState, fill
from spark.server import events, page
from spark.server.board import Board
from spark.server.supervisor import Health
from spark.speech.conversation import Usage
from tests.command_line import NANO, ROOT, started
from tests.server.test_connections import connected
from tests.server.test_server import PATIENCE_S, Running, fake, running, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WAIT_MS = 20_000


def read_events(lines: Iterator[str], n: int) -> list[tuple[str, dict]]:
    """The next events of a stream, which closes when its lines are forgotten."""
    found: list[tuple[str, dict]] = []
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        if line.startswith("data: "):
            found.append((name, json.loads(line.removeprefix("data: "))))
            if len(found) == n:
                return found
    raise AssertionError(f"{len(found)} events and no more")


@pytest.fixture(scope="module")
def fast() -> Iterator[Running]:
    with running() as made:
        yield made


# --- what is served -------------------------------------------------------------------------------


def test_the_files_of_the_page(fast: Running) -> None:
    kinds = {"/": "text/html", "/page.css": "text/css"}
    kinds |= {f"/{name}.js": "text/javascript" for name in ("page", "rates", "requests", "text")}
    assert kinds.keys() == page.PATHS
    for path, kind in kinds.items():
        response = fast.http.get(path)
        assert response.status_code == 200 and response.headers["content-type"] == f"{kind}; charset=utf-8"
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"https?://|//[a-z]|@import|url\(", response.text.replace("// ", ""))
    assert fast.http.get("/", headers={"host": "evil.example"}).status_code == 403
    assert fast.http.post("/").status_code == 405


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.named: list[str] = []  # what others refer to
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = {key: value or "" for key, value in attrs}
        self.ids += [made["id"]] if "id" in made else []
        for key in ("for", "aria-labelledby", "aria-describedby"):
            self.named += made.get(key, "").split()
        self.inline += [key for key in made if key == "style" or key.startswith("on")]
        if tag == "script" and "src" not in made:
            self.inline.append(tag)


def test_ids_and_references_of_the_page() -> None:
    folder = ROOT / "spark" / "server" / "static"
    parsed = _Page()
    parsed.feed((folder / "index.html").read_text())
    assert len(set(parsed.ids)) == len(parsed.ids) and set(parsed.named) <= set(parsed.ids)
    assert not parsed.inline
    used = [
        name for script in folder.glob("*.js") for name in re.findall(r'\b(?:at|say)\("([a-z-]+)"', script.read_text())
    ]
    assert "open-requests" in used and set(used) <= set(parsed.ids)


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_contrast_in_light_and_dark() -> None:
    """Text 4.5:1, marks 3:1 (WCAG 1.4.3, 1.4.11)."""
    style = (ROOT / "spark" / "server" / "static" / "page.css").read_text()
    blocks = re.findall(r":root \{([^}]*)\}", style)
    assert len(blocks) == 2
    for block in blocks:
        colors = dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6});", block))

        def contrast(a: str, b: str, colors: dict[str, str] = colors) -> float:
            high, low = sorted((luminance(colors[a]), luminance(colors[b])), reverse=True)
            return (high + 0.05) / (low + 0.05)

        for text in ("text", "soft", "accent"):
            assert contrast(text, "panel") >= 4.5 and contrast(text, "back") >= 4.5, text
        for mark in ("pinned", "cached", "dot", "missed", *(f"m{i}" for i in range(6))):
            assert contrast(mark, "panel") >= 3.0, mark


# --- events ---------------------------------------------------------------------------------------


def test_events(fast: Running) -> None:
    with fast.http.stream("GET", "/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        (first, model), (second, sample), (_, later) = read_events(response.iter_lines(), 3)
    assert first == "model" and model["name"] == "fake-model" and model["layers"] == []
    assert second == "sample" and sample["up"] and sample["engine"]["queued"] == 0
    assert 0.9 < later["time_s"] - sample["time_s"] < 3.0
    assert sample["replies"] == 0 and sample["restarts"] == 0


@pytest.mark.slow
def test_one_task_asks_for_all_who_watch(fast: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    stats = fast.backend.stats

    def counted() -> dict[str, Any]:
        asked.append(time.monotonic())
        return stats()

    monkeypatch.setattr(fast.backend, "stats", counted)
    with contextlib.ExitStack() as stack:
        watched = [stack.enter_context(fast.http.stream("GET", "/events")).iter_lines() for _ in range(4)]
        for lines in watched:
            read_events(lines, 4)
    assert all(b - a > 0.9 for a, b in itertools.pairwise(asked)) and 3 <= len(asked) <= 8
    feed = fast.app.state.feed
    wait_until(lambda: feed.watchers == 0)
    n = len(asked)
    time.sleep(1.5)
    assert len(asked) <= n + 1  # nobody watches


@pytest.mark.slow
def test_samples_go_on_after_whatever_went_wrong(fast: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = list[int]()
    health = fast.backend.health

    async def once(patience_s: float) -> Health:
        failed.append(1)
        if len(failed) == 2:
            raise RuntimeError("can't start new thread")
        return await health(patience_s)

    monkeypatch.setattr(fast.backend, "health", once)
    with fast.http.stream("GET", "/events") as response:
        read_events(response.iter_lines(), 5)
    assert len(failed) >= 3


def test_not_everybody_can_watch(fast: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = fast.app.state.feed
    wait_until(lambda: feed.watchers == 0)  # of the tests before
    monkeypatch.setattr("spark.server.events.MAX_WATCHERS", 1)
    with fast.http.stream("GET", "/events") as response:
        lines = response.iter_lines()
        read_events(lines, 2)
        assert fast.http.get("/events").status_code == 503


def test_many_who_come_at_once_take_no_more_places_than_there_are(fast: Running) -> None:
    feed = fast.app.state.feed
    wait_until(lambda: feed.watchers == 0)
    for _ in range(2):  # and all places are free again
        with contextlib.ExitStack() as stack:
            made = [stack.enter_context(connected(fast.port)) for _ in range(40)]
            for one in made:
                one.sendall(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answers = [one.recv(12).split()[1] for one in made]
            assert answers.count(b"200") == events.MAX_WATCHERS and answers.count(b"503") == 24, answers
        wait_until(lambda: feed.watchers == 0)


def test_the_key_guards_the_events_and_not_the_page() -> None:
    with running(api_key="k\u00e9y") as made:
        assert all(made.http.get(path).status_code == 200 for path in page.PATHS)
        assert made.http.get("/events").status_code == 401
        with made.http.stream("GET", "/events", headers={"x-api-key": "k\u00e9y".encode()}) as response:
            read_events(response.iter_lines(), 2)


def test_a_long_step_and_a_dead_daemon_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "EVERY_S", 0.1)
    with running(fake(step_s=1.0)) as made, made.http.stream("GET", "/events") as response:
        lines = response.iter_lines()

        def until(condition: Any) -> None:
            samples = (json.loads(line[6:]) for line in lines if line.startswith("data: "))
            assert any(condition(sample) for sample in samples)

        until(lambda s: "engine" in s)
        thread = threading.Thread(target=made.ask, args=("crash",))
        thread.start()
        until(lambda s: s.get("replies") and "engine" not in s)
        until(lambda s: s.get("up") is False)
        thread.join()
        made.ask("a")  # which starts it again
        until(lambda s: s.get("name") == "fake-model")


def test_the_map_of_residency() -> None:
    state = SlotState.empty((3, 2), 5)
    fill(state, Placement((3, 2), pinned=((4, 0), ()), cached=((2,), (1,)), expert_bytes=(1, 1)))
    residency = object.__new__(Residency)
    residency.live = state
    residency.device = type("Host", (), {"read": staticmethod(np.asarray)})
    assert residency.map() == ["p.c.p", ".c..."]
    residency.live = SlotState.empty((), 0)
    assert residency.map() == []


@pytest.mark.slow
def test_who_only_watches_keeps_no_server_running(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, url), httpx.stream("GET", f"{url}/events", timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        read_events(lines, 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5.0) == 0


# --- in a browser ---------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[Any, str]]:
    """`spark serve` of the bundled model."""
    arguments = ["serve", NANO, "--port", "0", "--device", "cpu", "--spark", "--profile", "p.csv", "--residency", "60",
                 "--cache-slots", "8"]  # fmt: skip
    with started(*arguments, cwd=folder, tmp=folder) as process:
        line = next(line for line in process.stderr if "is served at" in line)
        yield process, line.split()[-1].removesuffix("/v1")


@pytest.fixture(scope="module")
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    """Chromium: the system's, or the one that Playwright brought. Under --need-chromium none is a failure."""
    missing = pytest.fail if request.config.getoption("--need-chromium") else pytest.skip
    try:
        from playwright import sync_api as playwright
    except ImportError:
        missing("there is no Playwright")
    with playwright.sync_playwright() as driver:
        found = map(shutil.which, ("chromium", "chromium-browser", "google-chrome", driver.chromium.executable_path))
        path = next(filter(None, found), None)
        if path is None:
            missing("there is no Chromium")
        sandbox = [] if os.geteuid() else ["--no-sandbox"]  # which root cannot have
        with contextlib.closing(driver.chromium.launch(executable_path=path, args=sandbox)) as made:
            yield made


@contextlib.contextmanager
def opened(browser: Browser, url: str, **settings: Any) -> Iterator[tuple[Page, list[str]]]:
    """A page, and what it says on the console: errors, what its policy forbids."""
    with contextlib.closing(browser.new_page(**settings)) as made:
        said: list[str] = []
        made.on("console", lambda message: said.append(message.text))
        made.on("pageerror", lambda error: said.append(str(error)))
        made.set_default_timeout(WAIT_MS)
        made.goto(url)
        yield made, said


def wait_for(shown: Page, script: str) -> None:
    # Not wait_for_function, which the page's policy forbids: it evaluates text.
    wait_until(lambda: shown.evaluate(script))


COLORS = """() => {
  const map = document.getElementById("map"), canvas = new OffscreenCanvas(map.width, map.height);
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  pen.drawImage(map, 0, 0);
  const data = new Uint32Array(pen.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  const style = getComputedStyle(document.documentElement);
  const seen = new Set(data);
  return ["pinned", "cached", "dot"].map((name) => {
    const value = parseInt(style.getPropertyValue("--" + name).trim().slice(1), 16);
    return seen.has(((0xff << 24) | ((value & 255) << 16) | (value & 0xff00) | (value >> 16)) >>> 0);
  });
}"""


@pytest.mark.slow
def test_the_page_shows_a_server_at_work(browser: Browser, tmp_path: Path) -> None:
    ask = {"messages": [{"role": "user", "content": "def f(x):\n" * 40}], "max_tokens": 300, "temperature": 1}
    done = threading.Event()

    def work(url: str) -> None:
        seed = 0
        with contextlib.suppress(httpx.HTTPError):
            while not done.is_set():
                httpx.post(f"{url}/v1/chat/completions", json=ask | {"seed": seed}, timeout=PATIENCE_S)
                seed += 1

    with serving(tmp_path) as (process, url):
        thread = threading.Thread(target=work, args=(url,))
        thread.start()
        try:
            with opened(browser, url, reduced_motion="reduce") as (shown, said):
                text = lambda name: shown.locator(f"#{name}").inner_text()  # noqa: E731
                wait_for(shown, "Number(document.getElementById('written').textContent) > 0")
                wait_for(shown, "document.getElementById('hits').textContent.endsWith('%')")
                assert text("name") == "nano" and "Spark" in shown.title()
                found = re.fullmatch(
                    r"6 layers of 32 experts: (\d+) pinned, (\d+) cached, (\d+) not resident.", text("map-summary")
                )
                assert found and sum(map(int, found.groups())) == 6 * 32 and all(map(int, found.groups()))
                assert shown.evaluate(COLORS) == [True, True, True]
                assert "%" in text("kv") and shown.get_by_role("meter", name="KV cache").is_visible()
                assert "MiB of fast memory" in text("memory-summary") and "slots of experts" in text("memory-table")
                shown.emulate_media(color_scheme="dark")
                wait_for(shown, f"({COLORS})().every(Boolean)")

                canvas = shown.get_by_role("img", name="Where experts are")
                canvas.focus()
                shown.keyboard.press("ArrowRight")
                shown.keyboard.press("ArrowDown")
                assert re.fullmatch(r"Layer 1, expert 0: [a-z ,]+\.", text("cell"))
                canvas.hover(position={"x": 31, "y": 20})
                assert text("cell").startswith("Layer 0, expert 0: ")
                shown.get_by_text("By layer").click()
                wait_for(shown, "document.getElementById('layers').rows.length === 6")

                shown.set_viewport_size({"width": 320, "height": 600})
                wait_for(shown, "document.documentElement.scrollWidth <= 320")
                assert said == []
                done.set()
                thread.join()
                wait_for(shown, "document.getElementById('state').textContent === 'idle'")
                process.send_signal(signal.SIGTERM)
                wait_for(shown, "document.getElementById('state').textContent.startsWith('no connection')")
        finally:
            done.set()
            thread.join()


class Counted:
    """The counters of a busy engine, which has written 50 tokens more each time it is asked, if the daemon answers."""

    def __init__(self, made: Running) -> None:
        self.stats = made.backend.stats
        self.busy, self.n = True, 0
        self.blocks = {"total": 64, "free": 8, "reclaimable": 40}

    def __call__(self) -> dict[str, Any]:
        found = self.stats()  # which waits for the daemon
        if not found:
            return {}
        self.n += self.busy
        n = self.n
        tokens = {"written": 50 * n, "read": 100 * n, "reused": 0}
        experts = {"hits": 30 * n, "misses": 10 * n, "hits_by_layer": [30 * n], "misses_by_layer": [10 * n]}
        return {"tokens": tokens, **experts, "map": ["pc." if n % 2 else "p.c"], "kv_blocks": self.blocks}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Running, Counted]]:
    with running() as made:
        counters = Counted(made)
        monkeypatch.setattr(made.backend, "stats", counters)
        yield made, counters


RATES = """() => [
  ...["state", "written", "read", "hits"].map((id) => document.getElementById(id).textContent),
  /[0-9,]+(?= misses a second)|$/.exec(document.getElementById("map").getAttribute("aria-label") ?? "")[0],
]"""
BUSY = f"(([_, written, read, hits, misses]) => written > 0 && read > 0 && hits === '75.0%' && misses > 0)(({RATES})())"


def idle(shown: Page, state: str) -> None:
    """Wait until the page says so and that nothing goes on."""
    wait_until(lambda: shown.evaluate(RATES) == [state, "0", "0", "–", "0"])


@pytest.mark.slow
def test_rates_fall_to_zero_when_nothing_is_counted(browser: Browser, counted: tuple[Running, Counted]) -> None:
    made, counters = counted
    with opened(browser, f"http://127.0.0.1:{made.port}") as (shown, said):
        wait_for(shown, BUSY)
        counters.busy = False
        idle(shown, "idle")
        counters.busy = True
        wait_for(shown, BUSY)
        assert said == []


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the state of a process is read in /proc")
def test_rates_of_a_daemon_that_is_stopped_and_of_one_that_is_down(
    browser: Browser, counted: tuple[Running, Counted]
) -> None:
    made, _ = counted
    with opened(browser, f"http://127.0.0.1:{made.port}") as (shown, said):
        wait_for(shown, BUSY)
        daemon = psutil.Process(made.backend.client().pid)
        daemon.suspend()
        idle(shown, "the daemon is stopped (SIGSTOP)")
        daemon.resume()
        wait_for(shown, BUSY)
        assert shown.evaluate(RATES)[0] == "idle"
        daemon.kill()
        down = f"(([state, ...rates]) => state.startsWith('the daemon is down') ? rates : null)(({RATES})())"
        wait_until(lambda: shown.evaluate(down) is not None)
        assert shown.evaluate(down) == ["0", "0", "–", ""]  # at once, and there is no map
        assert shown.locator("#kv").inner_text() == "–" and not shown.locator("#map").is_visible()
        assert "no experts" not in shown.locator("#map-summary").inner_text()
        made.ask("a")
        wait_for(shown, BUSY)
        assert shown.locator("#map").is_visible() and said == []


@pytest.mark.slow
def test_a_long_step_is_said_to_be_one(browser: Browser, counted: tuple[Running, Counted]) -> None:
    made, _ = counted
    with opened(browser, f"http://127.0.0.1:{made.port}") as (shown, _):
        wait_for(shown, BUSY)
        asking = threading.Thread(target=made.ask, args=("hang",))
        asking.start()
        idle(shown, "in a long step")
        psutil.Process(made.backend.client().pid).kill()
        asking.join()


@pytest.mark.slow
def test_the_time_a_tab_was_hidden_is_not_now(browser: Browser, counted: tuple[Running, Counted]) -> None:
    made, counters = counted
    hide = """(hidden) => {
      Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    watch = """() => {
      const written = document.getElementById("written");
      window.seen = [];
      new MutationObserver(() => window.seen.push(written.textContent)).observe(written, { childList: true });
    }"""
    with opened(browser, f"http://127.0.0.1:{made.port}") as (shown, said):
        wait_for(shown, BUSY)
        shown.evaluate(watch)
        shown.evaluate(hide, True)
        wait_until(lambda: made.app.state.feed.watchers == 0)
        counters.n += 1_000_000
        shown.evaluate(hide, False)
        wait_until(lambda: sum(text != "–" for text in shown.evaluate("window.seen")) >= 1)
        wait_for(shown, BUSY)
        seen = shown.evaluate("window.seen")
        assert seen[0] == "–" and max(float(text.replace(",", "")) for text in seen if text != "–") < 1000
        assert said == []


@pytest.mark.slow
def test_a_server_that_says_nothing_leaves_no_rates(browser: Browser, counted: tuple[Running, Counted]) -> None:
    made, _ = counted
    with opened(browser, f"http://127.0.0.1:{made.port}") as (shown, _):
        wait_for(shown, BUSY)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(made.app.state.feed, "_tell", lambda: asyncio.sleep(0))
            wait_for(shown, "document.getElementById('state').textContent === 'no word from the server'")
            assert shown.evaluate(RATES)[1:4] == ["–"] * 3
        wait_for(shown, BUSY)


def test_rates_are_means_over_their_windows(browser: Browser, fast: Running) -> None:
    """Of one sample nothing is known; a long step is told late, and counts for all of the time it took."""
    script = """async (given) => {
      const { Counters } = await import("/rates.js");
      const made = new Counters(10);
      return given.map(([time, n]) => {
        made.take(time, n === null ? null : { n });
        return made.rate(3, (told) => told.n);
      });
    }"""
    rates = [
        ((0, 0), None), ((1, 50), 50), ((2, 100), 50), ((3, 150), 50), ((4, 150), 100 / 3), ((5, 150), 50 / 3),
        ((6, 150), 0), ((7, 210), 20), ((8, None), 20), ((9, None), 20), ((10, None), 0), ((11, None), 0),
        ((15, 370), 20), ((21, 99999), None), ((22, 99999), 0), ((4, 5), None), ((5, 3), 0),
    ]  # fmt: skip
    with opened(browser, f"http://127.0.0.1:{fast.port}") as (shown, _):
        found = shown.evaluate(script, [given for given, _ in rates])
    assert found == pytest.approx([expected for _, expected in rates])


def test_the_meter_tells_requests_from_prefixes(browser: Browser, counted: tuple[Running, Counted]) -> None:
    made, counters = counted
    with opened(browser, f"http://127.0.0.1:{made.port}") as (shown, said):
        meter = shown.get_by_role("meter", name="KV cache")
        meter.wait_for()
        assert shown.locator("#kv").inner_text() == "25%"
        now = {name: meter.get_attribute(f"aria-{name}") for name in ("valuemin", "valuenow", "valuemax", "valuetext")}
        text = "Of 64 blocks 16 held by requests, 40 by prefixes, given up when needed, 8 free"
        assert now == {"valuemin": "0", "valuenow": "16", "valuemax": "64", "valuetext": text}
        parts = shown.get_by_role("list", name="Blocks of the KV cache").get_by_role("listitem")
        assert parts.all_inner_texts() == ["16 held by requests", "40 by prefixes, given up when needed", "8 free"]
        widths = [shown.locator(f"#kv-meter .{name}").bounding_box()["width"] for name in ("held", "spare")]
        assert widths[1] > 2 * widths[0] > 0
        counters.blocks = {"total": 64, "free": 0, "reclaimable": 64}
        wait_for(shown, "document.getElementById('kv').textContent === '0%'")
        assert meter.get_attribute("aria-valuenow") == "0" and said == []


@pytest.mark.slow
def test_the_list_of_requests(browser: Browser) -> None:
    """Eight at once on a slow daemon, by keyboard and on a phone; then how they ended."""
    with running(fake(step_s=0.02)) as made, opened(browser, f"http://127.0.0.1:{made.port}") as (shown, said):
        wait_for(shown, "document.getElementById('requests-summary').textContent === 'None yet.'")
        threads = [threading.Thread(target=made.ask, args=("x" * 100,), kwargs={"n": 1 + (i == 7)}) for i in range(8)]
        for thread in threads:
            thread.start()
        rows = "[...document.getElementById('open-requests').rows]"
        rows += ".map((row) => [...row.cells].map((cell) => cell.textContent))"
        wait_for(shown, f"{rows}.length === 8")
        wait_for(shown, f"{rows}.some((cells) => cells[7] === 'writing' && cells[5] > 0 && cells[6] > 0)")
        assert "writing" in shown.locator("#requests-summary").inner_text()
        region = shown.get_by_role("region", name="List of requests")
        table = region.get_by_role("table")
        heads = ["No.", "API", "Open for", "Prompt", "Reused", "Written", "Tokens/s", "State"]
        assert table.get_by_role("columnheader").all_inner_texts() == heads
        assert table.get_by_role("rowheader").count() >= 8
        assert shown.locator("[aria-live] table, table[aria-live], [role=status] table").count() == 0
        shown.evaluate("[...document.getElementById('open-requests').rows].at(-1).cells[1].id = 'kept'")
        shown.set_viewport_size({"width": 320, "height": 600})
        wait_for(shown, "document.documentElement.scrollWidth <= 320")
        for thread in threads:
            thread.join()
        ended = rows.replace("open-", "ended-")
        wait_for(shown, f"{rows}.length === 0 && {ended}.length === 8")
        found = shown.evaluate(ended)
        assert all(re.fullmatch(r"done, \d+ s ago", cells[7]) for cells in found)
        assert sorted(cells[1] for cells in found) == ["chat"] * 7 + ["chat, 2 choices"]
        assert {cells[5] for cells in found} == {"100", "200"} and float(found[0][6]) > 0
        assert shown.locator("#kept").count() == 1  # the same row, whatever it says now
        assert shown.locator("#requests-summary").inner_text() == "None is open."
        shown.locator("body").press("Tab")
        wait_for(shown, "document.activeElement.getAttribute('aria-label') === 'List of requests'")
        shown.keyboard.press("ArrowRight")
        wait_until(lambda: region.evaluate("(it) => it.scrollLeft") > 0)
        assert said == []


def test_more_requests_than_are_shown(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as made:
        full = Board()
        open_ones = [full.request("messages", 1 + (i == 1)) for i in range(40)]
        first, *_ = (one.__enter__() for one in open_ones)
        first.prompt_tokens = 1000
        first.choice().take(Usage(450, 0, 64))
        monkeypatch.setattr(made.app.state.feed, "_board", full)
        with opened(browser, f"http://127.0.0.1:{made.port}") as (shown, said):
            shown.get_by_text("and 24 more waiting").wait_for()
            assert shown.locator("#requests-summary").inner_text() == "40 open: 1 reading, 39 waiting."
            lines = shown.locator("#open-requests tr")
            assert lines.count() == 16
            cells = lines.first.locator("th, td").all_inner_texts()
            assert cells[:2] == ["1", "messages"] and cells[3:] == ["1,000", "64", "0", "–", "reading 45%"]
            assert lines.nth(1).locator("td").first.inner_text() == "messages, 2 choices"
            assert said == []


def test_a_model_without_experts(browser: Browser, fast: Running) -> None:
    with opened(browser, f"http://127.0.0.1:{fast.port}") as (shown, said):
        wait_for(shown, "document.getElementById('map-summary').textContent !== ''")
        assert "no experts" in shown.locator("#map-summary").inner_text()
        assert not shown.locator("#map").is_visible() and not shown.locator("#hits-figure").is_visible()
        assert said == []


@pytest.mark.slow
def test_the_page_asks_for_the_key(browser: Browser) -> None:
    with running(api_key="k\u00e9y \u2603") as made, opened(browser, f"http://127.0.0.1:{made.port}") as (shown, _):
        field = shown.get_by_label("API key")
        for key, visible in (("wrong", False), ("k\u00e9y \u2603", True)):
            field.fill(key)
            shown.get_by_role("button", name="Connect").click()
            wait_until(lambda visible=visible: shown.locator("#main").is_visible() == visible)
            if not visible:
                shown.get_by_text("not the right one").wait_for()
        assert not field.is_visible()
        assert shown.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        shown.reload()
        field.wait_for()
