"""DFlash drafters: drafts are those of a float64 twin, at every length of context, and a wrong file is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.drafting.dflash import DFlash, Drafter, drafter_limits
from engine.drafting.drafter import open_drafter
from engine.drafting.source import Promise
from engine.formats.quants import QTensor
from engine.ground.errors import ModelFormatError, SparkError, UnsupportedModelError, WrongModelError
from engine.ops import cpu, reference
from engine.ops.host import HostDevice
from tests.dflash_twin import DIALECTS, Shape, Tensors, random_drafter, twin_logits, write_drafter
from tests.gguf_files import qtensor
from tests.tiny_models import nmse

RNG = np.random.default_rng(7)
PLAIN = Shape()
WINDOWED = Shape(window=100, windowed=(True, False, True))
CAUSAL = Shape(window=70, causal=True, n_rot=20)
MODEL = SimpleNamespace(n_layer=5, n_embd=PLAIN.n_embd, n_vocab=PLAIN.n_vocab)
EMBEDDING = RNG.standard_normal((PLAIN.n_vocab, PLAIN.n_embd)).astype(np.float32)
HEAD = (RNG.standard_normal((PLAIN.n_vocab, PLAIN.n_embd)) / 16).astype(np.float32)
BACKENDS = (cpu, reference)
backends = pytest.mark.parametrize("ops", BACKENDS, ids=lambda m: m.__name__.split(".")[-1])


def features(n: int, shape: Shape = PLAIN) -> np.ndarray:
    """Of n positions: outliers in some channels, as residual streams have them."""
    values = np.random.default_rng(n).standard_normal((len(shape.captured), n, shape.n_embd)).astype(np.float32)
    values[..., ::50] *= 20
    return values


@contextmanager
def drafter(path: Path, ops: ModuleType = cpu, n_ctx: int = 4000, n_rings: int = 1) -> Iterator[Drafter]:
    config, weights = open_drafter(path, MODEL)
    ws = ops.workspace(drafter_limits(config, MODEL.n_vocab, n_ctx), 2)
    embedding, head = qtensor(EMBEDDING, QType.F32, "token_embd"), qtensor(HEAD, QType.F32, "output")
    yield Drafter(HostDevice(), ops, ws, config, weights, embedding, head, n_ctx, n_rings)
    ws.close()


def fed(made: Drafter, values: np.ndarray, cuts: tuple[int, ...] = (), first: int = 0) -> Any:
    ring = made.ring()
    assert ring is not None
    for a, b in zip((0, *cuts), (*cuts, values.shape[1]), strict=True):
        made.feed(ring, values[:, a:b], first + a)
    return ring


def written(path: Path, shape: Shape, arch: str = "dflash", **options: Any) -> Tensors:
    tensors = random_drafter(shape, np.random.default_rng(3))
    write_drafter(path, shape, tensors, arch, **options)
    return tensors


@pytest.mark.slow
@backends
@pytest.mark.parametrize("arch", DIALECTS)
@pytest.mark.parametrize("shape", [PLAIN, WINDOWED, CAUSAL], ids=["plain", "windowed", "causal"])
def test_drafts_are_those_of_the_twin(tmp_path: Path, ops: ModuleType, arch: str, shape: Shape) -> None:
    tensors = written(tmp_path / "d.gguf", shape, arch)
    with drafter(tmp_path / "d.gguf", ops) as made:
        assert made.config.captured == shape.captured
        for n in (1, 5, 63, 64, 69, 99, 100, 101, 128, 150) if ops is cpu else (5, 64, 101):
            values = features(n)
            ring = fed(made, values, () if n < 20 else (n // 3, n - 7))
            expected = twin_logits(shape, tensors, values, 17, EMBEDDING, HEAD)
            assert nmse(made.logits(ring, 17, shape.block - 1), expected) < 1e-6, n
            assert made.draft(ring, 17, 99) == tuple(expected.argmax(1)), n
            assert made.draft(ring, 17, 2) == tuple(expected.argmax(1)[:2]), n
            made.give_back(ring)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [PLAIN, WINDOWED, replace(PLAIN, window=300)], ids=["plain", "mixed", "300"])
def test_a_ring_holds_the_window_and_the_block(tmp_path: Path, shape: Shape) -> None:
    tensors = written(tmp_path / "d.gguf", shape)
    with drafter(tmp_path / "d.gguf") as made:
        assert made.ring_tokens >= max(made.config.reach) + shape.block
        for n in (2047, 2048, 2049, 2500):
            values = features(n)
            expected = twin_logits(shape, tensors, values, 4, EMBEDDING, HEAD)
            for cuts in ((), (1000, 1017), tuple(range(n - 40, n, 5))):
                ring = fed(made, values, cuts)
                for _ in range(2):  # a block is written over by what comes next
                    assert nmse(made.logits(ring, 4, shape.block - 1), expected) < 1e-6, (n, cuts)
                made.give_back(ring)


def test_tokens_taken_back_and_a_prefix_that_was_not_computed(tmp_path: Path) -> None:
    tensors = written(tmp_path / "d.gguf", WINDOWED)
    with drafter(tmp_path / "d.gguf") as made:
        values, others = features(400), features(401)
        ring = fed(made, values[:, :380])
        for end in (390, 395, 388, 400):  # a step of several tokens, of which some stay
            made.feed(ring, others[:, ring.end : end + 5], ring.end)
            made.draft(ring, 1, 6)
            made.feed(ring, values[:, 380:end], 380)
        expected = twin_logits(WINDOWED, tensors, values, 9, EMBEDDING, HEAD)
        assert nmse(made.logits(ring, 9, 6), expected) < 1e-6
        made.give_back(ring)
        for first in (64, 90, 350, 399):
            ring = fed(made, values[:, first:], first=first)
            expected = twin_logits(WINDOWED, tensors, values[:, first:], 9, EMBEDDING, HEAD, first)
            assert nmse(made.logits(ring, 9, 6), expected) < 1e-6, first
            made.give_back(ring)


def test_what_was_written_over_is_not_seen(tmp_path: Path) -> None:
    """A ring that is as small as it can be, and tokens that are taken back by more than it has room for."""
    shape = replace(PLAIN, window=121)
    tensors = written(tmp_path / "d.gguf", shape)
    with drafter(tmp_path / "d.gguf") as made:
        assert made.ring_tokens == 121 + shape.block
        values, others = features(400), features(401)
        for n in (120, 121, 122, 127, 128, 129, 191, 192, 400):  # at once, and in pieces
            for cuts in ((), tuple(range(1, n, 31))):
                ring = fed(made, values[:, :n], cuts)
                expected = twin_logits(shape, tensors, values[:, :n], 9, EMBEDDING, HEAD)
                assert nmse(made.logits(ring, 9, 6), expected) < 1e-6, (n, cuts)
                made.give_back(ring)
        ring = fed(made, others[:, :390])
        made.draft(ring, 3, 6)  # positions 390 to 396, in place of 262 to 268
        made.feed(ring, others[:, 340:350], 340)
        expected = twin_logits(shape, tensors, others[:, 269:350], 9, EMBEDDING, HEAD, 269)
        assert nmse(made.logits(ring, 9, 6), expected) < 1e-6
        made.feed(ring, values[:, :30], 0)  # before all that is there
        expected = twin_logits(shape, tensors, values[:, :30], 9, EMBEDDING, HEAD)
        assert nmse(made.logits(ring, 9, 6), expected) < 1e-6
        made.feed(ring, others[:, 60:70], 60)  # behind it, with a gap
        expected = twin_logits(shape, tensors, others[:, 60:70], 9, EMBEDDING, HEAD, 60)
        assert nmse(made.logits(ring, 9, 6), expected) < 1e-6
        made.give_back(ring)


def test_a_reply_has_a_ring_and_drafts_where_its_features_end(tmp_path: Path) -> None:
    written(tmp_path / "d.gguf", PLAIN)
    with drafter(tmp_path / "d.gguf", n_ctx=60) as made:
        ring = made.ring()
        assert ring is not None and made.ring() is None
        source = DFlash(made, ring)
        assert source.promise([5], 6) is None  # nothing is known
        source.feed(features(3), 0)
        assert source.promise([5, 6, 7, 8], 4) == Promise("dflash", 0, 4, is_block=True)
        found = source.draft(4)
        assert found is not None and found.source == "dflash" and len(found.tokens) == 4
        logits = made.logits(ring, 8, 4).astype(np.float64)
        assert found.sure == pytest.approx((np.exp(logits).max(1) / np.exp(logits).sum(1)).tolist(), rel=1e-5)
        assert source.promise([5, 6, 7], 4) is None and source.promise([5, 6, 7, 8, 9], 4) is None
        assert source.promise([5, 6, 7, 8], 0) is None
        source.feed(features(57), 3)
        assert source.promise(list(range(61)), 4) is None  # the context is full
        source.close()
        assert made.ring() is not None


def test_a_drafter_with_its_own_embedding_head_and_tokens(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    own = {
        "token_embd": rng.standard_normal(EMBEDDING.shape).astype(np.float32),
        "output": rng.standard_normal((45, PLAIN.n_embd)).astype(np.float32),
        "d2t": rng.permutation(PLAIN.n_vocab)[:45],
    }
    values = features(33)
    for names in (("token_embd",), ("output", "d2t"), ("token_embd", "output", "d2t")):
        shape = replace(PLAIN, own={name: own[name] for name in names})
        tensors = written(tmp_path / "d.gguf", shape)
        embedding = own["token_embd"] if "token_embd" in names else EMBEDDING
        head = own["output"] if "output" in names else embedding
        with drafter(tmp_path / "d.gguf") as made:
            rows = twin_logits(shape, tensors, values, 2, embedding, head).argmax(1)
            assert made.draft(fed(made, values), 2, 6) == tuple(own["d2t"][rows] if "d2t" in names else rows)


@pytest.mark.parametrize("qtype", [QType.Q8_0, QType.Q4_0, QType.F16])
def test_quantized_drafters(tmp_path: Path, qtype: QType) -> None:
    shape = replace(PLAIN, n_ff=512)
    tensors = written(tmp_path / "d.gguf", shape, qtype=qtype)
    with drafter(tmp_path / "d.gguf") as a, drafter(tmp_path / "d.gguf", reference) as b:
        values = features(70)
        logits = [made.logits(fed(made, values), 8, 6) for made in (a, b)]
        assert np.array_equal(*logits)
        expected = twin_logits(shape, tensors, values, 8, EMBEDDING, HEAD)
        assert nmse(logits[0], expected) < (0.1 if qtype == QType.Q4_0 else 2e-3)


# --- files that are refused ---------------------------------------------------------------------------

NARROW = Shape(n_embd=224)
REFUSED: dict[str, tuple[dict[str, Any], type[SparkError], str]] = {
    "width": ({"shape": NARROW}, WrongModelError, "is for features of width 224, the model has width 256"),
    "vocabulary": ({"keys": {"dflash.vocab_size": 300}}, WrongModelError, "is for 300 tokens, the model has 301"),
    "layers": (
        {"keys": {"dflash.target_layers": [2, 3, 1, 6]}}, WrongModelError, "for layer 5, the model has layers 0 to 4",
    ),
    "mask": ({"keys": {"dflash.vocab_size": None, "tokenizer.ggml.mask_token_id": 301}}, WrongModelError, "mask token"),
    "mask-beyond": ({"keys": {"tokenizer.ggml.mask_token_id": 301}}, ModelFormatError, "expected one of 301 tokens"),
    "no-mask": ({"keys": {"tokenizer.ggml.mask_token_id": None}}, ModelFormatError, "mask_token_id' is missing"),
    "no-block": ({"keys": {"dflash.block_size": None}}, ModelFormatError, "dflash.block_size' is missing"),
    "no-layers": ({"keys": {"dflash.target_layers": None}}, ModelFormatError, "dflash.target_layers' is missing"),
    "block": ({"keys": {"dflash.block_size": 1}}, ModelFormatError, "block_size is 1, expected at least 2"),
    "few-layers": ({"keys": {"dflash.target_layers": [1, 2]}}, ModelFormatError, "fc.weight has inputs of 4 layers"),
    "twice": ({"keys": {"dflash.target_layers": [1, 2, 2, 3]}}, ModelFormatError, "as many different ones from 1 on"),
    "words": ({"keys": {"dflash.target_layers": ["1", "2", "3", "4"]}}, ModelFormatError, "an array of 4 strings"),
    "eps": ({"keys": {"dflash.attention.layer_norm_rms_epsilon": -1.0}}, ModelFormatError, "number of at least 0"),
    "embedding": ({"keys": {"dflash.target_layers": [0, 1, 2, 3]}}, ModelFormatError, "different ones from 1 on"),
    "fc": ({"keys": {"dflash.embedding_length": 250}}, ModelFormatError, "fc.weight has 1024 inputs"),
    "heads": ({"keys": {"dflash.attention.head_count": 4}}, ModelFormatError, "blk.0.attn_q.weight has shape"),
    "kv": ({"keys": {"dflash.attention.head_count_kv": 4}}, ModelFormatError, "6 heads cannot share 4 KV heads"),
    "bias": ({"extra": {"blk.0.attn_q.bias": np.zeros(5, np.float32)}}, UnsupportedModelError, "blk.0.attn_q.bias"),
    "dspark": ({"extra": {"markov_w1.weight": np.zeros((4, 8), np.float32)}}, UnsupportedModelError, "DSpark drafter"),
    "conf": ({"extra": {"conf_proj.weight": np.zeros((1, 8), np.float32)}}, UnsupportedModelError, "DSpark drafter"),
    "conv": (
        {"extra": {"blk.1.attn_conv_proj.weight": np.zeros((4, 8), np.float32)}}, UnsupportedModelError, "DFlash2",
    ),
    "selector": (
        {"extra": {"selector_hidden.weight": np.zeros((4, 8), np.float32)}}, UnsupportedModelError, "DFlash2 drafter",
    ),
    "anchor": ({"keys": {"dflash.sample_from_anchor": True}}, UnsupportedModelError, "sample_from_anchor true"),
    "scaled": ({"keys": {"dflash.attention.value_scale": 0.7}}, UnsupportedModelError, "attention.value_scale"),
    "sections": ({"keys": {"dflash.rope.dimension_sections": [8, 4, 4, 0]}}, UnsupportedModelError, "[8, 4, 4, 0]"),
    "gelu": ({"keys": {"dflash.hidden_activation": "gelu"}}, UnsupportedModelError, "hidden_activation 'gelu'"),
    "model": ({"keys": {"general.architecture": "qwen3moe"}}, UnsupportedModelError, "expected a drafter: dflash or"),
    "d2t-alone": ({"shape": Shape(own={"d2t": np.arange(9)})}, ModelFormatError, "and no output.weight"),
    "d2t": (
        {"shape": Shape(own={"d2t": np.arange(295, 304), "output": np.zeros((9, 256), np.float32)})}, ModelFormatError,
        "295 to 303, expected 0 to 300",
    ),
    "rows": (
        {"shape": Shape(mask=5, own={"output": np.zeros((9, 256), np.float32)})}, WrongModelError, "is for 9 tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    options, error, words = REFUSED[case]
    shape = options.get("shape", PLAIN)
    written(tmp_path / "d.gguf", shape, **{k: v for k, v in options.items() if k != "shape"})
    with pytest.raises(error) as refused:
        open_drafter(tmp_path / "d.gguf", MODEL)
    assert words in refused.value.message and "\n" not in refused.value.message, refused.value.message


def test_a_missing_size_is_named(tmp_path: Path) -> None:
    for key in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "rope.freq_base",
                "attention.head_count_kv", "attention.layer_norm_rms_epsilon"):  # fmt: skip
        written(tmp_path / "d.gguf", PLAIN, keys={f"dflash.{key}": None})
        with pytest.raises(ModelFormatError, match=f"key 'dflash.{key}' is missing"):
            open_drafter(tmp_path / "d.gguf", MODEL)


def test_a_file_without_a_tensor_or_with_an_end_cut_off(tmp_path: Path) -> None:
    path, tensors = tmp_path / "d.gguf", random_drafter(PLAIN, RNG)
    for name, words in (("fc", "tensor fc.weight is missing"), ("1.attn_k", "tensor blk.1.attn_k.weight is missing")):
        write_drafter(path, PLAIN, {n: t for n, t in tensors.items() if n != name})
        with pytest.raises(ModelFormatError, match=words):
            open_drafter(path, MODEL)
    write_drafter(path, PLAIN, tensors)
    path.write_bytes(path.read_bytes()[:-100_000])
    with pytest.raises(ModelFormatError, match="but the file has"):
        open_drafter(path, MODEL)


def test_weights_outrank_what_an_older_file_counts(tmp_path: Path) -> None:
    """Published ones have the target's number of layers there."""
    arch = DIALECTS[1]
    written(tmp_path / "d.gguf", PLAIN, arch, keys={f"{arch}.dflash.n_target_layers": 60})
    assert open_drafter(tmp_path / "d.gguf", MODEL)[0].captured == PLAIN.captured
    written(tmp_path / "d.gguf", PLAIN, arch, keys={f"{arch}.dflash.target_layer_ids": None})
    with pytest.raises(ModelFormatError, match="target_layer_ids' is missing"):
        open_drafter(tmp_path / "d.gguf", MODEL)


def test_embedding_and_head_are_views_of_the_target(tmp_path: Path) -> None:
    written(tmp_path / "d.gguf", PLAIN)
    config, weights = open_drafter(tmp_path / "d.gguf", MODEL)
    assert weights.token_embd is None and weights.output is None and weights.d2t is None
    assert all(isinstance(part, QTensor) and part.shape == (config.n_embd,) * 2 for part in weights.fc)
