"""Which cores threads for experts may be bound to: read from /sys and /proc, which tests make as folders.

A thread on a hyper-thread of a busy core, on another NUMA node than the GPU, on an efficiency core, or beyond a
container's quota makes experts on the CPU slower than the link that they are to relieve. So one logical CPU a physical
core is taken, of the fast kind, near the GPU, and fewer than the quota has.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CPUS = Path("sys/devices/system/cpu")
_NODES = Path("sys/devices/system/node")
_CGROUPS = Path("sys/fs/cgroup")
REOPEN_S = 1.0
_MOST_BYTES = 4096  # of a file of /proc or a cgroup that are compared


@dataclass(frozen=True, slots=True)
class Cores:
    """Logical CPUs to bind a thread each to, the first ones first, and a sentence that says why these."""

    cpus: tuple[int, ...]
    why: str


def find(root: Path = Path("/"), gpu: str | None = None, spare: int = 1) -> Cores:
    """The cores of the machine that `root` describes.

    gpu: the PCI address of the GPU that they work beside, as "0000:1b:00.0". spare: cores that are left to others, the
    thread that launches steps among them. What cannot be read is taken as not limited.
    """
    notes: list[str] = []
    online = cpu_list(_read(root / _CPUS / "online"))
    cpus, limits = _allowed(root, online)
    if limits and online:
        notes.append(f"{len(cpus)} of {len(online)} CPUs are allowed by {' and '.join(limits)}")
    if not cpus:
        return Cores((), "no CPUs are listed in /sys and /proc, so none is taken")
    fast = _fast(root)
    if fast and cpus & fast and cpus - fast:
        notes.append(f"{len(cpus - fast)} CPUs are efficiency cores")
        cpus &= fast
    cores = _physical(root, cpus)
    if len(cores) < len(cpus):
        notes.append(f"{len(cpus)} CPUs are threads of {len(cores)} cores")
    cores = _near(root, cores, gpu, notes)
    found, kept = len(cores), max(0, len(cores) - spare)
    if spare:
        notes.append(f"{min(spare, found)} of {found} {_cores(found)} left to others")
    quota = _quota(root)
    if quota is not None and int(quota) - spare < kept:
        kept = max(0, int(quota) - spare)
        notes.append(f"the quota of the cgroup is {quota:g} CPUs")
    # The first core of a node has the interrupts of most systems, and is what is left to others.
    chosen = tuple(cores[found - kept :])
    return Cores(chosen, f"{len(chosen)} {_cores(len(chosen))}: {'; '.join(notes) or 'all that there are'}")


def cpu_list(text: str | None) -> set[int]:
    """The CPUs of a list like "0-3,8"; an empty set for what is none."""
    cpus: set[int] = set()
    for part in (text or "").strip().split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            continue
        cpus |= set(range(int(first), min(int(last or first), 65535) + 1))
    return cpus


def _cores(n: int) -> str:
    return "core" if n == 1 else "cores"


def _read(path: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return None


def _number(path: Path) -> int | None:
    text = _read(path) or ""
    return int(text) if text.removeprefix("-").isdecimal() else None


def _allowed(root: Path, online: set[int]) -> tuple[set[int], list[str]]:
    """The CPUs that affinity and cpusets leave of those online, and which of them took some away."""
    cpus, limits = set(online), []
    said = []
    for line in (_read(root / "proc/self/status") or "").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            said.append(("the process's affinity", cpu_list(line.partition(":")[2])))
    for folder in _cgroups(root, "cpuset"):
        names = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
        said.append(("a cpuset", next((c for n in names if (c := cpu_list(_read(folder / n)))), set())))
    for what, allowed in said:
        if allowed and not (cpus or allowed) <= allowed:
            limits.append(what)
        cpus = cpus & allowed if cpus and allowed else cpus or allowed
    return cpus, list(dict.fromkeys(limits))


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The process's cgroup of a controller and those above it, version 2 and 1."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            mount = root / _CGROUPS
        elif controller in controllers.split(","):
            places = [root / _CGROUPS / controllers, root / _CGROUPS / controller]
            mount = next((p for p in places if p.is_dir()), places[-1])
        else:
            continue
        parts = [p for p in path.split("/") if p not in ("", ".", "..")]
        yield from (mount.joinpath(*parts[:n]) for n in range(len(parts), -1, -1))


def _quota(root: Path) -> float | None:
    """The CPUs that the process's cgroup and those above it may use at a time; None: as many as there are."""
    found = []
    for folder in _cgroups(root, "cpu"):
        words = (_read(folder / "cpu.max") or "").split()
        if len(words) == 2 and all(w.isdecimal() for w in words) and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            found.append(quota / period)
    return min(found, default=None)


