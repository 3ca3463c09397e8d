"""Model runners: how a batch reaches the model. All requests are one ragged pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ragcache.engine.batch import BatchBuilder, ScheduledChunk, passes_of
from ragcache.engine.kv_cache import BlockPool
from ragcache.engine.sampler import Sampler
from ragcache.machine import keep_freed_memory
from ragcache.models import CausalLM

logger = logging.getLogger(__name__)


class ModelRunner(Protocol):
    """Computes the scheduled chunks of a step."""

    asynchronous: bool
    """Whether steps are launched and run on; it is an `AsynchronousRunner` then."""

    stream: torch.cuda.Stream | None
    """Where all steps run; None on a CPU."""

    @property
    def model(self) -> CausalLM: ...

    def create_pool(self, nbytes: int) -> BlockPool:
        """The pool of private states, of at most `nbytes`."""

    def create_sampler(self) -> Sampler:
        """Samples tokens from the logits of the steps."""

    def prepare_batch(self, chunks: Sequence[ScheduledChunk]) -> Callable[[], Tensor]:
        """Plans a step; the result computes it and returns the logits of the rows that chunks want,
        [R, vocabulary]; see `ScheduledChunk.logit_rows`."""

    def release_batch(self) -> None:
        """Releases what is kept between steps; called when nothing runs."""

    def warm_up(self) -> None:
        """Does ahead of time what the first steps would do. Called in the thread of the steps."""


class AsynchronousRunner(ModelRunner, Protocol):
    """Launches steps, which a device computes one after another in the order of their launches.

    What a step reads stays referenced by the core until the step has been waited for, so memory of
    segments may be reused once nothing references their tensors, and not before: a lease can end
    while a step runs. Blocks of the pool are freed without waiting, since whatever writes to them
    next is launched later.
    """

    def prepare_batch(
        self, chunks: Sequence[ScheduledChunk], previous: Tensor | None = None
    ) -> Callable[[], Tensor]:
        """Plans a step; the result launches it and returns its logits without waiting.

        previous: `PendingTokens.inputs` of the step before, int64 [N] on the device, where some
        chunks have `follows`: the token of such a chunk is `previous[chunk.follows]`.
        """

    def continue_batch(self, previous: Tensor) -> Callable[[], Tensor]:
        """Plans the step after one whose chunks all had one token and wanted logits, with the same
        chunks, each one token further. previous: the tokens sampled by it, in its order."""


class RaggedModelRunner:
    """Computes all chunks in one pass over segments."""

    asynchronous = False

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.stream = _stream_of(model)
        if self.stream is None:
            keep_freed_memory()
        self.builder = BatchBuilder(model)

    def create_pool(self, nbytes: int) -> BlockPool:
        return BlockPool.create(self.model, nbytes)

    def create_sampler(self) -> Sampler:
        return Sampler(self.model.device)

    def prepare_batch(self, chunks: Sequence[ScheduledChunk]) -> Callable[[], Tensor]:
        await_segments(chunks, self.model.device)
        passes = [self.builder.build_batch(each) for each in passes_of(chunks)]
        return lambda: [self.model.forward(each) for each in passes][-1]

    def release_batch(self) -> None:
        self.builder.forget()

    def warm_up(self) -> None:
        """Nothing to do."""


def await_segments(chunks: Sequence[ScheduledChunk], device: torch.device) -> None:
    """Makes this thread's stream wait for segments that are still being copied to the device."""
    if device.type != "cuda":
        return
    stream = torch.cuda.current_stream(device)
    for chunk in chunks:
        for segment in chunk.segments:
            if segment.states.arrival is not None:
                segment.states.arrival.wait(stream)


def runner_for(model: CausalLM, *, prefill_tokens: int = 8192) -> ModelRunner:
    """The runner that suits a model and its device. prefill_tokens: the most rows of a step that
    a GPU's tables have room for at first."""
    if model.device.type == "cuda" and model.kernels:
        try:
            from ragcache.engine.device_runner import DeviceModelRunner
        except ImportError as error:  # Triton comes with torch's builds for CUDA
            logger.warning("the GPU computes slowly, without Triton's kernels: %s", error)
        else:
            return DeviceModelRunner(model, prefill_tokens=prefill_tokens)
    return RaggedModelRunner(model)


def _stream_of(model: CausalLM) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(model.device) if model.device.type == "cuda" else None
