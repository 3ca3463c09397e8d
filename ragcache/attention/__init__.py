"""Attention over segments: pure tensor functions, no model and no store."""

from ragcache.attention.backend import AttentionBackend, backend_for, has_kernels
from ragcache.attention.cpu import attention_bytes
from ragcache.attention.metadata import (
    AttentionMetadata,
    CausalBlock,
    ContiguousWrite,
    KVWrite,
    LayersComputed,
    PagedQueries,
    PagedWrite,
    SharedKV,
    SharedQueries,
    read_values,
)
from ragcache.attention.ops import (
    Partial,
    Rotation,
    causal_bias,
    grouped,
    merge_state,
    merge_states,
    over_heads,
    partial_attention,
    rotate,
)
from ragcache.attention.reference import ReferenceAttentionBackend

__all__ = [
    "AttentionBackend", "AttentionMetadata", "CausalBlock", "ContiguousWrite", "KVWrite",
    "LayersComputed", "PagedQueries", "PagedWrite", "Partial", "ReferenceAttentionBackend",
    "Rotation", "SharedKV", "SharedQueries", "attention_bytes", "backend_for", "causal_bias",
    "grouped", "has_kernels", "merge_state", "merge_states", "over_heads", "partial_attention",
    "read_values", "rotate",
]  # fmt: skip
