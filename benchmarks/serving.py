"""What the benchmarks of the server share: `spark serve` as a process, and streamed requests over plain HTTP.

Requests go through `http.client`, which costs little beside what is measured, and whose connections can be dropped.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import jsonschema
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from spark.extract import ExtractOptions, extract  # noqa: E402
from spark.speech.sessions import Session, read_sessions  # noqa: E402

READY_S = 600.0
FEW_TOKENS = 16  # come in too few groups for a rate
Json: TypeAlias = dict[str, Any]
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


# --- the server -----------------------------------------------------------------------------------


class Server:
    """`spark serve` on a free port, in a process of its own; command: what to run in its place."""

    def __init__(self, model: Path, *options: str, command: Sequence[str] = ()) -> None:
        command = command or [sys.executable, "-m", "spark.cli", "serve", str(model), "--port", "0", *options]
        self._log = tempfile.NamedTemporaryFile(prefix="spark-serve-", suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=self._log, stderr=self._log)
        self.pid = self._process.pid
        try:
            self.url = self._wait()
        except BaseException:
            self._process.kill()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def log(self) -> str:
        """What it wrote so far."""
        return Path(self._log.name).read_text(errors="replace")

    def daemon_pid(self) -> int | None:
        """Process id of its daemon; None where there is none just now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children():
                with contextlib.suppress(psutil.Error):
                    if any("run_module('engine'" in word for word in child.cmdline()):
                        return child.pid
        return None

    def connections(self) -> int:
        """How many connections it has open."""
        found = psutil.Process(self.pid).net_connections("tcp")
        return sum(c.status in (psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT) for c in found)

    def _wait(self) -> str:
        end_s = time.monotonic() + READY_S
        while time.monotonic() < end_s and self._process.poll() is None:
            if found := re.search(r"served at (http://[^/\s]+)", self.log()):
                return found[1]
            time.sleep(0.05)
        raise SystemExit(f"the server did not start:\n{self.log()}")


# --- requests -------------------------------------------------------------------------------------


