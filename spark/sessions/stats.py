"""How long conversations are: turns, prompts, contexts and tools of recorded sessions, as percentiles.

With a model everything is in its tokens, as a server would count them: a turn's prompt is new as far as it departs from
the rendering of the turn before it. Without one, characters of the messages are counted. Token files know windows
alone, and not how deep in a conversation each begins.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine.ground.errors import FileFormatError, RequestError, UsageError
from spark import storage
from spark.pipeline.tokens import JoinedTokens, TokensFile, common_prefix, different, read_tokens, renderer_of
from spark.speech.render import Renderer
from spark.speech.sessions import EXTRACT_HINT, Message, Session

PERCENTS = (10, 25, 50, 75, 90)
ROUND_TOKENS = 1024
CHARS_A_TOKEN = 3  # a rule of thumb for code and JSON
MOSTLY = 0.9  # of what is written lies in contexts no longer than is expected

# What is measured, in the order of the table, and whether it is a number of things rather than a length.
FIGURES = {
    "turns a session": True,
    "tool calls a session": True,
    "new prompt a turn": False,
    "written a turn": False,
    "context of a turn": False,
    "longest context of a session": False,
    "result of a tool": False,
    "windows a session": True,
    "window": False,
    "written without a break": False,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. count: of the values; total: their sum; percentiles: by percent."""

    name: str
    count: int
    percentiles: Mapping[int, int]
    most: int
    total: int

    @property
    def is_number(self) -> bool:
        """Whether the values are numbers of things, rather than lengths."""
        return FIGURES[self.name]


@dataclass(frozen=True, slots=True)
class Report:
    """What sessions are like.

    unit: of lengths, `tokens` or `characters`. expect: for `--expect-ctx`, in tokens; None where contexts are not
    known. guessed: it was made of characters. tools: calls by tool, most first. skipped: turns that the template
    refuses.
    """

    unit: str
    sessions: int
    rows: tuple[Row, ...]
    expect: int | None
    guessed: bool
    tools: Mapping[str, int]
    skipped: int

    def to_json(self) -> dict[str, Any]:
        """What `--json` has of it."""
        return {
            "unit": self.unit,
            "sessions": self.sessions,
            "figures": {
                row.name: {
                    "count": row.count, **{f"p{n}": value for n, value in row.percentiles.items()}, "most": row.most,
                    "total": row.total, "unit": "number" if row.is_number else self.unit,
                }
                for row in self.rows
            },
            "expect_ctx": self.expect,
            "expect_ctx_guessed": self.guessed,
            "tools": dict(self.tools),
            "skipped_turns": self.skipped,
        }  # fmt: skip


@dataclass(slots=True)
class _Values:
    """Values by figure. deep: of each turn its context, and what was written there."""

    by_name: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    deep: list[tuple[int, int]] = field(default_factory=list)
    tools: Counter[str] = field(default_factory=Counter)
    sessions: int = 0
    skipped: int = 0

    def add(self, **values: int) -> None:
        for name, value in values.items():
            self.by_name[name.replace("_", " ")].append(value)


