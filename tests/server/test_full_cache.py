"""Sixteen clients of a real server whose replies together are longer than the cache: all get what they get alone."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.command_line import NANO, PATIENCE_S, started

PROMPTS = [f"def f{i}(x, y):\n    return x + {i}" for i in range(16)]
CTX_TOKENS = 1280


def body(prompt: str, stream: bool) -> dict[str, Any]:
    made = {"prompt": prompt, "max_tokens": 600, "temperature": 0.8, "seed": 3, "stream": stream}
    return made | ({"stream_options": {"include_usage": True}} if stream else {})


def ask(url: str, prompt: str, stream: bool) -> tuple[str, int]:
    """A reply, and how many tokens it has."""
    with httpx.stream("POST", f"{url}/completions", json=body(prompt, stream), timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        if not stream:
            whole = json.loads(answer.read())
            return whole["choices"][0]["text"], whole["usage"]["completion_tokens"]
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert not any("error" in chunk for chunk in chunks)
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    return text, next(chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage"))


def waits(url: str) -> dict[str, int]:
    """What the metrics say of requests that waited."""
    said = httpx.get(url.removesuffix("/v1") + "/metrics", timeout=PATIENCE_S).text
    return {reason: int(float(n)) for reason, n in re.findall(r'spark_waits_total\{reason="(\w+)"\} (\S+)', said)}


@pytest.mark.slow
@pytest.mark.parametrize("gib", ["2", "0"])
def test_all_get_what_they_get_alone(tmp_path: Path, gib: str) -> None:
    command = ("serve", NANO, "--device", "cpu", "--port", "0", "--ctx", str(CTX_TOKENS), "--prefix-gib", gib)
    with started(*command, "--parallel", "16", cwd=tmp_path, tmp=tmp_path) as process:
        assert process.stderr is not None
        url = next(line for line in process.stderr if " is served at" in line).split()[-1]
        expected = [ask(url, prompt, False) for prompt in PROMPTS]
        assert sum(n for _, n in expected) > 2 * CTX_TOKENS
        assert waits(url) == {"place": 0, "room": 0, "moved_out": 0, "read_again": 0}
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            found = list(pool.map(lambda i: ask(url, PROMPTS[i], bool(i % 2)), range(len(PROMPTS))))
        assert found == expected
        counted = waits(url)
    assert counted["room"] > 0 and counted["place"] == 0
    assert (counted["moved_out"] > 0) == (gib != "0") and (counted["read_again"] > 0) == (gib == "0")
