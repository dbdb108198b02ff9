"""Blocks that draft in a file of their own: the drafts of the block in the model's file, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import models
from engine.drafting.source import Draft
from engine.formats.gguf import open_header
from engine.ground.config import EngineConfig
from engine.ground.errors import ModelFormatError, SparkError, UnsupportedModelError, UsageError, WrongModelError
from engine.ground.sampling import Sampling
from engine.models import sidecar
from engine.placing import plan
from engine.running import draft_files, dryrun, probe
from engine.running.inspection import inspect
from engine.running.loaded import Loaded, load
from engine.running.mtp import Asked, Fed
from engine.running.source import open_source
from engine.running.stepping import Span
from tests.command_line import environment, refused, spark
from tests.dflash_twin import Shape, random_drafter, write_drafter
from tests.formats.test_gguf_malformed import mutate, rewrite
from tests.gguf_files import write_gguf
from tests.nextn_models import FAMILIES, Twin, apart, block_path, parts, states
from tests.telling import Telling, said
from tests.tiny_models import ALL_F32, nmse, tiny_path

TOKENS = np.random.default_rng(7).integers(0, 301, 70).astype(np.int32)
PROMPTS = [TOKENS[:50], TOKENS[20:61]]


def options(model: Path, draft: str | Path = "mtp", **more: Any) -> EngineConfig:
    config = EngineConfig(model=model, device="cpu", threads=2, ctx_tokens=130, chunk_tokens=57, draft=str(draft))
    return replace(config, **more)


def drafted(loaded: Loaded, most: int = 4) -> tuple[Draft, np.ndarray]:
    """A draft behind all but one of TOKENS, and the logits of its last token."""
    assert loaded.predictor is not None
    sequence = loaded.kv.sequence()
    for start, n in ((0, 40), (40, 28), (68, 1)):
        span = Span(sequence, TOKENS[start : start + n], np.ones(n, bool), (n - 1,))
        loaded.steps.run([span])
        loaded.predictor.follow([Fed(span, n, TOKENS)])
    (draft,) = loaded.predictor.drafts([Asked(sequence, TOKENS.tolist(), most)])
    assert draft is not None and len(draft.tokens) == most
    logits = loaded.forward.buffers.logits[0].copy()
    sequence.release()
    return draft, logits


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False], ids=["own-ends", "model's-ends"])
@pytest.mark.parametrize("arch", FAMILIES)
def test_a_float_block_equals_the_twin(tmp_path: Path, arch: str, own: bool) -> None:
    """The twin reads the file that holds both."""
    model, _ = apart(tmp_path, arch, ALL_F32, own)
    loaded = load(options(model))
    draft, logits = drafted(loaded)
    config, T = loaded.source.config, len(TOKENS) - 1
    twin = Twin(config, block_path(arch, ALL_F32, own))
    for state, token in zip(states(config, twin.weights, TOKENS[:T]), TOKENS[1:], strict=True):
        _, state, expected = twin.go_on(state, token)
    for token in draft.tokens[:-1]:
        assert token == expected.argmax()
        _, state, expected = twin.go_on(state, token)
    assert draft.tokens[-1] == expected.argmax() and nmse(logits[None], expected[None]) < 1e-6
    loaded.close()


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False], ids=["ends", "no-ends"])
@pytest.mark.parametrize("arch", FAMILIES)
def test_the_bits_are_those_of_the_block_in_the_models_file(tmp_path: Path, arch: str, ends: bool) -> None:
    """Found beside the model or named, from a folder of its own; and the tokens are those of no drafts."""
    both, named = load(options(block_path(arch))), tmp_path / "of its own"
    named.mkdir()
    model, path = apart(tmp_path, arch, ends=ends)
    found = load(options(model))
    assert found.source.drafts.path == path and f"the block of {path}" in found.reasons[-1]
    other = path.rename(named / "block.gguf")
    alone = load(options(model, other))
    expected = drafted(both)
    sampling = [Sampling(), Sampling(0.9, seed=4)]
    plain = said(both, both.decoder, PROMPTS, sampling, 12)
    for loaded in (found, alone):
        draft, logits = drafted(loaded)
        assert draft == expected[0] and np.array_equal(logits.view(np.uint32), expected[1].view(np.uint32))
        assert loaded.plan() == both.plan() and loaded.kv.groups == both.kv.groups
        for right in ((), plain):
            assert said(loaded, Telling(loaded, 3, right), PROMPTS, sampling, 12) == plain
        loaded.close()
    both.close()


def test_the_block_in_the_models_file_goes_first(tmp_path: Path) -> None:
    apart(tmp_path, "qwen35")
    model = tmp_path / "both.gguf"
    model.write_bytes(block_path("qwen35").read_bytes())
    source = open_source(options(model))
    assert source.block is not None and source.drafts.path is None and source.drafts.block_id == ""
    source.file.close()


def test_of_a_block_that_lacks_tensors_there_may_be_a_whole_one_beside_it(tmp_path: Path) -> None:
    _, metadata, tensors = parts("qwen35")
    model, path = apart(tmp_path, "qwen35")
    write_gguf(model, metadata, {n: v for n, v in tensors.items() if not n.startswith("blk.4.nextn.")})
    source = open_source(options(model))
    assert source.drafts.path == path and not source.warnings
    source.file.close()


def test_kept_prefixes_are_of_one_block(tmp_path: Path) -> None:
    """The name of a file depends on the block's file: another block of the same number leaves other entries."""
    model, path = apart(tmp_path, "qwen35")
    _, another = apart(tmp_path / "..", "qwen35", ALL_F32, name=f"{tmp_path.name}.gguf")
    roots = []
    for draft in ("mtp", path, another, "off"):
        loaded = load(options(model, draft, cache_dir=tmp_path / "cache"))
        assert loaded.prefixes._files is not None
        roots.append(loaded.prefixes._files.root)
        loaded.close()
    assert roots[0] == roots[1] and len(set(roots)) == 3


