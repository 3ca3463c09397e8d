"""The facade: one object that wires model, store, retrieval, pipeline and engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Unpack

from langchain_core.embeddings import Embeddings

from ragcache.config import DEFAULT_K, Settings, parse_bytes
from ragcache.documents.source import DocumentSource
from ragcache.errors import ConfigurationError, StoreUnwritable
from ragcache.facade import Administration, Chats, Keeping, Prompts, Questions, Retrieval
from ragcache.models import LoadedModel, load_model
from ragcache.pipeline import Ingestion, Parts, generated_schema, members
from ragcache.pipeline.ingestion import Progress
from ragcache.retrieval.embeddings import MiniLM
from ragcache.store import Database, KVStore, TierOptions, open_tiers
from ragcache_schemas import Schema, expand


class RagCache(Questions, Prompts, Chats, Retrieval, Keeping, Administration):
    """An open state folder with a model. Make one with `RagCache.open`.

    Calls from any number of threads and tasks run together: the engine computes what is new of all
    of them step by step. The methods with an `a` before their name are for asyncio; no thread waits
    for an answer there, and cancelling the task gives the request up.
    """

    def __init__(self, parts: Parts, *, closes: bool = True) -> None:
        """closes: whether closing this object closes the folder."""
        self._parts = parts
        self._closes = closes

    @classmethod
    def open(
        cls,
        state: str | Path,
        model: str | Path | LoadedModel | None = None,
        *,
        embedding: Embeddings | str | None = None,
        module_tokens: int = 384,
        host_bytes: int | str = "2GiB",
        max_new_tokens: int = 64,
        private_bytes: int | str = "512MiB",
        queue: int = 1024,
        scaffold_after: int | None = None,
        ingestion_bytes: int | str = "256MiB",
        **tiers: Unpack[TierOptions],
    ) -> RagCache:
        """Opens a state folder, making it if need be.

        model: None is the embedded reader; a folder, a hub name, or a model already loaded.
        embedding: None retrieves by words alone (BM25); `"minilm"` or any LangChain `Embeddings`
        adds meaning. private_bytes: room for the states of questions and answers. queue: the most
        requests that wait; one more raises `QueueFull`. scaffold_after: how often the same modules
        are retrieved in one order before they become a scaffold (see `add_scaffold`); None for
        never. ingestion_bytes: the most bytes of documents that `jobs.submit` lets wait; with more
        it raises `QueueFull`. tiers: see `TierOptions`. Raises `ConfigurationError`, `ModelError`
        or `StoreError`.
        """
        settings = Settings(
            module_tokens,
            parse_bytes(host_bytes),
            max_new_tokens,
            parse_bytes(private_bytes),
            queue,
            scaffold_after,
            parse_bytes(ingestion_bytes),
        )
        embedder = _embedder(embedding)
        folder = _state_folder(Path(state))
        loaded = model if isinstance(model, LoadedModel) else load_model(model)
        database = Database.open(tiers.get("ledger") or folder / "ledger.sqlite")
        chosen = open_tiers(tiers, loaded.causal.device)
        store = KVStore.open(folder, database, settings.host_bytes, **chosen)
        return cls(Parts.wire(database, store, loaded, embedder, settings))

    def __enter__(self) -> RagCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, *, drain: bool = False) -> None:
        """Stops the engine and closes the ledger. What still runs fails with `EngineClosed`, or is
        waited for with `drain`. Everything that was stored is on disk already. One that `within`
        made closes nothing."""
        if self._closes:
            self._parts.close(drain=drain)

    @property
    def namespace(self) -> str:
        """Whose collections, schemas and modules these are."""
        return self._parts.namespace

    def within(self, namespace: str) -> RagCache:
        """The same folder, model and engine for another tenant: its collections, schemas, modules
        and states are its own, and nothing of others is seen or reused.

        namespace: 1 to 64 letters, digits and `._-`; `default` is that of `open`. It is made with
        its first document. Raises `ConfigurationError`.
        """
        return RagCache(self._parts.within(namespace), closes=False)

    def ingest(
        self, collection: str, sources: Iterable[DocumentSource] | DocumentSource, *,
        progress: Progress | None = None,
    ) -> Ingestion:  # fmt: skip
        """Stores documents: files, folders, `SourceDocument`s or LangChain documents.

        A document that is known by its id and unchanged costs nothing. progress(done, total) is
        called with numbers of modules. Raises `DocumentError` before anything is stored.
        """
        if not collection.strip():
            raise ConfigurationError("a collection needs a name")
        self._parts.returned.release()
        return self._parts.ingestor.ingest(collection, sources, progress)

    def delete(self, collection: str, document_ids: Sequence[str]) -> int:
        """Deletes documents with their modules, vectors and states; returns how many."""
        return self._parts.ingestor.delete(collection, document_ids)

    def create_collection(self, collection: str) -> bool:
        """Makes a collection without documents; False where it is there already. `ingest` makes
        one with its first document. Raises `ConfigurationError`."""
        if not collection.strip():
            raise ConfigurationError("a collection needs a name")
        return self._parts.catalogue.add_collection(collection)

    def delete_collection(self, collection: str) -> int:
        """Deletes a collection with everything in it; returns how many documents there were.
        Raises `UnknownCollection`."""
        return self._parts.ingestor.delete_collection(collection)

    def add_scaffold(self, collection: str, ids: Sequence[str]) -> tuple[str, ...]:
        """Encodes modules of a collection together, each seeing those before it (Prompt Cache
        §3.3); returns their names.

        ids: of documents, which stand for all of their modules, or of modules. Questions that
        retrieve these modules in this order, next to each other, read the joint states, until a
        document of theirs changes. Raises `ConfigurationError`, `PromptTooLong` or
        `UnknownCollection`.
        """
        self._parts.returned.release()
        return self._parts.answerer.add_scaffold(collection, ids)

    def rename(self, collection: str, document_id: str, to: str) -> None:
        """Gives a document another id; nothing is encoded. Raises `UnknownCollection` or
        `DocumentError`."""
        self._parts.ingestor.rename(collection, document_id, to)

    def schema(self, collection: str, *, k: int = DEFAULT_K, expanded: bool = False) -> Schema:
        """The generated PML schema of a collection; `expanded` writes the slots' members out."""
        modules = self._parts.catalogue.modules(collection)
        schema = generated_schema(collection, self._parts.answerer.encoder.frame, k)
        return expand(schema, {collection: members(modules)}) if expanded else schema


def _embedder(embedding: Embeddings | str | None) -> Embeddings | None:
    if isinstance(embedding, str):
        if embedding != "minilm":
            raise ConfigurationError(
                f"unknown embedding {embedding!r}; give 'minilm' or a LangChain Embeddings object"
            )
        return MiniLM()
    return embedding


def _state_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnwritable(
            f"cannot make the state folder {folder}: {error.strerror or error}"
        ) from error
    return folder
