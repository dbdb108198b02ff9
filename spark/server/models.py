"""The list of models, of which there is one, in all the shapes that clients look for.

`data` is OpenAI's list; its objects have Anthropic's fields too, which do not clash. `models` is Codex's, from which it
learns how long the context is.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

# Codex takes a model's instructions from here.
_INSTRUCTIONS = """\
You are a coding agent in a terminal on the user's machine. You are given tools: use them to read, run and change what
is there instead of guessing, and go on until the task is done.

- Look before you change: read the files that matter, and follow the conventions that you find in them and in AGENTS.md.
- Make the smallest change that solves the problem at its cause. Leave unrelated code as it is.
- Check what you did with the project's own tests or by running it, and say plainly what you could not check.
- Do not commit, push, delete or overwrite what the user did not ask you to.
- Keep messages short. End with what changed, where, and what is left to do.
"""
_EFFORTS = {
    "low": "A short budget of reasoning.",
    "medium": "A moderate budget of reasoning.",
    "high": "As much reasoning as the model likes.",
}


def listing(name: str, created: int, ctx_tokens: int) -> dict[str, Any]:
    """Make the answer of /v1/models; created: seconds since the epoch."""
    made = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "spark",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": ctx_tokens,
        "max_tokens": ctx_tokens,
        "context_length": ctx_tokens,
    }
    return {
        "object": "list",
        "data": [made],
        "first_id": name,
        "last_id": name,
        "has_more": False,
        "models": [_codex(name, ctx_tokens)],
    }


def _codex(name: str, ctx_tokens: int) -> dict[str, Any]:
    return {
        "slug": name,
        "display_name": name,
        "description": "A local model, served by Spark.",
        "default_reasoning_level": "medium",
        "supported_reasoning_levels": [{"effort": key, "description": text} for key, text in _EFFORTS.items()],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
        "upgrade": None,
        "base_instructions": _INSTRUCTIONS,
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": "freeform",
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "context_window": ctx_tokens,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }
