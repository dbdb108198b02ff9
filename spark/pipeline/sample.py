"""Which windows' routing a calibration records, to choose by it what the slots should do."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.formats.trace import RoutingTrace, estimate_bytes, part_paths, read_routing
from engine.ground.errors import SparkError
from engine.placing import evidence
from engine.placing.evidence import MIN_ROOTS
from spark.pipeline.tokens import Window
from spark.speech.sessions import root_of

SAMPLE_BYTES = 1 << 29  # of the routing that is chosen by, at most
RECORDED_BYTES = 1 << 30  # of all that is recorded, what later sessions displaced included


@dataclass(slots=True)
class _Root:
    """What is recorded of a root session: its first windows, until it has its share or one is too long."""

    name: str
    tokens: int = 0
    generated: int = 0
    full: bool = False


class Sample:
    """The beginnings of so many root sessions as can be afforded, the first ones in the order of a hash of their ids.

    Windows are offered in the order of the file, and each is taken or not by those up to it: sessions that come later
    displace others, and what was displaced never comes back. So what is recorded of a file does not depend on where
    calibration ends, and one that goes on, to the same length or another, has all it needs.

    No root has more than the 2 x MIN_ROOTS-th part, and roots are displaced only by what is above the whole: from a
    file of enough roots there are always enough. Twice as many generated tokens are recorded as are affordable, since
    evidence.choose shares what it can afford among unequal roots.
    """

    def __init__(self, n_layer: int, n_used: int) -> None:
        self._row_bytes = estimate_bytes(1, n_layer, n_used, 0, hidden=False)
        self._generated = 2 * evidence.affordable(n_layer, n_used)
        self._share = self._generated // (2 * MIN_ROOTS)
        self._tokens = SAMPLE_BYTES // self._row_bytes
        self._left = RECORDED_BYTES // self._row_bytes
        self._roots: dict[bytes, _Root] = {}
        self._bound: bytes | None = None  # roots from this hash on are displaced
        self.has_too_long = False  # a window that is above a root's share alone was not taken

    @property
    def rule(self) -> str:
        """What is taken depends on nothing but this and the windows."""
        return f"{self._generated} of {self._tokens} tokens"

    @property
    def tokens(self) -> dict[str, int]:
        """The roots of the sample, and how many of each one's tokens were taken: the first ones."""
        return {root.name: root.tokens for root in self._roots.values() if root.tokens}

    def __contains__(self, session_id: object) -> bool:
        """Whether a session is of one of these roots."""
        return isinstance(session_id, str) and _key(root_of(session_id)) in self._roots

    def takes(self, window: Window) -> bool:
        """Whether the next window of the file is recorded."""
        name = root_of(window.session_id)
        key = _key(name)
        if self._bound is not None and key >= self._bound:
            return False
        root = self._roots.setdefault(key, _Root(name))
        n_tokens, share = len(window.tokens), self._tokens // (2 * MIN_ROOTS)
        self.has_too_long |= n_tokens > share
        root.full |= root.tokens + n_tokens > share or root.generated >= self._share
        if root.full or n_tokens > self._left:
            self._left = 0 if n_tokens > self._left else self._left
            root.full = True
            return False
        self._left -= n_tokens
        root.tokens += n_tokens
        root.generated += int(np.count_nonzero(window.generated))
        self._displace()
        return key in self._roots

    def _displace(self) -> None:
        generated = {key: min(root.generated, self._share) for key, root in self._roots.items()}
        tokens = {key: root.tokens for key, root in self._roots.items()}
        more_generated, more = sum(generated.values()) - self._generated, sum(tokens.values()) - self._tokens
        if more_generated <= 0 and more <= 0:
            return
        for key in sorted(self._roots, reverse=True):
            # The sums up to this root, inclusive, are above what can be had: it goes, and all that would come after it.
            self._bound = key
            more_generated, more = more_generated - generated[key], more - tokens[key]
            del self._roots[key]
            if more_generated <= 0 and more <= 0:
                return


def recorded(
    routing: Path, model_id: str, sample: Sample, order: Mapping[tuple[str, int], int], ctx_tokens: int
) -> RoutingTrace | None:
    """The routing of the sample, whatever else is in the folder and in any order; None where none was recorded.

    order: places of windows in the file. What is chosen depends on the order of sessions, and on which tokens of one
    are the first.
    """
    if not routing.exists() or not part_paths(routing):
        return None
    trace = read_routing(routing, model_id, sample).in_order(order, ctx_tokens)
    return evidence.beginnings(trace, sample.tokens)


def _key(root: str) -> bytes:
    return hashlib.sha256(root.encode()).digest()


@contextlib.contextmanager
def naming(routing: Path, *, traced: bool) -> Iterator[None]:
    """Say of routing that could not be written what it is for; whoever writes it takes it for the trace of --trace.

    routing: its folder. traced: it is that trace.
    """
    try:
        yield
    except SparkError as error:
        if traced or not error.message.startswith(f"cannot write the trace {routing.resolve()}"):
            raise
        raise SparkError(
            error.message.replace("the trace", "the routing by which slots are managed,", 1),
            hint="make room there and run it again with --resume, or let --out name a file where there is room",
        ) from error
