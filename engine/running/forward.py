"""A model laid out on a device: placed weights, cache, workspace and buffers, and one function that runs a step.

Everything is allocated in the constructor, in an order and in sizes that depend on the configuration alone; so
the same constructor over a device that only counts is the memory plan (engine/placing/plan.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from engine.formats.quants import QTensor
from engine.memory.blocks import Sequence as Cached
from engine.memory.blocks import block_table
from engine.memory.kv import KVCache
from engine.memory.residency import ExpertTensors, Residency
from engine.models import layers
from engine.models.layers import KEPT_TOKENS, Architecture, Buffers, ModelConfig, Pass, Recurrent, Step
from engine.models.loading import Weights
from engine.models.nextn import Block, WithBlock
from engine.ops import F32, I32, SMALL_TOKENS, Fetches, Limits
from engine.ops.cuda.replay import Replay
from engine.ops.cuda.views import Views
from engine.ops.cuda.workspace import Workspace as DeviceWorkspace
from engine.ops.device import Memory
from engine.ops.interface import Ops, Workspace
from engine.running.recall import Part, Recalling

GRAPH_TOKENS = (1, 2, 4, 8, 16, 32)  # tokens of a step that a device with graphs captures
MAX_NOTED = 64  # shapes of steps whose calls are known
MAX_ROWS = 64  # rows of logits held at once: 39 MB for a vocabulary of 152K


# What a step's kernels read of it; the rest is the host's.
Put = Callable[[NDArray[Any]], Any]


def placed(record: Any, put: Put) -> Any:
    """A record of weights with `put` of every matrix and norm; stacked experts stay where they are."""
    if isinstance(record, QTensor):
        return dataclasses.replace(record, data=put(record.data))
    if isinstance(record, np.ndarray):
        return put(record)
    if isinstance(record, tuple):
        return tuple(placed(item, put) for item in record)
    if dataclasses.is_dataclass(record) and not isinstance(record, ExpertTensors | type):
        values = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
        new: dict[str, Any] = {}
        for name, value in values.items():
            # A tied output matrix is one array under two names, before and after.
            twin = next((n for n in new if values[n] is value), None)
            new[name] = placed(value, put) if twin is None else new[twin]
        return type(record)(**new)
    return record


class Forward:
    """Weights, cache, workspace and buffers of a model on one device.

    arch, config, weights: the architecture's module, its configuration and the mapped weights. ops, ws: the
    backend and its workspace. kv_tokens, pool_tokens: positions that the cache holds, and on the device. put: gives the
    device's copy of a weight, whose bytes may come later; by default `device.upload`. ropes: tables of RoPE, by default
    the architecture's.
    captured: layers whose features are kept, as `capture_features` has it. block: of a model that drafts by one
    (running/mtp.py), which is placed with the weights and has a layer in the cache. recall: what decoded rows read
    beside what they read anyway, unless their request says otherwise; None: all rows read all.
    Inputs of a step are copied to the same device arrays every time, so that a captured graph finds them.
    """

    def __init__(
        self, device: Memory, ops: Ops, ws: Workspace, arch: Architecture, config: ModelConfig, weights: Weights[Any],
        limits: Limits, kv_tokens: int, kv_type: str, put: Put | None = None, ropes: Sequence[F32] | None = None,
        captured: tuple[int, ...] = (), block: Block | None = None, pool_tokens: int | None = None,
        recall: Part | None = None,
    ) -> None:  # fmt: skip
        self.device, self.ops, self.ws = device, ops, ws
        self.arch, self.config, self.limits = arch, config, limits
        self.weights: Weights[Any] = placed(weights, put or device.upload)
        self.block: Block | None = None if block is None else placed(block, put or device.upload)
        cached = config if block is None else WithBlock(config)
        self.kv = KVCache(device, cached, kv_tokens, kv_type, limits.max_tokens, limits.places, pool_tokens)
        self.recalling: Recalling | None = None
        if recall is not None:
            self.recalling = Recalling.made(recall, device, config, self.kv, limits)
        self.ropes = tuple(map(device.upload, arch.rope_tables(config, limits.n_ctx) if ropes is None else ropes))
        self._hidden: F32 | None = None
        self._views: dict[tuple[int, int, int], Step] = {}  # of the inputs, for the shapes of steps
        self._tables: dict[tuple[int, int], tuple[I32, ...]] = {}
        self._noted: dict[Hashable, tuple[Weights[Any], Any]] = {}  # what a step of a shape called, and with which
        T, c = limits.max_tokens, config
        L, n_blocks = len(c.moe_layers), -(-limits.n_ctx // 64)
        w = c.widths
        n_delta = 0 if c.delta is None else len(c.delta.layers)
        delta_width = w.n_mixed + 2 * w.n_head_v
        self.buffers = Buffers(
            x=device.empty((T, c.n_embd), np.float32),
            h=device.empty((T, c.n_embd), np.float32),
            y=device.empty((T, c.n_embd), np.float32),
            scratch_q=device.empty(T * w.n_head_dim, np.float32),
            scratch_attended=device.empty(T * max(w.n_head_dim, w.n_z, 0 if block is None else c.n_embd), np.float32),
            scratch_gate=device.empty(T * w.n_gate, np.float32),
            scratch_z=device.empty(T * w.n_z, np.float32),
            scratch_delta=device.empty(max(T, n_delta * KEPT_TOKENS) * delta_width, np.float32),
            router=device.empty((T, c.n_expert), np.float32),
            experts=device.empty((L, T, c.n_expert_used), np.int32),
            weights=device.empty((L, T, c.n_expert_used), np.float32),
            logits=device.empty((limits.max_rows, c.n_vocab), np.float32),
            fetches=Fetches(device.empty((c.n_expert, 3), np.int32), device.empty(1, np.int32)),
        )
        # One array for the slots of all groups, and one for their tables: sampling writes and reads them by stride.
        G = len(self.kv.groups)
        self.slots = device.empty((G, T), np.int32)
        self.block_tables = device.empty((G, limits.max_sequences, n_blocks), np.int32)
        self.inputs = Step(
            tokens=device.empty(T, np.int32),
            positions=device.empty(T, np.int32),
            sequence=device.empty(T, np.int32),
            slots=tuple(self.slots[g] for g in range(G)),
            block_table=tuple(self.block_tables[g] for g in range(G)),
            states=device.empty((limits.max_sequences, 2), np.int32),
            counted=device.empty(T, np.uint8),
            rows=device.empty(limits.max_rows, np.int32),
        )
        self._short_masks = Views(device.empty(T if L else 1, np.uint8))  # of `ShortRows`
        # Whether somebody reads the features of the next step that is not captured; buffers without room for any.
        self.features_wanted = True
        self._without: Buffers | None = None
        if captured:
            self.capture_features(captured)

    @property
    def buffers_bytes(self) -> int:
        """Bytes of what a step writes and reads besides weights and cache."""
        b = self.buffers
        arrays = (
            b.x, b.h, b.y, b.scratch_q, b.scratch_attended, b.scratch_gate, b.scratch_z, b.scratch_delta, b.router,
            b.experts, b.weights, b.logits, *self.ropes, *([] if b.features is None else [b.features]),
        )  # fmt: skip
        more = 0 if self.recalling is None else self.recalling.buffers_bytes
        return more + sum(int(a.nbytes) for a in arrays)

    def capture_hidden(self, wanted: bool) -> None:
        """Keep the residual stream entering each layer in later steps, or stop keeping it.

        It is kept in host memory: 1.6 GB for a step of 4,096 tokens of a model of 48 layers.
        """
        if wanted and self._hidden is None:
            shape = (self.config.n_layer, self.limits.max_tokens, self.config.n_embd)
            memory: NDArray[np.uint8] = self.device.page_locked(4 * shape[0] * shape[1] * shape[2])
            self._hidden = memory.view(np.float32).reshape(shape)
        self.buffers = dataclasses.replace(self.buffers, hidden=self._hidden if wanted else None)

    def capture_features(self, captured: tuple[int, ...]) -> None:
        """Keep the residual leaving these layers in later steps, on the device, for a drafter that reads it.

        Asked for once, and before the first step where steps are captured: a graph keeps what it was captured with.
        """
        assert self.buffers.features is None and set(captured) <= set(range(self.config.n_layer))
        features = self.device.empty((len(captured), self.limits.max_tokens, self.config.n_embd), np.float32)
        self._without = self.buffers
        self.buffers = dataclasses.replace(self.buffers, features=features, captured=captured)

    def inputs_of(self, T: int, n_sequences: int, R: int) -> Step:
        """Views of the inputs for T tokens of so many sequences, R of which want logits."""
        views = self._views.get((T, n_sequences, R))
        if views is None:
            if len(self._views) >= MAX_NOTED:
                self._views.clear()
            i = self.inputs
            views = self._views[T, n_sequences, R] = Step(
                i.tokens[:T], i.positions[:T], i.sequence[:T], tuple(slots[:T] for slots in i.slots),
                tuple(table[:n_sequences] for table in i.block_table), i.states[:n_sequences], i.counted[:T],
                i.rows[:R],
            )  # fmt: skip
        return views

    def feed(self, step: Step) -> Step:
        """`bring` a step's inputs; the views of them that `run` takes."""
        n_positions, short = int(step.positions.max()) + 1, step.short
        if short is not None and short.mask is not None:
            mask = self._short_masks(short.mask.shape)  # the same one again: layouts of what is fed are kept
            self.ws.feed([(mask, short.mask)])
            short = dataclasses.replace(short, mask=mask)
        return dataclasses.replace(
            self.bring(step), n_positions=n_positions, apart=step.apart, decoded=step.decoded, spans=step.spans,
            recall=step.recall, short=short,
        )  # fmt: skip

    def bring(self, step: Step) -> Step:
        """Copy a step's inputs, NumPy arrays, to the device, where captured steps read them; views of them.

        Tables of `step.block_table` may be narrower than the cache's: the rest stays as it was.
        """
        views = self.inputs_of(len(step.tokens), len(step.states), len(step.rows))
        tables = self._tables_of(len(step.states), step.block_table[0].shape[1]) if step.block_table else ()
        self.ws.feed([
            (views.tokens, step.tokens), (views.positions, step.positions), (views.sequence, step.sequence),
            *zip(views.slots, step.slots, strict=True), *zip(tables, step.block_table, strict=True),
            (views.states, step.states), (views.counted, step.counted), (views.rows, step.rows),
        ])  # fmt: skip
        return views

    def _tables_of(self, n_sequences: int, width: int) -> tuple[I32, ...]:
        """The first columns of the block tables of so many sequences."""
        tables = self._tables.get((n_sequences, width))
        if tables is None:
            if len(self._tables) >= MAX_NOTED:
                self._tables.clear()
            narrow = tuple(table[:n_sequences, :width] for table in self.inputs.block_table)
            tables = self._tables[n_sequences, width] = narrow
        return tables

    def tables(self, sequences: Sequence[Cached], width: int | None = None) -> tuple[I32, ...]:
        """Tables [n, width] of sequences as steps take them, of all groups; width: None: of a context.

        The device is told what is to be staged for them, so the next steps are to be of these sequences.
        """
        n = self.table_width if width is None else width
        held = list(sequences)
        return self.kv.gather(tuple(block_table(held, g, n) for g in range(len(self.kv.groups))))

    def tell_tables(self, sequences: Sequence[Cached], new: list[int], moves: int) -> int:
        """Write the tables of those of some sequences that have new blocks, between steps that the device feeds itself.

        All of them where blocks may have moved since the cache had `moves`: to make room for one, blocks of others may
        have left the pool. Returns what it has now.
        """
        if self.kv.is_pooled and (new or moves != self.kv.moves):
            new = [*range(len(sequences))]
        if new:
            tables = self.tables([sequences[i] for i in new])
            for table, held in zip(self.inputs.block_table, tables, strict=True):
                for i, values in zip(new, held, strict=True):
                    self.device.write(table[i : i + 1], values[None])
        return self.kv.moves

    @property
    def table_width(self) -> int:
        """Blocks of a context: the width of every block table."""
        return int(self.block_tables.shape[2])

    def run(self, step: Step, residency: Residency) -> Buffers:
        """Enqueue one step; returns the views of the buffers that it writes."""
        T = len(step.tokens)
        buffers = self.buffers
        if self._without is not None and not self.features_wanted and buffers.hidden is None:
            buffers = self._without
        b = buffers.first(T, len(step.rows))
        if self.replayed is not None:
            self.replayed.n_rows = T if step.decoded or T == 1 else 0
        passing = self._pass(step, residency, b)
        if T > SMALL_TOKENS or b.hidden is not None or b.features is not None:  # copies are no calls of kernels
            try:
                layers.forward(self.arch, self.weights, passing)
            except BaseException:
                if isinstance(self.ws, DeviceWorkspace):
                    self.ws.attention.abandon()
                raise
        else:  # the inputs lie where they did in the last step of this shape
            shape = T, len(step.states), len(step.rows), residency, step.recall is not None, self.kv.stages
            weights, noted = self._noted.get(shape, (None, None))
            if len(self._noted) >= MAX_NOTED:
                self._noted.clear()
            work = functools.partial(layers.forward, self.arch, self.weights, passing)
            noted = self.ws.repeat(noted if weights is self.weights else None, work)
            self._noted[shape] = self.weights, noted
        return b

    def join(self) -> None:
        """As the workspace's: behind a step that is not captured; at the end of what is."""
        if isinstance(self.ws, DeviceWorkspace):
            self.ws.join()

    @property
    def replayed(self) -> Replay | None:
        """The choices that are imposed, if any are."""
        return self.ws.replay if isinstance(self.ws, DeviceWorkspace) else None

    def replay(self, step: Step) -> None:
        """Enqueue the recurrences of a kept step again, for its first tokens alone (see `Sequence.take_back`)."""
        cast(Recurrent, self.arch).replay(self._pass(step, None, self.buffers.first(len(step.tokens), 0)), self.weights)

    def _pass(self, step: Step, residency: Residency | None, b: Buffers) -> Pass[ModelConfig]:
        norms = tuple(layer.norm for layer in self.weights.layers)
        return Pass(self.config, self.ops, self.ws, step, self.kv, residency, self.ropes, norms, b)

    def head(self, rows: I32) -> F32:
        """Logits [len(rows), V] of more rows of the last step."""
        out, at = self.buffers.logits[: len(rows)], self.inputs.rows[: len(rows)]
        self.device.write(at, rows)
        layers.head(self.config, self.weights, self.ops, self.ws, at, self.buffers.x, out)
        return np.asarray(self.device.read(out))
