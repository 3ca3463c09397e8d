"""`RagCache`: an open state folder with a model, for documents and questions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragcache.config import check_texts
from ragcache.contents import Collections, Documents, Namespaces, Schemas
from ragcache.db import ApiKeys
from ragcache.documents import ReadOptions, load_sources
from ragcache.documents.source import DocumentSource
from ragcache.errors import InvalidRequest
from ragcache.models import LoadedModel
from ragcache.modes import ReuseMode
from ragcache.notebooks import notebook_progress
from ragcache.opening import open_folder, typed_by
from ragcache.options import AskOptions, ChatOptions, IngestOptions, PromptOptions, SearchOptions
from ragcache.params import OpenConfig, TakesOptions
from ragcache.pipeline import (
    Answer,
    AnswerStream,
    Conversation,
    DocumentSearch,
    Ingestion,
    Modules,
    Namespace,
    PendingAnswer,
    Pins,
    SharedServices,
    Stats,
)
from ragcache.pipeline.answer import results
from ragcache.pipeline.chat import kept_modules, select_given
from ragcache.pipeline.gate import ModeGate
from ragcache.pipeline.ingest import check_collection
from ragcache.pipeline.ingestion_jobs import IngestionJobs
from ragcache.retrieval import Retriever, Selection
from ragcache.store import TierStatus, tier_status
from ragcache.store.admin import delete_documents

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings


class RagCache:
    """An open state folder with a model, which stores documents and answers questions.

    Every method is safe to call from many threads and tasks at once: the engine computes their
    tokens together, step by step. After `close`, every method but `close` raises `EngineClosed`.
    `AsyncRagCache` has the same methods for asyncio.

    Example:
        >>> with RagCache.open("state") as rag:
        ...     ingestion = rag.ingest("handbook", ["docs/"])
        ...     answer = rag.ask("How many days of leave are there?", collection="handbook")
    """

    def __init__(self, internals: Namespace, *, closes: bool = True) -> None:
        """Use the components of an open folder. `RagCache.open` makes them.

        Args:
            internals: The components.
            closes: Whether `close` closes the folder.
        """
        self._internals = internals
        self._closes = closes

    def __repr__(self) -> str:
        shared = self._internals.shared
        folder = str(shared.store.disk.folder.parent)
        closed = ", closed" if shared.closed.is_set() else ""
        model, namespace = shared.model.name, self.namespace
        return f"RagCache({folder!r}, model={model!r}, namespace={namespace!r}{closed})"

    def _repr_html_(self) -> str:
        """Return the folder with its first collections for notebooks."""
        closed = self._internals.shared.closed.is_set()
        table = "" if closed else self.collections._repr_html_()
        return f"<p><code>{escape(repr(self))}</code></p>{table}"

    @property
    def internals(self) -> Namespace:
        """Components of the namespace and, in `internals.shared`, of the folder.

        For services and tools that inspect the store, the engine or the model.

        Raises:
            EngineClosed: The folder was closed, or opened before this process was forked.
        """
        shared = self._internals.shared
        shared.check_open()
        if self._internals.ended:  # the namespace was deleted, and may be used again
            self._internals = shared.namespace(self.namespace)
        return self._internals

    @property
    def _shared(self) -> SharedServices:
        return self.internals.shared

    @classmethod
    def _open(
        cls, state: str | Path, model: str | Path | LoadedModel | None = None, **options: Any
    ) -> RagCache:
        """Open a state folder, which is created if it does not exist.

        Args:
            state: The folder.
            model: A folder, a hub name or a loaded model. Defaults to the embedded reader.
            **options: Fields of `OpenConfig`, such as `host_bytes="8GiB"`.

        Returns:
            The open folder. `close`, or the end of a `with` block, closes it.

        Raises:
            ConfigurationError: An option is unknown or has a value that cannot be used.
            ModelError: The model cannot be loaded or is not supported.
            StoreError: The folder cannot be opened.

        Example:
            >>> from ragcache import RagCache
            >>> rag = RagCache.open("state", host_bytes="1GiB", max_tokens=16)
        """
        return cls(open_folder(Path(state), model, OpenConfig(**options)).namespace())

    open = typed_by(OpenConfig, _open)

    def __enter__(self) -> RagCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self, *, drain: bool = False) -> None:
        """Close the folder, and stop the engine. On an object of `within` it does nothing.

        Args:
            drain: Wait for running requests. By default they fail with `EngineClosed`.
        """
        if self._closes:
            self._internals.shared.close(drain=drain)

    @property
    def namespace(self) -> str:
        """Name of the namespace."""
        return self._internals.name

    def within(self, namespace: str) -> RagCache:
        """Return the same folder, model and engine for another tenant.

        A namespace has its own collections, schemas, modules and states. It neither sees nor reuses
        anything of other namespaces. Its first use creates it; `RagCache.namespaces` deletes it.

        Args:
            namespace: 1 to 64 letters, digits and `._-`. `RagCache.open` uses `default`.

        Returns:
            A `RagCache` whose methods act on the namespace.

        Raises:
            ConfigurationError: The name cannot be used.

        Example:
            >>> rag.within("tenant-2").stats().collections
            {}
        """
        return RagCache(self._shared.namespace(namespace), closes=False)

    @TakesOptions(IngestOptions)
    def ingest(
        self,
        collection: str,
        sources: Iterable[DocumentSource] | DocumentSource,
        options: IngestOptions,
    ) -> Ingestion:
        """Store documents and encode their modules.

        Documents that are stored already are skipped. Files that cannot be read are skipped, too,
        and listed in the summary.

        Args:
            collection: The collection, which is created if there is none.
            sources: Files, folders, `SourceDocument`s or LangChain documents.
            options: Keywords of `IngestOptions`.

        Returns:
            A summary of the ingestion.

        Raises:
            DocumentError: A path does not exist, no document can be read or, with `strict`, one of
                them cannot. Nothing is stored.
            ConfigurationError: The name is blank, an option is unknown, or a module does not fit
                the model's window.
            JobCanceled: The ingestion was canceled (`RagCache.jobs`).

        Example:
            >>> from ragcache import SourceDocument
            >>> leave = SourceDocument("leave.md", "There are 28 days of leave a year.")
            >>> rag.ingest("handbook", [leave]).added
            1
        """
        return self._ingest(collection, sources, options, sync=False)

    @TakesOptions(IngestOptions)
    def sync(
        self,
        collection: str,
        sources: Iterable[DocumentSource] | DocumentSource,
        options: IngestOptions,
    ) -> Ingestion:
        """Store documents as `ingest` does, and remove documents that no longer exist.

        From folders, removes the documents whose files no longer exist. Without a folder among the
        sources, removes all other documents of the collection. Documents that have moved are
        renamed and not encoded again.

        Args:
            collection: The collection, which is created if there is none.
            sources: Files, folders, `SourceDocument`s or LangChain documents.
            options: Keywords of `IngestOptions`.

        Returns:
            A summary, with the `removed` and the `renamed` documents.

        Raises:
            DocumentError: As in `ingest`, or others changed a renamed document at the same time.
            ConfigurationError: As in `ingest`.
            JobCanceled: The ingestion was canceled (`RagCache.jobs`).

        Example:
            >>> rag.sync("handbook", [leave]).unchanged
            1
        """
        return self._ingest(collection, sources, options, sync=True)

    def _ingest(
        self,
        collection: str,
        sources: Iterable[DocumentSource] | DocumentSource,
        options: IngestOptions,
        *,
        sync: bool,
    ) -> Ingestion:
        check_collection(collection)
        limits = ReadOptions.of(self._shared.config)
        loaded = load_sources(sources, options.files, options.reading, limits)
        self._shared.deferred.release()
        return self.internals.ingestor.ingest(
            collection,
            loaded,
            options.progress or notebook_progress("encoding modules"),
            sync=sync,
            preparing=options.preparing,
        )

    @property
    def jobs(self) -> IngestionJobs:
        """Ingestion in the background, and the outcomes of all ingestions."""
        return self.internals.jobs

    def delete(self, collection: str, document_ids: Sequence[str]) -> int:
        """Delete documents with their modules, vectors and states.

        Args:
            collection: The collection.
            document_ids: Ids of the documents. Unknown ids are skipped.

        Returns:
            The number of deleted documents.

        Raises:
            UnknownCollection: There is no such collection.

        Example:
            >>> rag.delete("handbook", ["unknown.md"])
            0
        """
        check_texts("document_ids", document_ids)
        return delete_documents(
            self.internals.catalog, self._shared.store, collection, document_ids
        )

    @TakesOptions(AskOptions)
    def ask(self, question: str, options: AskOptions) -> Answer:
        """Answer a question from the best modules of a collection.

        Args:
            question: The question.
            options: Keywords of `AskOptions`; `collection` is required.

        Returns:
            The answer, with its sources.

        Raises:
            RequestError: The question is blank or too long, or an option has a value that cannot be
                used.
            UnknownCollection: There is no such collection.
            ConfigurationError: An option or the mode is unknown, or `collection` is missing.

        Example:
            >>> answer = rag.ask("How many days of leave are there?", collection="handbook", k=2)
            >>> answer.sources[0].document
            'leave.md'
        """
        return AnswerStream(*self._start_questions([question], options)).result()

    @TakesOptions(AskOptions)
    def ask_batch(self, questions: Sequence[str], options: AskOptions) -> list[Answer]:
        """Answer questions as one batch, with the options and errors of `ask`.

        A module that several questions share is read once per step of the engine. If one question
        fails, all are canceled.

        Args:
            questions: The questions.
            options: Keywords of `AskOptions`; `collection` is required.

        Returns:
            The answers, in the order of the questions.

        Example:
            >>> questions = ["How many days of leave are there?", "Who has leave?"]
            >>> len(rag.ask_batch(questions, collection="handbook"))
            2
        """
        check_texts("questions", questions)
        return results(self._start_questions(questions, options))

    @TakesOptions(AskOptions)
    def stream(self, question: str, options: AskOptions) -> AnswerStream:
        """Queue a question, and return a stream of pieces of its answer.

        Args:
            question: The question.
            options: Keywords of `AskOptions`; `collection` is required.

        Returns:
            A stream. Its `answer` is the whole answer.

        Raises:
            RequestError: As in `ask`. The stream raises errors of the answer itself.
            UnknownCollection: There is no such collection.
            ConfigurationError: As in `ask`.

        Example:
            >>> stream = rag.stream("How many days of leave are there?", collection="handbook")
            >>> pieces = list(stream)
        """
        return AnswerStream(*self._start_questions([question], options))

    def _start_questions(
        self, questions: Sequence[str], options: AskOptions
    ) -> list[PendingAnswer]:
        mode = self._shared.mode_of(options.mode)
        selection = _single_selection(options.selection, len(questions))
        build = partial(
            self.internals.ask.prepare_prompts,
            questions,
            options.collection,
            options,
            template_kwargs=options.chat_template_kwargs,
            selection=selection,
        )
        return self.internals.submitter.build_and_run(build, mode, options.generation)

    @TakesOptions(ChatOptions)
    def chat(self, messages: Conversation, options: ChatOptions) -> Answer:
        """Answer a conversation, formatted with the model's chat template.

        Texts of ingested modules in the conversation are read from their stored states.
        `answer.sources` lists these modules in the order of the prompt. `answer.mode` is then
        `recognized:MODE`, otherwise `exact`. Control tokens in messages are ordinary text.

        With `collection`, retrieved documents are put before the user's last message. The rest of
        the conversation, results of tools included, and `tools` stay in the prompt.

        Args:
            messages: Messages `{"role": "system|user|assistant|tool", "content": text}`, or a plain
                text or token ids to continue.
            options: Keywords of `ChatOptions`.

        Returns:
            The answer.

        Raises:
            RequestError: The conversation is malformed or too long, or an option has a value that
                cannot be used.
            ConfigurationError: An option or the mode is unknown.

        Example:
            >>> text = "There are 28 days of leave a year. How many weeks is that?"
            >>> rag.chat([{"role": "user", "content": text}]).mode
            'recognized:rooted'
        """
        return AnswerStream(*self._start_chats([messages], options)).result()

    @TakesOptions(ChatOptions)
    def chat_batch(
        self, conversations: Sequence[Conversation], options: ChatOptions
    ) -> list[Answer]:
        """Answer conversations as one batch, with the options and errors of `chat`.

        A module that several conversations share is read once per step of the engine. If one
        conversation fails, all are canceled.

        Args:
            conversations: The conversations.
            options: Keywords of `ChatOptions`.

        Returns:
            The answers, in the order of the conversations.
        """
        return results(self._start_chats(conversations, options))

    @TakesOptions(ChatOptions)
    def stream_chat(self, messages: Conversation, options: ChatOptions) -> AnswerStream:
        """Queue a conversation, and return a stream of pieces of its answer.

        Takes the arguments of `chat` and raises its errors.
        """
        return AnswerStream(*self._start_chats([messages], options))

    @TakesOptions(ChatOptions)
    def stream_chat_batch(
        self, conversations: Sequence[Conversation], options: ChatOptions
    ) -> list[AnswerStream]:
        """Queue conversations as one batch, and return a stream for each, in order.

        Takes the arguments of `chat_batch` and raises its errors.
        """
        return [AnswerStream(pending) for pending in self._start_chats(conversations, options)]

    def _start_chats(
        self, conversations: Sequence[Conversation], options: ChatOptions
    ) -> list[PendingAnswer]:
        mode, generation = self._shared.mode_of(options.mode), options.generation
        if options.tools and generation.confidence is None:
            generation = generation.replace(confidence=False)  # a call is not to be refused
        search, keep = None, options.keep
        if options.collection is not None:
            selection = _single_selection(options.selection, len(conversations))
            search = DocumentSearch(options.collection, options, selection)
        elif options.documents:
            config, model = self._shared.config, self._shared.model
            selection = select_given(options.documents, model, config.module_tokens)
            search = DocumentSearch("", options, selection)
            keep = kept_modules(keep, options.documents, selection)
        call, prepare = options.call(search, keep), self.internals.chat.prepare_prompts
        return self.internals.submitter.build_and_run(
            lambda mode: prepare(conversations, replace(call, mode=mode)), mode, generation
        )

    @TakesOptions(PromptOptions)
    def prompt(self, text: str, options: PromptOptions) -> Answer:
        """Answer a PML prompt (Prompt Cache §3.4).

        The states of imported modules are read. Arguments and new text are computed.

        Args:
            text: The prompt.
            options: Keywords of `PromptOptions`.

        Returns:
            The answer.

        Raises:
            PMLError: The prompt is not valid.
            UnknownSchema: There is no such schema.
            RequestError: The prompt is too long, or an option has a value that cannot be used.
            ConfigurationError: An option is unknown, or the mode does not suit PML prompts.

        Example:
            >>> trip = '<schema name="trip"><module name="sea">The tide is out.</module></schema>'
            >>> schema = rag.schemas.add(trip)
            >>> rag.prompt('<prompt schema="trip"><sea/>When is it in?</prompt>').mode
            'isolated'
        """
        return AnswerStream(*self._start_prompts([text], options)).result()

    @TakesOptions(PromptOptions)
    def stream_prompt(self, text: str, options: PromptOptions) -> AnswerStream:
        """Queue a PML prompt, and return a stream of pieces of its answer.

        Takes the arguments of `prompt` and raises its errors.
        """
        return AnswerStream(*self._start_prompts([text], options))

    def _start_prompts(self, texts: Sequence[str], options: PromptOptions) -> list[PendingAnswer]:
        build = self.internals.pml.build
        return self.internals.submitter.build_and_run(
            lambda mode: [build(text, mode, options.source) for text in texts],
            ReuseMode.parse(options.mode),
            options.generation,
        )

    @TakesOptions(SearchOptions)
    def retrieve(self, query: str, options: SearchOptions) -> Selection:
        """Find the best modules for a query, without running the model.

        Args:
            query: The query.
            options: Keywords of `SearchOptions`; `collection` is required.

        Returns:
            The modules with their scores, the best one first. `ask` takes it as `selection`.

        Raises:
            UnknownCollection: There is no such collection.
            InvalidRequest: An option has a value that cannot be used.
            ConfigurationError: An option is unknown, or `collection` is missing.

        Example:
            >>> found = rag.retrieve("days of leave", collection="handbook", search="sparse")
            >>> found.hits[0].module.document
            'leave.md'
        """
        return self.retriever().retrieve(query, options.collection, options)

    def retriever(self, embedding: Embeddings | None = None) -> Retriever:
        """Return the retriever of this folder, or a retriever with another embedder.

        Args:
            embedding: The other embedder. The first search computes and stores its vectors.
                Defaults to the embedder of `RagCache.open`.
        """
        return self.internals.retrievers.retriever_for(embedding)

    @property
    def collections(self) -> Collections:
        """The collections, with their instructions, calibrations and scaffolds."""
        return Collections(self.internals)

    @property
    def documents(self) -> Documents:
        """The documents of the collections."""
        return Documents(self.internals)

    @property
    def schemas(self) -> Schemas:
        """The PML schemas."""
        return Schemas(self.internals)

    @property
    def modules(self) -> Modules:
        """The modules of the documents, with their states: list, warm, pin, move, evict."""
        return self.internals.modules

    @property
    def pins(self) -> Pins:
        """The callers' pins: states of documents that are kept within a budget, until a time."""
        return self.internals.pins

    @property
    def gate(self) -> ModeGate:
        """The measured distance of each mode from `exact` on this model."""
        return self._shared.gate

    @property
    def keys(self) -> ApiKeys:
        """The API keys of the service, for all namespaces."""
        return self._shared.keys

    @property
    def namespaces(self) -> Namespaces:
        """All namespaces of the folder: their names, and their deletion."""
        return Namespaces(self._shared)

    def stats(self) -> Stats:
        """Count the folder's contents, and the events since this process opened it.

        Collections are counted for the namespace. All other figures cover the whole folder.
        """
        self._shared.deferred.release()
        return Stats.of(self.internals)

    def tiers(self) -> list[TierStatus]:
        """Return the usage of each tier of the folder, the fastest tier first."""
        return tier_status(self._shared.store)


def _single_selection(selection: Selection | None, requests: int) -> Selection | None:
    if selection is not None and requests != 1:
        raise InvalidRequest(f"a selection is for one question, not for {requests}; ask one by one")
    return selection
