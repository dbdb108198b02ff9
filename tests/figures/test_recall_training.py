"""Tasks of recall, the model that is trained on them, and its file."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as QType
from hypothesis import given
from hypothesis import strategies as st

from data.nano.model import Config, Model
from data.recall import tasks
from data.recall.export import engine_config, write_model
from data.recall.priming import primed
from data.recall.tasks import (
    ASSISTANT,
    COPY,
    EDIT,
    END,
    FIRST_WORD,
    IS,
    LEAST,
    LINE,
    N_VOCAB,
    NEW,
    NUMBERS,
    OLD,
    ROW,
    TASKS,
    VALUE,
    drawn,
    echo,
)
from data.recall.train import SMALL, Lengths, Plan, batch, main
from engine.formats.gguf import open_model
from engine.ground.config import EngineConfig
from engine.models import qwen3moe
from engine.running.loaded import load
from engine.running.stepping import Span
from tests.tiny_models import nmse


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of PyTorch: its threads wait for each other by spinning, which takes minutes where all cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def following(text: list[int], what: list[int], n: int) -> list[int]:
    """The n tokens behind the one place of a passage."""
    places = [i for i in range(len(text) - len(what) + 1) if text[i : i + len(what)] == what]
    assert len(places) == 1, (what, places)
    return text[places[0] + len(what) :][:n]


def solved(task: str, text: list[int], prompt: list[int]) -> list[int]:
    """The answer, by a reader who searches the context."""
    if task == "copying":
        assert prompt[1] == COPY
        return [*prompt[2:4], *following(text, prompt[2:4], tasks.COPIED_WORDS), END]
    if task == "agent":
        path, key, new = prompt[2:4], prompt[5:7], prompt[8:10]
        line = following(text, [LINE, *key], tasks.LINE_WORDS)
        return [tasks.CALL, EDIT, *path, OLD, *key, *line, NEW, *new, END]
    answer: list[int] = []
    for i, token in enumerate(prompt):
        if token in NUMBERS:
            answer.append(token)
            key = prompt[i + 1 : i + 3]
            if task == "table":
                answer += [ROW, *key, *following(text, [ROW, *key], 3 * tasks.CELLS + 1)]
            elif task == "variables":
                while key[0] != VALUE:
                    answer += [*key, IS]
                    key = following(text, [tasks.SET, *key, IS], 2)
                answer += [VALUE, *following(text, [*answer[-3:], VALUE], tasks.VALUE_WORDS)]
            else:
                answer += [*key, IS, *following(text, [tasks.FACT, *key, IS], tasks.VALUE_WORDS)]
    return [*answer, END]


@given(
    task=st.sampled_from(list(TASKS)), seed=st.integers(0, 1 << 40), length=st.integers(LEAST, 1500),
    n=st.integers(1, 40),
)  # fmt: skip
def test_an_answer_follows_from_the_context(task: str, seed: int, length: int, n: int) -> None:
    case = drawn(task, np.random.default_rng(seed), length, n)
    tokens, wanted = case.row()
    assert len(tokens) == len(wanted) == length and tokens.dtype == np.int32
    assert tokens.min() >= 0 and tokens.max() < N_VOCAB
    assert 1 <= len(case.asked) <= n
    text, words = case.context.tolist(), 0
    for a in case.asked:
        assert a.prompt[-1] == ASSISTANT and a.answer[-1] == END
        assert a.answer.tolist() == solved(task, text, a.prompt.tolist())
        asked = set(a.prompt.tolist())
        there = {t for begin, end in a.evidence for t in text[begin:end]}
        assert all(t in asked or t in there for t in a.answer.tolist() if t >= FIRST_WORD)
        assert all(0 <= begin < end <= len(text) for begin, end in a.evidence)
        words += len(a.answer)
    assert int(wanted.sum()) == words + int(case.wanted.sum())
    assert np.array_equal(drawn(task, np.random.default_rng(seed), length, n).row()[0], tokens)


@pytest.mark.parametrize("task", list(TASKS))
def test_long_contexts_have_as_many_questions_as_asked_for(task: str) -> None:
    case = drawn(task, np.random.default_rng(3), 16384, 10)
    assert len(case.row()[0]) == 16384 and len(case.asked) == 10
    assert len({a.answer.tobytes() for a in case.asked}) == 10
    with pytest.raises(ValueError, match="at least 128 tokens, found 127"):
        drawn(task, np.random.default_rng(3), LEAST - 1, 1)


def test_turns_and_calls_of_the_context_are_learned_too() -> None:
    for task in ("turns", "agent"):
        case = drawn(task, np.random.default_rng(1), 2000, 4)
        begins = np.flatnonzero(np.diff(case.wanted.astype(int)) == 1)
        assert len(begins) > 5 and set(case.context[begins].tolist()) == {ASSISTANT}
        ends = np.flatnonzero(np.diff(case.wanted.astype(int)) == -1)
        assert set(case.context[ends].tolist()) == {END}


def test_an_echo_says_all_words_or_passages_again() -> None:
    kinds = set()
    for seed in range(6):
        tokens, wanted = echo(np.random.default_rng(seed), 331).row()
        text, known = tokens.tolist(), int(np.argmax(wanted)) - 2
        assert len(text) == 331 and wanted[known:].mean() > 0.7
        kinds.add(known)
        triples = {tuple(text[i : i + 3]) for i in range(known - 2)}
        assert all(tuple(text[i - 2 : i + 1]) in triples for i in np.flatnonzero(wanted))
    assert kinds == {166, 82}


def test_batches_follow_from_seed_and_number() -> None:
    tokens, wanted = batch(7, 3, 5, 256)
    again, _ = batch(7, 3, 5, 256)
    other, _ = batch(7, 4, 5, 256)
    assert tokens.shape == wanted.shape == (5, 256) and np.array_equal(tokens, again)
    assert not np.array_equal(tokens, other)
    assert set(np.unique(wanted)) <= {0, 1, 2} and (wanted > 0).any(axis=1).all()


def tiny(n_ctx: int = 512) -> Model:
    torch.manual_seed(4)
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_head_kv": 2, "head_dim": 32, "n_ff_exp": 96}
    model = Model(Config(N_VOCAB, n_ctx=n_ctx, n_expert=1, n_expert_used=1, **sizes), torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide which norm is where
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.requires_grad_(False)


@pytest.mark.parametrize(("qtype", "most"), [(QType.F32, 1e-6), (QType.F16, 1e-5), (QType.Q8_0, 2e-3)])
def test_the_engine_computes_the_file(qtype: QType, most: float, tmp_path: Path) -> None:
    model, path = tiny(), tmp_path / "m.gguf"
    path.write_bytes(b"what was there")
    write_model(path, model, qtype)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    with open_model(path) as file:
        found = qwen3moe.Config.from_gguf(file)
    assert found.eps == pytest.approx(1e-6) and replace(found, eps=1e-6) == engine_config(model)
    tokens = batch(1, 1, 1, 300)[0][0]
    loaded = load(EngineConfig(path, device="cpu", ctx_tokens=512, chunk_tokens=300, draft="off", threads=1))
    sequence = loaded.kv.sequence()
    want = tuple(range(236, 300))
    logits = np.array(loaded.steps.run([Span(sequence, tokens, np.zeros(300, bool), want)]).logits)
    loaded.close()
    expected = model(torch.from_numpy(tokens[None].astype(np.int64)))[0][0, 236:].numpy()
    assert nmse(logits, expected) < most


def test_contexts_lengthen_when_the_last_are_known_or_have_had_their_time() -> None:
    plan = Plan(512, 1000, seed=1)
    assert plan.lengths == [128, 256, 512, 1000]
    lengths = Lengths(plan)
    lengths.learned(128, 1.0, 0.1)
    assert lengths.stage == 0 and lengths.of(5) == 128 and lengths.known == pytest.approx(0.05)
    lengths.known = 0.98
    lengths.learned(128, 0.98, 0.1)
    assert lengths.stage == 1 and lengths.known == 0.0
    lengths.learned(128, 1.0, 0.1)  # not the longest
    assert lengths.known == 0.0
    lengths.learned(256, 0.0, 0.33)
    assert lengths.stage == 1
    lengths.learned(256, 0.0, 0.34)
    assert lengths.stage == 2
    drawn_lengths = [lengths.of(i) for i in range(100)]
    assert set(drawn_lengths) == {128, 256, 512} and 35 < drawn_lengths.count(512) < 65


def test_a_model_echoes_before_it_has_learned_anything() -> None:
    torch.manual_seed(1)
    model = primed(Model(Config(N_VOCAB, n_ctx=512, n_expert=1, n_expert_used=1, **SMALL), torch.float32))
    for seed in range(4):
        tokens, wanted = echo(np.random.default_rng(seed), 400).row()
        with torch.no_grad():
            likeliest = model(torch.from_numpy(tokens[None].astype(np.int64)))[0][0].argmax(-1).numpy()
        at = np.flatnonzero(wanted)
        assert (likeliest[at - 1] == tokens[at]).mean() > 0.9


@pytest.mark.slow
def test_the_program_writes_a_model_and_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = "--steps 4 --small --ctx 128 --tokens 512 --cases 1 --device cpu --workers 1"
    monkeypatch.setattr(sys, "argv", ["train.py", "--out", str(tmp_path), *shlex.split(given)])
    main()
    made = json.loads((tmp_path / "recall.json").read_text())
    assert made["training"]["steps"] == 4 and set(made["training"]["accuracy"]) == set(TASKS)
    with open_model(tmp_path / "recall.gguf") as file:
        assert qwen3moe.Config.from_gguf(file).n_ctx_train == 128
