from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import daemon
from engine.ground import checks, protocol
from engine.ground.config import DEVICES, MAX_PARALLEL, EngineConfig
from engine.ground.errors import CapacityError, ContextOverflowError, RequestError, from_code
from engine.ground.kv_types import KV_TYPES
from engine.ground.sampling import Sampling
from engine.placing import policies

IDS = st.integers(0, protocol.MAX_ID)
TOKENS = st.lists(st.integers(0, protocol.TOKEN_END - 1), min_size=1, max_size=9).map(tuple)
TEXT = st.text(max_size=40)
PATHS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=30)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXT, JSON, max_size=4)
INFO = OBJECTS.map(lambda made: {k: v for k, v in made.items() if k not in ("op", "event", "protocol")})
SAMPLING = st.builds(
    Sampling,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, protocol.TOKEN_END - 1),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    seed=st.integers(0, (1 << 64) - 1),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
)
TOP = st.lists(st.tuples(st.integers(0, protocol.TOKEN_END - 1), FLOATS), max_size=3).map(tuple)


@st.composite
def scores(draw: st.DrawFn) -> protocol.Score:
    tokens = draw(TOKENS)
    marks = st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)).map(tuple)
    trace_dir = draw(st.none() | PATHS)
    return protocol.Score(
        draw(IDS),
        tokens,
        generated=draw(st.none() | marks),
        session_id=draw(TEXT),
        window=draw(st.integers(0, (1 << 31) - 1)),
        trace_dir=trace_dir,
        hidden=draw(st.booleans()) and trace_dir is not None,
        logprobs=draw(st.booleans()),
        count=draw(st.sampled_from(["generated", "all"])),
    )


REQUESTS = st.one_of(
    st.builds(
        protocol.Generate,
        IDS,
        TOKENS,
        st.integers(1, protocol.MAX_TOKENS),
        SAMPLING,
        st.none() | st.lists(st.integers(0, protocol.TOKEN_END - 1), max_size=4).map(tuple),
        st.none() | TEXT,
        st.sampled_from([None, 0, 1]),
        st.none() | st.integers(0, protocol.MAX_TOP_LOGPROBS),
        st.none() | IDS,
    ),
    scores(),
    st.builds(protocol.Stats, IDS),
    st.builds(protocol.ProfileRequest, IDS, st.sampled_from(["write", "reset", "read"]), st.none() | PATHS),
    st.builds(protocol.Cancel, IDS, IDS),
    st.builds(protocol.Ping, IDS),
    st.builds(protocol.Shutdown, IDS),
)
SECONDS = st.floats(0, 1e12)
EVENTS = st.one_of(
    st.builds(protocol.Hello, IDS, INFO),
    st.builds(protocol.Loading, st.sampled_from(protocol.STAGES), IDS, IDS),
    st.builds(protocol.Ready, INFO),
    st.builds(protocol.Plan, INFO),
    st.builds(
        protocol.Tokens,
        IDS,
        TOKENS,
        st.none() | st.lists(FLOATS, max_size=4).map(tuple),
        st.none() | st.lists(TOP, max_size=4).map(tuple),
        st.none() | INFO,
    ),
    st.builds(protocol.Progress, IDS, IDS, IDS, IDS),
    st.builds(protocol.Working, IDS),
    st.builds(protocol.Warned, TEXT, TEXT),
    st.builds(
        protocol.Done,
        IDS,
        st.builds(protocol.Usage, IDS, IDS),
        st.builds(protocol.Timing, SECONDS, SECONDS),
        OBJECTS,
        st.sampled_from([None, "stop", "length"]),
        st.none() | FLOATS,
        st.none() | st.lists(FLOATS, max_size=5).map(tuple),
    ),
    st.builds(protocol.Error, st.none() | IDS, TEXT, TEXT, TEXT),
    st.builds(protocol.StatsReport, IDS, OBJECTS),
    st.builds(protocol.ProfileReport, IDS, OBJECTS),
    st.builds(protocol.Cancelled, IDS, IDS, st.booleans()),
    st.builds(protocol.Pong, IDS),
    st.builds(protocol.Bye, IDS),
)