class RefusedError(Exception):
    """An answer that is an error, as a status or as the end of a stream; kind: `503 daemon_error`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class BrokenError(Exception):
    """A stream that ended without an end, or a connection that was lost."""


class LeftError(Exception):
    """The client hung up."""


@dataclass
class Call:
    """A call of a tool; arguments as they were sent."""

    name: str
    arguments: str = ""

    def judged(self, tools: Mapping[str, Any]) -> str:
        """`valid`; `unfit`: what the tool's schema does not allow; `broken`: no JSON object, or no such tool.

        tools: JSON schemas of the arguments by name.
        """
        try:
            arguments = json.loads(self.arguments or "{}")
        except ValueError:
            return "broken"
        if self.name not in tools or not isinstance(arguments, dict):
            return "broken"
        try:
            jsonschema.validate(arguments, tools[self.name] or {})
        except jsonschema.ValidationError:
            return "unfit"
        return "valid"


@dataclass
class Reply:
    """What came of one streamed request.

    Times are seconds since it was sent: first_s to the first token, answer_s to the first one that is not reasoning,
    end_s to the end. reused_tokens: of the prompt. calls: in the order in which they began.
    """

    first_s: float | None = None
    answer_s: float | None = None
    end_s: float = 0.0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    reason: str = ""
    calls: list[Call] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float | None:
        """Rate of the tokens after the first; None for few, and for calls, whose first tokens nobody sees come."""
        if self.first_s is None or self.tokens < FEW_TOKENS or self.calls or self.end_s <= self.first_s:
            return None
        return (self.tokens - 1) / (self.end_s - self.first_s)

    def token(self, since_s: float, *, reasoning: bool = False) -> None:
        """Note that a token came."""
        now_s = time.monotonic() - since_s
        self.first_s = now_s if self.first_s is None else self.first_s
        if not reasoning and self.answer_s is None:
            self.answer_s = now_s


def ask(
    url: str, api: str, body: Json, *, key: str | None = None, patience_s: float = 600.0,
    leave_after: int | None = None, leave_s: float | None = None,
) -> Reply:  # fmt: skip
    """Send a request, which is made a streaming one, and read the reply to its end.

    leave_after: hang up after so many events; leave_s: hang up if nothing came for so long. Then raises LeftError.
    Raises RefusedError, BrokenError, and TimeoutError where nothing comes for patience_s.
    """
    where = urlsplit(url)
    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    connection = kind(where.hostname or "", where.port, timeout=patience_s if leave_s is None else leave_s)
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
    if key is not None:
        headers |= {"authorization": f"Bearer {key}"}
    body = {**body, "stream": True}
    if api in ("chat", "completions"):
        body["stream_options"] = {"include_usage": True}
    reply, ended = Reply(), False
    since_s = time.monotonic()
    try:
        connection.request("POST", where.path.rstrip("/") + PATHS[api], json.dumps(body).encode(), headers)
        response = connection.getresponse()
        if response.status != 200:
            _refused(response.status, response.read())
        for n, event in enumerate(_events(response)):
            if leave_after is not None and n >= leave_after:
                raise LeftError
            if event is None or _READERS[api](reply, event, since_s):
                ended = True
                break
        reply.end_s = time.monotonic() - since_s
        if not ended:
            raise BrokenError(f"a stream of {api} ended without its last event")
        if not reply.reason:
            raise BrokenError(f"a stream of {api} does not say why it ended")
    except TimeoutError:
        if leave_s is not None:
            raise LeftError from None
        raise
    except (http.client.HTTPException, ConnectionError) as error:
        raise BrokenError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
    return reply


def drain(url: str, body: Json) -> int:
    """The tokens of a streamed completion, by a client that costs as little as it can: it reads at the end alone."""
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)) as connection:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        connection.request("POST", PATHS["completions"], json.dumps(body), {"content-type": "application/json"})
        text = connection.getresponse().read()
        found = re.findall(rb'"completion_tokens": ?(\d+)', text)
        if not found or not text.endswith(b"data: [DONE]\n\n"):
            raise BrokenError(text[-300:].decode(errors="replace"))
        return int(found[-1])


def get(url: str, path: str, key: str | None = None, patience_s: float = 30.0) -> str:
    """What a GET answers; raises RefusedError for a status other than 200."""
    where = urlsplit(url)
    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    with contextlib.closing(kind(where.hostname or "", where.port, timeout=patience_s)) as connection:
        connection.request("GET", path, headers={} if key is None else {"authorization": f"Bearer {key}"})
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            _refused(response.status, text)
        return text.decode()


def sample(url: str, patience_s: float = 30.0) -> tuple[Json, Json]:
    """What the server tells its page: the model, and one sample of the counters."""
    where = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(where.netloc, timeout=patience_s)) as connection:
        connection.request("GET", "/events")
        model: Json = {}
        for event in _events(connection.getresponse()):
            assert event is not None
            if "engine" in event:
                return model, event
            if "architecture" in event:
                model = event
    raise BrokenError("/events ended without a sample")


def metric(text: str, name: str) -> float:
    """The value of a metric without labels."""
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    if not found:
        raise SystemExit(f"/metrics has no {name}")
    return float(found[1])


def _refused(status: int, text: bytes) -> None:
    try:
        error = json.loads(text)["error"]
        kind, message = error.get("code") or error["type"], error["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        kind, message = "not JSON", text[:200].decode(errors="replace")
    raise RefusedError(f"{status} {kind}", message)


def _events(response: http.client.HTTPResponse) -> Iterator[Json | None]:
    """The data of server-sent events; None is `[DONE]`."""
    while line := response.readline():
        if line.startswith(b"data: "):
            yield None if line == b"data: [DONE]\n" else json.loads(line[6:])


# Each reads one event into a reply and says whether it is the last.


def _chat(reply: Reply, event: Json, since_s: float) -> bool:
    if "error" in event:
        raise RefusedError(f"stream {event['error'].get('code') or event['error']['type']}", event["error"]["message"])
    for choice in event["choices"]:
        delta = choice.get("delta") or {"content": choice.get("text")}
        if delta.get("reasoning_content"):
            reply.token(since_s, reasoning=True)
        if delta.get("content") or delta.get("tool_calls"):
            reply.token(since_s)
        for part in delta.get("tool_calls") or ():
            function = part["function"]
            if part["index"] == len(reply.calls):
                reply.calls.append(Call(function["name"]))
            reply.calls[part["index"]].arguments += function.get("arguments") or ""
        reply.reason = choice["finish_reason"] or reply.reason
    if used := event.get("usage"):
        reply.prompt_tokens, reply.tokens = used["prompt_tokens"], used["completion_tokens"]
        reply.reused_tokens = (used.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return False  # [DONE] is


def _messages(reply: Reply, event: Json, since_s: float) -> bool:
    kind = event["type"]
    if kind == "error":
        raise RefusedError(f"stream {event['error']['type']}", event["error"]["message"])
    if kind == "content_block_start" and event["content_block"]["type"] == "tool_use":
        reply.token(since_s)
        reply.calls.append(Call(event["content_block"]["name"]))
    elif kind == "content_block_delta":
        delta = event["delta"]
        if delta["type"] == "input_json_delta":
            reply.calls[-1].arguments += delta["partial_json"]
        if delta["type"] in ("text_delta", "thinking_delta"):
            reply.token(since_s, reasoning=delta["type"] == "thinking_delta")
    elif kind == "message_delta":
        used = event["usage"]
        reply.reused_tokens = used.get("cache_read_input_tokens") or 0
        kept = used.get("cache_creation_input_tokens") or 0
        reply.prompt_tokens = used["input_tokens"] + reply.reused_tokens + kept
        reply.tokens, reply.reason = used["output_tokens"], event["delta"]["stop_reason"]
    return bool(kind == "message_stop")


def _responses(reply: Reply, event: Json, since_s: float) -> bool:
    kind = event["type"]
    if kind in ("error", "response.failed"):
        error = event if kind == "error" else event["response"]["error"]
        raise RefusedError(f"stream {error['code']}", error["message"])
    if kind.endswith(".delta"):
        reply.token(since_s, reasoning="reasoning" in kind)
    if kind not in ("response.completed", "response.incomplete"):
        return False
    made = event["response"]
    used, reply.reason = made["usage"], made["status"]
    reply.prompt_tokens, reply.tokens = used["input_tokens"], used["output_tokens"]
    reply.reused_tokens = used["input_tokens_details"]["cached_tokens"]
    reply.calls = [Call(i["name"], i["arguments"]) for i in made["output"] if i["type"] == "function_call"]
    return True


_READERS = {"chat": _chat, "completions": _chat, "responses": _responses, "messages": _messages}


def function_tools(api: str, tools: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Definitions of tools in an API's own shape; tools: as session files have them."""
    made = []
    for tool in tools:
        function = tool["function"]
        known = {"name": function["name"], "description": function.get("description") or ""}
        schema = function.get("parameters") or {"type": "object"}
        if api == "messages":
            made.append({**known, "input_schema": schema})
        elif api == "responses":
            made.append({"type": "function", **known, "parameters": schema})
        else:
            made.append({"type": "function", "function": {**known, "parameters": schema}})
    return made


# --- what is sent ---------------------------------------------------------------------------------


def sample_sessions(share: float = 1.0) -> list[Session]:
    """The sample sessions of this repository; share: of the roots, those that are held out first."""
    samples = ROOT / "data" / "sessions"
    with tempfile.TemporaryDirectory(prefix="spark-samples-") as folder:
        options = ExtractOptions(Path(folder), "both", samples / "claude", samples / "codex", share)
        extract(options, lambda done, total: None)
        return list(read_sessions(Path(folder) / "test.jsonl"))


# --- figures --------------------------------------------------------------------------------------


def quantiles(values: Sequence[float]) -> dict[str, float | int | None]:
    """The median and the 95th of 100, and how many there are."""
    if not values:
        return {"p50": None, "p95": None, "n": 0}
    found = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else [values[0]] * 19
    return {"p50": statistics.median(values), "p95": found[18], "n": len(values)}