def stats(
    given: Sequence[str], model: Path | None = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> Report:
    """Measure sessions, or token files.

    given: paths, folders, patterns or URLs of one kind. model: whose tokens are counted, of sessions. progress: called
    with the sessions that were read and 0. Raises what reading them does, UsageError where there are both kinds, and
    FileFormatError where there is nothing to measure.
    """
    with ExitStack() as stack:
        files = stack.enter_context(storage.reading(given, (".parquet", ".jsonl")))
        kinds = {file.path.suffix == ".parquet" for file in files}
        values = _Values()
        if kinds == {True}:
            if model is not None:
                raise UsageError(f"--model {model}: token files are in tokens already", hint="leave it out")
            read = [read_tokens(file.path, name=file.name) for file in files]
            _measure_windows(values, read[0] if len(read) == 1 else JoinedTokens(read, given[0]))
        else:
            renderer = None if model is None else renderer_of(model)[0]
            for done, session in enumerate(different(files), 1):
                progress(done, 0)
                _measure(values, session, renderer)
    if not values.sessions:
        raise FileFormatError(f"{', '.join(given)}: no session has a turn of the model", hint=EXTRACT_HINT)
    in_tokens = kinds == {True} or model is not None
    return Report(
        "tokens" if in_tokens else "characters",
        values.sessions,
        tuple(_row(name, values.by_name[name]) for name in FIGURES if values.by_name.get(name)),
        expected_context(values.deep, 1 if in_tokens else CHARS_A_TOKEN),
        not in_tokens,
        dict(values.tools.most_common()),
        values.skipped,
    )


def expected_context(deep: Iterable[tuple[int, int]], chars_a_token: int = 1) -> int | None:
    """The least context, in whole ROUND_TOKENS, in which MOSTLY of all that is written lies; None: there is none.

    deep: of each turn its context and what was written. What is written reads its whole context, once a token, so
    long turns count for more than short ones.
    """
    found = np.array(sorted(deep), np.int64).reshape(-1, 2)
    written = np.cumsum(found[:, 1])
    if not len(found) or not written[-1]:
        return None
    context = int(found[np.searchsorted(written, MOSTLY * written[-1]), 0])
    return -(-context // (chars_a_token * ROUND_TOKENS)) * ROUND_TOKENS


def _row(name: str, values: Sequence[int]) -> Row:
    found = np.percentile(values, PERCENTS, method="inverted_cdf")
    return Row(name, len(values), dict(zip(PERCENTS, map(int, found), strict=True)), max(values), sum(values))


def _measure(values: _Values, session: Session, renderer: Renderer | None) -> None:
    calls = [call for message in session.messages for call in message.tool_calls]
    turns, longest = 0, 0
    for new, written, context in _turns(session) if renderer is None else _rendered(values, session, renderer):
        values.add(new_prompt_a_turn=new, written_a_turn=written, context_of_a_turn=context)
        values.deep.append((context, written))
        turns, longest = turns + 1, max(longest, context)
    if not turns:
        return
    values.sessions += 1
    values.tools.update(call.name for call in calls)
    values.add(turns_a_session=turns, tool_calls_a_session=len(calls), longest_context_of_a_session=longest)
    for message in session.messages:
        if message.role == "tool":
            n = len(message.content) if renderer is None else len(renderer.tokenizer.encode(message.content))
            values.add(result_of_a_tool=n)


def _turns(session: Session) -> Iterator[tuple[int, int, int]]:
    """Of each turn: characters that came since the one before, that the model wrote, and of all up to its end."""
    context, new = 0, sum(len(json.dumps(tool, ensure_ascii=False)) for tool in session.tools)
    for message in session.messages:
        n = _chars(message)
        if message.role != "assistant":
            new += n
            continue
        context += new + n
        yield new, n, context
        new = 0


def _chars(message: Message) -> int:
    calls = sum(len(c.name) + len(json.dumps(c.arguments, ensure_ascii=False)) for c in message.tool_calls)
    return len(message.content) + len(message.reasoning) + calls


def _rendered(values: _Values, session: Session, renderer: Renderer) -> Iterator[tuple[int, int, int]]:
    """The same in tokens, of what a server that keeps the turn before would have to read."""
    before = np.empty(0, np.int32)
    for turn in renderer.turns(session):
        if isinstance(turn, RequestError):
            values.skipped += 1
            continue
        whole = np.concatenate((turn.prompt, turn.generated))
        yield len(turn.prompt) - common_prefix(before, turn.prompt), len(turn.generated), len(whole)
        before = whole


def _measure_windows(values: _Values, file: TokensFile) -> None:
    windows: Counter[str] = Counter()
    for window in file:
        windows[window.session_id] += 1
        values.add(window=len(window.tokens))
        edges = np.flatnonzero(np.diff(np.concatenate(([0], window.generated.astype(np.int8), [0]))))
        for begin, end in edges.reshape(-1, 2):
            values.add(written_without_a_break=int(end - begin))
    values.sessions = len(windows)
    for n in windows.values():
        values.add(windows_a_session=n)
