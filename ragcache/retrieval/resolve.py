"""What the options `embedding` and `reranker` name. Nothing heavy is imported before."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ragcache.config import MINILM_PACKAGE, check_embedding
from ragcache.retrieval.reranking import CrossEncoderReranker, Reranker

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

_log = logging.getLogger(__name__)

WORDS_ONLY = (
    "documents are found by their words only (BM25), not by meaning: "
    "pip install 'ragcache[minilm]', or choose this with embedding 'none'"
)


def resolve_embedder(embedding: Embeddings | str | None) -> Embeddings | None:
    """The embedder of an option `embedding`; None for `none` and None.

    `auto` is `minilm`; where that is not installed, one warning of the process says so, and
    documents are found by their words. Raises `ConfigurationError`, `MissingExtra` or
    `ModelNotFound`.
    """
    if embedding is None or embedding == "none":
        return None
    if embedding == "auto" and not has_minilm():
        _warn_once()
        return None
    if not isinstance(embedding, str):
        return embedding
    check_embedding(embedding)
    from ragcache.retrieval.embeddings import MiniLM, SentenceEmbedder

    return MiniLM() if embedding in ("auto", "minilm") else SentenceEmbedder(embedding)


def has_minilm() -> bool:
    """Whether the embedder `minilm` is installed. Nothing is imported."""
    return find_spec(MINILM_PACKAGE) is not None


@cache
def _warn_once() -> None:
    _log.warning("%s", WORDS_ONLY)


def resolve_reranker(reranker: Reranker | str | None) -> Reranker | None:
    """The reranker of an option: itself, or the cross-encoder of a folder or hub name. Raises as
    `CrossEncoderReranker`."""
    return CrossEncoderReranker(reranker) if isinstance(reranker, str) else reranker