@given(REQUESTS)
def test_a_request_survives_its_text(request: protocol.Request) -> None:
    line = protocol.format_line(request)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert protocol.parse_request(line) == request


@given(EVENTS)
def test_an_event_survives_its_text(event: protocol.Event) -> None:
    line = protocol.format_line(event)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert protocol.parse_event(line) == event


GENERATE = {"id": 7, "op": "generate", "tokens": [1, 2], "max_tokens": 3}
SCORE = {"id": 7, "op": "score", "tokens": [1, 2]}


def test_defaults() -> None:
    made = protocol.parse_request(json.dumps(GENERATE).encode())
    assert made == protocol.Generate(7, (1, 2), 3, Sampling(), None)
    empty = protocol.parse_request(json.dumps(GENERATE | {"stop_tokens": []}).encode())
    assert isinstance(empty, protocol.Generate) and empty.stop_tokens == ()
    assert protocol.parse_request(json.dumps(SCORE).encode()) == protocol.Score(7, (1, 2))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"op": "sing"}, "'op'"),
        ({"op": ["generate"]}, "'op'"),
        ({"id": True}, "'id'"),
        ({"id": -1}, "'id'"),
        ({"id": 1 << 53}, "'id'"),
        ({"id": None}, "'id'"),
        ({"id": 7.0}, "'id'"),
        ({"reply_from": 3}, "'reply_from'"),
        ({"reply_from": -1}, "'reply_from'"),
        ({"logprobs": 21}, "'logprobs'"),
        ({"logprobs": True}, "'logprobs'"),
        ({"sampling": {"frequency_penalty": 2.1}}, "'sampling.frequency_penalty'"),
        ({"sampling": {"presence_penalty": -2.1}}, "'sampling.presence_penalty'"),
        ({"tokens": []}, "'tokens'"),
        ({"tokens": "12"}, "'tokens'"),
        ({"tokens": [1, 2.0]}, "'tokens'"),
        ({"tokens": [1, True]}, "'tokens'"),
        ({"tokens": [1, -1]}, "'tokens'"),
        ({"tokens": [1 << 31]}, "'tokens'"),
        ({"max_tokens": 0}, "'max_tokens'"),
        ({"max_tokens": "3"}, "'max_tokens'"),
        ({"stop_tokens": [None]}, "'stop_tokens'"),
        ({"stop_tokens": [0] * 1025}, "'stop_tokens'"),
        ({"grammar": {}}, "'grammar'"),
        ({"grammar": "x" * (protocol.MAX_GRAMMAR_CHARS + 1)}, "'grammar'"),
        ({"sampling": None}, "'sampling'"),
        ({"sampling": {"temperature": -0.1}}, "'sampling.temperature'"),
        ({"sampling": {"temperature": 10**400}}, "'sampling.temperature'"),
        ({"sampling": {"top_p": -0.1}}, "'sampling.top_p'"),
        ({"sampling": {"top_p": "1"}}, "'sampling.top_p'"),
        ({"sampling": {"min_p": True}}, "'sampling.min_p'"),
        ({"sampling": {"seed": 1 << 64}}, "'sampling.seed'"),
        ({"sampling": {"heat": 1}}, "'sampling.heat'"),
        ({"temperature": 1}, "'temperature'"),
        ({"event": "tokens"}, "'event'"),
    ],
)
def test_a_bad_generate_request_is_refused_by_field(change: dict, named: str) -> None:
    with pytest.raises(RequestError, match="field") as caught:
        protocol.parse_request(json.dumps(GENERATE | change).encode())
    assert named in caught.value.message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"generated": [True]}, "'generated'"),
        ({"generated": [1, 0]}, "'generated'"),
        ({"hidden": True}, "'hidden'"),
        ({"hidden": 1, "trace_dir": "d"}, "'hidden'"),
        ({"trace_dir": ""}, "'trace_dir'"),
        ({"trace_dir": "a\0b"}, "'trace_dir'"),
        ({"trace_dir": "\ud800"}, "'trace_dir'"),
        ({"count": "some"}, "'count'"),
        ({"window": 1 << 31}, "'window'"),
        ({"session_id": "s" * 4097}, "'session_id'"),
    ],
)
def test_a_bad_score_request_is_refused_by_field(change: dict, named: str) -> None:
    with pytest.raises(RequestError) as caught:
        protocol.parse_request(json.dumps(SCORE | change).encode())
    assert named in caught.value.message


