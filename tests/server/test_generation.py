"""Prompts, with reasoning on and off, and what is asked of the daemon, for the templates of the model families."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.ground import protocol
from engine.ground.errors import CancelledError, DaemonError, DeadlineError, RequestError, SparkError
from engine.ground.sampling import Sampling
from engine.text import grammar
from engine.text.template import PLAIN, ChatTemplate
from spark.server import generation
from spark.server.generation import Model
from spark.server.metrics import Metrics
from spark.server.prompts import PromptTooLongError
from spark.speech.conversation import Conversation, Finish, Part, Reasoning, Text, WholeCall, whole
from spark.speech.sessions import Message, ToolCall
from tests.fake_tokenizer import FakeTokenizer

TESTS = Path(__file__).parents[1]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS: Any = tuple({"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("read", "look"))
ASKED = (Message("user", "x"),)


class Backend:
    """One whose daemon writes what it is told, a token an event, and remembers what it was asked for."""

    ready = protocol.Ready({"ctx_tokens": 4096})

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)
        self.asked: list[tuple[str, int, str | None]] = []
        self.more: list[dict[str, Any]] = []


class Generation:
    def __init__(
        self, backend: Backend, tokens: list[int], max_tokens: int, sampling: Any, *, grammar: str | None, **more: Any
    ) -> None:
        backend.more.append({"seed": sampling.seed, **more})
        backend.asked.append((bytes(t for t in tokens if t < 256).decode(), max_tokens, grammar))
        reply = backend.replies.pop(0).encode()
        kept = reply[:max_tokens]
        self.events: list[Any] = [protocol.Progress(1, len(tokens), len(tokens), 2)]
        self.events += [protocol.Tokens(1, (token,)) for token in kept]
        usage = protocol.Usage(len(tokens), len(kept), min(len(tokens), 5))
        reason = "length" if len(reply) > max_tokens else "stop"
        self.events.append(protocol.Done(1, usage, protocol.Timing(0.1, 0.1), {}, reason))  # type: ignore[arg-type]
        self.cancelled = False

    async def next(self, patience_s: float) -> Any:
        return self.events.pop(0)

    def cancel(self) -> None:
        self.cancelled = True


def drafted(n: int) -> dict[str, dict[str, int]]:
    """What a generation of so many tokens says that it had of drafts."""
    return {"lookup": {"drafted": 2 * n, "accepted": n}}


def recalled(n: int) -> dict[str, float]:
    return {"tokens": n, "blocks": 3 * n, "read": 2 * n, "left_out_max": 0.5, "left_out_mean": 0.25}


class Counting(Generation):
    """One that says with each token what it took so far."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        n = 0
        for i, event in enumerate(self.events):
            if isinstance(event, protocol.Tokens):
                n += 1
                self.events[i] = replace(event, drafts=drafted(n), recall=recalled(n))
        done = self.events[-1]
        self.events[-1] = replace(done, usage=replace(done.usage, drafts=drafted(n), recall=recalled(n)))


class Clocked(Generation):
    """One whose events come at their times, by a clock of its own."""

    now_s = 0.0
    at_s = (0.5, 9.9, 19.0, 19.1, 45.0)  # progress, four times, and what follows at once

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        Clocked.now_s = 0.0
        self.events = [self.events[0]] * len(self.at_s) + self.events[1:]
        self.times = [*self.at_s, *(self.at_s[-1] for _ in self.events)]

    async def next(self, patience_s: float) -> Any:
        assert patience_s >= 0
        if Clocked.now_s + patience_s < self.times[0]:
            Clocked.now_s += patience_s
            return None
        Clocked.now_s = max(Clocked.now_s, self.times.pop(0))
        return self.events.pop(0)


def test_signs_of_life_come_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the daemon's own signs of life, which no client sees, come between."""
    monkeypatch.setattr(generation, "Generation", Clocked)
    monkeypatch.setattr(generation, "time", SimpleNamespace(monotonic=lambda: Clocked.now_s))

    async def said() -> list[float]:
        model: Any = Model(Backend("so"), FakeTokenizer(), Metrics())  # type: ignore[arg-type]
        prompt = await model.prompt(Conversation(messages=ASKED), "messages")
        return [Clocked.now_s async for _ in model.reply(prompt)]

    times = asyncio.run(said())
    assert times[0] <= 1.0 and times[-1] == 45.0
    assert max(after - before for before, after in pairwise(times)) <= 10.0 and len(times) < 12


