"""Log-probabilities: whose they are, and the shapes in which the APIs have them."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from spark.apis import chat, completions, responses
from spark.apis.written import Written, dumps
from spark.speech.conversation import Finish, Text, TokenLogprob, Usage
from spark.speech.dialect import Dialect
from spark.speech.logprobs import Aligner
from spark.speech.reply import ReplyParser
from tests import fake_engine
from tests.server.test_generation import SCHEMA, TOOLS
from tests.server.test_server import PATIENCE_S, Running, events, running
from tests.server.test_server import TOOLS as READ


class Pieces:
    """A tokenizer of these pieces; a token is a number of one."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def decode_bytes(self, ids: list[int]) -> bytes:
        return b"".join(self.pieces[i] for i in ids)


def aligned(pieces: list[bytes], stops: tuple[str, ...] = (), *, plain: bool = False) -> tuple[str, list[TokenLogprob]]:
    """The visible text of a reply that is written in these pieces, and its tokens."""
    tokenizer: Any = Pieces(pieces)
    aligner, chars = Aligner(tokenizer), 0
    parser = ReplyParser(Dialect(), stops=stops, tools=TOOLS, plain=plain)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    shown, found = "", []

    def take(text: str, *, last: bool = False) -> None:
        nonlocal shown
        for part in parser.push(text) + (parser.flush() if last else []):
            if isinstance(part, Text) and part.kind == "content":
                shown += part.text
                found.extend(aligner.of(part.at, len(part.text)))

    for i, piece in enumerate(pieces):
        text = decoder.decode(piece)
        aligner.token(chars, len(text), i, -float(i), [(i, 0.0)])
        chars += len(text)
        take(text)
    take(decoder.decode(b"", final=True), last=True)
    return shown, found


def test_tokens_of_visible_text_alone() -> None:
    call = [b" <tool_call>", b'{"name": "read"}', b"</tool_call>"]
    shown, found = aligned([b"<think>", b"hm", b"</think>", b"\n\n", b"so", b" it", *call])
    assert shown == "so it" and [made.token for made in found] == [b"so", b" it"] and found[0].logprob == -4.0


def test_a_stop_string_that_cuts_a_token() -> None:
    """The token that the stop string cuts is there, whole; those that lie in it are not, whatever was held back."""
    for pieces, expected in (
        ([b"one", b" tw", b"o th", b"ree"], [b"one", b" tw", b"o th"]),  # the stop string is " th"
        ([b"one", b" two", b" t", b"h", b"ree"], [b"one", b" two"]),
        ([b"one", b" two ", b"there"], [b"one", b" two "]),
    ):
        shown, found = aligned(pieces, (" th",))
        assert shown == "one two" and [made.token for made in found] == expected


def test_characters_in_several_tokens() -> None:
    snow = "\u2603".encode()
    shown, found = aligned([b"a", snow[:1], snow[1:2], snow[2:] + b"b", b"c"])
    assert shown == "a\u2603bc" and [made.token for made in found] == [b"a", snow[:1], snow[1:2], snow[2:] + b"b", b"c"]
    assert [made.at for made in found] == [0, 1, 1, 1, 3]
    shown, found = aligned([b"a", snow[:1], b"b", snow[:2]])  # what is not UTF-8, in the middle and at the end
    assert shown == "a\ufffdb\ufffd" and len(found) == 4
    shown, found = aligned([b"a", snow[:2], snow[2:]], ("\u2603",))  # a stop string of that character
    assert shown == "a" and [made.token for made in found] == [b"a"]


