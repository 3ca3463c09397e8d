"""Collections and their documents."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Response

from ragcache.documents import load_sources
from ragcache_api.http.errors import Refusal
from ragcache_api.http.paging import page_of
from ragcache_api.http.service import Call, CallDep, off_loop
from ragcache_api.http.uploads import sent_documents
from ragcache_api.http.wire.common import (
    CollectionName,
    Cursor,
    Deleted,
    Limit,
    PageOf,
    problems,
)
from ragcache_api.http.wire.documents import (
    MULTIPART,
    CollectionTold,
    DocumentsSent,
    DocumentTold,
    JobTold,
)

router = APIRouter(prefix="/v1/collections", tags=["documents"], responses=problems(507))
Collection = Annotated[CollectionName, Path()]
Document = Annotated[str, Path(min_length=1, max_length=1000)]
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=200)]


@router.get("")
async def list_collections(
    call: CallDep, cursor: Cursor = None, limit: Limit = 100
) -> PageOf[CollectionTold]:
    """The collections, by name."""
    counts = await off_loop(_counts, call)
    return page_of(counts, lambda c: c.name, lambda c: c, cursor, limit)


def _counts(call: Call) -> list[CollectionTold]:
    rag = call.rag
    return [
        CollectionTold(
            name=name, documents=number,
            modules=rag.modules.page(collection=name, limit=1).total or 0,
        )
        for name, number in rag.stats().collections.items()
    ]  # fmt: skip


@router.delete("/{collection}")
async def delete_collection(collection: Collection, call: CallDep) -> Deleted:
    """Deletes all documents of a collection."""
    return Deleted(deleted=await off_loop(_empty, call, collection))


def _empty(call: Call, collection: str) -> int:
    ids = [row.source_id for row in call.rag.documents(collection)]
    return call.rag.delete(collection, ids)


@router.post(
    "/{collection}/documents", status_code=202, openapi_extra={"requestBody": MULTIPART},
    responses={
        **problems(409, 415, 507),
        202: {"headers": {"Location": {"schema": {"type": "string"}}}},
    },
)  # fmt: skip
async def add_documents(
    collection: Collection, call: CallDep, response: Response,
    idempotency_key: IdempotencyKey = None,
) -> JobTold:  # fmt: skip
    """Stores documents in the background; the job tells how far it is."""
    documents = await sent_documents(call.request)
    await off_loop(load_sources, documents)  # what cannot be ingested is refused now
    if call.service.running.draining:
        raise Refusal(503, "stopping", "the service is being stopped; try again",
                      {"Retry-After": "5"})  # fmt: skip
    job = await off_loop(
        call.rag.jobs.submit, collection, documents, idempotency_key=idempotency_key
    )
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return JobTold.model_validate(job)


@router.get("/{collection}/documents")
async def list_documents(
    collection: Collection, call: CallDep, cursor: Cursor = None, limit: Limit = 100
) -> PageOf[DocumentTold]:
    """The documents of a collection, by id."""
    rows = await off_loop(call.rag.documents, collection)
    return page_of(rows, lambda row: row.source_id, _told, cursor, limit)


@router.get("/{collection}/documents/{document:path}")
async def get_document(collection: Collection, document: Document, call: CallDep) -> DocumentTold:
    """One document."""
    for row in await off_loop(call.rag.documents, collection):
        if row.source_id == document:
            return _told(row)
    raise _unknown(collection, document)


@router.delete("/{collection}/documents/{document:path}")
async def delete_document(collection: Collection, document: Document, call: CallDep) -> Deleted:
    """Deletes a document with its modules; states that nothing else needs go with them."""
    number = await off_loop(call.rag.delete, collection, [document])
    if not number:
        raise _unknown(collection, document)
    return Deleted(deleted=number)


def _unknown(collection: str, document: str) -> Refusal:
    detail = f"the collection {collection!r} holds no document {document!r:.200}"
    return Refusal(404, "unknown-document", detail)


def _told(row: Any) -> DocumentTold:
    return DocumentTold(
        id=row.source_id, uri=row.uri, digest=row.digest, modules=row.modules,
        metadata=dict(row.attributes),
    )  # fmt: skip


SENT = DocumentsSent
"""The JSON body of an upload, which the OpenAPI document names."""
