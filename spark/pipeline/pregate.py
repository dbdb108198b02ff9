"""Pre-gates: small predictors of the experts a layer will use, trained on a trace with hidden states.

From the residual that enters an MoE layer (before its attention norm) they guess that layer's experts and the next
MoE layer's, which is early enough to fetch what is not resident. docs/pregate.md has the file and the figures.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from engine.formats import pregate as files
from engine.formats import profile as profiles
from engine.formats.gguf import open_model
from engine.formats.pregate import TRAINED, Router, Trained, unit
from engine.formats.trace import RoutingTrace, iter_parts, read_routing
from engine.ground.errors import FileFormatError, MissingExtraError, UsageError
from engine.ground.files import replacing
from engine.ground.install import requirement
from spark.pipeline import predictors
from spark.pipeline.guessed import Guessed, GuessRow, expert_bytes
from spark.pipeline.predictors import F32
from spark.pipeline.replay import Progress

HELD_OUT_ONE_IN = 5  # sessions
HELD_OUT_ROWS_ONE_IN = 4  # of max_rows
MIN_TRAIN_TOKENS = 256
MIN_HELD_OUT_TOKENS = 64
TORCH = "torch==2.13.0"  # as in constraints.txt, which a wheel does not have
PASS_BYTES = 2 << 30  # hidden states in memory at a time: as many layers as fit are read in one pass
SHARED_WEIGHTS = 1 << 16  # of a router; threads that share smaller products mostly wait for each other

F16 = npt.NDArray[np.float16]
Tokens = npt.NDArray[np.int64]  # indices into the trace, ascending


@dataclass(frozen=True, slots=True)
class PregateOptions:
    """How to train and what to measure.

    epochs: passes over the training tokens. max_rows: the most tokens to train on; a quarter of it is the most
    to measure on. hidden_units: of the MLP. seed: of the sample, the first weights and the order.
    device: of torch. threads: of torch on the CPU; None takes one for small models, else torch's own choice.
    count: the held-out tokens that recall is measured on, those the model itself would have decoded or all.
    profile: routing counts that experts are placed by where guesses are judged.
    """

    epochs: int = 5
    max_rows: int = 32_768
    hidden_units: int = 128
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    count: Literal["generated", "all"] = "generated"
    profile: Path | None = None


@dataclass(frozen=True, slots=True)
class RecallRow:
    """How well a predictor guesses the experts of `target_layer` when the residual enters `layer`.

    recall_1x, 2x, 3x: the share of a token's A active experts that are among the A, 2A, 3A best guesses.
    """

    predictor: str
    layer: int
    target_layer: int
    recall_1x: float
    recall_2x: float
    recall_3x: float


@dataclass(frozen=True, slots=True)
class PregateReport:
    """What was trained on what, and how good it is.

    train_tokens: what each predictor was trained on. held_out_tokens: what recall was measured on, of the kind
    that `count` names. guesses: what prefetching by the predictors would bring, with the experts resident that the
    policy `spark` has by `profile`, or without one.
    """

    model: str
    model_id: str
    out: Path
    rows: tuple[RecallRow, ...]
    guesses: tuple[GuessRow, ...]
    profile: Path | None
    n_expert: int
    n_expert_used: int
    train_sessions: int
    held_out_sessions: int
    train_tokens: int
    held_out_tokens: int
    count: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The report as `--json` writes it."""
        paths = {"out": str(self.out), "profile": None if self.profile is None else str(self.profile)}
        return asdict(self) | paths


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    """Tokens to train on and to measure on, as ascending indices into the trace; no session is in both."""

    train: Tokens
    held_out: Tokens
    train_sessions: int
    held_out_sessions: int


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """All that training needs. routers: of each MoE layer; eps: of the norms; guessed: what guesses come to."""

    trace_dir: Path
    trace: RoutingTrace
    split: _Split
    routers: tuple[Router, ...]
    eps: float
    options: PregateOptions
    guessed: Guessed


def require_torch() -> Any:
    """The torch module; MissingExtraError with the line that installs it where there is none."""
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError(
            f"train-pregate needs PyTorch ({error}); its CPU build is enough",
            hint=f"{shlex.quote(sys.executable)} -m pip install {requirement('train')} {TORCH}",
        ) from error
    return torch


