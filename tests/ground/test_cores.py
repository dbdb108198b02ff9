"""The cores of machines that are made up as folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.ground import cores
from engine.ground.cores import Quota, cpu_list, find

GPU = "0000:1B:00.0"


def put(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def machine(root: Path, siblings: list[str], nodes: list[str] = [], gpu_node: int | None = None) -> Path:  # noqa: B006
    """siblings: of each CPU, its core's threads. nodes: CPUs of each NUMA node."""
    files: dict[str, object] = {"sys/devices/system/cpu/online": f"0-{len(siblings) - 1}"}
    for cpu, threads in enumerate(siblings):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = threads
    files |= {f"sys/devices/system/node/node{i}/cpulist": cpus for i, cpus in enumerate(nodes)}
    if gpu_node is not None:
        files[f"sys/bus/pci/devices/{GPU.lower()}/numa_node"] = gpu_node
    put(root, files)
    return root


def eight_with_threads(root: Path) -> Path:
    return machine(root, [f"{i % 8},{i % 8 + 8}" for i in range(16)])


def test_one_thread_of_each_of_eight_cores(tmp_path: Path) -> None:
    cores = find(eight_with_threads(tmp_path))
    assert cores.cpus == (1, 2, 3, 4, 5, 6, 7)
    assert cores.why == "7 cores: 16 CPUs are threads of 8 cores; 1 of 8 cores left to others"
    assert find(tmp_path, spare=0).cpus == tuple(range(8))


