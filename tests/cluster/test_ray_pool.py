"""What a pool refuses, and where it sees room, before there is a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.ground.errors import UsageError
from spark.cluster.options import ClusterOptions
from spark.cluster.ray_pool import RayPool, connected
from spark.cluster.worker import CountingWorker
from tests.cluster.clusters import CONFIG, DEADLINES
from tests.command_line import NANO, refused


class OfOneNode:
    """As much of Ray as a pool looks at before it starts anything: a node with these resources."""

    def __init__(self, **resources: float) -> None:
        self._node = {"Alive": True, "NodeManagerHostname": "a", "NodeID": "1", "Resources": resources}

    def nodes(self) -> list[dict[str, object]]:
        return [self._node]

    def put(self, value: object) -> object:
        return value

    def remote(self, **_: object) -> Callable[[object], object]:
        return lambda kind: kind


@pytest.mark.parametrize(
    ("has", "share", "threads", "n"),
    [
        ({"CPU": 32, "GPU": 2}, 1.0, None, 2),
        ({"CPU": 32, "GPU": 2}, 0.4, None, 4),  # two to a GPU: no worker has 0.2 of one and 0.2 of another
        ({"CPU": 32, "GPU": 4}, 0.7, 4, 4),
        ({"CPU": 32, "GPU": 4}, 1.0, 12, 2),
        ({"CPU": 7}, 0.0, 2, 3),
    ],
)
def test_places_are_as_many_as_can_have_a_worker(
    has: dict[str, float], share: float, threads: int | None, n: int
) -> None:
    config = replace(CONFIG, device="auto", threads=threads, vram_gib=8.0)
    cluster, kind = ClusterOptions("", None, share), CountingWorker
    pool = RayPool(OfOneNode(**has), cluster, config, DEADLINES, None, kind)
    assert len(pool.places()) == n


def test_more_threads_than_a_node_has() -> None:
    config = replace(CONFIG, device="auto", threads=33)
    with pytest.raises(UsageError, match="--threads 33: no node of the cluster that has a GPU has that many CPUs"):
        ray = OfOneNode(CPU=32, GPU=2)
        RayPool(ray, ClusterOptions("", None, 1.0), config, DEADLINES, None, CountingWorker)


def test_no_gpu_where_one_was_asked_for() -> None:
    with pytest.raises(UsageError, match="--worker-gpus 1: no node of the cluster has that many GPUs, 0 in all"):
        config = replace(CONFIG, device="auto")
        RayPool(OfOneNode(CPU=32), ClusterOptions(""), config, DEADLINES, None, CountingWorker)


@pytest.mark.parametrize(
    ("share", "words"),
    [(2.0, "--worker-gpus 2: a worker runs on one GPU"), (0.5, "--worker-gpus 0.5: workers share a GPU, and each")],
)
def test_a_part_of_a_gpu_that_no_worker_can_use(share: float, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        config, ray = replace(CONFIG, device="auto"), OfOneNode(CPU=32, GPU=4)
        RayPool(ray, ClusterOptions("", None, share), config, DEADLINES, None, CountingWorker)


def test_an_address_where_no_cluster_is() -> None:
    with (
        pytest.raises(UsageError, match="--ray nonsense:1:2: no Ray cluster answers there"),
        connected(ClusterOptions("nonsense:1:2")),
    ):
        raise AssertionError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--workers", "2"], "--workers of a cluster, and --ray is missing"),
        (["--ray", "auto", "--device", "cpu", "--worker-gpus", "1"], "--device cpu and --worker-gpus 1 contradict"),
        (["--ray", "auto", "--device", "cuda", "--worker-gpus", "0"], "--device cuda and --worker-gpus 0 contradict"),
    ],
)
def test_options_that_contradict(tmp_path: Path, given: list[str], words: str) -> None:
    assert words in refused("calibrate", NANO, "t.parquet", "--out", "p.csv", *given, cwd=tmp_path, status=2)


