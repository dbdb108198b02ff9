"""What lookup drafts are worth: recorded sessions through the real index and gate, and replies served for real.

    python benchmarks/drafts.py replay MODEL.gguf data/results/given_tokens.json TOKENS.parquet... --json FILE
    python benchmarks/drafts.py chances MODEL.gguf TOKENS.parquet... --json FILE
    python benchmarks/drafts.py serve MODEL.gguf TOKENS.parquet --prompts 40 --generate 160 --json FILE
    python benchmarks/drafts.py counted MODEL.gguf TOKENS.parquet --prompts 40 --generate 160 --json FILE

`replay` decodes nothing: each generated token of the sessions is what the model would have said, in their order, so
that only earlier ones are there to be looked in; what a step takes is a table of measured steps (given_tokens.py). The
same drafts are cut at fixed lengths, which never ask a gate. By what is written: reasoning, tool calls, text.

`chances` counts how often tokens of lookup's drafts are right, each given that all before it were, by how likely lookup
took that to be, and whether it is a draft's first.

`serve` has two daemons, with drafts and without, that generate from the same prompts in turns. Tokens are compared. Its
figure is the ratio of times for each prompt, the median of several runs, and the tenths of the prompts by that.

`counted` does the same with engines in this process, on a machine whose neighbors come and go: the steps of each reply
are counted, and each takes what steps like it took in the middle, all that is done for one counted: those of as many
tokens, of which as many stayed, of greedy replies or of sampled ones. Deciding is as it was, by what the clock said.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.driving import Sample, generate, note, open_checked, settings, spread  # noqa: E402
from benchmarks.figures import json_option  # noqa: E402
from benchmarks.suffix_cache import SuffixCache  # noqa: E402
from engine.drafting.gate import Gate  # noqa: E402
from engine.drafting.lookup import NAME, PRIORS, Lookup, Memory  # noqa: E402
from engine.drafting.outcomes import MOST_TOKENS, Record  # noqa: E402
from engine.drafting.source import Draft, Source  # noqa: E402
from engine.formats import gguf  # noqa: E402
from engine.ground.config import DEVICES, EngineConfig  # noqa: E402
from engine.ground.protocol import Generate, Tokens  # noqa: E402
from engine.ground.sampling import Sampling  # noqa: E402
from engine.serving.scheduler import Engine  # noqa: E402
from spark.pipeline.tokens import Window, read_tokens  # noqa: E402
from spark.results import write_json  # noqa: E402

KINDS = {
    "<think>": "reasoning", "</think>": "text", "<tool_call>": "call", "</tool_call>": "text", "<|im_start|>": "text",
}  # fmt: skip
FIXED, ORACLE = (0, 1, 3, 7, 15, 31), "oracle"
MEMORY_BYTES = 64 << 20
TENTHS = 10  # of chances, that are counted apart


class Beginning(Sequence[int]):
    """The first n tokens of a list, not copied."""

    def __init__(self, tokens: list[int], n: int) -> None:
        self.tokens, self.n = tokens, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return self.tokens[slice(*at.indices(self.n))]
        return self.tokens[at + self.n if at < 0 else at]


class Steps:
    """What steps of 1, 2, ... tokens take, in seconds, by a result of given_tokens.py; widths: those measured."""

    def __init__(self, path: Path, depth: int, plain_ms: float | None) -> None:
        rows = [r for r in json.loads(path.read_text())["rows"] if r["sequences"] == 1 and r["depth"] == depth]
        self.by_width = {r["tokens_each"]: r["seconds"]["median"] for r in rows}
        if plain_ms is not None:
            self.by_width[1] = plain_ms / 1000

    def __call__(self, n_tokens: int) -> float:
        """One of so many."""
        return float(np.interp(n_tokens, list(self.by_width), list(self.by_width.values())))

    def fits(self, n_tokens: int) -> bool:
        """Whether a step may have so many."""
        return n_tokens in self.by_width


def marks_of(model: Path) -> dict[int, str]:
    """What begins with each of a model's marks."""
    with gguf.open_model(model) as file:
        names = file.value("tokenizer.ggml.tokens", list)
        return {i: KINDS[str(name)] for i, name in enumerate(names) if str(name) in KINDS}


def kinds_of(tokens: Sequence[int], marks: dict[int, str]) -> list[str]:
    """What is being written behind each token."""
    kind, found = "text", []
    for token in tokens:
        kind = marks.get(token, kind)
        found.append(kind)
    return found


class Texts:
    """The index that is served with: texts of the sessions before, and one that drafts for each."""

    def __init__(self) -> None:
        self.memory = Memory(MEMORY_BYTES)
        self.add, self.close = self.memory.add, self.memory.close

    def open(self) -> Source:
        """What drafts for the next session."""
        return Lookup(self.memory)


