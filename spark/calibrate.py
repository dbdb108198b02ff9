"""Calibration: feed recorded sessions through the model and count which experts each layer routes to.

The counts are exact integers and every window adds to them independently, so a run that was interrupted
and resumed ends with the profile of one that never was. What is counted is checkpointed beside the
profile (`PROFILE.partial`, itself a profile) and removed when the profile is written.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from engine import placement, policy, simulate
from engine import profile as profiles
from engine.config import EngineConfig
from engine.errors import FileFormatError, SparkError, UsageError
from engine.gguf import open_model
from engine.profile import Profile
from engine.protocol import Sampling
from engine.trace import estimate_bytes, part_paths, read_routing
from spark import replay
from spark.client import DaemonClient, Deadlines
from spark.console import note
from spark.replay import Progress
from spark.tokens import TokensFile, Window, opened

CHECKPOINT_EVERY_S = 5.0
SPLIT_TOKENS = 4096  # generated tokens on which splits of the slots are compared
SPLIT_WINDOWS = 16
SPLIT_RESIDENCIES = (20.0, 40.0, 60.0, 80.0)
_CHECKPOINT = "# spark-checkpoint: "


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """What to calibrate on and what to count.

    tokens: a token file, or sessions (JSONL) that are tokenized first.
    count: whose routing counts, of the tokens the model itself would have decoded or of all.
    generate_tokens: also count this many tokens of the model's own continuation of each window.
    trace_dir, hidden: write the routing of every token there, with hidden states.
    max_tokens: stop after the window that reaches so many tokens. resume: go on from the checkpoint.
    """

    tokens: Path
    out: Path
    count: Literal["generated", "all"] = "generated"
    generate_tokens: int = 0
    trace_dir: Path | None = None
    hidden: bool = False
    max_tokens: int | None = None
    resume: bool = False


@dataclass(frozen=True, slots=True)
class CalibrateReport:
    """What a calibration read and counted; `to_json` has the keys of `--json`."""

    model: str
    profile: Path
    tokens: int
    generated_tokens: int
    counted_tokens: int
    sessions: int
    seconds: float
    resumed_tokens: int
    split: tuple[tuple[float, float], ...]

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
            "tokens_per_s": self.tokens_per_s,
            "split": [list(pair) for pair in self.split],
        }


@dataclass(frozen=True, slots=True)
class _Tally:
    """What was counted after whole windows; a new one takes its place when a window is done."""

    counts: np.ndarray[Any, np.dtype[np.int64]]
    windows: int = 0
    tokens: int = 0
    generated_tokens: int = 0
    trace_parts: int = 0


def partial_path(out: Path) -> Path:
    """Where the checkpoint of a calibration to `out` lies."""
    return out.with_name(out.name + ".partial")


def calibrate(
    config: EngineConfig, options: CalibrateOptions, deadlines: Deadlines, progress: Progress
) -> CalibrateReport:
    """Count the routing of a token file and write the profile.

    Raises what the token file, the model or the daemon are refused for; whatever ends the run early,
    Ctrl-C included, what was counted is in the checkpoint.
    """
    _refuse(options)
    with opened(config.model, options.tokens, progress) as file:
        if options.trace_dir is not None:
            note(f"the trace takes up to {_trace_bytes(config.model, file, options) / 2**20:,.0f} MiB")
        return _calibrate(config, options, file, deadlines, progress)


def _refuse(options: CalibrateOptions) -> None:
    """Refuse what needs no model to be refused, before there is any work."""
    if options.hidden and options.trace_dir is None:
        raise UsageError("--hidden writes hidden states into a trace, and --trace is missing")
    partial = partial_path(options.out)
    if partial.exists():
        if not options.resume and _windows_in(partial) != 0:
            raise UsageError(
                f"{partial} holds what an earlier run counted", hint="go on from it with --resume, or remove it"
            )
    elif options.trace_dir is not None and part_paths(options.trace_dir):
        raise UsageError(
            f"{options.trace_dir} has a trace already, and there is no checkpoint to go on from",
            hint="name another folder for --trace",
        )


def _trace_bytes(model: Path, file: TokensFile, options: CalibrateOptions) -> int:
    """About what the trace of a calibration takes on disk, at most."""
    with open_model(model) as header:
        keys = ("block_count", "expert_used_count", "embedding_length")
        n_layer, n_used, n_embd = (header.value(f"{header.architecture}.{key}", int) for key in keys)
    n_tokens = min(file.n_tokens, options.max_tokens or file.n_tokens)
    return estimate_bytes(n_tokens, n_layer, n_used, n_embd, options.hidden)


def _calibrate(
    config: EngineConfig, options: CalibrateOptions, file: TokensFile, deadlines: Deadlines, progress: Progress
) -> CalibrateReport:
    if config.ctx_tokens is None:  # a longer context would take memory that experts could have
        config = replace(config, ctx_tokens=_context_tokens(config.model, file.window + options.generate_tokens))
    with replay.open_daemon(config, deadlines, progress) as client:
        model = client.ready.info["model"]
        replay.require_experts(client)
        if file.window > client.ready.info["ctx_tokens"]:
            raise UsageError(
                f"windows of {file.window} tokens do not fit in the context of "
                f"{client.ready.info['ctx_tokens']}",
                hint="tokenize with a smaller --window",
            )
        fingerprint = _fingerprint(options, file, client.ready.info)
        checkpoint = _load_checkpoint(options.out, fingerprint)
        tally = checkpoint or _Tally(np.zeros((model["n_layer"], model["n_expert"]), np.int64))
        if options.trace_dir is not None and options.trace_dir.exists():
            parts = part_paths(options.trace_dir)
            if len(parts) < tally.trace_parts:
                raise UsageError(
                    f"{options.trace_dir} has {len(parts)} parts, the checkpoint was made after {tally.trace_parts}",
                    hint="remove the checkpoint and the trace, and start again",
                )
            # A window that was traced but not counted will be traced again.
            for part in parts[tally.trace_parts :]:
                part.unlink()
        resumed_tokens = tally.tokens
        began = time.monotonic()
        tally = _count(client, file, options, tally, fingerprint, progress)
        seconds = time.monotonic() - began
        sessions = {w.session_id for w in islice(file, tally.windows)}
        split = _split(client, file, tally, progress)
        used = model["n_expert_used"]
        counted = int(tally.counts[model["moe_layers"][0]].sum()) // used
        if not counted:
            partial_path(options.out).unlink(missing_ok=True)
            raise FileFormatError(
                f"{file.name}: none of its {tally.tokens} tokens counts, so there is no profile to write",
                hint="it needs sessions with at least one assistant turn",
            )
        profile = Profile(
            counts=tally.counts,
            n_expert_used=used,
            model_id=model["model_id"],
            tokens=counted,
            sessions=len(sessions),
            count=options.count,
            created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            split=split,
        )
    profiles.save(profile, options.out)
    partial_path(options.out).unlink(missing_ok=True)
    return CalibrateReport(
        model=str(config.model),
        profile=options.out,
        tokens=tally.tokens,
        generated_tokens=tally.generated_tokens,
        counted_tokens=counted,
        sessions=len(sessions),
        seconds=seconds,
        resumed_tokens=resumed_tokens,
        split=split,
    )


def _context_tokens(model: Path, needed: int) -> int:
    """What is needed, or what the model was trained on if that is less."""
    with open_model(model) as file:
        trained: int = file.value(f"{file.architecture}.context_length", int, needed)
    return min(trained, needed)


def _count(
    client: DaemonClient,
    file: TokensFile,
    options: CalibrateOptions,
    tally: _Tally,
    fingerprint: dict[str, Any],
    progress: Progress,
) -> _Tally:
    total = min(file.n_tokens, options.max_tokens or file.n_tokens)
    start = tally.counts
    client.profile("reset")
    if options.trace_dir is not None and not tally.windows:
        # A trace belongs to a checkpoint from its first part on: a run that is killed before the first window ends
        # leaves a folder that the next one can go on in.
        _save_checkpoint(options.out, tally, fingerprint, client.ready.info)
    progress("calibrating", min(tally.tokens, total), total)
    saved = time.monotonic()
    try:
        for window in islice(file, tally.windows, None):
            if tally.tokens >= total:
                break
            replay.score(client, window, trace_dir=options.trace_dir, hidden=options.hidden, count=options.count)
            if options.generate_tokens:
                _continue(client, window, options.generate_tokens)
            counts = start + np.asarray(client.profile("read")["counts"], np.int64)
            # One assignment: wherever Ctrl-C strikes, the tally is that of whole windows.
            tally = _Tally(
                counts,
                tally.windows + 1,
                tally.tokens + len(window.tokens),
                tally.generated_tokens + int(np.count_nonzero(window.generated)),
                0 if options.trace_dir is None else len(part_paths(options.trace_dir)),
            )
            progress("calibrating", min(tally.tokens, total), total)
            if time.monotonic() - saved > CHECKPOINT_EVERY_S:
                _save_checkpoint(options.out, tally, fingerprint, client.ready.info)
                saved = time.monotonic()
    finally:
        if tally.windows:
            _save_checkpoint(options.out, tally, fingerprint, client.ready.info)
    return tally


def _continue(client: DaemonClient, window: Window, n_tokens: int) -> None:
    room = client.ready.info["ctx_tokens"] - len(window.tokens)
    if room > 0:
        # Sampled, since greedy text of a small model repeats itself; the seed makes it reproducible.
        sampling = Sampling(temperature=0.8, top_p=0.95, seed=window.window)
        tokens = window.tokens.tolist()
        replay.finish(client.generate(tokens, max_tokens=min(n_tokens, room), sampling=sampling, stop_tokens=[]))


# --- checkpoint ---------------------------------------------------------------------------------------


def _fingerprint(options: CalibrateOptions, file: TokensFile, ready: Mapping[str, Any]) -> dict[str, Any]:
    """All that the counts and the trace depend on. A model's quantizations route differently, so the file counts."""
    with file.path.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    return {
        "model_file": ready["model"]["file_id"],
        "kv_type": ready["kv_type"],
        "ctx_tokens": ready["ctx_tokens"],
        "token_file": digest,
        "count": options.count,
        "generate": options.generate_tokens,
        "trace": None if options.trace_dir is None else str(options.trace_dir.resolve()),
        "hidden": options.hidden,
    }


