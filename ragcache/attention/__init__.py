"""Attention over segments: pure tensor functions, no model and no store."""

from ragcache.attention.backend import AttentionBackend, backend_for
from ragcache.attention.partial import Partial, merge, merge_slots, partial
from ragcache.attention.plan import PrivateRun, SegmentRows, StepPlan
from ragcache.attention.rotary import Rotation, rotate
from ragcache.attention.step import attend

__all__ = [
    "AttentionBackend",
    "Partial",
    "PrivateRun",
    "Rotation",
    "SegmentRows",
    "StepPlan",
    "attend",
    "backend_for",
    "merge",
    "merge_slots",
    "partial",
    "rotate",
]
