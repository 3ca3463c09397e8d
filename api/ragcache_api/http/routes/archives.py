"""Routes of operators for collections that travel: download one as an archive, upload one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import IO, Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Path, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from ragcache.pipeline.collection_import import CollectionImport
from ragcache.store.tiers.base import named_os_error
from ragcache_api.http.bodies import CollectionName
from ragcache_api.http.protocol import Flag, problems
from ragcache_api.http.service import ContextDep, RequestContext

router = APIRouter(prefix="/admin/collections", tags=["archives"], responses=problems(500))
Collection = Annotated[CollectionName, Path()]
MEDIA_TYPE = "application/x-tar"
_PIECE = 1 << 20  # bytes that are sent or written at once
_CONTENT = {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}


class ArchiveResponse(StreamingResponse):
    """An archive in pieces."""

    media_type = MEDIA_TYPE


@router.get(
    "/{collection}/archive",
    response_class=ArchiveResponse,
    responses={200: {"description": "The archive", "content": _CONTENT}, **problems(409, 500)},
)
async def export_archive(collection: Collection, context: ContextDep) -> ArchiveResponse:
    """Download a collection as one file: documents, settings, states and checksums.

    A download that ends early lacks the index at its end, and is refused by an import.
    """
    pieces = _pieces(context.rag.collections.stream_archive(collection))
    first = await run_in_threadpool(next, pieces)  # an unknown collection is an error, not a body
    name = quote(f"{collection}.tar", safe="")
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{name}"}
    return ArchiveResponse(_prepended(first, pieces), headers=headers)


_UPLOAD: dict[str, Any] = {
    "status_code": 201,
    "openapi_extra": {"requestBody": {"required": True, "content": _CONTENT}},
    "responses": problems(409, 500, 507),
}


@router.put("/{collection}/archive", **_UPLOAD)
async def import_archive(
    collection: Collection, context: ContextDep, encode: Flag = False, replace: Flag = False
) -> CollectionImport:
    """Store the collection of an archive, whose whole content is verified first.

    The documents appear together at the end. After an interruption, the same upload stores only
    states that the folder lacks. With `encode`, modules without states are encoded: all of them, if
    another model made the archive. With `replace`, the archive replaces the collection's documents.
    """
    with tempfile.TemporaryFile(dir=_folder(context)) as file:
        await _receive(context.request, file)
        return await run_in_threadpool(
            context.rag.collections.import_archive,
            file,
            collection,
            encode=encode,
            replace=replace,
        )


def _folder(context: RequestContext) -> str:
    """Return the state folder, whose disk holds the archive until it is stored."""
    return str(context.service.shared.store.disk.folder.parent)


async def _receive(request: Request, file: IO[bytes]) -> None:
    """Write the body to a file. Raises `StoreFull` or `StoreUnwritable`."""
    waiting = bytearray()
    try:
        async for piece in request.stream():
            waiting += piece
            if len(waiting) >= _PIECE:
                await run_in_threadpool(file.write, bytes(waiting))
                waiting.clear()
        await run_in_threadpool(file.write, bytes(waiting))
        file.flush()
    except OSError as error:
        raise named_os_error(error, "the state folder") from error


def _pieces(parts: Iterator[memoryview]) -> Iterator[bytes]:
    """Yield parts as bytes of a bounded size."""
    for part in parts:
        for begin in range(0, len(part), _PIECE):
            yield bytes(part[begin : begin + _PIECE])


def _prepended(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest
