"""Ray clusters of several nodes on this machine, what they count, and ways to break them."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fsspec
import psutil
import ray
from fsspec.implementations.local import LocalFileSystem
from ray.cluster_utils import Cluster

from engine.formats import profile as profiles
from engine.formats.profile import Profile
from engine.formats.trace import part_paths
from engine.ground.config import EngineConfig
from engine.ground.files import try_lock
from spark.cluster.pool import Task
from spark.cluster.validating import ReferenceWorker
from spark.cluster.worker import Counting, CountingWorker, Recorded
from spark.daemon.client import Deadlines
from spark.extract import ExtractOptions, extract
from spark.pipeline import calibrate, checkpoints
from spark.pipeline.tokens import Window, read_tokens, tokenize, write_windows
from spark.speech.sessions import root_of
from tests.command_line import NANO, SAMPLES

# Ray lets all else on a machine go before its workers (15): beside other tests they would starve, and deadlines pass.
os.environ.setdefault("RAY_worker_niceness", "0")

CONFIG = EngineConfig(model=NANO, device="cpu", threads=1)
DEADLINES = Deadlines(ready_s=60, silence_s=60, total_s=120)
STORE_BYTES = 80 << 20


class Disk(LocalFileSystem):
    """disk:///PATH, storage that all processes of this machine see, and that is behind a URL."""

    protocol = "disk"

    def __init__(self, **more: Any) -> None:
        super().__init__(auto_mkdir=True, **more)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("disk://")))


fsspec.register_implementation("disk", Disk, clobber=True)


def quiet(label: str, done: int, total: int) -> None:
    assert 0 <= done <= total, label


@dataclass(slots=True)
class Machines:
    """A cluster of nodes that have some CPUs; its head has none, unless it is said."""

    cluster: Cluster
    nodes: list[Any] = field(default_factory=list)

    @property
    def address(self) -> str:
        found: str = self.cluster.address
        return found

    def add(self, cpus: int = 1, gpus: int = 0) -> Any:
        """One more node, also while a run uses the cluster; gpus: that it says it has."""
        node = self.cluster.add_node(num_cpus=cpus, num_gpus=gpus, object_store_memory=STORE_BYTES, wait=gpus > 0)
        self.nodes.append(node)
        return node

    def node_ids(self) -> list[str]:
        """Of the head, and of the others."""
        return [self.cluster.head_node.node_id, *(node.node_id for node in self.nodes)]

    def remove(self, node: Any) -> None:
        """A node is gone, without a word."""
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)


