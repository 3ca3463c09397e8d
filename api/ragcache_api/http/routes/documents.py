"""Collections and their documents."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Response

from ragcache.db import DocumentRow
from ragcache_api.http.errors import Refusal
from ragcache_api.http.service import CallDep, off_loop
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
    CollectionMade,
    CollectionSent,
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
    page = await off_loop(call.rag.collection_page, cursor, limit)
    return PageOf[CollectionTold].model_validate(page)


@router.post(
    "", status_code=201,
    responses={200: {"model": CollectionMade, "description": "It was there already"}},
)  # fmt: skip
async def add_collection(
    body: CollectionSent, call: CallDep, response: Response
) -> CollectionMade:  # fmt: skip
    """Makes a collection without documents."""
    created = await off_loop(call.rag.create_collection, body.name)
    response.status_code = 201 if created else 200
    return CollectionMade(name=body.name, created=created)


@router.delete("/{collection}")
async def delete_collection(collection: Collection, call: CallDep) -> Deleted:
    """Deletes a collection with its documents; tells how many there were."""
    return Deleted(deleted=await off_loop(call.rag.delete_collection, collection))


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
    if call.service.running.draining:
        raise Refusal(503, "stopping", "the service is being stopped; try again",
                      {"Retry-After": "5"})  # fmt: skip
    row = await off_loop(
        call.rag.jobs.submit, collection, documents, idempotency_key=idempotency_key
    )
    job = JobTold.model_validate(row)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return job


@router.get("/{collection}/documents")
async def list_documents(
    collection: Collection, call: CallDep, cursor: Cursor = None, limit: Limit = 100
) -> PageOf[DocumentTold]:
    """The documents of a collection, by id."""
    page = await off_loop(call.rag.document_page, collection, cursor, limit)
    told = [_told(row) for row in page.items]
    return PageOf(items=told, next=page.next, total=page.total)


@router.get("/{collection}/documents/{document:path}")
async def get_document(collection: Collection, document: Document, call: CallDep) -> DocumentTold:
    """One document."""
    found = await off_loop(call.rag.documents, collection, [document])
    if not found:
        raise _unknown(collection, document)
    return _told(found[0])


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


def _told(row: DocumentRow) -> DocumentTold:
    return DocumentTold(
        id=row.source_id, uri=row.uri, digest=row.digest, modules=row.modules,
        metadata=dict(row.attributes),
    )  # fmt: skip


SENT = DocumentsSent
"""The JSON body of an upload, which the OpenAPI document names."""
