"""The rows of a step as recurrent layers read them: one run for each text that they continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ragcache.states.recurrent import LayerMap, RecurrentSnapshot, RecurrentStates


@dataclass(frozen=True, slots=True, eq=False)
class RecordedMaps:
    """The map of a text that is encoded, for each recurrent layer, by the layer's number."""

    before: dict[int, LayerMap] = field(default_factory=dict)
    """Map of the text before the rows. Empty at its beginning."""
    after: dict[int, LayerMap] = field(default_factory=dict)
    """Map of the text up to the end of the rows, which the step fills."""


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentRun:
    """Rows begin:end of a step, which continue one text."""

    begin: int
    end: int
    before: RecurrentSnapshot | None
    """States before the documents and the rows. None begins a text."""
    after: RecurrentSnapshot
    """States behind the rows, which the step fills."""
    documents: tuple[RecurrentStates, ...] = ()
    """Maps of the documents right before the rows, in order, which are not in `before`."""
    both: bool = False
    """Whether the state behind the documents is the mean over their order and its reverse."""
    maps: RecordedMaps | None = None
    """Maps of the text, if it is encoded."""
    composed: RecurrentSnapshot | None = None
    """States behind the documents, which the step fills, if they are to be kept."""

    @property
    def is_step(self) -> bool:
        """Whether the run is one token that continues a state, and nothing else."""
        plain = self.before is not None and not self.documents and self.maps is None
        return plain and self.end - self.begin == 1


@dataclass(frozen=True, eq=False)
class RecurrentBatch:
    """The runs of a step. A run may continue the run before it."""

    runs: Sequence[RecurrentRun]
    """Runs of all rows, in order."""
    device: torch.device
    """Device of the model."""

    @cached_property
    def steps(self) -> list[RecurrentRun]:
        """Runs of one token whose states are known before the step: one call computes them."""
        made = {id(run.after) for run in self.runs}
        return [run for run in self.runs if run.is_step and id(run.before) not in made]

    @cached_property
    def texts(self) -> list[RecurrentRun]:
        """All other runs, in order."""
        steps = {id(run) for run in self.steps}
        return [run for run in self.runs if id(run) not in steps]

    @cached_property
    def step_rows(self) -> Tensor:
        """Rows of `steps`, [n] int64."""
        return torch.tensor([run.begin for run in self.steps], device=self.device)

    @cached_property
    def row_order(self) -> Tensor | None:
        """Place of each row behind the steps and the texts, [T] int64. None if rows keep theirs."""
        order = [row for run in (*self.steps, *self.texts) for row in range(run.begin, run.end)]
        if order == sorted(order):
            return None
        return torch.tensor(order, device=self.device).argsort()
