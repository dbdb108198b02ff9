"""Fixtures that every test file shares."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Where Python is told to keep no bytecode, each of some hundred processes would compile the whole program again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Libraries would start a thread for each core in each of these processes, which then wait for one another's cores.
for libraries_threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(libraries_threads, "1")

# How long an example takes tells of what else the machine does, two of these processes among it.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
# The same examples each time: what a change is refused for is then the change. `--hypothesis-profile "same examples"`.
settings.register_profile("same examples", settings.get_profile("shared machine"), derandomize=True)


# What takes longest begins first, lest one worker ends alone with it: most seconds of either suite first.
LONGEST = (
    "models/test_cuda_families.py", "ops/test_cuda_compile.py", "running/test_cuda_landing.py",
    "running/test_cuda_engine.py", "ops/test_ops.py", "running/test_cuda_mtp.py", "running/test_cuda_short.py",
    "models/test_models.py", "running/test_cuda_recall.py", "running/test_kv_pool.py", "commands/test_cli.py",
    "cluster/test_ray_store.py", "running/test_reply_options.py", "cluster/test_ray_calibrate.py",
    "server/test_page.py", "serving/test_drafts.py", "serving/test_put_back.py", "cluster/test_ray_kills.py",
    "cluster/test_ray_validate.py", "cluster/test_ray.py", "ops/test_cuda_products.py", "ops/test_cuda_attention.py",
    "pipeline/test_pipeline.py", "ops/test_cuda_recall.py", "running/test_masked.py", "commands/test_cli_signals.py",
    "cluster/test_ray_driver_kills.py", "placing/test_plan.py", "running/test_inspection.py",
    "serving/test_read_together.py", "commands/test_launch.py", "running/test_restored.py", "pipeline/test_storage.py",
    "running/test_recall.py", "models/test_sidecar.py", "running/test_together.py", "serving/test_families.py",
    "running/test_cuda_several_misses.py", "server/test_full_cache.py", "memory/test_cuda_prefix.py",
    "running/test_cuda_long_misses.py", "server/test_connections.py", "commands/test_outputs.py",
    "running/test_decoding.py", "text/test_grammar.py", "running/test_cuda_misses.py", "commands/test_cli_values.py",
    "commands/test_object_store.py", "drafting/test_cuda_dflash.py", "running/test_warm.py", "extract/test_homes.py",
    "server/test_bodies.py", "ops/test_cuda_flash.py", "server/test_page_misses.py", "models/test_conventions.py",
    "ops/test_cuda_long_jobs.py", "ops/test_cuda_short.py", "drafting/test_dflash.py", "ground/test_files.py",
    "ops/test_cuda_experts.py", "tests/test_install.py", "pipeline/test_pregate.py",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get("/".join(item.path.parts[-2:]), len(place)))
    if not config.getoption("--gpu"):
        for item in items:
            if item.get_closest_marker("on_a_gpu") is not None:
                item.add_marker(pytest.mark.skip("takes a minute and more on the emulator; with --gpu it runs"))


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # pytest-xdist would begin with the files of most tests
    # A background shell and nohup ignore these, and so would all that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    from tests import gguf_files

    # One folder for all processes of a session, which the first of them makes and removes.
    given = getattr(config, "workerinput", {}).get("kept_in")
    if given is None:
        folder = tempfile.TemporaryDirectory(prefix="spark-tests-")
        config.add_cleanup(folder.cleanup)
        given = folder.name
    gguf_files.kept_in = Path(given)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is there now stays: no collection of garbage need look at it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files go to workers whole, and those of clusters to one: two that wait at a time would leave a core idle."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OfFiles(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "clusters" if "cluster/test_ray" in nodeid else super()._split_scope(nodeid)

    return OfFiles(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a worker of pytest-xdist what the session shares."""
    from tests import gguf_files

    node.workerinput["kept_in"] = str(gguf_files.kept_in)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the CUDA tests on the GPU instead of the emulator")
    parser.addoption("--need-chromium", action="store_true", help="fail the page's tests, not skip, without Chromium")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A fresh device: emulated, or the GPU with --gpu."""
    if request.config.getoption("--gpu"):
        from engine.ground.errors import SparkError
        from engine.ops.cuda import gpu

        try:
            found: Any = gpu.open_device()
        except SparkError as error:
            pytest.skip(f"--gpu: {error} ({error.hint})" if error.hint else f"--gpu: {error}")
    elif not sys.platform.startswith("linux") or shutil.which("g++") is None:
        pytest.skip("the CUDA emulator takes g++ on Linux")
    else:
        from tests.emulated_device import EmulatedDevice

        # Whole models: what -O2 would take longer to compile, they do not make up for. A kernel alone runs a few times.
        found = EmulatedDevice(effort="-O0" if request.path.parent.name == "ops" else "-O1")
    yield found
    found.close()


@pytest.fixture
def on_the_device(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine finds and opens the device of the tests."""
    if device.name == "emulated":
        from engine.ops.cuda import gpu
        from engine.running import probe

        found = probe.Found(0, device.name, (8, 0), device.n_sm, device.max_shared_bytes, "", 1 << 34, None, (12, 8))
        monkeypatch.setattr(probe, "probe", lambda: found)
        monkeypatch.setattr(gpu, "open_device", lambda _: type(device)())


@pytest.fixture
def short_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit of decoding is a step or two, however fast the machine is."""
    from engine.serving import scheduler, tasks

    monkeypatch.setattr(scheduler, "SLICE_S", 1e-4)
    monkeypatch.setattr(tasks, "SLICE_S", 1e-4)
