"""Profiles beside each other: sums of counts, what one says, and how two differ."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats import profile as files
from engine.formats.profile import Choice, Profile
from engine.ground.errors import FileFormatError, SparkError, UsageError, WrongModelError
from spark.pipeline import profiles

ID, OTHER = "1f" * 32, "2e" * 32
INT64_MAX = 2**63 - 1
CHOICE = Choice(60.0, 1.0, 6, 4.5, 4.25, 5.0, 5.75, 4.75, 7, 6)

counts_of_layers = st.integers(0, 2**40)


@st.composite
def same_shape(draw: st.DrawFn, n: int) -> list[Profile]:
    """So many profiles of one model; dense layers are dense in all of them."""
    n_layer, n_expert = draw(st.integers(1, 4)), draw(st.integers(2, 11))
    dense = draw(st.lists(st.booleans(), min_size=n_layer, max_size=n_layer))
    used = draw(st.integers(1, n_expert))
    row = st.lists(counts_of_layers, min_size=n_expert, max_size=n_expert).filter(any)
    made = []
    for i in range(n):
        rows = [[0] * n_expert if flat else draw(row) for flat in dense]
        tokens, sessions = draw(st.integers(0, 2**40)), draw(st.integers(0, 99))
        made.append(Profile(np.array(rows, np.int64), used, ID, tokens, sessions, created=f"2026-0{i + 1}"))
    return made


def merged(made: list[Profile], *factors: int) -> Profile:
    return profiles.combine(made, factors, [f"{profile.created}.csv" for profile in made])


def of(profile: Profile) -> tuple[object, ...]:
    """What a merged profile says, whatever order it was made in."""
    return profile.counts.tolist(), profile.tokens, profile.sessions, sorted(profile.sources, key=str)


# --- merging ------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(same_shape(3), st.tuples(*[st.integers(1, 99)] * 3))
def test_merging_is_commutative_and_associative(made: list[Profile], factors: tuple[int, int, int]) -> None:
    a, b, c = made
    x, y, z = factors
    whole = merged([a, b, c], x, y, z)
    assert of(whole) == of(merged([c, a, b], z, x, y))
    assert of(whole) == of(merged([merged([a, b], x, y), c], 1, z)) == of(merged([a, merged([b, c], y, z)], x, 1))
    assert whole.counts.tolist() == (x * a.counts + y * b.counts + z * c.counts).tolist()
    assert whole.tokens == x * a.tokens + y * b.tokens + z * c.tokens
    assert [source.weight for source in whole.sources] == [x, y, z]
    assert files.parse(files.format(whole)) == whole


def test_weights_of_one_give_what_counting_all_of_it_gives() -> None:
    """Whatever tokens go to whom."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 7, (40, 3, 2))  # of each, two experts in three layers

    def counted(some: np.ndarray) -> Profile:
        rows = [np.bincount(some[:, layer].ravel(), minlength=7) for layer in range(3)]
        return Profile(np.array(rows, np.int64), 2, ID, len(some), 1, "generated")

    both = merged([counted(tokens[:13]), counted(tokens[13:])], *profiles.weights("1,1", 2))
    assert both.counts.tolist() == counted(tokens).counts.tolist() and both.tokens == 40 and both.count == "generated"


@pytest.mark.parametrize(
    ("given_weights", "factors"),
    [
        (None, (1, 1, 1)), ("1,1,1", (1, 1, 1)), ("2,2,2", (2, 2, 2)), (" 2, 1,3 ", (2, 1, 3)),
        ("0.5,1,1", (1, 2, 2)), ("1/3,0.5,2", (2, 3, 12)), ("0.10,0.2,0.3", (1, 2, 3)), ("6/3,1,1", (2, 1, 1)),
    ],
)  # fmt: skip
def test_weights_are_made_whole(given_weights: str | None, factors: tuple[int, ...]) -> None:
    assert profiles.weights(given_weights, 3) == factors


@pytest.mark.parametrize(
    "wrong",
    ["", "1", "1,1", "1,1,1,1", "1,1,0", "1,1,-1", "1,1,0.0", "1,1,1/0", "1,1,x", "1,1,1e9", "1,1,", "1,1,nan",
     "1,1,1/2/3", "1,1," + "9" * 10, "1,1,١"],
)  # fmt: skip
def test_weights_that_are_none_are_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match=r"^--weights .*expected"):
        profiles.weights(wrong, 3)


@settings(deadline=None)
@given(st.lists(st.fractions(Fraction(1, 1000), 1000, max_denominator=1000), min_size=1, max_size=4))
def test_whole_weights_have_the_proportions_of_those_given(given_weights: list[Fraction]) -> None:
    factors = profiles.weights(",".join(map(str, given_weights)), len(given_weights))
    assert [Fraction(factor, factors[0]) for factor in factors] == [each / given_weights[0] for each in given_weights]


