"""A loaded model: weights, backend, cache and residency, and one function that runs a step.

A step is a list of spans of tokens, each belonging to a sequence: a prefill chunk, one decoded token,
later a draft to verify. Several sequences can share a step.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import backend, dryrun, models, placement, plan, policy
from engine.config import EngineConfig
from engine.dryrun import Decision
from engine.errors import CapacityError, NumericalError, UsageError
from engine.forms import Form, Forms
from engine.forward import GRAPH_TOKENS, Forward
from engine.gguf import GGUFFile, open_model
from engine.kv import Fork, KVCache, Sequence, block_table
from engine.layers import KEPT_TOKENS, Buffers, Step
from engine.ops import F32, I32, KV_BLOCK_TOKENS, PIECE_TOKENS
from engine.ops.cpu_library import library_path
from engine.ops.cuda import library
from engine.ops.cuda.counting import CountingDevice
from engine.ops.cuda.failures import translated
from engine.ops.cuda.replay import Replay
from engine.ops.likelihood import likelihood
from engine.placement import Placement
from engine.prefix import PrefixCache
from engine.prefix_files import PrefixFiles
from engine.profile import Profile
from engine.profile import load as load_profile
from engine.protocol import Stage
from engine.residency import Residency, largest_parts, slot_bytes
from engine.sampling import Drawing, Drawn, SamplingParams, counts_reply, sample
from engine.slowtier import loaded_bytes

HOST_CHUNK_TOKENS = 512
HOST_PREFIX_TOKENS = 128  # a chunk of prefixes
GRAPH_BYTES = 48 << 20  # what captured steps take of the device; see docs/cuda.md
Progress = Callable[[Stage, int, int], None]  # a stage, how much of it is done, of how much


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens that continue a sequence. counted: whose routing is counted, bool [T].

    want: indices within the span whose logits are wanted, MAX_ROWS in a step at most. keep: some of the tokens, of a
    step of at most KEPT_TOKENS, may be taken back.
    """

    sequence: Sequence
    tokens: I32
    counted: NDArray[np.bool_]
    want: tuple[int, ...] = ()
    keep: bool = False


class StepResult:
    """What a step computed, read from the device when asked for; the next step overwrites it.

    logits float32 [R, V] in order of the spans' wants. experts int32, weights float32 [L, T, A]; hidden
    float32 [n_layer, T, D] or None. residual float32 [T, D]: what the head reads. rows: of the wanted logits in the
    buffer, where it has others, too; T: tokens of the step, where it has been filled up.
    """

    def __init__(self, device: Any, buffers: Buffers, rows: Many[int] | None = None, T: int | None = None) -> None:
        self._device, self._buffers, self.rows, self._T = device, buffers, rows, T

    @property
    def logits(self) -> F32:
        """Logits of the wanted tokens."""
        logits: F32 = self._device.read(self._buffers.logits)
        return logits if self.rows is None else logits[list(self.rows)]

    @property
    def row(self) -> int:
        """Where the logits of the first wanted token are in the buffer."""
        return 0 if self.rows is None else self.rows[0]

    @property
    def experts(self) -> I32:
        """The chosen experts."""
        return np.asarray(self._device.read(self._buffers.experts))[:, : self._T]

    @property
    def weights(self) -> F32:
        """Their weights."""
        return np.asarray(self._device.read(self._buffers.weights))[:, : self._T]

    @property
    def hidden(self) -> F32 | None:
        """The residual entering each layer, where it was captured."""
        if self._buffers.hidden is None:
            return None
        self._device.synchronize()
        return self._buffers.hidden

    @property
    def last_residual(self) -> F32:
        """The last token's, float32 [D]: whatever is not finite in a cache or a state reaches it."""
        T = len(self._buffers.x) if self._T is None else self._T
        return np.asarray(self._device.read(self._buffers.x[T - 1 : T])[0])

    @property
    def residual(self) -> F32:
        """The residual that leaves the last layer."""
        return np.asarray(self._device.read(self._buffers.x))[: self._T]


