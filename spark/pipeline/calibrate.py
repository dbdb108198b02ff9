"""Calibration: feed recorded sessions through the model and count which experts each layer routes to.

The counts are exact integers and every window adds to them independently, so a run that was interrupted
and resumed ends with the profile of one that never was. What is counted is checkpointed beside the
profile (`PROFILE.partial`, itself a profile) and removed when the profile is written.

The routing of the sessions that the slots' rule is chosen by (placing/evidence.py, pipeline/sample.py) is recorded as
they are counted, in `PROFILE.partial.routing` or the folder of `--trace`, and goes with the checkpoint.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from engine.formats import profile as profiles
from engine.formats.gguf import open_model
from engine.formats.profile import Choice, Counted, Profile
from engine.formats.trace import RoutingTrace, estimate_bytes, iter_parts, n_parts, part_paths
from engine.ground.config import EngineConfig
from engine.ground.errors import FileFormatError, UsageError
from engine.ground.files import alone
from engine.placing import evidence
from spark import storage
from spark.console import note
from spark.daemon.client import DaemonClient, Deadlines
from spark.pipeline import checkpoints, replay, staged
from spark.pipeline.checkpoints import CalibrateOptions, Tally
from spark.pipeline.replay import Progress
from spark.pipeline.sample import Sample, naming, recorded
from spark.pipeline.tokens import TokensFile, opened
from spark.speech.sessions import root_of

CHECKPOINT_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class CalibrateReport:
    """What a calibration read and counted; `to_json` has the keys of `--json`.

    ready_s: until the first daemon was ready; seconds: from then until all was counted. no_choice: why nothing was
    chosen, where nothing was; empty otherwise. more: what else who counted has to say.
    """

    model: str
    profile: str | Path
    tokens: int
    generated_tokens: int
    counted_tokens: int
    sessions: int
    ready_s: float
    seconds: float
    resumed_tokens: int
    choices: tuple[Choice, ...]
    no_choice: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Tokens read in this run by its own time."""
        return (self.tokens - self.resumed_tokens) / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """The report as `--json` writes it."""
        return {
            "model": self.model,
            "profile": str(self.profile),
            "tokens": self.tokens,
            "generated_tokens": self.generated_tokens,
            "counted_tokens": self.counted_tokens,
            "sessions": self.sessions,
            "ready_s": self.ready_s,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "choices": [asdict(choice) for choice in self.choices],
            **self.more,
        }


@dataclass(frozen=True, slots=True)
class Run:
    """What there is to count, and where. tally: what an earlier run counted; total: tokens of both, about.

    routing: the folder of the trace, which gets the windows that the sample takes, or all where there is --trace.
    """

    file: TokensFile
    options: CalibrateOptions
    tally: Tally
    total: int
    fingerprint: Mapping[str, Any]
    info: Mapping[str, Any]
    sample: Sample
    routing: Path
    progress: Progress

    def save(self, tally: Tally) -> None:
        """Write the checkpoint."""
        checkpoints.save(self.options, tally, self.fingerprint, self.info)


class Counting(Protocol):
    """Who feeds windows to the model: a daemon of this machine, or those of a cluster (spark/cluster).

    info: what the daemon said when it was ready; of several, what all said. more: what else it has to say in the end.
    """

    @property
    def info(self) -> Mapping[str, Any]:
        """See the class."""
        ...

    @property
    def more(self) -> Mapping[str, Any]:
        """See the class."""
        ...

    def count(self, run: Run) -> Tally:
        """Count the windows of the file, up to the total, that the run's tally does not have, and keep checkpoints."""
        ...


Opening: TypeAlias = Callable[[EngineConfig, Deadlines, Progress], AbstractContextManager[Counting]]


@contextlib.contextmanager
def here(config: EngineConfig, deadlines: Deadlines, progress: Progress) -> Iterator[Counting]:
    """Count with a daemon of this machine."""
    with replay.open_daemon(config, deadlines, progress) as client:
        yield _Here(client)


