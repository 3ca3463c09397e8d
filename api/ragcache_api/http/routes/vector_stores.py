"""Routes of OpenAI's vector stores: stores, their files and batches of files, and their search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import Field, model_validator

from ragcache.retrieval import Hit
from ragcache_api.http.bodies import CollectionName, invalid
from ragcache_api.http.client_fields import ClientModel
from ragcache_api.http.lists import ListOf, ListQuery
from ragcache_api.http.protocol import Description, ResponseModel, openai_problems
from ragcache_api.http.responses import RankingOptions, plain_filters
from ragcache_api.http.routes.responses import DeletedObject
from ragcache_api.http.service import ContextDep
from ragcache_api.http.sources import FILE_PREFIX, similarities
from ragcache_api.http.vector_stores import VectorStores, shown_attributes

router = APIRouter(prefix="/v1/vector_stores", tags=["vector_stores"], responses=openai_problems())
StoreId = Annotated[CollectionName, Path()]
ObjectId = Annotated[str, Path(min_length=1, max_length=200)]
FileStatus = Literal["in_progress", "completed", "failed", "cancelled"]
Attributes = Annotated[
    dict[Annotated[str, Field(max_length=64)], str | bool | float], Field(max_length=16)
]
"""Values of a file for filters: at most 16."""
Metadata = Annotated[dict[str, str], Field(max_length=16)]
_FILES = 500  # most files of a batch, as at OpenAI


class ExpiresAfter(ClientModel):
    """The time for which an unused store is kept."""

    anchor: Literal["last_active_at"]
    days: Annotated[int, Field(ge=1, le=365)]


class ChunkingStrategy(ClientModel):
    """How files are split. The service splits them at headings, paragraphs and sentences."""

    type: Literal["auto"] = "auto"


class StoreChanges(ClientModel):
    """Changes of a vector store."""

    name: Annotated[str | None, Field(max_length=200)] = None
    metadata: Metadata | None = None
    """A client's own record."""
    expires_after: ExpiresAfter | None = None
    """Time after the last use at which the store is deleted with its documents. The files stay."""

    def changes(self) -> dict[str, Any]:
        """Return the fields that the request gives."""
        return self.model_dump(include={"name", "metadata", "expires_after"}, exclude_unset=True)


class StoreRequest(StoreChanges):
    """A vector store to create."""

    description: Description | None = None
    """Description of its collection."""
    file_ids: Annotated[list[str], Field(max_length=_FILES)] = Field(default_factory=list)
    """Files to attach."""
    chunking_strategy: ChunkingStrategy | None = None


class AttachRequest(ClientModel):
    """A file to attach."""

    file_id: Annotated[str, Field(min_length=1, max_length=200)]
    attributes: Attributes | None = None
    chunking_strategy: ChunkingStrategy | None = None


