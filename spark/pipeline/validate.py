"""Validation: what each policy misses on sessions it has not seen, and that no token changes.

The routing of the held-out sessions is recorded once; every policy of the ladder is replayed on that
record, so all are compared on the same accesses, beside the bound that no policy can beat. Then each
policy serves held-out prompts for real: its tokens must be those of the all-resident run. Intervals are of 95%, from a
bootstrap over root sessions (engine/placing/evidence.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from engine.formats import profile as profiles
from engine.formats.gguf import open_model
from engine.formats.trace import RoutingTrace, read_routing
from engine.ground.config import EngineConfig
from engine.ground.errors import CapacityError, UsageError
from engine.ground.files import scratch
from engine.placing import policies
from spark import storage
from spark.daemon.client import DaemonClient, Deadlines
from spark.pipeline import replay
from spark.pipeline.ladder import (
    Answer,
    Basis,
    Judge,
    Loaded,
    Prompts,
    Rung,
    Serving,
    Step,
    open_reference,
    serve,
    steps,
)
from spark.pipeline.replay import Progress
from spark.pipeline.tokens import TokensFile, opened

RESIDENCIES = (10.0, 30.0, 60.0)
PROMPT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ValidateOptions:
    """What to validate on.

    tokens: held-out token files, or sessions (JSONL) that are tokenized first, as paths, folders, patterns or URLs of
    them (spark/storage.py). profile: counts to place by. cross: profiles of other traffic, reported apart.
    residencies: shares of the expert bytes in slots, percent. max_tokens: of the held-out files, for the replay.
    prompts, generate_tokens: prompts served for real under each policy, and tokens generated for each.
    """

    tokens: storage.Given
    profile: Path
    cross: tuple[Path, ...] = ()
    residencies: tuple[float, ...] = RESIDENCIES
    max_tokens: int | None = None
    prompts: int = 8
    generate_tokens: int = 48


@dataclass(frozen=True, slots=True)
class Ladder:
    """One residency. verdict: what the profile says to do there, and what that is worth on these sessions, in words."""

    residency_pct: float
    verdict: str
    rows: tuple[Rung, ...]
    cross: tuple[Rung, ...]


@dataclass(frozen=True, slots=True)
class ValidateReport:
    """The ladder on held-out sessions, by residency in the order asked for; warnings: of the profiles, for the user.

    sessions: root sessions with generated tokens. more: what else who did it has to say.
    """

    model: str
    profile: str | Path
    tokens: int
    generated_tokens: int
    sessions: int
    prompts: int
    ladders: tuple[Ladder, ...]
    warnings: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The report as `--json` writes it."""
        return {
            "model": self.model,
            "profile": str(self.profile),
            "tokens": self.tokens,
            "generated_tokens": self.generated_tokens,
            "sessions": self.sessions,
            "prompts": self.prompts,
            "residencies": [asdict(ladder) for ladder in self.ladders],
            **self.more,
        }


class Climbing(Protocol):
    """Who replays and serves: a daemon of this machine after the other, or those of a cluster (spark/cluster).

    info: what the reference daemon, which holds all experts or as many as fit, said when it was ready. more: what else
    it has to say in the end.
    """

    @property
    def info(self) -> Mapping[str, Any]:
        """See the class."""
        ...

    @property
    def more(self) -> Mapping[str, Any]:
        """See the class."""
        ...

    def record(
        self, file: TokensFile, n_tokens: int, prompts: Prompts, generate_tokens: int
    ) -> tuple[int, RoutingTrace, Serving]:
        """Have the reference read windows, of about so many tokens, and serve prompts.

        Returns the tokens that were read, their routing in the order of the file, and what was served.
        """
        ...

    def climb(self, basis: Basis, steps: Sequence[Step], profile: Path) -> list[Answer]:
        """Answer steps, in their order; profile: the file that daemons place by. Nothing is recorded after that."""
        ...


Opening: TypeAlias = Callable[[EngineConfig, Deadlines, Progress], AbstractContextManager[Climbing]]


@contextlib.contextmanager
def here(config: EngineConfig, deadlines: Deadlines, progress: Progress) -> Iterator[Climbing]:
    """Replay and serve with daemons of this machine, one at a time."""
    with open_reference(config, deadlines, progress) as client:
        yield _Here(config, deadlines, progress, client)


def validate(
    config: EngineConfig, options: ValidateOptions, deadlines: Deadlines, progress: Progress, opening: Opening = here
) -> ValidateReport:
    """Replay and serve the ladder; raises what the files, the model or the daemon are refused for.

    opening: who does.
    """
    for percent in options.residencies:
        if not 0 <= percent <= 100:
            raise UsageError(f"--residency {percent:g}: expected 0 to 100 percent")
    with open_model(config.model) as header:
        replay.require_experts_in(header)
        model_id = header.model_id
    found = [(path, *profiles.load(path, model_id=model_id)) for path in (options.profile, *options.cross)]
    with opened(config.model, options.tokens, progress) as file, opening(config, deadlines, progress) as climbing:
        return _validate(config, options, file, found, climbing)


