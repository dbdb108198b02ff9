"""A DFlash drafter on a device: near the float64 twin, and its ring goes round as on the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.drafting.dflash import Drafter, drafter_limits
from engine.drafting.drafter import open_drafter
from engine.ops.cuda import ops
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
