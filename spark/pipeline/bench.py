"""What a model does on this machine at several residencies: real generation through the daemon, no trace replayed.

    bench(config, BenchOptions(residencies=(100, 60)), Deadlines(), progress) -> BenchReport

Every residency serves the same prompts, each prompt once and the first as a warm-up: nothing that is reported
was seen before, and nothing is drafted. Then all come again, with the reply of before as a prediction: text that is
copied, where drafts give most. Prefixes of the prompts, and their experts, may be there by then. A daemon that says it
runs with other settings than it was asked for is an error, not a row. On a GPU the residencies between that with the
fewest misses and that with the most are predicted from these two (spark/pipeline/predict.py), beside what was measured.
"""

from __future__ import annotations

import statistics
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from engine.formats import gguf
from engine.ground.config import EngineConfig
from engine.ground.errors import CapacityError, SparkError, UsageError
from engine.ground.protocol import Done
from engine.placing import policies
from engine.text import tokenizer
from spark.daemon.client import DaemonClient, Deadlines
from spark.pipeline import predict, replay
from spark.pipeline.predict import Line
from spark.pipeline.replay import Progress
from spark.pipeline.tokens import read_tokens

_SEED = 20
_CHARS_PER_TOKEN = 8  # of source text read for a prompt: more than any tokenizer needs


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure.

    residencies: percentages of the expert bytes in slots. prompts: measured ones; one more warms up.
    tokens: a token file (`spark tokenize`) to take prompts from; None: pieces of the Python standard library.
    """

    residencies: tuple[float, ...] = (100.0, 80.0, 60.0, 40.0)
    prompts: int = 6
    prompt_tokens: int = 512
    generate_tokens: int = 128
    tokens: Path | None = None


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One residency; rates are medians over prompts, `_spread` their extremes.

    miss_pct: misses among the active experts of generated tokens. identical_tokens: whether every prompt got the
    tokens of the first residency; None for that one. Of the second pass, None where there was none: draft_ rates,
    accepted_pct of the tokens that were drafted, draft_identical_tokens: whether the tokens were those of the first.
    step_ms: what steps of so many tokens of one reply take, by that number, as text; break_even_acceptance: of those
    with more than one, the chance of each token to be accepted from which on they are faster; None: they never are.
    missed_us: what a token's misses take alone, as the engine's figures have it. predicted_tokens_per_s: by the line
    through the other rows, which is fitted to two; None: this is one of them, or there is no line.
    """

    residency_pct: float
    policy: str
    miss_pct: float
    decode_tokens_per_s: float
    decode_spread: tuple[float, float]
    prefill_tokens_per_s: float
    prefill_spread: tuple[float, float]
    device_bytes: int
    identical_tokens: bool | None
    draft_decode_tokens_per_s: float | None = None
    draft_decode_spread: tuple[float, float] | None = None
    accepted_pct: float | None = None
    draft_identical_tokens: bool | None = None
    step_ms: Mapping[str, float] = field(default_factory=dict)
    break_even_acceptance: Mapping[str, float | None] = field(default_factory=dict)
    missed_us: float = 0.0
    predicted_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Rows in the order of the residencies asked for.

    prompts: where they come from. settings: what the daemon said of itself when it was ready, a record a row.
    skipped: residencies that do not fit on the device, and why. line: what rows are predicted by; None: nothing.
    """

    device: str
    model: str
    prompts: str
    prompt_tokens: int
    generate_tokens: int
    rows: tuple[BenchRow, ...]
    settings: tuple[dict[str, Any], ...]
    skipped: tuple[tuple[float, str], ...] = ()
    line: Line | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as `--json` writes it."""
        return {
            "device": self.device,
            "model": self.model,
            "prompts": self.prompts,
            "prompt_tokens": self.prompt_tokens,
            "generate_tokens": self.generate_tokens,
            "rows": [{name: getattr(row, name) for name in BenchRow.__slots__} for row in self.rows],
            "settings": list(self.settings),
            "skipped": [{"residency_pct": percent, "reason": reason} for percent, reason in self.skipped],
            "line": None if self.line is None else {"t0_ms": self.line.t0_ms, "scale": self.line.scale},
        }


