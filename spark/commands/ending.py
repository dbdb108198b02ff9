"""How every command ends: an exception becomes `error: ...`, `hint: ...` and an exit status."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import resource
import select
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer

from engine.ground.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, SparkError
from spark.console import note

_UNREAD = 128 + signal.SIGPIPE  # as a shell tells that `cat` has ended because `head` did


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C; or OpenBLAS, which sends its own process SIGINT where it cannot start its threads as numpy loads it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    while limit != resource.RLIM_INFINITY and frame is not None:
        if frame.f_globals.get("__name__") == "numpy":
            raise MemoryError(f"numpy does not load in {limit >> 20} MiB of address space, raise `ulimit -v`")
        frame = frame.f_back
    raise KeyboardInterrupt


def _fail(message: str, hint: str, status: int) -> int:
    note(f"error: {message}")
    if hint:
        note(f"hint: {hint}")
    return status


def _usage(error: typer.TyperException) -> str:
    """What typer says of an option in one line, with the value that it found, which it leaves out."""
    said = " ".join(error.format_message().split())
    details: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    found = repr(details[0]["input"]) if details else ""
    return said if found in said else f"{said}; found {found}"


def _reported(error: Exception) -> str:
    """Write down what a report of a bug needs; the hint that says where it is, and what to do with it."""
    from spark import __version__

    about = f"spark {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
    text = about + "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile("w", prefix="spark-bug-", suffix=".txt", delete=False, encoding="utf-8",
                                         errors="backslashreplace") as file:  # fmt: skip
            file.write(text)
    except OSError:
        note(text)
        return "please report it, with the lines above"
    return f"please report it, with {file.name}, which has the traceback"


def _unread() -> list[int]:
    """Which of stdout and stderr are pipes whose reader has left."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, select.POLLOUT)
    return [descriptor for descriptor, event in poll.poll(0) if event & select.POLLERR]


def _called(app: typer.Typer) -> int | None:
    """Call the command that `sys.argv` asks for. Of a pipe that breaks typer makes an exit without a word."""
    try:
        status: int | None = app(standalone_mode=False)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError) and error.code == 1:
            raise error.__context__ from None
        raise
    return status


def _run(app: typer.Typer) -> int:
    """Run the command that `sys.argv` asks for; its exit status. Raises BrokenPipeError where nobody reads stderr."""
    try:
        status = _called(app)
        sys.stdout.flush()
    except SparkError as error:
        return _fail(error.message, error.hint, error.exit_code)
    except typer.TyperException as error:  # of the options themselves
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "spark"
        return _fail(_usage(error), f"{path} --help", EXIT_USAGE)
    except OSError as error:  # a disk that is full, a folder that is gone: where no code below had more to say
        if isinstance(error, BrokenPipeError) and _unread():
            return _UNREAD
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", "", EXIT_FAILURE)
    except MemoryError as error:
        return _fail(f"there is not enough memory{f': {error}' if str(error) else ''}", "", EXIT_FAILURE)
    except Exception as error:
        found = " ".join(f"{type(error).__name__}: {error}".split())
        return _fail(f"this is a bug in spark: {found}", _reported(error), EXIT_FAILURE)
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    if status == EXIT_INTERRUPTED:
        with contextlib.suppress(BrokenPipeError):  # the Ctrl-C was for whoever reads stderr, too
            note("interrupted")
    return status or 0


def _open_standard_streams() -> None:
    """Throw away what is written to a standard stream that whoever started us closed, as `>&-` does.

    Otherwise the next file that is opened, or a pipe to the daemon, would have its descriptor.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free: this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  # for as long as we run


def end(app: typer.Typer) -> NoReturn:
    """Run the command that `sys.argv` asks for, and exit; nothing else prints errors or chooses exit statuses."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup asks for that
            signal.signal(number, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # paths may hold what their encoding does not have
            stream.reconfigure(errors="backslashreplace")
    try:
        status = _run(app)
    except BrokenPipeError:  # of what was said of a failure
        status = _UNREAD
    for descriptor in _unread():  # Python writes what is left in its buffers when it ends, and would say that it cannot
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    sys.exit(status)
