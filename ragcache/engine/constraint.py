"""Constraints on the tokens of an answer: the seam between a grammar and the sampler.

The engine reads a mask before each token and passes on the token that came. It knows neither
grammars nor the libraries that compile them, and a request without a constraint costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ragcache.errors import ConstraintFailed

PROCESS_ENDS = (KeyboardInterrupt, SystemExit)
"""Errors of foreign code that do not stay with their request: they end the engine's thread."""

T = TypeVar("T")
_NONE_ALLOWED = torch.zeros(0, dtype=torch.int32, device="cpu")


class Constraint(Protocol):
    """The state of one answer under a constraint. Only the engine's thread uses it."""

    def mask(self) -> Tensor:
        """The tokens that may come next.

        Returns:
            Packed bits on the CPU, int32 [ceil(V / 32)]: token t is bit t % 32 of word t // 32.
            Tokens beyond the end are not allowed. A stop token is allowed only where the answer
            may end. The engine reads the mask before it calls the constraint again, so that one
            buffer may hold every mask.
        """

    def accept(self, token: int) -> None:
        """Takes the token that was chosen. It is never a stop token."""

    @property
    def finished(self) -> bool:
        """Whether the answer is complete and nothing but an end may follow."""


MakeConstraint = Callable[[], Constraint]
"""Makes the constraint of one answer, in its initial state."""


class GuardedConstraint:
    """A constraint whose errors fail its own request.

    It lives as long as the answer, so that a preempted answer continues where it was.
    """

    def __init__(self, make: MakeConstraint) -> None:
        self.failure: ConstraintFailed | None = None
        """The error of the constraint. No token is allowed after it."""
        self._constraint = self._tried("making it", make, None)

    def mask(self) -> Tensor:
        """See `Constraint.mask`."""
        if self._constraint is None:
            return _NONE_ALLOWED
        return self._tried("asking which tokens may follow", self._constraint.mask, _NONE_ALLOWED)

    def accept(self, token: int) -> bool:
        """Takes a token. Returns whether the answer is complete."""
        if self._constraint is None:
            return False
        return self._tried(f"taking token {token}", partial(_taken, self._constraint, token), False)

    def _tried(self, doing: str, ask: Callable[[], T], otherwise: T) -> T:
        try:
            return ask()
        except PROCESS_ENDS:
            raise
        except BaseException as error:  # foreign code, panics of Rust included: ends its request
            failure = ConstraintFailed(f"the request's constraint failed in {doing}: {error!r}")
            failure.__cause__ = error
            self._constraint, self.failure = None, failure
            return otherwise


def _taken(constraint: Constraint, token: int) -> bool:
    constraint.accept(token)
    return constraint.finished


def bits_of(word: int) -> list[int]:
    """Return the positions of the bits that are set in a word of a mask."""
    return [bit for bit in range(32) if word >> bit & 1]


def penalty_table(device: torch.device) -> Tensor:
    """The bias of the logits of eight tokens, for every byte of a mask, [256, 8]: 0 where a
    token is allowed, else minus infinity."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return torch.where(bits == 1, 0.0, -torch.inf)


def penalties(packed: Tensor, table: Tensor) -> Tensor:
    """The bias of the logits of each token, float32 [R, 32 * W]. packed: int32 [R, W]. One
    look-up for eight tokens in the table of the device."""
    eights = packed.view(torch.uint8).int()  # [R, 4 * W], the lowest byte first
    return embedding(eights, table).flatten(1)