_COUNTERS = ("windows", "tokens", "generated_tokens", "trace_parts")


def _save_checkpoint(out: Path, tally: _Tally, fingerprint: dict[str, Any], ready: Mapping[str, Any]) -> None:
    state = {name: getattr(tally, name) for name in _COUNTERS} | fingerprint
    model = ready["model"]
    profile = Profile(
        counts=tally.counts,
        n_expert_used=model["n_expert_used"],
        model_id=model["model_id"],
        extra_lines=(_CHECKPOINT + json.dumps(state),),
    )
    profiles.save(profile, partial_path(out))


def _windows_in(partial: Path) -> int | None:
    """How many windows a checkpoint counted; None where it is none."""
    try:
        (line,) = (x for x in profiles.load(partial)[0].extra_lines if x.startswith(_CHECKPOINT))
        return int(json.loads(line.removeprefix(_CHECKPOINT))["windows"])
    except (SparkError, ValueError, KeyError, TypeError):
        return None


def _load_checkpoint(out: Path, fingerprint: dict[str, Any]) -> _Tally | None:
    path = partial_path(out)
    if not path.exists():
        return None
    profile, _ = profiles.load(path)
    try:
        line = next(x for x in profile.extra_lines if x.startswith(_CHECKPOINT))
        state = json.loads(line.removeprefix(_CHECKPOINT))
        done = [int(state[name]) for name in _COUNTERS]
        changed = [key for key, value in fingerprint.items() if state[key] != value]
    except (StopIteration, ValueError, KeyError, TypeError) as error:
        hint = "remove it and start again"
        raise FileFormatError(f"{path} is not a checkpoint of a calibration", hint=hint) from error
    if changed:
        raise UsageError(
            f"{path} was counted with another {', '.join(changed)}: found {[state[k] for k in changed]}, "
            f"expected {[fingerprint[k] for k in changed]}",
            hint="remove it, or resume with what it was started with",
        )
    return _Tally(profile.counts, *done)


