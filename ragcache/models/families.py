"""Which models can be served, and why others cannot."""

from __future__ import annotations

from typing import Any

from ragcache.errors import UnsupportedModel

LLAMA_FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def check_supported(config: Any) -> None:
    """Raises `UnsupportedModel` and says which property is not served."""
    name = config.model_type
    if name not in LLAMA_FAMILY:
        raise UnsupportedModel(
            f"models of type {name!r} are not served; served types: "
            f"{', '.join(sorted(LLAMA_FAMILY))}"
        )
    window = sliding_window(config)
    if window is not None and window < config.max_position_embeddings:
        raise UnsupportedModel(
            f"this {name} model attends through a sliding window of {window} tokens, shorter than "
            f"its context of {config.max_position_embeddings}; a cached module could stand outside "
            "the window, which is not served"
        )


def sliding_window(config: Any) -> int | None:
    """The window in tokens, None where every layer sees the whole context."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    if getattr(config, "use_sliding_window", True) is False:
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)