def calibrate(
    config: EngineConfig,
    options: CalibrateOptions,
    deadlines: Deadlines,
    progress: Progress,
    opening: Opening = here,
) -> CalibrateReport:
    """Count the routing of a token file and write the profile.

    opening: who counts. Raises what the token file, the model or the daemon are refused for; whatever ends the run
    early, Ctrl-C included, what was counted is in the checkpoint.
    """
    with _alone(options):
        _refuse(options)
        with opened(config.model, options.tokens, progress) as file:
            if options.trace is not None:
                where = f" in {options.trace_dir} until it is sent" if options.trace_url and not options.staged else ""
                note(f"the trace takes up to {_trace_bytes(config.model, file, options) / 2**20:,.0f} MiB{where}")
            try:
                return _calibrate(config, options, file, deadlines, progress, opening)
            finally:
                if not checkpoints.partial_path(options.out).exists():  # without a checkpoint nothing can go on from it
                    shutil.rmtree(checkpoints.routing_path(options.out), ignore_errors=True)
                    if options.trace_url and options.trace_dir is not None:
                        shutil.rmtree(options.trace_dir, ignore_errors=True)


@contextlib.contextmanager
def _alone(options: CalibrateOptions) -> Iterator[None]:
    """Let no other calibration make the same profile or trace within the block; UsageError where one does."""
    folder = options.trace_dir
    with contextlib.ExitStack() as stack:
        lock = options.out.with_name(f"{options.out.name}.partial.lock")
        stack.enter_context(alone(lock, f"another calibration makes {options.out}"))
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            stack.callback(_drop_empty, folder)
            stack.enter_context(alone(folder / ".calibrate.lock", f"another calibration writes its trace to {folder}"))
        yield


def _drop_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it has a trace, or another calibration has begun one
        folder.rmdir()


def _refuse(options: CalibrateOptions) -> None:
    """Refuse what needs no model to be refused, before there is any work."""
    if options.hidden and options.trace is None:
        raise UsageError("--hidden writes hidden states into a trace, and --trace is missing")
    partial = checkpoints.partial_path(options.out)
    state = checkpoints.state_of(partial)
    if partial.exists() and state is None:
        raise checkpoints.no_checkpoint(partial)
    if state is not None and state["windows"]:
        if not options.resume:
            raise UsageError(
                f"{partial} holds what an earlier run counted", hint="go on from it with --resume, or remove it"
            )
        return
    # A run that was killed in its first window has counted nothing, and begun a trace, which can be gone on in.
    begun = None if state is None else state.get("trace")
    folder = options.trace_dir
    if options.trace_url:
        if any(name.startswith("part-") for name in storage.names(options.trace_url)):
            raise UsageError(f"{options.trace_url} has a trace already", hint="name another folder for --trace")
        if state is None and folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # of a run whose checkpoint is gone
    if folder is not None and begun != options.trace and part_paths(folder):
        raise UsageError(
            f"{folder} has a trace already, and there is no checkpoint to go on from",
            hint="name another folder for --trace",
        )


def _trace_bytes(model: Path, file: TokensFile, options: CalibrateOptions) -> int:
    """About what the trace of a calibration takes on disk, at most."""
    with open_model(model) as header:
        keys = f"{header.architecture}."
        n_layer, n_embd = (header.value(keys + key, int) for key in ("block_count", "embedding_length"))
        n_used = header.value(keys + "expert_used_count", int, 0)  # a model without experts is refused by the daemon
    n_tokens = min(file.n_tokens, options.max_tokens or file.n_tokens)
    return estimate_bytes(n_tokens, n_layer, n_used, n_embd, options.hidden)