@pytest.fixture
def team(tmp_path: Path) -> list[Path]:
    """Profiles of three people, in folders of their own, under the name that calibrate gives them."""
    paths = []
    for i, name in enumerate(("ann", "bob", "cy")):
        path = tmp_path / name / "m.gguf.spark.csv"
        path.parent.mkdir()
        counts = np.array([[0, 0, 0, 0], [4 + i, 3, 2, 1]], np.int64)
        about = {"tokens": 5, "sessions": 2, "created": f"2026-11-0{i + 1}T00:00:00Z", "choices": (CHOICE,)}
        files.save(Profile(counts, 2, ID, count="generated", **about), path)  # type: ignore[arg-type]
        paths.append(path)
    return paths


def test_what_was_merged_is_in_the_file_and_evidence_is_not(team: list[Path], tmp_path: Path) -> None:
    report = profiles.merge(team, tmp_path / "c", (2, 1, 1))
    made, warnings = files.load(tmp_path / "c", model_id=ID, shape=(2, 4))
    assert made == report.made and warnings == report.warnings == ()
    assert made.counts.tolist() == [[0] * 4, [2 * 4 + 5 + 6, 12, 8, 4]] and made.tokens == 20 and made.sessions == 6
    assert made.choices == () and report.evidence == tuple(team)
    assert [(s.weight, s.tokens, s.created[:10], s.file) for s in made.sources] == [
        (2, 5, "2026-11-01", "m.gguf.spark.csv"), (1, 5, "2026-11-02", "m.gguf.spark.csv"),
        (1, 5, "2026-11-03", "m.gguf.spark.csv"),
    ]  # fmt: skip
    assert [s.digest for s in made.sources] == [files.digest(files.load(path)[0]) for path in team]
    assert report.to_json()["sources"][0]["weight"] == 2 and report.to_json()["without_choices_of"] == [*map(str, team)]


def test_one_that_is_in_there_twice_is_named(team: list[Path], tmp_path: Path) -> None:
    profiles.merge(team[:2], tmp_path / "c", (1, 1))
    (warning,) = profiles.merge([tmp_path / "c", team[1]], tmp_path / "d", (1, 1)).warnings
    assert warning == "m.gguf.spark.csv is in the merged profile more than once, and counts as often"
    assert profiles.merge([tmp_path / "c", team[2]], tmp_path / "d", (1, 1)).warnings == ()


def test_a_profile_that_names_no_model_is_taken_for_one_of_it(team: list[Path], tmp_path: Path) -> None:
    files.save(replace(files.load(team[0])[0], model_id=None), team[0])
    report = profiles.merge(team, tmp_path / "c", (1, 1, 1))
    assert report.made.model_id == ID
    assert report.warnings == (f"{team[0]} does not name its model; assuming that it is the one of the others",)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model_id": OTHER}, WrongModelError, f"c is of model {OTHER}, .*csv is of model {ID}"),
        ({"n_expert_used": 3}, WrongModelError, "of 4 experts, 3 active, .* counts 2 layers of 4 experts, 2 active"),
        ({"counts": np.ones((2, 5), np.int64)}, WrongModelError, "c counts 2 layers of 5 experts, 2 active"),
        ({"counts": np.ones((3, 4), np.int64)}, WrongModelError, "c counts 3 layers of 4 experts, 2 active"),
        ({"count": "all"}, SparkError, "c counts all tokens, .* counts generated tokens"),
        ({"counts": np.full((2, 4), INT64_MAX)}, SparkError, f"would count {INT64_MAX + 4}, expected at most 2"),
        ({"tokens": INT64_MAX}, SparkError, f"would count {INT64_MAX + 5}, expected at most 2"),
    ],
)  # fmt: skip
def test_what_does_not_belong_together_is_refused(
    team: list[Path], tmp_path: Path, change: dict, error: type[SparkError], words: str
) -> None:
    path, out = tmp_path / "c", tmp_path / "out"
    files.save(replace(files.load(team[1])[0], **change), path)
    out.write_text("before")
    with pytest.raises(error, match=words):
        profiles.merge([team[0], path], out, (1, 1))
    assert out.read_text() == "before" and not list(tmp_path.glob(".*"))


