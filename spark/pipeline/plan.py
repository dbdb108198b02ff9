"""What a model file is, what it lacks to be served, and what it would take, by its header alone.

The engine, in a process of its own, says what it can run and what that takes; tokenizer and template are asked here.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any

from engine.formats.gguf import GGUFFile, open_header
from engine.ground import protocol
from engine.ground.config import EngineConfig
from engine.ground.errors import (
    DaemonError,
    DeadlineError,
    ModelFormatError,
    RequestError,
    SparkError,
    UnsupportedModelError,
    from_code,
)
from engine.text import tokenizer
from spark.daemon.client import engine_command
from spark.speech.dialect import Dialect, learn

_BESIDE = {"drafter": "a drafter", "block": "a block that drafts"}  # files that go beside a model's
CARDS_GIB = (12.0, 24.0)  # what is planned for where there is no GPU to ask
_TAIL_LINES = 12
_TEMPLATE_S = 10.0  # a template takes milliseconds


@dataclass(frozen=True, slots=True)
class Column:
    """The plan under one cap: what the daemon says of it, or why it is refused."""

    vram_gib: float | None
    info: dict[str, Any] | None
    refusal: SparkError | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What was found.

    file: of the header, as docs/protocol.md has it. tokenizer: its kind and sizes; None where it cannot be used.
    dialect: what the model writes; None without a template. columns: one for each cap; none where nothing can be
    planned. missing: what stands in the way of serving it, the weightiest first.
    """

    model: str
    file: dict[str, Any]
    tokenizer: dict[str, Any] | None
    dialect: Dialect | None
    columns: tuple[Column, ...]
    missing: tuple[SparkError, ...]

    @property
    def refusal(self) -> SparkError | None:
        """All that is missing as one error."""
        if not self.missing:
            return None
        first, said = self.missing[0], "; ".join(error.message for error in self.missing)
        return from_code(first.code, f"{self.model} cannot be served: {said}", first.hint)

    @property
    def planned(self) -> list[dict[str, Any]]:
        """What the daemon said under the caps that are large enough."""
        return [column.info for column in self.columns if column.info is not None]

    def to_json(self) -> dict[str, Any]:
        """The report as `--json` writes it."""
        file = {key: value for key, value in self.file.items() if key != "missing"}
        return {
            "model": self.model,
            **file,
            "tokenizer": self.tokenizer,
            "dialect": None if self.dialect is None else asdict(self.dialect),
            "missing": [{"message": error.message, "hint": error.hint} for error in self.missing],
            "rows": self.rows(),
        }

    def rows(self) -> list[dict[str, Any]]:
        """The plan of each cap, or why it is refused."""
        rows: list[dict[str, Any]] = []
        for column in self.columns:
            if column.info is None:
                assert column.refusal is not None
                rows.append({"vram_gib": column.vram_gib, "refusal": column.refusal.message})
                continue
            rest = {key: value for key, value in column.info.items() if key not in ("file", "plan", "refusal")}
            rows.append({"vram_gib": column.vram_gib, **column.info["plan"], **rest})
        return rows


def inspect(config: EngineConfig, vram_gib: Sequence[float], deadline_s: float) -> Report:
    """Inspect a model file, and plan for each cap; for none, the GPU that is there, or cards of usual sizes.

    A cap that is too small is a column that says so. Raises the daemon's error, DaemonError or DeadlineError, and
    ModelFormatError for a header that cannot be read.
    """
    with open_header(config.model) as header:  # whose errors need no daemon
        caps: list[float | None] = list(vram_gib) or [None]
        first = ask(replace(config, vram_gib=caps[0]), deadline_s)
        file = first["file"]
        kind, dialect, silent = _speech(header) if file["kind"] == "model" else (None, None, [])
    missing = [*(from_code(each["code"], each["message"], each["hint"]) for each in file["missing"]), *silent]
    columns: list[Column] = []
    if not missing and not file["absent_files"] and file["kind"] == "model":
        if first["plan"] is None and first["refusal"] is None:
            caps = list(CARDS_GIB)
            first = ask(replace(config, vram_gib=caps[0]), deadline_s)
        answers = [first, *(ask(replace(config, vram_gib=cap), deadline_s) for cap in caps[1:])]
        columns = [_column(cap, info) for cap, info in zip(caps, answers, strict=True)]
    return Report(str(config.model), file, kind, dialect, tuple(columns), tuple(missing))


def plan(config: EngineConfig, vram_gib: Sequence[float], deadline_s: float) -> Report:
    """As `inspect`, for who wants a plan: what is missing is an error, and so is a plan that no cap is enough for."""
    report = inspect(config, vram_gib, deadline_s)
    if report.refusal is not None:
        raise report.refusal
    if (kind := _BESIDE.get(report.file["kind"])) is not None:
        raise UnsupportedModelError(
            f"{report.model} is {kind}, expected a model", hint=f"name its model, and --draft {report.model}"
        )
    if absent := report.file["absent_files"]:
        raise ModelFormatError(f"{absent[0]}: this part of the model is missing", hint="fetch it to that place")
    if not report.planned and (refusal := report.columns[-1].refusal) is not None:
        raise refusal
    return report


def ask(config: EngineConfig, deadline_s: float) -> dict[str, Any]:
    """What the daemon says; `plan` is None where it is refused, or there is neither a cap nor a GPU to size it by."""
    command = engine_command(replace(config, plan_only=True))
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"no plan within {deadline_s:g} s") from None
    for line in done.stdout.splitlines():
        try:
            event = protocol.parse_event(line)
        except RequestError:
            continue
        if isinstance(event, protocol.Plan):
            return dict(event.info)
        if isinstance(event, protocol.Error):
            raise from_code(event.code, event.message, event.hint)
    tail = "\n".join(done.stderr.decode(errors="replace").splitlines()[-_TAIL_LINES:])
    raise DaemonError(
        f"the daemon ended with exit status {done.returncode} and no plan",
        hint=f"its last lines on stderr:\n{tail}" if tail else "it wrote nothing to stderr",
    )


def _column(cap: float | None, info: dict[str, Any]) -> Column:
    refusal = info["refusal"]
    if refusal is None:
        return Column(cap, info)
    return Column(cap, None, from_code(refusal["code"], refusal["message"], refusal["hint"]))


def _speech(file: GGUFFile) -> tuple[dict[str, Any] | None, Dialect | None, list[SparkError]]:
    """The tokenizer's kind and sizes, what the model writes, and what is missing for either."""
    try:
        loaded = tokenizer.load(file)
        template = loaded.template
        ends = {name: i for name, i in loaded.special_ids.items() if i in loaded.stop_ids}
        kind = {"kind": loaded.pre, "tokens": loaded.vocab_size, "ends_of_turn": sorted(ends, key=ends.__getitem__)}
        with _limited(_TEMPLATE_S):
            return kind, None if template is None else learn(template), []
    except SparkError as error:
        return None, None, [error]
    except _Late:
        late = f"tokenizer.chat_template is not done with three messages after {_TEMPLATE_S:g} s"
        return kind, None, [ModelFormatError(late, hint="a template is a program, and this one may never end")]


class _Late(BaseException):
    """Time is up. Not an Exception, of which templates have their own."""


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise _Late in the block, which the main thread runs, when so many seconds have passed."""

    def end(number: int, frame: FrameType | None) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