# --- what is refused ----------------------------------------------------------------------------------


def why_not(config: EngineConfig, kind: type[SparkError]) -> str:
    with pytest.raises(kind) as caught:
        open_source(config)
    assert "\n" not in caught.value.message
    return caught.value.message


def changed(path: Path, arch: str = "qwen35", keys: dict[str, Any] | None = None, **more: Any) -> Path:
    """A sidecar with other keys; more: tensors, None of which are left out."""
    config, metadata, tensors = parts(arch)
    own = {n: v for n, v in tensors.items() if n.startswith(f"blk.{config.n_layer}.") or not n.startswith("blk.")}
    own |= more
    write_gguf(path, metadata | (keys or {}), {n: v for n, v in own.items() if v is not None})
    return path


@pytest.mark.parametrize(
    ("keys", "tensors", "words"),
    [
        ({"qwen35.embedding_length": 128}, {}, "of a model with width 128, this one has 256"),
        ({"qwen35.block_count": 9}, {}, "of a model with layers 8, this one has 4"),
        ({}, {"token_embd.weight": np.ones((77, 256), np.float32)}, "with tokens 77, this one has 301"),
        ({"qwen35.attention.head_count": 9}, {}, "with n_head 9, this one has"),
    ],
)  # fmt: skip
def test_a_block_of_another_model(tmp_path: Path, keys: dict[str, Any], tensors: dict[str, Any], words: str) -> None:
    model, path = apart(tmp_path, "qwen35")
    path.unlink()
    other = changed(tmp_path / "mtp-other.gguf", keys=keys, **tensors)
    if "qwen35.attention.head_count" in keys:  # which its other heads have to divide
        other = changed(other, keys=keys | {"qwen35.attention.head_count_kv": 3})
    assert words in (named := why_not(options(model, other), WrongModelError)) and str(other) in named
    beside = why_not(options(model), UsageError)
    assert beside.startswith("--draft mtp: the file has no block") and words in beside


def test_a_block_of_another_architecture(tmp_path: Path) -> None:
    other = changed(tmp_path / "mtp-other.gguf")
    assert "is of a qwen35 model, this one is qwen35moe" in why_not(
        options(tiny_path("qwen35moe"), other), WrongModelError
    )
    assert "is of a qwen35 model, this one is qwen3moe" in why_not(
        options(tiny_path("qwen3moe"), other), WrongModelError
    )


def test_several_that_fit_are_refused_by_name(tmp_path: Path) -> None:
    model, path = apart(tmp_path, "qwen35")
    path.with_name("mtp-x.gguf").write_bytes(path.read_bytes())
    path.with_name("mtp-y.gguf").write_bytes(block_path("qwen35moe").read_bytes())  # a model
    said = why_not(options(model), UsageError)
    assert "mtp-tiny.gguf and " in said and "mtp-x.gguf each hold a block" in said and "mtp-y" not in said
    open_source(options(model, path)).file.close()


def test_one_that_is_cut_off(tmp_path: Path) -> None:
    model, path = apart(tmp_path, "qwen35")
    whole = path.read_bytes()
    for size, words in ((len(whole) - 2000, "but the file has"), (2000, "its header is longer"), (0, "")):
        path.write_bytes(whole[:size])
        said = why_not(options(model, path), ModelFormatError)
        assert str(path) in said and words in said
        assert str(path) in why_not(options(model), UsageError)
    path.unlink()
    assert why_not(options(model), UsageError).endswith("the file has no block that predicts further tokens")


