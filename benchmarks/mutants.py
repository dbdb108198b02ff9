"""Which of the small faults that a machine plants in the pure modules the tests notice: docs/mutation.md.

    python benchmarks/mutants.py --json data/results/mutants.json [MODULE ...]

Of every module 300 faults are drawn (all, where there are fewer), the same for the same seed. A fault is killed when a
test fails or takes more than four times its time, and survives otherwise. A process that has collected the tests forks
for each fault, puts the changed code into the function that has it, and runs the tests that reach its line, the
quickest first, to the first failure. What the import of a module runs (constants, defaults, tables and what makes
them) is changed before the import instead, in a process of its own.

Modules that are named take the place of their own entries in the file, the others stay. What survives counts as
survived, whatever the reason; benchmarks/mutants.txt has the reasons, a line each: module, function, a part of the
change, why no test can or need notice it, with tabs between. What is listed there is counted without being run.
"""

from __future__ import annotations

import argparse
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import gguf  # noqa: F401  # so that a fork has it: only what is tested is imported there
import hypothesis
import hypothesis.strategies
import numpy as np  # noqa: F401
import pyarrow.parquet  # noqa: F401
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.mutations import Fault, fault_of, planted, possible  # noqa: E402

LOGS = (
    "attachments", "blocks", "claude", "codex", "dropped", "items", "messages", "openings", "subagents", "tree",
    "typed_ahead",
)  # fmt: skip
REDACTION = ("redact", "secret_names", "secret_places", "secret_tokens")
REDACT = tuple(f"tests/extract/test_redact{name}.py" for name in ("", "_bounds", "_names", "_set"))
# Module: its files, the tests that are to notice.
MODULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "schedule": (("engine/serving/schedule.py",), ("tests/serving/test_schedule.py",)),
    "blocks": (("engine/memory/blocks.py",), ("tests/memory/test_blocks.py",)),
    "prefix tree": (
        ("engine/memory/prefix_tree.py",),
        tuple(f"tests/memory/test_{name}.py" for name in ("prefix_tree", "prefix", "inexact")),
    ),
    "policy": (("engine/placing/policy.py",), ("tests/placing/test_policy.py", "tests/placing/test_simulate.py")),
    "placement": (("engine/placing/placement.py",), ("tests/placing/test_placement.py",)),
    "simulate": (("engine/placing/simulate.py",), ("tests/placing/test_simulate.py",)),
    "evidence": (("engine/placing/evidence.py",), ("tests/placing/test_evidence.py",)),
    "profile": (("engine/formats/profile.py",), ("tests/formats/test_profile.py",)),
    "sampling": (("engine/running/sampling.py",), ("tests/running/test_sampling.py",)),
    "extraction": (tuple(f"spark/extract/{name}.py" for name in LOGS), ("tests/extract",)),
    "redaction": (tuple(f"spark/extract/{name}.py" for name in REDACTION), REDACT),
}
KILLED = ("killed", "timeout")
EXAMPLES = 100  # of a property at most, and no more than take
EXAMPLES_S = 1.0  # but
LEAST_EXAMPLES = 10
MOST_S = 3.0  # tests that take longer even so are left out
PATIENCE = 4  # times what the tests took without a fault, and
LEAST_S = 5  # more than that
MEMORY_BYTES = 4 << 30  # beyond what the process has


