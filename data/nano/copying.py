"""Copying tasks: text that can be continued only by looking far back."""

from __future__ import annotations

import random
from collections.abc import Sequence

from corpus import IDENTIFIER, Module

WORDS = (
    "amber", "anchor", "basalt", "beacon", "birch", "cedar", "cinder", "cobalt", "copper", "coral", "delta",
    "ember", "falcon", "fennel", "garnet", "glacier", "harbor", "hazel", "indigo", "island", "jasper",
    "juniper", "kestrel", "lagoon", "lantern", "linen", "maple", "marble", "meadow", "nickel", "oasis", "olive",
    "onyx", "opal", "orchid", "otter", "pebble", "pepper", "pine", "plum", "prairie", "quartz", "raven", "reef",
    "river", "saffron", "sage", "slate", "sparrow", "spruce", "summit", "thistle", "timber", "topaz", "tundra",
    "valley", "velvet", "walnut", "willow", "winter", "zephyr",
)  # fmt: skip


def _excerpt(modules: Sequence[Module], rng: random.Random, fewest: int, most: int) -> list[str]:
    lines = rng.choice(modules).lines
    count = rng.randint(fewest, most)
    start = rng.randrange(max(1, len(lines) - count))
    return lines[start : start + count]


def _filler(modules: Sequence[Module], rng: random.Random) -> str:
    return "\n".join(_excerpt(modules, rng, 10, 180))


def _word(rng: random.Random) -> str:
    match rng.randrange(5):
        case 0:
            return f"{rng.getrandbits(32):08x}"
        case 1:
            return str(rng.randrange(10 ** rng.randint(1, 7)))
        case 2:
            return "_".join(rng.choices(WORDS, k=2))
        case 3:
            return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 9)))
        case _:
            return rng.choice(WORDS) + str(rng.randrange(100))


def repeated(modules: Sequence[Module], rng: random.Random) -> str:
    """A passage, other text, the passage again (perhaps more than once, perhaps of made-up words)."""
    if rng.random() < 0.3:
        passage = "\n".join(" ".join(_word(rng) for _ in range(rng.randint(4, 10))) for _ in range(rng.randint(3, 14)))
    else:
        passage = "\n".join(_excerpt(modules, rng, 5, 45))
    parts = [passage]
    for _ in range(rng.randint(1, 3)):
        parts += [_filler(modules, rng), passage]
    return "\n".join(parts)


def looked_up(modules: Sequence[Module], rng: random.Random) -> str:
    """A table of made-up keys and values, other text, then the table's entries in another order."""
    keys = list(dict.fromkeys(_word(rng) for _ in range(rng.randint(6, 50))))
    table = {key: _word(rng) for key in keys}
    line, ask = rng.choice(
        [
            ("    {k!r}: {v!r},", "assert table[{k!r}] == {v!r}"),
            ("{k} = {v}", "{k} is {v}"),
            ("export {k}={v}", "echo ${k}  # {v}"),
            ('{{"key": "{k}", "value": "{v}"}}', 'get("{k}") -> "{v}"'),
        ]
    )
    parts = ["\n".join(line.format(k=k, v=v) for k, v in table.items())]
    for _ in range(rng.randint(1, 3)):
        parts.append(_filler(modules, rng))
        parts.append("\n".join(ask.format(k=k, v=table[k]) for k in rng.sample(keys, rng.randint(3, len(keys)))))
    return "\n".join(parts)


def edited(modules: Sequence[Module], rng: random.Random) -> str:
    """A passage, other text, then the passage with one name changed throughout."""
    passage = "\n".join(_excerpt(modules, rng, 8, 45))
    names = sorted(set(IDENTIFIER.findall(passage))) or ["pass"]
    old, new = rng.choice(names), "_".join(rng.choices(WORDS, k=2))
    changed = IDENTIFIER.sub(lambda m: new if m[0] == old else m[0], passage)
    return f"{passage}\n{_filler(modules, rng)}\n# {old} -> {new}\n{changed}"


def copying_tasks(modules: Sequence[Module], count: int, seed: str) -> list[str]:
    """`count` tasks of all three kinds, deterministic by seed."""
    rng = random.Random(seed)
    return [rng.choice([repeated, repeated, looked_up, edited])(modules, rng) for _ in range(count)]
