"""Reranking: a cross-encoder reads the query with each candidate (Nogueira and Cho, 2019)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ragcache.config import check_reranker
from ragcache.errors import ModelNotFound


@runtime_checkable
class Reranker(Protocol):
    """Scores how well texts answer a query. Calls come from any number of threads."""

    def score_texts(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        """A score from 0 to 1 for each text; higher is better."""
        ...


class CrossEncoderReranker:
    """A cross-encoder of sentence-transformers with one logit (extra `sentence-transformers`).
    Thread-safe.

    Args:
        model: A folder or a hub name, such as `cross-encoder/ms-marco-MiniLM-L6-v2`.
        device: Where it runs.

    Raises:
        ConfigurationError: It is neither a folder nor a hub name, or has several logits.
        MissingExtra: sentence-transformers is not installed.
        ModelNotFound: The model is not on this machine and cannot be fetched.
    """

    def __init__(self, model: str, device: str = "cpu") -> None:
        check_reranker(model)
        import torch

        from ragcache.models.loader import quiet_loading

        with quiet_loading():
            from sentence_transformers import CrossEncoder

        self._scoring = threading.Lock()  # fast tokenizers are not thread-safe
        self._sigmoid = torch.nn.Sigmoid()
        try:
            self._model = CrossEncoder(model, device=device, num_labels=1)
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
