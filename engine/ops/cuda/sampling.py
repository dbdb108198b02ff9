"""Sampling and step control on the device: the token of `running.sampling.sample`, and the inputs of the next step.

Nothing about a request is an argument of a kernel: parameters, history and stop tokens lie in device memory, so one
captured graph serves every request, and steps can be enqueued ahead. After a stop token, the last token or an error
the device clears `active`, and what was enqueued beyond changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.ground.protocol import MAX_STOP_TOKENS
from engine.ground.sampling import Sampling
from engine.ops import Limits
from engine.ops.cuda.device import Array, Device, Module
from engine.ops.likelihood import Likelihood, log_likelihood

HISTORY_TOKENS = 256  # PENALTY_TOKENS of engine/running/sampling.py
MAX_VOCAB = 1 << 20
RING_ENTRIES = 4096
RUNNING, STOPPED, LENGTH, FAILED = range(4)  # Status of cuda/step.cuh
_N_CONTROL, _N_SCRATCH, _N_BINS = 20, 8, 2048
_POSITION, _STEP, _EPOCH, _N_STOP, _MASKED, _N_TOP = 1, 3, 4, 5, 7, 18  # of the control block
_BLOCK_TOKENS, _COLLECT_THREADS = 1024, 512
_EPOCHS = 512
DESCRIBED_ENTRIES = 8  # draws whose likelihoods wait to be read
_MAX_TOP, _ENTRY_WORDS = 20, 24  # of cuda/logprobs.cu


class Draw(NamedTuple):
    """What a step drew: `token` counts if `status` is RUNNING or LENGTH (then it is the last one)."""

    token: int
    status: int


class News(NamedTuple):
    """Tokens that were drawn since, and how the request ended, if it did: by a stop token, or by bad logits.

    likelihoods: of each token, where the request asks for them.
    """

    tokens: list[int]
    stopped: bool
    error: bool
    likelihoods: tuple[Likelihood, ...] = ()


def draws_row_by_row(params: Sampling) -> bool:
    """Whether a token's draw depends on the tokens before it, but for their number."""
    return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)