class BatchRequest(ClientModel):
    """Files to attach as one job: `file_ids` with the same attributes, or `files`."""

    file_ids: Annotated[list[str] | None, Field(min_length=1, max_length=_FILES)] = None
    files: Annotated[list[AttachRequest] | None, Field(min_length=1, max_length=_FILES)] = None
    attributes: Attributes | None = None
    chunking_strategy: ChunkingStrategy | None = None

    @model_validator(mode="after")
    def _check_files(self) -> BatchRequest:
        if (self.file_ids is None) == (self.files is None):
            raise ValueError("give either file_ids or files")
        return self

    @property
    def wanted(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Ids of the files with their attributes."""
        if self.files is not None:
            return [(each.file_id, each.attributes or {}) for each in self.files]
        return [(each, self.attributes or {}) for each in self.file_ids or ()]


class AttributesRequest(ClientModel):
    """New attributes of a file."""

    attributes: Attributes | None


class SearchRequest(ClientModel):
    """A search."""

    query: (
        Annotated[str, Field(min_length=1, max_length=1_000_000)]
        | Annotated[
            list[Annotated[str, Field(min_length=1, max_length=100_000)]],
            Field(min_length=1, max_length=16),
        ]
    )
    """A query, or up to 16, whose best texts are joined."""
    max_num_results: Annotated[int, Field(ge=1, le=50)] = 10
    filters: dict[str, Any] | None = None
    ranking_options: RankingOptions | None = None
    rewrite_query: bool = False
    """Without effect: the query is searched for as it is."""


class FileCounts(ResponseModel):
    """Numbers of files by status."""

    in_progress: int
    completed: int
    failed: int
    cancelled: int
    total: int


class StoreResponse(ResponseModel):
    """A vector store."""

    id: str
    object: Literal["vector_store"]
    name: str
    created_at: int
    """Unix seconds. 0 for a collection that was made otherwise."""
    last_active_at: int | None
    metadata: dict[str, str]
    status: Literal["in_progress", "completed"]
    usage_bytes: int
    """Bytes of the attached files."""
    file_counts: FileCounts
    expires_after: ExpiresAfter | None
    expires_at: int | None


class FileError(ResponseModel):
    """The reason why a file is not stored."""

    code: str
    message: str


class AttachedFile(ResponseModel):
    """A file of a vector store."""

    id: str
    object: Literal["vector_store.file"]
    created_at: int
    vector_store_id: str
    status: FileStatus
    last_error: FileError | None
    usage_bytes: int
    attributes: dict[str, Any]
    chunking_strategy: dict[str, Any]


class BatchResponse(ResponseModel):
    """A batch of files."""

    id: str
    object: Literal["vector_store.files_batch"]
    created_at: int
    vector_store_id: str
    status: FileStatus
    file_counts: FileCounts


class FoundText(ResponseModel):
    """A text of a file."""

    type: Literal["text"] = "text"
    text: str


class SearchResult(ResponseModel):
    """A text that a search found."""

    file_id: str
    filename: str
    score: float
    """Similarity to the query, 0 to 1."""
    attributes: dict[str, Any]
    content: list[FoundText]


class SearchResults(ResponseModel):
    """The texts that a search found, the best one first."""

    object: Literal["vector_store.search_results.page"] = "vector_store.search_results.page"
    search_query: list[str]
    data: list[SearchResult]
    has_more: Literal[False] = False
    next_page: None = None


class FileContent(ResponseModel):
    """The text of a file as it was read."""

    object: Literal["vector_store.file_content.page"] = "vector_store.file_content.page"
    data: list[FoundText]
    has_more: Literal[False] = False
    next_page: None = None


@router.post("")
def create_store(body: StoreRequest, context: ContextDep) -> StoreResponse:
    """Create a vector store, and attach files."""
    stores = VectorStores(context)
    id = stores.create(body.changes(), body.description or "")
    if body.file_ids:
        stores.attach(id, [(each, {}) for each in body.file_ids])
    return StoreResponse.model_validate(stores.get(id))


@router.get("")
def list_stores(context: ContextDep, page: ListQuery) -> ListOf[StoreResponse]:
    """List the vector stores, with all collections of the namespace."""
    stores = VectorStores(context)
    names = page.cut([_Named(id) for id in stores.ids()])
    data = [StoreResponse.model_validate(stores.get(each.id)) for each in names.data]
    return ListOf(
        data=data, first_id=names.first_id, last_id=names.last_id, has_more=names.has_more
    )


@router.get("/{store}")
def get_store(store: StoreId, context: ContextDep) -> StoreResponse:
    """Return a vector store."""
    return StoreResponse.model_validate(VectorStores(context).get(store))


@router.post("/{store}")
def change_store(store: StoreId, body: StoreChanges, context: ContextDep) -> StoreResponse:
    """Change name, metadata or expiry of a vector store."""
    stores = VectorStores(context)
    stores.change(store, body.changes())
    return StoreResponse.model_validate(stores.get(store))


@router.delete("/{store}")
def delete_store(store: StoreId, context: ContextDep) -> DeletedObject:
    """Delete a vector store with its documents. The files stay."""
    VectorStores(context).delete(store)
    return DeletedObject(id=store, object="vector_store.deleted")


@router.post("/{store}/search")
def search_store(store: StoreId, body: SearchRequest, context: ContextDep) -> SearchResults:
    """Search a vector store. Several queries take the best texts of each."""
    VectorStores(context).touch(store)
    queries = [body.query] if isinstance(body.query, str) else body.query
    filters = None if body.filters is None else plain_filters(body.filters)
    found: dict[int, tuple[float, Hit]] = {}
    for query in queries:
        selection = context.rag.retrieve(
            query, collection=store, k=body.max_num_results, filters=filters
        )
        for score, hit in zip(similarities(selection.hits), selection.hits, strict=True):
            known = found.get(hit.module.id)
            if known is None or known[0] < score:
                found[hit.module.id] = score, hit
    least = body.ranking_options.score_threshold if body.ranking_options else 0.0
    best = sorted(found.values(), key=lambda pair: -pair[0])[: body.max_num_results]
    data = [_result(score, hit) for score, hit in best if score >= least]
    return SearchResults(search_query=queries, data=data)


@router.post("/{store}/files")
def attach_file(store: StoreId, body: AttachRequest, context: ContextDep) -> AttachedFile:
    """Store a file as a document, in the background."""
    stores = VectorStores(context)
    [attached] = stores.attach(store, [(body.file_id, body.attributes or {})])
    return AttachedFile.model_validate(stores.file(attached))


@router.get("/{store}/files")
def list_attached_files(
    store: StoreId,
    context: ContextDep,
    page: ListQuery,
    filter: Annotated[FileStatus | None, Query()] = None,
) -> ListOf[AttachedFile]:
    """List the files of a vector store."""
    return page.cut(_files(VectorStores(context), store, None, filter))


@router.get("/{store}/files/{file}")
def get_attached_file(store: StoreId, file: ObjectId, context: ContextDep) -> AttachedFile:
    """Return a file of a vector store."""
    stores = VectorStores(context)
    return AttachedFile.model_validate(stores.file(stores.attached(store, file)))


@router.post("/{store}/files/{file}")
def change_attached_file(
    store: StoreId, file: ObjectId, body: AttributesRequest, context: ContextDep
) -> AttachedFile:
    """Change the attributes of a file. Its states stay."""
    stores = VectorStores(context)
    before = stores.attached(store, file)
    [attached] = stores.attach(store, [(file, body.attributes or {})], before.value["batch"])
    return AttachedFile.model_validate(stores.file(attached))


@router.delete("/{store}/files/{file}")
def detach_file(store: StoreId, file: ObjectId, context: ContextDep) -> DeletedObject:
    """Remove the document of a file from a vector store. The file stays."""
    VectorStores(context).detach(store, file)
    return DeletedObject(id=file, object="vector_store.file.deleted")


@router.get("/{store}/files/{file}/content")
def get_attached_text(store: StoreId, file: ObjectId, context: ContextDep) -> FileContent:
    """Return the text of a file, as it was read. Empty before it is stored."""
    VectorStores(context).attached(store, file)
    texts = context.rag.documents.texts(store, [file])
    return FileContent(data=[FoundText(text=text) for text in texts.values()])


@router.post("/{store}/file_batches")
def create_batch(store: StoreId, body: BatchRequest, context: ContextDep) -> BatchResponse:
    """Attach files as one job."""
    stores = VectorStores(context)
    if len({name for name, _ in body.wanted}) < len(body.wanted):
        raise invalid("file_ids", "a file is named twice")
    batch = stores.create_batch(store, body.wanted)
    return BatchResponse.model_validate(stores.batch(store, batch))


@router.get("/{store}/file_batches/{batch}")
def get_batch(store: StoreId, batch: ObjectId, context: ContextDep) -> BatchResponse:
    """Return a batch."""
    return BatchResponse.model_validate(VectorStores(context).batch(store, batch))


@router.post("/{store}/file_batches/{batch}/cancel")
def cancel_batch(store: StoreId, batch: ObjectId, context: ContextDep) -> BatchResponse:
    """Cancel a batch. Files that are stored already stay."""
    stores = VectorStores(context)
    stores.cancel_batch(store, batch)
    return BatchResponse.model_validate(stores.batch(store, batch))


@router.get("/{store}/file_batches/{batch}/files")
def list_batch_files(
    store: StoreId,
    batch: ObjectId,
    context: ContextDep,
    page: ListQuery,
    filter: Annotated[FileStatus | None, Query()] = None,
) -> ListOf[AttachedFile]:
    """List the files of a batch."""
    stores = VectorStores(context)
    stores.batch(store, batch)
    return page.cut(_files(stores, store, batch, filter))


@dataclass(frozen=True, slots=True)
class _Named:
    """The id of a vector store, of which a page is cut."""

    id: str


def _files(
    stores: VectorStores, store: str, batch: str | None, status: FileStatus | None
) -> list[AttachedFile]:
    files = [AttachedFile.model_validate(stores.file(each)) for each in stores.files(store, batch)]
    return [each for each in files if status in (None, each.status)]


def _result(score: float, hit: Hit) -> SearchResult:
    module = hit.module
    uploaded = module.document.startswith(FILE_PREFIX) and module.uri
    return SearchResult(
        file_id=module.document,
        filename=module.uri if uploaded else module.document,
        score=score,
        attributes=shown_attributes(module.attributes),
        content=[FoundText(text=module.text)],
    )