@pytest.mark.parametrize("missing", ["id", "op", "tokens", "max_tokens"])
def test_a_missing_field_is_named(missing: str) -> None:
    given = {key: value for key, value in GENERATE.items() if key != missing}
    with pytest.raises(RequestError, match=f"'{missing}' is missing"):
        protocol.parse_request(json.dumps(given).encode())


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello",
        b"[1]",
        b"null",
        b'{"id":1,"id":2,"op":"ping"}',
        b'{"op":"ping","id":NaN}',
        b'{"op":"ping","id":' + b"9" * 5000 + b"}",
        b'{"op":"ping","id":1e999}',
        b'{"op":"ping","id":"\xff"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b" " * (protocol.MAX_LINE_BYTES + 1),
    ],
)
def test_garbage_is_a_request_error(line: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        protocol.parse_request(line)
    assert len(caught.value.message) < 300


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_request_error(line: bytes) -> None:
    for parse in (protocol.parse_request, protocol.parse_event):
        with pytest.raises(RequestError):
            parse(line)


@given(st.sampled_from([GENERATE, SCORE, {"id": 1, "op": "profile", "action": "read"}]), st.data())
def test_a_changed_field_is_a_message_or_a_request_error(base: dict, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(base)) | TEXT)
    line = json.dumps(base | {key: data.draw(JSON)}).encode()
    try:
        made = protocol.parse_request(line)
    except RequestError:
        return
    assert protocol.parse_request(protocol.format_line(made)) == made


def test_bytes_that_are_not_utf8_are_replaced_in_events() -> None:
    line = b'{"event":"error","id":3,"code":"failed","message":"caf\xe9"}'
    assert protocol.parse_event(line) == protocol.Error(3, "failed", "caf\ufffd")


@pytest.mark.slow
def test_a_message_that_could_not_be_read_is_not_written() -> None:
    tokens = (protocol.TOKEN_END - 1,) * (protocol.MAX_LINE_BYTES // 10)
    with pytest.raises(RequestError, match="limit"):
        protocol.format_line(protocol.Tokens(1, tokens))


def test_not_a_number_is_not_written() -> None:
    usage, timing = protocol.Usage(1, 0), protocol.Timing(0.0, 0.0)
    with pytest.raises(ValueError, match="not JSON compliant"):
        protocol.format_line(protocol.Done(1, usage, timing, {}, nll=math.nan))


def test_errors_are_rebuilt() -> None:
    event = protocol.error_event(4, ContextOverflowError("too long", hint="shorten it"))
    rebuilt = from_code(event.code, event.message, event.hint)
    assert type(rebuilt) is ContextOverflowError and rebuilt.hint == "shorten it"
    assert protocol.error_event(None, CapacityError("full")).id is None


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b" ")), max_size=6), st.booleans())
def test_lines_are_read_as_they_were_written(lines: list[bytes], ended: bool) -> None:
    text = b"\n".join(lines) + (b"\n" if ended and lines else b"")
    expected = text.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    read_fd, write_fd = os.pipe()
    os.write(write_fd, text)
    os.close(write_fd)
    try:
        assert list(protocol.read_lines(read_fd)) == expected
    finally:
        os.close(read_fd)


def test_a_line_too_long_is_dropped_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with path.open("wb") as file:
        for size in (5, protocol.MAX_LINE_BYTES, protocol.MAX_LINE_BYTES + 1, 3 * protocol.MAX_LINE_BYTES, 6):
            file.write(b"x" * size + b"\n")
    with path.open("rb") as file:
        sizes = [None if line is None else len(line) for line in protocol.read_lines(file.fileno())]
    assert sizes == [5, protocol.MAX_LINE_BYTES, None, None, 6]


