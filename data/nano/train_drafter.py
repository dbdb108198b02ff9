"""Train a DFlash drafter for the reference model: text, replies of the model, training, export, measurement.

    python data/nano/train_drafter.py --device cuda --minutes 8 --out DIR

writes DIR/nano-drafter.gguf, drafter_metrics.json and drafter.log. `--minutes` is from the start to the end of
training; the measurement takes another one on a GPU. Where the engine is not built, `--engine FILE` elsewhere adds what
it says of the file. `--tiny` is a test of the whole path.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the repository: engine

from acceptance import Ids, agreement, cases, engine_cases, table, window_prompts  # noqa: E402
from drafter import Drafter, Optimizer, Shape, guess_loss, labels, write_drafter  # noqa: E402
from export import read_values  # noqa: E402
from model import Model  # noqa: E402
from streams import END, Amounts, Texts, Tokens, encode, make_texts  # noqa: E402
from target import all_replies, follow, load_target  # noqa: E402
from train import Log, device_name  # noqa: E402
from windows import MIXTURE, STOP, Batches, Sizes, rewritten, turns_of  # noqa: E402

from engine.ground.errors import SparkError  # noqa: E402

NAME = "nano-drafter.gguf"
METRICS = "drafter_metrics.json"
MASK = "ÿ"  # as the tokenizer writes the byte 0xFF, which no UTF-8 text has
SAY_EVERY = 15.0  # seconds
REPLY_SHARE = 0.2  # of the time, at most, at which the model stops writing replies to learn from
MAX_REPLY = 256  # tokens
MOST_WINDOWS = 512  # of a token file
CUT = 512  # tokens of a held-out source that the model continues
ENGINE_REPLIES, ENGINE_TOKENS = 32, 128  # that the engine writes, too


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train and measure.

    batch: replies that the model writes at a time. sessions: held out, that are measured, with all of their turns.
    """

    sizes: Sizes
    batch: int
    sessions: int
    learning_rate: float = 4e-3
    warmup_steps: int = 100


class Sometimes:
    """A log that takes a line every SAY_EVERY seconds, and leaves out the others."""

    def __init__(self, log: Log) -> None:
        self.log, self.at = log, time.perf_counter()

    def __call__(self, text: str) -> None:
        """Write a line, if one is due."""
        if time.perf_counter() - self.at >= SAY_EVERY:
            self.log(text)
            self.at = time.perf_counter()


def train(
    target: Model, drafter: Drafter, plan: Plan, batches: Batches, stop: int, seconds: float, steps: int | None,
    log: Log,
) -> dict[str, Any]:  # fmt: skip
    """Train for `seconds` (or `steps` steps); the learning rate follows the elapsed share and ends at zero."""
    cuda = target.output.weight.device.type == "cuda"
    optimizer = Optimizer(drafter, plan.learning_rate, cuda)
    step, share, losses = 0, 0.0, []
    begin = said_at = time.perf_counter()
    per_step = plan.sizes.rows * plan.sizes.anchors
    while share < 1:
        tokens, anchors = batches.draw()
        greedy, features = follow(target, tokens, drafter.s.captured)
        said, known = labels(greedy, tokens, anchors, drafter.s.block, stop)
        if step == 0:
            drafter.balance(features)
        logits = drafter(target, features, tokens, anchors, target.dtype)
        loss = guess_loss(logits, said, known)
        loss.backward()
        norm = optimizer.step(min(1.0, (step + 1) / plan.warmup_steps) * (1 - share))
        step += 1
        if steps is not None:
            share = step / steps
        elif not cuda or step % 5 == 1:
            torch.cuda.synchronize() if cuda else None  # the clock must not run ahead of the device
            share = min(1.0, (time.perf_counter() - begin) / seconds)
        now = time.perf_counter()
        if now - said_at >= SAY_EVERY or share >= 1:
            said_at = now
            losses.append((step, loss.item()))
            right = ((logits.argmax(-1) == said) & known).sum((0, 1)) / known.sum((0, 1)).clamp(min=1)
            places = " ".join(f"{x:.0%}" for x in right.tolist())
            log(
                f"step {step} ({share:.1%}): loss {loss.item():.4f}, gradient {norm.item():.2f}, "
                f"right by place {places}; {step * per_step / (now - begin):,.0f} blocks/s"
            )
    wall = time.perf_counter() - begin
    blocks = step * per_step
    return {"steps": step, "blocks": blocks, "seconds": wall, "blocks_per_s": blocks / wall, "losses": losses}


