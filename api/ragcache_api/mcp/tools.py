"""The tools that a client of the Model Context Protocol finds, apart from the protocol itself.

A tool takes a pydantic model and returns one: their JSON schemas are the tool's. A language model
reads the docstrings and the texts under fields, and chooses a tool by them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote, unquote

from anyio import to_thread
from pydantic import BaseModel, ConfigDict, Field

from ragcache import Answer, AsyncRagCache, RagCache, SourceDocument
from ragcache.config import DEFAULT_K
from ragcache.db import ModuleRow
from ragcache.errors import DocumentError

SCHEME = "ragcache"
_NAMED = 5  # documents that the description of a collection names
_MOST_COLLECTIONS = 100
_NO_ANSWER = ("no_answer", "no_documents")

Ask = Callable[["AskArguments"], Awaitable[Answer]]
"""Answers a question, in the way of the transport."""
Text = Annotated[str, Field(min_length=1, max_length=100_000)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]


@dataclass(frozen=True, slots=True)
class McpSession:
    """The caller's view of the service."""

    rag: RagCache
    """Collections of the caller's namespace."""
    ask: Ask
    ingests: bool = False
    """Whether the caller may store documents."""


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class NoArguments(_Arguments):
    """No arguments."""


class CollectionDescription(_Result):
    """A collection of documents."""

    name: str
    description: str
    """Its description, or else the names of some of its documents."""
    documents: int
    """Number of documents."""


class CollectionsResult(_Result):
    """The collections that can be asked."""

    collections: list[CollectionDescription]


class _RetrievalArguments(_Arguments):
    collection: Name
    """Name of the collection, as `list_collections` gives it."""
    k: Annotated[int, Field(ge=1, le=50)] = DEFAULT_K
    """Most passages to find."""
    filters: dict[str, Any] | None = None
    """Conditions on the documents' metadata, such as {"year": {"$gte": 2020}}."""


class SearchArguments(_RetrievalArguments):
    """A search."""

    query: Text
    """Words or a question to look for."""


class McpPassage(_Result):
    """A passage of a document."""

    document: str
    """Id of the document, for `get_document`."""
    resource: str
    """URI of the document as a resource."""
    text: str
    page: int | None = None
    """Page or slide that it is from, if its document has any."""
    headings: list[str] = []
    """Titles above it, outermost first."""
    score: float | None = None


class PassagesResult(_Result):
    """Passages, the best one first."""

    passages: list[McpPassage]


class AskArguments(_RetrievalArguments):
    """A question, which is answered from the passages that are found for it."""

    question: Text


class AskResult(_Result):
    """An answer."""

    answer: str
    answered: bool
    """Whether the documents hold an answer. Otherwise `answer` says that they do not."""
    confidence: float | None = None
    """Probability that the answer is right, if it is known."""
    citations: list[McpPassage]
    """Passages that the answer was read from."""


class GetDocumentArguments(_Arguments):
    """A document."""

    collection: Name
    document: Name
    """Id of the document, as other tools give it."""


class DocumentResult(_Result):
    """A whole document."""

    document: str
    resource: str
    """URI of the document as a resource."""
    text: str
    metadata: dict[str, Any]


class NewDocumentArguments(_Arguments):
    """A document to store."""

    id: Name
    """Name of the document. A document of this name is replaced."""
    text: Annotated[str, Field(min_length=1, max_length=10_000_000)]
    uri: Annotated[str, Field(max_length=10_000)] = ""
    """Address, for citations."""
    metadata: dict[str, Any] = {}
    """Values for filters."""


class IngestArguments(_Arguments):
    """Documents to store."""

    collection: Name
    """The collection, which is created if there is none."""
    documents: Annotated[list[NewDocumentArguments], Field(min_length=1, max_length=100)]


class IngestResult(_Result):
    """The result of storing documents."""

    added: int
    updated: int
    unchanged: int


async def list_collections(_: NoArguments, session: McpSession) -> CollectionsResult:
    """List the collections of documents that can be searched and asked, with their contents."""
    return await to_thread.run_sync(_describe_collections, session.rag)


def _describe_collections(rag: RagCache) -> CollectionsResult:
    return CollectionsResult(
        collections=[
            CollectionDescription(
                name=row.name,
                description=row.description or _describe(rag, row.name, row.documents),
                documents=row.documents,
            )
            for row in rag.collections.page(limit=_MOST_COLLECTIONS).items
        ]
    )


def _describe(rag: RagCache, collection: str, documents: int) -> str:
    if not documents:
        return "no documents yet"
    names = [row.source_id for row in rag.documents.page(collection, limit=_NAMED).items]
    listed = ", ".join(names)
    return listed if documents <= len(names) else f"{listed} and {documents - len(names):,} more"


