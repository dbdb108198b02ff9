"""An engine without a model, for tests of the daemon, its client and the server.

It repeats what it is told: a Generate request is answered with the tokens between the last `SAY` and the
`SAID` after it, or with the prompt reversed, one token a step, then with the end of text. Special tokens in
a prompt make it misbehave, or answer with its seed. A token that the reply has is passed over where penalties
take more than 1 off it. Log-probabilities are made from the token's number. A prediction is drafted, all of it at once,
and accepted as far as the reply has it.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from engine.ground.config import EngineConfig
from engine.ground.errors import ContextOverflowError, DeviceLostError, ModelFormatError, NumericalError, RequestError
from engine.ground.protocol import Done, Error, Event, Generate, Progress, Score, Timing, Tokens, Usage, error_event

END, SAY, SAID = 256, 257, 258
CRASH, REFUSED, NAN, HANG, PRINT, BUG, QUIET, LOST, DRAW, WARN, HALVES = range(300, 311)
VOCAB = 320

# What a daemon says of forms that it cannot have, by a word of their schemas.
_NO_FORMS = {
    "uniqueItems": "field 'grammar': uniqueItems is not supported",
    "contains": "the schema cannot be enforced: contains is not supported",
    "dependentRequired": "the grammar takes more than 4 s: the limit of a form",
}


class FakeEngine:
    """step_s: how long a step takes; load_s: how long loading takes, in five parts."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str, int, int], None],
        *,
        step_s: float = 0.0,
        load_s: float = 0.0,
    ) -> None:
        if config.model.name == "broken.gguf":
            raise ModelFormatError("key 'general.architecture': expected a string", hint="download it again")
        if config.model.name == "printing.gguf":
            print_in_every_way()
        progress("compiling kernels", 3, 3)
        for part in range(5):
            progress("loading", 20 * part, 100)
            time.sleep(load_s / 5)
        progress("loading", 100, 100)
        self.config = config
        self.ctx_tokens = config.ctx_tokens or 4096
        self.step_s = step_s
        self.served = 0
        self.steps = 0
        self.prompts: dict[int, tuple[int, ...]] = {}  # of the requests that have not ended
        self.shared = 0  # requests whose prompt another one had
        self.drafts = {"drafted": 0, "accepted": 0}
        self.jobs: deque[tuple[int, Iterator[list[Event]]]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self.jobs)

    @property
    def idle_work(self) -> bool:
        return False

    @property
    def idle_s(self) -> float | None:
        return None

    def hello(self) -> dict:
        return {"architecture": "fake"}

    def ready(self) -> dict:
        return {"ctx_tokens": self.ctx_tokens, "threads": self.config.threads, "draft": self.config.draft}

    def submit(self, request: Generate | Score) -> None:
        if REFUSED in request.tokens:
            raise RequestError("field 'tokens': a token that is always refused")
        for word, said in _NO_FORMS.items():
            if isinstance(request, Generate) and f'"{word}"' in (request.grammar or ""):
                raise RequestError(said)
        if len(request.tokens) >= self.ctx_tokens:
            raise ContextOverflowError(f"{len(request.tokens)} tokens in a context of {self.ctx_tokens}")
        if isinstance(request, Generate):
            same = self.prompts.get(request.same_prompt_as or -1) == request.tokens
            self.shared += same
            self.prompts[request.id] = request.tokens
            work = self.generate(request, len(request.tokens) if same else 0)
        else:
            work = self.score(request)
        self.jobs.append((request.id, work))

    def step(self) -> list[Event]:
        request_id, work = self.jobs[0]
        self.steps += 1
        time.sleep(self.step_s)
        try:
            events = next(work)
        except NumericalError as error:
            events = [error_event(request_id, error)]
        if any(isinstance(event, Done | Error) for event in events):
            self.jobs.popleft()
            self.prompts.pop(request_id, None)
            self.served += 1
        return events

    def generate(self, request: Generate, cached: int) -> Iterator[list[Event]]:
        if HALVES in request.tokens:
            yield [Progress(request.id, len(request.tokens) // 2, len(request.tokens), cached)]
            yield []
        yield [Progress(request.id, len(request.tokens), len(request.tokens), cached)]
        for _ in range(8 if QUIET in request.tokens else 0):
            yield []
        misbehave(request.tokens)
        stop = (END,) if request.stop_tokens is None else request.stop_tokens
        sent, reason, made = 0, "length", list[int]()
        written = reply(request.tokens) if DRAW not in request.tokens else (*b"%x" % request.sampling.seed, END)
        for token in itertools.islice(penalized(request, written), request.max_tokens):
            if token in stop:
                reason = "stop"
                break
            sent += 1
            made.append(token)
            if request.logprobs is None:
                yield [Tokens(request.id, (token,))]
                continue
            top = tuple((other % 256, logprob(other)) for other in range(token, token + request.logprobs))
            yield [Tokens(request.id, (token,), (logprob(token),), (top,))]
        usage = Usage(len(request.tokens), sent, cached, self.drafted(request, made))
        yield [Done(request.id, usage, Timing(0.25, 0.5), {"hits": sent, "misses": 1}, reason)]

    def drafted(self, request: Generate, made: list[int]) -> dict[str, dict[str, int]]:
        if not (request.draft and request.prediction) or self.config.draft == "off":
            return {}
        pairs = zip(request.prediction, made, strict=False)
        counts = {
            "drafted": len(request.prediction),
            "accepted": len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))),
        }
        self.drafts = {name: self.drafts[name] + n for name, n in counts.items()}
        return {"lookup": counts}

    def score(self, request: Score) -> Iterator[list[Event]]:
        misbehave(request.tokens)
        n = len(request.tokens)
        yield [Progress(request.id, n // 2, n)]
        marks = request.generated or (True,) * n
        logprobs = tuple(-token / 7.0 for token in request.tokens[1:])
        nll = -sum(p for p, mark in zip(logprobs, marks[1:], strict=True) if mark)
        yield [
            Done(
                request.id,
                Usage(n, 0),
                Timing(0.125, 0.0),
                {"hits": sum(marks), "misses": 0},
                nll=nll if request.logprobs else None,
                logprobs=logprobs if request.logprobs else None,
            )
        ]

    def cancel(self, request_id: int) -> bool:
        found = [job for job in self.jobs if job[0] == request_id]
        for job in found:
            self.jobs.remove(job)
            self.prompts.pop(request_id, None)
        return bool(found)

    def stats(self) -> dict:
        shared = {"shared": self.shared} if self.shared else {}
        drafts = {"tokens": {"lookup": dict(self.drafts)}, "memory_bytes": 0, "step_ms": {}}
        more = shared | ({"drafts": drafts} if self.drafts["drafted"] else {})
        return {"served": self.served, "queued": len(self.jobs), "steps": self.steps, **more}

    def profile(self, action: str, path: Path | None) -> dict:
        if action == "write":
            assert path is not None
            partial = path.with_suffix(".partial")  # whoever waits for the file must not find it empty
            partial.write_text(f"served={self.served}\n")
            partial.replace(path)
            return {"path": str(path)}
        if action == "reset":
            self.served = 0
        return {"served": self.served}

    def close(self) -> None:
        print("fake engine closed", file=sys.stderr, flush=True)


def reply(tokens: tuple[int, ...]) -> Iterator[int]:
    """What a prompt is answered with; the end of text again and again after it."""
    if SAY in tokens:
        start = len(tokens) - tokens[::-1].index(SAY)
        stop = tokens.index(SAID, start) if SAID in tokens[start:] else len(tokens)
        yield from tokens[start:stop]
    else:
        yield from reversed(tokens)
    while True:
        yield END


def penalized(request: Generate, written: Iterable[int]) -> Iterator[int]:
    """What is written, without what the penalties keep away."""
    start = len(request.tokens) if request.reply_from is None else request.reply_from
    said = Counter(request.tokens[start:])
    for token in written:
        n = said[token]
        if token == END or request.sampling.frequency_penalty * n + request.sampling.presence_penalty * (n > 0) <= 1:
            said[token] += 1
            yield token


def logprob(token: int) -> float:
    return -token / 256


def misbehave(tokens: tuple[int, ...]) -> None:
    if CRASH in tokens:
        print("fake engine crashes", file=sys.stderr, flush=True)
        os._exit(7)
    if NAN in tokens:
        raise NumericalError("3 of 9 logits are not finite")
    if HANG in tokens:
        time.sleep(600)
    if PRINT in tokens:
        print_in_every_way()
    if WARN in tokens:
        for i in range(3):
            logging.getLogger("engine.fake").warning("file %d is damaged", i, extra={"reason": "damaged_file"})
        threading.Timer(0.3, logging.getLogger("engine.fake").warning, ["late"], {"extra": {"reason": "late"}}).start()
        logging.getLogger("engine.fake").warning("without a reason")
    if LOST in tokens:
        raise DeviceLostError("the GPU failed", hint="start again")
    if BUG in tokens:
        raise ZeroDivisionError("a bug of the engine")


def print_in_every_way() -> None:
    """Write to what a library takes for stdout: through Python, the descriptor and the C library."""
    print("printed by Python", flush=True)
    os.write(1, b"printed by a descriptor\n")
    libc = ctypes.CDLL(None)
    libc.puts(b"printed by C")
    libc.fflush(None)
