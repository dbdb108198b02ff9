"""Profiles beside each other: those of a team made one, what one says, and how two differ.

Everything here is counts of files; no model is opened.

**The same model** is the same model id (`engine.formats.gguf.GGUFFile.model_id`): architecture, sizes, tensors and
router weights. So all quantizations of a model have one, as far as they keep the routers in F32 or BF16.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from engine.formats import profile as files
from engine.formats.profile import Profile, Source
from engine.ground.errors import SparkError, UsageError, WrongModelError

_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9}|/[0-9]{1,9})?")  # short: a numerator of a billion digits is no weight
_INT64_MAX = int(np.iinfo(np.int64).max)
_EXPECTED = "positive numbers separated by commas, like 2,1 or 0.5,1 or 1/3,2/3"
_SMALLER = "give smaller --weights"


# --- one of several -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What `merge` wrote; `to_json` has the keys of `--json`.

    made: the profile. evidence: files whose choices were left out. warnings: to show to the user.
    """

    out: Path
    made: Profile
    evidence: tuple[Path, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as `--json` writes it."""
        return {
            "profile": str(self.out),
            "model_id": self.made.model_id,
            "tokens": self.made.tokens,
            "sessions": self.made.sessions,
            "sources": [asdict(source) for source in self.made.sources],
            "without_choices_of": [str(path) for path in self.evidence],
        }


def weights(given: str | None, n: int) -> tuple[int, ...]:
    """Read `--weights`: one for each of n profiles, as integers of the same proportions; None: 1 each.

    Fractions are multiplied by the smallest number that makes them whole: 0.5,1 is 1,2. Integers stay as they are.
    Raises UsageError for anything but n positive numbers.
    """
    if given is None:
        return (1,) * n
    words = [word.strip() for word in given.split(",")]
    for word in words:
        if not _NUMBER.fullmatch(word):
            raise UsageError(f"--weights is {given!r}: expected {_EXPECTED}, found {word!r}")
        numerator, _, denominator = word.partition("/")
        if not Fraction(numerator) or (denominator and not int(denominator)):
            raise UsageError(
                f"--weights is {given!r}: expected {_EXPECTED}, found {word!r}",
                hint="leave out a profile that shall not count",
            )
    if len(words) != n:
        raise UsageError(f"--weights has {len(words)} numbers, expected one for each of the {n} profiles")
    fractions = [Fraction(word) for word in words]
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    return tuple(int(fraction * unit) for fraction in fractions)


def merge(paths: Sequence[Path], out: Path, factors: Sequence[int]) -> MergeReport:
    """Write the profile of several: the sum of their counts, each times its factor.

    factors: positive integers, one a path. The file appears whole or not at all. Raises UsageError for fewer than two
    profiles, WrongModelError for those of another model or shape than the first's, SparkError for those that count
    other tokens, for sums that no profile can hold, and where the file cannot be written.
    """
    if len(paths) < 2:
        raise UsageError(f"expected at least two profiles to merge, found {len(paths)}")
    found, warnings = _loaded(paths)
    first = found[0]
    for path, profile in zip(paths, found, strict=True):
        if profile.count != first.count:
            raise SparkError(
                f"{path} counts {_counted(profile)}, {paths[0]} counts {_counted(first)}",
                hint="calibrate all of them with the same --count",
            )
    made = combine(found, factors, [path.name for path in paths])
    _require_readable(made, out)
    files.save(made, out)
    twice = [digest for digest, n in Counter(source.digest for source in made.sources).items() if n > 1]
    names = [next(source.file for source in made.sources if source.digest == digest) for digest in twice]
    warnings += tuple(f"{name} is in the merged profile more than once, and counts as often" for name in names)
    evidence = tuple(path for path, profile in zip(paths, found, strict=True) if profile.choices or profile.split)
    return MergeReport(out, made, evidence, warnings)


def combine(profiles: Sequence[Profile], factors: Sequence[int], names: Sequence[str]) -> Profile:
    """The sum of profiles of one model and shape, each times its factor; names: of their files.

    Tokens have the weights of the counts, sessions have none. A profile that was merged itself brings its own sources,
    with their weights times its factor, so the order in which profiles are merged changes counts and sources nowhere.
    Choices are left out: each was judged under the counts of one profile and on its sessions, and nothing follows from
    them for the sum. Raises SparkError where a sum exceeds 2**63 - 1.
    """
    counts = sum(
        profile.counts.astype(object) * factor for profile, factor in zip(profiles, factors, strict=True)
    )  # Python integers: exact, no overflow
    tokens = sum(profile.tokens * factor for profile, factor in zip(profiles, factors, strict=True))
    sources: list[Source] = []
    for profile, factor, name in zip(profiles, factors, names, strict=True):
        own = Source(1, profile.tokens, profile.sessions, profile.created, files.digest(profile), name)
        sources += [replace(source, weight=source.weight * factor) for source in profile.sources or (own,)]
    most = max(int(np.max(counts)), tokens, *(source.weight for source in sources))
    if most > _INT64_MAX:
        raise SparkError(f"the merged profile would count {most}, expected at most 2**63 - 1", hint=_SMALLER)
    return Profile(
        counts=np.asarray(counts).astype(np.int64),
        n_expert_used=profiles[0].n_expert_used,
        model_id=next((profile.model_id for profile in profiles if profile.model_id), None),
        tokens=tokens,
        sessions=sum(profile.sessions for profile in profiles),
        count=profiles[0].count,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        extra_lines=tuple(dict.fromkeys(line for profile in profiles for line in profile.extra_lines)),
        sources=tuple(sources),
    )


def _loaded(paths: Sequence[Path]) -> tuple[list[Profile], tuple[str, ...]]:
    """Profiles that must be of one model and shape, and warnings; WrongModelError names the first that is not."""
    found: list[Profile] = []
    warnings: tuple[str, ...] = ()
    named: tuple[Path, str] | None = None
    for path in paths:
        profile, _ = files.load(path)
        found.append(profile)
        if profile.model_id is None:
            warnings += (f"{path} does not name its model; assuming that it is the one of the others",)
        elif named is None:
            named = path, profile.model_id
        elif profile.model_id != named[1]:
            raise WrongModelError(
                f"{path} is of model {profile.model_id}, {named[0]} is of model {named[1]}",
                hint="expected profiles of one model; its quantizations have one id, other models or tunings do not",
            )
        if _shape(profile) != _shape(found[0]):
            raise WrongModelError(
                f"{path} counts {_shape(profile)}, {paths[0]} counts {_shape(found[0])}",
                hint="expected profiles of one model",
            )
    return found, warnings


def _shape(profile: Profile) -> str:
    n_layer, n_expert = profile.counts.shape
    return f"{n_layer} layers of {n_expert} experts, {profile.n_expert_used} active"


def _counted(profile: Profile) -> str:
    return "all tokens" if profile.count == "all" else "generated tokens"


def _require_readable(made: Profile, out: Path) -> None:
    """Raise SparkError for a profile that would be refused when it is read: too many lines or bytes."""
    text = files.format(made)
    lines, n_bytes = text.count("\n") - files.HEAD_LINES, len(text.encode())
    if lines > files.MAX_LINES or n_bytes > files.MAX_FILE_BYTES:
        raise SparkError(
            f"{out} would have {lines} layers and comments and {n_bytes} bytes, expected at most {files.MAX_LINES} "
            f"and {files.MAX_FILE_BYTES}",
            hint="merge fewer profiles, or remove comment lines from them",
        )