class Quota:
    """The CPUs that the process may use at a time, looked at as often as one likes: files stay open, some us a look.

    Files that were not there are looked for once in REOPEN_S.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._files: list[tuple[int, bytes]] = []  # what was read of each
        self._cpus: float | None = None
        self._opened_s = 0.0
        self._open()

    def cpus(self) -> float | None:
        """As many as there are now; None: as many as the machine has."""
        try:
            is_same = time.monotonic() - self._opened_s < REOPEN_S
            is_same &= all(os.pread(file, _MOST_BYTES, 0) == text for file, text in self._files)
        except OSError:  # a group that is gone
            is_same = False
        if not is_same:
            self._open()
        return self._cpus

    def _open(self) -> None:
        self.close()
        self._opened_s = time.monotonic()
        names = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
        paths = [self._root / "proc/self/cgroup"]
        paths += [folder / name for folder in _cgroups(self._root, "cpu") for name in names]
        for path in paths:
            with contextlib.suppress(OSError):
                file = os.open(path, os.O_RDONLY)
                self._files.append((file, b""))
                self._files[-1] = file, os.pread(file, _MOST_BYTES, 0)
        self._cpus = _quota(self._root)

    def close(self) -> None:
        """Close the files."""
        for file, _ in self._files:
            os.close(file)
        self._files = []


def _fast(root: Path) -> set[int]:
    """The performance cores of a processor that has two kinds: by Intel's lists, else by capacity (ARM)."""
    if fast := cpu_list(_read(root / "sys/devices/cpu_core/cpus")):
        return fast
    capacity = {}
    for folder in (root / _CPUS).glob("cpu[0-9]*"):
        if (value := _number(folder / "cpu_capacity")) is not None:
            capacity[int(folder.name.removeprefix("cpu"))] = value
    return {cpu for cpu, value in capacity.items() if value == max(capacity.values())}


def _physical(root: Path, cpus: set[int]) -> list[int]:
    """One CPU of each core, in ascending order."""
    first: dict[object, int] = {}
    for cpu in sorted(cpus):
        topology = root / _CPUS / f"cpu{cpu}/topology"
        siblings = cpu_list(_read(topology / "thread_siblings_list"))
        place = (_read(topology / "physical_package_id"), _read(topology / "core_id"))
        key: object = frozenset(siblings) if cpu in siblings else place if None not in place else cpu
        first.setdefault(key, cpu)
    return sorted(first.values())


def _near(root: Path, cores: list[int], gpu: str | None, notes: list[str]) -> list[int]:
    """Those of the GPU's NUMA node, where the machine has several."""
    nodes = {}
    for folder in (root / _NODES).glob("node[0-9]*"):
        if cpus := cpu_list(_read(folder / "cpulist")):
            nodes[int(folder.name.removeprefix("node"))] = cpus
    if len(nodes) < 2 or not any(set(cores) - cpus for cpus in nodes.values()):
        return cores
    of_gpu = _number(root / "sys/bus/pci/devices" / gpu.lower() / "numa_node") if gpu else None
    if of_gpu is not None and of_gpu in nodes:
        near = [core for core in cores if core in nodes[of_gpu]]
        if near:
            if len(near) < len(cores):
                notes.append(f"{len(near)} of {len(cores)} cores are on NUMA node {of_gpu}, as the GPU is")
            return near
        notes.append(f"none is on NUMA node {of_gpu}, as the GPU is")
        return cores
    # Which node is near is not known: one alone has one memory, at least.
    most = max(sorted(nodes), key=lambda node: len(nodes[node] & set(cores)))
    near = [core for core in cores if core in nodes[most]]
    if 0 < len(near) < len(cores):
        notes.append(f"{len(near)} of {len(cores)} cores are on NUMA node {most}; the GPU's is not known")
    return near or cores
