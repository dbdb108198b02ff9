"""Forks: prompts of any length, whole, that requests which are sure to come go on from (engine/serving/families.py)."""

from __future__ import annotations

from engine.ground.errors import CapacityError
from engine.memory.blocks import Sequence
from engine.memory.host import Claim
from engine.memory.kv import Fork, KVCache


class Forks:
    """Those of a cache. Each is held until it is dropped, or until blocks are short and its turn comes."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._claims: dict[Fork, Claim | None] = {}  # the oldest first
        self._begun: Fork | None = None  # that a sequence is being begun from

    def make(self, sequence: Sequence) -> Fork | None:
        """What others go on from, after all tokens of a sequence; None where there is no room for it."""
        n_bytes = self._kv.snapshot_bytes(sequence.length) if self._kv.needs_snapshots else 0
        claim = self._kv.host.claim("forks", n_bytes) if n_bytes else None
        if n_bytes and claim is None:
            return None
        try:
            fork = self._kv.fork(sequence)
        except CapacityError:
            if claim is not None:
                self._kv.host.drop(claim)
            return None
        self._claims[fork] = claim
        return fork

    def begin(self, sequence: Sequence, fork: Fork) -> None:
        """Let an empty sequence go on from a fork that is not gone; CapacityError where a pool is short."""
        self._begun = fork
        try:
            self._kv.begin(sequence, fork.length, fork.shared, fork.snapshot, fork.rest)
            sequence.exact = fork.exact
        finally:
            self._begun = None

    def drop(self, fork: Fork) -> None:
        """Give up a fork, if that has not been done."""
        if not fork.gone:
            claim = self._claims.pop(fork)
            if claim is not None:
                self._kv.host.drop(claim)
            self._kv.drop(fork)

    def give_up(self) -> bool:
        """Give up the oldest that no sequence is being begun from; False: there is none."""
        fork = next((fork for fork in self._claims if fork is not self._begun), None)
        if fork is not None:
            self.drop(fork)
        return fork is not None

    def clear(self) -> None:
        """Give up all."""
        for fork in list(self._claims):
            self.drop(fork)
