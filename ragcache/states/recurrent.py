"""States of recurrent layers: linear attention, state spaces and short convolutions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Self

import torch
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
    slot: object = None
    """Slot that has the states on a GPU, in place of `layers` (`SlotPool`)."""

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(each.nbytes for layer in self.layers.values() for each in layer.tensors())

    def compact(self) -> RecurrentSnapshot:
        """Return the snapshot in memory of its own.

        Requests that decode together have states that are rows of one tensor, and a row keeps the
        whole tensor alive.
        """

        if self.slot is not None:
            return self

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


@dataclass(frozen=True, slots=True, eq=False)
class LayerMap:
    """Map of a text: its effect on the state of one recurrent layer, whatever the state is.

    The layer's convolution sees the inputs before the text, so the first tokens are kept as inputs.
    The state behind them, S, becomes `transition` S + `increment` behind the text.
    """

    transition: Tensor
    """[H, dk, dk], or [H, 1, 1] of a state space. Empty for layers that are a convolution alone."""
    increment: Tensor
    """[H, dk, dv]. Empty for layers that are a convolution alone."""
    decays: Tensor
    """Decays of the first tokens, [H, f, 1], or [H, f, dk] with one for each channel."""
    steps: Tensor
    """Sizes of the steps of the first tokens, [H, f, 1]."""
    first: Tensor
    """Inputs of the convolution at the first tokens, [1, channels, f]."""
    last: Tensor
    """Inputs of the convolution at the last tokens, [1, channels, at most kernel]."""

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of the fields."""
        return tuple(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True, eq=False)
class RecurrentStates:
    """Effect of a text on the states of all recurrent layers: a `LayerMap` for each.

    The fields are the fields of `LayerMap` with the R recurrent layers as the first axis.
    """

    transition: Tensor
    """[R, H, dk, dk], or [R, H, 1, 1]."""
    increment: Tensor
    """[R, H, dk, dv]."""
    decays: Tensor
    """[R, H, f, 1 or dk], float32."""
    steps: Tensor
    """[R, H, f, 1], float32."""
    first: Tensor
    """[R, 1, channels, f]."""
    last: Tensor
    """[R, 1, channels, at most kernel]."""

    @classmethod
    def of(cls, layers: Sequence[LayerMap], dtype: torch.dtype) -> Self:
        """Join the maps of all recurrent layers, in order. See `to`."""
        columns = zip(*(each.tensors() for each in layers), strict=True)
        return cls(*map(torch.stack, columns)).to(dtype)

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None) -> Self:
        """Return all in a dtype, except for decays and steps, and on a device."""
        exact = ("decays", "steps")
        return type(self)(
            **{
                name: each.to(device, None if name in exact else dtype)
                for name, each in self.tensors().items()
            }
        )

    @property
    def num_layers(self) -> int:
        """Number of recurrent layers (R)."""
        return int(self.last.shape[0])

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(each.nbytes for each in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {name: getattr(self, name) for name in RECURRENT_NAMES}

    @cached_property
    def forgets(self) -> Tensor:
        """Whether each head forgets the state before the text, [R, H] bool on the CPU.

        A head forgets if the Frobenius norm of its transition M is at most u, the rounding of a
        number in the dtype of the maps. The state S before the text then changes the state behind
        it by |M S| <= u |S|, and compositions leave M S out. On a GPU, no head counts as one that
        forgets, since the answer would have to be waited for.
        """
        if self.transition.device.type != "cpu":
            return torch.zeros(self.transition.shape[:2], dtype=torch.bool)
        rounding = torch.finfo(self.transition.dtype).eps / 2
        norms: Tensor = torch.linalg.matrix_norm(self.transition.float())
        return norms <= rounding

    def part(self, layers: slice) -> RecurrentStates:
        """Return the maps of some recurrent layers."""
        return RecurrentStates(*(each[layers] for each in self.tensors().values()))

    def fits(self, shapes: RecurrentStates) -> bool:
        """Whether the tensors have the shapes of others, which are a long text's. The maps of a
        short text have fewer tokens."""
        for name, wanted in shapes.tensors().items():
            given, most = list(getattr(self, name).shape), list(wanted.shape)
            axis = _TOKEN_AXES.get(name)
            if axis is not None and len(given) == len(most):
                most[axis] = min(most[axis], given[axis])
            if given != most:
                return False
        beside = [each for each in (self.decays, self.steps) if each.shape[1]]
        return all(each.shape[2] == self.first.shape[3] for each in beside)


_TOKEN_AXES = {"decays": 2, "steps": 2, "first": 3, "last": 3}
RECURRENT_NAMES = tuple(each.name for each in fields(LayerMap))
"""Names of the tensors of `RecurrentStates`."""
