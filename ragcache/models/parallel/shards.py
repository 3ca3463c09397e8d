"""The parts of a model that ranks compute, with weights in memory that all of them map."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ragcache.models.model import CausalLM
from ragcache.models.parallel.memory import SharedArena
from ragcache.models.parallel.plans import shard_model, weights_of


def split_parts(whole: CausalLM, ranks: int, arena: SharedArena) -> tuple[list[Any], list[slice]]:
    """Move the weights of a model to shared memory, and split it there.

    Weights that share memory share it afterwards.

    Returns:
        Of each rank the Hugging Face model and its key heads.
    """
    model = whole.model
    moved: dict[int, Tensor] = {}
    for weight in weights_of(model):  # one by one, so that memory holds one more at most
        storage, place = weight.untyped_storage(), weight.storage_offset()
        if storage.data_ptr() not in moved:
            content = torch.empty(0, dtype=torch.uint8).set_(storage)
            moved[storage.data_ptr()] = arena.copy(content)
        content = moved[storage.data_ptr()]
        into = content[: len(content) // weight.itemsize * weight.itemsize].view(weight.dtype)
        weight.data = into.as_strided(weight.shape, weight.stride(), place)

    def join(parts: list[Tensor]) -> Tensor:
        return arena.copy(torch.cat(parts))

    shards = [shard_model(model, rank, ranks, join) for rank in range(ranks)]
    heads = [parts.key_heads(rank) for rank, (_, parts) in enumerate(shards)]
    return [shard for shard, _ in shards], heads
