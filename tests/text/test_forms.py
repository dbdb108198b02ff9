"""Forms in processes of their own: the same masks, whatever is killed; nobody waits for what takes too long."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats.gguf import open_model
from engine.ground import protocol
from engine.ground.config import EngineConfig
from engine.ground.errors import RequestError, SparkError
from engine.ground.protocol import Done, Error, Event, Generate, Tokens
from engine.ground.sampling import Sampling
from engine.serving.scheduler import Engine
from engine.text import forms as forms_module
from engine.text.forms import COMPILING, KEPT_FORMS, Form, Forms
from engine.text.forms_host import COMPILE_S
from engine.text.grammar import Compiled, Vocabulary, check
from engine.text.tokenizer import Tokenizer, load
from spark.daemon import client
from tests.forms_here import FormHere
from tests.text.test_grammar import LEAVES, NODE, TOOLS, nested, schema

NANO = Path(__file__).parents[2] / "data" / "nano" / "nano.gguf"
# Small, and more than any machine has time or memory for.
HOPELESS = {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}
BOUND_S = 4 * COMPILE_S + 20  # that anything takes, on a machine that does other work


def many_patterns(n: int) -> dict[str, Any]:
    return {"type": "string", "allOf": [{"pattern": f"a{{{i},}}b.*c{{{i}}}"} for i in range(1, n + 1)]}


def hopeless(n: int) -> str:
    return json.dumps(schema({**HOPELESS, "title": str(n)}))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load(NANO)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer, tokenizer.vocab_size)


@pytest.fixture(scope="module")
def forms(tokenizer: Tokenizer) -> Iterator[Forms]:
    with open_model(NANO) as file:
        file_id = file.file_id
    made = Forms(NANO, lambda: file_id, tokenizer.vocab_size)
    yield made
    host = made._host
    made.close()
    assert host is None or host.poll() is not None


def ready(forms: Forms, *wanted: Form) -> None:
    end_s = time.monotonic() + 2 * BOUND_S
    forms.wait(lambda: all(form.is_ready for form in wanted), end_s)
    assert time.monotonic() < end_s, "it takes too long"


def children(forms: Forms) -> list[psutil.Process]:
    return [] if forms._host is None else psutil.Process(forms._host.pid).children()


def compare(forms: Forms, vocabulary: Vocabulary, wanted: Any, seed: int, kills: dict[int, str] | None = None) -> int:
    """Walk a form with random tokens, here and in its process: every mask, and every end, is the same."""
    text, stop, rng = json.dumps(wanted), vocabulary.tokenizer.stop_ids, np.random.default_rng(seed)
    form = forms.open(text, stop)
    ready(forms, form)
    try:
        here = Compiled.from_text(check(text)[0], vocabulary).begin(stop)
    except RequestError as error:
        with pytest.raises(RequestError) as caught:
            form.begin()
        assert caught.value.message == error.message
        form.close()
        return 0
    form.begin()
    n = 0
    while n < 40:
        for who in {(kills or {}).get(n)} - {None}:
            victims = children(forms) if who == "form" else [forms._host]
            for victim in victims:
                os.kill(victim.pid, signal.SIGKILL)
        expected = here.mask()
        mask = form.mask(time.monotonic() + BOUND_S)
        assert mask is not None and form.is_done == here.is_done
        if here.is_done:
            break
        assert (mask == expected).all()
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed))
        if token in stop:
            break
        here.accept(token)
        form.accept(token)
        n += 1
        assert form.settle(time.monotonic() + BOUND_S) and form.is_done == here.is_done
        if here.is_done:
            break
    form.close()
    return n


@settings(max_examples=25)
@given(wanted=st.recursive(LEAVES, nested, max_leaves=5), seed=st.integers(0, 2**32))
def test_masks_are_those_of_the_library(wanted: Any, seed: int, forms: Forms, vocabulary: Vocabulary) -> None:
    compare(forms, vocabulary, schema(wanted), seed)


@pytest.mark.parametrize("form", ["hermes", "xml", "laguna", "gemma4"])
def test_masks_of_calls(form: str, forms: Forms, vocabulary: Vocabulary) -> None:
    wanted = {"kind": "tool_call", "format": form, "tools": TOOLS, "after": "</think>", "opens": "<think>"}
    assert compare(forms, vocabulary, wanted, 3) == 40


@pytest.mark.slow
@settings(max_examples=8)
@given(
    wanted=st.recursive(LEAVES, nested, max_leaves=3),
    seed=st.integers(0, 99),
    kills=st.dictionaries(st.integers(0, 8), st.sampled_from(["form", "form", "host"]), min_size=1, max_size=3),
)
def test_whoever_is_killed_the_masks_are_the_same(
    wanted: Any, seed: int, kills: dict[int, str], forms: Forms, vocabulary: Vocabulary
) -> None:
    compare(forms, vocabulary, schema(wanted), seed, kills)


def test_a_form_is_compiled_once(forms: Forms, vocabulary: Vocabulary) -> None:
    wanted = schema({"type": "array", "items": NODE | {"title": "once"}})
    compare(forms, vocabulary, wanted, 1)
    before = {child.pid for child in children(forms)}
    compare(forms, vocabulary, wanted | {"binds": True}, 2)
    assert {child.pid for child in children(forms)} <= before
    for i in range(KEPT_FORMS + 4):
        ready(forms, forms.open(json.dumps(schema({"const": i})), ()))
    for shared in [*forms._known.values()]:
        shared.waiting.clear()
    forms._tidy()
    assert len(forms._processes) <= KEPT_FORMS
    end_s = time.monotonic() + BOUND_S
    while len(children(forms)) > KEPT_FORMS:
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_forms_that_had_errors_are_remembered(forms: Forms) -> None:
    for _ in range(2):
        form = forms.open(json.dumps(schema({"type": "array", "uniqueItems": True})), ())
        ready(forms, form)
        with pytest.raises(RequestError, match="uniqueItems"):
            form.begin()
        form.close()
    assert forms.open(json.dumps(schema({"type": "array", "uniqueItems": True})), ()).is_ready


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (many_patterns(29), "more than 8 patterns in one 'allOf' \\(29 found\\)"),
        (many_patterns(100), "more than 8 patterns in one 'allOf' \\(100 found\\)"),
        ({"type": "object", "properties": {f"p{i}": {} for i in range(5000)}}, "2048 properties in one object"),
        ({"enum": [[0] * 1000] * 100}, "65536 values"),
        ({"anyOf": [{"pattern": f"{i}"} for i in range(2000)]}, "1024 patterns"),
    ],
)
def test_what_is_too_large_is_refused_by_its_size(wanted: Any, named: str, forms: Forms) -> None:
    began_s = time.monotonic()
    with pytest.raises(RequestError, match=f"field 'grammar': the schema has more than.*{named}|{named}"):
        forms.open(json.dumps(schema(wanted)), ())
    tool = {"kind": "tool_call", "format": "hermes", "tools": [{"name": "big", "parameters": wanted}]}
    with pytest.raises(RequestError, match="of tool 'big'"):
        forms.open(json.dumps(tool), ())
    assert time.monotonic() - began_s < 5


@pytest.mark.slow
def test_many_hopeless_forms_let_another_through_and_are_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms_module, "SLOW_S", 0.3)
    with open_model(NANO) as file:
        file_id = file.file_id
    own = Forms(NANO, lambda: file_id, tokenizer.vocab_size)
    bad = [own.open(hopeless(i), ()) for i in range(6)]
    good = own.open(json.dumps(schema({"const": "good"})), ())
    most = 0
    end_s = time.monotonic() + BOUND_S
    while not good.is_ready and time.monotonic() < end_s:
        own.poll(0.05)
        most = max(most, sum(not process.compiled for process in own._processes.values()))
    assert good.is_ready and not any(form.is_ready for form in bad[1:]) and most <= COMPILING
    for form in bad[2:]:
        form.close()  # whoever hangs up is not compiled for
    ready(own, *bad[:2])
    for form in bad[:2]:
        with pytest.raises(RequestError, match=r"the grammar takes more than (256 MiB|10 s)"):
            form.begin()
    assert not own._queue and not own._slow
    own.close()


def test_a_short_form_goes_ahead_of_long_ones_but_not_for_ever(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Forms(NANO, lambda: "", tokenizer.vocab_size)
    monkeypatch.setattr(own, "_start", lambda: None)
    texts = [json.dumps(schema({"const": "a" * n})) for n in (30, 7, 19)]
    for text in texts:
        own.open(text, ())
    assert own._next().text == texts[1]
    own._queue[0].queued_s -= 10
    assert own._next().text == texts[0]
    own.close()


def test_a_file_that_was_replaced_is_told(tokenizer: Tokenizer) -> None:
    own = Forms(NANO, lambda: "0" * 64, tokenizer.vocab_size)
    form = own.open(json.dumps(schema({"const": 1})), ())
    ready(own, form)
    with pytest.raises(SparkError, match="was replaced"):
        form.begin()
    own.close()


# --- through the engine -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(EngineConfig(model=NANO, device="cpu", threads=1, ctx_tokens=512, chunk_tokens=128))
    yield made
    made.close()


def drain(engine: Engine) -> list[Event]:
    events: list[Event] = []
    end_s = time.monotonic() + 2 * BOUND_S
    while engine.busy:
        events += engine.step()
        assert time.monotonic() < end_s, "it does not end"
    return events


def tokens_of(events: list[Event], request_id: int) -> list[int]:
    return [t for e in events if isinstance(e, Tokens) and e.id == request_id for t in e.tokens]


LONG = json.dumps(schema({"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 40, "maxItems": 60}))


def test_others_are_served_while_a_form_is_compiled(engine: Engine) -> None:
    free = Generate(1, (5, 6, 7), 60, Sampling(0.8, seed=1), ())
    engine.submit(free)
    alone = tokens_of(drain(engine), 1)
    engine.submit(Generate(2, (5, 6), 30, grammar=hopeless(77)))
    engine.submit(free)
    events = drain(engine)
    assert tokens_of(events, 1) == alone
    ends = [(type(e), e.id) for e in events if isinstance(e, Done | Error)]
    assert ends == [(Done, 1), (Error, 2)]
    assert events[-1].code == "bad_request" and "the grammar takes more than" in events[-1].message
    assert not engine._forms and not engine.busy


def test_a_request_is_cancelled_while_its_form_is_compiled(engine: Engine) -> None:
    engine.submit(Generate(1, (5, 6), 30, grammar=hopeless(78)))
    end_s = time.monotonic() + BOUND_S
    while not any(not process.compiled for process in engine.loaded.forms._processes.values()):
        engine.step()
        assert time.monotonic() < end_s
    assert engine.cancel(1) and not engine.busy and not engine._forms
    assert all(process.compiled for process in engine.loaded.forms._processes.values())


class Late(FormHere):
    """A form whose masks come when they have been asked for some times, and whose ends are known late."""

    def __init__(self, grammar: Any, rng: random.Random) -> None:
        super().__init__(grammar)
        self.rng = rng
        self.delay, self.unsettled = 2, 0

    @property
    def is_late(self) -> bool:  # type: ignore[override]
        self.delay -= 1
        return self.delay > 0

    def mask(self, until_s: float) -> Any:
        return None if self.delay > 0 else super().mask(until_s)

    def settle(self, until_s: float) -> bool:
        self.unsettled -= 1
        return self.unsettled < 0

    def accept(self, token: int) -> None:
        super().accept(token)
        self.delay, self.unsettled = self.rng.choice([0, 0, 1, 3]), self.rng.choice([0, 0, 2])


@pytest.mark.slow
@settings(max_examples=8)
@given(seed=st.integers(0, 999), temperature=st.sampled_from([0.0, 1.1]))
def test_masks_that_are_late_change_no_token(
    engine: Engine, vocabulary: Vocabulary, seed: int, temperature: float
) -> None:
    sampling = Sampling(temperature, top_p=0.9, seed=seed)
    requests = [
        Generate(1, (5, 6, 7), 25, sampling, ()),
        Generate(2, (8, 9), 30, sampling, None, LONG),
        Generate(3, (8, 9, 11), 9, sampling, None, json.dumps(schema({"type": "integer", "minimum": 10**6}))),
    ]
    grammar, expected = engine.loaded.forms.open, {}
    for request in requests:
        engine.submit(request)
        expected[request.id] = tokens_of(drain(engine), request.id)
    rng = random.Random(seed)
    try:
        engine.loaded.forms.open = lambda text, stop: Late(  # type: ignore[assignment,method-assign]
            Compiled.from_text(check(text)[0], vocabulary).begin(stop), rng
        )
        for request in requests:
            engine.submit(request)
        events = drain(engine)
    finally:
        engine.loaded.forms.open = grammar  # type: ignore[method-assign]
    assert not [e for e in events if isinstance(e, Error)]
    assert {request.id: tokens_of(events, request.id) for request in requests} == expected


@pytest.mark.slow
@settings(max_examples=5)
@given(seed=st.integers(0, 999), moments=st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_killed_processes_change_no_token(engine: Engine, seed: int, moments: list[int]) -> None:
    sampling = Sampling(1.0, seed=seed)
    prompt = (5, 6, 7 + seed % 50)
    requests = [Generate(i, prompt, 60, sampling, grammar=LONG) for i in (1, 2)]
    requests.append(Generate(3, prompt, 60, sampling, grammar=json.dumps(schema({"type": "string", "minLength": 150}))))
    expected = {}
    for request in requests:
        engine.submit(request)
        expected[request.id] = tokens_of(drain(engine), request.id)
    for request in requests:
        engine.submit(request)
    events: list[Event] = []
    steps, rng = 0, random.Random(seed)
    while engine.busy:
        events += engine.step()
        steps += 1
        if steps in moments:
            victims = [*children(engine.loaded.forms)]
            if rng.random() < 0.3 and engine.loaded.forms._host is not None:
                victims = [engine.loaded.forms._host]
            for victim in victims[: rng.randint(1, 3)]:
                os.kill(victim.pid, signal.SIGKILL)
    assert not [e for e in events if isinstance(e, Error)]
    assert {request.id: tokens_of(events, request.id) for request in requests} == expected


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a parent's death is told on Linux")
def test_no_process_outlives_a_daemon_that_is_killed(tmp_path: Path) -> None:
    command = client.engine_command(EngineConfig(model=NANO, device="cpu", threads=1, ctx_tokens=512))
    with (tmp_path / "stderr").open("wb") as said:
        daemon = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said)
    assert daemon.stdin and daemon.stdout
    for request_id, text in ((1, hopeless(1)), (2, LONG)):
        request = Generate(request_id, (5, 6, 7), 400, grammar=text)
        daemon.stdin.write(protocol.format_line(request))
    daemon.stdin.flush()
    for line in daemon.stdout:  # of a protocol in which nobody else writes
        event = protocol.parse_event(line)
        if isinstance(event, Tokens):
            break
    found = psutil.Process(daemon.pid).children(recursive=True)
    assert len(found) == 3, found  # the host, and two forms
    daemon.kill()
    daemon.wait()
    _, alive = psutil.wait_procs(found, timeout=10)
    assert not alive, alive
    assert "Traceback" not in (tmp_path / "stderr").read_text()


HOST_THAT_ENDS = """
import contextlib, os, signal, socket, time
from engine.text import forms_host
ours, its = socket.socketpair()
host = forms_host._Host(its, None)
host._children[1] = os.fork()
if not host._children[1]:
    ours.close()
    time.sleep(60)
ours.close()
with contextlib.suppress(EOFError):
    host.run()
host._wake.close()
os.kill(os.getpid(), signal.SIGCHLD)
time.sleep(0.1)
"""


@pytest.mark.slow
def test_a_host_whose_daemon_was_killed_ends_in_silence() -> None:
    done = subprocess.run([sys.executable, "-c", HOST_THAT_ENDS], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and done.stderr == "", done.stderr