def learn(
    args: argparse.Namespace, target: Model, shape: Shape, plan: Plan, texts: Texts, tokenizer: Tokenizer, log: Log
) -> dict[str, Any]:
    """Train a drafter and write its file; what is known of the run."""
    device = target.output.weight.device
    streams = {kind: encode(tokenizer, texts.train[kind]) for kind in ("dialogues", "renamed", "source", "copying")}
    log("tokens: " + ", ".join(f"{kind} {len(stream):,}" for kind, stream in streams.items()))
    assert not any((stream == shape.mask).any() for stream in streams.values()), "the text has the token of masks"
    stop = tokenizer.token_to_id(STOP)
    streams["turns"], wanted, written = _replied(args, target, plan, streams["dialogues"], tokenizer, log)
    drafter = Drafter(shape, target.c.n_ctx).to(device)
    batches = Batches(streams, {"turns": wanted}, plan.sizes, shape.block, device, args.seed)
    left = max(1.0, 60 * args.minutes - (time.perf_counter() - log.start))
    steps = 20 if args.tiny and args.steps is None else args.steps
    trained = train(target, drafter, plan, batches, stop, left, steps, log)
    path = args.out / NAME
    write_drafter(path, drafter, "spark-nano-drafter")
    log(f"{path.name}: {path.stat().st_size:,} bytes")
    return {
        "command": _command(args),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": {"python": platform.python_version(), "torch": torch.__version__, "device": device_name(device)},
        "library": {"name": args.library.name, "modules": texts.modules, "sha256": texts.sha256},
        "tokens": {kind: len(streams[kind]) for kind in MIXTURE},
        "written": written,
        "mixture": MIXTURE,
        "shape": asdict(shape),
        "plan": asdict(plan),
        "training": trained,
        "gguf_bytes": path.stat().st_size,
    }


def _replied(
    args: argparse.Namespace, target: Model, plan: Plan, stream: Tokens, tokenizer: Tokenizer, log: Log
) -> tuple[Tokens, Any, dict[str, int]]:
    """The sessions with as many turns as there is time for written by the model; where turns are; counts."""
    turns = turns_of(stream, tokenizer)
    until = log.start + REPLY_SHARE * 60 * args.minutes
    prompts = [stream[turn.session : turn.begin] for turn in turns]
    replies = all_replies(target, prompts, MAX_REPLY, _stops(tokenizer), plan.batch, until, 0.9, Sometimes(log))
    n_tokens = sum(map(len, replies.values()))
    log(f"the model wrote {len(replies):,} of {len(turns):,} turns, {n_tokens:,} tokens")
    new, wanted = rewritten(stream, turns, replies, tokenizer.token_to_id(STOP))
    return new, wanted, {"turns": len(replies), "of": len(turns), "tokens": n_tokens}


def measure(
    args: argparse.Namespace, target: Model, drafter: Drafter, prompts: Mapping[str, list[Ids]], plan: Plan,
    tokenizer: Tokenizer, metrics: dict[str, Any], log: Log,
) -> None:  # fmt: skip
    """Acceptance on held-out prompts, into `metrics` and its file."""
    metrics["acceptance"] = {}
    for name, some in prompts.items():
        kind = "source" if name == "source" else None
        found = cases(target, drafter, some, MAX_REPLY, _stops(tokenizer), plan.batch, tokenizer, kind, Sometimes(log))
        measured = {"replies": len(found), "tokens": sum(len(case.reply) for case in found), **table(found)}
        log(f"{name}: {json.dumps(measured)}")
        metrics["acceptance"][name] = measured
        _write(args.out / METRICS, metrics)


