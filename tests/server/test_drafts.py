"""What requests say of drafts, and what is said of them: with the fake daemon, and once with the bundled model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from engine.ground import protocol
from engine.ground.errors import RequestError
from spark.server import generation
from spark.server.metrics import Metrics
from spark.speech.conversation import Conversation, Reasoning, Usage, accepted_among
from tests.command_line import NANO, started
from tests.server.test_generation import ASKED, TOOLS, Backend, Generation, run
from tests.server.test_server import PATIENCE_S, Running, events, running

LOOKUP = {"lookup": {"drafted": 6, "accepted": 4}}  # of the prediction below, by the fake engine
PREDICTION = {"type": "content", "content": "helix!"}


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running() as made:
        yield made


def details(usage: dict[str, Any]) -> tuple[int, int]:
    found = usage["completion_tokens_details"]
    return found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]


def drafted(made: Running) -> dict[str, float]:
    found = re.findall(r'spark_draft_tokens_total\{outcome="(\w+)",.*\} (\S+)', made.http.get("/metrics").text)
    return {outcome: float(n) for outcome, n in found}


def test_a_prediction_is_proposed_and_counted(served: Running) -> None:
    before = drafted(served)
    plain = served.ask("helicopter").json()
    assert details(plain["usage"]) == (0, 0) and "drafts" not in plain["usage"]
    made = served.ask("helicopter", prediction=PREDICTION).json()
    assert made["choices"][0]["message"] == plain["choices"][0]["message"]
    assert details(made["usage"]) == (4, 2) and made["usage"]["drafts"] == LOOKUP
    assert made["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    parts = {"type": "content", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "ix!"}]}
    assert served.ask("helicopter", prediction=parts).json()["usage"] == made["usage"]
    for off in ({"draft": "off"}, {"draft": "off", "stream": True, "stream_options": {"include_usage": True}}):
        answer = served.ask("helicopter", prediction=PREDICTION, **off)
        assert details((events(answer)[-1] if "stream" in off else answer.json())["usage"]) == (0, 0)
    assert served.ask("helicopter", prediction=None, draft=None).json()["usage"] == plain["usage"]
    assert details(served.ask("a", prediction={"type": "content", "content": ""}).json()["usage"]) == (0, 0)
    after = drafted(served)
    assert after["accepted"] - before.get("accepted", 0) == 8 and after["rejected"] - before.get("rejected", 0) == 4


def test_each_choice_gets_the_prediction(served: Running) -> None:
    one = served.ask("helicopter", prediction=PREDICTION, n=3).json()
    *_, last = events(
        served.ask("helicopter", prediction=PREDICTION, n=3, stream=True, stream_options={"include_usage": True})
    )
    assert one["usage"] == last["usage"] | {"prompt_tokens_details": one["usage"]["prompt_tokens_details"]}
    assert details(one["usage"]) == (12, 6) and one["usage"]["drafts"] == {"lookup": {"drafted": 18, "accepted": 12}}


def test_a_prediction_names_no_control_tokens(served: Running) -> None:
    content = "<|said|><|end|>"
    made = served.ask(content, prediction={"type": "content", "content": content}).json()
    assert details(made["usage"]) == (len(content), 0)  # byte by byte, as any text


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("text", "prediction"),
        ([], "prediction"),
        ({}, "prediction.type"),
        ({"content": "a"}, "prediction.type"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": {"text": "a"}}, "prediction.content"),
        ({"type": "content", "content": ["a"]}, "prediction.content[0]"),
        ({"type": "content", "content": [{"type": "text", "text": "a"}, {}]}, "prediction.content[1].type"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text"),
        ({"type": "content", "content": [{"type": "image_url", "text": "a"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": [{"type": "text", "text": 5}]}, "prediction.content[0].text"),
        ({"type": "content", "content": "x" * (32 * 4096 + 1)}, "prediction"),
    ],
)
def test_malformed_predictions_are_refused_by_name(served: Running, given: Any, field: str) -> None:
    answer = served.ask("a", prediction=given)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    assert answer.json()["error"]["message"].startswith(f"{field}: ")


def test_a_long_prediction_is_cut_to_the_context(served: Running) -> None:
    made = served.ask("a" * 20, prediction={"type": "content", "content": "a" * 32 * 4096}).json()
    assert made["usage"]["drafts"] == {"lookup": {"drafted": 4096, "accepted": 20}}


BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9},
    "/v1/responses": {"input": "a"},
}


@pytest.mark.parametrize("path", BODIES)
def test_every_api_takes_draft(served: Running, path: str) -> None:
    for value in ("auto", "off", None):
        assert served.http.post(path, json=BODIES[path] | {"model": "x", "draft": value}).status_code == 200
    for value in ("on", "lookup", "", True, False, 0, ["off"], {}):
        answer = served.http.post(path, json=BODIES[path] | {"model": "x", "draft": value})
        assert answer.status_code == 400 and "draft: expected" in answer.json()["error"]["message"]


class Drafting(Generation):
    """One that says at its end what was drafted; telling: and on the way, so far, four a token of which one stays."""

    telling = False

    def __init__(self, backend: Backend, *args: Any, **more: Any) -> None:
        super().__init__(backend, *args, **more)
        done = self.events[-1]
        for i, event in enumerate(self.events[1:-1] if self.telling else []):
            drafts = {"lookup": {"drafted": 4 * (i + 1), "accepted": i + 1}}
            self.events[1 + i] = protocol.Tokens(1, event.tokens, drafts=drafts)
        usage = protocol.Usage(done.usage.prompt_tokens, done.usage.completion_tokens, drafts=LOOKUP)
        self.events[-1] = protocol.Done(1, usage, done.timing, {}, done.finish_reason)


def test_drafts_of_the_generations_of_a_reply_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is broken off no more is known than its tokens said; the prediction goes with each."""

    def after(backend: Backend, **wanted: Any) -> Usage:
        with monkeypatch.context() as patch:
            patch.setattr("tests.server.test_generation.Generation", Drafting)
            _, finish = run(patch, "qwen35", backend, Conversation(ASKED, prediction="so", **wanted))
        assert [more["prediction"] for more in backend.more] == [tuple(b"so")] * len(backend.asked)
        return finish.usage

    assert after(Backend("hm\n</think>\n\nso")).drafts == LOOKUP
    budget = Backend("123456", "so")
    assert after(budget, reasoning=Reasoning(True, 3)).drafts == LOOKUP and len(budget.asked) == 2
    again = Backend("hm\n</think>\n\nso", '{"a": 1}')
    form = {"type": "object", "properties": {"a": {}}}
    assert after(again, response_schema=form, tools=TOOLS).drafts == LOOKUP and len(again.asked) == 2
    monkeypatch.setattr(Drafting, "telling", True)
    assert after(Backend("hm\n</think>\n\nso")).drafts == LOOKUP  # what the end says counts
    # Of the one with the reasoning three tokens were taken, of which each brought a draft.
    usage = after(Backend("123456", "so"), reasoning=Reasoning(True, 3))
    assert usage.completion == 5 and usage.drafts == {"lookup": {"drafted": 12 + 6, "accepted": 5}}
    usage = after(Backend("hm\n</think>\n\nso it is", '{"a": 1}'), response_schema=form, tools=TOOLS)
    assert usage.drafts["lookup"]["drafted"] > 6 and 4 < usage.drafts["lookup"]["accepted"] <= usage.completion
    usage = after(Backend("hm\n</think>\n\nso it is, or is it"), stops=(" is",))
    n = len("hm\n</think>\n\nso it is")
    assert usage.completion == n and usage.drafts == {"lookup": {"drafted": 4 * n, "accepted": n}}
    off = Backend("so")
    with monkeypatch.context() as patch:
        run(patch, "nano", off, Conversation(ASKED, draft=False, prediction="so"))
    assert off.more[0]["draft"] is False and off.more[0]["prediction"] is None


