"""The tokenizer of a GGUF model: BPE, its special tokens, and text from tokens as they come.

Two kinds (`tokenizer.ggml.model`): `gpt2`, byte-level BPE of words, cut as `tokenizer.ggml.pre` names it; and `gemma4`,
BPE of characters in uncut text, where U+2581 stands for a space and bytes for characters without a token. So U+2581
itself comes back as a space, as in every implementation of it. See engine/text/pretokenizers.py.

Text never becomes a control token: `<|im_end|>` in a file that a model reads is encoded as the letters it is made
of. Only `encode(text, parse_special=True)`, meant for what a chat template wrote, knows control tokens.

Which tokens are what (`tokenizer.ggml.token_type`):
- control and unknown tokens (3, 2) and, whatever their type, BOS, EOS, EOT, EOM and tokens with a name known to end
  a turn or to mark speakers or tool calls: parsed only on request. Names of one letter are never parsed.
- user-defined tokens (4), such as `<think>` or runs of blanks: found in any text, as in the published tokenizers.
- unused tokens (5) and empty ones never come out of text and decode to nothing; byte tokens (6) decode to a byte.

BOS is added by no method but `encode(..., add_special=True)`, and then where `tokenizer.ggml.add_bos_token` says so;
where it says nothing, the pre-tokenizer's family decides (llama-bpe and tekken: yes). gemma4 has it always: early files
say no by mistake, and the model needs it. The same for EOS: never by default. A byte that the vocabulary has no token
for is dropped, as the `tokenizers` library does; in gemma4 a character becomes the unknown token then.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from gguf import TokenType
from tokenizers import decoders, models, processors

from engine.formats.gguf import GGUFFile, StringArray, open_model
from engine.ground.errors import ModelFormatError, RequestError, UnsupportedModelError
from engine.text.pretokenizers import GEMMA4, SPACE, PreTokenizer, pre_tokenizer
from engine.text.template import ChatTemplate

_PREFIX = "tokenizer.ggml."
_TOKENS, _TYPES, _MERGES = f"{_PREFIX}tokens", f"{_PREFIX}token_type", f"{_PREFIX}merges"

# Names of tokens that end a turn, in the vocabularies of published models; files often name only one of theirs.
_END_OF_TURN = frozenset((
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>",
    "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>",
    "<|END_OF_TURN_TOKEN|>", "<|return|>", "<|call|>", "</assistant>", "<turn|>", "<|tool_response>", "<eos>",
))  # fmt: skip
# Tokens that files call user-defined, although text could forge turns and tool calls with them: Laguna's speakers, and
# what Gemma 4's converters want shown to whoever reads replies.
_MARKS = frozenset((
    "<system>", "</system>", "<user>", "</user>", "<assistant>",
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<tool_response|>", '<|"|>',
))  # fmt: skip

# Where every rule of cutting text begins a word, whatever stands around: long text is cut there, for several cores.
_WORD_BEGINS = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
_NEAR_SUCH = re.compile(r"[A-Za-z] ")  # a token of this kind may reach beyond it
_PART_CHARS = 2048


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 stands for itself, the other bytes for U+0100 and following."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_letters()


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What the metadata say, checked: ids are in range, merges are made of tokens, no token is there twice."""

    pre: str  # `gemma4` where that is the model
    rule: PreTokenizer
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[tuple[str, str]]
    ids: Mapping[str, int | None]  # bos, eos, eot, eom
    unknown: int | None  # for characters that have neither a token nor bytes
    add_bos: bool
    add_eos: bool


class Detokenizer:
    """Text of a stream of tokens, in whole characters: what was pushed and flushed equals `decode` of all of it."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete; the beginning of a character waits for its other bytes."""
        return self._decoder.decode(self._tokenizer.decode_bytes(ids, skip_special=self._skip_special))

    def flush(self) -> str:
        """What is left: U+FFFD if the stream ended inside a character. The stream can begin anew after it."""
        return self._decoder.decode(b"", final=True)


