"""Files from processes that were killed, pipes in place of files, and limits that nothing can live in."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from engine.formats import profile as profiles
from engine.formats.profile import Profile
from engine.ground import files
from engine.ground.errors import SparkError, UsageError
from engine.ground.files import hold, open_regular, replacing, scratch
from spark.pipeline.checkpoints import partial_path
from tests.command_line import LOGS, NANO, ROOT, SPARK, environment, explained, refused, spark, started, until

OLD_S = 1000


def leave(folder: Path, name: str, age_s: float = OLD_S) -> Path:
    """A file as a killed process leaves it."""
    path = folder / name
    path.write_bytes(b"half")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_what_a_killed_save_left_goes_with_the_next(tmp_path: Path) -> None:
    script = (
        "import os, signal; from pathlib import Path; from engine.ground.files import replacing\n"
        "with replacing(Path('p.csv'), 'it') as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment(), check=False)
    left = list(tmp_path.iterdir())
    assert len(left) == 2  # it is too young to be taken for dead
    for path in left:
        os.utime(path, (time.time() - OLD_S,) * 2)
    others = [leave(tmp_path, name) for name in (".q.csv.12345678.tmp", ".p.csv.tmp", "p.csv.12345678.tmp")]
    with replacing(tmp_path / "p.csv", "it") as file:
        file.write(b"whole")
    assert (tmp_path / "p.csv").read_bytes() == b"whole"
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "p.csv", *others])


def test_what_is_still_written_stays(tmp_path: Path) -> None:
    slow = leave(tmp_path, ".p.csv.abcdefgh.tmp")
    with slow.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with replacing(tmp_path / "p.csv", "it") as file:
            (ours,) = (path for path in tmp_path.iterdir() if path != slow)
            os.utime(ours, (time.time() - OLD_S,) * 2)
            with replacing(tmp_path / "p.csv", "it") as second:
                second.write(b"2")
            file.write(b"1")
        assert slow.exists() and (tmp_path / "p.csv").read_bytes() == b"1"
    files.remove_stale(tmp_path / "p.csv")
    assert not slow.exists()


def test_a_pipe_is_no_profile(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="regular file"):
        open_regular(tmp_path / "pipe")
    with pytest.raises(SparkError, match="a pipe"):
        profiles.load(tmp_path / "pipe")
    with pytest.raises(SparkError, match="No such file"):
        profiles.load(tmp_path / "none")
    text = refused("plan", NANO, "--vram", "1", "--spark", "--profile", "pipe", cwd=tmp_path)
    assert "expected a regular file, found a pipe" in text
    for command in (("tokenize", NANO, "pipe", "--out", "t"), ("calibrate", NANO, "pipe", "--out", "p")):
        assert "expected a regular file, found a pipe" in refused(*command, cwd=tmp_path)


# --- memory ---------------------------------------------------------------------------------------------


def peak_mib(code: str, *arguments: str | Path) -> int:
    """The most memory that a process had. (That of getrusage begins with what the parent had.)"""
    peak = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}\n{peak}"
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return int(done.stdout.splitlines()[-1]) >> 10


REFUSED = """
from pathlib import Path
from engine.ground.errors import FileFormatError
{imports}
try:
    {call}
except FileFormatError as error:
    print(error.message[:200], file=sys.stderr)
else:
    raise SystemExit("it was taken")
