"""How fast prompts were read so far, and so how long the next one will take."""

from __future__ import annotations

LEAST_TOKENS = 256  # of what is measured: a shorter prompt says how long a step takes, not how fast long ones are read


class Pace:
    """Tokens and seconds of all prompts that were computed since the server started."""

    def __init__(self) -> None:
        self._tokens = 0
        self._seconds = 0.0

    def take(self, tokens: int, seconds: float) -> None:
        """Note a prompt: tokens that were computed, and from its beginning to its last token."""
        if tokens >= LEAST_TOKENS and seconds > 0:
            self._tokens += tokens
            self._seconds += seconds

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second; None: nothing was measured."""
        return self._tokens / self._seconds if self._tokens else None

    def expected_s(self, tokens: int) -> float | None:
        """How long it takes to read so many; None: nothing was measured."""
        rate = self.tokens_per_s
        return None if rate is None else tokens / rate
