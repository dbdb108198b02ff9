"""A pool on Ray: an actor a worker, on the node that the driver chose. Ray is imported here alone, when it is needed.

Ray does what it is good at: it starts processes on other machines, carries messages, and tells that a process or a node
is gone. It restarts and retries nothing, and places nothing: the driver does, since it knows what was counted.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import re
import secrets
import shlex
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.ground.config import EngineConfig
from engine.ground.errors import DaemonError, DeadlineError, MissingExtraError, SparkError, UsageError
from engine.ground.install import requirement
from spark.cluster.options import ClusterOptions
from spark.cluster.pool import Alive, Died, Event, Finished, Place, Ready, Refused, Result, Task
from spark.cluster.worker import Worker
from spark.console import note
from spark.daemon.client import Deadlines, why

CONTROL = "control"  # what is asked of an actor while it works
_GRACE_S = 5.0  # of an actor, beyond its daemon's
_MOST_WORDS = 200  # characters of a reason


class Hand:
    """What an actor is: a worker that is opened, given leases, asked, and closed."""

    def __init__(self, kind: type[Worker]) -> None:
        self._kind = kind
        self._worker: Worker | None = None
        self._closed = threading.Event()

    def open(self, config: EngineConfig, deadlines: Deadlines, asked: Any) -> Mapping[str, Any] | SparkError:
        """Load the model; what the worker says of itself, or why it cannot work."""
        try:
            if not config.model.exists():
                raise SparkError(f"there is no model file {config.model}", hint="--model-on-workers says where it is")
            self._worker = self._kind(config, deadlines, asked)
            if self._closed.is_set():
                self._worker.close()
        except SparkError as error:
            return error
        return self._worker.info

    def work(self, tasks: Sequence[Task]) -> Result:
        """Do the tasks of a lease."""
        assert self._worker is not None
        return self._worker.work(tasks)

    def fed(self) -> int:
        """What is done of the lease; also a sign of life."""
        return 0 if self._worker is None else self._worker.fed

    def close(self) -> None:
        """End the daemon, whatever it does."""
        self._closed.set()
        if self._worker is not None:
            self._worker.close()


def load_ray() -> Any:
    """The library; MissingExtraError where it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        hint = f"{shlex.quote(sys.executable)} -m pip install {requirement('cluster')}"
        raise MissingExtraError(f"--ray takes the library Ray, which is not installed ({error})", hint=hint) from error


@contextlib.contextmanager
def connected(options: ClusterOptions) -> Iterator[Any]:
    """Ray, connected to the cluster for as long as the context lasts.

    Raises MissingExtraError without the library, UsageError where no cluster answers at the address.
    """
    ray = load_ray()
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    common = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    # What Ray has to say of nodes and workers it prints to stdout, which is for data; the driver says it in a line.
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
        try:
            try:
                ray.init(address=options.address, **common)
            except ConnectionError as error:
                if options.address != "auto":
                    raise _unreachable(options.address, error) from error
                note("no Ray cluster runs on this machine; one is started for this run")
                _make_token()
                ray.init(address="local", include_dashboard=False, **common)
            except Exception as error:  # each layer below has its own
                raise _unreachable(options.address, error) from error
            for number, handler in kept.items():  # Ray takes them for itself
                signal.signal(number, handler)
            yield ray
        finally:
            ray.shutdown()
            for number, handler in kept.items():
                signal.signal(number, handler)


def _make_token() -> None:
    """Protect a cluster of this run alone by a token of its own.

    Ray would leave one in the user's home, and every cluster that is started there afterwards would ask for it.
    """
    given = any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if not given and not (Path.home() / ".ray" / "auth_token").exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _unreachable(address: str, error: Exception) -> UsageError:
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return UsageError(
        f"--ray {address}: no Ray cluster answers there: {said}",
        hint="expected auto, or HOST:PORT of what `ray start --head` printed, with the same versions of Ray and Python;"
        " a cluster that asks for a token takes RAY_AUTH_MODE=token, and the same ~/.ray/auth_token on all machines",
    )