def test_no_more_is_accepted_than_was_said() -> None:
    """A reply that is broken off among the tokens of an event, all of which were drafts."""
    counts = {"lookup": {"drafted": 9, "accepted": 5}, "mtp": {"drafted": 4, "accepted": 3}}
    assert accepted_among(8, counts) == counts and accepted_among(0, {}) == {}
    assert accepted_among(5, counts) == counts | {"lookup": {"drafted": 9, "accepted": 2}}
    assert [n["accepted"] for n in accepted_among(1, counts).values()] == [0, 1]


def test_usages_are_added_by_source() -> None:
    one = Usage(3, 5, drafts={"lookup": {"drafted": 6, "accepted": 4}, "dflash": {"drafted": 1, "accepted": 1}})
    made = one + Usage(0, 7, drafts={"lookup": {"drafted": 2, "accepted": 1}, "other": {"drafted": 5, "accepted": 0}})
    assert made.drafts == {
        "lookup": {"drafted": 8, "accepted": 5},
        "dflash": {"drafted": 1, "accepted": 1},
        "other": {"drafted": 5, "accepted": 0},
    }
    assert (made.drafted, made.accepted) == (14, 6) and made.shown_more() == {"drafts": made.drafts}
    assert (Usage(1, 1) + Usage(1, 1)).shown_more() == {}