def bench(config: EngineConfig, options: BenchOptions, deadlines: Deadlines, progress: Progress) -> BenchReport:
    """Serve the prompts at each residency.

    config: `profile` is placed by where it is set (policy `spark`), else the slots are plain LRU; `policy` and
    `residency_pct` are set here. A residency that does not fit is left out, unless none fits. Raises
    UsageError for options that cannot be measured, SparkError where the daemon runs with other settings than asked
    for, and whatever the model or the daemon is refused for.
    """
    _check(config, options)
    prompts, source = _prompts(config.model, options)
    rows: list[BenchRow] = []
    settings: list[dict[str, Any]] = []
    expected: list[list[int]] = []
    skipped: list[tuple[float, str]] = []
    device = ""
    for percent in options.residencies:
        asked = replace(config, policy=_policy(config, percent), residency_pct=percent)
        try:
            daemon = replay.open_daemon(asked, deadlines, progress)
        except CapacityError as error:
            skipped.append((percent, error.message))
            if len(skipped) == len(options.residencies):
                raise
            continue
        with daemon as client:
            check_settings(asked, client.ready.info)
            row, made = _serve(client, prompts, options, percent, progress)
            info = client.ready.info
            if info["draft"] != "off":
                row = _drafted(row, client, prompts, made, options, percent, progress)
        # Steps of other lengths round otherwise, so one length serves all; auto is asked once.
        config = replace(config, device=info["device"], chunk_tokens=info["chunk_tokens"])
        device = info["device"]
        settings.append({key: info[key] for key in info if key not in ("files", "model")})
        expected = expected or made
        rows.append(replace(row, identical_tokens=made == expected if rows else None))
    line, rows = predicted(rows) if device == "cuda" else (None, rows)  # on a host nothing has to be brought
    return BenchReport(
        device, str(config.model), source, options.prompt_tokens, options.generate_tokens, tuple(rows),
        tuple(settings), tuple(skipped), line,
    )  # fmt: skip


def predicted(rows: Sequence[BenchRow]) -> tuple[Line | None, list[BenchRow]]:
    """The line through the rows with the fewest and the most misses, and the rows with what it says of the others."""
    ends = predict.anchors([row.missed_us for row in rows])
    if ends is None:
        return None, list(rows)
    least, most = (rows[i] for i in ends)
    speeds = 1e3 / least.decode_tokens_per_s, 1e3 / most.decode_tokens_per_s
    line = predict.fit((least.missed_us, most.missed_us), speeds)
    return line, [
        row if i in ends else replace(row, predicted_tokens_per_s=1e3 / line.ms(row.missed_us))
        for i, row in enumerate(rows)
    ]


def check_settings(asked: EngineConfig, info: Mapping[str, Any]) -> None:
    """Raise SparkError unless the daemon's Ready `info` has every setting that was asked for."""
    for name in ("device", "policy", "kv_type", "ctx_tokens", "chunk_tokens", "threads", "draft"):
        want, found = getattr(asked, name), info[name]
        if name == "chunk_tokens" and want is not None:
            want = min(want, info["ctx_tokens"])
        if want not in (None, "auto", found):
            raise SparkError(f"the daemon runs with {name} {found}, asked for {want}")
    if asked.vram_gib is not None and info["plan"]["device_bytes"] > asked.vram_gib * (1 << 30):
        raise SparkError(f"the daemon plans {info['plan']['device_bytes']} bytes, asked for {asked.vram_gib:g} GiB")
    whole = policies.find(asked.policy).whole
    percent = 100.0 if whole else asked.residency_pct
    sizes = info["model"]["expert_bytes"]
    if not sizes:
        return  # a model without experts is always resident
    # Slots are whole: less than one more would fit, and the byte budget is never exceeded. 100 on a GPU is what fits.
    below = 100.0 * max(sizes) / (sum(sizes) * info["model"]["n_expert"])
    if percent == 100.0 and not whole and info["device"] == "cuda":
        below = 100.0
    if not percent - below - 1e-6 <= info["residency_pct"] <= percent + 1e-6:
        raise SparkError(f"the daemon holds {info['residency_pct']:.2f}% of the experts, asked for {percent:g}%")


