"""Hand-written PML schemas."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import TypeAdapter, ValidationError

from ragcache_api.http.cursors import page_of
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.protocol import (
    Cursor,
    Deleted,
    Limit,
    PageOf,
    PathName,
    SchemaRequest,
    SchemaResponse,
    problems,
)
from ragcache_api.http.service import Call, CallDep, off_loop
from ragcache_schemas import Placement, parse_schema

router = APIRouter(prefix="/v1/schemas", tags=["schemas"], responses=problems(507))
Name = Annotated[PathName, Path()]
_NAME = TypeAdapter(PathName)


@router.get("")
async def list_schemas(
    call: CallDep, cursor: Cursor = None, limit: Limit = 100
) -> PageOf[SchemaResponse]:
    """The schemas, by name."""
    listed = await off_loop(call.service.looking.schemas, call.caller.namespace)
    return page_of(listed, lambda s: s.name, lambda s: s, cursor, limit)


@router.post("", status_code=201)
async def add_schema(body: SchemaRequest, call: CallDep) -> SchemaResponse:
    """Stores a schema and encodes its modules."""
    name = await off_loop(_add, call, body.text, body.placement)
    return SchemaResponse(name=name, placement=body.placement)


def _add(call: Call, text: str, placement: Placement) -> str:
    name = parse_schema(text, source="schema").name
    try:
        _NAME.validate_python(name)
    except ValidationError:
        raise HTTPProblem(
            422, "unusable-name",
            f"the schema is called {name!r:.80}, which no path can hold: a name has 1 to 200 "
            "characters and no `/`, and is neither `.` nor `..`",
        ) from None  # fmt: skip
    return call.rag.add_schema(text, placement=placement, source="schema").name


@router.get("/{name}")
async def get_schema(name: Name, call: CallDep) -> SchemaResponse:
    """A schema as it was written."""
    return await off_loop(call.service.looking.schema, call.caller.namespace, name)


@router.delete("/{name}")
async def delete_schema(name: Name, call: CallDep) -> Deleted:
    """Deletes a schema; states that nothing else needs go with it."""
    await off_loop(call.rag.delete_schema, name)
    return Deleted(deleted=1)
