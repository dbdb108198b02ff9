"""What benchmarks of recall go by: ways to choose blocks, shares, questions, and answers beside all of a context."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as QType

from benchmarks import recall_quality
from benchmarks.choosing import BYTES, CHOICES, SKETCHES, Keys, Layers, Seen, best, by_chance, choosing, masses
from benchmarks.kv_results import recall_quality as recall_quality_section
from benchmarks.recall_quality import Fared, Plan, Reader, cases, chosen_of, is_far, measure, verdict
from data.nano.model import Config, Model
from data.recall.export import write_model
from data.recall.tasks import N_VOCAB, Asked
from engine.ops import TAIL_BLOCKS
from engine.placing.summaries import Sketch, true_masses
from engine.running.recall import Part

LENGTH = 1600


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(4)
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_head_kv": 2, "head_dim": 32, "n_ff_exp": 96}
    made = Model(Config(N_VOCAB, n_ctx=LENGTH, n_expert=1, n_expert_used=1, **sizes), torch.float32)
    path = tmp_path_factory.mktemp("model") / "random.gguf"
    write_model(path, made, QType.F16)
    return path


@pytest.fixture(scope="module")
def reader(model: Path) -> Iterator[Reader]:
    one = Reader(model, LENGTH, 1)
    yield one
    one.loaded.close()


def fake_cache(rng: np.random.Generator, blocks: int = 9) -> tuple[Any, np.ndarray]:
    return SimpleNamespace(k=rng.normal(size=(blocks * 64, 2, 32)).astype(np.float16)), rng.permutation(blocks)


def test_masses_are_those_of_summaries() -> None:
    rng = np.random.default_rng(1)
    keys, q = rng.normal(size=(5, 64, 32)), 4 * rng.normal(size=(6, 32))
    assert np.allclose(masses(q, keys, 0.3), true_masses(keys, q, 0.3), rtol=1e-12)
    for bits in (2, 4):
        choice, sketch = CHOICES[f"{bits} bits"], Sketch(bits)
        assert choice is not None
        wanted = sketch.masses(sketch.of(keys), q, 0.3)[0]
        assert np.allclose(choice.weigh(q, choice.keep(keys), 0.3), wanted, rtol=1e-12)


@pytest.mark.parametrize("name", [name for name, choice in CHOICES.items() if choice is not None and name != "random"])
def test_what_is_kept_of_shared_blocks_is_what_is_made_anew(name: str) -> None:
    rng = np.random.default_rng(2)
    kv, table = fake_cache(rng)
    q, choice, kept, anew = rng.normal(size=(6, 32)), CHOICES[name], Keys(), Keys()
    assert choice is not None
    kept.forget(shared=6)
    for n in (8, 5, 6):
        expected = anew.weighed(choice, q, kv, table, 1, n, 0.4)
        assert expected.shape == (6, n)
        assert np.allclose(kept.weighed(choice, q, kv, table, 1, n, 0.4), expected, rtol=1e-12)
    kv.k[table[0] * 64 :][:64] += 1  # of a shared block: whoever shares it promises that this is not done
    assert choice.blind or np.allclose(kept.weighed(choice, q, kv, table, 1, 5, 0.4), expected[:, :5], rtol=1e-12)
    kept.forget(shared=6)
    assert np.allclose(
        kept.weighed(choice, q, kv, table, 1, 5, 0.4), anew.weighed(choice, q, kv, table, 1, 5, 0.4), rtol=1e-12
    )


def test_some_channels_are_in_bits_and_the_others_are_means() -> None:
    rng = np.random.default_rng(3)
    keys = rng.normal(size=(4, 64, 8)) * np.array([5, 5, 5, 5, 1, 1, 1, 1])
    kept = SKETCHES["sketch, not rounded"].keep(keys)
    assert np.allclose(kept[:, :, 4:], keys[:, :, 4:].mean(axis=1, keepdims=True))
    assert all(len(np.unique(kept[b, :, c].round(9))) == 4 for b in range(4) for c in range(4))


def test_the_best_are_by_the_largest_share_of_any_row() -> None:
    weighed = np.log(np.array([[0.5, 0.1, 0.3, 0.05, 0.05], [0.9e6, 0.01e6, 0.01e6, 0.08e6, 0.0]]) + 1e-30)
    assert best(weighed, 2).tolist() == [2, 1]
    assert best(weighed, 3).tolist() == [2, 1, 3]


def test_random_blocks_are_others_each_time() -> None:
    choice = by_chance(5)
    q = np.zeros((2, 4))
    a, b = choice.weigh(q, 30, 1.0), choice.weigh(q, 30, 1.0)
    assert a.shape == (2, 30) and np.array_equal(a[0], a[1]) and not np.array_equal(a, b)


def test_shares_and_evidence() -> None:
    assert [chosen_of(share, 8192) for share in (5, 10, 20, 50)] == [1, 8, 21, 59]
    assert chosen_of(10, 700) == 1
    asked = [Asked(np.zeros(1, np.int32), np.zeros(1, np.int32), ((b, e),)) for b, e in
             ((64, 70), (63, 70), (440, 448), (440, 449))]  # fmt: skip
    assert [is_far(a, 640 + 5) for a in asked] == [True, False, True, False]
    made = list(cases("keys", LENGTH, 7, 4))
    assert sum(len(some) for _, some in made) == 7 and len(made) >= 2
    assert all(is_far(a, len(case.context)) for case, some in made for a in some)
    again = list(cases("keys", LENGTH, 7, 4))
    assert all(np.array_equal(a[0].context, b[0].context) for a, b in zip(made, again, strict=True))
    with pytest.raises(SystemExit, match="keys: no questions of far evidence"):
        list(cases("keys", 200, 3, 2))


def test_a_reply_is_the_same_with_all_blocks_and_others_with_few(reader: Reader) -> None:
    case, asked = next(cases("agent", LENGTH, 1, 2))
    context, _ = reader.read(case.context)
    reader.keys.forget(len(case.context) // 64)
    fork, first = reader.read(asked[0].prompt, context)
    reply = reader.reply(fork, first)
    assert reply[0] == first and len(reply) > 15
    assert reader.same(fork, first, reply, None) == len(reply)
    assert reader.same(fork, first + 1, reply, None) == 0
    wrong = reply.copy()
    wrong[9] += 1
    assert reader.same(fork, first, wrong, None) == 9
    for choice in CHOICES.values():
        assert reader.same(fork, first, reply, Part(30), choice) == len(reply)
    few = {name: reader.same(fork, first, reply, Part(1), choice) for name, choice in CHOICES.items()}
    assert min(few.values()) < len(reply)
    assert few == {name: reader.same(fork, first, reply, Part(1), CHOICES[name]) for name in few} | {
        "random": few["random"]
    }
    reader.drop(fork)
    reader.drop(context)


def test_layers_read_what_another_one_chose() -> None:
    rng, caches = np.random.default_rng(6), [SimpleNamespace(k=np.zeros(1)) for _ in range(5)]
    chosen = [(rng.random((2, 3, 9)) < 0.5).astype(np.uint8) for _ in caches]
    for one in chosen:
        one[:, :, 0] = one[:, :, 6:] = 1

    def read(way: Layers) -> list[np.ndarray]:
        told = [one.copy() for one in chosen]
        for _ in "ab":  # of two steps; an array's address is its layer
            for kv, one in zip(caches, told, strict=True):
                way.told(kv, one)
        return told

    def same(way: Layers) -> list[int]:
        """Of each layer, whose choice it reads; -1: nobody's."""
        return [next((i for i, own in enumerate(chosen) if (own == one).all()), -1) for one in read(way)]

    assert same(Layers(9)) == [0] * 5 and same(Layers(2)) == [0, 0, 2, 2, 4] and same(Layers(2, 1)) == [0, 1, 1, 3, 3]
    assert same(Layers(2, 3, latest=True)) == [0, 1, 2, 3, -1]
    latest = read(Layers(2, 3, latest=True))[4]
    assert (latest.sum(axis=2) == chosen[4].sum(axis=2)).all()
    for row in latest.reshape(-1, 9):
        n = int(row.sum())
        assert row[0] == 1 and row[9 - n + 1 :].all()


