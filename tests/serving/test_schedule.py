"""Scheduling without a model: whatever comes, the rules of schedule.py hold at every unit of work."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.serving import schedule
from engine.serving.schedule import (
    Admit,
    Ahead,
    Decode,
    Draw,
    Read,
    Recompute,
    Room,
    Running,
    Save,
    State,
    View,
    Wait,
    Waiting,
    Work,
    decide,
    gives_way,
    owed,
)

PLACES, BLOCKS, CHUNK, SMALL = 3, 48, 8, 2


@dataclass(eq=False)
class Job:
    """A request of the simulation. late: of its tokens, which has a late mask, for how many units."""

    id: int
    arrives: int
    prompt: int
    reply: int
    score: bool = False
    form: int | None = None  # units until it is compiled
    late: int = 0
    after: int | None = None  # whose prompt it has
    made: int = 0
    cached: int | None = None
    reading: bool = True
    held: int = 0
    turn: int = -1
    number: int = -1
    begun: bool = False  # once
    passed: bool = False  # it began before one who waited longer

    @property
    def to_read(self) -> int:
        return self.prompt + max(0, self.made - 1)


@dataclass
class Simulation:
    """An engine of counters; each look at it checks what was decided against the rules, told another way."""

    jobs: list[Job]
    times: list[float]  # that units take, over and over
    block: int = 1
    states: int | None = None
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    ahead: Job | None = None
    units: int = 0
    releases: int = 0
    put_back_at: int = -1
    last_read: int = -1
    owed_s: float = 0.0
    turns: int = 0
    put_back: list[Job] = field(default_factory=list)  # and have not begun again, the last first
    read_since: dict[int, set[int]] = field(default_factory=dict)  # turns of others that read first since one did
    decoded_s: float = 0.0  # since a chunk was read
    chunk_s: float = 0.0
    done: list[int] = field(default_factory=list)
    idle_units: int = 0
    together: int = 0  # chunks in one step, at most
    passes: int = 0  # that began before one who waited longer

    # --- what there is ----------------------------------------------------------------------------

    def blocks(self, job: Job) -> int:
        return 0 if job.cached is None else -(-job.cached // self.block)

    @property
    def free(self) -> int:
        return BLOCKS // self.block - sum(map(self.blocks, self.running))

    def reader(self, job: Job) -> int:
        first = next((other for other in self.jobs if other.id == job.after), None)
        there = first is not None and (first in self.waiting or first in self.running)
        return first.id if first is not None and there and first.reading and not job.begun else job.id

    def state(self, job: Job) -> State:
        return "reading" if job.reading else "decoding" if not job.late else "held" if job.held else "due"

    def view(self) -> View:
        free_states = None if self.states is None else self.states - sum(j.cached is not None for j in self.running)
        return View(
            tuple(
                Running(j.id, j.number, j.turn, self.state(j), j.to_read, j.reply - j.made, j.cached, j.score,
                        j.form is not None, j.passed)
                for j in self.running
            ),
            tuple(
                Waiting(j.id, j.to_read, j.reply - j.made, j.score, j.form is None or j.form <= self.units,
                        self.reader(j), j in self.put_back)
                for j in self.waiting
            ),
            Room(self.free, 0, self.block, free_states, BLOCKS // self.block), PLACES, self.owed_s, self.last_read,
            None if self.ahead is None else self.ahead.id, self.put_back_at == self.releases, idle=True,
        )  # fmt: skip

    # --- what is done -----------------------------------------------------------------------------

    def run(self) -> None:
        """Until all have ended, and a while of nothing; every decision is checked."""
        todo = sorted(self.jobs, key=lambda job: job.arrives)
        limit = 60 * sum(job.prompt + job.reply + 20 for job in self.jobs) + max((j.form or 0) for j in self.jobs)
        while todo or self.waiting or self.running or not self.idle_units:
            while todo and todo[0].arrives <= self.units:
                self.waiting.append(todo.pop(0))
            view = self.view()
            work = decide(view)
            assert decide(view) == work
            self.check(view, work)
            took = self.times[self.units % len(self.times)]
            self.do(work, took)
            self.owed_s = owed(work, self.owed_s, took)
            self.units += not isinstance(work, Admit | Draw)
            for job in self.running:
                job.held = max(0, job.held - 1)
            assert self.units < limit, "it does not end"
        assert sorted(self.done) == sorted(job.id for job in self.jobs)

    def do(self, work: Work, took: float) -> None:
        match work:
            case Admit(request_id, number, _, passes):
                job = self.by_id(self.waiting, request_id)
                self.waiting.remove(job)
                job.passed = passes
                job.number, job.turn, job.begun = number, self.turns, True
                self.turns += 1
                self.running.append(job)
                self.read_since[job.turn] = set()
            case Draw(request_id):
                job = self.by_id(self.running, request_id)
                job.late = 0
                self.drawn(job)
            case Read(ids):
                self.chunk_s, self.decoded_s = took, 0.0
                self.read([self.by_id(self.running, i) for i in ids])
            case Decode(ids):
                self.decoded_s += took
                for job in [self.by_id(self.running, i) for i in ids]:
                    if job in self.running and self.make_room(job, (job.cached or 0) + 1):
                        job.cached = (job.cached or 0) + 1
                        self.drawn(job)
            case Ahead(request_id, pause):
                self.ahead = job = self.by_id(self.running, request_id)
                for _ in range(1 if pause else 3):
                    if job in self.running and self.make_room(job, (job.cached or 0) + 1):
                        job.cached = (job.cached or 0) + 1
                        self.drawn(job)
                if pause or job not in self.running:
                    self.ahead = None
            case Recompute():
                self.idle_units += 1

    def read(self, jobs: list[Job]) -> None:
        """A chunk of the first, and of those that can join it."""
        for read in self.read_since.values():
            read.add(jobs[0].turn)
        taken: list[int] = []
        passed = False
        for job in jobs:
            n = min(job.to_read - (job.cached or 0), CHUNK, CHUNK if not taken else schedule.space(taken, CHUNK, SMALL))
            begun = (job.cached or 0) + n
            if taken and n < min(job.to_read - (job.cached or 0), CHUNK) and job.to_read - begun <= SMALL:
                n = 0  # what would be left is computed otherwise
            free = not taken or self.free >= -(-begun // self.block) - self.blocks(job)
            if taken and (n <= 0 or not free or not schedule.joins(taken, n, CHUNK, SMALL)):
                passed = True
                continue
            if not passed:
                self.last_read = job.turn
            self.read_since[job.turn] = set()
            if self.make_room(job, begun):
                taken.append(n)
                self.together = max(self.together, len(taken))
                job.cached = begun
                if begun == job.to_read:
                    job.reading = False
                    if job.score:
                        self.end(job)
                    elif not job.made:
                        self.drawn(job)
            else:
                return
        assert sum(taken) <= CHUNK
        assert all(n > SMALL for n in taken) or sum(taken) <= SMALL

    def by_id(self, jobs: list[Job], request_id: int) -> Job:
        return next(job for job in jobs if job.id == request_id)

    def drawn(self, job: Job) -> None:
        job.made += 1
        if job.made >= job.reply:
            self.end(job)
        elif job.form is not None and job.made % 3 == 0:
            job.late, job.held = 1, job.made % 5

    def end(self, job: Job) -> None:
        self.running.remove(job)
        self.read_since.pop(job.turn)
        job.cached = None
        job.reading = False
        self.releases += 1
        self.done.append(job.id)

    def make_room(self, job: Job, n: int) -> bool:
        """Whether one may have n positions; others are put back for it, or itself."""
        while self.free < -(-n // self.block) - self.blocks(job):
            tasks = self.view().running
            chosen = gives_way(tasks, job.id)
            assert chosen is not None, "a request that fits alone fails"
            victim = self.by_id(self.running, chosen)
            holding = [other for other in self.running if other.cached is not None or other is job]
            # The youngest gives way, and never the oldest of all that hold anything.
            assert victim.turn == max(other.turn for other in holding)
            assert victim.turn > min(other.turn for other in holding) and not victim.score
            self.running.remove(victim)
            self.read_since.pop(victim.turn)
            victim.cached, victim.reading, victim.late = None, True, 0
            self.waiting.insert(0, victim)
            self.put_back.insert(0, victim)
            self.put_back_at = self.releases
            if victim is job:
                return False
        return True

    # --- the rules --------------------------------------------------------------------------------

    def check(self, view: View, work: Work) -> None:
        states = [task.state for task in view.running]
        numbers = [task.number for task in view.running]
        assert len(set(numbers)) == len(numbers) <= PLACES and set(numbers) <= set(range(PLACES))
        if any(task.score for task in view.running):
            assert len(view.running) == 1, "a score is not alone"
        match work:
            case Admit(request_id, number, follow, passes):
                self.check_admission(view, request_id, number, follow, passes)
            case Draw(request_id):
                assert self.state(self.by_id(self.running, request_id)) == "due"
            case Read(ids):
                assert view.ahead is None
                assert sorted(ids) == sorted(task.id for task in view.running if task.state == "reading")
                if "decoding" in states:
                    assert self.decoded_s >= self.chunk_s - 1e-9, "those that decode are owed time"
                turn = self.by_id(self.running, ids[0]).turn
                for job in self.running:  # before one is read, each of the others is read first once, and not twice
                    if job.reading and job.turn != turn:
                        assert turn not in self.read_since[job.turn], f"request {job.id} starves"
            case Decode(ids):
                assert view.ahead is None and ids and {*ids} == {t.id for t in view.running if t.state == "decoding"}
                if "reading" in states:
                    assert self.decoded_s < self.chunk_s, "a chunk waits for time that nobody is owed"
            case Ahead(request_id, pause):
                alone = states.count("decoding") == 1 and "reading" not in states
                assert alone == (not pause)
                assert self.by_id(self.running, request_id).form is None
                assert not pause or view.ahead == request_id
            case Recompute():
                assert not view.running and not view.waiting, "a busy server does idle work"
            case Wait():
                assert view.running or view.waiting
                assert set(states) <= {"held"}
                beginning = [job for job in view.waiting if job.may_begin]
                assert not beginning or view.running, "nothing runs, and who could begin waits"

    def check_admission(self, view: View, request_id: int, number: int, follow: bool, passes: bool) -> None:
        assert follow == (not view.running), "pinned slots follow inside a request, or not between two"
        assert number not in {task.number for task in view.running}
        job = self.by_id(self.waiting, request_id)
        before = list(itertools.takewhile(lambda other: other is not job, self.waiting))
        able = [other for other in before if (other.form or 0) <= self.units and self.reader(other) == other.id]
        assert passes == bool(able), "somebody is passed over"
        growth = schedule.GROWTH_TOKENS
        if able:  # the first of them has no room, and will have it when those have ended that began in their turn
            first, beside = able[0], [other for other in self.running if other.passed]
            assert not first.score and first not in self.put_back and len(self.running) + 2 <= PLACES
            needs = [max(j.cached or 0, j.to_read + min(j.reply - j.made, growth)) for j in (first, job, *beside)]
            assert sum(-(-n // self.block) for n in needs) <= BLOCKS // self.block, "who waits longest is kept waiting"
            assert self.states is None or len(self.running) + 2 <= self.states
            self.passes += 1
            needs = [max(j.cached or 0, j.to_read + min(j.reply - j.made, growth)) for j in (*self.running, first)]
            blocks = sum(-(-n // self.block) for n in needs) + len(needs)
            assert blocks > BLOCKS // self.block, "the first had room"
        assert (job.form or 0) <= self.units and self.reader(job) == job.id
        if self.put_back and not passes:
            assert job is self.put_back.pop(0), "who was put back is not the first again"
            assert not view.running or self.put_back_at != self.releases, "nobody has ended since it was put back"
        if view.running:
            assert not job.score
            needs = [max(j.cached or 0, j.to_read + min(j.reply - j.made, growth)) for j in (*self.running, job)]
            # Blocks that are begun twice are not counted; replies get longer than that, too, and then one is put back.
            slack = len(self.running) if self.block > 1 else 0
            assert sum(-(-n // self.block) for n in needs) <= BLOCKS // self.block + slack, "there is no room"
            assert self.states is None or len(self.running) < self.states


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    made: list[Job] = []
    for i in range(draw(st.integers(1, 9))):
        score = draw(st.integers(0, 9)) == 0
        prompt = draw(st.integers(1, 30))
        job = Job(
            i, draw(st.integers(0, 40)), prompt, 1 if score else draw(st.integers(1, BLOCKS - 4 - prompt)), score,
            None if score else draw(st.sampled_from([None, None, 0, 5, 50])),
        )  # fmt: skip
        same = [other for other in made if not other.score and other.after is None]
        if same and not score and draw(st.integers(0, 3)) == 0:
            first = draw(st.sampled_from(same))
            job.after, job.prompt = first.id, first.prompt
            job.reply = min(job.reply, BLOCKS - 4 - job.prompt)
        made.append(job)
    return made


TIMES = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=7)


@pytest.fixture(autouse=True)
def _small_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "GROWTH_TOKENS", 4)


@given(jobs(), TIMES, st.sampled_from([1, 4]), st.sampled_from([None, None, 2, 4]))
@settings(max_examples=300)
def test_the_rules_hold_whatever_comes(jobs: list[Job], times: list[float], block: int, states: int | None) -> None:
    Simulation(jobs, times, block, states).run()


def test_the_simulation_meets_what_the_rules_are_about() -> None:
    """A cache that gets full, a form that is late, a score among others, a prompt of two: nothing is vacuous."""
    made = [
        Job(0, 0, 20, 24), Job(1, 0, 10, 30), Job(2, 1, 9, 30, form=3), Job(3, 2, 9, 5, form=90),
        Job(4, 2, 30, 1, True), Job(5, 2, 20, 9, after=0), Job(6, 90, 5, 40),
    ]  # fmt: skip
    simulation = Simulation(made, [3.0, 0.5, 1.0])
    seen: set[type] = set()
    check = simulation.check

    def watched(view: View, work: Work) -> None:
        seen.add(type(work))
        check(view, work)

    simulation.check = watched  # type: ignore[method-assign]
    simulation.run()
    assert seen == {Admit, Draw, Read, Decode, Ahead, Recompute, Wait}
    assert simulation.put_back_at >= 0 and simulation.together > 1


def test_short_ones_pass_one_that_waits_for_room_and_keep_it_from_nothing() -> None:
    """However many come: what runs beside it leaves it a place and its room, so it begins when the first has ended."""
    shorts = [Job(10 + i, 2 + i, 2, 3) for i in range(30)]
    simulation = Simulation([Job(0, 0, 10, 30), Job(1, 1, 30, 5), *shorts], [1.0])
    begun: list[tuple[int, bool]] = []
    check = simulation.check

    def watched(view: View, work: Work) -> None:
        if isinstance(work, Admit):
            begun.append((work.id, 0 in simulation.done))
        check(view, work)

    simulation.check = watched  # type: ignore[method-assign]
    simulation.run()
    passed = [request_id for request_id, _ in begun[: begun.index((1, True))]]
    assert passed[0] == 0 and passed[1:] == list(range(10, 10 + len(passed) - 1)) and len(passed) > 4
    assert next(request_id for request_id, ended in begun if ended) == 1


def test_nobody_begins_before_those_that_were_put_back_have_room() -> None:
    """There may be room by the numbers, of which replies that grow make nothing."""
    running = (Running(1, 0, 0, "decoding", 5, 5, 5),)
    waiting = (Waiting(2, 5, 5), Waiting(3, 1, 1))
    view = View(running, waiting, Room(99, 0, 1), PLACES, crowded=True)
    assert decide(view) == Ahead(1, pause=False)
    assert decide(replace(view, crowded=False)) == Admit(2, 1, follow=False)
    assert decide(replace(view, running=())) == Admit(2, 0, follow=True)  # nobody is left who could make room
    assert decide(replace(view, crowded=False, room=Room(4, 18, 1))) == Admit(2, 1, follow=False)
    assert decide(replace(view, crowded=False, room=Room(4, 9, 1))) == Ahead(1, pause=False)


# --- what a decision is made of, each by itself -------------------------------------------------------


@given(
    st.lists(st.integers(0, 40), max_size=4), st.integers(0, 20), st.integers(0, 20), st.integers(1, 8),
    st.none() | st.integers(0, 4),
)  # fmt: skip
def test_room_is_of_whole_blocks_and_of_states(
    lengths: list[int], free: int, reclaimable: int, block: int, states: int | None
) -> None:
    """A sequence of n tokens and one more has so many blocks begun, and a state of its own."""
    blocks = sum(len(range(0, n + 1, block)) for n in lengths)
    enough = states is None or len(lengths) <= states
    assert Room(free, reclaimable, block, states).holds(lengths) == (enough and blocks <= free + reclaimable)
    assert Room(0, blocks, block).holds(lengths) and not Room(0, blocks - 1, block).holds(lengths)


@pytest.mark.parametrize(
    ("ready", "reader", "may"),
    [(True, None, True), (True, 7, True), (True, 8, False), (False, None, False), (False, 7, False)],
)
def test_one_may_begin_whose_form_is_there_and_whose_prompt_nobody_else_is_to_read(
    ready: bool, reader: int | None, may: bool
) -> None:
    assert Waiting(7, 1, 1, ready=ready, reader=reader).may_begin == may
    waiting = (Waiting(7, 1, 1, ready=ready, reader=reader), Waiting(9, 1, 1))
    view = View((), waiting, Room(9, 0, 1), PLACES)
    assert decide(view) == Admit(7 if may else 9, 0, follow=True)


running_ones = st.lists(
    st.builds(
        Running, st.integers(0, 99), st.integers(0, 9), st.integers(0, 99),
        st.sampled_from(["reading", "decoding", "held", "due"]), st.integers(1, 20), st.integers(1, 20),
        st.none() | st.integers(0, 30), st.booleans(), st.booleans(),
    ),
    min_size=1, max_size=5, unique_by=(lambda task: task.id, lambda task: task.turn, lambda task: task.number),
).map(lambda tasks: tuple(sorted(tasks, key=lambda task: task.turn)))  # fmt: skip


@given(running_ones, st.data())
def test_the_youngest_that_holds_anything_gives_way(running: tuple[Running, ...], data: st.DataObject) -> None:
    """Not a score, nor who holds nothing, but for the one that needs the block; nobody where no other holds any."""
    needy = data.draw(st.sampled_from(running)).id
    others = {t.turn: t.id for t in running if t.id != needy and t.cached is not None and not t.score}
    own = {t.turn: t.id for t in running if t.id == needy}
    expected = (others | own)[max(others | own)] if others else None
    assert gives_way(running, needy) == gives_way(iter(running), needy) == expected


@given(running_ones, st.floats(-1, 1), st.integers(-1, 99), st.booleans(), st.data())
def test_the_rules_are_asked_in_their_order(
    running: tuple[Running, ...], owed_s: float, last_read: int, idle: bool, data: st.DataObject
) -> None:
    """Where nobody can begin: late tokens, who is ahead, prompts in turn while no time is owed, then steps."""
    decoding = [task for task in running if task.state == "decoding"]
    reading = [task for task in running if task.state == "reading"]
    due = [task for task in running if task.state == "due"]
    ahead = data.draw(st.sampled_from([None, *(task.id for task in decoding)]))
    view = View(running, (), Room(9, 0, 1), 9, owed_s, last_read, ahead, idle=idle)
    if due:
        expected: Work = Draw(due[0].id)
    elif ahead is not None:
        expected = Ahead(ahead, pause=bool(reading) or len(decoding) > 1)
    elif reading and not (decoding and owed_s > 0):
        later = [task.id for task in reading if task.turn > last_read]  # who runs is given in the order of turns
        expected = Read((*later, *(task.id for task in reading if task.turn <= last_read)))
    elif decoding and not reading and len(decoding) == 1 and not decoding[0].formed:
        expected = Ahead(decoding[0].id, pause=False)
    else:
        expected = Decode(tuple(task.id for task in decoding)) if decoding else Wait()
    assert decide(view) == expected


def test_idle_work_is_done_where_there_is_some_and_nothing_else() -> None:
    empty = View((), (), Room(9, 0, 1), PLACES)
    waiting, held = (Waiting(1, 1, 1, ready=False),), (Running(1, 0, 0, "held", 1, 1, 1),)
    assert decide(empty) == Wait() and decide(replace(empty, idle=True)) == Recompute()
    assert decide(replace(empty, missed=True)) == decide(replace(empty, idle=True, missed=True)) == Save()
    for busy in (replace(empty, waiting=waiting), replace(empty, running=held)):
        assert decide(replace(busy, idle=True, missed=True)) == Wait()


@given(running_ones, st.integers(1, 30), st.integers(1, 30), st.booleans(), st.integers(0, 60), st.integers(1, 8))
def test_one_begins_beside_others_where_all_they_need_fits(
    running: tuple[Running, ...], to_read: int, left: int, score: bool, free: int, places: int
) -> None:
    """To those that hold blocks so many are to be added; those that hold none need whole ones of their own."""
    growth = schedule.GROWTH_TOKENS
    positions = to_read + min(left, growth)
    for task in running:
        positions += max(0, task.to_read + min(task.left, growth) - (task.cached or 0))
    n_new = 1 + sum(task.cached is None for task in running)
    fits = not score and not any(task.score for task in running) and positions + n_new <= free
    work = decide(View(running, (Waiting(100, to_read, left, score),), Room(free, 0, 1), places))
    numbers = {task.number for task in running}
    place = min(set(range(places + 5)) - numbers)
    if fits and len(running) < places:
        assert work == Admit(100, place, follow=False)
    else:
        assert not isinstance(work, Admit)


@pytest.mark.parametrize(
    ("work", "owed_s"),
    [(Read((1,)), 3.0), (Decode((1,)), 2.0), (Ahead(1, False), 5.0), (Recompute(), 5.0), (Wait(), 5.0), (Draw(1), 5.0)],
)
def test_a_chunk_of_a_prompt_is_owed_to_those_that_decode_until_they_had_it(work: Work, owed_s: float) -> None:
    assert owed(work, 5.0, 3.0) == owed_s


def test_in_the_beginning_nobody_has_read_is_owed_or_was_put_back() -> None:
    both = tuple(Running(i, i, i, "reading", 3, 3, None) for i in range(2))
    assert decide(View(both, (), Room(9, 0, 1), PLACES)) == Read((0, 1))
    decoding = Running(2, 2, 2, "decoding", 3, 3, 3)
    assert decide(View((*both, decoding), (), Room(9, 0, 1), PLACES)) == Read((0, 1))
    assert decide(View((decoding,), (Waiting(3, 1, 1),), Room(99, 0, 1), PLACES)) == Admit(3, 0, follow=False)


def test_no_more_run_than_there_are_places() -> None:
    running = tuple(Running(i, i, i, "decoding", 5, 5, 5) for i in range(PLACES))
    view = View(running, (Waiting(9, 1, 1),), Room(99, 0, 1), PLACES)
    assert decide(view) == Decode(tuple(range(PLACES)))
    assert decide(replace(view, running=running[:1] + running[2:])) == Admit(9, 1, follow=False)


@given(st.lists(st.integers(1, 60), max_size=8), st.integers(0, 32), st.integers(33, 100))
def test_what_is_computed_otherwise_never_shares_a_step(parts: list[int], small: int, most: int) -> None:
    """Chunks that come one after the other: a step is short or long, and each is in it what it would be alone."""
    taken: list[int] = []
    for part in (min(part, most) for part in parts):
        assert schedule.space(taken, most, small) >= part or not schedule.joins(taken, part, most, small)
        if schedule.joins(taken, part, most, small):
            taken.append(part)
            assert sum(taken) <= most
        else:
            assert taken  # alone any chunk is a step
            of_one_kind = (part <= small) == (taken[0] <= small)
            assert not of_one_kind or sum(taken) + part > (small if part <= small else most)
    assert all(n > small for n in taken) or sum(taken) <= small


@given(running_ones, st.lists(st.booleans(), max_size=3), st.booleans(), st.integers(0, 90), st.integers(1, 6))
def test_what_they_wait_for_is_a_place_or_room(
    running: tuple[Running, ...], ready: list[bool], score: bool, free: int, places: int
) -> None:
    """Where nobody begins who may: no place, or else no room; beside a score, and with nobody there, it is neither."""
    waiting = tuple(Waiting(100 + i, 5, 9, score, ready=is_ready) for i, is_ready in enumerate(ready))
    view = View(running, waiting, Room(free, 0, 1), places)
    wants = schedule.wanting(view)
    if not any(ready) or score or any(task.score for task in running):
        assert wants is None
    elif len(running) >= places:
        assert wants == "place"
    else:
        assert wants == (None if isinstance(decide(view), Admit) else "room")
    assert schedule.wanting(replace(view, running=())) is None
