"""Replies under a form, in steps of their own or with others, draw what they would draw a step at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.ground.errors import CapacityError, RequestError
from engine.ground.sampling import Sampling
from engine.memory.blocks import Sequence
from engine.running.drawing import DeviceDrawer
from engine.running.loaded import Loaded, load
from engine.running.masked import Masked, can_mask
from engine.running.reply import Reply
from engine.running.stepping import Span
from tests.engine_runs import PROMPT, config
from tests.forms_here import FormHere
from tests.tiny_models import k_quant_mix, write_tiny

pytestmark = pytest.mark.usefixtures("on_the_device")
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.9, top_p=0.9, frequency_penalty=0.4, repetition_penalty=1.1, seed=5)
FOREVER = float("inf")


class Turns:
    """Tokens of one residue after the other. ends: after so many; fails: at that one."""

    def __init__(self, n_vocab: int, ends: int | None = None, fails: int | None = None) -> None:
        self._n_vocab, self._ends, self._fails, self.n = n_vocab, ends, fails, 0

    @property
    def is_done(self) -> bool:
        return self.n == self._ends

    def mask(self) -> np.ndarray:
        bits = np.arange(-(-self._n_vocab // 32) * 32) % 5 == self.n % 5
        bits[self._n_vocab :] = False
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        assert token % 5 == self.n % 5
        self.n += 1
        if self.n == self._fails:
            raise RequestError("too much work")


class Late(FormHere):
    """A form whose masks are late for some tokens, once each."""

    def __init__(self, grammar: Turns, late: set[int]) -> None:
        super().__init__(grammar)
        self.late = late

    def mask(self, until_s: float) -> np.ndarray | None:  # type: ignore[override]
        if self.grammar.n in self.late:
            self.late.remove(self.grammar.n)
            return None
        return super().mask(until_s)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", k_quant_mix, n_layer=2, n_expert_used=3)


@pytest.fixture
def loaded(model: Path) -> Iterator[Loaded]:
    loaded = load(config(model, policy="lru", residency_pct=50, ctx_tokens=640))
    yield loaded
    loaded.close()


def reply(
    loaded: Loaded, n: int, limit: int, params: Sampling = GREEDY, form: FormHere | None = None,
    logprobs: int | None = None, stop: tuple[int, ...] = (),
) -> Reply:  # fmt: skip
    """One of which all but the last token of a prompt is fed."""
    sequence = loaded.kv.sequence()
    for part in np.array_split(PROMPT[: n - 1], -(-n // 16)):
        loaded.steps.run([Span(sequence, part, np.zeros(len(part), bool))])
    return Reply(
        PROMPT[:n].tolist(), params, limit, stop=stop, logprobs=logprobs, sequence=sequence,
        grammar=form,  # type: ignore[arg-type]
    )  # fmt: skip


def release(replies: list[Reply]) -> None:
    for one in replies:
        assert one.sequence is not None
        one.sequence.release()


def turns(loaded: Loaded, ends: int | None = None, late: set[int] | None = None) -> Late:
    return Late(Turns(loaded.source.config.n_vocab, ends), late or set())


def stepwise(loaded: Loaded, one: Reply) -> list[int]:
    """Its tokens where the host waits for each."""
    while one.settled(0):
        assert loaded.decoder.step([one]) == [None]
    return one.history[len(one.history) - one.made :]


def finished(loaded: Loaded, replies: list[Reply]) -> list[list[int]]:
    """Their tokens, in steps that they share, ahead of the host; as the scheduler has it, of those held too."""
    while going := [r for r in replies if r.settled(0)]:
        assert loaded.decoder.together(going, FOREVER) == [None] * len(going)
        for r in going:
            assert r.sequence is not None
            fed = r.held is not None or r.reason == "stop"
            assert r.sequence.length == len(r.history) - (not fed)
            while r.held is not None:
                held, r.held = r.held, None
                loaded.decoder.draw_from(r, held, 0)
    return [r.history[len(r.history) - r.made :] for r in replies]


KINDS = [
    (9, 7, GREEDY, True, 2),
    (60, 8, SAMPLED, False, None),  # into another block
    (20, 7, SAMPLED, True, None),
    (7, 5, GREEDY, False, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize("which", [[2], [0, 1], [0, 1, 2, 3]])
def test_tokens_and_likelihoods_are_those_of_each_alone(loaded: Loaded, which: list[int]) -> None:
    def made(late: set[int]) -> list[Reply]:
        return [
            reply(loaded, n, limit, params, turns(loaded, late=set(late)) if formed else None, logprobs)
            for n, limit, params, formed, logprobs in (KINDS[i] for i in which)
        ]

    one_by_one = made(set())
    expected = [stepwise(loaded, one) for one in one_by_one]
    release(one_by_one)
    for late in (set(), {0, 3, 4}):
        replies = made(late)
        assert can_mask(loaded.steps, replies)
        assert finished(loaded, replies) == expected
        for one, other in zip(replies, one_by_one, strict=True):
            assert [d.likelihood for d in one.unsent] == [d.likelihood for d in other.unsent]
            assert one.reason == other.reason == "length"
        release(replies)


@pytest.mark.slow
def test_the_end_of_a_form_ends_its_reply_alone(loaded: Loaded) -> None:
    expected = stepwise(loaded, reply(loaded, 9, 50, form=turns(loaded, 6)))
    free = stepwise(loaded, reply(loaded, 12, 10, SAMPLED))
    assert len(expected) == 6
    for limit in (50, 6):
        replies = [reply(loaded, 9, limit, form=turns(loaded, 6)), reply(loaded, 12, 10, SAMPLED)]
        assert finished(loaded, replies) == [expected, free]
        assert [r.reason for r in replies] == ["stop", "length"]
        release(replies)
    replies = [reply(loaded, 9, 50, form=turns(loaded), stop=(expected[4],)), reply(loaded, 12, 10, SAMPLED)]
    assert finished(loaded, replies) == [expected[: expected.index(expected[4])], free]
    assert replies[0].reason == "stop"


@pytest.mark.slow
def test_a_failure_of_a_form_is_its_replys(loaded: Loaded) -> None:
    free = stepwise(loaded, reply(loaded, 12, 10))
    form = FormHere(Turns(loaded.source.config.n_vocab, fails=3))
    replies = [reply(loaded, 9, 50, form=form), reply(loaded, 12, 10)]
    failures = loaded.decoder.together(replies, FOREVER)
    assert isinstance(failures[0], RequestError) and failures[1] is None
    assert stepwise(loaded, replies[1]) == free


@pytest.mark.slow
def test_where_blocks_run_out_it_ends_between_steps(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = stepwise(loaded, reply(loaded, 39, 30, form=turns(loaded)))
    replies = [reply(loaded, 39, 30, form=turns(loaded)), reply(loaded, 12, 30)]
    reserve, asked = Sequence.reserve, list[int]()

    def scarce(sequence: Sequence, n: int) -> None:
        asked.append(n)
        if len(asked) > 4:
            raise CapacityError("no block is left")
        reserve(sequence, n)

    monkeypatch.setattr(Sequence, "reserve", scarce)
    assert isinstance(loaded.drawer, DeviceDrawer)
    assert Masked(loaded.steps, loaded.drawer, replies).run(FOREVER) == [None, None]
    assert all(0 < r.made < 30 for r in replies)
    monkeypatch.undo()
    assert finished(loaded, replies)[0] == expected


@pytest.mark.slow
def test_it_ends_in_time_with_the_last_token_drawn_and_not_fed(loaded: Loaded) -> None:
    expected = stepwise(loaded, reply(loaded, 9, 12, form=turns(loaded)))
    one = reply(loaded, 9, 12, form=turns(loaded))
    while one.settled(0):
        assert loaded.decoder.together([one], 0.0) == [None]
        assert one.sequence is not None and one.sequence.length == len(one.history) - 1
    assert one.history[9:] == expected
