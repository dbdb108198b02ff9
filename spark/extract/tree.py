"""The shape of one log: nodes that answer each other, cut by compactions, with branches that were taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Node:
    """A response with the results of its calls, or a user message.

    order: line in the file. thread: empty for the file's own conversation. identity: the same in every
    copy of the node. parts: places in the spool of the node's parts. after: user text that came with the
    results. results: places of results by call id. calls: call ids in order.
    above: the node that this one answers, once links are resolved; segment: compactions before it.
    run: id of the call that started a subagent, where its records say so. before, notes: what stands
    before the node and after it.
    """

    order: int
    thread: str
    response: bool
    identity: int
    parent: int | None
    starts: bool
    started_at: str
    lines: int = 1
    words: int = 0
    parts: list[int] = field(default_factory=list)
    after: list[Note] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    results: dict[str, int] = field(default_factory=dict)
    home: Node | None = None
    above: Node | None = None
    segment: int = -1
    run: str = ""
    before: tuple[Note, ...] = ()
    notes: tuple[Note, ...] = ()


@dataclass(slots=True, eq=False)
class Note:
    """Text that was put in beside the messages: a file, a reminder, a prompt typed while the model worked.

    It belongs to what it follows and is no node: where it hangs in the log, beside results or after them,
    says nothing about what the model answered. identity: the same in every copy, 0 if there is none.
    at, words: place in the spool and fingerprint of its text. sent: a prompt of the user that no record but the
    queue's has, which does not say what it follows.
    """

    order: int
    thread: str
    parent: int | None
    identity: int
    at: int
    words: int
    dropped: bool = False
    sent: bool = False


@dataclass(slots=True, eq=False)
class Boundary:
    """A compaction in a thread: the next node begins segment `segment`."""

    thread: str
    segment: int


def split_paths(nodes: list[Node], counts: Callable[[Node], bool] = lambda node: node.response) -> list[list[Node]]:
    """Split a segment's trees into paths that share no node: first the one to the last leaf, then the others.

    Each path runs from the oldest node that no path before it has to a node without an answer. Those without a node
    that counts, of which nothing is written, have what no other has: a compaction's summary goes with what was
    answered, though the user went back, asked again and left. All but the first are in the order of their beginnings.
    """
    answered = {node.above.order for node in nodes if node.above is not None}
    leaves = [node for node in nodes if node.order not in answered]
    nearest: dict[int, int | None] = {}  # of a node, the lowest one that counts, at it or above
    taken: set[int] = set()
    paths, empty = list[list[Node]](), list[list[Node]]()

    def lowest(leaf: Node) -> int | None:
        passed, node = list[Node](), leaf
        while node.order not in nearest:
            nearest[node.order] = node.order if counts(node) else None  # ends a ring of links
            if nearest[node.order] is not None:
                break
            passed.append(node)
            if node.above is None:
                break
            node = node.above
        for each in passed:
            nearest[each.order] = nearest[node.order]
        return nearest[leaf.order]

    def take(leaf: Node) -> list[Node]:
        path, node = list[Node](), leaf
        while node.order not in taken:
            taken.add(node.order)
            path.append(node)
            if node.above is None:
                break
            node = node.above
        return path[::-1]

    for leaf in reversed(leaves):
        if (last := lowest(leaf)) is not None and last not in taken:
            paths.append(take(leaf))
    for leaf in [*reversed(leaves), *reversed(nodes)]:  # the latter for nodes in a ring of links
        if path := take(leaf):
            empty.append(path)
    paths += empty
    return paths[:1] + sorted(paths[1:], key=lambda path: path[0].order)


def settle_segment(node: Node) -> None:
    """Give a node, and those above it, the segment of the first of them."""
    path: list[Node] = []
    at: Node | None = node
    while at is not None and at.segment < 0:
        path.append(at)
        at.segment = 0  # ends a ring of links
        at = at.above
    segment = at.segment if at is not None else 0
    for passed in path:
        passed.segment = segment
