"""Missed experts that are guessed and brought before their layer asks: by what, in a loaded model, and whether it pays.

Memory and kernels are engine/ops/cuda/landing.py, what guesses are placing/guesses.py says. The GPU times its own
steps, some with guesses and some without, and says so in page-locked memory: nothing here waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.formats import pregate as pregates
from engine.formats.gguf import GGUFFile
from engine.formats.pregate import Pregate, PregateModel, Trained, norm_epsilon, read_router
from engine.ground.config import EngineConfig
from engine.ground.errors import FileFormatError, UsageError, WrongModelError
from engine.memory.residency import Residency
from engine.models.layers import ModelConfig
from engine.ops import F32, Limits
from engine.ops.cuda.device import Device
from engine.ops.cuda.landing import F16, FIRST_TARGET, SLOTS, Counts, Landing, Scoring
from engine.ops.cuda.workspace import Workspace
from engine.placing.guesses import Chances, Gate, Timed, logistic

LEAST_CHANCE = 0.5  # of what is brought: right in four of five (docs/residency.md)
_LARGEST = 65504.0  # of a half

_log = logging.getLogger(__name__)


class Guesses:
    """Who has missing experts brought ahead in steps of one token; `next` before each, `look` behind it.

    source: what they are guessed by. is_forced: in every step, whatever it costs. imposed: whether steps that may be of
    either kind have guesses, whatever the gate says; None: as it says.
    """

    def __init__(self, landing: Landing, source: str, is_forced: bool = False) -> None:
        self.landing, self.source, self.is_forced = landing, source, is_forced
        self.gate = Gate()
        self.imposed: bool | None = None
        self._wasted_bytes = 0
        self._before = landing.counts()

    def reset(self) -> None:
        """What was counted until now was to get ready; no step is under way."""
        self.gate, self._wasted_bytes, self._before = Gate(), 0, self.landing.counts(wait=True)

    @property
    def counts(self) -> Counts:
        """Since then."""
        now, before = self.landing.counts(), self._before
        timed = Timed(*(a - b for a, b in zip(now.timed, before.timed, strict=True)))
        return Counts(
            now.made - before.made, now.useful - before.useful, now.misses - before.misses,
            now.brought_bytes - before.brought_bytes, now.taken_bytes - before.taken_bytes, timed,
        )  # fmt: skip

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Whether steps have guesses, of the kinds that there are: the usual one first."""
        return (True,) if self.is_forced else (self.gate.with_guesses, not self.gate.with_guesses)

    def next(self, tries: bool) -> bool:
        """Before a step of one token is chosen: whether it has guesses. tries: it may be of the rarer kind."""
        if self.is_forced:
            return True
        if tries and self.imposed is not None:
            return self.imposed
        return self.gate.next() if tries else self.gate.with_guesses

    def look(self) -> None:
        """When such a step is enqueued: whether those that follow have guesses, by what is known of those before."""
        if self.is_forced or self.imposed is not None:
            return
        counts = self.counts
        if self.gate.weigh(counts.made, counts.useful):
            _log.info("guesses of experts are off: hardly any of them is right")
        elif self.gate.look(counts.timed):
            said = "on again: steps are" if self.gate.with_guesses else "off: steps are not"
            _log.info("guesses of experts are %s faster with them", said)

    def stats(self) -> dict[str, Any]:
        """Counters since the start, as `stats` of the protocol has them."""
        counts = self.counts
        # What the last layer takes of its guesses is told with the next step; until then it counts as wasted.
        self._wasted_bytes = max(self._wasted_bytes, counts.brought_bytes - counts.taken_bytes)
        without_ns, with_ns = self.gate.means_ns
        steps = counts.timed.with_
        return {
            "source": self.source, "ahead": 1, "budget": SLOTS, "threshold": LEAST_CHANCE,
            "steps": steps, "tokens": steps, "made": counts.made, "useful": counts.useful,
            "wasted": counts.made - counts.useful, "misses": counts.misses, "useful_bytes": counts.taken_bytes,
            "wasted_bytes": self._wasted_bytes,
            "on": self.is_forced or self.gate.with_guesses,
            "with_us": round(with_ns / 1e3, 1), "without_us": round(without_ns / 1e3, 1),
        }  # fmt: skip


def wanted(options: EngineConfig) -> bool:
    """Whether experts are to be guessed on a GPU."""
    return options.guess in ("auto", "on")


def guess(
    options: EngineConfig, file: GGUFFile, config: ModelConfig, pregate: Pregate | None, gpu: Device, ws: Workspace,
    limits: Limits, residency: Residency, has_room: bool = True,
) -> tuple[Guesses | None, tuple[str, ...]]:  # fmt: skip
    """Have missing experts brought ahead, if that is asked for and something misses; and what is said of it.

    has_room: on the device; that there is none was said when it was decided.
    """
    if not wanted(options):
        return None, ()
    if not residency.tier.n_bytes:
        return None, ("guesses: none, all experts are resident",)
    if not has_room:
        return None, ()
    if not _fits(limits, len(config.moe_layers)):
        return None, (f"guesses: none for {len(config.moe_layers)} layers of experts of {limits.n_embd} columns",)
    kind, scorings = scorings_of(file, config.moe_layers, pregate)
    eps, imposed = norm_epsilon(file) if pregate is None else pregate.eps, ws.replay and ws.replay.imposed_guesses
    made = Landing(gpu, limits, residency.banks, scorings, eps, residency.live, imposed)
    ws.guess_misses(made)
    by = f"each layer's {kind}, applied a layer early" if kind == "router" else f"{kind} of {_path_of(options)}"
    said = "in every step" if options.guess == "on" else "as long as steps are faster so"
    return Guesses(made, kind, options.guess == "on"), (f"guesses: {said}, by {by}",)


def find_pregate(options: EngineConfig, file: GGUFFile, config: ModelConfig) -> Pregate | None:
    """As `open_pregate`, where guesses are wanted on a GPU; one that was not named and is wrong is left out."""
    if not wanted(options):
        return None
    try:
        return open_pregate(options, file, config)
    except (FileFormatError, WrongModelError) as error:
        if options.pregate is not None:
            raise
        _log.warning("guesses go by the routers, %s", error.message, extra={"reason": "pregate"})
        return None


def open_pregate(options: EngineConfig, file: GGUFFile, config: ModelConfig) -> Pregate | None:
    """The file of predictors that was named, or lies beside the model."""
    path = _path_of(options)
    if options.pregate is None and not path.exists():
        return None
    model = PregateModel(file.model_id, config.moe_layers, config.n_embd, config.n_expert, config.n_expert_used)
    return pregates.read(path, model)


def _path_of(options: EngineConfig) -> Path:
    return options.pregate or pregates.default_path(options.model)


def scorings_of(file: GGUFFile, layers: Sequence[int], pregate: Pregate | None) -> tuple[str, list[Scoring]]:
    """What guesses go by, and how each MoE layer from FIRST_TARGET on is scored from what enters the one before."""
    trained = {} if pregate is None else pregate.predictors
    kind = next((kind for kind in ("mlp", "linear") if kind in trained), "router")
    made = []
    for at, target in zip(layers[FIRST_TARGET - 1 :], layers[FIRST_TARGET:], strict=False):
        table = None if pregate is None else pregate.chances.get(kind, {}).get((at, target))
        least = (logistic() if table is None else Chances(*table)).least_margin(LEAST_CHANCE)
        if kind == "router":
            router = read_router(file, target)
            choice = "score" if router.bias is None else "share" if router.softmax else "sigmoid"
            made.append(Scoring(_half(router.weight), least, choice=choice, choice_bias=router.bias))
        else:
            made.append(_of_trained(trained[kind][at, target], least))
    return kind, made


def _of_trained(t: Trained, least: float) -> Scoring:
    if t.hidden_weight is None or t.output_weight is None:
        return Scoring(_half(t.weight), least, t.bias)
    return Scoring(_half(t.weight), least, t.bias, _half(t.hidden_weight), t.hidden_bias, _half(t.output_weight))


def _half(weight: F32) -> F16:
    return np.clip(weight, -_LARGEST, _LARGEST).astype(np.float16)


def count(device: Device, limits: Limits, residency: Residency, n_hidden: int) -> Landing | None:
    """What `guess` allocates at most, for the memory plan; None where it guesses nothing. n_hidden: units of an MLP."""
    E, D, n = limits.n_expert, limits.n_embd, len(residency.experts)
    if not _fits(limits, n):
        return None
    weight, bias = np.broadcast_to(np.float16(0), (E, D)), np.zeros(E, np.float32)
    scoring = Scoring(weight, 0.0, bias)
    if n_hidden:
        hidden, output = (np.broadcast_to(np.float16(0), shape) for shape in ((n_hidden, D), (E, n_hidden)))
        scoring = Scoring(weight, 0.0, bias, hidden, np.zeros(n_hidden, np.float32), output)
    return Landing(device, limits, residency.banks, [scoring] * (n - FIRST_TARGET), 0.0, residency.live)


def _fits(limits: Limits, n_layers: int) -> bool:
    return n_layers > FIRST_TARGET and limits.n_embd % 8 == 0


def hidden_units(options: EngineConfig) -> int:
    """Hidden units of the MLPs that guesses would go by; 0: they go by something else."""
    if not wanted(options):
        return 0
    path = _path_of(options)
    return pregates.hidden_units(path) if options.pregate is not None or path.exists() else 0


def refuse_on_host(options: EngineConfig) -> None:
    """UsageError where guesses are to be brought to a GPU in any case, and there is none."""
    if options.guess == "on":
        raise UsageError("--guess on brings guesses to a GPU, and this is the CPU", hint="--guess auto does without")
