"""The kernels of cuda/: from source text to machine code, by NVRTC, kept on disk.

A module is one text without includes, so that NVRTC needs no folder and a hash of the text says everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

from engine.formats import block_types
from engine.ground.digest import kernels
from engine.ground.errors import MissingExtraError, SparkError
from engine.ground.files import replacing
from engine.ground.install import requirement
from engine.ops.cuda.device import Module

# No contraction of a * b + c: the kernels say where an fma is meant, as docs/arithmetic.md does.
OPTIONS = ("--std=c++17", "--fmad=false")
LOG_LINES = 20
OLDEST_NVRTC = (12, 4)  # 12.0 does not find `__dp4a`

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[ \t]*(?://.*)?$', re.MULTILINE)
_DIGEST_BYTES = 32


# --- sources --------------------------------------------------------------------------------------


def source(module: Module, folders: Sequence[Path] | None = None) -> str:
    """One text without includes: the module's macros, then its file with every header in its place, once.

    `folders` are searched in order (the kernels' folder by default), then that of block_types.h. SparkError: a file
    that is missing, a header that includes itself.
    """
    lines = [f"#define {name} {value}\n" for name, value in module.defines]
    return "".join([*lines, _inlined(module.file, folders or (kernels(),), set(), ())])


def _inlined(name: str, folders: Sequence[Path], done: set[str], above: tuple[str, ...]) -> str:
    if name in above:
        raise SparkError(f"a CUDA source includes itself: {' -> '.join((*above, name))}")
    path = next((f / name for f in (*folders, block_types.FOLDER) if (f / name).is_file()), None)
    if path is None:
        by = f", which {above[-1]} includes," if above else ""
        raise SparkError(f"the CUDA source {name}{by} is missing in {folders[-1]}", hint="reinstall spark-moe")
    done.add(name)
    text = path.read_text(encoding="utf-8").replace("#pragma once\n", "\n")
    parts = [f'#line 1 "{name}"\n']
    end = 0
    for match in _INCLUDE.finditer(text):
        parts.append(text[end : match.start()])
        if match[1] not in done or match[1] in (*above, name):
            line = text.count("\n", 0, match.start()) + 2  # of what follows the directive
            parts.append(f'{_inlined(match[1], folders, done, (*above, name))}\n#line {line} "{name}"')
        end = match.end()
    parts.append(text[end:])
    return "".join(parts)


# --- NVRTC ----------------------------------------------------------------------------------------


class Nvrtc:
    """NVIDIA's run-time compiler, through its C interface. `version` is (major, minor)."""

    options: tuple[str, ...] = OPTIONS

    def __init__(self, path: str) -> None:
        location = Path(path)
        for builtins in location.parent.glob("libnvrtc-builtins.so*"):  # not every wheel's library finds them
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = major.value, minor.value
        if self.version < OLDEST_NVRTC:
            raise SparkError(f"NVRTC {major.value}.{minor.value} is older than {'.'.join(map(str, OLDEST_NVRTC))}")
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", archs)
        self.archs = sorted(archs)

    def target(self, arch: str) -> str:
        """What to compile for: `arch` as machine code, or PTX of the newest one known that it can run."""
        number = int(arch.removeprefix("sm_"))
        if number in self.archs:
            return arch
        return f"compute_{max((a for a in self.archs if a < number), default=number)}"

    def compile(self, text: str, module: Module, arch: str) -> bytes:
        """Machine code (or PTX) that the driver loads; a SparkError holds the first lines of the compiler's log."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), module.file.encode(), 0, None, None)
        try:
            target = self.target(arch)
            options = [o.encode() for o in (*self.options, f"--gpu-architecture={target}")]
            failed = self._library.nvrtcCompileProgram(
                program, len(options), (ctypes.c_char_p * len(options))(*options)
            )
            if failed:
                text = self._output(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                log = [line for line in text.splitlines() if line.strip()]
                macros = " ".join(f"{name}={value}" for name, value in module.defines)
                raise SparkError(
                    f"{' '.join((module.file, macros)).strip()} does not compile for {arch}:\n"
                    + "\n".join(log[:LOG_LINES] or [self._error(failed)]),
                    hint="this is a mistake in spark-moe: please report it",
                )
            return self._output(program, "CUBIN" if target.startswith("sm_") else "PTX")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _output(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, name: str, *args: Any) -> None:
        if failed := getattr(self._library, name)(*args):
            raise SparkError(f"{name} failed: {self._error(failed)}")

    def _error(self, code: int) -> str:
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        text: bytes = self._library.nvrtcGetErrorString(code)
        return text.decode()


@cache
def find_nvrtc(max_major: int = sys.maxsize) -> Nvrtc:
    """The newest NVRTC up to a major version: of NVIDIA's wheels, else of the system.

    A driver loads machine code of its own major version of CUDA and of earlier ones. MissingExtraError: none.
    """
    unusable = []
    for major, path in sorted(_candidates(), key=lambda c: -c[0]):  # stable: wheels before the system's
        if major > max_major:
            continue
        try:
            return Nvrtc(path)
        except (OSError, AttributeError, SparkError) as error:
            unusable.append(f"{path}: {error}")
    raise MissingExtraError(
        "NVRTC, which compiles the CUDA kernels, is not installed" + "".join(f"\n{u}" for u in unusable[:3]),
        hint=f"pip install {requirement('cuda13')} (driver 580 or newer) or {requirement('cuda12')}",
    )


def _candidates() -> Iterator[tuple[int, str]]:
    """(major version, path or name) of what may be NVRTC libraries."""
    windows = sys.platform == "win32"
    patterns = ("*/bin/nvrtc64_*0_0.dll", "*/bin/*/nvrtc64_*0_0.dll") if windows else ("*/lib/libnvrtc.so.*",)
    spec = importlib.util.find_spec("nvidia")  # the package that NVIDIA's wheels share
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    found = [path for root in roots for pattern in patterns for path in sorted(root.glob(pattern))]
    if not windows:
        found += sorted(Path("/usr/local").glob("cuda*/lib64/libnvrtc.so.*"))
    for path in found:
        if match := re.fullmatch(r"nvrtc64_(\d+)0_0\.dll|libnvrtc\.so\.(\d+)", path.name):
            yield int(match[1] or match[2]), str(path)
    for major in (13, 12):  # where the loader looks
        yield major, f"nvrtc64_{major}0_0.dll" if windows else f"libnvrtc.so.{major}"


# --- the cache ------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where compiled kernels are kept, in the user's folder for caches."""
    base = {"win32": "AppData/Local", "darwin": "Library/Caches"}.get(sys.platform, ".cache")
    return Path.home() / base / "spark" / "kernels"


class Compiler:
    """Compiles modules for one architecture, or finds them in the cache.

    cache: the folder of compiled kernels; where it cannot be written, nothing is kept. An entry is the SHA-256
    of its contents and these; one that does not match is compiled again.
    """

    def __init__(self, arch: str, nvrtc: Nvrtc, cache: Path | None = None) -> None:
        self.arch = arch
        self.nvrtc = nvrtc
        self.cache = cache or cache_folder()
        self._lock = threading.Lock()
        self._images: dict[Module, bytes] = {}

    @property
    def about(self) -> str:
        """All but the sources that machine code follows from."""
        return repr((self.nvrtc.version, OPTIONS, self.nvrtc.target(self.arch)))

    def image(self, module: Module) -> bytes:
        """What the driver loads."""
        image = self._images.get(module)
        if image is None:
            image = self._compiled(module)
            with self._lock:
                self._images[module] = image
        return image

    def build(self, modules: Sequence[Module], progress: Callable[[int, int], None]) -> None:
        """Compile several modules, in as many threads as there are processors: NVRTC is run without the GIL.

        progress(done, total) is called in this thread. The first error is raised when all have ended.
        """
        missing = [m for m in dict.fromkeys(modules) if m not in self._images]
        progress(0, len(missing))
        with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="nvrtc") as pool:
            running = [pool.submit(self.image, m) for m in missing]
            try:
                for done, future in enumerate(as_completed(running), 1):
                    future.result()
                    progress(done, len(missing))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _compiled(self, module: Module) -> bytes:
        text = source(module)
        key = hashlib.sha256(f"{self.about}\n{text}".encode()).hexdigest()
        path = self.cache / f"{Path(module.file).stem}-{key[:40]}.bin"
        with contextlib.suppress(OSError):
            entry = path.read_bytes()
            if entry[:_DIGEST_BYTES] == hashlib.sha256(entry[_DIGEST_BYTES:]).digest():
                return entry[_DIGEST_BYTES:]
        image = self.nvrtc.compile(text, module, self.arch)
        with contextlib.suppress(OSError, SparkError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, "the compiled kernel") as file:
                file.write(hashlib.sha256(image).digest() + image)
        return image
