"""DFlash: a block of tokens guessed in one forward of a small model, from features of the one that generates.

The features of a position, what left the captured layers of the target there, go through `fc` and a norm, and every
layer of the drafter makes a key and a value of them: that is all the drafter keeps of a context. A draft is a block of
the last token, drawn and not fed, and masks; its layers see the context and all of the block, and the head says what
stands in the place of each mask (docs/models.md, "Drafters").

All of it is made of the ops that models are made of. The concatenation of features is never made: `fc` is a sum of a
product for each captured layer. Attention is causal by an op's arguments alone, so the queries of a block are given
the position of its last token there, and their own in RoPE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.drafting.confidence import sureness
from engine.drafting.drafter import DrafterConfig, DrafterWeights
from engine.drafting.source import Draft, Promise
from engine.formats.quants import QTensor
from engine.models.scaling import scaled_rope_table
from engine.ops import F32, KV_BLOCK_TOKENS, SMALL_TOKENS, AttentionInput, KVLayer, Limits
from engine.ops.device import Array, Memory
from engine.ops.interface import Ops, Workspace

NAME = "dflash"
# Chances of a draft's tokens, as `gate.Priors`: what published drafters reach on code; the first drafts correct it.
PRIORS = ((0.75, 0.70, 0.65, 0.60, 0.55, 0.50),)
FEED_TOKENS = 64  # positions whose features become keys and values in one step


@dataclass(slots=True, eq=False)
class Ring:
    """What a drafter keeps of one reply: keys and values of the last positions, in a part of each layer's cache.

    number: of the part. waiting: room for features [n, FEED_TOKENS, D] of which nothing was made yet. first, end:
    positions whose features are there. top: one more than the largest that was written, blocks included: it says what
    has been written over. base: the position that lies at the part's beginning. Attention counts from there, so it
    needs no window for what is not there before it: on a device each window is a kernel of its own.
    """

    number: int
    waiting: Array
    first: int = 0
    end: int = 0
    top: int = 0
    base: int = 0

    def begin(self, position: int) -> None:
        """Forget all that is there; what comes begins at a position."""
        self.base = self.first = self.end = self.top = position


def drafter_limits(config: DrafterConfig, n_vocab: int, n_ctx: int) -> Limits:
    """Bounds of a drafter's steps, for its workspace; n_vocab: of the target."""
    return Limits(
        max_tokens=max(FEED_TOKENS, config.block_tokens),
        n_embd=config.n_embd,
        n_head_dim=config.n_head * config.head_dim,
        n_ff=config.n_ff,
        n_vocab=max(n_vocab, config.n_draft),
        n_expert=0,
        n_expert_used=0,
        n_head=config.n_head,
        n_head_kv=config.n_head_kv,
        head_dim=config.head_dim,
        n_ctx=n_ctx + config.block_tokens,
        max_rows=config.block_tokens,
        max_sequences=1,
        places=1,
    )


