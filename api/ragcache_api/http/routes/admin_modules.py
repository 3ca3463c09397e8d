"""The operator's modules: listed, warmed, pinned, expired, moved and evicted, one or many."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Query

from ragcache.config import NAMESPACE
from ragcache_api.http.cursors import decrypted, encrypted
from ragcache_api.http.service import Call, CallDep, off_loop
from ragcache_api.http.wire.admin import (
    ChangesTold,
    EvictSent,
    ExpireSent,
    ModuleTextTold,
    ModuleTold,
    MoveSent,
)
from ragcache_api.http.wire.common import (
    CollectionName,
    Cursor,
    Flag,
    Limit,
    PageOf,
    PublicId,
    problems,
)

router = APIRouter(prefix="/admin", tags=["admin"], responses=problems(500))
Sort = Literal["id", "name", "nbytes", "hits", "last_use"]
Word = Annotated[str | None, Query(max_length=1000)]


@router.get("/modules")
async def list_modules(
    call: CallDep, collection: CollectionName | None = None, document: Word = None,
    tier: Word = None, pinned: Flag | None = None, search: Word = None, sort: Sort = "id",
    descending: Flag = False, cursor: Cursor = None, limit: Limit = 100,
) -> PageOf[ModuleTold]:  # fmt: skip
    """Modules with what the tiers hold of them."""
    page = await off_loop(
        call.rag.modules.page, collection=collection, document=document, tier=tier, pinned=pinned,
        search=search, sort=sort, descending=descending, cursor=decrypted(call, cursor),
        limit=limit,
    )  # fmt: skip
    told = PageOf[ModuleTold].model_validate(page)
    if call.caller.namespace != NAMESPACE:
        told = told.model_copy(update={"items": [each.without_clock() for each in told.items]})
    return encrypted(call, told)


@router.get("/modules/{module}")
async def get_module(module: PublicId, call: CallDep) -> ModuleTextTold:
    """A module with its text."""
    detail = await off_loop(call.rag.modules.get, module)
    told = ModuleTextTold(
        **asdict(detail.listing), text=detail.text, uri=detail.uri,
        metadata=dict(detail.attributes), states=[asdict(state) for state in detail.states],
    )  # fmt: skip
    return told if call.caller.namespace == NAMESPACE else told.without_clock()


@router.delete("/modules/{module}")
async def evict_module(
    module: PublicId, call: CallDep, tier: Word = None, dry_run: Flag = False
) -> ChangesTold:
    """Evicts a module's states; its document stays, and they are encoded again when a question
    needs them."""
    return await off_loop(_one, call, module, "evict", dry_run, tier=tier)


@router.post("/modules/{module}/pin")
async def pin_module(module: PublicId, call: CallDep, dry_run: Flag = False) -> ChangesTold:
    """Keeps a module's states from being evicted for pressure or time."""
    return await off_loop(_one, call, module, "pin", dry_run)


@router.delete("/modules/{module}/pin")
async def unpin_module(module: PublicId, call: CallDep, dry_run: Flag = False) -> ChangesTold:
    """Lets a module's states be evicted again."""
    return await off_loop(_one, call, module, "unpin", dry_run)


@router.post("/modules/{module}/warm")
async def warm_module(module: PublicId, call: CallDep, dry_run: Flag = False) -> ChangesTold:
    """Brings a module's states to the first tier, and encodes them if no tier has them."""
    return await off_loop(_one, call, module, "warm", dry_run)


@router.post("/modules/{module}/move")
async def move_module(
    module: PublicId, body: MoveSent, call: CallDep, dry_run: Flag = False
) -> ChangesTold:
    """Brings a module's states to a tier, and takes them from those above it."""
    return await off_loop(_one, call, module, "move", dry_run, tier=body.tier)


@router.post("/modules/{module}/expire")
async def expire_module(
    module: PublicId, body: ExpireSent, call: CallDep, dry_run: Flag = False
) -> ChangesTold:
    """Evicts a module's states when a time has passed, unless they are pinned; null lifts the
    limit."""
    return await off_loop(_expire, call, module, body.seconds, dry_run)


@router.post("/evict")
async def evict(body: EvictSent, call: CallDep, dry_run: Flag = False) -> ChangesTold:
    """Evicts states of a collection or of all; tells each that went, or would go."""
    return await off_loop(_evict, call, body, dry_run)


def _one(
    call: Call, module: str, action: str, dry_run: bool, *, tier: str | None = None
) -> ChangesTold:
    modules = call.rag.modules
    row = modules.get(module).listing
    more = {"tier": tier} if tier is not None else {}
    act = getattr(modules, action)
    changes = act(row.collection, names=[row.name], dry_run=dry_run, **more)
    call.service.looking.flush()  # the next listing shows it
    return ChangesTold.of(changes, dry_run=dry_run)


def _expire(call: Call, module: str, seconds: float | None, dry_run: bool) -> ChangesTold:
    modules = call.rag.modules
    listing = modules.get(module).listing
    changes = modules.expire([listing.id], seconds, dry_run=dry_run)
    call.service.looking.flush()
    return ChangesTold.of(changes, dry_run=dry_run)


def _evict(call: Call, body: EvictSent, dry_run: bool) -> ChangesTold:
    rag = call.rag
    names = list(rag.stats().collections) if body.collection is None else [body.collection]
    changes = [
        change
        for name in names
        for change in rag.modules.evict(name, body.documents, tier=body.tier, dry_run=dry_run)
    ]
    call.service.looking.flush()
    return ChangesTold.of(changes, dry_run=dry_run)
