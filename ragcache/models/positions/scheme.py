"""What differs between ways of telling a model where its tokens stand."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ragcache.attention.rotary import Rotation


class PositionScheme(Protocol):
    """How a segment moves from where it was encoded to where a prompt wants it."""

    @property
    def name(self) -> str:
        """Names everything that moved states depend on; part of every state key."""
        ...

    @property
    def movable(self) -> bool:
        """Whether states may stand elsewhere than where they were encoded."""
        ...

    @property
    def slopes(self) -> Tensor | None:
        """[Hq] float32: the bias a position of distance adds (ALiBi), None for other schemes."""
        ...

    def relocation(self, delta: Tensor) -> Rotation | None:
        """How queries turn towards a segment that was moved by `delta` ([T or 1] positions), None
        where they need not turn. A scheme that is not movable takes deltas of zero only."""
        ...
