"""Rotary positions: keys are turned by an angle for each position (RoFormer, Su et al., 2021)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ragcache.attention.rotary import Rotation
from ragcache.errors import UnsupportedModel

# The scalings whose frequencies are fixed once the model is loaded. LongRoPE's are up to the length
# where they switch, and that is then the window (`Dimensions.of`). Under dynamic NTK a key's
# rotation depends on the length of the whole sequence.
FIXED_SCALINGS = frozenset({"default", "linear", "llama3", "longrope", "yarn"})


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
    def of(
        cls,
        config: Any,
        rotary_embedding: nn.Module,
        *,
        interleaved: bool = False,
        layer_type: str | None = None,
    ) -> Rotary:
        """The scheme of a loaded model, from its configuration and rotary module.

        layer_type: whose frequencies, where those of the layers differ. Raises `UnsupportedModel`
        where the frequencies are not fixed.
        """
        scaling = rotary_scaling(config, layer_type)
        check_scaling(scaling)
        prefix = f"{layer_type}_" if hasattr(rotary_embedding, f"{layer_type}_inv_freq") else ""
        current = getattr(rotary_embedding, f"{prefix}inv_freq")
        # past its switch LongRoPE overwrites the current frequencies in place
        kept = "original_inv_freq" if scaling == "longrope" else "inv_freq"
        frequency = getattr(rotary_embedding, f"{prefix}{kept}")
        assert isinstance(frequency, Tensor)
        exact = frequency.detach().to(current.device, torch.float32, copy=True)
        return cls(exact, scaling, interleaved=interleaved)

    def relocation(self, delta: Tensor) -> Rotation:
        """See `PositionScheme.relocation`."""
        return Rotation.by(-delta, self.inverse_frequency, interleaved=self.interleaved)


def rotary_scaling(config: Any, layer_type: str | None = None) -> str:
    """The name of the scaling, `default` where there is none. layer_type: of which layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return str(parameters.get(layer_type, parameters).get("rope_type", "default"))


def check_scaling(scaling: str) -> None:
    """Raises `UnsupportedModel` where frequencies change with the length of the prompt."""
    if scaling not in FIXED_SCALINGS:
        raise UnsupportedModel(
            f"rotary scaling {scaling!r} changes with the length of the prompt, so cached "
            f"states cannot move; served scalings: {', '.join(sorted(FIXED_SCALINGS))}"
        )