@dataclass(slots=True)
class Baseline:
    """What tests do in a module without a fault: lines and seconds by test, and the lines that the import runs."""

    lines: dict[str, set[int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    examples: dict[str, int] = field(default_factory=dict)
    imported: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Planned:
    """A fault to be planted, and what became of it."""

    path: Path
    source: str
    fault: Fault
    baseline: Baseline = field(default_factory=Baseline)
    became: str = ""

    def compiled(self) -> CodeType:
        """The module with the fault."""
        return compile(planted(self.source, self.fault), str(self.path), "exec", dont_inherit=True)


class Collected:
    """A pytest plugin: hands the tests to `loop` instead of running them."""

    def __init__(self, loop: Callable[[list[pytest.Item]], None]) -> None:
        self.loop, self.failed, self.name = loop, False, ""

    def pytest_collection(self) -> None:
        """Before tests are imported, and after conftest.py was."""
        # Examples that are the same each time, and no search for the smallest one that fails.
        # As many as a test that has a number of its own gets here at most.
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        checks = list(hypothesis.HealthCheck)
        hypothesis.settings.register_profile(
            "mutants",
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            phases=phases,
            suppress_health_check=checks,
        )
        hypothesis.settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In place of pytest's own."""
        for item in session.items:
            limit_examples(item, EXAMPLES)
        self.loop(session.items)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of a test's set-up, call and end."""
        self.failed |= report.failed

    def run(self, items: list[pytest.Item], stop: bool) -> Iterator[tuple[pytest.Item, bool, float]]:
        """Run tests; of each whether it passed, and seconds of the processor."""
        for item, following in zip(items, [*items[1:], None], strict=True):
            self.failed, began = False, time.process_time()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            yield item, not self.failed, time.process_time() - began
            if stop and self.failed:
                return


def limit_examples(item: pytest.Item, most: int) -> int | None:
    """Let a property be tried on so many examples at most; how many it is. None: it is none."""
    tried, name = getattr(item, "obj", None), "_hypothesis_internal_use_settings"
    if isinstance(getattr(getattr(item, "cls", None), "settings", None), hypothesis.settings):  # a state machine
        tried, name = item.cls, "settings"  # type: ignore[attr-defined]
    own = getattr(tried, name, None)
    if own is None:
        return None
    if own.max_examples > most:
        setattr(tried, name, hypothesis.settings(own, max_examples=most))
    return min(most, int(own.max_examples))


def run_pytest(tests: tuple[str, ...], plugin: Collected, folder: str) -> int:
    """Collect tests; the plugin runs them."""
    options = ["-m", "not slow", "-p", "no:cacheprovider", "-p", "no:timeout", "-p", "no:xdist", "--assert=plain"]
    options += ["--tb=no", "--basetemp", folder, *tests]
    return int(pytest.main(options, plugins=[plugin]))


def silent() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)


def forked(work: Callable[[int], None]) -> Iterator[bytes]:
    """Lines that `work`, in a process of its own, writes to the descriptor that it is given."""
    theirs, ours = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        try:
            silent_errors(work, ours)
        finally:
            os._exit(1)
    os.close(ours)
    with os.fdopen(theirs, "rb") as lines:
        yield from lines
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"the process that runs the tests ended with {os.waitstatus_to_exitcode(status)}")


