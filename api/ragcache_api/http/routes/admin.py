"""The operator's modules: listed, warmed, pinned, expired, moved and evicted, one or many."""

# MERGED ragcache_api.http.routes.admin_state: What the operator sees: statistics, tiers,
#   requests, evictions, heat, schemas.
# MERGED ragcache_api.http.routes.admin_work: What the operator asks for besides modules:
#   flush, verify, plan.

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query

from ragcache.config import NAMESPACE
from ragcache_api.http.cursors import decrypted, encrypted, page_of
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
from ragcache_api.http.service import Call, CallDep, off_loop

router = APIRouter(prefix="/admin", tags=["admin"], responses=problems(500))
Sort = Literal["id", "name", "nbytes", "hits", "last_use"]
Word = Annotated[str | None, Query(max_length=1000)]


@router.get("/modules")
async def list_modules(
    call: CallDep, collection: CollectionName | None = None, document: Word = None,
    tier: Word = None, pinned: Flag | None = None, search: Word = None, sort: Sort = "id",
    descending: Flag = False, cursor: Cursor = None, limit: Limit = 100,
) -> PageOf[ModuleResponse]:  # fmt: skip
    """Modules with what the tiers hold of them."""
    page = await off_loop(
        call.rag.modules.page, collection=collection, document=document, tier=tier, pinned=pinned,
        search=search, sort=sort, descending=descending, cursor=decrypted(call, cursor),
        limit=limit,
    )  # fmt: skip
    told = PageOf[ModuleResponse].model_validate(page)
    if call.caller.namespace != NAMESPACE:
        told = told.model_copy(update={"items": [each.without_clock() for each in told.items]})
    return encrypted(call, told)


@router.get("/modules/{module}")
async def get_module(module: PublicId, call: CallDep) -> ModuleTextResponse:
    """A module with its text."""
    detail = await off_loop(call.rag.modules.get, module)
    told = ModuleTextResponse(
        **asdict(detail.listing), text=detail.text, uri=detail.uri,
        metadata=dict(detail.attributes), states=[asdict(state) for state in detail.states],
    )  # fmt: skip
    return told if call.caller.namespace == NAMESPACE else told.without_clock()


@router.delete("/modules/{module}")
async def evict_module(
    module: PublicId, call: CallDep, tier: Word = None, dry_run: Flag = False
) -> ChangesResponse:
    """Evicts a module's states; its document stays, and they are encoded again when a question
    needs them."""
    return await off_loop(_one, call, module, "evict", dry_run, tier=tier)


@router.post("/modules/{module}/pin")
async def pin_module(module: PublicId, call: CallDep, dry_run: Flag = False) -> ChangesResponse:
    """Keeps a module's states from being evicted for pressure or time."""
    return await off_loop(_one, call, module, "pin", dry_run)


@router.delete("/modules/{module}/pin")
async def unpin_module(module: PublicId, call: CallDep, dry_run: Flag = False) -> ChangesResponse:
    """Lets a module's states be evicted again."""
    return await off_loop(_one, call, module, "unpin", dry_run)


@router.post("/modules/{module}/warm")
async def warm_module(module: PublicId, call: CallDep, dry_run: Flag = False) -> ChangesResponse:
    """Brings a module's states to the first tier, and encodes them if no tier has them."""
    return await off_loop(_one, call, module, "warm", dry_run)


@router.post("/modules/{module}/move")
async def move_module(
    module: PublicId, body: MoveRequest, call: CallDep, dry_run: Flag = False
) -> ChangesResponse:
    """Brings a module's states to a tier, and takes them from those above it."""
    return await off_loop(_one, call, module, "move", dry_run, tier=body.tier)


@router.post("/modules/{module}/expire")
async def expire_module(
    module: PublicId, body: ExpireRequest, call: CallDep, dry_run: Flag = False
) -> ChangesResponse:
    """Evicts a module's states when a time has passed, unless they are pinned; null lifts the
    limit."""
    return await off_loop(_expire, call, module, body.seconds, dry_run)


@router.post("/evict")
async def evict(body: EvictRequest, call: CallDep, dry_run: Flag = False) -> ChangesResponse:
    """Evicts states of a collection or of all; tells each that went, or would go."""
    return await off_loop(_evict, call, body, dry_run)


def _one(
    call: Call, module: str, action: str, dry_run: bool, *, tier: str | None = None
) -> ChangesResponse:
    modules = call.rag.modules
    row = modules.get(module).listing
    more = {"tier": tier} if tier is not None else {}
    act = getattr(modules, action)
    changes = act(row.collection, names=[row.name], dry_run=dry_run, **more)
    call.service.looking.flush()  # the next listing shows it
    return ChangesResponse.of(changes, dry_run=dry_run)


def _expire(call: Call, module: str, seconds: float | None, dry_run: bool) -> ChangesResponse:
    modules = call.rag.modules
    listing = modules.get(module).listing
    changes = modules.expire([listing.id], seconds, dry_run=dry_run)
    call.service.looking.flush()
    return ChangesResponse.of(changes, dry_run=dry_run)


def _evict(call: Call, body: EvictRequest, dry_run: bool) -> ChangesResponse:
    rag = call.rag
    names = list(rag.stats().collections) if body.collection is None else [body.collection]
    changes = [
        change
        for name in names
        for change in rag.modules.evict(name, body.documents, tier=body.tier, dry_run=dry_run)
    ]
    call.service.looking.flush()
    return ChangesResponse.of(changes, dry_run=dry_run)


HEAT_CELLS = 100_000  # a day of 69 modules


class SchemaListed(ResponseModel):
    """id: `collection:NAME` or `schema:NAME`."""

    id: str
    name: str
    kind: str