class RayPool:
    """Workers on a Ray cluster; see `pool.Pool`.

    kind: what they are; asked: what each is made for. Raises UsageError where the cluster has no GPU and one is asked
    for, or a worker cannot have what is asked for.
    """

    def __init__(
        self,
        ray: Any,
        options: ClusterOptions,
        config: EngineConfig,
        deadlines: Deadlines,
        asked: Any,
        kind: type[Worker],
    ) -> None:
        self._ray, self._options, self._deadlines = ray, options, deadlines
        self._asked = ray.put(asked)  # once for all of a node
        self._config = replace(config, model=(options.model or config.model).absolute())
        self._actors: dict[str, Any] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._kind = kind
        self._hand = ray.remote(concurrency_groups={CONTROL: 1})(Hand)
        self._cpus: dict[str, int] = {}
        _check_gpus(options.worker_gpus, config)
        places = self.places()
        found = sum(float(node["Resources"].get("GPU", 0)) for node in self._nodes().values())
        if not places and options.worker_gpus and found:
            raise UsageError(
                f"--threads {config.threads or 1}: no node of the cluster that has a GPU has that many CPUs",
                hint="give fewer; on a GPU few are needed, to load the model",
            )
        if not places and options.worker_gpus:
            raise UsageError(
                f"--worker-gpus {options.worker_gpus:g}: no node of the cluster has that many GPUs, {found:g} in all",
                hint="--worker-gpus 0 counts on CPUs; `ray status` shows what the cluster has",
            )
        if options.n_workers is not None and len(places) < options.n_workers:
            note(f"the cluster has room for {len(places)} of {options.n_workers} workers for now")

    def places(self) -> list[Place]:
        """See `pool.Pool`."""
        options, places = self._options, []
        nodes = self._nodes()
        working = {name: node for name, node in nodes.items() if node["Resources"].get("CPU", 0) >= 1}
        for name, node in working.items():
            has = node["Resources"]
            if options.worker_gpus:
                cpus = self._config.threads or 1
                on_gpus = int(has.get("GPU", 0)) * int(1 / options.worker_gpus + 1e-6)  # a part is of one GPU
                n = min(on_gpus, int(has["CPU"]) // cpus)
            else:
                spread = -(-(options.n_workers or 1) // len(working))
                cpus = self._config.threads or max(1, int(has["CPU"]) // spread)
                n = int(has["CPU"]) // cpus
            self._cpus[node["NodeID"]] = cpus
            places += [Place(node["NodeID"], name, i) for i in range(n)]
        return sorted(places, key=lambda place: (place.index, place.name))  # few workers are on many nodes

    def _nodes(self) -> dict[str, Mapping[str, Any]]:
        """The nodes that are alive, by names of which no two are alike."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        hosts = Counter(node["NodeManagerHostname"] for node in alive)
        named = {}
        for node in alive:
            host = node["NodeManagerHostname"]
            named[host if hosts[host] == 1 else f"{host}-{node['NodeID'][:6]}"] = node
        return dict(sorted(named.items()))

    def start(self, worker: str, place: Place) -> None:
        """See `pool.Pool`."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options, cpus = self._options, self._cpus[place.node]
        actor = self._hand.options(
            num_cpus=cpus,
            num_gpus=options.worker_gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(place.node, soft=False),
        ).remote(self._kind)
        self._actors[worker] = actor
        config = replace(self._config, device="cuda" if options.worker_gpus else "cpu")
        if not options.worker_gpus:
            config = replace(config, threads=cpus)
        self._watch(actor.open.remote(config, self._deadlines, self._asked), worker, None)

    def send(self, worker: str, lease: int, tasks: Sequence[Task]) -> None:
        """See `pool.Pool`."""
        self._watch(self._actors[worker].work.remote(tasks), worker, lease)

    def ping(self, worker: str) -> None:
        """See `pool.Pool`."""
        self._watch(self._actors[worker].fed.options(concurrency_group=CONTROL).remote(), worker, -1)

    def kill(self, worker: str) -> None:
        """See `pool.Pool`."""
        actor = self._actors.pop(worker, None)
        if actor is not None:
            # The daemon sees the end of its stdin and ends by itself.
            self._ray.kill(actor)

    def poll(self, timeout_s: float) -> list[Event]:
        """See `pool.Pool`."""
        found: list[Event] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._events.get(timeout=timeout_s))
            while True:
                found.append(self._events.get_nowait())
        return [event for event in found if event.worker in self._actors]

    def close(self) -> None:
        """See `pool.Pool`: daemons are asked to end, then the actors are killed."""
        actors, self._actors = list(self._actors.values()), {}
        try:
            asked = [actor.close.options(concurrency_group=CONTROL).remote() for actor in actors]
            if asked:
                self._ray.wait(asked, num_returns=len(asked), timeout=self._deadlines.grace_s + _GRACE_S)
        finally:
            for actor in actors:
                self._ray.kill(actor)

    def _watch(self, ref: Any, worker: str, lease: int | None) -> None:
        """Make an event of what becomes of a call. lease: of work; -1: a question; None: the start."""
        future: Future[Any] = ref.future()
        future.add_done_callback(lambda done: self._events.put(self._event(done, worker, lease)))

    def _event(self, done: Future[Any], worker: str, lease: int | None) -> Event:
        errors = self._ray.exceptions
        try:
            value = done.result()
        except (errors.ObjectLostError, errors.OwnerDiedError) as error:
            return Died(worker, _first_line(error), lost_only=True)
        except errors.RayTaskError as error:  # a bug, or something that is not installed there
            found = f"{type(error.cause).__name__}: {error.cause}" if error.cause else _first_line(error)
            return Refused(worker, SparkError(" ".join(found.split())))
        except Exception as error:  # the actor or its node is gone, or cannot be reached
            return Died(worker, _first_line(error))
        if lease is None:
            if isinstance(value, DaemonError | DeadlineError):
                return Died(worker, why(value))
            return Refused(worker, value) if isinstance(value, SparkError) else Ready(worker, value)
        return Alive(worker, value) if lease < 0 else Finished(worker, lease, value)


def _check_gpus(worker_gpus: float, config: EngineConfig) -> None:
    """Raise UsageError for a number of GPUs that no worker can use."""
    if worker_gpus > 1:
        raise UsageError(
            f"--worker-gpus {worker_gpus:g}: a worker runs on one GPU", hint="give 1, a part of one, or 0 for CPUs"
        )
    if 0 < worker_gpus < 1 and config.vram_gib is None:
        raise UsageError(
            f"--worker-gpus {worker_gpus:g}: workers share a GPU, and each would take what is free of its memory",
            hint="give --vram, the GiB that each may take",
        )


def _first_line(error: BaseException) -> str:
    """The first sentence that says something: Ray explains at length what could be meant."""
    sentences = re.split(r"(?<=[.!]) |\n|Worker exit detail: ", str(error).strip())
    said = next((sentence.strip() for sentence in sentences if sentence.strip()), "no reason given")
    return f"{type(error).__name__}: {said[:_MOST_WORDS]}"
