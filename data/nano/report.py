"""Write the tables of README.md from metrics.json, between the two marker lines there.

python data/nano/report.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- begin: metrics.json -->", "<!-- end: metrics.json -->"


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


def main() -> None:
    metrics = json.loads((HERE / "metrics.json").read_text("utf-8"))
    readme = HERE / "README.md"
    before, _, rest = readme.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    assert rest and after, f"README.md needs the lines {BEGIN} and {END}"
    readme.write_text(f"{before}{BEGIN}\n{tables(metrics)}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
