"""The demo: every step of the pipeline on the bundled model and sample sessions, each table explained."""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from engine.config import EngineConfig
from engine.errors import DaemonError, DeadlineError, SparkError
from engine.profile import default_path
from spark import calibrate as calibration
from spark import cli, pregate, tokens, validate
from spark.client import Deadlines
from spark.extract import ExtractOptions, extract

CALIBRATION_TOKENS = 60_000
HELD_OUT_TOKENS = 25_000
TRACE_TOKENS = 12_000
RESIDENCY_PCT = 60.0
DEADLINES = Deadlines(ready_s=60.0, silence_s=60.0, total_s=120.0)
PROMPT = "Show me how argparse adds a subcommand."


def bundled() -> tuple[Path, Path]:
    """The bundled model and the folder of sample sessions; SparkError where they are not there."""
    data = Path(__file__).resolve().parents[1] / "data"
    model, sessions = data / "nano" / "nano.gguf", data / "sessions"
    for path in (model, sessions):
        if not path.exists():
            raise SparkError(
                f"{path} is not there: the demo's model and sessions come with the source tree, not with the wheel",
                hint="clone the repository and run `make demo`",
            )
    return model, sessions


def run(out_dir: Path | None, threads: int | None) -> dict[str, Any]:
    """Run it all; what it makes stays in `out_dir`, or goes with a temporary folder. Returns every figure."""
    model, sessions = bundled()
    if out_dir is not None:
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SparkError(f"{out_dir} cannot be made: {error.strerror}", hint="choose another --out-dir") from error
        return _run(model, sessions, out_dir, threads)
    with tempfile.TemporaryDirectory(prefix="spark-demo-") as folder:
        return _run(model, sessions, Path(folder), threads)


