"""ragcache: RAG middleware in which the document is the unit of cache.

Each document is computed once. Every later question reads its stored states.

Example:
    >>> from ragcache import RagCache
    >>> with RagCache.open("state/") as rag:
    ...     ingestion = rag.ingest("handbook", ["docs/"])
    ...     answer = rag.ask("How long is the grace period?", collection="handbook")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragcache import errors
from ragcache.errors import *  # noqa: F403  # every error is a public name
from ragcache.openmp import spin_briefly

if TYPE_CHECKING:
    from ragcache.aio import AsyncRagCache
    from ragcache.documents import SourceDocument
    from ragcache.modes import ReuseMode
    from ragcache.params import GenerationParams
    from ragcache.pipeline import (
        Answer,
        AnswerSpan,
        AnswerStream,
        AsyncAnswerStream,
        Citation,
        Ingestion,
        Reuse,
        Timings,
    )
    from ragcache.rag import RagCache

spin_briefly()  # OpenMP reads its settings when torch is imported, which is later

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "AnswerSpan",
    "AnswerStream",
    "AsyncAnswerStream",
    "AsyncRagCache",
    "Citation",
    "GenerationParams",
    "Ingestion",
    "RagCache",
    "Reuse",
    "ReuseMode",
    "SourceDocument",
    "Timings",
]

_HOMES = {
    **dict.fromkeys(__all__, "ragcache.pipeline"),
    "AsyncRagCache": "ragcache.aio",
    "GenerationParams": "ragcache.params",
    "RagCache": "ragcache.rag",
    "ReuseMode": "ragcache.modes",
    "SourceDocument": "ragcache.documents",
}


__all__ += errors.__all__


def __getattr__(name: str) -> object:
    """Load a public name on first use: the engine also runs without SQL and FAISS installed."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ragcache' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
