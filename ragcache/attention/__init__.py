"""Attention over segments: pure tensor functions, no model and no store."""

from ragcache.attention.backend import AttentionBackend, backend_for
from ragcache.attention.partial import Partial, causal_bias, grouped, merge, merge_table, partial
from ragcache.attention.plan import (
    Asking,
    PageRows,
    PageWrite,
    RunRows,
    RunWrite,
    Square,
    StepPlan,
    Write,
)
from ragcache.attention.reference import Reference
from ragcache.attention.rotary import Rotation, rotate

__all__ = [
    "Asking",
    "AttentionBackend",
    "PageRows",
    "PageWrite",
    "Partial",
    "Reference",
    "Rotation",
    "RunRows",
    "RunWrite",
    "Square",
    "StepPlan",
    "Write",
    "backend_for",
    "causal_bias",
    "grouped",
    "merge",
    "merge_table",
    "partial",
    "rotate",
]
