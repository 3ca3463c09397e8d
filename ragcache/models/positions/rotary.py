"""Rotary positions: keys are turned by an angle for each position (RoFormer, Su et al., 2021)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ragcache.attention.rotary import Rotation
from ragcache.errors import UnsupportedModel

# The scalings whose frequencies are fixed once the model is loaded. Under the others (dynamic
# NTK, LongRoPE past its switch) a key's rotation depends on the length of the whole sequence.
FIXED_SCALINGS = frozenset({"default", "linear", "llama3", "yarn"})


class Rotary:
    """Fixed frequencies: the query turns by -delta.

    inverse_frequency: [R/2] float32, radians a position; the first R dimensions of a head turn.
    interleaved: dimensions 2i and 2i+1 are paired (GPT-J, GLM, Cohere), not i and i + R/2.

    A factor on cos and sin (yarn's attention factor) is no part of this: keys and queries carry it
    since the model made them, and moving only turns.
    """

    movable = True
    slopes = None

    def __init__(
        self, inverse_frequency: Tensor, scaling: str = "default", *, interleaved: bool = False
    ) -> None:
        self.inverse_frequency = inverse_frequency
        self.interleaved = interleaved
        pairs = ":interleaved" if interleaved else ""
        self.name = f"rotary:{scaling}:{inverse_frequency.numel()}{pairs}"

    @classmethod
    def of(cls, config: Any, rotary_embedding: nn.Module, *, interleaved: bool = False) -> Rotary:
        """The scheme of a loaded model, from its configuration and rotary module.

        Raises `UnsupportedModel` where the frequencies are not fixed.
        """
        scaling = rotary_scaling(config)
        check_scaling(scaling)
        inverse_frequency = rotary_embedding.inv_freq
        assert isinstance(inverse_frequency, Tensor)
        exact = inverse_frequency.detach().to(torch.float32)
        return cls(exact, scaling, interleaved=interleaved)

    def relocation(self, delta: Tensor) -> Rotation:
        """See `PositionScheme.relocation`."""
        return Rotation.by(-delta, self.inverse_frequency, interleaved=self.interleaved)


def rotary_scaling(config: Any) -> str:
    """The name of the scaling, `default` where there is none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return str(parameters.get("rope_type", "default"))


def check_scaling(scaling: str) -> None:
    """Raises `UnsupportedModel` where frequencies change with the length of the prompt."""
    if scaling not in FIXED_SCALINGS:
        raise UnsupportedModel(
            f"rotary scaling {scaling!r} changes with the length of the prompt, so cached "
            f"states cannot move; served scalings: {', '.join(sorted(FIXED_SCALINGS))}"
        )
