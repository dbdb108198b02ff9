"""The wheel: what is in it, and that it works far from the source tree."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.ground.install import requirement

ROOT = Path(__file__).parents[1]
NANO = ROOT / "data" / "nano" / "nano.gguf"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a wheel is built
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
# How well the library is optimized is no matter here, and takes a minute to compile.
BUILD = [*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-C", "cmake.build-type=Debug"]

ROUND_TRIP = """
import sys
from pathlib import Path
from engine.ground.config import EngineConfig
from spark.daemon.client import DaemonClient, engine_command
config = EngineConfig(model=Path(sys.argv[1]), device="cpu", threads=1)
with DaemonClient(engine_command(config)) as client:
    done = client.generate([1, 2, 3], max_tokens=4, stop_tokens=[]).result()
print(done.usage.completion_tokens)
"""
WHERE = """
import engine, spark
from engine.ground import cpu_library
print(engine.__file__, spark.__file__, cpu_library.load()._name, sep="\\n")
"""


SOURCES = """
from engine.ground.digest import kernels
from engine.ops.cuda.device import Module
from engine.ops.cuda.library import source
print(kernels())
for path in kernels().glob("*.cu"):
    text = source(Module(path.name, (("TYPE", "Q4_K"),)))
    assert text.startswith("#define TYPE Q4_K") and '#include "' not in text and "KERNEL" in text, path
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this source tree."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("spark", "engine", "cpu", "cuda"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tree / name)
    (tree / "tests").mkdir()
    (tree / "tests" / "test_nothing.py").touch()
    subprocess.run([*BUILD, "--wheel-dir", out, tree], check=True, timeout=300)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a fresh environment with the wheel, which sees the dependencies of this one."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    subprocess.run([*PIP, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    site = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    # A path in a .pth file: the .pth files over there, our editable install's among them, are not read.
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "dependencies.pth").write_text("\n".join(sorted(places)))
    return home / "bin"


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        (None, "'spark-moe[train]'"),
        ({"url": "file:///a%20b/c", "dir_info": {}}, "'/a b/c[train]'"),
        ({"url": "file:///c", "dir_info": {"editable": True}}, "-e '/c[train]'"),
        ({"url": "https://h/s.git", "vcs_info": {"vcs": "git", "commit_id": "0a"}},
         "'spark-moe[train] @ git+https://h/s.git@0a'"),
        ({"url": "file:///c/s.whl", "archive_info": {}}, "'spark-moe[train] @ file:///c/s.whl'"),
    ],
)  # fmt: skip
def test_an_extra_comes_from_where_the_program_did(
    monkeypatch: pytest.MonkeyPatch, origin: dict | None, words: str
) -> None:
    record = None if origin is None else json.dumps(origin)
    found = SimpleNamespace(read_text=lambda name: record if name == "direct_url.json" else None)
    monkeypatch.setattr(metadata, "distribution", lambda name: found)
    assert requirement("train") == words


def test_the_extra_of_this_installation_can_be_asked_for(installed: Path, wheel: Path, tmp_path: Path) -> None:
    code = "from engine.ground.install import requirement; print(requirement('cuda13'))"
    said = run([installed / "python", "-c", code], tmp_path).stdout
    assert said == f"'spark-moe[cuda13] @ {wheel.as_uri()}'\n"


def run(command: list, cwd: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=cwd, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    return done


def test_what_the_wheel_is_and_holds(wheel: Path) -> None:
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.split("-")[2:] == ["py3", "none", f"{platform}.whl"]
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(n).decode() for n in names if n.endswith("/METADATA"))
        (license_name,) = (n for n in names if n.endswith("/LICENSE"))
        assert b"Spark contributors" in archive.read(license_name)
    headers = {"engine/formats/block_types.h", "engine/formats/grids.h", "engine/formats/expert_job.h"}
    assert names >= headers | {"engine/lib/libspark_cpu.so", "engine/__main__.py", "spark/cli.py"}
    kernels = {f"engine/cuda/{path.name}" for path in (ROOT / "cuda").iterdir() if path.suffix in (".cu", ".cuh")}
    assert {name for name in names if name.startswith("engine/cuda/")} == kernels and len(kernels) > 20
    static = {f"spark/server/static/{path.name}" for path in (ROOT / "spark" / "server" / "static").iterdir()}
    assert {name for name in names if name.startswith("spark/server/static/")} == static and len(static) > 3
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"engine", "spark"}
    assert {name for name in names if name.endswith(".py")} == {
        str(path.relative_to(ROOT)) for package in ("engine", "spark") for path in (ROOT / package).rglob("*.py")
    }
    for extra in ("cuda12", "cuda13", "train", "storage", "dev"):
        assert f"Provides-Extra: {extra}\n" in metadata


def test_the_installed_packages_are_used(installed: Path, tmp_path: Path) -> None:
    for line in run([installed / "python", "-c", WHERE], tmp_path).stdout.split():
        assert Path(line).is_relative_to(installed.parent)


def test_the_kernels_of_the_wheel_are_whole(installed: Path, tmp_path: Path) -> None:
    for line in run([installed / "python", "-c", SOURCES], tmp_path).stdout.split():
        assert Path(line).is_relative_to(installed.parent)


def test_commands_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    assert "extract-sessions" in run([installed / "spark", "--help"], tmp_path).stdout
    run([installed / "spark", "tokenize", NANO, "--export-tokenizer", "tokenizer.json"], tmp_path)
    assert (tmp_path / "tokenizer.json").stat().st_size > 100_000


def test_a_daemon_of_the_wheel_answers(installed: Path, tmp_path: Path) -> None:
    assert run([installed / "python", "-c", ROUND_TRIP, NANO], tmp_path).stdout == "4\n"


def test_the_demo_says_what_the_wheel_does_not_have(installed: Path, tmp_path: Path) -> None:
    done = run([installed / "spark", "demo"], tmp_path, status=1)
    (error, hint) = done.stderr.splitlines()
    assert error.startswith("error: ") and "nano.gguf is not there" in error and done.stdout == ""
    assert hint == "hint: clone the repository and run `make demo` there"


def test_nothing_beside_a_clone_can_be_imported() -> None:
    shown = [sys.executable, "-c", "import sys; print(*sys.path, sep='\\n')"]
    done = subprocess.run(shown, capture_output=True, text=True, check=True, cwd=ROOT / "tests", env={})
    assert str(ROOT.parent) not in done.stdout.splitlines()
