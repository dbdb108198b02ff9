"""The shared library of `cpu/`: where it lies, its records and the signatures of its functions.

The counterpart of cpu/spark_cpu.h; engine/ops/cpu.py uses it, engine/ops/jobs.py, engine/placing/simulate.py and
engine/drafting/lookup.py what is theirs.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.resources
from ctypes import c_char_p, c_float, c_int32, c_int64, c_uint8, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from engine.ground.errors import SparkError

ABI = 13  # SPARK_CPU_ABI
BAD_TYPE = 2  # SPARK_BAD_TYPE
ISAS = ("portable", "avx2", "avx512", "avx512vnni")  # worst first, by their numbers in the header
LIBRARY_NAMES = ("libspark_cpu.so", "libspark_cpu.dylib")


# The fields of engine.ops.Limits that the kernels need.
LIMITS = (
    "max_tokens", "n_embd", "n_head_dim", "n_ff", "n_vocab", "n_expert", "n_expert_used", "n_ff_exp", "n_mixed", "n_z",
    "n_head_v",
)  # fmt: skip


class LimitsRecord(ctypes.Structure):
    """spark_limits: engine.ops.Limits."""

    _fields_ = tuple((name, c_int64) for name in LIMITS)


class MatrixRecord(ctypes.Structure):
    """spark_matrix: a weight matrix."""

    _fields_ = (("data", c_void_p), ("rows", c_int64), ("cols", c_int64), ("type", c_int64), ("scale", c_float))


class KVRecord(ctypes.Structure):
    """spark_kv: engine.ops.KVLayer."""

    _fields_ = (
        *((name, c_void_p) for name in ("k", "v", "k_scale", "v_scale")),
        *((name, c_int64) for name in ("n_slots", "n_head_kv", "head_dim", "k_type", "v_type")),
    )


class ExpertsRecord(ctypes.Structure):
    """spark_experts: engine.ops.Experts."""

    _fields_ = (
        ("type", c_int64 * 3),
        ("part_bytes", c_int64 * 3),
        *((name, c_int64) for name in ("n_embd", "n_ff", "n_expert", "n_slots")),
        *((name, c_void_p) for name in ("expert_ptr", "home_ptr", "slot_ptr")),
        ("poison", c_int64),
        ("activation", c_int64),
        ("gate_scale", c_void_p),
    )


class GatingRecord(ctypes.Structure):
    """spark_gating: engine.ops.Gating."""

    _fields_ = (
        ("kind", c_int64),
        ("renormalize", c_int64),
        ("bias", c_void_p),
        ("expert_scale", c_void_p),
        ("scale", c_float),
    )


class DeltaRecord(ctypes.Structure):
    """spark_delta_layer: engine.ops.DeltaLayer."""

    _fields_ = (
        ("conv", c_void_p),
        ("state", c_void_p),
        *((name, c_int64) for name in ("n_states", "kernel", "n_mixed", "n_head_v", "d_v", "d_k")),
    )


class LookRecord(ctypes.Structure):
    """spark_look: a token of a text, and what may follow."""

    _fields_ = (
        ("text", c_void_p),
        *((name, c_int32) for name in ("n_new", "most", "n", "run", "seen", "n_chances")),
        ("least", c_float), ("tokens", c_int32 * 64), ("chances", c_float * 31),
    )


class JobRecord(ctypes.Structure):
    """spark_job of engine/formats/expert_job.h: an expert's work."""

    _fields_ = (
        ("posted", c_uint64), ("back", c_uint64), ("unused", c_uint64 * 6),
        ("source", c_uint64 * 3), ("input", c_uint64), ("input_scales", c_uint64), ("output", c_uint64),
        ("output_scales", c_uint64), ("gate_scale", c_float),
        *((name, c_int32) for name in ("bank", "part", "first", "last", "count")),
        ("token", c_uint8 * 32), ("more", c_uint8 * 16),
        ("answer", c_uint64), ("claimed_ns", c_uint64), ("done_ns", c_uint64),
        ("accepted", c_uint64), ("rest", c_uint64 * 4),
    )  # fmt: skip


class BankRecord(ctypes.Structure):
    """spark_bank: types and shapes of experts that are alike."""

    _fields_ = (("type", c_int64 * 3), ("n_embd", c_int64), ("n_ff", c_int64), ("activation", c_int64))


class JobsPlanRecord(ctypes.Structure):
    """spark_jobs_plan: what a pool of threads is made of."""

    _fields_ = (
        ("ring", c_void_p), ("n_records", c_int64), ("banks", c_void_p), ("n_banks", c_int64), ("cores", c_void_p),
        *((name, c_int64) for name in ("threads", "isa", "max_tokens", "spin_ns", "nap_ns")),
    )  # fmt: skip


STATE_ARRAYS = (
    "slot_begin", "slot_of", "expert_of", "heat", "pinned", "clock", "counts", "hits", "misses",
    "expert_ptr", "home_ptr", "slot_ptr",
)  # fmt: skip


class SlotsRecord(ctypes.Structure):
    """spark_slots: engine.placing.policy.SlotState."""

    _fields_ = (
        *((name, c_void_p) for name in STATE_ARRAYS),
        ("n_layer", c_int64),
        ("n_expert", c_int64),
    )


