"""What the engine was asked for: one frozen record, shared by the daemon and its clients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Device = Literal["auto", "cuda", "cpu", "reference"]

DEVICES: tuple[Device, ...] = ("auto", "cuda", "cpu", "reference")
DRAFTS = ("auto", "off", "lookup", "mtp")
GUESSES = ("off", "auto", "on", "count")
EXPECT_CTX_TOKENS = 32768  # where nobody says how long contexts are
MAX_CPU_EXPERTS = 1024  # threads
MAX_PARALLEL = 32  # requests that may run at a time: the tokens of the longest step whose rows are independent


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that the daemon's command line sets.

    model: path of the GGUF file (the first part of a split one).
    device: `reference` is the NumPy oracle; `auto` takes CUDA where there is a GPU, else the CPU.
    policy: what the slots do, by the name of its record (engine/placing/policies.py).
    profile: routing counts to place by; None where the policy needs none.
    residency_pct: share of all expert bytes held in slots, pinned and cache together, 0..100. On a GPU, 100 is as
        much as fits, unless the policy has every expert in a slot; a smaller share that does not fit is refused.
    vram_gib: GiB that the whole process may take on a GPU; None: what is free there.
    cache_slots: slots of each layer that are cache, under a policy that goes by evidence; None chooses.
    ctx_tokens: context length; None takes the model's own, bounded by what is sensible.
    kv_pool: how much of the KV cache of full attention is on a GPU, tokens or GiB ("16384", "6GiB"), the rest being at
        home in host memory; "auto": all of it, or what `expect_ctx` tokens take where experts need the memory.
    expect_ctx_tokens: how long contexts mostly are; None: 32,768.
    kv_type: of the KV cache, one of KV_TYPES (engine/ground/kv_types.py).
    chunk_tokens: a prefill step; None: as many as the backend likes.
    parallel: requests that run at a time, up to MAX_PARALLEL; None: sixteen, or as many as leave the memory to experts.
    threads: CPU threads; None takes the physical cores.
    poison: fill evicted slots with NaN (tests of the exactness invariant).
    replay: expert choices (.npy, integers [n_tokens, L, A]) that decoded tokens take in place of the router's, one
        after the other and then from the first again: benchmarks at a chosen miss rate. replay_guesses: of the same
        tokens the experts (.npy, integers [n_tokens, L, 4], -1: none) that are guessed in place of the likeliest.
    prefix_gib: GiB of host memory for prefixes that may come again; 0: what the KV cache itself keeps of them, no more.
    cache_dir: folder that keeps prefixes from one start to the next; None: nowhere.
    cache_dir_gib: GiB of files in that folder.
    exact_prefixes: prompts reuse nothing that was decoded before it has been read as a prompt.
    idle_release_s: seconds without a request after which memory of slots and cache goes back until the next one; None:
        never.
    draft: who proposes tokens that steps check beside the one that is due: `lookup`, nobody (`off`), or beside lookup
        the block that predicts further tokens (`mtp`), of the model's file or of one beside it, or what a file holds,
        by its path: a drafter or such a block. `auto` is what has been shown never to slow a reply: lookup.
    draft_memory_mib: MiB of host memory for the texts of earlier requests that `lookup` looks in; 0: none.
    cpu_experts: on a GPU, missed experts that the CPU computes beside it: `off`, as many threads as there are cores to
        spare (`auto`), or a number of threads.
    guess: what is done about experts that a layer is likely to miss. `auto`, `on`: a GPU brings them while the layer
        before computes, as long as steps are faster so, or in every step (measurements). `count`: on a host, guesses
        are made beside decoding steps and counted, and do nothing else (measurements). `off`: nothing.
    pregate: the file of predictors that guesses are made by; None: the one beside the model, else its own routers.
    kv_recall_blocks: full blocks of 64 positions that decoded tokens read beside the first, the last and what their
        request keeps, unless it says otherwise. kv_recall: the share of softmax mass that they may leave out instead,
        by estimate, 0 to 1; with both as few blocks as that takes, and no more. None, both: all tokens read all.
        kv_recall_from: contexts of up to so many tokens are read whole.
    plan_only: say what memory it would take, and end; no weights are read.
    """

    model: Path
    device: Device = "auto"
    policy: str = "all"
    profile: Path | None = None
    residency_pct: float = 100.0
    vram_gib: float | None = None
    cache_slots: int | None = None
    ctx_tokens: int | None = None
    kv_pool: str = "auto"
    expect_ctx_tokens: int | None = None
    kv_type: str = "f16"
    chunk_tokens: int | None = None
    parallel: int | None = None
    threads: int | None = None
    poison: bool = False
    replay: Path | None = None
    replay_guesses: Path | None = None
    prefix_gib: float = 2.0
    cache_dir: Path | None = None
    cache_dir_gib: float = 32.0
    exact_prefixes: bool = False
    idle_release_s: float | None = None
    draft: str = "auto"
    draft_memory_mib: float = 64.0
    cpu_experts: str = "off"
    guess: str = "off"
    pregate: Path | None = None
    kv_recall: float | None = None
    kv_recall_blocks: int | None = None
    kv_recall_from: int = 0
    plan_only: bool = False

    @property
    def draft_file(self) -> Path | None:
        """The file of a drafter or a block that `draft` names."""
        return None if self.draft in DRAFTS else Path(self.draft)


def is_cpu_experts(text: str) -> bool:
    """Whether a `cpu_experts` can be meant: off, auto, or a number of threads."""
    return text in ("off", "auto") or (text.isdecimal() and text.isascii() and 0 < int(text) <= MAX_CPU_EXPERTS)


def pool_size(text: str) -> tuple[int | None, float | None]:
    """A `kv_pool` as tokens, or as GiB; neither for "auto". ValueError for anything else."""
    if text == "auto":
        return None, None
    if text.endswith("GiB"):
        gib = float(text.removesuffix("GiB"))
        if not 0.0 < gib < 1 << 20:
            raise ValueError(text)
        return None, gib
    tokens = int(text)
    if not 0 < tokens < 1 << 31:
        raise ValueError(text)
    return tokens, None
