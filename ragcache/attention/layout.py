"""Layers whose heads differ, in states of one shape.

Stored states are tensors [L, Hkv, S, D]: L planes of Hkv heads each. In most models a plane is a
layer. The layers of Gemma 4 differ in the number and size of their heads. Each layer then takes as
many planes as its heads fill, and a wide head is cut into parts of D elements. D and Hkv divide the
heads of all layers, so that nothing is padded. Tiers, blobs and budgets see the planes alone.

Keys turn for a new position with their query, which has whole heads. No plane has to turn alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """The key heads of one layer."""

    count: int
    """Number of heads."""
    size: int
    """Elements of a head."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The planes of each layer in states [L, Hkv, S, D].

    Example:
        >>> layout = StateLayout.of([LayerHeads(2, 256), LayerHeads(1, 512)])
        >>> layout.num_planes, layout.num_heads, layout.head_dim
        (2, 2, 256)
    """

    layers: tuple[LayerHeads, ...]
    num_heads: int
    """Heads of a plane (Hkv)."""
    head_dim: int
    """Elements of a head of a plane (D)."""
    ends: tuple[int, ...]
    """The plane behind the last one of each layer."""

    @classmethod
    def of(cls, layers: Sequence[LayerHeads]) -> StateLayout:
        """Return the layout with the largest planes that fit all layers."""
        size = gcd(*(each.size for each in layers))
        parts = [each.count * each.size // size for each in layers]
        heads = gcd(*parts)
        return cls(tuple(layers), heads, size, tuple(accumulate(n // heads for n in parts)))

    @property
    def num_planes(self) -> int:
        """Planes of all layers (L)."""
        return self.ends[-1]

    def planes(self, layer: int) -> range:
        """Return the planes of a layer."""
        return range(self.ends[layer - 1] if layer else 0, self.ends[layer])

    def split(self, states: Tensor) -> Tensor:
        """Return the states of a layer as planes.

        Args:
            states: Keys or values of the layer, [heads, S, size].

        Returns:
            [planes of the layer, Hkv, S, D].
        """
        heads, tokens, size = states.shape
        parts = states.view(heads, tokens, size // self.head_dim, self.head_dim).transpose(1, 2)
        return parts.reshape(-1, self.num_heads, tokens, self.head_dim)

    def of_layer(self, layer: int, states: Tensor) -> Tensor:
        """Return a layer of states [L, Hkv, S, D] with whole heads. See `join`."""
        here = self.planes(layer)
        return self.join(layer, states[here.start : here.stop])

    def join(self, layer: int, planes: Tensor) -> Tensor:
        """Return the planes of a layer with whole heads, the inverse of `split`.

        Args:
            layer: Number of the layer.
            planes: Keys or values, [planes of the layer, Hkv, S, D].

        Returns:
            [heads, S, size]. A view if no head is cut.
        """
        parts, whole = planes.flatten(0, 1), self.layers[layer]
        if whole.size == self.head_dim:
            return parts
        heads = parts.reshape(whole.count, -1, *parts.shape[1:])  # [heads, parts, S, D]
        return heads.transpose(1, 2).flatten(2)
