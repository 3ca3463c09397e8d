"""BLOOM: ALiBi, a key head for each query head."""

from __future__ import annotations

from typing import Any

from ragcache.models.dimensions import Dimensions
from ragcache.models.families.family import Family
from ragcache.models.patch import replace_forward
from ragcache.models.positions import Alibi, PositionScheme
from ragcache.models.positions.alibi import geometric_slopes
from ragcache.models.replaced import bloom_attention, bloom_stack

TRAINED_LENGTH = 2048  # tokens; published configurations say it as `seq_length`, or not at all


class Bloom(Family):
    """BLOOM and BLOOMZ."""

    model_types = ("bloom",)

    def scheme(self, model: Any) -> PositionScheme:
        return Alibi(geometric_slopes(model.config.n_head).to(model.device))

    def dimensions(self, config: Any) -> Dimensions:
        return Dimensions.of(config, window=getattr(config, "seq_length", TRAINED_LENGTH))

    def patch(self, model: Any) -> None:
        replace_forward(model.transformer, bloom_stack)
        for block in model.transformer.h:
            replace_forward(block.self_attention, bloom_attention)
