"""The sizes of a model, under one name each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Dimensions:
    """window: the positions that prompt and answer may take together."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int

    @classmethod
    def of(
        cls, config: Any, *, num_kv_heads: int | None = None, window: int | None = None
    ) -> Dimensions:
        """From a configuration's usual names, which most of them offer, whatever their own.

        num_kv_heads, window: given where the configuration has them under a name of its own.
        """
        heads = int(config.num_attention_heads)
        kv_heads = num_kv_heads or getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        limit = _positions(config) if window is None else window
        layers = int(config.num_hidden_layers)
        return cls(layers, heads, int(kv_heads), int(head_dim), int(limit))


def _positions(config: Any) -> int:
    """Those of the configuration; with LongRoPE those up to which its frequencies are fixed."""
    positions = int(config.max_position_embeddings)
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") == "longrope":
        return min(positions, int(parameters["original_max_position_embeddings"]))
    return positions
