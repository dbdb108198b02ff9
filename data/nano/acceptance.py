"""How far a drafter's guesses go: blocks drafted along replies of the target, in PyTorch and by the engine.

A reply is drafted as a server would that drafts always: a block behind its first token, then one behind each token that
was due after the accepted ones. So blocks stand more often where guessing is hard than a token of the text does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch
from drafter import Drafter
from model import Model
from streams import MARKUP_TOKENS
from target import all_replies, follow
from tokenizers import Tokenizer

Ids = npt.NDArray[np.int64]

ANCHORS = 256  # blocks that are guessed at once
KINDS = ("text", "quoted", "reasoning", "tool call", "source")
OPENING = {"<think>": "reasoning", "<tool_call>": "tool call"}
CLOSING = ("</think>", "</tool_call>")


@dataclass(frozen=True, slots=True)
class Case:
    """A reply of the target to a prompt, what kind of text each of its tokens is, and the blocks guessed in it.

    drafts [n - 1, b - 1]: the tokens guessed behind each of the reply's n tokens but the last.
    """

    prompt: Ids
    reply: Ids
    kinds: tuple[str, ...]
    drafts: Ids


def session_kinds(reply: Sequence[int], tokenizer: Tokenizer) -> tuple[str, ...]:
    """Which part of a turn each token belongs to; marks belong to the parts that they open or close."""
    markup = {tokenizer.token_to_id(mark): mark for mark in MARKUP_TOKENS}
    kind, fenced, kinds = "text", False, []
    for token in reply:
        mark = markup.get(token, "")
        kind = OPENING.get(mark, kind)
        if kind == "text" and "```" in (tokenizer.id_to_token(token) or ""):
            fenced = not fenced
        kinds.append("quoted" if kind == "text" and fenced else kind)
        if mark in CLOSING:
            kind = "text"
    return tuple(kinds)


@torch.no_grad()
def torch_drafts(target: Model, drafter: Drafter, prompt: Ids, reply: Ids) -> Ids:
    """The blocks guessed behind each of a reply's tokens but the last, [n - 1, b - 1]."""
    device = target.output.weight.device
    tokens = torch.from_numpy(np.concatenate([prompt, reply]).astype(np.int64)).to(device)[None]
    _, features = follow(target, tokens, drafter.s.captured)
    anchors = torch.arange(len(prompt), tokens.shape[1] - 1, device=device)[None]
    parts = [
        drafter(target, features, tokens, part, torch.float32)[0].argmax(-1).cpu() for part in anchors.split(ANCHORS, 1)
    ]
    return torch.cat(parts).numpy()


def cases(
    target: Model, drafter: Drafter, prompts: Sequence[Ids], n_tokens: int, stops: Sequence[int], batch: int,
    tokenizer: Tokenizer, kind: str | None, tell: Callable[[str], None],
) -> list[Case]:  # fmt: skip
    """Replies of the target to prompts and the blocks guessed in them.

    kind: of all of their tokens; None for an agent's turns, which have parts. tell: is told how far it is.
    """
    found = []
    written = all_replies(target, prompts, n_tokens, stops, batch, tell=tell)
    for i, said in sorted(written.items()):
        if len(said) < 2:
            continue
        tell(f"guessed in {len(found):,} of {len(written):,} replies")
        reply = np.array(said, np.int64)
        kinds = session_kinds(said, tokenizer) if kind is None else (kind,) * len(said)
        found.append(Case(prompts[i], reply, kinds, torch_drafts(target, drafter, prompts[i], reply)))
    return found


def walked(case: Case) -> Iterator[tuple[str, int, int]]:
    """Of each block of a reply: the kind of what comes next, how many tokens were offered, how many accepted."""
    at = 0
    while at < len(case.reply) - 1:
        due = case.reply[at + 1 : at + 1 + case.drafts.shape[1]]
        right = (case.drafts[at, : len(due)] == due).cumprod()
        accepted = int(right.sum())
        yield case.kinds[at + 1], len(due), accepted
        at += accepted + 1