@contextlib.contextmanager
def machines(*cpus: int, head_cpus: int = 0) -> Iterator[Machines]:
    """A cluster with a node for each number of CPUs."""
    head = {"num_cpus": head_cpus, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    made = Machines(Cluster(initialize_head=True, head_node_args=head))
    try:
        for n in cpus:
            made.add(n)
        yield made
    finally:
        ray.shutdown()
        made.cluster.shutdown()


def hands() -> list[psutil.Process]:
    """The processes of the workers' actors, of clusters that this process started."""
    return [p for p in _below() if _name(p).startswith("ray::Hand")]


def daemons() -> list[psutil.Process]:
    """The daemons below them."""
    return [p for p in _below() if "run_module('engine'" in _name(p)]


def folders_left() -> list[Path]:
    """Folders for temporary files whose processes are gone."""
    left = []
    for path in Path(tempfile.gettempdir()).glob("spark-scratch-*"):
        with contextlib.suppress(FileNotFoundError):
            held = os.open(path, os.O_RDONLY)
            if try_lock(held):
                left.append(path)
            os.close(held)
    return left


def _below() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def write_tokens(folder: Path, n_tokens: int, window: int = 256) -> Path:
    """The beginnings of all sample sessions that generate anything, about so many tokens."""
    extract(ExtractOptions(folder, "both", SAMPLES / "claude", SAMPLES / "codex", 0.3), lambda a, b: None)
    tokenize(NANO, folder / "train.jsonl", folder / "all.parquet", window)
    source = read_tokens(folder / "all.parquet")
    by_root: dict[str, list[Window]] = {}
    for each in source:
        if each.generated.any():
            by_root.setdefault(root_of(each.session_id), []).append(each)
    n = max(1, n_tokens // len(by_root) // window)
    with (folder / "tokens.parquet").open("wb") as file:
        write_windows(file, [w for found in by_root.values() for w in found[:n]], source.origin, window)
    return folder / "tokens.parquet"


@dataclass(frozen=True, slots=True)
class Expected:
    """What one machine makes of the tokens."""

    tokens: Path
    profile: Profile
    parts: tuple[bytes, ...]
    report: calibrate.CalibrateReport

    def options(self, out: Path, **more: Any) -> checkpoints.CalibrateOptions:
        return checkpoints.CalibrateOptions(self.tokens, out, **more)

    def same(self, out: Path) -> bool:
        """Whether a profile is that of one machine, byte for byte, but for the time when it was made."""
        found = profiles.load(out)[0]
        return profiles.format(replace(found, created="")) == profiles.format(replace(self.profile, created=""))


def on_one_machine(folder: Path, n_tokens: int) -> Expected:
    """Count with one daemon."""
    tokens = write_tokens(folder, n_tokens)
    options = checkpoints.CalibrateOptions(tokens, folder / "one.csv", trace_dir=folder / "one")
    report = calibrate.calibrate(CONFIG, options, DEADLINES, quiet)
    assert report.choices, "there is evidence to compare"
    parts = tuple(path.read_bytes() for path in part_paths(folder / "one"))
    return Expected(tokens, profiles.load(folder / "one.csv")[0], parts, report)


class Poisoned(CountingWorker):
    """Its daemon is killed by the windows of a session that a file beside the model names."""

    def __init__(self, config: EngineConfig, deadlines: Deadlines, counting: Counting) -> None:
        super().__init__(config, deadlines, counting)
        self._poison = (config.model.parent / "poison").read_text().split()

    def _do(self, payload: Recorded, before: int) -> Any:
        if f"{payload.window.session_id}:{payload.window.window}" in self._poison:
            os.kill(self._client.pid, signal.SIGKILL)
        return super()._do(payload, before)


def await_file(path: Path) -> None:
    """Wait until another worker has made a file, so that each has its turn before all is counted."""
    end_s = time.monotonic() + 100
    while not path.exists() and time.monotonic() < end_s:
        time.sleep(0.01)


class Misplaced(CountingWorker):
    """On the node that a file beside the model names another file lies under that path; the others wait for it."""

    def __init__(self, config: EngineConfig, deadlines: Deadlines, counting: Counting) -> None:
        folder, node = config.model.parent, ray.get_runtime_context().get_node_id()
        self._opened = folder / "the other file was opened"
        if node != (folder / "node").read_text():
            super().__init__(config, deadlines, counting)
            return
        try:
            super().__init__(replace(config, model=folder / "other.gguf"), deadlines, counting)
        finally:
            self._opened.touch()

    def _do(self, payload: Recorded, before: int) -> Any:
        await_file(self._opened)
        time.sleep(0.05)  # the refusal is on its way
        return super()._do(payload, before)


class Elsewhere(Misplaced):
    """Is also one that does not see the folders of the driver."""

    def __init__(self, config: EngineConfig, deadlines: Deadlines, counting: Counting) -> None:
        assert counting.parts is not None
        super().__init__(config, deadlines, replace(counting, parts=counting.parts / "not" / "here"))


class Apart(CountingWorker):
    """Does not see the folders of the driver."""

    def __init__(self, config: EngineConfig, deadlines: Deadlines, counting: Counting) -> None:
        assert counting.parts is not None
        super().__init__(config, deadlines, replace(counting, parts=counting.parts / "not" / "here"))


class Carded(CountingWorker):
    """Counts on the CPU in place of its GPU, and writes down beside the model which ones its daemon sees."""

    def __init__(self, config: EngineConfig, deadlines: Deadlines, counting: Counting) -> None:
        assert config.device == "cuda"
        super().__init__(replace(config, device="cpu", vram_gib=None, threads=1), deadlines, counting)
        environment = Path(f"/proc/{self._client.pid}/environ").read_bytes().split(b"\0")
        (cards,) = (line for line in environment if line.startswith(b"CUDA_VISIBLE_DEVICES="))
        self._folder_of_all = config.model.parent
        (self._folder_of_all / f"cards-{self._client.pid}").write_bytes(cards.partition(b"=")[2])

    def work(self, tasks: Sequence[Task]) -> Any:
        """Begins when there are two, so that both are there."""
        end_s = time.monotonic() + 100
        while len(list(self._folder_of_all.glob("cards-*"))) < 2 and time.monotonic() < end_s:
            time.sleep(0.02)
        return super().work(tasks)


class Reading(ReferenceWorker):
    """Is sent no window."""

    def _do(self, payload: Any, before: int) -> Any:
        assert not isinstance(payload, Window)
        return super()._do(payload, before)


class Slow(CountingWorker):
    """Takes its time, so that there is some for others to break things."""

    def work(self, tasks: Sequence[Task]) -> Any:
        time.sleep(0.1)
        return super().work(tasks)
