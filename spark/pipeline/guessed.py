"""What guesses of predictors come to over experts that are not resident: found, useful, wasted, by a replay of a trace.

The held-out sessions are replayed under the policy `spark`, so that it is known what is resident when each token comes.
A guess counts where it is not; it is useful where the token uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.formats.gguf import GGUFFile
from engine.formats.profile import Profile
from engine.formats.trace import RoutingTrace
from engine.placing import guesses, placement, policies
from engine.placing.placement import Experts
from engine.placing.policies import SPARK, Placed
from engine.placing.simulate import Recording

RESIDENCIES = (10.0, 30.0, 60.0)  # percent of the expert bytes
BUDGETS = (1, 2, 4)  # experts a layer
THRESHOLD = 0.5  # with a budget of A experts
SOURCES = ("linear", "mlp", "router", "previous_token")  # `frequency` guesses what is resident
WITH_TABLE = ("linear", "mlp", "router")  # whose chances the file of predictors keeps

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GuessRow:
    """What a predictor's guesses come to at a residency, over all layers.

    ahead: 0: for the layer that the residual enters, 1: for the MoE layer after it, 2: for the one after that. budget:
    experts a layer at most; threshold: the chance that each has to exceed. precision: useful guesses of those that
    were made; promised: what their chances said of that; recall: useful guesses of the active experts that were not
    resident. The rest is a token's, in all layers that can be guessed for.
    """

    predictor: str
    ahead: int
    residency_pct: float
    budget: int
    threshold: float
    precision: float
    promised: float
    recall: float
    misses_per_token: float
    guesses_per_token: float
    useful_per_token: float
    wasted_bytes_per_token: float


def expert_bytes(file: GGUFFile, layer: int) -> int:
    """Bytes of one expert of a layer, gate, up and down together."""
    prefix = f"blk.{layer}."
    fused = prefix + "ffn_gate_up_exps.weight" in file.tensors
    parts = ("gate_up", "down") if fused else ("gate", "up", "down")
    tensors = [file.tensor(f"{prefix}ffn_{part}_exps.weight") for part in parts]
    return sum(tensor.nbytes // tensor.shape[0] for tensor in tensors)


class Guessed:
    """Adds up what guesses come to, layer by layer.

    tokens: int64 [n], indices of the held-out tokens that count, ascending; all sessions that one of them is of are
    replayed. sizes: bytes of an expert of each of the trace's layers.
    """

    def __init__(self, trace: RoutingTrace, tokens: Tokens, sizes: Sequence[int], profile: Profile | None) -> None:
        self._sizes, self._layers, self._n_used = sizes, trace.layers, trace.experts.shape[2]
        self._n_expert = trace.n_expert
        self._experts = trace.experts[tokens]
        kept = np.isin(trace.session, np.unique(trace.session[tokens]))
        held_out = replace(
            trace, experts=trace.experts[kept], generated=trace.generated[kept], session=trace.session[kept],
            position=trace.position[kept],
        )  # fmt: skip
        self._recording, self._tokens = Recording(held_out), np.searchsorted(np.flatnonzero(kept), tokens)
        self._placed = {percent: self._place(percent, profile) for percent in RESIDENCIES}
        self._residents: tuple[int, dict[float, npt.NDArray[np.bool_]]] = (-1, {})  # of the layer asked for last
        self._sums: dict[tuple[str, int, float, int, float], npt.NDArray[np.float64]] = {}
        self._tables: list[dict[str, Any]] = []

    def _place(self, percent: float, profile: Profile | None) -> Placed:
        counts = SPARK.counts(profile, self._layers, self._n_expert)
        experts = Experts(counts, self._sizes, n_used=self._n_used)
        budget = placement.residency_budget(self._n_expert, self._sizes, percent)
        return policies.place(SPARK, experts, budget, profile)

    def _resident(self, layer: int) -> dict[float, npt.NDArray[np.bool_]]:
        """At each residency, which experts of a layer are resident when the tokens come, bool [n, E]."""
        if self._residents[0] != layer:
            found = {
                percent: self._recording.residents(layer, placed.placement, placed.rule, self._tokens)
                for percent, placed in self._placed.items()
            }
            self._residents = layer, found
        return self._residents[1]

    def add(self, layer: int, target: int, scores: Mapping[str, npt.NDArray[Any]]) -> None:
        """Judge predictors' scores [n, E] of the experts of `target` when the residual enters `layer`; numbers of both.

        Chances of the first half of the tokens are by a table that was fitted to the second, and the other way round,
        so no token is judged by a table that it made. The table that is kept is fitted to all.
        """
        experts = self._experts[:, target].astype(np.int64)
        used = np.zeros((len(experts), self._n_expert), np.bool_)
        np.put_along_axis(used, experts, True, 1)
        half = len(experts) // 2
        for name in (name for name in SOURCES if name in scores):
            margin = guesses.margins(scores[name], self._n_used)
            if name in WITH_TABLE:
                table = guesses.fit(margin, used)
                self._tables.append({
                    "predictor": name, "layer": self._layers[layer], "target_layer": self._layers[target],
                    "knots": table.knots.tolist(), "values": table.values.tolist(),
                })  # fmt: skip
            crossed = [guesses.fit(margin[part], used[part]) for part in (slice(half, None), slice(half))]
            chances = np.concatenate([crossed[0].of(margin[:half]), crossed[1].of(margin[half:])])
            for percent, resident in self._resident(target).items():
                self._count(name, target - layer, percent, target, chances, resident, used)

    def _count(
        self, name: str, ahead: int, percent: float, target: int, chances: guesses.F64,
        resident: npt.NDArray[np.bool_], used: npt.NDArray[np.bool_],
    ) -> None:  # fmt: skip
        rules = [*((budget, 0.0) for budget in BUDGETS), (self._n_used, THRESHOLD)]
        best = guesses.ranked(chances, resident, max(budget for budget, _ in rules))
        there = best >= 0
        chance = np.where(there, np.take_along_axis(chances, np.maximum(best, 0).astype(np.int64), 1), 0.0)
        true = there & np.take_along_axis(used, np.maximum(best, 0).astype(np.int64), 1)
        misses = int((used & ~resident).sum())
        for budget, threshold in rules:
            made = (there & (chance > threshold))[:, :budget]
            n, useful = int(made.sum()), int((made & true[:, :budget]).sum())
            promised = float(chance[:, :budget][made].sum())
            more = np.array([n, useful, promised, misses, (n - useful) * self._sizes[target]], np.float64)
            key = name, ahead, percent, budget, threshold
            self._sums[key] = self._sums.get(key, np.zeros(5)) + more

    def rows(self) -> tuple[GuessRow, ...]:
        """What was added up, a row for each predictor, way ahead, residency and rule."""
        n = max(1, len(self._experts))
        made_of = []
        for (name, ahead, percent, budget, threshold), sums in self._sums.items():
            made, useful, promised, misses, wasted_bytes = sums.tolist()
            made_of.append(
                GuessRow(
                    name,
                    ahead,
                    percent,
                    budget,
                    threshold,
                    precision=useful / made if made else 0.0,
                    promised=promised / made if made else 0.0,
                    recall=useful / misses if misses else 0.0,
                    misses_per_token=misses / n,
                    guesses_per_token=made / n,
                    useful_per_token=useful / n,
                    wasted_bytes_per_token=wasted_bytes / n,
                )
            )
        return tuple(sorted(made_of, key=lambda row: (row.ahead, row.residency_pct)))

    def tables(self) -> list[dict[str, Any]]:
        """The tables of chances, as the file of predictors keeps them."""
        return self._tables
