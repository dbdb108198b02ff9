"""Train a small model on tasks of recall: first short contexts, then ever longer ones.

    python data/recall/train.py --out DIR --minutes 15 --device cuda
    python data/recall/train.py --out DIR --minutes 15 --ctx 1024 --small  # without a GPU: short contexts, one thread

writes DIR/recall.gguf whenever the model is better than before, whole or not at all, and DIR/recall.json: what ran, on
what, and which share of answers is right, by task and length. Accuracy goes to stderr meanwhile.

The model is qwen3moe with one expert, which is a dense model; its tokens are numbers, there is no tokenizer. Only
tokens that follow from what stands before them are learned: answers, and replies that a conversation has already. A
batch has rows of one length, half of the time the longest that there is yet; that doubles as soon as nearly all tokens
are right, and after its share of the time at the latest. Heads that look back are laid out beforehand (priming.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from gguf import GGMLQuantizationType as QType

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from data.nano.model import Config, Model, decayed  # noqa: E402
from data.recall.export import write_model  # noqa: E402
from data.recall.priming import primed  # noqa: E402
from data.recall.tasks import I32, LEAST, N_VOCAB, TASKS, drawn, echo  # noqa: E402
from spark.results import write_json  # noqa: E402

KNOWN = 0.97  # of the tokens of the longest contexts: longer ones then come
DECAY_FROM = 0.5  # share of the run from which on the learning rate falls
MOST_ASKED = 32  # questions of a row
HELD_OUT = 1 << 32  # seeds from here on are of no batch
ECHOES = 0.1  # rows that are no task but teach to look back
# The base of the rotation is so large that enough channels hardly turn over the whole context: words are compared in
# them.
LARGE: dict[str, Any] = {"n_ff_exp": 512, "rope_freq_base": 1e8}
SMALL: dict[str, Any] = {
    "n_embd": 160, "n_layer": 3, "n_head": 4, "n_head_kv": 2, "head_dim": 48, "n_ff_exp": 128, "rope_freq_base": 1e8,
}  # fmt: skip
Batch = tuple[I32, np.ndarray]


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train: a step is about `tokens` tokens, and a row at least. lookahead: batches made meanwhile."""

    tokens: int
    n_ctx: int
    seed: int
    first: int = LEAST
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    lookahead: int = 8

    @property
    def lengths(self) -> list[int]:
        """Of rows: doubling, the last that of the longest."""
        found = [self.first]
        while found[-1] < self.n_ctx:
            found.append(min(self.n_ctx, found[-1] * 2))
        return found

    def latest(self, stage: int) -> float:
        """The share of the run by which a length has had its time: half for all but the longest."""
        return 0.5 * (stage + 1) / max(1, len(self.lengths) - 1)


def batch(seed: int, index: int, rows: int, length: int) -> Batch:
    """Tokens int32 [rows, length], and which are wanted, uint8: 1, in an echo 2. A row is of any task, or an echo."""
    rng = np.random.default_rng((seed, index))
    tokens, wanted = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.uint8)
    for r in range(rows):
        task = list(TASKS)[int(rng.integers(len(TASKS)))]
        echoing = rng.random() < ECHOES
        tokens[r], wanted[r] = (echo(rng, length) if echoing else drawn(task, rng, length, MOST_ASKED)).row()
        wanted[r] *= 1 + echoing
    return tokens, wanted