def test_what_could_not_be_read_again_is_not_written(
    team: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_LINES", 5)
    profiles.merge(team, tmp_path / "c", (1, 1, 1))
    assert len(files.load(tmp_path / "c")[0].sources) == 3
    with pytest.raises(SparkError, match=r"d would have 6 layers and comments and \d+ bytes, expected at most 5 and"):
        profiles.merge([tmp_path / "c", team[0]], tmp_path / "d", (1, 1))
    monkeypatch.setattr(files, "MAX_FILE_BYTES", (tmp_path / "c").stat().st_size)
    with pytest.raises(SparkError, match="expected at most"):
        profiles.merge(team, tmp_path / "d", (1000, 1000, 1000))
    assert not (tmp_path / "d").exists()


def test_what_is_too_large_for_a_key_is_not_written(team: list[Path], tmp_path: Path) -> None:
    profile = files.load(team[0])[0]
    files.save(replace(profile, sessions=2**63 - 1), tmp_path / "many")
    with pytest.raises(SparkError, match=r"could not be read: .*found '9223372036854775\d+'"):
        profiles.merge([tmp_path / "many", team[0]], tmp_path / "d", (1, 1))
    assert not (tmp_path / "d").exists()


def test_a_damaged_or_missing_file_is_named(team: list[Path], tmp_path: Path) -> None:
    team[1].write_text(team[1].read_text()[:-4])
    with pytest.raises(FileFormatError, match=f"{team[1]}, line 6: expected 4 counts"):
        profiles.merge(team, tmp_path / "c", (1, 1, 1))
    with pytest.raises(SparkError, match=r"cannot read the profile .*none: No such file"):
        profiles.merge([team[0], tmp_path / "none"], tmp_path / "c", (1, 1))
    with pytest.raises(UsageError, match="at least two profiles to merge, found 1"):
        profiles.merge(team[:1], tmp_path / "c", (1,))
    assert not (tmp_path / "c").exists()


# --- what one says ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(same_shape(1))
def test_show_is_what_counting_by_hand_gives(tmp_path_factory: pytest.TempPathFactory, made: list[Profile]) -> None:
    path = tmp_path_factory.mktemp("p") / "p.csv"
    files.save(made[0], path)
    report = profiles.show(path)
    rows = {i: row for i, row in enumerate(made[0].counts.tolist()) if any(row)}
    assert [each.layer for each in report.layers] == list(rows)
    for each in report.layers:
        row = rows[each.layer]
        uses, by_use = sum(row), sorted(row, reverse=True)
        assert each.uses == uses and row[each.top_expert] == max(row) and row.index(max(row)) == each.top_expert
        assert each.top_share == pytest.approx(max(row) / uses)
        for pct in (10, 30, 60):
            assert each.coverage[pct] == pytest.approx(sum(by_use[: math.ceil(len(row) * pct / 100)]) / uses)
        bits = sum(-n / uses * math.log2(n / uses) for n in row if n)
        assert each.entropy == pytest.approx(bits / math.log2(len(row)))
    if rows:
        whole = sum(sum(sorted(row)[-profiles.top(len(row), 30) :]) for row in rows.values())
        assert report.coverage[30] == pytest.approx(whole / sum(map(sum, rows.values())))
    assert json.loads(json.dumps(report.to_json()))["layers"] == [
        {**each, "coverage": {str(pct): share for pct, share in each["coverage"].items()}}
        for each in report.to_json()["layers"]
    ]


@pytest.mark.parametrize(
    ("row", "entropy", "coverage"),
    [
        ([5] * 10, 1.0, {10: 0.1, 30: 0.3, 60: 0.6}),
        ([0, 7] + [0] * 8, 0.0, {10: 1.0, 30: 1.0, 60: 1.0}),
        ([INT64_MAX] * 4, 1.0, {10: 0.25, 30: 0.5, 60: 0.75}),  # whose sum is no int64
        ([3], 0.0, {10: 1.0, 30: 1.0, 60: 1.0}),
    ],
)
def test_rows_that_are_even_or_are_one_expert(
    tmp_path: Path, row: list[int], entropy: float, coverage: dict[int, float]
) -> None:
    files.save(Profile(np.array([row, [0] * len(row)], np.int64), 1), tmp_path / "p")
    report = profiles.show(tmp_path / "p")
    (layer,) = report.layers
    assert layer.entropy == pytest.approx(entropy) and str(layer.entropy)[0] != "-"
    assert layer.coverage == pytest.approx(coverage) and layer.uses == sum(row)
    assert report.coverage == pytest.approx(coverage)


def test_a_profile_without_counts_has_no_layers(tmp_path: Path) -> None:
    files.save(Profile(np.zeros((2, 3), np.int64), 1), tmp_path / "p")
    report = profiles.show(tmp_path / "p")
    assert report.layers == () and report.coverage == {} and report.to_json()["layers"] == []
    with pytest.raises(SparkError, match=r"neither .*p nor .*p counts anything"):
        profiles.diff(tmp_path / "p", tmp_path / "p")


# --- how two differ -----------------------------------------------------------------------------------


@settings(deadline=None)
@given(same_shape(1))
def test_a_profile_does_not_differ_from_itself(made: list[Profile]) -> None:
    layers, total = profiles.differences(made[0], made[0])
    for each in [*layers.values(), *([total] if layers else [])]:
        assert each.overlap == dict.fromkeys((10, 30, 60), 1.0) and each.distance == 0.0
        assert each.coverage == each.own and len(each.own) == 3


@settings(deadline=None)
@given(same_shape(2), st.integers(2, 9))
def test_a_difference_is_of_shares_and_no_placement_beats_the_own_one(made: list[Profile], factor: int) -> None:
    a, b = made
    layers, total = profiles.differences(a, b)
    back, _ = profiles.differences(b, a)
    more, _ = profiles.differences(replace(a, counts=a.counts * factor), b)
    assert list(layers) == np.flatnonzero(a.counts.any(axis=1)).tolist()
    for i, each in layers.items():
        p, q = ([Fraction(n, sum(row)) for n in row] for row in (a.counts[i].tolist(), b.counts[i].tolist()))
        assert each.distance == pytest.approx(float(sum(max(x - y, Fraction(0)) for x, y in zip(p, q, strict=True))))
        assert each.overlap == back[i].overlap == more[i].overlap
        assert each.distance == pytest.approx(back[i].distance) and each.coverage == pytest.approx(more[i].coverage)
        for pct in (10, 30, 60):
            n = profiles.top(len(p), pct)
            one, other = ({*sorted(range(len(r)), key=lambda e, r=r: (-r[e], e))[:n]} for r in (p, q))
            assert each.overlap[pct] == len(one & other) / n
    assert all(total.coverage[pct] <= total.own[pct] for pct in total.own)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=5).filter(any), min_size=1, max_size=3))
