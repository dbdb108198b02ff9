"""What types of the KV cache cost in exactness: logits and tokens beside those with f16, on the CPU backend.

    python benchmarks/kv_types.py --json data/results/kv_types.json

On the reference model: beginnings of held-out sessions of an agent, which quote what stands far back. On a tiny model
of each family, whose weights and prompts are random: that no layer, window or shared cache does worse. Logits are of
the last positions of a prompt, all fed as they stand; tokens are then decoded greedily until one differs.

Some rows are simulated: what is stored is changed in a cache of f16. A type of 3 bits; q4_0, which says what the
simulation is worth; and halves whose last bit is flipped, the least that any change makes, since experts that are all
but equal are chosen otherwise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.driving import note  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from engine import models  # noqa: E402
from engine.ground.config import EngineConfig  # noqa: E402
from engine.ground.kv_types import KV_TYPES, pair_of  # noqa: E402
from engine.ops import F32, I32, cpu  # noqa: E402
from engine.running.loaded import load  # noqa: E402
from engine.running.stepping import Span  # noqa: E402
from spark.extract import ExtractOptions, extract  # noqa: E402
from spark.pipeline.tokens import read_tokens, tokenize  # noqa: E402
from spark.results import write_json  # noqa: E402
from tests.tiny_models import tiny_path  # noqa: E402

NANO = ROOT / "data" / "nano" / "nano.gguf"
BASE = "f16"
ROWS = 64  # of logits, that a step gives
Round = Callable[[F32], F32]  # rows [..., head_dim] to what a type keeps of them


def held_out_windows(folder: Path, n: int, length: int) -> list[I32]:
    """Held-out sessions cut where the model would speak: `length` tokens, or down to half as many."""
    samples = ROOT / "data" / "sessions"
    extract(ExtractOptions(folder, "both", samples / "claude", samples / "codex", 0.4), lambda a, b: None)
    tokenize(NANO, folder / "test.jsonl", folder / "test.parquet", length)
    found = []
    for window in read_tokens(folder / "test.parquet"):
        begins = np.flatnonzero(np.diff(window.generated.astype(np.int8)) == 1) + 1
        if len(begins) and begins[-1] >= length // 2:
            found.append(window.tokens[: begins[-1]].astype(np.int32))
    if len(found) < n:
        raise SystemExit(f"{len(found)} held-out prompts of {length // 2} tokens, expected {n}")
    return [found[i] for i in np.linspace(0, len(found) - 1, n).astype(int)]


def to_bits(bits: int) -> Round:
    """Blocks of 32 that share a half, as q4_0: the element of largest magnitude is the least of 2^bits integers."""
    half = 1 << (bits - 1)

    def rounded(x: F32) -> F32:
        blocks = x.reshape(*x.shape[:-1], -1, 32)
        extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
        d = extreme / np.float32(-half)
        with np.errstate(all="ignore"):
            inverse = np.where(d == 0, np.float32(0), np.float32(1) / d)
        q = np.trunc(blocks * inverse + np.float32(half + 0.5)).clip(0, 2 * half - 1) - half
        return np.asarray((q * d.astype(np.float16).astype(np.float32)).reshape(x.shape), np.float32)

    return rounded


def one_bit_off(x: F32) -> F32:
    """Halves whose last bit is flipped."""
    return np.asarray((x.astype(np.float16).view(np.uint16) ^ np.uint16(1)).view(np.float16), np.float32)


LAST_BIT = "f16, last bit flipped"
SIMULATED: dict[str, tuple[Round | None, Round | None]] = {
    LAST_BIT: (one_bit_off, one_bit_off),
    "q4_0, simulated": (to_bits(4), to_bits(4)),
    "3 bits": (to_bits(3), to_bits(3)),
    "3 bits,f16": (to_bits(3), None),
    "f16,3 bits": (None, to_bits(3)),
}
BITS = {
    LAST_BIT: (16.0, 16.0), "q4_0, simulated": (4.5, 4.5), "3 bits": (3.5, 3.5), "3 bits,f16": (3.5, 16.0),
    "f16,3 bits": (16.0, 3.5),
}  # fmt: skip


@contextmanager
def simulated(rounds: tuple[Round | None, Round | None]) -> Iterator[None]:
    """Let the CPU backend round what it has stored in a cache of f16."""
    store = cpu.attention_input

    def attention_input(*arguments: Any, **named: Any) -> None:
        store(*arguments, **named)
        w, kv, slots = arguments[2], arguments[6], arguments[7]
        if w.wk is None:
            return
        stored = slots[slots >= 0]
        for array, rounded in zip((kv.k, kv.v), rounds, strict=True):
            if rounded is not None:
                array[stored] = rounded(array[stored].astype(np.float32)).astype(np.float16)

    cpu.attention_input = attention_input
    try:
        yield
    finally:
        cpu.attention_input = store


def run(path: Path, kv_type: str, prompts: list[I32], n_logits: int, n_tokens: int) -> list[tuple[F32, list[int]]]:
    """Of each prompt the logits of its last positions, [n_logits, V], and the tokens that follow greedily."""
    longest = max(map(len, prompts)) + n_tokens
    loaded = load(
        EngineConfig(
            path, device="cpu", kv_type=kv_type, ctx_tokens=longest, chunk_tokens=512, prefix_gib=0.0, draft="off"
        )
    )
    if cpu.attention_input.__module__ == __name__:  # calls that are noted and made again would not be simulated
        loaded.forward.ws.repeat = lambda noted, work: work()  # type: ignore[attr-defined]
    found = []
    for prompt in prompts:
        sequence = loaded.kv.sequence()

        def step(tokens: I32, want: tuple[int, ...] = (), of: Any = sequence) -> F32:
            result = loaded.steps.run([Span(of, tokens, np.zeros(len(tokens), bool), want)])
            return np.array(result.logits) if want else np.zeros((0, 0), np.float32)

        head = len(prompt) - n_logits
        for begin in range(0, head, 512):
            step(prompt[begin : min(begin + 512, head)])
        parts = [prompt[begin : begin + ROWS] for begin in range(head, len(prompt), ROWS)]
        logits = np.concatenate([step(part, tuple(range(len(part)))) for part in parts])
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < n_tokens:
            tokens.append(int(step(np.array(tokens[-1:], np.int32), (0,))[0].argmax()))
        sequence.release()
        found.append((logits, tokens))
    loaded.close()
    return found


def beside(base: list[tuple[F32, list[int]]], other: list[tuple[F32, list[int]]]) -> dict[str, Any]:
    """Errors of logits over all positions; of each prompt, how many tokens are the same before one differs."""
    squares, energy, same, divergence, n = 0.0, 0.0, 0, 0.0, 0
    agreed = []
    for (a, tokens), (b, others) in zip(base, other, strict=True):
        x, y = a.astype(np.float64), b.astype(np.float64)
        squares, energy = squares + float(((y - x) ** 2).sum()), energy + float((x**2).sum())
        log_p, log_q = (v - v.max(1, keepdims=True) for v in (x, y))
        log_p, log_q = (v - np.log(np.exp(v).sum(1, keepdims=True)) for v in (log_p, log_q))
        divergence += float((np.exp(log_p) * (log_p - log_q)).sum())
        same, n = same + int((x.argmax(1) == y.argmax(1)).sum()), n + len(x)
        agreed.append(next((i for i, (t, o) in enumerate(zip(tokens, others, strict=True)) if t != o), len(tokens)))
    return {
        "logits_nmse": squares / energy, "kl_nats": divergence / n, "likeliest_same": same / n, "tokens_same": agreed,
        "replies_same": sum(a == len(base[0][1]) for a in agreed),
    }  # fmt: skip


def bits_of(kv_type: str) -> tuple[float, float]:
    """Bits of a dimension of keys, and of values."""
    k, v = (8 * kind.row_bytes(64) / 64 for kind in pair_of(kv_type))
    return k, v


def measure(
    name: str, path: Path, prompts: list[I32], n_logits: int, n_tokens: int, types: list[str]
) -> list[dict[str, Any]]:
    """A row a type."""
    base, rows = run(path, BASE, prompts, n_logits, n_tokens), []
    for kv_type in types:
        if kv_type in SIMULATED:
            with simulated(SIMULATED[kv_type]):
                other = run(path, BASE, prompts, n_logits, n_tokens)
        else:
            other = run(path, kv_type, prompts, n_logits, n_tokens)
        bits = BITS[kv_type] if kv_type in SIMULATED else bits_of(kv_type)
        row = {
            "model": name, "kv_type": kv_type, "simulated": kv_type in SIMULATED, "bits": sum(bits) / 2,
            "prompts": [len(p) for p in prompts], "positions": n_logits * len(prompts), "tokens": n_tokens,
        }  # fmt: skip
        rows.append(row | beside(base, other))
        made = rows[-1]
        note(
            f"{name} {kv_type}: NMSE {made['logits_nmse']:.2e}, KL {made['kl_nats']:.2e}, likeliest the same "
            f"{made['likeliest_same']:.2%}, tokens the same {made['tokens_same']}"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    json_option(parser)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--length", type=int, default=3072, help="of the longest prompt of the reference model")
    parser.add_argument("--tokens", type=int, default=128, help="decoded behind each prompt")
    o = parser.parse_args()
    others = [t for t in KV_TYPES if t != BASE]
    with tempfile.TemporaryDirectory(prefix="spark-kv-types-") as name:
        windows = held_out_windows(Path(name), o.prompts, o.length)
    rows = measure("spark-nano", NANO, windows, 512, o.tokens, [*others, *SIMULATED])
    rng = np.random.default_rng(9)
    for family in models.known():
        path = tiny_path(family)
        n_vocab = models.find(family).tiny(np.random.default_rng(0))[0].n_vocab
        prompts = [rng.integers(0, n_vocab, n).astype(np.int32) for n in (417, 333, 290)]
        rows += measure(family, path, prompts, 128, 32, [*others, LAST_BIT, "3 bits"])
    if o.json:
        write_json(o.json, {"base": BASE, "rows": rows})


if __name__ == "__main__":
    main()
