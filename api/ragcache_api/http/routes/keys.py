"""Routes that list, create and revoke API keys. They concern all namespaces."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response
from pydantic import Field

from ragcache.config import NAMESPACE
from ragcache.db import ApiKeyRow
from ragcache.params import KeyParams, Surface
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.protocol import PageOf, PageQuery, problems
from ragcache_api.http.service import ContextDep

router = APIRouter(prefix="/admin/keys", tags=["keys"], responses=problems(500, 507))


class KeyRequest(Surface, KeyParams):
    """A key to create."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    """Name to list the key under, 1 to 100 characters."""


class KeyResponse(ApiKeyRow):
    """A key without its secret."""

    current: bool = False
    """Whether this request came with the key."""


class KeyCreatedResponse(KeyResponse):
    """A new key with its secret."""

    secret: str
    """The secret. It is not stored and cannot be shown again."""


@router.get("")
def list_keys(context: ContextDep, page: PageQuery) -> PageOf[KeyResponse]:
    """List all keys, including revoked ones, oldest first."""
    context.caller.require_operator()
    current = context.caller.key
    listed = [
        KeyResponse(**row.model_dump(), current=row.id == current)
        for row in context.rag.keys.list()
    ]
    return page.cut(listed, lambda key: f"{key.id:020}")


@router.post("", status_code=201, responses=problems(409))
def create_key(body: KeyRequest, context: ContextDep, response: Response) -> KeyCreatedResponse:
    """Create a key.

    The first key must be an operator's. From then on, every request needs a key.
    """
    context.caller.require_operator()
    keys = context.rag.keys
    if not keys.any() and (body.role, body.namespace) != ("admin", NAMESPACE):
        raise HTTPProblem(
            409,
            "first-key",
            "the first key closes the service to requests without one, so it has to be an "
            f"operator's: role `admin`, namespace {NAMESPACE!r}",
        )
    row, secret = keys.create(body.name, **KeyParams.part_of(body).given())
    response.headers["Cache-Control"] = "no-store"
    return KeyCreatedResponse(**row.model_dump(), secret=secret)


@router.delete("/{key}", responses=problems(409))
def revoke_key(key: Annotated[int, Path(ge=1, lt=2**63)], context: ContextDep) -> KeyResponse:
    """Revoke a key: at once in this process, within ten seconds in others.

    A request cannot revoke its own key, so that an operator's key always remains.
    """
    context.caller.require_operator()
    if key == context.caller.key:
        raise HTTPProblem(
            409,
            "own-key",
            "this request came with that key; revoke it with another one, or "
            "with `ragcache keys revoke`",
        )
    keys = context.rag.keys
    keys.revoke(key)
    return KeyResponse(**next(row for row in keys.list() if row.id == key).model_dump())
