"""Ways to choose the blocks that a decoded token reads, beside the one that is served: for benchmarks of recall.

*Sketch* is served: 2 bits of each key in the half of the channels that varies most in a block. The others are computed
here over all keys before the tail: one mean, and four; extremes, as Quest; keys
in 2 or 4 bits; the true masses, which no summary can beat; the latest blocks; any. And other forms of the sketch: with
queries that are not rounded to 8 bits; by the largest score of a sketched key in place of the sum of exponentials; of
each two neighboring channels the one that varies more; of a quarter of the channels.

*KVFlash* is the choice of Lucebox's pool of that name: one for all layers and heads, by the product of a query and the
mean of a block's keys, brought to one length; its largest over heads, the mean over layers, from the last token of the
step before: the prompt's at first, then once in as many tokens as are fed at a time.

*One for two layers*, *for all*: the sketch, but layers read what one ahead of them has chosen, for the same KV head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.ops import KV_BLOCK_TOKENS, TAIL_BLOCKS, cpu
from engine.placing.summaries import Extremes, Means, Sketch, Summary, log_sum

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to choose.

    keep: of keys [B, 64, d] whatever is kept of them. weigh: of queries [R, d], that and the scale the logarithms of
    the masses of blocks [R, B], or what else they are ranked by. blind: by no keys; what is kept is how many blocks
    there are.
    """

    keep: Callable[[Array], Any]
    weigh: Callable[[Array, Any, float], Array]
    blind: bool = False


def by(kind: Summary) -> Choice:
    """By what a summary estimates."""
    return Choice(kind.of, lambda q, kept, scale: kind.masses(kept, q, scale)[0])


def masses(q: Array, keys: Array, scale: float) -> Array:
    """What is to be estimated, of keys [B, 64, d]."""
    scores = _scores(q, keys, scale)
    top = scores.max(axis=2, keepdims=True)
    np.exp(np.subtract(scores, top, out=scores), out=scores)  # in place: it is large
    return np.asarray(top[:, :, 0] + np.log(scores.sum(axis=2)))


def largest(q: Array, keys: Array, scale: float) -> Array:
    """The largest score of a key in place of that."""
    return np.asarray(_scores(q, keys, scale).max(axis=2))


def _scores(q: Array, keys: Array, scale: float) -> Array:
    products = (q * scale).astype(q.dtype) @ keys.reshape(-1, keys.shape[2]).T
    return np.asarray(products.reshape(len(q), *keys.shape[:2]))