def _calibrate(
    config: EngineConfig, options: CalibrateOptions, file: TokensFile, deadlines: Deadlines, progress: Progress,
    opening: Opening,
) -> CalibrateReport:  # fmt: skip
    if config.ctx_tokens is None:  # a longer context would take memory that experts could have
        config = replace(config, ctx_tokens=_context_tokens(config.model, file.window + options.generate_tokens))
    asked_s = time.monotonic()
    with opening(config, deadlines, progress) as counting:
        ready_s = time.monotonic() - asked_s
        info = counting.info
        model = info["model"]
        replay.require_experts(model)
        if file.window > info["ctx_tokens"]:
            raise UsageError(
                f"windows of {file.window} tokens do not fit in the context of {info['ctx_tokens']}",
                hint="tokenize with a smaller --window",
            )
        sample = Sample(len(model["moe_layers"]), model["n_expert_used"])
        fingerprint = checkpoints.fingerprint_of(options, file, info, sample)
        checkpoint = checkpoints.load(options, fingerprint, file.n_windows)
        tally = checkpoint or Tally(np.zeros((model["n_layer"], model["n_expert"]), np.int64))
        routing = _routing_folder(options, tally, file, model["model_id"])
        resumed_tokens = tally.tokens
        began = time.monotonic()
        total = min(file.n_tokens, options.max_tokens or file.n_tokens)
        with naming(routing, traced=options.trace is not None):
            tally = counting.count(Run(file, options, tally, total, fingerprint, info, sample, routing, progress))
        seconds = time.monotonic() - began
        sessions, order = _read(file, tally, sample)
        trace = recorded(routing, model["model_id"], sample, order, info["ctx_tokens"])
        choices = () if trace is None else _choices(trace, model, config.threads, options.count, progress)
        used = model["n_expert_used"]
        counted = int(tally.counts[model["moe_layers"][0]].sum()) // used
        if not counted:
            checkpoints.partial_path(options.out).unlink(missing_ok=True)
            for part in part_paths(options.trace_dir) if options.trace_dir is not None else ():
                part.unlink()  # of no profile
            raise FileFormatError(
                f"{file.name}: none of its {tally.tokens} tokens counts, so there is no profile to write",
                hint="it needs sessions with at least one assistant turn",
            )
        profile = Profile(
            counts=tally.counts,
            n_expert_used=used,
            model_id=model["model_id"],
            tokens=counted,
            sessions=sessions,
            count=options.count,
            created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            choices=choices,
        )
    if options.staged:
        staged.publish(options.staged, tally.has, tally.end, lambda a, b: progress("giving parts their names", a, b))
    elif options.trace_url and options.trace_dir is not None:
        progress("sending the trace", 0, 1)
        storage.send(part_paths(options.trace_dir), options.trace_url)
    if options.url:
        with storage.writing(options.url, "the profile") as destination:
            destination.write(profiles.format(profile).encode())
    else:
        profiles.save(profile, options.out)
    checkpoints.partial_path(options.out).unlink(missing_ok=True)
    return CalibrateReport(
        model=str(config.model),
        profile=options.url or options.out,
        tokens=tally.tokens,
        generated_tokens=tally.generated_tokens,
        counted_tokens=counted,
        sessions=sessions,
        ready_s=ready_s,
        seconds=seconds,
        resumed_tokens=resumed_tokens,
        choices=choices,
        no_choice="" if choices else _no_choice(trace, sample, file.window),
        more=counting.more,
    )


def _routing_folder(options: CalibrateOptions, tally: Tally, file: TokensFile, model_id: str) -> Path:
    """The folder that routing is recorded in, with as many parts as the tally has seen."""
    folder = options.trace_dir or checkpoints.routing_path(options.out)
    if options.trace_dir is None and not tally.windows and folder.exists():
        shutil.rmtree(folder)  # of a run whose checkpoint is gone
    parts = part_paths(folder) if folder.exists() else []
    if parts:
        if len(parts) < tally.trace_parts:
            raise UsageError(
                f"{folder} has {len(parts)} parts, the checkpoint was made after {tally.trace_parts}",
                hint="remove the checkpoint and the trace, and start again",
            )
        if not tally.windows:
            _require_first_window(folder, file, model_id)
        # A window that was recorded but not counted will be recorded again.
        for part in parts[tally.trace_parts :]:
            part.unlink()
        if tally.trace_parts:
            _require_whole(folder, model_id)
    elif tally.trace_parts:
        raise UsageError(
            f"{folder} is gone, the checkpoint was made after {tally.trace_parts} parts of it",
            hint=f"remove {checkpoints.partial_path(options.out)} and start again",
        )
    return folder


def _require_whole(folder: Path, model_id: str) -> None:
    """Refuse a damaged part now, and not when all is counted."""
    try:
        for _ in iter_parts(folder, model_id, ()):
            pass
    except FileFormatError as error:
        raise FileFormatError(error.message, hint="remove the checkpoint and the trace, and start again") from error


def _require_first_window(folder: Path, file: TokensFile, model_id: str) -> None:
    """Raise UsageError unless a trace is of the file's first window alone, which will be recorded again as it was."""
    window, n_tokens = next(iter(file)), 0
    try:
        for part in iter_parts(folder, model_id, ()):
            n_tokens += len(part.position)
            if set(part.session_ids) - {window.session_id} or n_tokens > len(window.tokens):
                raise UsageError(
                    f"{folder} has a trace of more than the window that the checkpoint was made before",
                    hint="name another folder for --trace",
                )
    except FileFormatError:
        if len(part_paths(folder)) > 1:
            raise
        # A machine that went down may leave a part that is not whole.


