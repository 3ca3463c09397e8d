"""What an answer's tokens must be: the hold of a grammar on the sampler.

The engine asks for a mask before each token and tells which one came. It knows neither grammars nor
the libraries that compile them, and a request without a constraint pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ragcache.errors import ConstraintFailed

_NONE_ALLOWED = torch.zeros(0, dtype=torch.int32, device="cpu")


class Constraint(Protocol):
    """The state of one answer under a constraint. Only the engine's thread uses it."""

    def mask(self) -> Tensor | None:
        """The tokens that may come next: on the CPU either packed, int32 [ceil(V / 32)] with token
        t at bit t % 32 of word t // 32, or bool [V]; None where all may. Tokens beyond its end may
        not. A stop token may come only where the answer may end. It is read before
        this constraint is called again, so that one buffer may serve for every mask."""
        ...

    def accept(self, token: int) -> None:
        """Takes the token that was chosen; never a stop token."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the answer is complete and nothing but an end may follow."""
        ...


MakeConstraint = Callable[[], Constraint]
"""Makes the constraint of one answer in its first state."""


class Guarded:
    """A constraint whose errors fail its own request.

    failure: what went wrong; from then on it allows nothing. The state lives as long as the answer,
    so that one that is pre-empted goes on where it was.
    """

    def __init__(self, make: MakeConstraint) -> None:
        self.failure: ConstraintFailed | None = None
        self._constraint: Constraint | None = None
        try:
            self._constraint = make()
        except Exception as error:
            self._fail("making it", error)

    def mask(self) -> Tensor | None:
        """See `Constraint.mask`."""
        if self._constraint is None:
            return _NONE_ALLOWED
        try:
            return self._constraint.mask()
        except Exception as error:
            self._fail("asking which tokens may follow", error)
            return _NONE_ALLOWED

    def accept(self, token: int) -> bool:
        """Takes a token. Returns whether the answer is complete."""
        if self._constraint is None:
            return False
        try:
            self._constraint.accept(token)
            return self._constraint.finished
        except Exception as error:
            self._fail(f"taking token {token}", error)
            return False

    def _fail(self, doing: str, error: Exception) -> None:
        self._constraint = None
        self.failure = ConstraintFailed(f"the request's constraint failed in {doing}: {error!r}")
        self.failure.__cause__ = error


def forbid(logits: Tensor, masks: Sequence[Tensor | None]) -> None:
    """Sets what the masks do not allow to minus infinity. logits: [R, V], overwritten."""
    held = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
    if not held:
        return
    allowed = torch.zeros((len(held), logits.shape[-1]), dtype=torch.bool, device="cpu")
    for place, (_, mask) in enumerate(held):
        bits = mask if mask.dtype == torch.bool else unpack(mask)
        width = min(len(bits), allowed.shape[-1])
        allowed[place, :width] = bits[:width]
    rows = torch.tensor([row for row, _ in held], device=logits.device)
    logits[rows] = logits[rows].masked_fill(~allowed.to(logits.device), -torch.inf)


def unpack(mask: Tensor) -> Tensor:
    """A packed mask, int32 [W], as bool [32 * W]."""
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    return ((mask[:, None] >> shifts) & 1).bool().flatten()  # [W, 32]
