"""Whose prompt is made when: long conversations keep no short ones waiting, and nothing is made for who has left."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from spark.server import app as server
from spark.server import prompts as prompts_of
from spark.server.prompts import Prompts, PromptTooLongError
from spark.speech.conversation import Conversation
from spark.speech.render import Opening, Renderer
from spark.speech.sessions import Message, ToolCall
from tests.fake_tokenizer import FakeTokenizer
from tests.server.test_connections import connected, post
from tests.server.test_server import PATIENCE_S, Running, fake, replies, running, wait_until

COUNT = "/v1/messages/count_tokens"
MANY = 5000  # messages, of few characters
LONG = 300_000  # characters
CALLS = tuple(ToolCall(f"{i}", "read", {}) for i in range(MANY))
TOOLS: Any = tuple({"type": "function", "function": {"name": f"{i}"}} for i in range(1000))


class Held:
    """Renderings of conversations that are long, which wait until they are let go; the others are made."""

    def __init__(self) -> None:
        self.begun: list[str] = []  # what the last message of each says, as far as it came to it
        self.go = threading.Event()
        self._render = Renderer.opening

    def opening(self, renderer: Renderer, messages: Any, tools: Any = (), **more: Any) -> Opening:
        name = messages[-1].content
        self.begun.append(name)
        if name.startswith("long"):
            assert self.go.wait(PATIENCE_S)
            return Opening([1, 2, 3], "")
        return self._render(renderer, messages, tools, **more)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held()
    monkeypatch.setattr(Renderer, "opening", lambda *args, **more: made.opening(*args, **more))
    yield made
    made.go.set()


def conversation(name: str, *before: Message, **more: Any) -> Conversation:
    return Conversation((*before, Message("user", name)), **more).measured(1 << 30)


LONG_ONES = {
    "messages": conversation("long messages", *[Message("user", "")] * MANY),
    "calls": conversation("long calls", Message("assistant", "", "", CALLS)),
    "tools": conversation("long tools", *[Message("user", "")] * 1000, tools=TOOLS),
    "text": conversation("long text", Message("user", "x" * LONG)),
}


@pytest.mark.parametrize("kind", LONG_ONES)
def test_short_conversations_wait_for_no_long_one(held: Held, kind: str) -> None:
    """Whether that has many characters, messages, calls or tools."""

    async def ask() -> None:
        prompts = Prompts(FakeTokenizer(), lambda: 1 << 18)  # type: ignore[arg-type]
        long = [asyncio.create_task(prompts.prompt(LONG_ONES[kind], "messages")) for _ in range(3)]
        while not held.begun:
            await asyncio.sleep(0.001)
        async with asyncio.timeout(PATIENCE_S):
            for name in ("so", "x" * 4000, "x" * 50_000):
                assert len((await prompts.prompt(conversation(name), "messages")).opening.tokens) > len(name)
                assert await prompts.count(conversation(name), "messages") > len(name)
            too_long = conversation("long", Message("user", "x" * LONG * 30))
            with pytest.raises(PromptTooLongError, match="characters"):
                await prompts.prompt(too_long, "messages")
        assert len([name for name in held.begun if name.startswith("long")]) == 1  # one after the other
        held.go.set()
        for one in await asyncio.gather(*long):
            assert one.opening.tokens == [1, 2, 3]
        prompts.close()

    asyncio.run(ask())


def test_whoever_leaves_before_his_turn_takes_none(held: Held) -> None:
    async def ask() -> None:
        prompts = Prompts(FakeTokenizer(), lambda: 1 << 18)  # type: ignore[arg-type]
        long = [
            asyncio.create_task(prompts.count(conversation(f"long {i}", Message("user", "x" * LONG)), "messages"))
            for i in range(4)
        ]
        while not held.begun:
            await asyncio.sleep(0.001)
        for task in long[:3]:  # also the one that is being made, which cannot be broken off
            task.cancel()
        await asyncio.wait(long[:3])
        assert held.begun == ["long 0"]  # nor does another one begin beside it
        held.go.set()
        assert await long[3] == 3 and held.begun == ["long 0", "long 3"]
        prompts.close()

    asyncio.run(ask())


def turns(monkeypatch: pytest.MonkeyPatch, *begun: str, aged_s: float = 1e9) -> list[str]:
    """In which order prompts are made that wait for `long 0`, by the last of their messages: `NAME LENGTH`."""
    monkeypatch.setattr(prompts_of, "_AGED_S", aged_s)
    rendered = Held()
    monkeypatch.setattr(Renderer, "opening", lambda *args, **more: rendered.opening(*args, **more))

    async def ask() -> None:
        prompts = Prompts(FakeTokenizer(), lambda: 1 << 18)  # type: ignore[arg-type]
        first = asyncio.create_task(prompts.count(conversation("long 0", Message("user", "x" * 50_000)), "messages"))
        while not rendered.begun:
            await asyncio.sleep(0.001)
        more = []
        for name in begun:
            before = Message("user", "x" * int(name.split()[1]))
            more.append(asyncio.create_task(prompts.count(conversation(name, before), "messages")))
            await asyncio.sleep(0.001)
        rendered.go.set()
        await asyncio.gather(first, *more)
        prompts.close()

    asyncio.run(ask())
    return rendered.begun[1:]


def test_the_shortest_that_waits_is_made_first(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [f"{i} {60_000 + i}" for i in range(20)]
    assert turns(monkeypatch, *many, "chat 9000", "note 8000") == ["note 8000", "chat 9000", *many]
    # Who has waited for long has every second turn: none waits for ever, nor behind all that came before.
    first = ["0 60000", "1 60001"]
    found = turns(monkeypatch, *first, *(f"{i} {9000 + i}" for i in range(4)), aged_s=-1.0)
    assert found == ["0 9000", "0 60000", "1 9001", "1 60001", "2 9002", "3 9003"]


def test_what_fails_and_what_is_closed_keeps_no_one(monkeypatch: pytest.MonkeyPatch, held: Held) -> None:
    async def ask() -> None:
        prompts = Prompts(FakeTokenizer(), lambda: 1 << 18)  # type: ignore[arg-type]

        def count(name: str) -> asyncio.Task[int]:
            long = conversation(name, Message("user", "x" * LONG))
            return asyncio.create_task(prompts.count(long, "messages"))

        monkeypatch.setattr(FakeTokenizer, "encode", None)
        held.go.set()
        with pytest.raises(TypeError):
            await count("fails")
        held.go.clear()
        made, left = count("long 0"), [count(f"long {i}") for i in (1, 2)]
        while "long 0" not in held.begun:
            await asyncio.sleep(0.001)
        prompts.close()
        await asyncio.wait(left, timeout=PATIENCE_S)
        assert all(task.cancelled() for task in left)
        held.go.set()
        assert await made == 3

    asyncio.run(ask())


# --- of the server ------------------------------------------------------------------------------------


def asked(name: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "x" * LONG}, {"role": "user", "content": name}]
    return {"model": "x", "max_tokens": 1, "messages": messages}


@contextlib.contextmanager
def waiting(made: Running, path: str, *names: str) -> Iterator[None]:
    """Clients who wait for long prompts."""
    with contextlib.ExitStack() as held:
        for name in names:
            content = httpx.Request("POST", "http://x", json=asked(name)).content
            held.enter_context(connected(made.port, post(path, content)))
        yield


@pytest.fixture(scope="module")
def roomy() -> Iterator[Running]:
    with running(fake(ctx=1 << 16)) as made:
        yield made


def test_counting_takes_a_place(roomy: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = {"messages": [{"role": "user", "content": "x"}]}
    assert roomy.http.post(COUNT, json=messages).json()["input_tokens"] > 1
    monkeypatch.setattr(server, "MAX_REPLIES", 0)
    refused = roomy.http.post(COUNT, json=messages)
    assert refused.status_code == 529 and refused.json()["error"]["type"] == "overloaded_error"


@pytest.mark.slow
@pytest.mark.parametrize("path", [COUNT, "/v1/messages", "/v1/chat/completions"])
def test_a_client_who_leaves_gives_his_place_back(roomy: Running, held: Held, path: str) -> None:
    """Also while the prompts of others are made, and then nothing is rendered for him."""
    with waiting(roomy, path, "long 0"):
        wait_until(lambda: held.begun == ["long 0"])
        with waiting(roomy, path, "long 1", "long 2"):
            wait_until(lambda: replies(roomy) == 3)
        wait_until(lambda: replies(roomy) == 1)
    wait_until(lambda: replies(roomy) == 0)
    held.go.set()
    assert roomy.ask("so").status_code == 200 and held.begun[:-1] == ["long 0"]
