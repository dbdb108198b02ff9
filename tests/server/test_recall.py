"""What requests say of recall, and what is said of it: bodies, usage, metrics, and once with the bundled model."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.ground import protocol
from engine.ground.errors import RequestError
from engine.ground.recall import KVRecall
from spark.apis import chat, completions, messages, response_items, responses
from spark.server.metrics import Metrics
from spark.speech.conversation import Usage, added_recall
from tests.command_line import NANO, started
from tests.server.test_server import PATIENCE_S

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
BODIES: list[tuple[Any, dict[str, Any]]] = [
    (chat.parse, {"messages": ASKED}),
    (completions.parse, {"prompt": "a"}),
    (messages.parse, {"messages": ASKED, "max_tokens": 4}),
    (responses.parse, {"input": "a"}),
]


@pytest.mark.parametrize(("parse", "body"), BODIES, ids=["chat", "completions", "messages", "responses"])
def test_every_api_takes_it(parse: Any, body: dict[str, Any]) -> None:
    assert parse(body).kv_recall is None and parse(body | {"kv_recall": None}).kv_recall is None
    assert parse(body | {"kv_recall": "off"}).kv_recall == KVRecall(off=True)
    given = {"blocks": 3, "keep": [[0, 64], [100, 101]]}
    assert parse(body | {"kv_recall": given}).kv_recall == KVRecall(blocks=3, keep=((0, 64), (100, 101)))
    assert parse(body | {"kv_recall": {}}).kv_recall == KVRecall()
    assert parse(body | {"kv_recall": {"from": 9}}).kv_recall == KVRecall(start=9)
    assert parse(body | {"kv_recall": {"left_out": 0, "blocks": 2}}).kv_recall == KVRecall(blocks=2, left_out=0.0)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("on", "kv_recall"),
        (5, "kv_recall"),
        ([], "kv_recall"),
        ({"block": 3}, "kv_recall.block"),
        ({"blocks": -1}, "kv_recall.blocks"),
        ({"blocks": 1.5}, "kv_recall.blocks"),
        ({"blocks": 1 << 40}, "kv_recall.blocks"),
        ({"from": -1}, "kv_recall.from"),
        ({"from": 1 << 31}, "kv_recall.from"),
        ({"start": 1}, "kv_recall.start"),
        ({"left_out": 1.01}, "kv_recall.left_out"),
        ({"left_out": -1e-9}, "kv_recall.left_out"),
        ({"left_out": True}, "kv_recall.left_out"),
        ({"left_out": "0.1"}, "kv_recall.left_out"),
        ({"left_out": math.nan}, "kv_recall.left_out"),
        ({"left_out": [0.1]}, "kv_recall.left_out"),
        ({"keep": 5}, "kv_recall.keep"),
        ({"keep": [[0, 1]] * 65}, "kv_recall.keep"),
        ({"keep": [[0, 1], [3, 3]]}, "kv_recall.keep[1]"),
        ({"keep": [[-1, 1]]}, "kv_recall.keep[0]"),
        ({"keep": [[0, True]]}, "kv_recall.keep[0]"),
        ({"keep": [[0]]}, "kv_recall.keep[0]"),
        ({"keep": [[0, 1 << 31]]}, "kv_recall.keep[0]"),
        ({"": 3}, "kv_recall."),
        ({"keep_messages": 0}, "kv_recall.keep_messages"),
        ({"keep_messages": [0] * 65}, "kv_recall.keep_messages"),
        ({"keep_messages": [0] * 60, "keep": [[0, 1]] * 5}, "kv_recall.keep_messages"),
        ({"keep_messages": ["user"]}, "kv_recall.keep_messages[0]"),
        ({"keep_messages": [0, True]}, "kv_recall.keep_messages[1]"),
        ({"keep_messages": [0.0]}, "kv_recall.keep_messages[0]"),
        ({"keep_messages": [[0]]}, "kv_recall.keep_messages[0]"),
        ({"keep_messages": [[None, 1]]}, "kv_recall.keep_messages[0]"),
        ({"keep_messages": [[0, "1"]]}, "kv_recall.keep_messages[0]"),
        ({"keep_messages": [1 << 300]}, "kv_recall.keep_messages[0]"),
    ],
)
def test_what_is_malformed_is_refused_by_name(given: Any, field: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat.parse({"messages": ASKED, "kv_recall": given})
    assert refused.value.field == field


ENTRIES = [0, -1, [1, 3], [-2, None], [0, -2], "system"]
CONVERSATIONS: list[tuple[Any, dict[str, Any], list[tuple[int, int]]]] = [
    (
        chat.parse,
        {"messages": [
            {"role": "system", "content": "s"}, *ASKED, {"role": "assistant", "content": "b"}, *ASKED,
        ]},
        [(0, 1), (3, 4), (1, 3), (2, 4), (0, 2), (-1, 1)],
    ),
    (  # a text and two results in one message, and how the reply begins
        messages.parse,
        {"max_tokens": 4, "system": "s", "messages": [
            *ASKED,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [
                *({"type": "tool_result", "tool_use_id": "c", "content": "r"} for _ in range(2)),
                {"type": "text", "text": "a"},
            ]},
            {"role": "assistant", "content": "so"},
        ]},
        [(1, 2), (6, 7), (2, 6), (3, 7), (1, 3), (-1, 1)],
    ),
    (  # a turn of three items, and one that the model is not told of
        responses.parse,
        {"instructions": "s", "input": [
            *ASKED, {"type": "reasoning", "content": [{"text": "t"}]}, {"role": "assistant", "content": "b"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, {"type": "web_search_call"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
        ]},
        [(1, 2), (3, 4), (2, 3), (2, 4), (1, 3), (-1, 1)],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("parse", "body", "expected"), CONVERSATIONS, ids=["chat", "messages", "responses"])
def test_messages_are_those_of_the_request(parse: Any, body: dict[str, Any], expected: Any) -> None:
    for entry, span in zip(ENTRIES, expected, strict=True):
        made = parse(body | {"kv_recall": {"blocks": 3, "keep": [[0, 5]], "keep_messages": [entry]}})
        assert made.kept_messages == (span,) and made.kv_recall == KVRecall(blocks=3, keep=((0, 5),))
    assert parse(body | {"kv_recall": {"keep_messages": ENTRIES}}).kept_messages == tuple(expected)
    for nothing in ({}, {"keep_messages": []}, {"keep_messages": None}, "off", None):
        assert parse(body | {"kv_recall": nothing}).kept_messages == ()
    n = len(body.get("messages", body.get("input")))
    for wrong in (n, -n - 1, [0, 0], [2, 1], [0, n + 1], [-n - 1, 1], [n, None]):
        with pytest.raises(RequestError, match=f"{n} messages") as refused:
            parse(body | {"kv_recall": {"keep_messages": [0, wrong]}})
        assert refused.value.field == "kv_recall.keep_messages[1]"


def test_items_before_the_input_come_first() -> None:
    """Of a response that is gone on from."""
    before = [json.dumps(said).encode() for said in (["user", "a"], ["assistant", "b"])]
    body = {"input": "c", "kv_recall": {"keep_messages": [0, 1, -1]}}
    assert responses.parse(body, response_items.Found({}, before)).kept_messages == ((0, 1), (1, 2), (2, 3))


def test_a_prompt_without_messages_keeps_none() -> None:
    body = {"prompt": "a", "kv_recall": {"keep_messages": [0]}}
    with pytest.raises(RequestError, match="no messages") as refused:
        completions.parse(body)
    assert refused.value.field == "kv_recall.keep_messages"
    assert completions.parse({"prompt": "a", "kv_recall": {"keep_messages": []}}).kv_recall == KVRecall()


def test_it_goes_through_the_line_protocol() -> None:
    recall = KVRecall(blocks=3, keep=((0, 64), (100, 101)), left_out=0.25)
    request = protocol.Generate(1, (2, 3), 4, kv_recall=recall)
    assert protocol.parse_request(protocol.format_line(request)) == request
    with pytest.raises(RequestError, match=r"kv_recall.keep"):
        protocol.parse_request(b'{"op":"generate","id":1,"tokens":[1],"max_tokens":1,"kv_recall":{"keep":[[1]]}}')


def test_usage_of_several_is_one() -> None:
    one = {"tokens": 3, "blocks": 30, "read": 20, "left_out_max": 0.5, "left_out_mean": 0.1}
    other = {"tokens": 1, "blocks": 10, "read": 10, "left_out_max": 0.25, "left_out_mean": 0.02}
    both = {"tokens": 4, "blocks": 40, "read": 30, "left_out_max": 0.5, "left_out_mean": 0.08}
    assert added_recall(one, other) == pytest.approx(both) and added_recall(None, one) == one
    assert (Usage(1, 2, recall=one) + Usage(3, 4, recall=other)).shown_more() == {"recall": pytest.approx(both)}
    assert Usage(1, 2).shown_more() == {}


def test_metrics() -> None:
    recall = {"tokens": 7, "blocks": 90, "read": 60, "left_out_max": 0.5, "left_out_sum": 0.75}
    lines = Metrics().text({"recall": recall}, True, 0, {}).decode().splitlines()
    for line in (
        'spark_recall_blocks_total{outcome="read"} 60.0', 'spark_recall_blocks_total{outcome="left_out"} 30.0',
        "spark_recall_tokens_total 7.0", "spark_recall_left_out_total 0.75", "spark_recall_left_out_max 0.5",
        f"spark_recall_left_out_mean {0.75 / 7}",
    ):  # fmt: skip
        assert line in lines
    assert b"recall" not in Metrics().text({"recall": {}}, True, 0, {})
    none = dict.fromkeys(recall, 0)
    assert b"spark_recall_left_out_mean 0.0" in Metrics().text({"recall": none}, True, 0, {})


KEPT: list[dict[str, Any]] = [
    {"blocks": 0},
    {"blocks": 0, "keep_messages": [1]},
    {"blocks": 0, "keep_messages": [0, -1]},
]


@pytest.mark.slow
def test_the_bundled_model_reads_a_part(tmp_path: Path) -> None:
    """Over HTTP: what is said of it, and that "off" says what a server without the option does."""
    text = "".join(f"{i}: the value of item {i * 7919 % 1000} is {i * 31 % 97}. " for i in range(60))
    body = {"model": "any", "prompt": text, "max_tokens": 24, "temperature": 0}
    chatted = {
        "messages": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": text},
            {"role": "assistant", "content": "Yes."}, {"role": "user", "content": text[:400]},
        ],
        "max_tokens": 4, "temperature": 0,
    }  # fmt: skip
    asked: dict[str, dict[str, Any]] = {"": {}, " off": {"kv_recall": "off"}, " all": {"kv_recall": {"blocks": 99}}}
    replies: dict[str, Any] = {}
    chats: dict[str, list[Any]] = {}
    for name, options in (("plain", ()), ("recall", ("--kv-recall-blocks", "1"))):
        command = ("serve", NANO, "--device", "cpu", "--port", "0", "--ctx", "2048", *options)
        with started(*command, cwd=tmp_path, tmp=tmp_path) as process:
            assert process.stderr is not None
            url = next(line for line in process.stderr if " is served at" in line).split()[-1]
            for more, fields in asked.items():
                answer = httpx.post(f"{url}/completions", json=body | fields, timeout=PATIENCE_S)
                replies[name + more] = answer.json()
            chats[name] = [
                httpx.post(f"{url}/chat/completions", json=chatted | {"kv_recall": given}, timeout=PATIENCE_S).json()
                for given in KEPT
            ]
            metrics = httpx.get(f"{url.removesuffix('/v1')}/metrics", timeout=PATIENCE_S).text
    texts = {name: reply["choices"][0]["text"] for name, reply in replies.items() if "choices" in reply}
    assert texts["plain"] == texts["plain off"] == texts["recall off"] == texts["recall all"]
    assert "kv_recall" in replies["plain all"]["error"]["message"]
    used, whole = (replies[name]["usage"]["recall"] for name in ("recall", "recall all"))
    assert used["tokens"] == 23 and 0 < used["read"] < used["blocks"]
    assert 0 < used["left_out_mean"] < used["left_out_max"]
    assert whole["read"] == whole["blocks"] and whole["left_out_max"] == 0
    assert "recall" not in replies["recall off"]["usage"] and "recall" not in replies["plain"]["usage"]
    assert 'spark_recall_blocks_total{outcome="left_out"}' in metrics
    assert all("kv_recall" in reply["error"]["message"] for reply in chats["plain"])
    none, long, short = (reply["usage"]["recall"] for reply in chats["recall"])
    assert none["blocks"] == long["blocks"] == long["read"] > short["read"] >= none["read"]


FORM = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}
FUNCTION = {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}
KINDS: list[dict[str, Any]] = [
    {}, {"n": 2, "temperature": 1}, {"logprobs": True}, {"repetition_penalty": 1.2},
    {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}},
]  # fmt: skip
RECALLS: list[Any] = [{"blocks": 1, "keep_messages": [-1]}, {"keep": [[200, 300]]}, None, "off"]


@pytest.mark.slow
def test_no_request_says_anything_else_beside_others(tmp_path: Path) -> None:
    """Of every kind, with a pool and drafts; alone and without either they said the same, and read as much."""
    text = "".join(f"{i}: the value of item {i * 7919 % 1000} is {i * 31 % 97}. " for i in range(40))
    same = {"max_tokens": 12, "temperature": 0, "seed": 3}
    asked = [
        same | kind | {"messages": [{"role": "user", "content": f"{i}. {text}"}, *ASKED]}
        | {"kv_recall": RECALLS[i % len(RECALLS)], "prediction": {"type": "content", "content": text[:200]}}
        for i, kind in enumerate(KINDS)
    ]  # fmt: skip
    said = []
    for beside, options in ((1, ("--draft", "off")), (6, ("--kv-pool", "1280", "--parallel", "3", "--chunk", "128"))):
        more = ("--ctx", "2048", "--kv-recall-blocks", "2", *options)
        with started("serve", NANO, "--device", "cpu", "--port", "0", *more, cwd=tmp_path, tmp=tmp_path) as process:
            assert process.stderr is not None
            url = next(line for line in process.stderr if " is served at" in line).split()[-1]

            def ask(body: dict[str, Any], url: str = url) -> tuple[list[Any], Any]:
                made = httpx.post(f"{url}/chat/completions", json=body, timeout=PATIENCE_S).json()
                calls = [call for one in made["choices"] for call in one["message"].get("tool_calls", ())]
                for call in calls:
                    del call["id"]
                return made["choices"], {**made["usage"].get("recall", {}), "left_out_mean": 0}

            with ThreadPoolExecutor(beside) as pool:
                said.append(list(pool.map(ask, asked)))
    assert said[0] == said[1]
    read = [recall for _, recall in said[0]]
    assert all(one["read"] < one["blocks"] for i, one in enumerate(read) if i != 3) and len(read[3]) == 1
