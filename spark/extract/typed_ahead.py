"""Prompts that were typed while Claude Code's model worked: which of them it read in the middle of its turn.

A prompt that is put in the queue (`enqueue`) leaves it by one of three ways. `dequeue`: a turn begins with it, and
an ordinary message of the user says so. `popAll`: the user took it back to edit it. `remove`: it was sent into the
turn that was running; versions up to 2.1.42 wrote nothing else of it, later ones an attachment too, before or after.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from spark.extract.tree import Note

SENT = ("", "absorbed_mid_turn", "consumed")  # reasons of such a removal; versions before 2.1.246 give none


@dataclass(frozen=True, slots=True)
class TypedPrompt:
    """A prompt in the queue: a fingerprint of its words, and where they are in the spool."""

    key: int
    at: int
    words: int
    typed: bool
    redacted: Counter[str]


@dataclass(frozen=True, slots=True)
class _Sent:
    note: Note
    prompt: TypedPrompt


class TypedAhead:
    """The queue of one log, replayed."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, TypedPrompt | None] = OrderedDict()
        self._places: dict[int, deque[int]] = {}  # of waiting prompts, by key
        self._count = 0
        self._sent: dict[int, list[_Sent]] = {}  # by key: what no other record has
        self._attached: Counter[int] = Counter()  # by key: attachments that came before their removal

    def enqueue(self, prompt: TypedPrompt | None) -> None:
        """Put a prompt in the queue; None if it has no words."""
        self._count += 1
        self._waiting[self._count] = prompt
        if prompt is not None:
            self._places.setdefault(prompt.key, deque()).append(self._count)

    def leave(self, prompt: TypedPrompt | None) -> TypedPrompt | None:
        """What leaves the queue: the prompt that the record names, else the oldest."""
        if prompt is None:
            return self._pop(next(iter(self._waiting))) if self._waiting else None
        places = self._places.get(prompt.key)
        return self._pop(places[0]) if places else prompt

    def take_back(self, prompt: TypedPrompt | None) -> None:
        """The user took back the prompt that the record names, else all."""
        places = self._places.get(prompt.key) if prompt is not None else None
        if places:
            self._pop(places[0])
        else:
            self._waiting.clear()
            self._places.clear()

    def _pop(self, place: int) -> TypedPrompt | None:
        prompt = self._waiting.pop(place)
        if prompt is not None:
            places = self._places[prompt.key]
            places.popleft()
            if not places:
                del self._places[prompt.key]
        return prompt

    def send(self, prompt: TypedPrompt, note: Note) -> bool:
        """Note that a prompt went into the turn; whether the note has to say so, as far as is known."""
        if self._attached[prompt.key]:
            self._attached[prompt.key] -= 1
            return False
        self._sent.setdefault(prompt.key, []).append(_Sent(note, prompt))
        return True

    def attach(self, key: int, since: int) -> None:
        """An attachment has the prompt, too: it is the record of a removal before it or after it.

        since: line of the last response. A removal after it is meant first; then one to come, if the prompt waits.
        """
        sent = self._sent.get(key)
        if sent and (sent[-1].note.order > since or key not in self._places):
            sent.pop().note.dropped = True
        elif key in self._places:
            self._attached[key] += 1

    def repeat(self, key: int, since: int) -> None:
        """A message of the user has the words of a prompt that was sent after line `since`: it is the same one."""
        sent = self._sent.get(key)
        if sent and sent[-1].note.order > since:
            sent.pop().note.dropped = True

    def read(self) -> list[tuple[Note, TypedPrompt]]:
        """The prompts that only the queue has, with their notes."""
        return [(sent.note, sent.prompt) for found in self._sent.values() for sent in found]