class SamplerStates:
    """What n samplers have on the device, one after the other, so that one launch can draw for several."""

    def __init__(self, device: Device, limits: Limits, n: int) -> None:
        V = limits.n_vocab
        if not 0 < V <= MAX_VOCAB:
            raise ValueError(f"sampling: a vocabulary of {V}, at most {MAX_VOCAB} is supported")
        self.device, self.n_vocab, self.blocks = device, V, -(-V // _BLOCK_TOKENS)
        vectors = -(-V // 4) * 4  # rows of these end with whole ones
        self.control = device.empty((n, _N_CONTROL), np.int32)
        self.history = device.empty((n, HISTORY_TOKENS), np.int32)
        self.stop = device.empty((n, MAX_STOP_TOKENS), np.int32)
        self.allowed = device.empty((n, -(-V // 32)), np.uint32)
        self.counts = device.empty((n, vectors), np.int32)
        self.values = device.empty((n, vectors), np.float32)
        self.list = device.empty((n, 3 * V), np.uint32)
        self.masses = device.empty((n, self.blocks), np.uint64)
        self.scratch = device.empty((n, _N_SCRATCH), np.uint64)
        self.bin_mass = device.empty((n, _N_BINS), np.uint64)
        self.bin_count = device.empty((n, _N_BINS), np.uint32)
        for array in (self.control, self.history, self.stop, self.scratch, self.bin_mass, self.bin_count):
            device.write(array, np.zeros(array.shape, array.dtype))
        memory = device.page_locked(8 * RING_ENTRIES * n)
        memory[:] = 0
        self.rings: NDArray[np.uint64] = memory.view(np.uint64).reshape(n, RING_ENTRIES)
        self._rings_pointer = device.pointer(memory)

    def prepare_rows(self, samplers: Sequence[Sampler], params: Sampling, position: int, limit: int, made: int) -> None:
        """Let neighbors draw for one request: the first for `position`, the others for those behind it.

        Each has begun an epoch. Nothing ends the request but the limit, and nothing depends on its tokens
        (`draws_row_by_row`). made: draws that count as made, so that those of several calls have entries of their own.
        """
        controls = np.tile(control_of(params, self.n_vocab, position, limit), (len(samplers), 1))
        controls[:, _POSITION] += np.arange(len(samplers), dtype=np.int32)
        controls[:, _STEP] = made
        controls[:, _EPOCH] = [sampler.epoch for sampler in samplers]
        first = samplers[0].number
        self.device.write(self.control[first : first + len(samplers)], controls)

    def step(
        self, own: slice, logits: Array, tokens: Array, positions: Array, slots: Array, block_tables: Array,
        greedy: bool = False, row: int = 0, counted: Array | None = None,
    ) -> None:  # fmt: skip
        """Let samplers `own` draw a token each and make them the next step's input, in rows from `row` on.

        logits float32, a row for each, 16-byte aligned. tokens, positions int32 [n], slots int32 [G, n], G the
        KV groups; block_tables int32 [G, n_sequence, max_blocks]: of a row are written the token, its position and its
        KV slots, which are -1 where nothing follows. greedy: only requests of temperature 0 will run; one kernel, not
        three. counted: uint8 [n], whose element of a row becomes 0 where nothing follows.
        """
        V, n = self.n_vocab, own.stop - own.start
        if logits.shape != (n, V) or (n > 1 and V % 4):
            raise ValueError(f"sampling: logits {logits.shape}, expected {(n, V)}")
        at = self.device.pointer
        max_blocks = block_tables.shape[2]
        table, slot = (np.uint64(at(a) + 4 * row * each) for a, each in ((block_tables, max_blocks), (slots, 1)))
        next_step = (
            self.control[own], self.history[own], self.counts[own], self.stop[own], table,
            int(np.prod(block_tables.shape[1:])), max_blocks, len(slots), tokens[row:], positions[row:], slot,
            slots.shape[1], None if counted is None else counted[row:],
            np.uint64(self._rings_pointer + 8 * RING_ENTRIES * own.start), RING_ENTRIES,
        )  # fmt: skip
        module, values, scratch = Module("sample.cu"), self.values[own], self.scratch[own]
        kernel = self.device.kernel(module, "largest")
        arguments = (logits, V, self.allowed[own], None if greedy else values, scratch, *next_step)
        kernel((self.blocks, n), 256, arguments, overlap=True)
        if greedy:
            return
        kernel = self.device.kernel(module, "weigh")
        bins = self.bin_mass[own], self.bin_count[own]
        kernel((self.blocks, n), 256, (values, V, self.masses[own], *bins, scratch, *next_step), overlap=True)
        kernel = self.device.kernel(module, "collect")
        last = (values, V, self.list[own], scratch, *next_step)
        kernel((-(-V // _COLLECT_THREADS), n), _COLLECT_THREADS, last, overlap=True)


def control_of(params: Sampling, n_vocab: int, position: int, limit: int) -> NDArray[np.int32]:
    """The control block of a request that begins, without epoch, stop tokens, mask and likelihoods."""
    top_k = params.top_k if params.top_k < n_vocab else 0
    words = np.array([1, position, limit, 0, 0, 0, top_k, 0], np.int32)
    floats = np.array([params.repetition_penalty, params.temperature], np.float32)
    top_p, min_p = (round(p * 2.0**32) for p in (params.top_p, params.min_p))
    wide = np.array([max(top_p, 1), min_p, params.seed], np.uint64)
    penalties = np.array([params.frequency_penalty, params.presence_penalty, 0.0, 0.0], np.float32)
    return np.concatenate([words, *(a.view(np.int32) for a in (floats, wide, penalties))])


class Sampler:
    """Draws for one request at a time; `step` can be captured. `number`: of those that have their states together.

    active: int32 [1], a view of the control block: 1 while the request runs. ring: page-locked uint64 [RING_ENTRIES],
    which `poll` reads; entry (n - 1) % RING_ENTRIES holds draw n = 1, 2, ... of the request as
    token | status << 32 | epoch << 34 | n << 43, the epoch being the request's number modulo 512. counts: int32 [V and
    a rest to a multiple of 4], how often each token is in the reply, where a penalty depends on it. described: draws
    whose likelihoods are kept until they are read.
    """

    def __init__(
        self, device: Device, limits: Limits, states: SamplerStates | None = None, number: int = 0,
        described: int = DESCRIBED_ENTRIES,
    ) -> None:  # fmt: skip
        self.device, self.n_vocab = device, limits.n_vocab
        self.states, self.number = states or SamplerStates(device, limits, 1), number
        states = self.states
        self._own = slice(number, number + 1)
        self.control, self.history, self.stop = states.control[number], states.history[number], states.stop[number]
        self.allowed, self.counts, self.ring = states.allowed[number], states.counts[number], states.rings[number]
        self.active = self.control[:1]
        self.likeliest = Module("logprobs.cu")
        self.blocks = states.blocks
        self.best = device.empty((self.blocks, _MAX_TOP), np.uint64)
        self.sums = device.empty(self.blocks, np.uint64)
        self.described = device.empty(1, np.uint64)
        device.write(self.described, np.zeros(1, np.uint64))
        memory = device.page_locked(8 * described * _ENTRY_WORDS)
        memory[:] = 0
        self.entries: NDArray[np.uint64] = memory.view(np.uint64).reshape(described, _ENTRY_WORDS)
        self.entries_pointer = np.uint64(device.pointer(memory))
        self.epoch = 0
        self.logprobs: int | None = None

    def prepare(
        self,
        params: Sampling,
        history: Sequence[int],
        position: int,
        stop: Iterable[int],
        limit: int,
        allowed: NDArray[np.uint32] | None = None,
        logprobs: int | None = None,
    ) -> None:
        """Begin a request, in stream order: the next draw is for `position`, the number of tokens so far.

        history: those tokens, oldest first, or the last HISTORY_TOKENS of them. stop: at most MAX_STOP_TOKENS ids.
        limit: tokens that may be emitted, at least 1. allowed: as in `running.sampling.sample`. With a frequency or
        presence penalty, `count` says what is in the reply so far. logprobs: how many likeliest tokens `describe`
        is to find with each draw; None: it will not be called.
        """
        stop_tokens = np.asarray(sorted(stop), np.int32)
        if len(stop_tokens) > MAX_STOP_TOKENS or limit < 1:
            raise ValueError(f"sampling: {len(stop_tokens)} stop tokens (at most {MAX_STOP_TOKENS}), limit {limit}")
        recent = np.zeros(HISTORY_TOKENS, np.int32)
        n_recent = min(position, HISTORY_TOKENS)
        recent[np.arange(position - n_recent, position) % HISTORY_TOKENS] = history[len(history) - n_recent :]
        self.begin_epoch()
        if allowed is not None:
            self.device.write(self.allowed, allowed)
        if len(stop_tokens):
            self.device.write(self.stop[: len(stop_tokens)], stop_tokens)
        self.device.write(self.history, recent)
        self.logprobs = logprobs
        control = control_of(params, self.n_vocab, position, limit)
        control[_EPOCH], control[_N_STOP], control[_MASKED] = self.epoch, len(stop_tokens), allowed is not None
        control[_N_TOP] = logprobs or 0
        self.device.write(self.control, control)

    def begin_epoch(self) -> None:
        """What comes is of another request."""
        self.epoch = (self.epoch + 1) % _EPOCHS
        if self.epoch == 0:  # an entry of 512 requests ago must not pass for one of this request
            self.device.synchronize()
            self.ring[:] = 0
            self.entries[:] = 0

    def allow(self, allowed: NDArray[np.uint32]) -> None:
        """Set the mask of the next draw, in stream order, of a request that was prepared with one."""
        self.device.write(self.allowed, allowed)

    def count(self, reply: Sequence[int]) -> None:
        """Set the counts to those of a reply so far, in stream order; draws then go on from there."""
        if len(reply):
            counted = np.bincount(np.asarray(reply, np.int64), minlength=len(self.counts))
            self.device.write(self.counts, counted.astype(np.int32))
        else:
            self.device.set_bytes(self.device.pointer(self.counts), 0, self.counts.nbytes)

    def step(
        self, logits: Array, tokens: Array, positions: Array, slots: Array, block_tables: Array, greedy: bool = False,
        row: int = 0, counted: Array | None = None,
    ) -> None:  # fmt: skip
        """Draw a token and make it the next step's input, as `SamplerStates.step` of one row."""
        self.states.step(self._own, logits, tokens, positions, slots, block_tables, greedy, row, counted)

    def describe(self, logits: Array) -> None:
        """Find how likely the token was that the last `step` drew from the same logits, and the likeliest ones.

        Nothing happens where that step drew none.
        """
        V = self.n_vocab
        kernel = self.device.kernel(self.likeliest, "top_logits")
        kernel(self.blocks, 256, (logits, V, self.control, self.best))
        kernel = self.device.kernel(self.likeliest, "log_sum")
        arguments = (logits, V, self.control, self.history, self.best, self.sums, self.described)
        kernel(self.blocks, 256, (*arguments, self.entries_pointer, len(self.entries)))

    def likelihood(self, n: int) -> Likelihood | None:
        """What `describe` found of draw n, or None while it is not there; at most as many draws back as it keeps."""
        entry = self.entries[(n - 1) % len(self.entries)]
        if int(entry[0]) >> 34 != self.epoch | n << 9:
            return None
        assert self.logprobs is not None
        words = entry.view(np.uint32).reshape(-1, 2)[2 : 3 + max(1, min(self.logprobs, self.n_vocab))].copy()
        logits = words.view(np.float32)
        top = [(int(id_), float(logit)) for id_, logit in zip(words[1:, 0], logits[1:, 1], strict=True)]
        return log_likelihood(float(logits[0, 0]), int(entry[1]), top, self.logprobs)

    def drawn(self, n: int) -> Draw | None:
        """Draw n = 1, 2, ... of the request, or None while it is not there; at most RING_ENTRIES draws back."""
        entry = int(self.ring[(n - 1) % RING_ENTRIES])
        if entry >> 34 != self.epoch | n << 9:
            return None
        token = entry & 0xFFFFFFFF
        return Draw(token - (token >> 31 << 32), entry >> 32 & 3)

    def is_there(self, n: int) -> bool:
        """Whether draw n can be taken, with its likelihood where the request asks for that."""
        found = self.drawn(n)
        if found is None or self.logprobs is None or found.status in (STOPPED, FAILED):
            return found is not None
        return self.likelihood(n) is not None

    def poll(self, made: int) -> News:
        """What is there beyond the first `made` tokens of the request; never waits."""
        tokens: list[int] = []
        likelihoods: list[Likelihood] = []
        while (draw := self.drawn(n := made + len(tokens) + 1)) is not None:
            if draw.status in (STOPPED, FAILED):
                return News(tokens, draw.status == STOPPED, draw.status == FAILED, tuple(likelihoods))
            if self.logprobs is not None:
                found = self.likelihood(n)
                if found is None:
                    break
                likelihoods.append(found)
            tokens.append(draw.token)
        return News(tokens, False, False, tuple(likelihoods))