async def search(wanted: SearchArguments, session: McpSession) -> PassagesResult:
    """Find the passages of a collection that fit a query best, without answering it."""
    found = await AsyncRagCache(session.rag).retrieve(
        wanted.query, collection=wanted.collection, k=wanted.k, filters=wanted.filters
    )
    passages = [_passage(wanted.collection, hit.module, hit.score) for hit in found.hits]
    return PassagesResult(passages=passages)


def _passage(collection: str, module: ModuleRow, score: float) -> McpPassage:
    return McpPassage(
        document=module.document,
        resource=resource_uri(collection, module.document),
        text=module.text.strip(),
        page=module.page,
        headings=list(module.headings),
        score=score,
    )


async def ask(wanted: AskArguments, session: McpSession) -> AskResult:
    """Answer a question from the documents of a collection, with the passages it is read from."""
    answer = await session.ask(wanted)
    answered = answer.finish_reason not in _NO_ANSWER
    return AskResult(
        answer=answer.text,
        answered=answered,
        confidence=answer.confidence,
        citations=[
            McpPassage(
                document=each.document,
                resource=resource_uri(wanted.collection, each.document),
                text=each.text.strip(),
                page=each.page,
                headings=list(each.headings),
                score=each.score,
            )
            for each in answer.sources
        ]
        if answered
        else [],
    )


async def get_document(wanted: GetDocumentArguments, session: McpSession) -> DocumentResult:
    """Return the whole text of a document, with its metadata."""
    return await to_thread.run_sync(read_document, session.rag, wanted.collection, wanted.document)


def read_document(rag: RagCache, collection: str, document: str) -> DocumentResult:
    """Read a document. Raises `UnknownCollection` or `DocumentError`."""
    texts = rag.documents.texts(collection, [document])
    rows = rag.documents.get(collection, [document])
    if not rows or document not in texts:
        raise DocumentError(
            f"the collection {collection!r} holds no document {document!r:.200}; `search` gives "
            "the ids of documents"
        )
    return DocumentResult(
        document=document,
        resource=resource_uri(collection, document),
        text=texts[document],
        metadata=dict(rows[0].attributes),
    )


async def ingest(wanted: IngestArguments, session: McpSession) -> IngestResult:
    """Store documents in a collection, so that they can be searched and asked about."""
    documents = [
        SourceDocument(each.id, each.text, each.uri, each.metadata) for each in wanted.documents
    ]
    done = await AsyncRagCache(session.rag).ingest(wanted.collection, documents)
    return IngestResult(added=done.added, updated=done.updated, unchanged=done.unchanged)


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool: its function, whose docstring describes it, and its types."""

    run: Callable[[Any, McpSession], Awaitable[BaseModel]]
    arguments: type[_Arguments]
    result: type[_Result]
    title: str
    writes: bool = False
    """Whether it stores documents, and is offered only to callers that may."""

    @property
    def description(self) -> str:
        """Description of the tool for a language model."""
        return self.run.__doc__ or ""


TOOLS: Mapping[str, ToolSpec] = {
    "list_collections": ToolSpec(
        list_collections, NoArguments, CollectionsResult, "List collections"
    ),
    "search": ToolSpec(search, SearchArguments, PassagesResult, "Search documents"),
    "ask": ToolSpec(ask, AskArguments, AskResult, "Ask documents"),
    "get_document": ToolSpec(get_document, GetDocumentArguments, DocumentResult, "Read a document"),
    "ingest": ToolSpec(ingest, IngestArguments, IngestResult, "Store documents", writes=True),
}


def offered_tools(session: McpSession) -> Sequence[tuple[str, ToolSpec]]:
    """Return the tools that a caller may use."""
    return [(name, tool) for name, tool in TOOLS.items() if session.ingests or not tool.writes]


def resource_uri(collection: str, document: str) -> str:
    """Return the URI of a document as a resource.

    Example:
        >>> resource_uri("staff handbook", "leave/2024.md")
        'ragcache://staff%20handbook/leave%2F2024.md'
    """
    return f"{SCHEME}://{quote(collection, safe='')}/{quote(document, safe='')}"


def parse_resource_uri(uri: str) -> tuple[str, str]:
    """Return the collection and the document of `resource_uri`. Raises `DocumentError`."""
    scheme, _, rest = uri.partition("://")
    collection, slash, document = rest.partition("/")
    if scheme != SCHEME or not (collection and slash and document):
        raise DocumentError(
            f"{uri!r:.200} is no resource of this server; a document has the URI "
            f"{SCHEME}://COLLECTION/DOCUMENT, both percent-encoded"
        )
    return unquote(collection), unquote(document)
