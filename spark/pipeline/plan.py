"""What a model takes of a GPU and of the host, under one cap or several, without loading it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.ground import protocol
from engine.ground.config import EngineConfig
from engine.ground.errors import CapacityError, DaemonError, DeadlineError, RequestError, from_code
from spark.daemon.client import engine_command

CARDS_GIB = (12.0, 24.0)  # what is planned for where there is no GPU to ask
_TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class Column:
    """The plan under one cap: what the daemon says of it, or why it is refused."""

    vram_gib: float | None
    info: dict[str, Any] | None
    refusal: CapacityError | None = None


@dataclass(frozen=True, slots=True)
class PlanReport:
    """One column for each cap."""

    model: str
    columns: tuple[Column, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as `--json` writes it."""
        rows: list[dict[str, Any]] = []
        for column in self.columns:
            if column.info is None:
                assert column.refusal is not None
                rows.append({"vram_gib": column.vram_gib, "refusal": column.refusal.message})
                continue
            rest = {key: value for key, value in column.info.items() if key not in ("model", "plan")}
            rows.append({"vram_gib": column.vram_gib, **column.info["plan"], **rest})
        return {"model": self.model, "rows": rows}


def plan(config: EngineConfig, vram_gib: Sequence[float], deadline_s: float) -> PlanReport:
    """Plan for each cap; for none, the GPU that is there, or cards of usual sizes where there is none.

    Raises the daemon's error, DaemonError or DeadlineError. Where there are several caps, one that is too small is a
    column that says so, unless all are.
    """
    caps: list[float | None] = list(vram_gib)
    if not caps:
        first = ask(config, deadline_s)
        if first["plan"] is not None:
            return PlanReport(str(config.model), (Column(None, first),))
        caps = list(CARDS_GIB)
    columns = []
    for cap in caps:
        try:
            columns.append(Column(cap, ask(replace(config, vram_gib=cap), deadline_s)))
        except CapacityError as error:
            if cap == caps[-1] and not any(column.info for column in columns):
                raise
            columns.append(Column(cap, None, error))
    return PlanReport(str(config.model), tuple(columns))


def ask(config: EngineConfig, deadline_s: float) -> dict[str, Any]:
    """What the daemon says; its `plan` is None where there is neither a cap nor a GPU to size it by."""
    command = engine_command(replace(config, plan_only=True))
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"no plan within {deadline_s:g} s") from None
    for line in done.stdout.splitlines():
        try:
            event = protocol.parse_event(line)
        except RequestError:
            continue
        if isinstance(event, protocol.Plan):
            return dict(event.info)
        if isinstance(event, protocol.Error):
            raise from_code(event.code, event.message, event.hint)
    tail = "\n".join(done.stderr.decode(errors="replace").splitlines()[-_TAIL_LINES:])
    raise DaemonError(
        f"the daemon ended with exit status {done.returncode} and no plan",
        hint=f"its last lines on stderr:\n{tail}" if tail else "it wrote nothing to stderr",
    )
