"""What is asked of a daemon from the event loop, and how it ends where the daemon does."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.ground import protocol
from engine.ground.errors import DaemonError, DeadlineError, SparkError
from engine.ground.sampling import Sampling
from spark.daemon.client import Deadlines
from spark.server import supervisor
from spark.server.supervisor import Generation, Supervisor, _Mail
from tests.server.test_server import PATIENCE_S, fake

HERE = Path(__file__).parents[1]


@contextlib.contextmanager
def supervised(command: list[str], silence_s: float = PATIENCE_S) -> Iterator[Supervisor]:
    made = Supervisor(lambda: command, Deadlines(PATIENCE_S, silence_s, None, grace_s=0.5), None)
    try:
        yield made
    finally:
        made.close()


def rogue(name: str) -> list[str]:
    return [sys.executable, "-S", str(HERE / "rogue_daemon.py"), name]


async def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)


async def events(made: Generation) -> list[protocol.Event]:
    """All events, up to the answer."""
    found: list[protocol.Event] = []
    while not found or not isinstance(found[-1], protocol.Done):
        event = await made.next(PATIENCE_S)
        assert event is not None
        found.append(event)
    return found


def generation(made: Supervisor, n_tokens: int = 3, first: int = 1) -> Generation:
    return Generation(made, [first + i % 200 for i in range(n_tokens)], 2, Sampling())


@pytest.mark.parametrize("n_tokens", [3, supervisor._AT_ONCE_TOKENS + 1, 300_000])
def test_a_request_short_or_long(n_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written at once, by a thread, and a line that no pipe holds: the events are the same, in order."""
    aside: list[Callable[[], None]] = []
    through = Generation._aside

    def noted(self: Generation, work: Callable[[], None]) -> None:
        aside.append(work)
        through(self, work)

    async def ask(made: Supervisor) -> list[protocol.Event]:
        return await events(generation(made, n_tokens))

    monkeypatch.setattr(Generation, "_aside", noted)
    with supervised(fake(ctx=1 << 20)) as made:
        progress, first, second, done = asyncio.run(ask(made))
    assert bool(aside) == (n_tokens > 3)
    last = 1 + (n_tokens - 1) % 200
    assert isinstance(progress, protocol.Progress) and progress.total_tokens == n_tokens
    assert isinstance(first, protocol.Tokens) and first.tokens == (last,)
    assert isinstance(second, protocol.Tokens) and second.tokens == (last - 1 if last > 1 else 200,)
    assert isinstance(done, protocol.Done) and done.usage.prompt_tokens == n_tokens


@pytest.mark.parametrize("awaited", [True, False])
def test_one_that_falls_silent_is_ended_also_while_nobody_awaits_it(awaited: bool) -> None:
    async def ask(made: Supervisor) -> SparkError:
        one = generation(made)
        if not awaited:
            await until(lambda: not made.alive)
        with pytest.raises(SparkError) as raised:
            await events(one)
        return raised.value

    with supervised(rogue("silent_after_a_token"), silence_s=0.5) as made:
        error = asyncio.run(ask(made))
    assert isinstance(error, DeadlineError) and "no sign of life" in error.message


def test_one_that_reads_nothing_does_not_hold_up_the_loop() -> None:
    async def ask(made: Supervisor) -> SparkError:
        one = generation(made, 300_000)
        assert made.alive and not one.sent.done()  # to wait for it would have been to end it
        with pytest.raises(SparkError) as raised:
            await events(one)
        return raised.value

    with supervised(rogue("reads_nothing"), silence_s=0.5) as made:
        error = asyncio.run(ask(made))
    assert isinstance(error, DeadlineError) and "did not read" in error.message


def test_one_that_leaves_its_output_open_behind() -> None:
    async def ask(made: Supervisor) -> None:
        with pytest.raises(DaemonError, match="exit status 9"):
            await events(generation(made))

    with supervised(rogue("leaves_a_child_behind")) as made:
        asyncio.run(ask(made))


def test_all_are_told_that_it_died() -> None:
    async def ask(made: Supervisor) -> list[object]:
        before = [generation(made, 60) for _ in range(3)]
        crashing = Generation(made, [300], 2, Sampling())  # of tests/fake_engine.py
        made_of_it: list[object] = await asyncio.gather(*map(events, [crashing, *before]), return_exceptions=True)
        assert isinstance(await crashing.sent, supervisor.SentRequest)
        return [*made_of_it, *await asyncio.gather(events(generation(made)), return_exceptions=True)]

    with supervised(fake(step_s=0.05)) as made:
        *told, again = asyncio.run(ask(made))
        assert made.restarts == 1
    assert isinstance(told[0], DaemonError) and all(isinstance(one, DaemonError | list) for one in told[1:])
    assert isinstance(again, list)


def test_a_start_that_fails_fails_for_all_who_waited_for_it() -> None:
    starts, command = list[int](), fake()
    fails = [sys.executable, "-c", "import time; time.sleep(0.5); raise SystemExit(9)"]

    def commands() -> list[str]:
        starts.append(1)
        return command if len(starts) == 1 else fails

    async def ask() -> list[object]:
        with pytest.raises(DaemonError):
            await events(Generation(made, [300], 2, Sampling()))  # of tests/fake_engine.py: it ends
        return await asyncio.gather(*(events(generation(made)) for _ in range(6)), return_exceptions=True)

    made = Supervisor(commands, Deadlines(PATIENCE_S, PATIENCE_S, None, grace_s=0.5), None)
    try:
        told = asyncio.run(ask())
        assert all(isinstance(one, DaemonError) and "cannot be started again" in one.message for one in told), told
        assert len(starts) == 2
        with pytest.raises(DaemonError):  # who comes later tries again
            made.client()
        assert len(starts) == 3
    finally:
        made.close()


def test_mail_comes_in_order_from_every_thread() -> None:
    n_threads, n = 3, 500

    async def take() -> list[tuple[int, int]]:
        taken: list[tuple[int, int]] = []
        mail = _Mail(asyncio.get_running_loop())

        def post(thread: int) -> None:
            for i in range(n):
                mail.post(lambda one: taken.append(one), (thread, i))  # type: ignore[arg-type]

        threads = [threading.Thread(target=post, args=(k,)) for k in range(n_threads)]
        for thread in threads:
            thread.start()
        await until(lambda: len(taken) == n_threads * n)
        return taken

    taken = asyncio.run(take())
    for k in range(n_threads):
        assert [i for thread, i in taken if thread == k] == list(range(n))
