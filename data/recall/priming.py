"""Weights to begin with: heads that look for the place where the last words stood before, and say what followed there.

Training finds such heads by itself, after many tokens in which nothing seems to be learned; so they are laid
out, and everything is learned on from there. The residual stream begins in four parts: one direction that all tokens
share, their own words, and room for the word before and for the one before that.

- Layer 0: the KV heads attend by position alone, to the token before and to the second before, and write their words.
- Layer 1: the first KV head compares a token's word with the words before others, the second one also the word before
  with the words before those. What follows the place that is found is written where words are.

Comparing has only the channels that turn by less than a radian over the whole context, attending by position only those
that turn fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from data.nano.model import Model

WORD, SHARED = 8.0, 8.0  # norms of a token's own part, and of what all share
FAST = 0.05  # radians a position
SHARP = 2.5, 2.0  # weights of the norms of Q and K, in layer 0 and 1
COPY = 3.0  # how loud what was found is
QUIET = 0.2  # of what begins random, beside what is laid out


def _orthogonal(rows: int, columns: int) -> Tensor:
    """Random rows [rows, columns], orthonormal."""
    return torch.linalg.qr(torch.randn(columns, rows))[0].T


@torch.no_grad()
def primed(model: Model) -> Model:
    """Lay the heads out in the first two layers of a model; random numbers are torch's.

    It has two layers and KV heads at least, and a residual stream of more than three heads' width.
    """
    c = model.c
    D, d, group = c.n_embd, c.head_dim, c.n_head // c.n_head_kv
    assert c.n_layer > 1 and c.n_head_kv > 1 and 3 * d < D, c
    basis = _orthogonal(D, D)
    shared, before, second, words = basis[:1], basis[1 : d + 1], basis[d + 1 : 2 * d + 1], basis[2 * d + 1 :]
    own = torch.randn(c.n_vocab, len(words)) @ words
    own = WORD * own / own.norm(dim=1, keepdim=True)
    model.token_embd.weight.copy_(own + SHARED * shared)
    model.output.weight.copy_(own / WORD)
    for layer in model.blk:
        layer.ffn_down_exps.weight.mul_(QUIET)

    turns = c.rope_freq_base ** (-torch.arange(0, d, 2).double() / d)
    fast, slow = turns > FAST, turns * c.n_ctx < 1.0
    read = _orthogonal(d, len(words)) @ words
    scale = (WORD**2 + SHARED**2) ** 0.5 / D**0.5  # what is written is as loud as the word that was read
    first, match = model.blk[0], model.blk[1]
    for layer, sharp in zip((first, match), SHARP, strict=True):
        layer.attn_output.weight.mul_(QUIET)
        layer.attn_q_norm.weight.fill_(sharp)
        layer.attn_k_norm.weight.fill_(sharp)
        for part in (layer.attn_q, layer.attn_k):
            part.weight.mul_(QUIET * 0.5)

    def add(weight: Tensor, head: int, rows: Tensor) -> None:
        weight[head * d : (head + 1) * d].add_(rows)

    for head, room in ((0, before), (1, second)):
        angle = (head + 1) * turns
        found = torch.cat([angle.cos() * fast, angle.sin() * fast]).float()
        asked = torch.cat([fast, torch.zeros_like(fast)]).float()
        for query in range(head * group, (head + 1) * group):
            add(first.attn_q.weight, query, asked[:, None] * shared)
        add(first.attn_k.weight, head, found[:, None] * shared)
        first.attn_v.weight[head * d : (head + 1) * d] = read
        first.attn_output.weight[:, head * group * d : (head * group + 1) * d].add_(scale * room.T)

    steady = torch.cat([slow, slow]).nonzero().flatten()
    one, two = torch.zeros(d, d), torch.zeros(d, d)
    one[steady], two[steady] = _orthogonal(d, d)[: len(steady)], _orthogonal(d, d)[: len(steady)]
    keys = one @ before, one @ before + two @ second
    queries = one @ read, one @ read + two @ before
    said = _orthogonal(d, len(words)) @ words
    for head in (0, 1):
        for query in range(head * group, (head + 1) * group):
            add(match.attn_q.weight, query, queries[head])
        add(match.attn_k.weight, head, keys[head])
        match.attn_v.weight[head * d : (head + 1) * d] = said
        match.attn_output.weight[:, head * group * d : (head * group + 1) * d].add_(COPY * said.T)
    return model