@pytest.mark.slow
def test_tensors_that_are_missing_or_unknown(tmp_path: Path) -> None:
    model, path = apart(tmp_path, "qwen35")
    changed(path, **{"blk.4.attn_k.weight": None})
    assert "but lacks blk.4.attn_k.weight" in why_not(options(model, path), UsageError)
    changed(path, **{"extra.weight": np.ones(256, np.float32)})
    assert "tensor extra.weight is no part of a block" in why_not(options(model, path), UnsupportedModelError)
    changed(path, **{"blk.4.nextn.bias.weight": np.ones(256, np.float32)})
    assert "blk.4.nextn.bias.weight is not part" in why_not(options(model, path), UnsupportedModelError)
    changed(path, **{"blk.4.nextn.enorm.weight": np.ones(128, np.float32)})
    assert "blk.4.nextn.enorm.weight has shape" in why_not(options(model, path), ModelFormatError)


def test_a_file_that_is_neither_a_drafter_nor_a_block(tmp_path: Path) -> None:
    model, path = apart(tmp_path, "qwen35")
    said = why_not(options(model, block_path("qwen35")), UnsupportedModelError)
    assert "expected a drafter" in said and "in a file of its own" in said
    assert "holds a block that drafts for a model" in why_not(options(path), UnsupportedModelError)


# --- what `auto` would take ---------------------------------------------------------------------------


def test_auto_is_lookup_alone(tmp_path: Path) -> None:
    model, _ = apart(tmp_path, "qwen35")
    source = open_source(options(model, "auto"))
    assert source.block is None and not source.warnings and not draft_files.AUTO_HAS_BLOCKS
    source.file.close()


def test_auto_with_blocks_takes_one_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_files, "AUTO_HAS_BLOCKS", True)
    model, path = apart(tmp_path, "qwen35")
    for at, expected in ((model, path), (block_path("qwen35"), None)):
        source = open_source(options(at, "auto"))
        assert source.block is not None and source.drafts.is_found and source.drafts.path == expected
        assert not source.warnings
        source.file.close()
        assert open_source(options(at, "off")).block is None


@pytest.mark.slow
def test_auto_with_blocks_leaves_out_what_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_files, "AUTO_HAS_BLOCKS", True)

    def warned(at: Path) -> list[str]:
        loaded = load(options(at, "auto"))
        assert loaded.predictor is None and loaded.drafts is not None
        loaded.close()
        return list(loaded.source.warnings)

    assert warned(tiny_path("qwen35")) == []
    model, path = apart(tmp_path, "qwen35")
    whole = path.read_bytes()
    path.write_bytes(whole[:-2000])
    (said,) = warned(model)
    assert said.startswith("no block drafts: ") and str(path) in said
    path.write_bytes(whole)
    path.with_name("mtp-x.gguf").write_bytes(whole)
    (said,) = warned(model)
    assert "each hold a block" in said
    path.unlink()
    changed(tmp_path / "mtp-x.gguf", "qwen35moe")  # another model's, which is nobody's business here
    assert warned(model) == []
    _, metadata, tensors = parts("qwen35")
    for change in ({"blk.4.nextn.eh_proj.weight": None}, {"blk.4.nextn.enorm.weight": np.ones(128, np.float32)}):
        write_gguf(model, metadata, {n: v for n, v in (tensors | change).items() if v is not None})
        (said,) = warned(model)
        assert said.startswith("no block drafts: ") and "blk.4.nextn" in said


