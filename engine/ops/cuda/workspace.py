"""What the CUDA ops share: kernels and scratch memory, and what an op has prepared for the next one.

All of it is allocated when it is made. ops.py are the functions over it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.ops import SMALL_TOKENS, Limits
from engine.ops.cuda.attention import Attention
from engine.ops.cuda.cpu_experts import CpuExperts
from engine.ops.cuda.delta import Delta
from engine.ops.cuda.device import Argument, Array, Device
from engine.ops.cuda.experts import SmallDense, SmallExperts
from engine.ops.cuda.feeding import Feeding
from engine.ops.cuda.flash import Flash
from engine.ops.cuda.gemm import Gemm, Halves
from engine.ops.cuda.landing import Landing
from engine.ops.cuda.long_jobs import LongJobs
from engine.ops.cuda.products import Products, Quantized, QuantizedScratch
from engine.ops.cuda.replay import Replay
from engine.ops.cuda.routing import Routing, Staging
from engine.ops.cuda.several_jobs import SeveralJobs
from engine.ops.cuda.short import ShortExperts
from engine.ops.cuda.views import Views

MOST_PREPARED = 2  # arrays


@dataclass(slots=True)
class _Prepared:
    """A float array in the form in which the next op reads it, so that the kernel which made it wrote both.

    first, end: addresses of the array's memory. norm: of the weight of the norm of the array that this is; 0: itself.
    """

    first: int
    end: int
    shape: tuple[int, ...]
    value: Quantized | Halves | None
    norm: int = 0


class Workspace:
    """Kernels and scratch memory for steps within `limits`, all of it allocated here."""

    def __init__(self, device: Device, limits: Limits) -> None:
        self.device = device
        self.limits = limits
        self.isa = device.arch
        self.products = Products(device, limits)
        self.small_experts = SmallExperts(device, limits, self.products)
        self.attention = Attention(device, limits)
        self.small_dense = SmallDense(device, limits, self.products)
        self._routing = Routing(device, limits) if limits.n_expert else None
        long = limits.max_tokens > SMALL_TOKENS
        self._gemm = Gemm(device, limits) if long else None
        self._short_experts: ShortExperts | None = None
        if self._gemm is not None and limits.n_expert:
            self._short_experts = ShortExperts(device, limits, self.products, self._gemm)
        self._flash = Flash(device, limits) if long else None
        self._delta = Delta(device, limits) if limits.n_mixed else None
        T, width = limits.max_tokens, limits.head_dim
        self.normed = device.empty((min(T, SMALL_TOKENS), limits.n_embd), np.float32)
        self.raw_q = device.empty((T, limits.n_head * width), np.float32)
        self.raw_k = device.empty((T, limits.n_head_kv * width), np.float32)
        self.raw_v = device.empty((T, limits.n_head_kv * width), np.float32)
        self.attended = QuantizedScratch(device, min(T, SMALL_TOKENS), limits.n_head_dim)
        # A step after a stop token is a no-op: its tables do not move (cuda/step.cuh clears this).
        self.active_step: Array | None = None
        self.replay: Replay | None = None
        self.streaming: Streaming | None = None
        self.landing: Landing | None = None
        self.long_jobs: LongJobs | None = None
        self._feeding = Feeding(device)
        self._prepared: list[_Prepared] = []
        self._views: dict[int, Views] = {}  # of scratch, by its identity

    def rows_of(self, scratch: Array, n_rows: int, width: int) -> Array:
        """The beginning of an array of this workspace as [n_rows, width]."""
        views = self._views.get(id(scratch))
        if views is None:
            views = self._views[id(scratch)] = Views(scratch)
        return views((n_rows, width))

    @property
    def routing(self) -> Routing:
        """The choice of experts."""
        assert self._routing is not None, "the workspace was made for a model without experts"
        return self._routing

    @property
    def gemm(self) -> Gemm:
        """Products of long steps."""
        assert self._gemm is not None, "the workspace was made for short steps"
        return self._gemm

    @property
    def short_experts(self) -> ShortExperts:
        """Experts of the short rows of long steps."""
        assert self._short_experts is not None, "the workspace was made for short steps, or for no experts"
        return self._short_experts

    @property
    def flash(self) -> Flash:
        """Attention of long steps."""
        assert self._flash is not None, "the workspace was made for short steps"
        return self._flash

    @property
    def delta(self) -> Delta:
        """Gated DeltaNet layers."""
        assert self._delta is not None, "the workspace was made for a model without them"
        return self._delta

    def join_choices(self, poison: bool = False) -> None:
        """Leave the choice of few tokens' experts to the kernel that reads them, which has to follow `route`.

        poison: it fills slots that experts enter, as banks ask for in tests.
        """
        if self._routing is not None:
            self._routing.joins, self._routing.poisons = True, poison

    def share_misses(self, cpu: CpuExperts | None) -> None:
        """Have the CPU compute what `cpu` divides of one token's missing experts; None: no longer. Before a capture."""
        self.routing.cpu = self.small_experts.cpu = cpu

    def hand_misses(self, jobs: SeveralJobs | None) -> None:
        """Have the CPU compute what `jobs` divides of the missing experts of a step of 2 to 32 tokens; None: no longer.

        Before a capture.
        """
        self.routing.several = self.small_experts.several = jobs

    def offer_misses(self, jobs: LongJobs | None) -> None:
        """Have the CPU compute some of what long steps miss, where `jobs` is on; None: no longer."""
        self.long_jobs = jobs

    def guess_misses(self, landing: Landing | None, with_guesses: bool = True) -> None:
        """Have one token's missing experts guessed and brought ahead; None: no longer. Before a capture.

        with_guesses: else a step is without, and tells only what it took, to be compared.
        """
        self.routing.landing, self.routing.with_guesses = landing, with_guesses
        self.landing = self.small_experts.landing = landing if with_guesses else None

    def entered(self) -> tuple[Argument, ...]:
        """What the first product of a layer needs more, where guesses wait for what enters it."""
        return () if self.landing is None else self.landing.entered()

    def join(self) -> None:
        """End a step: what it has enqueued on other streams is waited for by what follows it on the main one."""
        if self.landing is not None:
            self.landing.join()

    def repeat(self, noted: None, work: Callable[[], None]) -> None:
        """Run `work`: steps that come again are graphs here (running/stepping.py)."""
        work()

    def feed(self, pairs: Sequence[tuple[Array, NDArray[Any]]]) -> None:
        """Copy arrays of the host into arrays of the device, in one launch where they are small."""
        self._feeding(pairs)

    def stream_experts(self, n_bytes: int, part_bytes: tuple[int, int, int]) -> None:
        """Allocate for experts that have no slot: two staging buffers of n_bytes, and what misses pass through.

        part_bytes: of the largest gate, up and down of any layer.
        """
        self.streaming = Streaming(self.device, self.limits, n_bytes)
        self.routing.pass_through(part_bytes)

    def prepare(self, array: Array, value: Quantized | Halves | None, norm: Array | None = None) -> None:
        """Remember what an op made of `array`, or of its norm, for those that read it before anything writes it."""
        self.writes(array)
        first, of = self.device.pointer(array), 0 if norm is None else self.device.pointer(norm)
        made = _Prepared(first, first + int(array.nbytes), array.shape, value, of)
        self._prepared = [*self._prepared[1 - MOST_PREPARED :], made]

    def writes(self, *arrays: Array | None) -> None:
        """Forget what was prepared of memory that an op writes: each says so (tests/ops/test_cuda_prepared.py)."""
        for array in arrays:
            if self._prepared and array is not None:
                first, end = (at := self.device.pointer(array)), at + int(array.nbytes)
                self._prepared = [known for known in self._prepared if end <= known.first or known.end <= first]

    def forget(self) -> None:
        """Forget whatever was prepared: a step begins, and captured ones may have run since the last, or one failed."""
        self._prepared = []
        if self._routing is not None:
            self._routing.take()

    def prepared(self, array: Array, norm: Array | None = None) -> Quantized | Halves | None:
        """What was prepared of `array`, or of its norm, if nothing has written there since; None if not."""
        at = self.device.pointer(array), array.shape, 0 if norm is None else self.device.pointer(norm)
        found = [known for known in self._prepared if (known.first, known.shape, known.norm) == at]
        if not found:
            return None
        known = found[0]
        if isinstance(known.value, Halves) and known.value is not self.gemm.newest:
            return None  # another array's halves have taken their place
        return known.value

    def prepared_norm(self, array: Array, norm: Array) -> Quantized | None:
        """The norm of `array` in 8 bits, if it was prepared and nothing has written there since."""
        known = self.prepared(array, norm)
        return known if isinstance(known, Quantized) else None

    def halves(self, array: Array) -> Halves:
        """`array` [T, K] for a product of a long step."""
        known = self.prepared(array)
        if not isinstance(known, Halves):
            self.prepare(array, known := self.gemm.to_halves(array))
        return known

    def close(self) -> None:
        """The device releases everything at once when it closes."""


class Streaming:
    """The missing experts of the layers to come, on their way to staging memory."""

    def __init__(self, device: Device, limits: Limits, n_bytes: int) -> None:
        self.staging = Staging(device, limits, n_bytes)
        self.stream = device.stream(priority=-1)
