"""Every kernel that models launch compiles, without a GPU: NVRTC makes machine code of it.

That is done of every kernel for the oldest architecture, the newest and Hopper. What there is besides (types, sizes,
further architectures) is only read and checked, in an eighth of the time: what is wrong with C++ is found so, and what
is not, that a kernel has more shared memory of its own than any GPU, is known from the others.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from benchmarks.full_shape import SHAPES, first_layers, mix_of
from engine.formats.block_types import NATIVE_TYPES
from engine.formats.quants import QTensor
from engine.ground.digest import kernels
from engine.ground.errors import SparkError
from engine.ground.kv_types import pair_of
from engine.memory.residency import ExpertTensors
from engine.models import qwen3moe
from engine.ops.cuda import library
from engine.ops.cuda.counting import CountingDevice
from engine.ops.cuda.device import Module
from engine.running import dryrun
from engine.running.counted import count
from engine.running.recall import Part
from tests.emulated_device import folder
from tests.tiny_models import k_quant_mix

Kernels = dict[Module, set[str]]

# Multiprocessors and KiB of shared memory of a common GPU: launches depend on them, and so do modules.
GPUS = {"sm_80": (108, 163), "sm_86": (84, 99), "sm_89": (128, 99), "sm_90": (132, 227), "sm_120": (170, 99)}
MACHINE_CODE = {"sm_80", "sm_90", "sm_120"}  # sm_86 and sm_89 have what sm_80 has, as far as kernels ask
QWEN3_30B_A3B = qwen3moe.Config(
    n_layer=3, n_embd=2048, n_head=32, n_head_kv=4, head_dim=128, n_expert=128, n_expert_used=8, n_ff_exp=768,
    n_vocab=151936, n_ctx_train=40960, rope_base=1e6, eps=1e-6,
)  # fmt: skip
OTHER = replace(
    QWEN3_30B_A3B, n_layer=1, n_embd=768, n_head=8, n_head_kv=2, head_dim=96, n_expert=17, n_expert_used=5,
    n_ff_exp=256, n_vocab=999,
)  # fmt: skip
pytestmark = pytest.mark.timeout(600)  # a minute in all, where two processors have nothing else to do
OF_A_BENCHMARK = {
    Module("replay.cu"): {"replay", "replay_back"},
    Module("handover.cu"): {"fill", "post", "fold", "mark", "reader"},
}


class FrontEnd(library.Nvrtc):
    """NVRTC, which stops where machine code would be made of what it has read."""

    options = (*library.OPTIONS, "-dlto", "--relocatable-device-code=true")

    def target(self, arch: str) -> str:
        return super().target(arch).replace("sm_", "compute_")

    def _output(self, program: Any, what: str) -> bytes:
        return super()._output(program, "LTOIR" if what == "PTX" else what)


class Shapes:
    """A model file without its bytes."""

    def __init__(self, config: qwen3moe.Config, type_of: Callable[[str], QType]) -> None:
        self.tensors, self.type_of = config.tensors(), type_of
        self.architecture, self.metadata = "of shapes alone", dict[str, Any]()

    def tensor(self, name: str) -> QTensor:
        shape, qtype = self.tensors[name], self.type_of(name)
        block, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
        data = CountingDevice().empty(prod(shape) // block * block_bytes, np.uint8)
        return QTensor(name, qtype, shape, data)


def launched(
    arch: str, config: Any, type_of: Callable[[str], QType], kv_type: Any = "f16", max_tokens: int = 4096,
    module: ModuleType = qwen3moe, change: Callable[[Any], Any] = lambda weights: weights,
    pool_tokens: int | None = None, recall: Part | None = None, guess_hidden: int | None = None,
) -> Kernels:  # fmt: skip
    """The modules that a model's steps of up to `max_tokens` take, and the kernels in them; change: of its weights.

    pool_tokens: of the cache, on the device. recall: None: every token reads all of its context. guess_hidden: as of
    `count`.
    """
    n_sm, shared_kib = GPUS[arch]
    device = CountingDevice(arch, n_sm, shared_kib << 10)
    weights = change(module.load(Shapes(config, type_of), config))
    limits = dryrun.limits_of(config, 8192, max_tokens, 8)
    parts = {"pool_tokens": pool_tokens, "recall": recall, "guess_hidden": guess_hidden, "short_rows": True}
    counted = count(device, module, config, weights, limits, kv_type, **parts)
    found: Kernels = {}
    for source, name in counted.kernels:
        found.setdefault(source, set()).add(name)
    return found


def all_of_type(qtype: QType) -> Callable[[str], QType]:
    return lambda name: QType.F32 if "norm" in name or "ffn_gate_inp" in name else qtype


def with_jobs(kernels: Kernels) -> Kernels:
    """The kernels of experts, one module each, as they are where the CPU computes some of them."""
    chosen = {next(iter(names & {"route", "gate_up", "down_one"}), ""): module for module, names in kernels.items()}
    found = {replace(m, defines=(*m.defines, ("JOBS", "1"))): {name} for name, m in chosen.items() if name}
    experts = dict(chosen["route"].defines)["EXPERTS"]
    long = {"plan_jobs", "hand_rows", "share_experts", "collect_jobs"}
    return found | {Module("long_jobs.cu", (("EXPERTS", experts),)): long}


def of_gpu(arch: str) -> Kernels:
    """All of the reference model on the first GPU; on the others every kernel once."""
    of_model = launched(arch, QWEN3_30B_A3B, k_quant_mix, recall=Part(64), guess_hidden=128)
    kernels = OF_A_BENCHMARK | of_model | with_jobs(of_model)
    if arch == next(iter(GPUS)):
        return kernels
    once = {(module.file, *sorted(kernels[module])): module for module in sorted(kernels)}
    return {module: kernels[module] for module in once.values()}


@cache
def of_families(arch: str) -> Kernels:
    """What the other families take besides: every set of kernels and macros once, whatever the macros' values."""
    known = {(module.file, tuple(name for name, _ in module.defines)) for module in of_gpu(next(iter(GPUS)))}
    found: dict[Any, tuple[Module, set[str]]] = {}
    for shape, pool in (
        ("laguna-xs2", None),
        ("qwen3.6-35b-a3b", None),
        ("gemma-4-26b-a4b", None),
        ("laguna-xs2", 4096),
    ):
        module, config = SHAPES[shape]
        config = first_layers(config, 6)
        recall = None if pool is None else Part(64)
        kernels = launched(
            arch, config, mix_of(config), max_tokens=512, module=module, pool_tokens=pool, recall=recall
        )  # fmt: skip
        for source, names in kernels.items():
            key = source.file, tuple(name for name, _ in source.defines)
            if key not in known:
                found.setdefault(key, (source, names))
    return dict(found.values())


