"""A model that is loaded: a record of parts, made stage by stage, each from what the one before it gave.

    options -> source -> backend -> shares -> forward, residency -> steps, drawer, prefixes, forms

What a stage opened is closed when a later one fails, by the same list that closes everything in the end.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from engine.drafting.dflash import Drafter
from engine.ground.config import EngineConfig
from engine.ground.digest import code_digest
from engine.ground.errors import CapacityError, UsageError
from engine.ground.kv_types import pair_of
from engine.memory import swap
from engine.memory.blocks import Sequence
from engine.memory.host import HostTier
from engine.memory.kv import Fork, KVCache
from engine.memory.parking import Parking
from engine.memory.prefix import PrefixCache
from engine.memory.prefix_files import PrefixFiles
from engine.memory.residency import Residency, largest_parts
from engine.memory.shape import cached_tokens
from engine.memory.slowtier import loaded_bytes
from engine.memory.swap import Swapped
from engine.ops import I32, PIECE_TOKENS, SMALL_TOKENS, Limits
from engine.ops.cuda.failures import translated
from engine.ops.cuda.memory import available_bytes
from engine.ops.cuda.workspace import Workspace
from engine.placing import plan
from engine.running import dryrun, landing, mtp
from engine.running.backend import Backend, open_backend
from engine.running.decoding import Decoder
from engine.running.drafts import Drafts, lay_out
from engine.running.drawing import DeviceDrawer, Drawer, HostDrawer
from engine.running.forward import Forward
from engine.running.guessing import Guessing, Way
from engine.running.misses import share
from engine.running.mtp import Predictor
from engine.running.recall import made_of
from engine.running.shares import Progress, Shares, share_out
from engine.running.source import Source, open_source
from engine.running.stepping import Graphs, Steps
from engine.text.forms import Forms

HOST_PREFIX_TOKENS = 128  # a chunk of prefixes


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything that a forward pass needs, allocated once, and who uses it.

    source: what the files hold. shares: what is resident. forward, residency: the model on the backend's device.
    steps, drawer, decoder: they run steps, draw from them, and do both. kv, prefixes: the cache, and what is kept of it
    for other requests. forms: of replies. parking: what gives memory back while nothing runs. threads: of the host.
    reasons: why what was not asked for was chosen. predictor: drafts by a block of the model's file, where that was
    asked for and it has one.
    """

    options: EngineConfig
    source: Source
    backend: Backend
    shares: Shares
    forward: Forward
    residency: Residency
    kv: KVCache
    prefixes: PrefixCache
    steps: Steps
    drawer: Drawer
    decoder: Decoder
    drafts: Drafts | None
    forms: Forms
    parking: Parking
    threads: int
    reasons: tuple[str, ...]
    _opened: ExitStack
    predictor: Predictor | None = None

    @property
    def limits(self) -> Limits:
        """Bounds of a step, and of a sequence."""
        return self.shares.limits

    @property
    def small_tokens(self) -> int:
        """Tokens of a step whose rows have other bits than those of a longer one; 0 where no bit depends on that."""
        return SMALL_TOKENS if self.backend.name == "cuda" else 0

    def resume(self, tokens: I32, exact: bool = False, again: bool = False) -> tuple[Sequence, int]:
        """Begin a sequence after the longest prefix of a prompt that is remembered; the sequence, the prefix's length.

        At least one token is left to be fed, in steps as `PrefixCache.step_tokens` has them; then all bits are those
        of a prompt that was fed from its first token on, but for what `Sequence.exact` says. exact: it says nothing.
        again: as of `PrefixCache.insert`.
        """
        sequence = self.kv.sequence()
        try:
            return sequence, self.prefixes.attach(sequence, self.prefixes.match(tokens, exact), again)
        except BaseException:
            sequence.release()
            raise

    def begin(self, fork: Fork) -> Sequence:
        """Begin a sequence from a fork."""
        sequence = self.kv.sequence()
        try:
            self.prefixes.forks.begin(sequence, fork)
        except BaseException:
            sequence.release()
            raise
        return sequence

    def swap_in(self, swapped: Swapped) -> Sequence:
        """Go on as a sequence that was moved out; CapacityError where there is no room, and it stays out."""
        sequence = self.kv.sequence()
        try:
            swap.swap_in(self.kv, sequence, swapped)
        except BaseException:
            sequence.release()
            raise
        return sequence

    def plan(self) -> dict[str, int | bool]:
        """Bytes by purpose: what is in fast memory, and what the slow tier takes."""
        if self.shares.decision is not None:
            return self.shares.decision.plan.to_json()
        block, recalling = self.source.block, self.forward.recalling
        made = {
            "dense_bytes": int(self.source.weights.dense_bytes) + (0 if block is None else block.nbytes),
            "kv_bytes": self.kv.nbytes + (0 if recalling is None else recalling.sketches.nbytes),
            "slots_bytes": self.residency.arena_bytes,
            "buffers_bytes": self.forward.buffers_bytes + (0 if self.drafts is None else self.drafts.nbytes),
        }
        return made | {"device_bytes": sum(made.values()), "experts_bytes": self.residency.experts_bytes}

    def close(self) -> None:
        """Write out what is to be kept, stop all threads, release the device and unmap the file; twice does no harm."""
        self._opened.close()


