"""The components of an open state folder and of its namespaces, and how they connect."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ragcache.answers.confidence import ModelCalibration
from ragcache.answers.quotations import Quotations
from ragcache.config import NAMESPACE, check_namespace, parse_optional_bytes, salt_of
from ragcache.db import (
    ApiKeys,
    Catalog,
    ConversationStates,
    Database,
    NamespaceDeletion,
    NamespaceRows,
    ScaffoldRows,
    SchemaTexts,
    StoredObjects,
)
from ragcache.db.observed import ObservedTexts
from ragcache.engine import EngineConfig, LLMEngine
from ragcache.engine.config import GPU_RESERVE
from ragcache.errors import EngineClosed, LedgerUnavailable, StoreError
from ragcache.machine import close_at_exit
from ragcache.models import INSTRUCTION, LoadedModel, prompt_frame
from ragcache.models.model import RECURRING_TOKENS
from ragcache.modes import ReuseMode
from ragcache.params import OpenConfig
from ragcache.pipeline.answer import DeferredReleases
from ragcache.pipeline.ask import AskPipeline
from ragcache.pipeline.chat import ChatPipeline, InContextTokenizer, PreparationTurns
from ragcache.pipeline.chat_template import ChatTemplate
from ragcache.pipeline.companions import Companions
from ragcache.pipeline.conversations import Conversations
from ragcache.pipeline.gate import ModeGate
from ragcache.pipeline.history import HistoryReads
from ragcache.pipeline.ingest import EncodingTurns, Ingestor
from ragcache.pipeline.ingestion_jobs import IngestionJobs, IngestionWorkers
from ragcache.pipeline.module_states import (
    ModuleEncoder,
    ModuleTokens,
    Scaffolds,
)
from ragcache.pipeline.modules import Modules
from ragcache.pipeline.observed import ObservedModules
from ragcache.pipeline.pins import Pins
from ragcache.pipeline.pml import PmlPipeline
from ragcache.pipeline.schema_states import ScopeEncoder
from ragcache.pipeline.submit import Submitter
from ragcache.recognition import Recognizer
from ragcache.retrieval import Reranker, Retrievers, embedder_name
from ragcache.states import KVKey
from ragcache.store import KVStore
from ragcache.store.admin import delete_namespace

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

logger = logging.getLogger(__name__)

_CONVERSATION_SECONDS = {"none": 0.0, "memory": 3600.0, "disk": 86_400.0}


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SharedServices:
    """Components of an open state folder that all of its namespaces share."""

    database: Database
    model: LoadedModel
    engine: LLMEngine
    store: KVStore
    deferred: DeferredReleases
    embedder: Embeddings | None
    config: OpenConfig
    template: ChatTemplate
    instruction: str
    keys: ApiKeys
    workers: IngestionWorkers
    gate: ModeGate
    calibration: ModelCalibration
    reranker: Reranker | None = None
    closed: threading.Event = field(default_factory=threading.Event, init=False)
    turns: EncodingTurns = field(default_factory=EncodingTurns, init=False)
    preparing: PreparationTurns = field(default_factory=PreparationTurns, init=False)
    observing: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "ragcache-observed"), init=False
    )
    """Encodes observed modules, and loads stored ones."""
    _background: list[threading.Thread] = field(default_factory=list, init=False)
    """Threads that the engine's end ends."""
    keeping: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "ragcache-conversations"), init=False
    )
    """Stores the states of conversations."""
    on_deletion: list[Callable[[str], object]] = field(default_factory=list, init=False)
    """Functions called with the name of a namespace that this or another process has deleted."""
    _pid: int = field(default_factory=os.getpid, init=False)
    _namespaces: dict[str, Namespace] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def default_mode(self) -> ReuseMode:
        """Mode of questions and chats that name none."""
        return self.config.default_mode or self.model.default_mode

    def mode_of(self, named: str | ReuseMode | None) -> ReuseMode:
        """Return the mode that a call names, or the default mode.

        Raises:
            ConfigurationError: The mode is unknown.
        """
        return self.default_mode if named is None else ReuseMode.parse(named)

    @classmethod
    def start(
        cls,
        database: Database,
        store: KVStore,
        model: LoadedModel,
        config: OpenConfig,
        *,
        embedder: Embeddings | None = None,
        reranker: Reranker | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        instruction: str = INSTRUCTION,
    ) -> SharedServices:
        """Connect a store with a model, and start the engine.

        Args:
            database: The ledger.
            store: The store of states.
            model: The model.
            config: Settings of the folder.
            embedder: Embedder of module texts. Without it only BM25 searches.
            reranker: Reranker of search results.
            template_kwargs: Variables of the chat template, already checked.
            instruction: Instruction of every preamble, already checked.
        """
        limits = EngineConfig.for_device(
            model.causal.device,
            pool_bytes=parse_optional_bytes(config.private_bytes),
            queue=config.queue,
            draft_tokens=config.draft_tokens,
            max_gap_ms=config.max_gap_ms,
            int8_states=config.device_kv_dtype == "int8",
            warm_up=config.warm_up,
        )
        with ExitStack() as started:
            engine = started.enter_context(LLMEngine(model.causal, limits))
            store.bind_device(engine.stream, keep_free=GPU_RESERVE + limits.encode_bytes)
            jobs = IngestionWorkers(
                store.jobs, lambda job: shared.namespace(job.namespace).jobs.run(job)
            )
            shared = cls(
                database,
                model,
                engine,
                store,
                DeferredReleases(),
                embedder,
                config,
                ChatTemplate(model, template_kwargs),
                instruction,
                ApiKeys(database, stale_seconds=config.stale_seconds),
                jobs,
                ModeGate(model, engine, store.ledger, config.force_modes, config.compose),
                ModelCalibration(model, instruction, store.ledger, config.force_modes),
                reranker,
            )
            store.memory.conversation_bytes = parse_optional_bytes(config.conversation_bytes)
            store.on_heartbeat += [shared.workers.wake, shared.keep_up]
            store.on_wait.append(shared.deferred.release_finished)
            close_at_exit(shared)
            started.pop_all()
        return shared

    def check_open(self) -> None:
        """Raise `EngineClosed` after `close`, and in a process that was forked after opening."""
        if self._pid != os.getpid():
            raise EngineClosed.of_fork()
        if self.closed.is_set():
            raise EngineClosed.of_folder()

    def run_in_background(self, task: Callable[[], object], name: str) -> None:
        """Run a task in a thread, which `close` waits for. A closed engine must end the task."""
        thread = threading.Thread(target=task, name=name, daemon=True)
        self._background.append(thread)
        thread.start()

    def join_background(self) -> None:
        """Wait for the tasks of `run_in_background`."""
        for thread in self._background:
            thread.join()

    def namespace(self, name: str = NAMESPACE) -> Namespace:
        """Return the components of a namespace, which the first call builds.

        Raises:
            ConfigurationError: The name cannot be used.
        """
        check_namespace(name)
        with self._lock:
            found = self._namespaces.get(name)
            if found is None:
                found = self._namespaces[name] = Namespace.build(name, self)
            return found

    def delete_namespace(self, name: str, *, dry_run: bool = False) -> NamespaceDeletion:
        """Delete a namespace with everything in it; see `Namespaces.delete`."""
        check_namespace(name)
        self.deferred.release()
        opened, roots, unstored = self._namespaces.get(name), set[KVKey](), 0
        if opened is not None:
            opened.modules.conversations.settle()
            roots, unstored = opened.modules.encoder.root_keys(), opened.modules.observed.unstored
        deletion = delete_namespace(self.store, name, roots, dry_run=dry_run)
        if not dry_run:
            self._end_namespaces([name])
        return replace(deletion, observed=deletion.observed + unstored)

    def keep_up(self) -> None:
        """Forget namespaces that other processes have deleted, and end expired pins and texts."""
        self._end_namespaces(NamespaceRows(self.database).find_deleted())
        for each in list(self._namespaces.values()):
            each.pins.end_expired()
            each.modules.observed.end_kept()
            each.modules.observed.end_unused()

    def _end_namespaces(self, names: Collection[str]) -> None:
        """Forget deleted namespaces. The next use of one of the names begins a new namespace.

        Until the end of this call, the ledger refuses to store anything for the old one.
        """
        for name in names:
            opened = self._namespaces.get(name)
            if opened is not None:
                opened.modules.conversations.end()
                opened.modules.observed.end()
                self.store.retire(opened.modules.encoder.root_keys())
            for follow in self.on_deletion:
                follow(name)
            with self._lock:
                self._namespaces.pop(name, None)
                self.database.namespaces.pop(name, None)
        if names:
            self.keys.forget()

    def close(self, *, drain: bool = False) -> None:
        """Stop the engine, and close store and ledger, for all namespaces.

        Does nothing in a forked process: connections and threads belong to its parent.

        Background ingestions are interrupted even with `drain`, because they may take hours. The
        next process that has the folder open continues them.

        Args:
            drain: Wait for running requests.
        """
        if self._pid != os.getpid() or self.closed.is_set():
            return
        self.workers.halt()
        self.observing.shutdown(wait=False, cancel_futures=True)
        self.engine.close(drain=drain)
        self.gate.join()
        self.join_background()
        self.observing.shutdown()
        self.keeping.shutdown()  # conversations of answers that have ended are stored
        self.workers.join()
        self.deferred.release()
        self.keys.flush()
        with suppress(LedgerUnavailable):  # a deletion since the last heartbeat
            self._end_namespaces(NamespaceRows(self.database).find_deleted())
        self.store.close()
        self.database.close()
        if self.config.tensor_parallel > 1:  # the folder was opened with a whole model
            self.model.causal.close()
        self.closed.set()


