"""MPT: ALiBi, a key head for each query head."""

from __future__ import annotations

from typing import Any

from ragcache.errors import UnsupportedModel
from ragcache.models.dimensions import Dimensions
from ragcache.models.families.family import Family
from ragcache.models.patch import replace_forward
from ragcache.models.positions import Alibi, PositionScheme
from ragcache.models.positions.alibi import interleaved_slopes
from ragcache.models.replaced import mpt_attention, mpt_stack

# Hugging Face passes over `attn_config.alibi_bias_max` and computes with its default.
BIAS_MAX = 8.0


class Mpt(Family):
    """MPT as Hugging Face has it."""

    model_types = ("mpt",)

    def check(self, config: Any) -> None:
        super().check(config)
        if not config.attn_config.alibi:
            raise UnsupportedModel("this mpt model has no ALiBi (attn_config.alibi is false)")
        if config.attn_config.prefix_lm:
            raise UnsupportedModel(
                "this mpt model attends in both directions within a prefix (attn_config.prefix_lm)"
            )

    def scheme(self, model: Any) -> PositionScheme:
        slopes = interleaved_slopes(model.config.n_heads, BIAS_MAX)
        return Alibi(slopes.to(model.device))

    def dimensions(self, config: Any) -> Dimensions:
        return Dimensions.of(config, window=config.max_seq_len)

    def patch(self, model: Any) -> None:
        replace_forward(model.transformer, mpt_stack)
        for block in model.transformer.blocks:
            replace_forward(block.attn, mpt_attention)
