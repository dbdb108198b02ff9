"""Training the bundled model's drafter: what it learns from, that it learns, and that the engine computes its file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as QType

from engine.drafting.dflash import Drafter as EngineDrafter
from engine.drafting.dflash import drafter_limits
from engine.drafting.drafter import open_drafter
from engine.ops import cpu
from engine.ops.host import HostDevice
from tests.gguf_files import qtensor
from tests.tiny_models import nmse

NANO = str(Path(__file__).parents[2] / "data" / "nano")
sys.path.insert(0, NANO)  # its programs import each other by their names
from acceptance import Case, table, walked  # noqa: E402
from drafter import Drafter, Optimizer, Shape, guess_loss, labels, write_drafter  # noqa: E402
from export import read_values  # noqa: E402
from model import Config, Model  # noqa: E402
from target import all_replies, follow, replies  # noqa: E402
from windows import Batches, Sizes, Turn, rewritten  # noqa: E402

sys.path.remove(NANO)

STOP, MASK, N_VOCAB = 7, 298, 301
SHAPE = Shape(
    N_VOCAB, 64, MASK, (2, 0), n_layer=2, n_head=6, n_head_kv=2, head_dim=32, n_ff=96, block=5, window=50
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of PyTorch: its threads wait for each other by spinning, which takes minutes where all cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> Model:
    torch.manual_seed(5)
    sizes = {"n_embd": 64, "n_head": 4, "head_dim": 32, "n_expert": 8, "n_expert_used": 2, "n_ff_exp": 32}
    return Model(Config(N_VOCAB, n_layer=3, n_ctx=300, **sizes), torch.float32).requires_grad_(False)


@pytest.fixture(scope="module")
def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(8, 290, n) for n in (40, 23, 57, 31, 2, 44)]


def test_replies_are_what_the_model_says_next(target: Model, prompts: list[np.ndarray]) -> None:
    found = replies(target, prompts, 30, (STOP,))
    assert all_replies(target, prompts, 30, (STOP,), batch=2) == dict(enumerate(found))
    for prompt, reply in zip(prompts, found, strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, reply]))[None]
        greedy, features = follow(target, tokens, (2, 0))
        assert greedy[0, len(prompt) - 1 : -1].tolist() == reply
        assert features.shape == (1, tokens.shape[1], 128)
        assert len(reply) == 30 or reply.index(STOP) == len(reply) - 1


def test_labels_are_the_models_own_continuation(target: Model, prompts: list[np.ndarray]) -> None:
    """Known ones, along a reply, in text that the model would not have said, and before and behind a stop token."""
    reply = replies(target, prompts[:1], 30, ())[0]
    stop = reply[12]
    tokens = torch.from_numpy(np.concatenate([prompts[0], reply, prompts[1]]))[None]
    greedy, _ = follow(target, tokens, (0,))
    anchors = torch.arange(20, tokens.shape[1] - 5)[None]
    said, known = labels(greedy, tokens, anchors, 5, stop)
    assert said.shape == known.shape == (1, anchors.shape[1], 4)
    places = range(anchors.shape[1])
    own = replies(target, [tokens[0, : 21 + i].numpy() for i in places], 4, (stop,))
    counts = []
    for i, reply in zip(places, own, strict=True):
        n = int(known[0, i].sum())
        assert known[0, i].tolist() == [k < n for k in range(4)] and 1 <= n <= len(reply)
        assert said[0, i, :n].tolist() == reply[:n]
        counts.append(n)
    assert set(counts) == {1, 2, 3, 4}


def test_turns_are_replaced_by_replies() -> None:
    stream = np.array([9, 9, 1, 2, STOP, 9, 3, STOP, 9], np.uint16)
    turns = [Turn(0, 2, 4), Turn(0, 6, 7)]
    new, wanted = rewritten(stream, turns, {0: [5, 6, 4, STOP]}, STOP)
    assert new.tolist() == [9, 9, 5, 6, 4, STOP, 9, 3, STOP, 9]
    assert new[wanted].tolist() == [5, 6, 4, 3]
    assert rewritten(stream, turns, {}, STOP)[0].tolist() == stream.tolist()


def test_anchors_are_where_they_are_wanted() -> None:
    stream = np.arange(400, dtype=np.uint16)
    marks = stream % 3 == 0
    streams = dict.fromkeys(("turns", "renamed", "source", "copying"), stream)
    batches = Batches(streams, dict.fromkeys(streams, marks), Sizes(6, 60, 12), 5, CPU, seed=1)
    for _ in range(5):
        tokens, anchors = batches.draw()
        assert tokens.shape == (6, 60) and bool((tokens.diff(dim=1) == 1).all())
        assert bool((tokens.gather(1, anchors) % 3 == 0).all())
        assert bool((anchors.diff(dim=1) > 0).all()) and anchors.min() > 0 and anchors.max() < 56


@pytest.mark.slow
def test_a_drafter_learns_and_the_engine_computes_its_file(
    target: Model, prompts: list[np.ndarray], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    rows = [np.concatenate([p, r])[-60:] for p, r in zip(prompts, replies(target, prompts, 60, ()), strict=True)]
    tokens = torch.from_numpy(np.stack(rows))
    anchors = torch.arange(3, 55, 3).expand(len(rows), -1)
    greedy, features = follow(target, tokens, SHAPE.captured)
    said, known = labels(greedy, tokens, anchors, SHAPE.block, STOP)
    drafter = Drafter(SHAPE, target.c.n_ctx)
    drafter.balance(features)
    optimizer = Optimizer(drafter, 3e-3, cuda=False)
    losses = []
    for _ in range(25):
        loss = guess_loss(drafter(target, features, tokens, anchors, torch.float32), said, known)
        loss.backward()
        optimizer.step(1.0)
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses

    path = tmp_path / "d.gguf"
    write_drafter(path, drafter, "tiny")
    assert not list(tmp_path.glob(".export*"))
    drafter.load_state_dict({name: torch.from_numpy(np.array(w)) for name, w in read_values(path).items()})
    config, weights = open_drafter(path, SimpleNamespace(n_layer=3, n_embd=64, n_vocab=N_VOCAB))
    assert (config.captured, config.block_tokens, config.mask_token) == (SHAPE.captured, SHAPE.block, MASK)
    assert config.reach == (SHAPE.window,) * SHAPE.n_layer and not config.causal
    ws = cpu.workspace(drafter_limits(config, N_VOCAB, 300), 1)
    embedding, head = (
        qtensor(getattr(target, name).weight.numpy(), QType.F32, name) for name in ("token_embd", "output")
    )
    made = EngineDrafter(HostDevice(), cpu, ws, config, weights, embedding, head, 300)
    text = torch.from_numpy(np.concatenate(rows[:4]))[None]  # longer than the window
    _, features = follow(target, text, SHAPE.captured)
    places = torch.tensor([[1, 2, 48, 49, 50, 51, 52, 120, 200, 230]])
    with torch.no_grad():
        expected = drafter(target, features, text, places, torch.float32)[0].numpy()
    for p, wanted in zip(places[0].tolist(), expected, strict=True):
        ring = made.ring()
        assert ring is not None
        parts = features[0, :p].unflatten(-1, (2, 64)).transpose(0, 1).contiguous().numpy()
        made.feed(ring, parts, 0)
        assert nmse(made.logits(ring, int(text[0, p]), SHAPE.block - 1), wanted) < 3e-3, p
        made.give_back(ring)
    made.close()


def test_acceptance_is_counted_along_the_blocks_of_a_reply() -> None:
    reply = np.arange(10)
    drafts = np.full((9, 3), -1)
    drafts[0] = [1, 2, 9]  # two stay, and a third token is drawn
    drafts[3] = [4, 9, 6]  # what is right behind a wrong one does not stay
    drafts[5] = [6, 7, 8]  # all stay, and the reply's last is drawn
    case = Case(np.arange(5), reply, ("text",) * 5 + ("source",) * 5, drafts)
    assert list(walked(case)) == [("text", 3, 2), ("text", 3, 1), ("source", 3, 3)]
    found = table([case])
    assert found["text"] == {"blocks": 2, "accepted_per_block": 1.5, "due": [2, 2, 1], "right": [2, 1, 0]}
    assert found["all"] == {"blocks": 3, "accepted_per_block": 2.0, "due": [3, 3, 2], "right": [3, 2, 1]}
    drafts[5] = -1
    assert [b[1:] for b in walked(case)][2:] == [(3, 0), (3, 0), (2, 0), (1, 0)]
