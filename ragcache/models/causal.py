"""A causal language model whose attention reads segments: the engine's view of a model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ragcache.attention import AttentionBackend, StepPlan, backend_for
from ragcache.models.families import check_supported
from ragcache.models.fingerprint import model_fingerprint
from ragcache.models.patch import StepCache, patch
from ragcache.models.positions import PositionScheme, Rotary


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

    def __init__(self, model: Any, scheme: PositionScheme, backend: AttentionBackend) -> None:
        self.model = model
        self.scheme = scheme
        self.backend = backend
        config = model.config
        self.num_layers = int(config.num_hidden_layers)
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(config.num_key_value_heads)
        head_dim = getattr(config, "head_dim", None)
        self.head_dim = int(head_dim or config.hidden_size // config.num_attention_heads)
        self.window = int(config.max_position_embeddings)

    @classmethod
    def patch(cls, model: Any) -> CausalLM:
        """Patches a loaded model in place; raises `UnsupportedModel` before it changes anything."""
        check_supported(model.config)
        scheme = Rotary.of(model.config, model.model.rotary_emb)
        patch(model)
        model.eval()
        return cls(model, scheme, backend_for(model.device))

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
        """Logits of the wanted rows: [R, vocabulary]. Writes the private runs of the plan."""
        hidden = self.model.model(
            input_ids=step.token_ids[None],
            position_ids=step.position_ids[None],
            past_key_values=StepCache(step.plan),
            use_cache=True,
            plan=step.plan,
            backend=self.backend,
        ).last_hidden_state[0]
        logits: Tensor = self.model.lm_head(hidden[step.logit_rows])
        return logits