def test_what_is_left_out_is_counted(reader: Reader) -> None:
    case, asked = next(cases("keys", LENGTH, 1, 2))
    context, _ = reader.read(case.context)
    fork, _ = reader.read(asked[0].prompt, context)
    left = {}
    for name in ("exact", "random"):
        seen = Seen()
        with choosing(CHOICES[name], 3, Keys(), seen):
            sequence = reader.loaded.begin(fork)
            reader._likeliest(sequence, asked[0].answer[:6], Part(3), 6)
            sequence.release()
        blocks = (len(case.context) + len(asked[0].prompt)) // 64 + 1
        assert len(seen.true) == len(seen.estimated) == 2 * 6 * 4
        assert seen.read == pytest.approx([(3 + 1 + TAIL_BLOCKS + 1) / blocks] * 12)
        left[name] = np.mean(seen.true)
    assert 0 < left["exact"] < left["random"] < 1
    reader.drop(fork)
    reader.drop(context)


def test_a_table_has_every_way_and_share(model: Path) -> None:
    rows = measure(Plan(model, LENGTH, 2, 2, ("4 means", "random"), 1), "agent")
    assert [(r["choice"], r["share"]) for r in rows] == [
        ("all", None), *((name, share) for name in ("4 means", "random") for share in recall_quality.SHARES)
    ]  # fmt: skip
    assert all(r["cases"] == 2 and r["task"] == "agent" for r in rows)
    assert rows[0]["right"] == 0.0 and rows[0]["differs_at"] is not None  # it was never trained
    assert all(0 < r["read"] < 1 for r in rows[1:]) and rows[1]["bytes_share"] == BYTES["4 means"]
    made = {"rows": rows, "length": LENGTH, "model": "m.gguf", "bytes": 2_000_000, **verdict(rows)}
    made |= {"commit": "0" * 40, "versions": {}, "host": {"gpu": None, "cpu": "c"}, "command": "x", "created": "today"}
    text = "\n".join(recall_quality_section("recall_quality.json", made))
    assert "1,600 tokens by m.gguf (2.0 MB" in text and "| agent | 0.0% | random |" in text


