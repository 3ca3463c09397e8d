"""Position schemes: how a segment moves from where it was encoded to where a prompt wants it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ragcache.attention.rotary import Rotation
from ragcache.errors import UnsupportedModel

# The scalings whose frequencies are fixed once the model is loaded. Under the others (dynamic
# NTK, LongRoPE past its switch) a key's rotation depends on the length of the whole sequence.
FIXED_SCALINGS = frozenset({"default", "linear", "llama3", "yarn"})


class PositionScheme(Protocol):
    """What differs between ways of telling a model where its tokens stand."""

    @property
    def name(self) -> str:
        """Names everything that moved states depend on; part of every state key."""
        ...

    @property
    def slopes(self) -> Tensor | None:
        """[Hq] float32: the bias a position of distance adds (ALiBi), None for other schemes."""
        ...

    def relocation(self, delta: Tensor) -> Rotation | None:
        """How queries turn towards a segment that was moved by `delta` ([T or 1] positions)."""
        ...


def fixed_scaling(parameters: Mapping[str, Any]) -> str:
    """The scaling of rotary parameters. Raises `UnsupportedModel` where it is not fixed."""
    scaling = str(parameters.get("rope_type", "default"))
    if scaling not in FIXED_SCALINGS:
        raise UnsupportedModel(
            f"rotary scaling {scaling!r} changes with the length of the prompt, so cached "
            f"states cannot move; served scalings: {', '.join(sorted(FIXED_SCALINGS))}"
        )
    return scaling


class Rotary:
    """Rotary positions with fixed frequencies: the query turns by -delta."""

    def __init__(self, inverse_frequency: Tensor, scaling: str) -> None:
        self.inverse_frequency = inverse_frequency
        self._name = f"rotary:{scaling}:{inverse_frequency.numel()}"

    @classmethod
    def of(cls, config: Any, rotary_embedding: nn.Module) -> Rotary:
        """The scheme of a loaded model, from its configuration and rotary module."""
        parameters = getattr(config, "rope_parameters", None) or {}
        scaling = fixed_scaling(parameters)
        inverse_frequency = rotary_embedding.inv_freq
        assert isinstance(inverse_frequency, Tensor)
        return cls(inverse_frequency.detach().to(torch.float32), scaling)

    @property
    def name(self) -> str:
        return self._name

    @property
    def slopes(self) -> None:
        return None

    def relocation(self, delta: Tensor) -> Rotation:
        return Rotation.by(-delta, self.inverse_frequency)
