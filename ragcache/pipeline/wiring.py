"""What an open state folder is made of, and how the parts are connected."""

from __future__ import annotations

from dataclasses import dataclass

from langchain_core.embeddings import Embeddings

from ragcache.config import Settings
from ragcache.engine import Engine, EngineSettings
from ragcache.models import LoadedModel, prompt_frame
from ragcache.pipeline.answering import Answerer
from ragcache.pipeline.asked import Returned
from ragcache.pipeline.chat_text import ChatText
from ragcache.pipeline.chatting import ChatRunner
from ragcache.pipeline.encoding import ModuleEncoder, ModuleTokens
from ragcache.pipeline.ingestion import Ingestor
from ragcache.pipeline.inside import InsideText
from ragcache.pipeline.modules import Modules
from ragcache.pipeline.prompting import PromptRunner
from ragcache.pipeline.scaffolds import Scaffolds
from ragcache.pipeline.scope_states import ScopeEncoder
from ragcache.pipeline.submitting import Submitter
from ragcache.pipeline.template_text import TemplateText
from ragcache.pipeline.tokenizing import SharedModel
from ragcache.recognition import Recogniser
from ragcache.retrieval import Retrievers
from ragcache.retrieval.embedders import embedder_name
from ragcache.store import Catalogue, Database, KVStore, ScaffoldRows, SchemaTexts


@dataclass(frozen=True, slots=True)
class Parts:
    """What a `RagCache` is made of."""

    database: Database
    model: LoadedModel
    engine: Engine
    store: KVStore
    catalogue: Catalogue
    returned: Returned
    ingestor: Ingestor
    answerer: Answerer
    prompts: PromptRunner
    chats: ChatRunner
    modules: Modules
    retrievers: Retrievers

    @classmethod
    def wire(
        cls, database: Database, store: KVStore, model: LoadedModel,
        embedder: Embeddings | None, settings: Settings,
    ) -> Parts:  # fmt: skip
        """Connects a store and a model, and starts the engine."""
        model = SharedModel.of(model)
        name = embedder_name(embedder) if embedder is not None else None
        catalogue = Catalogue(database, model.tokenizer_fingerprint, name)
        retrievers = Retrievers(catalogue, database, embedder)
        retriever = retrievers.of()
        engine = Engine(
            model.causal, EngineSettings(pool_bytes=settings.private_bytes, queue=settings.queue)
        )
        encoder = ModuleEncoder(model, prompt_frame(model.tokenizer), store, engine.encode)
        template = TemplateText(model)
        scopes = ScopeEncoder(model, template, store, engine.encode)
        returned = Returned()
        submitter = Submitter(model, engine, returned, settings)
        tokens = ModuleTokens(catalogue, model)
        scaffolds = Scaffolds(ScaffoldRows(database), settings.scaffold_after)
        return cls(
            database,
            model,
            engine,
            store,
            catalogue,
            returned,
            Ingestor(catalogue, store, encoder, retriever, settings),
            Answerer(catalogue, encoder, tokens, retriever, scaffolds, submitter),
            PromptRunner(SchemaTexts(database), scopes, template, submitter),
            ChatRunner(
                ChatText(model, template),
                InsideText(model, template),
                Recogniser(catalogue),
                catalogue,
                encoder,
                tokens,
                submitter,
            ),
            Modules(catalogue, store, encoder, tokens),
            retrievers,
        )

    def close(self, *, drain: bool) -> None:
        """Stops the engine, and closes store and ledger."""
        self.engine.close(drain=drain)
        self.returned.release()
        self.store.close()
        self.database.close()
