"""Conversations that begin with a record that is no message: a hook's progress or output, an attachment, a notice.

The first prompt then has a parent, and so has what the user typed instead after going back to before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spark.extract.intake import as_object, as_text
from spark.extract.tree import Node

# The hooks of a conversation that begins; those of one that goes on are SessionStart:resume and SessionStart:compact.
_BEGINNING = ("SessionStart:startup", "SessionStart:clear")
_HOOKS = "SessionStart:"


@dataclass(slots=True, eq=False)
class FirstRecord:
    """A record without a parent that is no message.

    order: its line. anew: a conversation begins there. attached: it is an attachment that may be such a record.
    first: the first node that hangs off it, through records that are no messages either.
    """

    order: int
    anew: bool
    attached: bool
    first: Node | None = None


class Openings:
    """The openings of one log."""

    def __init__(self, links: Mapping[int, int | None]) -> None:
        """links: parents of the records that are no messages, as far as they are read."""
        self._links = links
        self._openings: dict[int, FirstRecord] = {}
        self._first: dict[str, int] = {}  # line of the first node, by thread

    def add(self, uuid: int, record: dict[str, Any], order: int) -> None:
        """Take a record that is no message and has no parent."""
        inner = as_object(record.get("attachment") or record.get("data"))
        hook = as_text(inner.get("hookName"))
        attached = record.get("type") == "attachment" and not hook.startswith(_HOOKS)
        self._openings[uuid] = FirstRecord(order, hook in _BEGINNING, attached)

    def add_node(self, node: Node) -> None:
        """Take a node as it is read."""
        self._first.setdefault(node.thread, node.order)

    def find(self, node: Node) -> FirstRecord | None:
        """The opening that a node hangs off."""
        if not self._openings or node.parent not in self._links:
            return None
        return next((self._openings[uuid] for uuid in self.chain(node) if uuid in self._openings), None)

    def chain(self, node: Node) -> Iterator[int]:
        """The ids of the records that are no messages between a node and the message above it, from the node on."""
        uuid, passed = node.parent, set[int]()
        while uuid is not None and uuid in self._links and uuid not in passed:
            yield uuid
            passed.add(uuid)
            uuid = self._links[uuid]

    def begins(self, node: Node) -> bool:
        """Whether a node begins a conversation: it has no parent, or hangs off a record that stands for that."""
        if node.starts or (opening := self.find(node)) is None:
            return node.starts
        return opening.anew or opening.order < self._first[node.thread] or (opening.attached and bool(node.results))
