"""How fast prompts were read so far, and so how long the next one will take."""

from __future__ import annotations

LEAST_TOKENS = 256  # of what is measured: a shorter prompt says how long a step takes, not how fast long ones are read
_KEPT = 0.9  # of what was measured before, with each prompt: what a server does changes


class Pace:
    """Tokens and seconds of the prompts that were computed last."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def take(self, tokens: int, reused: int, seconds: float) -> None:
        """Note a prompt: tokens that were computed and reused, and from its beginning to its last token.

        To bring back what is reused takes time of its own, so one that mostly reuses says little.
        """
        if tokens >= max(LEAST_TOKENS, reused) and seconds > 0:
            self._tokens = _KEPT * self._tokens + tokens
            self._seconds = _KEPT * self._seconds + seconds

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second; None: nothing was measured."""
        return self._tokens / self._seconds if self._tokens else None

    def expected_s(self, tokens: int) -> float | None:
        """How long it takes to read so many; None: nothing was measured."""
        rate = self.tokens_per_s
        return None if rate is None else tokens / rate
