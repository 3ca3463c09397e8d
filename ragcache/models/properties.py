"""Kinds of layers in a configuration, and properties that are not served."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NoReturn

from transformers import Cache

from ragcache.errors import UnsupportedModel
from ragcache.models.model import Dimensions
from ragcache.models.positions import check_scaling, rotary_scaling
from ragcache.models.recurrent import LayerKinds

FULL, SLIDING = "full_attention", "sliding_attention"
FULL_NAMES = frozenset({FULL, "attention"})
RECURRENT_NAMES = frozenset({"linear_attention", "conv", "hybrid"})
"""Layers with a recurrent state; `hybrid` has attention, too."""
WITHOUT_STATES = frozenset({"mlp", "moe"})
STATE_SPACES = ("mamba_d_state", "ssm_cfg", "state_size", "ssm_state_size")
_NOT_SERVED = "which is not served"
_UNSERVED = {
    "is_encoder_decoder": "has an encoder and a decoder; only models that decode are served",
    "add_cross_attention": f"attends to another sequence (cross attention), {_NOT_SERVED}",
    "use_bidirectional_attention": "attends in both directions, so it continues no prompt",
    "attention_chunk_size": f"attends within chunks (attention_chunk_size), {_NOT_SERVED}",
    "kv_lora_rank": "keeps compressed states (kv_lora_rank), and its type has no row",
    "global_head_dim": f"has layers with heads of two sizes, {_NOT_SERVED}",
}
_NOT_CONTINUED = "has recurrent layers that continue no text from a cache in transformers"
_NO_ATTENTION = "has no attention layer, so it keeps no keys and values"
_INDEXER = f"chooses the keys of a query by an indexer, {_NOT_SERVED}"
_AROUND_KEYS = "has convolutions around its keys and values, so they change with the text before"
WITHOUT_FAMILY = {
    **dict.fromkeys(("qwen4_exp_text", "glm5_next_text"), _INDEXER),
    **dict.fromkeys(("inkling_text", "inkling2_text", "zaya"), _AROUND_KEYS),
    "deepseek_v4": "pools keys over several tokens, so they change with the text around",
    **dict.fromkeys(("jamba", "zamba", "recurrent_gemma", "minimax"), _NOT_CONTINUED),
    **dict.fromkeys(("mamba", "falcon_mamba", "mamba2", "rwkv", "xlstm"), _NO_ATTENTION),
}
"""Why models of some types are not served, where their configuration does not tell."""
_HARMLESS = (None, False, "vision")  # of these; "vision": only images, which are not served


def check_properties(
    config: Any, served: Collection[str] = (), layers: Collection[str] = ()
) -> None:
    """Raises `UnsupportedModel` and names the property that is not served. served: names of
    properties that a family serves; layers: types of layers that it serves beside attention."""
    differing = _differing_names(config) - set(served)
    if differing:
        refuse(config, f"has layers that differ in {', '.join(sorted(differing))}, {_NOT_SERVED}")
    for name, reason in _UNSERVED.items():
        if name in served:
            continue
        value = getattr(config, name, None)
        if value not in _HARMLESS:
            refuse(config, reason)
    _check_layers(config, layers)
    for layer_type in set(layer_types(config)):
        check_scaling(rotary_scaling(config, layer_type))


def sliding_window(config: Any) -> int | None:
    """The sliding window in tokens, if a layer has one."""
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
        return tuple(FULL if each in FULL_NAMES else each for each in listed)
    every = FULL if sliding_window(config) is None else SLIDING
    return (every,) * int(config.num_hidden_layers)


def layer_windows(config: Any, dimensions: Dimensions) -> tuple[int | None, ...]:
    """See `CausalLM.windows`."""
    window = sliding_window(config)
    if window is None or window >= dimensions.window:
        return ()
    types = [layer_types(config)[number] for number in LayerKinds.of(config).keys]
    types = types[: dimensions.num_layers]  # layers behind them share states
    return tuple(window if each == SLIDING else None for each in types)


def check_hybrid(config: Any, served: Collection[str] = ()) -> None:
    """`check_properties` of a family with recurrent layers beside attention."""
    if not hasattr(Cache, "get_conv_state"):
        refuse(config, "has recurrent layers, which need transformers 5.21 or later")
    check_properties(config, served, RECURRENT_NAMES | WITHOUT_STATES)
    if not LayerKinds.of(config).keys:
        refuse(config, _NO_ATTENTION)


def _differing_names(config: Any) -> set[str]:
    """Names of properties that are given layer by layer."""
    return {name for each in layer_changes(config).values() for name in each}


def layer_changes(config: Any) -> dict[int, dict[str, Any]]:
    """Properties of single layers, by the layers' numbers. Empty if all layers are alike."""
    changes = config.to_dict().get("per_layer_config") or {}
    return {int(layer): dict(each) for layer, each in changes.items()}


def _check_layers(config: Any, served: Collection[str]) -> None:
    listed = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    others = sorted(set(listed or ()) - {SLIDING} - FULL_NAMES - set(served))
    if others:
        refuse(config, f"has layers of type {', '.join(others)}; served are {FULL} and {SLIDING}")
    if listed is None and any(hasattr(config, name) for name in STATE_SPACES):
        refuse(config, "has state space layers, whose states are not keys and values")


def refuse(config: Any, reason: str) -> NoReturn:
    """Raises `UnsupportedModel` with a reason."""
    raise UnsupportedModel(f"this {config.model_type} model {reason}")