def train(
    model_path: Path, trace_dir: Path, out: Path, options: PregateOptions, progress: Progress = lambda *_: None
) -> PregateReport:
    """Train predictors for every MoE layer of a trace, measure them on held-out sessions and write them to `out`.

    Raises MissingExtraError without torch; WrongModelError or FileFormatError for a trace that is of another
    model, damaged, too small or without hidden states; UnsupportedModelError for a router we don't know.
    """
    torch = require_torch()
    _check(options, out, torch)
    began = time.monotonic()
    with open_model(model_path) as file:
        trace = read_routing(trace_dir, file.model_id)
        split = _split(trace, trace_dir, options)
        routers = tuple(files.read_router(file, layer) for layer in trace.layers)
        eps, sizes = files.norm_epsilon(file), [expert_bytes(file, layer) for layer in trace.layers]
        profile = None
        if options.profile is not None:
            shape = file.value(f"{file.architecture}.block_count", int), trace.n_expert
            profile, _ = profiles.load(options.profile, model_id=file.model_id, shape=shape)
    guessed = Guessed(trace, split.held_out, sizes, profile)
    work = _Work(trace_dir, trace, split, routers, eps, options, guessed)
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads or (1 if routers[0].weight.size < SHARED_WEIGHTS else before))
    try:
        tensors, rows = _train(work, progress)
    finally:
        torch.set_num_threads(before)
    report = PregateReport(
        model=str(model_path),
        model_id=trace.model_id,
        out=out,
        rows=tuple(rows),
        guesses=guessed.rows(),
        profile=options.profile,
        n_expert=trace.n_expert,
        n_expert_used=trace.experts.shape[2],
        train_sessions=split.train_sessions,
        held_out_sessions=split.held_out_sessions,
        train_tokens=len(split.train),
        held_out_tokens=len(split.held_out),
        count=options.count,
        seconds=time.monotonic() - began,
    )
    _save(tensors, work, report)
    return report


def _check(options: PregateOptions, out: Path, torch: Any) -> None:
    """Refuse what would fail after the work is done, or mean nothing."""
    least = {"epochs": 1, "max_rows": MIN_TRAIN_TOKENS, "hidden_units": 1, "seed": 0, "threads": 1}
    for name, minimum in least.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise UsageError(f"{name} is {value}, expected at least {minimum}")
    if not out.absolute().parent.is_dir() or out.is_dir():
        raise UsageError(f"cannot write {out}: expected the name of a file in an existing folder")
    try:
        torch.zeros(1, device=options.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"torch has no device {options.device!r}: {reason}", hint="'cpu' always works") from error


