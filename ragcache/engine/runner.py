"""How a batch of works reaches the model: one ragged pass, or one contiguous buffer a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ragcache.engine.batch import StepBuilder
from ragcache.engine.layout import Work
from ragcache.engine.pool import ChunkPool
from ragcache.engine.private import PrivateStates
from ragcache.models import CausalLM, LanguageModel


class Runner(Protocol):
    """Computes works."""

    @property
    def model(self) -> LanguageModel: ...

    @property
    def shares(self) -> bool:
        """Whether requests can use each other's private states, chunk by chunk."""
        ...

    @property
    def window(self) -> int:
        """The most positions of prompt and answer."""
        ...

    def pool(self, nbytes: int) -> ChunkPool:
        """Room for requests' own states."""
        ...

    def prepare(self, works: Sequence[Work]) -> Callable[[], Tensor]:
        """Plans a step; the result computes it and returns the logits of the last row of each work
        that wants them, [R, vocabulary]."""
        ...

    def release(self, private: PrivateStates) -> None:
        """A request gave its states back."""
        ...

    def idle(self) -> None:
        """Nothing runs: what was kept for the next step goes."""
        ...


class Ragged:
    """All works in one pass (the segment design)."""

    shares = True

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.builder = StepBuilder(model)

    @property
    def window(self) -> int:
        return self.model.window

    def pool(self, nbytes: int) -> ChunkPool:
        return ChunkPool.create(self.model, nbytes)

    def prepare(self, works: Sequence[Work]) -> Callable[[], Tensor]:
        step = self.builder.build(works)
        return lambda: self.model.forward(step)

    def release(self, private: PrivateStates) -> None:
        """Its chunks are the pool's; nothing else is kept."""

    def idle(self) -> None:
        self.builder.forget()
