"""A proxy in front of the server that notes the shapes of requests and checks what comes back, for clients.py."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

PATIENCE_S = 900.0  # for one run of a program
REASONING_TOKENS = 64  # a small model's has no end
ANSWER = {
    "type": "object",
    "properties": {"answer": {"enum": ["done", "ready"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
LONG_ANSWER = {"type": "array", "items": {"enum": ["done", "ready"]}, "minItems": 900, "maxItems": 900}
LAST_EVENT = re.compile(rb"\n(event: (message_stop|response\.completed)\n[^\n]*|data: \[DONE\])\n\n$")
CHATS = ("/v1/chat/completions", "/v1/completions")
INFERENCE = (*CHATS, "/v1/messages", "/v1/responses")
_OUTLINED = (
    "thinking", "output_config", "reasoning", "text", "tool_choice", "context_management", "response_format",
    "stream_options", "chat_template_kwargs", "metadata", "safeguards",
)  # fmt: skip
Json: TypeAlias = dict[str, Any]


# --- what requests and replies look like ----------------------------------------------------------


def shape(request: Request, path: str, body: Json) -> Json:
    """Names and types of a request, nothing of what it says."""
    made: Json = {
        "method": request.method,
        "path": path,
        "query": sorted(request.query_params),
        "headers": sorted(set(request.headers) - {"host", "content-length", "connection"}),
        "body": sorted(body),
        "types": {name: type(value).__name__ for name, value in sorted(body.items())},
    }
    for name in _OUTLINED:
        if name in body:
            made[name] = _outline(body[name])
    if "stream" in body or path.endswith(("/messages", "/responses")):
        made["stream"] = body.get("stream") is True
    made["tools"] = sorted({_kind(tool, "type", "function") for tool in body.get("tools") or []})
    items = body.get("messages", body.get("input"))
    parts = set()
    for item in items if type(items) is list else []:
        if type(item) is not dict:  # a text of which embeddings are wanted
            parts.add(type(item).__name__)
            continue
        name = str(item.get("role") or item.get("type"))
        name += " in a namespace" if "namespace" in item else ""
        if path in CHATS:
            parts |= {f"{name}.{key}" for key in item.keys() - {"role", "content"}}
        content = item.get("content", item.get("output"))
        parts |= {name} if content is None else {f"{name}: {kind}" for kind in _kinds(content)}
    made["items"] = sorted(parts)
    if "system" in body:
        made["system"] = sorted(_kinds(body["system"]))
    return made


def _outline(value: Any) -> Any:
    """Keys, and of strings those that are the API's own words."""
    if isinstance(value, dict):
        if "schema" in value:
            value = {**value, "schema": None}
        return {key: _outline(inner) for key, inner in sorted(value.items())}
    if isinstance(value, list):
        return [_outline(inner) for inner in value]
    return value if isinstance(value, str) and re.fullmatch(r"[a-z0-9_]{1,40}", value) else type(value).__name__


def _kind(block: Any, name: str, default: str) -> str:
    kind = block.get(name) if isinstance(block, dict) else None
    return kind if isinstance(kind, str) else default


def _kinds(content: Any) -> set[str]:
    """The types of a content's blocks, those inside results of tools too."""
    if not isinstance(content, list):
        return {type(content).__name__}
    made = set()
    for block in content:
        kind = _kind(block, "type", "object")
        made.add(kind)
        if kind == "tool_result":
            made |= {f"tool_result/{inner}" for inner in _kinds(block.get("content"))}
    return made


def brings_results(body: Json) -> bool:
    """Whether a request's last turn has results of tools."""
    for item in reversed(body.get("messages") or (body["input"] if type(body.get("input")) is list else [])):
        if type(item) is not dict:
            return False
        if item.get("role") == "tool":
            return True
        if str(item.get("type")).endswith("_call_output") or "tool_result" in _kinds(item.get("content")):
            return True
        if item.get("role") == "assistant" or str(item.get("type")).endswith("_call"):
            return False
    return False


def problems_of(path: str, events: Sequence[Json]) -> list[str]:
    """What is wrong with the order of a stream's events."""
    names = [event.get("type", event.get("object")) for event in events]
    try:
        if path in CHATS:
            _check_chunks(events)
        elif path == "/v1/messages":
            _check_messages(events)
        else:
            _check_responses(events)
    except (AssertionError, KeyError, IndexError, ValueError, StopIteration) as error:
        return [f"{path}: events out of order after {names[-3:]}: {type(error).__name__} {error}"]
    return []


