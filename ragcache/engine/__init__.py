"""The engine: contexts of segments, ragged batches, encoding and generation."""

from ragcache.engine.context import Context, Segment, assemble, check_window
from ragcache.engine.encoder import EncodeJob, encode
from ragcache.engine.generate import Completion, Request, generate

__all__ = [
    "Completion",
    "Context",
    "EncodeJob",
    "Request",
    "Segment",
    "assemble",
    "check_window",
    "encode",
    "generate",
]