def load(options: EngineConfig, progress: Progress = lambda stage, done, total: None) -> Loaded:
    """Open, decide, allocate and load; a SparkError says why not, and leaves nothing open."""
    with ExitStack() as opened:
        source = open_source(options)
        opened.callback(source.file.close)
        threads = options.threads or physical_cores()
        backend = open_backend(options.device, threads)
        opened.callback(backend.device.close)
        if options.guess == "count" and backend.name == "cuda":
            raise UsageError("--guess count counts guesses on a host, found a GPU", hint="use --device cpu")
        if options.replay_guesses is not None and not (options.replay and landing.wanted(options)):
            raise UsageError("--replay-guesses says what is guessed with --replay, and with --guess auto or on")
        pregate = None if backend.gpu is None else landing.find_pregate(options, source.file, source.config)
        n_ctx = dryrun.context_tokens(options, source.config.n_ctx_train)
        with translated("loading the model"):
            shares = share_out(options, source, backend, n_ctx, progress)
            if shares.decision is not None:  # without a block that was found and does not fit
                source = replace(source, drafts=shares.decision.drafts)
            forward, residency, drafter = _lay_out(options, source, backend, shares, progress, opened)
            gpu = backend.gpu
            guessing, guesses_said = _guess(options, source, backend, residency)
            graphs = None if gpu is None else Graphs(gpu, lambda: forward.kv.stages, forward.join)
            steps = Steps(forward, residency, graphs)
            if gpu is None:
                landing.refuse_on_host(options)
            elif isinstance(forward.ws, Workspace):
                found = landing.guess(
                    options, source.file, source.config, pregate, gpu, forward.ws, shares.limits, residency,
                    shares.decision is None or shares.decision.has_guesses,
                )  # fmt: skip
                steps.guesses, guesses_said = found
            steps.misses, misses_said = share(
                options, gpu, backend.bus, forward.ws, shares.limits, residency, source.block
            )  # fmt: skip
            if steps.misses is not None:
                opened.callback(steps.misses.close)
            predictor = _predict(source, backend, steps, opened)
            drawer: Drawer = HostDrawer() if gpu is None else DeviceDrawer(forward, gpu)
            drafts = _drafts(options, steps, drafter, predictor)
            if drafts is not None:
                opened.callback(drafts.close)
            prefixes = _remember(options, source, backend, shares, forward.kv)
            opened.callback(prefixes.close)
        forms = Forms(options.model, lambda: source.file.file_id, source.config.n_vocab)
        opened.callback(forms.close)
        reasons = (
            f"device {backend.name}: {backend.reason}",
            f"{threads} threads: " + ("asked for" if options.threads else "one for each physical core"),
            f"context of {n_ctx} tokens: "
            + ("asked for" if options.ctx_tokens else f"the model was trained on {source.config.n_ctx_train}"),
            *source.drafts.reasons,
            *shares.reasons,
            f"drafts: {_who_drafts(options, source)}",
            *(() if forward.recalling is None else (forward.recalling.said,)),
            *guesses_said,
            *misses_said,
        )
        decoder = Decoder(steps, drawer, drafts)
        decoder.guessing = guessing
        return Loaded(
            options, source, backend, shares, forward, residency, forward.kv, prefixes, steps, drawer,
            decoder, drafts, forms, Parking(backend.device, residency, forward.kv), threads,
            reasons, opened.pop_all(), predictor,
        )  # fmt: skip


def _lay_out(
    options: EngineConfig, source: Source, backend: Backend, shares: Shares, progress: Progress, opened: ExitStack
) -> tuple[Forward, Residency, Drafter | None]:
    """Allocate everything of the device, in the order of the dry run, and load what is resident."""
    device, weights = backend.device, source.weights
    uploader = backend.uploader()
    ws = backend.workspace(shares.limits)
    opened.callback(ws.close)
    forward = Forward(
        device, backend.ops, ws, source.arch, source.config, weights, shares.limits,
        kv_tokens=cached_tokens(shares.limits.n_ctx, shares.pool_tokens), kv_type=options.kv_type,
        put=None if uploader is None else uploader.put,
        captured=() if source.drafter is None else source.drafter.config.captured,
        block=source.block, pool_tokens=shares.pool_tokens,
        recall=made_of(options.kv_recall_blocks, options.kv_recall, options.kv_recall_from),
    )  # fmt: skip
    drafter = None
    if source.drafter is not None:
        put = None if uploader is None else uploader.put
        drafter = lay_out(source.drafter, forward, backend.workspace, put, backend.gpu)
    tier = backend.tier(weights.experts, shares.placement, uploader)
    opened.callback(tier.close)
    dense_bytes = 0
    if uploader is not None:
        dense_bytes = uploader.waiting_bytes
        total = dense_bytes + loaded_bytes(weights.experts, shares.placement)
        uploader.flush(lambda done, _: progress("loading", done, total))
    residency = Residency(
        weights.experts, shares.placement, shares.rule, device=device, tier=tier, poison=options.poison,
        progress=lambda done, n_bytes: progress("loading", dense_bytes + done, dense_bytes + n_bytes),
    )  # fmt: skip
    if isinstance(ws, Workspace):
        ws.replay = shares.replay
        ws.join_choices(options.poison)
        if shares.staging_bytes:
            ws.stream_experts(shares.staging_bytes, largest_parts(weights.experts))
    return forward, residency, drafter