def _check_messages(events: Sequence[Json]) -> None:
    events = [event for event in events if event["type"] != "ping"]
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    assert events[-2]["type"] == "message_delta" and events[-2]["delta"]["stop_reason"]
    thinking = {"thinking_delta", "signature_delta"}
    deltas = {"text": {"text_delta"}, "thinking": thinking, "tool_use": {"input_json_delta"}}
    kind, index, arguments = None, -1, ""
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            index += 1
            assert kind is None and event["index"] == index
            kind, arguments = event["content_block"]["type"], ""
        elif event["type"] == "content_block_delta":
            assert event["index"] == index and kind and event["delta"]["type"] in deltas[kind]
            arguments += event["delta"].get("partial_json", "")
        else:
            assert event["type"] == "content_block_stop" and event["index"] == index and kind
            if kind == "tool_use":
                json.loads(arguments or "{}")
            kind = None
    assert kind is None


def _check_responses(events: Sequence[Json]) -> None:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    done: list[Json] = []
    open_id = None
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "in_progress":  # again, as a sign of life
            continue
        assert event["output_index"] == len(done)
        if kind == "output_item.added":
            assert open_id is None
            open_id = event["item"]["id"]
        elif kind == "output_item.done":
            assert open_id == event["item"]["id"]
            if event["item"]["type"] == "function_call":
                json.loads(event["item"]["arguments"])
            done.append(event["item"])
            open_id = None
        else:
            assert open_id == event["item_id"]
    assert open_id is None and events[-1]["response"]["output"] == done