def template(name: str) -> ChatTemplate:
    if name == "plain":
        return ChatTemplate(PLAIN, "", "<end>")
    path = TESTS.parent / "data/nano/template.jinja" if name == "nano" else TESTS / "golden" / f"{name}.jinja"
    return ChatTemplate(path.read_text(), "", "<end>")


def run(
    monkeypatch: pytest.MonkeyPatch, name: str, backend: Backend, conversation: Conversation
) -> tuple[list[Part], Finish]:
    monkeypatch.setattr(generation, "Generation", Generation)
    tokenizer = FakeTokenizer()
    tokenizer.template = template(name)

    async def all_of_it() -> tuple[list[Part], Finish]:
        model = Model(backend, tokenizer, Metrics())  # type: ignore[arg-type]
        parts: list[Part] = []
        prompt = await model.prompt(conversation.measured(model.most_chars), "prompt")
        async with contextlib.aclosing(model.reply(prompt)) as reply:
            async for item in reply:
                if isinstance(item, Finish):
                    return parts, item
                parts += item
        raise AssertionError

    return asyncio.run(all_of_it())


OPENED, SHUT = "<think>\n", "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("name", "enabled", "end"),
    [
        ("qwen35", None, OPENED),
        ("qwen35", True, OPENED),
        ("qwen35", False, SHUT),
        ("laguna", None, "<assistant>\n</think>"),
        ("laguna", True, "<assistant>\n<think>"),
        ("laguna", False, "<assistant>\n</think>"),
        ("gemma4", True, "<|turn>model\n"),
        ("gemma4", False, "<|channel>thought\n<channel|>"),
        ("nano", None, "<|im_start|>assistant\n"),
        ("nano", False, f"<|im_start|>assistant\n{SHUT}"),
        ("plain", False, "Assistant:\n"),
    ],
)
def test_how_prompts_end(monkeypatch: pytest.MonkeyPatch, name: str, enabled: bool | None, end: str) -> None:
    backend = Backend("ok")
    _, finish = run(monkeypatch, name, backend, Conversation(ASKED, reasoning=Reasoning(enabled)))
    assert backend.asked[0][0].endswith(end) and backend.asked[0][2] is None
    assert finish.reason == "stop" and finish.usage.completion == 2 and finish.usage.cached == 5


def test_how_replies_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, end in (("qwen35", f"{SHUT}so"), ("nano", f"{SHUT}so"), ("gemma4", "<channel|>so"), ("plain", "so")):
        for written, reply in (("so", " it is"), ("so\n", "it is")):  # whose blanks they are
            backend = Backend(" it is")
            parts, _ = run(monkeypatch, name, backend, Conversation(ASKED, written=written))
            assert backend.asked[0][0].endswith(end)
            assert "".join(p.text for p in parts if isinstance(p, Text)) == reply


@pytest.mark.parametrize(
    ("name", "opens", "shuts"),
    [
        ("qwen35", "", "\n</think>\n\n"),
        ("nano", "<think>\n", "\n</think>\n\n"),
        ("gemma4", "<|channel>thought\n", "\n<channel|>"),
    ],
)
def test_a_budget_shuts_reasoning(monkeypatch: pytest.MonkeyPatch, name: str, opens: str, shuts: str) -> None:
    made = opens + "12345"
    backend = Backend(made + "678", "so")
    budget = len("12345") + (1 if opens else 0) + (len(opens) > 0 and opens.endswith("\n"))
    conversation = Conversation(ASKED, reasoning=Reasoning(True, budget), max_tokens=100)
    parts, finish = run(monkeypatch, name, backend, conversation)
    reasoning, content = whole(parts)
    assert isinstance(reasoning, Text) and isinstance(content, Text)
    assert (reasoning.kind, reasoning.text, content.text) == ("reasoning", "12345", "so")
    (prompt, *_), (again, left, _) = backend.asked
    assert again == prompt + made + shuts and left == 100 - len(made)
    assert finish.usage.completion == len(made) + 2 and finish.usage.reasoning == budget
    assert finish.usage.prompt == len(prompt)


def test_a_budget_that_is_not_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend("hm\n</think>\n\nso it is")
    parts, finish = run(monkeypatch, "qwen35", backend, Conversation(ASKED, reasoning=Reasoning(True, 100)))
    assert [(p.kind, p.text) for p in whole(parts) if isinstance(p, Text)] == [
        ("reasoning", "hm"),
        ("content", "so it is"),
    ]
    assert len(backend.asked) == 1 and finish.usage.reasoning == len("hm\n</think>")


