"""Recorded sessions, turn by turn, against a server: what an agent would have waited for.

    python benchmarks/agent_replay.py data/nano/nano.gguf --device cpu --json data/results/agent_replay.json
    python benchmarks/agent_replay.py --url http://127.0.0.1:8080 --sessions test.jsonl --api chat

Each turn of the model is asked for with everything before it as it was recorded; what the server says is timed and
thrown away, and the recorded turn goes into the history. So every turn reads the same prompt whatever the server, and
what it computes beyond the new messages is the server's doing. Without --sessions the sample sessions are replayed. Any
server with one of the two APIs will do; a session ends where it no longer fits in the context.

At full shape, on a GPU, with a synthetic model (its calls say nothing, its times do) and sessions grown for it from
the samples, whose tools return 30 to 4,000 tokens; --last replays only the end, whose first turn then finds nothing to
reuse:

    python benchmarks/full_shape.py qwen3-30b-a3b q3.gguf
    python benchmarks/agent_replay.py q3.gguf --device cuda --ctx 131072 --synthetic 35000 --json FILE
    python benchmarks/agent_replay.py q3.gguf --device cuda --ctx 131072 --synthetic 94000 --last 40 --json FILE
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.driving import note  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from benchmarks.serving import Json, RefusedError, Reply, Server, ask, function_tools, quantiles, sample_sessions  # noqa: E402
from spark.results import write_json  # noqa: E402
from spark.speech.sessions import Message, Session, ToolCall, read_sessions  # noqa: E402

HELD_OUT = 0.2  # share of the sample sessions
RESULT_TOKENS = (30, 4000)  # of a tool, in synthetic sessions
TURNS_A_TASK = 8  # of the model, for each message of the user
FIRST_BAND = 1024  # tokens; the next bands each begin at twice the one before


# --- requests -------------------------------------------------------------------------------------


def chat_body(messages: Sequence[Message]) -> Json:
    """A history as OpenAI's chat completions have it."""
    made: list[Json] = []
    for m in messages:
        one: Json = {"role": m.role, "content": m.content}
        if m.reasoning:
            one["reasoning_content"] = m.reasoning
        if m.tool_calls:
            one["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
                for c in m.tool_calls
            ]
        if m.role == "tool":
            one["tool_call_id"] = m.tool_call_id
        made.append(one)
    return {"messages": made}


