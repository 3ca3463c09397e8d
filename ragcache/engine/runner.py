"""How a batch of works reaches the model: one ragged pass, or one contiguous buffer a request."""

# MERGED ragcache.engine.contiguous: The runner of models that read one buffer: each request's
#   works on its own, one after another.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ragcache.engine.batch import ScheduledChunk, StepBuilder
from ragcache.engine.kv_cache import BlockPool, BlockTable, ContiguousKV, RequestKV
from ragcache.models import Buffer, BufferPool, CausalLM, ContiguousLM, LanguageModel


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

    def pool(self, nbytes: int) -> BlockPool:
        """Room for requests' own states."""
        ...

    def prepare(self, works: Sequence[ScheduledChunk]) -> Callable[[], Tensor]:
        """Plans a step; the result computes it and returns the logits of the last row of each work
        that wants them, [R, vocabulary]."""
        ...

    def release(self, private: RequestKV) -> None:
        """A request gave its states back."""
        ...

    def idle(self) -> None:
        """Nothing runs: what was kept for the next step goes."""
        ...


class RaggedModelRunner:
    """All works in one pass (the segment design)."""

    shares = True

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.builder = StepBuilder(model)

    @property
    def window(self) -> int:
        return self.model.window

    def pool(self, nbytes: int) -> BlockPool:
        return BlockPool.create(self.model, nbytes)

    def prepare(self, works: Sequence[ScheduledChunk]) -> Callable[[], Tensor]:
        step = self.builder.build(works)
        return lambda: self.model.forward(step)

    def release(self, private: RequestKV) -> None:
        """Its chunks are the pool's; nothing else is kept."""

    def idle(self) -> None:
        self.builder.forget()


class BufferedModelRunner:
    """A request's segments are placed in a buffer at its first work; its tokens follow.

    The chunks of the pool count tokens and hold nothing, so no states can be shared through them.
    """

    shares = False

    def __init__(self, model: ContiguousLM) -> None:
        self.model = model
        self.buffers = BufferPool(model, keep_bytes=0)
        self._held: dict[RequestKV, Buffer] = {}

    @property
    def window(self) -> int:
        return self.model.window

    @property
    def held(self) -> int:
        """How many requests have a buffer."""
        return len(self._held)

    def pool(self, nbytes: int) -> BlockPool:
        """Chunks without memory. Unused buffers may take `nbytes`."""
        self.buffers.keep_bytes = nbytes
        return BlockPool.create(self.model, nbytes, device=torch.device("meta"))

    def prepare(self, works: Sequence[ScheduledChunk]) -> Callable[[], Tensor]:
        return lambda: self._run(works)

    def release(self, private: RequestKV) -> None:
        buffer = self._held.pop(private, None)
        if buffer is not None:
            self.buffers.give(buffer)

    def idle(self) -> None:
        """Buffers stay for the next request."""

    def _run(self, works: Sequence[ScheduledChunk]) -> Tensor:
        wanted = []
        for work in works:
            run = self._encode if isinstance(work.private, ContiguousKV) else self._continue
            logits = run(work)
            if work.wants_logits:
                wanted.append(logits)
        return torch.stack(wanted) if wanted else torch.empty(0, device=self.model.device)

    def _continue(self, work: ScheduledChunk) -> Tensor:
        """A request's next tokens, in the buffer that it holds."""
        private = work.private
        assert isinstance(private, BlockTable)
        segments = sum(segment.states.length for segment in work.segments)
        needed = segments + private.capacity
        buffer = self._held.get(private)
        if buffer is None:
            assert private.length == 0
            self._held[private] = buffer = self.buffers.take(needed)
            self._place(buffer, work)
        assert buffer.length == segments + private.length
        self._held[private] = buffer = self.buffers.grown(buffer, needed)
        return self._forward(buffer, work)

    def _encode(self, work: ScheduledChunk) -> Tensor:
        """A module's next tokens: computed in a buffer behind the root, and copied to its room."""
        room = work.private
        assert isinstance(room, ContiguousKV)
        filled, new = room.length, len(work.token_ids)
        roots = sum(segment.states.length for segment in work.segments)
        buffer = self.buffers.take(roots + filled + new)
        try:
            self._place(buffer, work)
            standing = torch.tensor(room.positions, dtype=torch.int64, device=self.model.device)
            buffer.append(room.keys[:, :, :filled], room.values[:, :, :filled], standing)
            logits = self._forward(buffer, work)
            here, there = slice(filled, filled + new), slice(roots + filled, buffer.length)
            room.keys[:, :, here] = buffer.keys[:, :, there]
            room.values[:, :, here] = buffer.values[:, :, there]
        finally:
            self.buffers.give(buffer)
        return logits

    def _place(self, buffer: Buffer, work: ScheduledChunk) -> None:
        for segment in work.segments:
            self.model.place(buffer, segment.states, segment.start)

    def _forward(self, buffer: Buffer, work: ScheduledChunk) -> Tensor:
        device = self.model.device
        token_ids = torch.tensor(work.token_ids, dtype=torch.int64, device=device)
        position_ids = torch.tensor(work.position_ids, dtype=torch.int64, device=device)
        return self.model.forward(buffer, token_ids, position_ids)


def runner_of(model: LanguageModel) -> Runner:
    """The runner that a model needs."""
    if isinstance(model, ContiguousLM):
        return BufferedModelRunner(model)
    assert isinstance(model, CausalLM)
    return RaggedModelRunner(model)
