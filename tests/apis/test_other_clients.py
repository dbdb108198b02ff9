"""Requests as opencode, pi, qwen-code, llm, Vercel's AI SDK and LangChain send them, with other texts.

`benchmarks/other_clients.py` runs them; what it finds them to send is repeated here, without them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from benchmarks.client_proxy import shape
from spark.apis import chat as api_chat
from spark.apis import messages as api_messages
from spark.apis import responses as api_responses
from spark.speech.conversation import IMAGE_NOTE
from tests.server.test_server import Running, running

Json = dict[str, Any]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
PARSE = {CHAT: api_chat.parse, MESSAGES: api_messages.parse, RESPONSES: api_responses.parse}
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
PIXEL = "data:image/png;base64,iVBORw0K"
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
SEEN = Path(__file__).parents[2] / "data" / "results" / "other_clients.json"


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running() as made:
        made.app.state.kept.put_items([("msg_kept", b'["assistant", "{}"]')])
        made.app.state.kept.put_response("resp_kept", ["msg_kept"])
        yield made


def text(words: str, **more: Any) -> Json:
    return {"type": "text", "text": words, **more}


# --- what is common to those that speak an API ------------------------------------------------------

FUNCTION = {"type": "function", "function": {"name": "read", "description": "d", "parameters": SCHEMA}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"place": "here"}'}}
IMAGE = {"type": "image_url", "image_url": {"url": PIXEL}}
SAID = {"role": "assistant", "content": "{}"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "a"}
ASKED = {"role": "user", "content": "do it"}
SYSTEM = {"role": "system", "content": "be"}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}


def chat(*messages: Json, **more: Any) -> Json:
    return {"model": "m", "messages": list(messages), **more}


SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0K"}
AUTO = {"type": "auto"}
TOOL = {"name": "read", "description": "d", "input_schema": SCHEMA}
PICTURE = {"type": "image", "source": SOURCE}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "spark-0"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"place": "here"}}
FOUND = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a", "is_error": False, **EPHEMERAL}
SHOWN = {**FOUND, "content": [text("see"), PICTURE]}


def messages(*messages: Json, **more: Any) -> Json:
    return {"model": "m", "max_tokens": 8192, "messages": list(messages), **more}


def user(*blocks: Json) -> Json:
    return {"role": "user", "content": list(blocks)}


def model(*blocks: Json) -> Json:
    return {"role": "assistant", "content": list(blocks)}


INPUT_IMAGE = {"type": "input_image", "image_url": PIXEL}
ANSWER = {"role": "assistant", "content": [{"type": "output_text", "text": "{}"}]}
KEPT = {"type": "reasoning", "id": "rs_1", "summary": [],
        "encrypted_content": "spark1." + base64.b64encode(b"hm").decode()}  # fmt: skip
THINKING = {**KEPT, "content": [{"type": "reasoning_text", "text": "hm"}]}
FUNCTION_CALL = {"type": "function_call", "call_id": "call_1", "name": "read", "arguments": '{"place": "here"}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "a"}
OUTPUT_IMAGE = {**OUTPUT, "output": [{"type": "input_text", "text": "see"}, INPUT_IMAGE]}
FLAT = {"type": "function", "name": "read", "description": "d", "parameters": SCHEMA, "strict": False}
FLAT_FORM = {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": SCHEMA}}


def responses(*items: Json, **more: Any) -> Json:
    return {"model": "m", "input": list(items), **more}


def asked(*parts: Json) -> Json:
    return {"role": "user", "content": [{"type": "input_text", "text": "do it"}, *parts]}


CHOSEN = {"type": "function", "function": {"name": "read"}}

# --- the clients ------------------------------------------------------------------------------------

OPENCODE = {"max_tokens": 8192, "tools": [FUNCTION], "tool_choice": "auto", **USAGE}
PI = {"store": False, "max_completion_tokens": 8192, "tools": [FUNCTION], "reasoning_effort": "medium", **USAGE}
DEVELOPER = {"role": "developer", "content": "be"}
PI_INPUT = {
    "stream": True, "prompt_cache_key": "k", "store": False, "max_output_tokens": 8192, "tools": [FLAT],
    "reasoning": {"effort": "medium", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
}  # fmt: skip
EAGER = {**TOOL, "eager_input_streaming": True}
SUMMARIZED = {"type": "enabled", "budget_tokens": 2048, "display": "summarized"}
LLM = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}, "store": False}
LANGCHAIN = {"stream": False, "max_completion_tokens": 2000}
# What each sent to each path; the first of each has no picture.
CLIENTS: dict[tuple[str, str], list[Json]] = {
    ("opencode", CHAT): [
        chat(SYSTEM, ASKED, CALLED, RESULT, **OPENCODE),
        chat(SYSTEM, user(text("see"), IMAGE), SAID, {**CALLED, "content": ""}, RESULT, ASKED, **OPENCODE),
        chat(SYSTEM, ASKED, {**SAID, "reasoning_content": "hm"}, ASKED, reasoning_effort="low", **OPENCODE),
    ],
    ("opencode", MESSAGES): [
        messages(user(text("a", **EPHEMERAL)), model(text("b")), user(text("c")), model({**USE, **EPHEMERAL}),
                 user(FOUND), system=[text("be", **EPHEMERAL)], tools=[TOOL], tool_choice=AUTO, stream=True),
        messages(user(text("see"), PICTURE), model(text("b")), user(text("c")), model(USE), user(SHOWN),
                 system=[text("be", **EPHEMERAL)], tools=[TOOL], tool_choice=AUTO, stream=True),
    ],
    ("pi", CHAT): [
        chat(DEVELOPER, user(text("a")), {**CALLED, "reasoning_content": "hm"}, RESULT, **PI),
        chat(DEVELOPER, user(text("see"), IMAGE), {**SAID, "reasoning_content": "hm"}, user(text("c")), **PI),
        chat(DEVELOPER, user(text("a")), CALLED, {**RESULT, "content": "(see attached image)"}, user(text("b"), IMAGE),
             **PI),
    ],
    ("pi", MESSAGES): [
        messages(user(text("a")), model(THOUGHT, text("b")), user(text("c")), model(THOUGHT, USE), user(FOUND),
                 stream=True, system=[text("be", **EPHEMERAL)], tools=[EAGER], thinking=SUMMARIZED),
        messages(user(text("see"), {**PICTURE, **EPHEMERAL}), model(THOUGHT, text("b")), user(text("c")), model(USE),
                 user(SHOWN), stream=True, system=[text("be", **EPHEMERAL)], tools=[EAGER], thinking=SUMMARIZED),
    ],
    ("pi", RESPONSES): [
        responses(DEVELOPER, asked(), THINKING, FUNCTION_CALL, OUTPUT, **PI_INPUT),
        responses(DEVELOPER, asked(INPUT_IMAGE), {**ANSWER, "type": "message", "id": "msg_1"}, asked(), FUNCTION_CALL,
                  OUTPUT_IMAGE, **PI_INPUT),
    ],
    ("qwen", CHAT): [
        chat(SYSTEM, user(text("a")), SAID, user(text("b")), CALLED, {**RESULT, "content": [text("a")]},
             max_tokens=8000, tools=[FUNCTION], **USAGE),
        chat(SYSTEM, user(text("see"), IMAGE), CALLED, {**RESULT, "content": [text("see"), IMAGE]}, SAID,
             user(text("b")), max_tokens=8000, tools=[FUNCTION], **USAGE),
    ],
    ("llm", CHAT): [
        chat(SYSTEM, ASKED, **USAGE),
        chat(ASKED, stream=False),
        chat(ASKED, response_format=FORM, **USAGE),
        chat(ASKED, CALLED, RESULT, tools=[FUNCTION], **USAGE),
        chat(user(text("see"), IMAGE), SAID, ASKED, **USAGE),
    ],
    ("llm", RESPONSES): [
        responses(ASKED, instructions="be", stream=True, **LLM),
        responses(ASKED, stream=False, **LLM),
        responses(ASKED, text=FLAT_FORM, stream=True, **LLM),
        responses(ASKED, KEPT, FUNCTION_CALL, OUTPUT, tools=[FLAT], stream=True, **LLM),
        responses(asked(INPUT_IMAGE), KEPT, SAID, ASKED, stream=True, **LLM),
    ],
    ("ai", CHAT): [
        chat(SYSTEM, ASKED, max_tokens=2000),
        chat(ASKED, max_completion_tokens=2000, reasoning_effort="low", store=False),
        chat(ASKED, CALLED, RESULT, max_tokens=2000, tools=[FUNCTION], tool_choice="auto"),
        chat(ASKED, {**CALLED, "content": ""}, RESULT, max_tokens=2000, tools=[FUNCTION], tool_choice="auto", **USAGE),
        chat(ASKED, max_tokens=2000, response_format=FORM),
        chat(ASKED, max_tokens=2000, logprobs=True, top_logprobs=3),
        chat(user(text("see"), IMAGE), SAID, ASKED, max_tokens=2000),
        chat(ASKED, {**SAID, "reasoning_content": "hm"}, user(text("b")), max_tokens=2000, reasoning_effort="low"),
    ],
    ("ai", MESSAGES): [
        messages(user(text("a")), model(USE), user(FOUND), system=[text("be")], tools=[TOOL],
                 tool_choice=AUTO, stream=True),
        messages(user(text("a")), tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True}),
        messages(user(text("a")), model(THOUGHT, text("b")), user(text("c")),
                 thinking={"type": "enabled", "budget_tokens": 1024}),
        messages(user(text("see"), PICTURE), model(USE), user(SHOWN)),
    ],
    ("ai", RESPONSES): [
        responses({**SYSTEM}, asked(), max_output_tokens=2000),
        responses(asked(), FUNCTION_CALL, OUTPUT, max_output_tokens=2000, tools=[FLAT], tool_choice="auto",
                  stream=True),
        responses(asked(), text=FLAT_FORM, max_output_tokens=2000),
        responses(asked(), KEPT, ANSWER, asked(), max_output_tokens=2000, store=False, reasoning={"effort": "low"},
                  include=["reasoning.encrypted_content"]),
        responses(asked(), max_output_tokens=2000, top_logprobs=3, include=["message.output_text.logprobs"]),
        responses(asked(INPUT_IMAGE), ANSWER, asked(), FUNCTION_CALL, OUTPUT_IMAGE, max_output_tokens=2000,
                  store=False),
    ],
    ("langchain", CHAT): [
        chat(SYSTEM, ASKED, CALLED, RESULT, tools=[FUNCTION], **LANGCHAIN),
        chat(SYSTEM, ASKED, max_completion_tokens=2000, **USAGE),
        chat(ASKED, response_format=FORM, **LANGCHAIN),
        chat(SYSTEM, ASKED, SAID, ASKED, reasoning_effort="low", **LANGCHAIN),
        chat(SYSTEM, ASKED, n=2, temperature=0.7, seed=1, logprobs=True, top_logprobs=2, **LANGCHAIN),
        chat(ASKED, tools=[FUNCTION], tool_choice=CHOSEN, parallel_tool_calls=False, **LANGCHAIN),
        chat(user(text("see"), IMAGE), SAID, ASKED, **LANGCHAIN),
    ],
    ("langchain", RESPONSES): [
        responses(SYSTEM, ASKED, {**FUNCTION_CALL, "id": "fc_1", "status": "completed"}, OUTPUT, tools=[FLAT],
                  max_output_tokens=2000, stream=False),
        responses(ASKED, tools=[FLAT], tool_choice={"type": "function", "name": "read"}, parallel_tool_calls=False,
                  max_output_tokens=2000, stream=False),
        responses(ASKED, text=FLAT_FORM, max_output_tokens=2000, stream=True),
        responses(SYSTEM, ASKED, {**THINKING, "status": "completed"}, ANSWER, ASKED, reasoning={"effort": "low"},
                  include=["reasoning.encrypted_content"], store=False, max_output_tokens=2000, stream=False),
        responses(asked(INPUT_IMAGE), THINKING, ANSWER, ASKED, max_output_tokens=2000, stream=False),
    ],
    ("langchain", MESSAGES): [
        messages(ASKED, model(USE), user(FOUND), system="be", tools=[TOOL], stream=True),
        messages(ASKED, tools=[TOOL], tool_choice={"type": "tool", "name": "read"}),
        messages(ASKED, {**SAID, "content": [THOUGHT, text("b")]}, ASKED, system="be",
                 thinking={"type": "enabled", "budget_tokens": 1024}),
        messages(ASKED, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}),
        messages(user(text("see"), PICTURE), SAID, ASKED),
    ],
}  # fmt: skip
# What their sources have these send; they were not run.
NOT_RUN: dict[str, Json] = {
    "litellm": {
        "messages": [SYSTEM, ASKED], "model": "m", "n": 2, "top_logprobs": 3, "logprobs": True,
        "max_completion_tokens": 9, "tools": [FUNCTION], "tool_choice": CHOSEN, "max_retries": 2,
        "modalities": ["text"], "prediction": None, "audio": None, "thinking": {"type": "enabled", "budget_tokens": 9},
        "web_search_options": None, "safety_identifier": "x", "extra_headers": {},
    },
    "aider": {"messages": [SYSTEM, ASKED], "model": "m", "temperature": 0, "stream": True, "cache_control": True},
    "pi with Qwen": {
        "messages": [ASKED, CALLED, RESULT],
        "chat_template_kwargs": {"enable_thinking": True, "preserve_thinking": True}, **USAGE,
    },
    "qwen-code with Qwen": {
        "messages": [ASKED, CALLED, {**RESULT, "content": [text("a", **EPHEMERAL), IMAGE]}], "model": "m",
        "tools": [{**FUNCTION, **EPHEMERAL}], "metadata": {"sessionId": "x", "promptId": "x"},
        "vl_high_resolution_images": True, "preserve_thinking": True, "temperature": 0.3, "top_p": 0.95,
        "presence_penalty": 0.5, "repetition_penalty": 1.05, **USAGE,
    },
}  # fmt: skip
CASES = [(client, path, i) for (client, path), bodies in CLIENTS.items() for i in range(len(bodies))]


# What the AI SDK sends by default, of items and responses that the server has kept.
REFERRING: list[Json] = [
    responses(asked(INPUT_IMAGE), {"type": "item_reference", "id": "msg_kept"}, FUNCTION_CALL, OUTPUT_IMAGE,
              max_output_tokens=2000, tools=[FLAT], tool_choice="auto"),
    responses(asked(), max_output_tokens=2000, previous_response_id="resp_kept"),
]  # fmt: skip


@pytest.mark.parametrize(("client", "path", "i"), CASES)
def test_a_request(served: Running, client: str, path: str, i: int) -> None:
    body = CLIENTS[client, path][i]
    made = PARSE[path](body)
    assert made.stream == bool(body.get("stream"))
    shown = any(part in json.dumps(body) for part in ("image_url", "image/png"))
    assert any(IMAGE_NOTE in message.content for message in made.messages) == shown
    response = served.http.post(path, json=body, headers={"authorization": "Bearer none", "x-api-key": "none"})
    assert response.status_code == 200, response.text
    assert '"error": {' not in response.text and "event: error" not in response.text
    end = {CHAT: "data: [DONE]", MESSAGES: "event: message_stop", RESPONSES: "event: response.completed"}[path]
    assert (end in response.text) == made.stream


@pytest.mark.parametrize("name", NOT_RUN)
def test_what_others_send(served: Running, name: str) -> None:
    response = served.http.post(CHAT, json={**NOT_RUN[name], "max_tokens": 50})
    assert response.status_code == 200, response.text
    assert '"error"' not in response.text


@pytest.mark.skipif(not SEEN.exists(), reason="benchmarks/other_clients.py was not run yet")
@pytest.mark.parametrize(("client", "path"), CLIENTS)
def test_everything_that_was_seen_is_tested(client: str, path: str) -> None:
    """Fields with their types, kinds of items and tools, in the last run of the programs."""
    seen = [s for s in json.loads(SEEN.read_text())["shapes"] if (s["program"], s["path"]) == (client, path)]
    request = Request({"type": "http", "method": "POST", "query_string": b"", "headers": []})
    more = REFERRING if (client, path) == ("ai", RESPONSES) else []
    tested = [shape(request, path, body) for body in [*CLIENTS[client, path], *more]]
    assert seen
    for kind in ("body", "types", "tools", "items"):
        assert _names(kind, seen) <= _names(kind, tested), kind
    assert _names("types", seen) and {one.get("stream") for one in seen} <= {one.get("stream") for one in tested}


def _names(kind: str, shapes: list[Json]) -> set[Any]:
    found: set[Any] = set()
    for one in shapes:
        values = one.get(kind, [])
        found |= set(values.items()) if isinstance(values, dict) else set(values)
    return found


@pytest.mark.parametrize("body", REFERRING)
def test_references_to_what_is_kept(served: Running, body: Json) -> None:
    response = served.http.post(RESPONSES, json=body)
    assert response.status_code == 200, response.text
    sent = responses(*([ANSWER] if "previous_response_id" in body else []),
                     *(ANSWER if item.get("type") == "item_reference" else item for item in body["input"]))  # fmt: skip
    sent = {**body, "previous_response_id": None, "input": sent["input"]}
    again = served.http.post(RESPONSES, json=sent).json()
    assert again["usage"]["input_tokens"] == response.json()["usage"]["input_tokens"]


def test_references_to_what_was_not_kept(served: Running) -> None:
    """Vercel's AI SDK sends them where it is not told `store`: false, after the server was started again too."""
    body = responses(asked(), {"type": "item_reference", "id": "msg_1"}, asked())
    response = served.http.post(RESPONSES, json=body)
    assert response.status_code == 404 and "`store`: false" in response.json()["error"]["message"]


def test_embeddings_are_a_clean_404(served: Running) -> None:
    for body in ({"model": "m", "input": ["hello"]}, {"model": "m", "input": "hello", "encoding_format": "float"}):
        response = served.http.post("/v1/embeddings", json=body)
        assert response.status_code == 404 and response.json()["error"]["type"] == "invalid_request_error"
