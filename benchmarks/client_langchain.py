"""One thing that LangChain can be asked for, for other_clients.py: URL MODEL API WHAT PICTURE; a line of JSON.

Run by the Python of an environment that has langchain-openai and langchain-anthropic; it needs nothing of Spark's.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

FORM = {
    "title": "answer",
    "description": "An answer.",
    "type": "object",
    "properties": {"answer": {"type": "string", "enum": ["done", "ready"]}},
    "required": ["answer"],
    "additionalProperties": False,
}


@tool
def look(place: str) -> str:
    """Look somewhere."""
    return "nothing of note"


def model(url: str, name: str, api: str, **more: Any) -> Any:
    """The model by one of the APIs."""
    common = {"model": name, "api_key": "none", "max_retries": 0, "max_tokens": 2000, **more}
    if api == "anthropic":
        return ChatAnthropic(base_url=url, **common)
    return ChatOpenAI(base_url=f"{url}/v1", use_responses_api=api == "responses", **common)


def said(message: Any) -> dict[str, Any]:
    """What a message has; raises where it has not been counted."""
    if not message.usage_metadata or not message.usage_metadata["output_tokens"]:
        raise ValueError(f"no usage: {message.usage_metadata}")
    return {"chars": len(str(message.content)), "calls": len(message.tool_calls)}


def main() -> None:
    url, name, api, what, picture = sys.argv[1:]
    asked = [SystemMessage("Be brief."), HumanMessage("Say hello.")]

    def prompt() -> Any:
        return said(model(url, name, api).invoke(asked))

    def stream() -> Any:
        whole: Any = None
        for chunk in model(url, name, api, stream_usage=True).stream(asked):
            whole = chunk if whole is None else whole + chunk
        return said(whole)

    def tools() -> Any:
        bound = model(url, name, api).bind_tools([look])
        called = bound.invoke(asked)
        (call,) = called.tool_calls
        result = ToolMessage(look.invoke(call["args"]), tool_call_id=call["id"])
        return said(bound.invoke([*asked, called, result]))

    def picture_and_after() -> Any:
        data = base64.b64encode(Path(picture).read_bytes()).decode()
        image = {"type": "image", "base64": data, "mime_type": "image/png"}
        shown = [HumanMessage([{"type": "text", "text": "What is this?"}, image])]
        first = model(url, name, api).invoke(shown)
        return said(model(url, name, api).invoke([*shown, first, HumanMessage("Sure?")]))

    def form(method: str) -> Any:
        made = model(url, name, api).with_structured_output(FORM, method=method).invoke("Answer.")
        if made["answer"] not in ("done", "ready"):
            raise ValueError("not the form")
        return {"answer": len(made)}

    def several() -> Any:
        made = model(url, name, api, n=2, temperature=0.7, seed=1, logprobs=True, top_logprobs=2).generate([asked])
        (both,) = made.generations
        scored = [len(one.message.response_metadata["logprobs"]["content"]) for one in both]
        if len(both) != 2 or not all(scored):
            raise ValueError(f"{len(both)} choices, log-probabilities of {scored} tokens")
        return {"choices": 2, "scored": scored}

    def reasoning() -> Any:
        more: dict[str, Any] = {"reasoning_effort": "low"}
        if api == "anthropic":
            more = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
        elif api == "responses":
            more = {"reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "store": False}
        bound = model(url, name, api, **more)
        first = bound.invoke(asked)
        return said(bound.invoke([*asked, first, HumanMessage("Again.")]))

    def embeddings() -> Any:
        made = OpenAIEmbeddings(
            model=name, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False, max_retries=0
        )
        try:
            made.embed_query("hello")
        except openai.NotFoundError as error:
            return {"refused": str(error)}
        raise ValueError("embeddings were made")

    def cancelled() -> Any:
        pieces = model(url, name, api, max_tokens=20_000).stream("Count.")
        next(pieces)
        pieces.close()
        return {"cancelled": True}

    scenarios: dict[str, Callable[[], Any]] = {
        "prompt": prompt,
        "stream": stream,
        "tools": tools,
        "picture and after": picture_and_after,
        "form": lambda: form("json_schema"),
        "form by a call": lambda: form("function_calling"),
        "two choices with log-probabilities": several,
        "reasoning": reasoning,
        "embeddings": embeddings,
        "cancelled": cancelled,
    }
    print(json.dumps(scenarios[what]()))


main()
