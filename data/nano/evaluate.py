"""What the reference model has learned: bits per byte beside simple baselines, copying, routing, samples."""

from __future__ import annotations

import ast
import lzma
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from model import Model
from streams import END, Tokens
from tokenizers import Tokenizer
from torch import Tensor


@torch.no_grad()
def token_bits(model: Model, stream: Tokens, window: int, batch: int = 8) -> tuple[float, npt.NDArray[np.float64]]:
    """Sum of -log2 p over the stream's tokens but the first, and the use of each expert, a share [L, E].

    Windows overlap by half and count their second half, so that every token but the first few sees at
    least half a window of context.
    """
    device = model.output.weight.device
    tokens = torch.from_numpy(stream.astype(np.int64)).to(device)
    half = window // 2
    starts = list(range(0, max(1, len(tokens) - 1 - half), half))
    padded = torch.nn.functional.pad(tokens, (0, window + 1))
    total, uses, weight = 0.0, np.zeros((model.c.n_layer, model.c.n_expert)), 0
    for i in range(0, len(starts), batch):
        part = starts[i : i + batch]
        rows = torch.stack([padded[s : s + window + 1] for s in part])
        logits, used, _ = model(rows[:, :-1])
        nll = torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), rows[:, 1:], reduction="none")
        for start, row in zip(part, nll, strict=True):
            first = 0 if start == 0 else half
            total += row[first : len(tokens) - 1 - start].double().sum().item() / math.log(2)
        uses += used.double().cpu().numpy() * len(part)
        weight += len(part)
    return total, uses / weight


def xz_bits(held_out: bytes, known: bytes = b"") -> float:
    """Bits that xz -9e adds for `held_out`, after it has seen `known` (inside its 256 MiB window)."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 28}]

    def size(data: bytes) -> int:
        return len(lzma.compress(data, lzma.FORMAT_RAW, filters=filters)) if data else 0

    return 8.0 * (size(known + held_out) - size(known))


def bigram_bits(known: npt.NDArray[np.integer], unseen: npt.NDArray[np.integer], symbols: int) -> float:
    """-log2 probability of `unseen` (but its first symbol) by an interpolated Kneser-Ney bigram of `known`."""
    pairs, counts = np.unique(known[:-1].astype(np.int64) * symbols + known[1:], return_counts=True)
    first, second = pairs // symbols, pairs % symbols
    discount = 0.75
    followers = np.bincount(first, minlength=symbols)  # distinct symbols seen after each
    totals = np.bincount(first, weights=counts, minlength=symbols)
    novelty = (np.bincount(second, minlength=symbols) + 1.0) / (len(pairs) + symbols)  # distinct ones seen before
    wanted = unseen[:-1].astype(np.int64) * symbols + unseen[1:]
    at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    seen = np.where(pairs[at] == wanted, counts[at] - discount, 0.0)
    context = unseen[:-1].astype(np.int64)
    backoff = np.where(totals[context] > 0, discount * followers[context], 1.0)
    p = (seen + backoff * novelty[unseen[1:].astype(np.int64)]) / np.maximum(totals[context], 1.0)
    return float(-np.log2(p).sum())


@torch.no_grad()
def copying_accuracy(
    model: Model, stream: Tokens, distance: int | None, seed: int, n: int = 64, shuffled: bool = False
) -> float:
    """How often the likeliest token is the right one in the second copy of a passage of 64 tokens.

    The first copy starts `distance` tokens earlier (None: it is not there, the control); the first 16 tokens of the
    second copy are given and not counted. Passage and what lies between are drawn from `stream`. shuffled: the
    passage's tokens are in random order, so that nothing but the first copy can tell the next one.
    """
    passage, cue = 64, 16
    rng = np.random.default_rng([seed, distance or 0])
    length = distance or min(1024, model.c.n_ctx - passage)
    rows = []
    for _ in range(n):
        start, other = rng.integers(0, len(stream) - length - passage, 2)
        again, before = stream[start : start + passage], stream[other : other + length]
        if shuffled:
            again = rng.permutation(again)
        if distance is not None:
            before = np.concatenate([again, before[passage:]])
        rows.append(np.concatenate([before, again]).astype(np.int64))
    device = model.output.weight.device
    tokens = torch.from_numpy(np.stack(rows)).to(device)
    right = []
    for part in tokens.split(8):
        guess = model(part[:, :-1])[0].argmax(-1)
        right.append((guess == part[:, 1:])[:, -(passage - cue) :].float().mean())
    return float(torch.stack(right).mean())


def routing(uses: npt.NDArray[np.float64]) -> list[dict[str, float]]:
    """Per layer: entropy of the experts' use as a share of the greatest possible, and the extremes.

    uses [L, E]: shares of all uses in the layer.
    """
    rows = []
    for layer, share in enumerate(uses):
        p = share / share.sum()
        entropy = float(-(p[p > 0] * np.log(p[p > 0])).sum() / math.log(len(p)))
        top = float(np.sort(p)[-len(p) // 4 :].sum())
        rows.append(
            {"layer": layer, "entropy": entropy, "least": float(p.min()), "most": float(p.max()), "top_quarter": top}
        )
    return rows


@torch.no_grad()
def sample(
    model: Model, tokenizer: Tokenizer, prompts: Sequence[str], n_tokens: int, temperature: float, seed: int
) -> list[str]:
    """Continuations of the prompts, each up to the first end-of-turn or end-of-document token (no KV cache)."""
    stops = {tokenizer.token_to_id(END), tokenizer.token_to_id("<|im_end|>")}
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt).ids
        begin = len(ids)
        for _ in range(n_tokens):
            logits = model(torch.tensor([ids[-model.c.n_ctx :]], device=model.output.weight.device))[0][0, -1]
            ids.append(_draw(logits.float().cpu(), temperature, generator))
            if ids[-1] in stops:
                break
        texts.append(tokenizer.decode(ids[begin:], skip_special_tokens=False))
    return texts


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    top = logits.topk(40)
    p = (top.values / temperature).softmax(-1)
    return int(top.indices[torch.multinomial(p, 1, generator=generator)])


def parsed_share(text: str) -> float:
    """The share of a text's lines in its longest beginning that is valid Python (a cut last statement is no fault)."""
    lines = text.rstrip().split("\n")
    for kept in range(len(lines), 0, -1):
        try:
            ast.parse("\n".join(lines[:kept]))
        except (SyntaxError, ValueError):
            continue
        return kept / len(lines)
    return 0.0
