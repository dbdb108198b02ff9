r"""How text is cut into words before byte pairs are merged: what `tokenizer.ggml.pre` names.

A GGUF file holds the vocabulary and the merges, but of the pre-tokenizer only the name. With a wrong one a model
loads and encodes text into tokens it has never seen side by side, so there is no default: an unknown or missing
name is refused. The rules are those of each model's published `tokenizer.json`. Where they come from:

- gpt-2, olmo, mpt, qwen2, qwen35, command-r: the tokenizer classes of `transformers` 5 (GPT2, GPTNeoX, Qwen2,
  Qwen3.5, Cohere), with their NFC normalization. Other GGUF engines leave NFC out: decomposed accents differ.
- llama-bpe and its aliases, gpt-4o, llama4, minimax-m2, tekken: the table `transformers` 5 reads GGUF files with.
- falcon, deepseek-llm, deepseek-coder, deepseek-v3, starcoder, refact, smollm, bailingmoe, seed-coder: the
  published files as several engines quote them. deepseek-r1-qwen, glm4 and chatglm-bpe as the same engines have
  them, equal to qwen2 and llama-bpe; their normalization is not verified.
- laguna: many independent readers of the published file agree on two stages, a cut before every run of line feeds
  (`\r\n` counts as one), then qwen2's expression, no NFC. `transformers` has the model but no tokenizer for it.
  llama.cpp cuts around runs of `\n` alone in the first stage, so that the vocabulary's token of `\r\n` never comes of
  it. Not verified against the file itself, nor against tokens that it made (docs/text.md).
- gemma4: named by `tokenizer.ggml.model`, without a `pre`. Not words but whole text is merged, from characters instead
  of bytes, after spaces became U+2581; what has no token becomes byte tokens (`GemmaTokenizer` of `transformers`).
  The most used GGUF engine cuts around runs of line feeds too, and takes such a run whole where it is a token. That is
  the same as long as no token mixes line feeds with others and every cut of a run is a merge, as in the published
  vocabulary as far as its readers tell. Not verified against the file itself.

Whether whole words are looked up before merging (`ignore_merges`) and whether BOS is added where a file does not say
are facts that GGUF engines keep in such a table too; they are as those engines have them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from engine.ground.errors import UnsupportedModelError

SPACE = "\u2581"  # what stands for a space in vocabularies that are written in plain text


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One rule of cutting text into words.

    words: cuts, and maps bytes to the printable letters that vocabularies are written in; None: text is not cut, and
    vocabularies are written in plain text, with U+2581 for the space. nfc: text is NFC-normalized first.
    ignore_merges: a word that is a token is taken whole. add_bos: for files that do not say.
    """

    words: pre_tokenizers.PreTokenizer | None
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        """What is done to text before it is cut, if anything."""
        if self.words is None:
            return normalizers.Replace(" ", SPACE)
        return normalizers.NFC() if self.nfc else None


def _steps(*steps: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(list(steps))


def _split(pattern: str, behavior: str = "isolated") -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior=behavior)


def _letters(hex_ranges: str) -> str:
    """The inside of a character class: code points in hexadecimal, since editors normalize some of the letters."""
    ranges = (entry.split("-") for entry in hex_ranges.split())
    return "".join("-".join(rf"\x{{{end}}}" for end in ends) for ends in ranges)


_DIGITS = pre_tokenizers.Digits(individual_digits=True)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's own expression
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"  # up to a line end; all but the one before a word; that one
_BLANKS_ONE_LINE = r"\s*[\r\n]|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _one_of(*patterns: str) -> pre_tokenizers.PreTokenizer:
    return _steps(_split("|".join(patterns)), _BYTES)


def _camel_case(suffix: str, digits: str) -> pre_tokenizers.PreTokenizer:
    """OpenAI's o200k expression, where a capital letter begins a word inside a word."""
    return _one_of(
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{suffix}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{suffix}",
        digits,
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        _BLANKS,
    )


