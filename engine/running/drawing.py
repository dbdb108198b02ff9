"""Tokens drawn from rows of logits: on the host, or by samplers on the device, which draw the same ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import NamedTuple, Protocol

import numpy as np

from engine.ground.errors import NumericalError
from engine.ops import F32
from engine.ops.cuda.device import Device
from engine.ops.cuda.recall import tally
from engine.ops.cuda.sampling import (
    DESCRIBED_ENTRIES,
    FAILED,
    RING_ENTRIES,
    Sampler,
    SamplerStates,
    draws_row_by_row,
)
from engine.ops.device import Array
from engine.ops.likelihood import likelihood
from engine.running.forward import Forward
from engine.running.sampling import Drawing, Drawn, counts_reply, sample
from engine.running.stepping import StepResult

Behind = Callable[[Array], None]
CHECK_S = 1.0  # without news for so long, ask the device whether it failed


class Drawer(Protocol):
    """Who draws."""

    def draw(
        self, result: StepResult, drawings: Many[Drawing], follow: Many[Many[int]], behind: Behind | None = None
    ) -> list[list[Drawn | None]]:
        """Draw a token from each of some rows of the last step's wanted logits; None where they are not finite.

        follow: of each, what the step was fed behind. As long as a token is the next of these the row behind counts,
        too, and may be drawn from at once: so of each there are one token or more, of which only the last may be
        another one. behind: told of the tokens of all rows of the only drawing, int32 [n] on the device, where they
        will be together, before they are waited for; it enqueues what needs no more.
        """

    def draw_from(self, logits: F32, drawing: Drawing) -> Drawn | None:
        """As `draw`, from a row of an earlier step that was kept, float32 [V] in host memory."""


class HostDrawer:
    """Draws on the host."""

    def draw(
        self, result: StepResult, drawings: Many[Drawing], follow: Many[Many[int]], behind: Behind | None = None
    ) -> list[list[Drawn | None]]:
        """As `Drawer.draw`; of each there is one: the next costs nothing before it is known to count."""
        logits = result.logits
        return [[self.draw_from(logits[d.row], d)] for d in drawings]

    def draw_from(self, logits: F32, drawing: Drawing) -> Drawn | None:
        """As `Drawer.draw_from`."""
        d = drawing
        reply = d.history[d.reply_from :] if counts_reply(d.params) else ()
        try:
            token = sample(logits, d.params, len(d.history), d.history, d.allowed, reply)
        except NumericalError:
            return None
        return Drawn(token, None if d.logprobs is None else likelihood(logits, token, d.logprobs))


class _Request(NamedTuple):
    """What a sampler has of a request: tokens, the last of them, draws since it was prepared, whether with a mask."""

    request: int = -1
    n_tokens: int = 0
    token: int = -1
    draws: int = 0
    masked: bool = False


_NOTHING = _Request()


class DeviceDrawer:
    """Draws on the device, that of `forward`, with a sampler for each sequence of a step."""

    def __init__(self, forward: Forward, device: Device) -> None:
        self.forward, self.device = forward, device
        n = forward.limits.max_sequences
        self.states = SamplerStates(device, forward.limits, n)
        self._samplers = [Sampler(device, forward.limits, self.states, i) for i in range(n)]
        self._known = [_NOTHING] * len(self._samplers)
        self._nowhere = device.upload(np.zeros((2 + len(forward.kv.groups), n), np.int32))
        self._row = device.empty((1, forward.limits.n_vocab), np.float32)

    def lend(self, number: int = 0) -> Sampler:
        """A sampler for somebody who prepares it; what it had of a request is forgotten."""
        self._known[number] = _NOTHING
        return self._samplers[number]

    def count_left_out(self, n: int) -> None:
        """Count what the first n rows of a step left out of their contexts, of those that go on (running/recall.py)."""
        recalling = self.forward.recalling
        assert recalling is not None
        arrays, control = recalling.arrays, self.states.control[:n]
        found = recalling.left_out[:n], recalling.read[:n], recalling.ring
        tally(self.device, n, arrays.missed, arrays.read, recalling.heads, control, *found)

    def draw(
        self, result: StepResult, drawings: Many[Drawing], follow: Many[Many[int]], behind: Behind | None = None
    ) -> list[list[Drawn | None]]:
        """As `Drawer.draw`; waits for the tokens, once.

        A sampler goes on by itself with the request it had, without a mask. So it draws from all rows that may count,
        each as if the tokens ahead were those that it drew, which they are where it counts. Where that does not matter,
        as many samplers draw from as many rows at once.
        """
        rows_are_vectors = self.forward.limits.n_vocab % 4 == 0
        if rows_are_vectors and len(self._samplers) > 1 and any(follow) and all(map(self._is_free, drawings)):
            return self._draw_rows(result, drawings, follow, behind)
        counts = [1 if d.allowed is not None else 1 + len(f) for d, f in zip(drawings, follow, strict=True)]
        for i, d in enumerate(drawings):
            if d.logprobs is not None:
                counts[i] = min(counts[i], DESCRIBED_ENTRIES)
            for row in range(d.row, d.row + counts[i]):
                self._draw(d, self.aligned(result.at(row)), row - d.row, counts[i])
        self.device.synchronize()
        return [self._drawn(*item) for item in zip(drawings, counts, follow, strict=True)]

    @staticmethod
    def _is_free(d: Drawing) -> bool:
        return d.allowed is None and d.logprobs is None and not draws_row_by_row(d.params)

    def _draw_rows(
        self, result: StepResult, drawings: Many[Drawing], follow: Many[Many[int]], behind: Behind | None
    ) -> list[list[Drawn | None]]:
        """As `draw`, with all samplers, one a row, as often as it takes."""
        f, nowhere, at_once = self.forward, self._nowhere, len(self._samplers)
        places: list[list[tuple[Sampler, int]]] = []  # of each drawing's rows: who draws, and which draw
        n_launches = 0
        for sampler in self._samplers[: 1 + max(map(len, follow))]:
            sampler.begin_epoch()
        for d, tokens in zip(drawings, follow, strict=True):
            places.append([])
            for first in range(0, 1 + len(tokens), at_once):
                samplers = self._samplers[: min(at_once, 1 + len(tokens) - first)]
                position, row = len(d.history) + first, result.at(d.row + first)
                assert result.at(d.row + first + len(samplers) - 1) == row + len(samplers) - 1
                self.states.prepare_rows(samplers, d.params, position, f.limits.n_ctx, made=n_launches)
                self.states.step(
                    slice(0, len(samplers)), f.buffers.logits[row : row + len(samplers)], nowhere[0], nowhere[1],
                    nowhere[2:], f.block_tables, d.params.temperature <= 0,
                )  # fmt: skip
                n_launches += 1
                places[-1] += [(sampler, n_launches) for sampler in samplers]
        self._known = [_NOTHING] * at_once
        if behind is not None and n_launches == 1:
            behind(nowhere[0][: len(places[0])])
            self._await(places[0])
        else:
            self.device.synchronize()
        result.is_waited_for = True
        return [self._that_count(own, tokens) for own, tokens in zip(places, follow, strict=True)]

    def _await(self, places: Many[tuple[Sampler, int]]) -> None:
        """Wait for draws, and for nothing that is enqueued behind them."""
        heard_s = time.monotonic()
        for sampler, n in places:
            while sampler.drawn(n) is None:
                time.sleep(0)
                if time.monotonic() - heard_s > CHECK_S:
                    self.device.synchronize()  # which raises where it failed
                    assert sampler.drawn(n) is not None

    def _that_count(self, places: Many[tuple[Sampler, int]], follow: Many[int]) -> list[Drawn | None]:
        """The draws up to the first that is not what was fed behind."""
        found: list[Drawn | None] = []
        for i, (sampler, n) in enumerate(places):
            drawn = sampler.drawn(n)
            assert drawn is not None
            found.append(None if drawn.status == FAILED else Drawn(drawn.token, None))
            if drawn.status == FAILED or i == len(follow) or drawn.token != follow[i]:
                break
        return found

    def draw_from(self, logits: F32, drawing: Drawing) -> Drawn | None:
        """As `Drawer.draw_from`."""
        self.device.write(self._row, logits[None])
        self._draw(drawing, self._row)
        self.device.synchronize()
        return self._drawn(drawing, 1, ())[0]

    def _draw(self, d: Drawing, logits: Array, nth: int = 0, of: int = 1) -> None:
        """Enqueue the draw of a token from logits float32 [1, V]; nth: of so many in a row."""
        f, sampler, nowhere = self.forward, self._samplers[d.number], self._nowhere
        n = len(d.history)
        known = self._known[d.number]
        draws, goes_on = known.draws, (known.request, known.n_tokens, known.token) == (d.request, n, d.history[-1])
        goes_on |= nth > 0
        masked = d.allowed is not None
        if masked or known.masked or not goes_on or (nth == 0 and draws + of >= RING_ENTRIES):
            sampler.prepare(d.params, d.history, n, (), f.limits.n_ctx, d.allowed, d.logprobs)
            draws = 0
        if counts_reply(d.params) and not goes_on:  # a grammar's are prepared for each token, and their counts go on
            sampler.count(d.history[d.reply_from :])
        self._known[d.number] = _Request(d.request, n + 1 + nth, -1, draws + 1, masked)
        sampler.step(logits, nowhere[0], nowhere[1], nowhere[2:], f.block_tables, d.params.temperature <= 0)
        if d.logprobs is not None:
            sampler.describe(logits)

    def _drawn(self, d: Drawing, n: int, follow: Many[int]) -> list[Drawn | None]:
        """Of the last n tokens that were drawn, those that count; the sampler knows what it has drawn for nothing."""
        sampler, known = self._samplers[d.number], self._known[d.number]
        found: list[Drawn | None] = []
        for draw in range(known.draws - n + 1, known.draws + 1):
            drawn = sampler.drawn(draw)
            assert drawn is not None
            if drawn.status == FAILED:
                found.append(None)
                break
            found.append(Drawn(drawn.token, None if d.logprobs is None else sampler.likelihood(draw)))
            if len(found) <= len(follow) and drawn.token != follow[len(found) - 1]:
                break
        last = found[-1]
        goes_on = len(found) == n and last is not None
        self._known[d.number] = known._replace(token=last.token) if goes_on and last is not None else _NOTHING
        return found

    def aligned(self, row: int) -> Array:
        """A row of the last step's logits, where vectors of four can be read until the next is asked for."""
        logits = self.forward.buffers.logits[row : row + 1]
        if row * logits.shape[1] % 4 == 0:
            return logits
        self.device.copy(self.device.pointer(self._row), self.device.pointer(logits), logits.nbytes)
        return self._row
