"""Learned absolute positions (GPT-2, OPT): a vector for each position, added to the token's.

It is mixed into all that follows, so states belong to the position where they were encoded.
"""

from __future__ import annotations

from torch import Tensor


class Learned:
    """Nothing moves: a module is encoded at the schema position that the prompt needs."""

    movable = False
    slopes = None
    name = "learned"

    def relocation(self, delta: Tensor) -> None:
        """See `PositionScheme.relocation`; asserts that nothing was moved."""
        assert not bool(delta.any()), "states of learned positions stand where they were encoded"