def table(some: Sequence[Case]) -> dict[str, Any]:
    """By kind and for "all": blocks, tokens accepted of a block, and of each place how often it was due and right.

    A place is due where all before it were right and the reply was not over.
    """
    places = max((case.drafts.shape[1] for case in some), default=0)
    counts = {kind: np.zeros((2, places), np.int64) for kind in (*KINDS, "all")}
    blocks = dict.fromkeys(counts, 0)
    for case in some:
        for kind, offered, accepted in walked(case):
            for name in (kind, "all"):
                blocks[name] += 1
                counts[name][0, : min(accepted + 1, offered)] += 1
                counts[name][1, :accepted] += 1
    return {
        kind: {
            "blocks": blocks[kind],
            "accepted_per_block": float(right.sum() / blocks[kind]),
            "due": due.tolist(),
            "right": right.tolist(),
        }
        for kind, (due, right) in counts.items()
        if blocks[kind]
    }


def window_prompts(path: Path, most: int) -> list[Ids]:
    """Prompts in a token file (docs/formats.md): windows up to a run of generated tokens; `most` of them, spread."""
    rows = pq.read_table(path, columns=["tokens", "generated"])
    prompts = []
    for tokens, generated in zip(*(rows[name].to_pylist() for name in ("tokens", "generated")), strict=True):
        marks = np.array(generated, np.int8)
        starts = np.flatnonzero(np.diff(marks, prepend=0) == 1)
        prompts += [np.array(tokens[:start], np.int64) for start in starts if start]
    return prompts[:: -(-len(prompts) // most) or 1]


def engine_cases(model: Path, drafter: Path, prompts: Sequence[Ids], n_tokens: int, stops: Sequence[int]) -> list[Case]:
    """Replies and blocks by the engine on the CPU: its own likeliest tokens, and its drafter behind each of them."""
    from engine.drafting.drafter import open_drafter  # here: training takes none of it
    from engine.ground.config import EngineConfig
    from engine.ops import cpu
    from engine.running.drafts import lay_out
    from engine.running.loaded import load
    from engine.running.stepping import Span

    n_ctx = max(map(len, prompts)) + n_tokens + 64
    threads = torch.get_num_threads()
    loaded = load(EngineConfig(model=model, device="cpu", ctx_tokens=n_ctx, draft="off", threads=threads))
    try:
        forward = loaded.forward
        file = open_drafter(drafter, forward.config)
        forward.capture_features(file.config.captured)
        made = lay_out(file, forward, lambda limits: cpu.workspace(limits, threads))
        most = file.config.block_tokens - 1
        found = []
        for prompt in prompts:
            ring, sequence = made.ring(), loaded.kv.sequence()
            assert ring is not None
            reply: list[int] = []
            drafts: list[tuple[int, ...]] = []
            step = loaded.limits.max_tokens
            parts = [prompt[a : a + step] for a in range(0, len(prompt), step)]
            while parts:
                part, position = parts.pop(0).astype(np.int32), sequence.length
                want = () if parts else (len(part) - 1,)
                result = loaded.steps.run([Span(sequence, part, np.zeros(len(part), bool), want)])
                assert result.features is not None
                made.feed(ring, result.features[:, : len(part)], position)
                if want:
                    reply.append(int(result.logits[0].argmax()))
                    if reply[-1] not in stops and len(reply) < n_tokens:
                        drafts.append(made.draft(ring, reply[-1], most))
                        parts.append(np.array(reply[-1:]))
            made.give_back(ring)
            sequence.release()
            if drafts:
                found.append(Case(prompt, np.array(reply), ("text",) * len(reply), np.array(drafts)))
        made.close()
    finally:
        loaded.close()
    return found


def agreement(target: Model, drafter: Drafter, some: Sequence[Case]) -> dict[str, Any]:
    """The engine's blocks beside those that PyTorch guesses along the same replies."""
    ours = [Case(c.prompt, c.reply, c.kinds, torch_drafts(target, drafter, c.prompt, c.reply)) for c in some]
    equal = np.concatenate([(a.drafts == b.drafts).ravel() for a, b in zip(some, ours, strict=True)])
    return {
        "replies": len(some),
        "tokens": sum(len(c.reply) for c in some),
        "equal_guesses": float(equal.mean()),
        "engine": table(some)["all"],
        "torch": table(ours)["all"],
    }
