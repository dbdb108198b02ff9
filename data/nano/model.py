"""The reference model in PyTorch: architecture qwen3moe, parameters under the names of their GGUF tensors.

Letters: T tokens, D embd, F expert ff, E experts, A active experts, H heads, K kv heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

COARSE = frozenset({"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_exps", "ffn_up_exps"})  # stored as Q4_K


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes as GGUF metadata names them; rows of what becomes a K-quant are multiples of 256."""

    n_vocab: int
    n_layer: int = 6
    n_ctx: int = 4096
    n_embd: int = 256
    n_head: int = 8
    n_head_kv: int = 2
    head_dim: int = 64
    n_expert: int = 32
    n_expert_used: int = 4
    n_ff_exp: int = 256
    rope_freq_base: float = 1e6
    rms_eps: float = 1e-6


class Weight(nn.Module):
    """One tensor called `<name>.weight`; shape as NumPy has it, the input axis last."""

    def __init__(self, *shape: int, scale: float = 1.0) -> None:
        super().__init__()
        if len(shape) == 1:
            values = torch.full(shape, scale)
        else:
            values = torch.randn(shape) * (scale * shape[-1] ** -0.5)
        self.weight = nn.Parameter(values)


class _Permute(torch.autograd.Function):
    """Rows in another order; the inverse order turns the gradient's scatter into a gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        _, inverse = ctx.saved_tensors
        return grad[inverse], None, None


def q4_k_values(w: Tensor) -> Tensor:
    """The values that Q4_K can hold nearest to `w`, its scales taken from each block's extremes."""
    blocks = w.float().reshape(-1, 8, 32)
    low = blocks.amin(-1).clamp(max=0)
    span = (blocks.amax(-1) - low).clamp(min=1e-8)
    d = (span / 15).amax(-1, keepdim=True) / 63
    dmin = (-low).amax(-1, keepdim=True) / 63
    d, dmin = d.half().float().clamp(min=1e-7), dmin.half().float()
    step = (d * (span / 15 / d).round().clamp(1, 63)).unsqueeze(-1)
    offset = (dmin * (-low / dmin.clamp(min=1e-12)).round().clamp(0, 63)).unsqueeze(-1)
    q = ((blocks + offset) / step).round().clamp(0, 15)
    return (q * step - offset).reshape(w.shape)


