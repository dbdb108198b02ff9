"""Requests with one prompt, which is read once for all of them: several choices of one question.

A request names another one with the same tokens. The first of a family reads the prompt; the others wait until a fork
of its cache is there (memory/kv.py) and the last row of logits, from which each draws its own first token. If the
reader goes away before, the next in line reads; if there is no room for a fork, each reads for itself, in turn. Where
the first says how many are to name it, the fork is there for those, too, that come when the prompt has been read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.ground.protocol import Generate
from engine.memory.kv import Fork
from engine.ops import F32

MOST_LEFT = 8  # families whose fork waits for others though all that came have ended


@dataclass(slots=True, eq=False)
class Kept:
    """What a family goes on from: the cache after the prompt, and the logits float32 [V] of its last token."""

    fork: Fork
    logits: F32


@dataclass(slots=True, eq=False)
class Family:
    """name: the id by which the others call it. pending: ids of those that have no prompt yet, in the order they came.

    members: ids of all that have not ended. awaited: how many more are said to come.
    """

    name: int
    tokens: tuple[int, ...]
    drop: Callable[[Fork], None]
    pending: list[int] = field(default_factory=list)
    members: set[int] = field(default_factory=set)
    awaited: int = 0
    _kept: Kept | None = None

    @property
    def kept(self) -> Kept | None:
        """What there is to go on from; its blocks may have been given up meanwhile."""
        if self._kept is not None and self._kept.fork.gone:
            self._kept = None
        return self._kept

    def wants(self, request_id: int) -> bool:
        """Whether others wait for the prompt that a request has read, or will."""
        return self.kept is None and (self.awaited > 0 or any(other != request_id for other in self.pending))

    def keep(self, kept: Kept) -> None:
        """Let the others go on from here."""
        self._kept = kept

    def begun(self, request_id: int) -> None:
        """A request has its prompt, or needs none any more; after the last the fork is dropped."""
        if request_id in self.pending:
            self.pending.remove(request_id)
        self.drop_unneeded()

    def drop_unneeded(self) -> None:
        """Drop the fork where nobody is to go on from it any more: all have come, and begun."""
        if self._kept is not None and not self.pending and not self.awaited:
            self.drop(self._kept.fork)
            self._kept = None


class Families:
    """The families of all requests that have not ended. drop: gives a fork up."""

    def __init__(self, drop: Callable[[Fork], None]) -> None:
        self._drop = drop
        self._left: list[Family] = []  # without members, and with a fork for those that are still to come
        self._of: dict[int, Family] = {}  # by the ids of members and by names, whose requests may have ended

    def add(self, request: Generate, unread: Iterable[Generate]) -> None:
        """Take a new request in. unread: those that run or wait and whose prompt has not been read."""
        other = self._of.pop(request.id, None)  # an id that is used again is another request
        if other is not None:
            self._forget(other)
        named = request.same_prompt_as
        if named is None:
            if request.shared_by:
                first_of = Family(request.id, request.tokens, self._drop, awaited=request.shared_by)
                self._join(first_of, request.id)
            return
        family = self._of.get(named)
        if family is None:
            family = Family(named, request.tokens, self._drop)
            first = next((other for other in unread if other.id == named), None)
            if first is not None and first.tokens == request.tokens:
                self._join(family, named)
            self._of[named] = family
        elif family.tokens != request.tokens:
            return
        family.awaited = max(0, family.awaited - 1)
        if family in self._left:
            self._left.remove(family)
        self._join(family, request.id)

    def _join(self, family: Family, request_id: int) -> None:
        self._of[request_id] = family
        family.pending.append(request_id)
        family.members.add(request_id)

    def of(self, request_id: int) -> Family | None:
        """The family of a request that has not ended, if it has one."""
        family = self._of.get(request_id)
        return family if family is not None and request_id in family.members else None

    def reader(self, request_id: int) -> int:
        """Who is to read the request's prompt before it begins: another one, or itself."""
        family = self.of(request_id)
        if family is None or family.kept is not None or request_id not in family.pending:
            return request_id
        return family.pending[0]

    def cancel(self, request_id: int) -> None:
        """Where the last of a family is given up, nobody is to come any more; called before its end."""
        family = self.of(request_id)
        if family is not None and family.members == {request_id}:
            family.awaited = 0

    def end(self, request_id: int) -> None:
        """Forget a request; with the last of a family, all of it, unless it has a fork for some that are to come."""
        family = self.of(request_id)
        if family is None:
            return
        family.members.remove(request_id)
        family.begun(request_id)
        if request_id != family.name:
            del self._of[request_id]
        if family.members or self._of.get(family.name) is not family:
            return
        if family.awaited and family.kept is not None:
            self._left.append(family)
            family = self._left.pop(0) if len(self._left) > MOST_LEFT else None
        if family is not None:
            self._forget(family)

    def _forget(self, family: Family) -> None:
        """Let nobody come to a family any more."""
        if family in self._left:
            self._left.remove(family)
        if self._of.get(family.name) is family:
            del self._of[family.name]
        family.awaited = 0
        family.drop_unneeded()

    def __len__(self) -> int:
        """Ids that are known."""
        return len(self._of)