def replayed(
    windows: list[Window], marks: dict[int, str], steps: Steps, fixed: int | str | None, memory: Texts | SuffixCache
) -> dict[str, Any]:
    """Time with drafts against time without.

    fixed: the most tokens of every draft; None: the gate decides; ORACLE: as many as go furthest in the time of the
    step, by what the session says.
    """
    gate = Gate({NAME: PRIORS})
    gate.begin({n - 1: steps(n) for n in steps.by_width})  # a server tries them at its start
    by_kind: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)  # plain, taken, tokens, drafted, stayed
    sessions: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    drafted = accepted = 0
    for window in windows:
        tokens, kinds = window.tokens.tolist(), kinds_of(window.tokens.tolist(), marks)
        source, record, i = memory.open(), Record(), 1
        ends = {int(e) for e in np.flatnonzero(np.diff(window.generated.astype(np.int8)) == -1) + 1} | {len(tokens)}
        while i < len(tokens):
            if not window.generated[i]:
                i += 1
                continue
            end = min(e for e in ends if e > i)
            most = min(MOST_TOKENS, end - i - 1)  # a reply's limit: nothing is drafted beyond
            promise = source.promise(Beginning(tokens, i), most) if most else None
            n = 0
            if promise is not None:
                n = min(promise.n_tokens, fixed if isinstance(fixed, int) else most)
                if fixed == ORACLE:
                    n = best(source.draft(n), tokens[i : i + n], steps)
                elif fixed is None:
                    (n,) = gate.share([(promise, record)], steps.fits, n)
                n = max((w - 1 for w in steps.by_width if w - 1 <= n), default=0)
            draft, stayed = source.draft(n) or Draft(NAME, 0, ()), 0
            while stayed < n and tokens[i + stayed] == draft.tokens[stayed]:
                stayed += 1
            taken_s, plain_s = steps(1 + n), steps(1) * (1 + stayed)
            if fixed is None and n:
                gate.note([(draft, record, n, stayed)], taken_s)
            elif fixed is None:
                gate.plain(1, taken_s)
            for sums in (by_kind[kinds[i - 1]], sessions[window.session_id]):
                sums[0] += plain_s
                sums[1] += taken_s
            for k, count in enumerate((1 + stayed, n, stayed), 2):
                by_kind[kinds[i - 1]][k] += count
            drafted, accepted, i = drafted + n, accepted + stayed, i + 1 + stayed
        source.close()
        memory.add(window.tokens)
    memory.close()
    plain_s, taken_s = (sum(sums[k] for sums in by_kind.values()) for k in (0, 1))
    ratios = [plain / taken for plain, taken in sessions.values()]
    return {
        "speedup": plain_s / taken_s, "drafted": drafted, "accepted": accepted,
        "by_kind": {
            k: {"speedup": p / t, "tokens": int(n), "drafted": int(d), "accepted": int(a)}
            for k, (p, t, n, d, a) in sorted(by_kind.items())
        },
        "sessions": {"n": len(ratios), "min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)},
    }  # fmt: skip


def best(draft: Draft | None, follow: list[int], steps: Steps) -> int:
    """How many tokens of a draft go furthest in the time of the step."""
    tokens = () if draft is None else draft.tokens
    stay = [a == b for a, b in zip(tokens, follow, strict=True)]
    stayed = stay.index(False) if False in stay else len(stay)
    lengths = [w - 1 for w in steps.by_width if w - 1 <= len(tokens)]
    return max(map(int, lengths), key=lambda n: (1 + min(n, stayed)) / steps(1 + n))


def replay(o: argparse.Namespace) -> dict[str, Any]:
    steps, marks, rows = Steps(o.steps, o.depth, o.plain_ms), marks_of(o.model), []
    for path in o.tokens:
        windows = list(read_tokens(path))
        n = sum(int(w.generated.sum()) for w in windows)
        for index in ("lookup", *(["suffix cache"] if o.suffix_cache else [])):
            for fixed in (None, *FIXED[1:], ORACLE):
                memory = SuffixCache(o.suffix_cache) if index != "lookup" else Texts()
                made = replayed(windows, marks, steps, fixed, memory)
                rows.append({"tokens": path.name, "index": index, "generated": n, "fixed": fixed} | made)
                note(f"{path.name}, {index}, {'gate' if fixed is None else fixed}: {made['speedup']:.3f}")
    step_ms = {w: 1000 * s for w, s in steps.by_width.items()}
    return {"what": "replay", "step_ms": step_ms, "depth": o.depth, "plain_ms": o.plain_ms, "rows": rows}


def counted(windows: list[Window]) -> dict[str, dict[str, list[float]]]:
    """Of first tokens and of later ones: by tenths of the chance that was promised how many, their sum, the right."""
    texts = Texts()
    found: dict[str, dict[str, list[float]]] = {
        which: {key: [0.0] * TENTHS for key in ("reached", "promised", "right")} for which in ("first", "later")
    }
    for window in windows:
        tokens, source = window.tokens.tolist(), texts.open()
        for i in (np.flatnonzero(window.generated[1:]) + 1).tolist():
            promise = source.promise(Beginning(tokens, i), MOST_TOKENS)
            if promise is None or promise.chances is None:
                continue
            drafted, before = (source.draft(promise.n_tokens) or Draft(NAME, 0, ())).tokens, 1.0
            for k, chance in enumerate(promise.chances):
                if i + k == len(tokens) or not window.generated[i + k]:
                    break
                row, alone = found["later" if k else "first"], chance / before
                tenth, before = min(int(TENTHS * alone), TENTHS - 1), chance
                for key, value in (("reached", 1.0), ("promised", alone), ("right", drafted[k] == tokens[i + k])):
                    row[key][tenth] += value
                if drafted[k] != tokens[i + k]:
                    break
        source.close()
        texts.add(window.tokens)
    texts.close()
    return found


def chances(o: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for path in o.tokens:
        for which, row in counted(list(read_tokens(path))).items():
            rows.append({"tokens": path.name, "which": which} | row)
            note(f"{path.name}, {which}: {row}")
    return {"what": "chances", "rows": rows}


def prompts_of(path: Path, n: int, most: int) -> list[list[int]]:
    """Ends of what came before turns of the model, of different sessions as far as there are so many."""
    found: dict[tuple[int, ...], None] = {}
    windows = list(read_tokens(path))
    for lap in range(64):
        for window in windows:
            begins = np.flatnonzero(np.diff(window.generated.astype(np.int8)) == 1) + 1
            if lap < len(begins) and len(found) < n:
                found[tuple(window.tokens[max(0, begins[lap] - most) : begins[lap]].tolist())] = None
    if len(found) < n:
        raise SystemExit(f"{path} has {len(found)} turns, expected {n}")
    return [list(p) for p in found]


def serve(o: argparse.Namespace) -> dict[str, Any]:
    prompts = prompts_of(o.tokens, o.prompts, o.prompt_tokens)
    base = {"model": o.model, "device": o.device, "threads": o.threads, "ctx_tokens": o.prompt_tokens + o.generate + 64}
    rows, same = [], True
    drafted_with = EngineConfig(**base, draft=o.draft)
    with open_checked(drafted_with) as with_drafts, open_checked(EngineConfig(**base, draft="off")) as without:
        for i, prompt in enumerate(prompts):
            times: dict[bool, list[float]] = {True: [], False: []}
            drafts: dict[str, dict[str, int]] = {}
            sampling = Sampling(temperature=0.8, top_p=0.95, seed=i) if i % 2 else Sampling()
            for run in range(o.runs):
                # No run is of a prompt that was there before: its first token is another one.
                asked = [(7 * i + run) % 4096, *prompt[1:]]
                made: dict[bool, Sample] = {}
                for drafted in (True, False) if run % 2 else (False, True):
                    made[drafted] = generate(with_drafts if drafted else without, asked, o.generate, sampling)
                    times[drafted].append(made[drafted].done.timing.decode_s)
                same &= made[True].tokens == made[False].tokens
                for source, counts in made[True].done.usage.drafts.items():
                    own = drafts.setdefault(source, {"drafted": 0, "accepted": 0})
                    for key in own:
                        own[key] += counts[key]
            ratio = statistics.median(times[False]) / statistics.median(times[True])
            rows.append({"prompt": i, "tokens": len(prompt), "speedup": ratio, "drafts": drafts})
            note(f"{i}: {ratio:.3f} {drafts}")
        found = settings(with_drafts), with_drafts.stats()["drafts"]
    ratios = sorted(r["speedup"] for r in rows)
    tenths = [statistics.fmean(part.tolist()) for part in np.array_split(np.array(ratios), 10)]
    return {
        "what": "serve", "model": o.model.name, "draft": Path(o.draft).name, "generate": o.generate, "runs": o.runs,
        "identical_tokens": same, "speedup": spread(ratios), "tenths": tenths, "rows": rows, "settings": found[0],
        "drafts": found[1],
    }  # fmt: skip


Kind = tuple[int, int, bool]  # tokens of a step, tokens that a reply got of it, whether it is sampled


class Counting:
    """An engine in this process whose steps of replies that decode are counted; seconds: of each kind of step."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = Engine(config)
        self.engine.warm_up()
        self.seconds: dict[Kind, list[float]] = defaultdict(list)
        decoder = self.engine.loaded.decoder
        step, run, width = decoder.step, decoder.run, [0]

        def ran(proposals: Any, *more: Any, **named: Any) -> Any:
            width[0] = sum(len(p.span.tokens) for p in proposals)
            return run(proposals, *more, **named)

        def stepped(replies: Any, *more: Any) -> Any:
            made, began = replies[0].made, time.perf_counter()
            failures = step(replies, *more)
            taken = time.perf_counter() - began
            kind = width[0], replies[0].made - made, replies[0].params.temperature > 0
            self.steps.append(kind)
            self.seconds[kind].append(taken)
            return failures

        decoder.step, decoder.run = stepped, ran  # type: ignore[method-assign]

    def generate(self, number: int, prompt: list[int], n: int, sampling: Sampling) -> tuple[list[int], list[Kind]]:
        """The tokens of a reply, and its steps."""
        self.steps: list[Kind] = []
        self.engine.submit(Generate(number, tuple(prompt), n, sampling, stop_tokens=()))
        told: list[int] = []
        while self.engine.busy:
            for event in self.engine.step():
                told += event.tokens if isinstance(event, Tokens) else ()
        return told, self.steps

    def cost(self, steps: list[Kind]) -> float:
        """What steps take in the middle, in seconds."""
        return sum(statistics.median(self.seconds[kind]) for kind in steps)


def counted_steps(o: argparse.Namespace) -> dict[str, Any]:
    prompts = prompts_of(o.tokens, o.prompts, o.prompt_tokens)
    base = {"model": o.model, "device": o.device, "threads": o.threads, "ctx_tokens": o.prompt_tokens + o.generate + 64}
    drafted, plain = Counting(EngineConfig(**base, draft=o.draft)), Counting(EngineConfig(**base, draft="off"))
    replies: list[tuple[int, list[Kind], list[Kind]]] = []
    same, number = True, 0
    for run in range(o.runs):
        for i, prompt in enumerate(prompts):
            asked = [(7 * i + run) % 4096, *prompt[1:]]
            sampling = Sampling(temperature=0.8, top_p=0.95, seed=i) if i % 2 else Sampling()
            number += 1
            made = [engine.generate(number, asked, o.generate, sampling) for engine in (drafted, plain)]
            same &= made[0][0] == made[1][0]
            replies.append((i, made[0][1], made[1][1]))
    by_prompt: dict[int, list[float]] = defaultdict(list)
    for i, with_drafts, without in replies:
        by_prompt[i].append(plain.cost(without) / drafted.cost(with_drafts))
    ratios = sorted(statistics.median(found) for found in by_prompt.values())
    for engine in (drafted, plain):
        engine.engine.close()
    tenths = [statistics.fmean(part.tolist()) for part in np.array_split(np.array(ratios), 10)]
    note(f"{spread(ratios)}, tenths {tenths}, the same tokens: {same}")
    return {
        "what": "counted", "model": o.model.name, "draft": Path(o.draft).name, "generate": o.generate, "runs": o.runs,
        "identical_tokens": same, "speedup": spread(ratios), "tenths": tenths,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(required=True)
    one = modes.add_parser("replay")
    one.add_argument("model", type=Path, metavar="MODEL.gguf", help="whose tokens they are")
    one.add_argument("steps", type=Path, metavar="GIVEN_TOKENS.json")
    one.add_argument("tokens", type=Path, nargs="+", metavar="TOKENS.parquet")
    one.add_argument("--depth", type=int, default=512)
    one.add_argument("--plain-ms", type=float, help="a decoded token, where steps run ahead of the host")
    one.add_argument("--suffix-cache", type=Path, metavar="FOLDER", help="ArcticInference, too (suffix_cache.py)")
    one.set_defaults(work=replay)
    one = modes.add_parser("chances")
    one.add_argument("model", type=Path, metavar="MODEL.gguf", help="whose tokens they are")
    one.add_argument("tokens", type=Path, nargs="+", metavar="TOKENS.parquet")
    one.set_defaults(work=chances)
    for name, work in (("serve", serve), ("counted", counted_steps)):
        one = modes.add_parser(name)
        one.add_argument("model", type=Path, metavar="MODEL.gguf")
        one.add_argument("tokens", type=Path, metavar="TOKENS.parquet")
        one.add_argument("--device", default="cpu", choices=DEVICES)
        one.add_argument("--threads", type=int)
        one.add_argument("--prompts", type=int, default=40)
        one.add_argument("--prompt-tokens", type=int, default=700, help="at most")
        one.add_argument("--generate", type=int, default=160)
        one.add_argument("--runs", type=int, default=5)
        one.add_argument("--draft", default="auto", help="as of `spark serve`")
        one.set_defaults(work=work)
    for mode in modes.choices.values():
        json_option(mode)
    o = parser.parse_args()
    report = o.work(o)
    if o.json:
        write_json(o.json, report)


if __name__ == "__main__":
    main()
