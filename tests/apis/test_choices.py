"""Several choices of a reply, several prompts of a request, penalties."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from engine.ground.errors import DaemonError
from spark.server import app as server
from spark.server import generation
from spark.speech.conversation import Finish, Part, Text, Usage
from tests.apis.test_sdks import ARGUMENTS, CALL, FUNCTION
from tests.server.test_server import PATIENCE_S, Running, body, events, fake, running, wait_until


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running() as made:
        yield made


@pytest.fixture(scope="module")
def client(served: Running) -> Iterator[OpenAI]:
    url = f"http://127.0.0.1:{served.port}/v1"
    with OpenAI(api_key="none", base_url=url, timeout=PATIENCE_S, max_retries=0) as made:
        yield made


def said(*texts: str) -> Any:
    return [{"role": "user", "content": text} for text in texts]


def seed_of(seed: int, k: int) -> int:
    """As docs/server.md has it."""
    return seed if k == 0 else int.from_bytes(hashlib.sha256(f"{seed}:{k}".encode()).digest()[:8], "big")


def test_choices_are_requests_with_seeds_that_follow(client: OpenAI) -> None:
    made = client.chat.completions.create(model="any", messages=said("draw"), n=3, seed=7)
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    assert [choice.message.content for choice in made.choices] == [f"{seed_of(7, k):x}" for k in range(3)]
    for k in range(3):
        alone = client.chat.completions.create(model="any", messages=said("draw"), seed=seed_of(7, k) - (k > 0) * 2**64)
        assert alone.choices[0].message.content == made.choices[k].message.content
    assert made.usage and alone.usage and made.usage.prompt_tokens == alone.usage.prompt_tokens
    assert made.usage.completion_tokens == sum(len(choice.message.content or "") for choice in made.choices)
    other = client.chat.completions.create(model="any", messages=said("draw"), n=2)
    assert other.choices[0].message.content != made.choices[0].message.content  # without a seed, any


def test_choices_of_a_stream(client: OpenAI, served: Running) -> None:
    options = {"stream_options": {"include_usage": True}}
    chunks = events(served.ask("draw", stream=True, n=3, seed=7, **options))
    assert len({chunk["id"] for chunk in chunks}) == 1
    *chunks, last = chunks
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == sum(
        len(f"{seed_of(7, k):x}") for k in range(3)
    )
    for k in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == k]
        assert "".join(choice["delta"].get("content", "") for choice in own) == f"{seed_of(7, k):x}"
        assert own[0]["delta"]["role"] == "assistant" and own[-1]["finish_reason"] == "stop"
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
    with client.chat.completions.stream(model="any", messages=said(CALL), tools=[FUNCTION], n=2) as stream:
        for _ in stream:
            pass
        made = stream.get_final_completion()
    for choice in made.choices:  # each has calls of its own
        (call,) = choice.message.tool_calls or []
        assert choice.finish_reason == "tool_calls" and call.function.parsed_arguments in (None, ARGUMENTS)


def test_budgets_and_forms_go_with_each_choice(served: Running) -> None:
    messages = body("abcdef", "think")["messages"]
    wish = {"messages": messages, "n": 2, "reasoning": {"max_tokens": 3}}
    made = served.http.post("/v1/chat/completions", json=wish).json()
    assert [choice["message"]["reasoning_content"] for choice in made["choices"]] == ["abc"] * 2
    assert [choice["message"]["content"] for choice in made["choices"]] == ["abcdef"] * 2
    assert made["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6
    wish = {"messages": messages, "n": 2, "max_tokens": 2, "temperature": 0}
    made = served.http.post("/v1/chat/completions", json=wish).json()
    assert [choice["finish_reason"] for choice in made["choices"]] == ["length"] * 2


def test_prompts(client: OpenAI) -> None:
    made = client.completions.create(model="any", prompt=["ab", "cd", "e"], n=2, max_tokens=9)
    assert [choice.index for choice in made.choices] == list(range(6))
    assert [choice.text for choice in made.choices] == ["ba", "ba", "dc", "dc", "e", "e"]
    assert made.usage and (made.usage.prompt_tokens, made.usage.completion_tokens) == (5, 10)
    for prompt in ([[97, 98], [99]], ["ab", "c"]):
        found: dict[int, str] = {}
        for chunk in client.completions.create(model="any", prompt=prompt, stream=True):  # type: ignore[arg-type]
            found[chunk.choices[0].index] = found.get(chunk.choices[0].index, "") + chunk.choices[0].text
        assert found == {0: "ba", 1: "c"}
    texts = [f"{i:02}" for i in range(32)]  # more than run at a time
    made = client.completions.create(model="any", prompt=texts)
    assert [choice.text[::-1] for choice in made.choices] == texts


def test_the_prompt_is_read_once() -> None:
    with running(fake(step_s=0.01)) as made:
        reply = made.ask("x" * 300, n=4, max_tokens=60).json()
        assert made.stats()["shared"] == 3
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        text = made.http.get("/metrics").text
        prompt = reply["usage"]["prompt_tokens"]
        assert f'spark_tokens_total{{kind="read"}} {prompt}.0' in text
        assert f'spark_tokens_total{{kind="reused"}} {3 * prompt}.0' in text


def test_choices_take_places(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_REPLIES", 5)
    assert served.ask("x", n=6).status_code == 429
    assert served.ask("x", n=5).status_code == 200
    assert served.http.post("/v1/completions", json={"prompt": ["a"] * 3, "n": 2}).status_code == 429
    wait_until(lambda: "spark_replies 0.0" in served.http.get("/metrics").text)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_all(stream: bool) -> None:
    with running(fake(step_s=0.02)) as made:
        with pytest.raises(httpx.ReadTimeout):
            limit = httpx.Timeout(PATIENCE_S, read=1.5)
            with made.http.stream(
                "POST", "/v1/chat/completions", json=body("x" * 1000, n=8, stream=stream), timeout=limit
            ) as response:
                if stream:
                    for _ in response.iter_lines():
                        if made.stats()["queued"] == 8:
                            raise httpx.ReadTimeout("enough")
                response.read()
        wait_until(lambda: made.stats()["queued"] == 0)
        assert made.stats()["served"] == 0
        wait_until(lambda: "spark_replies 0.0" in made.http.get("/metrics").text)
        text = made.http.get("/metrics").text
        assert 'outcome="left"} 1.0' in text
        assert [float(line.split()[-1]) for line in text.splitlines() if 'kind="written"' in line] > [0.0]


def test_a_daemon_that_dies_ends_all(served: Running) -> None:
    before = served.backend.restarts
    assert served.ask("crash", n=4).status_code == 503
    assert served.ask("draw", n=4).status_code == 200
    assert served.backend.restarts == before + 1
    assert served.ask("refused", n=4).status_code == 400


def test_penalties(client: OpenAI, served: Running) -> None:
    """Those of the fake engine keep away what would lose more than 1."""
    made = client.chat.completions.create(model="any", messages=said("aaab"), presence_penalty=1.5)
    assert made.choices[0].message.content == "ab"
    made = client.chat.completions.create(model="any", messages=said("aaab"), frequency_penalty=0.6)
    assert made.choices[0].message.content == "aab"
    assert client.completions.create(model="any", prompt="baaa", presence_penalty=2).choices[0].text == "ab"
    again = client.responses.create(model="any", input="aaab", extra_body={"presence_penalty": 2})
    assert again.output_text == "ab"
    # They go on counting in the next generation of a reply, after a budget of reasoning.
    wish = body("abcabc", "think", reasoning={"max_tokens": 2}, presence_penalty=1.5)
    (choice,) = served.http.post("/v1/chat/completions", json=wish).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "c", "reasoning_content": "ab"}


# --- interleaving -----------------------------------------------------------------------------------


class Replies:
    """Replies that bring a part at a time, when they are let."""

    def __init__(self, n: int) -> None:
        self.running = self.most = 0
        self.closed: list[int] = []
        self.replies = [self.reply(i) for i in range(n)]

    async def reply(self, i: int) -> AsyncGenerator[list[Part] | Finish]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(2):
                await asyncio.sleep(0.001)
                yield [Text("content", f"{i}")]
            if i == 13:
                raise DaemonError("it died")
            yield Finish("stop", Usage(1, 2))
        finally:
            self.running -= 1
            self.closed.append(i)


def test_replies_are_interleaved() -> None:
    async def ask(n: int, left_after: int) -> tuple[Replies, list[tuple[int, Any]]]:
        made, found = Replies(n), []
        async with contextlib.aclosing(generation._interleaved(made.replies)) as items:
            with contextlib.suppress(DaemonError):
                async for i, item in items:
                    found.append((i, item))
                    if len(found) == left_after:
                        break
        return made, found

    made, found = asyncio.run(ask(12, 0))
    assert made.most == generation.AT_ONCE == 8 and sorted(made.closed) == list(range(12)) and made.running == 0
    assert [i for i, _ in found[:8]] == list(range(8))  # nobody waits for the others' ends
    for k in range(12):
        assert [type(item) for i, item in found if i == k] == [list, list, Finish]
    made, found = asyncio.run(ask(12, 9))
    assert made.running == 0 and len(found) == 9  # those that had begun were ended
    made, found = asyncio.run(ask(14, 0))
    assert made.running == 0 and not any(i == 13 and isinstance(item, Finish) for i, item in found)
