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
import numpy.typing as npt

from engine.formats import profile as files
from engine.formats.profile import Profile, Source
from engine.ground.errors import FileFormatError, SparkError, UsageError, WrongModelError
from engine.placing import placement
from engine.placing.placement import Experts

RESIDENCIES = (10, 30, 60)  # percent
_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9}|/[0-9]{1,9})?")  # short: a numerator of a billion digits is no weight
_INT64_MAX = int(np.iinfo(np.int64).max)
_EXPECTED = "positive numbers separated by commas, like 2,1 or 0.5,1 or 1/3,2/3"
_SMALLER = "give smaller --weights"

Shares = dict[int, float]  # 0..1, by residency


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


# --- what one says ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layer:
    """How even an MoE layer's uses are.

    uses: active experts counted. coverage: share of them that the most used experts have, so many as `top` says.
    entropy: of the shares of uses, over that of equal ones: 1 where all experts are used alike, 0 where one is.
    top_expert, top_share: the most used one (of equals the lowest), and its share.
    """

    layer: int
    uses: int
    coverage: Shares
    entropy: float
    top_expert: int
    top_share: float


@dataclass(frozen=True, slots=True)
class ShowReport:
    """What a profile says; layers without counts, such as dense ones, are left out."""

    path: Path
    profile: Profile
    layers: tuple[Layer, ...]

    @property
    def coverage(self) -> Shares:
        """As of one layer, of all uses together; empty without counts."""
        uses = sum(layer.uses for layer in self.layers)
        return {
            pct: sum(layer.coverage[pct] * layer.uses for layer in self.layers) / uses
            for pct in RESIDENCIES
            if self.layers
        }

    def to_json(self) -> dict[str, Any]:
        """The report as `--json` writes it."""
        profile = self.profile
        n_layer, n_expert = profile.counts.shape
        return {
            "profile": str(self.path),
            **_about(profile),
            "n_layer": n_layer,
            "n_expert": n_expert,
            "n_expert_used": profile.n_expert_used,
            "sources": [asdict(source) for source in profile.sources],
            "choices": [asdict(choice) for choice in profile.choices],
            "coverage": self.coverage,
            "layers": [asdict(layer) for layer in self.layers],
        }


