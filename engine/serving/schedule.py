"""Who is served next: a pure function from what runs, what waits, the room and the time owed to the next unit of work.

Nothing here knows a model, a cache or a clock. `decide` names a unit, the loop (scheduler.py) does it and looks again;
whoever has to make room is named by `gives_way`. The rules, in the order in which they are asked:

1. Who has waited longest begins as soon as there is room, as long as there are places. One whose form is being compiled
   or whose prompt another is to read is passed over. Who has to wait for room is passed, too, by those who have some,
   as far as that keeps nothing from him: when all have ended that began in their turn, he has room beside them. (Batch
   systems call it backfilling: Lifka, "The ANL/IBM SP scheduling system", 1995.) A score runs alone. Pinned slots
   follow the counts only before one begins beside nobody.
2. A token whose mask was late is drawn as soon as the mask has come.
3. Who runs ahead of the host stops when anybody else wants a step.
4. Prompts are read in turn, a chunk each; then those that decode get the time that it took before the next chunk. The
   chunks of several share a step as far as it has room (`joins`): whoever is next fills it as it would alone.
5. When nothing runs and nothing waits, files are written that were missed; then what was decoded is read again as a
   prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

GROWTH_TOKENS = 256  # of a reply, for which there is to be room before another request begins

State: TypeAlias = Literal["reading", "decoding", "held", "due"]
Wants: TypeAlias = Literal["place", "room"]


@dataclass(frozen=True, slots=True)
class Running:
    """One that runs.

    number: its place, 0, 1, ... turn: when it began, counted. state: its prompt is read, or it decodes, or its next
    token is held for a mask that is late, or that has come. to_read, left: tokens of its own to be in the cache before
    the next is drawn, all of them, and those that may still be drawn. cached: positions in the cache; None: it holds
    nothing. formed: a form binds its reply, so it never runs ahead. passed: it began before one who waited longer.
    """

    id: int
    number: int
    turn: int
    state: State
    to_read: int
    left: int
    cached: int | None
    score: bool = False
    formed: bool = False
    passed: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """One that waits. to_read, left: as of `Running`. ready: its form is compiled. reader: who reads its prompt.

    back: it ran before, and was put back.
    """

    id: int
    to_read: int
    left: int
    score: bool = False
    ready: bool = True
    reader: int | None = None
    back: bool = False

    @property
    def may_begin(self) -> bool:
        """Whether it waits for nothing but its turn and room."""
        return self.ready and self.reader in (None, self.id)


@dataclass(frozen=True, slots=True)
class Room:
    """Blocks of `block_tokens` positions that are free, or would be if prefixes gave theirs up; free recurrent states.

    states: None for a model without recurrent layers. total: blocks that there are.
    """

    free: int
    reclaimable: int
    block_tokens: int
    states: int | None = None
    total: int = 0

    def holds(self, lengths: Sequence[int]) -> bool:
        """Whether new sequences of so many tokens, and a few more each, fit beside what is held."""
        if self.states is not None and self.states < len(lengths):
            return False
        return self._blocks(lengths) <= self.free + self.reclaimable

    def would_hold(self, lengths: Sequence[int]) -> bool:
        """Whether they would fit if nothing else was held."""
        return self._blocks(lengths) <= self.total

    def _blocks(self, lengths: Sequence[int]) -> int:
        return sum(n // self.block_tokens + 1 for n in lengths)


@dataclass(frozen=True, slots=True)
class View:
    """All that a decision depends on.

    running: the oldest first. waiting: who is to begin first, first. places: how many may run. owed_s: time that those
    that decode have to come. last_read: the turn of the one whose prompt was read last. ahead: who runs ahead. crowded:
    one was put back, and nobody has ended since. idle: something could be read again. missed: a file could be written.
    """

    running: tuple[Running, ...]
    waiting: tuple[Waiting, ...]
    room: Room
    places: int
    owed_s: float = 0.0
    last_read: int = -1
    ahead: int | None = None
    crowded: bool = False
    idle: bool = False
    missed: bool = False


@dataclass(frozen=True, slots=True)
class Admit:
    """Let one begin, in a place that is free; first, where `follow`, let the pinned slots follow the counts.

    passes: one who waits longer has no room yet.
    """

    id: int
    number: int
    follow: bool
    passes: bool = False


@dataclass(frozen=True, slots=True)
class Draw:
    """Draw the token whose mask has come."""

    id: int


@dataclass(frozen=True, slots=True)
class Read:
    """Read a chunk of the first one's prompt, and in the same step of the others' in this order, as far as they fit."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decode:
    """Make steps of a token of each, for a while."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ahead:
    """Let one run ahead of the host for a while, or end that: then nothing of it is under way."""

    id: int
    pause: bool


@dataclass(frozen=True, slots=True)
class Recompute:
    """Read a chunk again, as a prompt is, that was decoded."""


@dataclass(frozen=True, slots=True)
class Save:
    """Have a file written that was missed."""


@dataclass(frozen=True, slots=True)
class Wait:
    """There is nothing to do before something comes."""


Work: TypeAlias = Admit | Draw | Read | Decode | Ahead | Recompute | Save | Wait


def decide(view: View) -> Work:
    """The next unit of work. `Admit` and `Draw` are no units of their own: look again after them."""
    admitted = _admitted(view)
    if admitted is not None:
        return admitted
    due = next((task for task in view.running if task.state == "due"), None)
    if due is not None:
        return Draw(due.id)
    reading = [task for task in view.running if task.state == "reading"]
    decoding = [task for task in view.running if task.state == "decoding"]
    if view.ahead is not None:
        return Ahead(view.ahead, pause=bool(reading) or [task.id for task in decoding] != [view.ahead])
    if reading and (not decoding or view.owed_s <= 0):
        return Read(tuple(task.id for task in _readers(reading, view.last_read)))
    if len(decoding) == 1 and not reading and not decoding[0].formed:
        return Ahead(decoding[0].id, pause=False)
    if decoding:
        return Decode(tuple(task.id for task in decoding))
    if view.running or view.waiting:
        return Wait()
    return Save() if view.missed else Recompute() if view.idle else Wait()


def wanting(view: View) -> Wants | None:
    """What those that may begin wait for, where `decide` lets none of them; None: nobody waits, or beside a score.

    Who is first waits for it; the others wait behind him for the same.
    """
    job = next((job for job in view.waiting if job.may_begin), None)
    if job is None or not view.running or job.score or any(task.score for task in view.running):
        return None
    return "place" if len(view.running) >= view.places else None if _fits_beside(job, view) else "room"


def owed(work: Work, owed_s: float, took_s: float) -> float:
    """The time that those that decode have to come, after a unit of work that took so long."""
    if isinstance(work, Read):
        return took_s
    return owed_s - took_s if isinstance(work, Decode) else owed_s


def joins(taken: Sequence[int], part: int, most: int, small: int) -> bool:
    """Whether `part` tokens of a prompt may be in a step with `taken` tokens of others.

    most: tokens of a step. small: of a step whose rows have other bits than in a longer one, 0: of none. So what would
    be such a step by itself never joins a longer one, and several share one as far as it stays one.
    """
    is_small = part <= small
    return all((n <= small) == is_small for n in taken) and space([*taken, part], most, small) >= 0


def space(taken: Sequence[int], most: int, small: int) -> int:
    """How many tokens more a step has room for, as `joins` says, that has `taken` tokens of each."""
    return (min(small, most) if taken and taken[0] <= small else most) - sum(taken)


def gives_way(running: Iterable[Running], needy: int) -> int | None:
    """Who is put back where one needs a block and none is left: the youngest of it and those that hold any.

    None: nobody else holds any, so it can never run. running: the oldest first.
    """
    tasks = list(running)
    holding = [task for task in tasks if not task.score and task.cached is not None and task.id != needy]
    if not holding:
        return None
    return max((*holding, *(task for task in tasks if task.id == needy)), key=lambda task: task.turn).id


def _admitted(view: View) -> Admit | None:
    if len(view.running) >= view.places:
        return None
    able = [job for job in view.waiting if job.may_begin]
    chosen = able[0] if able else None
    if chosen is not None and view.running and not _fits_beside(chosen, view):
        chosen = next((job for job in able[1:] if _may_pass(job, able[0], view)), None)
    if chosen is None:
        return None
    taken = {task.number for task in view.running}
    number = next(n for n in range(view.places) if n not in taken)
    return Admit(chosen.id, number, follow=not view.running, passes=chosen is not able[0])


def _may_pass(job: Waiting, first: Waiting, view: View) -> bool:
    """Whether one may begin though the first has no room: a place, a state and his room are left for him."""
    states, new = view.room.states, sum(task.cached is None for task in view.running) + 2
    if first.score or first.back or len(view.running) + 1 >= view.places or (states is not None and states < new):
        return False
    passed = [max(_needs(task), task.cached or 0) for task in view.running if task.passed]
    return view.room.would_hold([_needs(first), _needs(job), *passed]) and _fits_beside(job, view)


def _fits_beside(job: Waiting, view: View) -> bool:
    """Whether there is room beside those that run and what they still have to read; a score runs alone."""
    if job.score or any(task.score for task in view.running):
        return False
    if view.crowded:  # somebody is waiting for room that nobody has made yet
        return False
    begun = sum(max(0, _needs(task) - task.cached) for task in view.running if task.cached is not None)
    return view.room.holds([_needs(job) + begun, *(_needs(task) for task in view.running if task.cached is None)])


def _needs(job: Running | Waiting) -> int:
    """Positions for which there is to be room, with some of its reply."""
    return job.to_read + min(job.left, GROWTH_TOKENS)


def _readers(reading: Sequence[Running], last_read: int) -> list[Running]:
    """In the order in which they began, from the one after the last on, and then from the first."""
    return sorted(reading, key=lambda task: (task.turn <= last_read, task.turn))
