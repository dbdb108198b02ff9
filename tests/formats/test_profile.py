"""The profile's text format, its errors, its atomic writes, and what merging keeps and forgets."""

import errno
import math
import os
import subprocess
import sys
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.formats import profile as profiles
from engine.formats.profile import Choice, Profile, Source
from engine.ground.errors import FileFormatError, SparkError, WrongModelError

ID, OTHER = "1f" * 32, "2e" * 32
INT64_MAX = 2**63 - 1

SAMPLE = f"""\
# hotness table: n_layer=3 n_expert=4 n_expert_used=2
# format: one row per layer, columns are expert activation counts (expert 0..N-1)
# spark: version=1 model={ID} tokens=7 sessions=2 count=generated created=2026-11-21T10:00:00Z
# spark-choice: residency=40 cache=1 memory=6 misses=8.5 low=8.25 high=9 lru=9.75 static=8.75 tokens=7 sessions=6
# spark-choice: residency=60 cache=0.25 memory=5 misses=4.5 low=4.25 high=5 lru=5.75 static=4.75 tokens=7 sessions=6
0,0,0,0
1,2,3,8
0,14,0,0
"""
MERGED = "# spark-merged: weight=2 tokens=9 sessions=1 digest=ab file=a%20b.csv"


@st.composite
def profile_values(draw):
    n_layer, n_expert = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    count = st.one_of(st.integers(0, 9), st.integers(0, INT64_MAX))
    row = st.lists(count, min_size=n_expert, max_size=n_expert)
    words = st.text(st.characters(codec="utf-8", exclude_categories=["Z", "C"]), max_size=9)
    comment = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=20)
    whole, figure = st.integers(0, INT64_MAX), st.floats(0, allow_infinity=False)
    choice = st.builds(
        Choice, st.floats(0, 100), st.floats(0, 1), st.integers(0, 16), *[figure] * 5, whole, whole
    )
    source = st.builds(
        Source, st.integers(1, INT64_MAX), whole, whole, words, st.text("0123456789abcdef", min_size=1, max_size=64),
        st.text(st.characters(codec="utf-8"), max_size=9) | st.just("a\udcff %2F"),
    )  # fmt: skip
    return Profile(
        counts=np.array(draw(st.lists(row, min_size=n_layer, max_size=n_layer)), np.int64),
        n_expert_used=draw(st.integers(1, n_expert)),
        model_id=draw(st.none() | words.filter(bool)),
        tokens=draw(st.integers(0, INT64_MAX)),
        sessions=draw(st.integers(0, 99)),
        count=draw(st.sampled_from(["generated", "all"])),
        created=draw(words),
        choices=tuple(sorted(draw(st.lists(choice, max_size=3)), key=lambda made: made.residency_pct)),
        extra_lines=tuple(f"#! {line}".strip() for line in draw(st.lists(comment, max_size=3))),
        sources=tuple(draw(st.lists(source, max_size=3))),
    )


def assert_equal(a, b):
    for field in fields(Profile):
        x, y = getattr(a, field.name), getattr(b, field.name)
        assert np.array_equal(x, y) if field.name == "counts" else x == y, field.name
    assert a == b and a.counts.dtype == b.counts.dtype == np.int64


@settings(deadline=None)
@given(profile_values())
def test_parse_gives_back_what_format_wrote(profile):
    assert_equal(profiles.parse(profiles.format(profile)), profile)


def test_the_sample_reads_and_writes_as_specified():
    profile = profiles.parse(SAMPLE)
    assert profile.counts.tolist() == [[0, 0, 0, 0], [1, 2, 3, 8], [0, 14, 0, 0]]
    assert (profile.n_expert_used, profile.model_id, profile.tokens, profile.sessions) == (2, ID, 7, 2)
    assert (profile.count, profile.created) == ("generated", "2026-11-21T10:00:00Z")
    assert profile.choices == (
        Choice(40.0, 1.0, 6, 8.5, 8.25, 9.0, 9.75, 8.75, 7, 6), Choice(60.0, 0.25, 5, 4.5, 4.25, 5.0, 5.75, 4.75, 7, 6)
    )  # fmt: skip
    assert [made.words for made in profile.choices] == [
        "pin nothing, remember 64 steps", "pin 75%, remember 32 steps"
    ]  # fmt: skip
    assert profiles.format(profile) == SAMPLE


