"""The facade: one object that wires model, store, retrieval and pipeline."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Unpack, get_args

from langchain_core.embeddings import Embeddings

from ragcache.config import DEFAULT_K, Settings, check_mode, parse_bytes
from ragcache.documents.source import Source
from ragcache.errors import ConfigurationError, StoreUnwritable
from ragcache.models import LoadedModel, load_model, prompt_frame
from ragcache.pipeline import (
    Answer,
    Answerer,
    Ingestion,
    Ingestor,
    ModuleEncoder,
    Modules,
    ModuleTokens,
    PromptRunner,
    ScopeEncoder,
    TemplateText,
    generated_schema,
    members,
)
from ragcache.pipeline.ingestion import Progress
from ragcache.retrieval import Retriever
from ragcache.retrieval.embedders import MiniLM, embedder_name
from ragcache.store import (
    Catalogue,
    Database,
    KVStore,
    ModuleListing,
    SchemaTexts,
    TierOptions,
    Vectors,
    list_modules,
    open_tiers,
)
from ragcache_schemas import Placement, Schema, expand


@dataclass(frozen=True, slots=True)
class Stats:
    """What is kept and what happened. tiers: by tier, states, bytes, tokens and hits of all time.

    evictions: by tier and reason, and how many of them were fetched again. encoded: modules encoded
    since this process opened the state folder; corrupt: blobs that failed their checksum and were
    encoded again; host_evictions: states that left memory for lack of room.
    """

    model: str
    collections: dict[str, int]
    tiers: dict[str, dict[str, int]]
    evictions: dict[str, dict[str, int]]
    host_budget_bytes: int
    encoded: int
    corrupt: int
    host_evictions: int


@dataclass(frozen=True, slots=True)
class Parts:
    """What a `RagCache` is made of."""

    database: Database
    model: LoadedModel
    store: KVStore
    catalogue: Catalogue
    ingestor: Ingestor
    answerer: Answerer
    prompts: PromptRunner
    modules: Modules

    @classmethod
    def wire(
        cls, database: Database, store: KVStore, model: LoadedModel,
        embedder: Embeddings | None, settings: Settings,
    ) -> Parts:  # fmt: skip
        """Connects a store and a model."""
        name = embedder_name(embedder) if embedder is not None else None
        catalogue = Catalogue(database, model.tokenizer_fingerprint, name)
        vectors = Vectors(database, name) if name is not None else None
        encoder = ModuleEncoder(model, prompt_frame(model.tokenizer), store)
        retriever = Retriever(catalogue, embedder, vectors)
        tokens = ModuleTokens(catalogue, model)
        template = TemplateText(model)
        scopes = ScopeEncoder(model, template, store)
        return cls(
            database,
            model,
            store,
            catalogue,
            Ingestor(catalogue, store, encoder, retriever, settings),
            Answerer(catalogue, encoder, tokens, retriever, settings),
            PromptRunner(SchemaTexts(database), scopes, template, settings),
            Modules(catalogue, store, encoder, tokens),
        )


class RagCache:
    """An open state folder with a model. Make one with `RagCache.open`.

    Calls from several threads are answered one after another.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._turn = threading.RLock()

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
        **tiers: Unpack[TierOptions],
    ) -> RagCache:
        """Opens a state folder, making it if need be.

        model: None is the embedded reader; a folder, a hub name, or a model already loaded.
        embedding: None retrieves by words alone (BM25); `"minilm"` or any LangChain `Embeddings`
        adds meaning. tiers: see `TierOptions`. Raises `ConfigurationError`, `ModelError` or
        `StoreError`.
        """
        settings = Settings(module_tokens, parse_bytes(host_bytes), max_new_tokens)
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

    def close(self) -> None:
        """Closes the ledger. Everything that was stored is on disk already."""
        self._parts.store.close()
        self._parts.database.close()

    def ingest(
        self, collection: str, sources: Iterable[Source] | Source, *,
        progress: Progress | None = None,
    ) -> Ingestion:  # fmt: skip
        """Stores documents: files, folders, `SourceDocument`s or LangChain documents.

        A document that is known by its id and unchanged costs nothing. progress(done, total) is
        called with numbers of modules. Raises `DocumentError` before anything is stored.
        """
        if not collection.strip():
            raise ConfigurationError("a collection needs a name")
        with self._turn:
            return self._parts.ingestor.ingest(collection, sources, progress)

    def delete(self, collection: str, document_ids: Sequence[str]) -> int:
        """Deletes documents with their modules, vectors and states; returns how many."""
        with self._turn:
            return self._parts.ingestor.delete(collection, document_ids)

    def rename(self, collection: str, document_id: str, to: str) -> None:
        """Gives a document another id; nothing is encoded. Raises `UnknownCollection` or
        `DocumentError`."""
        with self._turn:
            self._parts.ingestor.rename(collection, document_id, to)

    def ask(
        self, question: str, *, collection: str, k: int = DEFAULT_K, mode: str = "rooted"
    ) -> Answer:
        """Answers a question from the `k` best modules of a collection.

        mode: `rooted` (default), `isolated`, or `exact`, which reuses nothing. Raises
        `RequestError`.
        """
        return self.ask_batch([question], collection=collection, k=k, mode=mode)[0]

    def ask_batch(
        self, questions: Sequence[str], *, collection: str, k: int = DEFAULT_K, mode: str = "rooted"
    ) -> list[Answer]:
        """Answers questions together: every document that several share is read once a step."""
        if k < 1:
            raise ConfigurationError(f"k is {k}; at least one module is needed")
        checked = check_mode(mode)
        with self._turn:
            return self._parts.answerer.answer(questions, collection, k, checked)

    def add_schema(
        self, text: str, *, placement: Placement = "schema", source: str = "<string>"
    ) -> Schema:
        """Stores a hand-written PML schema and encodes its modules (Prompt Cache §3.3).

        placement: `schema`, the paper's fixed positions, or `compact`, which moves modules so that
        a prompt has no gaps. source: a file name, for errors. A schema of the same name is
        replaced. Raises `PMLError`.
        """
        if placement not in get_args(Placement):
            raise ConfigurationError(
                f"unknown placement {placement!r}; placements: {', '.join(get_args(Placement))}"
            )
        with self._turn:
            return self._parts.prompts.add(text, source, placement)

    def prompt(self, text: str, *, mode: str = "isolated", source: str = "<string>") -> Answer:
        """Answers a PML prompt (§3.4): imported modules are read, arguments and new text computed.

        mode: `isolated`, or `exact`, which computes everything. Raises `PMLError`, `UnknownSchema`
        or `PromptTooLong`.
        """
        checked = check_mode(mode)
        with self._turn:
            return self._parts.prompts.answer(text, checked, source)

    def schema(self, collection: str, *, k: int = DEFAULT_K, expanded: bool = False) -> Schema:
        """The generated PML schema of a collection; `expanded` writes the slots' members out."""
        modules = self._parts.catalogue.modules(collection)
        schema = generated_schema(collection, self._parts.answerer.encoder.frame, k)
        return expand(schema, {collection: members(modules)}) if expanded else schema

    @property
    def modules(self) -> Modules:
        """Warming, pinning, moving and evicting the states of documents."""
        return self._parts.modules

    def list_modules(self, collection: str | None = None) -> list[ModuleListing]:
        """Every module with the size, tiers and hits of its states."""
        self._parts.store.ledger.flush()
        return list_modules(self._parts.database, collection)

    def stats(self) -> Stats:
        """What is kept and what happened since this process opened the folder."""
        store = self._parts.store
        store.ledger.flush()
        return Stats(
            model=self._parts.model.name,
            collections=self._parts.catalogue.collections(),
            tiers={tier: asdict(sums) for tier, sums in store.ledger.totals().items()},
            evictions=store.ledger.evictions(),
            host_budget_bytes=store.host.budget_bytes or 0,
            encoded=store.counters.encoded,
            corrupt=store.counters.corrupt,
            host_evictions=store.counters.evictions["host", "pressure"],
        )


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