def test_what_later_generations_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the reply began, that penalties go on; they are no news of how much of the prompt was read."""
    backend = Backend("12345678", "so")
    sampling = Sampling(presence_penalty=1.0, seed=3)
    conversation = Conversation(
        ASKED, reasoning=Reasoning(True, 5), sampling=sampling, logprobs=4, draft=True, prediction="so"
    )
    _, finish = run(monkeypatch, "qwen35", backend, conversation)
    prompt = backend.asked[0][0]
    first, second = backend.more
    same = {"seed": 3, "logprobs": 4, "draft": True, "prediction": tuple(b"so"), "kv_recall": None, "shared": None,
            "shared_by": 0, "stop_tokens": None}  # fmt: skip
    assert first == {**same, "reply_from": None} and second == {**same, "reply_from": len(prompt)}
    assert finish.usage.cached == 2 and finish.usage.prompt == len(prompt)  # as the first one said on the way


def test_reasoning_of_earlier_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    render = ChatTemplate.render

    def spy(self: ChatTemplate, messages: Any, tools: Any = (), **variables: Any) -> str:
        given.append(variables)
        return render(self, messages, tools, **variables)

    monkeypatch.setattr(ChatTemplate, "render", spy)
    for wish, expected in ((Reasoning(preserve=True), {"preserve_thinking": True}), (Reasoning(), {})):
        run(monkeypatch, "nano", Backend("x"), Conversation(ASKED, reasoning=wish))
        assert {key: value for key, value in given[-1].items() if key != "now"} == expected


@pytest.mark.parametrize("way", ["left", "died", "deadline", "stopped"])
def test_what_a_reply_took_that_did_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """Of the prompt what was read, and all that was written, also what nobody awaited any more."""
    caplog.set_level(logging.INFO, "spark.server.generation")

    def counted(events: list[Any], error: SparkError | None, taken: int) -> tuple[str, dict[str, float]]:
        monkeypatch.setattr(generation, "Generation", lambda *args, **more: Broken(events, error))
        metrics = Metrics()

        async def leave() -> None:
            model = Model(Backend(), FakeTokenizer(), metrics)  # type: ignore[arg-type]
            prompt = await model.prompt(Conversation((Message("user", "x" * 34),)), "messages")
            assert len(prompt.opening.tokens) == 76
            async with contextlib.aclosing(model.replies([prompt])) as replies:
                with contextlib.suppress(SparkError):
                    for _ in range(taken if error is None else 9):
                        await anext(replies)

        caplog.clear()
        asyncio.run(leave())
        (record,) = caplog.records
        lines = metrics.text({}, True, 0, {}).decode().splitlines()
        found = {line.split('"')[1]: float(line.split()[-1]) for line in lines if "tokens_total{" in line}
        return record.getMessage(), found

    errors = {"died": DaemonError("x"), "deadline": DeadlineError("x"), "stopped": CancelledError("x")}
    error = errors.get(way)
    reading = [protocol.Progress(1, 40, 76, 10)]
    said, found = counted(reading, error, 1)
    assert said.startswith("30 tokens read, 10 reused, 0 written") and found["read"] == 30 and found["reused"] == 10
    writing = [*reading, protocol.Progress(1, 76, 76, 10), protocol.Tokens(1, (97, 98)), protocol.Tokens(1, (99,))]
    said, found = counted(writing, error, 2)  # of which the last was not awaited by who left
    assert said.startswith("66 tokens read, 10 reused, 3 written") and found == {"read": 66, "reused": 10, "written": 3}
    said, found = counted([], error, 1)
    assert said.startswith("0 tokens read, 0 reused, 0 written")


class Broken:
    """A generation that brings some events, and then fails, or nothing more."""

    def __init__(self, events: list[Any], error: SparkError | None) -> None:
        self.events, self.error = list(events), error

    async def next(self, patience_s: float) -> Any:
        await asyncio.sleep(0)
        if self.events:
            return self.events.pop(0)
        if self.error is not None:
            raise self.error
        return None

    def undelivered(self) -> list[Any]:
        return self.events

    def cancel(self) -> None:
        pass


def test_efforts_are_budgets_where_templates_do_not_know_them(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend("x" * 600, "so")
    _, finish = run(monkeypatch, "qwen35", backend, Conversation(ASKED, reasoning=Reasoning(True, None, "minimal")))
    assert finish.usage.reasoning == 512 and len(backend.asked) == 2


FORMATS = {"qwen35": "xml", "laguna": "laguna", "gemma4": "gemma4", "nano": "hermes"}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_the_daemon_is_asked_to_make(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def asked(*replies: str, **more: Any) -> list[Any]:
        backend = Backend(*(replies or ("x",)))
        run(monkeypatch, name, backend, Conversation(ASKED, TOOLS, **more))
        made = [json.loads(text) if text else None for _, _, text in backend.asked]
        for text in backend.asked:
            assert text[2] is None or grammar.check(text[2])
        return made

    assert asked() == asked(tool_choice="none") == [None]
    (made,) = asked(tool_choice="required")
    assert made["kind"] == "tool_call" and made["format"] == FORMATS[name] and made["parallel"]
    assert [tool["name"] for tool in made["tools"]] == ["read", "look"] and made["tools"][0]["parameters"] == SCHEMA
    assert "after" not in made  # reasoning is shut unless it is asked for
    (made,) = asked(tool_choice=("name", "look"))
    assert made["name"] == "look" and not made["parallel"]
    none: Any = {"tool_choice": "none"}
    assert asked(response_schema={}, **none) == [{"kind": "json_object"}]
    assert asked(response_schema=SCHEMA, **none) == [{"kind": "json_schema", "schema": SCHEMA}]
    (made,) = asked(response_schema={}, reasoning=Reasoning(True), **none)
    shuts = "<channel|>" if name == "gemma4" else "</think>"
    opens = {"gemma4": "<|channel>thought", "nano": "<think>"}.get(name)
    assert made == {"kind": "json_object", "after": shuts} | ({"opens": opens} if opens else {})
    if name == "qwen35":  # after the budget there is no more reasoning to let through
        first, second = asked("abcd", "{}", response_schema={}, reasoning=Reasoning(True, 2), **none)
        assert first == {"kind": "json_object", "after": "</think>"} and second == {"kind": "json_object"}


CALL = "<tool_call>\n<function=read>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("thought", ["", "hm\n</think>\n\n"])
def test_a_form_or_a_call(monkeypatch: pytest.MonkeyPatch, thought: str) -> None:
    """Tools that may be called and a form of the answer go together."""
    wish = Reasoning(bool(thought))
    conversation = Conversation(ASKED, TOOLS, response_schema={}, reasoning=wish, max_tokens=200)
    backend = Backend(f"{thought}Sure: x", '{"a": 1}')
    parts, finish = run(monkeypatch, "qwen35", backend, conversation)
    assert [p.text for p in whole(parts) if isinstance(p, Text)] == [*(["hm"] if thought else []), '{"a": 1}']
    (prompt, _, free), (again, left, constrained) = backend.asked
    shut = thought.rstrip()  # what came with the answer is taken back
    assert free is not None and json.loads(free)["binds"] is False  # it is only checked
    assert (again, constrained) == (prompt + shut, '{"kind": "json_object"}')
    assert finish.usage.completion == len(shut) + 8 and left == 200 - len(shut) and finish.reason == "stop"

    backend = Backend(thought + CALL)
    parts, finish = run(monkeypatch, "qwen35", backend, conversation)
    assert len(backend.asked) == 1 and finish.reason == "tool_calls"

    # A stop string in what is taken back ends nothing; in the answer it does.
    for answer, said in (('{"a": 1}', '{"a": 1}'), ('{"a": "S"}', '{"a": "')):
        backend = Backend(f"{thought}S", answer)
        parts, finish = run(monkeypatch, "qwen35", backend, replace(conversation, stops=("S",)))
        assert [p.text for p in whole(parts) if isinstance(p, Text)][-1:] == [said] and len(backend.asked) == 2
        assert finish.stop == ("S" if said != answer else None)


@pytest.mark.parametrize("thought", ["", "hm\n</think>\n\n"])
@pytest.mark.parametrize("free", ["", " \n", "<", "<tool_call", "<tool_call>\n<func", "<tool_call>\nno call"])
def test_what_a_free_beginning_gives_out_at_its_end_has_no_form_either(
    monkeypatch: pytest.MonkeyPatch, thought: str, free: str
) -> None:
    """Text that was held back as it might have begun a call, blanks, and nothing at all."""
    wish = Reasoning(bool(thought))
    conversation = Conversation(ASKED, TOOLS, response_schema={}, reasoning=wish, max_tokens=200, logprobs=0)
    backend = Backend(f"{thought}{free}", '{"a": 1}')
    parts, finish = run(monkeypatch, "qwen35", backend, conversation)
    assert [p.text for p in whole(parts) if isinstance(p, Text)] == [*(["hm"] if thought else []), '{"a": 1}']
    (prompt, _, _), (again, left, constrained) = backend.asked
    shut = thought.rstrip()
    assert (again, left, constrained) == (prompt + shut, 200 - len(shut), '{"kind": "json_object"}')
    assert finish.usage.completion == len(shut) + 8 and finish.usage.reasoning == len(shut)
    assert finish.reason == "stop" and finish.usage.prompt == len(prompt)


OTHERS = {
    "qwen35": CALL.replace("=read>", "=reader>"),
    "nano": '<tool_call>\n{"name": "rea", "arguments": {"path": "a"}}\n</tool_call>',
    "laguna": "<tool_call>reader\n<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
    "gemma4": '<|tool_call>call:other{path:<|"|>a<|"|>}<tool_call|>',
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("cut", [0, 16])
def test_a_call_to_a_tool_that_was_not_offered_has_to_have_the_form(
    monkeypatch: pytest.MonkeyPatch, name: str, cut: int
) -> None:
    """Also one that is cut behind its name."""
    most = len(OTHERS[name]) - cut
    conversation = Conversation(ASKED, TOOLS, response_schema={}, reasoning=Reasoning(False), max_tokens=most)
    for more in ("", OTHERS[name]):
        backend = Backend(OTHERS[name] + more, '{"a": 1}')
        parts, finish = run(monkeypatch, name, backend, conversation)
        assert [p.text for p in whole(parts) if isinstance(p, Text)] == ['{"a": 1}']
        assert all(isinstance(part, Text) for part in parts)
        (prompt, _, _), again = backend.asked
        assert again == (prompt, most, '{"kind": "json_object"}')
        assert (finish.reason, finish.usage.completion) == ("stop", 8)
    # Without a form there is nothing to be written instead.
    _, finish = run(monkeypatch, name, Backend(OTHERS[name]), replace(conversation, response_schema=None))
    assert finish.reason == ("length" if cut else "tool_calls")


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("between", ["\n", "\nso\n"])
def test_a_later_call_to_a_tool_that_was_not_offered_ends_a_reply_with_a_form(
    monkeypatch: pytest.MonkeyPatch, name: str, between: str
) -> None:
    offered = OTHERS[name].replace("reader", "read").replace('"rea"', '"read"').replace("other", "read")
    conversation = Conversation(ASKED, TOOLS, response_schema={}, reasoning=Reasoning(False), max_tokens=900)
    two = offered + between + offered
    for cut in (0, 3):
        backend = Backend(two + between + OTHERS[name][: len(OTHERS[name]) - cut] + ("" if cut else between + offered))
        parts, finish = run(monkeypatch, name, backend, conversation)
        calls = [part for part in whole(parts) if isinstance(part, WholeCall)]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("read", {"path": "a"})] * 2
        assert finish.reason == "tool_calls" and finish.stop is None and len(backend.asked) == 1
        texts = "".join(part.text for part in parts if isinstance(part, Text))
        assert "so" in texts or "so" not in between
    # What is cut behind the name of such a call has been cut before it.
    most = len(two + between + OTHERS[name]) - 8
    _, finish = run(monkeypatch, name, Backend(two + between + OTHERS[name]), replace(conversation, max_tokens=most))
    assert finish.reason == "tool_calls"
    # Without a form the client is told of all.
    parts, _ = run(monkeypatch, name, Backend(two + OTHERS[name]), replace(conversation, response_schema=None))
    assert len([part for part in whole(parts) if isinstance(part, WholeCall)]) == 3


@pytest.mark.parametrize(("free", "reasoned"), [("so it is", 0), ("hm\n</think>\n\nso it is", 11), ("", 0)])
def test_of_drafts_and_recall_what_is_taken_back_counts_for_nothing(
    monkeypatch: pytest.MonkeyPatch, free: str, reasoned: int
) -> None:
    conversation = Conversation(ASKED, TOOLS, response_schema={}, reasoning=Reasoning(reasoned > 0), max_tokens=200)
    backend = Backend(free, '{"a": 1}')
    monkeypatch.setattr("tests.server.test_generation.Generation", Counting)
    _, finish = run(monkeypatch, "qwen35", backend, conversation)
    n = reasoned + 8
    assert len(backend.asked) == 2 and finish.usage.completion == n
    assert finish.usage.drafts == drafted(n) and finish.usage.recall == recalled(n)


def test_a_free_beginning_that_ends_while_it_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reasoning is shut, and the answer has the form."""
    conversation = Conversation(ASKED, TOOLS, response_schema={}, reasoning=Reasoning(True), max_tokens=200)
    backend = Backend("hm", '{"a": "<tool_call>"}')
    parts, finish = run(monkeypatch, "qwen35", backend, conversation)
    assert [p.text for p in whole(parts) if isinstance(p, Text)] == ["hm", '{"a": "<tool_call>"}']
    (prompt, _, _), (again, left, constrained) = backend.asked
    assert (again, left, constrained) == (f"{prompt}hm\n</think>\n\n", 198, '{"kind": "json_object"}')
    assert finish.reason == "stop" and (finish.usage.completion, finish.usage.reasoning) == (22, 2)
    backend = Backend("hmm")
    parts, finish = run(monkeypatch, "qwen35", backend, replace(conversation, max_tokens=2))
    assert finish.reason == "length" and finish.usage.completion == 2