def some_channels(bits: int, of: int, pairs: bool = False) -> Callable[[Array], Array]:
    """Keys in so many bits, of the channels that vary most in a block, one of so many; the others are their means.

    pairs: of each two neighbors the one that varies more.
    """

    def keep(keys: Array) -> Array:
        least, most = keys.min(axis=1, keepdims=True), keys.max(axis=1, keepdims=True)
        step = np.where(most > least, (most - least) / ((1 << bits) - 1), 1.0)
        order = np.argsort(-(most - least)[:, 0], axis=1, kind="stable")
        kept = np.zeros(order.shape, bool)
        np.put_along_axis(kept, order[:, : keys.shape[2] // of], True, axis=1)
        if pairs:
            spread = (most - least).reshape(len(keys), -1, 2)
            kept = (spread == spread.max(axis=2, keepdims=True)).reshape(kept.shape)
        sketch = least + np.rint((keys - least) / step) * step
        return np.where(kept[:, None], sketch, keys.mean(axis=1, keepdims=True)).astype(keys.dtype)

    return keep


def in_bits(bits: int) -> Choice:
    """By all keys in so many bits, as a sketch keeps them."""
    sketch = Sketch(bits)
    return Choice(lambda keys: sketch.keys(sketch.of(keys)).astype(keys.dtype), masses)


def by_age() -> Choice:
    """The latest blocks."""
    return Choice(len, lambda q, n, scale: np.broadcast_to(np.arange(n, dtype=np.float64), (len(q), n)), blind=True)


def by_chance(seed: int) -> Choice:
    """Any blocks."""
    rng = np.random.default_rng(seed)
    return Choice(len, lambda q, n, scale: np.broadcast_to(rng.random(n), (len(q), n)), blind=True)


# None: the choice that is served. Bytes of a summary, by those of the block's keys and values in f16.
CHOICES: dict[str, Choice | None] = {
    "sketch": None, "one mean": by(Means(1)), "4 means": by(Means(4)), "extremes": by(Extremes()),
    "2 bits": in_bits(2), "4 bits": in_bits(4), "exact": Choice(lambda keys: keys, masses), "recent": by_age(),
    "random": by_chance(1),
}  # fmt: skip
SKETCHES = {
    "sketch, not rounded": Choice(some_channels(2, 2), masses),
    "largest key of it": Choice(some_channels(2, 2), largest),
    "2 bits, one of two": Choice(some_channels(2, 2, pairs=True), masses),
    "2 bits of a quarter": Choice(some_channels(2, 4), masses),
}
BYTES = {
    "sketch": 11.125 / 256, "sketch, not rounded": 11.125 / 256, "largest key of it": 11.125 / 256,
    "2 bits, one of two": 11.0625 / 256, "2 bits of a quarter": 6.625 / 256, "one mean": 2 / 256, "4 means": 8 / 256,
    "extremes": 4 / 256, "KVFlash": 2 / 256, "2 bits": 20 / 256, "4 bits": 36 / 256,
}  # fmt: skip


@dataclass(slots=True)
class Seen:
    """Of rows, layers and heads: shares of mass that were left out, in truth and as estimated; of rows: blocks read."""

    true: list[float] = field(default_factory=list)
    estimated: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Keys:
    """The keys of a sequence as attention has them. shared: of how many of its first blocks what is kept is kept on.

    Whoever shares blocks promises that they are the same ones in every call until `forget`.
    """

    dtype: Any = np.float64
    shared: int = 0
    _kept: dict[tuple[int, int, Choice], Any] = field(default_factory=dict)

    def forget(self, shared: int = 0) -> None:
        """Other blocks are shared from now on."""
        self._kept.clear()
        self.shared = shared

    def of(self, kv: Any, table: Array, head: int, begin: int, end: int) -> Array:
        """Those of a head in some blocks, [B, 64, d]."""
        slots = table[begin:end, None] * KV_BLOCK_TOKENS + np.arange(KV_BLOCK_TOKENS)
        return np.asarray(kv.k[slots, head].astype(self.dtype))

    def weighed(self, choice: Choice, q: Array, kv: Any, table: Array, head: int, n: int, scale: float) -> Array:
        """What a choice ranks the first n blocks by for queries [R, d] of a head: [R, n]."""
        if choice.blind:
            return choice.weigh(q, n, scale)
        parts, m = [], min(n, self.shared)
        if m:
            name = kv.k.ctypes.data, head, choice
            if name not in self._kept:
                self._kept[name] = choice.keep(self.of(kv, table, head, 0, self.shared))
            parts.append(choice.weigh(q, self._kept[name], scale)[:, :m])
        if m < n:
            parts.append(choice.weigh(q, choice.keep(self.of(kv, table, head, m, n)), scale))
        return np.concatenate(parts, axis=1)


def best(weighed: Array, most: int) -> Array:
    """The blocks but for the first that have the largest share for any row of [R, B]; ties go to the earlier block."""
    shares = (weighed - log_sum(weighed)[:, None]).max(axis=0)
    return np.argsort(-shares[1:], kind="stable")[:most] + 1


@dataclass(slots=True)
class Alike:
    """Chooses for all layers and heads at once, from what the last row of the step before asked for.

    What it is told of a step are the calls of attention, a layer after the other.
    """

    _layers: dict[int, Array] = field(default_factory=dict)  # by the address of its keys: scores of blocks
    _ranked: Array = field(default_factory=lambda: np.zeros(0))

    def told(self, q: Any, kv: Any, table: Array, positions: Array, keys: Keys) -> None:
        """A layer of a step is about to run."""
        layer, blocks = kv.k.ctypes.data, int(positions[-1]) // KV_BLOCK_TOKENS
        if layer in self._layers:  # a step begins
            n = min(map(len, self._layers.values()))
            self._ranked = np.mean([scores[:n] for scores in self._layers.values()], axis=0)
            self._layers.clear()
        best = np.full(blocks, -np.inf)
        group = q.shape[1] // kv.k.shape[1]
        for head in range(kv.k.shape[1]):
            means = keys.of(kv, table, head, 0, blocks).mean(axis=1)
            own = q[-1, head * group : (head + 1) * group].astype(keys.dtype)
            means = means / np.maximum(np.linalg.norm(means, axis=1), 1e-30)[:, None]
            best = np.maximum(best, (own @ means.T).max(axis=0))
        self._layers[layer] = best

    def of(self, behind: int, most: int) -> Array:
        """The blocks that a row reads of those before its tail; who is not ranked yet comes first, as the latest do."""
        ranked = np.full(behind, np.inf)
        ranked[: len(self._ranked)] = self._ranked[:behind]
        return np.argsort(-ranked[1:], kind="stable")[:most] + 1


@dataclass(frozen=True, slots=True)
class Layers:
    """Some layers read what one ahead of them chose as it is served, or with `latest` as many of the latest blocks.

    Layer `first` chooses, and of those behind it one in `every`; those ahead of it do, too.
    """

    every: int
    first: int = 0
    latest: bool = False
    _known: list[int] = field(default_factory=list)  # layers, by the addresses of their keys
    _chosen: list[Array] = field(default_factory=list)  # the last choice

    def told(self, kv: Any, chosen: Array) -> None:
        """A layer of a step is about to run and has chosen: [T, K, W]."""
        if kv.k.ctypes.data not in self._known:
            self._known.append(kv.k.ctypes.data)
        behind = self._known.index(kv.k.ctypes.data) - self.first
        if behind < 0 or behind % self.every == 0:
            self._chosen[:] = [chosen.copy()]
        elif not self.latest:
            chosen[...] = self._chosen[0]
        else:
            for row in chosen.reshape(-1, chosen.shape[-1]):
                n, end = int(row.sum()), int(np.flatnonzero(row)[-1]) + 1
                row[1:end] = np.arange(1, end) > end - n


LAYERS = {
    "one for all layers": Layers(1 << 30), "one for two layers": Layers(2),
    "one for two, from the second on": Layers(2, 1), "the latest in every second": Layers(2, 1, latest=True),
}  # fmt: skip


@contextmanager
def choosing(choice: Choice | Alike | Layers | None, most: int, keys: Keys, seen: Seen | None = None) -> Iterator[None]:
    """Let attention of the CPU backend read the blocks that a choice takes, `most` of those that need not be read.

    None: those that were chosen. seen: is told what was left out. A choice for all layers is to see the end of the
    prompt, too.
    """
    plain = cpu.attention

    def attention(
        ws: Any, q: Any, kv: Any, table: Any, sequence: Any, positions: Any, scale: float, out: Any, *more: Any,
        recall: Any = None, **also: Any,
    ) -> None:  # fmt: skip
        if isinstance(choice, Alike):
            choice.told(q, kv, table[0], positions, keys)
        if recall is None:
            return plain(ws, q, kv, table, sequence, positions, scale, out, *more, **also)
        T, K = len(positions), kv.k.shape[1]
        group, blocks = q.shape[1] // K, positions // KV_BLOCK_TOKENS + 1
        behind = np.maximum(blocks - 1 - TAIL_BLOCKS, 0)
        if isinstance(choice, Layers):
            choice.told(kv, recall.chosen)
        for t in np.flatnonzero(behind - 1 > most) if isinstance(choice, Alike) else ():
            recall.chosen[t, :, 1 : behind[t]] = 0
            recall.chosen[t, :, choice.of(int(behind[t]), most)] = 1
        by_head = isinstance(choice, Choice) and behind.max() - 1 > most
        for head in range(K if by_head else 0):
            assert isinstance(choice, Choice)
            rows = q[:, head * group : (head + 1) * group].reshape(T * group, -1).astype(keys.dtype)
            weighed = keys.weighed(choice, rows, kv, table[0], head, int(behind.max()), scale).reshape(T, group, -1)
            for t in np.flatnonzero(behind - 1 > most):
                recall.chosen[t, head, 1 : behind[t]] = 0
                recall.chosen[t, head, best(weighed[t, :, : behind[t]], most)] = 1
        if seen is not None:
            _left_out(seen, keys, q, kv, table[0], positions, scale, recall.chosen)
        plain(ws, q, kv, table, sequence, positions, scale, out, *more, recall=recall, **also)
        if seen is not None:
            seen.estimated += recall.missed.reshape(-1).tolist()

    cpu.attention = attention
    try:
        yield
    finally:
        cpu.attention = plain


def _left_out(seen: Seen, keys: Keys, q: Any, kv: Any, table: Any, positions: Any, scale: float, chosen: Any) -> None:
    """Count the mass of what was not chosen, from all keys."""
    group, blocks = q.shape[1] // kv.k.shape[1], int(positions[-1]) // KV_BLOCK_TOKENS + 1
    for head in range(kv.k.shape[1]):
        of = keys.of(kv, table, head, 0, blocks).reshape(blocks * KV_BLOCK_TOKENS, -1)
        for t, p in enumerate(positions.tolist()):
            rows = q[t, head * group : (head + 1) * group].astype(keys.dtype)
            scores = scale * (rows @ of.T)[:, : p + 1]
            left = np.repeat(chosen[t, head, :blocks] == 0, KV_BLOCK_TOKENS)[: p + 1]
            seen.true += np.exp(log_sum(scores[:, left]) - log_sum(scores)).tolist()
    for t, p in enumerate(positions.tolist()):
        seen.read.append(float(chosen[t].sum()) / chosen.shape[1] / (p // KV_BLOCK_TOKENS + 1))