def messages_body(messages: Sequence[Message]) -> Json:
    """A history as Anthropic's messages have it: system text apart, results of tools in the user's turns."""
    system = [m.content for m in messages if m.role == "system"]
    made: list[Json] = []
    for m in messages:
        if m.role == "system":
            continue
        if m.role == "assistant":
            blocks: list[Json] = [{"type": "thinking", "thinking": m.reasoning, "signature": ""}] if m.reasoning else []
            blocks += [{"type": "text", "text": m.content}] if m.content else []
            blocks += [{"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in m.tool_calls]
        elif m.role == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": m.tool_call_id, "content": m.content}]
        else:
            blocks = [{"type": "text", "text": m.content}]
        role = "assistant" if m.role == "assistant" else "user"
        if made and made[-1]["role"] == role:
            made[-1]["content"] += blocks
        else:
            made.append({"role": role, "content": blocks})
    return {"messages": made} | ({"system": "\n\n".join(system)} if system else {})


BODIES = {"chat": chat_body, "messages": messages_body}


def turns(session: Session) -> Iterator[tuple[int, tuple[Message, ...], Message]]:
    """Each turn of the model that answers something: its number among them, what it read, what was recorded."""
    number = 0
    for i, message in enumerate(session.messages):
        before = session.messages[:i]
        if message.role == "assistant" and any(m.role in ("user", "tool") for m in before):
            yield number, before, message
            number += 1


def replay(
    url: str, api: str, session: Session, *, key: str | None = None, max_tokens: int = 64, last: int | None = None,
    required: bool = False,
) -> tuple[list[Json], dict[str, int]]:  # fmt: skip
    """Replay a session; a row for each turn, and how many turns were refused, by kind.

    last: only so many turns, the last ones. required: where the recorded turn calls a tool, a call is required.
    """
    rows: list[Json] = []
    refused: collections.Counter[str] = collections.Counter()
    all_turns = list(turns(session))
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in session.tools}
    for number, before, recorded in all_turns[-last:] if last else all_turns:
        body = {"model": "any", **BODIES[api](before), "max_tokens": max_tokens, "temperature": 0}
        if session.tools:
            body["tools"] = function_tools(api, session.tools)
            if required and recorded.tool_calls:
                body["tool_choice"] = {"type": "any"} if api == "messages" else "required"
        try:
            reply = ask(url, api, body, key=key)
        except RefusedError as error:
            if "context" in str(error) or "too long" in str(error):
                refused["beyond the context"] += len(all_turns) - number
                break
            refused[error.kind] += 1
            continue
        rows.append(row_of(reply, session, number, schemas, bool(recorded.tool_calls)))
    return rows, dict(refused)


def row_of(reply: Reply, session: Session, turn: int, schemas: Json, recorded_calls: bool) -> Json:
    """The figures of one turn."""
    calls = list(reply.calls)
    if reply.reason in ("length", "max_tokens") and calls:
        calls.pop()  # max_tokens is to blame for whatever is wrong with it
    found = {call.judged(schemas) for call in calls} | ({"cut"} if reply.calls else {"none"})
    judged = next(word for word in ("broken", "unfit", "valid", "cut", "none") if word in found)
    return {
        "session": session.session_id, "turn": turn, "prompt_tokens": reply.prompt_tokens,
        "reused_tokens": reply.reused_tokens, "computed_tokens": reply.prompt_tokens - reply.reused_tokens,
        "tokens": reply.tokens, "first_s": reply.first_s, "answer_s": reply.answer_s, "end_s": reply.end_s,
        "tokens_per_s": reply.tokens_per_s, "reason": reply.reason, "calls": judged, "recorded_calls": recorded_calls,
    }  # fmt: skip


# --- sessions that are grown ----------------------------------------------------------------------


def tokens_per_char(url: str, api: str, text: str, key: str | None = None) -> float:
    """How the server's model cuts a text: from two prompts of different lengths."""
    lengths = [
        ask(url, api, {"model": "any", **BODIES[api]([Message("user", text[:n])]), "max_tokens": 1}, key=key)
        for n in (1000, 4000)
    ]
    return (lengths[1].prompt_tokens - lengths[0].prompt_tokens) / 3000


def synthetic(n_tokens: int, rate: float, samples: Sequence[Session], seed: int = 0) -> Session:
    """A session of about so many tokens, made of what users, models and tools said in others; rate: tokens a char."""
    rng = np.random.default_rng((31, seed))
    said = {role: [m for s in samples for m in s.messages if m.role == role] for role in ("user", "assistant")}
    callers = [m for m in said["assistant"] if m.tool_calls]
    results = "".join(m.content for s in samples for m in s.messages if m.role == "tool")
    tools = {tool["function"]["name"]: tool for s in samples for tool in s.tools}
    system = next(m for s in samples for m in s.messages if m.role == "system")
    made, n_chars, turn = [system], len(system.content) + len(json.dumps(list(tools.values()))), 0
    while n_chars * rate < n_tokens:
        if turn % TURNS_A_TASK == 0:
            made.append(said["user"][int(rng.integers(len(said["user"])))])
        model = callers[int(rng.integers(len(callers)))]
        calls = tuple(ToolCall(f"call_{turn}_{i}", c.name, c.arguments) for i, c in enumerate(model.tool_calls))
        new = [Message("assistant", model.content, "", calls)]
        for call in calls:
            n = int(np.exp(rng.uniform(*np.log(RESULT_TOKENS))) / rate)
            at = int(rng.integers(0, max(1, len(results) - n)))
            new.append(Message("tool", results[at : at + n], tool_call_id=call.id))
        n_chars += sum(len(m.content) + len(json.dumps([c.arguments for c in m.tool_calls])) for m in new)
        made += new
        turn += 1
    made.append(Message("assistant", "Done."))
    return Session(f"synthetic-{n_tokens}-{seed}", "claude", "", tuple(tools.values()), tuple(made))


# --- figures --------------------------------------------------------------------------------------


def totals(rows: Sequence[Json]) -> Json:
    """What the turns come to together."""
    prompt, reused = sum(r["prompt_tokens"] for r in rows), sum(r["reused_tokens"] for r in rows)
    judged = collections.Counter(r["calls"] for r in rows)
    calling = judged["valid"] + judged["unfit"] + judged["broken"]
    return {
        "turns": len(rows), "prompt_tokens": prompt, "reused_tokens": reused, "computed_tokens": prompt - reused,
        "tokens": sum(r["tokens"] for r in rows),
        "whole_tokens_per_s": sum(r["tokens"] for r in rows) / sum(r["end_s"] for r in rows),
        **{name: quantiles([r[name] for r in rows if r[name] is not None])
           for name in ("first_s", "answer_s", "end_s", "tokens_per_s")},
        "computed_a_turn": quantiles([r["computed_tokens"] for r in rows]),
        "calls": dict(judged), "well_formed_share": 1 - judged["broken"] / calling if calling else None,
        "valid_share": judged["valid"] / calling if calling else None,
        "recorded_calls": sum(r["recorded_calls"] for r in rows),
    }  # fmt: skip


def bands(rows: Sequence[Json]) -> list[Json]:
    """Totals by the length of the prompt."""
    made: dict[int, list[Json]] = {}
    for row in rows:
        low = 0
        while row["prompt_tokens"] >= (low * 2 or FIRST_BAND):
            low = low * 2 or FIRST_BAND
        made.setdefault(low, []).append(row)
    return [{"from_tokens": low, "to_tokens": low * 2 or FIRST_BAND, **totals(made[low])} for low in sorted(made)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL.gguf", help="served for the time of the replay")
    parser.add_argument("--url", help="of a server that runs, instead of a model")
    parser.add_argument("--key", help="its API key")
    json_option(parser)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ctx", type=int, help="context of the served model")
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="more options of `spark serve`")
    parser.add_argument("--api", default="messages", choices=tuple(BODIES))
    parser.add_argument("--sessions", type=Path, metavar="FILE.jsonl", help="default: the held-out samples")
    parser.add_argument("--synthetic", type=int, metavar="N", help="a session of about N tokens grown from the samples")
    parser.add_argument("--limit", type=int, help="sessions at most")
    parser.add_argument("--last", type=int, help="turns of each session, the last ones; default: all")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each reply")
    parser.add_argument("--require-calls", action="store_true", help="of the turns that called a tool when recorded")
    o = parser.parse_args()
    if (o.model is None) == (o.url is None):
        parser.error("give a model or --url")
    options = ["--device", o.device, *([] if o.ctx is None else ["--ctx", str(o.ctx)]), *shlex.split(o.serve)]
    rows: list[Json] = []
    refused: collections.Counter[str] = collections.Counter()
    with contextlib.ExitStack() as stack:
        url: str = o.url or stack.enter_context(Server(o.model, *options)).url
        for session in sessions_of(o, url)[: o.limit]:
            found, left_out = replay(
                url, o.api, session, key=o.key, max_tokens=o.max_tokens, last=o.last, required=o.require_calls
            )
            rows += found
            refused.update(left_out)
            first = quantiles([r["first_s"] for r in found if r["first_s"] is not None])["p50"]
            note(f"{session.session_id[:40]}: {len(found)} turns, first token after {first or 0:.3f} s, {left_out}")
    if not rows:
        raise SystemExit(f"no turn was answered: {dict(refused)}")
    report: Json = {
        "model": o.url or o.model.name, "device": None if o.url else o.device, "api": o.api,
        "sessions": len({r["session"] for r in rows}), "max_tokens": o.max_tokens, "synthetic_tokens": o.synthetic,
        "total": totals(rows), "refused": dict(refused), "bands": bands(rows), "turns": rows,
    }  # fmt: skip
    if o.json:
        write_json(o.json, report)
    made: dict[str, Any] = report["total"]
    note(f"{made['turns']} turns, {made['reused_tokens'] / made['prompt_tokens']:.1%} of the prompts reused, "
         f"first token after {made['first_s']['p50']:.3f} s, calls {made['calls']}")  # fmt: skip
    if set(refused) - {"beyond the context"}:
        sys.exit(f"refused: {dict(refused)}")


def sessions_of(o: argparse.Namespace, url: str) -> list[Session]:
    """The sessions to replay."""
    if o.synthetic is None:
        return list(read_sessions(o.sessions)) if o.sessions else sample_sessions(HELD_OUT)
    samples = sample_sessions()
    text = "".join(m.content for s in samples for m in s.messages if m.role == "tool")
    return [synthetic(o.synthetic, tokens_per_char(url, o.api, text, o.key), samples)]


if __name__ == "__main__":
    main()