def of_type(qtype: QType) -> Kernels:
    """What weights of one type take besides, in another model, with a cache in 8 bits.

    Of modules that differ in nothing but their macros' values one, and another with each type.
    """
    kernels = launched("sm_80", OTHER, all_of_type(qtype), "q8_0", max_tokens=64)
    alike: dict[Any, list[Module]] = {}
    for module in sorted(kernels):
        names = tuple(name for name, _ in module.defines)
        alike.setdefault((module.file, names, *sorted(kernels[module])), []).append(module)
    turn = NATIVE_TYPES.index(qtype)
    return {module: kernels[module] for modules in alike.values() for module in (modules[turn % len(modules)],)}


@cache
def front_end(max_major: int = sys.maxsize) -> FrontEnd:
    """That of the compiler that `library.find_nvrtc` finds."""
    return FrontEnd(library.find_nvrtc(max_major)._library._name)


def remembered(about: object, stem: str, find: Callable[[], list[bytes]]) -> set[str]:
    """Names that are found, as they are known from an earlier run of the tests.

    As with the emulator's modules, only what would be found again is kept: about is all that it follows from.
    """
    path = folder() / f"{stem}-{hashlib.sha256(repr(about).encode()).hexdigest()[:32]}.kernels"
    if not path.exists():
        names = find()
        own = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        own.write_bytes(b"\n".join(names))
        own.replace(path)
    return set(path.read_text().split())


@cache
def compiled(arch: str, module: Module, names: frozenset[str], nvrtc: library.Nvrtc) -> set[str]:
    """Kernels of a module that compile: those in its machine code, or those of `names` that a front end finds."""
    text, stem = library.source(module), Path(module.file).stem
    if isinstance(nvrtc, FrontEnd):
        text += "".join(f"\nstatic_assert(sizeof(decltype({name})*) > 0);" for name in sorted(names))
    about = nvrtc.version, Path(nvrtc._library._name).stat().st_size, nvrtc.options, nvrtc.target(arch), text

    def find() -> list[bytes]:
        code = nvrtc.compile(text, module, arch)
        if isinstance(nvrtc, FrontEnd):
            return [name.encode() for name in sorted(names)]
        return re.findall(rb"\.text\.(\w+)\0", code)

    return remembered(about, stem, find)


