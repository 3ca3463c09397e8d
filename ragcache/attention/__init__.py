"""Attention over segments: pure tensor functions, no model and no store."""

from ragcache.attention.cpu import attention_bytes, backend_for
from ragcache.attention.metadata import (
    AttentionBackend,
    AttentionMetadata,
    CausalBlock,
    ContiguousWrite,
    KVWrite,
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
    merge_states,
    over_heads,
    partial_attention,
    rotate,
)
from ragcache.attention.reference import ReferenceAttentionBackend

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "CausalBlock",
    "ContiguousWrite",
    "KVWrite",
    "PagedQueries",
    "PagedWrite",
    "Partial",
    "ReferenceAttentionBackend",
    "Rotation",
    "SharedKV",
    "SharedQueries",
    "attention_bytes",
    "backend_for",
    "causal_bias",
    "grouped",
    "merge_states",
    "over_heads",
    "partial_attention",
    "read_values",
    "rotate",
]
