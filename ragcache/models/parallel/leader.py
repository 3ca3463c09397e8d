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
from ragcache.models.dtype import FP8
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
)
from ragcache.models.parallel.ranks import FollowerProcesses
from ragcache.models.parallel.shards import split_parts


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
        self, capacity: int, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `CausalLM.new_states`. In the memory of all ranks."""
        if device is not None and device != self.device:
            return super().new_states(capacity, device)
        shape = (self.num_layers, self.num_kv_heads, capacity)
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


def split_model(whole: CausalLM, ranks: int, device: str | torch.device = "cpu") -> CausalLM:
    """Split a model over `ranks` processes, of which this one is the leader.

    The weights are moved to memory that all ranks map. `CausalLM.close` ends the others.

    Args:
        whole: A model in main memory, which stays usable.
        ranks: Number of processes, at least 2.
        device: Device of the leader. The other ranks have the GPUs behind it.

    Raises:
        UnsupportedModel: The model cannot be split.
        ConfigurationError: The system or the device does not allow it, or the model is split.
        EngineFailed: A process could not load its part.

    Example:
        >>> from ragcache.models import load_model
        >>> parallel = split_model(load_model("MODEL").causal, 2)  # doctest: +SKIP
    """
    place = torch.device(device)
    check_device(place, ranks)
    if whole.ranks > 1:
        raise ConfigurationError("the model is split already; give the model that it was made from")
    if place.type == "cuda":
        from ragcache.models.parallel.device_leader import split_over_devices

        return split_over_devices(whole, ranks, place)
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
    """Raise `ConfigurationError` for a device on which no model is split over so many ranks."""
    if device.type == "cuda":
        first, count = device.index or 0, torch.cuda.device_count()
        if first + ranks > count:
            raise ConfigurationError(
                f"tensor_parallel={ranks} needs as many GPUs from cuda:{first} on, and this "
                f"machine has {count}; take a lower number"
            )
    elif device.type != "cpu":
        raise ConfigurationError(
            f"tensor_parallel={ranks} is served on GPUs of CUDA and on a CPU, and the device is "
            f"{device}; leave tensor_parallel out"
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
    if quantization not in (None, FP8):
        raise ConfigurationError(
            f"tensor_parallel={ranks}: packed weights are not split; leave quantization="
            f"{quantization!r} out, or tensor_parallel"
        )
    if embedded:
        refuse_reader(ranks)


def _distribute(
    whole: CausalLM, writer: MessageWriter, followers: FollowerProcesses, signs: SignsOfLife
) -> ParallelLM:
    """Send each follower its part, and connect the ranks."""
    ranks = followers.ranks
    models, heads = split_parts(whole, ranks, writer.arena)
    for rank in range(1, ranks):
        message = models[rank], heads[rank], whole.logits_width
        followers.send(rank, writer.dumps(message))
    causal = wrap_causal(models[0])
    followers.wait_until_ready()
    collectives = GlooCollectives(followers.folder, 0, ranks, signs)
    followers.wait_for(collectives.connect)
    attach(models[0], collectives)
    leader = RankModel(causal, heads[0], whole.logits_width, collectives)
    return ParallelLM(whole, leader, models, writer, followers)