@given(
    st.lists(st.binary(min_size=1, max_size=4) | st.sampled_from([b"STOP", b"\xe2\x98", b"\x83", b" "]), max_size=12)
)
def test_all_of_what_is_shown_has_its_tokens(pieces: list[bytes]) -> None:
    shown, found = aligned(pieces, ("STOP",), plain=True)
    written = b"".join(pieces)
    assert b"".join(made.token for made in found) == written[: sum(len(made.token) for made in found)]
    covered = b"".join(made.token for made in found).decode(errors="replace")
    assert covered.startswith(shown.rstrip("\ufffd")) and len(covered) >= len(shown)
    if "STOP" not in written.decode(errors="replace"):
        assert len(found) == len(pieces)


# --- the APIs -------------------------------------------------------------------------------------


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


WISH = "hm\n</think>\n\ncaf\u00e9"


def test_chat(client: OpenAI) -> None:
    made = client.chat.completions.create(
        model="any", messages=said("think", WISH), logprobs=True, top_logprobs=2
    ).choices[0]
    assert made.message.content == "caf\u00e9" and made.logprobs and made.logprobs.content
    assert made.logprobs.refusal is None and made.logprobs.model_dump().keys() == {"content", "refusal"}
    tokens = made.logprobs.content
    assert bytes(b for token in tokens for b in token.bytes or []) == "caf\u00e9".encode()
    assert [token.token for token in tokens] == ["c", "a", "f", "\ufffd", "\ufffd"]
    assert [token.logprob for token in tokens] == [fake_engine.logprob(b) for b in "caf\u00e9".encode()]
    assert [[top.token for top in token.top_logprobs] for token in tokens[:2]] == [["c", "d"], ["a", "b"]]

    with client.chat.completions.stream(
        model="any", messages=said("think", WISH), logprobs=True, top_logprobs=2
    ) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        final = stream.get_final_completion().choices[0]
    assert final.logprobs and final.logprobs.content == tokens
    for chunk in chunks:
        (choice,) = chunk.choices
        assert bool(choice.logprobs and choice.logprobs.content) == bool(choice.delta.content)

    for off in ({}, {"logprobs": None}, {"logprobs": False, "top_logprobs": 0}):
        plain: Any = client.chat.completions.create(model="any", messages=said("x"), extra_body=off)
        assert plain.choices[0].logprobs is None
    alone = client.chat.completions.create(model="any", messages=said("x"), logprobs=True).choices[0]
    assert alone.logprobs and alone.logprobs.content and alone.logprobs.content[0].top_logprobs == []


def test_what_is_cut(client: OpenAI) -> None:
    def tokens(wish: str, **more: Any) -> list[str]:
        made = client.chat.completions.create(model="any", messages=said(wish), logprobs=True, **more).choices[0]
        assert made.logprobs and made.logprobs.content is not None
        return [token.token for token in made.logprobs.content]

    assert tokens("abc def", stop="c d") == ["a", "b"]
    assert tokens("abcdef", max_tokens=3) == ["a", "b", "c"]
    assert tokens("ab\u2603", max_tokens=4) == ["a", "b", "\ufffd", "\ufffd"]
    assert tokens('so<tool_call>{"name": "read", "arguments": {}}</tool_call>', tools=READ) == ["s", "o"]
    assert tokens('<tool_call>{"name": "read", "arguments": {}}</tool_call>', tools=READ) == []
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    # The reply is begun freely, taken back at its first letter, and begun again: its tokens are those of the second.
    assert tokens("{}", response_format=form, tools=READ) == ["{", "}"]


def test_completions(client: OpenAI) -> None:
    made = client.completions.create(model="any", prompt="\u00e9a", max_tokens=9, logprobs=2).choices[0]
    assert made.text == "a\ufffd\ufffd" and made.logprobs  # it says what it read backwards
    assert made.logprobs.tokens == ["a", "bytes:\\xa9", "bytes:\\xc3"] and made.logprobs.text_offset == [0, 1, 2]
    assert made.logprobs.token_logprobs == [fake_engine.logprob(b) for b in b"a\xa9\xc3"]
    assert made.logprobs.top_logprobs and [*made.logprobs.top_logprobs[0]] == ["a", "b"]
    alone = client.completions.create(model="any", prompt="ba", logprobs=0).choices[0]
    assert alone.logprobs and alone.logprobs.tokens == ["a", "b"] and alone.logprobs.top_logprobs is None
    chunks = [
        chunk.choices[0] for chunk in client.completions.create(model="any", prompt="ba", logprobs=1, stream=True)
    ]
    found = [chunk.logprobs for chunk in chunks if chunk.logprobs]
    assert [offset for part in found for offset in part.text_offset or []] == [0, 1]
    assert chunks[-1].finish_reason == "stop" and chunks[-1].logprobs is None
    assert client.completions.create(model="any", prompt="ba").choices[0].logprobs is None


