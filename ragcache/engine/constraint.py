"""Constraints on the tokens of an answer: the seam between a grammar and the sampler.

The engine reads a mask before each token and passes on the token that came. It knows neither
grammars nor the libraries that compile them, and a request without a constraint costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from ragcache.errors import ConstraintFailed

T = TypeVar("T")
# What is added to the logits of eight tokens, for every byte of a mask: [256, 8].
_OF_BYTE = torch.tensor(
    [[0.0 if byte >> bit & 1 else -torch.inf for bit in range(8)] for byte in range(256)],
    device="cpu",
)
_NONE_ALLOWED = torch.zeros(0, dtype=torch.int32, device="cpu")


class Constraint(Protocol):
    """The state of one answer under a constraint. Only the engine's thread uses it."""

    def mask(self) -> Tensor | None:
        """The tokens that may come next: on the CPU either packed, int32 [ceil(V / 32)] with token
        t at bit t % 32 of word t // 32, or bool [V]; None where all may. Tokens beyond its end may
        not. A stop token may come only where the answer may end. It is read before
        this constraint is called again, so that one buffer may serve for every mask."""

    def accept(self, token: int) -> None:
        """Takes the token that was chosen; never a stop token."""

    @property
    def finished(self) -> bool:
        """Whether the answer is complete and nothing but an end may follow."""


MakeConstraint = Callable[[], Constraint]
"""Makes the constraint of one answer, in its initial state."""


class GuardedConstraint:
    """A constraint whose errors fail its own request.

    failure: what went wrong; from then on no token is allowed. The state lives as long as the
    answer, so that a preempted one continues where it was.
    """

    def __init__(self, make: MakeConstraint) -> None:
        self.failure: ConstraintFailed | None = None
        self._constraint = self._tried("making it", make, None)

    def mask(self) -> Tensor | None:
        """See `Constraint.mask`."""
        if self._constraint is None:
            return _NONE_ALLOWED
        none: Tensor | None = _NONE_ALLOWED
        return self._tried("asking which tokens may follow", self._constraint.mask, none)

    def accept(self, token: int) -> bool:
        """Takes a token. Returns whether the answer is complete."""
        if self._constraint is None:
            return False
        return self._tried(f"taking token {token}", partial(_taken, self._constraint, token), False)

    def _tried(self, doing: str, ask: Callable[[], T], otherwise: T) -> T:
        try:
            return ask()
        except Exception as error:  # foreign code, whose errors end only its own request
            failure = ConstraintFailed(f"the request's constraint failed in {doing}: {error!r}")
            failure.__cause__ = error
            self._constraint, self.failure = None, failure
            return otherwise


def _taken(constraint: Constraint, token: int) -> bool:
    constraint.accept(token)
    return constraint.finished


def forbid(logits: Tensor, masks: Sequence[Tensor | None]) -> None:
    """Sets what the masks do not allow to minus infinity. logits: float32 [R, V], overwritten."""
    alike: dict[tuple[torch.dtype, int], list[int]] = {}
    for row, mask in enumerate(masks):
        if mask is not None:
            alike.setdefault((mask.dtype, len(mask)), []).append(row)
    for (dtype, _), rows in alike.items():
        stacked = torch.stack([mask for row in rows if (mask := masks[row]) is not None])
        stacked = stacked.to(logits.device)  # packed, a thirty-second of what follows
        added = penalties(stacked if dtype == torch.int32 else pack(stacked))
        width = min(added.shape[-1], logits.shape[-1])
        for row, penalty in zip(rows, added, strict=True):
            logits[row, :width] += penalty[:width]
            logits[row, width:] = -torch.inf


def penalties(packed: Tensor) -> Tensor:
    """What is added to the logits of each token: 0 where it is allowed, else minus infinity.

    packed: int32 [R, W]; the result is float32 [R, 32 * W]. One look-up for eight tokens.
    """
    eights = packed.view(torch.uint8).int()  # [R, 4 * W], the lowest byte first
    return embedding(eights, _OF_BYTE.to(packed.device)).flatten(1)


def pack(allowed: Tensor) -> Tensor:
    """bool [R, V] as packed masks, int32 [R, ceil(V / 32)]."""
    words = pad(allowed, (0, -allowed.shape[-1] % 32)).view(len(allowed), -1, 4, 8)
    weights = torch.tensor([1 << bit for bit in range(8)], device=allowed.device)
    eights: Tensor = (words * weights).sum(-1).to(torch.uint8)  # [R, W, 4]
    return eights.view(torch.int32).flatten(1)
