"""What is known of every model that is served, however its attention reads cached states."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ragcache.models.dimensions import Dimensions
from ragcache.models.fingerprint import model_fingerprint


class Scheme(Protocol):
    """A way of telling a model where its tokens stand."""

    @property
    def name(self) -> str:
        """Names everything that moved states depend on; part of every state key."""
        ...

    @property
    def movable(self) -> bool:
        """Whether states may stand elsewhere than where they were encoded."""
        ...


class LanguageModel:
    """A causal language model of Hugging Face, described."""

    def __init__(self, model: Any, scheme: Scheme, dimensions: Dimensions) -> None:
        self.model = model
        self.scheme = scheme
        self.num_layers = dimensions.num_layers
        self.num_heads = dimensions.num_heads
        self.num_kv_heads = dimensions.num_kv_heads
        self.head_dim = dimensions.head_dim
        self.window = dimensions.window

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @cached_property
    def fingerprint(self) -> str:
        """Digest of configuration, dtype and weights."""
        return model_fingerprint(self.model)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        per_layer = 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return self.num_layers * per_layer

    def new_states(
        self, capacity: int, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor]:
        """Room for `capacity` tokens: keys and values, [L, Hkv, capacity, D]. device: None is the
        model's."""
        shape = (self.num_layers, self.num_kv_heads, capacity, self.head_dim)
        keys = torch.empty(shape, dtype=self.dtype, device=device or self.device)
        return keys, torch.empty_like(keys)
