"""The operator's routes, `/admin`: modules, statistics, tiers, requests, schemas, maintenance."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query

from ragcache.config import NAMESPACE
from ragcache.store.admin import StateChange
from ragcache_api.http.cursors import decrypt_cursor, encrypt_next, page_of
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.protocol import (
    ChangesResponse,
    CollectionName,
    Cursor,
    EvictionResponse,
    EvictRequest,
    ExpireRequest,
    Flag,
    FlushResponse,
    Limit,
    ModuleResponse,
    ModuleTextResponse,
    MoveRequest,
    PageOf,
    PlanRequest,
    PublicId,
    ResponseModel,
    StatsResponse,
    TierResponse,
    VerifyResponse,
    problems,
)
from ragcache_api.http.requests import ActiveRequest
from ragcache_api.http.service import ContextDep, RequestContext, off_loop

router = APIRouter(prefix="/admin", tags=["admin"], responses=problems(500))
Sort = Literal["id", "name", "nbytes", "hits", "last_use"]
Word = Annotated[str | None, Query(max_length=1000)]
HEAT_CELLS = 100_000  # a day of 69 modules


class SchemaListedResponse(ResponseModel):
    """id: `collection:NAME` or `schema:NAME`."""

    id: str
    name: str
    kind: str


@router.get("/modules")
async def list_modules(
    context: ContextDep, collection: CollectionName | None = None, document: Word = None,
    tier: Word = None, pinned: Flag | None = None, search: Word = None, sort: Sort = "id",
    descending: Flag = False, cursor: Cursor = None, limit: Limit = 100,
) -> PageOf[ModuleResponse]:  # fmt: skip
    """Modules, with the tiers that hold their states."""
    page = await off_loop(
        context.rag.modules.page, collection=collection, document=document, tier=tier,
        pinned=pinned, search=search, sort=sort, descending=descending,
        cursor=decrypt_cursor(context, cursor), limit=limit,
    )  # fmt: skip
    listed = PageOf[ModuleResponse].model_validate(page)
    if context.caller.namespace != NAMESPACE:
        items = [each.without_clock() for each in listed.items]
        listed = listed.model_copy(update={"items": items})
    return encrypt_next(context, listed)


@router.get("/modules/{module}")
async def get_module(module: PublicId, context: ContextDep) -> ModuleTextResponse:
    """A module with its text."""
    detail = await off_loop(context.rag.modules.get, module)
    module_text = ModuleTextResponse(
        **asdict(detail.listing), text=detail.text, uri=detail.uri,
        metadata=dict(detail.attributes), states=[asdict(state) for state in detail.states],
    )  # fmt: skip
    operator = context.caller.namespace == NAMESPACE
    return module_text if operator else module_text.without_clock()


@router.delete("/modules/{module}")
async def evict_module(
    module: PublicId, context: ContextDep, tier: Word = None, dry_run: Flag = False
) -> ChangesResponse:
    """Evicts a module's states. Its document stays, and they are encoded again when a question
    needs them."""
    return await off_loop(_change_module, context, module, "evict", dry_run, tier=tier)


@router.post("/modules/{module}/pin")
async def pin_module(
    module: PublicId, context: ContextDep, dry_run: Flag = False
) -> ChangesResponse:
    """Keeps a module's states from being evicted for pressure or time."""
    return await off_loop(_change_module, context, module, "pin", dry_run)


@router.delete("/modules/{module}/pin")
async def unpin_module(
    module: PublicId, context: ContextDep, dry_run: Flag = False
) -> ChangesResponse:
    """Lets a module's states be evicted again."""
    return await off_loop(_change_module, context, module, "unpin", dry_run)


@router.post("/modules/{module}/warm")
async def warm_module(
    module: PublicId, context: ContextDep, dry_run: Flag = False
) -> ChangesResponse:
    """Brings a module's states to the first tier, and encodes them if no tier has them."""
    return await off_loop(_change_module, context, module, "warm", dry_run)


