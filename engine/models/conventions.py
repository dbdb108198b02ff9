"""What a file's keys ask for that the model's configuration did not read: refused, unless it changes nothing.

A key that shapes the computation and is ignored is a wrong model that loads without a word. So what is left of those
keys must have a value that stands for "not there": one of `NEUTRAL`, or a zero.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from engine.formats.gguf_header import StringArray, describe
from engine.ground.errors import UnsupportedModelError

# Groups of keys that shape the computation, by how names begin and end, without the architecture's. A key outside of
# them and of the table describes: a size that tensors have anyway, a name.
GROUPS = (
    "rope.", "attention.", "expert", "moe_", "ssm.", "swiglu_", "altup.", "hyper_connection.", "kda.", "ple.",
    "attn_res.", "activation",
)  # fmt: skip
OTHER_SENSES = ("vision.", "audio.")  # whose tensors are left out
SCALES = ("scale", "factor")
ENDINGS = ("softcapping", "multiplier", *SCALES)
ZERO, ONE_OR_ZERO = (0,), (0, 1)
_NAMED = 8  # keys in one error
# The values that change nothing, where they are not 0, or 0 and 1 of a scale; () where none changes anything.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "decoder_sparse_step": ONE_OR_ZERO,
    "embedding_length_per_layer_input": ZERO,
    "expert_gating_func": ONE_OR_ZERO,  # not given, softmax
    "expert_group_count": ONE_OR_ZERO,
    "expert_group_used_count": ONE_OR_ZERO,
    "expert_weights_norm": (True,),
    "full_attention_interval": ONE_OR_ZERO,
    "interleave_moe_layer_step": ONE_OR_ZERO,
    "leading_dense_block_count": ZERO,
    "moe_every_n_layers": ONE_OR_ZERO,
    "norm_top_k_prob": (True,),
    "num_loops": ONE_OR_ZERO,
    "rope.scaling.alpha": ONE_OR_ZERO,
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.finetuned": (),
    # Read with the kinds of scaling that have them.
    "rope.scaling.original_context_length": (),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (),
    "rope.scaling.yarn_beta_slow": (),
    "rope.scaling.yarn_ext_factor": (-1, 1),  # as the kind of scaling says, wholly
    "use_parallel_residual": ZERO,
}


def unsupported_keys(metadata: Mapping[str, Any], architecture: str, read: Collection[str] = ()) -> list[str]:
    """What a header's keys ask for and nobody implements, a line each: key, value, what is supported.

    metadata: of the file. read: keys, without the architecture's name, that its configuration was made from: what
    they ask for was judged there.
    """
    found = []
    for name, value in metadata.items():
        owner, _, key = name.partition(".")
        shapes = key in NEUTRAL or key.startswith(GROUPS) or key.endswith(ENDINGS)
        if owner != architecture or key in read or key.startswith(OTHER_SENSES) or not shapes:
            continue
        neutral = NEUTRAL.get(key, ONE_OR_ZERO if key.endswith(SCALES) else ZERO)
        if neutral and not _is_one_of(value, neutral):
            known = " or ".join(map(str, neutral))
            shown = repr(name)[1:-1][:80]
            found.append(f"{shown} is {_described(value)}, and only {known} is implemented for {architecture}")
    return found


def refuse_unsupported_keys(metadata: Mapping[str, Any], architecture: str, read: Collection[str]) -> None:
    """UnsupportedModelError that names the keys of `unsupported_keys`, the first ones of many."""
    if found := unsupported_keys(metadata, architecture, read):
        more = [f"and {len(found) - _NAMED} keys more"] if len(found) > _NAMED else []
        raise UnsupportedModelError(
            "; ".join(found[:_NAMED] + more),
            hint="ignoring it would compute another model; convert it with llama.cpp's converter",
        )


def mtp_blocks(metadata: Mapping[str, Any], architecture: str) -> range:
    """The blocks after the model proper, which predict tokens after the next one: no part of what is computed here."""
    n_block, n_mtp = (metadata.get(f"{architecture}.{key}", 0) for key in ("block_count", "nextn_predict_layers"))
    return range(n_block - n_mtp, n_block)


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    if isinstance(value, np.ndarray):
        return bool(np.isin(value, neutral).all())
    return not value if isinstance(value, StringArray | str) else value in neutral


def _described(value: Any) -> str:
    return describe(value) if isinstance(value, np.ndarray | StringArray) else repr(value)[:60]