# --- the split of the slots ---------------------------------------------------------------------------


def _sample_windows(file: TokensFile, n_windows: int) -> Iterator[Window]:
    """Windows spread evenly over the first `n_windows`, until they hold SPLIT_TOKENS generated tokens."""
    stride = max(1, n_windows // min(SPLIT_WINDOWS, max(2, n_windows // 8)))
    found = 0
    for window in islice(file, 0, n_windows, stride):
        if found >= SPLIT_TOKENS:
            return
        found += int(np.count_nonzero(window.generated))
        yield window


def _split(
    client: DaemonClient, file: TokensFile, tally: _Tally, progress: Progress
) -> tuple[tuple[float, float], ...]:
    """For some residencies, the share of cache slots that misses least on a sample of the windows."""
    model = client.ready.info["model"]
    with tempfile.TemporaryDirectory(prefix="spark-split-") as folder:
        for window in _sample_windows(file, tally.windows):
            replay.score(client, window, trace_dir=Path(folder))
        if not part_paths(Path(folder)):
            return ()  # no window was counted
        trace = read_routing(Path(folder), model["model_id"])
    if not trace.generated.any():
        return ()
    # What the sample's generated tokens added is taken out: no placement should be judged on what it was made from.
    counts = tally.counts[model["moe_layers"]]
    rest = np.maximum(counts - trace.counts(), 0)
    placed_by = rest if 2 * rest.sum() >= counts.sum() else None
    sizes, found = model["expert_bytes"], []
    for i, pct in enumerate(SPLIT_RESIDENCIES):
        progress("choosing cache slots", i, len(SPLIT_RESIDENCIES))
        budget = placement.residency_budget(model["n_expert"], sizes, pct)
        split = simulate.best_split(
            trace, sizes, budget, counts=placed_by, rule=policy.AGED, max_tokens=SPLIT_TOKENS
        )
        found.append((pct, split.cache_fraction))
    progress("choosing cache slots", len(SPLIT_RESIDENCIES), len(SPLIT_RESIDENCIES))
    return tuple(found)


