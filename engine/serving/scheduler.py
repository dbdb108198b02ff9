"""Requests in, units of work out: a loop that looks, asks schedule.py what is next, and does it.

As many requests run at a time as there are places (`--parallel`), in the order they came; each call of `Engine.step` is
one unit of work between which the daemon answers pings and cancels. What its clients are told comes from tasks.py.

A chunk and the tokens being decoded are not one step: the arithmetic of long steps is not that of short ones
(docs/arithmetic.md), and what a request says must not depend on who else reads a prompt. Chunks of several prompts
share long steps, and those that decode share short ones, whose rows do not depend on each other; a request that is
alone runs ahead of the host instead.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from engine.ground.config import EngineConfig
from engine.ground.errors import (
    CapacityError,
    ContextOverflowError,
    DeviceLostError,
    RequestError,
    SparkError,
)
from engine.ground.protocol import Done, Event, Generate, Score, Stage, Tokens, error_event
from engine.ops import KV_BLOCK_TOKENS
from engine.ops.cuda.failures import translated
from engine.running.decoding import Alone
from engine.running.loaded import load
from engine.running.recall import part_of
from engine.running.reply import MASK_WAIT_S
from engine.running.warm import warm_up
from engine.serving.families import Families
from engine.serving.idling import Idling
from engine.serving.learned import Learned
from engine.serving.reading import gather, read_together
from engine.serving.schedule import (
    Admit,
    Ahead,
    Decode,
    Draw,
    Read,
    Recompute,
    Room,
    Running,
    Save,
    View,
    Wait,
    Waiting,
    Work,
    decide,
    gives_way,
    owed,
    wanting,
)
from engine.serving.tasks import SLICE_S, GenerateTask, ScoreTask
from engine.text.forms import Form

_LAST_POSITION = (1 << 31) - 1  # a trace's positions are int32

_log = logging.getLogger(__name__)

Task: TypeAlias = GenerateTask | ScoreTask


class Engine:
    """A model that is loaded, the requests that run and those that wait.

    progress: called while the model loads, as `protocol.Loading` is made.
    """

    def __init__(
        self, config: EngineConfig, progress: Callable[[Stage, int, int], None] = lambda stage, done, total: None
    ) -> None:
        self.config = config
        began = time.perf_counter()
        self.loaded = load(config, progress)
        self.load_s = time.perf_counter() - began
        self._learned = Learned(self.loaded, config)
        self._waiting: deque[Generate | Score | Task] = deque()  # a task was put back
        self._running: list[Task] = []  # the oldest first
        self._forms: dict[int, Form] = {}  # of requests that have not begun
        self._families = Families(self.loaded.prefixes.forks.drop)
        self._turns = itertools.count()
        self._last_read = -1  # the turn of the one whose prompt was read last
        self._owed_s = 0.0  # time that those that decode have to come
        self._ahead: tuple[GenerateTask, Alone] | None = None
        self._requests = 0
        self._releases = 0  # of what requests held
        self._put_back_at = -1  # how many there were when one was put back last
        self._tokens = {"read": 0, "reused": 0, "written": 0}
        self._waits = {"place": 0, "room": 0, "moved_out": 0, "read_again": 0}
        self._waited: set[tuple[int, str]] = set()  # requests that have not begun, and what they have waited for
        self._idling = Idling(self.loaded, config.idle_release_s)

    def warm_up(self) -> None:
        """Do what a first request would wait for; it counts as a part of the load, and leaves no trace."""
        took_s = warm_up(self.loaded)
        self.load_s += took_s
        _log.info("warmed up in %.2f s", took_s)

    def hello(self) -> dict[str, Any]:
        """Which file was opened."""
        file = self.loaded.source.file
        return {"files": [str(p) for p in file.paths], "architecture": file.architecture, "bytes": file.size_bytes}

    def ready(self) -> dict[str, Any]:
        """Every effective setting, the memory plan, and why what was not asked for was chosen."""
        r, c = self.loaded, self.loaded.source.config
        return {
            "model": {
                "architecture": r.source.file.architecture,
                "model_id": r.source.file.model_id,
                "file_id": r.source.file.file_id,
                "n_layer": c.n_layer,
                "n_embd": c.n_embd,
                "n_expert": c.n_expert,
                "n_expert_used": c.n_expert_used,
                "n_vocab": c.n_vocab,
                "moe_layers": list(c.moe_layers),
                "expert_bytes": list(r.shares.placement.expert_bytes),
            },
            "device": r.backend.name,
            "isa": r.forward.ws.isa,
            "threads": r.threads,
            "ctx_tokens": r.limits.n_ctx,
            "chunk_tokens": r.limits.max_tokens,
            "parallel": r.limits.places,
            "kv_type": self.config.kv_type,
            "pool_tokens": r.shares.pool_tokens,
            "draft": "off" if r.drafts is None else self.config.draft,
            "kv_recall": self.config.kv_recall,
            "kv_recall_blocks": self.config.kv_recall_blocks,
            "kv_recall_from": self.config.kv_recall_from or None,
            "guess": "off" if r.decoder.guessing is None and r.steps.guesses is None else self.config.guess,
            "cpu_experts": None if r.steps.misses is None else r.steps.misses.settings(),
            "policy": self.config.policy,
            "residency_pct": r.residency.percent,
            "slots_per_layer": list(r.shares.placement.slots_per_layer),
            "cache_slots": list(r.shares.placement.cache_slots),
            "profile": None if self.config.profile is None else str(self.config.profile),
            "reasons": list(r.reasons),
            "warnings": list(r.source.warnings),
            "plan": r.plan(),
            "load_s": round(self.load_s, 3),
        }

    # --- requests ---------------------------------------------------------------------------------

    def submit(self, request: Generate | Score) -> None:
        """Queue a request; raises RequestError for one that can never run."""
        n_vocab = self.loaded.source.config.n_vocab
        predicted = request.prediction or () if isinstance(request, Generate) else ()
        for what, tokens in (("token", request.tokens), ("field 'prediction': token", predicted)):
            if max(tokens, default=0) >= n_vocab:
                bad = next(t for t in tokens if t >= n_vocab)
                raise RequestError(f"{what} {bad} is outside the vocabulary of {n_vocab}")
        n, limit = len(request.tokens), self.loaded.limits.n_ctx
        if n > limit or (isinstance(request, Generate) and n == limit):
            raise ContextOverflowError(
                f"{n} tokens do not fit in the context of {limit}",
                hint="send fewer tokens, or serve with a larger --ctx",
            )
        if isinstance(request, Generate):
            recalling = self.loaded.forward.recalling
            part_of(request.kv_recall, None if recalling is None else recalling.served)
        if isinstance(request, Score) and (request.window + 1) * (limit + 1) > _LAST_POSITION:
            raise RequestError(f"window {request.window} of a context of {limit} has positions beyond 32 bits")
        if any(job.id == request.id for job in (*self._running, *self._waiting)):
            raise RequestError(f"request {request.id} is still running")
        if isinstance(request, Generate):
            if request.grammar is not None:
                stop = self.loaded.source.stop_tokens if request.stop_tokens is None else request.stop_tokens
                self._forms[request.id] = self.loaded.forms.open(request.grammar, frozenset(stop))
            self._families.add(request, self._unread())
        self._idling.begin()
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

    @property
    def idle_work(self) -> bool:
        """Whether nothing is unfinished, and there is something to do all the same (engine/serving/idling.py)."""
        return not self.busy and self._idling.has_work

    @property
    def idle_s(self) -> float | None:
        """Seconds until that may be so, if nothing comes; None: it is, or never will be."""
        return None if self.busy else self._idling.wait_s

    def step(self) -> list[Event]:
        """Do one unit of work; a request's failure is its own error event.

        That of the device is everybody's: DeviceLostError.
        """
        events: list[Event] = []
        if not self.busy and self._idling.may_release:
            self._idling.release()
            return events
        with translated():
            self.loaded.forms.poll()
            if self.busy:
                self._idling.begin()
            if self._idling.is_away and (self.busy or self._idling.is_returning):
                error = self._idling.take()
                return [] if error is None else [self._failed(job, error) for job in tuple(self._waiting)]
            while True:
                view = self._look()
                work = decide(view)
                self._note_waits(view, work)
                began = time.perf_counter()
                if not isinstance(work, Wait):
                    events += self._do(work)
                elif self.busy and not events:  # all wait for their forms
                    self.loaded.forms.poll(SLICE_S)
                self._owed_s = owed(work, self._owed_s, time.perf_counter() - began)
                if not isinstance(work, Admit | Draw):
                    return events

    def _look(self) -> View:
        """What there is to decide about."""
        places = self.loaded.limits.places
        crowded = self._put_back_at == self._releases
        beginning = self._waiting if len(self._running) < places else ()
        return View(
            running=tuple(map(self._seen, self._running)),
            waiting=tuple(map(self._awaited, self._waiting)),
            # To count what could be given up is a walk through all prefixes.
            room=self._room() if beginning and self._running and not crowded else Room(0, 0, KV_BLOCK_TOKENS),
            places=places,
            owed_s=self._owed_s,
            last_read=self._last_read,
            ahead=None if self._ahead is None else self._ahead[0].id,
            crowded=crowded,
            idle=self._idling.may_reread,
            missed=self._idling.may_save,
        )

    def _note_waits(self, view: View, work: Work) -> None:
        """Count those that wait to begin, once for each reason; who was put back is counted there."""
        wants = None if isinstance(work, Admit) or not view.waiting else wanting(view)
        if wants is not None:
            back = {job.id for job in self._waiting if isinstance(job, Task)}
            new = {(job.id, wants) for job in view.waiting if job.may_begin and job.id not in back} - self._waited
            self._waited |= new
            self._waits[wants] += len(new)

    def _seen(self, task: Task) -> Running:
        cached = None if task.sequence is None else task.sequence.length
        if isinstance(task, ScoreTask):
            return Running(task.id, task.number, task.turn, "reading", len(task.request.tokens), 0, cached, score=True)
        to_read, left = self._needs(task)
        return Running(
            task.id, task.number, task.turn, task.state, to_read, left, cached, formed=task.grammar is not None,
            passed=task.passed,
        )

    def _awaited(self, job: Generate | Score | Task) -> Waiting:
        if isinstance(job, Score | ScoreTask):
            return Waiting(job.id, 0, 0, score=True)
        to_read, left = self._needs(job)
        is_formed = job.id not in self._forms or self._forms[job.id].is_ready
        reader, back = self._families.reader(job.id), isinstance(job, Task)
        return Waiting(job.id, to_read, left, ready=is_formed, reader=reader, back=back)

    def _needs(self, job: Generate | GenerateTask) -> tuple[int, int]:
        """Positions for which it needs blocks of its own before a token is drawn, and tokens that may be drawn."""
        n, left = (job.n_to_read, job.left) if isinstance(job, GenerateTask) else (len(job.tokens), job.max_tokens)
        family = self._families.of(job.id)
        forked = family is not None and family.kept is not None and job.id in family.pending
        return KV_BLOCK_TOKENS if forked else n, left

    def _room(self) -> Room:
        kv = self.loaded.kv
        free = min((kv.pools[group].free_blocks for group in kv.full_groups), default=1 << 62)
        reclaimable = self.loaded.prefixes.reclaimable_tokens // KV_BLOCK_TOKENS
        total = min((kv.pools[group].n_blocks for group in kv.full_groups), default=1 << 62)
        return Room(free, reclaimable, KV_BLOCK_TOKENS, None if kv.states is None else kv.states.free_blocks, total)

    def _do(self, work: Work) -> list[Event]:
        """Do what was decided; the events of it."""
        match work:
            case Admit():
                return self._admit(work)
            case Draw(request_id):
                task = self._generating(request_id)
                return self._guarded(task, task.draw_held)
            case Read(ids):
                by_id = {task.id: task for task in self._running}
                return self._read([by_id[request_id] for request_id in ids])
            case Ahead(request_id, pause):
                if self._ahead is None:
                    task = self._generating(request_id)
                    self._ahead = task, self.loaded.decoder.alone(task)
                return self._run_ahead(pause=pause)
            case Decode(ids):
                return self._decode([self._generating(request_id) for request_id in ids])
            case Recompute():
                self._idling.reread()
            case Save():
                self._idling.save()
        return []

    def _generating(self, request_id: int) -> GenerateTask:
        task = next(task for task in self._running if task.id == request_id)
        assert isinstance(task, GenerateTask)
        return task

    def _read(self, tasks: list[Task]) -> list[Event]:
        """Read a chunk of the first one's prompt, if there is room for it, and of the others' that fit in its step."""
        before = [(task.read_tokens, task.reused_tokens) for task in tasks]
        first = tasks[0]
        self._last_read = first.turn
        events = self._make_room(first)
        if not events and first in self._running:
            if isinstance(first, ScoreTask):
                events = self._guarded(first, first.read)
            else:
                # Those that made room for the first are not there any more.
                others = [t for t in tasks[1:] if isinstance(t, GenerateTask) and t in self._running]
                found = gather(first, others)
                self._last_read = found.last.turn
                for ready in found.ready:
                    events += self._guarded(ready, ready.begin)
                events += self._read_together(found.taken) if found.taken else []
        for task, (read, reused) in zip(tasks, before, strict=True):
            self._tokens["read"] += task.read_tokens - read
            self._tokens["reused"] += task.reused_tokens - reused
        return events

    def _read_together(self, tasks: list[GenerateTask]) -> list[Event]:
        """One step of the chunks of all tasks."""
        try:
            with translated():
                outcomes = read_together(tasks)
        except DeviceLostError:
            raise
        except SparkError as error:  # of a step that they share, so of all of them
            return [self._failed(task, error) for task in tasks]
        events: list[Event] = []
        for task, outcome in zip(tasks, outcomes, strict=True):
            events += [self._failed(task, outcome)] if isinstance(outcome, SparkError) else self._ended(task, outcome)
        return events

    def cancel(self, request_id: int) -> bool:
        """Forget a request, of which no further event comes; False where there is none."""
        for job in (*self._running, *self._waiting):
            if job.id == request_id:
                self._families.cancel(request_id)
                self._finish(job)
                return True
        return False

    def _admit(self, work: Admit) -> list[Event]:
        """Let one begin that waits."""
        job = next(job for job in self._waiting if job.id == work.id)
        if work.follow:
            self._learned.follow()  # before a request begins, never inside one
        self._waiting.remove(job)
        self._waited -= {(job.id, "place"), (job.id, "room")}
        try:
            task = job if isinstance(job, Task) else self._task(job)
        except SparkError as error:
            self._families.end(job.id)
            self._requests += 1
            return [error_event(job.id, error)]
        task.turn, task.number, task.passed = next(self._turns), work.number, work.passes
        self._running.append(task)
        return []

    def _task(self, request: Generate | Score) -> Task:
        if isinstance(request, Score):
            return ScoreTask(self.loaded, request)
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
        return GenerateTask(self.loaded, request, form, self._families)

    def _finish(self, job: Generate | Score | Task) -> None:
        form = self._forms.pop(job.id, None)
        if form is not None:
            form.close()
        if isinstance(job, Task):
            if self._ahead is not None and self._ahead[0] is job:
                self._ahead = None
            job.close()
            self._releases += 1
        self._families.end(job.id)
        self._waited -= {(job.id, "place"), (job.id, "room")}
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
        """Room for what a task does next: others make it, or the task waits itself.

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
                chosen = gives_way(map(self._seen, self._running), task.id)
                if chosen is None:
                    return [self._failed(task, error)]
                self._put_back(self._generating(chosen))
                if chosen == task.id:
                    return []
            except SparkError as error:
                return [self._failed(task, error)]

    def _put_back(self, task: GenerateTask) -> None:
        """Let a task wait, first in the queue, until somebody has ended and there is room to read its tokens again."""
        held = task.sequence is not None and task.sequence.length > 0
        task.put_back()
        if held:
            self._waits["moved_out" if task.is_moved_out else "read_again"] += 1
        self._running.remove(task)
        self._waiting.appendleft(task)
        self._put_back_at = self._releases

    def _run_ahead(self, *, pause: bool) -> list[Event]:
        """Take the tokens of the one that decodes alone, for a while or, to pause it, until none is under way."""
        assert self._ahead is not None
        task, steps = self._ahead

        def work() -> list[Event]:
            until = time.perf_counter() + SLICE_S
            if pause:
                steps.pause()
            while not steps.ended and (pause or time.perf_counter() < until):
                steps.advance()
            return task.flush()

        events = self._guarded(task, work)
        if steps.ended or task not in self._running:  # it paused, ended or failed
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
            try:
                with translated():
                    failures = self.loaded.decoder.together(tasks, until)
            except DeviceLostError:
                raise
            except SparkError as error:  # of a step that they share, so of all of them
                return events + [self._failed(task, error) for task in tasks if task in self._running]
            for task, failure in zip(tasks, failures, strict=True):
                events += self._guarded(task, task.flush) if failure is None else [self._failed(task, failure)]
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

    # --- counters ---------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters since the start: requests, tokens, hits and misses by layer, memory.

        waits: requests that waited for a place or for room before they began, and how often one was put back and moved
        to host memory, or is read again because that had no room.
        kv_blocks: what is neither free nor reclaimable (of prefixes alone, given up when room is short) requests hold.
        """
        r = self.loaded
        with translated():
            totals = r.residency.totals() | {"map": r.residency.map()}
        return {
            "requests": self._requests,
            "running": len(self._running),
            "queued": len(self._waiting),
            "tokens": dict(self._tokens),
            "waits": dict(self._waits),
            **totals,
            "kv_blocks": {
                "total": r.kv.n_blocks,
                "free": r.kv.free_blocks,
                "reclaimable": r.prefixes.reclaimable_blocks,
                "away": r.kv.blocks_away,
                "moved_bytes": dict(r.kv.moved_bytes),
            },
            "prefixes": r.prefixes.stats(),
            "drafts": {} if r.drafts is None else r.drafts.stats(),
            "guesses": self._guesses(),
            "recall": {} if r.forward.recalling is None else r.forward.recalling.stats(),
            "cpu_experts": {} if r.steps.misses is None else r.steps.misses.stats(),
            "plan": r.plan(),
            "released_bytes": r.parking.released_bytes,
        }

    def _guesses(self) -> dict[str, Any]:
        r = self.loaded
        who = r.steps.guesses or r.decoder.guessing
        return {} if who is None else who.stats()

    def profile(self, action: str, path: Path | None = None) -> dict[str, Any]:
        """Write what was learned to a profile file, read the raw counts, or reset them."""
        if action == "write":
            return self._learned.write(path)
        if action == "reset":
            if self.busy:
                raise RequestError("the counts cannot be reset while requests are counted")
            self._learned.reset()
            return {}
        return self._learned.read()

    def close(self) -> None:
        """Cancel everything and release the model."""
        for job in (*self._running, *self._waiting):
            self._finish(job)
        self._idling.close()
        self.loaded.close()
