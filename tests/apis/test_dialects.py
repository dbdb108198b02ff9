"""Fields of other servers: what is read of them, and what is refused; nothing is ignored that asks for something."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.ground.errors import RequestError
from spark.apis import chat, completions, dialects, messages, responses
from spark.speech.sessions import Message

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BODIES: dict[Any, dict[str, Any]] = {
    chat: {"messages": [{"role": "user", "content": "hi"}]},
    completions: {"prompt": "hi"},
}


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("response_format", {"type": "json_object", "schema": SCHEMA}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
        ("guided_json", SCHEMA),
        ("guided_json", json.dumps(SCHEMA)),
        ("json_schema", SCHEMA),
        ("structured_outputs", {"json": SCHEMA, "regex": None, "disable_any_whitespace": True}),
    ],
)
def test_forms_are_read_wherever_they_stand(api: Any, field: str, given: Any) -> None:
    made = api.parse(BODIES[api] | {field: given})
    assert made.response_schema == SCHEMA and made.form_field.split(".")[0] == field
    with pytest.raises(RequestError) as caught:
        api.parse(BODIES[api] | {field: given} | {"guided_json" if field != "guided_json" else "json_schema": SCHEMA})
    assert "already" in caught.value.message


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize(
    ("field", "given", "named"),
    [
        ("guided_json", "{", "guided_json"),
        ("guided_json", "[" * 50_000, "guided_json"),
        ("json_schema", [SCHEMA], "json_schema"),
        ("structured_outputs", {"regex": "(yes|no)"}, "structured_outputs.regex"),
        ("structured_outputs", {"choice": ["yes"]}, "structured_outputs.choice"),
        ("guided_choice", ["yes", "no"], "guided_choice"),
        ("grammar", "root ::= 'a'", "grammar"),
        ("min_tokens", 5, "min_tokens"),
        ("stop_token_ids", [5], "stop_token_ids"),
        ("mirostat", 2, "mirostat"),
        ("ignore_eos", 1, "ignore_eos"),
        ("response_format", {"type": "json_object", "schema": 3}, "response_format.schema"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(api: Any, field: str, given: Any, named: str) -> None:
    with pytest.raises(RequestError) as caught:
        api.parse(BODIES[api] | {field: given})
    assert caught.value.field == named


@pytest.mark.parametrize("api", BODIES)
def test_values_that_ask_for_nothing_are_taken(api: Any) -> None:
    for name, neutral in dialects.UNSUPPORTED.items():
        for value in (None, *neutral):
            assert api.parse(BODIES[api] | {name: value}).response_schema is None
    assert api.parse(BODIES[api] | {"repeat_penalty": 1.25}).sampling.repetition_penalty == 1.25
    assert api.parse(BODIES[api] | {"ignore_eos": True}).endless and not api.parse(BODIES[api]).endless


def test_a_last_message_may_begin_the_reply() -> None:
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "He"}]
    for body in (
        {"messages": begun, "continue_final_message": True, "add_generation_prompt": False},
        {"messages": [begun[0], {**begun[1], "prefix": True}]},
    ):
        made = chat.parse(body)
        assert made.messages == (Message("user", "hi"),) and made.written == "He"
        with pytest.raises(RequestError, match="not together"):
            chat.parse(body | {"response_format": {"type": "json_object"}})
    assert len(chat.parse({"messages": begun}).messages) == 2
    for wrong in (begun[:1], begun[1:]):
        with pytest.raises(RequestError, match="continue_final_message"):
            chat.parse({"messages": wrong, "continue_final_message": True})


@pytest.mark.parametrize(
    ("api", "body", "field", "given", "place"),
    [
        (responses, {"input": "hi"}, "response_format", {"type": "json_object"}, "text.format"),
        (responses, {"input": "hi"}, "max_tokens", 5, "max_output_tokens"),
        (responses, {"input": "hi"}, "n", 2, "a request for each"),
        (messages, {"max_tokens": 5} | BODIES[chat], "stop", ["a"], "stop_sequences"),
        (messages, {"max_tokens": 5} | BODIES[chat], "response_format", {"type": "text"}, "output_config.format"),
    ],
)
def test_fields_of_chat_completions_are_refused_by_what_is_in_their_place(
    api: Any, body: dict[str, Any], field: str, given: Any, place: str
) -> None:
    with pytest.raises(RequestError) as caught:
        api.parse(body | {field: given})
    assert caught.value.field == field and place in caught.value.hint
    api.parse(body | {field: None})