_QWEN2 = (_CONTRACTION, _WORD, r"\p{N}", _SIGNS, _BLANKS)
_LLAMA3 = _one_of(_CONTRACTION, _WORD, r"\p{N}{1,3}", _SIGNS, _BLANKS)
_QWEN35 = (_CONTRACTION, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _BLANKS)
_SEED_CODER = (_CONTRACTION, _WORD, r"\p{N}{1}", r" ?[^\s\p{L}\p{N}\r\n]+", _BLANKS)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)",
    r"[^\r\n\p{L}\p{N}]?+\p{L}+",
    r"\p{N}",
    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    _BLANKS_ONE_LINE,
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    _BLANKS,
)
_DEEPSEEK_CASED = _letters(
    """
    41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1
    3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77
    1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE
    1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124
    2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3
    A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A
    10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
    """
)
_DEEPSEEK_SIGNS = _letters("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
_DEEPSEEK_CJK = _split(f"[{_letters('4E00-9FA5 800-4E00 AC00-D7FF')}]+")
_HAN_AND_KANA = _split(f"[{_letters('4E00-9FA5 3040-309F 30A0-30FF')}]+")

_RULES = {
    "gpt-2 phi-2": PreTokenizer(_GPT2),
    "olmo mpt": PreTokenizer(_GPT2, nfc=True),
    "starcoder refact smollm": PreTokenizer(_steps(_DIGITS, _GPT2)),
    "command-r": PreTokenizer(_steps(_DIGITS, _GPT2), nfc=True),
    "falcon": PreTokenizer(
        _steps(
            pre_tokenizers.Punctuation(behavior="contiguous"),
            _GPT2,
            pre_tokenizers.Digits(individual_digits=False),
            _split("[0-9][0-9][0-9]"),
        )
    ),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer(
        _LLAMA3, ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": PreTokenizer(_LLAMA3),
    "tekken": PreTokenizer(_camel_case("", r"\p{N}"), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 minimax-m2": PreTokenizer(_camel_case(f"{_CONTRACTION}?", r"\p{N}{1,3}")),
    "qwen2 deepseek-r1-qwen": PreTokenizer(_one_of(*_QWEN2), nfc=True),
    "qwen35": PreTokenizer(_one_of(*_QWEN35), nfc=True),
    "seed-coder": PreTokenizer(_one_of(*_SEED_CODER)),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(_one_of(*_BAILING)),
    "laguna": PreTokenizer(
        _steps(_split(r"(?:\r?\n)+(?!\r?\n)", "merged_with_next"), _split("|".join(_QWEN2)), _BYTES)
    ),
    "deepseek-llm": PreTokenizer(
        _steps(
            _split(r"[\r\n]"),
            _split(rf"\s?[{_DEEPSEEK_CASED}]+"),
            _split(rf"\s?[{_DEEPSEEK_SIGNS}]+"),
            _split(r"\s+$"),
            _DEEPSEEK_CJK,
            _DIGITS,
            _BYTES,
        )
    ),
    "deepseek-coder": PreTokenizer(
        _steps(_split(r"[\r\n]"), _split(r"\s?\p{L}+"), _split(r"\s?\p{P}+"), _DEEPSEEK_CJK, _DIGITS, _BYTES)
    ),
    "deepseek-v3": PreTokenizer(_steps(_split(r"\p{N}{1,3}"), _HAN_AND_KANA, _split("|".join(_DEEPSEEK3)), _BYTES)),
}
GEMMA4 = PreTokenizer(None, add_bos=True)
PRE_TOKENIZERS = {name: rule for names, rule in _RULES.items() for name in names.split()}


def pre_tokenizer(name: str | None) -> PreTokenizer:
    """The rule called `name`; UnsupportedModelError for an unknown name, for `default` and for None.

    `default`, or no name, is what converters wrote before they knew pre-tokenizers (April 2024): such a file has
    lost how its model's text was cut, and engines that guess degrade the model without a word.
    """
    if name is not None and name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    known = "known pre-tokenizers: " + ", ".join(sorted(PRE_TOKENIZERS))
    if name is None or name == "default":
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre is {name or 'missing'}: the file does not say how its text is cut into words",
            hint=f"convert the model again with a converter newer than April 2024; {known}",
        )
    raise UnsupportedModelError(f"tokenizer.ggml.pre is {name!r}, which is not implemented", hint=known)
