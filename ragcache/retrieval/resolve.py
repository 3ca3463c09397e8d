"""Embedders and rerankers from options. Heavy libraries are imported at their first use."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ragcache.config import MINILM_PACKAGE, check_embedding, check_reranker
from ragcache.errors import ModelNotFound

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

_log = logging.getLogger(__name__)

WORDS_ONLY = (
    "documents are found by their words only (BM25), not by meaning: "
    "pip install 'ragcache[minilm]', or choose this with embedding 'none'"
)


def resolve_embedder(embedding: Embeddings | str | None) -> Embeddings | None:
    """Return the embedder of an option `embedding`.

    Args:
        embedding: An embedder, `minilm`, or a folder or hub name. `none` gives no embedder. `auto`
            is `minilm`; if that is not installed, a warning is logged once and there is no
            embedder, so documents are found by their words.

    Raises:
        ConfigurationError: The option is neither a name nor a folder.
        MissingExtra: A package is not installed.
        ModelNotFound: The model cannot be loaded.
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
    """Tell whether the embedder `minilm` is installed, without importing it."""
    return find_spec(MINILM_PACKAGE) is not None


@cache
def _warn_once() -> None:
    _log.warning("%s", WORDS_ONLY)


@runtime_checkable
class Reranker(Protocol):
    """Scores how well texts answer a query (Nogueira and Cho, 2019). Must be thread-safe."""

    def score_texts(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        """Return a score for each text, 0 to 1; higher is better."""
        ...


class CrossEncoderReranker:
    """A cross-encoder of sentence-transformers with one logit (extra `sentence-transformers`).
    Thread-safe.

    Args:
        model: A folder or a hub name, such as `cross-encoder/ms-marco-MiniLM-L6-v2`.
        device: PyTorch device of the model.

    Raises:
        ConfigurationError: `model` is neither a folder nor a hub name, or has several logits.
        MissingExtra: sentence-transformers is not installed.
        ModelNotFound: The model is not on this machine and cannot be fetched.
    """

    def __init__(self, model: str, device: str = "cpu") -> None:
        check_reranker(model)
        import torch

        from ragcache.hub import is_cached_name
        from ragcache.models.quiet import quiet_loading

        with quiet_loading():
            from sentence_transformers import CrossEncoder

        self.model_name = model
        self._scoring = threading.Lock()  # fast tokenizers are not thread-safe
        self._sigmoid = torch.nn.Sigmoid()
        try:
            cached = is_cached_name(model)
            self._model = CrossEncoder(model, device=device, num_labels=1, local_files_only=cached)
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelNotFound(
                f"cannot load the reranker {model!r}: {error}. Give a folder, or the name of a hub "
                "model with one logit that this machine has or can reach; without `reranker` "
                "nothing is reranked"
            ) from error

    def score_texts(self, query: str, texts: Sequence[str]) -> list[float]:
        pairs = [(query, text.strip()) for text in texts]
        with self._scoring:
            scores: list[float] = self._model.predict(
                pairs, activation_fn=self._sigmoid, show_progress_bar=False
            ).tolist()
        return scores


def resolve_reranker(reranker: Reranker | str | None) -> Reranker | None:
    """Return the reranker of an option: the object itself, or a named `CrossEncoderReranker`.

    Raises the errors of `CrossEncoderReranker`.
    """
    return CrossEncoderReranker(reranker) if isinstance(reranker, str) else reranker