@dataclass(frozen=True, slots=True, eq=False)
class Namespace:
    """The components of one namespace.

    State keys are salted with the namespace, so that the time of an answer does not tell whether
    another namespace has encoded a document. Private states are shared within the namespace only.
    """

    name: str
    shared: SharedServices
    catalog: Catalog
    ingestor: Ingestor
    ask: AskPipeline
    pml: PmlPipeline
    chat: ChatPipeline
    submitter: Submitter
    modules: Modules
    retrievers: Retrievers
    jobs: IngestionJobs
    pins: Pins

    @classmethod
    def build(cls, name: str, shared: SharedServices) -> Namespace:
        """Build the components of a namespace on the shared ones."""
        try:
            NamespaceRows(shared.database).use(name)
        except StoreError as error:
            logger.warning("%s; a deletion of the namespace %r is not noticed", error, name)
        database, model, store = shared.database, shared.model, shared.store
        template, config = shared.template, shared.config
        salt, encode = salt_of(name), shared.engine.encode
        catalog = _catalog(shared, name)
        retrievers = Retrievers(catalog, database, shared.embedder, shared.reranker)
        retriever = retrievers.retriever_for()
        frame = prompt_frame(model.tokenizer, shared.instruction, template.kwargs)
        encoder = ModuleEncoder(model, store, encode, frame, salt=salt)
        scopes = ScopeEncoder(model, store, encode, template, salt=salt)
        tokens = ModuleTokens(catalog, model)
        ingestor = Ingestor(catalog, store, encoder, retriever, config, shared.turns)
        scaffolds = Scaffolds(ScaffoldRows(database, name))
        in_context = InContextTokenizer(template)
        observed = _observed_modules(shared, encoder, name)
        conversations = _conversations(shared, encoder, name)
        companions = Companions(catalog, tokens, retriever.indexes)
        modules = Modules(
            catalog,
            store,
            encoder,
            tokens,
            observed,
            conversations,
            shared.default_mode,
            companions,
        )
        pins = Pins(modules, store, StoredObjects(database, name))
        return cls(
            name,
            shared,
            catalog,
            ingestor,
            AskPipeline(catalog, encoder, template, tokens, retriever, scaffolds, companions),
            PmlPipeline(SchemaTexts(database, name), scopes, template),
            ChatPipeline(
                template,
                in_context,
                Recognizer(catalog),
                catalog,
                encoder,
                tokens,
                retriever,
                observed,
                companions,
                HistoryReads(conversations),
                shared.preparing,
            ),
            Submitter(
                model,
                shared.engine,
                shared.deferred,
                config,
                name,
                Quotations(model),
                shared.gate,
                shared.calibration,
                conversations,
            ),
            modules,
            retrievers,
            IngestionJobs(store.jobs.within(name), ingestor, shared.deferred, shared.workers),
            pins,
        )

    @property
    def ended(self) -> bool:
        """Whether the namespace was deleted. The components keep nothing in memory any more."""
        return self.modules.conversations.ended

    def encoder_of(self, collection: str) -> ModuleEncoder:
        """Return the encoder of a collection's modules, with the collection's texts."""
        return self.ask.encoder.with_texts(self.catalog.collection_texts(collection))


