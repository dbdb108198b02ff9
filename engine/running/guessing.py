"""Guesses that are counted: which missing experts they would have brought in time, beside steps that know of none.

A layer's row of `slot_of` changes in its own `route` alone, so what is resident when a layer's guesses are made is what
was before the step, and all can be told behind it: from the residuals that entered the layers, and from what the
routers chose. So a step that is watched computes what it would compute alone, bit for bit, and the slots go the same
way (docs/residency.md, "Guesses").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.formats.gguf import GGUFFile
from engine.formats.pregate import Pregate, norm_epsilon, read_router, unit
from engine.memory.residency import Residency
from engine.ops import F32, I32
from engine.placing import guesses
from engine.placing.guesses import F64, Chances, Record
from engine.running.forecast import Expected, Routed
from engine.running.stepping import Span, StepResult, Steps

UNTRAINED = ("router", "previous", "draft")


@dataclass(frozen=True, slots=True)
class Way:
    """How experts are guessed.

    source: a kind of predictor in a file of pre-gates; `router`: that of the target layer, applied early; `previous`:
    what decoding steps used last; or `draft`: what tokens of a draft used that were taken back, in the step that
    follows. These two have an order and no chances. ahead: MoE layers between the residual that is looked at and the
    target; files have 0 and 1. budget: experts a layer; threshold: what a chance exceeds.
    """

    source: str
    ahead: int = 1
    budget: int = 2
    threshold: float = 0.0


class Guessing:
    """Watches decoding steps on a host backend, and keeps a record for each of several ways.

    layers: indices of the MoE layers. expert_bytes: of one expert of each.
    """

    def __init__(
        self, ways: Sequence[Way], file: GGUFFile, layers: Sequence[int], n_used: int, residency: Residency,
        expert_bytes: Sequence[int], pregate: Pregate | None = None,
    ) -> None:  # fmt: skip
        self.records = {way: Record(len(layers)) for way in ways}
        self.n_steps = self.n_tokens = 0
        self._layers, self._n_used, self._residency = layers, n_used, residency
        self._expert_bytes = np.array(expert_bytes, np.int64)
        self._pregate = pregate
        self._eps = norm_epsilon(file)
        early = any(way.source == "router" for way in ways)
        self._routers = [read_router(file, layer) for layer in layers] if early else []
        self._last: F64 = np.full(residency.state.slot_of.shape, -np.inf)  # when decoding steps used each expert last
        self._taken_back: Expected | None = None  # what tokens used that the last step's draft had for nothing
        self._logistic = guesses.logistic()
        for way in ways:
            known = UNTRAINED if pregate is None or way.ahead > 1 else (*UNTRAINED, *pregate.predictors)
            assert way.source in known and way.ahead >= 0, f"{way}: nothing predicts that"

    def run(self, steps: Steps, spans: list[Span]) -> StepResult:
        """Run a step as `Steps.run` does, and count."""
        forward = steps.forward
        before = np.array(self._residency.device.read(self._residency.live.slot_of))
        was_captured = forward.buffers.hidden is not None
        forward.capture_hidden(True)
        try:
            result = steps.run(spans)
        finally:
            forward.capture_hidden(was_captured)
        assert result.hidden is not None
        self._count(before, result.hidden, result.experts)
        return result

    def _count(self, slot_of: I32, hidden: F32, experts: I32) -> None:
        """slot_of [L, E] before the step; hidden [n_layer, T, D]; experts [L, T, A]."""
        self.n_steps += 1
        self.n_tokens += experts.shape[1]
        inputs: dict[int, F32] = {}
        known: dict[tuple[str, int, int], F64] = {}
        missed = [np.setdiff1d(chosen, np.flatnonzero(row >= 0)) for chosen, row in zip(experts, slot_of, strict=True)]
        for way, record in self.records.items():
            if way.source == "draft" and self._taken_back is None:
                continue
            for target in range(way.ahead, len(self._layers)):
                at = target - way.ahead
                key = way.source, at, target
                if key not in known:
                    if at not in inputs:
                        inputs[at] = unit(hidden[self._layers[at]], self._eps)
                    known[key] = guesses.of_step(self._chances(way.source, at, target, inputs[at]))
                chances = known[key]
                # What chances are multiplied by is what the threshold is divided by.
                threshold = way.threshold / record.scale(target)
                (best,) = guesses.ranked(chances, slot_of[target] >= 0, way.budget, threshold)
                made = best[best >= 0]
                record.add(target, made, chances[0, made], missed[target])
        self._taken_back = None
        for t in range(experts.shape[1]):
            self._last = np.where(np.isneginf(self._last), self._last, self._last - self._n_used)
            rank = np.broadcast_to(-np.arange(self._n_used, dtype=np.float64), experts[:, t].shape)
            np.put_along_axis(self._last, experts[:, t].astype(np.int64), rank, 1)

    def verified(self, routed: Routed) -> Expected | None:
        """As `Forecast.verified`: what was taken back may come a step later, or its like; its experts, in order."""
        gone = routed.experts[:, ~routed.stayed]
        self._taken_back = tuple(tuple(dict.fromkeys(layer.ravel().tolist())) for layer in gone) if gone.size else None
        return self._taken_back

    def _chances(self, source: str, at: int, target: int, x: F32) -> F64:
        """How likely the experts of a layer are, for each of the tokens whose residual enters another: [T or 1, E]."""
        if source == "draft":
            assert self._taken_back is not None
            by_order = np.zeros((1, self._last.shape[1]))
            by_order[0, list(self._taken_back[target])] = 1.0 / (2 + np.arange(len(self._taken_back[target])))
            return by_order
        if source == "previous":
            order = np.argsort(np.argsort(-self._last[target], kind="stable"), kind="stable")
            return np.where(np.isneginf(self._last[target]), 0.0, 1.0 / (2 + order))[None]
        pair = self._layers[at], self._layers[target]
        table = None if self._pregate is None else self._pregate.chances.get(source, {}).get(pair)
        if source == "router":
            scores = self._routers[target].scores(x)
        else:
            assert self._pregate is not None
            scores = self._pregate.predictors[source][pair].scores(x)
        chances = self._logistic if table is None else Chances(*table)
        return chances.of(guesses.margins(scores, self._n_used))

    def totals(self, way: Way) -> dict[str, int]:
        """What came of a way: counts of guesses and of missed experts in steps of layers, and bytes."""
        record = self.records[way]
        counts = {"made": record.made, "useful": record.useful, "wasted": record.wasted, "misses": record.misses}
        of_bytes = {"useful_bytes": record.useful, "wasted_bytes": record.wasted}
        return {name: int(count.sum()) for name, count in counts.items()} | {
            name: int(count @ self._expert_bytes) for name, count in of_bytes.items()
        }

    def stats(self) -> dict[str, Any]:
        """The counters of the first way, as `stats` of the protocol has them."""
        way = next(iter(self.records))
        settings = {"source": way.source, "ahead": way.ahead, "budget": way.budget, "threshold": way.threshold}
        return settings | {"steps": self.n_steps, "tokens": self.n_tokens} | self.totals(way)