@pytest.mark.parametrize(
    ("free", "most", "said"), [("<tool_call>", 4, '{"a"'), ("\u00e9", 1, "{"), ("<tool_call>\n<function", 15, None)]
)
def test_a_free_beginning_that_is_cut(monkeypatch: pytest.MonkeyPatch, free: str, most: int, said: str | None) -> None:
    """What is taken back counts for nothing; a call that has begun is never text."""
    conversation = Conversation(ASKED, TOOLS, response_schema={}, reasoning=Reasoning(False), max_tokens=most)
    backend = Backend(free, '{"a": 1}')
    parts, finish = run(monkeypatch, "qwen35", backend, conversation)
    assert [p.text for p in whole(parts) if isinstance(p, Text)] == ([] if said is None else [said])
    assert [asked[1] for asked in backend.asked] == [most] * (1 if said is None else 2)
    assert (finish.reason, finish.usage.completion, finish.usage.reasoning) == ("length", most, 0)


def test_prompts_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend("<think>a</think><tool_call>STOP")
    parts, finish = run(monkeypatch, "qwen35", backend, Conversation(raw="once", stops=("STOP",)))
    assert backend.asked[0][0] == "once" and finish.stop == "STOP" and finish.reason == "stop"
    assert "".join(p.text for p in parts if isinstance(p, Text)) == "<think>a</think><tool_call>"
    with pytest.raises(RequestError, match="prompt"):
        run(monkeypatch, "qwen35", Backend("x"), Conversation(raw=(5, 1 << 30)))


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        run(monkeypatch, "nano", Backend(), Conversation((Message("user", "x" * 4200),)))
    assert caught.value.figures.endswith("tokens > 4096 maximum")
    with pytest.raises(PromptTooLongError, match="characters"):  # which nobody made tokens of
        run(monkeypatch, "nano", Backend(), Conversation((Message("user", "x" * 200_000),)))
    long = "x" * 200_000
    tool: Any = {"type": "function", "function": {"name": "read", "description": long}}
    call = Message("assistant", tool_calls=(ToolCall("c", "read", {"path": [long]}),))
    for refused in (
        Conversation(ASKED, (tool,)),
        Conversation((*ASKED, call)),
        Conversation((*ASKED, Message("assistant", tool_calls=(ToolCall(long, "read", {}),)))),
        Conversation((*ASKED, Message("tool", tool_call_id=long))),
        Conversation(ASKED, written=long),
    ):
        with pytest.raises(PromptTooLongError, match="characters"):
            run(monkeypatch, "nano", Backend(), refused)
    run(monkeypatch, "nano", Backend("x"), Conversation(ASKED, (tool,), "none"))  # which is not rendered
    backend = Backend("x" * 9000)
    _, finish = run(monkeypatch, "nano", backend, Conversation(ASKED, max_tokens=1 << 20))
    assert backend.asked[0][1] + finish.usage.prompt == 4096 and finish.reason == "length"