def _check_chunks(chunks: Sequence[Json]) -> None:
    assert len({chunk["id"] for chunk in chunks}) == 1
    ended: set[int] = set()
    arguments: dict[tuple[int, int], str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index, delta = choice["index"], choice.get("delta", {})
            assert index not in ended
            for call in delta.get("tool_calls", []):
                key = (index, call["index"])
                assert (key in arguments) != ("id" in call)
                arguments[key] = arguments.get(key, "") + call["function"]["arguments"]
            ended |= {index} if choice["finish_reason"] else set()
    assert ended == set(range(len(ended))) and ended
    for text in arguments.values():
        json.loads(text)


def chunks_of(text: str) -> list[Json]:
    """The chunks of a stream of completions; comments are left out."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    if not blocks or blocks[-1] != "data: [DONE]":
        raise ValueError("the stream has no end")
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def events_of(text: str) -> list[Json]:
    """The events of a stream; comments are left out."""
    made = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            name, data = lines
            event = json.loads(data.removeprefix("data: "))
            if name != f"event: {event['type']}":
                raise ValueError("an event's name is not its type")
            made.append(event)
    return made


# --- the proxy ------------------------------------------------------------------------------------


@dataclass
class Session:
    """What the proxy does with one run of a program.

    calls: tools that turns to come have to call. refusals: statuses that are no problem. narrowed: beyond those of all.
    """

    program: str
    changed: bool = True
    may_leave: bool = False
    calls: collections.deque[str] = field(default_factory=collections.deque)
    refusals: Sequence[int] = ()
    narrowed: Mapping[str, Json] = field(default_factory=dict)
    form: Json = field(default_factory=lambda: ANSWER)  # of answers
    refused: set[int] = field(default_factory=set)
    n_requests: int = 0
    n_streaming: int = 0  # replies of which something has come
    n_left: int = 0  # in the middle, by the program
    n_answers: int = 0  # requests that bring what a tool has said
    problems: list[str] = field(default_factory=list)


@dataclass
class Proxy:
    """Passes on requests to /SESSION/..., and notes their shapes."""

    url: str
    narrowed: Mapping[str, Json]
    sessions: dict[str, Session] = field(default_factory=dict)
    shapes: dict[str, Json] = field(default_factory=dict)
    events: collections.Counter[str] = field(default_factory=collections.Counter)
    at_once: int = 0
    most_at_once: int = 0
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    dump: Path | None = None

    async def answer(self, request: Request) -> Response:
        """Pass on a request."""
        session = self.sessions[request.path_params["session"]]
        path = "/" + request.path_params["path"]
        content = await request.body()
        try:
            body = json.loads(content) if content else {}
        except ValueError:
            body = {}
        if self.dump is not None:
            (self.dump / f"{len(list(self.dump.iterdir())):03}.json").write_bytes(content)
        found = {"program": session.program, **shape(request, path, body)}
        session.n_requests += 1
        session.n_answers += brings_results(body)
        if session.changed and body:
            content = json.dumps(self._change(session, path, body)).encode()
        headers = {k: v for k, v in request.headers.items() if k not in ("host", "content-length", "accept-encoding")}
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        client = httpx.AsyncClient(timeout=PATIENCE_S)
        made = client.build_request(
            request.method, self.url + path, params=request.query_params, headers=headers, content=content
        )
        response = await client.send(made, stream=True)
        kept = {k: v for k, v in response.headers.items() if k not in ("content-length", "transfer-encoding")}
        chunks = self._chunks(session, path, found, client, response)
        return StreamingResponse(chunks, response.status_code, kept)

    async def _chunks(
        self, session: Session, path: str, found: Json, client: httpx.AsyncClient, response: httpx.Response
    ) -> AsyncIterator[bytes]:
        text, whole = b"", False
        try:
            async for chunk in response.aiter_raw():
                text += chunk
                session.n_streaming += path in INFERENCE and len(text) == len(chunk)
                yield chunk
            whole = True
        finally:
            self.at_once -= 1
            whole = whole or LAST_EVENT.search(text[-65536:]) is not None  # clients may leave when they have seen it
            self._note(found, str(response.status_code) if whole else "left by the client")
            with contextlib.suppress(asyncio.CancelledError):
                await response.aclose()
                await client.aclose()
            session.n_left += not whole
            if response.status_code in session.refusals:
                session.refused.add(response.status_code)
            elif response.status_code >= 400:
                session.problems.append(f"{path}: {response.status_code} {text[:300].decode(errors='replace')}")
            elif not whole and not session.may_leave:
                session.problems.append(f"{path}: the client left")
            elif whole:
                self._check(session, path, found, text.decode())

    def _check(self, session: Session, path: str, found: Json, text: str) -> None:
        try:
            if not found.get("stream"):
                if found["method"] != "HEAD":
                    json.loads(text)
                return
            events = (chunks_of if path in CHATS else events_of)(text)
        except ValueError as error:
            session.problems.append(f"{path}: the reply cannot be read: {error}")
            return
        session.problems += problems_of(path, events)
        self.events.update(f"{path} {event.get('type', event.get('object'))}" for event in events)
        for event in events:
            usage = (event.get("response") or event.get("message") or event).get("usage") or {}
            n = usage.get("input_tokens", 0) + usage.get("prompt_tokens", 0) + usage.get("cache_read_input_tokens", 0)
            self.prompt_tokens[session.program] = max(self.prompt_tokens.get(session.program, 0), n)

    def _note(self, found: Json, outcome: str) -> None:
        key = json.dumps(found, sort_keys=True)
        entry = self.shapes.setdefault(key, {**found, "count": 0, "outcomes": {}})
        entry["count"] += 1
        entry["outcomes"][outcome] = entry["outcomes"].get(outcome, 0) + 1

    def _change(self, session: Session, path: str, body: Json) -> Json:
        """Narrow the tools, and have the model call the next one or say something short."""
        chat = path == "/v1/chat/completions"
        tools: dict[str, Json] = {}
        for tool in body.get("tools") or []:
            inside = {f"{tool['name']}__{inner['name']}": inner for inner in tool.get("tools", [])}
            own = tool["function"] if chat else tool
            tools |= inside or {own.get("name", ""): own}
        narrowed = {**self.narrowed, **session.narrowed}
        for name in tools.keys() & narrowed.keys():
            values = narrowed[name]
            tools[name]["input_schema" if path.startswith("/v1/messages") else "parameters"] = {
                "type": "object",
                "properties": {key: {"enum": [value]} for key, value in values.items()},
                "required": list(values),
                "additionalProperties": False,
            }
        if path not in INFERENCE[:1] + INFERENCE[2:]:
            return body
        if "thinking" in body or (chat and "reasoning_effort" in body):
            body["thinking"] = {"type": "enabled", "budget_tokens": REASONING_TOKENS}
        elif path == "/v1/responses":
            body["reasoning"] = {**(body.get("reasoning") or {}), "max_tokens": REASONING_TOKENS}
        form = {"name": "answer", "schema": session.form}
        if session.calls and session.calls[0] in tools:
            name = session.calls.popleft()
            kind = "tool" if path == "/v1/messages" else "function" if chat else tools[name]["type"]
            body["tool_choice"] = {"type": kind, **({"function": {"name": name}} if chat else {"name": name})}
        elif path == "/v1/messages":
            output = body.setdefault("output_config", {})
            output.setdefault("format", {"type": "json_schema", "schema": session.form})
        elif chat:
            body.setdefault("response_format", {"type": "json_schema", "json_schema": form})
        else:
            body["text"] = {"format": {"type": "json_schema", **form}, **(body.get("text") or {})}
        return body


@contextlib.contextmanager
def proxied(proxy: Proxy) -> Iterator[str]:
    """The proxy on a free port; its URL."""
    methods = ["GET", "POST", "HEAD", "PUT", "DELETE", "PATCH"]
    app = Starlette(routes=[Route("/{session}/{path:path}", proxy.answer, methods=methods)])
    app.add_exception_handler(ClientDisconnect, lambda request, error: Response(status_code=499))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