class Drafter:
    """A drafter on a device: its weights, buffers, and rings of as many replies as may draft at a time.

    weights: placed on the device. token_embd, output: the target's, for a drafter without its own. n_ctx: positions of
    a sequence. ws: a workspace within `drafter_limits`. Everything is allocated here.
    """

    def __init__(
        self, device: Memory, ops: Ops, ws: Workspace, config: DrafterConfig, weights: DrafterWeights,
        token_embd: QTensor, output: QTensor, n_ctx: int, n_rings: int = 1,
    ) -> None:  # fmt: skip
        self.config, self.n_ctx = config, n_ctx
        self._device, self._ops, self._ws, self._weights = device, ops, ws, weights
        self._token_embd = token_embd if weights.token_embd is None else weights.token_embd
        self._output = output if weights.output is None else weights.output
        # Keys and values of features: their norm is the one behind `fc`. An op that makes these makes queries, too;
        # those of one head are the fewest, and nobody reads them.
        self._contexts = [
            AttentionInput(
                weights.norm, own.wq.rows(0, config.head_dim), own.wk, own.wv, q_norm=own.q_norm, k_norm=own.k_norm
            )
            for own in (layer.attention.inputs for layer in weights.layers)
        ]
        c, B = config, config.block_tokens
        T, reach = ws.limits.max_tokens, max(c.reach)
        # A block of the ring may hold the end of one logical block and the beginning of another, which no window sees.
        self._n_blocks = -(-(reach + B) // KV_BLOCK_TOKENS)
        self.ring_tokens = self._n_blocks * KV_BLOCK_TOKENS
        shape = (n_rings * self.ring_tokens, c.n_head_kv, c.head_dim)
        self._layers = tuple(KVLayer(device.empty(shape, np.float16), device.empty(shape, np.float16)) for _ in c.reach)
        waiting = len(weights.fc), FEED_TOKENS, weights.fc[0].shape[1]
        self._rings = [Ring(i, device.empty(waiting, np.float32)) for i in range(n_rings)]
        self._taken: list[Ring] = []
        n_logical = -(-(n_ctx + B) // KV_BLOCK_TOKENS)
        firsts = self._n_blocks * np.arange(n_rings, dtype=np.int32)
        self._table = device.upload(firsts[:, None] + np.arange(n_logical, dtype=np.int32) % self._n_blocks)
        self._rope = device.upload(scaled_rope_table(n_ctx + B, c.n_rot, c.rope_base, c.scaling))
        width = c.n_head * c.head_dim
        self._fused = device.empty((T, c.n_embd), np.float32)
        self._unread = device.empty((T, 1, c.head_dim), np.float32)
        self._x, self._h = (device.empty((B, c.n_embd), np.float32) for _ in range(2))
        self._q = device.empty((B, c.n_head, c.head_dim), np.float32)
        self._attended = device.empty((B, width), np.float32)
        self._logits = device.empty((B - 1, self._output.shape[0]), np.float32)
        self._positions, self._slots = (device.empty(T, np.int32) for _ in range(2))
        self._tokens, self._seen = (device.empty(B, np.int32) for _ in range(2))
        self._places: dict[int, tuple[Array, Array]] = {}  # positions and slots of n tokens
        self._sequence = device.empty(B, np.int32)
        self._rows = device.upload(np.arange(1, B, dtype=np.int32))

    @property
    def nbytes(self) -> int:
        """Bytes of rings, tables and buffers."""
        rings = [ring.waiting for ring in (*self._rings, *self._taken)]
        layers = [array for layer in self._layers for array in (layer.k, layer.v)]
        own = (
            self._table, self._rope, self._fused, self._unread, self._x, self._h, self._q, self._attended, self._logits
        )  # fmt: skip
        return sum(int(a.nbytes) for a in (*rings, *layers, *own))

    def ring(self) -> Ring | None:
        """A ring without any features, or None where all are taken."""
        if not self._rings:
            return None
        ring = self._rings.pop()
        self._taken.append(ring)
        ring.begin(0)
        return ring

    def give_back(self, ring: Ring) -> None:
        """The reply of a ring has ended."""
        self._taken.remove(ring)
        self._rings.append(ring)

    def rehearse(self) -> None:
        """Steps of every kind, of features that mean nothing, so that whatever they launch is compiled."""
        ring = self.ring()
        assert ring is not None, "replies have all rings"
        for n in (1, 2, SMALL_TOKENS // 2, SMALL_TOKENS, FEED_TOKENS):
            self.feed(ring, ring.waiting[:, :n], 0)
        for n in {1, self.config.block_tokens - 1}:
            self.logits(ring, 0, n)
        self.give_back(ring)

    def close(self) -> None:
        """Release the workspace."""
        self._ws.close()

    def keep(self, ring: Ring, features: Sequence[Array] | Array, at: int) -> None:
        """Copy features to where they can wait, from row `at` on."""
        for to, feature in zip(ring.waiting, features, strict=True):
            self._device.copy(self._device.pointer(to[at:]), self._device.pointer(feature), feature.nbytes)

    def feed(self, ring: Ring, features: Sequence[Array] | Array, position: int) -> None:
        """Keep the features of positions from `position` on: float32 [T, D] of each captured layer, on the device.

        They may begin behind what is there, after a prefix that was not computed, or before its end, where tokens were
        taken back.
        """
        T = len(features[0])
        start = self._goes_on(ring, position, T)
        step = self._ws.limits.max_tokens
        for a in range(start, T, step):
            n = min(step, T - a)
            self._place(ring, position + a, n)
            self._keep([feature[a : a + n] for feature in features])
        self._written(ring, position + T)

    def feed_waiting(self, ring: Ring, n: int, position: int) -> None:
        """`feed` of the first n features that wait."""
        self.feed(ring, ring.waiting[:, :n], position)

    def _goes_on(self, ring: Ring, position: int, T: int) -> int:
        """Say that features of T positions come; how many of them are too many."""
        start = max(0, T - self.ring_tokens)  # of more than a ring holds, the last
        if start or not ring.first < position <= ring.end:  # nothing of what is there comes before
            ring.begin(position + start)
        ring.end = position + T
        return start

    def _keep(self, features: Sequence[Array] | Array) -> None:
        """Keys and values of features, [n, D] of each captured layer, where `_place` has said."""
        c, ops, ws, n = self.config, self._ops, self._ws, len(features[0])
        fused, unread = self._fused[:n], self._unread[:n]
        for k, (matrix, feature) in enumerate(zip(self._weights.fc, features, strict=True)):
            ops.attention_output(ws, feature, matrix, fused, add=k > 0)
        for context, kv in zip(self._contexts, self._layers, strict=True):
            ops.attention_input(ws, fused, context, c.eps, self._rope, self._positions[:n], kv, self._slots[:n], unread)

    def _place(self, ring: Ring, position: int, n: int, n_rows: int = 0) -> None:
        """Positions and slots of n tokens, to the device; rows beyond, up to n_rows of them, are stored nowhere."""
        n_rows = max(n, n_rows)
        if n_rows not in self._places:
            self._places[n_rows] = self._positions[:n_rows], self._slots[:n_rows]
        positions = np.minimum(np.arange(position, position + n_rows), position + n - 1).astype(np.int32)
        slots = (ring.number * self.ring_tokens + (positions - ring.base) % self.ring_tokens).astype(np.int32)
        slots[n:] = -1
        at = self._places[n_rows]
        self._ws.feed([(at[0], positions), (at[1], slots)])

    def _written(self, ring: Ring, end: int) -> None:
        ring.top = max(ring.top, end)
        ring.first = max(ring.first, ring.top - self.ring_tokens)

    def draft(self, ring: Ring, token: int, most: int) -> tuple[int, ...]:
        """At most `most` tokens behind `token`, which stands where the features end; none where there are none."""
        draft = self.drafted(ring, token, most)
        return () if draft is None else tuple(draft.tokens)

    def drafted(self, ring: Ring, token: int, most: int, sure: bool = False) -> Draft | None:
        """The same as a draft, with how sure the drafter is of each, which it is wherever the host has logits."""
        n = self._room(ring, most)
        if n < 1:
            return None
        logits = np.asarray(self._device.read(self.logits(ring, token, n)))
        return Draft(NAME, 0, self._of_target(logits.argmax(axis=1).tolist()), sure=sureness(logits))

    def logits(self, ring: Ring, token: int, n: int) -> F32:
        """What the head says of the first n masks of a block behind the features, [n, rows of the head]."""
        self._begin(ring, token)
        known = [min(reach, ring.end - ring.first + 1) for reach in self.config.reach]
        end = ring.end - ring.base + self.config.block_tokens
        logits = self._block(n, self.config.reach if self._sees_all(ring) else known, end)
        self._written(ring, ring.end + self.config.block_tokens)
        return logits

    def _room(self, ring: Ring, most: int) -> int:
        """How many tokens can be drafted, of so many at most."""
        n = min(most, self.config.block_tokens - 1)
        return n if ring.first < ring.end < self.n_ctx else 0

    def _sees_all(self, ring: Ring) -> bool:
        """Whether a block's windows hold nothing that was written over; where tokens were taken back they may."""
        return ring.first == ring.base or ring.end - ring.first + 1 >= max(self.config.reach)

    def _of_target(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Tokens of the target that rows of the head stand for."""
        d2t = self._weights.d2t
        return tuple(ids) if d2t is None else tuple(d2t[i] for i in ids)

    def _begin(self, ring: Ring, token: int) -> None:
        """What a block's kernels read: tokens, positions, places."""
        c, B = self.config, self.config.block_tokens
        tokens = np.full(B, c.mask_token, np.int32)
        tokens[0] = token
        self._place(ring, ring.end, B)
        start = ring.end - ring.base
        seen = np.arange(start, start + B) if c.causal else np.full(B, start + B - 1)
        sequence = np.full(B, ring.number, np.int32)
        self._ws.feed([(self._tokens, tokens), (self._seen, seen.astype(np.int32)), (self._sequence, sequence)])

    def _block(self, n: int, reach: Sequence[int], end: int) -> F32:
        """A block through all layers, and the head of its first n masks.

        reach: positions that each layer sees. end: of the block, from the ring's base, which long blocks need.
        """
        c, ops, ws, w, B = self.config, self._ops, self._ws, self._weights, self.config.block_tokens
        positions, slots = self._positions[:B], self._slots[:B]
        ops.embed(ws, self._token_embd, self._tokens, self._x, scale=c.embed_scale)
        for layer, kv, known in zip(w.layers, self._layers, reach, strict=True):
            inputs = layer.attention.inputs
            ops.attention_input(ws, self._x, inputs, c.eps, self._rope, positions, kv, slots, self._q)
            # A query that sees all of the block begins where its first one does: that much more in all.
            window = known if c.causal else known + B - 1
            ops.attention(
                ws,
                self._q,
                kv,
                self._table,
                self._sequence,
                self._seen,
                c.scale,
                self._attended,
                end,
                window=window,
                as_block=not c.causal,
            )
            ops.attention_output(ws, self._attended, layer.attention.wo, self._x)
            ops.norm(ws, self._x, layer.ffn_norm, c.eps, self._h)
            ops.dense_ffn(ws, self._h, layer.ffn.gate, layer.ffn.up, layer.ffn.down, self._x)
        logits: F32 = self._logits[:n]
        ops.head(ws, self._x, self._rows[:n], w.output_norm, c.eps, self._output, logits)
        return logits


class DFlash:
    """Drafts of one reply (`source.Source`), as long as it is told the features of what was fed.

    Most steps get no computed draft, so the features of a few tokens wait until one is asked for, or there are many.
    """

    def __init__(self, drafter: Drafter, ring: Ring) -> None:
        self._drafter, self._ring = drafter, ring
        self._token = 0  # that a draft is to follow
        self._at = self._n = 0  # positions that wait: the first, and how many

    def feed(self, features: Sequence[Array] | Array, position: int) -> None:
        """As `Drafter.feed`: of what stays of a step."""
        n = len(features[0])
        if self._n and (position != self._at + self._n or self._n + n > FEED_TOKENS):
            self._feed_waiting()
        if n >= FEED_TOKENS:
            self._drafter.feed(self._ring, features, position)
            return
        if not self._n:
            self._at = position
        self._drafter.keep(self._ring, features, self._n)
        self._n += n

    def _feed_waiting(self) -> None:
        if self._n:
            self._drafter.feed_waiting(self._ring, self._n, self._at)
            self._n = 0

    def promise(self, history: Sequence[int], most: int, least: float = 0.0) -> Promise | None:
        """As `Source.promise`; None unless the features end right before the last token of `history`."""
        ring, drafter = self._ring, self._drafter
        n, end = min(most, drafter.config.block_tokens - 1), self._at + self._n if self._n else ring.end
        if n < 1 or end != len(history) - 1 or end >= drafter.n_ctx or not (self._n or ring.first < end):
            return None
        self._token = history[-1]
        return Promise(NAME, 0, n, is_block=True)

    def draft(self, n_tokens: int, sure: bool = False) -> Draft | None:
        """As `Source.draft`."""
        self._feed_waiting()
        return self._drafter.drafted(self._ring, self._token, n_tokens, sure)

    def close(self) -> None:
        """As `Source.close`."""
        self._drafter.give_back(self._ring)
