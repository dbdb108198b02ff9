"""Train the reference model: read the library, make a tokenizer and token streams, train, export, measure.

    python data/nano/train.py --out DIR --minutes 6 --device cuda

writes DIR/nano.gguf (or its parts), tokenizer.json, metrics.json and train.log. Where there is no GPU the same model
is trained in smaller steps; give it hours. `--tiny` is a test of the path from text to GGUF in a minute.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the repository: engine

from check import transformers_nmse  # noqa: E402
from evaluate import (  # noqa: E402
    bigram_bits,
    copying_accuracy,
    parsed_share,
    routing,
    sample,
    token_bits,
    xz_bits,
)  # fmt: skip
from export import load_values, read_values, split_parts, stored_values, write_gguf  # noqa: E402
from model import Config, Model, decayed, loss  # noqa: E402
from streams import MIXTURE, Amounts, Texts, Tokens, encode, make_texts, train_tokenizer  # noqa: E402

ROUNDING_FROM = 0.75  # share of the run after which the forward pass sees weights rounded as Q4_K will
PASTED = 0.5  # share of the windows of plain text that get passages repeated
NORM_RATE = 3.0  # learning rate of norms, relative: the sharpness of attention is learned there
TEMPERATURE = 0.8
CODE_PROMPTS = ('"""', "import os\nimport re\n\n", "def read_", "class Test", "    def __init__(self, ")


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train: a step is `rows` windows of `window` tokens."""

    rows: int
    window: int
    learning_rate: float = 2e-3
    warmup_steps: int = 200
    weight_decay: float = 0.3
    dropout: float = 0.15
    balance: float = 0.003
    betas: tuple[float, float] = (0.9, 0.95)


class Log:
    """Lines for a person, on stderr and in a file."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w", encoding="utf-8")
        self.start = time.perf_counter()

    def __call__(self, text: str) -> None:
        """Write one line with the seconds since the start."""
        line = f"[{time.perf_counter() - self.start:6.1f} s] {text}"
        print(line, file=sys.stderr, flush=True)
        print(line, file=self.file, flush=True)


