"""The retrievers of one catalogue: one for each embedder."""

from __future__ import annotations

import threading

from langchain_core.embeddings import Embeddings

from ragcache.retrieval.embedders import embedder_name
from ragcache.retrieval.retriever import Retriever
from ragcache.store import Catalogue, Database, Vectors


class Retrievers:
    """Retrievers by embedder. Thread-safe; embedders of one name share vectors and index."""

    def __init__(
        self, catalogue: Catalogue, database: Database, embedder: Embeddings | None
    ) -> None:
        self._catalogue = catalogue
        self._database = database
        self._known: dict[str, Retriever] = {}
        self._finding = threading.Lock()
        self._first = Retriever(catalogue) if embedder is None else self.of(embedder)

    def of(self, embedder: Embeddings | None = None) -> Retriever:
        """The retriever of an embedder; without, that of the embedder that there is, or by words
        alone."""
        if embedder is None:
            return self._first
        name = embedder_name(embedder)
        with self._finding:
            found = self._known.get(name)
            if found is None:
                vectors = Vectors(self._database, name, self._catalogue.namespace)
                found = self._known[name] = Retriever(self._catalogue, embedder, vectors)
        return found if found.embedder is embedder else found.using(embedder)
