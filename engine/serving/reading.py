"""Prompts that are read in one step: whose chunks share it, and the step.

A chunk has the bits in it that it has alone (docs/cuda.md), so who else reads a prompt changes no token.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from engine.ground.errors import DeviceLostError, SparkError
from engine.ground.protocol import Event
from engine.ops.cuda.failures import translated
from engine.serving.schedule import joins, space
from engine.serving.tasks import GenerateTask


@dataclass(slots=True)
class Gathered:
    """Who is read next. taken: in one step. ready: those that need none. last: nobody before was passed over."""

    last: GenerateTask
    taken: list[GenerateTask] = field(default_factory=list)
    ready: list[GenerateTask] = field(default_factory=list)


def gather(first: GenerateTask, others: Many[GenerateTask]) -> Gathered:
    """The step of one that is prepared, and of those that can join it, in this order; nobody is put back for these."""
    loaded = first.loaded
    most, small = loaded.limits.max_tokens, loaded.small_tokens
    found, passed = Gathered(first), False
    for task in (first, *others):
        parts = [other.part_tokens for other in found.taken]
        if task is not first and not _prepared(task, found.taken, space(parts, most, small)):
            passed = True
        elif task.is_ready:
            found.ready.append(task)
        elif joins(parts, task.part_tokens, most, small):
            found.taken.append(task)
        else:
            passed = True
        if not passed:
            found.last = task
    return found


def _prepared(task: GenerateTask, taken: Many[GenerateTask], most: int) -> bool:
    """Whether one can do what is next beside `taken`, in a step that has room for so many tokens more.

    Whoever has not begun waits for a step that reads what it can go on after.
    """
    if most <= 0 or any(task.repeats(other) for other in taken):
        return False
    try:
        with translated():
            task.prepare(most)
    except DeviceLostError:
        raise
    except SparkError:  # it is told when it is its turn, or room is made
        return False
    return task.is_ready or task.part_tokens > 0


def read_together(tasks: Many[GenerateTask]) -> list[list[Event] | SparkError]:
    """One step of the chunks that tasks are prepared for; then those whose prompts are read draw their first token.

    Returns each task's events, or its own failure; one that all share is raised.
    """
    loaded = tasks[0].loaded
    chunks = [task.chunk() for task in tasks]
    result = loaded.decoder.run(chunks)
    loaded.decoder.proposer.fed(chunks, result)
    outcomes: list[list[Event] | SparkError] = []
    drawing = [i for i, chunk in enumerate(chunks) if chunk.span.want]
    end = 0
    for i, (task, chunk) in enumerate(zip(tasks, chunks, strict=True)):
        end += len(chunk.span.tokens)
        row = drawing.index(i) if chunk.span.want else None
        try:
            logits = None if row is None else lambda row=row: result.logits[row]
            outcomes.append(task.fed(result.residual_at(end - 1), logits))  # waits for the step
        except DeviceLostError:
            raise
        except SparkError as error:
            outcomes.append(error)
    failures = loaded.decoder.accept([chunks[i] for i in drawing], result) if drawing else []
    for i, failure in zip(drawing, failures, strict=True):
        told = outcomes[i]
        if not isinstance(told, SparkError):
            outcomes[i] = [*told, *tasks[i].drawn()] if failure is None else failure
    return outcomes
