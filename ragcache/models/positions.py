"""Position schemes: rotary, ALiBi and absolute positions, and how a segment moves under each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ragcache.attention.ops import Rotation
from ragcache.errors import UnsupportedModel

# The scalings whose frequencies are fixed once the model is loaded. Those of dynamic NTK and
# LongRoPE are up to the length where they change, and that is then the window (`Dimensions.of`).
FIXED_SCALINGS = frozenset(
    {"default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn"}
)
NO_POSITIONS = "none"
LONG_FACTORS = {"short_factor": "long_factor", "short_mscale": "long_mscale"}
"""LongRoPE's factors for texts up to the original length, and for longer ones."""


class PositionScheme(Protocol):
    """How a segment moves from where it was encoded to where a prompt wants it."""

    @property
    def name(self) -> str:
        """Names everything that moved states depend on; part of every state key."""

    @property
    def movable(self) -> bool:
        """Whether states can be moved from where they were encoded."""

    @property
    def slopes(self) -> Tensor | None:
        """[Hq] float32: the bias that a position of distance adds (ALiBi). Not set for other
        schemes."""

    def relocation(self, delta: Tensor) -> Rotation | tuple[Rotation, ...] | None:
        """How queries turn toward a segment that was moved by `delta` ([T or 1] positions).

        One rotation, or one for each layer if layers differ; none if queries do not turn. A scheme
        that is not movable accepts deltas of zero only.
        """


class Rotary:
    """Keys turned by an angle for each position (RoFormer, Su et al., 2021); queries by -delta.

    The frequencies are fixed. inverse_frequency: [R/2] float32, radians a position; the first R
    dimensions of a head turn. interleaved: dimensions 2i and 2i+1 are paired (GPT-J, GLM, Cohere),
    not i and i + R/2. backward: keys turn by minus the angle (nanochat).

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
        backward: bool = False,
        layer_type: str | None = None,
    ) -> Rotary:
        """Read the scheme of a loaded model from its configuration and rotary module.

        `layer_type` selects the frequencies if layers differ. Raises `UnsupportedModel` if
        frequencies are not fixed.
        """
        scaling = rotary_scaling(config, layer_type)
        check_scaling(scaling)
        prefix = f"{layer_type}_" if hasattr(rotary_embedding, f"{layer_type}_inv_freq") else ""
        current = getattr(rotary_embedding, f"{prefix}inv_freq")
        # past their switch these overwrite the current frequencies in place
        kept = "original_inv_freq" if scaling in ("longrope", "dynamic") else "inv_freq"
        frequency = getattr(rotary_embedding, f"{prefix}{kept}")
        assert isinstance(frequency, Tensor)
        exact = frequency.detach().to(current.device, torch.float32, copy=True)
        return cls(-exact if backward else exact, scaling, interleaved=interleaved)

    def silent(self) -> Rotary:
        """Positions that turn nothing, for layers without positions."""
        return Rotary(torch.zeros_like(self.inverse_frequency), NO_POSITIONS)

    def relocation(self, delta: Tensor) -> Rotation:
        """See `PositionScheme.relocation`."""
        return Rotation.by(-delta, self.inverse_frequency, interleaved=self.interleaved)


class LayeredRotary:
    """Rotary positions whose frequencies may differ from layer to layer. layers: one a layer; those
    without positions have frequencies of zero."""

    movable = True
    slopes = None

    def __init__(self, layers: tuple[Rotary, ...]) -> None:
        self.layers = layers

    @property
    def name(self) -> str:
        return "+".join(dict.fromkeys(layer.name for layer in self.layers))

    def relocation(self, delta: Tensor) -> tuple[Rotation, ...]:
        """See `PositionScheme.relocation`."""
        turned = {layer: layer.relocation(delta) for layer in set(self.layers)}
        return tuple(turned[layer] for layer in self.layers)


class Alibi:
    """A bias of slope times distance, head by head (Press et al., 2022, §3).

    States carry no position. Moving a segment changes its distance alone, which the metadata holds
    (`ragcache.attention.ops`).

    slopes: [Hq] float32, added to a score for each position by which the key is further on: a
    geometric series for a power of two heads. For other numbers of heads BLOOM and Falcon take the
    series of the power below and fill up from the series of the power above; MPT takes the series
    of the power above, every second slope first.
    """

    movable = True
    name = "alibi"  # the slopes follow from the configuration, which the fingerprint holds

    def __init__(self, slopes: Tensor) -> None:
        assert slopes.dtype == torch.float32
        self.slopes = slopes

    def relocation(self, delta: Tensor) -> None:  # noqa: ARG002
        """No query turns: the metadata's distances move the segment."""
        return


class Absolute:
    """Positions that nothing moves from: a module is encoded at the position that the prompt needs.

    Learned positions (GPT-2, OPT) are mixed into everything that follows. A norm with a weight per
    channel after the rotation (HunYuan V1) makes scores depend on both positions instead of their
    distance: weights and rotation do not commute.

    name: What the positions are (`PositionScheme.name`).
    """

    movable = False
    slopes = None

    def __init__(self, name: str) -> None:
        self.name = name

    def relocation(self, delta: Tensor) -> None:
        """See `PositionScheme.relocation`; asserts that nothing was moved."""
        assert not bool(delta.any()), "states of absolute positions stay where they were encoded"


def rotary_scaling(config: Any, layer_type: str | None = None) -> str:
    """The name of the scaling, `default` where there is none. layer_type: of which layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return str(parameters.get(layer_type, parameters).get("rope_type", "default"))


def changes_at_length(parameters: Mapping[str, Any]) -> bool:
    """Whether LongRoPE has other factors for short texts than for long ones."""
    return any(
        parameters.get(short) != parameters.get(long) for short, long in LONG_FACTORS.items()
    )


def check_scaling(scaling: str) -> None:
    """Raises `UnsupportedModel` where frequencies change with the length of the prompt."""
    if scaling not in FIXED_SCALINGS:
        raise UnsupportedModel(
            f"rotary scaling {scaling!r} may change with the length of the prompt, so that cached "
            f"states could not move; served scalings: {', '.join(sorted(FIXED_SCALINGS))}"
        )


def geometric_slopes(num_heads: int) -> Tensor:
    """[Hq] float32, as BLOOM and Falcon have them, to the bit."""
    below = 2 ** math.floor(math.log2(num_heads))
    between = _powers(2 * below, torch.arange(1, 2 * (num_heads - below) + 1, 2))
    return torch.cat([_powers(below, torch.arange(1, below + 1)), between])


def interleaved_slopes(num_heads: int, bias_max: float) -> Tensor:
    """[Hq] float32, as MPT has them, to the bit. bias_max: the last slope's negative exponent."""
    above = 2 ** math.ceil(math.log2(num_heads))
    exponents = torch.arange(1, above + 1, dtype=torch.float32) * (bias_max / above)
    slopes = 1.0 / torch.pow(2, exponents)
    if above == num_heads:
        return slopes
    return torch.cat([slopes[1::2], slopes[::2]])[:num_heads]


def _powers(count: int, exponents: Tensor) -> Tensor:
    """The slopes of a series for `count` heads, a power of two, at exponents 1 and above. The base
    is rounded to float32 before it is raised, as in the models' own code."""
    base = torch.tensor(2.0 ** -(8.0 / count), dtype=torch.float32)
    return torch.pow(base, exponents.to(torch.int32))