def _check(config: EngineConfig, options: BenchOptions) -> None:
    if not options.residencies:
        raise UsageError("--residency names no percentage")
    for percent in options.residencies:
        if not 0.0 <= percent <= 100.0:
            raise UsageError(f"--residency {percent:g}: expected 0 to 100 percent")
    if options.prompts < 1 or options.prompt_tokens < 1 or options.generate_tokens < 2:
        raise UsageError("a bench needs a prompt, a token in it, and two tokens to generate")
    with gguf.open_model(config.model) as file:
        trained = file.value(f"{file.architecture}.context_length", int, 0)
    room = min(filter(None, (config.ctx_tokens, trained)), default=None)
    if room is not None and room < options.prompt_tokens + options.generate_tokens:
        raise UsageError(
            f"--prompt-tokens {options.prompt_tokens} and --generate {options.generate_tokens} do not fit in a context "
            f"of {room} tokens",
            hint="ask for fewer" if room == trained else f"ask for fewer, or a larger --ctx: the model has {trained}",
        )


def _policy(config: EngineConfig, percent: float) -> str:
    return (policies.ALL if percent == 100.0 else policies.served(config.profile is not None)).name


def _serve(
    client: DaemonClient, prompts: Sequence[list[int]], options: BenchOptions, percent: float, progress: Progress
) -> tuple[BenchRow, list[list[int]]]:
    label = f"serving at {percent:g}%"
    tokens, ended = _pass(client, prompts, None, options, label, progress)
    decode = [_decode_rate(done) for done in ended]
    prefill = [done.usage.prompt_tokens / done.timing.prefill_s for done in ended]
    hits, misses = (sum(done.residency[name] for done in ended) for name in ("hits", "misses"))
    info = client.ready.info
    steps = max(1, sum(done.usage.completion_tokens - 1 for done in ended))
    by_layer = np.sum([done.residency["misses_by_layer"] for done in ended], axis=0) / steps
    row = BenchRow(
        residency_pct=info["residency_pct"],
        policy=info["policy"],
        miss_pct=100.0 * misses / max(1, hits + misses),
        decode_tokens_per_s=statistics.median(decode),
        decode_spread=(min(decode), max(decode)),
        prefill_tokens_per_s=statistics.median(prefill),
        prefill_spread=(min(prefill), max(prefill)),
        device_bytes=info["plan"]["device_bytes"],
        identical_tokens=None,
        missed_us=predict.missed_us(info, by_layer.tolist()),
    )
    return row, tokens


def _drafted(
    row: BenchRow,
    client: DaemonClient,
    prompts: Sequence[list[int]],
    known: list[list[int]],
    options: BenchOptions,
    percent: float,
    progress: Progress,
) -> BenchRow:
    """The row with the figures of a second pass, whose replies are known."""
    made, ended = _pass(client, prompts, known, options, f"drafting at {percent:g}%", progress)
    decode = [_decode_rate(done) for done in ended]
    counts = [n for done in ended for n in done.usage.drafts.values()]
    drafted, accepted = (sum(n[name] for n in counts) for name in ("drafted", "accepted"))
    found = client.stats()["drafts"]["step_ms"].get("1", {})
    step_ms = {1 + int(n): ms for n, ms in found.items()}
    return replace(
        row,
        draft_decode_tokens_per_s=statistics.median(decode),
        draft_decode_spread=(min(decode), max(decode)),
        accepted_pct=100.0 * accepted / drafted if drafted else None,
        draft_identical_tokens=made == known,
        step_ms={str(n): ms for n, ms in step_ms.items()},
        break_even_acceptance={
            str(n): break_even(n, ms / step_ms[1]) for n, ms in step_ms.items() if n > 1 and step_ms.get(1)
        },
    )