def top(n_expert: int, pct: int) -> int:
    """How many experts are `pct` percent of a layer's, rounded up."""
    return -(-n_expert * pct // 100)


def show(path: Path) -> ShowReport:
    """Read a profile and say how even its layers are; raises what `engine.formats.profile.load` does."""
    profile, _ = files.load(path)
    layers = [_layer(i, row) for i, row in enumerate(profile.counts) if row.any()]
    return ShowReport(path, profile, tuple(layers))


def _layer(index: int, row: npt.NDArray[np.int64]) -> Layer:
    shares = _shares(row)
    by_use = np.sort(shares)[::-1]
    some = shares[shares > 0]
    even = math.log(row.size)
    return Layer(
        layer=index,
        uses=sum(row.tolist()),
        coverage={pct: float(by_use[: top(row.size, pct)].sum()) for pct in RESIDENCIES},
        entropy=float((some * np.log(1 / some)).sum()) / even if even else 0.0,
        top_expert=int(row.argmax()),
        top_share=float(by_use[0]),
    )


def _shares(row: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Of the row's uses, [E]; zeros where there are none."""
    counts = row.astype(np.float64)  # whose sum does not overflow
    total = counts.sum()
    return counts / total if total else counts


def _about(profile: Profile) -> dict[str, Any]:
    about = {key: getattr(profile, key) for key in ("model_id", "tokens", "sessions", "count")}
    return about | {"profile_created": profile.created}  # `created` is when the figures were


# --- how two differ -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """How far the second profile is from the first in one layer, or in all of them; shares are of 0 to 1.

    overlap: experts that are among the most used of both, of so many as `top` says. coverage: the share of the first's
    uses that would find their expert in a slot under the second's placement; own: under its own. A placement gives
    layers slots by their uses, so in one layer coverage may exceed own. Both are empty where the first has no uses.
    distance: half the sum of the differences of shares of uses (total variation): the share of uses that would have to
    go to other experts for the two to be alike.
    """

    overlap: Shares
    coverage: Shares
    own: Shares
    distance: float


@dataclass(frozen=True, slots=True)
class DiffReport:
    """How two profiles of a model differ: by layer, without those that neither counts, and in all.

    total: overlap and distance are means over layers, coverage and own of all uses together.
    """

    paths: tuple[Path, Path]
    profiles: tuple[Profile, Profile]
    layers: dict[int, Difference]
    total: Difference
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as `--json` writes it."""
        named = zip(("a", "b"), self.paths, self.profiles, strict=True)
        return {
            **{name: {"profile": str(path), **_about(profile)} for name, path, profile in named},
            "total": asdict(self.total),
            "layers": [{"layer": layer} | asdict(difference) for layer, difference in self.layers.items()],
        }


def diff(first: Path, second: Path) -> DiffReport:
    """Compare two profiles of one model, which may count other tokens.

    Raises WrongModelError for those of two models or shapes, SparkError where neither counts anything.
    """
    (a, b), warnings = _loaded([first, second])
    layers, total = differences(a, b)
    if not layers:
        raise SparkError(f"neither {first} nor {second} counts anything", hint="`spark calibrate` writes profiles")
    return DiffReport((first, second), (a, b), layers, total, warnings)


def differences(a: Profile, b: Profile) -> tuple[dict[int, Difference], Difference]:
    """Of each layer that either counts, and of all; of profiles of one shape."""
    counting = np.flatnonzero(a.counts.any(axis=1) | b.counts.any(axis=1)).tolist()
    by_b, by_a = (_held(a, other, counting) for other in (b, a))
    layers = {}
    for i in counting:
        ours, theirs = a.counts[i], b.counts[i]
        one_sided = not (ours.any() and theirs.any())
        layers[i] = Difference(
            overlap={pct: 0.0 if one_sided else _overlap(ours, theirs, top(ours.size, pct)) for pct in RESIDENCIES},
            coverage={pct: share for pct, held in by_b.items() for share in _of(held[i], ours)},
            own={pct: share for pct, held in by_a.items() for share in _of(held[i], ours)},
            distance=1.0 if one_sided else float(np.abs(_shares(ours) - _shares(theirs)).sum()) / 2,
        )
    n = max(len(layers), 1)
    total = Difference(
        overlap={pct: sum(each.overlap[pct] for each in layers.values()) / n for pct in RESIDENCIES},
        coverage={pct: share for pct, held in by_b.items() for share in _of(sum(held.values()), a.counts)},
        own={pct: share for pct, held in by_a.items() for share in _of(sum(held.values()), a.counts)},
        distance=sum(each.distance for each in layers.values()) / n,
    )
    return layers, total


def _held(of: Profile, by: Profile, layers: Sequence[int]) -> dict[int, dict[int, int]]:
    """By residency and layer: uses of the one whose expert has a slot under the other's placement.

    As serving places where all experts take as many bytes, which a profile does not say.
    """
    n_layer, n_expert = by.counts.shape
    sizes = [int(layer in layers) for layer in range(n_layer)]
    experts = Experts(by.counts, sizes, n_used=by.n_expert_used)
    held = {}
    for pct in RESIDENCIES:
        placed = placement.best(experts, placement.residency_budget(n_expert, sizes, pct))
        held[pct] = {i: sum(of.counts[i, list(placed.residents[i])].tolist()) for i in layers}
    return held


def _of(held: int, counts: npt.NDArray[np.int64]) -> tuple[float, ...]:
    """The share of the counts that is held; nothing where there are none."""
    total = sum(counts.ravel().tolist())
    return (held / total,) if total else ()


def _overlap(ours: npt.NDArray[np.int64], theirs: npt.NDArray[np.int64], n: int) -> float:
    one, other = (set(np.argsort(-row, kind="stable")[:n].tolist()) for row in (ours, theirs))
    return len(one & other) / n


# --- reading several ----------------------------------------------------------------------------------


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
    try:
        files.parse(text, str(out))
    except FileFormatError as error:
        raise SparkError(
            f"the merged profile could not be read: {error.message}", hint="give smaller --weights, or fewer profiles"
        ) from error
