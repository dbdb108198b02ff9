"""`spark validate --ray`: what one machine finds, what depends on time aside, also where workers end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.ground.errors import DaemonError, UsageError
from spark.cluster import validating
from spark.cluster.options import ClusterOptions
from spark.pipeline import validate
from spark.pipeline.ladder import Step
from tests.cluster import clusters
from tests.cluster.clusters import CONFIG, DEADLINES, Expected, Machines, quiet
from tests.cluster.ladders import on_one, options, untimed
from tests.command_line import NANO, none_left, spark


@pytest.fixture(scope="module")
def expected(one_machine: Callable[[int], Expected]) -> Expected:
    return one_machine(9_000)


@pytest.fixture(scope="module")
def two() -> Iterator[Machines]:
    with clusters.machines(1, 1) as made:
        yield made


def run(expected: Expected, on: Machines, **more: Any) -> validate.ValidateReport:
    return validating.run(CONFIG, options(expected, **more), ClusterOptions(on.address, None, 0), DEADLINES, quiet)


@pytest.mark.slow
def test_workers_that_end_change_nothing(expected: Expected, two: Machines) -> None:
    over, kills = threading.Event(), []

    def trouble() -> None:
        for wait_s in (0.2, 3.0):
            while not clusters.daemons() and not over.wait(0.05):
                pass
            over.wait(wait_s)
            found = clusters.daemons()
            while not found and not over.is_set():
                found = clusters.daemons()
                over.wait(0.01)
            for daemon in found[:1]:
                daemon.kill()
                kills.append(daemon.pid)

    thread = threading.Thread(target=trouble)
    thread.start()
    try:
        report = run(expected, two, residencies=(60.0, 25.0))
    finally:
        over.set()
        thread.join()
    assert kills and sum(each["lost"] for name in ("workers", "climbers") for each in report.more[name])
    assert untimed(report.to_json()) == on_one(expected, residencies=(60.0, 25.0))


class Doomed(validating.LadderWorker):
    """Its daemon ends at one step."""

    def _do(self, payload: Step, before: int) -> Any:
        if payload == Step(25.0, "lru"):
            raise DaemonError("it is gone")
        return super()._do(payload, before)


@pytest.mark.slow
def test_a_step_that_two_workers_end_at_is_named(
    expected: Expected, two: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validating, "LadderWorker", Doomed)
    with pytest.raises(DaemonError, match=r"lru at 25%: two workers ended at it: .*it is gone; .*it is gone"):
        run(expected, two, max_tokens=600, prompts=1, generate_tokens=2)
    assert none_left(clusters.daemons()) and none_left(clusters.hands())


@pytest.mark.slow
def test_what_one_machine_refuses_is_refused(expected: Expected, two: Machines) -> None:
    with pytest.raises(UsageError, match="leaves no room for a prompt"):
        run(expected, two, generate_tokens=1 << 20)
    with pytest.raises(UsageError, match="--residency 101: expected 0 to 100"):
        run(expected, two, residencies=(101.0,))
    with pytest.raises(UsageError, match="--vram caps the memory of a GPU, and this is the CPU"):
        capped = replace(CONFIG, vram_gib=1.0)
        validating.run(capped, options(expected), ClusterOptions(two.address, None, 0), DEADLINES, quiet)


@pytest.mark.slow
def test_the_command_says_who_did_what(expected: Expected, two: Machines, tmp_path: Path) -> None:
    few = ("--max-tokens", "600", "--residency", "60", "--prompts", "1", "--generate", "2", "--device", "cpu")
    profile = expected.tokens.parent / "one.csv"
    done = spark(
        "validate", NANO, expected.tokens, "--profile", profile, *few, "--ray", two.address, "--json", "j", cwd=tmp_path
    )
    found = json.loads((tmp_path / "j").read_text())
    assert "Steps of the ladder" in done.stdout and "Held-out sessions at 60% residency" in done.stdout
    assert sum(climber["tasks"] for climber in found["climbers"]) == len(found["residencies"][0]["rows"])