def test_the_own_placement_holds_the_most_that_so_many_slots_can(rows: list[list[int]]) -> None:
    """Against all ways to deal the slots out, each layer at least as many as a token needs, or its even share."""
    made, n = Profile(np.array(rows, np.int64), 2), len(rows)
    _, total = profiles.differences(made, made)
    for pct in (10, 30, 60):
        slots = int(Fraction(5 * n * pct, 100))
        ways = itertools.product(range(min(2, slots // n), 6), repeat=n)
        held = (sum(sum(sorted(r)[5 - k :]) for r, k in zip(rows, ks, strict=True)) for ks in ways if sum(ks) == slots)
        assert total.own[pct] == pytest.approx(max(held) / sum(map(sum, rows)))


def test_the_placement_of_another_by_hand() -> None:
    """At 30% there are 6 slots for 20 experts: 2 of each layer first, then the two most used of all."""
    a = Profile(np.array([[9, 8, 7, 6, 5, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]], np.int64), 2, ID)
    b = Profile(np.array([[1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 5, 6, 7, 8, 9]], np.int64), 2, ID)
    layers, total = profiles.differences(a, b)
    assert layers[0].own[30] == 30 / 35 and layers[0].coverage[30] == 17 / 35
    assert layers[1].own[30] == 2 / 10 and layers[1].coverage[30] == 4 / 10
    assert total.own[30] == 32 / 45 and total.coverage[30] == 21 / 45
    assert layers[0].overlap[30] == 1.0 and layers[1].overlap[30] == 0.0
    assert total.overlap[30] == 0.5 and total.distance == pytest.approx((0.5 + 0.5) / 2)


def test_a_layer_that_one_alone_counts_is_as_far_as_can_be(team: list[Path], tmp_path: Path) -> None:
    ann, _ = files.load(team[0])
    files.save(replace(ann, counts=np.array([[1, 1, 1, 1], [0, 0, 0, 0]], np.int64)), tmp_path / "c")
    report = profiles.diff(team[0], tmp_path / "c")
    assert {i: (each.overlap[60], each.distance, len(each.own)) for i, each in report.layers.items()} == {
        0: (0.0, 1.0, 0), 1: (0.0, 1.0, 3)
    }  # fmt: skip
    assert report.total.coverage == dict.fromkeys((10, 30, 60), 0.0)


def test_profiles_of_other_models_are_not_compared(team: list[Path], tmp_path: Path) -> None:
    ann, _ = files.load(team[0])
    for change, words in (({"model_id": OTHER}, "is of model"), ({"n_expert_used": 1}, "4 experts, 1 active")):
        files.save(replace(ann, **change), tmp_path / "c")
        with pytest.raises(WrongModelError, match=words):
            profiles.diff(team[0], tmp_path / "c")
    files.save(replace(ann, count="all", model_id=None), tmp_path / "c")  # prompts and replies may be compared
    report = profiles.diff(team[0], tmp_path / "c")
    assert len(report.warnings) == 1 and report.to_json()["b"]["count"] == "all"