def loss_of(model: Model, tokens: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of the wanted tokens of [B, S], and whether each is the likeliest, bool: of tasks, if there are any."""
    left, _, _ = model.residuals(tokens[:, :-1])
    at = wanted[:, 1:] > 0
    logits, expected = model.head(left[-1][at], model.dtype).float(), tokens[:, 1:][at]
    right = logits.detach().argmax(-1) == expected
    tasks = wanted[:, 1:][at] == 1
    return F.cross_entropy(logits, expected), right[tasks] if bool(tasks.any()) else right


@torch.no_grad()
def accuracy(model: Model, lengths: list[int], cases: int, seed: int) -> dict[str, dict[int, float]]:
    """By task and length the share of answers whose every token is the likeliest, at the ends of held-out rows."""
    device, found = model.output.weight.device, {task: dict[int, float]() for task in TASKS}
    for kind, task in enumerate(TASKS):
        for length in lengths:
            right = n = 0
            for i in range(cases):
                rng = np.random.default_rng((seed, HELD_OUT, kind, length, i))
                case = drawn(task, rng, length, 8)
                row = torch.from_numpy(case.row()[0].astype(np.int64)).to(device)
                left, _, _ = model.residuals(row[None])
                likeliest = model.head(left[-1][0], torch.float32).argmax(-1)
                hit = (likeliest[:-1] == row[1:]).cpu().numpy()
                at = len(case.context)
                for a in case.asked:
                    at += len(a.prompt) + len(a.answer)
                    right += bool(hit[at - 1 - len(a.answer) : at - 1].all())
                    n += 1
            found[task][length] = right / n
    return found


def batches(plan: Plan, length: Callable[[int], int], pool: Executor | None) -> Iterator[tuple[int, Batch]]:
    """Batches without end, made in order, some ahead in processes; with the length of each.

    length: of batch i, asked for when its turn to be made comes.
    """

    def ask(i: int) -> tuple[int, Future[Batch] | Batch]:
        n = length(i)
        given = (plan.seed, i, max(1, plan.tokens // n), n)
        return n, batch(*given) if pool is None else pool.submit(batch, *given)

    ahead = 1 if pool is None else plan.lookahead
    waiting = [ask(i) for i in range(ahead)]
    for i in range(ahead, sys.maxsize):
        n, made = waiting.pop(0)
        yield n, made.result() if isinstance(made, Future) else made
        waiting.append(ask(i))


class Lengths:
    """How long rows are. stage: the longest of the plan's lengths that there is yet; known: how well it is, lately."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.stage, self.known = plan, 0, 0.0

    @property
    def longest(self) -> int:
        """That there is yet."""
        return self.plan.lengths[self.stage]

    def of(self, i: int) -> int:
        """Of batch i: the longest, or with even odds a shorter one."""
        rng = np.random.default_rng((self.plan.seed, i, 1))
        if rng.random() < 0.5 or self.stage == 0:
            return self.longest
        return self.plan.lengths[int(rng.integers(self.stage))]

    def learned(self, length: int, right: float, over: float) -> None:
        """Such a share of the tokens of a batch was right; `over` is the share of the run that is over."""
        if length == self.longest:
            self.known += 0.05 * (right - self.known)
        last = self.stage == len(self.plan.lengths) - 1
        if not last and (self.known > KNOWN or over > self.plan.latest(self.stage)):
            self.stage, self.known = self.stage + 1, 0.0


class Run:
    """A training run. share: what of it is over."""

    def __init__(self, model: Model, plan: Plan, minutes: float, steps: int | None) -> None:
        self.model, self.plan, self.seconds, self.steps = model, plan, 60 * minutes, steps
        self.lengths = Lengths(plan)
        self.step, self.share = 0, 0.0
        self.begin = time.perf_counter()
        matrices, norms = decayed(model.parameters())
        groups = [
            {"params": matrices, "weight_decay": plan.weight_decay, "rate": plan.learning_rate},
            {"params": norms, "weight_decay": 0.0, "rate": plan.learning_rate},
        ]
        cuda = model.output.weight.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=plan.betas, fused=cuda)

    def learn(self, length: int, made: Batch) -> tuple[float, float]:
        """One step; the loss before it, and the share of tokens that were right, as `loss_of` has it."""
        device = self.model.output.weight.device
        tokens, wanted = (torch.from_numpy(a).to(device, non_blocking=True) for a in made)
        warm = min(1.0, (self.step + 1) / self.plan.warmup_steps)
        fall = min(1.0, (1 - self.share) / (1 - DECAY_FROM))
        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * warm * fall
        loss, hits = loss_of(self.model, tokens.long(), wanted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        passed = (time.perf_counter() - self.begin) / self.seconds
        self.share = min(1.0, passed if self.steps is None else self.step / self.steps)
        right = hits.float().mean().item()
        self.lengths.learned(length, right, self.share)
        return loss.item(), right


def mean(found: dict[str, dict[int, float]]) -> float:
    return float(np.mean([share for of in found.values() for share in of.values()]))


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def train(run: Run, out: Path, qtype: QType, watched: int, every: float, pool: Executor | None) -> dict[str, Any]:
    """Train until the run is over; what recall.json has of it. The best model so far is always in `out`.

    watched: held-out cases of a task and length that it is judged by. every: share of the run between two judgments.
    """
    plan, best, due, judged = run.plan, -1.0, every, dict[str, dict[int, float]]()
    lengths = plan.lengths[-2:]
    tokens = 0
    for length, made in batches(plan, run.lengths.of, pool):
        loss, share = run.learn(length, made)
        tokens += made[0].size
        seconds = time.perf_counter() - run.begin
        if run.step % 50 == 1:
            note(
                f"[{seconds:6.1f} s] step {run.step} ({run.share:.1%}), {length} tokens: "
                f"loss {loss:.3f}, {share:.1%} of tokens right, {tokens / seconds:,.0f} tokens/s"
            )
        if run.share < min(due, 1.0):
            continue
        due += every
        found = accuracy(run.model, lengths, watched, plan.seed)
        for task, of in found.items():
            note(f"  {task}: " + ", ".join(f"{n} tokens {share:.0%}" for n, share in of.items()))
        if mean(found) >= best:
            best, judged = mean(found), found
            write_model(out / "recall.gguf", run.model, qtype)
            note(f"  {best:.1%} of answers right: written")
        if run.share >= 1:
            break
    seconds = time.perf_counter() - run.begin
    return {
        "steps": run.step, "tokens": tokens, "seconds": seconds, "longest": run.lengths.longest,
        "cases": watched, "accuracy": judged,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--minutes", type=float, default=15.0, help="what training may take, judging included")
    parser.add_argument("--steps", type=int, help="train for so many steps instead; on a CPU all follows from the seed")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--ctx", type=int, default=16384, help="tokens of the longest contexts")
    parser.add_argument("--tokens", type=int, help="of a step")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    parser.add_argument("--type", choices=["f32", "f16", "q8_0"], default="q8_0", help="of the file's matrices")
    parser.add_argument("--cases", type=int, default=4, help="of a task and length, that models are judged by")
    parser.add_argument("--workers", type=int, help="processes that make batches; 4 beside a GPU")
    parser.add_argument("--seed", type=int, default=1)
    o = parser.parse_args()
    sys.argv = ["OUT" if word == str(o.out) else word for word in sys.argv]  # a folder of this machine's is no figure
    cuda = o.device == "cuda" or (o.device == "auto" and torch.cuda.is_available())
    torch.manual_seed(o.seed)
    sizes = SMALL if o.small else LARGE
    config = Config(N_VOCAB, n_ctx=o.ctx, n_expert=1, n_expert_used=1, **sizes)
    model = primed(Model(config, torch.bfloat16 if cuda else torch.float32)).to("cuda" if cuda else "cpu")
    plan = Plan(o.tokens or (1 << 17 if cuda else 2048), o.ctx, o.seed, learning_rate=o.rate)
    o.out.mkdir(parents=True, exist_ok=True)
    note(f"{sum(p.numel() for p in model.parameters()):,} parameters, lengths {plan.lengths}")
    run = Run(model, plan, o.minutes, o.steps)
    if not cuda:
        torch.set_num_threads(1)
    workers = (4 if cuda else 0) if o.workers is None else o.workers
    with ExitStack() as stack:
        pool = stack.enter_context(ProcessPoolExecutor(workers, get_context("spawn"))) if workers else None
        made = train(run, o.out, QType[o.type.upper()], o.cases, 0.1, pool)
    host = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if cuda else "CPU, 1 thread"}
    write_json(o.out / "recall.json", {"torch": host, "config": asdict(config), "plan": asdict(plan), "training": made})
    note(json.dumps(made))


if __name__ == "__main__":
    main()