def compare(
    args: argparse.Namespace, target: Model, drafter: Drafter, turns: list[Ids], tokenizer: Tokenizer,
    metrics: dict[str, Any], log: Log,
) -> None:  # fmt: skip
    """Some replies and guesses by the engine, into `metrics` and its file."""
    some = turns[:: max(1, len(turns) // ENGINE_REPLIES)][:ENGINE_REPLIES]
    path = args.engine or args.out / NAME
    try:
        said = engine_cases(args.model, path, some, ENGINE_TOKENS, _stops(tokenizer))
    except (ImportError, SparkError) as error:  # not built here: `--engine` does it where it is
        log(f"the engine cannot be loaded: {error}")
        return
    metrics["engine"] = agreement(target, drafter, said)
    log(f"engine: {json.dumps(metrics['engine'])}")
    _write(args.out / METRICS, metrics)


def held_out(texts: Texts, tokenizer: Tokenizer, sessions: int, seed: int) -> dict[str, list[Ids]]:
    """Prompts about held-out modules: what stands before each turn of sessions, and pieces of sources."""
    stream = encode(tokenizer, texts.held_out["dialogues"][:sessions])
    rng, pieces = np.random.default_rng(seed), []
    for text in texts.held_out["source"][:sessions]:
        ids = np.array(tokenizer.encode(text).ids, np.int64)
        if len(ids) > CUT:
            start = int(rng.integers(0, len(ids) - CUT))
            pieces.append(ids[start : start + CUT])
    return {"sessions": [stream[t.session : t.begin].astype(np.int64) for t in turns_of(stream, tokenizer)],
            "source": pieces}  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description="Train the reference model's drafter.")
    arguments.add_argument("--out", type=Path, required=True, help="folder for the results")
    arguments.add_argument("--minutes", type=float, default=8.0, help="from the start to the end of training")
    arguments.add_argument("--steps", type=int, help="train for so many steps instead")
    arguments.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    arguments.add_argument("--model", type=Path, default=HERE / "nano.gguf", help="the target")
    arguments.add_argument(
        "--library", type=Path, default=Path(sysconfig.get_path("stdlib")), help="Python's Lib folder"
    )
    arguments.add_argument("--tokens", type=Path, help="a token file (Parquet) to measure on, too")
    arguments.add_argument("--engine", type=Path, help="only see what the engine makes of this file, for OUT's metrics")
    arguments.add_argument("--layers", type=int, default=2, help="of the drafter")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--threads", type=int, help="of the CPU")
    arguments.add_argument("--tiny", action="store_true", help="little text and few steps, to test this program")
    args = arguments.parse_args()
    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if cuda else "cpu")
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.tiny:
        amounts, plan = Amounts(60, 64, 32, 1, 0), Plan(Sizes(2, 256, 16), batch=8, sessions=2)
    elif cuda:
        amounts, plan = Amounts(None, 16000, 4000, 2, 0), Plan(Sizes(12, 2048, 512), batch=2048, sessions=160)
    else:
        amounts, plan = Amounts(None, 1600, 400, 1, 0), Plan(Sizes(2, 640, 96), batch=32, sessions=12)
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / ("drafter.log" if args.engine is None else "engine.log"))
    torch.manual_seed(args.seed)

    texts = make_texts(args.library, (HERE / "template.jinja").read_text("utf-8"), amounts, args.seed)
    log(f"{texts.modules} modules, {len(texts.held_out_paths)} held out")
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    target = load_target(args.model, device, torch.bfloat16 if cuda else torch.float32)
    c = target.c
    prompts = held_out(texts, tokenizer, plan.sessions, args.seed)
    if args.tokens:
        prompts["token file"] = window_prompts(args.tokens, MOST_WINDOWS)
    if args.engine is None:
        captured = (0, c.n_layer // 3, c.n_layer - 1)  # the token, those before it, and what comes next
        shape = Shape(c.n_vocab, c.n_embd, tokenizer.token_to_id(MASK), captured, n_layer=args.layers)
        metrics = learn(args, target, shape, plan, texts, tokenizer, log)
    else:
        metrics = json.loads((args.out / METRICS).read_text("utf-8"))
        shape = Shape(**metrics["shape"])
    drafter = Drafter(shape, c.n_ctx).to(device)
    values = read_values(args.engine or args.out / NAME)
    drafter.load_state_dict({name: torch.from_numpy(np.array(w)) for name, w in values.items()})
    if args.engine is None:
        measure(args, target, drafter, prompts, plan, tokenizer, metrics, log)
    compare(args, target, drafter, prompts["sessions"], tokenizer, metrics, log)


def _stops(tokenizer: Tokenizer) -> tuple[int, int]:
    return tokenizer.token_to_id(STOP), tokenizer.token_to_id(END)


def _write(path: Path, metrics: dict[str, Any]) -> None:
    path.write_text(json.dumps(metrics, indent=1) + "\n", "utf-8")


def _command(args: argparse.Namespace) -> str:
    """The command line without the names of this machine's folders."""
    names = {str(args.out): "OUT", str(args.library): args.library.name, str(args.tokens): "TOKENS"}
    return " ".join(["python data/nano/train_drafter.py", *(names.get(word, word) for word in sys.argv[1:])])


if __name__ == "__main__":
    main()
