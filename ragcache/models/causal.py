"""A causal language model whose attention reads segments: the engine's view of a model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ragcache.attention import AttentionBackend, StepPlan
from ragcache.models.dimensions import Dimensions
from ragcache.models.fingerprint import model_fingerprint
from ragcache.models.patch import StepCache
from ragcache.models.positions import PositionScheme


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One ragged forward pass: the new tokens of all requests, flattened.

    token_ids, position_ids: [T] int64; logit_rows: [R] int64, the rows whose logits are wanted.
    """

    token_ids: Tensor
    position_ids: Tensor
    logit_rows: Tensor
    plan: StepPlan


class CausalLM:
    """Wraps a patched Hugging Face model. Make one with `CausalLM.patch`."""

    def __init__(
        self,
        model: Any,
        scheme: PositionScheme,
        backend: AttentionBackend,
        dimensions: Dimensions,
    ) -> None:
        self.model = model
        self.scheme = scheme
        self.backend = backend
        self.num_layers = dimensions.num_layers
        self.num_heads = dimensions.num_heads
        self.num_kv_heads = dimensions.num_kv_heads
        self.head_dim = dimensions.head_dim
        self.window = dimensions.window

    @classmethod
    def patch(cls, model: Any) -> CausalLM:
        """Patches a loaded model in place; raises `UnsupportedModel` before it changes anything.

        The model's family (`ragcache.models.families`) says how, and what kind of model it makes.
        """
        from ragcache.models.families import family_of  # families make CausalLMs

        return family_of(model.config).serve(model)

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

    def new_states(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Room for `capacity` tokens: keys and values, [L, Hkv, capacity, D]."""
        shape = (self.num_layers, self.num_kv_heads, capacity, self.head_dim)
        keys = torch.empty(shape, dtype=self.dtype, device=self.device)
        return keys, torch.empty_like(keys)

    @torch.inference_mode()
    def forward(self, step: Step) -> Tensor:
        """Logits of the wanted rows: [R, vocabulary]. Writes the private runs of the plan.

        The whole Hugging Face model is called, so that heads and the scaling of logits are its
        own. A model that takes no positions (ALiBi) passes over them.
        """
        out = self.model(
            input_ids=step.token_ids[None],
            position_ids=step.position_ids[None],
            past_key_values=StepCache(step.plan, self.backend),
            attention_mask=step.token_ids.new_empty(1, 1, 1, 1),  # a finished mask: none is built
            use_cache=True,
            logits_to_keep=step.logit_rows,
            plan=step.plan,
            backend=self.backend,
        )
        logits: Tensor = out[0][0]
        return logits
