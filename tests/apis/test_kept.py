"""What /v1/responses keeps: references are the items themselves, responses go on, and nothing grows without bound."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from engine.ground.errors import RequestError
from spark.apis import bodies
from spark.apis.kept import ENTRY_BYTES, Kept
from spark.apis.response_items import MOST_VALUES, to_keep
from spark.apis.responses import MAX_ECHO_BYTES, Asked, Refers, Writer, ask, parse, resolved
from spark.apis.written import dumps
from spark.speech import json_text
from spark.speech.conversation import CallArguments, CallEnd, CallStart, Finish, NotKeptError, Part, Text, Usage
from tests.server.test_server import PATIENCE_S, Running, fake, running, wait_until

RESPONSES = "/v1/responses"
CALL = 'Let me see.\n<tool_call>\n{"name": "read", "arguments": {"path": "\u00e9.py"}}\n</tool_call>'
TOOL: Any = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}
CUSTOM: Any = {"type": "custom", "name": "apply_patch"}
TEXT = st.text(st.sampled_from('\\"\n\ud83d\ude00\u00e9a') | st.characters(), max_size=8)
FINISH = Finish("stop", Usage(1, 1))


def item_of(store: Kept, item_id: str) -> bytes | None:
    return store.items([item_id]).get(item_id)


# --- the store ------------------------------------------------------------------------------------


def test_the_least_recently_used_is_given_up_first() -> None:
    store = Kept(max_bytes=3 * (ENTRY_BYTES + 10))
    for name in "abc":
        store.put_items([(name, name.encode() * 10)])
    assert item_of(store, "a") == b"a" * 10
    store.put_items([("d", b"d" * 10)])
    assert [item_of(store, name) is not None for name in "abcd"] == [True, False, True, True]
    store.put_items([("d", b"d")])  # in place of the other
    assert len(store) == 3 and store.n_bytes == 3 * ENTRY_BYTES + 21
    assert store.drop("d") and not store.drop("d") and store.n_bytes == 2 * (ENTRY_BYTES + 10)


def test_an_item_that_is_too_large_displaces_nothing() -> None:
    store = Kept(max_bytes=4096, max_item_bytes=1000)
    store.put_items([("a", b"a")])
    store.put_items([("large", b"x" * 1001)])
    assert item_of(store, "large") is None and item_of(store, "a") == b"a"
    store.put_response("r", ["a", "large"])
    assert store.response("r") is None
    Kept(max_bytes=100).put_items([("a", b"a")])


def test_what_was_not_used_for_long_is_given_up() -> None:
    now = [0.0]
    store = Kept(max_age_s=10, clock=lambda: now[0])
    for name in "ab":
        store.put_items([(name, b"x")])
    now[0] = 9
    assert item_of(store, "a") == b"x"
    now[0] = 11
    store.give_up()
    assert len(store) == 1 and item_of(store, "b") is None and item_of(store, "a") == b"x"
    now[0] = 22
    assert item_of(store, "a") is None and store.n_bytes == 0


def test_a_response_lives_as_long_as_all_of_its_items() -> None:
    store = Kept()
    for name in "ab":
        store.put_items([(name, name.encode())])
    store.put_response("r", ["a", b"no", "b"])
    assert store.response("r") is None
    store.put_response("r", ["a", "b", "a"])
    assert store.response("r") == (("a", "b", "a"), [b"a", b"b", b"a"])
    assert (
        item_of(store, "r") is None and store.response("a") is None and store.response("x") is None
    )  # each its own kind
    store.drop("b")
    assert store.response("r") is None and len(store) == 1


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 300), st.booleans()), max_size=60))
def test_never_more_than_the_bound(steps: list[tuple[str, int, bool]]) -> None:
    store = Kept(max_bytes=2000, max_item_bytes=250)
    for name, size, whole in steps:
        if whole:
            store.put_response(f"r{name}", [name] * size)
        else:
            store.put_items([(name, b"x" * size)])
        entries = store._entries.values()
        assert store.n_bytes == sum(entry.n_bytes for entry in entries) <= 2000


# --- items and their references -------------------------------------------------------------------


def answered(kept_in: Kept, parts: list[Part], **body: Any) -> list[dict]:
    """The output of a reply, as its client has it."""
    asking = {"input": "x", "tools": [TOOL, CUSTOM], **body}
    made = parse(asking)
    output: list[dict] = json.loads(dumps(Writer("m", asking, made, kept_in).whole(parts, FINISH)))["output"]
    return output


def through(store: Kept, body: dict) -> Asked:
    """A request as the server reads it."""
    first = ask(body)
    again = resolved(store, first)
    if again is None:
        assert isinstance(first, Asked)
        return first
    return again[0](body)


@given(st.lists(TEXT, min_size=5, max_size=5), st.booleans())
def test_a_reference_is_the_item_itself(texts: list[str], encrypted: bool) -> None:
    store = Kept()
    parts: list[Part] = [
        Text("reasoning", texts[0]), Text("content", texts[1]), CallStart("call_1", "read"),
        CallArguments(json.dumps({texts[2]: texts[3]})), CallEnd(), CallStart("call_2", "apply_patch"),
        CallArguments(json.dumps({"input": texts[4]})), CallEnd(),
    ]  # fmt: skip
    output = answered(store, parts, include=["reasoning.encrypted_content"] if encrypted else [])
    results = [{"type": "function_call_output", "call_id": f"call_{k}", "output": texts[k]} for k in (1, 2)]
    for typed in ({"type": "item_reference"}, {}, {"type": None}):
        said = [{"role": "user", "content": texts[0]}, *({"id": item["id"], **typed} for item in output), *results]
        sent = [said[0], *output, *results]
        assert through(store, {"input": said}).messages == parse({"input": sent}).messages


def test_what_comes_back_with_its_id_is_no_reference() -> None:
    store = Kept()
    (item,) = answered(store, [Text("content", "so")])
    changed = item | {"content": [{"type": "output_text", "text": "other"}]}
    assert isinstance(ask({"input": [changed]}), Asked)
    assert through(store, {"input": [changed]}).messages[0].content == "other"
    assert to_keep(item) == b'["assistant", "so"]'  # log-probabilities and ids are no part of it


def test_nothing_is_kept_of_a_request_that_says_so() -> None:
    store = Kept()
    (item,) = answered(store, [Text("content", "so")], store=False)
    assert len(store) == 0
    with pytest.raises(NotKeptError, match=r"^input\[1\]: what it refers to is not kept") as refused:
        through(store, {"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": item["id"]}]})
    assert "`store`: false" in refused.value.hint
    with pytest.raises(RequestError, match=r"input\[0\]\.id"):
        ask({"input": [{"type": "item_reference"}]})


def test_what_is_kept_is_flat() -> None:
    """The bound on values that an item counts for holds for every kind."""
    store = Kept()
    output = answered(store, [Text("reasoning", "[,"), Text("content", "{,"), CallStart("c", "read"), CallEnd()])
    for item in output:
        containers, values = json_text.count(item_of(store, item["id"]) or b"")
        assert containers == 1 and values <= MOST_VALUES


def test_a_reply_that_fails_keeps_what_was_given_out() -> None:
    store = Kept()
    body = {"input": "x"}
    writer = Writer("m", body, parse(body), store)
    begun = writer.start(1) + writer.part(Text("reasoning", "hm")) + writer.part(Text("content", "so"))
    writer.failed(RequestError("no"))
    (thought,) = re.findall(rb'"response.output_item.done".*?"id": "(rs_[0-9a-f]{24})"', begun)
    assert len(store) == 1 and item_of(store, thought.decode()) is not None


def test_a_conversation_goes_on_from_a_response() -> None:
    store = Kept()
    picture = {"type": "input_image", "image_url": "data:" + "x" * 100_000}
    first: dict = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a\ud83d"}, picture]}]}
    sent: list[dict] = list(first["input"])
    body, previous = first, None
    for k in range(5):
        made = through(store, body)
        assert made.messages == parse({"input": sent}).messages
        reply = Writer("m", body, made, store).whole([Text("reasoning", f"t{k}"), Text("content", f"s{k}")], FINISH)
        assert reply["previous_response_id"] == previous and reply["store"]
        previous = reply["id"]
        body = {"input": f"next {k}", "previous_response_id": previous}
        sent += [*reply["output"], {"role": "user", "content": f"next {k}"}]
    assert store.n_bytes < 50_000  # no picture is among it
    # Instructions are each request's own; two may go on from one place.
    branch = through(store, body | {"instructions": "be"})
    assert branch.messages[0].content == "be" and branch.messages[1:] == through(store, body).messages
    for name, value in (("previous_response_id", 3), ("input", 3)):
        with pytest.raises(RequestError, match=name):
            through(store, body | {name: value})
    assert through(store, {"previous_response_id": previous}).messages[-1].role == "assistant"


def test_a_conversation_that_comes_whole_is_there_once() -> None:
    store = Kept()
    items: list[dict] = [{"role": "user", "content": "x" * 100_000}]
    for k in range(20):
        body = {"input": items}
        reply = Writer("m", body, parse(body), store).whole([Text("content", f"{k}")], FINISH)
        items = [*items, *reply["output"], {"role": "user", "content": f"{k}"}]
    assert 100_000 < store.n_bytes < 200_000


def test_too_many_items() -> None:
    store = Kept()
    body: dict = {"input": [{"role": "user", "content": "x"}] * 16_000}
    reply = Writer("m", body, parse(body), store).whole([Text("content", "y")], FINISH)
    more = {"input": [{"role": "user", "content": "x"}] * 400, "previous_response_id": reply["id"]}
    with pytest.raises(RequestError, match="more than 16384 items"):
        through(store, more)


def test_references_stay_what_was_asked_for_first() -> None:
    assert ask({"input": "x", "previous_response_id": "r"}) == Refers("r", [])
    assert ask({"input": [{"type": "item_reference", "id": "i"}] * 2}) == Refers(None, [(0, "i"), (1, "i")])


# --- what a response repeats ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metadata",
    [{str(k): "" for k in range(17)}, {"k" * 65: ""}, {"k": "v" * 513}, {"k": 1}, {"k": {}}, ["k"]],
)
def test_metadata_has_openai_s_limits(metadata: Any) -> None:
    with pytest.raises(RequestError, match="metadata") as refused:
        parse({"input": "x", "metadata": metadata})
    assert refused.value.field == "metadata"
    largest = {f"{k:064}": "\u00e9" * 512 for k in range(16)}
    body = {"input": "x", "metadata": largest}
    assert Writer("m", body, parse(body)).whole([], FINISH)["metadata"] == largest


def test_long_parts_are_not_repeated() -> None:
    long = "\u00e9" * MAX_ECHO_BYTES
    described = TOOL | {"description": long}
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object", "description": long}}
    body = {"input": "x", "instructions": long, "tools": [described], "text": {"format": form}}
    made = Writer("m", body, parse(body))
    events = [made.start(1), made.part(Text("content", "so")), made.keep_alive, made.end(FINISH)]
    assert all(len(event) < 6000 for event in events)
    whole = Writer("m", body, parse(body)).whole([], FINISH)
    assert whole["instructions"] is None and whole["tools"] == [] and whole["text"] == {"format": {"type": "text"}}
    # What fits is there, in the order in which it is asked about: the rest is for the next one.
    body |= {"instructions": "i" * (MAX_ECHO_BYTES - 1000), "tools": [TOOL]}
    whole = Writer("m", body, parse(body)).whole([], FINISH)
    assert whole["instructions"] == body["instructions"] and whole["tools"] == [TOOL]
    body["tools"] = [TOOL | {"name": f"t{k}"} for k in range(100)]
    assert Writer("m", body, parse(body)).whole([], FINISH)["tools"] == []


# --- in a server ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running() as made:
        yield made


@pytest.fixture(scope="module")
def client(served: Running) -> Iterator[OpenAI]:
    url = f"http://127.0.0.1:{served.port}/v1"
    with OpenAI(api_key="none", base_url=url, timeout=PATIENCE_S, max_retries=0) as made:
        yield made


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def test_a_loop_of_tools_with_references(client: OpenAI) -> None:
    """As Vercel's AI SDK has it: the model's items by their ids, the results of tools themselves."""
    with client.responses.stream(model="any", input=[user(CALL)], tools=[TOOL]) as stream:
        first = stream.get_final_response()
    call = first.output[-1]
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "text"}
    referred: Any = [user(CALL), *({"type": "item_reference", "id": item.id} for item in first.output), result]
    sent: Any = [user(CALL), *(item.to_dict() for item in first.output), result]
    made = [client.responses.create(model="any", input=items, tools=[TOOL]) for items in (sent, referred)]
    assert made[0].usage and made[1].usage and made[0].usage.input_tokens == made[1].usage.input_tokens
    assert made[0].output_text == made[1].output_text


def test_responses_that_go_on(client: OpenAI) -> None:
    first = client.responses.create(model="any", input="think of it")
    second = client.responses.create(model="any", input="hello", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    sent: Any = [user("think of it"), *(item.to_dict() for item in first.output), user("hello")]
    whole = client.responses.create(model="any", input=sent)
    assert second.usage and whole.usage and second.usage.input_tokens == whole.usage.input_tokens


def test_what_is_not_kept_is_refused_as_openai_does(client: OpenAI) -> None:
    unkept = client.responses.create(model="any", input="hello", store=False)
    reference: Any = {"type": "item_reference", "id": unkept.output[0].id}
    with pytest.raises(openai.NotFoundError, match="not kept here") as missing:
        client.responses.create(model="any", input=[user("x"), reference], stream=True)
    assert (missing.value.param, missing.value.code, missing.value.type) == ("input", None, "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="not kept here") as gone:
        client.responses.create(model="any", input="x", previous_response_id=unkept.id)
    assert gone.value.param == "previous_response_id" and gone.value.code == "previous_response_not_found"


def kept_by(made: Running) -> Kept:
    found: Kept = made.app.state.kept
    return found


def test_ten_thousand_references_to_one_large_item(served: Running) -> None:
    store = kept_by(served)
    item_id = f"msg_{secrets.token_hex(12)}"
    store.put_items([(item_id, json.dumps(["assistant", "x" * (1 << 20)]).encode())])
    body = {"input": [user("x"), *[{"type": "item_reference", "id": item_id}] * 10_000]}
    began_s = time.monotonic()
    response = served.http.post(RESPONSES, json=body)
    assert response.status_code == 400 and "the limit is 33554432" in response.json()["error"]["message"]
    assert time.monotonic() - began_s < 5
    # As many as there may be are read aside, and are too long a prompt as they would be if they were sent.
    body = {"input": [user("x"), *[{"type": "item_reference", "id": item_id}] * 20]}
    response = served.http.post(RESPONSES, json=body)
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    # Many small ones are many values.
    store.put_items([(item_id, b'["assistant", ""]')])
    body = {"input": [*[{"type": "item_reference", "id": item_id}] * 16_000], "x": [[]] * 40_000}
    response = served.http.post(RESPONSES, json=body)
    assert response.status_code == 400 and "lists and objects; the limit is" in response.json()["error"]["message"]


def test_large_items_are_referred_to() -> None:
    """What becomes large by its references is read by the process for large bodies, to the same end."""
    item_id = f"msg_{secrets.token_hex(12)}"
    n = bodies.LARGE_BYTES // 1000 + 10
    with running(fake(ctx=1 << 20)) as made:
        kept_by(made).put_items([(item_id, json.dumps(["assistant", "y" * 1000]).encode())])
        counted = []
        for item in ({"type": "item_reference", "id": item_id}, {"role": "assistant", "content": "y" * 1000}):
            body = {"input": [*[item] * n, user("hello")], "max_output_tokens": 1}
            counted.append(made.http.post(RESPONSES, json=body).json()["usage"]["input_tokens"])
        assert counted[0] == counted[1] > bodies.LARGE_BYTES


def test_a_client_that_leaves_has_nothing_kept_but_what_it_got() -> None:
    with running(fake(step_s=0.02)) as made:
        body = {"input": "x" * 300, "stream": True}
        with httpx.stream("POST", f"http://127.0.0.1:{made.port}{RESPONSES}", json=body, timeout=PATIENCE_S) as stream:
            for line in stream.iter_lines():
                if "delta" in line:
                    break
        wait_until(lambda: "spark_replies 0.0" in made.http.get("/metrics").text)
        assert len(kept_by(made)) == 0
        assert made.http.post(RESPONSES, json={"input": "hi", "store": False}).status_code == 200
        assert len(kept_by(made)) == 0
        assert made.http.post(RESPONSES, json={"input": "hi"}).status_code == 200
        assert len(kept_by(made)) == 3  # what was asked, the answer, the response


def test_a_metadata_of_megabytes_is_refused(served: Running) -> None:
    body = {"stream": True, "max_output_tokens": 4, "input": "hi", "metadata": {"a": "\u00e9" * 5_000_000}}
    response = served.http.post(RESPONSES, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "metadata"
    assert len(response.content) < 1000
