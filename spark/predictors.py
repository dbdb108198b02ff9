"""What guesses a layer's experts before its router runs, and how good a guess is.

A predictor gives every token one score for each expert; its guess of k experts is the k largest. Recall at k is
the share of active experts among them. Axis letters as in engine: T tokens, D embd, E experts, A active.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import MissingExtraError

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Experts = npt.NDArray[np.uint16]  # [T, A], the largest router weight first
Tensors = Mapping[str, F32]  # of one trained predictor, by the names that the file gives them

_BLOCK_TOKENS = 1024  # tokens at a time where a [T, A, E] comparison would not fit in the cache
_BATCH_TOKENS = 256
_RATES = {"linear": 3e-3, "mlp": 3e-3}  # Adam's step at the beginning; it falls to zero along a cosine
_WEIGHT_DECAY = 1e-2


def rms_norm(x: npt.NDArray[np.float16] | F32, eps: float) -> F32:
    """Rows [T, D] scaled to a mean square of one: what every predictor of the file takes."""
    y = x.astype(np.float32)
    y /= np.sqrt(np.einsum("td,td->t", y, y) / y.shape[1] + eps)[:, None].astype(np.float32)
    return y


def ranks(scores: npt.NDArray[Any], experts: Experts) -> npt.NDArray[np.int64]:
    """How many experts a guess puts before each active one: [T, A]; ties go to the smaller index.

    scores: float [T, E]; minus infinity is no guess at all, and its rank is beyond every k.
    """
    T, E = scores.shape
    out = np.empty(experts.shape, np.int64)
    index = np.arange(E)
    for start in range(0, T, _BLOCK_TOKENS):
        s = scores[start : start + _BLOCK_TOKENS, None, :]
        e = experts[start : start + _BLOCK_TOKENS, :, None].astype(np.int64)
        own = np.take_along_axis(s, e, 2)
        before = (s > own) | ((s == own) & (index < e))
        out[start : start + _BLOCK_TOKENS] = np.where(own[..., 0] == -np.inf, np.iinfo(np.int64).max, before.sum(2))
    return out


def recall(scores: npt.NDArray[Any], experts: Experts) -> tuple[float, float, float]:
    """Share of the active experts among the A, 2A and 3A best guesses, over all tokens."""
    r, A = ranks(scores, experts), experts.shape[1]
    return float((r < A).mean()), float((r < 2 * A).mean()), float((r < 3 * A).mean())


def frequency_scores(experts: Experts, n_expert: int, tokens: int) -> F64:
    """The same guess for all `tokens`: the experts most used by `experts`. Returns float64 [tokens, E]."""
    counts = np.bincount(experts.reshape(-1), minlength=n_expert).astype(np.float64)
    return np.broadcast_to(counts, (tokens, n_expert))


def reuse_scores(experts: Experts, session: npt.NDArray[Any], wanted: npt.NDArray[Any], n_expert: int) -> F64:
    """Guess what the session used last: the previous token's experts by weight, then those of the one before it.

    experts [T, A] and session [T]: every token in trace order. wanted: the tokens (indices, ascending) whose guess
    is returned: float64 [len(wanted), E], minus infinity for an expert that the session has not used yet.
    """
    A = experts.shape[1]
    out = np.empty((len(wanted), n_expert), np.float64)
    for number in np.unique(session[wanted]):
        tokens = np.flatnonzero(session == number)
        rows = np.flatnonzero(session[wanted] == number)
        at = np.searchsorted(tokens, wanted[rows])  # where the wanted tokens are in their session
        last = np.full(n_expert, -np.inf)
        for start in range(0, len(tokens), _BLOCK_TOKENS):
            block = experts[tokens[start : start + _BLOCK_TOKENS]].astype(np.int64)
            T = len(block)
            used = np.full((T + 1, n_expert), -np.inf)
            used[0] = last
            time = (start + np.arange(T))[:, None] * A + np.arange(A - 1, -1, -1)  # a larger weight is more recent
            used[np.arange(1, T + 1)[:, None], block] = time
            np.maximum.accumulate(used, axis=0, out=used)
            inside = (at >= start) & (at < start + T)
            out[rows[inside]] = used[at[inside] - start]  # row i of `used` is what came before token i
            last = used[T]
    return out


def router_scores(x: F32, norm: F32, router: F32) -> F32:
    """A layer's router applied early: to the normed residual x [T, D] that enters some layer before it.

    norm [D], router [E, D]: of the layer whose experts are guessed. Its logits, float32 [T, E].
    """
    scores: F32 = x @ (router * norm).T
    return scores


def trained_scores(kind: str, tensors: Tensors, x: F32) -> F32:
    """Scores [T, E] of a trained predictor for the normed residual x [T, D], as docs/pregate.md states them."""
    if kind == "mlp":
        x = np.maximum(x @ tensors["hidden.weight"].T + tensors["hidden.bias"], 0)
    scores: F32 = x @ tensors["weight"].T + tensors["bias"]
    return scores
