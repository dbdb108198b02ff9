"""Requests in, units of work out: who is served next, and what its clients are told.

Up to eight requests run at a time, in the order they came; each call of `Engine.step` is one unit of work between which
the daemon answers pings and cancels. Prompts are read chunk by chunk in turn, so that a short one waits for one chunk
of each of the others, not for all of them. Between two chunks those that decode get as much time as the chunk took.

A chunk and the tokens being decoded are not one step: the arithmetic of long steps is not that of short ones
(docs/arithmetic.md), and what a request says must not depend on who else reads a prompt. Those that decode share steps
of up to eight tokens, whose rows do not depend on each other; a request that is alone runs ahead of the host instead.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.config import EngineConfig
from engine.errors import CapacityError, ContextOverflowError, DeviceLostError, RequestError, SparkError, UsageError
from engine.families import Families
from engine.forms import Form
from engine.learning import Learning
from engine.ops import KV_BLOCK_TOKENS
from engine.ops.cuda.failures import translated
from engine.profile import Profile
from engine.protocol import Done, Event, Generate, Score, Stage, Tokens, error_event
from engine.runner import Runner
from engine.sampling import Drawing, Drawn
from engine.tasks import MASK_WAIT_S, SLICE_S, GenerateTask, ScoreTask

GROWTH_TOKENS = 256  # of a reply, for which there is to be room before another request begins
_LAST_POSITION = (1 << 31) - 1  # a trace's positions are int32

Task: TypeAlias = GenerateTask | ScoreTask


class Engine:
    """A runner, the requests that run and those that wait.

    progress: called while the model loads, as `protocol.Loading` is made.
    """

    def __init__(
        self, config: EngineConfig, progress: Callable[[Stage, int, int], None] = lambda stage, done, total: None
    ) -> None:
        self.config = config
        began = time.perf_counter()
        self.runner = Runner(config, progress)
        self.load_s = time.perf_counter() - began
        self._learning = self._new_learning()
        self._waiting: deque[Generate | Score | Task] = deque()  # a task was put back
        self._running: list[Task] = []  # the oldest first
        self._forms: dict[int, Form] = {}  # of requests that have not begun
        self._families = Families(self.runner.prefixes.drop)
        self._turns = itertools.count()
        self._turn = -1  # of the one whose prompt was read last
        self._owed_s = 0.0  # time that those that decode have to come
        self._ahead: tuple[GenerateTask, Generator[list[Drawn], bool, None]] | None = None
        self._requests = 0
        self._releases = 0  # of what requests held
        self._put_back_at = -1  # how many there were when one was put back last
        self._tokens = {"read": 0, "reused": 0, "written": 0}
        self._followed = 0  # uses counted when the pinned slots last followed them

    def hello(self) -> dict[str, Any]:
        """Which file was opened."""
        file = self.runner.file
        return {"files": [str(p) for p in file.paths], "architecture": file.architecture, "bytes": file.size_bytes}

    def ready(self) -> dict[str, Any]:
        """Every effective setting, the memory plan, and why what was not asked for was chosen."""
        r, c = self.runner, self.runner.config
        return {
            "model": {
                "architecture": r.file.architecture,
                "model_id": r.file.model_id,
                "file_id": r.file.file_id,
                "n_layer": c.n_layer,
                "n_embd": c.n_embd,
                "n_expert": c.n_expert,
                "n_expert_used": c.n_expert_used,
                "n_vocab": c.n_vocab,
                "moe_layers": list(c.moe_layers),
                "expert_bytes": list(r.placement.expert_bytes),
            },
            "device": r.device,
            "isa": r.isa,
            "threads": r.threads,
            "ctx_tokens": r.n_ctx,
            "chunk_tokens": r.chunk_tokens,
            "kv_type": self.config.kv_type,
            "policy": self.config.policy,
            "residency_pct": r.residency.percent,
            "slots_per_layer": list(r.placement.slots_per_layer),
            "cache_slots": list(r.placement.cache_slots),
            "profile": None if self.config.profile is None else str(self.config.profile),
            "reasons": r.reasons,
            "warnings": r.warnings,
            "plan": r.plan(),
            "load_s": round(self.load_s, 3),
        }

    # --- requests ---------------------------------------------------------------------------------

    def submit(self, request: Generate | Score) -> None:
        """Queue a request; raises RequestError for one that can never run."""
        r = self.runner
        bad = next((t for t in request.tokens if t >= r.config.n_vocab), None)
        if bad is not None:
            raise RequestError(f"token {bad} is outside the vocabulary of {r.config.n_vocab}")
        n, limit = len(request.tokens), r.n_ctx
        if n > limit or (isinstance(request, Generate) and n == limit):
            raise ContextOverflowError(
                f"{n} tokens do not fit in the context of {limit}",
                hint="send fewer tokens, or serve with a larger --ctx",
            )
        if isinstance(request, Score) and (request.window + 1) * (limit + 1) > _LAST_POSITION:
            raise RequestError(f"window {request.window} of a context of {limit} has positions beyond 32 bits")
        if any(job.id == request.id for job in (*self._running, *self._waiting)):
            raise RequestError(f"request {request.id} is still running")
        if isinstance(request, Generate):
            if request.grammar is not None:
                stop = r.stop_tokens if request.stop_tokens is None else request.stop_tokens
                self._forms[request.id] = r.grammar(request.grammar, frozenset(stop))
            self._families.add(request, self._unread())
        self._waiting.append(request)

    def _unread(self) -> Iterator[Generate]:
        """Requests whose prompt has not been read."""
        for job in (*self._running, *self._waiting):
            if isinstance(job, Generate):
                yield job
            elif isinstance(job, GenerateTask) and not job.decoding and not job.made:
                yield job.request

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._running or self._waiting)

    def step(self) -> list[Event]:
        """Do one unit of work; a request's failure is its own error event.

        That of the device is everybody's: DeviceLostError.
        """
        with translated():
            self.runner.forms.poll()
            events = self._admit() + self._draw_held()
            reading = [task for task in self._running if not task.decoding]
            generating = [task for task in self._running if isinstance(task, GenerateTask)]
            decoding = [task for task in generating if task.decoding and task.held is None]
            if self._ahead is not None:
                return events + self._run_ahead(pause=bool(reading) or decoding != [self._ahead[0]])
            if reading and (not decoding or self._owed_s <= 0):
                task = self._next_reader(reading)
                began, read, reused = time.perf_counter(), task.read_tokens, task.reused_tokens
                failed = self._make_room(task)
                events += failed
                if not failed and task in self._running:
                    events += self._guarded(task, task.read)
                self._owed_s = time.perf_counter() - began
                self._tokens["read"] += task.read_tokens - read
                self._tokens["reused"] += task.reused_tokens - reused
            elif len(decoding) == 1 and not reading and decoding[0].grammar is None:
                self._ahead = decoding[0], decoding[0].ahead()
                events += self._run_ahead(pause=False)
            elif decoding:
                began = time.perf_counter()
                events += self._decode(decoding)
                self._owed_s -= time.perf_counter() - began
            elif self.busy and not events:  # all wait for their forms
                self.runner.forms.poll(SLICE_S)
        return events

    def _next_reader(self, reading: list[Task]) -> Task:
        """The one after the last in the order in which they began."""
        task = next((task for task in reading if task.turn > self._turn), reading[0])
        self._turn = task.turn
        return task

    def cancel(self, request_id: int) -> bool:
        """Forget a request, of which no further event comes; False where there is none."""
        for job in (*self._running, *self._waiting):
            if job.id == request_id:
                self._finish(job)
                return True
        return False

    def _admit(self) -> list[Event]:
        """Let those begin that have waited longest, as long as there is room.

        One whose prompt another is reading is passed over: it holds nothing while it waits, and nobody waits for it.
        """
        events: list[Event] = []
        while len(self._running) < self.runner.limits.max_sequences:
            job = next(filter(self._may_begin, self._waiting), None)
            if job is None or (self._running and not self._fits_beside(job)):
                break
            if not self._running:
                self._follow()
            self._waiting.remove(job)
            try:
                task = job if isinstance(job, Task) else self._task(job)
            except SparkError as error:
                events.append(error_event(job.id, error))
                self._families.end(job.id)
                self._requests += 1
                continue
            taken = {other.number for other in self._running}
            task.turn = next(self._turns)
            task.number = next(n for n in range(len(self._running) + 1) if n not in taken)
            self._running.append(task)
        return events

    def _may_begin(self, job: Generate | Score | Task) -> bool:
        """Whether it waits for nothing but its turn: a form that is being compiled delays its own request alone."""
        is_formed = job.id not in self._forms or self._forms[job.id].is_ready
        return is_formed and self._families.may_begin(job.id)

    def _draw_held(self) -> list[Event]:
        """Draw for those whose masks were late and have come."""
        events: list[Event] = []
        for task in [*self._running]:
            if isinstance(task, GenerateTask) and task.held is not None and task.grammar and not task.grammar.is_late:
                events += self._guarded(task, task.draw_held)
        return events

    def _fits_beside(self, job: Generate | Score | Task) -> bool:
        """Whether there is room beside those that run and what they still have to read; a score runs alone."""
        if isinstance(job, Score | ScoreTask) or any(isinstance(task, ScoreTask) for task in self._running):
            return False
        if self._put_back_at == self._releases:  # somebody is waiting for room that nobody has made yet
            return False
        new, begun = [self._needs(job)], 0
        for task in self._running:
            assert isinstance(task, GenerateTask)
            needed = self._needs(task)
            if task.sequence is None:
                new.append(needed)
            else:
                begun += max(0, needed - task.sequence.length)
        return self.runner.has_room([new[0] + begun, *new[1:]])

    def _needs(self, job: Generate | GenerateTask) -> int:
        """Positions for which it needs blocks of its own, with some of its reply."""
        tokens, left = (job.to_read, job.left) if isinstance(job, GenerateTask) else (job.tokens, job.max_tokens)
        family = self._families.of(job.id)
        forked = family is not None and family.kept is not None and job.id in family.pending
        return (KV_BLOCK_TOKENS if forked else len(tokens)) + min(left, GROWTH_TOKENS)

    def _task(self, request: Generate | Score) -> Task:
        if isinstance(request, Score):
            return ScoreTask(self.runner, request)
        form = self._forms.pop(request.id, None)
        if form is not None:
            try:
                form.begin()
            except SparkError:
                form.close()
                raise
            if not form.binds:
                form.close()
                form = None
        return GenerateTask(self.runner, request, form, self._families)

    def _finish(self, job: Generate | Score | Task) -> None:
        form = self._forms.pop(job.id, None)
        if form is not None:
            form.close()
        if isinstance(job, Task):
            if self._ahead is not None and self._ahead[0] is job:
                self._ahead[1].close()
                self._ahead = None
            job.close()
            self._releases += 1
        self._families.end(job.id)
        (self._running if job in self._running else self._waiting).remove(job)  # type: ignore[arg-type]
        self._requests += 1

    def _failed(self, job: Generate | Score | Task, error: SparkError) -> Event:
        if job in self._running or job in self._waiting:
            self._finish(job)
        return error_event(job.id, error)

    def _ended(self, task: Task, events: list[Event]) -> list[Event]:
        """Events of a task, which is finished if they say so."""
        for event in events:
            if isinstance(event, Tokens):
                self._tokens["written"] += len(event.tokens)
            if isinstance(event, Done):
                self._finish(task)
        return events

    def _guarded(self, task: Task, work: Callable[[], list[Event]]) -> list[Event]:
        """Do something for one task; its failure is its own."""
        try:
            with translated():
                events = work()
            return self._ended(task, events)
        except DeviceLostError:
            raise
        except SparkError as error:
            return [self._failed(task, error)]

    def _make_room(self, task: Task) -> list[Event]:
        """Room for what a task does next: the youngest of those that hold any make it, or the task waits itself.

        Events of a failure, where nobody else holds anything.
        """
        while True:
            try:
                with translated():
                    task.prepare()
                return []
            except DeviceLostError:
                raise
            except CapacityError as error:
                holding = [t for t in self._running if isinstance(t, GenerateTask) and t.sequence and t is not task]
                if not holding:
                    return [self._failed(task, error)]
                younger = self._running.index(holding[-1]) > self._running.index(task)
                assert isinstance(task, GenerateTask)
                self._put_back(holding[-1] if younger else task)
                if not younger:
                    return []
            except SparkError as error:
                return [self._failed(task, error)]

    def _put_back(self, task: GenerateTask) -> None:
        """Let a task wait, first in the queue, until somebody has ended and there is room to read its tokens again."""
        task.put_back()
        self._running.remove(task)
        self._waiting.appendleft(task)
        self._put_back_at = self._releases

    def _run_ahead(self, *, pause: bool) -> list[Event]:
        """Take the tokens of the one that runs ahead, for a while or, to pause it, until none is under way."""
        assert self._ahead is not None
        task, steps = self._ahead

        def work() -> list[Event]:
            until = time.perf_counter() + SLICE_S
            try:
                next(steps)
                while pause or time.perf_counter() < until:
                    steps.send(pause)
            except StopIteration:
                self._ahead = None
            return task.flush()

        events = self._guarded(task, work)
        if task not in self._running and self._ahead is not None:  # it failed, or was put back
            steps.close()
            self._ahead = None
        return events

    def _decode(self, tasks: list[GenerateTask]) -> list[Event]:
        """Steps of a token of each task, for a while."""
        events: list[Event] = []
        until = time.perf_counter() + SLICE_S
        while time.perf_counter() < until:
            tasks, ended = self._settled(tasks)
            events += ended
            for task in tasks:
                if task in self._running:
                    events += self._make_room(task)
            tasks = [task for task in tasks if task in self._running]
            if not tasks:
                break
            made: list[tuple[GenerateTask, Drawing | None]] = []
            try:
                with translated():
                    result = self.runner.run([task.span() for task in tasks])
                    masks_s = time.monotonic() + MASK_WAIT_S
                    for row, task in enumerate(tasks):
                        try:
                            made.append((task, task.drawing(result, row, masks_s)))
                        except DeviceLostError:
                            raise
                        except SparkError as error:  # of its grammar
                            events.append(self._failed(task, error))
                    drawings = [drawing for _, drawing in made if drawing is not None]
                    drawn = iter(self.runner.draw(result, drawings) if drawings else [])
            except DeviceLostError:
                raise
            except SparkError as error:  # of a step that they share, so of all of them
                return events + [self._failed(task, error) for task in tasks if task in self._running]
            for task, drawing in made:
                events += self._guarded(task, partial(task.go_on, *([] if drawing is None else [next(drawn)])))
            tasks = [task for task in tasks if task in self._running and task.held is None]
        return events

    def _settled(self, tasks: list[GenerateTask]) -> tuple[list[GenerateTask], list[Event]]:
        """Those that go on, as far as that is known of their forms in time, and the events of those that ended."""
        events: list[Event] = []
        going: list[GenerateTask] = []
        until_s = time.monotonic() + MASK_WAIT_S
        for task in tasks:
            if task.grammar is None:
                going.append(task)
                continue
            try:
                if task.settled(until_s):
                    going.append(task)
                elif task.reason is not None:
                    events += self._guarded(task, task.flush)
            except SparkError as error:
                events.append(self._failed(task, error))
        return going, events

    def _follow(self) -> None:
        """Before a request begins, never inside one: let the pinned slots follow what was counted since."""
        counted = int(self.runner.residency.counts.sum())
        if self.config.policy == "spark" and counted != self._followed:
            self._followed = counted
            learned = self._learning.learned(self._counts())
            self.runner.residency.follow(learned.counts[list(self.runner.config.moe_layers)])

    # --- counters ---------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters since the start: requests, tokens, hits and misses by layer, memory.

        kv_blocks: what is neither free nor reclaimable (of prefixes alone, given up when room is short) requests hold.
        """
        r = self.runner
        with translated():
            totals = r.residency.totals() | {"map": r.residency.map()}
        return {
            "requests": self._requests,
            "running": len(self._running),
            "queued": len(self._waiting),
            "tokens": dict(self._tokens),
            **totals,
            "kv_blocks": {
                "total": r.kv.n_blocks,
                "free": r.kv.free_blocks,
                "reclaimable": r.prefixes.reclaimable_blocks,
            },
            "prefixes": r.prefixes.stats(),
            "plan": r.plan(),
        }

    def _counts(self) -> NDArray[np.int64]:
        c = self.runner.config
        counts = np.zeros((c.n_layer, c.n_expert), np.int64)
        with translated():
            counts[list(c.moe_layers)] = self.runner.residency.counts
        return counts

    def _new_learning(self) -> Learning:
        c = self.runner.config
        if self.runner.profile is not None:
            return Learning(self.runner.profile, self.config.profile)
        none = np.zeros((c.n_layer, c.n_expert), np.int64)
        return Learning(Profile(none, c.n_expert_used, self.runner.file.model_id, count="generated"), None)

    def profile(self, action: str, path: Path | None = None) -> dict[str, Any]:
        """Write what was learned to a profile file, read the raw counts, or reset them."""
        if action == "write":
            target = path or self.config.profile
            if target is None:
                raise UsageError("no path to write the profile to")
            written, warnings = self._learning.write(self._counts(), target, self.runner.file.model_id)
            return {"path": str(target), "tokens": written.tokens, "warnings": list(warnings)}
        if action == "reset":
            if self.busy:
                raise RequestError("the counts cannot be reset while requests are counted")
            self.runner.residency.reset()
            self._learning.reset()
            return {}
        return {"counts": self._counts().tolist(), **self.runner.residency.totals()}

    def close(self) -> None:
        """Cancel everything and release the model."""
        for job in (*self._running, *self._waiting):
            self._finish(job)
        self.runner.close()
