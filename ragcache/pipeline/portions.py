"""Portions of modules that are leased together while they are encoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

PORTION = 8  # modules leased at once: bounds what the host tier must hold


def portions(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """The items in order, at most `PORTION` at a time."""
    for start in range(0, len(items), PORTION):
        yield items[start : start + PORTION]