"""


@pytest.mark.slow
@pytest.mark.parametrize("body", ["1,", "1\n", "# a=1\n", "\n"])
def test_a_large_profile_is_refused_in_little_memory(tmp_path: Path, body: str) -> None:
    header = "# hotness table: n_layer=6 n_expert=32 n_expert_used=4\n"
    (tmp_path / "p").write_text(header + body * ((15 << 20) // len(body)))
    code = REFUSED.format(imports="from engine.formats import profile", call="profile.load(Path(sys.argv[1]))")
    assert peak_mib(code, tmp_path / "p") < 200
    (tmp_path / "p").write_text(header.replace("\n", " ") + "a=1 " * (4 << 20))
    assert peak_mib(code, tmp_path / "p") < 200


WRITE = """
import json, sys
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
from spark.pipeline.tokens import _COLUMNS
n = 10**8
offsets = pa.array([0, n], pa.int32())
lists = [pa.ListArray.from_arrays(offsets, pa.array(np.zeros(n, kind))) for kind in (np.int32, np.bool_)]
schema = _COLUMNS.with_metadata(json.loads(sys.argv[2]))
pq.write_table(pa.table([pa.array(["s"]), pa.array([0], pa.int32()), *lists], schema=schema), sys.argv[1])
"""


@pytest.mark.slow
def test_a_large_window_is_refused_in_little_memory(tmp_path: Path) -> None:
    about = {"format": "tokens", "version": "1", "model_id": "a" * 64, "tokenizer": "b" * 64, "template": "c" * 64}
    metadata = {f"spark.{key}": value for key, value in about.items()} | {"spark.window": "4096"}
    subprocess.run([sys.executable, "-c", WRITE, tmp_path / "t", json.dumps(metadata)], env=environment(), check=True)
    call = "list(read_tokens(Path(sys.argv[1])))"
    code = REFUSED.format(imports="from spark.pipeline.tokens import read_tokens", call=call)
    assert peak_mib(code, tmp_path / "t") < 300


@pytest.mark.slow
def test_too_little_address_space_is_said(tmp_path: Path) -> None:
    """OpenBLAS sends its own process SIGINT where it cannot start its threads; so does this numpy."""
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nfor _ in range(10**7): pass\n"
    )
    command = [*SPARK, "tokenize", str(NANO), "x.jsonl", "--out", "t"]
    environ = environment(PYTHONPATH=f"{tmp_path}:{ROOT}")

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))

    for preexec, status, said in ((limited, 1, "numpy does not load in 2048 MiB"), (None, 130, "interrupted")):
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, preexec_fn=preexec, capture_output=True, text=True, check=False
        )
        assert done.returncode == status and said in done.stderr, done.stderr


@pytest.mark.slow
def test_a_plan_in_too_little_address_space_is_one_line(tmp_path: Path) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (250 << 20,) * 2)

    command = [*SPARK, "plan", str(NANO), "--vram", "1"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), preexec_fn=limited, capture_output=True, text=True, check=False
    )
    if done.returncode:  # libraries differ in what they take
        assert "Traceback" not in done.stderr
        explained(done.stderr)


# --- a trace that was cut off ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_calibration_killed_in_its_first_window_goes_on(tmp_path: Path) -> None:
    spark("extract-sessions", "--out-dir", ".", *LOGS, cwd=tmp_path)
    spark("tokenize", NANO, "test.jsonl", "--out", "t.parquet", "--window", "1024", cwd=tmp_path)
    command = ["calibrate", NANO, "t.parquet", "--out", "p.csv", "--trace", "trace", "--max-tokens", "1500"]
    with started(*command, "--threads", "1", cwd=tmp_path, tmp=tmp_path) as process:
        until(partial_path(tmp_path / "p.csv").exists, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    (tmp_path / "trace").mkdir(exist_ok=True)
    (tmp_path / "trace" / "part-000000.parquet").write_bytes(b"a part of the window that was cut off")
    spark(*command, cwd=tmp_path)
    whole = profiles.load(tmp_path / "p.csv")[0]
    assert whole.tokens > 0 and not partial_path(tmp_path / "p.csv").exists()
    spark(*(x if x not in ("p.csv", "trace") else f"other-{x}" for x in command), cwd=tmp_path)
    other = profiles.load(tmp_path / "other-p.csv")[0]
    assert np.array_equal(whole.counts, other.counts)
    names = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("trace", "other-trace")]
    assert names[0] == names[1]


def test_a_checkpoint_that_counted_something_is_not_thrown_away(tmp_path: Path) -> None:
    counts = np.ones((6, 32), np.int64)
    line = '# spark-checkpoint: {"windows": 3}'
    profiles.save(Profile(counts, 4, extra_lines=(line,)), tmp_path / "p.csv.partial")
    (tmp_path / "t.parquet").write_bytes(b"")
    text = refused("calibrate", NANO, "t.parquet", "--out", "p.csv", cwd=tmp_path, status=2)
    assert "--resume" in text


SCRATCH = """
import sys, time; from pathlib import Path; from engine.ground.files import scratch
with scratch(Path(sys.argv[1])) as folder:
    (folder / "deep").mkdir(); (folder / "deep" / "file").write_bytes(b"half")
    print(folder.name, flush=True); time.sleep(100)
