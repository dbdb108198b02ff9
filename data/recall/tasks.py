"""Tasks of recall as tokens: a context, questions about what stands far back in it, and their answers.

| task | context | question -> answer |
| --- | --- | --- |
| copying | words | two words that follow each other once -> they, and what follows |
| needles | words; facts, each with two facts that share a word of its key, and its key in prose | a key -> its fact |
| keys | nothing but facts | up to four keys -> their facts, in that order |
| variables | words; chains of assignments, one ending in a value | a variable -> the way to its value |
| turns | a conversation: facts, answers about earlier ones | two keys nobody asked for -> their facts |
| table | rows of a table among words | up to eight rows -> they, whole |
| agent | files that a tool read, lines that were edited | a line of a file, new words -> the call that edits it |

Nothing has to be counted: where a passage ends, a token says so. A key is a pair of words that no other statement of
the context has; single words come again everywhere. An answer first says what was asked, so the tokens that take
looking far back come behind its first: a server reads prompts with attention to all, and the first token of a reply is
drawn from a prompt's last.
Everything follows from the generator that is given; lengths are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
Ints = NDArray[np.int64]
Rng = np.random.Generator

(
    PAD, USER, ASSISTANT, TOOL, END, ASK, FACT, IS, SEMI, SET, VALUE, ROW, CELL, COPY, CALL, READ, EDIT, LINE, WITH,
    OLD, NEW, FINE,
) = range(22)  # fmt: skip
NUMBERS = tuple(range(24, 32))  # of what a question lists
FIRST_WORD, N_VOCAB = 32, 512
WORDS = N_VOCAB - FIRST_WORD
LEAST = 128  # tokens of the shortest context with its questions
VALUE_WORDS, COPIED_WORDS, LINE_WORDS, CELLS = 3, 14, 6, 3
FACT_TOKENS, ROW_TOKENS = VALUE_WORDS + 5, 4 + 3 * CELLS
# What a question asks for at most, and what each of that takes in it and in its answer.
LISTED = {"keys": (4, 2 + FACT_TOKENS), "turns": (2, 2 + FACT_TOKENS), "table": (8, 4 + ROW_TOKENS)}


@dataclass(frozen=True, slots=True)
class Asked:
    """A question. prompt: the user's turn, up to where the reply begins; answer: up to and with END.

    evidence: the ranges [from, to) of the context that the answer needs.
    """

    prompt: I32
    answer: I32
    evidence: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A context and what can be asked about it, one after the other or each by itself.

    wanted: bool, the tokens of the context that follow from what stands before them: replies that it has.
    """

    task: str
    context: I32
    wanted: NDArray[np.bool_]
    asked: tuple[Asked, ...]

    def row(self) -> tuple[I32, NDArray[np.bool_]]:
        """Tokens of the context and of all questions with their answers, and which of them are wanted."""
        tokens, wanted = [self.context], [self.wanted]
        for a in self.asked:
            tokens += [a.prompt, a.answer]
            wanted += [np.zeros(len(a.prompt), bool), np.ones(len(a.answer), bool)]
        return np.concatenate(tokens), np.concatenate(wanted)


@dataclass(slots=True)
class _Text:
    """Tokens that are written one piece after the other."""

    pieces: list[I32] = field(default_factory=list)
    replies: list[tuple[int, int]] = field(default_factory=list)
    length: int = 0

    def add(self, tokens: Iterable[int], reply: bool = False) -> tuple[int, int]:
        """Write a piece; where it stands."""
        piece = np.fromiter(tokens, np.int32)
        begin, self.length = self.length, self.length + len(piece)
        self.pieces.append(piece)
        if reply:
            self.replies.append((begin, self.length))
        return begin, self.length

    def case(self, task: str, asked: list[Asked]) -> Case:
        """What was written, with questions about it."""
        wanted = np.zeros(self.length, bool)
        for begin, end in self.replies:
            wanted[begin:end] = True
        return Case(task, np.concatenate(self.pieces), wanted, tuple(asked))


def _words(rng: Rng, *shape: int) -> Ints:
    return rng.integers(FIRST_WORD, N_VOCAB, shape)


