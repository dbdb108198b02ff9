"""What the benchmarks of the whole engine share: a daemon with checked settings, fresh prompts, spreads, memory."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine import models  # noqa: E402
from engine.formats.gguf import open_model  # noqa: E402
from engine.ground.config import EngineConfig  # noqa: E402
from engine.ground.protocol import Done  # noqa: E402
from engine.ground.sampling import Sampling  # noqa: E402
from engine.memory.residency import slot_bytes  # noqa: E402
from engine.placing import policies  # noqa: E402
from spark.daemon.client import DaemonClient, Deadlines  # noqa: E402
from spark.pipeline import replay  # noqa: E402
from spark.pipeline.bench import check_settings  # noqa: E402

DEADLINES = Deadlines(ready_s=300, silence_s=120, total_s=300)
GIB = 1 << 30
# Policies that hold a part of the experts and can do without a profile.
PARTIAL = tuple(p.name for p in policies.POLICIES if not (p.whole or p.needs_profile))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes and number."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Shape:
    """What the drivers need to know of a model before they open it."""

    name: str
    file_bytes: int
    n_layer: int
    moe_layers: tuple[int, ...]
    n_expert: int
    n_expert_used: int
    n_vocab: int
    expert_bytes: tuple[int, ...]


def shape_of(model: Path) -> Shape:
    with open_model(model) as file:
        arch = models.find(file.architecture)
        c = arch.Config.from_gguf(file)
        sizes = tuple(slot_bytes(experts) for experts in arch.load(file, c).experts)
        name = file.value("general.name", str, model.name)
        return Shape(name, file.size_bytes, c.n_layer, c.moe_layers, c.n_expert, c.n_expert_used, c.n_vocab, sizes)


def open_checked(config: EngineConfig) -> DaemonClient:
    """A daemon that is ready and runs with what it was asked for; anything else raises."""
    client = replay.open_daemon(config, DEADLINES, lambda label, done, total: None)
    try:
        check_settings(config, client.ready.info)
    except BaseException:
        client.close()
        raise
    return client


def settings(client: DaemonClient) -> dict[str, Any]:
    """The daemon's effective settings and memory plan, for the report."""
    return {key: value for key, value in client.ready.info.items() if key not in ("files", "model")}


@dataclass(frozen=True)
class Sample:
    """One finished request."""

    done: Done
    tokens: list[int]

    @property
    def decode_tokens_per_s(self) -> float:
        """Rate of the tokens after the first."""
        return (self.done.usage.completion_tokens - 1) / self.done.timing.decode_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Rate of the prompt."""
        return self.done.usage.prompt_tokens / self.done.timing.prefill_s


@dataclass
class Prompts:
    """Random prompts, none given twice."""

    n_vocab: int
    seed: int = 0
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def next(self, n_tokens: int) -> list[int]:
        """A prompt of n_tokens."""
        return self._rng.integers(0, self.n_vocab, n_tokens).tolist()


def generate(client: DaemonClient, prompt: list[int], n_tokens: int, sampling: Sampling | None = None) -> Sample:
    """Generate exactly n_tokens after a prompt; fewer raise."""
    request = client.generate(prompt, max_tokens=n_tokens, sampling=sampling, stop_tokens=[])
    tokens, done = replay.finish(request)
    if len(tokens) != n_tokens or done.usage.completion_tokens != n_tokens:
        raise SystemExit(f"asked for {n_tokens} tokens, got {len(tokens)} ({done.usage})")
    return Sample(done, tokens)


# --- memory -------------------------------------------------------------------------------------------


def rss_bytes(pid: int) -> int:
    """Resident set of a process, without the pages of mapped files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/{pid}/status has no RssAnon")


def _nvidia_smi(*query: str) -> list[list[str]]:
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(
        ["nvidia-smi", *query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20, check=False
    )
    return [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []


def device_used_bytes() -> int | None:
    """Memory in use on the first GPU, by everybody; None without one."""
    rows = _nvidia_smi("--query-gpu=memory.used", "--id=0")
    return int(float(rows[0][0])) << 20 if rows else None


def device_process_bytes(pid: int) -> int | None:
    """Memory of one process on the GPUs as the driver accounts it; None where it does not say.

    Inside a container the driver's process ids are not ours; there a lone process is taken for the one meant.
    """
    rows = [row for row in _nvidia_smi("--query-compute-apps=pid,used_memory") if row[-1].strip().isdigit()]
    own = [row for row in rows if int(row[0]) == pid] or (rows if len(rows) == 1 else [])
    return sum(int(row[1]) for row in own) << 20 if own else None


def parse_list(text: str) -> list[float]:
    return [float(value) for value in text.split(",") if value]
