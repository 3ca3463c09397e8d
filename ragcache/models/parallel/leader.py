"""The leader's model: a `CausalLM` with all heads, each pass of which runs on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragcache.errors import ConfigurationError, EngineFailed
from ragcache.models.families import wrap_causal
from ragcache.models.model import CausalLM, Dimensions, ForwardBatch
from ragcache.models.parallel.collectives import GlooCollectives, SignsOfLife
from ragcache.models.parallel.memory import SharedArena
from ragcache.models.parallel.messages import MessageWriter
from ragcache.models.parallel.passes import RankModel
from ragcache.models.parallel.plans import (
    attach,
    check_model,
    refuse_reader,
    shard_model,
    weights_of,
)
from ragcache.models.parallel.ranks import FollowerProcesses


class Followers(Protocol):
    """The other ranks, as the leader's model uses them (`FollowerProcesses`)."""

    failure: EngineFailed | None
    on_failure: list[Callable[[EngineFailed], object]]

    def send_all(self, message: bytes) -> None: ...
    def computing(self) -> Any: ...
    def close(self) -> None: ...


class ParallelLM(CausalLM):
    """A model whose layers several processes compute together.

    Sizes, states, keys and the fingerprint are the whole model's. States have the heads of all
    ranks and lie in memory that all ranks map.

    Args:
        whole: The model that was split.
        leader: The leader's part.
        parts: The models of all ranks, whose weights the other ranks read.
        writer: Writes messages to the other ranks.
        followers: The other ranks.
    """

    def __init__(
        self,
        whole: CausalLM,
        leader: RankModel,
        parts: Sequence[Any],
        writer: MessageWriter,
        followers: Followers,
    ) -> None:
        sizes = Dimensions(
            whole.num_layers, whole.num_heads, whole.num_kv_heads, whole.head_dim, whole.window
        )
        part = leader.causal
        super().__init__(
            part.model,
            part.scheme,
            part.backend,
            sizes,
            whole.windows,
            whole.softcap,
            kernels=False,
        )
        self.states_dtype, self.fingerprint = whole.states_dtype, whole.fingerprint
        self.logits_width, self.ranks = leader.logits_width, leader.collectives.ranks
        self._leader, self._followers = leader, followers
        self._parts, self._writer, self._arena = tuple(parts), writer, writer.arena
        self._lock = threading.Lock()  # steps of an engine, and of scripts beside it

    @property
    def failure(self) -> EngineFailed | None:
        """See `CausalLM.failure`."""
        return self._followers.failure

    def on_failure(self, call: Callable[[EngineFailed], object]) -> None:
        """See `CausalLM.on_failure`."""
        self._followers.on_failure.append(call)

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """See `CausalLM.host_memory`. Steps read it without a copy."""
        return self._arena.allocate(nbytes)

    def new_states(
        self, capacity: int, device: torch.device | None = None, layers: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `CausalLM.new_states`. In the memory of all ranks."""
        if device is not None and device != self.device:
            return super().new_states(capacity, device, layers)
        shape = (layers or self.num_layers, self.num_kv_heads, capacity)
        keys = self._arena.empty((*shape, self.head_dim), self.dtype)
        return keys, self._arena.empty((*shape, self.value_dim), self.dtype)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """See `CausalLM.forward`. Raises `EngineFailed` once a rank has failed."""
        with self._lock:
            self._followers.send_all(self._writer.dumps(batch))
            with self._followers.computing():
                return self._leader.forward(batch)

    def close(self) -> None:
        """End the followers. The model computes nothing afterwards."""
        self._followers.close()


def split_model(whole: CausalLM, ranks: int) -> ParallelLM:
    """Split a model over `ranks` processes, of which this one is the leader.

    The weights are moved to memory that all ranks map. `ParallelLM.close` ends the others.

    Args:
        whole: A model on a CPU, which stays usable.
        ranks: Number of processes, at least 2.

    Raises:
        UnsupportedModel: The model cannot be split.
        ConfigurationError: The system or the device does not allow it, or the model is split.
        EngineFailed: A process could not load its part.

    Example:
        >>> from ragcache.models import load_model
        >>> parallel = split_model(load_model("MODEL").causal, 2)  # doctest: +SKIP
    """
    check_device(whole.device, ranks)
    if whole.ranks > 1:
        raise ConfigurationError("the model is split already; give the model that it was made from")
    check_model(whole.model, ranks)
    arena = SharedArena.create()
    signs, writer = SignsOfLife(arena, ranks), MessageWriter(arena)
    followers = FollowerProcesses(ranks, arena, signs)
    try:
        return _distribute(whole, writer, followers, signs)
    except BaseException:
        followers.close()
        raise


def check_device(device: torch.device, ranks: int) -> None:
    """Raise `ConfigurationError` for a device on which no model is split."""
    if device.type != "cpu":
        raise ConfigurationError(
            f"tensor_parallel={ranks} is served on a CPU so far, and the device is {device}; leave "
            "tensor_parallel out, or serve the model by a replica for each GPU"
        )


def check_options(
    device: torch.device, quantization: str | None, ranks: int, *, embedded: bool
) -> None:
    """Check, before a model is read, whether it may be split.

    Args:
        device: Device of the model.
        quantization: Quantization of its weights, if any.
        ranks: Number of ranks.
        embedded: Whether the model is the embedded reader.

    Raises:
        ConfigurationError: No model is split on this device, or with packed weights.
        UnsupportedModel: The embedded reader is not split.
    """
    check_device(device, ranks)
    if quantization is not None:
        raise ConfigurationError(
            f"tensor_parallel={ranks}: packed weights are not split; leave quantization="
            f"{quantization!r} out, or tensor_parallel"
        )
    if embedded:
        refuse_reader(ranks)


def split_parts(
    whole: CausalLM, ranks: int, writer: MessageWriter
) -> tuple[list[Any], list[slice], list[bytes]]:
    """Move the weights of a model to shared memory, and split it there.

    Returns:
        Of each rank the Hugging Face model, its key heads, and the first message to it.
    """
    arena, model = writer.arena, whole.model
    for weight in weights_of(model):  # one by one, so that memory holds one more at most
        weight.data = arena.copy(weight.detach())

    def join(parts: list[Tensor]) -> Tensor:
        return arena.copy(torch.cat(parts))

    shards = [shard_model(model, rank, ranks, join) for rank in range(ranks)]
    heads = [parts.key_heads(rank) for rank, (_, parts) in enumerate(shards)]
    models = [shard for shard, _ in shards]
    width = whole.logits_width
    return models, heads, [writer.dumps((*each, width)) for each in zip(models, heads, strict=True)]


def _distribute(
    whole: CausalLM, writer: MessageWriter, followers: FollowerProcesses, signs: SignsOfLife
) -> ParallelLM:
    """Send each follower its part, and connect the ranks."""
    ranks = followers.ranks
    models, heads, messages = split_parts(whole, ranks, writer)
    for rank in range(1, ranks):
        followers.send(rank, messages[rank])
    causal = wrap_causal(models[0])
    followers.wait_until_ready()
    collectives = GlooCollectives(followers.folder, 0, ranks, signs)
    attach(models[0], collectives)
    leader = RankModel(causal, heads[0], whole.logits_width, collectives)
    return ParallelLM(whole, leader, models, writer, followers)
