"""Routes of collections, documents, and ingestion jobs.

Documents are uploaded as JSON or as the files of a form.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import replace
from io import BytesIO
from time import monotonic
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile

from ragcache.db import CollectionRow
from ragcache.documents import LoadedSources, ReadOptions, SkippedFile, load_sources, read_file
from ragcache.documents.originals import digest_original
from ragcache.errors import MissingExtra, UnreadableDocument
from ragcache_api.http.bodies import CollectionName
from ragcache_api.http.downloads import download
from ragcache_api.http.envelope import stream_error
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.protocol import (
    MULTIPART,
    CollectionCreatedResponse,
    CollectionRequest,
    DeletedResponse,
    DeletionResponse,
    DescriptionBody,
    DocumentResponse,
    DocumentsRequest,
    DocumentTextResponse,
    Flag,
    InstructionRequest,
    InstructionResponse,
    JobResponse,
    PageOf,
    PageQuery,
    PrimingRequest,
    PrimingResponse,
    PublicId,
    event_stream,
    problems,
)
from ragcache_api.http.requests import stopping
from ragcache_api.http.service import ContextDep, RequestContext
from ragcache_api.http.sources import FILE_PREFIX
from ragcache_api.http.streaming import EventStream, format_event
from ragcache_api.http.vector_stores import FILE

router = APIRouter(prefix="/v1/collections", tags=["documents"], responses=problems(507))
jobs_router = APIRouter(prefix="/v1/jobs", tags=["documents"], responses=problems())
Collection = Annotated[CollectionName, Path()]
Document = Annotated[str, Path(min_length=1, max_length=1000)]
DocumentIds = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1000)]], Query(min_length=1, max_length=100)
]
_FILES = 1000  # of a form
POLL_SECONDS = 0.25
_OPEN = ("queued", "running")
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=200)]


@router.get("")
def list_collections(context: ContextDep, page: PageQuery) -> PageOf[CollectionRow]:
    """List the collections by name."""
    listed = context.rag.collections.page(page.cursor, page.limit)
    return PageOf[CollectionRow].model_validate(listed)


@router.post(
    "",
    status_code=201,
    responses={200: {"model": CollectionCreatedResponse, "description": "It existed"}},
)
def add_collection(
    body: CollectionRequest, context: ContextDep, response: Response
) -> CollectionCreatedResponse:
    """Create a collection without documents."""
    created = context.rag.collections.create(body.name, body.description)
    response.status_code = 201 if created else 200
    return CollectionCreatedResponse(name=body.name, created=created)


@router.get("/{collection}/instruction")
def get_instruction(collection: Collection, context: ContextDep) -> InstructionResponse:
    """Return the instruction that precedes a collection's documents in prompts."""
    return InstructionResponse(instruction=context.rag.collections.instruction(collection))


@router.put("/{collection}/instruction")
def set_instruction(
    collection: Collection, body: InstructionRequest, context: ContextDep
) -> InstructionResponse:
    """Change the instruction of a collection."""
    context.rag.collections.set_instruction(collection, body.instruction)
    return get_instruction(collection, context)


@router.get("/{collection}/priming")
def get_priming(collection: Collection, context: ContextDep) -> PrimingResponse:
    """Return the text that a collection's modules in later places are encoded behind."""
    collections = context.rag.collections
    return PrimingResponse(
        priming=collections.priming(collection), similar=collections.similar_priming(collection)
    )


@router.put("/{collection}/priming")
def set_priming(
    collection: Collection, body: PrimingRequest, context: ContextDep
) -> PrimingResponse:
    """Change the priming text of a collection. States behind the earlier text are removed."""
    context.rag.collections.set_priming(collection, body.priming, similar=body.similar)
    return get_priming(collection, context)


@router.get("/{collection}/description")
def get_description(collection: Collection, context: ContextDep) -> DescriptionBody:
    """Return the description of a collection, or an empty text."""
    return DescriptionBody(description=context.rag.collections.description(collection))


@router.put("/{collection}/description")
def set_description(
    collection: Collection, body: DescriptionBody, context: ContextDep
) -> DescriptionBody:
    """Change the description of a collection, which lists show and no prompt contains."""
    context.rag.collections.set_description(collection, body.description)
    return body


@router.delete("/{collection}")
def delete_collection(
    collection: Collection, context: ContextDep, dry_run: Flag = False
) -> DeletionResponse | DeletedResponse:
    """Delete a collection with its documents. With `dry_run`, report what would be deleted."""
    collections = context.rag.collections
    if dry_run:
        return DeletionResponse.model_validate(collections.preview_deletion(collection))
    return DeletedResponse(deleted=collections.delete(collection))


_UPLOAD: dict[str, Any] = {
    "status_code": 202,
    "openapi_extra": {"requestBody": MULTIPART},
    "responses": problems(409, 415, 507)
    | {202: {"headers": {"Location": {"schema": {"type": "string"}}}}},
}