def test_responses(client: OpenAI) -> None:
    made = client.responses.create(model="any", input="hello", include=["message.output_text.logprobs"], top_logprobs=1)
    (content,) = made.output[0].content  # type: ignore[union-attr,misc]
    assert [token.token for token in content.logprobs] == [*"hello"]  # type: ignore[union-attr]
    with client.responses.stream(model="any", input="hello", include=["message.output_text.logprobs"]) as stream:
        kinds = {event.type: event for event in stream}
        final = stream.get_final_response()
    assert final.output[0].content[0].logprobs[0].bytes == [ord("h")]  # type: ignore[union-attr]
    assert len(kinds["response.output_text.done"].logprobs) == 5  # type: ignore[union-attr]


def test_as_many_as_there_may_be(served: Running) -> None:
    chunks = events(served.ask("ab", stream=True, logprobs=True, top_logprobs=20))
    entries = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [len(entry["top_logprobs"]) for entry in entries] == [20, 20]


# --- written as they come ---------------------------------------------------------------------------


def test_what_is_written_already_is_put_in_its_place() -> None:
    values: list[Any] = [{"a": 'x"y', "b": [1, None]}, "\ud800", 0.1, True]
    one, two, none = Written(), Written(), Written()
    one.add(values[:1])
    one.add(values[1:])
    two.add([2])
    made = {"first": one, "second": [none, {"third": two, "again": one}], "text": '"]'}
    plain = {"first": values, "second": [[], {"third": [2], "again": values}], "text": '"]'}
    assert dumps(made) == json.dumps(plain).encode() == dumps(plain)
    with pytest.raises(TypeError, match="set is nothing"):
        dumps({"a": set()})


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (chat, {"messages": said("x"), "logprobs": True, "top_logprobs": 1}),
        (completions, {"prompt": "x", "logprobs": 1}),
        (completions, {"prompt": "x", "logprobs": 0}),
        (responses, {"input": "x", "top_logprobs": 1}),
    ],
)
def test_the_end_of_a_reply_is_no_long_work(api: Any, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are written as they come, so the last step of a reply of thousands keeps nobody waiting."""
    finish = Finish("stop", Usage(1, 2))
    tokens = tuple(TokenLogprob(bytes([c]), -0.5, ((b"s", -0.5),), i) for i, c in enumerate(b"so"))
    asked = api.parse(body)

    def writer() -> Any:
        return api.Writer("m", body, asked)

    late, held = writer(), writer()
    late_said = json.loads(dumps(late.whole([Text("content", "so", tokens)], finish)))
    held.hold([Text("content", "s", tokens[:1])])
    held.hold([Text("content", "o", tokens[1:])])
    for name in ("entry", "_top"):
        monkeypatch.setattr(api, name, None, raising=False)
    held_said = json.loads(dumps(held.whole([], finish)))
    assert "-0.5" in str(held_said) and _unnamed(held_said) == _unnamed(late_said)


def _unnamed(made: Any) -> Any:
    """A reply without its ids."""
    if isinstance(made, list):
        return [_unnamed(item) for item in made]
    if isinstance(made, dict):
        return {key: _unnamed(value) for key, value in made.items() if key not in ("id", "created", "created_at")}
    return made
