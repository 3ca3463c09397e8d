"""A causal language model whose attention reads segments: the engine's view of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragcache.attention import AttentionBackend, StepPlan
from ragcache.models.dimensions import Dimensions
from ragcache.models.language import LanguageModel
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


class CausalLM(LanguageModel):
    """Wraps a patched Hugging Face model. Make one with `CausalLM.patch`."""

    scheme: PositionScheme

    def __init__(
        self,
        model: Any,
        scheme: PositionScheme,
        backend: AttentionBackend,
        dimensions: Dimensions,
    ) -> None:
        super().__init__(model, scheme, dimensions)
        self.backend = backend

    @classmethod
    def patch(cls, model: Any) -> CausalLM:
        """Patches a loaded model in place, as its family says (`ragcache.models.families`).

        Raises `UnsupportedModel` before it changes anything.
        """
        from ragcache.models.families import family_of  # families make CausalLMs

        return family_of(model.config).segmented(model)

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
