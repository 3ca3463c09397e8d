"""Hand-written PML schemas."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from ragcache_api.http.paging import page_of
from ragcache_api.http.service import CallDep, off_loop
from ragcache_api.http.wire.common import Cursor, Deleted, Limit, PageOf, problems
from ragcache_api.http.wire.documents import SchemaSent, SchemaTold

router = APIRouter(prefix="/v1/schemas", tags=["schemas"], responses=problems(507))
Name = Annotated[str, Path(min_length=1, max_length=200)]


@router.get("")
async def list_schemas(
    call: CallDep, cursor: Cursor = None, limit: Limit = 100
) -> PageOf[SchemaTold]:
    """The schemas, by name."""
    listed = await off_loop(call.service.looking.schemas, call.caller.namespace)
    return page_of(listed, lambda s: s.name, lambda s: s, cursor, limit)


@router.post("", status_code=201)
async def add_schema(body: SchemaSent, call: CallDep) -> SchemaTold:
    """Stores a schema and encodes its modules."""
    schema = await off_loop(
        call.rag.add_schema, body.text, placement=body.placement, source="schema"
    )
    return SchemaTold(name=schema.name, placement=body.placement)


@router.get("/{name}")
async def get_schema(name: Name, call: CallDep) -> SchemaTold:
    """A schema as it was written."""
    return await off_loop(call.service.looking.schema, call.caller.namespace, name)


@router.delete("/{name}")
async def delete_schema(name: Name, call: CallDep) -> Deleted:
    """Deletes a schema; states that nothing else needs go with it."""
    await off_loop(call.rag.delete_schema, name)
    return Deleted(deleted=1)