def test_a_prediction_that_is_too_long_is_refused_where_it_was_read() -> None:
    conversation = Conversation(ASKED, prediction="x" * 101)
    with pytest.raises(RequestError) as caught:
        conversation.measured(100)
    assert caught.value.field == "prediction"
    assert conversation.measured(101).prediction == "x" * 101
    assert Conversation(ASKED * 200, prediction="x").measured(100).prediction == ""  # the prompt will be refused


def test_metrics_without_drafts() -> None:
    for stats in ({}, {"drafts": {}}, {"drafts": {"tokens": {}}}):
        assert "spark_draft_tokens_total{" not in Metrics().text(stats, True, 0, {}).decode()


# --- the clients' own libraries, and a real model -------------------------------------------------


def test_sdks_take_the_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has a field that theirs does not have."""
    said: Any = [{"role": "user", "content": "helicopter"}]
    expected: Any = PREDICTION
    real = generation.Generation

    def predicted(*args: Any, **more: Any) -> generation.Generation:
        return real(*args, **more | {"prediction": tuple(b"helix!")})

    with running() as made:
        url = f"http://127.0.0.1:{made.port}"
        with openai.OpenAI(api_key="none", base_url=f"{url}/v1", timeout=PATIENCE_S, max_retries=0) as client:
            chat = client.chat.completions.create(model="any", messages=said, prediction=expected)
            found = chat.usage and chat.usage.completion_tokens_details
            assert found and (found.accepted_prediction_tokens, found.rejected_prediction_tokens) == (4, 2)
            off = client.chat.completions.create(
                model="any", messages=said, prediction=expected, extra_body={"draft": "off"}
            )
            found = off.usage and off.usage.completion_tokens_details
            assert found and found.accepted_prediction_tokens == 0 and off.choices[0].message == chat.choices[0].message
            monkeypatch.setattr(generation, "Generation", predicted)  # the other APIs have no field for it
            response = client.responses.create(model="any", input=said)
            assert response.usage and response.usage.model_dump()["drafts"] == LOOKUP
            with client.responses.stream(model="any", input=said) as stream:
                assert stream.get_final_response().usage == response.usage
            text = client.completions.create(model="any", prompt="!xileh")
            assert text.usage and text.usage.model_dump()["drafts"]["lookup"] == {"drafted": 6, "accepted": 6}
        with anthropic.Anthropic(api_key="none", base_url=url, timeout=PATIENCE_S, max_retries=0) as claude:
            message = claude.messages.create(model="any", messages=said, max_tokens=100)
            assert message.usage.model_dump()["drafts"] == LOOKUP
            with claude.messages.stream(model="any", messages=said, max_tokens=100) as events_of:
                assert events_of.get_final_text() == "helicopter"
                assert events_of.get_final_message().usage.output_tokens == message.usage.output_tokens


@pytest.mark.slow
def test_a_known_reply_of_a_real_model_is_accepted(tmp_path: Path) -> None:
    command = ("serve", NANO, "--device", "cpu", "--port", "0", "--ctx", "512", "--draft-memory", "0")
    with started(*command, cwd=tmp_path, tmp=tmp_path) as process:
        assert process.stderr is not None
        url = next(line for line in process.stderr if " is served at" in line).split()[-1]
        asked = {"messages": [{"role": "user", "content": "Write a function."}], "max_tokens": 120, "temperature": 0}

        def ask(**more: Any) -> tuple[Any, dict[str, Any]]:
            answer = httpx.post(f"{url}/chat/completions", json=asked | more, timeout=PATIENCE_S)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0], answer.json()["usage"]

        first, usage = ask(draft="off")
        assert details(usage) == (0, 0) and "drafts" not in usage
        prediction = {"type": "content", "content": first["message"]["content"]}
        for _ in range(100):  # a machine that is busy with other things may take drafts for slow, for a while
            known, usage = ask(prediction=prediction)
            accepted, _ = details(usage)
            assert known == first
            if accepted:
                break
        assert accepted > 0 and usage["drafts"]["lookup"]["accepted"] == accepted
        off, usage = ask(prediction=prediction, draft="off")
        assert off == first and details(usage) == (0, 0)
        text = httpx.get(f"{url.removesuffix('/v1')}/metrics", timeout=PATIENCE_S).text
        counted = re.search(r'spark_draft_tokens_total\{outcome="accepted",source="lookup"\} (\S+)', text)
        assert counted and float(counted[1]) >= accepted