def test_a_profile_of_another_engine_reads():
    profile = profiles.parse("# hotness table: n_layer=1 n_expert=3 n_expert_used=1\n5,0,2\n")
    assert profile.counts.tolist() == [[5, 0, 2]]
    assert (profile.model_id, profile.tokens, profile.count, profile.choices) == (None, 0, "all", ())


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "\ufeff" + text,
        lambda text: text.replace("8\n", "8,\n"),
        lambda text: text.replace("1,2,3,8", " 1 , 2,\t3,8 "),
        lambda text: text.replace("\n", "\n\n   \n"),
        lambda text: text.removesuffix("\n"),
        lambda text: text.replace("# ", "#"),
        lambda text: text.replace("tokens=7", "moons=4 tokens=7 later"),
        lambda text: "\n".join(text.splitlines()[3:] + text.splitlines()[:3]),
        lambda text: text.replace("14", "0" * 30 + "14"),
    ],
)
def test_tolerated(change):
    text = change(SAMPLE)
    assert text != SAMPLE
    profile = profiles.parse(text)
    assert_equal(replace(profile, extra_lines=()), profiles.parse(SAMPLE))
    assert len(profile.extra_lines) == text.count("#format")


def test_what_a_profile_was_merged_from_is_kept():
    merged = SAMPLE.replace("0,0,0,0", f"{MERGED}\n0,0,0,0")
    assert profiles.parse(merged).sources == (Source(2, 9, 1, "", "ab", "a b.csv"),)
    assert profiles.format(profiles.parse(merged)) == merged


