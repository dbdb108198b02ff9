"""The server as its clients see it: the SDKs of OpenAI and Anthropic, over the fake daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from spark.server import app as server
from spark.server import generation
from tests.server.test_server import PATIENCE_S, Running, fake, running, wait_until

CALL = 'Let me see.\n<tool_call>\n{"name": "read", "arguments": {"path": "\u00e9.py", "n": [1, 2]}}\n</tool_call>'
ARGUMENTS = {"path": "\u00e9.py", "n": [1, 2]}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
FUNCTION: Any = {"type": "function", "function": {"name": "read", "description": "d", "parameters": SCHEMA}}
THOUGHT = "hm\n</think>\n\nso"  # where the prompt has opened reasoning, which the word "think" makes it do


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running() as made:
        yield made


@pytest.fixture(scope="module")
def openai_client(served: Running) -> Iterator[OpenAI]:
    url = f"http://127.0.0.1:{served.port}/v1"
    with OpenAI(api_key="none", base_url=url, timeout=PATIENCE_S, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_client(served: Running) -> Iterator[Anthropic]:
    url = f"http://127.0.0.1:{served.port}"
    with Anthropic(api_key="none", base_url=url, timeout=PATIENCE_S, max_retries=0) as client:
        yield client


def said(*texts: str) -> Any:
    return [{"role": "user", "content": text} for text in texts]


# --- OpenAI ---------------------------------------------------------------------------------------


def test_chat(openai_client: OpenAI) -> None:
    made = openai_client.chat.completions.create(model="any", messages=said("hello"))
    assert made.choices[0].message.content == "hello" and made.usage and made.usage.completion_tokens == 5
    made = openai_client.chat.completions.create(model="any", messages=said(CALL), tools=[FUNCTION])
    (call,) = made.choices[0].message.tool_calls or []
    assert call.type == "function" and json.loads(call.function.arguments) == ARGUMENTS


def test_a_chat_stream(openai_client: OpenAI) -> None:
    with openai_client.chat.completions.stream(
        model="any", messages=said(CALL), tools=[FUNCTION], stream_options={"include_usage": True}
    ) as stream:
        kinds = [event.type for event in stream]
        made = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and made.choices[0].finish_reason == "tool_calls"
    (call,) = made.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == ARGUMENTS and made.choices[0].message.content == "Let me see."
    assert made.usage and made.usage.completion_tokens == len(CALL.encode())


def test_completions(openai_client: OpenAI) -> None:
    made = openai_client.completions.create(model="any", prompt="abc", max_tokens=2)
    assert made.choices[0].text == "cb" and made.choices[0].finish_reason == "length"  # it says what it read backwards
    chunks = list(openai_client.completions.create(model="any", prompt=[104, 105], stream=True, stop="h"))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "i" and chunks[-1].choices[0].finish_reason == "stop"


def test_responses(openai_client: OpenAI) -> None:
    made = openai_client.responses.create(model="any", input="hello", store=False)
    assert made.output_text == "hello" and made.status == "completed" and made.usage and made.usage.output_tokens == 5
    tool: Any = {"type": "function", "name": "read", "parameters": SCHEMA, "strict": False}
    with openai_client.responses.stream(model="any", input=CALL, tools=[tool]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events if event.type != "keepalive"] == list(range(len(events)))
    message, call = final.output
    assert message.type == "message" and call.type == "function_call"
    assert json.loads(call.arguments) == ARGUMENTS and final.output_text == "Let me see."


@pytest.mark.slow
def test_signs_of_life_in_responses_are_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a prompt is read, and while the input of a custom tool is written, which is shown only when it is whole."""
    for module, name, value in ((generation, "_SOON_S", 0.1), (generation, "KEEP_ALIVE_S", 0.1)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.1)
    patch: Any = {"type": "custom", "name": "apply_patch", "description": "d" * 1000}
    call = (
        '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin Patch of some length"}}\n</tool_call>'
    )
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "apply_patch"}]}
    with (
        running(fake(step_s=0.05)) as made,
        OpenAI(
            api_key="none", base_url=f"http://127.0.0.1:{made.port}/v1", timeout=PATIENCE_S, max_retries=0
        ) as client,
    ):
        for wish, said_before in (("quiet", "response.created"), (call, "response.output_item.added")):
            with client.responses.stream(
                model="any", input=wish, tools=[patch], tool_choice=choice, instructions="i" * 1000,
                metadata={"k": "v" * 500},
            ) as stream:  # fmt: skip
                events = list(stream)
                final = stream.get_final_response()
            kinds = [event.type for event in events]
            assert kinds[:2] == ["response.created", "response.in_progress"] and final.status == "completed"
            again = [event for event in events[2:] if event.type == "response.in_progress"]
            assert len(again) >= 2 and "response.in_progress" in kinds[kinds.index(said_before) + 2 :]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert all(event.response.id == final.id and len(event.to_json(indent=None)) < 1000 for event in again)
    (called,) = final.output
    assert called.type == "custom_tool_call" and called.input == "*** Begin Patch of some length"


