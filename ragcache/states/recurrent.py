"""States of recurrent layers: linear attention, state spaces and short convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False)
class LayerState:
    """The state of one recurrent layer behind a text. A layer may have several of each kind."""

    convolution: dict[int, Tensor] = field(default_factory=dict)
    """Last inputs of each convolution, [1, channels, kernel]."""
    recurrent: dict[int, Tensor] = field(default_factory=dict)
    """Each recurrent state, [1, H, ...]. Empty for layers that are a convolution alone."""

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the layer."""
        yield from self.convolution.values()
        yield from self.recurrent.values()


@dataclass(slots=True, eq=False)
class RecurrentSnapshot:
    """The states of all recurrent layers behind a text.

    A step of the engine fills a new snapshot and changes no older one. Requests therefore share
    snapshots, and a request goes back to an earlier one, without a copy.
    """

    layers: dict[int, LayerState] = field(default_factory=dict)
    """State of each recurrent layer, by the number of the layer in the model."""

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(each.nbytes for layer in self.layers.values() for each in layer.tensors())

    def compact(self) -> RecurrentSnapshot:
        """Return the snapshot in memory of its own.

        Requests that decode together have states that are rows of one tensor, and a row keeps the
        whole tensor alive.
        """

        def own(states: dict[int, Tensor]) -> dict[int, Tensor]:
            return {
                index: each.clone() if each.untyped_storage().nbytes() > each.nbytes else each
                for index, each in states.items()
            }

        return RecurrentSnapshot(
            {
                number: LayerState(own(layer.convolution), own(layer.recurrent))
                for number, layer in self.layers.items()
            }
        )
