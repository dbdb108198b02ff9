"""Errors that are explained to the user: one code, one exit status, one hint each.

The same class is rebuilt on the client's side of the line protocol from its `code`, so an
error raised inside the daemon ends a command exactly as an error raised in the command does.
"""

from __future__ import annotations

from typing import Any

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_DEADLINE = 124  # the code of GNU timeout
EXIT_INTERRUPTED = 130


class SparkError(Exception):
    """A failure with an explanation: what was expected, what was found, what to do.

    `code` names the failure in the line protocol, `exit_code` is the command's exit status and
    `hint` (may be empty) says what the user can do about it. `field` is the one of a request that it is about, where
    there is one, such as `messages[0].content`; it does not go through the line protocol.
    """

    code = "failed"
    exit_code = EXIT_FAILURE
    field: str | None = None

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ModelFormatError(SparkError):
    """A model file that is truncated, malformed or inconsistent; names the key or tensor."""

    code = "model_format"


class UnsupportedModelError(SparkError):
    """A well-formed model that this engine does not implement; names what it does implement."""

    code = "unsupported_model"


class FileFormatError(SparkError):
    """A profile, trace, token or session file that is not what its name promises."""

    code = "file_format"


class WrongModelError(SparkError):
    """A profile, trace or token file that was made for another model; shows both ids."""

    code = "wrong_model"


class UsageError(SparkError):
    """Options that contradict each other or the model."""

    code = "usage"
    exit_code = EXIT_USAGE


class MissingExtraError(SparkError):
    """An optional dependency that is not installed; the hint is the exact pip line."""

    code = "missing_extra"


class RequestError(SparkError):
    """A request that is refused: malformed, unknown operation, token out of range.

    details: what the answer says besides, for clients that can do without what is refused.
    """

    code = "bad_request"

    def __init__(
        self, message: str, *, hint: str = "", field: str | None = None, details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.field, self.details = field, details


class ContextOverflowError(RequestError):
    """A prompt that does not fit in the context."""

    code = "context_overflow"


class OverloadedError(SparkError):
    """A request that came while as many as may wait were waiting; it may be sent again later."""

    code = "overloaded"


class CapacityError(SparkError):
    """Memory or slots that do not suffice; names the smallest budget that would."""

    code = "capacity"


class NumericalError(SparkError):
    """NaN or infinite logits: an error, never a token."""

    code = "numerical"


class DeviceLostError(SparkError):
    """A GPU that failed, with all that it held: nothing more can be computed, and the daemon ends."""

    code = "device_lost"


class CancelledError(SparkError):
    """A request that was cancelled by its client."""

    code = "cancelled"


class DaemonError(SparkError):
    """A daemon that died, closed its output or spoke something else than the protocol."""

    code = "daemon"


class DeadlineError(SparkError):
    """A deadline passed: silence for too long, or too long in total."""

    code = "deadline"
    exit_code = EXIT_DEADLINE


def _subclasses(cls: type[SparkError]) -> list[type[SparkError]]:
    return [cls, *(s for child in cls.__subclasses__() for s in _subclasses(child))]


def from_code(code: str, message: str, hint: str = "") -> SparkError:
    """Rebuild the error that a daemon reported as `code`; an unknown code gives a SparkError."""
    for cls in _subclasses(SparkError):
        if cls.code == code:
            return cls(message, hint=hint)
    error = SparkError(message, hint=hint)
    error.code = code
    return error
