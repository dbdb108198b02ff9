"""From modules to token streams: the tokenizer and the five kinds of training text, each one long array of tokens."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
from copying import copying_tasks
from corpus import Module, is_held_out, module_paths, parse_module, read_module, read_pages, rename
from dialogues import dialogues
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.text.pretokenizers import pre_tokenizer
from engine.text.template import ChatTemplate

Tokens = npt.NDArray[np.uint16]

PRE = "qwen2"  # how text is cut into words, by the name that GGUF files have for it
END = "<|endoftext|>"  # ends a document
CONTROL_TOKENS = (END, "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
SHARES = 16
MIXTURE = {"source": 0.25, "renamed": 0.22, "pages": 0.03, "dialogues": 0.30, "copying": 0.20}  # by tokens


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much text to make: modules read (None: all), dialogues, copying tasks, renamed copies of each module."""

    modules: int | None
    dialogues: int
    copying: int
    renamed: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Texts:
    """Documents by kind; `held_out` has the kinds "source" and "dialogues", about other modules."""

    train: Mapping[str, Sequence[str]]
    held_out: Mapping[str, Sequence[str]]
    modules: int
    held_out_paths: tuple[str, ...]
    sha256: str  # of all paths and sources, training and held out


def make_texts(library: Path, template: str, amounts: Amounts, seed: int) -> Texts:
    """Read the library and make every kind of text from it, on all cores; deterministic by seed.

    The modules are dealt into SHARES hands, and a dialogue or task draws on the modules of one hand.
    """
    paths = module_paths(library)[: amounts.modules]
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:  # before anything starts threads
        modules = [m for m in pool.map(partial(read_module, library), paths, chunksize=16) if m is not None]
        train = [m for m in modules if not is_held_out(m.path)]
        held_out = [m for m in modules if is_held_out(m.path)]
        hands = [train[i::SHARES] for i in range(SHARES)]
        names = sorted(frozenset().union(*(m.names for m in train)))
        parts = [pool.submit(_derived, hand, names, template, amounts, f"{seed}:{i}") for i, hand in enumerate(hands)]
        derived = [part.result() for part in parts]
    made = {kind: [text for part in derived for text in part[kind]] for kind in derived[0]}
    made["source"] = [m.text for m in train]
    made["pages"] = [p.text for p in read_pages(library, train) if not is_held_out(p.path)]
    shuffled = {kind: random.Random(f"{seed}:{kind}").sample(texts, len(texts)) for kind, texts in made.items()}
    chat = _chat_template(template)
    unseen = dialogues(held_out, chat, max(40, amounts.dialogues // 100), f"{seed}:held-out")
    kept = {"source": [m.text for m in held_out], "dialogues": unseen}
    digest = hashlib.sha256()
    for m in sorted(modules, key=lambda m: m.path):
        digest.update(f"{m.path}\0{m.text}\0".encode())
    return Texts(shuffled, kept, len(train), tuple(sorted(m.path for m in held_out)), digest.hexdigest())


def _derived(
    modules: Sequence[Module], names: Sequence[str], template: str, amounts: Amounts, seed: str
) -> dict[str, list[str]]:
    """Texts made from one hand of modules; half of what is asked and copied is renamed, so that it cannot be known."""
    copies = [rename(m, names, random.Random(f"{seed}:{i}")) for i in range(amounts.renamed) for m in modules]
    fresh = [parse_module(m.path, text) for m, text in zip(modules, copies, strict=False)]
    subjects = [*modules, *(m for m in fresh if m is not None)]
    return {
        "renamed": copies,
        "dialogues": dialogues(subjects, _chat_template(template), amounts.dialogues // SHARES, seed),
        "copying": copying_tasks(subjects, amounts.copying // SHARES, seed),
    }


def _chat_template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos=END, eos="<|im_end|>")


def train_tokenizer(texts: Texts, vocabulary: int) -> Tokenizer:
    """Byte-level BPE on the sources, pages and a tenth of the dialogues; special tokens take the last ids."""
    tokenizer = Tokenizer(models.BPE())
    rule = pre_tokenizer(PRE)
    tokenizer.normalizer = rule.normalizer()
    tokenizer.pre_tokenizer = rule.words
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(CONTROL_TOKENS) - len(MARKUP_TOKENS),
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    talk = texts.train["dialogues"]
    tokenizer.train_from_iterator([*texts.train["source"], *texts.train["pages"], *talk[: len(talk) // 10]], trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP_TOKENS])
    return tokenizer


def merges_of(tokenizer: Tokenizer) -> list[str]:
    """The merge rules in order, each "left right", as GGUF files list them."""
    rules = json.loads(tokenizer.to_str())["model"]["merges"]
    return [rule if isinstance(rule, str) else " ".join(rule) for rule in rules]


def encode(tokenizer: Tokenizer, texts: Sequence[str], batch: int = 256) -> Tokens:
    """All documents as one stream, each followed by the end token."""
    end = tokenizer.token_to_id(END)

    def pieces() -> Iterator[Tokens]:
        for start in range(0, len(texts), batch):
            for encoding in tokenizer.encode_batch_fast(list(texts[start : start + batch])):
                yield np.array([*encoding.ids, end], np.uint16)

    return np.concatenate(list(pieces()))
