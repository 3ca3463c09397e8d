"""A causal language model whose attention reads segments: the engine's view of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragcache.attention import AttentionBackend, StepPlan, backend_for
from ragcache.models.families import check_supported
from ragcache.models.language import LanguageModel
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


class CausalLM(LanguageModel):
    """Wraps a patched Hugging Face model. Make one with `CausalLM.patch`."""

    scheme: PositionScheme

    def __init__(self, model: Any, scheme: PositionScheme, backend: AttentionBackend) -> None:
        super().__init__(model, scheme)
        self.backend = backend

    @classmethod
    def patch(cls, model: Any) -> CausalLM:
        """Patches a loaded model in place; raises `UnsupportedModel` before it changes anything."""
        check_supported(model.config)
        scheme = Rotary.of(model.config, model.model.rotary_emb)
        patch(model)
        model.eval()
        return cls(model, scheme, backend_for(model.device))

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
