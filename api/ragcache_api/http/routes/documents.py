"""Collections and their documents."""

# MERGED ragcache_api.http.uploads: Documents from a request: JSON, or files of a form.

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from ragcache import SourceDocument
from ragcache.db import DocumentRow
from ragcache.errors import UnreadableDocument
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.protocol import (
    MULTIPART,
    CollectionCreated,
    CollectionName,
    CollectionRequest,
    CollectionResponse,
    Cursor,
    Deleted,
    DocumentResponse,
    DocumentsRequest,
    JobResponse,
    Limit,
    PageOf,
    problems,
)
from ragcache_api.http.service import CallDep, off_loop

router = APIRouter(prefix="/v1/collections", tags=["documents"], responses=problems(507))
Collection = Annotated[CollectionName, Path()]
Document = Annotated[str, Path(min_length=1, max_length=1000)]
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=200)]


@router.get("")
async def list_collections(
    call: CallDep, cursor: Cursor = None, limit: Limit = 100
) -> PageOf[CollectionResponse]:
    """The collections, by name."""
    page = await off_loop(call.rag.collection_page, cursor, limit)
    return PageOf[CollectionResponse].model_validate(page)


@router.post(
    "", status_code=201,
    responses={200: {"model": CollectionCreated, "description": "It was there already"}},
)  # fmt: skip
async def add_collection(
    body: CollectionRequest, call: CallDep, response: Response
) -> CollectionCreated:  # fmt: skip
    """Makes a collection without documents."""
    created = await off_loop(call.rag.create_collection, body.name)
    response.status_code = 201 if created else 200
    return CollectionCreated(name=body.name, created=created)


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
) -> JobResponse:  # fmt: skip
    """Stores documents in the background; the job tells how far it is."""
    documents = await sent_documents(call.request)
    if call.service.running.draining:
        raise HTTPProblem(503, "stopping", "the service is being stopped; try again",
                      {"Retry-After": "5"})  # fmt: skip
    row = await off_loop(
        call.rag.jobs.submit, collection, documents, idempotency_key=idempotency_key
    )
    job = JobResponse.model_validate(row)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return job


@router.get("/{collection}/documents")
async def list_documents(
    collection: Collection, call: CallDep, cursor: Cursor = None, limit: Limit = 100
) -> PageOf[DocumentResponse]:
    """The documents of a collection, by id."""
    page = await off_loop(call.rag.document_page, collection, cursor, limit)
    told = [_told(row) for row in page.items]
    return PageOf(items=told, next=page.next, total=page.total)


@router.get("/{collection}/documents/{document:path}")
async def get_document(
    collection: Collection, document: Document, call: CallDep
) -> DocumentResponse:
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


def _unknown(collection: str, document: str) -> HTTPProblem:
    detail = f"the collection {collection!r} holds no document {document!r:.200}"
    return HTTPProblem(404, "unknown-document", detail)


def _told(row: DocumentRow) -> DocumentResponse:
    return DocumentResponse(
        id=row.source_id, uri=row.uri, digest=row.digest, modules=row.modules,
        metadata=dict(row.attributes),
    )  # fmt: skip


SENT = DocumentsRequest
"""The JSON body of an upload, which the OpenAPI document names."""


_FILES = 1000


async def sent_documents(request: Request) -> list[SourceDocument]:
    """Raises `RequestValidationError`, `HTTPProblem` (400, 415) or `UnreadableDocument`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return await off_loop(_documents, await _files(request))
    if kind == "application/json":
        return await off_loop(_json, await request.body())
    raise HTTPProblem(415, "unsupported-media-type", "send application/json or multipart/form-data")


def _json(body: bytes) -> list[SourceDocument]:
    """Takes as long as the body is large."""
    try:
        sent = DocumentsRequest.model_validate_json(body)
    except ValidationError as error:
        problems: list[Any] = [
            {**each, "loc": ("body", *each["loc"])}
            for each in error.errors(include_url=False, include_input=False)
        ]
        raise RequestValidationError(problems) from None
    return [each.source() for each in sent.documents]


async def _files(request: Request) -> list[tuple[str, bytes]]:
    """Names and contents."""
    found = []
    async with request.form(max_files=_FILES, max_fields=10) as form:
        for field, file in form.multi_items():
            if not isinstance(file, UploadFile):
                raise HTTPProblem(400, "not-a-file", f"the field {field!r:.100} is no file")
            found.append((file.filename or "", await file.read()))
    if not found:
        raise HTTPProblem(400, "no-files", "the form holds no file")
    return found


def _documents(files: list[tuple[str, bytes]]) -> list[SourceDocument]:
    return [_document(name, raw) for name, raw in files]


def _document(name: str, raw: bytes) -> SourceDocument:
    name = name.replace("\\", "/").strip("/")
    if not name or len(name) > 1000:
        raise UnreadableDocument("a file of the form has no usable name")
    if b"\0" in raw:
        raise UnreadableDocument(f"{name}: a binary file")
    try:
        return SourceDocument(name, raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UnreadableDocument(f"{name}: not UTF-8 at byte {error.start}") from None