@router.get("/stats")
async def stats(call: CallDep) -> StatsResponse:
    """What is kept and what happened since the service began."""
    told = await off_loop(call.rag.stats)
    service = call.service
    record = service.recorder.of(call.caller.namespace)
    computing = [entry.computes for entry in _mine(call)]
    operator = call.caller.is_operator
    evictions = told.evictions if operator else {}
    return StatsResponse(
        model=service.model,
        uptime=time.time() - service.started,
        collections=told.collections,
        requests={
            "running": sum(computing),
            "waiting": len(computing) - sum(computing),
            **{name: record.outcomes[name] for name in ("finished", "failed", "cancelled")},
        },
        tokens=dict(record.tokens),
        ttft=record.ttft(),
        engine=service.looking.work() if operator else {},
        series=record.series(),
        evictions={
            tier: {reason: n for reason, n in reasons.items() if reason != "fetched_again"}
            for tier, reasons in evictions.items()
        },
        refetched=sum(reasons.get("fetched_again", 0) for reasons in evictions.values()),
    )


@router.get("/tiers")
async def tiers(call: CallDep) -> PageOf[TierResponse]:
    """Every tier with its fill, which all namespaces share."""
    call.operator()
    listed = await off_loop(call.rag.tiers)
    return PageOf(items=[TierResponse.model_validate(each) for each in listed], total=len(listed))


@router.get("/evictions")
async def evictions(
    call: CallDep, cursor: Cursor = None, limit: Limit = 100
) -> PageOf[EvictionResponse]:
    """States that left a tier, the latest first."""
    page = await off_loop(call.rag.evictions, decrypted(call, cursor), limit)
    return encrypted(call, PageOf[EvictionResponse].model_validate(page))


@router.get("/requests")
async def requests(call: CallDep) -> dict[str, Any]:
    """Requests that run, the engine's batch, and the last that ended."""
    batch = asdict(await off_loop(call.rag.batch)) if call.caller.is_operator else None
    record = call.service.recorder.of(call.caller.namespace)
    return {
        "running": [_told(entry) for entry in _mine(call)],
        "batch": batch,
        "recent": list(reversed(record.recent)),
    }


@router.get("/heat")
async def heat(
    call: CallDep,
    minutes: Annotated[int, Query(ge=1, le=24 * 60)] = 60,
    modules: Annotated[int, Query(ge=1, le=1000)] = 40,
) -> dict[str, Any]:
    """How often the most used modules stood in a prompt, minute by minute."""
    if minutes * modules > HEAT_CELLS:
        raise HTTPProblem(
            400, "too-many-cells", f"minutes times modules may be {HEAT_CELLS:,} at most"
        )  # fmt: skip
    heat = call.service.recorder.of(call.caller.namespace).heat(minutes)
    return await off_loop(heat.map, modules)


@router.get("/schemas")
async def schemas(call: CallDep, cursor: Cursor = None, limit: Limit = 100) -> PageOf[SchemaListed]:
    """Hand-written schemas, and those of collections."""
    listed = await off_loop(_schemas, call)
    return page_of(listed, lambda s: s.id, lambda s: s, cursor, limit)


@router.get("/schemas/{number}/tree")
async def schema_tree(
    number: Annotated[str, Path(min_length=1, max_length=300)], call: CallDep
) -> dict[str, Any]:
    """A schema as a tree of what it holds, in tokens."""
    kind, _, name = number.partition(":")
    looking, namespace = call.service.looking, call.caller.namespace
    if kind == "schema":
        return await off_loop(looking.written_tree, namespace, name)
    if kind == "collection":
        return await off_loop(looking.generated_tree, namespace, name)
    raise HTTPProblem(404, "unknown-schema", "ids are schema:NAME or collection:NAME")


def _schemas(call: Call) -> list[SchemaListed]:
    named = [("schema", name) for name in call.rag.schemas()]
    named += [("collection", name) for name in call.rag.stats().collections]
    return [SchemaListed(id=f"{kind}:{name}", name=name, kind=kind) for kind, name in named]


def _mine(call: Call) -> list[ActiveRequest]:
    entries = call.service.running.entries.values()
    return [entry for entry in entries if entry.namespace == call.caller.namespace]


def _told(entry: ActiveRequest) -> dict[str, Any]:
    return {
        "id": entry.id,
        "kind": entry.kind,
        "collection": entry.collection,
        "age": time.monotonic() - entry.started,
        "prompt_tokens": entry.prompt_tokens,
        "generated": entry.generated,
        "state": entry.state,
    }


@router.post("/flush", responses=problems(507))
async def flush(call: CallDep) -> FlushResponse:
    """Writes to the ledger what has happened: uses, evictions, what memory holds. States
    themselves are on disk already."""
    call.operator()
    await off_loop(call.service.looking.flush)
    return FlushResponse(flushed=True)


@router.post("/verify", responses=problems(507))
async def verify(call: CallDep, repair: Flag = False) -> VerifyResponse:
    """Checks every row of the ledger against every blob; `repair` mends what can be mended."""
    call.operator()
    report = await off_loop(call.service.looking.verify, repair=repair)
    return VerifyResponse(
        states=report.states, modules=report.modules, clean=report.clean,
        found=[asdict(each) for each in report.found], interrupted=report.interrupted,
    )  # fmt: skip


@router.post("/plan", responses=problems(507))
async def plan(body: PlanRequest, call: CallDep) -> dict[str, Any]:
    """What caching a corpus will take and bring; a sample is measured beside what runs."""
    call.operator()
    tokens = call.service.settings.module_tokens
    return await off_loop(call.service.looking.plan, call.caller.namespace, body, tokens)
