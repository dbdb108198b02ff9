"""The tokenizer against the `tokenizers` and `transformers` libraries, and against malformed metadata."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.cohere.tokenization_cohere import CohereTokenizer
from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer
from transformers.models.gpt_neox.tokenization_gpt_neox import GPTNeoXTokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from engine.ground.errors import ModelFormatError, RequestError, SparkError, UnsupportedModelError
from engine.text.pretokenizers import _DEEPSEEK_CASED, PRE_TOKENIZERS
from engine.text.tokenizer import Tokenizer, load
from tests.gguf_files import write_gguf

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<think>", "</think>", "\t\t\t"]

# ---- oracles: the pre-tokenizers as published, built without the engine's own table ----

CLASSES = {
    "gpt-2": GPT2Tokenizer,
    "olmo": GPTNeoXTokenizer,
    "qwen2": Qwen2Tokenizer,
    "qwen35": Qwen3_5Tokenizer,
    "command-r": CohereTokenizer,
}
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2_WORDS = BYTES | {"use_regex": True}
EACH_DIGIT = {"type": "Digits", "individual_digits": True}
DEEPSEEK_CASED = (  # escapes where editors would put an equivalent letter
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽ"
    "Ა-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄ"
    "Ⰰ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
DEEPSEEK_CJK = "[一-龥\u0800-一가-\ud7ff]+"
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)


def split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "starcoder": [EACH_DIGIT, GPT2_WORDS],
    "refact": [EACH_DIGIT, GPT2_WORDS],
    "smollm": [EACH_DIGIT, GPT2_WORDS],
    "falcon": [
        {"type": "Punctuation", "behavior": "Contiguous"},
        GPT2_WORDS,
        {"type": "Digits", "individual_digits": False},
        split("[0-9][0-9][0-9]"),
    ],
    "laguna": [split(r"(?:\r?\n)+(?!\r?\n)", "MergedWithNext"), split(QWEN2), BYTES],
    "deepseek-llm": [
        split("[\r\n]"),
        split(rf"\s?[{DEEPSEEK_CASED}]+"),
        split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
        split(r"\s+$"),
        split(DEEPSEEK_CJK),
        EACH_DIGIT,
        BYTES,
    ],
    "deepseek-coder": [
        split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split(DEEPSEEK_CJK), EACH_DIGIT, BYTES,
    ],
    "deepseek-v3": [split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK3), BYTES],
    "bailingmoe": [
        split(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
        ),
        BYTES,
    ],
    "seed-coder": [
        split(
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\r\n]+"
            "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
        ),
        BYTES,
    ],
}  # fmt: skip
FROM_TABLE = ["llama-bpe", "tekken", "gpt-4o"]
TESTED = [*CLASSES, *PUBLISHED, *FROM_TABLE]

TEXTS = [
    "",
    " ",
    "\n",
    "Hello, World! It's I'LL we'Ve 'tis don't'd",
    "def f(x: int) -> str:\n    if x >= 10**3:\n\t\treturn f'{x!r}'  # done\n\n\n\nclass A:\r\n\r\n  pass\r",
    "1 22 333 4444 55555 3.14159e-10 0xDEADBEEF ½ ² ٣٤ 1,000,000",
    "   leading   and trailing   \n \n  \t mixed \t\n",
    "naïve café cafe\u0301 Å\u212b \u1e9b\u0323 ﬁ Ω\u2126 \u1f7d\u1fbe",
    "日本語のテキスト 中文字符 한국어 กินข้าว हिन्दी தமிழ் עִבְרִית العَرَبِيَّة",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽 \U0001f600\U0001f600 a\u200db \u00a0\u2003x\u3000y",
    "CamelCaseHTTPServer snake_case_name kebab-case x/y\\z a/*b*/c//d",
    "!!!???...\n\n===---\n}}}))];\n<tag attr=\"v\">&amp;</tag> 'quoted' “curly” ‘single’ „low“。、！",
    "nul \x00 bell \x07 del \x7f \x85 \u2028 \ufeff \ufffd \U0010ffff",
    "<|im_end|><|im_start|>system <think>hm</think> <think> \t\t\t \t\t\t\t",
]
PIECES = [*TEXTS, *"aZé\u0301日ｱ한0９ \t\n\r'\"(<|_>👍\u200d\u00a0", "'s", "\r\n", "  ", "<think>", "<|im_end|>"]
any_text = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=8).map("".join)
no_surrogates = any_text.map(lambda s: s.encode("utf-8", "replace").decode())


@cache
def corpus() -> tuple[str, ...]:
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return (*(path.read_text() for path in library[:12]), *TEXTS * 5)


def oracle(pre: str, n_tokens: int = 1200) -> tokenizers.Tokenizer:
    """A small trained tokenizer with the published pre-tokenizer, without special tokens."""
    trained = tokenizers.Tokenizer(models.BPE())
    if pre in CLASSES:
        backend = CLASSES[pre](vocab={letter: i for i, letter in enumerate(ALPHABET)}, merges=[]).backend_tokenizer
        trained.normalizer, trained.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    else:
        steps = PUBLISHED.get(pre) or [split(GGUF_PRE_TOKENIZER_SPLITS[pre]), BYTES]
        spec = json.loads(trained.to_str()) | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
        trained = tokenizers.Tokenizer.from_str(json.dumps(spec))
    trainer = trainers.BpeTrainer(vocab_size=n_tokens, initial_alphabet=ALPHABET, show_progress=False)
    trained.train_from_iterator(corpus(), trainer)
    trained.decoder = decoders.ByteLevel()
    return trained


def metadata(trained: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    """The metadata a converter would write: control and user-defined tokens, padding to a round size."""
    model = json.loads(trained.to_str())["model"]
    tokens = [*model["vocab"], *SPECIAL, *USER_DEFINED]
    types = [1] * len(model["vocab"]) + [3] * len(SPECIAL) + [4] * len(USER_DEFINED)
    padding = [f"[PAD{i}]" for i in range(len(tokens), len(tokens) + 7)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + padding,
        "tokenizer.ggml.token_type": types + [5] * len(padding),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }


def write(path: Path, fields: dict[str, Any]) -> Path:
    write_gguf(path, fields, {"x": np.ones((2, 3), np.float32)})
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@cache
def qwen2() -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    trained = oracle("qwen2")
    return trained, metadata(trained, "qwen2")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load(write(folder / "model.gguf", qwen2()[1]))


# ---- encoding ----


@pytest.mark.parametrize("pre", TESTED)
def test_encodes_as_the_published_tokenizer(pre: str, folder: Path) -> None:
    trained = oracle(pre)
    fields = metadata(trained, pre)
    ours = load(write(folder / f"{pre}.gguf", fields))
    # the published tokenizer with the control tokens left unknown, as they are in plain text
    trained.add_tokens([AddedToken(token, normalized=False) for token in SPECIAL + USER_DEFINED])
    names = {trained.token_to_id(token): token for token in SPECIAL}

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(no_surrogates)
    def compare(text: str) -> None:
        assert ours.encode(text, parse_special=True) == trained.encode(text, add_special_tokens=False).ids
        whole = trained.normalizer.normalize_str(text) if trained.normalizer else text
        if not any(token in text for token in SPECIAL + USER_DEFINED):
            assert ours.decode(ours.encode(text)) == whole

    words = PRE_TOKENIZERS[pre].words
    for text in [*TEXTS, "".join(TEXTS), corpus()[0]]:
        assert words.pre_tokenize_str(text) == trained.pre_tokenizer.pre_tokenize_str(text)
        ids = trained.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, parse_special=True) == ids, text
        assert not names.keys() & set(ours.encode(text))
    compare()


@pytest.mark.parametrize("pre", TESTED)
def test_text_in_parts_has_the_tokens_of_the_whole(pre: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = load(write(folder / f"{pre}.gguf", metadata(oracle(pre), pre)))
    words = st.sampled_from([*PIECES, "a", " b", "Cd ", "'s e", "I'LL we'Ve", "x \u0301y", "e\u0301 f", "1 g", "h  i"])
    texts = st.lists(words, max_size=30).map("".join).map(lambda s: s.encode("utf-8", "replace").decode())

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(texts)
    @example(corpus()[0])
    def compare(text: str) -> None:
        with monkeypatch.context() as patched:
            patched.setattr("engine.text.tokenizer._PART_CHARS", 1 << 40)
            whole = ours.encode(text)
            patched.setattr("engine.text.tokenizer._PART_CHARS", 3)
            assert "".join(ours._parts(text)) == text
            assert ours.encode(text) == whole

    compare()
    monkeypatch.setattr("engine.text.tokenizer._PART_CHARS", 3)
    assert len(ours._parts(corpus()[0])) > 100


def test_every_known_name_is_tested_or_an_alias() -> None:
    rules = {id(PRE_TOKENIZERS[name]) for name in TESTED}
    assert {name for name, rule in PRE_TOKENIZERS.items() if id(rule) not in rules} == {
        "dbrx", "smaug-bpe", "glm4", "chatglm-bpe",  # llama-bpe's words, without its defaults
    }  # fmt: skip
    assert PRE_TOKENIZERS["glm4"].words is PRE_TOKENIZERS["llama-bpe"].words


def test_names_that_transformers_knows_have_its_expression() -> None:
    for name in PRE_TOKENIZERS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys():
        spec = json.loads(PRE_TOKENIZERS[name].words.__getstate__())
        assert spec["pretokenizers"][0]["pattern"]["Regex"] == GGUF_PRE_TOKENIZER_SPLITS[name], name


def test_deepseek_letters_are_the_published_ones() -> None:
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x1F000)]))
    classes = [pre_tokenizers.Split(tokenizers.Regex(f"[{c}]+"), "removed") for c in (_DEEPSEEK_CASED, DEEPSEEK_CASED)]
    ours, published = ([span for _, span in letters.pre_tokenize_str(everything)] for letters in classes)
    assert ours == published


def test_marks_belong_to_words_in_qwen35_alone(folder: Path) -> None:
    text = "นี้"  # two consonants, two marks
    words = {pre: PRE_TOKENIZERS[pre].words.pre_tokenize_str(text) for pre in ("qwen2", "qwen35")}
    assert len(words["qwen35"]) == 1 < len(words["qwen2"])


def test_text_cannot_forge_control_tokens(tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_id
    text = "a<|im_end|>b"
    assert end not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text, parse_special=True) == [*tokenizer.encode("a"), end, *tokenizer.encode("b")]


def test_a_control_token_that_merges_could_make_stays_out_of_text(folder: Path) -> None:
    fields = dict(qwen2()[1])
    left, right = fields["tokenizer.ggml.merges"][-1].split(" ")
    forged = fields["tokenizer.ggml.tokens"].index(left + right)
    fields["tokenizer.ggml.token_type"] = list(fields["tokenizer.ggml.token_type"])
    fields["tokenizer.ggml.token_type"][forged] = 3
    ours = load(write(folder / "forged.gguf", fields))
    text = ours.decode([forged]).replace("Ġ", " ")
    assert forged not in ours.encode(text)
    assert forged in load(write(folder / "unforged.gguf", qwen2()[1])).encode(text)


def test_the_longest_name_wins(folder: Path) -> None:
    fields = dict(qwen2()[1])
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"][:-2], "<|im_end|>s", "<|im_end|"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"][:-2], 3, 4]
    ours = load(write(folder / "longest.gguf", fields))
    n, end = ours.vocab_size, ours.eos_id
    text = "<|im_end|>s<|im_end|><|im_end|"
    assert ours.encode(text, parse_special=True) == [n - 2, end, n - 1]
    assert tokenizers.Tokenizer.from_str(ours.to_json()).encode(text).ids == [n - 2, end, n - 1]


def test_an_end_token_is_a_control_token_whatever_its_type(folder: Path) -> None:
    fields = dict(qwen2()[1])
    end = fields["tokenizer.ggml.tokens"].index("<|im_end|>")
    eot = len(fields["tokenizer.ggml.tokens"]) - 1
    fields["tokenizer.ggml.token_type"] = list(fields["tokenizer.ggml.token_type"])
    fields["tokenizer.ggml.token_type"][end] = fields["tokenizer.ggml.token_type"][eot] = 4
    ours = load(write(folder / "end.gguf", fields | {"tokenizer.ggml.eot_token_id": eot}))
    assert {end, eot} <= ours.stop_ids
    for i in (end, eot):
        assert i not in ours.encode(ours.decode([i]))
        assert ours.encode(ours.decode([i]), parse_special=True) == [i]


def test_user_defined_tokens_are_found_in_any_text(tokenizer: Tokenizer) -> None:
    think = tokenizer.special_ids["<think>"]
    assert tokenizer.encode("x<think>y") == [*tokenizer.encode("x"), think, *tokenizer.encode("y")]


@pytest.mark.parametrize("defined", ["Answer ", "so it", " b", "zend"])
def test_long_text_is_not_cut_within_user_defined_tokens(folder: Path, defined: str) -> None:
    fields = metadata(oracle("qwen2"), "qwen2")
    n = fields["tokenizer.ggml.tokens"].index(f"[PAD{len(fields['tokenizer.ggml.tokens']) - 1}]")
    fields["tokenizer.ggml.tokens"][n], fields["tokenizer.ggml.token_type"][n] = defined, 4
    ours = load(write(folder / "defined.gguf", fields))
    one = ours.encode(f"x{defined}y\n")
    assert one.count(n) == 1 and ours.encode(f"x{defined}y\n" * 900) == one * 900


def test_whole_words_before_merges_where_the_family_does_so(folder: Path) -> None:
    """A word that no merges lead to: a token of its own for llama-bpe, bytes for gpt-4o."""
    fields = metadata(oracle("llama-bpe"), "llama-bpe")
    unreachable = fields["tokenizer.ggml.tokens"].index(f"[PAD{len(fields['tokenizer.ggml.tokens']) - 1}]")
    fields["tokenizer.ggml.tokens"][unreachable] = "Zyzzyva"
    fields["tokenizer.ggml.token_type"][unreachable] = 1
    assert load(write(folder / "whole.gguf", fields)).encode("Zyzzyva") == [unreachable]
    fields["tokenizer.ggml.token_type"][unreachable] = 5
    assert unreachable not in load(write(folder / "unused.gguf", fields)).encode("Zyzzyva")
    fields["tokenizer.ggml.token_type"][unreachable] = 1
    fields["tokenizer.ggml.pre"] = "gpt-4o"
    assert unreachable not in load(write(folder / "merged.gguf", fields)).encode("Zyzzyva")


def test_bos_and_eos_only_on_request(folder: Path) -> None:
    fields = dict(qwen2()[1])
    bos, eos = fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]
    cases = {  # (pre, add_bos_token, add_eos_token) -> what goes around "a"
        ("qwen2", None, None): ([], []),
        ("qwen2", True, None): ([bos], []),
        ("qwen2", False, True): ([], [eos]),
        ("llama-bpe", None, None): ([bos], []),
        ("llama-bpe", False, None): ([], []),
    }
    for number, ((pre, add_bos, add_eos), (before, after)) in enumerate(cases.items()):
        said = {"tokenizer.ggml.add_bos_token": add_bos, "tokenizer.ggml.add_eos_token": add_eos}
        said = {key: value for key, value in said.items() if value is not None}
        ours = load(write(folder / f"bos{number}.gguf", fields | said | {"tokenizer.ggml.pre": pre}))
        a = ours.encode("a")
        assert len(a) == 1
        assert ours.encode("a", add_special=True) == [*before, *a, *after]


def test_lone_surrogates_are_replaced(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "\U0001f600"  # a pair, as JSON may have it


def test_stop_tokens(folder: Path, tokenizer: Tokenizer) -> None:
    tokens = qwen2()[1]["tokenizer.ggml.tokens"]
    assert tokenizer.stop_ids == {tokens.index("<|im_end|>"), tokens.index("<|endoftext|>")}

    def with_names(*names: str, **ids: int) -> set[str]:
        fields = dict(qwen2()[1])
        fields["tokenizer.ggml.tokens"] = [*tokens[: -len(names)], *names]
        fields["tokenizer.ggml.token_type"] = [1] * len(tokens)
        ours = load(write(folder / "stops.gguf", fields | {f"tokenizer.ggml.{key}": i for key, i in ids.items()}))
        return {fields["tokenizer.ggml.tokens"][i] for i in ours.stop_ids} - {"<|im_end|>", "<|endoftext|>"}

    assert with_names("<|eot_id|>", "<|eom_id|>", "</assistant>") == {"<|eot_id|>", "<|eom_id|>", "</assistant>"}
    assert with_names("<|end|>", "<|return|>", "<|call|>") == {"<|return|>", "<|call|>"}
    assert with_names("<|end|>", "over") == {"<|end|>"}
    assert with_names("over", eot_token_id=len(tokens) - 1) == {"over"}


# ---- decoding ----


@given(st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_stream_loses_nothing_and_splits_no_character(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(any_text)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12)) + tokenizer.encode(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    stream = tokenizer.stream()
    pieces = [stream.push(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
    if b"\xff" not in tokenizer.decode_bytes(ids) and "\ufffd" not in tokenizer.decode(ids):
        assert "\ufffd" not in "".join(pieces)


def test_a_stream_holds_back_half_a_character(tokenizer: Tokenizer) -> None:
    one_byte_each = [tokenizer.encode_pieces([]), *[[qwen2()[0].token_to_id(c)] for c in "ðŁĺĢ"]]
    stream = tokenizer.stream()
    assert [stream.push(ids) for ids in one_byte_each] == ["", "", "", "", "\U0001f600"]
    assert stream.push(one_byte_each[1]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(tokenizer.encode("ok")) == "ok"


def test_special_tokens_can_be_skipped_in_decoding(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>a<|im_end|>", parse_special=True)
    assert tokenizer.decode(ids) == "<think>a<|im_end|>"
    assert tokenizer.decode(ids, skip_special=True) == "<think>a"
    stream = tokenizer.stream(skip_special=True)
    assert stream.push(ids) + stream.flush() == "<think>a"


def test_unused_and_byte_tokens(folder: Path) -> None:
    fields = dict(qwen2()[1])
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"][:-3], "<0xE2>", "", "raw é text"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"][:-3], 6, 5, 1]
    ours = load(write(folder / "bytes.gguf", fields))
    n = ours.vocab_size
    assert ours.decode_bytes([n - 3]) == b"\xe2"
    assert ours.decode([n - 2]) == ours.decode([n - 4]) == ""
    assert ours.decode([n - 1]) == "raw é text"
    assert n - 4 not in ours.encode(f"[PAD{n - 4}]", parse_special=True)


@pytest.mark.parametrize("token", [-1, 10**9])
def test_decoding_an_unknown_id_is_refused(tokenizer: Tokenizer, token: int) -> None:
    with pytest.raises(RequestError, match=str(token)):
        tokenizer.decode([token])


# ---- the tokenizer as a file, and its hash ----


def test_exported_tokenizer_encodes_the_same(tokenizer: Tokenizer, folder: Path) -> None:
    exported = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    for text in TEXTS:
        assert exported.encode(text).ids == tokenizer.encode(text, parse_special=True)
        assert exported.decode(exported.encode(text).ids) == normalizers.NFC().normalize_str(
            tokenizer.decode(tokenizer.encode(text, parse_special=True), skip_special=True)
        )
    fields = qwen2()[1] | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    with_bos = load(write(folder / "export.gguf", fields))
    exported = tokenizers.Tokenizer.from_str(with_bos.to_json())
    assert exported.encode("a b").ids == with_bos.encode("a b", add_special=True)


def test_hash_changes_with_all_that_shapes_encoding(folder: Path) -> None:
    base = qwen2()[1]
    tokens, types, merges = (list(base[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type", "merges"))
    variants = [
        {},
        {"tokenizer.ggml.pre": "qwen35"},
        {"tokenizer.ggml.tokens": [*tokens[:-1], "[other]"]},
        {"tokenizer.ggml.token_type": [*types[:-1], 1]},
        {"tokenizer.ggml.merges": [merges[1], merges[0], *merges[2:]]},
        {"tokenizer.ggml.add_bos_token": True},
        {"tokenizer.ggml.eot_token_id": 5},
    ]
    hashes = [load(write(folder / "hash.gguf", base | change)).hash for change in variants]
    assert len(set(hashes)) == len(variants)
    assert all(len(h) == 64 for h in hashes)
    assert load(write(folder / "hash.gguf", base | {"general.name": "other"})).hash == hashes[0]


# ---- refusals ----


def test_unknown_pre_tokenizers_are_refused_with_the_known_ones(folder: Path) -> None:
    for pre, word in (("qwen99", "qwen99"), ("default", "default"), (None, "missing")):
        fields = dict(qwen2()[1])
        del fields["tokenizer.ggml.pre"]
        if pre is not None:
            fields["tokenizer.ggml.pre"] = pre
        with pytest.raises(UnsupportedModelError, match=word) as caught:
            load(write(folder / "pre.gguf", fields))
        assert "qwen35, refact" in caught.value.hint


def test_sentencepiece_models_are_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'llama'") as caught:
        load(write(folder / "spm.gguf", qwen2()[1] | {"tokenizer.ggml.model": "llama"}))
    assert "SentencePiece" in caught.value.hint


def _malformed() -> dict[str, tuple[str, dict[str, Any]]]:
    base = qwen2()[1]
    tokens, types, merges = (list(base[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type", "merges"))
    n = len(tokens)
    return {
        "no model": ("tokenizer.ggml.model", {"tokenizer.ggml.model": None}),
        "no tokens": ("tokenizer.ggml.tokens", {"tokenizer.ggml.tokens": None}),
        "tokens are numbers": ("tokenizer.ggml.tokens", {"tokenizer.ggml.tokens": [1, 2, 3]}),
        "tokens is a string": ("tokenizer.ggml.tokens", {"tokenizer.ggml.tokens": "abc"}),
        "a token twice": ("tokenizer.ggml.tokens", {"tokenizer.ggml.tokens": [*tokens[:-1], tokens[5]]}),
        "no types": ("tokenizer.ggml.token_type", {"tokenizer.ggml.token_type": None}),
        "too few types": ("tokenizer.ggml.token_type", {"tokenizer.ggml.token_type": types[:-1]}),
        "too many types": ("tokenizer.ggml.token_type", {"tokenizer.ggml.token_type": [*types, 1]}),
        "types are words": ("tokenizer.ggml.token_type", {"tokenizer.ggml.token_type": ["1"] * n}),
        "types are floats": ("tokenizer.ggml.token_type", {"tokenizer.ggml.token_type": [1.0] * n}),
        "type 0": ("tokenizer.ggml.token_type", {"tokenizer.ggml.token_type": [0, *types[1:]]}),
        "type 7": ("tokenizer.ggml.token_type", {"tokenizer.ggml.token_type": [7, *types[1:]]}),
        "a byte token of another form": ("tokenizer.ggml.tokens", {"tokenizer.ggml.token_type": [6, *types[1:]]}),
        "no merges": ("tokenizer.ggml.merges", {"tokenizer.ggml.merges": None}),
        "merge of unknown tokens": ("tokenizer.ggml.merges", {"tokenizer.ggml.merges": [*merges, "Q q\u0130"]}),
        "merge to an unknown token": ("tokenizer.ggml.merges", {"tokenizer.ggml.merges": [*merges, "~ ~~~"]}),
        "merge of one": ("tokenizer.ggml.merges", {"tokenizer.ggml.merges": ["abc", *merges]}),
        "empty merge": ("tokenizer.ggml.merges", {"tokenizer.ggml.merges": ["", *merges]}),
        "merge of three": ("tokenizer.ggml.merges", {"tokenizer.ggml.merges": ["a b c", *merges]}),
        "bos out of range": ("tokenizer.ggml.bos_token_id", {"tokenizer.ggml.bos_token_id": n}),
        "eos negative": ("tokenizer.ggml.eos_token_id", {"tokenizer.ggml.eos_token_id": np.int32(-1)}),
        "eot is a word": ("tokenizer.ggml.eot_token_id", {"tokenizer.ggml.eot_token_id": "<|im_end|>"}),
        "add_bos is a number": ("tokenizer.ggml.add_bos_token", {"tokenizer.ggml.add_bos_token": 1}),
        "template is a number": ("tokenizer.chat_template", {"tokenizer.chat_template": 1}),
    }


@pytest.mark.parametrize("case", _malformed())
def test_malformed_metadata_name_the_key(case: str, folder: Path) -> None:
    key, change = _malformed()[case]
    fields = {k: v for k, v in (qwen2()[1] | change).items() if v is not None}
    with pytest.raises(ModelFormatError, match=key.replace(".", r"\.")):
        load(write(folder / "malformed.gguf", fields))


json_scalars = st.none() | st.booleans() | st.integers(-(2**31), 2**31 - 1) | st.floats(width=32) | st.text(max_size=4)
values = st.one_of(
    json_scalars,
    st.lists(st.text(max_size=4), min_size=1, max_size=5),
    st.lists(st.integers(-2, 8), min_size=1, max_size=5),
)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(sorted(qwen2()[1])), values, min_size=1, max_size=3))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_metadata_load_or_are_explained(folder: Path, changes: dict[str, Any]) -> None:
    fields = {k: np.int32(v) if type(v) is int else v for k, v in (qwen2()[1] | changes).items() if v is not None}
    path = write(folder / "any.gguf", fields)
    try:
        load(path).encode("text")
    except SparkError as error:
        assert str(error)


@given(st.dictionaries(st.integers(0, 1180), st.integers(1, 6), max_size=30))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_types_load_and_keep_control_tokens_out_of_text(folder: Path, changes: dict[int, int]) -> None:
    fields = dict(qwen2()[1])
    types = fields["tokenizer.ggml.token_type"] = list(fields["tokenizer.ggml.token_type"])
    for i, kind in changes.items():
        types[i] = 1 if kind == 6 else kind
    ours = load(write(folder / "types.gguf", fields))
    for text in TEXTS:
        ids = ours.encode(text)
        assert not set(ids) & {i for name, i in ours.special_ids.items() if ours.is_control(name)}
        assert not any(types[i] == 5 for i in ids)


# ---- size ----


def big_metadata(n_tokens: int) -> dict[str, Any]:
    """A vocabulary as large as the large models', of merges that pair the older tokens up."""
    tokens, merges = list(ALPHABET), []
    known = set(tokens)
    for left in tokens:
        for right in tokens[:256]:
            if len(tokens) == n_tokens:
                break
            if left + right not in known:
                known.add(left + right)
                tokens.append(left + right)
                merges.append(f"{left} {right}")
    base = {k: v for k, v in qwen2()[1].items() if "token" not in k.rpartition(".")[2]}
    return base | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": merges,
    }


@pytest.mark.slow
def test_a_vocabulary_of_152k_tokens_loads_in_two_seconds(folder: Path) -> None:
    path = write(folder / "big.gguf", big_metadata(151_936))
    times = []
    for _ in range(3):
        begin = time.process_time()
        ours = load(path)
        times.append(time.process_time() - begin)
    assert ours.vocab_size == 151_936
    assert min(times) < 2


def test_importing_the_engine_tokenizer_imports_no_heavy_library() -> None:
    code = "import sys, engine.text.tokenizer; print({'torch', 'pyarrow', 'pandas', 'transformers'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "set()"
