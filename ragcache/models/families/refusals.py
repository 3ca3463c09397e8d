"""Properties that no model may have whose attention reads segments."""

from __future__ import annotations

from typing import Any

from ragcache.errors import UnsupportedModel
from ragcache.models.positions.rotary import check_scaling, rotary_scaling


def check_properties(config: Any) -> None:
    """Raises `UnsupportedModel` and names the property that is not served."""
    if getattr(config, "is_encoder_decoder", False):
        _refuse(config, "has an encoder and a decoder; only models that decode are served")
    if getattr(config, "add_cross_attention", False):
        _refuse(config, "attends to another sequence (cross attention), which is not served")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        _refuse(config, "caps its attention scores (attn_logit_softcapping), which is not served")
    if getattr(config, "attention_chunk_size", None) is not None:
        _refuse(config, "attends within chunks (attention_chunk_size), which is not served")
    if getattr(config, "kv_lora_rank", None) is not None:
        _refuse(config, "keeps compressed states (kv_lora_rank), which is not served")
    _check_window(config)
    check_scaling(rotary_scaling(config))


def sliding_window(config: Any) -> int | None:
    """The window in tokens, None where every layer sees the whole context."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    if getattr(config, "use_sliding_window", True) is False:
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def _check_window(config: Any) -> None:
    window = sliding_window(config)
    context = getattr(config, "max_position_embeddings", None)
    if window is not None and (context is None or window < context):
        _refuse(
            config,
            f"attends through a sliding window of {window} tokens, shorter than its context of "
            f"{context}; a cached module could stand outside the window, which is not served",
        )


def _refuse(config: Any, reason: str) -> None:
    raise UnsupportedModel(f"this {config.model_type} model {reason}")
