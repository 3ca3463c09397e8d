"""Model runners: all requests of a step become one ragged forward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ragcache.engine.batch import BatchBuilder, ScheduledChunk, await_segments
from ragcache.engine.decode_batch import DecodeBatch
from ragcache.engine.kv_cache import BlockPool
from ragcache.engine.sampler import Sampler
from ragcache.machine import keep_freed_memory
from ragcache.models import CausalLM

logger = logging.getLogger(__name__)


class ModelRunner(Protocol):
    """Computes the scheduled chunks of a step."""

    asynchronous: bool
    """Whether steps are launched ahead: the runner is an `AsynchronousRunner`."""

    stream: torch.cuda.Stream | None
    """The CUDA stream of all steps. None on a CPU."""

    @property
    def model(self) -> CausalLM: ...

    def create_pool(self, nbytes: int) -> BlockPool:
        """Create the pool for the states of requests' own tokens, of at most `nbytes`."""

    def create_slots(self, count: int) -> None:
        """Create slots for recurrent states. A runner without slots makes states as it computes
        them."""

    def create_sampler(self) -> Sampler:
        """Create a sampler for the logits of the runner's steps."""

    def prepare_batch(self, chunks: Sequence[ScheduledChunk]) -> Callable[[], Tensor]:
        """Plan a step. The result computes it and returns the logits [R, vocabulary] of the rows
        that chunks want (`ScheduledChunk.logit_rows`)."""

    def release_batch(self) -> None:
        """Release memory that is kept between steps. Called when no request runs."""

    def warm_up(self) -> None:
        """Compile and capture before the first step. Called in the thread of the steps."""


class AsynchronousRunner(ModelRunner, Protocol):
    """Launches steps, which a device computes in the order of their launches.

    The core keeps references to everything that a step reads until it has waited for the step.
    Memory of segments may therefore be reused once nothing references their tensors, and not
    before: a lease can end while a step runs. Blocks of the pool are freed without waiting, since
    the next writer is launched later.
    """

    def prepare_batch(
        self,
        chunks: Sequence[ScheduledChunk],
        previous: Tensor | None = None,
        decoding: DecodeBatch | None = None,
    ) -> Callable[[], Tensor]:
        """Plan a step. The result launches it and returns its logits without waiting.

        Args:
            chunks: Chunks of the step beside the decode batch.
            previous: The sampled tokens of the step before (`PendingTokens.inputs`), int64 [N] on
                the device. A row of the decode batch takes the token `previous[follows]`.
            decoding: The first rows of the step. Where `version` is the last step's and there are
                no chunks, the step repeats the last one, each row one token further.
        """


class RaggedModelRunner:
    """Computes all chunks in one pass, on any device."""

    asynchronous = False

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.stream = _stream_of(model)
        if self.stream is None:
            keep_freed_memory()
        self.builder = BatchBuilder(model)

    def create_pool(self, nbytes: int) -> BlockPool:
        return BlockPool.create(self.model, nbytes)

    def create_slots(self, count: int) -> None:
        """See `ModelRunner.create_slots`."""

    def create_sampler(self) -> Sampler:
        return Sampler(self.model.device)

    def prepare_batch(self, chunks: Sequence[ScheduledChunk]) -> Callable[[], Tensor]:
        await_segments(chunks, self.model.device)
        return partial(self.model.forward, self.builder.build_batch(chunks))

    def release_batch(self) -> None:
        self.builder.forget()

    def warm_up(self) -> None:
        """Does nothing: no graphs are captured."""


def runner_for(
    model: CausalLM, *, prefill_tokens: int = 8192, int8_states: bool = False
) -> ModelRunner:
    """Create the runner that suits a model and its device. A GPU's tables have room for
    `prefill_tokens` rows at first."""
    if model.ranks > 1 and model.kernels:
        from ragcache.engine.device_ranks import LeadingRunner
        from ragcache.models.parallel.device_model import DeviceParallelLM

        assert isinstance(model, DeviceParallelLM)
        return LeadingRunner(model, prefill_tokens=prefill_tokens)
    if model.device.type == "cuda" and model.kernels:
        try:
            from ragcache.engine.device_runner import DeviceModelRunner
        except ImportError as error:  # Triton comes with torch's builds for CUDA
            logger.warning("the GPU computes slowly, without Triton's kernels: %s", error)
        else:
            kind: type[DeviceModelRunner] = DeviceModelRunner
            if model.recurrent_bytes:
                from ragcache.engine.device_recurrent import HybridDeviceRunner

                kind = HybridDeviceRunner
            return kind(model, prefill_tokens=prefill_tokens, int8_states=int8_states)
    return RaggedModelRunner(model)


def _stream_of(model: CausalLM) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(model.device) if model.device.type == "cuda" else None