def test_unknown_comment_lines_are_kept():
    profile = profiles.parse("# first\n" + SAMPLE.replace("1,2", "#second = 1,2\n1,2") + "## third")
    assert profile.extra_lines == ("# first", "#second = 1,2", "## third")
    assert profiles.parse(profiles.format(profile)).extra_lines == profile.extra_lines


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("n_expert=4", "n_expert=5"), r"p, line 6: expected 5 counts \(n_expert\), found 4"),
        (("1,2,3,8", "1,2,3"), r"p, line 7: expected 4 counts \(n_expert\), found 3"),
        (("1,2,3,8", "1,2,3,8,9"), r"p, line 7: expected 4 counts \(n_expert\), found 5"),
        (("1,2,3,8", "1,2,,8"), r"p, line 7: expected integers .*, found '' in column 3"),
        (("1,2,3,8", "1,-2,3,8"), r"p, line 7: expected integers .*, found '-2' in column 2"),
        (("1,2,3,8", "1,2,3,8.0"), r"p, line 7: .*found '8\.0' in column 4"),
        (("1,2,3,8", "1,2,3,nan"), r"found 'nan'"),
        (("1,2,3,8", "1e3,2,3,8"), r"found '1e3'"),
        (("1,2,3,8", "1_0,2,3,8"), r"found '1_0'"),
        (("1,2,3,8", "١,2,3,8"), r"found '١'"),
        (("1,2,3,8", "9223372036854775808,2,3,8"), r"found '9223372036854775808'"),
        (("1,2,3,8", "9" * 5000 + ",2,3,8"), r"found '9{40}'"),
        (("0,14,0,0\n", ""), r"p, line 7: expected 3 rows of counts \(n_layer\), found 2"),
        (("0,14,0,0\n", "0,14,0,0\n0,0,0,0\n"), r"p, line 9: expected 3 rows of counts \(n_layer\), found 4"),
        (("n_layer=3", "n_layer=999999999999"), r"expected 999999999999 rows"),
        (("n_layer=3", "n_layer=0"), r"p, line 1: expected n_layer=N, N at least 1, found '0'"),
        (("n_layer=3 ", ""), r"p, line 1: expected n_layer=N, N at least 1, found 'nothing'"),
        (("n_expert=4", "n_expert=four"), r"expected n_expert=N, .*, found 'four'"),
        (("n_expert_used=2", "n_expert_used=5"), r"p, line 1: expected n_expert_used <= 4, found 5"),
        (("# hotness table:", "# heat table:"), r"p: expected a line '# hotness table: .*found none"),
        (("1,2,3,8", "# hotness table: n_layer=3\n1,2,3,8"), r"p, line 7: .*found a second"),
        (("1,2,3,8", "# spark: version=1\n1,2,3,8"), r"p, line 7: .*found a second"),
        (("version=1", "version=2"), r"p, line 3: expected version=1, found 2"),
        (("version=1", "revision=1"), r"p, line 3: expected version=N"),
        (("tokens=7 sessions=2", "tokens=-7 sessions=2"), r"expected tokens=N, N at least 0, found '-7'"),
        (("sessions=2", "sessions=two"), r"found 'two'"),
        (("count=generated", "count=some"), r"expected count=generated or count=all, found 'some'"),
        (("00Z\n", "00Z split=40:0.375,60:1.25\n"), r"expected split=PCT:FRACTION.*found '40:0\.375,60:1\.25'"),
        (("00Z\n", "00Z split=60\n"), r"expected split"),
        (("00Z\n", "00Z split=-0.5:0.5\n"), r"expected split"),
        (("00Z\n", "00Z split=100.5:0.5\n"), r"expected split"),
        (("00Z\n", "00Z split=50:-0.5\n"), r"expected split"),
        (("00Z\n", "00Z split=nan:nan\n"), r"expected split"),
        (("cache=0.25", "cache=1.25"), r"p, line 5: expected cache=a number of 0 to 1, found '1\.25'"),
        (("memory=6", "memory=17"), r"p, line 4: expected memory=a number of 0 to 16, found '17'"),
        (("memory=6", "memory=5.5"), r"expected memory"),
        (("residency=60", "residency=nan"), r"expected residency=a number of 0 to 100, found 'nan'"),
        (("low=8.25", "low=-1"), r"expected low=a number of at least 0, found '-1'"),
        (("high=9", "high=inf"), r"expected high"),
        (("sessions=6\n", "\n"), r"expected sessions=a number of at least 0, found 'nothing'"),
        (("0,0,0,0", f"{MERGED}\n0,0,0,0".replace("weight=2", "weight=0")), r"line 6: expected weight=N, N at least 1"),
        (("0,0,0,0", f"{MERGED}\n0,0,0,0".replace("ab", "AB")), r"p, line 6: expected digest=HEX.*found 'AB'"),
        (("0,0,0,0", f"{MERGED}\n0,0,0,0".replace("tokens=9 ", "")), r"expected tokens=N.*found 'nothing'"),
    ],
)
def test_malformed(change, message):
    assert change[0] in SAMPLE
    with pytest.raises(FileFormatError, match=message):
        profiles.parse(SAMPLE.replace(*change), "p")


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_mutated_profile_reads_or_is_refused_with_an_explanation(data):
    text = list(SAMPLE)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        text[at : at + data.draw(st.integers(0, 5))] = data.draw(st.text(max_size=3))
    try:
        profile = profiles.parse("".join(text))
    except FileFormatError as error:
        assert "expected" in error.message and "found" in error.message
    else:
        assert_equal(profiles.parse(profiles.format(profile)), profile)


def test_a_profile_of_another_model_is_refused_with_both_ids(tmp_path):
    path = tmp_path / "m.gguf.spark.csv"
    path.write_text(SAMPLE)
    assert profiles.load(path, model_id=ID, shape=(3, 4)) == (profiles.parse(SAMPLE), ())
    assert profiles.load(path)[1] == ()
    with pytest.raises(WrongModelError, match=f"{ID}.*{OTHER}"):
        profiles.load(path, model_id=OTHER)
    with pytest.raises(WrongModelError, match="3 layers of 4 experts, the model has 3 layers of 5"):
        profiles.load(path, model_id=ID, shape=(3, 5))


