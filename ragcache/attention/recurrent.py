"""The rows of a step as recurrent layers read them: one run for each text that they continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ragcache.states.recurrent import RecurrentSnapshot


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentRun:
    """Rows begin:end of a step, which continue one text."""

    begin: int
    end: int
    before: RecurrentSnapshot | None
    """States before the rows. None begins a text."""
    after: RecurrentSnapshot
    """States behind the rows, which the step fills."""


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
        return [
            run
            for run in self.runs
            if run.end - run.begin == 1 and run.before is not None and id(run.before) not in made
        ]

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
