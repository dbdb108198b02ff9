"""Runs Claude Code or Codex on a server of its own.

The server is a child in a session of its own, so that Ctrl-C is the client's alone. It ends when its stdin does,
whatever became of this process, and takes the client along if that was not expected: it was told whom.
The client has the terminal, and this process waits.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import spark
from engine.ground.errors import SparkError, from_code
from engine.ground.protocol import read_lines
from spark.commands.descendants import Descendants
from spark.console import note, progress_bars
from spark.daemon.client import OnLoading
from spark.daemon.process import ChildProcess
from spark.server.app import ServeOptions, serve
from spark.server.models import listing

_BOOT = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module(sys.argv.pop(1), run_name='__main__')"
_CLIENT_GRACE_S = 5.0  # for a client that was asked to end
_SERVER_GRACE_S = 30.0  # for a server that was: the profile is saved, a large model is given back
_WRITE_S = 10.0
_LOOK_S = 0.05
# What would send Claude Code elsewhere, or have it ask about a key that is not needed.
_NOT_CLAUDE = ("ANTHROPIC_API_KEY", "ANTHROPIC_MODEL", "CLAUDE_CODE_OAUTH_TOKEN", "CLAUDE_CODE_USE_ANTHROPIC_AWS",
               "CLAUDE_CODE_USE_ANTHROPIC_GOOGLE_CLOUD", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_FOUNDRY",
               "CLAUDE_CODE_USE_GATEWAY", "CLAUDE_CODE_USE_MANTLE", "CLAUDE_CODE_USE_VERTEX")  # fmt: skip
# Of a smaller context Claude Code has nothing left beside what it keeps for a reply, and ends at once if it knows.
_LEAST_CTX_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is ready: where, its model's name and context, and how long a request may take."""

    url: str
    name: str
    ctx_tokens: int
    total_s: float | None

    @property
    def total_ms(self) -> int:
        """`total_s` as clients take it; a day for no limit."""
        return int(1000 * (self.total_s or 86_400))


def launch(client: str, options: ServeOptions, arguments: Sequence[str]) -> int:
    """Serve a model, run a client (`claude` or `codex`) on it, stop the server; the client's exit status.

    128 + n for a client that signal n ended. Raises SparkError where the client is not on PATH, and what keeps the
    model from being served.
    """
    package, make = _CLIENTS[client]
    program = shutil.which(client)
    if program is None:
        raise SparkError(f"{client} is not on PATH", hint=f"install it: npm install -g {package}")
    with tempfile.TemporaryDirectory(prefix="spark-launch-") as folder, _Server(options, folder) as server:
        with progress_bars() as progress:
            served = server.wait_ready(progress)
        note(f"{served.name} is served at {served.url}, where a page shows what it does")
        command, environment = make(served, os.environ, Path(folder), arguments)
        status = _run([program, *command], environment, server)
    if server.failed:  # one that was killed a moment ago is not dead yet, so it is asked when it should have ended
        note(f"the server did not live as long as {client}: it {server.failed}")
    return status if status >= 0 else 128 - status