@router.post("/{collection}/documents", **_UPLOAD)
async def add_documents(
    collection: Collection,
    context: ContextDep,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> JobResponse:
    """Store documents in the background.

    The job shows the progress and, in `report`, the files that could not be read.
    """
    return await _submit(collection, context, response, idempotency_key, sync=False)


@router.put("/{collection}/documents", **_UPLOAD)
async def sync_documents(
    collection: Collection,
    context: ContextDep,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> JobResponse:
    """Make the body the contents of a collection, in the background.

    Changed documents are encoded again, moved ones renamed, and documents that the body lacks
    deleted. A stored document stays if its file cannot be read.
    """
    return await _submit(collection, context, response, idempotency_key, sync=True)


async def _submit(
    collection: str, context: RequestContext, response: Response, key: str | None, *, sync: bool
) -> JobResponse:
    loaded = await read_documents(context)
    if context.service.requests.draining:
        raise stopping()
    submit = context.rag.jobs.submit
    row = await run_in_threadpool(submit, collection, loaded, idempotency_key=key, sync=sync)
    job = JobResponse.model_validate(row)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return job


@router.delete("/{collection}/documents")
def delete_documents(
    collection: Collection, context: ContextDep, id: DocumentIds, dry_run: Flag = False
) -> DeletionResponse | DeletedResponse:
    """Delete documents by their ids, as one change; unknown ids are skipped.

    With `dry_run`, report what would be deleted.
    """
    if dry_run:
        return DeletionResponse.model_validate(
            context.rag.collections.preview_deletion(collection, id)
        )
    return DeletedResponse(deleted=context.rag.delete(collection, id))


@router.get("/{collection}/documents")
def list_documents(
    collection: Collection, context: ContextDep, page: PageQuery
) -> PageOf[DocumentResponse]:
    """List the documents of a collection by id."""
    listed = context.rag.documents.page(collection, page.cursor, page.limit)
    return PageOf[DocumentResponse].model_validate(listed)


@router.get("/{collection}/documents/{document:id}")
def get_document(
    collection: Collection, document: Document, context: ContextDep, text: Flag = False
) -> DocumentTextResponse:
    """Return a document.

    With `text`, also its text, into which the spans of answers point, and where its pages begin.
    """
    documents = context.rag.documents
    for row in documents.get(collection, [document]):
        ingested = bool(row.original) and documents.has_original(collection, document)
        has_original = ingested or _is_kept(context, document)
        told: dict[str, Any] = {"has_original": has_original}
        if text:
            told["text"] = documents.texts(collection, [document]).get(document)
            told["pages"] = documents.pages(collection, document)
        return DocumentTextResponse.model_validate(row).model_copy(update=told)
    raise _unknown(collection, document)


_ORIGINAL: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file", "content": {"application/octet-stream": {}}}
}


@router.get(
    "/{collection}/originals/{document:id}",
    response_class=Response,
    responses=_ORIGINAL | problems(409),
)
def get_original(collection: Collection, document: Document, context: ContextDep) -> Response:
    """Download the file that a document was read from.

    Uploaded files are kept by the service, up to its setting `originals_bytes`. Files that a
    server's ingestion read are copied from their place, if they still have the content that was
    ingested. Of other documents, the text is all that is kept.
    """
    for row in context.rag.documents.get(collection, [document]):
        if document.startswith(FILE_PREFIX):
            content = context.objects.content(FILE, document)
            if content is not None:
                return download(row.uri, BytesIO(content))
        return download(document, context.rag.documents.original(collection, document))
    raise _unknown(collection, document)


def _is_kept(context: RequestContext, document: str) -> bool:
    return document.startswith(FILE_PREFIX) and context.objects.get(FILE, document) is not None


@router.delete("/{collection}/documents/{document:id}")
def delete_document(
    collection: Collection, document: Document, context: ContextDep, dry_run: Flag = False
) -> DeletionResponse | DeletedResponse:
    """Delete a document with its modules, and the states that nothing else needs.

    With `dry_run`, report what would be deleted.
    """
    deletion = delete_documents(collection, context, [document], dry_run)
    if not deletion.deleted:
        raise _unknown(collection, document)
    return deletion


def _unknown(collection: str, document: str) -> HTTPProblem:
    detail = f"the collection {collection!r} holds no document {document!r:.200}"
    return HTTPProblem(404, "unknown-document", detail)


async def read_documents(context: RequestContext) -> LoadedSources:
    """Read the documents of an upload.

    Raises:
        RequestValidationError: The JSON is not a `DocumentsRequest`.
        HTTPProblem: (400, 415, 422) The body is neither JSON nor a form with readable files.
    """
    request = context.request
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        files = await _form_files(request)
        limits = ReadOptions.of(context.service.shared.config)
        until = monotonic() + context.deadline
        return await to_thread.run_sync(
            _parse_files, files, limits, until, limiter=context.service.readers
        )
    if kind == "application/json":
        return await run_in_threadpool(_parse_json, await request.body())
    raise HTTPProblem(415, "unsupported-media-type", "send application/json or multipart/form-data")


def _parse_json(body: bytes) -> LoadedSources:
    try:
        upload = DocumentsRequest.model_validate_json(body)
    except ValidationError as error:
        problems: list[Any] = [
            {**each, "loc": ("body", *each["loc"])}
            for each in error.errors(include_url=False, include_input=False)
        ]
        raise RequestValidationError(problems) from None
    return load_sources([each.source() for each in upload.documents])


async def _form_files(request: Request) -> list[tuple[str, bytes]]:
    """Return the names and contents of a form's files."""
    found = []
    async with request.form(max_files=_FILES, max_fields=10) as form:
        for field, file in form.multi_items():
            if not isinstance(file, UploadFile):
                raise HTTPProblem(400, "not-a-file", f"the field {field!r:.100} is no file")
            name = (file.filename or "").replace("\\", "/").strip("/")
            found.append((name, await file.read()))
    if not found:
        raise HTTPProblem(400, "no-files", "the form holds no file")
    return found


def _parse_files(
    files: list[tuple[str, bytes]], limits: ReadOptions, until: float
) -> LoadedSources:
    """Parse the files that can be read.

    Args:
        files: Names and contents.
        limits: Limits of each file.
        until: Time of `monotonic` at which the remaining files count as unreadable.

    Raises:
        HTTPProblem: (422) No file can be read; its `problems` say why for each.
    """
    documents, skipped, originals = [], [], {}
    for name, raw in files:
        try:
            if not 0 < len(name) <= 1000:
                raise UnreadableDocument("a file of the form has no usable name")
            left = until - monotonic()
            if left <= 0:
                raise UnreadableDocument("the time of the upload was over before it was read")
            document = read_file(name, raw, replace(limits, wall_seconds=left))
            documents.append(replace(document, original=digest_original(raw)))
            originals[documents[-1].original] = raw
        except (UnreadableDocument, MissingExtra) as error:
            skipped.append(SkippedFile(name, str(error), failed=True))
    if not documents:
        detail = "; ".join(f"{file.name}: {file.reason}" for file in skipped)
        reasons = [{"loc": ["files", file.name], "msg": file.reason} for file in skipped]
        raise HTTPProblem(422, "unreadable-document", detail, problems=reasons)
    present = frozenset(file.name for file in skipped)
    loaded = load_sources(documents)
    return replace(loaded, skipped=tuple(skipped), present=present, originals=originals)


@jobs_router.get("")
def list_jobs(context: ContextDep, page: PageQuery) -> PageOf[JobResponse]:
    """List the ingestion jobs, newest first."""
    return PageOf[JobResponse].model_validate(context.rag.jobs.list(page.cursor, page.limit))


@jobs_router.get("/{job}", response_model=JobResponse, responses=event_stream("The job"))
async def get_job(job: PublicId, context: ContextDep) -> JobResponse | Response:
    """Return an ingestion job.

    With `Accept: text/event-stream`, send an event `progress` for each change until the job ends,
    or an event `error`.
    """
    found = await _job(context, job)
    if "text/event-stream" in context.request.headers.get("accept", ""):
        return EventStream(_progress(context, found))
    return found


@jobs_router.delete("/{job}")
def cancel_job(job: PublicId, context: ContextDep) -> JobResponse:
    """Cancel a waiting or running job, which then stores and removes nothing.

    A job that has ended stays as it is.
    """
    return JobResponse.model_validate(context.rag.jobs.cancel(job))


async def _job(context: RequestContext, public_id: str) -> JobResponse:
    return JobResponse.model_validate(await run_in_threadpool(context.rag.jobs.get, public_id))


async def _progress(context: RequestContext, job: JobResponse) -> AsyncGenerator[bytes, None]:
    """Yield an event for each change of a job. Errors become the last event."""
    yield format_event(job.model_dump(), "progress")
    try:
        async with aclosing(_changes(context, job)) as changes:
            async for changed in changes:
                yield format_event(changed.model_dump(), "progress")
    except Exception as error:  # a response that has begun can only end with an event
        yield format_event(stream_error(error).problem(context.request.url.path), "error")


async def _changes(context: RequestContext, job: JobResponse) -> AsyncGenerator[JobResponse, None]:
    """Yield the job after each change. Raises `HTTPProblem` (503) if the service ends first."""
    draining = asyncio.Event()
    with context.service.requests.on_drain(draining.set):
        while job.status in _OPEN:
            if context.service.requests.draining:
                raise stopping()
            with suppress(TimeoutError):
                await asyncio.wait_for(draining.wait(), POLL_SECONDS)
            now = await _job(context, job.id)
            if now != job:
                job = now
                yield job
