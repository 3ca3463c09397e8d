"""The engine: contexts of segments, ragged continuous batches, encoding and generation."""

from ragcache.engine.config import EngineConfig, EngineStats
from ragcache.engine.constraint import Constraint, MakeConstraint
from ragcache.engine.detokenizer import LogprobFormat, TextStream
from ragcache.engine.encoding import EncodeJob
from ragcache.engine.engine import LLMEngine, complete, encode
from ragcache.engine.handle import RequestHandle
from ragcache.engine.request import (
    Choice,
    ComputedTokens,
    Context,
    Request,
    RequestOutput,
    Segment,
    TokenDelta,
    assemble_context,
    check_window,
)
from ragcache.engine.sampler import SampledToken
from ragcache.engine.sampling_params import SamplingParams

__all__ = [
    "Choice",
    "ComputedTokens",
    "Constraint",
    "Context",
    "EncodeJob",
    "EngineConfig",
    "EngineStats",
    "LLMEngine",
    "LogprobFormat",
    "MakeConstraint",
    "Request",
    "RequestHandle",
    "RequestOutput",
    "SampledToken",
    "SamplingParams",
    "Segment",
    "TextStream",
    "TokenDelta",
    "assemble_context",
    "check_window",
    "complete",
    "encode",
]
