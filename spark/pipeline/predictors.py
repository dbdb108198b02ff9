"""What guesses a layer's experts before its router runs, and how good a guess is.

A predictor gives every token one score for each expert; its guess of k experts is the k largest. Recall at k is
the share of active experts among them. Axis letters as in engine: T tokens, D embd, E experts, A active.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.formats.pregate import TRAINED
from engine.ground.errors import NumericalError

if TYPE_CHECKING:
    import torch

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Experts = npt.NDArray[np.uint16]  # [T, A], the largest router weight first

_BLOCK_TOKENS = 1024  # tokens at a time, so that a comparison [T, A, E] stays small
_BATCH_TOKENS = 256  # at most
_EPOCH_STEPS = 64  # at least, where there are so many tokens: a small trace takes smaller batches
_MAX_STEP = 0.01  # Adam's first step; it falls to zero along a cosine
_STEP_TIMES_WIDTH = 10.0  # a wider input adds up more weights, so each moves less
_WEIGHT_DECAY = 0.01
_THRESHOLD_STEPS = 4  # of Newton's method


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


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The normed residuals of one layer's training tokens, each dimension centered and scaled to unit variance.

    z: float32 tensor [T, D]; the normed residual is z * scale + mean, both float32 [D].
    """

    z: torch.Tensor
    mean: F32
    scale: F32


def standardize(x: F32, device: str) -> Inputs:
    """Training inputs from normed residuals x [T, D], which is overwritten."""
    import torch

    mean, deviation = x.mean(0), x.std(0)
    scale = np.where(deviation > 1e-6, deviation, 1).astype(np.float32)
    x -= mean
    x /= scale
    return Inputs(torch.from_numpy(x).to(device), mean, scale)


def fit(
    inputs: Inputs, experts: Experts, starts: F32, *, hidden_units: int, epochs: int, rng: np.random.Generator
) -> list[dict[str, dict[str, F32]]]:
    """Train a linear predictor and an MLP for each of G targets; returns for each target {kind: tensors}.

    experts: uint16 [T, G, A], to be predicted. starts: float32 [G, E, D], the targets' routers with their norms'
    weights folded in, from which the linear parts set out. The 2G predictors share the batches and nothing else.
    The loss is described in docs/pregate.md. Deterministic for one device, torch and number of threads. Raises
    NumericalError if training diverges.
    """
    import torch

    device, (T, D), (G, E, _), H = inputs.z.device, inputs.z.shape, starts.shape, hidden_units
    linear = np.stack([starts, starts])  # of both kinds
    first: dict[str, npt.NDArray[Any]] = {
        "weight": (linear * inputs.scale).reshape(-1, D),
        "bias": (linear @ inputs.mean).reshape(-1),
        "hidden.weight": rng.standard_normal((G * H, D)) / np.sqrt(D),
        "hidden.bias": np.zeros(G * H),
        "output.weight": np.zeros((G, E, H)),
    }
    p = {
        name: torch.tensor(values, dtype=torch.float32, device=device, requires_grad=True)
        for name, values in first.items()
    }
    step = min(_MAX_STEP, _STEP_TIMES_WIDTH / D)
    optimizer = torch.optim.AdamW(p.values(), lr=step, weight_decay=_WEIGHT_DECAY)
    batch_tokens = min(_BATCH_TOKENS, max(1, T // _EPOCH_STEPS))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-T // batch_tokens))
    chosen = torch.from_numpy(experts.astype(np.int64)).to(device)
    for _ in range(epochs):
        for batch in torch.from_numpy(rng.permutation(T)).to(device).split(batch_tokens):
            z = inputs.z[batch]
            scores = torch.addmm(p["bias"], z, p["weight"].T).view(-1, len(TRAINED), G, E)
            hidden = torch.relu(torch.addmm(p["hidden.bias"], z, p["hidden.weight"].T)).view(-1, G, H)
            mlp = scores[:, 1] + torch.einsum("tgh,geh->tge", hidden, p["output.weight"])
            optimizer.zero_grad()
            _loss(torch.stack((scores[:, 0], mlp), 1), chosen[batch, None]).backward()
            optimizer.step()
            schedule.step()
    trained: dict[str, F32] = {name: values.detach().cpu().numpy() for name, values in p.items()}
    if not all(np.isfinite(values).all() for values in trained.values()):
        raise NumericalError("training the predictors diverged: their weights are not finite")
    for prefix in ("", "hidden."):  # from z to the normed residual itself
        trained[prefix + "weight"] = trained[prefix + "weight"] / inputs.scale
        trained[prefix + "bias"] = trained[prefix + "bias"] - trained[prefix + "weight"] @ inputs.mean
    weight, bias = trained["weight"].reshape(-1, G, E, D), trained["bias"].reshape(-1, G, E)
    return [
        {
            "linear": {"weight": weight[0, g], "bias": bias[0, g]},
            "mlp": {
                "weight": weight[1, g],
                "bias": bias[1, g],
                "hidden.weight": trained["hidden.weight"].reshape(G, H, D)[g],
                "hidden.bias": trained["hidden.bias"].reshape(G, H)[g],
                "output.weight": trained["output.weight"][g],
            },
        }
        for g in range(G)
    ]


def _loss(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy of every expert against being chosen, above a threshold of the token's own.

    scores [T, ..., E], chosen int64 [T, ..., A] (broadcast); a mean over tokens, a sum over all else. The
    threshold is where the chances sum to A. It is also where the loss is least, so no gradient flows through it.
    """
    import torch

    A = chosen.shape[-1]
    with torch.no_grad():
        threshold = scores.topk(A).values[..., -1:]
        for _ in range(_THRESHOLD_STEPS):
            chance = torch.sigmoid(scores - threshold)
            slope = (chance * (1 - chance)).sum(-1, keepdim=True).clamp_min(0.1)
            threshold = threshold + ((chance.sum(-1, keepdim=True) - A) / slope).clamp(-2, 2)
        target = torch.zeros_like(scores).scatter_(-1, chosen.expand(*scores.shape[:-1], A), 1)
    cross_entropy = torch.nn.functional.binary_cross_entropy_with_logits
    return cross_entropy(scores - threshold, target, reduction="sum") / len(scores)