def _validate(
    config: EngineConfig, options: ValidateOptions, file: TokensFile, found: Loaded, climbing: Climbing
) -> ValidateReport:
    info = climbing.info
    model = info["model"]
    replay.require_experts(model)
    _require_room(info, max(options.residencies))
    for path, profile, _ in found:
        profiles.require_shape(profile, path, (model["n_layer"], model["n_expert"]))
    room = info["ctx_tokens"] - options.generate_tokens
    if room <= 0:
        raise UsageError(
            f"--generate {options.generate_tokens} leaves no room for a prompt in a context of "
            f"{info['ctx_tokens']} tokens"
        )
    prompts = _prompts(file, options.prompts, room)
    total = min(file.n_tokens, options.max_tokens or file.n_tokens)
    n_read, trace, reference = climbing.record(file, total, prompts, options.generate_tokens)
    # Steps of other lengths round otherwise, so one length serves all.
    basis = Basis(
        trace, model, found, reference, policies.find(info["policy"]).whole, prompts, options.generate_tokens,
        info["chunk_tokens"],
    )  # fmt: skip
    asked = [step for percent in options.residencies for step in steps(percent, len(found))]
    with scratch() as folder:  # what was loaded: who serves by the profile's file may change it meanwhile
        profiles.save(found[0][1], folder / "profile.csv")
        answers = dict(zip(asked, climbing.climb(basis, asked, folder / "profile.csv"), strict=True))
    judge = Judge(basis, config)
    return ValidateReport(
        str(config.model), options.profile, n_read, int(trace.generated.sum()), judge.n_roots, len(prompts),
        tuple(_ladder(judge, percent, len(found), answers) for percent in options.residencies),
        tuple(line for _, _, lines in found for line in lines), climbing.more,
    )  # fmt: skip


def _ladder(judge: Judge, percent: float, n_profiles: int, answers: Mapping[Step, Answer]) -> Ladder:
    own = {step.policy: answers[step] for step in steps(percent, 1)}
    cross = tuple(answers[step].row for step in steps(percent, n_profiles) if step.profile)
    verdict = judge.verdict(percent, {name: answer.missed for name, answer in own.items()})
    return Ladder(percent, verdict, tuple(answer.row for answer in own.values()), cross)


class _Here:
    """One daemon at a time."""

    more: Mapping[str, Any] = {}  # never changed

    def __init__(self, config: EngineConfig, deadlines: Deadlines, progress: Progress, client: DaemonClient) -> None:
        self._config, self._deadlines, self._progress, self._client = config, deadlines, progress, client

    @property
    def info(self) -> Mapping[str, Any]:
        return self._client.ready.info

    def record(
        self, file: TokensFile, n_tokens: int, prompts: Prompts, generate_tokens: int
    ) -> tuple[int, RoutingTrace, Serving]:
        client, progress, read = self._client, self._progress, 0
        progress("recording routing", read, n_tokens)
        with scratch() as folder:
            for window in file:
                if read >= n_tokens:
                    break
                read += replay.score(
                    client, window, trace_dir=folder, fed=replay.within(progress, "recording routing", read, n_tokens)
                ).usage.prompt_tokens
                progress("recording routing", min(read, n_tokens), n_tokens)
            trace = read_routing(folder, self.info["model"]["model_id"])
        return read, trace, serve(client, prompts, generate_tokens, policies.ALL.name, progress)

    def climb(self, basis: Basis, steps: Sequence[Step], profile: Path) -> list[Answer]:
        self._client.close()  # its memory is the others' now
        judge = Judge(basis, replace(self._config, device=self.info["device"], profile=profile))
        answers = []
        for i, step in enumerate(steps):
            if not judge.serves(step):
                self._progress("replaying policies", i, len(steps))
            answers.append(judge.answer(step, self._open, self._progress))
        return answers

    def _open(self, asked: EngineConfig) -> DaemonClient:
        return replay.open_daemon(asked, self._deadlines, self._progress)


def _require_room(info: Mapping[str, Any], residency_pct: float) -> None:
    """Raise CapacityError where the reference, which holds all that fits, has fewer experts than are asked for."""
    held = info["residency_pct"]
    if not policies.find(info["policy"]).whole and residency_pct > held:
        raise CapacityError(
            f"--residency {residency_pct:g}: {held:.1f}% of the experts fit on the device",
            hint=f"give at most --residency {int(held)}, or a larger --vram",
        )


def _prompts(file: TokensFile, n_prompts: int, room: int) -> Prompts:
    """What comes before the first generated token of windows spread over the file, one a session if it can be."""
    by_session: dict[str, list[tuple[int, ...]]] = {}
    for window in file:
        generated = np.flatnonzero(window.generated)
        if generated.size and generated[0] > 0:
            end = int(generated[0])
            start = max(0, end - min(PROMPT_TOKENS, room))
            by_session.setdefault(window.session_id, []).append(tuple(int(t) for t in window.tokens[start:end]))
    chosen: list[tuple[int, ...]] = []
    while by_session and len(chosen) < n_prompts:
        for session in list(by_session):
            found = by_session[session].pop(0)
            if found not in chosen:
                chosen.append(found)
            if not by_session[session]:
                del by_session[session]
    if not chosen:
        raise UsageError("the held-out file has no turn to continue", hint="it needs at least one assistant turn")
    return tuple(chosen[:n_prompts])