# The operations. P: a pointer; i: int64; w: int32; f: float. Each takes the workspace first and returns int32.
SIGNATURES = {
    "spark_product": "PPiP",
    "spark_embed": "PPiPf",
    "spark_norm": "PiiPfP",
    "spark_add_norm": "PiiPfPf",
    "spark_attention_input": "PiPfPPPPPPPiiPPPPiPP",
    "spark_attention": "PiiPPiiPPfPiPwwPPP",
    "spark_summarize": "PPPiiP",
    "spark_choose": "PiiiiPiPiiPPPPPfPPPPP",
    "spark_attention_output": "PiPPw",
    "spark_router": "PiPfPPP",
    "spark_route": "PiiPPiPiPPPP",
    "spark_expert_ffn": "PiiPPPPPPw",
    "spark_dense_ffn": "PiPPPPwPw",
    "spark_delta_input": "PiPfPPPPPPPP",
    "spark_delta": "PiPPPPPfPPiPPPP",
    "spark_delta_output": "PiPPifPP",
    "spark_head": "PiPiPfPPf",
}
# Those of texts: what they return, and all their arguments.
TEXTS: dict[str, tuple[type[Any] | None, str]] = {
    "spark_memory_create": (c_void_p, "i"),
    "spark_memory_destroy": (None, "P"),
    "spark_memory_add": (c_int32, "PPi"),
    "spark_text_create": (c_void_p, "PPi"),
    "spark_text_destroy": (None, "P"),
    "spark_text_take": (c_int32, "PPi"),
    "spark_text_propose": (None, "P"),
}
# Those of jobs, likewise.
JOBS: dict[str, tuple[type[Any] | None, str]] = {
    "spark_jobs_create": (c_void_p, "P"),
    "spark_jobs_destroy": (None, "P"),
    "spark_jobs_wake": (None, "Pi"),
    "spark_jobs_dismiss": (None, "P"),
    "spark_jobs_missing": (c_int64, "Pi"),
    "spark_jobs_drain": (c_int32, "Pi"),
    "spark_jobs_reset": (None, "P"),
    "spark_jobs_counts": (None, "PP"),
    "spark_jobs_hold": (None, "Pwi"),
    "spark_job_post": (None, "Piii"),
    "spark_job_take_back": (c_int32, "Pii"),
    "spark_job_wait": (c_int32, "Piii"),
}
_CTYPES = {"P": c_void_p, "i": c_int64, "w": c_int32, "f": c_float}


def library_path() -> Path:
    """Where the compiled kernels are; SparkError where they are not."""
    # An installed wheel has the library inside the package; an editable install only beside its metadata; a source tree
    # that was built and is not installed where it runs has it where it was built.
    package = Path(str(importlib.resources.files("engine")))
    places = [package / "lib"]
    try:
        installed = importlib.metadata.distribution("spark-moe")
        places.append(Path(str(installed.locate_file("engine/lib"))))
    except importlib.metadata.PackageNotFoundError:
        pass
    places += sorted(package.parent.glob("build/py3-none-*"))
    for place in places:
        for name in LIBRARY_NAMES:
            if (place / name).is_file():
                return place / name
    raise SparkError(
        f"the CPU kernels are not built: no {LIBRARY_NAMES[0]} in {' or '.join(str(p) for p in places)}",
        hint="run `make setup` in Spark's source tree, or `pip install .` there (a C++17 compiler is needed)",
    )


@functools.cache
def load() -> ctypes.CDLL:
    """The library with its signatures set; a SparkError when it is missing or of another version."""
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise SparkError(f"the CPU kernels cannot be loaded: {error}", hint="reinstall spark-moe") from error
    found = int(library.spark_abi())
    if found != ABI:
        raise SparkError(f"{path} has interface {found}, this version needs {ABI}", hint="reinstall spark-moe")
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = [c_void_p, *(_CTYPES[a] for a in arguments)]
        function.restype = c_int32
    library.spark_block_types.restype = c_char_p
    library.spark_workspace_create.argtypes = [c_void_p, c_int32, c_int32]
    library.spark_workspace_create.restype = c_void_p
    library.spark_workspace_destroy.argtypes = [c_void_p]
    library.spark_workspace_destroy.restype = None
    library.spark_operation.argtypes = [c_char_p]
    library.spark_operation.restype = c_int64
    library.spark_repeat.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_void_p]
    library.spark_repeat.restype = c_int32
    library.spark_simulate.argtypes = [c_int64 if a == "i" else c_void_p for a in "PiiiPiPiPiiiPP"]
    library.spark_simulate.restype = c_int32
    library.spark_residents.argtypes = [c_int64 if a == "i" else c_void_p for a in "PiiiPiPiiiPiP"]
    library.spark_residents.restype = c_int32
    for name, (result, arguments) in (TEXTS | JOBS).items():
        function = getattr(library, name)
        function.argtypes = [_CTYPES[a] for a in arguments]
        function.restype = result
    library.spark_exp.argtypes = [c_void_p, c_void_p, c_int64, c_void_p]
    library.spark_exp.restype = None
    library.spark_read.argtypes = [c_void_p, c_void_p, c_int64]
    library.spark_read.restype = c_uint64
    return library
