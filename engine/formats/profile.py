"""The profile: how often each layer routed to each expert, in a text file beside the model.

The format is the one that other engines of this family read: a table of counts in CSV under comment lines
(docs/formats.md). What we add sits in one more comment line, `# spark: key=value ...`. Comment lines that we
don't know are kept.
"""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt

from engine.ground.errors import FileFormatError, SparkError, WrongModelError
from engine.ground.files import open_regular, replacing

VERSION = 1
MAX_MEMORY = 16  # of engine.placing.policy.Rule
WINDOW_TOKENS = 65_536  # until a profile has counted so many, it grows and forgets nothing
MAX_FILE_BYTES = 16 << 20  # 512 layers of 512 experts, 20 digits each, are 5 MiB
MAX_LINES = 4096  # layers and comments
HEAD_LINES = 3  # what `format` writes before them
MAX_COMMENT_CHARS = 1 << 16

Counted = Literal["generated", "all"]

_HEADER = re.compile(r"#\s*hotness table:(.*)")
_SPARK = re.compile(r"#\s*spark:(.*)")
_CHOICE = re.compile(r"#\s*spark-choice:(.*)")
_MERGED = re.compile(r"#\s*spark-merged:(.*)")
_FORMAT = "# format: one row per layer, columns are expert activation counts (expert 0..N-1)"
_COUNTED: dict[str, Counted] = {"generated": "generated", "all": "all"}
_OTHER = "run `spark calibrate` on this model, or name another profile"
_INT64_MAX = int(np.iinfo(np.int64).max)


@dataclass(frozen=True, slots=True)
class Choice:
    """What sessions that a placement was not made from spoke for at one residency (engine/placing/evidence.py).

    residency_pct: percent. cache_fraction: cache slots / slots, 0..1; the others are pinned. memory: of
    `placing.policy.Rule`, for the cache slots. misses: a token, low to high: its 95% interval over sessions; lru,
    static: misses a token of those policies on the same sessions. tokens, sessions: generated tokens, root sessions.
    """

    residency_pct: float
    cache_fraction: float
    memory: int
    misses: float
    low: float
    high: float
    lru: float
    static: float
    tokens: int
    sessions: int

    @property
    def words(self) -> str:
        """What it says to do: `pin nothing, remember 64 steps`."""
        if self.cache_fraction == 0.0:
            return "pin everything"
        pinned = f"pin {1 - self.cache_fraction:.0%}" if self.cache_fraction < 1 else "pin nothing"
        return f"{pinned}, " + (f"remember {1 << self.memory} steps" if self.memory else "the rest is LRU")


@dataclass(frozen=True, slots=True)
class Source:
    """One of the profiles that a merged one was made from.

    weight: what its counts were multiplied by, at least 1. tokens, sessions, created: as it said, tokens without the
    weight. digest: of `digest`, at most 64 hex digits. file: the name of its file, without folders.
    """

    weight: int
    tokens: int
    sessions: int
    created: str
    digest: str
    file: str


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """Routing counts and where they come from.

    counts: int64 [n_layer, n_expert], a dense layer's row is all zero.
    n_expert_used: active experts a token in an MoE layer.
    model_id: 64 hex digits; None if the file names no model.
    tokens, sessions: how many were counted.
    count: which tokens were counted.
    created: ISO 8601; may be empty.
    choices: by ascending residency.
    split: what an earlier version measured, pairs (residency in percent, share of cache slots). It is read to be told
        from a profile without evidence, not followed and not written.
    extra_lines: comment lines that are not ours, each beginning with `#`.
    sources: what it was merged from (`spark profile merge`); empty for one that was calibrated.
    """

    counts: npt.NDArray[np.int64]
    n_expert_used: int
    model_id: str | None = None
    tokens: int = 0
    sessions: int = 0
    count: Counted = "all"
    created: str = ""
    choices: tuple[Choice, ...] = ()
    split: tuple[tuple[float, float], ...] = ()
    extra_lines: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Profile) and format(self) == format(other)

    __hash__ = None  # type: ignore[assignment]  # its array can change

    def choice_for(self, residency_pct: float) -> Choice | None:
        """The choice that was measured at the nearest residency, the lower one of two; None if none was measured."""
        return min(self.choices, key=lambda choice: abs(choice.residency_pct - residency_pct), default=None)


