"""Check a reference model file against two other programs: `transformers` for logits, `tokenizers` for encoding.

python data/nano/check.py data/nano/nano.gguf
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository: engine

import gguf
from export import load_values, read_values
from model import Config, Model
from streams import Tokens
from tokenizers import Tokenizer


def read_config(path: Path) -> Config:
    """The sizes in a GGUF file's metadata."""
    reader = gguf.GGUFReader(path)

    def value(key: str) -> Any:
        field = reader.get_field(f"qwen3moe.{key}")
        assert field is not None, f"{path.name} has no qwen3moe.{key}"
        return field.contents()

    tokens = reader.get_field("tokenizer.ggml.tokens")
    assert tokens is not None, f"{path.name} has no tokens"
    return Config(
        n_vocab=len(tokens.data),
        n_layer=value("block_count"),
        n_ctx=value("context_length"),
        n_embd=value("embedding_length"),
        n_head=value("attention.head_count"),
        n_head_kv=value("attention.head_count_kv"),
        head_dim=value("attention.key_length"),
        n_expert=value("expert_count"),
        n_expert_used=value("expert_used_count"),
        n_ff_exp=value("expert_feed_forward_length"),
        rope_freq_base=value("rope.freq_base"),
        rms_eps=value("attention.layer_norm_rms_epsilon"),
    )


def _transformers_model(c: Config, values: dict[str, npt.NDArray[np.float32]]) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=c.n_vocab, hidden_size=c.n_embd, num_hidden_layers=c.n_layer, num_attention_heads=c.n_head,
        num_key_value_heads=c.n_head_kv, head_dim=c.head_dim, num_experts=c.n_expert,
        num_experts_per_tok=c.n_expert_used, moe_intermediate_size=c.n_ff_exp, intermediate_size=c.n_ff_exp,
        norm_topk_prob=True, decoder_sparse_step=1, rms_norm_eps=c.rms_eps, tie_word_embeddings=False,
        max_position_embeddings=c.n_ctx, rope_parameters={"rope_type": "default", "rope_theta": c.rope_freq_base},
    )  # fmt: skip
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate_inp": "mlp.gate",
    }  # fmt: skip
    state = {
        "model.embed_tokens.weight": values["token_embd.weight"],
        "model.norm.weight": values["output_norm.weight"],
        "lm_head.weight": values["output.weight"],
    }
    for i in range(c.n_layer):
        ours, theirs = f"blk.{i}.", f"model.layers.{i}."
        state |= {f"{theirs}{new}.weight": values[f"{ours}{old}.weight"] for old, new in names.items()}
        both = [values[f"{ours}ffn_{part}_exps.weight"] for part in ("gate", "up")]
        state[f"{theirs}mlp.experts.gate_up_proj"] = np.concatenate(both, axis=1)
        state[f"{theirs}mlp.experts.down_proj"] = values[f"{ours}ffn_down_exps.weight"]
    model = Qwen3MoeForCausalLM(config).float().eval()
    model.load_state_dict({name: torch.from_numpy(np.array(w)) for name, w in state.items()})
    return model


@torch.no_grad()
def transformers_nmse(path: Path, tokens: Tokens) -> float:
    """Normalised squared error of our logits against Qwen3MoeForCausalLM's, both in float32 on the stored weights."""
    c, values = read_config(path), read_values(path)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    theirs = _transformers_model(c, values)(ids).logits.double()
    model = Model(c, torch.float32)
    load_values(model, values)
    ours = model(ids)[0].double()
    return float((ours - theirs).square().sum() / theirs.square().sum())


def encoding_differences(path: Path, tokenizer: Tokenizer, texts: Sequence[str]) -> int:
    """How many of the texts the engine's tokenizer encodes or decodes differently from the one we trained."""
    from engine.text.tokenizer import load

    ours = load(path)
    different = 0
    for text in texts:
        ids = ours.encode(text, parse_special=True)
        different += ids != tokenizer.encode(text).ids or ours.decode(ids) != text
    return different


def main() -> None:
    arguments = argparse.ArgumentParser(description="Check a reference model file against other programs.")
    arguments.add_argument("model", type=Path)
    path = arguments.parse_args().model
    tokenizer = Tokenizer.from_file(str(path.with_name("tokenizer.json")))
    sources = [p.read_text("utf-8") for p in sorted(Path(__file__).parent.glob("*.py"))]
    written = json.loads(path.with_name("metrics.json").read_text("utf-8"))["samples"]["turns"]
    texts = sources + [turn["prompt"] + turn["expected"] for turn in written] + ["café ☕ 数据\r\n\t 12345 'll <think>"]
    nmse = transformers_nmse(path, np.array(tokenizer.encode(sources[0]).ids[:256], np.uint16))
    different = encoding_differences(path, tokenizer, texts)
    print(f"logits against transformers: NMSE {nmse:.2e}; encodings that differ: {different} of {len(texts)}")
    sys.exit(nmse > 1e-6 or different > 0)


if __name__ == "__main__":
    main()
