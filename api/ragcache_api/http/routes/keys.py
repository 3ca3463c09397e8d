"""Routes that list, create and revoke API keys. They concern all namespaces."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Response
from pydantic import Field

from ragcache.config import NAMESPACE
from ragcache_api.http.bodies import PathName
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.protocol import PageOf, PageQuery, RequestModel, ResponseModel, problems
from ragcache_api.http.service import ContextDep

router = APIRouter(prefix="/admin/keys", tags=["keys"], responses=problems(500, 507))
Role = Literal["user", "admin"]


class KeyRequest(RequestModel):
    """A key to create."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    """Name to list the key under, 1 to 100 characters."""
    role: Role = "user"
    """`user` may ask and ingest; `admin` may also use `/admin`."""
    namespace: PathName = NAMESPACE
    """Namespace that the key opens."""
    pin_bytes: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Most bytes of states that a `user` keeps from eviction. `admin` has no limit."""


class KeyResponse(ResponseModel):
    """A key without its secret."""

    id: int
    name: str
    role: Role
    namespace: str
    prefix: str
    """First characters of the secret."""
    created_at: float
    """Unix seconds."""
    last_used: float | None
    """Unix seconds. Null for a key that was never used."""
    revoked_at: float | None
    """Unix seconds. Null for a valid key."""
    pin_bytes: int
    """Most bytes of states that a `user` keeps from eviction."""
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
    listed = [KeyResponse.model_validate(row) for row in context.rag.keys.list()]
    current = context.caller.key
    return page.cut(
        [each.model_copy(update={"current": each.id == current}) for each in listed],
        lambda key: f"{key.id:020}",
    )


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
    row, secret = keys.create(body.name, body.role, body.namespace, body.pin_bytes)
    response.headers["Cache-Control"] = "no-store"
    return KeyCreatedResponse(**KeyResponse.model_validate(row).model_dump(), secret=secret)


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
    return KeyResponse.model_validate(next(row for row in keys.list() if row.id == key))
