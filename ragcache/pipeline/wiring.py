"""What an open state folder is made of, and how the parts are connected."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from langchain_core.embeddings import Embeddings

from ragcache.config import NAMESPACE, Settings, check_namespace, salt_of
from ragcache.engine import EngineConfig, LLMEngine
from ragcache.models import LoadedModel, ThreadSafeTokenizer, prompt_frame
from ragcache.pipeline.answering import Answerer
from ragcache.pipeline.asked import Returned
from ragcache.pipeline.chat_text import ChatText
from ragcache.pipeline.chatting import ChatRunner
from ragcache.pipeline.ingesting import IngestionJobs
from ragcache.pipeline.ingestion import Ingestor
from ragcache.pipeline.inside import InsideText
from ragcache.pipeline.module_states import ModuleEncoder, ModuleTokens, Scaffolds, ScopeEncoder
from ragcache.pipeline.modules import Modules
from ragcache.pipeline.observing import Observing
from ragcache.pipeline.prompting import PromptRunner
from ragcache.pipeline.submitting import Submitter
from ragcache.pipeline.template_text import TemplateText
from ragcache.pipeline.worker import Worker
from ragcache.recognition import Recognizer
from ragcache.retrieval import Retrievers
from ragcache.retrieval.embeddings import embedder_name
from ragcache.store import Catalogue, Database, Keys, KVStore, ScaffoldRows, SchemaTexts


@dataclass(frozen=True, slots=True, eq=False)
class Common:
    """What the namespaces of an open state folder share. namespaces: those that were asked for."""

    database: Database
    model: LoadedModel
    engine: LLMEngine
    store: KVStore
    returned: Returned
    embedder: Embeddings | None
    settings: Settings
    template: TemplateText
    keys: Keys
    worker: Worker
    observing: Observing
    namespaces: dict[str, Parts] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What a `RagCache` is made of: the parts of one namespace, and those that all share."""

    namespace: str
    common: Common
    catalogue: Catalogue
    ingestor: Ingestor
    answerer: Answerer
    prompts: PromptRunner
    chats: ChatRunner
    modules: Modules
    retrievers: Retrievers
    jobs: IngestionJobs

    @classmethod
    def wire(
        cls, database: Database, store: KVStore, model: LoadedModel,
        embedder: Embeddings | None, settings: Settings,
    ) -> Parts:  # fmt: skip
        """Connects a store and a model, and starts the engine."""
        model = ThreadSafeTokenizer.of(model)
        engine = LLMEngine(
            model.causal, EngineConfig(pool_bytes=settings.private_bytes, queue=settings.queue)
        )
        template = TemplateText(model)
        common = Common(
            database,
            model,
            engine,
            store,
            Returned(),
            embedder,
            settings,
            template,
            Keys(database),
            Worker(settings.ingestion_bytes),
            Observing(),
        )
        return _parts(common, NAMESPACE)

    def within(self, namespace: str) -> Parts:
        """The parts of another namespace, made at the first call. Raises `ConfigurationError`."""
        return _parts(self.common, check_namespace(namespace))

    @property
    def database(self) -> Database:
        return self.common.database

    @property
    def model(self) -> LoadedModel:
        return self.common.model

    @property
    def engine(self) -> LLMEngine:
        return self.common.engine

    @property
    def store(self) -> KVStore:
        return self.common.store

    @property
    def returned(self) -> Returned:
        return self.common.returned

    def close(self, *, drain: bool) -> None:
        """Stops the engine, and closes store and ledger, for all namespaces. An ingestion in the
        background is interrupted, also with `drain`: it may take hours, and goes on where it was.
        """
        self.common.worker.halt()
        self.engine.close(drain=drain)
        self.common.worker.join()
        self.common.observing.close()
        self.returned.release()
        self.common.keys.flush()
        self.store.close()
        self.database.close()


def _parts(common: Common, namespace: str) -> Parts:
    with common.lock:
        found = common.namespaces.get(namespace)
        if found is None:
            found = common.namespaces[namespace] = _wire(common, namespace)
        return found


def _wire(common: Common, namespace: str) -> Parts:
    """State keys are salted, so that a document which another namespace has encoded is no faster
    here; private states are shared within the namespace alone."""
    database, model, store = common.database, common.model, common.store
    salt, encode = salt_of(namespace), common.engine.encode
    name = embedder_name(common.embedder) if common.embedder is not None else None
    catalogue = Catalogue(database, model.tokenizer_fingerprint, name, namespace)
    retrievers = Retrievers(catalogue, database, common.embedder)
    retriever = retrievers.of()
    encoder = ModuleEncoder(model, prompt_frame(model.tokenizer), store, encode, salt)
    scopes = ScopeEncoder(model, common.template, store, encode, salt)
    submitter = Submitter(
        model, common.engine, common.returned, common.settings, namespace, common.observing
    )
    tokens = ModuleTokens(catalogue, model)
    ingestor = Ingestor(catalogue, store, encoder, retriever, common.settings)
    rows = store.jobs.within(namespace)
    scaffolds = Scaffolds(ScaffoldRows(database, namespace), common.settings.scaffold_after)
    return Parts(
        namespace,
        common,
        catalogue,
        ingestor,
        Answerer(catalogue, encoder, tokens, retriever, scaffolds, submitter),
        PromptRunner(SchemaTexts(database, namespace), scopes, common.template, submitter),
        ChatRunner(
            ChatText(model, common.template),
            InsideText(model, common.template),
            Recognizer(catalogue),
            catalogue,
            encoder,
            tokens,
            submitter,
        ),
        Modules(catalogue, store, encoder, tokens),
        retrievers,
        IngestionJobs(rows, ingestor, common.returned, common.worker),
    )
