"""The DFlash drafter in PyTorch, parameters under the names of their GGUF tensors (docs/models.md, "Drafters").

Letters: B rows, S positions of a row, A anchors of a row, b tokens of a block, D width, H heads, K kv heads. An anchor
is the position of a block's first token; a block guesses the b - 1 tokens behind it.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
import torch.nn.functional as F  # noqa: N812
from gguf import GGMLQuantizationType as QType
from model import Model, Weight, decayed, rms, rotate
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

ARCH = "dflash"
DECAY = 7.0  # places in a block, over which a guess's weight in the loss falls to 1/e
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # those that know any mask
MUON_RATE = 10.0  # learning rate of matrices, relative to that of norms
GROUP = 64  # anchors whose blocks attend in one product: more waste masked work, fewer copy more keys


@dataclass(frozen=True, slots=True)
class Shape:
    """A drafter's sizes. captured: layers of the target, from 0. window: positions that a block sees, its first
    token among them. Rows of matrices are multiples of 32."""

    n_vocab: int
    n_embd: int
    mask: int
    captured: tuple[int, ...]
    n_layer: int = 2
    n_head: int = 8
    n_head_kv: int = 2
    head_dim: int = 64
    n_ff: int = 768
    block: int = 8
    window: int = 2048
    rope_freq_base: float = 1e6
    rms_eps: float = 1e-6


class DrafterLayer(nn.Module):
    """x += attention(rms(x)) over the context and the block; x += ffn(rms(x))."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        residual = (2 * s.n_layer) ** -0.5
        q, kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
        self.attn_norm = Weight(s.n_embd)
        self.attn_q, self.attn_k, self.attn_v = Weight(q, s.n_embd), Weight(kv, s.n_embd), Weight(kv, s.n_embd)
        self.attn_q_norm, self.attn_k_norm = Weight(s.head_dim, scale=1.5), Weight(s.head_dim, scale=1.5)
        self.attn_output = Weight(s.n_embd, q, scale=residual)
        self.ffn_norm = Weight(s.n_embd)
        self.ffn_gate, self.ffn_up = Weight(s.n_ff, s.n_embd), Weight(s.n_ff, s.n_embd)
        self.ffn_down = Weight(s.n_embd, s.n_ff, scale=residual)

    def keys(self, h: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of h [.., T, D], each [.., K, T, head_dim]; rope broadcasts to [.., T, 1, head_dim / 2]."""
        s = self.s
        k = _product(h, self.attn_k).unflatten(-1, (s.n_head_kv, s.head_dim))
        v = _product(h, self.attn_v).unflatten(-1, (s.n_head_kv, s.head_dim))
        k = rotate(rms(k, self.attn_k_norm.weight, s.rms_eps), rope).to(h.dtype)
        return k.transpose(-2, -3), v.transpose(-2, -3)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], seen: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """x [B, G, T, D], T tokens of each group's blocks; context: keys and values [B, K, S, head_dim].

        seen [B * G, 1, T, S + T]: 0 where a query looks, minus infinity elsewhere.
        """
        s = self.s
        B, G, T, _ = x.shape
        h = rms(x, self.attn_norm.weight, s.rms_eps).to(dtype)
        q = _product(h, self.attn_q).unflatten(-1, (s.n_head, s.head_dim))
        q = rotate(rms(q, self.attn_q_norm.weight, s.rms_eps), rope).to(dtype).transpose(2, 3).flatten(0, 1)
        both = []
        for before, own in zip(context, self.keys(h, rope), strict=True):
            spread = before[:, None].expand(B, G, *before.shape[1:])
            both.append(torch.cat([spread, own], -2).flatten(0, 1).repeat_interleave(s.n_head // s.n_head_kv, 1))
        with sdpa_kernel(BACKENDS):
            out = F.scaled_dot_product_attention(q, *both, attn_mask=seen)
        x = x + _product(out.transpose(1, 2).flatten(2), self.attn_output).view(B, G, T, -1)
        h = rms(x, self.ffn_norm.weight, s.rms_eps).to(dtype)
        return x + _product(F.silu(_product(h, self.ffn_gate)) * _product(h, self.ffn_up), self.ffn_down)


class _End(nn.Module):
    """What stands before `output_norm` in the name of the features' norm."""

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.output_norm = Weight(n_embd)


class Drafter(nn.Module):
    """Guesses of blocks from a target's features; the embedding and the head are the target's."""

    def __init__(self, s: Shape, n_positions: int) -> None:
        super().__init__()
        self.s = s
        self.fc = Weight(s.n_embd, len(s.captured) * s.n_embd)
        self.enc = _End(s.n_embd)
        self.blk = nn.ModuleList(DrafterLayer(s) for _ in range(s.n_layer))
        self.output_norm = Weight(s.n_embd)
        angles = torch.arange(n_positions + s.block).double()[:, None] * s.rope_freq_base ** (
            -torch.arange(0, s.head_dim, 2).double() / s.head_dim
        )
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    @torch.no_grad()
    def balance(self, features: Tensor) -> None:
        """Let captured layers of all sizes count alike in `fc`, before training; features [.., n * D]."""
        size = features.float().unflatten(-1, (len(self.s.captured), -1)).square().flatten(0, -3).mean((0, 2)).sqrt()
        self.fc.weight.div_(size.clamp(min=1e-6).repeat_interleave(self.s.n_embd))

    def forward(self, target: Model, features: Tensor, tokens: Tensor, anchors: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits [B, A, b - 1, V] in `dtype` of the tokens behind each anchor [B, A], ascending.

        features [B, S, n * D], tokens int64 [B, S]: those before an anchor, and the token there, are all that its block
        is made of.
        """
        s, b = self.s, self.s.block
        B, S, A = *tokens.shape, anchors.shape[1]
        group = min(GROUP, A)
        fill = -A % group  # anchors that fill the last group up
        anchors = F.pad(anchors, (0, fill), value=1) if fill else anchors
        G = anchors.shape[1] // group
        places = anchors[..., None] + torch.arange(b, device=anchors.device)
        blocks = torch.full_like(places, s.mask)
        blocks[..., 0] = tokens.gather(1, anchors)
        x = F.embedding(blocks, target.token_embd.weight).reshape(B, G, group * b, s.n_embd)
        rope = tuple(table[places].reshape(B, G, group * b, 1, -1) for table in (self.cos, self.sin))
        seen = self._seen(anchors.view(B * G, group), S, dtype)
        c = rms(_product(features.to(dtype), self.fc), self.enc.output_norm.weight, s.rms_eps).to(dtype)
        before = (self.cos[:S, None], self.sin[:S, None])
        for layer in self.blk:
            x = layer(x, rope, layer.keys(c, before), seen, dtype)
        guesses = x.view(B, G * group, b, s.n_embd)[:, :A, 1:]
        h = rms(guesses, self.output_norm.weight, s.rms_eps).to(dtype)
        return F.linear(h, target.output.weight.to(dtype))

    def _seen(self, anchors: Tensor, S: int, dtype: torch.dtype) -> Tensor:
        """Anchors [N, group]; gives [N, 1, group * b, S + group * b], 0 where a token of a block looks."""
        group, b = anchors.shape[1], self.s.block
        at = torch.arange(S, device=anchors.device)
        first = anchors[..., None]
        context = (at < first) & (at > first - self.s.window)
        own = torch.eye(group, dtype=torch.bool, device=anchors.device).repeat_interleave(b, 1)
        looks = torch.cat([context, own.expand(len(anchors), -1, -1)], -1).repeat_interleave(b, 1)
        nothing = torch.zeros((), dtype=dtype, device=anchors.device)
        return torch.where(looks, nothing, float("-inf"))[:, None]


def labels(greedy: Tensor, tokens: Tensor, anchors: Tensor, block: int, stop: int) -> tuple[Tensor, Tensor]:
    """What the target says behind each anchor: tokens and whether they are known, each [B, A, block - 1].

    greedy [B, S]: the likeliest token behind each of tokens [B, S]. As long as the text is what the target would have
    said, `greedy` along the text is its own continuation; the first place where they differ still has a known token,
    and those behind it have none. Behind a `stop` token nothing is known either.
    """
    places = anchors[..., None] + torch.arange(block - 1, device=anchors.device)
    said = greedy.gather(1, places.flatten(1)).view_as(places)
    text = tokens.gather(1, (places + 1).flatten(1)).view_as(places)
    goes_on = ((said == text) & (text != stop)).cumprod(-1)
    return said, F.pad(goes_on[..., :-1], (1, 0), value=1).bool()


def guess_loss(logits: Tensor, said: Tensor, known: Tensor) -> Tensor:
    """Cross entropy of guesses [B, A, b - 1, V], weighted by exp(-(k - 1) / DECAY) for place k, over known tokens."""
    weights = torch.exp(torch.arange(said.shape[-1], device=said.device) / -DECAY) * known
    entropy = F.cross_entropy(logits.flatten(0, 2).float(), said.flatten(), reduction="none").view_as(weights)
    return (entropy * weights).sum() / weights.sum().clamp(min=1)


class Optimizer:
    """Muon for the matrices, AdamW for the norms; one learning rate of AdamW's size for both."""

    def __init__(self, drafter: Drafter, rate: float, cuda: bool) -> None:
        self.drafter, self.rate = drafter, rate
        matrices, norms = decayed(drafter.parameters())
        self.muon = torch.optim.Muon(matrices, lr=0.0, momentum=0.95, weight_decay=0.1)
        self.adamw = torch.optim.AdamW(norms, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=cuda)

    def step(self, factor: float) -> Tensor:
        """One step at `factor` times the learning rate, by the gradients, which are cleared; gives their norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        for optimizer, ratio in ((self.muon, MUON_RATE), (self.adamw, 1.0)):
            for group in optimizer.param_groups:
                group["lr"] = self.rate * ratio * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm


def _product(x: Tensor, module: nn.Module) -> Tensor:
    w: Tensor = module.weight  # type: ignore[assignment]
    return F.linear(x, w.to(x.dtype))


def write_drafter(path: Path, drafter: Drafter, name: str) -> None:
    """Write a GGUF file, atomically: matrices in Q8_0, norms in F32, the rest is the target's."""
    s = drafter.s
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        unfinished = Path(folder) / path.name
        writer = gguf.GGUFWriter(unfinished, ARCH)
        writer.add_name(name)
        writer.add_description("Drafter for the reference model of Spark, trained on the Python standard library")
        writer.add_license("PSF-2.0")
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_block_count(s.n_layer)
        writer.add_embedding_length(s.n_embd)
        writer.add_feed_forward_length(s.n_ff)
        writer.add_head_count(s.n_head)
        writer.add_head_count_kv(s.n_head_kv)
        writer.add_key_length(s.head_dim)
        writer.add_value_length(s.head_dim)
        writer.add_layer_norm_rms_eps(s.rms_eps)
        writer.add_rope_freq_base(s.rope_freq_base)
        writer.add_vocab_size(s.n_vocab)
        writer.add_sliding_window(s.window)
        writer.add_array(f"{ARCH}.attention.sliding_window_pattern", [True] * s.n_layer)
        writer.add_uint32(f"{ARCH}.block_size", s.block)
        writer.add_array(f"{ARCH}.target_layers", [i + 1 for i in s.captured])
        writer.add_mask_token_id(s.mask)
        for tensor, parameter in drafter.named_parameters():
            w = parameter.detach().float().cpu().numpy()
            if w.ndim == 1:
                writer.add_tensor(tensor, w)
            else:
                writer.add_tensor(tensor, gguf.quantize(w, QType.Q8_0), raw_dtype=QType.Q8_0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
