"""A tokenizer whose tokens are bytes, and the names that make the fake engine do things."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

from engine.text.template import ChatTemplate
from tests import fake_engine

NAMES = {
    "<|end|>": fake_engine.END,
    "<|say|>": fake_engine.SAY,
    "<|said|>": fake_engine.SAID,
    "<|crash|>": fake_engine.CRASH,
    "<|refused|>": fake_engine.REFUSED,
    "<|nan|>": fake_engine.NAN,
    "<|hang|>": fake_engine.HANG,
    "<|quiet|>": fake_engine.QUIET,
    "<|draw|>": fake_engine.DRAW,
    "<|warn|>": fake_engine.WARN,
    "<|halves|>": fake_engine.HALVES,
}
# The model answers with what the last message says, or does what it names.
TEMPLATE = """\
{%- for tool in tools or [] %}[tool {{ tool.function.name }}]{% endfor -%}
{%- for message in messages -%}
[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls or [] %}[call {{ call.function | tojson }}]{% endfor -%}
{%- endfor -%}
{%- set wish = messages[-1].content -%}
{%- if wish in ["crash", "refused", "nan", "hang", "quiet", "draw", "warn", "halves"] -%}<|{{ wish }}|>{%- endif -%}
{%- if wish == "refuse" -%}{{ raise_exception("not with me") }}{%- endif -%}
<|say|>{{ wish }}<|said|>
{%- if messages[0].content == "think" %}<think>
{% endif -%}
"""


class FakeTokenizer:
    bos_id = None
    eos_id = fake_engine.END
    add_bos = False
    stop_ids = frozenset([fake_engine.END])
    special_ids = NAMES
    vocab_size = fake_engine.VOCAB

    def __init__(self) -> None:
        self.template = ChatTemplate(TEMPLATE, "", "<|end|>")
        self._texts = {number: name.encode() for name, number in NAMES.items()}
        self._split = re.compile("(" + "|".join(map(re.escape, NAMES)) + ")")

    def is_control(self, name: str) -> bool:
        return name in NAMES

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        assert not parse_special
        return list(text.encode(errors="replace"))

    def split_special(self, text: str) -> list[int | str]:
        return [NAMES.get(piece, piece) for piece in self._split.split(text) if piece]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(bytes([i]) if i < 256 else self._texts[i] for i in ids)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def stream(self) -> FakeDetokenizer:
        return FakeDetokenizer(self)


class FakeDetokenizer:
    def __init__(self, tokenizer: FakeTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(self._tokenizer.decode_bytes(ids))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)