def _who_drafts(options: EngineConfig, source: Source) -> str:
    if options.draft == "off":
        return "none, asked for"
    memory = f"looked up, also in the last {options.draft_memory_mib:g} MiB of earlier requests"
    if source.block is not None:
        of = "the file" if source.drafts.path is None else str(source.drafts.path)
        return f"{memory}; the block of {of} that predicts further tokens"
    if source.drafter is None:
        return memory
    c = source.drafter.config
    return f"{memory}; a DFlash drafter of {c.n_layer} layers, {c.block_tokens} tokens a block, from {options.draft}"


def _drafts(options: EngineConfig, steps: Steps, drafter: Drafter | None, predictor: Predictor | None) -> Drafts | None:
    """Who drafts; None: nobody."""
    if options.draft == "off":
        return None
    n_bytes, free = int(options.draft_memory_mib * (1 << 20)), available_bytes()
    if free is not None and n_bytes > free:
        raise CapacityError(
            f"--draft-memory {options.draft_memory_mib:g}: {free >> 20} MiB of host memory are free",
            hint="give a smaller one; 0 remembers no texts",
        )
    return Drafts(steps, n_bytes, drafter, predictor)


def _guess(
    options: EngineConfig, source: Source, backend: Backend, residency: Residency
) -> tuple[Guessing | None, tuple[str, ...]]:
    """Who guesses experts, and what is said of it."""
    if options.guess != "count":
        return None, ()
    if not residency.experts:
        return None, ("guesses: none, the model has no experts",)
    c, pregate = source.config, landing.open_pregate(options, source.file, source.config)
    known = () if pregate is None else pregate.predictors
    way = Way("mlp" if "mlp" in known else "router", threshold=0.5)
    sizes = [sum(e.part_bytes) for e in residency.experts]
    made = Guessing([way], source.file, c.moe_layers, c.n_expert_used, residency, sizes, pregate)
    by = "the next layer's router, applied early"
    if pregate is not None and way.source != "router":
        by = f"{way.source} of {pregate.path}"
    return made, (f"guesses: counted, by {by}",)


def _predict(source: Source, backend: Backend, steps: Steps, opened: ExitStack) -> Predictor | None:
    """What drafts by the block of the file; its experts are loaded here."""
    if source.block is None:
        return None
    tier = None
    if source.block.experts:
        tier = backend.tier(source.block.experts, mtp.whole(source.block.experts), backend.uploader())
        opened.callback(tier.close)
    return Predictor(steps, tier, backend.gpu)


def _remember(options: EngineConfig, source: Source, backend: Backend, shares: Shares, kv: KVCache) -> PrefixCache:
    """The tree of prefixes, and its files."""
    step_tokens = shares.limits.max_tokens
    # On the host a row's bits depend on no other row. Several steps of an odd length are left whole.
    piece = HOST_PREFIX_TOKENS if backend.name == "cpu" else PIECE_TOKENS
    if step_tokens < shares.limits.n_ctx and step_tokens % piece:
        piece = step_tokens
    kv.host = HostTier(backend.device, int(options.prefix_gib * plan.GIB))
    files = None
    if options.cache_dir is not None and options.replay is None:  # what replayed choices leave, nobody would compute
        key: dict[str, str | int | list[str]] = {
            "file_id": source.file.file_id,
            "kv_types": [kind.name for kind in pair_of(options.kv_type)],  # of K and of V
            "chunk_tokens": piece,
            "block": 0 if source.block is None else source.block.number,
            "block_id": source.drafts.block_id,  # of a file of its own: what it computed is in the chunks
            "device": f"{backend.name}: {backend.device.name}",
            "code": code_digest(),
            "compiler": backend.compiler,
        }
        model: dict[str, str | bool] = {
            "path": str(options.model.absolute()),
            "architecture": source.file.architecture,
            "needs_state": kv.needs_snapshots,
        }
        files = PrefixFiles(options.cache_dir, key, int(options.cache_dir_gib * plan.GIB), model)
    return PrefixCache(
        kv, piece, files, step_tokens, cuts=not shares.staging_bytes,
        decoded_differ=backend.name == "cuda" and step_tokens > SMALL_TOKENS, exact=options.exact_prefixes,
        has_short=options.cpu_experts != "off",
    )  # fmt: skip


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