def check(arch: str, kernels: Kernels, nvrtc: library.Nvrtc) -> None:
    """Each module compiles, NVRTC running without the GIL, and has its kernels."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tried = pool.map(lambda m: compiled(arch, m, frozenset(kernels[m]), nvrtc), kernels)
        found = dict(zip(kernels, tried, strict=True))
    for module, names in kernels.items():
        assert names <= found[module], f"{module} lacks {names - found[module]}"


def test_a_front_end_finds_what_is_wrong() -> None:
    module = Module("feed.cu")
    assert compiled("sm_80", module, frozenset({"feed"}), front_end()) == {"feed"}
    with pytest.raises(SparkError, match="fed"):
        compiled("sm_80", module, frozenset({"fed"}), front_end())
    with pytest.raises(SparkError, match="does not compile"):
        front_end().compile(library.source(module) + "static_assert(sizeof(int) == 5);", module, "sm_80")


@pytest.mark.slow
@pytest.mark.parametrize("arch", GPUS)
def test_kernels_compile_for_every_architecture(arch: str) -> None:
    check(arch, of_gpu(arch), library.find_nvrtc() if arch in MACHINE_CODE else front_end())


@pytest.mark.slow
@pytest.mark.parametrize("qtype", NATIVE_TYPES, ids=lambda t: t.name)
def test_kernels_compile_for_every_type(qtype: QType) -> None:
    check("sm_80", of_type(qtype), front_end())


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", ["q4_0", "q8_0,q4_0", "q4_0,f16", "f16,q8_0"])  # q8_0 and f16 are below and above
def test_kernels_compile_for_types_of_the_cache(kv_type: str) -> None:
    kernels = launched("sm_80", OTHER, all_of_type(QType.Q8_0), kv_type, max_tokens=64, recall=Part(64))
    k, v = (("K_TYPE", f"KV_{pair_of(kv_type).k.name.upper()}"), ("V_TYPE", f"KV_{pair_of(kv_type).v.name.upper()}"))
    of_keys = {m for m in kernels if m.file == "summarize.cu" and k in m.defines}
    typed = {m: names for m, names in kernels.items() if {k, v} <= set(m.defines) or m in of_keys}
    assert {module.file for module in typed} == {"attention.cu", "flash.cu", "rope.cu", "summarize.cu"}
    check("sm_80", typed, front_end())


def with_factors(record: Any) -> Any:
    """Weights whose products are all multiplied by something."""
    if isinstance(record, ExpertTensors):
        return replace(record, gate_scale=np.ones(record.gate.shape[0], np.float32))
    if isinstance(record, QTensor):
        return replace(record, scale=0.5) if record.qtype == QType.NVFP4 else record
    if isinstance(record, tuple):
        return tuple(map(with_factors, record))
    if not is_dataclass(record):
        return record
    return replace(record, **{f.name: with_factors(getattr(record, f.name)) for f in fields(record)})


@pytest.mark.slow
def test_kernels_compile_for_products_with_factors() -> None:
    module, config = SHAPES["laguna-xs2"]
    config = first_layers(config, 2)
    kernels = launched("sm_80", config, all_of_type(QType.NVFP4), max_tokens=64, module=module, change=with_factors)
    weighted = {m: names for m, names in kernels.items() if ("WEIGHTED", "1") in m.defines}
    assert {m.file for m in weighted} == {"product.cu", "wide.cu", "experts.cu", "several.cu", "tiled.cu"}
    found = {name for names in weighted.values() for name in names}
    assert found == {"product", "wide", "gate_up", "gate_up_several", "gate_up_dense", "gate_up_tiled"}
    check("sm_80", weighted, front_end())


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_kernels_of_other_families_compile(arch: str) -> None:
    check(arch, of_families(arch), library.find_nvrtc() if arch == "sm_80" else front_end())


@pytest.mark.slow
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "qwen3-30b-a3b"])
def test_every_module_of_published_shapes_compiles(shape: str) -> None:
    """Also what depends on sizes alone: rows may be longer than registers or shared memory hold."""
    module, config = SHAPES[shape]
    config = first_layers(config, 6)
    check("sm_90", launched("sm_90", config, mix_of(config), max_tokens=512, module=module), front_end())


@pytest.mark.slow
def test_the_oldest_compiler_takes_every_file() -> None:
    """It refuses some C++ that the newest accepts; so do compilers between the two."""
    oldest = front_end(max_major=12)
    assert oldest.version == library.OLDEST_NVRTC
    kernels = of_gpu("sm_80") | of_families("sm_80")
    once = {(module.file, *sorted(kernels[module])): module for module in kernels}
    check("sm_80", {module: kernels[module] for module in once.values()}, oldest)


def test_no_file_is_left_out() -> None:
    found = {module.file for module in (*of_gpu("sm_80"), *of_families("sm_80"), *of_type(QType.F16))}
    assert found == {path.name for path in kernels().glob("*.cu")}
    parts = {(module.file, tuple(name for name, _ in module.defines)) for module in of_families("sm_80")}
    assert ("stage.cu", ("N_HEAD",)) in parts
