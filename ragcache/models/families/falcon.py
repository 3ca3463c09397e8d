"""Falcon: 7B (one key head), 40B (grouped key heads), RW (a key head for each query, ALiBi)."""

from __future__ import annotations

from typing import Any

import torch

from ragcache.models.contiguous import ContiguousLM
from ragcache.models.dimensions import Dimensions
from ragcache.models.families.family import Family, RotaryFamily
from ragcache.models.patch import replace_forward
from ragcache.models.positions import Alibi, PositionScheme
from ragcache.models.positions.alibi import geometric_slopes
from ragcache.models.replaced import falcon_attention, falcon_stack


class Falcon(RotaryFamily):
    """Rotary positions, or ALiBi where the configuration says so."""

    model_types = ("falcon",)

    def scheme(self, model: Any) -> PositionScheme:
        config = model.config
        if not config.alibi:
            return super().scheme(model)
        # Falcon keeps its slopes in bfloat16, and adds the bias before it scales the scores
        slopes = geometric_slopes(config.num_attention_heads).to(torch.bfloat16).float()
        return Alibi((slopes * config.head_dim**-0.5).to(model.device))

    def dimensions(self, config: Any) -> Dimensions:
        one = config.multi_query and not config.new_decoder_architecture
        return Dimensions.of(config, num_kv_heads=1 if one else config.num_kv_heads)

    def contiguous(self, model: Any) -> ContiguousLM:
        """Refused: its own attention repeats grouped keys before it keeps them."""
        return Family.contiguous(self, model)

    def patch(self, model: Any) -> None:
        replace_forward(model.transformer, falcon_stack)
        for block in model.transformer.h:
            replace_forward(block.self_attention, falcon_attention)