@router.post("/modules/{module}/move")
async def move_module(
    module: PublicId, body: MoveRequest, context: ContextDep, dry_run: Flag = False
) -> ChangesResponse:
    """Moves a module's states to a tier, away from those above it."""
    return await off_loop(_change_module, context, module, "move", dry_run, tier=body.tier)


@router.post("/modules/{module}/expire")
async def expire_module(
    module: PublicId, body: ExpireRequest, context: ContextDep, dry_run: Flag = False
) -> ChangesResponse:
    """Evicts a module's states after a time, unless they are pinned; null lifts the limit."""
    return await off_loop(_expire, context, module, body.seconds, dry_run)


@router.post("/evict")
async def evict_modules(
    body: EvictRequest, context: ContextDep, dry_run: Flag = False
) -> ChangesResponse:
    """Evicts states of a collection or of all; lists each that went, or would go."""
    return await off_loop(_evict, context, body, dry_run)


def _change_module(
    context: RequestContext, module: str, action: str, dry_run: bool, *, tier: str | None = None
) -> ChangesResponse:
    modules = context.rag.modules
    row = modules.get(module).listing
    more = {"tier": tier} if tier is not None else {}
    change = getattr(modules, action)
    changes = change(row.collection, names=[row.name], dry_run=dry_run, **more)
    return _changes(context, changes, dry_run)


def _expire(
    context: RequestContext, module: str, seconds: float | None, dry_run: bool
) -> ChangesResponse:
    modules = context.rag.modules
    listing = modules.get(module).listing
    changes = modules.expire([listing.id], seconds, dry_run=dry_run)
    return _changes(context, changes, dry_run)


def _evict(context: RequestContext, body: EvictRequest, dry_run: bool) -> ChangesResponse:
    rag = context.rag
    names = list(rag.stats().collections) if body.collection is None else [body.collection]
    changes = [
        change
        for name in names
        for change in rag.modules.evict(name, body.documents, tier=body.tier, dry_run=dry_run)
    ]
    return _changes(context, changes, dry_run)


def _changes(
    context: RequestContext, changes: Sequence[StateChange], dry_run: bool
) -> ChangesResponse:
    context.service.queries.flush()  # so that the next listing shows the changes
    return ChangesResponse.of(changes, dry_run=dry_run)


@router.get("/stats")
async def get_stats(context: ContextDep) -> StatsResponse:
    """Statistics since the service began."""
    stats = await off_loop(context.rag.stats)
    service = context.service
    record = service.recorder.stats_of(context.caller.namespace)
    computing = [active.computes for active in _mine(context)]
    operator = context.caller.is_operator
    evictions = stats.evictions if operator else {}
    return StatsResponse(
        model=service.model,
        uptime=time.time() - service.started,
        collections=stats.collections,
        requests={
            "running": sum(computing),
            "waiting": len(computing) - sum(computing),
            **{name: record.outcomes[name] for name in ("finished", "failed", "cancelled")},
        },
        tokens=dict(record.tokens),
        ttft=record.ttft(),
        engine=service.queries.engine_figures() if operator else {},
        series=record.series(),
        evictions={
            tier: {reason: n for reason, n in reasons.items() if reason != "fetched_again"}
            for tier, reasons in evictions.items()
        },
        refetched=sum(reasons.get("fetched_again", 0) for reasons in evictions.values()),
    )


@router.get("/tiers")
async def list_tiers(context: ContextDep) -> PageOf[TierResponse]:
    """The tiers, which all namespaces share."""
    context.require_operator()
    listed = await off_loop(context.rag.tiers)
    return PageOf(items=[TierResponse.model_validate(each) for each in listed], total=len(listed))


@router.get("/evictions")
async def list_evictions(
    context: ContextDep, cursor: Cursor = None, limit: Limit = 100
) -> PageOf[EvictionResponse]:
    """States that left a tier, the latest first."""
    page = await off_loop(context.rag.evictions, decrypt_cursor(context, cursor), limit)
    return encrypt_next(context, PageOf[EvictionResponse].model_validate(page))


