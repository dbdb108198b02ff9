"""Tokens a second under a form beside those without: one request, four of which one has a form, four that all have.

    python benchmarks/forms_speed.py data/nano/nano.gguf --json data/results/forms_speed.json

The kinds take turns on one daemon, so that what else the machine does is in all of them. A form is a list of objects
with strings and numbers, long enough that no reply ends before its tokens are made; the first use of it, which compiles
it, is not counted. Of mixed requests the rates of those without a form are given apart from that with one.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.driving import DEADLINES, note, settings, shape_of, spread
from benchmarks.figures import json_option
from engine.ground.config import EngineConfig
from engine.ground.protocol import Done
from engine.ground.sampling import Sampling
from spark.daemon.client import DaemonClient, engine_command
from spark.results import write_json

ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}, "kind": {"enum": ["file", "folder"]}},
    "required": ["name", "size", "kind"],
}
FORM = json.dumps({"kind": "json_schema", "schema": {"type": "array", "items": ITEM, "minItems": 10_000}})
KINDS = {  # whether each request has a form
    "1 free": (False,),
    "1 formed": (True,),
    "4 free": (False,) * 4,
    "1 formed, 3 free": (True, False, False, False),
    "4 formed": (True,) * 4,
}


def rate(client: DaemonClient, prompt: list[int], n_tokens: int, grammar: str | None, seed: int) -> float:
    """Tokens a second after the first, as the daemon timed them."""
    request = client.generate(
        prompt, max_tokens=n_tokens, sampling=Sampling(temperature=0.8, seed=seed), stop_tokens=(), grammar=grammar
    )
    done = next(event for event in request if isinstance(event, Done))
    if done.usage.completion_tokens != n_tokens:
        raise SystemExit(f"{done.usage.completion_tokens} tokens of {n_tokens} came")
    return (n_tokens - 1) / done.timing.decode_s


def at_once(
    client: DaemonClient, prompt: list[int], n_tokens: int, formed: tuple[bool, ...], seed: int
) -> dict[str, list[float]]:
    """The rates of requests that run together, of those with a form and those without."""
    rates: dict[str, list[float]] = {"free": [], "formed": []}

    def run(i: int, has_form: bool) -> None:
        found = rate(client, prompt, n_tokens, FORM if has_form else None, seed + i)
        rates["formed" if has_form else "free"].append(found)

    threads = [threading.Thread(target=run, args=item) for item in enumerate(formed)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if sum(map(len, rates.values())) < len(formed):
        raise SystemExit("a request failed")
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cpu", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=256, help="of each reply")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each kind")
    json_option(parser)
    o = parser.parse_args()
    prompt = [token % shape_of(o.model).n_vocab for token in range(100, 100 + o.prompt)]
    ctx_tokens = 64 * (-(-(o.prompt + o.tokens + 64) // 64)) * 4
    config = EngineConfig(model=o.model, device=o.device, threads=o.threads, ctx_tokens=ctx_tokens, draft="off")
    rates: dict[str, dict[str, list[float]]] = {name: {"free": [], "formed": []} for name in KINDS}
    with DaemonClient(engine_command(config), deadlines=DEADLINES) as client:
        ready = settings(client)
        at_once(client, prompt, o.tokens, (True, True), 0)
        for number in range(o.rounds):
            for name in KINDS if number % 2 else reversed(KINDS):
                found = at_once(client, prompt, o.tokens, KINDS[name], 1 + 8 * number)
                for kind, values in found.items():
                    rates[name][kind] += values
    rows: dict[str, Any] = {}
    for name, kinds in rates.items():
        rows[name] = {kind: spread(values) for kind, values in kinds.items() if values}
        free = rows["1 free" if name.startswith("1 f") and "," not in name else "4 free"]["free"]["median"]
        for kind, row in rows[name].items():
            row["of_free"] = row["median"] / free
            note(
                f"{name}, {kind}: {row['median']:.1f} tokens/s each ({row['min']:.1f} to {row['max']:.1f}),"
                f" {100 * row['of_free']:.0f}% of free"
            )
    if o.json:
        write_json(o.json, {"model": o.model.name, "settings": ready, "tokens": o.tokens, "rows": rows})


if __name__ == "__main__":
    main()
