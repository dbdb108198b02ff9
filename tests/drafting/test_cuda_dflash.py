"""A DFlash drafter on a device: near the float64 twin, its ring goes round as on the host, and drafts are captured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.drafting.dflash import DFlash, Drafter, drafter_limits
from engine.drafting.drafter import open_drafter
from engine.ops.cuda import ops
from engine.running import device_drafts
from engine.running.device_drafts import CapturedDrafter
from engine.running.forward import placed
from tests.dflash_twin import Shape, random_drafter, twin_logits, write_drafter
from tests.drafting.test_dflash import EMBEDDING, HEAD, MODEL, features
from tests.gguf_files import qtensor
from tests.tiny_models import nmse

SHAPE = Shape(head_dim=64, n_ff=512, window=60, windowed=(True, False, True))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_drafts_are_near_the_twin(device: Any, tmp_path: Path, causal: bool) -> None:
    shape = replace(SHAPE, causal=causal)
    tensors = random_drafter(shape, np.random.default_rng(3))
    write_drafter(tmp_path / "d.gguf", shape, tensors, qtype=QType.Q8_0)
    config, weights = open_drafter(tmp_path / "d.gguf", MODEL)
    ends = [
        placed(qtensor(values, QType.Q8_0, name), device.upload) for name, values in (("e", EMBEDDING), ("h", HEAD))
    ]
    n_ctx = 600
    ws = ops.workspace(drafter_limits(config, MODEL.n_vocab, n_ctx), device)
    drafter = Drafter(device, ops, ws, config, placed(weights, device.upload), ends[0], ends[1], n_ctx)
    for n in (3, 130):
        values = features(n)
        ring, kept = drafter.ring(), device.upload(values.copy())
        assert ring is not None
        for a, b in ((0, n - 2), (n - 2, n)):
            drafter.feed(ring, [kept[k][a:b] for k in range(len(values))], a)
        expected = twin_logits(shape, tensors, values, 5, EMBEDDING, HEAD)
        assert nmse(np.asarray(device.read(drafter.logits(ring, 5, 6))), expected) < 3e-3
        assert len(drafter.draft(ring, 5, 4)) == 4
        drafter.give_back(ring)
    ws.close()


# --- captured -----------------------------------------------------------------------------------------

WHOLE = np.concatenate([HEAD, HEAD[:3] + 1.0])  # 304 rows: whole vectors, as published models have them


def captured(device: Any, path: Path, shape: Shape = SHAPE, n_rings: int = 2) -> CapturedDrafter:
    write_drafter(path, shape, random_drafter(shape, np.random.default_rng(3)), qtype=QType.Q8_0)
    config, weights = open_drafter(path, MODEL)
    ends = [
        placed(qtensor(values, QType.Q8_0, name), device.upload) for name, values in (("e", EMBEDDING), ("h", WHOLE))
    ]
    ws = ops.workspace(drafter_limits(config, len(WHOLE), 600), device)
    return CapturedDrafter(device, ops, ws, config, placed(weights, device.upload), *ends, 600, n_rings)


def told(drafter: CapturedDrafter, device: Any, values: np.ndarray, first: int, last: int, step: int = 3) -> DFlash:
    """A reply's source, told of features from a position on, a few at a time."""
    ring = drafter.ring()
    assert ring is not None
    source = DFlash(drafter, ring)
    for a in range(first, last, step):
        part = np.ascontiguousarray(values[:, a : min(a + step, last)])
        source.feed([device.upload(feature) for feature in part], a)
    return source


def drafts_of(drafter: CapturedDrafter, source: DFlash, end: int, n: int, device: Any) -> tuple[int, ...]:
    """What the source drafts behind `end` positions, as the host has it when the device has been waited for."""
    assert source.promise([5] * (end + 1), n) is not None
    draft = source.draft(n)
    assert draft is not None
    device.synchronize()
    if draft.drawn is not None:
        assert draft.made_s is not None and [*device.read(draft.drawn)] == [*draft.tokens]
    return tuple(draft.tokens)


def largest(drafter: CapturedDrafter, source: DFlash, n: int, device: Any) -> tuple[int, ...]:
    """The same by logits that the host reads."""
    logits = np.asarray(device.read(drafter.logits(source._ring, 5, n)))
    return tuple(int(i) for i in logits.argmax(axis=1))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_captured_drafts_are_those_of_the_logits(
    device: Any, tmp_path: Path, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any length of a draft, in two rings by turns, behind prefixes whose features nobody has."""
    monkeypatch.setattr(device_drafts, "TIMED", 0)
    drafter = captured(device, tmp_path / "d.gguf", replace(SHAPE, causal=causal))
    values = features(330)
    for firsts in ((0, 90), (64, 301)):
        sources = [told(drafter, device, values, first, first + 29) for first in firsts]
        for n in (1, 2, 3, 4, 6):
            for source, first in zip(sources, firsts, strict=True):
                assert drafts_of(drafter, source, first + 29, n, device) == largest(drafter, source, n, device)
        for source in sources:
            source.close()
    assert drafter.ring() is not None


@pytest.mark.slow
def test_how_sure_it_is_follows_from_the_logits(device: Any, tmp_path: Path) -> None:
    """The same tokens, which the host has at once, of blocks that are longer than what a sampler keeps as a rule."""
    for block in (7, 12):
        drafter = captured(device, tmp_path / "d.gguf", replace(SHAPE, block=block), n_rings=1)
        source = told(drafter, device, features(60), 0, 51)
        for n in (1, 3, block - 1):
            tokens = drafts_of(drafter, source, 51, n, device)
            assert source.promise([5] * 52, n) is not None
            draft = source.draft(n, sure=True)
            assert draft is not None and draft.drawn is None and draft.tokens == tokens
            logits = np.asarray(device.read(drafter.logits(source._ring, 5, n))).astype(np.float64)
            assert draft.sure == pytest.approx((np.exp(logits).max(1) / np.exp(logits).sum(1)).tolist(), rel=1e-4)
        source.close()


@pytest.mark.slow
def test_no_kernel_is_compiled_while_a_reply_goes_on(device: Any, tmp_path: Path) -> None:
    """A window that grew with what is known behind a prefix would be a kernel for every token."""
    drafter = captured(device, tmp_path / "d.gguf")
    drafter.rehearse()
    known = set(device._kernels)
    values = features(200)
    for first in (0, 37):
        source = told(drafter, device, values, first, first + 3)
        for end in range(first + 3, first + 90, 7):
            drafts_of(drafter, source, end, 1 + end % 5, device)
            assert source.promise([5] * (end + 1), 6) is not None and source.draft(1 + end % 5, sure=True) is not None
            source.feed([device.upload(np.ascontiguousarray(f)) for f in values[:, end : end + 7]], end)
        source.close()
    assert set(device._kernels) == known


@pytest.mark.slow
def test_a_draft_where_tokens_were_taken_back_by_more_than_there_is_room_for(device: Any, tmp_path: Path) -> None:
    shape = replace(SHAPE, window=121, windowed=())
    drafter = captured(device, tmp_path / "d.gguf", shape, n_rings=1)
    assert drafter.ring_tokens == 128
    values = features(400)
    source = told(drafter, device, values, 0, 390, 30)
    drafts_of(drafter, source, 390, 6, device)  # positions 390 to 396, in place of 262 to 268
    source.feed([device.upload(np.ascontiguousarray(f)) for f in values[:, 340:350]], 340)
    tensors = random_drafter(shape, np.random.default_rng(3))
    expected = twin_logits(shape, tensors, values[:, 269:350], 5, EMBEDDING, WHOLE, 269)
    found = drafts_of(drafter, source, 350, 6, device)
    assert nmse(np.asarray(device.read(drafter.logits(source._ring, 5, 6))), expected) < 3e-3
    assert found == largest(drafter, source, 6, device)
    source.close()


@pytest.mark.slow
@pytest.mark.parametrize("own", [("output",), ("output", "d2t")])
def test_heads_that_are_not_the_targets(device: Any, tmp_path: Path, own: tuple[str, ...]) -> None:
    """Of ids that are others, which the host knows alone; and of rows that are no whole vectors."""
    rng = np.random.default_rng(2)
    rows = 48 if "d2t" in own else MODEL.n_vocab
    parts = {"output": rng.standard_normal((rows, SHAPE.n_embd)).astype(np.float32)}
    if "d2t" in own:
        parts["d2t"] = rng.permutation(MODEL.n_vocab)[:rows]
    drafter = captured(device, tmp_path / "d.gguf", replace(SHAPE, own=parts))
    source = told(drafter, device, features(40), 0, 40)
    ids = drafts_of(drafter, source, 40, 3, device)
    found = largest(drafter, source, 3, device)
    assert ids == (tuple(int(parts["d2t"][i]) for i in found) if "d2t" in own else found)
    source.close()
