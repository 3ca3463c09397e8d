"""Documents from a request: JSON, or files of a form."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from ragcache import SourceDocument
from ragcache.errors import UnreadableDocument
from ragcache_api.http.errors import Refusal
from ragcache_api.http.service import off_loop
from ragcache_api.http.wire.documents import DocumentsSent

_FILES = 1000


async def sent_documents(request: Request) -> list[SourceDocument]:
    """Raises `RequestValidationError`, `Refusal` (400, 415) or `UnreadableDocument`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return await off_loop(_documents, await _files(request))
    if kind == "application/json":
        return await off_loop(_json, await request.body())
    raise Refusal(415, "unsupported-media-type", "send application/json or multipart/form-data")


def _json(body: bytes) -> list[SourceDocument]:
    """Takes as long as the body is large."""
    try:
        sent = DocumentsSent.model_validate_json(body)
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
                raise Refusal(400, "not-a-file", f"the field {field!r:.100} is no file")
            found.append((file.filename or "", await file.read()))
    if not found:
        raise Refusal(400, "no-files", "the form holds no file")
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
