"""Documents from a request: JSON, or files of a form."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from ragcache import SourceDocument
from ragcache.errors import UnreadableDocument
from ragcache_api.http.errors import Refusal
from ragcache_api.http.wire.documents import DocumentsSent

_FILES = 1000


async def sent_documents(request: Request) -> list[SourceDocument]:
    """Raises `RequestValidationError`, `Refusal` (400, 415) or `UnreadableDocument`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return await _files(request)
    if kind == "application/json":
        return [each.source() for each in (await _json(request)).documents]
    raise Refusal(415, "unsupported-media-type", "send application/json or multipart/form-data")


async def _json(request: Request) -> DocumentsSent:
    try:
        return DocumentsSent.model_validate(json.loads(await request.body()))
    except ValidationError as error:
        problems: list[Any] = [
            {**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)
        ]
        raise RequestValidationError(problems) from None
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "invalid-json", f"the body is no JSON: {error}") from None


async def _files(request: Request) -> list[SourceDocument]:
    documents = []
    async with request.form(max_files=_FILES, max_fields=10) as form:
        for field, file in form.multi_items():
            if not isinstance(file, UploadFile):
                raise Refusal(400, "not-a-file", f"the field {field!r:.100} is no file")
            documents.append(_document(file.filename or "", await file.read()))
    if not documents:
        raise Refusal(400, "no-files", "the form holds no file")
    return documents


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
