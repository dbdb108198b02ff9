"""Whatever a body holds, no endpoint fails: it answers, or refuses in its API's own shape."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.ground import protocol
from engine.ground.errors import RequestError
from engine.running import sampling
from spark.speech import conversation
from tests.server.test_server import Running, running

TEXT = st.text(max_size=6) | st.sampled_from(
    ["<think>", "<tool_call>{", "</think>", "\ud800", "<|end|>", "\0", "think"]
)
NAME = st.sampled_from(["a", "b", "\u00e9 <x>", "\ud800"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def record(needed: dict[str, Any] | None = None, **optional: Any) -> st.SearchStrategy[dict]:
    """An object with the needed fields and some of the optional ones; what is no strategy stands for itself."""

    def strategies(fields: dict[str, Any]) -> dict[str, st.SearchStrategy]:
        return {k: v if isinstance(v, st.SearchStrategy) else st.just(v) for k, v in fields.items()}

    return st.fixed_dictionaries(strategies(needed or {}), optional=strategies(optional))


def some(item: st.SearchStrategy, least: int = 0) -> st.SearchStrategy[list]:
    return st.lists(item, min_size=least, max_size=3)


BOOL, TOKENS, SHARE = st.booleans(), st.integers(1, 50), st.floats(0.1, 1)
OBJECT = st.dictionaries(NAME, JSON, max_size=2)
SCHEMA = st.sampled_from(
    [{"type": "object"}, {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}}, {}]
)
EFFORT = st.sampled_from(["none", "low", "high"])
SAMPLING = {"model": TEXT, "stream": BOOL, "temperature": SHARE, "top_p": SHARE, "top_k": TOKENS, "metadata": OBJECT}
MORE = {"presence_penalty": SHARE, "frequency_penalty": SHARE, "seed": TOKENS}
CHOICES = st.integers(1, 3)

FUNCTION = record({"name": NAME}, description=TEXT, parameters=SCHEMA, strict=BOOL)
CALL = record({"function": record({"name": NAME}, arguments=TEXT)}, id=TEXT, type="function")
PARTS = TEXT | some(
    record({"type": "text", "text": TEXT})
    | record({"type": "image_url", "image_url": OBJECT})
    | record({"type": st.sampled_from(["file", "input_audio"])})
)
FORM = record({"type": st.sampled_from(["text", "json_object"])}) | record(
    {"type": "json_schema", "json_schema": record({"schema": SCHEMA}, name=NAME)}
)
CHAT_MESSAGE = (
    record({"role": st.sampled_from(["user", "system", "developer"]), "content": PARTS})
    | record({"role": "assistant"}, content=PARTS, tool_calls=some(CALL), reasoning_content=TEXT)
    | record({"role": "tool", "content": PARTS}, tool_call_id=TEXT)
)

BLOCK = (
    record({"type": "text", "text": TEXT}, cache_control=OBJECT)
    | record({"type": "image", "source": OBJECT})
    | record({"type": "document", "source": record({"type": "text", "data": TEXT}) | record({"type": "base64"})})
    | record({"type": "search_result"}, title=TEXT, content=some(record({"type": "text", "text": TEXT})))
)
RESULT = record({"type": "tool_result", "tool_use_id": TEXT}, content=TEXT | some(BLOCK), is_error=BOOL)
SAID = (
    BLOCK
    | record({"type": "thinking", "thinking": TEXT}, signature=TEXT)
    | record({"type": "redacted_thinking", "data": TEXT})
    | record({"type": "tool_use", "id": TEXT, "name": NAME}, input=OBJECT)
)
MESSAGE = record({"role": "user", "content": TEXT | some(BLOCK | RESULT)}) | record(
    {"role": "assistant", "content": TEXT | some(SAID)}
)

SHOWN = TEXT | some(record({"type": st.sampled_from(["input_text", "output_text", "input_image"]), "text": TEXT}))
PRINTED = record(stdout=TEXT, stderr=TEXT, outcome=record({"type": "exit"}, exit_code=TOKENS))
RESPONSES_TOOL = (
    record({"type": "function", "name": NAME}, description=TEXT, parameters=SCHEMA)
    | record({"type": "custom", "name": NAME}, format=record(definition=TEXT))
    | record({"type": st.sampled_from(["web_search", "shell", "local_shell", "apply_patch"])})
    | record({"type": "tool_search"}, execution="client", description=TEXT, parameters=SCHEMA)
)
ITEM = (
    record({"role": st.sampled_from(["user", "assistant", "developer"]), "content": SHOWN}, type="message")
    | record({"type": "function_call", "call_id": TEXT, "name": NAME}, arguments=TEXT)
    | record({"type": "custom_tool_call", "call_id": TEXT, "name": NAME}, input=TEXT)
    | record({"type": "function_call_output", "call_id": TEXT}, output=SHOWN)
    | record({"type": "custom_tool_call_output", "call_id": TEXT}, output=SHOWN)
    | record({"type": "reasoning"}, summary=some(OBJECT), encrypted_content=st.sampled_from(["spark1.aGk=", "gAA"]))
    | record({"type": "web_search_call"})
    | record({"type": st.sampled_from(["shell_call", "local_shell_call"]), "call_id": TEXT, "action": OBJECT})
    | record({"type": "apply_patch_call", "call_id": TEXT, "operation": OBJECT})
    | record({"type": "tool_search_call", "call_id": TEXT, "arguments": OBJECT})
    | record({"type": "shell_call_output", "call_id": TEXT, "output": some(PRINTED)})
    | record({"type": "apply_patch_call_output", "call_id": TEXT}, status=TEXT, output=TEXT)
    | record({"type": "tool_search_output", "tools": some(RESPONSES_TOOL)}, call_id=TEXT)
    | record({"type": "additional_tools", "tools": some(RESPONSES_TOOL)}, role="developer")
)
RESPONSES_FORM = record({"type": "text"}) | record({"type": "json_schema", "schema": SCHEMA}, name=NAME)

BODIES: dict[str, st.SearchStrategy] = {
    "/v1/chat/completions": record(
        {"messages": some(CHAT_MESSAGE, 1)},
        **SAMPLING, **MORE, max_tokens=TOKENS, stop=some(NAME), response_format=FORM, parallel_tool_calls=BOOL,
        n=CHOICES, logprobs=st.just(True), top_logprobs=st.just(0),
        stream_options=record(include_usage=BOOL), tool_choice=st.sampled_from(["auto", "none"]),
        reasoning_effort=EFFORT, tools=some(record({"type": "function", "function": FUNCTION})),
    ),
    "/v1/completions": record(
        {"prompt": st.sampled_from(["x", "a b", ["x", "y"], [[1, 2], [3]]])
         | st.lists(st.integers(0, 255), min_size=1, max_size=3)},
        **SAMPLING, **MORE, max_tokens=TOKENS, stop=NAME, stream_options=record(include_usage=BOOL), n=CHOICES,
        logprobs=CHOICES,
    ),
    "/v1/responses": record(
        {"input": st.just("x") | some(ITEM).map(lambda items: [{"role": "user", "content": "x"}, *items])},
        **SAMPLING, **MORE, top_logprobs=CHOICES, instructions=TEXT, max_output_tokens=TOKENS, store=BOOL,
        tools=some(RESPONSES_TOOL),
        reasoning=record(effort=EFFORT, summary="auto"), text=record(format=RESPONSES_FORM, verbosity="low"),
        include=st.just(["reasoning.encrypted_content"]),
    ),
    "/v1/messages": record(
        {"max_tokens": TOKENS, "messages": some(MESSAGE).map(lambda all_: [{"role": "user", "content": "x"}, *all_])},
        **SAMPLING, system=TEXT | some(record({"type": "text", "text": TEXT})), stop_sequences=some(NAME),
        tools=some(record({"name": NAME, "input_schema": SCHEMA}, description=TEXT) | record({"type": "bash_2025"})),
        tool_choice=record({"type": st.sampled_from(["auto", "none"])}, disable_parallel_tool_use=BOOL),
        thinking=record({"type": "enabled"}, budget_tokens=TOKENS) | record({"type": "adaptive"}),
        output_config=record(effort=EFFORT, format=record({"type": "json_schema", "schema": SCHEMA})),
    ),
}  # fmt: skip
BODIES["/v1/messages/count_tokens"] = BODIES["/v1/messages"]
BODIES["/v1/responses/input_tokens"] = BODIES["/v1/responses"]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a value, with each of its keys."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


@st.composite
def damaged(draw: st.DrawFn, bodies: st.SearchStrategy) -> dict:
    """A body in which up to two values were replaced, or left out."""
    body: dict = json.loads(json.dumps(draw(bodies)))
    for _ in range(draw(st.integers(0, 2))):
        found = places(body)
        if found:
            holder, key = draw(st.sampled_from(found))
            if draw(st.booleans()) and isinstance(holder, dict):
                del holder[key]
            else:
                holder[key] = json.loads(json.dumps(draw(JSON)))
    return body


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running() as made:
        yield made


def check(served: Running, path: str, content: bytes) -> int:
    response = served.http.post(path, content=content)
    assert response.status_code in (200, 400, 413), (response.status_code, response.text, content)
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["type"] in ("invalid_request_error", "request_too_large") and error["message"], content
        assert (response.json().get("type") == "error") == path.startswith("/v1/messages")
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert "error inside" not in response.text and response.text.endswith("\n\n")
    else:
        response.json()
    return response.status_code


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(BODIES))
def test_bodies(served: Running, path: str) -> None:
    answers: Counter[int] = Counter()

    @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
    @given(damaged(BODIES[path]))
    def ask(body: dict) -> None:
        answers[check(served, path, json.dumps(body).encode())] += 1

    ask()
    assert answers[200] > 20 and answers[400] > 20, answers  # or it tests nothing


NUMBER = st.sampled_from(
    [
        0, -0.0, 1, -1, 1.5, 5e-324, -5e-324, 1e-310, 1.2e-38, 1e-45, 1e-7, 1 - 2**-53, 1 + 2**-52, 1e308, -1e308, True,
        2**31, 2**32, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30, 10**400, -(10**400), "1", None, [], {},
    ]
) | st.floats(allow_nan=False, allow_infinity=False) | st.integers()  # fmt: skip
NUMBER |= st.floats(0.125, 1) | st.integers(1, 3)
COMMON = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "frequency_penalty",
          "presence_penalty")  # fmt: skip
NUMBERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "draw"}], "max_tokens": 5},
        (*COMMON, "max_tokens", "max_completion_tokens", "n", "logprobs", "top_logprobs", "reasoning.max_tokens",
         "thinking.budget_tokens", "logit_bias", "stop"),
    ),
    "/v1/completions": (
        {"prompt": "x", "max_tokens": 5},
        (*COMMON, "max_tokens", "n", "best_of", "logprobs", "prompt", "logit_bias", "stop"),
    ),
    "/v1/responses": (
        {"input": "draw", "max_output_tokens": 5},
        (*COMMON, "max_output_tokens", "top_logprobs", "reasoning.max_tokens", "max_tool_calls"),
    ),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "draw"}], "max_tokens": 5},
        (*COMMON[:5], "max_tokens", "thinking.budget_tokens", "output_config.task_budget"),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(NUMBERS))
def test_numbers(served: Running, path: str) -> None:
    """Whatever a number is, the request is answered, or refused by the field's name."""
    body, names = NUMBERS[path]
    answers: Counter[int] = Counter()

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.dictionaries(st.sampled_from(names), NUMBER, min_size=1, max_size=2))
    def ask(changes: dict[str, Any]) -> None:
        made: dict[str, Any] = {**body, "stream": len(changes) == 2}
        for name, value in changes.items():
            outer, _, inner = name.partition(".")
            made[outer] = {"type": "enabled", inner: value} if inner else value
        response = served.http.post(path, content=json.dumps(made).encode())
        answers[response.status_code] += 1
        assert response.status_code in (200, 400), (response.status_code, response.text, made)
        if response.status_code == 400 and path != "/v1/messages":
            param = response.json()["error"]["param"]
            assert param is not None and any(param.startswith(name.split(".")[0]) for name in changes), (param, made)

    ask()
    assert answers[200] > 10 and answers[400] > 10, answers


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(COMMON), NUMBER, max_size=4), st.randoms(use_true_random=False))
def test_numbers_that_are_accepted_can_be_computed_with(given_: dict[str, Any], random: Any) -> None:
    try:
        params = conversation.sampling(given_)
    except RequestError:
        return
    logits = np.array([random.uniform(-60, 60) for _ in range(40)], dtype=np.float32)
    assert 0 <= sampling.sample(logits, params, 5, recent=[1, 2, 2, 39]) < 40
    line = protocol.format_line(protocol.Generate(1, (1,), 1, params))
    assert protocol.parse_request(line) == protocol.Generate(1, (1,), 1, params)


@pytest.mark.parametrize("path", sorted(BODIES))
def test_no_bodies(served: Running, path: str) -> None:
    for content in (
        b"",
        b"null",
        b"[]",
        b'"',
        b"\xff\xfe",
        b"[" * 9999,
        b'{"a":' * 70 + b"1" + b"}" * 70,
        b'{"a":NaN}',
    ):
        check(served, path, content)
    assert served.http.get(path).status_code == 405
