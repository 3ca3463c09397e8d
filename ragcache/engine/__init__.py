"""The engine: contexts of segments, ragged continuous batches, encoding and generation."""

from ragcache.engine.constraint import Constraint, MakeConstraint
from ragcache.engine.context import Context, Segment, assemble, check_window
from ragcache.engine.detokenizer import TextStream
from ragcache.engine.encoder import EncodeJob
from ragcache.engine.handle import Handle
from ragcache.engine.logprobs import LogprobFormat
from ragcache.engine.offline import complete, encode
from ragcache.engine.request import Choice, Completion, Piece, Request
from ragcache.engine.sampler import Chosen
from ragcache.engine.sampling import Sampling
from ragcache.engine.serving import Engine
from ragcache.engine.settings import EngineSettings, Tally

__all__ = [
    "Choice",
    "Chosen",
    "Completion",
    "Constraint",
    "Context",
    "EncodeJob",
    "Engine",
    "EngineSettings",
    "Handle",
    "LogprobFormat",
    "MakeConstraint",
    "Piece",
    "Request",
    "Sampling",
    "Segment",
    "Tally",
    "TextStream",
    "assemble",
    "check_window",
    "complete",
    "encode",
]
