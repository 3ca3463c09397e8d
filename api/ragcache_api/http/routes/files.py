"""Routes of OpenAI's files: uploads that vector stores take their documents from."""

from __future__ import annotations

from io import BytesIO
from secrets import token_hex
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.responses import Response

from ragcache.db import StoredObject
from ragcache_api.http.bodies import invalid
from ragcache_api.http.downloads import download
from ragcache_api.http.lists import ListOf, ListQuery
from ragcache_api.http.protocol import ResponseModel, openai_problems
from ragcache_api.http.routes.responses import DeletedObject, unknown_object
from ragcache_api.http.service import ContextDep, RequestContext
from ragcache_api.http.sources import FILE_PREFIX
from ragcache_api.http.vector_stores import FILE, VectorStores

router = APIRouter(prefix="/v1/files", tags=["files"], responses=openai_problems())
FileId = Annotated[str, Path(min_length=1, max_length=200)]
_PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
_EXPIRY = "expires_after[seconds]"


class FileResponse(ResponseModel):
    """An uploaded file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, file: StoredObject) -> FileResponse:
        """Return the response of a stored file."""
        expires = None if file.expires_at is None else int(file.expires_at)
        created = int(file.created_at)
        return cls(id=file.id, created_at=created, expires_at=expires, **file.value)


_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(_PURPOSES)},
                        _EXPIRY: {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
                    },
                }
            }
        },
    }
}


@router.post("", openapi_extra=_FORM)
async def upload_file(context: ContextDep) -> FileResponse:
    """Store a file of a form with `file` and `purpose`."""
    kind = context.request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise invalid("file", "send the file as multipart/form-data, with file and purpose")
    async with context.request.form(max_files=1, max_fields=10) as form:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise invalid("file", "the form has no file in the field file")
        if purpose not in _PURPOSES:
            raise invalid("purpose", f"purpose is one of {', '.join(_PURPOSES)}")
        seconds = _seconds(form.get(_EXPIRY))
        name = (file.filename or "").replace("\\", "/").rpartition("/")[2]
        if not 0 < len(name) <= 500:
            raise invalid("file", "the file has no usable name")
        content = await file.read()
    value = {"filename": name, "purpose": purpose, "bytes": len(content)}
    made = await run_in_threadpool(
        context.objects.add,
        FILE,
        value,
        id=f"{FILE_PREFIX}{token_hex(12)}",
        content=content,
        seconds=seconds,
    )
    return FileResponse.of(made)


@router.get("")
def list_files(
    context: ContextDep,
    page: ListQuery,
    purpose: Annotated[str | None, Query(max_length=100)] = None,
) -> ListOf[FileResponse]:
    """List the files."""
    files = [FileResponse.of(each) for each in context.objects.list(FILE)]
    return page.cut([each for each in files if purpose in (None, each.purpose)])


@router.get("/{file}")
def get_file(file: FileId, context: ContextDep) -> FileResponse:
    """Return a file without its content."""
    return FileResponse.of(_stored(context, file))


_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file", "content": {"application/octet-stream": {}}}
}


@router.get("/{file}/content", response_class=Response, responses=_CONTENT)
def get_file_content(file: FileId, context: ContextDep) -> Response:
    """Return the content of a file."""
    found = _stored(context, file)
    content = context.objects.content(FILE, file)
    if content is None:
        raise unknown_object("file", file)
    return download(found.value["filename"], BytesIO(content))


@router.delete("/{file}")
def delete_file(file: FileId, context: ContextDep) -> DeletedObject:
    """Delete a file, with its documents in all vector stores."""
    _stored(context, file)
    VectorStores(context).detach_everywhere(file)
    context.objects.delete(FILE, file)
    return DeletedObject(id=file, object="file")


def _stored(context: RequestContext, file: str) -> StoredObject:
    found = context.objects.get(FILE, file)
    if found is None:
        raise unknown_object("file", file)
    return found


def _seconds(given: Any) -> float | None:
    """Return the seconds of a form's expiry. Raises `HTTPProblem` (400)."""
    if given is None:
        return None
    if not str(given).isdecimal() or not 3600 <= int(given) <= 2_592_000:
        raise invalid("expires_after", "expires_after[seconds] is a number from 3600 to 2592000")
    return float(given)