def test_a_reply_that_fills_the_context_is_told_from_one_that_its_limit_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(reply: str, max_tokens: int | None) -> Finish:
        return run(monkeypatch, "nano", Backend(reply), Conversation(ASKED, max_tokens=max_tokens))[1]

    room = finish("x" * 9000, None).usage.completion
    for max_tokens, full in ((None, True), (room + 1, True), (room, False), (5, False)):
        made = finish("x" * 9000, max_tokens)
        assert (made.reason, made.full) == ("length", full)
    assert not finish("x" * (room - 1), None).full


@pytest.mark.parametrize("choice", ["auto", "required", "name"])
@pytest.mark.parametrize("format_of", ["nano", "qwen35", "laguna", "gemma4"])
@pytest.mark.parametrize(
    "name", ["<tool_call>", "</tool_call>", "<|im_end|>", "<function=", "a<|im_start|>b", "</think>"]
)
def test_a_tool_named_like_a_mark_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, choice: str, format_of: str, name: str
) -> None:
    tools = (*TOOLS, {"type": "function", "function": {"name": name}})
    if name == "</think>" and format_of == "gemma4":
        name, tools = "<channel|>", (*TOOLS, {"type": "function", "function": {"name": "<channel|>"}})
    monkeypatch.setattr(
        FakeTokenizer, "special_ids", {**FakeTokenizer.special_ids, "<|im_end|>": 0, "<|im_start|>": 0}
    )
    monkeypatch.setattr(FakeTokenizer, "is_control", lambda self, name: True)
    wanted: Any = ("name", name) if choice == "name" else choice
    backend = Backend()
    with pytest.raises(RequestError) as caught:
        run(monkeypatch, format_of, backend, Conversation(ASKED, tools=tools, tool_choice=wanted))
    assert repr(name) in caught.value.message and caught.value.field == "tools" and not backend.asked