@router.get("/requests")
async def list_requests(context: ContextDep) -> dict[str, Any]:
    """Requests under way, the engine's batch, and the requests that ended last."""
    batch = asdict(await off_loop(context.rag.batch)) if context.caller.is_operator else None
    record = context.service.recorder.stats_of(context.caller.namespace)
    return {
        "running": [_active_fields(active) for active in _mine(context)],
        "batch": batch,
        "recent": list(reversed(record.recent)),
    }


@router.get("/heat")
async def get_heat_map(
    context: ContextDep,
    minutes: Annotated[int, Query(ge=1, le=24 * 60)] = 60,
    modules: Annotated[int, Query(ge=1, le=1000)] = 40,
) -> dict[str, Any]:
    """How many prompts held each of the most used modules, minute by minute."""
    if minutes * modules > HEAT_CELLS:
        raise HTTPProblem(
            400, "too-many-cells", f"minutes times modules may be {HEAT_CELLS:,} at most"
        )  # fmt: skip
    heat = context.service.recorder.stats_of(context.caller.namespace).heat(minutes)
    return await off_loop(heat.map, modules)


@router.get("/schemas")
async def list_schemas(
    context: ContextDep, cursor: Cursor = None, limit: Limit = 100
) -> PageOf[SchemaListedResponse]:
    """Hand-written schemas, and those of collections."""
    listed = await off_loop(_schemas, context)
    return page_of(listed, lambda s: s.id, cursor, limit)


@router.get("/schemas/{id}/tree")
async def get_schema_tree(
    id: Annotated[str, Path(min_length=1, max_length=300)], context: ContextDep
) -> dict[str, Any]:
    """A schema as a tree, with the tokens of each node."""
    kind, _, name = id.partition(":")
    queries, namespace = context.service.queries, context.caller.namespace
    if kind == "schema":
        return await off_loop(queries.written_tree, namespace, name)
    if kind == "collection":
        return await off_loop(queries.generated_tree, namespace, name)
    raise HTTPProblem(404, "unknown-schema", "ids are schema:NAME or collection:NAME")


def _schemas(context: RequestContext) -> list[SchemaListedResponse]:
    named = [("schema", name) for name in context.rag.schemas()]
    named += [("collection", name) for name in context.rag.stats().collections]
    return [SchemaListedResponse(id=f"{kind}:{name}", name=name, kind=kind) for kind, name in named]


def _mine(context: RequestContext) -> list[ActiveRequest]:
    entries = context.service.requests.active.values()
    return [active for active in entries if active.namespace == context.caller.namespace]


def _active_fields(active: ActiveRequest) -> dict[str, Any]:
    return {
        "id": active.id,
        "kind": active.kind,
        "collection": active.collection,
        "age": time.monotonic() - active.started,
        "prompt_tokens": active.prompt_tokens,
        "generated": active.generated,
        "state": active.state,
    }


@router.post("/flush", responses=problems(507))
async def flush_ledger(context: ContextDep) -> FlushResponse:
    """Writes uses, evictions and the contents of memory to the ledger. States themselves are on
    disk already."""
    context.require_operator()
    await off_loop(context.service.queries.flush)
    return FlushResponse(flushed=True)


@router.post("/verify", responses=problems(507))
async def verify_states(context: ContextDep, repair: Flag = False) -> VerifyResponse:
    """Checks each row of the ledger against its blob; `repair` mends the rows that it can."""
    context.require_operator()
    report = await off_loop(context.service.queries.verify, repair=repair)
    return VerifyResponse(
        states=report.states, modules=report.modules, clean=report.clean,
        found=[asdict(each) for each in report.found], interrupted=report.interrupted,
    )  # fmt: skip


@router.post("/plan", responses=problems(507))
async def plan_cache(body: PlanRequest, context: ContextDep) -> dict[str, Any]:
    """Costs and gains of caching a corpus; a sample is measured while requests run."""
    context.require_operator()
    tokens = context.service.settings.module_tokens
    return await off_loop(context.service.queries.plan, context.caller.namespace, body, tokens)