def claude(
    served: Served, environ: Mapping[str, str], folder: Path, arguments: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Say with which arguments and in which environment Claude Code runs; folder: for files that it needs.

    A user's settings may set the same variables in their `env`, which counts more than the environment. So they are in
    a file for `--settings`, too, which counts more than either. Raises SparkError where `arguments` name some that
    cannot be read.
    """
    told = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": "spark",  # there has to be one
        "ANTHROPIC_DEFAULT_OPUS_MODEL": served.name,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": served.name,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": served.name,
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it differs in each request, and prompts would share no prefix
    }
    if served.ctx_tokens >= _LEAST_CTX_TOKENS:  # else it takes the context for one of a million tokens
        told |= {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.ctx_tokens), "CLAUDE_CODE_DISABLE_1M_CONTEXT": "1"}
    given, rest = _named_settings(arguments)
    named = given.get("env")
    given["env"] = {**(named if isinstance(named, dict) else {}), **dict.fromkeys(_NOT_CLAUDE, ""), **told}
    settings = folder / "settings.json"
    settings.write_text(json.dumps(given))
    made = _without_proxy({key: value for key, value in environ.items() if key not in _NOT_CLAUDE}) | told
    made.setdefault("API_TIMEOUT_MS", str(served.total_ms))
    return ["--settings", str(settings), *rest], made


def _named_settings(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """What the last `--settings` of Claude Code's arguments holds, a file's name or JSON, and the other arguments."""
    rest, last, words = list[str](), "", iter(arguments)
    for word in words:
        name, is_joined, value = word.partition("=")
        if word == "--":
            rest += [word, *words]
        elif name != "--settings":
            rest.append(word)
        else:
            last = value if is_joined else next(words, "")
    if not last.strip():
        return {}, rest
    try:
        found = json.loads(last if last.lstrip().startswith("{") else Path(last).expanduser().read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SparkError(f"--settings {last[:200]}: {error}", hint="name a file of JSON, or an object of it") from error
    if not isinstance(found, dict):
        raise SparkError(f"--settings {last[:200]}: expected an object of JSON")
    return found, rest


def codex(
    served: Served, environ: Mapping[str, str], folder: Path, arguments: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Say with which arguments and in which environment Codex runs; its configuration stays as it is."""
    # It asks a server without a login for no list of models, and knows little of those that are not on its own.
    models = folder / "models.json"
    models.write_text(json.dumps(listing(served.name, int(time.time()), served.ctx_tokens)))
    settings = {
        "model": served.name,
        "model_provider": _PROVIDER,
        f"model_providers.{_PROVIDER}.name": "Spark",
        f"model_providers.{_PROVIDER}.base_url": f"{served.url}/v1",
        f"model_providers.{_PROVIDER}.wire_api": "responses",
        f"model_providers.{_PROVIDER}.stream_idle_timeout_ms": served.total_ms,
        "model_catalog_json": str(models),
    }
    # A string of JSON is one of TOML, if nothing is written as a pair of surrogates.
    pairs = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]
    return [*(word for pair in pairs for word in ("-c", pair)), *arguments], _without_proxy(environ)


_PROVIDER = "spark_launch"  # a user's own would be merged with it
_Make = Callable[[Served, Mapping[str, str], Path, Sequence[str]], tuple[list[str], dict[str, str]]]
_CLIENTS: Mapping[str, tuple[str, _Make]] = {
    "claude": ("@anthropic-ai/claude-code", claude),
    "codex": ("@openai/codex", codex),
}