class Layer(nn.Module):
    """x += attention(rms(x)); x += experts(rms(x))."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        residual = (2 * c.n_layer) ** -0.5  # so that the residual stream does not grow with depth
        self.attn_norm = Weight(c.n_embd)
        self.attn_q = Weight(c.n_head * c.head_dim, c.n_embd)
        self.attn_k = Weight(c.n_head_kv * c.head_dim, c.n_embd)
        self.attn_v = Weight(c.n_head_kv * c.head_dim, c.n_embd)
        self.attn_q_norm = Weight(c.head_dim, scale=1.5)  # attention must be sharp to find one place in thousands
        self.attn_k_norm = Weight(c.head_dim, scale=1.5)
        self.attn_output = Weight(c.n_embd, c.n_head * c.head_dim, scale=residual)
        self.ffn_norm = Weight(c.n_embd)
        self.ffn_gate_inp = Weight(c.n_expert, c.n_embd)
        self.ffn_gate_exps = Weight(c.n_expert, c.n_ff_exp, c.n_embd)
        self.ffn_up_exps = Weight(c.n_expert, c.n_ff_exp, c.n_embd)
        self.ffn_down_exps = Weight(c.n_expert, c.n_embd, c.n_ff_exp, scale=residual)

    def heads(
        self, x: Tensor, rope: tuple[Tensor, Tensor], rounding: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, D], normed, in the compute type; gives q [B, H, S, head_dim], k and v [B, K, S, head_dim]."""
        c = self.c
        B, S, _ = x.shape
        q = F.linear(x, _cast(self.attn_q, x, rounding)).view(B, S, c.n_head, c.head_dim)
        k = F.linear(x, _cast(self.attn_k, x, rounding)).view(B, S, c.n_head_kv, c.head_dim)
        v = F.linear(x, _cast(self.attn_v, x, rounding)).view(B, S, c.n_head_kv, c.head_dim)
        q = rotate(rms(q, self.attn_q_norm.weight, c.rms_eps), rope).to(x.dtype).transpose(1, 2)
        k = rotate(rms(k, self.attn_k_norm.weight, c.rms_eps), rope).to(x.dtype).transpose(1, 2)
        return q, k, v.transpose(1, 2)

    def attention(self, x: Tensor, rope: tuple[Tensor, Tensor], rounding: Tensor | None) -> Tensor:
        """x [B, S, D], normed, in the compute type; gives [B, S, D]."""
        q, k, v = self.heads(x, rope, rounding)
        return self.mixed(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), rounding)

    def mixed(self, attended: Tensor, rounding: Tensor | None = None) -> Tensor:
        """What all heads [B, H, S, head_dim] read, as [B, S, D]."""
        return F.linear(attended.transpose(1, 2).flatten(2), _cast(self.attn_output, attended, rounding))

    def experts(self, h: Tensor, dtype: torch.dtype, rounding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """h [T, D] float32, normed; gives the output [T, D], uses [E] (a share of T*A), mean probabilities [E].

        Tokens are sorted by expert, so that each projection is one grouped product.
        """
        c = self.c
        T, D = h.shape
        logits = F.linear(h, self.ffn_gate_inp.weight)
        top, chosen = logits.topk(c.n_expert_used, dim=-1)
        weights = top.softmax(-1)  # of the chosen logits alone: the same as renormalising the softmax over all
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        inverse = order.argsort()
        uses = (flat[:, None] == torch.arange(c.n_expert, device=h.device)).sum(0)
        ends = uses.cumsum(0).to(torch.int32)
        rows = h.to(dtype).unsqueeze(1).expand(T, c.n_expert_used, D).reshape(-1, D)
        x = _Permute.apply(rows, order, inverse)
        gate = F.grouped_mm(x, _cast(self.ffn_gate_exps, x, rounding).transpose(1, 2), offs=ends)
        up = F.grouped_mm(x, _cast(self.ffn_up_exps, x, rounding).transpose(1, 2), offs=ends)
        z = F.silu(gate) * up
        y = F.grouped_mm(z, _cast(self.ffn_down_exps, x, rounding).transpose(1, 2), offs=ends)
        y = _Permute.apply(y, inverse, order).view(T, c.n_expert_used, D)
        out = (y * weights.unsqueeze(-1).to(dtype)).sum(1)
        return out, uses / flat.numel(), logits.softmax(-1).mean(0)


class Model(nn.Module):
    """Token ids to logits; `dtype` is what products are computed in, master weights and the residual are float32."""

    def __init__(self, c: Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.c = c
        self.dtype = dtype
        self.token_embd = Weight(c.n_vocab, c.n_embd, scale=8)  # so large that tokens stay apart in deep layers
        self.blk = nn.ModuleList(Layer(c) for _ in range(c.n_layer))
        self.output_norm = Weight(c.n_embd)
        self.output = Weight(c.n_vocab, c.n_embd)
        for name, module in self.named_modules():
            module.coarse = name.rsplit(".", 1)[-1] in COARSE
        angles = torch.arange(c.n_ctx).double()[:, None] * c.rope_freq_base ** (
            -torch.arange(0, c.head_dim, 2).double() / c.head_dim
        )
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(
        self, tokens: Tensor, dropout: float = 0.0, rounding: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """tokens int64 [B, S]; gives logits [B, S, V] in `dtype`, uses [L, E] and mean probabilities [L, E].

        dropout: share of each branch's outputs dropped. rounding: scalar; at 1 the tensors that will be Q4_K are
        rounded to what Q4_K can hold (gradients pass straight through), at 0 nothing is; None skips the work.
        """
        left, uses, probabilities = self.residuals(tokens, dropout, rounding)
        return self.head(left[-1], self.dtype), uses, probabilities

    def head(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits [.., V] of what left the last layer, computed in `dtype`."""
        return F.linear(rms(x, self.output_norm.weight, self.c.rms_eps).to(dtype), self.output.weight.to(dtype))

    def residuals(
        self, tokens: Tensor, dropout: float = 0.0, rounding: Tensor | None = None
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """As `forward`, with what leaves each layer, float32 [B, S, D], in place of the logits."""
        c = self.c
        B, S = tokens.shape
        rope = (self.cos[:S, None], self.sin[:S, None])
        x = F.dropout(F.embedding(tokens, self.token_embd.weight), dropout)
        left, uses, probabilities = [], [], []
        for layer in self.blk:
            h = rms(x, layer.attn_norm.weight, c.rms_eps).to(self.dtype)
            x = x + F.dropout(layer.attention(h, rope, rounding), dropout)
            h = rms(x, layer.ffn_norm.weight, c.rms_eps).view(B * S, c.n_embd)
            out, used, probability = layer.experts(h, self.dtype, rounding)
            x = x + F.dropout(out.view(B, S, c.n_embd), dropout)
            left.append(x)
            uses.append(used)
            probabilities.append(probability)
        return left, torch.stack(uses), torch.stack(probabilities)


def loss(
    model: Model, tokens: Tensor, dropout: float, rounding: Tensor | None, balance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Next-token loss of tokens [B, S + 1] with the balancing loss; then the next-token loss alone and uses [L, E].

    The balancing loss is Switch Transformer's, E * sum over experts of (share of uses * mean probability): 1 when
    all experts are used alike. `balance` is its factor.
    """
    logits, uses, probabilities = model(tokens[:, :-1], dropout, rounding)
    plain = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    uneven = (uses * probabilities).sum(-1).mean() * model.c.n_expert
    return plain + balance * uneven, plain.detach(), uses


def decayed(parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters that weight decay applies to (matrices) and those that it does not (norms)."""
    every = list(parameters)
    return [p for p in every if p.ndim > 1], [p for p in every if p.ndim == 1]


def _cast(module: nn.Module, like: Tensor, rounding: Tensor | None) -> Tensor:
    w: Tensor = module.weight  # type: ignore[assignment]
    if rounding is not None and module.coarse:
        w = w + rounding * (q4_k_values(w.detach()) - w.detach())
    return w.to(like.dtype)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm of the last axis, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """NeoX rotary embedding of x [B, S, heads, head_dim]: pairs are (i, i + head_dim / 2)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = rope
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
