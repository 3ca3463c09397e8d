"""What stands against serving a model, read from its configuration."""

from __future__ import annotations

from typing import Any

from ragcache.errors import UnsupportedModel
from ragcache.models.positions.rotary import check_scaling, rotary_scaling

FULL, SLIDING = "full_attention", "sliding_attention"
STATE_SPACES = ("mamba_d_state", "ssm_cfg", "state_size", "ssm_state_size")


def check_properties(config: Any) -> None:
    """Raises `UnsupportedModel` and names the property that is served in no way."""
    if getattr(config, "is_encoder_decoder", False):
        _refuse(config, "has an encoder and a decoder; only models that decode are served")
    if getattr(config, "add_cross_attention", False):
        _refuse(config, "attends to another sequence (cross attention), which is not served")
    if getattr(config, "use_bidirectional_attention", False):
        _refuse(config, "attends in both directions, so it continues no prompt")
    if getattr(config, "attention_chunk_size", None) is not None:
        _refuse(config, "attends within chunks (attention_chunk_size), which is not served")
    if getattr(config, "kv_lora_rank", None) is not None:
        _refuse(config, "keeps compressed states (kv_lora_rank), which is not served")
    if config.model_type == "gpt_oss":
        _refuse(config, "has attention sinks, which no segment holds and which are not served")
    _check_layers(config)
    check_scaling(rotary_scaling(config))


def whole_context(config: Any) -> str | None:
    """Why the attention cannot be split over segments, though it can read one buffer. None where
    it can."""
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is not None:
        return f"caps its attention scores at {cap} (attn_logit_softcapping)"
    window = sliding_window(config)
    context = getattr(config, "max_position_embeddings", None)
    if window is not None and (context is None or window < context):
        return (
            f"attends through a sliding window of {window} tokens, shorter than its context of "
            f"{context}; a cached module could stand outside the window"
        )
    parameters = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(each, dict) for each in parameters.values()):
        return "turns queries and keys by other frequencies in some layers than in others"
    return None


def sliding_window(config: Any) -> int | None:
    """The window in tokens, None where every layer sees the whole context."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and SLIDING not in layer_types:
        return None
    if getattr(config, "use_sliding_window", True) is False:
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def layer_types(config: Any) -> tuple[str, ...]:
    """Whether each layer sees everything or through the sliding window."""
    listed = getattr(config, "layer_types", None)
    if listed is not None:
        return tuple(listed)
    every = FULL if sliding_window(config) is None else SLIDING
    return (every,) * int(config.num_hidden_layers)


def _check_layers(config: Any) -> None:
    listed = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    others = sorted(set(listed or ()) - {FULL, SLIDING})
    if others:
        _refuse(config, f"has layers of type {', '.join(others)}; served are {FULL} and {SLIDING}")
    if any(hasattr(config, name) for name in STATE_SPACES):
        _refuse(config, "has state space layers, whose states are not keys and values")
    if 0 in (getattr(config, "no_rope_layers", None) or ()):
        _refuse(config, "has layers without positions (no_rope_layers), which is not served")


def _refuse(config: Any, reason: str) -> None:
    raise UnsupportedModel(f"this {config.model_type} model {reason}")