def _without_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment, with this machine excepted where there is a proxy."""
    made = dict(environ)
    if any(key.lower() in ("http_proxy", "https_proxy", "all_proxy") for key in made):
        for key in ("NO_PROXY", "no_proxy"):
            made[key] = ",".join(filter(None, (made.get(key), "127.0.0.1")))
    return made


def _run(command: Sequence[str], environment: Mapping[str, str], server: _Server) -> int:
    """Run the client to its end; its status as `subprocess` has it.

    A signal that ends this process ends it first, and then what it had started. It is in this process's group, so that
    it has the terminal: there is no group of its own to be signaled.
    """
    client: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def on_end(number: int, frame: FrameType | None) -> None:
        if client is None:
            early.append(number)
        else:
            raise SystemExit(128 + number)

    # Ctrl-C and Ctrl-\ are the client's; as handlers, unlike SIG_IGN, these are not inherited.
    handlers = {signal.SIGTERM: on_end, signal.SIGHUP: on_end, signal.SIGINT: _leave_it, signal.SIGQUIT: _leave_it}
    before = {n: signal.signal(n, f) for n, f in handlers.items() if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        try:
            client = subprocess.Popen(command, env=environment)
            if early:
                raise SystemExit(128 + early[0])
            server.tell(client.pid)
            return client.wait()
        finally:
            for number in before:
                signal.signal(number, _leave_it)
            if client is not None and client.poll() is None:
                _end(client.pid, lambda: client.poll() is not None)
                client.wait()
            server.tell(0)
    except OSError as error:
        raise SparkError(f"{command[0]} cannot be run: {error.strerror or error}") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(pid: int, ended: Callable[[], bool]) -> None:
    """End a process, which may end its own children, then those that it has left; `ended` may know that it has."""
    family, end_s = Descendants(pid), time.monotonic() + _CLIENT_GRACE_S
    family.look()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGTERM)
        while time.monotonic() < end_s and not ended():
            family.look()
            time.sleep(_LOOK_S)
            os.kill(pid, 0)
        if not ended():
            os.kill(pid, signal.SIGKILL)
    family.end(_CLIENT_GRACE_S)


def _leave_it(number: int, frame: FrameType | None) -> None:
    """Do nothing about a signal."""


class _Server:
    """The child that serves. Lines of JSON come from it; the options go to it, and then whom it outlives."""

    def __init__(self, options: ServeOptions, folder: str) -> None:
        self._options, self._folder = options, folder
        assert spark.__file__ is not None
        root = Path(spark.__file__).resolve().parents[1]
        self._process = ChildProcess([sys.executable, "-P", "-c", _BOOT, str(root), "spark.commands.launch"])
        self._lines = self._process.lines()
        self.failed = ""  # how it ended, where that was not by itself at the end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._process.close_stdin(_WRITE_S)
            self.failed = _ending(self._process.status(_SERVER_GRACE_S) or 0)
        finally:
            self._process.end(_CLIENT_GRACE_S)

    def wait_ready(self, on_loading: OnLoading) -> Served:
        """Wait until it serves; raises what keeps it from that."""
        with contextlib.suppress(BrokenPipeError):  # its last words are read below
            self._process.write(base64.b64encode(pickle.dumps((self._options, self._folder))) + b"\n", _WRITE_S)
        for line in self._lines:
            match json.loads(line or b"{}"):
                case {"stage": stage, "done": done, "total": total}:
                    on_loading(stage, done, total)
                case {"url": url, "name": name, "ctx_tokens": ctx_tokens}:
                    return Served(url, name, ctx_tokens, self._options.deadlines.total_s)
                case {"error": [code, message, hint], "status": status}:
                    error = from_code(code, message, hint)
                    error.exit_code = status
                    raise error
        raise SparkError(f"the server {self.lost(_WRITE_S) or 'closed its output'}", hint=self._process.stderr_tail())

    def tell(self, pid: int) -> None:
        """Say which process is not to outlive this one; 0: none any more."""
        with contextlib.suppress(BrokenPipeError, TimeoutError):  # it is gone itself
            self._process.write(b"%d\n" % pid, _WRITE_S)

    def lost(self, wait_s: float = 0.0) -> str:
        """How it ended, if it did."""
        status = self._process.status(wait_s)
        return "" if status is None else _ending(status) or "ended"


def _ending(status: int) -> str:
    """What to say of an exit status; nothing of success."""
    return f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}" if status else ""


# --- the child ----------------------------------------------------------------------------------------


def _child() -> int:
    """Serve what the first line of stdin says until stdin ends."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which may have been ignored
    signal.signal(signal.SIGTERM, _terminate)
    lines, gone = read_lines(0), threading.Event()

    def tell(**message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            out.write(json.dumps(message).encode() + b"\n")

    try:
        options, folder = pickle.loads(base64.b64decode(next(lines, None) or b""))
        following = threading.Thread(target=_follow, args=(lines, gone, folder), name="stdin", daemon=True)
        following.start()
        serve(
            options,
            lambda stage, done, total: tell(stage=stage, done=done, total=total),
            lambda url, name, ctx_tokens: tell(url=url, name=name, ctx_tokens=ctx_tokens),
        )
    except SparkError as error:
        tell(error=[error.code, error.message, error.hint], status=error.exit_code)
        return error.exit_code
    except OSError as error:
        tell(error=["failed", f"{error.filename or 'the model'}: {error.strerror or error}", ""], status=1)
        return 1
    except (KeyboardInterrupt, EOFError):
        pass
    finally:
        if gone.is_set():
            following.join()
    return 0


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _follow(lines: Iterator[bytes | None], gone: threading.Event, folder: str) -> None:
    """Wait for the end of stdin, and end this process and what was told of last; its files are of no use then."""
    client = 0
    for line in lines:
        client = int(line or 0)
    gone.set()
    os.kill(os.getpid(), signal.SIGINT)  # replies get little time: nobody waits for them
    if client:
        _end(client, lambda: False)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(_child())
