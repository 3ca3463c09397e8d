"""Embedders: the built-in all-MiniLM-L6-v2, and models of sentence-transformers."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from langchain_core.embeddings import Embeddings

from ragcache.config import MINILM_PACKAGE, check_embedding
from ragcache.errors import ModelNotFound

_MINILM_TOKENS = 256  # the model's `max_seq_length`: longest text of its training


class MiniLM(Embeddings):
    """all-MiniLM-L6-v2, with 384 dimensions, from a Python package that contains its weights.

    The model is loaded at the first text. Thread-safe.

    Raises:
        MissingExtra: The package is not installed.
    """

    def __init__(self) -> None:
        check_embedding("minilm")
        self._loaded: tuple[Any, Any] | None = None
        self._encoding = threading.Lock()  # fast tokenizers are not thread-safe

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        if not texts:
            return []
        with self._encoding:
            rows: list[list[float]] = self._mean_states(texts)
        return rows

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]

    def _mean_states(self, texts: list[str]) -> list[list[float]]:
        """Return the mean of the last layer's states for each text, as unit vectors [N, D].

        The model's modules.json defines it so. Importing transformers alone takes a tenth of the
        time of importing sentence-transformers.
        """
        import torch

        if self._loaded is None:
            self._loaded = _load_minilm()
        tokenizer, model = self._loaded
        batch = tokenizer(
            texts, padding=True, truncation=True, max_length=_MINILM_TOKENS, return_tensors="pt"
        )
        with torch.inference_mode():
            states = model(**batch).last_hidden_state  # [N, T, D]
            counted = batch["attention_mask"].unsqueeze(-1)  # [N, T, 1]
            means = (states * counted).sum(1) / counted.sum(1)
            rows: list[list[float]] = torch.nn.functional.normalize(means).tolist()
        return rows


def _load_minilm() -> tuple[Any, Any]:
    from ragcache.models.quiet import quiet_loading

    spec = find_spec(MINILM_PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    with quiet_loading():
        from transformers import AutoModel, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModel.from_pretrained(folder, local_files_only=True)
    return tokenizer, model.float().eval()


class SentenceEmbedder(Embeddings):
    """An embedding model of sentence-transformers (extra of that name). Thread-safe.

    Args:
        model: A folder or a hub name, such as `BAAI/bge-small-en-v1.5`.

    Raises:
        MissingExtra: sentence-transformers is not installed.
        ModelNotFound: The model is not on this machine and cannot be fetched.
    """

    def __init__(self, model: str) -> None:
        check_embedding(model)
        from ragcache.hub import is_cached_name
        from ragcache.models.quiet import quiet_loading

        with quiet_loading():
            from sentence_transformers import SentenceTransformer

        self.model_name = model
        self._encoding = threading.Lock()
        try:
            cached = is_cached_name(model)
            self._model = SentenceTransformer(model, device="cpu", local_files_only=cached)
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelNotFound(
                f"cannot load the embedding model {model!r}: {error}. Give a folder, or the name "
                "of a hub model that this machine has or can reach; embedding 'minilm' needs no "
                "hub, and 'none' finds documents by their words"
            ) from error

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        with self._encoding:
            rows: list[list[float]] = self._model.encode_document(
                texts, show_progress_bar=False
            ).tolist()
        return rows

    def embed_query(self, text: str) -> list[float]:
        with self._encoding:
            row: list[float] = self._model.encode_query(text, show_progress_bar=False).tolist()
        return row