def _keys(rng: Rng, n: int) -> Ints:
    """n pairs of words, no two alike, [n, 2]."""
    codes = rng.choice(WORDS * WORDS, n, replace=False)
    return FIRST_WORD + np.stack([codes // WORDS, codes % WORDS], axis=1)


def _fact(key: Ints, value: Ints) -> list[int]:
    return [FACT, *key, IS, *value, SEMI]


def _listed(keys: Iterable[Ints]) -> list[int]:
    """The user's turn that asks for keys."""
    return [USER, ASK, *(t for number, key in zip(NUMBERS, keys, strict=False) for t in (number, *key)), ASSISTANT]


def _facts(keys: Iterable[Ints], values: Iterable[Ints]) -> list[int]:
    """The answer to `_listed`."""
    said: list[int] = []
    for number, key, value in zip(NUMBERS, keys, values, strict=False):
        said += [number, *key, IS, *value]
    return [*said, END]


def _asked(prompt: Iterable[int], answer: Iterable[int], evidence: Iterable[tuple[int, int]]) -> Asked:
    return Asked(np.fromiter(prompt, np.int32), np.fromiter(answer, np.int32), tuple(evidence))


def _scattered(rng: Rng, statements: list[list[int]], room: int) -> tuple[_Text, list[tuple[int, int]]]:
    """Statements in their order among as many words as make up `room` tokens; where each stands."""
    free = room - sum(map(len, statements))
    assert free >= 0, "no room for the statements"
    cuts = np.sort(rng.integers(0, free + 1, len(statements)))
    words, text, at, places = _words(rng, free), _Text(), 0, []
    for cut, statement in zip(cuts.tolist(), statements, strict=True):
        text.add(words[at:cut])
        places.append(text.add(statement))
        at = cut
    text.add(words[at:])
    return text, places


def copying(rng: Rng, length: int, n: int) -> Case:
    """A passage, by its first two words."""
    room = length - n * (5 + 3 + COPIED_WORDS)
    words = _words(rng, room)
    pairs = (words[:-1] - FIRST_WORD) * WORDS + words[1:]
    _, places, counts = np.unique(pairs, return_index=True, return_counts=True)
    once = places[(counts == 1) & (places + 2 + COPIED_WORDS <= room)]
    asked = []
    for at in rng.choice(once, n, replace=False).tolist():
        passage = words[at : at + 2 + COPIED_WORDS]
        asked.append(_asked([USER, COPY, *passage[:2], ASSISTANT], [*passage, END], [(at, at + len(passage))]))
    text = _Text()
    text.add(words)
    return text.case("copying", asked)


def needles(rng: Rng, length: int, n: int) -> Case:
    """A fact among words, with decoys: two facts that share one word of its key, and its key in prose."""
    room = length - n * (6 + FACT_TOKENS)
    keys = _keys(rng, n)
    used = set(map(tuple, keys.tolist()))

    def decoy(key: Ints, place: int) -> Ints:
        while True:
            other = key.copy()
            other[place] = _words(rng)
            if tuple(other.tolist()) not in used:
                used.add(tuple(other.tolist()))
                return other

    values, statements, owners = _words(rng, n, VALUE_WORDS), [], []
    for i, key in enumerate(keys):
        statements += [_fact(key, values[i]), *(_fact(decoy(key, p), _words(rng, VALUE_WORDS)) for p in (0, 1))]
        statements.append([*key, int(_words(rng))])
        owners += [i, -1, -1, -1]
    order = rng.permutation(len(statements))
    text, places = _scattered(rng, [statements[i] for i in order], room)
    where = {owners[i]: place for i, place in zip(order, places, strict=True)}
    asked = [_asked(_listed(keys[[i]]), _facts(keys[[i]], values[[i]]), [where[i]]) for i in range(n)]
    return text.case("needles", asked)


def _per_question(task: str, length: int) -> int:
    """How much a question asks for: an eighth of all at most, so long as that is one."""
    most, tokens = LISTED[task]
    return min(most, max(1, length // 8 // tokens))


def _listed_tokens(task: str, m: int) -> int:
    """Of a question that asks for m, with its answer."""
    return 4 + m * LISTED[task][1]


def keys(rng: Rng, length: int, n: int) -> Case:
    """Up to four facts of a context that has nothing else."""
    m = _per_question("keys", length)
    room = length - n * _listed_tokens("keys", m)
    count = room // FACT_TOKENS
    known, values = _keys(rng, count), _words(rng, count, VALUE_WORDS)
    text = _Text()
    text.add(_words(rng, room % FACT_TOKENS))
    places = [text.add(_fact(k, v)) for k, v in zip(known, values, strict=True)]
    asked = []
    for _ in range(n):
        some = rng.choice(count, min(m, count), replace=False)
        asked.append(_asked(_listed(known[some]), _facts(known[some], values[some]), [places[i] for i in some]))
    return _exact(rng, text.case("keys", asked), length)


def _exact(rng: Rng, case: Case, length: int) -> Case:
    """A case with as many words before it as it lacks."""
    lacks = length - len(case.row()[0])
    assert lacks >= 0, (case.task, length)
    asked = tuple(Asked(a.prompt, a.answer, tuple((b + lacks, e + lacks) for b, e in a.evidence)) for a in case.asked)
    context = np.concatenate([_words(rng, lacks).astype(np.int32), case.context])
    return Case(case.task, context, np.concatenate([np.zeros(lacks, bool), case.wanted]), asked)


def variables(rng: Rng, length: int, n: int) -> Case:
    """The value of a variable that is set to another, which is set to a third, which is set to the value."""
    each, tokens = 3, 2 * 7 + 6 + VALUE_WORDS
    room = length - n * (6 + 12 + VALUE_WORDS)
    chains = max(n, room // 2 // tokens)
    names, values = _keys(rng, chains * each).reshape(chains, each, 2), _words(rng, chains, VALUE_WORDS)
    turn = rng.permutation(np.repeat(np.arange(chains), each))  # whose next assignment comes
    done, statements = [0] * chains, []
    for chain in turn.tolist():
        k = done[chain]
        done[chain] += 1
        what = [*names[chain, k - 1]] if k else [VALUE, *values[chain]]
        statements.append([SET, *names[chain, k], IS, *what, SEMI])
    text, places = _scattered(rng, statements, room)
    asked = []
    for chain in rng.choice(chains, n, replace=False).tolist():
        a, b, c = names[chain, ::-1]
        way = [NUMBERS[0], *a, IS, *b, IS, *c, IS, VALUE, *values[chain], END]
        asked.append(_asked(_listed([a]), way, [places[i] for i in np.flatnonzero(turn == chain)]))
    return text.case("variables", asked)


def turns(rng: Rng, length: int, n: int) -> Case:
    """Facts of a conversation's turns, in which others were asked for before."""
    m = _per_question("turns", length)
    room = length - n * _listed_tokens("turns", m)
    known, values = _keys(rng, room // FACT_TOKENS + 1), _words(rng, room // FACT_TOKENS + 1, VALUE_WORDS)
    text, places, unasked = _Text(), list[tuple[int, int]](), list[int]()
    while True:
        told, prose = int(rng.integers(1, 4)), int(rng.integers(0, 13))
        again = len(unasked) > n * m and rng.random() < 0.3
        if text.length + 1 + told * FACT_TOKENS + prose + 14 > room:
            break
        text.add([USER])
        for _ in range(told):
            unasked.append(len(places))
            places.append(text.add(_fact(known[len(places)], values[len(places)])))
        text.add(_words(rng, prose))
        if again:
            i = unasked.pop(int(rng.integers(len(unasked))))
            text.add(_listed([known[i]])[1:])
            text.add(_facts([known[i]], [values[i]]), reply=True)
        else:
            text.add([ASSISTANT])
            text.add([FINE, END], reply=True)
    order, asked = rng.permutation(unasked), []
    for some in order[: len(order) // m * m].reshape(-1, m)[:n]:
        asked.append(_asked(_listed(known[some]), _facts(known[some], values[some]), [places[i] for i in some]))
    return _exact(rng, text.case("turns", asked), length)


def table(rng: Rng, length: int, n: int) -> Case:
    """Up to eight rows of a table that stand apart."""
    m = _per_question("table", length)
    room = length - n * _listed_tokens("table", m)
    count = max(m, room // 2 // ROW_TOKENS)
    ids, cells = _keys(rng, count), _words(rng, count, CELLS, 2)
    rows = [[ROW, *ids[i], *(t for cell in cells[i] for t in (CELL, *cell)), SEMI] for i in range(count)]
    text, places = _scattered(rng, rows, room)
    asked = []
    for _ in range(n):
        some = rng.choice(count, m, replace=False)
        answer = [t for number, i in zip(NUMBERS, some, strict=False) for t in (number, *rows[i])]
        asked.append(_asked(_listed(ids[some]), [*answer, END], [places[i] for i in some]))
    return text.case("table", asked)


def agent(rng: Rng, length: int, n: int) -> Case:
    """A line of a file that a tool read, quoted in a call that edits it."""
    prompt, answer = 11, LINE_WORDS + 11
    room = length - n * (prompt + answer)
    text, lines, most = _Text(), list[tuple[Ints, Ints, Ints, tuple[int, int]]](), room // (3 + LINE_WORDS) + 1
    paths, begins = _keys(rng, most), _keys(rng, most)

    def edit(line: tuple[Ints, Ints, Ints, tuple[int, int]]) -> tuple[list[int], list[int]]:
        path, begin, rest, _ = line
        new = _words(rng, 2)
        call = [CALL, EDIT, *path, OLD, *begin, *rest, NEW, *new, END]
        return [USER, EDIT, *path, LINE, *begin, WITH, *new, ASSISTANT], call

    quoted: set[int] = set()
    for path in paths:
        count = int(rng.integers(3, 9))
        if text.length + 14 + count * (3 + LINE_WORDS) > room:
            break
        text.add([USER, READ, *path, ASSISTANT])
        text.add([CALL, READ, *path, END], reply=True)
        text.add([TOOL, *path])
        for _ in range(count):
            begin, rest = begins[len(lines)], _words(rng, LINE_WORDS)
            lines.append((path, begin, rest, text.add([LINE, *begin, *rest])))
        text.add([END])
        if rng.random() < 0.4 and len(lines) - len(quoted) > n and text.length + prompt + answer <= room:
            i = int(rng.integers(len(lines)))
            quoted.add(i)
            asks, call = edit(lines[i])
            text.add(asks)
            text.add(call, reply=True)
    fresh = [line for i, line in enumerate(lines) if i not in quoted]
    asked = [_asked(*edit(fresh[i]), [fresh[i][3]]) for i in rng.permutation(len(fresh))[:n]]
    return _exact(rng, text.case("agent", asked), length)


def echo(rng: Rng, length: int) -> Case:
    """Words, and all of them again, or passages in any order: no task, but what teaches to look back soonest.

    All of them are always as far back, so where to look is learned at once, and with it to say what is found there.
    """
    text = _Text()
    if rng.random() < 0.5:
        words = _words(rng, length // 2)
        text.add(_words(rng, length % 2))
        text.add(words)
        text.add(words[:2])
        text.add(words[2:], reply=True)
        return text.case("echo", [])
    words = FIRST_WORD + rng.choice(WORDS, min(WORDS, length // 4), replace=False)
    text.add(words)
    while (room := length - text.length) > 0:
        n = min(room, int(rng.integers(6, 25)))
        begin = int(rng.integers(len(words) - n + 1))
        text.add(words[begin : begin + min(n, 2)])
        text.add(words[begin + 2 : begin + n], reply=True)
    return text.case("echo", [])


TASKS: dict[str, Callable[[Rng, int, int], Case]] = {
    f.__name__: f for f in (copying, needles, keys, variables, turns, table, agent)
}
# What a question with its answer, and what stands in the context for it alone, take; of others it follows from what
# they ask for.
_SPACE = {"copying": 24, "needles": 44, "variables": 48, "agent": 56}


def drawn(task: str, rng: Rng, length: int, n: int) -> Case:
    """A case of exactly `length` tokens with its questions: n of them, or as many as half of it has room for.

    ValueError for fewer than LEAST tokens.
    """
    if length < LEAST:
        raise ValueError(f"a case has at least {LEAST} tokens, found {length}")
    space = _SPACE.get(task) or 2 * _listed_tokens(task, _per_question(task, length))
    return TASKS[task](rng, length, max(1, min(n, length // 2 // space)))
