"""The demo: every step of the pipeline on the bundled model and sample sessions, each table explained."""

from __future__ import annotations

import http.client
import json
import socket
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from engine.formats.profile import default_path
from engine.ground.config import Device, EngineConfig
from engine.ground.errors import DaemonError, MissingExtraError, SparkError
from engine.placing import policies
from engine.text import tokenizer
from spark.commands import tables
from spark.console import note, progress_bars, table, write
from spark.daemon.client import Deadlines, engine_command
from spark.extract import ExtractOptions, extract
from spark.pipeline import calibrate, checkpoints, pregate, tokens, validate
from spark.server.app import create_app
from spark.server.supervisor import Supervisor

TEST_FRAC = 0.3
CALIBRATION_TOKENS = 40_000
HELD_OUT_TOKENS = 48_000  # of five sessions at least: of fewer no interval says anything
CROSS_TOKENS = 16_000
TRACE_TOKENS = 15_000
RESIDENCY_PCT = 60.0
VALIDATED_PCT = (10.0, 30.0, 60.0)
DEADLINES = Deadlines(ready_s=300.0, silence_s=60.0, total_s=120.0)  # a GPU's kernels may have to be compiled
REPLY_TOKENS = 96
PROMPT = "Show me how argparse adds a subcommand."
_CLOSE_S = 10.0


def bundled() -> tuple[Path, Path]:
    """The bundled model and the folder of sample sessions; SparkError where they are not there."""
    data = Path(__file__).resolve().parents[2] / "data"
    model, sessions = data / "nano" / "nano.gguf", data / "sessions"
    for path in (model, sessions):
        if not path.exists():
            raise SparkError(
                f"{path} is not there: the demo's model and sessions come with the source tree, not with the wheel",
                hint="clone the repository and run `make demo` there",
            )
    return model, sessions


def run(out_dir: Path | None, threads: int | None, device: Device = "cpu") -> dict[str, Any]:
    """Run it all; what it makes stays in `out_dir`, or goes with a temporary folder. Returns every figure."""
    model, logs = bundled()
    config = EngineConfig(model=model, device=device, threads=threads)
    began_s = time.monotonic()
    if out_dir is None:
        with tempfile.TemporaryDirectory(prefix="spark-demo-") as folder:
            figures = _run(config, logs, Path(folder))
        files = "`--out-dir DIR` keeps the files that it makes."
    else:
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SparkError(f"{out_dir} cannot be made: {error.strerror}", hint="choose another --out-dir") from error
        figures = _run(config, logs, out_dir)
        files = f"Its files are in {out_dir}."
    seconds = time.monotonic() - began_s
    note(f"The whole pipeline took {seconds:.0f} s. {files}")
    return {**figures, "seconds": seconds}


def _run(config: EngineConfig, logs: Path, out: Path) -> dict[str, Any]:
    figures: dict[str, Any] = {}

    _say(
        "1. Sessions: spark extract-sessions",
        """Logs of Claude Code and Codex become conversations: tool calls, results and reasoning are kept, replays
        dropped, secrets redacted. Three sessions in ten are held out, whole; nothing is calibrated on them.""",
    )
    with progress_bars() as progress:
        extracted = extract(
            ExtractOptions(out, "both", logs / "claude", logs / "codex", TEST_FRAC),
            lambda done, total: progress("reading logs", done, total),
        )
        for name in ("claude", "codex"):
            extract(
                ExtractOptions(out / name, name, logs / "claude", logs / "codex", TEST_FRAC),
                lambda done, total: progress("reading logs", done, total),
            )
    tables.show_extraction(extracted)
    figures["extract-sessions"] = extracted.to_json()

    _say(
        "2. Tokens: spark tokenize",
        """Each assistant turn is rendered as serving would have rendered it, with the model's own chat template.
        The tokens that the model itself would have decoded are marked: those are the ones to be fast for.""",
    )
    summaries = {}
    with progress_bars() as progress:
        for name in ("train", "test", "claude/train", "codex/test"):
            summaries[name] = tokens.tokenize(
                config.model, out / f"{name}.jsonl", out / f"{name}.parquet",
                progress=lambda done, total: progress("tokenizing", done, total),
            )  # fmt: skip
    rows = [(n, f"{s.tokens:,}", f"{s.generated_tokens:,}", f"{s.windows:,}") for n, s in summaries.items()]
    table("Token files", ["sessions of", "tokens", "generated", "windows"], rows)
    figures["tokenize"] = {name: summary.to_json() for name, summary in summaries.items()}

    _say(
        "3. Calibration: spark calibrate",
        """The sessions run through the model, and the experts that each layer routes to are counted. The profile is
        a text file of these counts. It also says what the slots should do: how many to pin, and how long the others
        remember; found by replaying each session under the counts of others.""",
    )
    profile, claude_only = out / default_path(config.model).name, out / "claude-only.spark.csv"
    with progress_bars() as progress:
        calibrated = calibrate.calibrate(
            config,
            checkpoints.CalibrateOptions(
                out / "train.parquet", profile, max_tokens=CALIBRATION_TOKENS, resume=True
            ),
            DEADLINES, progress,
        )  # fmt: skip
        calibrate.calibrate(
            config,
            checkpoints.CalibrateOptions(
                out / "claude/train.parquet", claude_only, max_tokens=CALIBRATION_TOKENS // 2, resume=True
            ),
            DEADLINES, progress,
        )  # fmt: skip
    tables.show_calibration(calibrated)
    figures["calibrate"] = calibrated.to_json()

    _say(
        "4. Validation on held-out sessions: spark validate",
        """What each policy misses on sessions that nothing was made from, and what the profile's choice is worth.
        Each policy also serves prompts, and its tokens must be those of the all-resident run.""",
    )
    with progress_bars() as progress:
        checked = validate.validate(
            config,
            validate.ValidateOptions(
                out / "test.parquet", profile, (), VALIDATED_PCT, HELD_OUT_TOKENS, prompts=4, generate_tokens=32
            ),
            DEADLINES, progress,
        )  # fmt: skip
        crossed = validate.validate(
            config,
            validate.ValidateOptions(
                out / "codex/test.parquet", profile, (claude_only,), (RESIDENCY_PCT,), CROSS_TOKENS, 1, 8
            ),
            DEADLINES, progress,
        )  # fmt: skip
    tables.show_validation(checked)
    (ladder,) = crossed.ladders
    tables.show_cross(crossed, ladder, "Held-out Codex sessions, placed by all sessions and by Claude Code's alone")
    figures["validate"], figures["cross"] = checked.to_json(), crossed.to_json()

    _say(
        "5. Pre-gate: spark train-pregate",
        """How well are a layer's experts known before its attention has run? Small predictors look at the residual
        that enters the layer; router, previous token and frequency are guesses that need no training. What is
        known early can be fetched early.""",
    )
    try:
        figures["train-pregate"] = _pregate(config, out)
    except MissingExtraError as error:
        note(f"skipped: {error.message}: {error.hint}\n")

    _say(
        f"6. Serving: spark serve {config.model.name} --spark --residency {RESIDENCY_PCT:g}",
        """A chat request, answered over HTTP. What the server learns from it goes into the profile.""",
    )
    figures["serve"] = _serve(config, profile)
    return figures