def _pass(
    client: DaemonClient,
    prompts: Sequence[list[int]],
    known: Sequence[list[int]] | None,
    options: BenchOptions,
    label: str,
    progress: Progress,
) -> tuple[list[list[int]], list[Done]]:
    """The replies to all prompts, and how those ended that are measured: not the first, which warms up.

    known: what they are going to be, to draft from; None: nothing is drafted.
    """
    tokens, ended = [], []
    for i, prompt in enumerate(prompts):
        progress(label, i, len(prompts))
        stream = client.generate(
            prompt, max_tokens=options.generate_tokens, stop_tokens=[], draft=known is not None,
            prediction=None if known is None else known[i],
        )  # fmt: skip
        made, done = replay.finish(stream)
        tokens.append(made)
        ended += [done] if i else []
    progress(label, len(prompts), len(prompts))
    return tokens, ended


def _decode_rate(done: Done) -> float:
    return (done.usage.completion_tokens - 1) / done.timing.decode_s


def break_even(n_tokens: int, cost: float) -> float | None:
    """The chance p of each token of a step to be accepted, given the one before, at which 1 + p + ... + p^(n-1) = cost.

    cost: what the step takes, in steps of one token. 0 where it takes no more than one of these, None where it takes
    more than n_tokens of them, and loses even if all is accepted.
    """
    if cost > n_tokens:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        p = (low + high) / 2
        low, high = (p, high) if sum(p**k for k in range(n_tokens)) < cost else (low, p)
    return round((low + high) / 2, 6)


# --- prompts ------------------------------------------------------------------------------------------


def _prompts(model: Path, options: BenchOptions) -> tuple[list[list[int]], str]:
    """One prompt more than is measured, all distinct, and where they come from."""
    n, length = options.prompts + 1, options.prompt_tokens
    if options.tokens is not None:
        found = list(islice(_recorded(options.tokens, length), n))
        if len(found) < n:
            raise UsageError(f"{options.tokens} has {len(found)} distinct prompts of {length} tokens, {n} are needed")
        return found, str(options.tokens)
    with gguf.open_model(model) as file:
        n_vocab = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 1
        try:
            encoder = tokenizer.load(file)
        except SparkError as error:  # of the model; there may be no other prompts for it
            rng = np.random.default_rng(_SEED)
            return [rng.integers(0, n_vocab, length).tolist() for _ in range(n)], f"random tokens: {error.message}"
    return _library(encoder, n, length), "the Python standard library"


def _library(encoder: tokenizer.Tokenizer, n: int, length: int) -> list[list[int]]:
    """Prompts from the sources of n modules spread over the standard library; UsageError where none is that long."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    long = [path for path in paths if path.stat().st_size > 2 * _CHARS_PER_TOKEN * length]
    if not long:
        raise UsageError(
            f"--prompt-tokens {length}: no module of Python's library is that long",
            hint="give a token file with windows that are: --tokens TOKENS.parquet",
        )
    prompts = []
    for i in range(n):
        lap, at = divmod(i * max(1, len(long) // n), len(long))
        text = long[at].read_text("utf-8")
        start = (lap + 1) * 97 % max(1, len(text) - _CHARS_PER_TOKEN * length)
        tokens = encoder.encode(text[start : start + _CHARS_PER_TOKEN * length])[:length]
        prompts.append(tokens)
    return prompts


def _recorded(path: Path, length: int) -> Iterator[list[int]]:
    """What comes before an assistant's turn, cut to its last `length` tokens; one prompt a window, none twice."""
    seen = set()
    for window in read_tokens(path):
        generated = np.flatnonzero(window.generated)
        end = int(generated[0]) if generated.size else 0
        prompt = tuple(int(token) for token in window.tokens[max(0, end - length) : end])
        if len(prompt) == length and prompt not in seen:
            seen.add(prompt)
            yield list(prompt)
