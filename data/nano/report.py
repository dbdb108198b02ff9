"""Write the tables of README.md from metrics.json and drafter_metrics.json, each between two marker lines there.

python data/nano/report.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TITLES = {"sessions": "turns of held-out sessions", "source": "held-out sources, continued"}


def tables(m: dict[str, Any]) -> str:
    """What was trained, on what, and what it learned, in Markdown."""
    c, run, host, library = m["config"], m["training"], m["host"], m["library"]
    before, after, simple = m["unquantised"], m["stored"], m["baselines_bits_per_byte"]
    epochs = run["tokens"] * m["mixture"]["source"] / m["tokens"]["source"]
    mixture = ", ".join(f"{kind} {share:.0%}" for kind, share in m["mixture"].items())
    lines = [
        f"Trained with `{m['command']}` on {host['device']} (torch {host['torch']}), {m['created'][:10]}: "
        f"{run['tokens'] / 1e6:,.0f} M tokens in {run['seconds']:.0f} s ({run['tokens_per_s'] / 1e6:.2f} M tokens/s), "
        f"{run['steps']:,} steps. Text: `{library['name']}`, {library['modules']} modules for training and "
        f"{len(library['held_out'])} held out ({library['held_out_bytes']:,} bytes), SHA-256 of all sources "
        f"`{library['sha256'][:16]}…`. Mixture by tokens: {mixture}; the sources as they stand were seen "
        f"{epochs:.0f} times.",
        "",
        f"{c['n_layer']} layers, {c['n_expert']} experts of which {c['n_expert_used']} are active, "
        f"D {c['n_embd']}, expert FF {c['n_ff_exp']}, {c['n_head']} heads and {c['n_head_kv']} KV heads of "
        f"{c['head_dim']}, vocabulary {c['n_vocab']}, context {c['n_ctx']}; {m['gguf_bytes'] / 1e6:.1f} MB.",
        "",
        "| bits per byte of held-out sources | |",
        "|---|---|",
        f"| this model as stored (Q4_K, Q6_K) | **{after['bits_per_byte']['source']:.3f}** |",
        f"| the same before rounding | {before['bits_per_byte']['source']:.3f} |",
        f"| token bigram (Kneser-Ney, same tokenizer and training text) | {simple['token_bigram']:.3f} |",
        f"| byte bigram (Kneser-Ney) | {simple['byte_bigram']:.3f} |",
        f"| `xz -9e` of the held-out sources alone | {simple['xz']:.3f} |",
        f"| `xz -9e` that has seen the training text | {simple['xz_after_training_text']:.3f} |",
        f"| this model, held-out sessions of an agent | {after['bits_per_byte']['dialogues']:.3f} |",
        "",
        "| a passage seen so many tokens earlier | its second copy: tokens guessed right | a passage in random order |",
        "|---|---|---|",
        *(f"| {d} | {share:.1%} | {after['copying_shuffled'][d]:.1%} |" for d, share in after["copying"].items()),
        "",
        "| layer | entropy of expert use | least used | most used | share of the most used quarter |",
        "|---|---|---|---|---|",
        *(
            f"| {r['layer']} | {r['entropy']:.3f} | {r['least']:.2%} | {r['most']:.2%} | {r['top_quarter']:.1%} |"
            for r in after["routing_source"]
        ),
        "",
        "Entropy is a share of the largest possible (all experts used alike, "
        f"{1 / c['n_expert']:.2%} each); over the held-out sources.",
        "",
        f"Logits against `transformers`' Qwen3MoE on the stored weights: NMSE {m['transformers_nmse']:.1e}.",
        "",
        f"A continuation at temperature {m['temperature']}:",
        "",
        "```python",
        *_best(m["samples"]["code"]),
        "```",
    ]
    return "\n".join(lines)


def _best(code: list[dict[str, Any]]) -> list[str]:
    sample = max(code, key=lambda s: len(set(s["text"].split("\n"))))  # small models like to repeat a line
    return (sample["prompt"] + sample["text"]).replace("```", "'''").rstrip().split("\n")


def drafter_tables(m: dict[str, Any]) -> str:
    """How the drafter was trained, and how many of its guesses are right, in Markdown."""
    s, run, host, written, plan = m["shape"], m["training"], m["host"], m["written"], m["plan"]
    places = range(1, s["block"])
    lines = [
        f"Trained with `{m['command']}` on {host['device']} (torch {host['torch']}), {m['created'][:10]}: "
        f"{run['blocks'] / 1e6:,.1f} M blocks in {run['seconds']:.0f} s ({run['blocks_per_s']:,.0f} a second), "
        f"{run['steps']:,} steps. Text: `{m['library']['name']}`, {m['library']['modules']} modules; the model wrote "
        f"{written['turns']:,} of the {written['of']:,} turns itself ({written['tokens']:,} tokens). Mixture by rows: "
        f"{', '.join(f'{kind} {share:.0%}' for kind, share in m['mixture'].items())}.",
        "",
        f"{s['n_layer']} layers, {s['n_head']} heads and {s['n_head_kv']} KV heads of {s['head_dim']}, FF {s['n_ff']}, "
        f"blocks of {s['block']}, window {s['window']}, features of layers {', '.join(map(str, s['captured']))} "
        f"(from 0); {m['gguf_bytes'] / 1e6:.1f} MB in Q8_0.",
    ]
    head = f"| | blocks | accepted of a block | {' | '.join(map(str, places))} |"
    for name, found in m["acceptance"].items():
        title = f"{TITLES.get(name, name)}: {found['replies']:,} replies, {found['tokens']:,} tokens"
        lines += ["", head.replace("| |", f"| {title} |", 1), "|---|" + "---|" * (len(places) + 2)]
        kinds = {kind: of for kind, of in found.items() if isinstance(of, dict)}
        if len(kinds) == 2:  # one kind is all
            kinds = {"all": kinds["all"]}
        lines += [_acceptance(kind, of) for kind, of in kinds.items()]
    lines += [
        "",
        "Blocks are drafted along the model's own likeliest replies, each behind the token that was due after the "
        f"accepted ones; the first {plan['sessions']} held-out sessions. In column k: how often guess k is right where "
        "all before it are.",
    ]
    if engine := m.get("engine"):
        lines += [
            "",
            f"By the engine on a CPU, {engine['replies']} replies of held-out sessions ({engine['tokens']:,} tokens): "
            f"{engine['engine']['accepted_per_block']:.2f} accepted of a block, where PyTorch's guesses behind the "
            f"same tokens give {engine['torch']['accepted_per_block']:.2f}; {engine['equal_guesses']:.1%} of the "
            "guesses are equal.",
        ]
    return "\n".join(lines)


def _acceptance(kind: str, of: dict[str, Any]) -> str:
    shares = [f"{right / due:.0%}" if due else "" for due, right in zip(of["due"], of["right"], strict=True)]
    return f"| {kind} | {of['blocks']:,} | {of['accepted_per_block']:.2f} | {' | '.join(shares)} |"


def main() -> None:
    readme = HERE / "README.md"
    text = readme.read_text("utf-8")
    for name, render in (("metrics.json", tables), ("drafter_metrics.json", drafter_tables)):
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        assert rest and after, f"README.md needs the lines {begin} and {end}"
        if (HERE / name).exists():
            text = f"{before}{begin}\n{render(json.loads((HERE / name).read_text('utf-8')))}\n{end}{after}"
    readme.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
