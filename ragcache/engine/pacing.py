"""Number of tokens that a step computes beside answers, so that gaps between tokens are bounded."""

from __future__ import annotations

from typing import Final

LEAST_TOKENS: Final = 16
"""Tokens that a step computes beside answers in any case, so that prompts and encodings end."""

MARGIN: Final = 0.9
"""Share of the bound that steps aim at, since they vary."""

MEMORY: Final = 0.9
"""Weight of a step, relative to the step after it."""

CONTRAST: Final = 16.0
"""Rows by which steps must differ before their seconds tell what a row takes."""

FLATTEST: Final = 0.01
"""Least share of a step's mean time of a row that a further row takes."""


class StepPace:
    """Fits the seconds of steps to their rows, for the number of rows that prompts and encodings
    may have.

    The seconds of a step are a fixed part, such as reading the weights, and a part for each row.
    Both are fitted by least squares to the last few steps, in which newer ones weigh more. While
    the steps have had about equal numbers of rows, all of their time counts as time of rows. The
    rows of prompts and encodings then start low and grow.

    Args:
        most_seconds: Longest gap between two tokens of an answer.

    Example:
        >>> pace = StepPace(0.050)
        >>> for _ in range(20):
        ...     for rows in (40, 240):
        ...         pace.observe(rows, 0.009 + 0.0001 * rows)
        >>> pace.tokens_beside(40)  # of about 360 rows, which 0.045 s have room for
        316
    """

    def __init__(self, most_seconds: float) -> None:
        self.most_seconds = most_seconds
        self._weight = self._rows = self._seconds = 0.0  # weighted mean values
        self._variance = self._covariance = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Take the time of a step into account.

        Args:
            rows: Rows of the step.
            seconds: Seconds from the tokens of the step before to its own.
        """
        self._weight = MEMORY * self._weight + 1
        share = 1 / self._weight
        apart, slower = rows - self._rows, seconds - self._seconds
        self._rows += share * apart
        self._seconds += share * slower
        self._variance += share * (apart * (rows - self._rows) - self._variance)
        self._covariance += share * (apart * (seconds - self._seconds) - self._covariance)

    def tokens_beside(self, rows: int) -> int:
        """Return how many tokens a step may compute beside the rows that it has anyway."""
        if not self._seconds:
            return LEAST_TOKENS
        known, whole = self._variance, self._seconds / self._rows
        per_row = (self._covariance + CONTRAST**2 * whole) / (known + CONTRAST**2)
        per_row = max(per_row, FLATTEST * whole)
        left = MARGIN * self.most_seconds - self._seconds
        return max(LEAST_TOKENS, int(self._rows + left / per_row) - rows)
