"""What the driver asks of a cluster, and what it hears from it: the seam between scheduling and Ray.

A pool starts workers on nodes, sends them leases and reports events; it decides nothing. `ray_pool.py` is one on Ray,
`benchmarks/cluster_pool.py` a simulated one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from engine.ground.errors import SparkError


@dataclass(frozen=True, slots=True)
class Place:
    """Room for a worker. node: its id in the cluster; name: what messages call it; index: among the node's places."""

    node: str
    name: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work. number: among all, from 0. cost: in the job's units, at least 1. payload: for the worker."""

    number: int
    cost: int
    name: str
    payload: Any = None


@dataclass(frozen=True, slots=True)
class Result:
    """What a worker made of a lease.

    done: the tasks that are done, by number; value: of all of them together. culprit: the task that took the worker's
    daemon along, with the reason; the worker does nothing more. error: what no other worker would do better, which
    ends the run. unread: why, in words or none, a task has to be sent whole that it was to read itself; so have those
    after it. seconds: that it worked on it.
    """

    done: tuple[int, ...]
    value: Any
    culprit: tuple[int, str] | None = None
    error: SparkError | None = None
    unread: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker that can be given work; info: what it says of itself."""

    worker: str
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker that cannot work where it is, for a reason that stays: no GPU, a file that is missing."""

    worker: str
    error: SparkError


@dataclass(frozen=True, slots=True)
class Finished:
    """A lease has ended, in whole or in part."""

    worker: str
    lease: int
    result: Result


@dataclass(frozen=True, slots=True)
class Alive:
    """A worker answers; fed: how much it has done of the task that it has, in its cost."""

    worker: str
    fed: int


@dataclass(frozen=True, slots=True)
class Died:
    """A worker is gone: its process, its node, or the way there. lost_only: what it had finished is lost, no more."""

    worker: str
    reason: str
    lost_only: bool = False


Event: TypeAlias = Ready | Refused | Finished | Alive | Died


class Pool(Protocol):
    """A cluster. Nothing but `poll` and `close` waits."""

    def places(self) -> Sequence[Place]:
        """Where workers can be now, of nodes that are alive, those included where one is."""
        ...

    def start(self, worker: str, place: Place) -> None:
        """Begin to start a worker: Ready, Refused or Died follows."""
        ...

    def send(self, worker: str, lease: int, tasks: Sequence[Task]) -> None:
        """Give a worker tasks, behind those that it has: Finished or Died follows."""
        ...

    def ping(self, worker: str) -> None:
        """Ask for a sign of life: Alive follows, if there is life."""
        ...

    def kill(self, worker: str) -> None:
        """End a worker at once; nothing that is heard of it later is an event."""
        ...

    def poll(self, timeout_s: float) -> Sequence[Event]:
        """Wait for events, in the order in which a worker's happened; empty after the time."""
        ...

    def close(self) -> None:
        """End all workers and what they have started."""
        ...
