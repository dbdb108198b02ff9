"""What a calibration is asked for, what it has counted, and the checkpoint that it goes on from.

A checkpoint lies beside the profile (`PROFILE.partial`) and is itself a profile, with a line that says what its counts
depend on, and which windows they are of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from engine.formats import profile as profiles
from engine.formats.profile import Profile
from engine.ground.errors import FileFormatError, SparkError, UsageError
from spark import storage
from spark.pipeline.ledger import Ledger
from spark.pipeline.sample import Sample
from spark.pipeline.tokens import TokensFile

_CHECKPOINT = "# spark-checkpoint: "


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """What to calibrate on and what to count.

    tokens: token files, or sessions (JSONL) that are tokenized first, as paths, folders, patterns or URLs of them
        (spark/storage.py).
    count: whose routing counts, of the tokens the model itself would have decoded or of all.
    generate_tokens: also count this many tokens of the model's own continuation of each window.
    trace_dir, hidden: write the routing of every token there, with hidden states. trace_url: where its parts go in the
        end, if that is a URL; trace_dir is then a folder of this calibration alone, `staging_path`, or, where those who
        count leave parts behind the URL themselves, None, and staged says where (pipeline/staged.py).
    max_tokens: stop after the window that reaches so many tokens. resume: go on from the checkpoint.
    out: the profile; the checkpoint lies beside it. url: where the profile goes instead, if it is a URL.
    """

    tokens: storage.Given
    out: Path
    count: Literal["generated", "all"] = "generated"
    generate_tokens: int = 0
    trace_dir: Path | None = None
    hidden: bool = False
    max_tokens: int | None = None
    resume: bool = False
    url: str = ""
    trace_url: str = ""
    staged: str = ""

    @property
    def trace(self) -> str | None:
        """Where parts of the trace are while windows are counted, if there is one: a URL, or a folder's whole path."""
        return self.trace_url if self.staged else None if self.trace_dir is None else str(self.trace_dir.resolve())


@dataclass(frozen=True, slots=True)
class Tally:
    """What was counted after whole windows; a new one takes its place when a window is done.

    windows: how many. ledger: which they are; None: the first ones.
    """

    counts: np.ndarray[Any, np.dtype[np.int64]]
    windows: int = 0
    tokens: int = 0
    generated_tokens: int = 0
    trace_parts: int = 0
    ledger: Ledger | None = None

    def has(self, number: int) -> bool:
        """Whether a window of the file is counted."""
        return number < self.windows if self.ledger is None else number in self.ledger

    @property
    def end(self) -> int:
        """A number above those of all windows that are counted."""
        return self.windows if self.ledger is None else self.ledger.end


def partial_path(out: Path) -> Path:
    """Where the checkpoint of a calibration to `out` lies."""
    return out.with_name(out.name + ".partial")


def counted_by(out: Path) -> int:
    """How many windows the checkpoint of a calibration to `out` has."""
    state = state_of(partial_path(out))
    return 0 if state is None else int(state["windows"])


def routing_path(out: Path) -> Path:
    """Where a calibration to `out` records routing to choose by, unless it has a trace."""
    return out.with_name(out.name + ".partial.routing")


def staging_path(out: Path) -> Path:
    """Where the trace of a calibration to `out` is gathered that goes to a URL."""
    return out.with_name(out.name + ".partial.trace")


def fingerprint_of(
    options: CalibrateOptions, file: TokensFile, ready: Mapping[str, Any], sample: Sample
) -> dict[str, Any]:
    """All that the counts and the trace depend on. A model's quantizations route differently, so the file counts."""
    return {
        "model_file": ready["model"]["file_id"],
        "kv_type": ready["kv_type"],
        "ctx_tokens": ready["ctx_tokens"],
        "token_file": file.digest,
        "count": options.count,
        "generate": options.generate_tokens,
        "trace": options.trace,
        "hidden": options.hidden,
        "sample": sample.rule,
    }


_DIGESTS = {"model_file": "model file", "token_file": "token file"}  # in words, where values say nothing
_COUNTERS = ("windows", "tokens", "generated_tokens", "trace_parts")


def save(
    options: CalibrateOptions, tally: Tally, fingerprint: Mapping[str, Any], ready: Mapping[str, Any]
) -> None:
    """Write down what was counted, in place of what was written before."""
    state = {name: getattr(tally, name) for name in _COUNTERS} | dict(fingerprint)
    if options.staged:
        state["staged"] = options.staged
    model = ready["model"]
    profile = Profile(
        counts=tally.counts,
        n_expert_used=model["n_expert_used"],
        model_id=model["model_id"],
        extra_lines=(_CHECKPOINT + json.dumps(state), *(() if tally.ledger is None else tally.ledger.lines())),
    )
    profiles.save(profile, partial_path(options.out))


def state_of(partial: Path) -> dict[str, Any] | None:
    """What a checkpoint says about itself, its number of windows at least; None where it is none."""
    try:
        (line,) = (x for x in profiles.load(partial)[0].extra_lines if x.startswith(_CHECKPOINT))
        state = json.loads(line.removeprefix(_CHECKPOINT))
        return {**state, "windows": int(state["windows"])}
    except (SparkError, ValueError, KeyError, TypeError, OverflowError):
        return None


def no_checkpoint(partial: Path) -> FileFormatError:
    """What a file that is no checkpoint is refused with."""
    message = f"{partial} is not a checkpoint of this version's calibration"
    return FileFormatError(message, hint="remove it, and a trace that it began, and start again")


def of_a_cluster(options: CalibrateOptions) -> UsageError:
    """What a checkpoint of a cluster is refused with, where one daemon counts."""
    return UsageError(
        f"{partial_path(options.out)} was counted by a cluster, whose windows are in no order",
        hint="go on from it with --ray, or remove it",
    )


def load(options: CalibrateOptions, fingerprint: dict[str, Any], n_windows: int) -> Tally | None:
    """What an earlier run counted, of so many windows; None where it counted none."""
    path = partial_path(options.out)
    if not path.exists():
        return None
    try:
        state = state_of(path)
        if state is None:
            raise ValueError("no checkpoint")
        if not state["windows"]:
            return None
        if state.get("staged") and not options.staged:
            raise of_a_cluster(options)
        done = {name: int(state[name]) for name in _COUNTERS}
        saved = profiles.load(path)[0]
        ledger = Ledger.parse(saved.extra_lines)
        if ledger is not None and len(ledger) != state["windows"]:
            raise ValueError(f"{len(ledger)} windows in its ledger, {state['windows']} counted")
        if min(done.values()) < 0 or done["windows"] > n_windows:
            raise ValueError(f"it has {done}")
        changed = [key for key, value in fingerprint.items() if state[key] != value]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise no_checkpoint(path) from error
    if changed:
        found = [_DIGESTS.get(key) or f"{key} (found {state[key]}, expected {fingerprint[key]})" for key in changed]
        raise UsageError(
            f"{path} was counted with another {', another '.join(found)}",
            hint="remove it, or resume with what it was started with",
        )
    return Tally(saved.counts, **done, ledger=ledger)
