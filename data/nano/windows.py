"""What a drafter is trained on: windows of token streams, and the anchors in them, mostly in turns of the assistant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from streams import END, Tokens
from tokenizers import Tokenizer
from torch import Tensor

STOP = "<|im_end|>"
HEADER = "<|im_start|>assistant\n"
MIXTURE = {"turns": 0.6, "renamed": 0.2, "source": 0.1, "copying": 0.1}  # of rows


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the assistant in a stream: where its session begins, where it begins, and where its last token is."""

    session: int
    begin: int
    end: int


def turns_of(stream: Tokens, tokenizer: Tokenizer) -> list[Turn]:
    """The turns in a stream of sessions; one whose first words have grown together with its header is left out."""
    header = np.array(tokenizer.encode(HEADER).ids)
    found = np.ones(len(stream) - len(header), bool)
    for i, token in enumerate(header):
        found &= stream[i : len(found) + i] == token
    begins = np.flatnonzero(found) + len(header)
    ends = np.flatnonzero(stream == tokenizer.token_to_id(STOP))
    sessions = np.concatenate([[0], np.flatnonzero(stream == tokenizer.token_to_id(END)) + 1])
    return [
        Turn(int(sessions[np.searchsorted(sessions, b, "right") - 1]), int(b), int(ends[np.searchsorted(ends, b)]))
        for b in begins
    ]


def rewritten(
    stream: Tokens, turns: Sequence[Turn], replies: Mapping[int, Sequence[int]], stop: int
) -> tuple[Tokens, npt.NDArray[np.bool_]]:
    """The sessions with turns replaced by the model's replies to what came before, and which tokens are of turns."""
    pieces, marks, at = [], [], 0
    for i, turn in enumerate(turns):
        reply = np.array(replies[i], np.uint16) if i in replies else stream[turn.begin : turn.end]
        own = reply[:-1] if len(reply) and reply[-1] == stop else reply
        pieces += [stream[at : turn.begin], own]
        marks += [np.zeros(turn.begin - at, bool), np.ones(len(own), bool)]
        at = turn.end
    pieces.append(stream[at:])
    marks.append(np.zeros(len(stream) - at, bool))
    return np.concatenate(pieces), np.concatenate(marks)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of what a step trains on: windows of text, tokens of each, anchors in each."""

    rows: int
    window: int
    anchors: int


class Batches:
    """Random windows of token streams in the proportions of MIXTURE, and anchors in them, all on the device."""

    def __init__(
        self, streams: Mapping[str, Tokens], wanted: Mapping[str, npt.NDArray[np.bool_]], sizes: Sizes, block: int,
        device: torch.device, seed: int,
    ) -> None:  # fmt: skip
        used = {kind: streams[kind] for kind in MIXTURE if len(streams[kind]) > sizes.window}
        lengths = np.array([len(stream) for stream in used.values()])
        self.begin = np.concatenate([[0], lengths.cumsum()[:-1]])
        self.choices = lengths - sizes.window
        share = np.array([MIXTURE[kind] for kind in used])
        self.share = share / share.sum()
        marks = [wanted.get(kind, np.ones(len(stream), bool)) for kind, stream in used.items()]
        self.tokens = torch.from_numpy(np.concatenate(list(used.values())).astype(np.int32)).to(device)
        self.wanted = torch.from_numpy(np.concatenate(marks)).to(device)
        self.sizes, self.block, self.device = sizes, block, device
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator(device).manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Tokens int64 [rows, window] and ascending anchors int64 [rows, anchors]: of wanted places, then others."""
        kinds = self.rng.choice(len(self.share), self.sizes.rows, p=self.share)
        starts = self.begin[kinds] + self.rng.integers(0, self.choices[kinds])
        index = torch.from_numpy(starts[:, None] + np.arange(self.sizes.window)).to(self.device)
        score = torch.rand(index.shape, generator=self.generator, device=self.device) + self.wanted[index]
        score[:, 0] = score[:, 1 - self.block :] = -1  # nothing stands before, or too little behind
        return self.tokens[index].long(), score.topk(self.sizes.anchors).indices.sort(-1).values