@cache
def _code_digest() -> str:
    """A hash of the sources and the library that compute what is cached; other code may give other bits."""
    engine = Path(__file__).parent
    sources = [*engine.glob("models/*.py"), *engine.glob("ops/**/*.py"), *library.folder().glob("*.cu*")]
    digest = hashlib.sha256()
    for path in [*sorted(sources), library_path()]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def physical_cores() -> int:
    """Cores that this process may use, hyper-threads of one core counted once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            package = (topology / "physical_package_id").read_text().strip()
            cores.add((package, (topology / "core_id").read_text().strip()))
        except OSError:
            return len(allowed)
    return max(1, len(cores))


def _draw(logits: F32, d: Drawing) -> Drawn:
    """Draw from logits float32 [V] on the host."""
    reply = d.history[d.reply_from :] if counts_reply(d.params) else ()
    token = sample(logits, d.params, len(d.history), d.history, d.allowed, reply)
    return Drawn(token, None if d.logprobs is None else likelihood(logits, token, d.logprobs))


class Runner:
    """Everything that a forward pass needs, allocated once."""

    def __init__(self, config: EngineConfig, progress: Progress = lambda stage, done, total: None) -> None:
        self.options = config
        self.file: GGUFFile = open_model(config.model)
        self.arch = models.find(self.file.architecture)
        self.config = self.arch.Config.from_gguf(self.file)
        self.weights = self.arch.load(self.file, self.config)
        self.threads = config.threads or physical_cores()
        self.backend = backend.open_backend(config.device, self.threads)
        self.device = self.backend.name
        self.n_ctx = dryrun.context_tokens(config, self.config.n_ctx_train)
        self.reasons = [
            f"device {self.device}: {self.backend.reason}",
            f"{self.threads} threads: " + ("asked for" if config.threads else "one for each physical core"),
            f"context of {self.n_ctx} tokens: "
            + ("asked for" if config.ctx_tokens else f"the model was trained on {self.config.n_ctx_train}"),
        ]
        self.warnings: list[str] = []
        self.forms = Forms(config.model, lambda: self.file.file_id, self.config.n_vocab)
        self.profile = self._profile()
        odd = [g.head_dim for g in self.config.kv_groups if g.head_dim % 32]
        if config.kv_type == "q8_0" and odd:
            raise UsageError(
                f"--kv-type q8_0 stores blocks of 32, and the model's heads have {odd[0]} dimensions",
                hint="use --kv-type f16",
            )
        with translated("loading the model"):
            self._lay_out(progress)

    def _lay_out(self, progress: Progress) -> None:
        """Decide what is resident, then allocate and load everything."""
        o, b = self.options, self.backend
        self.decision: Decision | None = None
        why: Many[str]
        if b.name == "cuda":
            self.decision = self._share_out_gpu(progress)
            self.limits = self.decision.limits
            self.placement, self.rule, why = self.decision.placement, self.decision.rule, self.decision.reasons
        else:
            chunk = min(o.chunk_tokens or HOST_CHUNK_TOKENS, self.n_ctx)
            self.limits = dryrun.limits_of(self.config, self.n_ctx, chunk)
            self.placement, self.rule, why = self._place_on_host()
        self.reasons.extend(why)
        self.chunk_tokens = self.limits.max_tokens
        uploader = b.uploader()
        self.forward = Forward(
            b.device, b.ops, b.workspace(self.limits), self.arch, self.config, self.weights, self.limits,
            kv_tokens=self.n_ctx, kv_type=o.kv_type, put=None if uploader is None else uploader.put,
        )  # fmt: skip
        tier = b.tier(self.weights.experts, self.placement, uploader)
        dense_bytes = 0
        if uploader is not None:
            dense_bytes = uploader.waiting_bytes
            total = dense_bytes + loaded_bytes(self.weights.experts, self.placement)
            uploader.flush(lambda done, _: progress("loading", done, total))
        self.residency = Residency(
            self.weights.experts, self.placement, self.rule, device=b.device, tier=tier, poison=o.poison,
            progress=lambda done, n_bytes: progress("loading", dense_bytes + done, dense_bytes + n_bytes),
        )  # fmt: skip
        if self.decision is not None:
            self.forward.ws.replay = self._replayed
            if self.decision.staging_bytes:
                self.forward.ws.stream_experts(self.decision.staging_bytes, largest_parts(self.weights.experts))
        self.graphs = b.graphs(self.forward, self.residency)
        # On the host a row's bits depend on no other row. Several steps of an odd length are left whole.
        piece = HOST_PREFIX_TOKENS if self.device == "cpu" else PIECE_TOKENS
        if self.chunk_tokens < self.n_ctx and self.chunk_tokens % piece:
            piece = self.chunk_tokens
        streams = self.decision is not None and self.decision.staging_bytes > 0
        self.kv.host_bytes = int(o.prefix_gib * plan.GIB)
        self.prefixes = PrefixCache(
            self.kv, piece, self.kv.host_bytes, self._prefix_files(piece), self.chunk_tokens,
            cuts=not streams,
        )  # fmt: skip

    def _prefix_files(self, piece: int) -> PrefixFiles | None:
        o = self.options
        if o.cache_dir is None or o.replay is not None:  # replayed choices leave what no other run would compute
            return None
        key: dict[str, str | int] = {
            "file_id": self.file.file_id,
            "kv_type": o.kv_type,
            "chunk_tokens": piece,
            "device": f"{self.device}: {self.backend.device.name}",
            "code": _code_digest(),
        }
        return PrefixFiles(o.cache_dir, key, int(o.cache_dir_gib * plan.GIB))

    def _share_out_gpu(self, progress: Progress) -> Decision:
        """Decide by what the context and the kernels really take, and reserve the rest in one piece."""
        o, device = self.options, self.backend.device
        free, total = device.memory_bytes()
        before = total if self.backend.free_bytes is None else self.backend.free_bytes
        cap = before - plan.SPARE_BYTES if o.vram_gib is None else plan.cap_bytes(o.vram_gib)

        def decide(context_bytes: int) -> Decision:
            return dryrun.decide(
                o, self.arch, self.config, self.weights, self.n_ctx, self.profile, CountingDevice.like(device),
                cap_bytes=cap, context_bytes=context_bytes,
            )  # fmt: skip

        # The first decision tells the kernels; with them loaded the context has the size that counts.
        first = decide(before - free)
        device.build(first.modules, lambda done, total: progress("compiling kernels", done, total))
        for module, name in first.kernels:
            device.kernel(module, name)
        free, _ = device.memory_bytes()
        decision = decide(before - free + GRAPH_BYTES)
        if decision.plan.device_bytes - (before - free) > free:
            raise CapacityError(
                f"the plan takes {decision.plan.device_bytes / plan.GIB:.2f} GiB of the GPU, of which "
                f"{free / plan.GIB:.2f} of {total / plan.GIB:.2f} GiB are free",
                hint="what else uses it (nvidia-smi)? or give a smaller --vram",
            )
        self._replayed = None if o.replay is None else Replay(device, self._choices(o.replay))
        device.reserve(decision.arena_bytes)
        return decision

    def _place_on_host(self) -> tuple[Placement, policy.Rule, Many[str]]:
        o, c = self.options, self.config
        if o.replay is not None:
            raise UsageError("--replay imposes choices on a GPU, and this is the CPU")
        if o.vram_gib is not None:
            raise UsageError(
                f"--vram caps the memory of a GPU, and this is the CPU ({self.backend.reason})", hint="use --residency"
            )
        sizes = [slot_bytes(e) for e in self.weights.experts]
        counts = np.zeros((len(sizes), c.n_expert), np.int64)
        if self.profile is not None:
            counts = self.profile.counts[list(c.moe_layers)]
        budget = placement.residency_budget(c.n_expert, sizes, o.residency_pct)
        return plan.place(o, counts, sizes, budget, c.n_expert_used, self.profile)

    def _choices(self, path: Path) -> NDArray[np.integer]:
        """Recorded expert choices for decoded tokens; they come on top of the memory plan."""
        choices: NDArray[np.integer] = np.load(path, allow_pickle=False)
        shape = (len(self.config.moe_layers), self.config.n_expert_used)
        if choices.ndim != 3 or choices.shape[1:] != shape or not np.issubdtype(choices.dtype, np.integer):
            raise UsageError(f"{path}: expected integers [n_tokens, {shape[0]}, {shape[1]}], found {choices.shape}")
        if not choices.size or not 0 <= choices.min() <= choices.max() < self.config.n_expert:
            raise UsageError(f"{path}: expected experts below {self.config.n_expert}, of at least one token")
        if (np.diff(np.sort(choices, axis=2), axis=2) == 0).any():
            raise UsageError(f"{path}: an expert is chosen twice for a token")
        self.reasons.append(f"the choices of {len(choices)} tokens are replayed from {path}: the text means nothing")
        return choices

    @property
    def kv(self) -> KVCache:
        """The KV cache."""
        return self.forward.kv

    @property
    def isa(self) -> str:
        """What the kernels were compiled for."""
        return str(self.forward.ws.isa)

    def _profile(self) -> Profile | None:
        if self.options.profile is None:
            return None
        profile, warnings = load_profile(self.options.profile, model_id=self.file.model_id)
        self.warnings.extend(warnings)
        expected = (self.config.n_layer, self.config.n_expert)
        if profile.counts.shape != expected:
            raise UsageError(
                f"{self.options.profile} counts {profile.counts.shape[0]} layers of {profile.counts.shape[1]} experts; "
                f"the model has {expected[0]} of {expected[1]}"
            )
        return profile

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The ids that end a turn, as the file's metadata names them."""
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        return tuple({self.file.value(key, int) for key in keys if key in self.file.metadata})

    def new_sequence(self) -> Sequence:
        """An empty sequence in this runner's cache."""
        return self.kv.sequence()

    def resume(self, tokens: I32) -> tuple[Sequence, int]:
        """Begin a sequence after the longest prefix of a prompt that is remembered; the sequence, the prefix's length.

        At least one token is left to be fed, in steps of `next_step`; then all bits are those of a prompt that was fed
        from its first token on.
        """
        sequence = self.new_sequence()
        try:
            return sequence, self.prefixes.attach(sequence, self.prefixes.match(tokens))
        except BaseException:
            sequence.release()
            raise

    def fork(self, sequence: Sequence) -> Fork | None:
        """What other requests with this prompt go on from, as `PrefixCache.fork`."""
        return self.prefixes.fork(sequence)

    def begin(self, fork: Fork) -> Sequence:
        """Begin a sequence from a fork."""
        sequence = self.new_sequence()
        try:
            self.prefixes.begin(sequence, fork)
        except BaseException:
            sequence.release()
            raise
        return sequence

    def next_step(self, sequence: Sequence, tokens: I32) -> I32:
        """The tokens of a prompt's next prefill step."""
        return tokens[sequence.length :][: self.prefixes.step_tokens(sequence, tokens)]

    def remember(self, sequence: Sequence, tokens: I32) -> None:
        """Let later requests begin after what a sequence holds; see `PrefixCache.insert` for when and which tokens."""
        self.prefixes.insert(sequence, tokens)

    def capture_hidden(self, wanted: bool) -> None:
        """Keep the residual stream entering each layer in later steps, or stop keeping it."""
        self.forward.capture_hidden(wanted)

    def run(self, spans: list[Span]) -> StepResult:
        """Run one step; sequences grow by their spans' tokens."""
        starts = [s.sequence.length for s in spans]
        T = sum(len(s.tokens) for s in spans)
        assert 0 < T <= self.limits.max_tokens
        assert len(spans) <= self.limits.max_sequences
        for span in spans:
            if span.sequence.length + len(span.tokens) > self.n_ctx:
                raise CapacityError(f"{span.sequence.length + len(span.tokens)} tokens in a context of {self.n_ctx}")
        slots = [s.sequence.extend(len(s.tokens)) for s in spans]
        assert T <= KEPT_TOKENS or not any(s.keep for s in spans)
        offsets = np.cumsum([0, *(len(s.tokens) for s in spans)])
        rows = [o + w for o, s in zip(offsets, spans, strict=False) for w in s.want]
        positions = [np.arange(a, a + len(s.tokens)) for a, s in zip(starts, spans, strict=True)]
        width = self._width(spans, T)
        sequences, groups = [s.sequence for s in spans], range(len(self.kv.groups))

        def padded(values: Many[NDArray[Any]], dtype: type, last: int | None = None) -> NDArray[Any]:
            row: NDArray[Any] = np.concatenate(values).astype(dtype)
            return np.concatenate([row, np.full(width - T, row[-1] if last is None else last, dtype)])

        # What fills a captured step up is the last token again, that is stored nowhere and routed where it was.
        captured = self._captured(width)
        step = self.forward.feed(
            Step(
                tokens=padded([s.tokens for s in spans], np.int32),
                positions=padded(positions, np.int32),
                sequence=padded([np.full(len(s.tokens), i) for i, s in enumerate(spans)], np.int32),
                slots=tuple(padded([s[g] for s in slots], np.int32, -1) for g in groups),
                block_table=tuple(block_table(sequences, g, self.forward.table_width) for g in groups),
                states=np.array([s.sequence.next_states(s.keep) for s in spans], np.int32),
                counted=padded([s.counted for s in spans], np.uint8, 0),
                rows=np.arange(width, dtype=np.int32) if captured else np.asarray(rows, dtype=np.int32),
            )
        )
        if captured and self.graphs is not None:
            self.graphs.step(width)
            result = StepResult(self.backend.device, self.forward.buffers.first(width, width), rows, T)
        else:
            result = StepResult(self.backend.device, self.forward.run(step, self.residency))
        for span in spans:  # what the step alone could see of a window may serve another sequence's next chunk
            span.sequence.reserve(0)
        return result

    def _captured(self, T: int) -> bool:
        """Whether a step of T tokens is a captured one, which computes the logits of all its rows."""
        return self.graphs is not None and T in GRAPH_TOKENS and self.forward.buffers.hidden is None

    def _width(self, spans: list[Span], T: int) -> int:
        """Tokens of the step that T are run in: more where one token each of several sequences make up no graph."""
        larger = (n for n in GRAPH_TOKENS if T <= n <= self.limits.max_tokens and self._captured(n))
        return next(larger, T) if 1 < len(spans) == T else T

    def take_back(self, spans: list[Span], n_tokens: list[int]) -> None:
        """Drop the last n_tokens[i] tokens of spans[i], those of the last step; 0 of one that was not kept.

        Sequences are as if the dropped tokens had never been: what they wrote to caches is written over before it is
        seen again, and recurrent states are replayed from before the step.
        """
        lengths = [len(s.tokens) for s in spans]
        states = [s.sequence.take_back(n, m) for s, n, m in zip(spans, n_tokens, lengths, strict=True)]
        if not any(states):
            return
        stay = [m - n if pair else 0 for pair, n, m in zip(states, n_tokens, lengths, strict=True)]
        # The other inputs of the step are still there; a slot of -1 is a token that is not.
        step = self.forward.inputs_of(sum(lengths), len(spans), 0)
        slots = [np.where(np.arange(m) < n, 0, -1) for n, m in zip(stay, lengths, strict=True)]
        pairs = [pair or (s.sequence.state, s.sequence.state) for pair, s in zip(states, spans, strict=True)]
        self.backend.device.write(step.slots[0], np.concatenate(slots).astype(np.int32))
        self.backend.device.write(step.states, np.array(pairs, np.int32))
        self.forward.replay(step)

    def decode(
        self, sequence: Sequence, history: list[int], result: StepResult, params: SamplingParams,
        stop: frozenset[int], limit: int, reply_from: int | None = None, logprobs: int | None = None,
    ) -> Generator[list[Drawn], bool | None, str]:  # fmt: skip
        """Generate up to `limit` tokens after `history`, ahead of the host where it can; lists of them as they come.

        result: of the last step, whose first wanted logits follow `history`, which grows by what is generated. A
        token of `stop` ends it and is not part of it. reply_from: where in `history` the reply begins that penalties
        count, by default behind it. logprobs: as in `Drawing`. Sent True, it ends as soon as nothing is under way, the
        last token drawn and not fed. Returns why it ended: "stop", "length" or "paused".
        """
        begin = len(history) if reply_from is None else reply_from
        if self.graphs is not None:
            return (yield from self.graphs.decode(sequence, history, result.row, params, stop, limit, begin, logprobs))
        counted = np.ones(1, bool)
        for made in range(limit):
            if made:
                result = self.run([Span(sequence, np.asarray(history[-1:], np.int32), counted, (0,))])
            logits = result.logits[0]
            drawn = _draw(logits, Drawing(0, 0, history, 0, params, begin, logprobs=logprobs))
            if drawn.token in stop:
                return "stop"
            history.append(drawn.token)
            if (yield [drawn]) and made + 1 < limit:
                return "paused"
        return "length"

    def draw(self, result: StepResult, drawings: Many[Drawing]) -> list[Drawn | None]:
        """Draw a token from each of some rows of the last step's wanted logits; None where they are not finite."""
        if self.graphs is not None:
            rows = [d.row if result.rows is None else result.rows[d.row] for d in drawings]
            return self.graphs.draw(drawings, rows)
        drawn: list[Drawn | None] = []
        logits = result.logits
        for d in drawings:
            try:
                drawn.append(_draw(logits[d.row], d))
            except NumericalError:
                drawn.append(None)
        return drawn

    def draw_from(self, logits: F32, drawing: Drawing) -> list[Drawn | None]:
        """As `draw`, from a row of an earlier step that was kept, float32 [V]."""
        if self.graphs is not None:
            return self.graphs.draw_from(logits, drawing)
        return [_draw(logits, drawing)]

    def has_room(self, lengths: Many[int]) -> bool:
        """Whether new sequences of so many tokens, and a few more each, fit beside what is held."""
        blocks = sum(n // KV_BLOCK_TOKENS + 1 for n in lengths)
        pools = [self.kv.pools[g] for g in self.kv.full_groups]
        if self.kv.states is not None and self.kv.states.free_blocks < len(lengths):
            return False
        if all(pool.free_blocks >= blocks for pool in pools):
            return True
        reclaimable = self.prefixes.reclaimable_tokens // KV_BLOCK_TOKENS
        return all(pool.free_blocks + reclaimable >= blocks for pool in pools)

    def grammar(self, text: str, stop: frozenset[int]) -> Form:
        """The form that a request asks for, of a reply that the tokens of `stop` end; it takes a while to be ready."""
        return self.forms.open(text, stop)

    def logits(self, rows: I32) -> F32:
        """Logits [len(rows), V] of more rows of the last step (at most MAX_ROWS at a time)."""
        return self.forward.head(rows)

    def synchronize(self) -> None:
        """Wait until the device has done all it was told."""
        self.backend.device.synchronize()

    def plan(self) -> dict[str, int | bool]:
        """Bytes by purpose: what is in fast memory, and what the slow tier takes."""
        if self.decision is not None:
            return self.decision.plan.to_json()
        made = {
            "dense_bytes": int(self.weights.dense_bytes),
            "kv_bytes": self.kv.nbytes,
            "slots_bytes": self.residency.arena_bytes,
            "buffers_bytes": self.forward.buffers_bytes,
        }
        return made | {"device_bytes": sum(made.values()), "experts_bytes": self.residency.experts_bytes}

    def close(self) -> None:
        """Write out what is to be kept, stop the backend's threads and unmap the file."""
        self.forms.close()
        self.prefixes.close()
        self.forward.ws.close()
        self.residency.tier.close()
        self.backend.device.close()
        self.file.close()
