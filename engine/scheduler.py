"""Requests in, steps out: which tokens the next forward pass works on, and what a request gets for it.

Requests run one after the other, in the order they came; each call of `Engine.step` is one unit of
work between which the daemon answers pings and cancels.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import profile as profiles
from engine.config import EngineConfig
from engine.errors import ContextOverflowError, DeviceLostError, RequestError, SparkError, UsageError
from engine.forward import MAX_ROWS
from engine.kv import Sequence
from engine.ops import F32
from engine.ops.cuda.failures import translated
from engine.profile import Profile
from engine.protocol import (
    Done,
    Event,
    Generate,
    Progress,
    Score,
    Stage,
    Timing,
    Tokens,
    Usage,
    error_event,
)
from engine.runner import Runner, Span
from engine.sampling import SamplingParams, check_finite
from engine.trace import TraceWriter

PAST_WEIGHT = 0.5  # what a profile keeps at least when a session is merged in
_LAST_POSITION = (1 << 31) - 1  # a trace's positions are int32
DECODE_SLICE_S = 0.025  # decoded tokens are sent in groups: at most one event every 25 ms

Work = Generator[list[Event], None, None]  # one list of events a unit of work, a Done at the end


@dataclass(slots=True)
class _Job:
    request: Generate | Score
    work: Work
    started: bool = False


class Engine:
    """A runner and the requests that wait for it.

    progress: called while the model loads, as `protocol.Loading` is made.
    """

    def __init__(
        self, config: EngineConfig, progress: Callable[[Stage, int, int], None] = lambda stage, done, total: None
    ) -> None:
        self.config = config
        began = time.perf_counter()
        self.runner = Runner(config, progress)
        self.load_s = time.perf_counter() - began
        self.base = self.runner.profile
        self._jobs: deque[_Job] = deque()
        self._requests = 0
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
        if any(job.request.id == request.id for job in self._jobs):
            raise RequestError(f"request {request.id} is still running")
        self._jobs.append(_Job(request, self._work(request)))

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._jobs)

    def step(self) -> list[Event]:
        """Do one unit of work for the first request; its failure is its own error event.

        That of the device is everybody's: DeviceLostError.
        """
        job = self._jobs[0]
        try:
            with translated():
                if not job.started:
                    job.started = True
                    self._follow()
                events = next(job.work)
            if isinstance(events[-1], Done):
                self._finish(job)
            return events
        except DeviceLostError:
            raise
        except SparkError as error:
            self._finish(job)
            return [error_event(job.request.id, error)]

    def cancel(self, request_id: int) -> bool:
        """Forget a request, of which no further event comes; False where there is none."""
        for job in self._jobs:
            if job.request.id == request_id:
                self._finish(job)
                return True
        return False

    def _finish(self, job: _Job) -> None:
        job.work.close()
        self._jobs.remove(job)
        self._requests += 1

    def _follow(self) -> None:
        """Before a request begins, never inside one: let the pinned slots follow what was counted since."""
        counted = int(self.runner.residency.counts.sum())
        if self.config.policy == "spark" and counted != self._followed:
            self._followed = counted
            self.runner.residency.follow(self._learned().counts[list(self.runner.config.moe_layers)])

    # --- the work of a request -------------------------------------------------------------------

    def _work(self, request: Generate | Score) -> Work:
        sequence = self.runner.new_sequence()
        try:
            if isinstance(request, Generate):
                yield from self._generate(request, sequence)
            else:
                yield from self._score(request, sequence)
        finally:
            sequence.release()

    def _prefill(
        self, tokens: NDArray[np.int32], counted: NDArray[np.bool_], sequence: Sequence
    ) -> Generator[slice, None, None]:
        """Feed tokens chunk by chunk on the grid of absolute positions; the last token's logits are kept."""
        size = self.runner.chunk_tokens
        for start in range(0, len(tokens), size):
            part = slice(start, min(start + size, len(tokens)))
            want = (part.stop - part.start - 1,) if part.stop == len(tokens) else ()
            self._result = self.runner.run([Span(sequence, tokens[part], counted[part], want)])
            yield part

    def _generate(self, request: Generate, sequence: Sequence) -> Work:
        r, s = self.runner, request.sampling
        params = SamplingParams(
            s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, seed=s.seed
        )
        stop = frozenset(r.stop_tokens if request.stop_tokens is None else request.stop_tokens)
        grammar = None if request.grammar is None else r.grammar(request.grammar, stop)
        prompt = np.asarray(request.tokens, np.int32)
        r.capture_hidden(False)
        before = r.residency.counters()
        began = time.perf_counter()
        for part in self._prefill(prompt, np.zeros(len(prompt), bool), sequence):
            if part.stop < len(prompt):
                yield [Progress(request.id, part.stop, len(prompt))]
        r.synchronize()
        prefill_s = time.perf_counter() - began
        history = list(request.tokens)
        limit = min(request.max_tokens, r.n_ctx - len(prompt))
        began, sent, pending = time.perf_counter(), -1.0, []
        decoding = r.decode(sequence, history, self._result, params, stop, limit, grammar)
        while True:
            try:
                pending += next(decoding)
            except StopIteration as end:
                reason = end.value
                break
            now = time.perf_counter()
            if now - sent > DECODE_SLICE_S:
                yield [Tokens(request.id, tuple(pending))]
                pending, sent = [], now
        timing = Timing(prefill_s, time.perf_counter() - began)
        events: list[Event] = [Tokens(request.id, tuple(pending))] if pending else []
        usage = Usage(len(prompt), len(history) - len(prompt))
        residency = r.residency.since(before)
        yield [*events, Done(request.id, usage, timing, residency, "stop" if reason == "stop" else "length")]

    def _score(self, request: Score, sequence: Sequence) -> Work:
        r = self.runner
        tokens = np.asarray(request.tokens, np.int32)
        generated = np.ones(len(tokens), bool) if request.generated is None else np.asarray(request.generated)
        counted = generated if request.count == "generated" else np.ones(len(tokens), bool)
        r.capture_hidden(request.hidden)
        before = r.residency.counters()
        logprobs = np.zeros(len(tokens))
        began = time.perf_counter()
        # A window is one part or more of the trace; one that fails leaves nothing behind it but whole parts.
        with self._open_trace(request) as trace:
            for part in self._prefill(tokens, counted, sequence):
                check_finite(self._result.residual)
                if request.logprobs:
                    self._log_probabilities(tokens, part, logprobs)
                if trace is not None:
                    self._trace(trace, request, part, generated)
                if part.stop < len(tokens):
                    yield [Progress(request.id, part.stop, len(tokens))]
        done = Done(
            request.id,
            Usage(len(tokens), 0),
            Timing(time.perf_counter() - began, 0.0),
            r.residency.since(before),
            nll=float(-logprobs[generated].sum()) if request.logprobs else None,
            logprobs=tuple(logprobs[1:].tolist()) if request.logprobs else None,
        )
        yield [done]

    def _open_trace(self, request: Score) -> AbstractContextManager[TraceWriter | None]:
        if request.trace_dir is None:
            return nullcontext()
        c = self.runner.config
        return TraceWriter(
            Path(request.trace_dir), self.runner.file.model_id, c.n_expert_used, c.n_embd, request.hidden,
            n_layer=c.n_layer, n_expert=c.n_expert,
        )  # fmt: skip

    def _log_probabilities(self, tokens: NDArray[np.int32], part: slice, out: NDArray[np.float64]) -> None:
        # Position i - 1 predicts token i; the last position of all predicts a token nobody gave.
        last = min(part.stop, len(tokens) - 1)
        for start in range(part.start, last, MAX_ROWS):
            stop = min(start + MAX_ROWS, last)
            logits = self.runner.logits(np.arange(start - part.start, stop - part.start, dtype=np.int32))
            check_finite(logits)
            out[start + 1 : stop + 1] = log_softmax_at(logits, tokens[start + 1 : stop + 1])

    def _trace(self, trace: TraceWriter, request: Score, part: slice, generated: NDArray[np.bool_]) -> None:
        result, c = self._result, self.runner.config
        # Windows of one session share no position, and none looks like the next token of another.
        positions = request.window * (self.runner.n_ctx + 1) + np.arange(part.start, part.stop)
        hidden = None if result.hidden is None else result.hidden[list(c.moe_layers)].swapaxes(0, 1)
        trace.append(
            request.session_id,
            positions.astype(np.int32),
            generated[part],
            c.moe_layers,
            result.experts.swapaxes(0, 1),
            result.weights.swapaxes(0, 1),
            hidden,
        )

    # --- counters ---------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters since the start: requests, hits and misses by layer, memory."""
        r = self.runner
        with translated():
            totals = r.residency.totals() | {"map": r.residency.map()}
        return {
            "requests": self._requests,
            "queued": len(self._jobs),
            **totals,
            "kv_blocks": {"total": r.kv.n_blocks, "free": r.kv.free_blocks},
            "plan": r.plan(),
        }

    def _counts(self) -> NDArray[np.int64]:
        c = self.runner.config
        counts = np.zeros((c.n_layer, c.n_expert), np.int64)
        with translated():
            counts[list(c.moe_layers)] = self.runner.residency.counts
        return counts

    def _learned(self) -> Profile:
        """The loaded profile with what was counted since merged in; without one, the counts alone."""
        c = self.runner.config
        base = self.base or Profile(
            counts=np.zeros((c.n_layer, c.n_expert), np.int64),
            n_expert_used=c.n_expert_used,
            model_id=self.runner.file.model_id,
            count="generated",
        )
        return profiles.merge(base, self._counts(), PAST_WEIGHT)

    def profile(self, action: str, path: Path | None = None) -> dict[str, Any]:
        """Write what was learned to a profile file, read the raw counts, or reset them."""
        if action == "write":
            target = path or self.config.profile
            if target is None:
                raise UsageError("no path to write the profile to")
            learned = self._learned()
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            profiles.save(replace(learned, model_id=self.runner.file.model_id, created=now), target)
            return {"path": str(target), "tokens": learned.tokens}
        if action == "reset":
            if self._jobs:
                raise RequestError("the counts cannot be reset while requests are counted")
            self.runner.residency.reset()
            return {}
        return {"counts": self._counts().tolist(), **self.runner.residency.totals()}

    def close(self) -> None:
        """Cancel everything and release the model."""
        while self._jobs:
            self._finish(self._jobs[0])
        self.runner.close()


def log_softmax_at(logits: F32, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    """log p of one token a row: logits float32 [T, V], tokens [T] -> float64 [T]."""
    wide = logits.astype(np.float64)
    top = wide.max(axis=1)
    total = np.log(np.exp(wide - top[:, None]).sum(axis=1))
    return np.asarray(wide[np.arange(len(tokens)), tokens] - top - total)