def _run(model: Path, logs: Path, out: Path, threads: int | None) -> dict[str, Any]:
    config = EngineConfig(model=model, device="cpu", threads=threads)
    began = time.monotonic()
    figures: dict[str, Any] = {}

    _say(
        1,
        "Sessions",
        "Logs of Claude Code and Codex become conversations: tools, results and reasoning kept, replays dropped,\n"
        "secrets redacted. Whole sessions are held out for the test; nothing is calibrated on them.",
    )
    with cli.progress_bars() as progress:
        report = extract(
            ExtractOptions(out, "both", logs / "claude", logs / "codex", 0.3),
            lambda a, b: progress("reading logs", a, b),
        )
        extract(ExtractOptions(out / "claude", "claude", logs / "claude", None, 0.3), lambda a, b: None)
        extract(ExtractOptions(out / "codex", "codex", None, logs / "codex", 0.3), lambda a, b: None)
    cli.show_extraction(report.to_json())
    figures["extract-sessions"] = report.to_json()

    _say(
        2,
        "Tokens",
        "Each assistant turn as serving would have rendered it, with the model's own template; `generated` marks the\n"
        "tokens that the model itself would have decoded.",
    )
    files = {}
    with cli.progress_bars() as progress:
        for name in ("train", "test", "claude/train", "codex/test"):
            files[name] = out / f"{name}.parquet"
            summary = tokens.tokenize(model, out / f"{name}.jsonl", files[name])
            figures[f"tokenize {name}"] = dataclasses.asdict(summary)
            progress("tokenizing", len(files), 4)
    counted = ("tokens", "generated_tokens", "windows")
    rows = [(name, *(f"{figures[f'tokenize {name}'][key]:,}" for key in counted)) for name in files]
    cli.table("Token files", ["file", "tokens", "generated", "windows"], rows)

    _say(
        3,
        "Calibration",
        "The sessions run through the model, and the experts that each layer routes to are counted. The profile is a\n"
        "text file of counts; it also carries which share of the slots is best left to the cache.",
    )
    profile, claude_only = out / default_path(model).name, out / "claude" / default_path(model).name
    with cli.progress_bars() as progress:
        options = calibration.CalibrateOptions(files["train"], profile, max_tokens=CALIBRATION_TOKENS)
        made = calibration.calibrate(config, options, DEADLINES, progress)
        options = calibration.CalibrateOptions(files["claude/train"], claude_only, max_tokens=CALIBRATION_TOKENS // 2)
        calibration.calibrate(config, options, DEADLINES, progress)
    cli.show_calibration(made)
    figures["calibrate"] = made.to_json()

    _say(
        4,
        f"Validation on held-out sessions, {RESIDENCY_PCT:g}% of the experts in slots",
        "uniform: the same share of every layer, fixed. static: placed by the profile, fixed. lru: no profile, the\n"
        "slots follow the traffic. spark: some pinned by the profile, the rest follow. belady: the bound that no\n"
        "policy can beat. Tokens under every policy are compared with the all-resident run's: they must be the same.",
    )
    with cli.progress_bars() as progress:
        checked = validate.validate(
            config,
            validate.ValidateOptions(
                files["test"], profile, (), RESIDENCY_PCT, HELD_OUT_TOKENS, prompts=6, generate_tokens=48
            ),
            DEADLINES,
            progress,
        )
        crossed = validate.validate(
            config,
            validate.ValidateOptions(
                files["codex/test"], profile, (claude_only,), RESIDENCY_PCT, HELD_OUT_TOKENS, 1, 8
            ),
            DEADLINES,
            progress,
        )
    cli.show_validation(checked)
    cli.show_cross(crossed, "Codex sessions, placed by a profile of Claude Code sessions alone")
    figures["validate"], figures["cross"] = checked.to_json(), crossed.to_json()

    _say(
        5,
        "Pre-gate",
        "How well can a layer's experts be known before its attention has run? Small predictors from the residual\n"
        "that enters the layer, beside guesses that need no training. A prefetcher lives on these numbers.",
    )
    try:
        figures["train-pregate"] = _pregate(config, files["train"], out)
    except SparkError as error:
        cli.note(f"skipped: {error.message} ({error.hint})")

    _say(6, "Serving", f"`spark serve {model.name} --spark` answers a chat request and keeps what it learns.")
    figures["serve"] = _serve(model, profile, threads)
    seconds = time.monotonic() - began
    cli.note(f"\nThe whole pipeline took {seconds:.0f} s." + (f" Its files are in {out}." if out.exists() else ""))
    return {**figures, "seconds": seconds}


def _say(number: int, title: str, text: str) -> None:
    typer.echo(f"\n{number}. {title}\n{text}\n")


def _pregate(config: EngineConfig, train: Path, out: Path) -> dict[str, Any]:
    pregate.require_torch()
    trace = out / "trace"
    with cli.progress_bars() as progress:
        options = calibration.CalibrateOptions(
            train, out / "trace.spark.csv", trace_dir=trace, hidden=True, max_tokens=TRACE_TOKENS
        )
        calibration.calibrate(config, options, DEADLINES, progress)
        report = pregate.train(config.model, trace, out / "pregate.safetensors", pregate.PregateOptions(), progress)
    cli.show_pregate(report)
    return report.to_json()


# --- serving ------------------------------------------------------------------------------------------


@contextmanager
def _server(arguments: list[str]) -> Iterator[int]:
    """A `spark serve` on a free port that it tells on stderr; ended by SIGTERM, which saves the profile."""
    command = [sys.executable, "-m", "spark.cli", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        lines = []
        try:
            for line in process.stderr:
                lines.append(line.rstrip())
                if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                    yield int(found[1])
                    return
            raise DaemonError("the server ended before it was ready", hint="\n".join(lines[-5:]))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise DeadlineError("the server did not end within 30 s of SIGTERM") from None


def _serve(model: Path, profile: Path, threads: int | None) -> dict[str, Any]:
    before = profile.read_bytes()
    arguments = [str(model), "--spark", "--profile", str(profile), "--residency", f"{RESIDENCY_PCT:g}"]
    arguments += ["--threads", str(threads)] if threads else []
    with _server(arguments) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 96,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.monotonic()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        typer.echo(f"> {PROMPT}")
        first_s, text = 0.0, ""
        usage: dict[str, Any] = {}
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            first_s = first_s or time.monotonic() - began
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or choice["delta"].get("reasoning_content") or ""
                text += piece
                typer.echo(piece, nl=False)
        seconds = time.monotonic() - began
        connection.close()
    learned = profile.read_bytes() != before
    typer.echo(
        f"\n\n{usage.get('completion_tokens', 0)} tokens in {seconds:.2f} s, the first after {first_s * 1000:.0f} ms; "
        f"the profile {'has learned from them' if learned else 'is unchanged'}."
    )
    return {"usage": usage, "seconds": seconds, "first_token_s": first_s, "text": text, "profile_updated": learned}
