"""Rendered turns, windows and token files."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from engine.formats.gguf import open_model
from engine.ground.errors import FileFormatError, RequestError, SparkError, UsageError, WrongModelError
from engine.text.pretokenizers import PRE_TOKENIZERS
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer, load
from spark.pipeline.tokens import (
    MIN_WINDOW,
    Origin,
    Window,
    export_tokenizer,
    read_tokens,
    tokenize,
    unread,
    windows,
)
from spark.speech.render import Renderer, Turn, _Shield
from spark.speech.sessions import Message, Session, ToolCall, read_sessions, write_sessions
from tests.gguf_files import write_gguf

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]

# As Qwen3's: reasoning is shown in the turns after the last question only; tools are in the system message.
CHATML = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
    {%- if message.role == 'tool' %}{{- message.name + ': ' }}{%- endif %}
    {%- if message.reasoning_content and loop.index0 > ns.last %}
        {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' + call.function.name + ' ' + (call.function.arguments | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
SIMPLE = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@cache
def vocabulary() -> tuple[list[str], list[str]]:
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = PRE_TOKENIZERS["qwen2"].words
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text()
    trained.train_from_iterator([text, "assistant user system tool\n" * 50], trainer)
    model = json.loads(trained.to_str())["model"]
    return list(model["vocab"]), [" ".join(pair) for pair in model["merges"]]


def write_model(path: Path, template: str | None = CHATML, **fields: Any) -> Path:
    tokens, merges = vocabulary()
    n = len(tokens)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*tokens, *CONTROL, *USER_DEFINED],
        "tokenizer.ggml.token_type": [1] * n + [3] * len(CONTROL) + [4] * len(USER_DEFINED),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": n,
        "tokenizer.ggml.eos_token_id": n + 2,
    }
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    write_gguf(path, metadata | {f"tokenizer.ggml.{k}": v for k, v in fields.items()}, {"x": np.ones((2, 3), "f4")})
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load(write_model(folder / "chatml.gguf"))


def renderer(folder: Path, template: str | None, **fields: Any) -> Renderer:
    return Renderer(load(write_model(folder / "model.gguf", template, **fields)))


def session(*messages: Message, tools: Sequence[dict[str, Any]] = (), started_at: str = "") -> Session:
    return Session("root/child#2", "claude", started_at, tuple(tools), messages)


def texts(rendering: Renderer, *messages: Message) -> list[tuple[str, str]]:
    """(prompt, generated) of each turn, as text."""
    decode = rendering.tokenizer.decode
    return [(decode(turn.prompt), decode(turn.generated)) for turn in accepted(rendering, session(*messages))]


def accepted(rendering: Renderer, conversation: Session) -> list[Turn]:
    turns = list(rendering.turns(conversation))
    assert all(isinstance(turn, Turn) for turn in turns)
    return turns


ASK = Message("user", "why?")
CALL = ToolCall("call_1", "read", {"path": "a.py", "lines": [1, 2]})
TOOL = {"type": "function", "function": {"name": "read", "description": "Reads a file", "parameters": {}}}
AGENT = (
    Message("system", "Be brief."),
    Message("system", "Use tools."),
    Message("user", "What is in a.py?"),
    Message("assistant", "Let me see.", "I must read it.", (CALL,)),
    Message("tool", "import os", tool_call_id="call_1"),
    Message("assistant", "An import.", "Only one line."),
    Message("user", "And in b.py?"),
    Message("assistant", "I cannot know.", "\nnothing\n"),
)


# ---- rendering ----


def test_a_turn_is_the_prompt_and_what_the_model_wrote(folder: Path) -> None:
    turns = texts(renderer(folder, CHATML), *AGENT)
    system = "<|im_start|>system\nBe brief.\n\nUse tools.<|im_end|>\n"
    first = f"{system}<|im_start|>user\nWhat is in a.py?<|im_end|>\n"
    call = '<tool_call>\nread {"path": "a.py", "lines": [1, 2]}\n</tool_call>'
    answer = f"<think>\nI must read it.\n</think>\n\nLet me see.\n{call}<|im_end|>"
    result = "<|im_start|>user\nread: import os<|im_end|>\n"
    header = "<|im_start|>assistant\n"
    assert turns[0] == (f"{first}{header}", answer)
    assert turns[1] == (
        f"{first}{header}{answer}\n{result}{header}",
        "<think>\nOnly one line.\n</think>\n\nAn import.<|im_end|>",
    )
    # a new question: the template drops the reasoning before it
    assert turns[2] == (
        f"{first}{header}Let me see.\n{call}<|im_end|>\n{result}{header}An import.<|im_end|>\n"
        f"<|im_start|>user\nAnd in b.py?<|im_end|>\n{header}",
        "<think>\nnothing\n</think>\n\nI cannot know.<|im_end|>",
    )


def test_tokens_are_those_of_the_rendered_text(folder: Path, tokenizer: Tokenizer) -> None:
    rendering = Renderer(tokenizer)
    conversation = session(*AGENT, tools=[TOOL])
    template = ChatTemplate(CHATML, "", "")
    chat = [
        {"role": "system", "content": "Be brief.\n\nUse tools."},
        {"role": "user", "content": "What is in a.py?"},
    ]
    expected = tokenizer.encode(template.render(chat, [TOOL]), parse_special=True)
    assert accepted(rendering, conversation)[0].prompt.tolist() == expected
    assert rendering.prompt(AGENT[:3], [TOOL]) == expected
    for turn in accepted(rendering, conversation):
        text = tokenizer.decode(turn.generated)
        assert turn.generated.tolist() == tokenizer.encode(text, parse_special=True)
        assert turn.prompt.dtype == turn.generated.dtype == np.int32


def test_later_system_messages_become_user_messages(folder: Path) -> None:
    turns = texts(renderer(folder, SIMPLE), ASK, Message("system", "note"), Message("assistant", "ok"))
    assert "<|im_start|>user\nnote<|im_end|>" in turns[0][0]


def test_serving_and_tokenizing_render_the_same(folder: Path) -> None:
    rendering = renderer(folder, CHATML)
    turns = accepted(rendering, session(*AGENT, tools=[TOOL]))
    for turn, n in zip(turns, (3, 5, 7), strict=True):
        assert rendering.prompt(AGENT[:n], [TOOL]) == turn.prompt.tolist()


@pytest.mark.parametrize(
    ("prompt_tail", "shown", "expected"),
    [  # what the template ends the prompt with, what it shows of a message, what the model wrote after the prompt
        ("<think>\n", "<think>\n{r}\n</think>\n\n{c}", "why not\n</think>\n\nbecause"),
        ("<think>", "<think>{r}</think>{c}", "why not</think>because"),
        ("<think>\n", "<think>{r}</think>{c}", "why not</think>because"),
        ("<think>\n", "{c}", "why not\n</think>\n\nbecause"),
        ("<think>", "</think>{c}", "</think>because"),
        ("<think>\n\n</think>\n\n", "{c}", "because"),
        ("</think>", "{t}</think>{c}", "because"),
        ("<think>\n\n</think>\n\n", "<think>\n{r}\n</think>\n\n{c}", "because"),
        ("", "{c}{# </think> #}", "<think>\nwhy not\n</think>\n\nbecause"),
        ("", "<think>\n{r}\n</think>\n\n{c}", "<think>\nwhy not\n</think>\n\nbecause"),
        ("", "{c}", "because"),  # a model that does not think
        ("\n\n", "{c}", "because"),  # a prompt that no history repeats
    ],
)
def test_reasoning_is_what_the_model_would_have_written(
    folder: Path, prompt_tail: str, shown: str, expected: str
) -> None:
    message = (
        shown.replace("{r}", "{{ m.reasoning_content }}")
        .replace("{c}", "{{ m.content }}")
        .replace("{t}", "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}{% endif %}")
    )
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>"
        f"{{% else %}}<|im_start|>{message}<|im_end|>{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|im_start|>{prompt_tail}{{% endif %}}"
    )
    (turn,) = texts(renderer(folder, template), ASK, Message("assistant", "because", "why not"))
    assert turn == (f"<|im_start|>why?<|im_end|><|im_start|>{prompt_tail}", f"{expected}<|im_end|>")


def test_a_turn_without_reasoning_closes_the_thinking_that_the_prompt_opened(folder: Path) -> None:
    template = SIMPLE.replace("assistant\\n", "assistant\\n<think>\\n")
    (turn,) = texts(renderer(folder, template), ASK, Message("assistant", "because"))
    assert turn[1] == "\n</think>\n\nbecause<|im_end|>"


def test_a_turn_ends_at_its_stop_token_or_gets_one(folder: Path) -> None:
    endless = "{% for m in messages %}{{ m.content }}\n\n{% endfor %}"
    assert texts(renderer(folder, endless), ASK, Message("assistant", "ok"))[0][1] == "ok<|im_end|>"
    twice = "{% for m in messages %}{{ m.content }}<|im_end|>{{ '\n' }}<|endoftext|>{% endfor %}"
    assert texts(renderer(folder, twice), ASK, Message("assistant", "ok"))[0][1] == "ok<|im_end|>"


def test_bos_is_there_once_if_wanted(folder: Path) -> None:
    for template in (SIMPLE, "{{ bos_token }}" + SIMPLE):
        rendering = renderer(folder, template, add_bos_token=True)
        assert rendering.tokenizer.decode(rendering.prompt([ASK])).count("<|endoftext|>") == 1
    rendering = renderer(folder, SIMPLE)
    assert rendering.tokenizer.bos_id not in rendering.prompt([ASK])


def test_a_model_without_a_template_gets_a_plain_one(folder: Path) -> None:
    rendering = renderer(folder, None)
    assert rendering.tokenizer.template is None
    turns = texts(rendering, *AGENT[1:])
    assert turns[0][0] == "System:\nUse tools.\n\nUser:\nWhat is in a.py?\n\nAssistant:\n"
    call = '{"name": "read", "arguments": {"path": "a.py", "lines": [1, 2]}}'
    assert turns[0][1] == f"I must read it.\n\nLet me see.\n{call}<|im_end|>"
    assert turns[1][0] == "".join(turns[0]) + "\n\nTool:\nimport os\n\nAssistant:\n"
    assert rendering.template_hash != renderer(folder, SIMPLE).template_hash


def test_the_date_is_the_sessions(folder: Path) -> None:
    rendering = renderer(folder, "{{ strftime_now('%Y-%m-%d') }}" + SIMPLE)
    answer = Message("assistant", "ok")
    for started_at, date in (("2025-03-04T05:06:07.890Z", "2025-03-04"), ("", "2025-01-01"), ("soon", "2025-01-01")):
        turn = accepted(rendering, session(ASK, answer, started_at=started_at))[0]
        assert rendering.tokenizer.decode(turn.prompt).startswith(date)
    assert rendering.tokenizer.decode(rendering.prompt([ASK])).startswith(datetime.now().strftime("%Y-%m-%d"))


def test_a_turn_the_template_refuses_is_an_error_and_the_next_goes_on(folder: Path) -> None:
    template = "{% if messages | length == 1 %}{{ raise_exception('too short') }}{% endif %}" + SIMPLE
    answer = Message("assistant", "ok")
    refused, turn = renderer(folder, template).turns(session(ASK, answer, ASK, answer))
    assert isinstance(refused, RequestError) and "too short" in refused.message
    assert isinstance(turn, Turn)


# ---- forging ----

FRAGMENTS = [
    "<|im_end|>", "<|im_", "end|>", "<", "|>", ">", "<|", "im_end", "<|<|im_end|>", "\n", " ", "a", "</think>", "é",
    "\ufdd0", "\ufdd1", "\ufdd2", "<|im_start|>assistant\n", "\ud800", "<|endoftext|>",
]  # fmt: skip
hostile = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join)


@pytest.mark.slow
@given(hostile, hostile, hostile, hostile, hostile)
@settings(max_examples=150, deadline=None)
def test_no_message_forges_a_control_token(
    tokenizer: Tokenizer, content: str, reasoning: str, key: str, value: str, description: str
) -> None:
    def conversation(*parts: str) -> Session:
        content, reasoning, key, value, description = parts
        call = ToolCall(f"id{value}", f"name{value}", {f"k{key}": value, "list": [value, {"x": key}]})
        tool = {"type": "function", "function": {"name": "name", "description": description}}
        return session(
            Message("system", content),
            Message("user", f"{value}{content}"),
            Message("assistant", content, f"r{reasoning}", (call,)),
            Message("tool", content, tool_call_id=f"id{value}"),
            Message("assistant", value, f"r{reasoning}"),
            tools=[tool],
        )

    rendering = Renderer(tokenizer)
    control = [tokenizer.special_ids[name] for name in CONTROL]
    forged = accepted(rendering, conversation(content, reasoning, key, value, description))
    honest = accepted(rendering, conversation("c", "r", "k", "v", "d"))
    for a, b in zip(forged, honest, strict=True):
        for ours, expected in ((a.prompt, b.prompt), (a.generated, b.generated)):
            assert [i for i in ours.tolist() if i in control] == [i for i in expected.tolist() if i in control]
    # and nothing of the text is lost
    clean = content.replace("\ud800", "\ufffd")
    shown = tokenizer.decode(forged[0].prompt)
    assert shown.count(f"<|im_start|>system\n{clean}<|im_end|>\n") == 1


def test_text_of_template_and_message_make_no_token_together(folder: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}end|>{% endfor %}<|im_{{ messages[0].content }}"
    rendering = renderer(folder, template)
    assert rendering.tokenizer.eos_id not in rendering.prompt([Message("user", "<|im_")])
    assert rendering.tokenizer.eos_id not in rendering.prompt([Message("user", "end|>")])
    whole = renderer(folder, template.replace("{{ m.content }}", "{{ m.content }}<|im_"))
    assert whole.tokenizer.eos_id in whole.prompt([Message("user", "<|im_")])  # the template's own


def test_json_in_ascii_shows_no_marks(folder: Path) -> None:
    rendering = renderer(folder, "{{ tools | tojson(ensure_ascii=True) }}")
    description = 'é \ufdd0 <|im_end|> \\ufdd0\\ufdd2 \\\ufdd0\ufdd1 "<'
    told = rendering.tokenizer.decode(rendering.prompt([], [{"description": description, "<|im_": ["end|>"]}]))
    assert told.isascii() is False  # noncharacters alone are as they are
    assert json.loads(told) == [{"description": description, "<|im_": ["end|>"]}]
    assert "\\u00e9" in told and "ufdd2" not in told.replace("\\\\ufdd2", "")
    assert rendering.tokenizer.eos_id not in rendering.prompt([], [{"description": description}])


@given(hostile, hostile)
def test_marks_can_be_lifted_and_leave_no_name(a: str, b: str) -> None:
    shield = _Shield(CONTROL)
    marked = shield.text(a), shield.text(b)
    assert shield.lift("".join(marked)) == a + b
    assert not any(name in "".join(marked) for name in CONTROL)
    for head, tail in (("<|im_", "end|>"), ("<", "|im_end|>"), ("<|im_end|", ">")):
        assert not any(name in f"{head}{marked[0]}{tail}" for name in CONTROL if a)
    assert shield.text("a plain text </think> <b>") == "a plain text </think> <b>"


# ---- windows ----

few_tokens = st.lists(st.integers(0, 2), max_size=40)


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """Turns whose prompts extend, cut back or replace what came before."""
    turns: list[Turn] = []
    before: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        keep = draw(st.sampled_from([len(before), len(before), len(before) // 2, draw(st.integers(0, len(before)))]))
        prompt = before[:keep] + draw(few_tokens)
        generated = draw(st.lists(st.integers(0, 2), min_size=1, max_size=40))
        turns.append(Turn(np.array(prompt, np.int32), np.array(generated, np.int32)))
        before = prompt + generated
    return turns


def shared_prefix(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@pytest.mark.slow
@given(conversations(), st.integers(MIN_WINDOW, 70))
@settings(max_examples=300, deadline=None)
def test_windows_hold_every_new_token_once(turns: list[Turn], window: int) -> None:
    """Replays the windows beside an independent account of what is new in each turn."""
    new: list[tuple[list[int], int, bool]] = []  # (rendering, position in it, generated) of each new token
    before: list[int] = []
    for turn in turns:
        rendering = turn.prompt.tolist() + turn.generated.tolist()
        start = shared_prefix(before, turn.prompt.tolist())
        new += [(rendering, i, i >= len(turn.prompt)) for i in range(start, len(rendering))]
        before = rendering

    rows = list(windows("s", turns, window))
    assert [row.window for row in rows] == list(range(len(rows)))
    at = 0
    for row in rows:
        n = len(row.tokens)
        assert 0 < n <= window and row.generated.shape == (n,) and row.session_id == "s"
        position = new[at][1]
        until_generated = next(i for i, (_, _, generated) in enumerate(new[at:]) if generated)
        context = min(position, max(0, window // 4 - until_generated))
        rendering = new[at + n - context - 1][0]  # its last token's rendering extends those of the others
        assert row.tokens.tolist() == rendering[position - context : position - context + n]
        fresh = new[at : at + n - context]
        assert [i for _, i, _ in fresh] == list(range(position, position + n - context))
        assert row.generated.tolist() == [False] * context + [generated for _, _, generated in fresh]
        at += n - context
    assert at == len(new)
    marked = [int(i) for row in rows for i in row.tokens[row.generated]]
    assert marked == [i for turn in turns for i in turn.generated.tolist()]


def test_an_agents_session_is_stored_once(folder: Path) -> None:
    """Turns that extend each other share one window; a dropped reasoning begins another."""
    rendering = renderer(folder, CHATML)
    turns = accepted(rendering, session(*AGENT))
    first, second = windows("s", turns, 4096)
    assert first.tokens.tolist() == np.concatenate((turns[1].prompt, turns[1].generated)).tolist()
    decode = rendering.tokenizer.decode
    assert decode(first.tokens[first.generated]) == decode(turns[0].generated) + decode(turns[1].generated)
    assert decode(second.tokens) == decode(turns[2].prompt) + decode(turns[2].generated)
    assert decode(second.tokens[second.generated]) == decode(turns[2].generated)


def test_too_small_a_window_is_refused() -> None:
    with pytest.raises(UsageError, match=str(MIN_WINDOW)):
        list(windows("s", [], MIN_WINDOW - 1))


@given(st.lists(conversations(), max_size=3), st.lists(st.integers(0, 2), max_size=100), st.integers(MIN_WINDOW, 40))
@settings(max_examples=50, deadline=None)
def test_what_sessions_begin_with_alike_is_there_once(
    several: list[list[Turn]], system: list[int], window: int
) -> None:
    """Whole windows of it, in the first of them; nothing that was generated is left out, and no window is changed."""
    openings: set[bytes] = set()
    told: set[tuple[tuple[int, ...], ...]] = set()
    for turns in several:
        begun = [Turn(np.array([*system, *turn.prompt], np.int32), turn.generated) for turn in turns]
        rows = list(windows("s", begun, window))
        kept = list(unread(rows, openings))
        n_opening = next((i for i, row in enumerate(rows) if row.generated.any()), len(rows))
        shown = [tuple(row.tokens.tolist()) for row in rows]
        beginnings = [tuple(shown[: i + 1]) for i in range(n_opening)]
        n_known = sum(beginning in told for beginning in beginnings)
        assert rows_of(kept) == rows_of(rows[n_known:])
        told |= set(beginnings)


# ---- files ----


def sessions_file(folder: Path, n: int = 3) -> Path:
    path = folder / "sessions.jsonl"
    recorded = [
        Session(f"session{i}", "codex", "2025-06-01T00:00:00Z", (TOOL,), (*AGENT[: 4 + i], Message("assistant", "x")))
        for i in range(n)
    ]
    write_sessions(path, recorded)
    return path


def rows_of(rows: Sequence[Window] | Iterator[Window]) -> list[tuple[str, int, list[int], list[bool]]]:
    return [(row.session_id, row.window, row.tokens.tolist(), row.generated.tolist()) for row in rows]


def test_a_token_file_holds_the_windows_of_all_sessions(tmp_path: Path) -> None:
    model, sessions = write_model(tmp_path / "m.gguf"), sessions_file(tmp_path)
    calls: list[tuple[int, int]] = []
    summary = tokenize(model, sessions, tmp_path / "t.parquet", 48, lambda done, total: calls.append((done, total)))
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]

    rendering = Renderer(load(model))
    alone = [list(windows(s.session_id, accepted(rendering, s), 48)) for s in read_sessions(sessions)]
    openings: set[bytes] = set()
    expected = [row for rows in alone for row in unread(rows, openings)]
    assert len(expected) < sum(map(len, alone))  # they begin alike
    with open_model(model) as file:
        origin = Origin(file.model_id, rendering.tokenizer.hash, rendering.template_hash)
    tokens_file = read_tokens(tmp_path / "t.parquet", origin)
    assert rows_of(tokens_file) == rows_of(expected) == rows_of(tokens_file)
    assert (tokens_file.window, tokens_file.n_windows) == (48, len(expected))
    assert tokens_file.n_tokens == summary.tokens
    assert summary.windows == len(expected) > 3
    assert summary.tokens == sum(len(row.tokens) for row in expected)
    assert summary.generated_tokens == sum(int(row.generated.sum()) for row in expected) > 0
    assert (summary.sessions, summary.skipped_turns) == (3, {})
    assert {"tokens", "generated_tokens", "windows"} <= summary.to_json().keys()

    table = pq.read_table(tmp_path / "t.parquet")
    assert table.schema.field("tokens").type == pa.list_(pa.int32())
    assert table.schema.metadata[b"spark.format"] == b"tokens"
    assert (tmp_path / "t.parquet").stat().st_mode & 0o077 == 0  # as private as the sessions
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "sessions.jsonl", "t.parquet"]


def test_the_tokenizer_can_be_exported(tmp_path: Path, tokenizer: Tokenizer) -> None:
    export_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    exported = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert exported.encode("def f():<|im_end|>").ids == tokenizer.encode("def f():<|im_end|>", parse_special=True)


def test_large_files_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark.pipeline.tokens._BATCH_TOKENS", 100)
    monkeypatch.setattr("spark.pipeline.tokens._BATCH_ROWS", 2)
    model, sessions = write_model(tmp_path / "m.gguf"), sessions_file(tmp_path)
    tokenize(model, sessions, tmp_path / "t.parquet", 48)
    assert pq.ParquetFile(tmp_path / "t.parquet").metadata.num_row_groups > 2
    parts = rows_of(read_tokens(tmp_path / "t.parquet"))
    monkeypatch.undo()
    tokenize(model, sessions, tmp_path / "t.parquet", 48)
    assert rows_of(read_tokens(tmp_path / "t.parquet")) == parts


def test_no_file_appears_when_it_is_interrupted(tmp_path: Path) -> None:
    model, sessions, out = write_model(tmp_path / "m.gguf"), sessions_file(tmp_path), tmp_path / "t.parquet"
    out.write_bytes(b"what was there")

    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(model, sessions, out, 48, interrupt)
    assert out.read_bytes() == b"what was there"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "sessions.jsonl", "t.parquet"]


def test_a_damaged_session_leaves_no_file(tmp_path: Path) -> None:
    model, sessions = write_model(tmp_path / "m.gguf"), sessions_file(tmp_path)
    with sessions.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(FileFormatError, match="line 4"):
        tokenize(model, sessions, tmp_path / "t.parquet")
    assert not (tmp_path / "t.parquet").exists()


def test_refused_turns_are_counted_unless_all_are(tmp_path: Path) -> None:
    refusing = "{% if messages | length < 4 %}{{ raise_exception('too short') }}{% endif %}" + CHATML
    sessions = sessions_file(tmp_path, 5)
    summary = tokenize(write_model(tmp_path / "m.gguf", refusing), sessions, tmp_path / "t.parquet")
    ((reason, count),) = summary.skipped_turns.items()
    assert "too short" in reason and count == 6
    assert summary.windows > 0
    never = write_model(tmp_path / "n.gguf", "{{ raise_exception('never') }}")
    with pytest.raises(SparkError, match=r"refuses all 14 turns .* never"):
        tokenize(never, sessions, tmp_path / "n.parquet")
    assert not (tmp_path / "n.parquet").exists()


@pytest.mark.parametrize("what", ["sessions", "out"])
def test_missing_files_are_explained(tmp_path: Path, what: str) -> None:
    sessions = tmp_path / "none.jsonl" if what == "sessions" else sessions_file(tmp_path)
    out = tmp_path / "no folder" / "t.parquet" if what == "out" else tmp_path / "t.parquet"
    with pytest.raises(SparkError, match="cannot "):
        tokenize(write_model(tmp_path / "m.gguf"), sessions, out)


def test_files_of_another_model_are_refused_with_both_ids(tmp_path: Path) -> None:
    tokenize(write_model(tmp_path / "m.gguf"), sessions_file(tmp_path), tmp_path / "t.parquet")
    origin = read_tokens(tmp_path / "t.parquet").origin
    assert read_tokens(tmp_path / "t.parquet", origin).origin == origin
    for name in ("model_id", "tokenizer", "template"):
        fields = {"model_id": origin.model_id, "tokenizer": origin.tokenizer, "template": origin.template}
        with pytest.raises(WrongModelError, match=name) as caught:
            read_tokens(tmp_path / "t.parquet", Origin(**fields | {name: "0" * 64}))
        assert "0" * 64 in caught.value.message and fields[name] in caught.value.message