def _say(title: str, text: str) -> None:
    write(f"{title}\n{textwrap.fill(' '.join(text.split()), 78)}\n\n")


def _pregate(config: EngineConfig, out: Path) -> dict[str, Any]:
    pregate.require_torch()
    with tempfile.TemporaryDirectory(prefix="trace-", dir=out) as folder, progress_bars() as progress:
        trace = Path(folder)
        options = checkpoints.CalibrateOptions(
            out / "train.parquet", trace / "profile.csv", trace_dir=trace, hidden=True, max_tokens=TRACE_TOKENS
        )
        calibrate.calibrate(config, options, DEADLINES, progress)
        report = pregate.train(
            config.model, trace, out / "pregate.safetensors", pregate.PregateOptions(threads=config.threads), progress
        )
    tables.show_pregate(report)
    return report.to_json()


# --- serving ------------------------------------------------------------------------------------------


@contextmanager
def _server(config: EngineConfig, profile: Path) -> Iterator[int]:
    """The server of `spark serve --spark` in a thread, on a port of its own that is given; saves the profile."""
    supervisor = Supervisor(lambda: engine_command(config), DEADLINES, profile)
    try:
        app = create_app(supervisor, tokenizer.load(config.model), config.model.stem)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            thread = threading.Thread(target=server.run, args=([listening],), name="server", daemon=True)
            thread.start()
            try:
                yield listening.getsockname()[1]
            finally:
                server.should_exit = True
                thread.join(_CLOSE_S)
    finally:
        supervisor.close()


def _serve(config: EngineConfig, profile: Path) -> dict[str, Any]:
    before = profile.read_bytes()
    config = EngineConfig(
        config.model, config.device, policies.SPARK.name, profile, residency_pct=RESIDENCY_PCT, threads=config.threads
    )
    with _server(config, profile) as port:
        figures = _chat(port)
    figures["profile_updated"] = profile.read_bytes() != before
    write(
        f"\n\n{figures['usage'].get('completion_tokens', 0)} tokens in {figures['seconds']:.2f} s, the first after "
        f"{figures['first_token_s'] * 1000:.0f} ms. The profile "
        f"{'has learned from them' if figures['profile_updated'] else 'is unchanged'}.\n\n"
    )
    return figures


def _chat(port: int) -> dict[str, Any]:
    """Ask the server and print its answer as it comes."""
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": REPLY_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    write(f"> {PROMPT}\n")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    began_s = time.monotonic()
    first_token_s, text = 0.0, ""
    usage: dict[str, Any] = {}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise DaemonError(f"the server answered {response.status}: {response.read().decode(errors='replace')}")
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise DaemonError(f"the server answered: {chunk['error']['message']}")
            first_token_s = first_token_s or time.monotonic() - began_s
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or choice["delta"].get("reasoning_content") or ""
                text += piece
                write(piece)
    finally:
        connection.close()
    return {"usage": usage, "seconds": time.monotonic() - began_s, "first_token_s": first_token_s, "text": text}