def _split(trace: RoutingTrace, trace_dir: Path, options: PregateOptions) -> _Split:
    """Hold out every fifth session with tokens that count, in the order of the SHA-256 of their ids."""
    n_session = len(trace.session_ids)
    if n_session < 2:
        raise FileFormatError(
            f"{trace_dir} has tokens of {n_session} session; expected at least 2, to hold one out whole",
            hint="trace more sessions",
        )
    counted = trace.generated if options.count == "generated" else np.ones(len(trace.session), bool)
    candidates = np.unique(trace.session[counted]).tolist()
    candidates.sort(key=lambda number: hashlib.sha256(trace.session_ids[number].encode()).digest())
    chosen = candidates[: min(-(-len(candidates) // HELD_OUT_ONE_IN), n_session - 1)]
    is_held_out = np.isin(trace.session, chosen)

    rng = np.random.default_rng([options.seed, len(trace.layers)])
    held_out = _sample(np.flatnonzero(is_held_out & counted), options.max_rows // HELD_OUT_ROWS_ONE_IN, rng)
    # What is decoded is what is predicted; other tokens only fill up.
    generated = _sample(np.flatnonzero(~is_held_out & trace.generated), options.max_rows, rng)
    others = _sample(np.flatnonzero(~is_held_out & ~trace.generated), options.max_rows - len(generated), rng)
    train = np.sort(np.concatenate([generated, others]))
    kind = "generated tokens" if options.count == "generated" else "tokens"
    for found, least, where in (
        (held_out, MIN_HELD_OUT_TOKENS, f"{kind} in the {len(chosen)} held-out sessions"),
        (train, MIN_TRAIN_TOKENS, f"tokens in the other {n_session - len(chosen)} sessions"),
    ):
        if len(found) < least:
            hint = "trace more tokens" + (", or count all tokens" if options.count == "generated" else "")
            raise FileFormatError(f"{trace_dir} has {len(found)} {where}, expected at least {least}", hint=hint)
    return _Split(train, held_out, n_session - len(chosen), len(chosen))


def _sample(tokens: Tokens, most: int, rng: np.random.Generator) -> Tokens:
    """At most so many of the tokens, in order."""
    return tokens if len(tokens) <= most else np.sort(rng.choice(tokens, most, replace=False))


def _train(work: _Work, progress: Progress) -> tuple[dict[str, F32], list[RecallRow]]:
    """Tensors by name, and figures, of every layer and target."""
    T, L, D = len(work.trace.session), len(work.trace.layers), work.routers[0].weight.shape[1]
    tokens = np.sort(np.concatenate([work.split.train, work.split.held_out]))
    is_train = np.isin(tokens, work.split.train, assume_unique=True)
    at_once = max(1, PASS_BYTES // (2 * D * len(tokens)))
    passes = [range(first, min(first + at_once, L)) for first in range(0, L, at_once)]
    tensors: dict[str, F32] = {}
    rows: list[RecallRow] = []
    for number, layers in enumerate(passes):
        hidden = np.empty((len(layers), len(tokens), D), np.float16)
        for read in _read_hidden(work, layers, tokens, hidden):
            progress("reading hidden states", number * T + read, len(passes) * T)
        for i in layers:
            x = unit(hidden[i - layers.start], work.eps)
            for target, fitted, scores in _predict(work, i, x[is_train], x[~is_train]):
                names = (work.trace.layers[i], work.trace.layers[target])
                for kind in fitted:
                    prefix = "layers.{}.target.{}.".format(*names) + kind
                    tensors |= {f"{prefix}.{name}": values for name, values in fitted[kind].items()}
                truth = work.trace.experts[work.split.held_out, target]
                rows += [RecallRow(name, *names, *predictors.recall(guess, truth)) for name, guess in scores.items()]
                work.guessed.add(i, target, scores)
            for target in range(i + 2, min(i + files.ROUTER_AHEAD + 1, L)):
                work.guessed.add(i, target, {"router": work.routers[target].scores(x[~is_train])})
            progress("training predictors", i + 1, L)
    return tensors, rows


def _predict(
    work: _Work, layer: int, x_train: F32, x_held_out: F32
) -> Iterator[tuple[int, dict[str, dict[str, F32]], dict[str, npt.NDArray[Any]]]]:
    """A layer's targets: which, the tensors of each trained predictor, every predictor's scores on held-out tokens."""
    trace, split, options = work.trace, work.split, work.options
    targets = range(layer, min(layer + 2, len(trace.layers)))
    examples = trace.experts[split.train, targets.start : targets.stop]
    fitted = predictors.fit(
        predictors.standardize(x_train, options.device), examples, np.stack([work.routers[i].weight for i in targets]),
        hidden_units=options.hidden_units, epochs=options.epochs, rng=np.random.default_rng([options.seed, layer]),
    )  # fmt: skip
    for i, target in enumerate(targets):
        scores: dict[str, npt.NDArray[Any]] = {
            kind: Trained.of(tensors).scores(x_held_out) for kind, tensors in fitted[i].items()
        }
        scores["router"] = work.routers[target].scores(x_held_out)
        scores["previous_token"] = predictors.reuse_scores(
            trace.experts[:, target], trace.session, split.held_out, trace.n_expert
        )
        scores["frequency"] = predictors.frequency_scores(examples[:, i], trace.n_expert, len(x_held_out))
        yield target, fitted[i], scores


def _read_hidden(work: _Work, layers: range, tokens: Tokens, out: F16) -> Iterator[int]:
    """Read the residuals [layers, tokens, D] of some MoE layers into `out`; yields how many tokens were passed."""
    begin = 0
    for part in iter_parts(work.trace_dir, work.trace.model_id, ("hidden",)):
        end = begin + len(part.position)
        found, expected = (part.model.n_expert, part.model.n_embd), work.routers[0].weight.shape
        if found != expected:
            raise FileFormatError(f"{part.path}: expected experts and width {expected} as in the model, found {found}")
        first, last = np.searchsorted(tokens, (begin, end))
        for i, layer in enumerate(layers):
            out[i, first:last] = part.values["hidden"][tokens[first:last] - begin, layer]
            _check_finite(out[i, first:last], part.path, work.trace.layers[layer])
        begin = end
        yield begin
    if begin != len(work.trace.session):
        raise FileFormatError(
            f"{work.trace_dir} had {len(work.trace.session)} tokens when it was opened and has {begin} now",
            hint="wait until the run that writes the trace has ended",
        )


def _check_finite(hidden: F16, path: Path, layer: int) -> None:
    if np.isfinite(hidden).all():
        return
    if np.isnan(hidden).any():
        raise FileFormatError(
            f"{path}: expected numbers as hidden states, found NaN entering layer {layer}",
            hint="the model or the run that wrote the trace is broken: trace again",
        )
    raise FileFormatError(
        f"{path}: expected finite hidden states, found infinity entering layer {layer}: a residual beyond the range "
        "of float16, 65504",
        hint="`spark calibrate --trace DIR --hidden` clips them to that range: trace again with it",
    )


def _save(tensors: dict[str, F32], work: _Work, report: PregateReport) -> None:
    """Write the predictors and what is known of them (docs/pregate.md), whole or not at all."""
    from safetensors.numpy import save

    known = {
        "version": files.VERSION,
        "model_id": report.model_id,
        "layers": work.trace.layers,
        "n_embd": work.routers[0].weight.shape[1],
        "n_expert": report.n_expert,
        "n_expert_used": report.n_expert_used,
        "eps": work.eps,
        "predictors": TRAINED,
        "options": {key: value for key, value in asdict(work.options).items() if key != "profile"},
        "chances": work.guessed.tables(),
        "rows": [asdict(row) for row in report.rows if row.predictor in TRAINED],
    }
    with replacing(report.out, "predictors") as file:
        file.write(save(tensors, {files.METADATA: json.dumps(known)}))