def default_path(model_path: Path) -> Path:
    """Where a model's profile lies: `<model>.gguf.spark.csv`, beside the model."""
    return model_path.parent / f"{model_path.name}.spark.csv"  # `.` has no name: who reads it says what it is


def format(profile: Profile) -> str:
    """The profile as text; `parse` gives it back."""
    n_layer, n_expert = profile.counts.shape
    about = {
        "version": str(VERSION),
        "model": profile.model_id or "",
        "tokens": str(profile.tokens),
        "sessions": str(profile.sessions),
        "count": profile.count,
        "created": profile.created,
    }
    lines = [
        f"# hotness table: n_layer={n_layer} n_expert={n_expert} n_expert_used={profile.n_expert_used}",
        _FORMAT,
        "# spark: " + " ".join(f"{key}={value}" for key, value in about.items() if value),
        *map(_choice_line, profile.choices),
        *map(_source_line, profile.sources),
        *profile.extra_lines,
        *(",".join(map(str, row)) for row in profile.counts.tolist()),
    ]
    return "\n".join(lines) + "\n"


def parse(text: str, name: str = "profile") -> Profile:
    """Read a profile; `name` stands for the file in messages.

    Windows line ends, a byte order mark, blank lines, blanks around numbers and a comma at the end of a row
    are accepted. Anything else raises FileFormatError with the line, what was expected and what was found: no
    header, rows or columns missing or too many, a count that is not an integer of 0 to 2**63 - 1.
    """
    header: tuple[str, dict[str, str]] | None = None
    spark: tuple[str, dict[str, str]] | None = None
    extra: list[str] = []
    choices: list[Choice] = []
    sources: list[Source] = []
    rows: list[tuple[str, str]] = []
    for number, raw in enumerate(io.StringIO(text.removeprefix("\ufeff"), newline="\n"), start=1):
        line, where = raw.strip(), f"{name}, line {number}"
        if not line or line == _FORMAT:
            continue
        if len(rows) + len(extra) + len(choices) + len(sources) == MAX_LINES:
            raise FileFormatError(f"{where}: expected at most {MAX_LINES} layers and comments, found more")
        if line.startswith("#") and len(line) > MAX_COMMENT_CHARS:
            raise FileFormatError(f"{where}: expected a comment of at most {MAX_COMMENT_CHARS} characters, found more")
        if not line.startswith("#"):
            rows.append((where, line))
        elif match := _HEADER.fullmatch(line):
            if header is not None:
                raise FileFormatError(f"{where}: expected one '# hotness table:' line, found a second")
            header = (where, _pairs(match[1]))
        elif match := _SPARK.fullmatch(line):
            if spark is not None:
                raise FileFormatError(f"{where}: expected one '# spark:' line, found a second")
            spark = (where, _pairs(match[1]))
        elif match := _CHOICE.fullmatch(line):
            choices.append(_choice(_pairs(match[1]), where))
        elif match := _MERGED.fullmatch(line):
            sources.append(_source(_pairs(match[1]), where))
        else:
            extra.append(line)
    if header is None:
        raise FileFormatError(
            f"{name}: expected a line '# hotness table: n_layer=... n_expert=...', found none",
            hint="is this a profile? `spark calibrate` writes one",
        )
    where, pairs = header
    n_layer = _integer(pairs, "n_layer", where, at_least=1)
    n_expert = _integer(pairs, "n_expert", where, at_least=1)
    n_expert_used = _integer(pairs, "n_expert_used", where, at_least=1)
    if n_expert_used > n_expert:
        raise FileFormatError(f"{where}: expected n_expert_used <= {n_expert}, found {n_expert_used}")
    if len(rows) != n_layer:
        at = rows[-1][0] if rows else name
        raise FileFormatError(f"{at}: expected {n_layer} rows of counts (n_layer), found {len(rows)}")
    counts = np.stack([_row(line, n_expert, where) for where, line in rows])
    choices.sort(key=lambda choice: choice.residency_pct)
    profile = Profile(counts, n_expert_used, choices=tuple(choices), extra_lines=tuple(extra), sources=tuple(sources))
    return profile if spark is None else _described(profile, *spark)


