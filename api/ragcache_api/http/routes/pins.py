"""Routes of pins: states of documents that a caller keeps from eviction, within its budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import Field

from ragcache.pipeline import Pin
from ragcache_api.http.bodies import CollectionName
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.protocol import (
    DeletedResponse,
    PageOf,
    PageQuery,
    RequestModel,
    ResponseModel,
    problems,
)
from ragcache_api.http.service import ContextDep

router = APIRouter(prefix="/v1/pins", tags=["pins"], responses=problems(500, 507))
admin_router = APIRouter(prefix="/admin/pins", tags=["pins_admin"], responses=problems(500))
PinId = Annotated[str, Path(min_length=1, max_length=200)]


class PinRequest(RequestModel):
    """Documents whose states are kept."""

    collection: CollectionName
    documents: Annotated[list[str], Field(min_length=1, max_length=10_000)] | None = None
    """Ids of documents. All documents that the collection has now by default."""
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds after which the pin ends. Null for no limit."""


class PinResponse(ResponseModel):
    """A pin. Times are Unix seconds."""

    id: str
    owner: str
    """The key, such as `key 3`. Empty without keys."""
    collection: str
    documents: list[str] | None
    states: int
    """Number of states."""
    bytes: int = Field(validation_alias="nbytes")
    created_at: float
    expires_at: float | None


@router.post("", status_code=201, responses=problems(409))
def add_pin(body: PinRequest, context: ContextDep) -> PinResponse:
    """Keep the states of documents from eviction, within the budget `pin_bytes` of the key."""
    pin = context.rag.pins.add(
        body.collection, body.documents, seconds=body.seconds, keeper=context.keeper
    )
    return PinResponse.model_validate(pin)


@router.get("")
def list_pins(context: ContextDep, page: PageQuery) -> PageOf[PinResponse]:
    """List the pins of the key."""
    return _page(context.rag.pins.list(context.keeper.name), page)


@router.delete("/{pin}")
def end_pin(pin: PinId, context: ContextDep) -> DeletedResponse:
    """End a pin of the key. Its states may be evicted from then on."""
    return _end(pin, found=context.rag.pins.end(pin, context.keeper.name))


@admin_router.get("")
def list_all_pins(context: ContextDep, page: PageQuery) -> PageOf[PinResponse]:
    """List the pins of all keys of the namespace."""
    return _page(context.rag.pins.list(), page)


@admin_router.delete("/{pin}")
def end_any_pin(pin: PinId, context: ContextDep) -> DeletedResponse:
    """End a pin of any key of the namespace."""
    return _end(pin, found=context.rag.pins.end(pin))


def _page(pins: Sequence[Pin], page: PageQuery) -> PageOf[PinResponse]:
    return page.cut([PinResponse.model_validate(each) for each in pins], lambda pin: pin.id)


def _end(pin: str, *, found: bool) -> DeletedResponse:
    if not found:
        raise HTTPProblem(404, "unknown-pin", f"there is no pin {pin!r:.200}; it may have ended")
    return DeletedResponse(deleted=1)