"""


def holder(parent: Path) -> tuple[subprocess.Popen[str], str]:
    """A process that has a scratch folder, and its name."""
    command = [sys.executable, "-c", SCRATCH, str(parent)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_the_folder_of_a_killed_process_goes_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    (tmp_path / "spark-other").mkdir()
    (dead, lost), (living, kept) = holder(tmp_path), holder(tmp_path)
    with living, dead:
        try:
            with scratch(tmp_path) as ours:
                dead.kill()
                dead.wait()
                assert {path.name for path in tmp_path.iterdir()} == {lost, kept, ours.name, "spark-other"}
            assert {path.name for path in tmp_path.iterdir()} == {kept, "spark-other"}, "they go as ours does"
        finally:
            living.kill()
    with scratch(tmp_path) as ours:
        assert {path.name for path in tmp_path.iterdir()} == {ours.name, "spark-other"}, "and as one is made"
    assert [path.name for path in tmp_path.iterdir()] == ["spark-other"]


def test_folders_that_come_and_go_at_once_are_never_taken_for_left(tmp_path: Path) -> None:
    """A folder is there before it is held, and whoever sweeps may see it then."""

    def often(number: int) -> None:
        for _ in range(60):
            with scratch(tmp_path) as folder:
                (folder / "file").write_text(str(number))
                time.sleep(0.001)
                assert (folder / "file").read_text() == str(number)

    with ThreadPoolExecutor(7) as threads:
        list(threads.map(often, range(7)))
    assert not list(tmp_path.iterdir())


def test_a_lock_that_is_a_link_makes_no_file_elsewhere(tmp_path: Path) -> None:
    lock = tmp_path / "D" / ".spark-lock"
    lock.parent.mkdir()
    lock.symlink_to(tmp_path / "elsewhere")
    for alone in (True, False):
        with pytest.raises(OSError, match=r"its \.spark-lock is a symbolic link; remove that"):
            hold(lock, alone=alone)
    (lock.parent / f"{'1' * 64}.state").write_bytes(b"half a file")
    said = refused("sessions", "drop", "D", "--damaged", cwd=tmp_path)
    assert said == "error: nothing can be removed from D: its .spark-lock is a symbolic link; remove that\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["D"]


@pytest.mark.parametrize("what", ["folder", "pipe"])
def test_a_lock_that_is_no_file_is_named(what: str, tmp_path: Path) -> None:
    lock = tmp_path / ".spark-lock"
    lock.mkdir() if what == "folder" else os.mkfifo(lock)
    found = "a folder" if what == "folder" else "no file"
    with pytest.raises(OSError, match=rf"its \.spark-lock is {found}; remove that"):
        hold(lock, alone=False)


def test_a_file_is_held_by_one_and_goes_with_him(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.lock"
    with files.alone(path, "busy"):
        with pytest.raises(UsageError, match="busy"), files.alone(path, "busy"):
            pass
        assert path.exists()
    assert not path.exists()
    path.touch()  # of one that was killed
    with files.alone(path, "busy"):
        pass
    assert not path.exists()
    # Whoever held it removes it after we have opened it: another may make and hold a new one.
    taken, n = files.hold, 0

    def late(path: Path, **how: bool) -> object:
        nonlocal n
        n += 1
        made = taken(path, **how)
        if n < 3:
            path.unlink()
        return made

    monkeypatch.setattr(files, "hold", late)
    with files.alone(path, "busy"):
        assert n == 3 and path.exists()
    monkeypatch.setattr(files, "hold", lambda path, alone: None)  # a file system without locks
    with files.alone(path, "busy"), files.alone(path, "busy"):
        pass