CONFIGS = st.builds(
    EngineConfig,
    model=PATHS.map(Path),
    device=st.sampled_from(DEVICES),
    policy=st.sampled_from(policies.NAMES),
    profile=st.none() | PATHS.map(Path),
    residency_pct=st.floats(0, 100),
    vram_gib=st.none() | st.floats(1e-3, 1e5),
    cache_slots=st.none() | st.integers(0, 1 << 40),
    ctx_tokens=st.none() | st.integers(1, 1 << 40),
    kv_type=st.sampled_from(KV_TYPES),
    chunk_tokens=st.none() | st.integers(1, 1 << 40),
    parallel=st.none() | st.integers(1, MAX_PARALLEL),
    threads=st.none() | st.integers(1, 1 << 40),
    poison=st.booleans(),
    replay=st.none() | PATHS.map(Path),
    prefix_gib=st.floats(0, 1e5),
    cache_dir=st.none() | PATHS.map(Path),
    cache_dir_gib=st.floats(1e-3, 1e5),
    exact_prefixes=st.booleans(),
    idle_release_s=st.none() | st.floats(1, 1e6),
    kv_recall=st.none() | st.floats(0, 1),
    kv_recall_blocks=st.none() | st.integers(0, 1 << 20),
    kv_recall_from=st.integers(0, 1 << 20),
    plan_only=st.booleans(),
)


@given(CONFIGS)
def test_the_command_line_survives_the_daemon(config: EngineConfig) -> None:
    assert daemon.parse_arguments(protocol.command_line(config)) == config


def test_every_setting_has_a_flag() -> None:
    config = EngineConfig(
        model=Path("m"), profile=Path("p"), vram_gib=4.5, cache_slots=1, ctx_tokens=2, chunk_tokens=5, parallel=4,
        threads=3, poison=True, replay=Path("r"), cache_dir=Path("c"), exact_prefixes=True, plan_only=True,
        expect_ctx_tokens=6, idle_release_s=7.5, pregate=Path("q"), kv_recall=0.25, kv_recall_blocks=8,
        kv_recall_from=9,
        replay_guesses=Path("g"),
    )  # fmt: skip
    flags = {argument.split("=")[0] for argument in protocol.command_line(config)[:-2]}
    assert flags == {"--" + f.name.replace("_", "-") for f in fields(EngineConfig)} - {"--model"}


@pytest.mark.parametrize(
    "flag",
    ["--residency-pct=101", "--residency-pct=nan", "--vram-gib=0", "--vram-gib=inf", "--threads=0", "--cache-slots=-1",
     "--prefix-gib=-1", "--cache-dir-gib=0", "--device=tpu", "--ctx-tokens=1.5", "--residency=5",
     "--chunk-tokens=" + "9" * 5000, "--parallel=0", "--parallel=33",
     "--kv-pool=5GB", "--kv-pool=0", "--kv-recall-blocks=-1", "--kv-recall-blocks=16777217",
     "--kv-recall-from=2147483648", "--expect-ctx-tokens=0"],
)  # fmt: skip
def test_a_bad_flag_is_a_usage_error(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        daemon.parse_arguments([flag, "model.gguf"])
    assert caught.value.code == 2
    assert flag.split("=")[0] in capsys.readouterr().err.splitlines()[-1]


def test_the_protocol_needs_no_array_library() -> None:
    code = "import sys, engine.ground.protocol, engine.daemon; sys.exit('numpy' in sys.modules)"
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", code) == 0


@pytest.mark.parametrize("value", [[], [3], [0, 7], [1, True], [1.0], [-1], [8], [1] * 5, "12", [[1]], None])
def test_many_integers_are_checked_as_one_by_one(value: Any) -> None:
    found = []
    for check in (checks.integers(0, 7, 4, shortest=1), checks.items(checks.integer(0, 7), 4, shortest=1)):
        try:
            found.append(check("tokens", value))
        except RequestError as error:
            found.append(error.message)
    assert found[0] == found[1]