def silent_errors(work: Callable[[int], None], out: int) -> None:
    errors = os.dup(2)
    silent()
    try:
        work(out)
    except BaseException as error:
        os.write(errors, f"mutants: {type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os._exit(0)


def outcome(child: Callable[[], bool], seconds: float) -> str:
    """What became of a process that returns whether all tests passed: survived, killed or timeout."""
    pid = os.fork()
    if pid == 0:
        limit = int(PATIENCE * seconds + LEAST_S)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        passed = False
        try:
            passed = child()
        finally:  # whatever a fault raises, a test would have failed by it
            os._exit(0 if passed else 1)
    deadline = time.monotonic() + 8 * (
        PATIENCE * seconds + LEAST_S
    )  # of a busy machine; the processor's time is the rule
    pause = 0.002
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return "survived" if code == 0 else "timeout" if code in (-signal.SIGXCPU, -signal.SIGKILL) else "killed"
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(pause)
        pause = min(pause * 1.2, 0.05)


# --- without a fault ----------------------------------------------------------------------------------


class Tracer:
    """Records which lines of some files run."""

    def __init__(self, paths: list[Path]) -> None:
        self._lines: dict[str, set[int]] = {str(path): set() for path in paths}

    def taken(self) -> dict[str, list[int]]:
        """The lines of each file that ran since this was last asked."""
        found = {path: sorted(lines) for path, lines in self._lines.items() if lines}
        for lines in self._lines.values():
            lines.clear()
        return found

    def __enter__(self) -> Tracer:
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        lines = self._lines.get(frame.f_code.co_filename)
        if lines is None:
            return None

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line


def measure(paths: list[Path], tests: tuple[str, ...], folder: str) -> dict[Path, Baseline]:
    """Run the tests once as they are; of each of the files what they do."""

    def work(out: int) -> None:
        tracer = Tracer(paths)

        def loop(items: list[pytest.Item]) -> None:
            sys.settrace(None)
            send(out, {"imported": tracer.taken()})
            for item in items:
                with tracer:
                    ((_, passed, seconds),) = plugin.run([item], stop=False)
                if seconds > EXAMPLES_S:  # most of it may be the recording's
                    ((_, _, seconds),) = plugin.run([item], stop=False)
                examples = limit_examples(item, EXAMPLES)
                if examples is not None and seconds > EXAMPLES_S:
                    fewer = max(LEAST_EXAMPLES, int(examples * EXAMPLES_S / seconds))
                    examples, seconds = fewer, seconds * min(1.0, fewer / examples)
                said = {"test": item.nodeid, "passed": passed, "seconds": seconds, "examples": examples or 0}
                send(out, said | {"lines": tracer.taken()})

        plugin = Collected(loop)
        with tracer:
            run_pytest(tests, plugin, folder)

    found = {path: Baseline() for path in paths}
    for line in forked(work):
        said = json.loads(line)
        for path, baseline in found.items():
            if "imported" in said:
                baseline.imported = set(said["imported"].get(str(path), ()))
            elif not said["passed"]:
                raise SystemExit(f"without a fault {said['test']} fails")
            elif said["seconds"] <= MOST_S and ((lines := said["lines"].get(str(path), ())) or not said["lines"]):
                baseline.lines[said["test"]], baseline.seconds[said["test"]] = set(lines), said["seconds"]
                baseline.examples[said["test"]] = said["examples"]
    return found


def send(out: int, said: dict[str, Any]) -> None:
    data = json.dumps(said).encode() + b"\n"
    while data:
        data = data[os.write(out, data) :]


# --- with one -----------------------------------------------------------------------------------------


def reaching(fault: Fault, baseline: Baseline) -> list[str]:
    """Tests that run the line of a fault, the quickest first; all of the file where the import runs it."""
    span = range(fault.line, fault.end_line + 1)
    names = list(baseline.lines)
    if not runs_at_import(fault, baseline):
        names = [name for name in names if not baseline.lines[name].isdisjoint(span)]
    return sorted(names, key=lambda name: baseline.seconds[name])


def runs_at_import(fault: Fault, baseline: Baseline) -> bool:
    """Whether a fault shows only where it was there before the import, which may have called what makes functions."""
    return fault.function is None or not baseline.imported.isdisjoint(fault.function_lines)


def codes(code: CodeType) -> Iterator[CodeType]:
    """A module's code, and all that is within."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def put_in(plan: Planned, functions: list[FunctionType]) -> None:
    """Give the functions that have a fault the changed code. functions: those of the file that are there."""
    (code,) = (code for code in codes(plan.compiled()) if is_of(code, plan.fault))
    functions = [function for function in functions if is_of(function.__code__, plan.fault)]
    assert functions, plan.fault
    for function in functions:
        function.__code__ = code


def is_of(code: CodeType, fault: Fault) -> bool:
    first, last = code.co_firstlineno, max((line for _, _, line in code.co_lines() if line), default=0)
    return code.co_qualname == fault.function and first <= fault.line <= max(last, fault.line)


class Planting(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with a fault in it."""

    def __init__(self, plan: Planned) -> None:
        self.plan = plan
        self.name = ".".join(plan.path.relative_to(ROOT).with_suffix("").parts)

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The module's, if it is that one."""
        return importlib.util.spec_from_file_location(name, self.plan.path, loader=self) if name == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        """Run it."""
        exec(self.plan.compiled(), module.__dict__)


def try_in_functions(tests: tuple[str, ...], planned: list[Planned], folder: str) -> Iterator[tuple[Planned, str]]:
    """Plant faults in functions that the import does not call; what became of each."""
    files = {str(plan.path) for plan in planned}

    def work(out: int) -> None:
        def loop(items: list[pytest.Item]) -> None:
            by_name = {item.nodeid: item for item in items}

            def run_all(names: list[str]) -> bool:
                return all(passed for _, passed, _ in plugin.run([by_name[name] for name in names], stop=True))

            functions = [
                found
                for found in gc.get_objects()
                if isinstance(found, FunctionType) and found.__code__.co_filename in files
            ]
            for plan in planned:
                for name, examples in plan.baseline.examples.items():
                    limit_examples(by_name[name], examples or EXAMPLES)
            gc.disable()  # in the forks, which it would make copy all that was collected
            seconds = {name: took for plan in planned for name, took in plan.baseline.seconds.items()}
            everything = sorted(seconds, key=seconds.__getitem__)
            if outcome(lambda: run_all(everything), sum(seconds.values())) != "survived":
                raise SystemExit("tests fail without a fault, in the order of their time")
            for number, plan in enumerate(planned):
                names = reaching(plan.fault, plan.baseline)

                def child(plan: Planned = plan, names: list[str] = names) -> bool:
                    own = [function for function in functions if function.__code__.co_filename == str(plan.path)]
                    put_in(plan, own)
                    return run_all(names)

                took = sum(seconds[name] for name in names)
                send(out, {"number": number, "what": outcome(child, took) if names else "unreached"})

        plugin = Collected(loop)
        run_pytest(tests, plugin, folder)

    for line in forked(work):
        said = json.loads(line)
        yield planned[said["number"]], said["what"]


def try_at_import(tests: tuple[str, ...], plan: Planned, folder: str) -> str:
    """Plant a fault before its module is imported; what became of it."""
    names = reaching(plan.fault, plan.baseline)
    if not names:
        return "unreached"

    def child() -> bool:
        silent()
        sys.meta_path.insert(0, Planting(plan))
        passed: list[bool] = []

        def loop(items: list[pytest.Item]) -> None:
            by_name = {item.nodeid: item for item in items}
            if not by_name.keys() >= set(names):  # what a fault makes of the tests' own names and cases
                passed.append(False)
                return
            for name in names:
                limit_examples(by_name[name], plan.baseline.examples[name] or EXAMPLES)
            passed.extend(passed for _, passed, _ in plugin.run([by_name[name] for name in names], stop=True))

        plugin = Collected(loop)
        run_pytest(tests, plugin, folder)
        return bool(passed) and all(passed)

    return outcome(child, sum(plan.baseline.seconds[name] for name in names) + 10)


def draw(module: str, n: int, seed: int) -> tuple[list[Planned], int]:
    """So many faults of a module's files together, in their order; and how many these allow."""
    files = [ROOT / file for file in MODULES[module][0]]
    sources = [file.read_text() for file in files]
    places = [(at, number) for at, source in enumerate(sources) for number in range(possible(source))]
    chosen = places if len(places) <= n else sorted(random.Random(f"{seed}:{module}").sample(places, n))
    return [Planned(files[at], sources[at], fault_of(sources[at], number)) for at, number in chosen], len(places)


def try_module(module: str, n: int, seed: int) -> dict[str, Any]:
    """Plant a module's faults, one after the other; what became of them."""
    began = time.monotonic()
    files, tests = MODULES[module]
    planned, total = draw(module, n, seed)
    with tempfile.TemporaryDirectory(prefix="spark-mutants-") as made:
        folders = (f"{made}/{i}" for i in range(1 << 30))
        baselines = measure([ROOT / file for file in files], tests, next(folders))
        for plan in planned:
            plan.baseline = baselines[plan.path]
        for plan in planned:
            if reason(module, plan.fault):  # it counts as survived, and costs the time of all tests
                tell(module, plan, "listed")
        inner = [plan for plan in planned if not plan.became and not runs_at_import(plan.fault, plan.baseline)]
        for plan, what in try_in_functions(tests, inner, next(folders)):
            tell(module, plan, what)
        for plan in planned:
            if not plan.became:
                tell(module, plan, try_at_import(tests, plan, next(folders)))
    return {
        "files": list(files),
        "tests": list(tests),
        "seed": seed,
        "possible": total,
        "mutants": len(planned),
        "killed": sum(plan.became in KILLED for plan in planned),
        "timeouts": sum(plan.became == "timeout" for plan in planned),
        "seconds": round(time.monotonic() - began, 1),
        "survivors": [
            {"file": plan.path.name, "line": plan.fault.line, "in": plan.fault.function}
            | {"operator": plan.fault.operator, "what": plan.fault.what, "became": plan.became}
            | {"reason": reason(module, plan.fault)}
            for plan in planned
            if plan.became not in KILLED
        ],
    }


def reason(module: str, fault: Fault) -> str | None:
    """Why a fault may survive, as benchmarks/mutants.txt has it; None where it says nothing."""
    for line in (ROOT / "benchmarks" / "mutants.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            of, function, part, why = line.split("\t")
            if (of, function) == (module, fault.function or "-") and part in fault.what:
                return why
    return None


def tell(module: str, plan: Planned, what: str) -> None:
    """Keep what became of a fault, and say what survived."""
    plan.became = what
    if what not in KILLED:
        f, why = plan.fault, reason(module, plan.fault)
        place = f"{module}: {plan.path.name}:{f.line} {what}: {f.function or '-'}: {f.operator}: {f.what}"
        print(f"    {place} [{why}]" if why else place, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(MODULES)}; all by default")
    parser.add_argument("--mutants", type=int, default=300, help="at most so many of each module")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what became of them to a file")
    o = parser.parse_args()
    if unknown := set(o.modules) - set(MODULES):
        parser.error(f"no such module: {', '.join(sorted(unknown))}")
    os.chdir(ROOT)
    os.nice(10)
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # threads do not survive a fork
        os.environ[variable] = "1"
    made = {}
    for name in o.modules or MODULES:
        row = made[name] = try_module(name, o.mutants, o.seed)
        share = 100 * row["killed"] / row["mutants"]
        print(f"{name}: {row['killed']} of {row['mutants']} ({share:.1f}%), {row['seconds']} s", flush=True)
    if o.json is None:
        return
    from spark.results import provenance, require_clean, write_json  # not before: the forks import it with faults in it

    require_clean(o.json)
    before: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        before = json.loads(o.json.read_text())["modules"]
    commit = provenance()["commit"]  # modules may have been measured at different ones
    every = before | {name: row | {"commit": commit} for name, row in made.items()}
    write_json(o.json, {"modules": {name: every[name] for name in MODULES if name in every}})


if __name__ == "__main__":
    main()
