"""What a drafter learns from: the model as its file has it, what it says next, its layers' residuals, its replies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from check import read_config
from export import load_values, read_values
from model import Layer, Model, rms
from torch import Tensor

READ_TOKENS = 1 << 16  # tokens of prompts that are read at once
ASK_EVERY = 16  # tokens, after which it is asked whether all replies have ended


def load_target(path: Path, device: torch.device, dtype: torch.dtype) -> Model:
    """The model in a GGUF file, whose weights stay as they are; products are computed in `dtype`."""
    model = Model(read_config(path), dtype)
    load_values(model, read_values(path))
    return model.requires_grad_(False).to(device)


@torch.no_grad()
def follow(model: Model, tokens: Tensor, captured: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The likeliest token behind each of tokens [B, S], int64 [B, S], and the features there, [B, S, n * D].

    Features are the residuals that leave the captured layers, side by side, float32.
    """
    left, _, _ = model.residuals(tokens)
    return model.head(left[-1], torch.float32).argmax(-1), torch.cat([left[i] for i in captured], -1)


@torch.no_grad()
def replies(
    model: Model, prompts: Sequence[npt.NDArray[np.integer]], n_tokens: int, stops: Sequence[int], enough: float = 1.0
) -> list[list[int]]:
    """The likeliest reply to each prompt, at most `n_tokens` and up to a stop token, which belongs to it.

    All of them are written at once; enough: the share of ended ones at which the others may be cut.
    """
    device, c = model.output.weight.device, model.c
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    N, P = len(prompts), int(lengths.max())
    shape = (2, N, c.n_head_kv, P + n_tokens, c.head_dim)
    caches = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in model.blk]
    padded = torch.zeros((N, P), dtype=torch.int64)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = torch.from_numpy(np.asarray(prompt, np.int64))
    padded = padded.to(device)
    rope = (model.cos[:P, None], model.sin[:P, None])
    step = max(1, READ_TOKENS // P)
    last = torch.cat([_read(model, padded[a : a + step], a, rope, caches, lengths) for a in range(0, N, step)])
    said, ends = [last], torch.tensor(list(stops), device=device)
    ended = torch.isin(last, ends)
    for n in range(n_tokens - 1):
        if n % ASK_EVERY == 0 and ended.float().mean().item() >= enough:
            break
        last = _next(model, last, lengths + n, P + n + 1, caches)
        ended |= torch.isin(last, ends)
        said.append(last)
    rows: list[list[int]] = torch.stack(said, 1).tolist()
    return [_cut(row, stops) for row in rows]


def _read(
    model: Model, tokens: Tensor, first: int, rope: tuple[Tensor, Tensor], caches: Sequence[Tensor], lengths: Tensor
) -> Tensor:
    """Read prompts [n, P], the rows from `first` on; the tokens [n] behind them."""
    n, P = tokens.shape
    x = F.embedding(tokens, model.token_embd.weight)
    for layer, cache in zip(_layers(model), caches, strict=True):
        q, k, v = layer.heads(rms(x, layer.attn_norm.weight, model.c.rms_eps).to(model.dtype), rope)
        cache[0, first : first + n, :, :P], cache[1, first : first + n, :, :P] = k, v
        x = x + layer.mixed(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        x = x + _experts(model, layer, x)
    ends = x[torch.arange(n, device=x.device), lengths[first : first + n] - 1]
    return model.head(ends, torch.float32).argmax(-1)


def _next(model: Model, last: Tensor, at: Tensor, n_seen: int, caches: Sequence[Tensor]) -> Tensor:
    """The tokens [N] behind `last` [N], which stand at positions `at` [N]; n_seen: of the caches' positions."""
    c, N = model.c, len(last)
    rows = torch.arange(N, device=last.device)
    rope = (model.cos[at][:, None, None], model.sin[at][:, None, None])
    seen = (torch.arange(n_seen, device=last.device) <= at[:, None])[:, None, None]
    x = F.embedding(last[:, None], model.token_embd.weight)
    for layer, cache in zip(_layers(model), caches, strict=True):
        q, k, v = layer.heads(rms(x, layer.attn_norm.weight, c.rms_eps).to(model.dtype), rope)
        cache[0, rows, :, at], cache[1, rows, :, at] = k[:, :, 0], v[:, :, 0]
        keys, values = cache[0, :, :, :n_seen], cache[1, :, :, :n_seen]
        scores = (q.view(N, c.n_head_kv, -1, c.head_dim) @ keys.transpose(2, 3)).float() * c.head_dim**-0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(model.dtype)
        x = x + layer.mixed((weights @ values).reshape(N, c.n_head, 1, c.head_dim))
        x = x + _experts(model, layer, x)
    return model.head(x[:, 0], torch.float32).argmax(-1)


def _experts(model: Model, layer: Layer, x: Tensor) -> Tensor:
    h = rms(x, layer.ffn_norm.weight, model.c.rms_eps).flatten(0, 1)
    return layer.experts(h, model.dtype, None)[0].view(x.shape)


def _layers(model: Model) -> Iterator[Layer]:
    for layer in model.blk:
        assert isinstance(layer, Layer)
        yield layer


def _cut(row: list[int], stops: Sequence[int]) -> list[int]:
    end = next((i for i, token in enumerate(row) if token in stops), len(row) - 1)
    return row[: end + 1]


def all_replies(
    model: Model, prompts: Sequence[npt.NDArray[np.integer]], n_tokens: int, stops: Sequence[int], batch: int,
    until: float | None = None, enough: float = 1.0, tell: Callable[[str], None] = lambda text: None,
) -> dict[int, list[int]]:  # fmt: skip
    """Replies by the number of their prompt, in batches of prompts of like length, in an order that is fixed.

    until: of `time.perf_counter`, after which no further batch is begun. tell: is told how far it is, after each.
    Prompts that leave no room are left out.
    """
    fits = [i for i, prompt in enumerate(prompts) if len(prompt) + n_tokens <= model.c.n_ctx]
    by_length = sorted(fits, key=lambda i: len(prompts[i]))
    batches = [by_length[a : a + batch] for a in range(0, len(by_length), batch)]
    found: dict[int, list[int]] = {}
    for k in np.random.default_rng(0).permutation(len(batches)):
        if until is not None and time.perf_counter() >= until:
            break
        some = batches[k]
        found |= zip(some, replies(model, [prompts[i] for i in some], n_tokens, stops, enough), strict=True)
        tell(f"{len(found):,} of {len(fits):,} replies")
    return found
