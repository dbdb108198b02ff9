"""The folder of prefixes: names are believed only with their contents, nothing is half there, the budget is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.ground.errors import UsageError
from engine.memory.prefix_files import PrefixFiles
from tests.memory.test_prefix import KEY


def test_a_file_under_another_name_is_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = PrefixFiles(tmp_path, KEY, 1 << 30)
    one, other = "1" * 64 + ".blocks", "2" * 64 + ".blocks"
    files.put(one, [np.arange(5), np.ones((2, 3), np.float32)])
    files.flush()
    got = files.get(one)
    assert got is not None and np.array_equal(got[0], np.arange(5)) and got[1].shape == (2, 3)
    assert (tmp_path / one).stat().st_mode & 0o777 == 0o600
    (tmp_path / one).rename(tmp_path / other)
    (tmp_path / "letter.txt").write_text("mine")
    files = PrefixFiles(tmp_path, KEY, 1 << 30)
    assert files.get(other) is None and not files.has(other) and files.get(one) is None
    assert [r.getMessage().split(": ")[1] for r in caplog.records] == [
        "1 files that are not Spark's are left alone",
        "it was made for something else",
    ]


def test_a_process_killed_before_the_rename_leaves_no_file(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys; import numpy as np; from engine.memory.prefix_files import PrefixFiles\n"
        "pathlib.Path.replace = lambda *_: os._exit(9)\n"
        "files = PrefixFiles(pathlib.Path(sys.argv[1]), {}, 1 << 30)\n"
        "files.put('0' * 64 + '.blocks', [np.zeros(999)]); files.close()"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path], timeout=60).returncode == 9
    (left,) = tmp_path.iterdir()
    files = PrefixFiles(tmp_path, {}, 1 << 30)
    assert files.n_bytes == 0 and not files.has("0" * 64 + ".blocks") and left.exists()
    os.utime(left, (0, 0))
    PrefixFiles(tmp_path, {}, 1 << 30)
    assert not left.exists()


def test_the_folder_keeps_its_budget_and_what_was_used_last(tmp_path: Path) -> None:
    names = [f"{i:064}.blocks" for i in range(5)]
    for budget, kept in ((20_000, names[:4]), (13_000, [names[0], names[4]])):
        files = PrefixFiles(tmp_path, KEY, budget)
        for name in names[:4] if budget == 20_000 else names[4:]:
            files.put(name, [np.zeros(4096, np.uint8)])
            files.flush()
            assert files.n_bytes == sum(f.stat().st_size for f in tmp_path.iterdir()) <= budget
        assert sorted(f.name for f in tmp_path.iterdir()) == kept
        files.touch(names[:1])
        files.put(f"{9:064}.state", [np.zeros(30_000, np.uint8)])
        files.close()
        assert files.n_bytes == sum(f.stat().st_size for f in tmp_path.iterdir()) <= budget


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--cache-dir"):
        PrefixFiles(tmp_path / "file", KEY, 1 << 20)
    folder = tmp_path / "gone"
    files = PrefixFiles(folder, KEY, 1 << 20)
    folder.rmdir()
    for i in range(3):
        files.put(f"{i:064}.blocks", [np.zeros(9)])
    files.close()
    assert len(caplog.records) == 1 and "no more prefixes are saved" in caplog.text