def test_a_row_says_where_answers_differ() -> None:
    fared = Fared()
    for same, tokens in ((5, 5), (2, 5), (4, 9), (9, 9)):
        fared.add(same, tokens, 0.25)
    row = fared.row("keys", "2 bits", 10)
    assert (row["right"], row["differs_at"], row["cases"], row["read"]) == (0.5, 3.0, 4, 0.25)


def test_the_verdict_is_what_the_tables_say() -> None:
    def row(task: str, choice: str, share: int | None, right: float) -> dict[str, Any]:
        return {"task": task, "choice": choice, "share": share, "right": right}

    rows = [row("keys", c, 10, r) for c, r in (("one mean", 0.5), ("2 bits", 0.75), ("4 bits", 0.7), ("exact", 0.9))]
    rows += [row("keys", "4 bits", 20, 1.0), row("keys", "all", None, 1.0)]
    rows += [row("turns", c, 10, r) for c, r in (("one mean", 0.5), ("extremes", 0.25), ("random", 0.8))]
    rows += [row("agent", "2 bits", s, r) for s, r in ((5, 0.98), (10, 0.99), (20, 1.0))]
    rows += [row("agent", "one mean", s, 0.9) for s in (5, 10)] + [row("agent", "all", None, 1.0)]
    found = verdict(rows)
    ahead = {"choice": "2 bits", "points": 25.0}, {"choice": "extremes", "points": -25.0}
    assert found["ahead"] == dict(zip(("keys", "turns"), ahead, strict=True))
    assert found["agree"] == {"2 bits": 10, "one mean": None}