def test_a_profile_without_an_id_loads_with_a_warning(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text(SAMPLE.replace(f"model={ID} ", ""))
    profile, warnings = profiles.load(path, model_id=ID, shape=(3, 4))
    assert profile.model_id is None
    assert len(warnings) == 1 and str(path) in warnings[0]


def test_unreadable_files(tmp_path, monkeypatch):
    with pytest.raises(SparkError, match=r"cannot read the profile .*No such file"):
        profiles.load(tmp_path / "none.csv")
    with pytest.raises(SparkError, match="cannot read the profile"):
        profiles.load(tmp_path)
    (tmp_path / "bytes").write_bytes(SAMPLE.encode() + b"\xff")
    with pytest.raises(
        FileFormatError, match=f"expected UTF-8 text, found byte 0xff at offset {len(SAMPLE)}"
    ):
        profiles.load(tmp_path / "bytes")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(FileFormatError, match="hotness table"):
        profiles.load(tmp_path / "empty")
    monkeypatch.setattr(profiles, "MAX_FILE_BYTES", 10)
    (tmp_path / "large").write_text(SAMPLE)
    with pytest.raises(FileFormatError, match="at most 10 bytes"):
        profiles.load(tmp_path / "large")


def test_save_replaces_the_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "m.gguf.spark.csv"
    profile = profiles.parse(SAMPLE)
    previous = os.umask(0o077)
    try:
        for tokens in (7, 8):
            profiles.save(replace(profile, tokens=tokens), path)
    finally:
        os.umask(previous)
    assert profiles.load(path)[0].tokens == 8
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644


def test_save_follows_a_symbolic_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "real.csv", tmp_path / "link.csv"
    link.symlink_to(target)
    profiles.save(profiles.parse(SAMPLE), link)
    assert link.is_symlink() and target.read_text() == SAMPLE


def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "p.csv"
    path.write_text("old")

    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(SparkError, match="No space left on device") as failed:
        profiles.save(profiles.parse(SAMPLE), path)
    assert "the profile that was there" in failed.value.hint
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(SparkError, match="cannot write the profile"):
        profiles.save(profiles.parse(SAMPLE), tmp_path / "no" / "folder" / "p.csv")


def test_a_disk_that_fills_while_writing(tmp_path):
    """The kernel refuses the bytes themselves: a limit on the size of files stands for a full disk."""
    path = tmp_path / "p.csv"
    path.write_text("old")
    code = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from engine.ground.errors import SparkError
from engine.formats.profile import Profile, save
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    save(Profile(np.full((40, 256), 123456789), 8), Path(sys.argv[1]))
except SparkError as error:
    print(error.message)
"""
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "cannot write the profile" in run.stdout and "File too large" in run.stdout
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_default_path():
    assert profiles.default_path(Path("/m/a-00001-of-00003.gguf")) == Path(
        "/m/a-00001-of-00003.gguf.spark.csv"
    )


def test_what_a_choice_says_to_do():
    base = profiles.parse(SAMPLE).choices[0]
    for (cache, memory), words in {
        (1.0, 6): "pin nothing, remember 64 steps", (0.25, 5): "pin 75%, remember 32 steps",
        (0.5, 0): "pin 50%, the rest is LRU", (1.0, 0): "pin nothing, the rest is LRU", (0.0, 0): "pin everything",
    }.items():  # fmt: skip
        assert replace(base, cache_fraction=cache, memory=memory).words == words


def test_choices_are_in_the_order_of_their_residencies():
    lines = SAMPLE.splitlines()
    lines[3], lines[4] = lines[4], lines[3]
    assert profiles.parse("\n".join(lines)) == profiles.parse(SAMPLE)


def test_profiles_are_equal_where_their_files_are():
    profile = profiles.parse(SAMPLE)
    assert profile == replace(profile, counts=profile.counts.copy())
    assert profile != replace(profile, tokens=8) and profile != "profile" and profile != profiles.format(profile)


def test_how_much_a_file_may_hold(tmp_path, monkeypatch):
    """Layers, comments and choices together, characters of a comment, and bytes: as many, and one more."""
    assert (profiles.MAX_FILE_BYTES, profiles.MAX_LINES, profiles.MAX_COMMENT_CHARS) == (1 << 24, 4096, 1 << 16)
    monkeypatch.setattr(profiles, "MAX_LINES", 7)
    most = SAMPLE + "# one\n# two\n"
    assert len(profiles.parse(most).extra_lines) == 2
    for more in ("# three\n", "1,2,3,8\n", SAMPLE.splitlines()[3].replace("40", "50") + "\n"):
        with pytest.raises(FileFormatError, match="line 11: expected at most 7 layers and comments"):
            profiles.parse(most + more)
    assert profiles.parse(most + "\n\n" + SAMPLE.splitlines()[1]) == profiles.parse(most)
    monkeypatch.setattr(profiles, "MAX_COMMENT_CHARS", 300)
    assert len(profiles.parse(SAMPLE + "#" * 300).extra_lines[0]) == 300
    with pytest.raises(FileFormatError, match="line 9: expected a comment of at most 300 characters"):
        profiles.parse(SAMPLE + "#" * 301)
    wide = "# hotness table: n_layer=1 n_expert=99 n_expert_used=1\n" + ",".join(["123"] * 99)
    assert profiles.parse(wide).counts.sum() == 99 * 123  # a row of counts is no comment
    (tmp_path / "p").write_text(SAMPLE)
    for most_bytes in (len(SAMPLE), len(SAMPLE) - 1):
        monkeypatch.setattr(profiles, "MAX_FILE_BYTES", most_bytes)
        if most_bytes == len(SAMPLE):
            assert profiles.load(tmp_path / "p")[0] == profiles.parse(SAMPLE)
        else:
            with pytest.raises(FileFormatError, match=f"at most {most_bytes} bytes"):
                profiles.load(tmp_path / "p")


@pytest.mark.parametrize("key", ["n_layer=3", "n_expert=4", "n_expert_used=2", "version=1"])
def test_least_numbers(key):
    name = key.partition("=")[0]
    with pytest.raises(FileFormatError, match=f"expected {name}=N, N at least 1, found '0'"):
        profiles.parse(SAMPLE.replace(key, f"{name}=0"))


def test_what_a_file_does_not_say():
    """Counts of an older version are of all tokens; a comment that only resembles ours is kept as it is."""
    assert profiles.parse(SAMPLE.replace("count=generated ", "")).count == "all"
    profile = profiles.parse(SAMPLE.replace("# spark: version", "# spark version"))
    assert (profile.model_id, profile.tokens, profile.sessions) == (None, 0, 0) and len(profile.extra_lines) == 1
    assert profile.created == "" and profiles.parse(profiles.format(profile)) == profile
    assert "# spark: version=1 tokens=0 sessions=0 count=all\n" in profiles.format(Profile(profile.counts, 2))


@pytest.mark.parametrize(("split", "pairs"), [
    ("0:0,100:1", ((0.0, 0.0), (100.0, 1.0))), ("100:0.5,0:1", ((0.0, 1.0), (100.0, 0.5))), ("", ()),
])  # fmt: skip
def test_splits_to_their_bounds(split, pairs):
    assert profiles.parse(SAMPLE.replace("00Z\n", f"00Z split={split}\n")).split == pairs


def test_the_choice_of_the_nearest_residency_counts():
    measured = profiles.parse(SAMPLE)
    found = [measured.choice_for(pct).residency_pct for pct in (10, 40, 49, 50, 51, 60, 99)]
    assert found == [40, 40, 40, 40, 60, 60, 60]
    assert replace(measured, choices=()).choice_for(50) is None


def test_a_profile_of_a_version_that_measured_splits_reads():
    """Written by `spark calibrate` of commit 3a3f828 on the sample sessions."""
    path = Path(__file__).parents[1] / "golden" / "profile-with-split.spark.csv"
    profile, warnings = profiles.load(path, shape=(6, 32))
    assert not warnings and profile.tokens == 46479 and profile.choices == ()
    assert [pct for pct, _ in profile.split] == [20, 40, 60, 80]
    assert "split" not in profiles.format(profile)


@st.composite
def counts_of_tokens(draw, n_layer=2, n_expert=5, used=2, most=3 * profiles.WINDOW_TOKENS):
    """Counts of a number of tokens, each with `used` uses in every layer."""
    tokens = draw(st.one_of(st.integers(0, 40), st.integers(0, most)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = [rng.multinomial(tokens * used, rng.dirichlet(np.full(n_expert, 0.4))) for _ in range(n_layer)]
    return np.array(rows, np.int64)


DECAYS = st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0])


@settings(deadline=None)
@given(old=counts_of_tokens(), new=counts_of_tokens(), decay=DECAYS)
@example(old=np.zeros((2, 5), np.int64), new=np.full((2, 5), 3), decay=0.5)
def test_merge_is_bounded_on_both_sides(old, new, decay):
    used = 2
    before = Profile(old, used, tokens=int(old[0].sum()) // used)
    after = profiles.merge(before, new, decay)
    capacity = max(int(old[0].sum()), profiles.WINDOW_TOKENS * used)
    assert (after.counts.sum(axis=1) <= capacity).all()  # does not grow past the window or what it was
    assert (after.counts >= np.floor(old * decay)).all()  # nothing is forgotten faster than decay
    assert after.tokens <= capacity // used
    if old[0].sum() + new[0].sum() <= profiles.WINDOW_TOKENS * used and decay == 0.0:
        assert np.array_equal(after.counts, old + new)  # a small profile just adds
    if not new.any():
        assert after == before


def literal_merge(old, new, used, decay, tokens):
    """The docstring of `merge` in fractions: counts, and the tokens behind them."""
    M, m = (Fraction(max(sum(row) for row in rows), used) for rows in (old, new))
    C = max(M, Fraction(profiles.WINDOW_TOKENS))
    g = min(Fraction(1), (1 - Fraction(decay)) * C / m) if m else Fraction(0)
    k = min(Fraction(1), (C - g * m) / M) if M else Fraction(1)
    merged = []
    for before, served in zip(old, new, strict=True):
        exact = [k * a + g * b for a, b in zip(before, served, strict=True)]
        whole = [math.floor(x) for x in exact]
        by_loss = sorted(range(len(exact)), key=lambda i: (whole[i] - exact[i], i))
        for i in by_loss[: math.floor(sum(exact)) - sum(whole)]:
            whole[i] += 1
        merged.append(whole)
    return merged, math.floor(k * tokens + g * m)


@settings(deadline=None)
@given(old=counts_of_tokens(), new=counts_of_tokens(), decay=DECAYS, used=st.integers(1, 3), short=st.integers(0, 60))
@example(old=np.full((2, 5), 60_000), new=np.full((2, 5), 3), decay=0.5, used=2, short=50_000)
@example(old=np.zeros((2, 5), np.int64), new=np.full((2, 5), 80_000), decay=0.5, used=2, short=0)
def test_merge_is_what_its_description_says(old, new, decay, used, short):
    # Rows need not have the same sum: a trace may miss some, and a dense layer counts nothing.
    new, old = new.copy(), old.copy()
    new[0], old[1] = np.maximum(new[0] - short, 0), np.maximum(old[1] - short, 0)
    before = Profile(old, used, tokens=max(int(old[0].sum()) // used - short, 0))
    counts, tokens = literal_merge(old.tolist(), new.tolist(), used, decay, before.tokens)
    after = profiles.merge(before, new, decay)
    assert after.counts.tolist() == counts and after.counts.dtype == np.int64
    assert after == replace(before, counts=after.counts, tokens=tokens)


def test_merge_adds_while_the_profile_is_small():
    before = Profile(np.array([[30, 10], [0, 0], [0, 40]]), 2, model_id=ID, tokens=20, created="then")
    after = profiles.merge(before, np.array([[1, 5], [0, 0], [6, 0]]), 0.5)
    assert after == replace(before, counts=np.array([[31, 15], [0, 0], [6, 40]]), tokens=23)


@settings(deadline=None, max_examples=20)
@given(
    start=counts_of_tokens(most=2 * profiles.WINDOW_TOKENS),
    session=counts_of_tokens(most=9000),
    decay=st.sampled_from([0.3, 0.9]),
)
def test_merging_for_ever_neither_grows_nor_forgets_at_once(start, session, decay):
    used = 2
    profile = Profile(start, used)
    bound = max(int(start[0].sum()), profiles.WINDOW_TOKENS * used)
    for _ in range(60):
        profile = profiles.merge(profile, session, decay)
        assert (profile.counts.sum(axis=1) <= bound).all()
    # after n merges of m tokens the calibration has the weight (1 - m/C)^n, here as a lower bound with
    # room for rounding: at most one use of an expert per merge
    weight = (1 - min(1.0, session[0].sum() / bound)) ** 60
    weight = max(weight, decay**60)
    assert (profile.counts >= np.floor(start * weight) - 60).all()


def test_merging_small_sessions_does_not_wear_small_counts_away():
    """Rounding down would take the 3s to 0 in three merges; the row's sum must stay at the window."""
    used, window = 1, profiles.WINDOW_TOKENS
    start = np.full((1, 64), 3)
    start[0, 0] = window - 3 * 63
    profile = Profile(start, used)
    session = np.zeros((1, 64), np.int64)
    session[0, 1] = 10
    for _ in range(50):
        profile = profiles.merge(profile, session, 0.5)
    assert profile.counts.sum() == window
    assert (profile.counts[0, 2:] >= 2).all()
    assert 450 <= profile.counts[0, 1] <= 503


def test_what_is_served_takes_over_with_the_time_constant_stated():
    window = profiles.WINDOW_TOKENS
    profile = Profile(np.array([[window * 2, 0, 0]]), 1)  # C = 2 windows
    session = np.array([[0, window // 100, window // 100]])
    for _ in range(100):  # as many tokens served as the calibration had
        profile = profiles.merge(profile, session, 0.5)
    assert profile.counts.sum() == window * 2
    assert profile.counts[0, 0] / (window * 2) == pytest.approx(np.exp(-1), abs=0.01)


def test_one_huge_session_leaves_the_calibration_its_share():
    window = profiles.WINDOW_TOKENS
    profile = profiles.merge(Profile(np.array([[window, 0]]), 1), np.array([[0, 1000 * window]]), 0.75)
    assert profile.counts.tolist() == [[window * 3 // 4, window // 4]]


def test_merge_of_counts_near_the_limit_of_int64():
    huge = Profile(np.array([[INT64_MAX, INT64_MAX]]), 1)
    assert profiles.merge(huge, np.array([[INT64_MAX, 1]]), 1.0).counts.tolist() == [[INT64_MAX, INT64_MAX]]
    # half of the old count and all of the new one would be 1.5 times the limit
    assert profiles.merge(huge, np.array([[INT64_MAX, 1]]), 0.5).counts[0, 0] == INT64_MAX


@pytest.mark.parametrize("zeros", [1, 4300, 5000])
def test_leading_zeros_mean_nothing_however_many(zeros: int) -> None:
    """int() refuses more than 4,300 digits, whatever they are."""
    seven, head = "0" * zeros + "7", "# hotness table: n_layer={} n_expert=8 n_expert_used=1\n"
    rows = f"{seven},1,1,1,1,1,1,{'0' * zeros}\n"
    assert profiles.parse(head.format(1) + rows).counts.tolist() == [[7, 1, 1, 1, 1, 1, 1, 0]]
    assert profiles.parse(head.format(seven) + rows * 7).counts.shape == (7, 8)
    with pytest.raises(FileFormatError, match="expected integers"):
        profiles.parse(head.format(1) + "9" * 5000 + rows)
    with pytest.raises(FileFormatError, match="n_layer=N"):
        profiles.parse(head.format("9" * 5000) + rows)