def _catalog(shared: SharedServices, name: str) -> Catalog:
    vectors = None if shared.embedder is None else embedder_name(shared.embedder)
    tokenizer, stale = shared.model.tokenizer_fingerprint, shared.config.stale_seconds
    note = shared.store.ledger.usage.note
    return Catalog(shared.database, tokenizer, vectors, name, stale, note)


def _conversations(shared: SharedServices, encoder: ModuleEncoder, name: str) -> Conversations:
    storage = shared.config.conversation_storage
    return Conversations(
        encoder,
        ConversationStates(shared.database, name),
        shared.keeping,
        storage,
        shared.config.conversation_seconds or _CONVERSATION_SECONDS[storage],
        shared.config.min_prefix_tokens,
        shared.engine.stats.prompt_rate,
    )


def _observed_modules(shared: SharedServices, encoder: ModuleEncoder, name: str) -> ObservedModules:
    stored = shared.config.observed_storage == "disk"
    observed = ObservedModules(
        shared.model,
        encoder,
        shared.gate,
        shared.observing,
        budget_bytes=_observed_bytes(shared.config, shared.store),
        min_module_tokens=shared.config.min_module_tokens,
        module_tokens=shared.model.causal.module_limit(
            shared.config.module_tokens, RECURRING_TOKENS
        ),
        is_idle=lambda: not shared.engine.core.busy,
        rows=ObservedTexts(shared.database, name) if stored else None,
    )
    with suppress(RuntimeError):  # the folder has been closed
        shared.observing.submit(observed.load)  # tokenizes texts, and a request waits for this
    return observed