@pytest.mark.slow
def test_auto_with_blocks_leaves_out_one_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap that is enough without the block and not with it; asked for by name, the block is refused there."""
    monkeypatch.setattr(probe, "probe", lambda: probe.Missing("none"))
    model, path = apart(tmp_path, "qwen35moe")
    config = EngineConfig(model, "cuda", "lru", ctx_tokens=130, chunk_tokens=40, parallel=1)

    def planned(draft: str, cap_bytes: int) -> dict[str, Any]:
        return dryrun.plan_only(replace(config, draft=draft, vram_gib=cap_bytes / plan.GIB))

    def is_enough(draft: str, cap_bytes: int) -> bool:
        return planned(draft, cap_bytes)["refusal"] is None

    low, high = plan.CONTEXT_BYTES, plan.CONTEXT_BYTES + (64 << 20)
    while high - low > 4096:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough("mtp", middle) else (middle, high)
    assert is_enough("off", low) and not is_enough("mtp", low)
    for cap, has_switch, fits in ((low, True, False), (high, True, True), (high, False, False)):
        monkeypatch.setattr(draft_files, "AUTO_HAS_BLOCKS", has_switch)
        found, expected = planned("auto", cap), planned("mtp" if fits else "off", cap)
        assert found["plan"] == expected["plan"] and found["slots_per_layer"] == expected["slots_per_layer"]
        assert (found["plan"]["drafts_bytes"] > 0) == fits == any(str(path) in r for r in found["reasons"])
        warned = [w for w in found["warnings"] if w.startswith("no block drafts, since with it there is no plan: ")]
        assert len(warned) == (has_switch and not fits) and all("\n" not in w for w in warned)
    monkeypatch.setattr(draft_files, "AUTO_HAS_BLOCKS", True)
    too_small = planned("auto", plan.CONTEXT_BYTES)["refusal"]  # for the model itself: its own least is named
    assert too_small == planned("off", plan.CONTEXT_BYTES)["refusal"] is not None


# --- by its header ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_plan_has_the_block_as_the_models_file_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "probe", lambda: probe.Missing("none"))
    model, path = apart(tmp_path, "qwen35moe")
    path.write_bytes(path.read_bytes()[:-20000])  # it may still be downloading
    config = EngineConfig(model, "cuda", "lru", vram_gib=1.0, ctx_tokens=130, chunk_tokens=40)
    made = [dryrun.plan_only(replace(config, draft=draft)) for draft in ("off", "mtp", str(path))]
    both = dryrun.plan_only(replace(config, model=block_path("qwen35moe"), draft="mtp"))["plan"]
    assert made[1]["plan"] == made[2]["plan"] == both
    assert made[0]["plan"]["drafts_bytes"] == 0 < both["drafts_bytes"]
    assert made[0]["plan"]["device_bytes"] + both["drafts_bytes"] == both["device_bytes"]
    assert "blk.4 drafts" in made[1]["reasons"][0] and str(path) in made[1]["reasons"][0]


@pytest.mark.parametrize("arch", FAMILIES)
def test_inspect_says_what_it_is(tmp_path: Path, arch: str) -> None:
    _, path = apart(tmp_path, arch)
    hidden = environment(CUDA_VISIBLE_DEVICES="-1")
    done = spark("inspect", path.name, "--json", "found.json", cwd=tmp_path, env=hidden)
    for words in ("is a block that drafts", "blk.4", "4 layers of this architecture, width 256", "vocabulary of 301"):
        assert words in done.stdout, (words, done.stdout)
    figures = json.loads((tmp_path / "found.json").read_text())
    assert figures["kind"] == "block" and figures["missing"] == [] and figures["rows"] == []
    assert figures["block"].items() >= {"number": 4, "embedding_length": 256, "vocabulary": 301}.items()
    assert not any(row["role"] == "further tokens" for row in figures["tensors"]) and figures["parameters"] > 0
    assert "is a block that drafts, expected a model" in refused("plan", path.name, cwd=tmp_path, env=hidden)


def test_inspect_says_what_it_lacks(tmp_path: Path) -> None:
    path = changed(tmp_path / "mtp-x.gguf", **{"blk.4.attn_k.weight": None})
    with open_header(path) as file:
        (missing,) = inspect(file).report["missing"]
    assert "lacks blk.4.attn_k.weight" in missing["message"]


@pytest.mark.slow
def test_mutated_headers_are_explained(tmp_path: Path) -> None:
    """Whatever the header says, it is read as a block for some model, or refused with an explanation."""
    rng, read = np.random.default_rng(5), 0
    model, path = apart(tmp_path, "qwen35", ends=False)
    whole = path.read_bytes()
    end = whole.index(b"blk.4.nextn.") + 200
    with open_header(model) as of:
        config = open_source(options(model, "off")).config
        arch = models.find("qwen35")
        for _ in range(1000):
            rewrite(path, mutate(whole, end, rng))
            try:
                draft_files.find(replace(options(model), draft=str(path)), of, arch, config)
                read += 1
            except SparkError:
                pass
            try:
                with open_header(path) as file:
                    inspect(file)
            except SparkError:
                continue
    assert read > 20


def test_a_drafter_is_still_known_by_what_its_file_says(tmp_path: Path) -> None:
    shape = Shape(captured=(2, 0))
    write_drafter(tmp_path / "mtp-d.gguf", shape, random_drafter(shape, np.random.default_rng(0)))
    source = open_source(options(tiny_path("qwen35"), tmp_path / "mtp-d.gguf"))
    assert source.drafter is not None and source.block is None
    with open_header(tmp_path / "mtp-d.gguf") as file:
        assert not sidecar.is_sidecar(file)
    source.file.close()
