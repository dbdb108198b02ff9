"""Fields that other servers have beside those of OpenAI's chat and completions, and what becomes of each here.

vLLM, SGLang and llama.cpp each have their own, and clients of these send them to any server. Those that ask for what
can be done here are read; the others are refused by name where their value asks for something, since a reply that
lacks what was asked for looks like one that has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.ground.sampling import Sampling
from spark.speech import conversation as c
from spark.speech.json_text import parse_string

# What cannot be done, and the values that ask for nothing.
UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    # vLLM
    "guided_regex": [""], "guided_choice": [[]], "guided_grammar": [""], "allowed_token_ids": [[]], "bad_words": [[]],
    "min_tokens": [0], "stop_token_ids": [[]], "prompt_logprobs": [], "truncate_prompt_tokens": [],
    "include_stop_str_in_output": [False], "use_beam_search": [False], "logits_processors": [[]], "prompt_embeds": [],
    # SGLang
    "regex": [""], "ebnf": [""],
    # llama.cpp
    "grammar": [""], "n_predict": [-1], "typical_p": [1], "mirostat": [0], "dry_multiplier": [0],
    "xtc_probability": [0], "dynatemp_range": [0], "top_n_sigma": [-1],
}  # fmt: skip
_SCHEMAS = ("guided_json", "json_schema")  # of vLLM before, and of llama.cpp


def schema(body: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | None]:
    """The field that a form came in, and its JSON schema, None: none did.

    Raises RequestError that names a field for a form of another kind, and for two of them.
    """
    found = {"response_format": c.response_schema("response_format", body.get("response_format"), "json_schema")}
    found |= {name: _schema(name, body[name]) for name in _SCHEMAS if body.get(name) is not None}
    for kind, value in c.get(body, "structured_outputs", dict, {}).items():
        where = f"structured_outputs.{kind[:40]}"
        if kind == "json" and value is not None:
            found[where] = _schema(where, value)
        elif kind == "json_object" and value:
            found[where] = {}
        elif value and not kind.startswith(("disable_", "whitespace_")):
            raise c.refusal(where, "not supported", hint="give a schema in 'json', or leave it out")
    asked = {name: form for name, form in found.items() if form is not None}
    if len(asked) > 1:
        raise c.refusal(list(asked)[1], f"a form is in {next(iter(asked))} already")
    return next(iter(asked.items()), ("response_format", None))


def _schema(where: str, value: Any) -> Mapping[str, Any]:
    """A schema, or the text of one."""
    if type(value) is str and type(value := parse_string(value)) is not dict:
        raise c.refusal(where, "expected a JSON schema, or the text of one")
    return c.as_object(where, value)


def sampling(body: Mapping[str, Any]) -> Sampling:
    """How tokens are drawn; `repeat_penalty` is llama.cpp's word for a repetition penalty."""
    if body.get("repeat_penalty") is not None and body.get("repetition_penalty") is None:
        body = {**body, "repetition_penalty": body["repeat_penalty"]}
    return c.sampling(body)


def endless(body: Mapping[str, Any]) -> bool:
    """Whether a reply goes on behind the token that would end it, up to its limit, as programs that measure ask for."""
    return bool(c.get(body, "ignore_eos", bool, False))


def continues(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is the beginning of the reply: by vLLM's field, or by Mistral's `prefix` in it."""
    asked = bool(c.get(body, "continue_final_message", bool, False))
    return asked or bool(c.get(messages[-1], "prefix", bool, False, f"messages[{len(messages) - 1}]."))