class Tokenizer:
    """Encodes and decodes the text of one model; made by `load`.

    pre: the pre-tokenizer's name. bos_id, eos_id: None where the file names none. stop_ids: tokens that end a turn:
    EOS, EOT, EOM and those with a name that is known for it. special_ids: text -> id of control and user-defined
    tokens. hash: SHA-256, 64 hex digits, of everything that shapes encoding. template: the model's chat template, None
    if it has none.
    """

    def __init__(self, vocabulary: _Vocabulary, template: str | None, tool_template: str | None) -> None:
        rule = vocabulary.rule
        self.vocab_size, self.pre = len(vocabulary.tokens), vocabulary.pre
        self.bos_id, self.eos_id = vocabulary.ids["bos"], vocabulary.ids["eos"]
        self.add_bos, self.add_eos = vocabulary.add_bos, vocabulary.add_eos
        self.hash = _hash(vocabulary)
        self._tokens, self._types, self._plain = vocabulary.tokens, vocabulary.types, rule.words is None
        self._template_sources = (template, tool_template)

        control: dict[str, int] = {}
        user_defined: dict[str, int] = {}
        ordinary: dict[str, int] = {}  # what text can become: user-defined tokens among them
        marks = set(vocabulary.ids.values())
        for i, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            if not token or kind == TokenType.UNUSED:
                continue
            named = token in _END_OF_TURN or token in _MARKS or i in marks
            if len(token) > 1 and (named or kind in (TokenType.CONTROL, TokenType.UNKNOWN)):
                control[token] = i
            else:
                ordinary[token] = i
                if kind == TokenType.USER_DEFINED:
                    user_defined[token] = i
        self._control = control
        self.special_ids: Mapping[str, int] = control | user_defined
        ends = {control[name] for name in _END_OF_TURN if name in control}
        if {"<|return|>", "<|call|>", "<|end|>"} <= control.keys():
            ends.remove(control["<|end|>"])  # here it ends a message, of which a turn has several
        self.stop_ids = frozenset(ends | {i for key, i in vocabulary.ids.items() if i is not None and key != "bos"})

        # Without the merges that touch a control or unused token: no text may grow into one.
        merges = [
            (left, right)
            for left, right in vocabulary.merges
            if left in ordinary and right in ordinary and left + right in ordinary
        ]
        if rule.words is None:
            unknown = {self._tokens[i]: i for i in (vocabulary.unknown,) if i is not None}
            vocab, name = ordinary | unknown, next(iter(unknown), None)
            bpe = models.BPE(vocab=vocab, merges=merges, unk_token=name, fuse_unk=True, byte_fallback=True)
            decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
        else:
            bpe = models.BPE(vocab=ordinary, merges=merges, ignore_merges=rule.ignore_merges)
            decoder = decoders.ByteLevel()  # type: ignore[assignment]
        self._bpe = tokenizers.Tokenizer(bpe)
        self._bpe.normalizer, self._bpe.pre_tokenizer, self._bpe.decoder = rule.normalizer(), rule.words, decoder
        self._bpe.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in user_defined])
        # A token that is found in any text, before words are, must not be cut.
        self._is_cut = rule.words is not None and not any(map(_NEAR_SUCH.search, user_defined))
        self._bytes: list[bytes | None] = [None] * self.vocab_size

    def encode(self, text: str, *, parse_special: bool = False, add_special: bool = False) -> list[int]:
        """The tokens of `text`.

        parse_special: names of control tokens in the text become these tokens. add_special: BOS before and EOS
        after it, if the model wants them. Lone surrogates are encoded as U+FFFD.
        """
        pieces: list[int | str] = self.split_special(text) if parse_special else [text]
        ids = self.encode_pieces(pieces)
        if add_special and self.add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def split_special(self, text: str) -> list[int | str]:
        """Cut text at control and user-defined tokens: their ids, and the text between them; the longest name wins."""
        if self._special_names is None:
            return [text]
        parts = self._special_names.split(text)  # text and names in turn
        return [self.special_ids[part] if i % 2 else part for i, part in enumerate(parts) if part]

    def encode_pieces(self, pieces: Iterable[int | str]) -> list[int]:
        """The tokens of text pieces, each encoded by itself and as plain text, with ids between them."""
        pieces = list(pieces)
        texts = [_without_surrogates(piece) for piece in pieces if isinstance(piece, str)]
        parts = [self._parts(text) for text in texts]
        found = iter(self._bpe.encode_batch_fast([*itertools.chain(*parts)], add_special_tokens=False) if texts else [])
        encoded = iter(parts)
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, str):
                for encoding in itertools.islice(found, len(next(encoded))):
                    ids += encoding.ids
            else:
                ids.append(piece)
        return ids

    def _parts(self, text: str) -> list[str]:
        """Text in parts that have, one after the other, the tokens of all of it."""
        parts, begin = [], 0
        while self._is_cut and len(text) - begin >= 2 * _PART_CHARS:
            found = _WORD_BEGINS.search(text, begin + _PART_CHARS)
            if found is None:
                break
            parts.append(text[begin : found.start()])
            begin = found.start()
        return [*parts, text[begin:]]

    def is_control(self, name: str) -> bool:
        """Whether `name`, of `special_ids`, is that of a control token."""
        return name in self._control

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of tokens; U+FFFD for bytes that are not UTF-8. skip_special: without control tokens.

        Raises RequestError for an id outside the vocabulary.
        """
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = False) -> bytes:
        """The bytes of tokens, which need not be whole characters; otherwise as `decode`."""
        return b"".join(map(self._text_bytes if skip_special else self._token_bytes, ids))

    def stream(self, *, skip_special: bool = False) -> Detokenizer:
        """A decoder of tokens as they are generated."""
        return Detokenizer(self, skip_special)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The model's chat template; ModelFormatError if it is not a template."""
        source, tool_source = self._template_sources
        bos, eos = ("" if i is None else self._tokens[i] for i in (self.bos_id, self.eos_id))
        return None if source is None else ChatTemplate(source, bos, eos, tool_source)

    def to_json(self) -> str:
        """The tokenizer in the format of the `tokenizers` library (`tokenizer.json`), control tokens included.

        That library finds control tokens in any text unless told otherwise.
        """
        spec = json.loads(self._bpe.to_str())
        spec["model"]["vocab"] |= self._control
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        spec["added_tokens"] = [
            {"id": i, "content": text, **plain, "special": text in self._control}
            for text, i in sorted(self.special_ids.items(), key=lambda item: item[1])
        ]
        whole = tokenizers.Tokenizer.from_str(json.dumps(spec))
        before = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        after = [self.eos_id] if self.add_eos and self.eos_id is not None else []
        if before or after:
            names = {self._tokens[i]: i for i in before + after}
            single = [self._tokens[i] for i in before] + ["$A"] + [self._tokens[i] for i in after]
            whole.post_processor = processors.TemplateProcessing(
                single=single, pair=[*single, "$B:1"], special_tokens=list(names.items())
            )
        return whole.to_str()

    @cached_property
    def _special_names(self) -> re.Pattern[str] | None:
        names = sorted(self.special_ids, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def _text_bytes(self, i: int) -> bytes:
        raw = self._token_bytes(i)
        return b"" if self._tokens[i] in self._control else raw

    def _token_bytes(self, i: int) -> bytes:
        if not 0 <= i < self.vocab_size:
            raise RequestError(f"token {i} is outside the vocabulary of {self.vocab_size} tokens")
        raw = self._bytes[i]
        if raw is None:
            token, kind = self._tokens[i], self._types[i]
            if kind == TokenType.UNUSED:
                raw = b""
            elif kind == TokenType.BYTE:
                raw = bytes([int(token[3:5], 16)])
            elif self._plain and token not in self.special_ids:
                raw = token.replace(SPACE, " ").encode()
            elif token in self.special_ids or not _BYTE_OF.keys() >= set(token):
                raw = token.encode()
            else:
                raw = bytes(map(_BYTE_OF.__getitem__, token))
            self._bytes[i] = raw
        return raw


def load(model: str | Path | GGUFFile) -> Tokenizer:
    """The tokenizer of a GGUF model, given open or by its path.

    Raises UnsupportedModelError for a kind of tokenizer or a pre-tokenizer that is not implemented, and
    ModelFormatError, which names the key, for metadata that are missing, malformed or contradict each other.
    """
    if isinstance(model, GGUFFile):
        return _from_metadata(model)
    with open_model(model) as file:
        return _from_metadata(file)


def _from_metadata(file: GGUFFile) -> Tokenizer:
    kind = file.value(f"{_PREFIX}model", str)
    if kind not in ("gpt2", "gemma4"):
        raise UnsupportedModelError(
            f"{file.paths[0]}: {_PREFIX}model is {kind!r:.60}, which is not implemented",
            hint="byte-level BPE ('gpt2') and 'gemma4' are; SentencePiece models ('llama') are not yet supported",
        )
    pre = "gemma4" if kind == "gemma4" else file.value(f"{_PREFIX}pre", str, None)
    rule = GEMMA4 if kind == "gemma4" else pre_tokenizer(pre)
    assert pre is not None
    tokens = list(file.value(_TOKENS, StringArray))
    ids = {name: _token_id(file, f"{_PREFIX}{name}_token_id", len(tokens)) for name in ("bos", "eos", "eot", "eom")}
    index = {token: i for i, token in enumerate(tokens) if token}
    if len(index) + tokens.count("") != len(tokens):
        twice = next(i for i, token in enumerate(tokens) if token and index[token] != i)
        raise _malformed(file, _TOKENS, f"{tokens[twice]!r} is there twice: {twice} and {index[tokens[twice]]}")
    add_bos = file.value(f"{_PREFIX}add_bos_token", bool, rule.add_bos)
    vocabulary = _Vocabulary(
        pre=pre,
        rule=rule,
        tokens=tokens,
        types=_types(file, tokens),
        merges=_merges(file, index),
        ids=ids,
        unknown=_token_id(file, f"{_PREFIX}unknown_token_id", len(tokens)) if kind == "gemma4" else None,
        add_bos=add_bos or kind == "gemma4",
        add_eos=file.value(f"{_PREFIX}add_eos_token", bool, False),
    )
    template = file.value("tokenizer.chat_template", str, None)
    tool_template = file.value("tokenizer.chat_template.tool_use", str, None)
    return Tokenizer(vocabulary, template, tool_template)


def _types(file: GGUFFile, tokens: Sequence[str]) -> list[int]:
    types = file.value(_TYPES, np.ndarray)
    if types.dtype.kind not in "iu":
        raise _malformed(file, _TYPES, f"an array of {types.dtype}, expected integers")
    if len(types) != len(tokens):
        raise _malformed(file, _TYPES, f"{len(types)} types for the {len(tokens)} tokens of {_TOKENS}")
    unknown = np.flatnonzero((types < min(TokenType)) | (types > max(TokenType)))
    if len(unknown):
        i = int(unknown[0])
        raise _malformed(file, _TYPES, f"token {i} has type {types[i]}, expected 1 to {max(TokenType):d}")
    for i in np.flatnonzero(types == TokenType.BYTE).tolist():
        if not re.fullmatch("<0x[0-9A-Fa-f]{2}>", tokens[i]):
            raise _malformed(file, _TOKENS, f"byte token {i} is {tokens[i]!r}, expected '<0x00>' to '<0xFF>'")
    kinds: list[int] = types.tolist()
    return kinds


def _merges(file: GGUFFile, index: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for i, merge in enumerate(file.value(_MERGES, StringArray)):
        left, _, right = merge.partition(" ")
        if left not in index or right not in index or left + right not in index:
            raise _malformed(file, _MERGES, f"merge {i}, {merge!r}, is not two tokens that make up a third")
        merges.append((left, right))
    return merges


def _token_id(file: GGUFFile, key: str, n_tokens: int) -> int | None:
    found = file.value(key, int, None)
    if found is not None and not 0 <= found < n_tokens:
        raise _malformed(file, key, f"{found}, outside the vocabulary of {n_tokens} tokens")
    return found


def _malformed(file: GGUFFile, key: str, found: str) -> ModelFormatError:
    return ModelFormatError(f"{file.paths[0]}: key {key!r}: {found}", hint="convert the model again")


def _hash(vocabulary: _Vocabulary) -> str:
    flags = (vocabulary.pre, vocabulary.ids, vocabulary.add_bos, vocabulary.add_eos, len(vocabulary.merges))
    digest = hashlib.sha256(b"spark tokenizer 1\n")
    unknown = [] if vocabulary.unknown is None else [vocabulary.unknown]
    digest.update(json.dumps([flags, vocabulary.tokens, *unknown]).encode())
    digest.update(bytes(vocabulary.types))
    digest.update("\n".join(map(" ".join, vocabulary.merges)).encode())
    return digest.hexdigest()


def _without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