def _context_tokens(model: Path, needed: int) -> int:
    """What is needed, or what the model was trained on if that is less."""
    with open_model(model) as file:
        trained: int = file.value(f"{file.architecture}.context_length", int, needed)
    return min(trained, needed)


class _Here:
    """Counts with one daemon, window after window."""

    more: Mapping[str, Any] = {}  # never changed

    def __init__(self, client: DaemonClient) -> None:
        self._client = client

    @property
    def info(self) -> Mapping[str, Any]:
        return self._client.ready.info

    def count(self, run: Run) -> Tally:
        client, file, options, tally = self._client, run.file, run.options, run.tally
        if tally.ledger is not None:
            raise checkpoints.of_a_cluster(options)
        total, progress = run.total, run.progress
        start = tally.counts
        client.profile("reset")
        if options.trace_dir is not None and not tally.windows:
            # A trace belongs to a checkpoint from its first part on: a run that is killed before the first window ends
            # leaves a folder that the next one can go on in.
            run.save(tally)
        progress("calibrating", min(tally.tokens, total), total)
        saved = time.monotonic()
        try:
            for number, window in enumerate(file):
                if number < tally.windows:  # of an earlier run
                    run.sample.takes(window)
                    continue
                if tally.tokens >= total:
                    break
                recorded = run.routing if run.sample.takes(window) or options.trace_dir is not None else None
                replay.score(
                    client, window, trace_dir=recorded, hidden=options.hidden, count=options.count,
                    fed=replay.within(progress, "calibrating", tally.tokens, total),
                )  # fmt: skip
                if options.generate_tokens:
                    replay.go_on(client, window, options.generate_tokens)
                counts = start + np.asarray(client.profile("read")["counts"], np.int64)
                # One assignment: wherever Ctrl-C strikes, the tally is that of whole windows.
                tally = Tally(
                    counts,
                    tally.windows + 1,
                    tally.tokens + len(window.tokens),
                    tally.generated_tokens + int(np.count_nonzero(window.generated)),
                    n_parts(run.routing, tally.trace_parts),
                )
                progress("calibrating", min(tally.tokens, total), total)
                # Behind the first window at once: a folder for a trace that has more than that before any is counted
                # may be another run's (`_require_first_window`).
                is_first = options.trace_dir is not None and tally.windows == 1
                if is_first or time.monotonic() - saved > CHECKPOINT_EVERY_S:
                    run.save(tally)
                    saved = time.monotonic()
        finally:
            if tally.windows:
                run.save(tally)
        return tally


def _read(file: TokensFile, tally: Tally, sample: Sample) -> tuple[int, dict[tuple[str, int], int]]:
    """How many sessions the tally's windows are of; and the places in the file of those that the sample may have."""
    sessions: set[str] = set()
    order: dict[tuple[str, int], int] = {}
    for number, (session_id, window) in enumerate(islice(file.names(), tally.end)):
        if tally.has(number):
            sessions.add(session_id)
            if session_id in sample:
                order.setdefault((session_id, window), number)
    return len(sessions), order


# --- what the slots do -------------------------------------------------------------------------------


def _choices(
    trace: RoutingTrace, model: Mapping[str, Any], threads: int | None, count: Counted, progress: Progress
) -> tuple[Choice, ...]:
    """What the sample speaks for at several residencies; nothing where its roots are too few."""
    if not trace.generated.any():
        return ()
    return evidence.choose(
        trace, model["expert_bytes"], threads=threads, count=count,
        progress=lambda done, total: progress("choosing what to pin", done, total),
    )  # fmt: skip


def _no_choice(trace: RoutingTrace | None, sample: Sample, window: int) -> str:
    """Why nothing was chosen, in a sentence without its full stop."""
    found = set() if trace is None else set(trace.session[trace.generated].tolist())
    n = len({root_of(trace.session_ids[i]) for i in found}) if trace is not None else 0
    why = f", since windows of up to {window:,} tokens are too long to record" if sample.has_too_long else ""
    return (
        f"To choose what the slots should do takes generated tokens of {evidence.MIN_ROOTS} sessions (subagents and "
        f"forks are of one), and there are those of {n}{why}"
    )
