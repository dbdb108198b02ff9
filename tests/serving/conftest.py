"""What the tests of whole engines share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import models
from engine.serving.scheduler import Engine
from tests.engine_runs import config
from tests.tiny_models import k_quant_mix, write_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def opened(request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[..., Engine]]:
    """A function that opens an engine; whatever happens in it, no block and no host memory is lost.

    A module's VARIANTS are fields of the tiny models by architecture, ENGINE the class, CTX_TOKENS the context.
    """
    module = request.module
    engines: list[Engine] = []

    def make(device: str = "cpu", arch: str = "qwen3moe", **options: Any) -> Engine:
        if device == "cuda":
            request.getfixturevalue("on_the_device")
        path = folder / f"{arch}.gguf"
        if not path.exists():
            smaller = {"n_layer": 2, "n_expert_used": 3} if arch == "qwen3moe" else {}
            variant = module.VARIANTS.get(arch, {})
            write_tiny(path, k_quant_mix, arch=models.find(arch), variant=variant, n_ctx_train=8192, **smaller)
        options = {"ctx_tokens": module.CTX_TOKENS, "chunk_tokens": 64} | options
        engines.append(module.ENGINE(config(path, device=device, **options)))
        return engines[-1]

    yield make
    for engine in engines:
        assert not engine.busy and len(engine._families) == 0
        engine.loaded.prefixes.clear()
        kv = engine.loaded.kv
        assert kv.free_blocks == kv.n_blocks and engine.loaded.prefixes.host_bytes == 0
        assert kv.states is None or kv.states.free_blocks == kv.states.n_blocks
        engine.close()