def test_cores_by_their_numbers_where_siblings_are_not_listed(tmp_path: Path) -> None:
    put(tmp_path, {"sys/devices/system/cpu/online": "0-7"})
    for cpu in range(8):
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
        put(tmp_path, {f"{topology}/physical_package_id": cpu // 4, f"{topology}/core_id": cpu % 4 // 2})
    assert find(tmp_path, spare=0).cpus == (0, 2, 4, 6)


def test_performance_cores_of_a_hybrid_processor(tmp_path: Path) -> None:
    pairs = [f"{i // 2 * 2}-{i // 2 * 2 + 1}" for i in range(16)]
    machine(tmp_path, [*pairs, *(str(i) for i in range(16, 32))])
    put(tmp_path, {"sys/devices/cpu_core/cpus": "0-15", "sys/devices/cpu_atom/cpus": "16-31"})
    cores = find(tmp_path, spare=0)
    assert cores.cpus == (0, 2, 4, 6, 8, 10, 12, 14)
    assert cores.why == "8 cores: 16 CPUs are efficiency cores; 16 CPUs are threads of 8 cores"


def test_large_cores_by_capacity(tmp_path: Path) -> None:
    machine(tmp_path, [str(i) for i in range(6)])
    put(tmp_path, {f"sys/devices/system/cpu/cpu{i}/cpu_capacity": 1024 if i in (1, 5) else 446 for i in range(6)})
    assert find(tmp_path, spare=0).cpus == (1, 5)


@pytest.mark.parametrize("node", [0, 1])
def test_the_node_of_the_gpu(tmp_path: Path, node: int) -> None:
    machine(tmp_path, [f"{i % 12},{i % 12 + 12}" for i in range(24)], ["0-5,12-17", "6-11,18-23"], node)
    cores = find(tmp_path, GPU)
    assert cores.cpus == tuple(range(6 * node + 1, 6 * node + 6))
    assert f"6 of 12 cores are on NUMA node {node}, as the GPU is" in cores.why


@pytest.mark.parametrize("gpu_node", [-1, None])
def test_a_gpu_of_no_node_gets_one_node(tmp_path: Path, gpu_node: int | None) -> None:
    machine(tmp_path, [str(i) for i in range(10)], ["0-3", "4-9"], gpu_node)
    cores = find(tmp_path, GPU, spare=0)
    assert cores.cpus == (4, 5, 6, 7, 8, 9) and "NUMA node 1; the GPU's is not known" in cores.why


def test_affinity_on_the_other_node_than_the_gpu(tmp_path: Path) -> None:
    machine(tmp_path, [str(i) for i in range(8)], ["0-3", "4-7"], 0)
    put(tmp_path, {"proc/self/status": "Name:\tspark\nCpus_allowed_list:\t3-6"})
    assert find(tmp_path, GPU, spare=0).cpus == (3,)
    put(tmp_path, {"proc/self/status": "Cpus_allowed_list:\t4-6"})
    cores = find(tmp_path, GPU, spare=0)
    assert cores.cpus == (4, 5, 6) and "allowed by the process's affinity" in cores.why


def test_a_quota_that_changes(tmp_path: Path) -> None:
    """The number, the group that the process is in, and whether there is any."""
    put(tmp_path, {"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "max 100000"})
    quota = Quota(tmp_path)
    assert quota.cpus() is None
    put(tmp_path, {"sys/fs/cgroup/a/cpu.max": "250000 100000"})
    assert quota.cpus() == quota.cpus() == 2.5
    put(tmp_path, {"sys/fs/cgroup/a/b/cpu.max": "100000 100000", "proc/self/cgroup": "0::/a/b"})
    assert quota.cpus() == 1.0
    put(tmp_path, {"proc/self/cgroup": "3:cpu:/c", "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": 50000})
    put(tmp_path, {"sys/fs/cgroup/cpu/c/cpu.cfs_period_us": 200000})
    assert quota.cpus() == 0.25
    put(tmp_path, {"sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": -1})
    assert quota.cpus() is None
    quota.close()


def test_a_quota_that_comes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, {"proc/self/cgroup": "0::/a"})
    quota = Quota(tmp_path)
    assert quota.cpus() is None
    put(tmp_path, {"sys/fs/cgroup/a/cpu.max": "250000 100000"})
    monkeypatch.setattr(cores, "REOPEN_S", 0.0)
    assert quota.cpus() == 2.5
    quota.close()


def test_a_machine_without_groups_has_no_quota(tmp_path: Path) -> None:
    quota = Quota(tmp_path)
    assert quota.cpus() is None
    quota.close()


def test_a_quota_of_one_and_a_half(tmp_path: Path) -> None:
    eight_with_threads(tmp_path)
    put(tmp_path, {"proc/self/cgroup": "0::/a.slice/b", "sys/fs/cgroup/a.slice/b/cpu.max": "150000 100000"})
    cores = find(tmp_path)
    assert cores.cpus == () and cores.why.endswith("the quota of the cgroup is 1.5 CPUs")
    assert find(tmp_path, spare=0).cpus == (7,)


@pytest.mark.parametrize(
    ("cgroup", "files", "n"),
    [
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000", "cpu.max": "900000 100000"}, 4),
        ("0::/not/mounted/here", {"cpu.max": "300000 100000"}, 3),
        ("3:cpu,cpu2:/x\n0::/", {"cpu,cpu2/x/cpu.cfs_quota_us": 250000, "cpu,cpu2/x/cpu.cfs_period_us": 50000}, 5),
        ("3:cpu,cpuacct:/x", {"cpu/cpu.cfs_quota_us": 200000, "cpu/cpu.cfs_period_us": 100000}, 2),
        ("3:cpu:/x", {"cpu/x/cpu.cfs_quota_us": -1, "cpu/x/cpu.cfs_period_us": 100000}, 8),
        ("0::/", {"cpu.max": "rubbish"}, 8),
    ],
)
def test_quotas_of_both_versions(tmp_path: Path, cgroup: str, files: dict[str, object], n: int) -> None:
    eight_with_threads(tmp_path)
    put(tmp_path, {"proc/self/cgroup": cgroup} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert len(find(tmp_path, spare=0).cpus) == n


@pytest.mark.parametrize("name", ["cpuset.cpus.effective", "cpuset/box/cpuset.effective_cpus"])
def test_a_cpuset_of_three(tmp_path: Path, name: str) -> None:
    machine(tmp_path, [str(i) for i in range(8)])
    put(tmp_path, {"proc/self/cgroup": "4:cpuset:/box\n0::/box", "proc/self/status": "Cpus_allowed_list:\t0-7"})
    put(tmp_path, {f"sys/fs/cgroup/{name}": "2,4-5"})
    cores = find(tmp_path)
    assert cores.cpus == (4, 5) and "3 of 8 CPUs are allowed by a cpuset;" in cores.why


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    cores = find(tmp_path)
    assert cores.cpus == () and "no CPUs are listed" in cores.why
    put(tmp_path, {"proc/self/status": "Cpus_allowed_list:\t0-3"})
    assert find(tmp_path, spare=0).cpus == (0, 1, 2, 3)


def test_this_machine() -> None:
    import os

    assert set(find(spare=0).cpus) <= os.sched_getaffinity(0)


@given(st.sets(st.integers(0, 300)))
def test_lists_of_cpus(cpus: set[int]) -> None:
    assert cpu_list(",".join(map(str, sorted(cpus)))) == cpus


@given(st.text(max_size=12))
def test_what_is_no_list_of_cpus_is_a_part_of_one(text: str) -> None:
    assert cpu_list(text) <= set(range(65536))


def test_ranges_of_cpus() -> None:
    assert cpu_list("0-2,7,9-10") == {0, 1, 2, 7, 9, 10} and cpu_list("") == cpu_list(None) == cpu_list("x-3") == set()