class Batches:
    """Random windows of the training streams in the proportions of MIXTURE, all streams in one array on the device.

    In half of the windows of plain text, passages are repeated at any later place. A third of these passages are
    put in random order first: no memory of the text helps to continue their second copy.
    """

    def __init__(self, streams: Mapping[str, Tokens], window: int, device: torch.device, seed: int) -> None:
        used = {kind: stream for kind, stream in streams.items() if len(stream) > window + 1}
        lengths = np.array([len(stream) for stream in used.values()])
        self.begin = np.concatenate([[0], lengths.cumsum()[:-1]])
        self.choices = lengths - window
        share = np.array([MIXTURE[kind] for kind in used])
        self.share = share / share.sum()
        self.plain = [kind in ("source", "renamed", "pages") for kind in used]
        self.tokens = torch.from_numpy(np.concatenate(list(used.values())).astype(np.int32)).to(device)
        self.window = window
        self.rng = np.random.default_rng(seed)

    def draw(self, rows: int) -> torch.Tensor:
        """Tokens int64 [rows, window + 1]."""
        kinds = self.rng.choice(len(self.share), rows, p=self.share)
        starts = self.begin[kinds] + self.rng.integers(0, self.choices[kinds])
        index = starts[:, None] + np.arange(self.window + 1)
        for row, kind in zip(index, kinds, strict=True):
            if self.plain[kind] and self.rng.random() < PASTED:
                self._paste(row)
        return self.tokens[torch.from_numpy(index).to(self.tokens.device)].long()

    def _paste(self, row: npt.NDArray[np.int64]) -> None:
        for _ in range(self.rng.integers(1, 4)):
            length = self.rng.integers(16, self.window // 8)
            distance = self.rng.integers(length, self.window - length)
            first = self.rng.integers(0, len(row) - length - distance + 1)
            if self.rng.random() < 1 / 3:
                row[first : first + length] = self.rng.permutation(row[first : first + length])
            row[first + distance : first + distance + length] = row[first : first + length]


def train(
    model: Model, plan: Plan, batches: Batches, seconds: float, steps: int | None, log: Log, watch: Callable[[], str]
) -> dict[str, Any]:
    """Train for `seconds` (or `steps` steps); the learning rate follows the elapsed share and ends at zero."""
    device = model.output.weight.device
    matrices, norms = decayed(model.parameters())
    groups = [
        {"params": matrices, "weight_decay": plan.weight_decay, "rate": plan.learning_rate},
        {"params": norms, "weight_decay": 0.0, "rate": plan.learning_rate * NORM_RATE},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=plan.betas, fused=device.type == "cuda")
    rounding = torch.zeros((), device=device)
    compute = torch.compile(loss) if device.type == "cuda" else loss
    step, share, begin, first_end, next_watch = 0, 0.0, time.perf_counter(), 0.0, 0.1
    uses = torch.zeros(())
    while share < 1:
        warm = min(1.0, (step + 1) / plan.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * warm * (1 - share)
        rounding.fill_(float(share >= ROUNDING_FROM))
        tokens = batches.draw(plan.rows)
        try:
            total, plain, uses = compute(model, tokens, plan.dropout, rounding, plan.balance)
        except torch._dynamo.exc.TorchDynamoException as error:  # no working compiler here: slower, same result
            log(f"torch.compile failed, running without it: {error}")
            compute = loss
            continue
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step == 1:
            value = plain.item()
            first_end = time.perf_counter()
            log(f"first step {first_end - begin:.1f} s (compilation included), loss {value:.3f}")
        if steps is not None:
            share = step / steps
        elif step % 10 == 1:
            plain.item()  # wait for the device: the clock must not run ahead of it
            share = min(1.0, (time.perf_counter() - first_end) / max(1.0, seconds - (first_end - begin)))
        if step % 100 == 0 or (steps is not None and steps <= 100):
            rate = (step - 1) * tokens[:, 1:].numel() / (time.perf_counter() - first_end + 1e-9)
            log(f"step {step} ({share:.1%}): loss {plain.item():.4f}, gradient {norm.item():.2f}, {rate:,.0f} tokens/s")
        if share >= next_watch:
            next_watch += 0.1
            least, most = (uses.amin(1) * 100).tolist(), (uses.amax(1) * 100).tolist()
            spread = " ".join(f"{a:.1f}-{b:.1f}" for a, b in zip(least, most, strict=True))
            log(f"step {step} ({share:.1%}): {watch()}; expert use by layer, %: {spread}")
    wall = time.perf_counter() - first_end
    count = step * plan.rows * plan.window
    return {"steps": step, "tokens": count, "seconds": wall, "tokens_per_s": count / wall, "final_loss": plain.item()}


def measure(model: Model, texts: Texts, streams: Mapping[str, Tokens], window: int, seed: int) -> dict[str, Any]:
    """Bits per byte on held-out text, copying accuracy, routing."""
    out: dict[str, Any] = {"bits_per_byte": {}}
    for kind, documents in texts.held_out.items():
        bits, uses = token_bits(model, streams[kind], window)
        out["bits_per_byte"][kind] = bits / sum(len(text.encode()) for text in documents)
        out[f"routing_{kind}"] = routing(uses)
    longest = min(model.c.n_ctx, len(streams["source"])) - 128
    distances = [d for d in (256, 1024, 2048, 3072, 3900) if d <= longest]
    for key, shuffled in (("copying", False), ("copying_shuffled", True)):
        places = {**{str(d): d for d in distances}, "not there": None}
        out[key] = {
            name: copying_accuracy(model, streams["source"], d, seed, 64, shuffled) for name, d in places.items()
        }
    return out


def baselines(texts: Texts, train_tokens: Tokens, held_out: Tokens, n_vocab: int) -> dict[str, float]:
    """Bits per byte of the held-out sources by models that need no training."""
    known = "\0".join(texts.train["source"]).encode()
    unseen = "\0".join(texts.held_out["source"]).encode()
    size = sum(len(text.encode()) for text in texts.held_out["source"])
    known_bytes, unseen_bytes = np.frombuffer(known, np.uint8), np.frombuffer(unseen, np.uint8)
    return {
        "xz": xz_bits(unseen) / size,
        "xz_after_training_text": xz_bits(unseen, known) / size,
        "byte_bigram": bigram_bits(known_bytes, unseen_bytes, 256) / size,
        "token_bigram": bigram_bits(train_tokens, held_out, n_vocab) / size,
    }


def samples(model: Model, tokenizer: Tokenizer, texts: Texts, n_tokens: int, seed: int) -> dict[str, Any]:
    """Text that the model writes: code at TEMPERATURE, and an agent's next turns on a held-out module, greedily."""
    written = sample(model, tokenizer, CODE_PROMPTS, n_tokens, TEMPERATURE, seed)
    code = [{"prompt": p, "text": t, "parsed": parsed_share(p + t)} for p, t in zip(CODE_PROMPTS, written, strict=True)]
    turns = []
    for document in texts.held_out["dialogues"][:4]:
        places = [i for i in range(len(document)) if document.startswith("<|im_start|>assistant\n", i)]
        prompt = document[: places[-1] + len("<|im_start|>assistant\n")]
        answer = document[len(prompt) :]
        text = sample(model, tokenizer, [prompt], n_tokens, 0.0, seed)[0]
        turns.append({"prompt": prompt, "expected": answer, "text": text})
    return {"code": code, "turns": turns}


def main() -> None:
    arguments = argparse.ArgumentParser(description="Train the reference model.")
    arguments.add_argument("--out", type=Path, required=True, help="folder for the results")
    arguments.add_argument("--minutes", type=float, default=6.0, help="training time, compilation included")
    arguments.add_argument("--steps", type=int, help="train for so many steps instead")
    arguments.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    arguments.add_argument(
        "--library", type=Path, default=Path(sysconfig.get_path("stdlib")), help="Python's Lib folder"
    )
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--tiny", action="store_true", help="a model and a corpus for testing this program")
    arguments.add_argument(
        "--parts", action="store_true", help="leave the GGUF in parts of 15 MiB, to be joined by cat"
    )
    args = arguments.parse_args()
    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    if args.tiny:
        amounts, plan = Amounts(60, 80, 40, 1, 1024), Plan(rows=4, window=256, warmup_steps=5)
    else:
        amounts = Amounts(None, 16000, 8000, 4, 6144)
        plan = Plan(rows=16, window=4096) if cuda else Plan(rows=8, window=1024)
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / "train.log")
    template = (HERE / "template.jinja").read_text("utf-8")
    torch.manual_seed(args.seed)

    texts = make_texts(args.library, template, amounts, args.seed)
    log(f"{texts.modules} modules, {len(texts.held_out_paths)} held out")
    tokenizer = train_tokenizer(texts, amounts.vocabulary)
    tokenizer.save(str(args.out / "tokenizer.json"))
    n_vocab = tokenizer.get_vocab_size()
    log(f"tokenizer of {n_vocab} tokens")
    streams = {kind: encode(tokenizer, documents) for kind, documents in texts.train.items()}
    unseen = {kind: encode(tokenizer, documents) for kind, documents in texts.held_out.items()}
    log("tokens: " + ", ".join(f"{k} {len(v):,}" for k, v in streams.items()) + f"; held out {len(unseen['source']):,}")

    c = Config(n_vocab, n_layer=2, n_expert=8, n_expert_used=2, n_ctx=512) if args.tiny else Config(n_vocab)
    model = Model(c, dtype).to(device)
    few = unseen["source"][: 128 * 1024]
    few_bytes = len(tokenizer.decode(few.tolist()).encode())

    def watch() -> str:
        bits = token_bits(model, few, plan.window)[0] / few_bytes
        copied = copying_accuracy(model, few, plan.window * 3 // 4, args.seed, 16)
        return f"held-out bits per byte {bits:.4f}, copied from far back {copied:.0%}"

    with ThreadPoolExecutor(1) as pool:
        simple = pool.submit(baselines, texts, streams["source"], unseen["source"], n_vocab)
        batches = Batches(streams, plan.window, device, args.seed)
        trained = train(model, plan, batches, 60 * args.minutes, args.steps, log, watch)
        log(f"trained: {json.dumps(trained)}")

        before = measure(model, texts, unseen, c.n_ctx, args.seed)
        log(f"unquantised: {json.dumps(before['bits_per_byte'])}")
        path = args.out / "nano.gguf"
        write_gguf(path, c, stored_values(model, rounded=True), tokenizer, template)
        log(f"{path.name}: {path.stat().st_size:,} bytes")
        stored = read_values(path)
        load_values(model, stored)
        after = measure(model, texts, unseen, c.n_ctx, args.seed)
        log(f"as stored: {json.dumps(after)}")
        nmse = transformers_nmse(path, unseen["source"][:256])
        log(f"logits against transformers' Qwen3MoE: NMSE {nmse:.2e}")
        written = samples(model, tokenizer, texts, 20 if args.tiny else 200, args.seed)
        metrics = {
            "command": _command(args),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "host": {"python": platform.python_version(), "torch": torch.__version__, "device": device_name(device)},
            "library": {
                "name": args.library.name, "modules": texts.modules, "sha256": texts.sha256,
                "held_out": list(texts.held_out_paths),
                "held_out_bytes": sum(len(t.encode()) for t in texts.held_out["source"]),
            },
            "tokens": {kind: len(stream) for kind, stream in streams.items()},
            "mixture": MIXTURE,
            "config": asdict(c),
            "plan": asdict(plan),
            "training": trained,
            "gguf_bytes": path.stat().st_size,
            "transformers_nmse": nmse,
            "baselines_bits_per_byte": simple.result(),
            "unquantised": before,
            "stored": after,
            "temperature": TEMPERATURE,
            "samples": written,
        }  # fmt: skip
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", "utf-8")
    log(f"baselines: {json.dumps(metrics['baselines_bits_per_byte'])}")
    if args.parts:
        log("parts: " + " ".join(part.name for part in split_parts(path)))


def _command(args: argparse.Namespace) -> str:
    """The command line without the names of this machine's folders."""
    names = {str(args.out): "OUT", str(args.library): args.library.name}
    return " ".join(["python data/nano/train.py", *(names.get(word, word) for word in sys.argv[1:])])


def device_name(device: torch.device) -> str:
    """What computes, for the record."""
    return torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
