"""Logs of many users read at once: 1 GB of 50 homes from the disk and from an object store, with the same sessions.

The sample logs are copied into homes, again and again under other session ids, until they have the size. The object
store is moto's server on this machine, which answers one request at a time on one core: what fetching some homes takes
without reading them says how much of the time is the server's. Last, one home alone on one core and on all.

    python benchmarks/cluster_homes.py --json data/results/cluster_homes.json
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import fsspec
import pytest
from moto.server import ThreadedMotoServer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.figures import json_option  # noqa: E402
from spark import storage  # noqa: E402
from spark.extract import ExtractOptions, extract  # noqa: E402
from spark.results import write_json  # noqa: E402

_UUID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_MESSAGE = re.compile(rb"(?<=\")msg_[0-9A-Za-z_-]{16,}(?=\")")


def renamed(data: bytes, copy: int) -> bytes:
    """A log whose ids are another's, the same in all files of a copy."""

    def other(found: re.Match[bytes]) -> bytes:
        digest = hashlib.sha256(b"%d " % copy + found[0]).hexdigest()
        if found[0].startswith(b"msg_"):
            return b"msg_" + digest[:24].encode()
        return "-".join((digest[:8], digest[8:12], digest[12:16], digest[16:20], digest[20:32])).encode()

    return _MESSAGE.sub(other, _UUID.sub(other, data))


def write_home(home: Path, n_bytes: int, first_copy: int) -> int:
    """Fill a home folder with copies of the sample logs; the number of bytes."""
    samples = ROOT / "data" / "sessions"
    paths = [path for name in ("claude", "codex") for path in sorted((samples / name).rglob("*.jsonl"))]
    files = [(path, path.read_bytes()) for path in paths]
    written, copy = 0, first_copy
    while written < n_bytes:
        for path, data in files:
            name = renamed(str(path.relative_to(samples)).encode(), copy).decode()
            at = home / f".{name}"
            if at.exists():
                at = at.with_name(f"{copy}-{at.name}")
            at.parent.mkdir(parents=True, exist_ok=True)
            made = renamed(data, copy)
            at.write_bytes(made)
            written += len(made)
        copy += 1
    return written


def one_home(folder: Path, n_bytes: int) -> dict[str, object]:
    """A home alone, read on one core and on all of this machine's."""
    home, cores = folder / "one", os.sched_getaffinity(0)
    made: dict[str, object] = {"bytes": write_home(home, n_bytes, 0)}
    reports = []
    for n in (1, len(cores)):
        os.sched_setaffinity(0, sorted(cores)[:n])
        began_s = time.monotonic()
        reports.append(extract(ExtractOptions(folder / f"of-{n}", homes=(str(home),)), lambda done, total: None))
        made[f"seconds_on_{n}"] = time.monotonic() - began_s
        print(f"one home of {n_bytes / 1e6:,.0f} MB on {n} cores: {made[f'seconds_on_{n}']:.1f} s")
    assert reports[0] == reports[-1], "the number of cores changes nothing"
    for name in ("train.jsonl", "test.jsonl"):
        assert len({(folder / f"of-{n}" / name).read_bytes() for n in (1, len(cores))}) == 1
    return made


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=50)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--one-megabytes", type=int, default=200, help="of one home alone")
    json_option(parser)
    given = parser.parse_args()

    figures: dict[str, object] = {"what": "logs of many users", "users": given.users}
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        each = given.megabytes * 1_000_000 // given.users
        n_bytes = sum(write_home(folder / "homes" / f"user{i:02}", each, 1000 * i) for i in range(given.users))
        figures["bytes"] = n_bytes
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        for key, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1",
        }.items():  # fmt: skip
            patch.setenv(key, value)
        store = fsspec.filesystem("s3")
        store.mkdir("team")
        began_s = time.monotonic()
        store.put(str(folder / "homes"), "team/homes", recursive=True)
        figures["upload_s"] = time.monotonic() - began_s
        figures["files"] = sum(len(names) for _, _, names in os.walk(folder / "homes"))
        began_s = time.monotonic()
        with storage.tree("s3://team/homes/user00", ".jsonl") as made:
            n_files = sum(len(names) for _, _, names in os.walk(made))
        figures["fetch_s_per_file"] = (time.monotonic() - began_s) / n_files
        found = {}
        for how, home, out in (
            ("file", f"file://{folder}/homes/*", f"file://{folder}/out"),
            ("s3", "s3://team/homes/*", "s3://team/out"),
        ):
            began_s = time.monotonic()
            report = extract(ExtractOptions(out, homes=(home,)), lambda done, total: None)
            seconds = time.monotonic() - began_s
            figures[how] = {"seconds": seconds, "mb_per_s": n_bytes / 1e6 / seconds, "sessions": report.sessions}
            found[how] = {key: value for key, value in report.to_json().items() if key != "sessions"}
            print(f"{how}: {n_bytes / 1e6:,.0f} MB in {seconds:,.0f} s, {sum(report.sessions.values()):,} sessions")
        assert found["file"] == found["s3"], "the same logs give the same counts"
        left = [path for path in store.find("team/out") if not path.endswith(("/train.jsonl", "/test.jsonl"))]
        assert not left and sorted(path.name for path in (folder / "out").iterdir()) == ["test.jsonl", "train.jsonl"]
        server.stop()
        shutil.rmtree(folder / "homes")
        figures["one_home"] = one_home(folder, given.one_megabytes * 1_000_000)
    if given.json is not None:
        write_json(given.json, figures)


if __name__ == "__main__":
    main()