@pytest.mark.parametrize(
    ("name", "key"),
    [("spark_prefix_inexact_tokens_total", "inexact_tokens"), ("spark_prefix_missed_files", "missed_files")],
)
def test_what_becomes_of_prefixes_is_counted(name: str, key: str) -> None:
    metrics = Metrics()
    assert f"{name} 576.0" in metrics.text({"prefixes": {key: 576}}, True, 0, {}).decode().splitlines()
    for stats in ({}, {"prefixes": None}, {"prefixes": {}}):  # of a daemon that is silent, or another
        assert f"{name} " not in metrics.text(stats, True, 0, {}).decode()


def test_experts_of_the_cpu_are_counted_where_there_are_any() -> None:
    cpu = {"state": "off", "computed": 120, "divided": 31, "taken_back": 7, "waited_s": 0.25}
    text = Metrics().text({"cpu_experts": cpu}, True, 0, {}).decode()
    for line in (
        'spark_expert_jobs_total{outcome="computed"} 120.0', 'spark_expert_jobs_total{outcome="divided"} 31.0',
        'spark_expert_jobs_total{outcome="taken_back"} 7.0',
        "spark_expert_wait_seconds_total 0.25", "spark_expert_jobs_on 0.0",
    ):  # fmt: skip
        assert f"\n{line}\n" in text
    for several, is_on in (("on", 1.0), ("idle", 0.0)):  # where one token's steps hand nothing over
        text = Metrics().text({"cpu_experts": cpu | {"several": {"state": several}}}, True, 0, {}).decode()
        assert f"\nspark_expert_jobs_on {is_on}\n" in text
    assert "spark_expert_jobs" not in Metrics().text({"cpu_experts": {}}, True, 0, {}).decode()


def test_guesses_of_experts_are_counted_where_there_are_any() -> None:
    counts = {"useful": 12, "wasted": 7, "useful_bytes": 4096, "wasted_bytes": 512}
    text = Metrics().text({"guesses": counts | {"on": True}}, True, 0, {}).decode()
    for line in (
        'spark_expert_guesses_total{outcome="useful"} 12.0', 'spark_expert_guesses_total{outcome="wasted"} 7.0',
        'spark_expert_guess_bytes_total{outcome="useful"} 4096.0', "spark_expert_guesses_on 1.0",
    ):  # fmt: skip
        assert f"\n{line}\n" in text
    counted = Metrics().text({"guesses": counts}, True, 0, {}).decode()  # on a host
    assert "spark_expert_guesses_total" in counted and "spark_expert_guesses_on" not in counted
    assert "spark_expert_guesses" not in Metrics().text({"guesses": {}}, True, 0, {}).decode()
