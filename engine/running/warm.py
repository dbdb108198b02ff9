"""What a first request would have to wait for, done before there is one: kernels loaded, steps captured, pools touched.

Steps of every kind run, on tokens that nobody asked for, and leave no trace. While they do, all slots are pinned, so no
expert moves; afterwards heat, clocks and counters are what they were. Nothing is told to the cache of prefixes.
On the host there is nothing to load, and what a step with drafts takes is found out, as far as that takes a moment.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import fields

import numpy as np

from engine.ground.errors import CapacityError, DeviceLostError, SparkError
from engine.ground.sampling import Sampling
from engine.memory.residency import Residency
from engine.ops import SHORT_ROWS, SMALL_TOKENS
from engine.ops.cuda.failures import translated
from engine.running.counted import LONG_STEPS
from engine.running.forward import GRAPH_TOKENS
from engine.running.loaded import Loaded
from engine.running.mtp import MOST_TOKENS, Asked, Fed
from engine.running.reply import Reply
from engine.running.stepping import Span

HOST_S = 0.25  # that steps are tried for on the host, and widths that are the least of use
RUNS, HOST_WIDTHS = 3, 4
DEVICE_S = 0.05  # that a width is tried for on a device, where it takes no longer once
_DRAWS = 3  # the first of a reply, and those of captured steps
_KINDS = (Sampling(temperature=0.0), Sampling(temperature=1.0, top_p=0.95))  # which have graphs of their own

_log = logging.getLogger(__name__)


def warm_up(loaded: Loaded) -> float:
    """Run a step of every kind; the seconds that it took. What fails then will say so to a request that needs it."""
    began_s = time.perf_counter()
    try:
        with translated(), _untouched(loaded.residency):
            if loaded.backend.gpu is not None:
                _read(loaded)
                _decode(loaded)
                if loaded.drafts is not None:
                    loaded.drafts.rehearse()
                if loaded.kv.is_pooled:
                    with loaded.kv.as_if_away():
                        _read(loaded, captured=True)
                        _decode(loaded)
            _time(loaded)
    except DeviceLostError:
        raise
    except SparkError as error:
        _log.info("not warmed up: %s", error)
    if loaded.forward.replayed is not None:
        loaded.forward.replayed.reset()
    if loaded.steps.guesses is not None:
        loaded.steps.guesses.imposed = None
        loaded.steps.guesses.reset()
    return time.perf_counter() - began_s


@contextlib.contextmanager
def _untouched(residency: Residency) -> Iterator[None]:
    """Let no expert move within the block, and have all state of slots afterwards as it was before."""
    state = residency.pull()
    before = {f.name: getattr(state, f.name).copy() for f in fields(state)}
    state.pinned[...] = 1
    residency.push()
    try:
        yield
    finally:
        residency.device.synchronize()
        for name, values in before.items():
            getattr(state, name)[...] = values
        residency.push()


def _read(loaded: Loaded, captured: bool = False) -> None:
    """Steps of every length that has kernels or a graph of its own, the longest first; captured: of graphs alone."""
    most = min(loaded.limits.max_tokens, loaded.limits.n_ctx)
    lengths = {*GRAPH_TOKENS} if captured else {*GRAPH_TOKENS, *LONG_STEPS, most}
    for n in sorted((n for n in lengths if n <= most), reverse=True):
        with _replies(loaded, 1, n + 1) as (one,):
            assert one.sequence is not None
            tokens = np.asarray(one.history[:n], np.int32)
            short = min(n, SHORT_ROWS) if loaded.prefixes.has_short else 0
            span = Span(one.sequence, tokens, np.zeros(n, bool), (n - 1,), short=short)
            _ = loaded.steps.run([span]).last_residual
            if loaded.predictor is not None:
                loaded.predictor.follow([Fed(span, n, one.history)])
                for wanted in range(1, 1 + MOST_TOKENS) if n == 1 else ():
                    for beyond in (0.0, 1.0) if loaded.backend.gpu is not None else (0.0,):  # by either head
                        loaded.predictor.drafts([Asked(one.sequence, one.history, wanted)], beyond)
                loaded.predictor.forget(one.sequence)


def _time(loaded: Loaded) -> None:
    """Steps that may have drafts again, now that nothing is compiled or captured any more: what each takes.

    The least of several runs counts, since the first of a width notes calls and others are disturbed. On the host long
    steps are left out, and where even short ones take long nothing is said.
    """
    if loaded.drafts is None:
        return
    on_host, until_s = loaded.backend.gpu is None, time.perf_counter() + HOST_S
    widths = [n for n in loaded.drafts.widths if n < loaded.limits.n_ctx]
    seconds: dict[int, float] = {}
    for n in widths:
        if on_host and time.perf_counter() > until_s:
            break
        if loaded.forward.replayed is not None:
            _step_seconds(loaded, n)  # captured once more, for choices that are imposed
        if not on_host and n > 1:
            _take_back(loaded, n)
        tries = [_step_seconds(loaded, n)]
        while len(tries) < RUNS and (time.perf_counter() < until_s if on_host else sum(tries) < DEVICE_S):
            tries.append(_step_seconds(loaded, n))
        seconds[n] = min(tries)
    if on_host and widths:
        if len(seconds) < min(len(widths), HOST_WIDTHS):
            return
        seconds[1] = min(seconds[1], _step_seconds(loaded, 1))
    if 1 in seconds:
        loaded.drafts.begin_costs(seconds)


def _take_back(loaded: Loaded, n: int) -> None:
    """A step of so many tokens whose last one is dropped, since to replay recurrent states is captured, too."""
    with _replies(loaded, 1, n + 1) as (one,):
        assert one.sequence is not None
        tokens = np.asarray(one.history[:n], np.int32)
        span = Span(one.sequence, tokens, np.zeros(n, bool), tuple(range(n)), keep=True)
        loaded.steps.run([span])
        loaded.steps.take_back([span], [1])
        one.sequence.settle()


def _step_seconds(loaded: Loaded, n: int) -> float:
    """What a step of so many tokens takes, logits of all of them with it."""
    with _replies(loaded, 1, n + 1) as (one,):
        assert one.sequence is not None
        tokens, keep = np.asarray(one.history[:n], np.int32), loaded.forward.replayed is not None
        span = Span(one.sequence, tokens, np.zeros(n, bool), tuple(range(n)), keep)
        loaded.forward.device.synchronize()  # states of a step before may still be replayed
        began_s = time.perf_counter()
        _ = loaded.steps.run([span]).last_residual
        return time.perf_counter() - began_s


def _decode(loaded: Loaded) -> None:
    """Replies alone and in all widths of steps that they share, greedy and not."""
    widths = [w for w in GRAPH_TOKENS if 1 < w <= min(loaded.limits.max_sequences, SMALL_TOKENS)]
    for params in _KINDS:
        for _ in _kinds_of_guesses(loaded):
            with _replies(loaded, 1, 1, params) as (one,):
                steps = loaded.decoder.alone(one)
                while not steps.ended:
                    steps.advance()
        for width in widths:
            # So short a context has no room for so many, nor will it have.
            with contextlib.suppress(CapacityError), _replies(loaded, width, 1, params) as together:
                while not any(one.reason for one in together):
                    failures = loaded.decoder.together(together, time.perf_counter() + 1)
                    for failure in filter(None, failures):
                        raise failure


def _kinds_of_guesses(loaded: Loaded) -> Iterator[None]:
    """Once for steps with guesses and once for those without, where both kinds are compared; else once."""
    guesses = loaded.steps.guesses
    for kind in (None,) if guesses is None else guesses.kinds:
        if guesses is not None:
            guesses.imposed = kind
        yield
    if guesses is not None:
        guesses.imposed = None


@contextlib.contextmanager
def _replies(loaded: Loaded, n: int, n_tokens: int, params: Sampling = _KINDS[0]) -> Iterator[list[Reply]]:
    """Replies to so many tokens, different ones, of which nothing is fed."""
    n_vocab = loaded.source.config.n_vocab
    replies: list[Reply] = []
    try:
        for i in range(n):
            tokens = ((np.arange(n_tokens) * 7919 + 31 * i) % n_vocab).tolist()
            limit = max(1, min(_DRAWS, loaded.limits.n_ctx - n_tokens))
            replies.append(Reply(tokens, params, limit, sequence=loaded.kv.sequence(), number=i))
        yield replies
    finally:
        for one in replies:
            assert one.sequence is not None
            one.sequence.release()
