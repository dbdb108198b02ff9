"""`spark validate --ray`: windows are replayed, and the ladder is climbed, by the workers of a cluster.

Two sets of workers, one after the other, since a GPU holds one daemon: those of the reference, which record the routing
of windows and serve the prompts, and those that answer the steps of the ladder, each with a daemon of its own. What is
measured there is timed on the workers; all else is what one machine finds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine.formats import profile as profiles
from engine.formats.gguf import open_model
from engine.formats.trace import RoutingTrace, read_routing
from engine.ground.config import EngineConfig
from engine.ground.errors import DaemonError
from engine.ground.files import scratch
from spark.cluster import counting
from spark.cluster.driver import Driver, Patience
from spark.cluster.inputs import Inputs, Row, row, sources
from spark.cluster.options import ClusterOptions
from spark.cluster.pool import Result, Task
from spark.cluster.ray_pool import RayPool, connected, load_ray
from spark.cluster.schedule import SetAside
from spark.cluster.worker import FeedingWorker, Worker
from spark.daemon.client import DaemonClient, Deadlines
from spark.pipeline import replay, validate
from spark.pipeline.ladder import Answer, Basis, Judge, Prompts, Serving, Step, open_reference, serve
from spark.pipeline.replay import Progress
from spark.pipeline.tokens import TokensFile, Window
from spark.pipeline.validate import ValidateOptions, ValidateReport

_OF_A_CLIMBER = ("node", "index", "tasks", "busy_s", "lost")
_SERVED_COST = 8  # of a step that takes a daemon, beside one that does not


def run(
    config: EngineConfig,
    options: ValidateOptions,
    cluster: ClusterOptions,
    deadlines: Deadlines,
    progress: Progress,
) -> ValidateReport:
    """Replay and serve the ladder on a cluster; the report is that of one machine, rates aside.

    Raises what `pipeline.validate.validate` and `calibrating.run` do; DaemonError where two workers end at one step.
    """
    load_ray()

    @contextlib.contextmanager
    def opening(config: EngineConfig, deadlines: Deadlines, progress: Progress) -> Iterator[validate.Climbing]:
        with connected(cluster) as ray, contextlib.ExitStack() as stack:
            yield _There(ray, cluster, config, deadlines, progress, stack)

    return validate.validate(config, options, deadlines, progress, opening)


# --- on a node ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Served:
    """The payload of a task: prompts for the reference."""

    prompts: Prompts
    generate_tokens: int


class ReferenceWorker(FeedingWorker):
    """The daemon that others are compared with: windows become the parts of their trace, prompts what it serves."""

    _inputs: Inputs | None = None

    def _start(self) -> DaemonClient:
        return open_reference(self._config, self._deadlines, _quiet)

    def _do(self, payload: Window | Row | Served, before: int) -> tuple[bytes, ...] | Serving:
        if isinstance(payload, Served):
            return serve(self._client, payload.prompts, payload.generate_tokens, "", _quiet)
        window = payload if isinstance(payload, Window) else self._read(payload)
        return tuple(path.read_bytes() for path in self._score(window, before, recorded=True))

    def _read(self, row: Row) -> Window:
        if self._inputs is None:
            self._inputs = Inputs(row.sources, self._open)
        return self._inputs.window(row)

    def _together(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values)


class LadderWorker(Worker):
    """Answers steps, each with a daemon of its own, which places by a copy of the profile."""

    def __init__(self, config: EngineConfig, deadlines: Deadlines, asked: Basis) -> None:
        super().__init__(config, deadlines, asked)
        self._profile = asked.found[0][1]
        self._judge = Judge(asked, config)

    @property
    def info(self) -> Mapping[str, Any]:
        """See Worker; and which model file lies there."""
        with open_model(self._config.model) as model:
            return {**super().info, "file_id": model.file_id}

    def _do(self, payload: Step, before: int) -> Answer:
        with scratch() as folder:
            profiles.save(self._profile, folder / "profile.csv")

            def opened(asked: EngineConfig) -> contextlib.AbstractContextManager[DaemonClient]:
                return self._opened(replace(asked, profile=folder / "profile.csv"))

            return self._judge.answer(payload, opened, _quiet)

    def _opened(self, asked: EngineConfig) -> DaemonClient:
        self._open.close()  # the daemon before
        return self._open.enter_context(replay.open_daemon(asked, self._deadlines, _quiet))

    def _together(self, values: Sequence[Answer]) -> tuple[Answer, ...]:
        return tuple(values)


def _quiet(label: str, done: int, total: int) -> None:
    """A progress that nobody sees: the driver shows its own."""


# --- at the driver ------------------------------------------------------------------------------------


class _Job:
    """Tasks whose values are kept by number. label: of its progress, in cost."""

    def __init__(self, label: str, total: int, progress: Progress) -> None:
        self._label, self._total, self._progress = label, total, progress
        self._done = self._shown = 0
        self.values: dict[int, Any] = {}
        self.aside: list[SetAside] = []

    def add(self, tasks: Sequence[Task], result: Result) -> None:
        for task, value in zip(tasks, result.value, strict=True):
            self.values[task.number] = value
            self._done += task.cost

    def set_aside(self, found: SetAside) -> None:
        self.aside.append(found)

    def tick(self, now_s: float, driver: Driver) -> None:
        self._shown = max(self._shown, min(self._done + driver.fed, self._total))
        self._progress(self._label, self._shown, self._total)


class _There:
    """A `validate.Climbing` on a cluster."""

    def __init__(
        self, ray: Any, cluster: ClusterOptions, config: EngineConfig, deadlines: Deadlines, progress: Progress,
        stack: contextlib.ExitStack,
    ) -> None:  # fmt: skip
        self._ray, self._cluster, self._deadlines, self._progress = ray, cluster, deadlines, progress
        self._config, self._stack = config, stack
        with open_model(config.model) as model:
            self._file_id = model.file_id
        self._aside: list[SetAside] = []
        self._drivers: list[Driver] = []
        self._driver = self._start(config, ReferenceWorker, None, self._refusal)
        self._info: Mapping[str, Any] = self._driver.first()["ready"]

    @property
    def info(self) -> Mapping[str, Any]:
        """See `validate.Climbing`."""
        return self._info

    @property
    def more(self) -> Mapping[str, Any]:
        """What `--json` has beside the figures of one machine."""
        refused = {name: why for driver in self._drivers for name, why in driver.refused.items()}
        read, climbed = (driver.shares for driver in self._drivers)
        return {
            "workers": [asdict(share) | {"tokens_per_s": share.rate} for share in read],
            "climbers": [{key: asdict(share)[key] for key in _OF_A_CLIMBER} for share in climbed],
            "set_aside": [{"window": each.task.name, "reasons": list(each.reasons)} for each in self._aside],
            "refused": refused,
        }

    def record(
        self, file: TokensFile, n_tokens: int, prompts: Prompts, generate_tokens: int
    ) -> tuple[int, RoutingTrace, Serving]:
        """See `validate.Climbing`."""
        lengths: list[tuple[str, int, int]] = []  # session, window and tokens of each window
        job = _Job("recording routing", n_tokens, self._progress)

        def tasks() -> Iterator[Task]:
            cost = sum(len(prompt) + generate_tokens for prompt in prompts)
            yield Task(0, cost, "the prompts", Served(prompts, generate_tokens))
            read = 0
            for number, window in enumerate(file, 1):
                if read >= n_tokens:
                    return
                read += len(window.tokens)
                lengths.append((window.session_id, window.window, len(window.tokens)))
                name = f"window {window.window} of session {window.session_id}"
                yield Task(number, len(window.tokens), name, window)

        found = sources(file)

        def small(task: Task) -> Task:
            window = task.payload
            return replace(task, payload=row(found, task.number - 1, window)) if isinstance(window, Window) else task

        self._driver.run(tasks(), job, small)
        self._stack.close()  # the reference's workers; their GPUs are the ladder's now
        self._aside = job.aside
        if 0 not in job.values:
            raise _ended(job.aside)
        read = 0
        with scratch() as folder:
            parts = 0
            for number, (_, _, length) in enumerate(lengths, 1):
                for data in job.values.get(number, ()):
                    (folder / f"part-{parts:06d}.parquet").write_bytes(data)
                    parts += 1
                read += length if number in job.values else 0
            trace = read_routing(folder, self._info["model"]["model_id"])
        order = {(session_id, window): i for i, (session_id, window, _) in enumerate(lengths)}
        return read, trace.in_order(order, self._info["ctx_tokens"]), job.values[0]

    def climb(self, basis: Basis, steps: Sequence[Step], profile: Path) -> list[Answer]:
        """See `validate.Climbing`."""
        judge = Judge(basis, self._config)
        tasks = [
            Task(i, _SERVED_COST if judge.serves(step) else 1, f"{step.policy} at {step.percent:g}%", step)
            for i, step in enumerate(steps)
        ]
        job = _Job("climbing the ladder", sum(task.cost for task in tasks), self._progress)
        driver = self._start(self._config, LadderWorker, basis, self._other)
        driver.run(iter(tasks), job)
        self._stack.close()
        if job.aside:
            raise _ended(job.aside)
        return [job.values[task.number] for task in tasks]

    def _start(self, config: EngineConfig, kind: type[Worker], asked: Any, refusal: Any) -> Driver:
        pool = RayPool(self._ray, self._cluster, config, self._deadlines, asked, kind)
        self._stack.callback(pool.close)
        patience = Patience(self._deadlines.ready_s, self._deadlines.silence_s)
        self._drivers.append(Driver(pool, refusal, patience, n_workers=self._cluster.n_workers))
        return self._drivers[-1]

    def _refusal(self, first: Mapping[str, Any], info: Mapping[str, Any]) -> str:
        if found := counting.refusal(first, info, self._file_id):
            return found
        for key in ("chunk_tokens", "policy"):  # steps of other lengths round otherwise
            ours, theirs = first["ready"][key], info["ready"][key]
            if ours != theirs:
                return f"its {key} is another: found {theirs}, expected {ours}"
        return ""

    def _other(self, first: Mapping[str, Any], info: Mapping[str, Any]) -> str:
        if info["file_id"] != self._file_id:
            return f"another model file lies there: found file id {info['file_id'][:16]}, expected {self._file_id[:16]}"
        return "" if info["code"] == first["code"] else f"other code is installed there: found {info['code']}"


def _ended(aside: Sequence[SetAside]) -> DaemonError:
    found = aside[0]
    return DaemonError(f"{found.task.name}: two workers ended at it: {'; '.join(found.reasons)}")