def _observed_bytes(config: OpenConfig, store: KVStore) -> int:
    """Return the budget of observed modules: by default a tenth of the host tier's."""
    if not config.recognize_recurring:
        return 0
    own = parse_optional_bytes(config.observed_bytes)
    return (store.host.budget_bytes or 0) // 10 if own is None else own


@dataclass(frozen=True, slots=True)
class Stats:
    """Contents of the state folder, and counts of events since this process opened it."""

    model: str
    """Name of the model."""
    collections: dict[str, int]
    """Number of documents of each collection of the namespace."""
    tiers: dict[str, dict[str, int]]
    """States, bytes, tokens and hits of each tier. Hits count from the folder's beginning."""
    evictions: dict[str, dict[str, int]]
    """Evictions from each tier by reason, and how many of the states were fetched again."""
    host_budget_bytes: int
    """Budget of the host tier, in bytes."""
    encoded: int
    """Modules that were encoded."""
    corrupt: int
    """Blobs that failed their checksum or vanished, and were encoded again."""
    unreadable: int
    """Failed reads and writes of tiers and ledger."""
    unclaimed: int
    """States encoded for a single question, because the ledger did not respond or another process
    took too long to encode them."""
    host_evictions: int
    """States that left the host tier for lack of room."""

    @classmethod
    def of(cls, namespace: Namespace) -> Stats:
        store = namespace.shared.store
        store.ledger.flush()
        counted = store.counters
        return cls(
            model=namespace.shared.model.name,
            collections=namespace.catalog.collections(),
            tiers={tier: asdict(sums) for tier, sums in store.ledger.totals().items()},
            evictions=store.ledger.evictions(),
            host_budget_bytes=store.host.budget_bytes or 0,
            encoded=counted.encoded,
            corrupt=counted.corrupt,
            unreadable=counted.unreadable,
            unclaimed=counted.unclaimed,
            host_evictions=counted.evictions["host", "pressure"],
        )
