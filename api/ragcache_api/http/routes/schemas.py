"""Hand-written PML schemas."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import TypeAdapter, ValidationError

from ragcache_api.http.cursors import PageDep
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.protocol import (
    DeletedResponse,
    PageOf,
    PathName,
    SchemaRequest,
    SchemaResponse,
    problems,
)
from ragcache_api.http.service import ContextDep, RequestContext, off_loop
from ragcache_schemas import Placement, parse_schema

router = APIRouter(prefix="/v1/schemas", tags=["schemas"], responses=problems(507))
Name = Annotated[PathName, Path()]
_NAME = TypeAdapter(PathName)


@router.get("")
async def list_schemas(context: ContextDep, page: PageDep) -> PageOf[SchemaResponse]:
    """The schemas, by name."""
    listed = await off_loop(context.service.queries.schemas, context.caller.namespace)
    return page.cut(listed, lambda s: s.name)


@router.post("", status_code=201)
async def add_schema(body: SchemaRequest, context: ContextDep) -> SchemaResponse:
    """Stores a schema and encodes its modules."""
    name = await off_loop(_add_schema, context, body.text, body.placement)
    return SchemaResponse(name=name, placement=body.placement)


def _add_schema(context: RequestContext, text: str, placement: Placement) -> str:
    name = parse_schema(text, source="schema").name
    try:
        _NAME.validate_python(name)
    except ValidationError:
        raise HTTPProblem(
            422, "unusable-name",
            f"the schema is called {name!r:.80}, which no path can hold: a name has 1 to 200 "
            "characters and no `/`, and is neither `.` nor `..`",
        ) from None  # fmt: skip
    return context.rag.add_schema(text, placement=placement, source="schema").name


@router.get("/{name}")
async def get_schema(name: Name, context: ContextDep) -> SchemaResponse:
    """A schema with its text."""
    return await off_loop(context.service.queries.schema, context.caller.namespace, name)


@router.delete("/{name}")
async def delete_schema(name: Name, context: ContextDep) -> DeletedResponse:
    """Deletes a schema, and the states that nothing else needs."""
    await off_loop(context.rag.delete_schema, name)
    return DeletedResponse(deleted=1)