def load(
    path: Path, *, model_id: str | None = None, shape: tuple[int, int] | None = None
) -> tuple[Profile, tuple[str, ...]]:
    """Read a profile for a model; returns it, and warnings to show to the user.

    model_id, shape: the model's id and its (n_layer, n_expert); None leaves them unchecked. A profile of
    another model or shape raises WrongModelError with both; one that names no model loads with a warning. A
    malformed file raises FileFormatError, an unreadable one SparkError.
    """
    try:
        with open_regular(path) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SparkError(
            f"cannot read the profile {path}: {error.strerror}", hint="`spark calibrate` writes one"
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise FileFormatError(f"{path}: expected at most {MAX_FILE_BYTES} bytes of text, found more")
    try:
        profile = parse(data.decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        found = f"byte {data[error.start]:#04x} at offset {error.start}"
        raise FileFormatError(f"{path}: expected UTF-8 text, found {found}") from error
    if shape is not None:
        require_shape(profile, path, shape)
    if model_id is None or profile.model_id == model_id:
        return profile, ()
    if profile.model_id is None:
        return profile, (f"{path} does not name its model; assuming that it is this one",)
    raise WrongModelError(f"{path} is of model {profile.model_id}, this is model {model_id}", hint=_OTHER)


def require_shape(profile: Profile, path: Path, shape: tuple[int, int]) -> None:
    """Raise WrongModelError unless a profile, read from `path`, counts (n_layer, n_expert) as the model has them."""
    if profile.counts.shape != shape:
        theirs, ours = (f"{a} layers of {b} experts" for a, b in (profile.counts.shape, shape))
        raise WrongModelError(f"{path} counts {theirs}, the model has {ours}", hint=_OTHER)


def save(profile: Profile, path: Path) -> None:
    """Write a profile atomically, mode 0644.

    A failure raises SparkError, leaves the old file as it was and no temporary file behind.
    """
    with replacing(path, "the profile", hint="the profile that was there, if any, is unchanged") as file:
        file.write(format(profile).encode())


def digest(profile: Profile) -> str:
    """The first 16 hex digits of the SHA-256 of the profile as `format` writes it: files that say the same have one."""
    return hashlib.sha256(format(profile).encode()).hexdigest()[:16]


def merge(profile: Profile, counts: npt.NDArray[np.int64], decay: float) -> Profile:
    """The profile with newly counted uses added; what is old fades once the profile is large.

    counts: int64 [n_layer, n_expert], the new uses alone; decay: the least weight of the past in a merge, 0..1.

    Let M and m be the tokens behind the profile and behind `counts` (largest row sum / n_expert_used) and
    `C = max(M, WINDOW_TOKENS)`. New counts weigh `g = min(1, (1 - decay) * C / m)`, old ones
    `k = min(1, (C - g * m) / M)`; the result is `k * old + g * new`, rounded such that a row never exceeds
    its exact sum. It follows that no row ever sums to more than `C * n_expert_used`, after any number of
    merges, and that `k >= decay` (C - g * m is at least decay * C, and C at least M): a merge leaves every
    count at least that share of itself, rounded down. Where nothing is clipped the past fades by m / C, that is
    exponentially with a time constant of C tokens: serving as many tokens as were calibrated on leaves the
    calibration 37% of the weight; one session hardly touches it.
    """
    old, new = profile.counts.astype(object), counts.astype(object)  # Python integers: exact, no overflow
    assert old.shape == new.shape
    assert 0.0 <= decay <= 1.0
    used = profile.n_expert_used
    old_uses, new_uses = max(old.sum(axis=1)), max(new.sum(axis=1))
    if new_uses == 0:
        return profile
    capacity = max(old_uses, WINDOW_TOKENS * used)
    gain = min(Fraction(1), (1 - Fraction(decay)) * capacity / new_uses)
    keep = min(Fraction(1), (capacity - gain * new_uses) / old_uses) if old_uses else Fraction(1)
    unit = keep.denominator * gain.denominator
    exact = old * int(keep * unit) + new * int(gain * unit)  # in units of 1 / unit
    whole, rest = exact // unit, exact % unit
    # Rounding down alone would wear small counts away a merge at a time, rounding to nearest would never let
    # go of them: so the uses that a row loses by rounding down go to those of its experts that lost most.
    for row, lost in zip(whole, rest, strict=True):
        by_loss = sorted(range(row.size), key=lambda expert: (-lost[expert], expert))
        row[by_loss[: sum(lost) // unit]] += 1
    merged = np.minimum(whole, _INT64_MAX).astype(np.int64)
    return replace(profile, counts=merged, tokens=int(keep * profile.tokens + gain * new_uses / used))


def _pairs(text: str) -> dict[str, str]:
    """The `key=value` words of a comment line."""
    return {key: value for key, _, value in (word.partition("=") for word in text.split())}


def _integer(pairs: dict[str, str], key: str, where: str, *, at_least: int = 0) -> int:
    """The integer that a comment line gives for `key`."""
    found = pairs.get(key, "nothing")
    value = _count(found)
    if value is None or value < at_least:
        raise FileFormatError(f"{where}: expected {key}=N, N at least {at_least}, found {found[:40]!r}")
    return value


def _count(digits: str) -> int | None:
    """The integer of 0 to 2**63 - 1 that the text is; None if it is none."""
    if not (digits.isascii() and digits.isdigit()):
        return None
    digits = digits.lstrip("0") or "0"
    if len(digits) > 19:  # int() itself refuses more than 4,300, leading zeros among them
        return None
    value = int(digits)
    return value if value <= _INT64_MAX else None


def _row(line: str, n_expert: int, where: str) -> npt.NDArray[np.int64]:
    """The counts of a row of the table."""
    line = line.removesuffix(",").rstrip()
    if (n := line.count(",") + 1) != n_expert:
        raise FileFormatError(f"{where}: expected {n_expert} counts (n_expert), found {n}")
    cells = [cell.strip() for cell in line.split(",")]
    row = []
    for column, cell in enumerate(cells, start=1):
        count = _count(cell)
        if count is None:
            found = f"{cell[:40]!r} in column {column}"
            raise FileFormatError(f"{where}: expected integers of 0 to 2**63 - 1, found {found}")
        row.append(count)
    return np.array(row, np.int64)


def _described(profile: Profile, where: str, pairs: dict[str, str]) -> Profile:
    """The profile with what its `# spark:` line says; keys that we don't know mean nothing to us."""
    version = _integer(pairs, "version", where, at_least=1)
    if version > VERSION:
        hint = "a newer version of spark wrote this file: update"
        raise FileFormatError(f"{where}: expected version={VERSION}, found {version}", hint=hint)
    count = _COUNTED.get(word := pairs.get("count", "all"))
    if count is None:
        raise FileFormatError(f"{where}: expected count=generated or count=all, found {word[:40]!r}")
    return replace(
        profile,
        model_id=pairs.get("model") or None,
        tokens=_integer({"tokens": "0"} | pairs, "tokens", where),
        sessions=_integer({"sessions": "0"} | pairs, "sessions", where),
        count=count,
        created=pairs.get("created", ""),
        split=_split(pairs.get("split", ""), where),
    )


def _split(text: str, where: str) -> tuple[tuple[float, float], ...]:
    """The measured pairs of `60:0.25,40:0.375`, ascending."""
    words = [word.split(":") for word in text.split(",") if word]
    try:
        pairs = sorted((float(pct), float(fraction)) for pct, fraction in words)
    except ValueError:
        pairs = [(-1.0, -1.0)]
    if not all(0 <= pct <= 100 and 0 <= fraction <= 1 for pct, fraction in pairs):
        expected = "split=PCT:FRACTION,... with PCT of 0 to 100 and FRACTION of 0 to 1"
        raise FileFormatError(f"{where}: expected {expected}, found {text[:80]!r}")
    return tuple(pairs)


_CHOICE_KEYS = {
    "residency": ("residency_pct", 100.0), "cache": ("cache_fraction", 1.0), "memory": ("memory", MAX_MEMORY),
    "misses": ("misses", np.inf), "low": ("low", np.inf), "high": ("high", np.inf), "lru": ("lru", np.inf),
    "static": ("static", np.inf), "tokens": ("tokens", _INT64_MAX), "sessions": ("sessions", _INT64_MAX),
}  # fmt: skip
_CHOICE_INTEGERS = ("memory", "tokens", "sessions")


def _choice_line(choice: Choice) -> str:
    """`# spark-choice: residency=60 cache=1 memory=6 misses=4.52 ...`."""
    words = []
    for key, (name, _) in _CHOICE_KEYS.items():
        value = getattr(choice, name)
        words.append(f"{key}={value if key in _CHOICE_INTEGERS else _short(value)}")
    return "# spark-choice: " + " ".join(words)


def _choice(pairs: dict[str, str], where: str) -> Choice:
    """The choice that a comment line describes; keys that we don't know mean nothing to us."""
    values: dict[str, float] = {}
    for key, (name, most) in _CHOICE_KEYS.items():
        text = pairs.get(key, "nothing")
        try:
            value = int(text) if key in _CHOICE_INTEGERS else float(text)
        except ValueError:
            value = -1
        if not 0 <= value <= most or value == np.inf:
            bound = f"a number of 0 to {most:g}" if most < _INT64_MAX else "a number of at least 0"
            raise FileFormatError(f"{where}: expected {key}={bound}, found {text[:40]!r}")
        values[name] = value
    return Choice(**values)  # type: ignore[arg-type]


def _source_line(source: Source) -> str:
    """`# spark-merged: weight=2 tokens=171000 sessions=157 created=... digest=... file=...`; the name as in a URL."""
    words = {
        "weight": source.weight, "tokens": source.tokens, "sessions": source.sessions, "created": source.created,
        "digest": source.digest, "file": quote(source.file, safe="", errors="surrogateescape"),
    }  # fmt: skip
    return "# spark-merged: " + " ".join(f"{key}={value}" for key, value in words.items() if value != "")


def _source(pairs: dict[str, str], where: str) -> Source:
    """The source that a comment line describes; keys that we don't know mean nothing to us."""
    found = pairs.get("digest", "nothing")
    if not re.fullmatch("[0-9a-f]{1,64}", found):
        raise FileFormatError(f"{where}: expected digest=HEX, at most 64 digits, found {found[:40]!r}")
    return Source(
        weight=_integer(pairs, "weight", where, at_least=1),
        tokens=_integer(pairs, "tokens", where),
        sessions=_integer(pairs, "sessions", where),
        created=pairs.get("created", ""),
        digest=found,
        file=unquote(pairs.get("file", ""), errors="surrogateescape"),
    )


def _short(value: float) -> str:
    """A float in the fewest digits that give it back: 60, not 60.0."""
    return repr(float(value)).removesuffix(".0")
