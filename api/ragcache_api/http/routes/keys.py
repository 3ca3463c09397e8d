"""The API keys of the service, which concern all namespaces: listed, created and revoked."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Response
from pydantic import Field

from ragcache.config import NAMESPACE
from ragcache.db import ApiKeyRow
from ragcache_api.http.bodies import PathName
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.protocol import (
    PageDep,
    PageOf,
    RequestModel,
    ResponseModel,
    problems,
)
from ragcache_api.http.service import ContextDep, RequestContext, off_loop

router = APIRouter(prefix="/admin/keys", tags=["keys"], responses=problems(500, 507))
Role = Literal["user", "admin"]


class KeyRequest(RequestModel):
    """A key to create. role: `user` asks and ingests, `admin` has `/admin` as well."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    role: Role = "user"
    namespace: PathName = NAMESPACE


class KeyResponse(ResponseModel):
    """A key. prefix: the first characters of its secret. Times in Unix seconds. current: whether
    this request came with it."""

    id: int
    name: str
    role: Role
    namespace: str
    prefix: str
    created_at: float
    last_used: float | None
    revoked_at: float | None
    current: bool = False


class KeyCreatedResponse(KeyResponse):
    """A new key with its secret, which is stored nowhere and told this once."""

    secret: str


@router.get("")
async def list_keys(context: ContextDep, page: PageDep) -> PageOf[KeyResponse]:
    """All keys, the revoked ones too, the oldest first."""
    context.caller.require_operator()
    rows = await off_loop(context.rag.keys.list)
    listed = [KeyResponse.model_validate(row) for row in rows]
    current = context.caller.key
    return page.cut(
        [each.model_copy(update={"current": each.id == current}) for each in listed],
        lambda key: f"{key.id:020}",
    )


@router.post("", status_code=201, responses=problems(409))
async def create_key(
    body: KeyRequest, context: ContextDep, response: Response
) -> KeyCreatedResponse:  # fmt: skip
    """Creates a key. The first one closes the service to requests without any, and is one of the
    operator's."""
    context.caller.require_operator()
    row, secret = await off_loop(_create, context, body)
    response.headers["Cache-Control"] = "no-store"
    return KeyCreatedResponse(**KeyResponse.model_validate(row).model_dump(), secret=secret)


def _create(context: RequestContext, body: KeyRequest) -> tuple[ApiKeyRow, str]:
    keys = context.rag.keys
    if not keys.any() and (body.role, body.namespace) != ("admin", NAMESPACE):
        raise HTTPProblem(
            409, "first-key",
            "the first key closes the service to requests without one, so it has to be an "
            f"operator's: role `admin`, namespace {NAMESPACE!r}",
        )  # fmt: skip
    return keys.create(body.name, body.role, body.namespace)


@router.delete("/{key}", responses=problems(409))
async def revoke_key(
    key: Annotated[int, Path(ge=1, lt=2**63)], context: ContextDep
) -> KeyResponse:  # fmt: skip
    """Refuses a key from now on; other processes do within ten seconds. That of the request itself
    stays, so that an operator's key is left."""
    context.caller.require_operator()
    if key == context.caller.key:
        raise HTTPProblem(
            409, "own-key", "this request came with that key; revoke it with another one, or "
            "with `ragcache keys revoke`",
        )  # fmt: skip
    return KeyResponse.model_validate(await off_loop(_revoke, context, key))


def _revoke(context: RequestContext, key: int) -> ApiKeyRow:
    keys = context.rag.keys
    keys.revoke(key)
    return next(row for row in keys.list() if row.id == key)