def test_reasoning_in_responses(openai_client: OpenAI) -> None:
    made = openai_client.responses.create(
        model="any", instructions=None, input=said("think", THOUGHT), include=["reasoning.encrypted_content"]
    )
    reasoning = made.output[0]
    assert reasoning.type == "reasoning" and reasoning.content and reasoning.content[0].text == "hm"
    assert made.output_text == "so" and made.usage and made.usage.output_tokens_details.reasoning_tokens == 11
    items: Any = [*said("think"), *(item.model_dump(exclude_none=True) for item in made.output), *said("done")]
    assert openai_client.responses.create(model="any", input=items).output_text == ""  # it thinks, and no more


def test_openai_s_errors(openai_client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client.chat.completions.create(model="any", messages=said("x"), logit_bias={"5": 1})
    assert "logit_bias: not supported" in str(refused.value) and refused.value.param == "logit_bias"
    with pytest.raises(openai.BadRequestError, match="is not kept here"):
        openai_client.responses.create(model="any", input="x", previous_response_id="resp_1")
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
            openai_client.responses.create(model="any", input="x", text=form, stream=stream)
        assert refused.value.param == "text.format"
        with pytest.raises(openai.BadRequestError) as refused:
            openai_client.chat.completions.create(model="any", messages=said("x" * 9000), stream=stream)
        assert refused.value.code == "context_length_exceeded" and refused.value.param == "messages"
    events = list(openai_client.responses.create(model="any", input="x" * 9000, stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error and str(events[-1].response.error.code) == "context_length_exceeded"
    events = list(openai_client.responses.create(model="any", input="nan", stream=True))
    assert events[-1].type == "response.failed"
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("gpt")
    monkeypatch.setattr(server, "MAX_REPLIES", 0)
    with pytest.raises(openai.RateLimitError):
        openai_client.chat.completions.create(model="any", messages=said("x"))


# --- Anthropic ------------------------------------------------------------------------------------

TOOL: Any = {"name": "read", "description": "d", "input_schema": SCHEMA}


def test_messages(anthropic_client: Anthropic) -> None:
    made = anthropic_client.messages.create(model="any", max_tokens=100, messages=said("hello"))
    assert [block.type for block in made.content] == ["text"] and made.stop_reason == "end_turn"
    assert made.usage.output_tokens == 5 and made.usage.cache_read_input_tokens == 0
    made = anthropic_client.messages.create(model="any", max_tokens=3, messages=said("hello"))
    assert made.stop_reason == "max_tokens"
    made = anthropic_client.messages.create(
        model="any", max_tokens=100, messages=said("hello"), stop_sequences=["lo", "x"]
    )
    assert made.stop_reason == "stop_sequence" and made.stop_sequence == "lo"
    made = anthropic_client.beta.messages.create(model="any", max_tokens=300, messages=said(CALL), tools=[TOOL])
    text, call = made.content
    assert text.type == "text" and call.type == "tool_use" and call.input == ARGUMENTS


def test_a_stream_of_messages(anthropic_client: Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    with anthropic_client.messages.stream(
        model="any", max_tokens=2000, messages=said("think", f"hm\n</think>\n\n{CALL}"), tools=[TOOL], thinking=thinking
    ) as stream:
        kinds = [event.type for event in stream]
        made = stream.get_final_message()
    thought, text, call = made.content
    assert thought.type == "thinking" and thought.thinking == "hm" and thought.signature
    assert text.type == "text" and text.text == "Let me see." and call.type == "tool_use" and call.input == ARGUMENTS
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and made.stop_reason == "tool_use"
    # What came goes back, with the result.
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "text"}
    messages: Any = [
        *said("go"),
        {"role": "assistant", "content": [block.to_dict() for block in made.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "done"}]},
    ]
    again = anthropic_client.messages.create(model="any", max_tokens=100, messages=messages, tools=[TOOL])
    assert again.content[0].type == "text" and again.content[0].text == "done"


def test_budgets_of_reasoning(anthropic_client: Anthropic, served: Running) -> None:
    """The fake model begins anew after it was broken off, with what it would have thought as its answer."""

    def ask(budget: int) -> Any:
        thinking = {"type": "enabled", "budget_tokens": budget}
        body = {"max_tokens": 2000, "messages": said("think", "abcdef"), "thinking": thinking}
        return served.http.post("/v1/messages", json=body).json()

    made = ask(3)
    assert [block.get("thinking", block.get("text")) for block in made["content"]] == ["abc", "abcdef"]
    assert made["usage"]["output_tokens"] == 9
    assert [block["type"] for block in ask(0)["content"]] == ["text"]
    assert [block["type"] for block in ask(50)["content"]] == ["thinking"]
    with anthropic_client.messages.stream(
        model="any", max_tokens=9, messages=said("think", "abcdef"), thinking={"type": "disabled"}
    ) as stream:
        assert stream.get_final_text() == "abcdef"


def test_the_beginning_of_a_reply(anthropic_client: Anthropic) -> None:
    messages = [*said("hello"), {"role": "assistant", "content": "{"}]
    made = anthropic_client.messages.create(model="any", max_tokens=100, messages=messages)
    assert made.content[0].type == "text" and made.content[0].text == "hello"
    assert made.usage.input_tokens == len("[user]hello") + 2 + len("hello{")


def test_tokens_are_counted(anthropic_client: Anthropic) -> None:
    counted = anthropic_client.messages.count_tokens(model="any", messages=said("hello"), system="be", tools=[TOOL])
    made = anthropic_client.messages.create(
        model="any", max_tokens=9, messages=said("hello"), system="be", tools=[TOOL]
    )
    assert counted.input_tokens == made.usage.input_tokens > 10


def test_anthropic_s_errors(anthropic_client: Anthropic, served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4096 maximum"):
        anthropic_client.messages.create(model="any", max_tokens=9, messages=said("x" * 4100))
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        anthropic_client.messages.create(model="any", max_tokens=9, messages=said("x" * 200_000), stream=True)
    with pytest.raises(anthropic.APIStatusError, match="logits"):
        list(anthropic_client.messages.create(model="any", max_tokens=9, messages=said("nan"), stream=True))
    for path, status, kind in (
        ("/v1/messages/x", 404, "not_found_error"),
        ("/v1/messages", 400, "invalid_request_error"),
    ):
        response = served.http.post(path, content=b"{")
        assert response.status_code == status and response.json()["type"] == "error"
        assert response.json()["error"]["type"] == kind
    monkeypatch.setattr(server, "MAX_REPLIES", 0)
    with pytest.raises(anthropic.APIStatusError) as busy:
        anthropic_client.messages.create(model="any", max_tokens=9, messages=said("x"))
    assert busy.value.status_code == 529 and busy.value.response.json()["error"]["type"] == "overloaded_error"


def test_an_overloaded_key(served: Running) -> None:
    with running(api_key="k") as made:
        refused = made.http.post("/v1/messages", json={})
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
        with Anthropic(auth_token="k", api_key=None, base_url=f"http://127.0.0.1:{made.port}") as client:
            assert client.messages.create(model="any", max_tokens=9, messages=said("x")).content


# --- both -----------------------------------------------------------------------------------------


def test_models(openai_client: OpenAI, anthropic_client: Anthropic, served: Running) -> None:
    assert [model.id for model in openai_client.models.list()] == ["fake-model"]
    assert openai_client.models.retrieve("fake-model").owned_by == "spark"
    (model,) = anthropic_client.models.list()
    assert model.id == model.display_name == "fake-model" and model.created_at.year >= 2024
    (codex,) = served.http.get("/v1/models").json()["models"]
    assert codex["slug"] == "fake-model" and codex["context_window"] == 4096


def test_metrics() -> None:
    with running() as made:
        made.http.post("/v1/messages", json={"max_tokens": 9, "messages": said("hello")})
        made.http.post("/v1/messages", json={})
        list(OpenAI(api_key="x", base_url=f"http://127.0.0.1:{made.port}/v1").chat.completions.create(
            model="any", messages=said("hey"), stream=True
        ))  # fmt: skip
        made.ask("crash")
        made.ask("again")
        wait_until(lambda: 'api="chat",outcome="ok"} 2.0' in made.http.get("/metrics").text)
        text = made.http.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert lines['spark_requests_total{api="messages",outcome="ok"}'] == "1.0"
    assert lines['spark_requests_total{api="messages",outcome="bad_request"}'] == "1.0"
    assert lines['spark_requests_total{api="chat",outcome="daemon"}'] == "1.0"
    assert lines['spark_tokens_total{kind="written"}'] == f"{len('hello' + 'hey' + 'again')}.0"
    assert lines["spark_time_to_first_token_seconds_count"] == "3.0"
    assert lines["spark_daemon_restarts_total"] == "1.0" and lines["spark_daemon_up"] == "1.0"
    assert lines["spark_replies"] == "0.0" and lines["spark_queue"] == "0.0"
    assert "hello" not in text


def test_no_cross_origin_headers(served: Running) -> None:
    response = served.http.options("/v1/messages", headers={"origin": "https://evil.example"})
    assert response.status_code == 403 and not any("access-control" in name for name in response.headers)


def test_many_streams_at_once_with_one_that_is_whole() -> None:
    """As Claude Code does it."""
    with running(fake(step_s=0.002)) as made, httpx.Client(timeout=PATIENCE_S) as http:
        import threading

        url, replies = f"http://127.0.0.1:{made.port}/v1/messages?beta=true", {}

        def ask(i: int) -> None:
            body = {"max_tokens": 99, "messages": said(f"reply {i}"), "stream": bool(i)}
            replies[i] = http.post(url, json=body, headers={"anthropic-version": "2023-06-01"}).text

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert json.loads(replies.pop(0))["content"] == [{"type": "text", "text": "reply 0"}]
        assert len(replies) == 11 and all(text.endswith("\n\n") and "message_stop" in text for text in replies.values())


# --- prompts that are only read ---------------------------------------------------------------------


def test_no_tokens_at_all(served: Running, anthropic_client: Anthropic, openai_client: OpenAI) -> None:
    """`max_tokens` 0 has the prompt read, and kept for the next request; nothing is written, whatever is asked for."""

    def written() -> list[str]:
        lines = httpx.get(f"http://127.0.0.1:{served.port}/metrics", timeout=PATIENCE_S).text.splitlines()
        return [line for line in lines if line.startswith("spark_tokens_total") and "written" in line]

    before = written()
    tool: Any = {"name": "read", "input_schema": SCHEMA}
    for more in ({}, {"tools": [tool], "tool_choice": {"type": "any"}}, {"thinking": {"type": "adaptive"}}):
        given: Any = {"model": "any", "max_tokens": 0, "messages": said("hello"), **more}
        made = anthropic_client.messages.create(**given)
        assert made.content == [] and (made.stop_reason, made.usage.output_tokens) == ("max_tokens", 0)
        assert made.usage.input_tokens > 0
        with anthropic_client.messages.stream(**given) as stream:
            final = stream.get_final_message()
        assert final.content == [] and (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 0)
    completed = openai_client.completions.create(model="any", prompt=["a", "b"], max_tokens=0, logprobs=1)
    assert [(one.text, one.finish_reason) for one in completed.choices] == [("", "length"), ("", "length")]
    assert completed.usage and (completed.usage.prompt_tokens, completed.usage.completion_tokens) == (2, 0)
    for refused in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(openai.BadRequestError, match="expected at least 1"):
            openai_client.chat.completions.create(model="any", messages=said("x"), extra_body={refused: 0})
    assert len(before) == 1 and written() == before


def test_tokens_of_a_response_are_counted(openai_client: OpenAI) -> None:
    """They are those that it takes, with what it goes on from."""
    tool: Any = {"type": "function", "name": "read", "description": "d", "parameters": SCHEMA}
    given: Any = {"model": "any", "input": said("hello"), "instructions": "be", "tools": [tool]}
    made = openai_client.responses.create(**given)
    counted = openai_client.responses.input_tokens.count(**given)
    assert made.usage and (counted.object, counted.input_tokens) == ("response.input_tokens", made.usage.input_tokens)
    further = openai_client.responses.input_tokens.count(model="any", input="more", previous_response_id=made.id)
    assert further.input_tokens > openai_client.responses.input_tokens.count(model="any", input="more").input_tokens
    with pytest.raises(openai.BadRequestError, match="input: expected at least one message"):
        openai_client.responses.input_tokens.count(model="any", input="")
