"""Routes of the operator: health checks, metrics, and `/admin`.

`/admin` has modules, statistics, tiers, requests, schemas and maintenance. Routes that
read the ledger are no coroutines: FastAPI runs them in threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response

from ragcache import SourceDocument
from ragcache.errors import ConfigurationError
from ragcache.machine import device_memory, host_memory, process_memory
from ragcache.models import dtype_name
from ragcache.planning import (
    Budgets,
    advise,
    corpus_of_collection,
    corpus_of_sources,
    make_plan,
)
from ragcache.store.admin import StateChange, TierStatus
from ragcache.store.verify import verify
from ragcache_api.http.admin_bodies import (
    ChangesResponse,
    EvictionResponse,
    EvictRequest,
    ExpireRequest,
    FlushResponse,
    ForgottenResponse,
    MemoryResponse,
    ModuleResponse,
    ModuleTextResponse,
    MoveRequest,
    ObservedResponse,
    PlanRequest,
    StateResponse,
    StatsResponse,
    VerifyResponse,
)
from ragcache_api.http.bodies import CollectionName
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.protocol import (
    Flag,
    PageOf,
    PageQuery,
    PageRequest,
    PublicId,
    ResponseModel,
    problems,
)
from ragcache_api.http.requests import ActiveRequest, stopping
from ragcache_api.http.routes.answers import find_schema
from ragcache_api.http.service import ContextDep, RequestContext, ServiceDep
from ragcache_api.http.sources import public_uri
from ragcache_schemas import write_schema

router = APIRouter(prefix="/admin", tags=["admin"], responses=problems(500))
health_router = APIRouter(tags=["health"])
Word = Annotated[str | None, Field(max_length=1000)]


class SchemaListedResponse(ResponseModel):
    """A schema in a list."""

    id: str
    """`schema:NAME` of a hand-written schema, `collection:NAME` of a collection's own."""
    name: str
    kind: str
    """`schema` or `collection`."""


class SchemaDetail(SchemaListedResponse):
    """A schema with its text."""

    text: str
    """The schema in PML."""


class ReplicaResponse(ResponseModel):
    """A replica behind a gateway, with its load."""

    name: str
    session: str
    """Session under which the ledger lists the replica's memory."""
    requests: int
    """Number of open requests."""
    routed: int
    """Number of requests that this gateway has sent to the replica."""
    draining: bool
    """Whether the replica gets no more requests."""


class ReplicasResponse(ResponseModel):
    """The replicas behind the gateway that answers."""

    items: list[ReplicaResponse]
    retried: int
    """Number of requests that the gateway sent again, to another replica."""
    bytes: dict[str, int]
    """Bytes of the modules that requests read: `held` by the chosen replica, or `moved` to it."""


@router.get("/replicas")
async def list_replicas(context: ContextDep) -> ReplicasResponse:
    """List the replicas behind a gateway.

    The gateway answers this itself; a service without one lists none. On a gateway,
    `POST /admin/replicas/NAME/drain` keeps new requests from a replica, and `resume` ends that.
    """
    context.caller.require_operator()
    return ReplicasResponse(items=[], retried=0, bytes={"held": 0, "moved": 0})


class ModuleQuery(PageRequest):
    """The query of a page of modules."""

    collection: CollectionName | None = None
    document: Word = None
    """Id of the modules' document."""
    tier: Word = None
    """Tier that holds states of the modules."""
    pinned: Flag | None = None
    search: Word = None
    """Part of the module's name or of its document's."""
    sort: Literal["id", "name", "nbytes", "hits", "used_at"] = "id"
    descending: Flag = False


@router.get("/modules")
def list_modules(
    context: ContextDep, query: Annotated[ModuleQuery, Query()]
) -> PageOf[ModuleResponse]:
    """List modules, with the tiers that hold their states."""
    return PageOf[ModuleResponse].model_validate(context.rag.modules.page(**dict(query)))


@router.get("/modules/{module}")
def get_module(module: PublicId, context: ContextDep) -> ModuleTextResponse:
    """Return a module with its text and the tiers of its states."""
    detail = context.rag.modules.get(module)
    return ModuleTextResponse(
        **asdict(detail.listing),
        text=detail.text,
        uri=public_uri(detail.uri, detail.listing.document),
        metadata=dict(detail.attributes),
        states=list(detail.states),
    )


async def _change(
    module: PublicId, context: ContextDep, dry_run: Flag = False
) -> Callable[..., ChangesResponse]:
    """Return a function that calls a method of `RagCache.modules` for one module."""

    def apply(action: str, *arguments: Any, **options: Any) -> ChangesResponse:
        modules = context.rag.modules
        row = modules.get(module).listing
        if action == "expire":
            changes = modules.expire([row.id], *arguments, dry_run=dry_run)
        else:
            options |= {"names": [row.name], "dry_run": dry_run}
            changes = getattr(modules, action)(row.collection, **options)
        return _changes(context, changes, dry_run)

    return apply


ChangeDep = Annotated[Callable[..., ChangesResponse], Depends(_change)]


@router.delete("/modules/{module}")
def evict_module(change: ChangeDep, tier: Word = None) -> ChangesResponse:
    """Evict a module's states. Its document stays, and the next question encodes them again."""
    return change("evict", tier=tier)


@router.post("/modules/{module}/pin")
def pin_module(change: ChangeDep) -> ChangesResponse:
    """Keep a module's states from being evicted for space or age."""
    return change("pin")


@router.delete("/modules/{module}/pin")
def unpin_module(change: ChangeDep) -> ChangesResponse:
    """Let a module's states be evicted again."""
    return change("unpin")


@router.post("/modules/{module}/warm")
def warm_module(change: ChangeDep) -> ChangesResponse:
    """Bring a module's states to the first tier, and encode them if no tier has them."""
    return change("warm")


@router.post("/modules/{module}/move")
def move_module(body: MoveRequest, change: ChangeDep) -> ChangesResponse:
    """Move a module's states to a tier, and out of the tiers above it."""
    return change("move", tier=body.tier)


@router.post("/modules/{module}/expire")
def expire_module(body: ExpireRequest, change: ChangeDep) -> ChangesResponse:
    """Limit how long a module's states are kept, unless they are pinned."""
    return change("expire", body.seconds)


@router.get("/observed")
def list_observed(context: ContextDep) -> PageOf[ObservedResponse]:
    """List the texts that recurred in prompts and are read from states, the last used first."""
    context.caller.require_operator()
    found = context.rag.modules.observed.all()
    return PageOf(items=[ObservedResponse.of(each) for each in found], total=len(found))


@router.delete("/observed")
def forget_observed(
    context: ContextDep, ids: Annotated[list[str] | None, Query(alias="id")] = None
) -> ForgottenResponse:
    """Forget recurring texts and their states: some by id, or all with all fingerprints."""
    context.caller.require_operator()
    return ForgottenResponse(forgotten=context.rag.modules.observed.forget(ids))


@router.post("/evict")
def evict_modules(
    body: EvictRequest, context: ContextDep, dry_run: Flag = False
) -> ChangesResponse:
    """Evict states of a collection or of all collections, and list each of them."""
    rag, changes = context.rag, list[StateChange]()
    names = list(rag.stats().collections) if body.collection is None else [body.collection]
    for name in names:
        changes += rag.modules.evict(name, body.documents, tier=body.tier, dry_run=dry_run)
    return _changes(context, changes, dry_run)


def _changes(
    context: RequestContext, changes: Sequence[StateChange], dry_run: bool
) -> ChangesResponse:
    context.service.shared.store.ledger.flush()  # so that the next listing shows the changes
    nbytes = sum(change.nbytes for change in changes)
    return ChangesResponse(dry_run=dry_run, changes=list(changes), bytes=nbytes)


@router.get("/stats")
async def get_stats(context: ContextDep) -> StatsResponse:
    """Return statistics since the service began."""
    stats, service = await run_in_threadpool(context.rag.stats), context.service
    record = service.recorder.stats_of(context.caller.namespace)
    computing = [active.computes for active in _requests_of_caller(context)]
    requests = {"running": sum(computing), "waiting": len(computing) - sum(computing)}
    requests |= {name: record.outcomes[name] for name in ("finished", "failed", "cancelled")}
    engine, operator = service.shared.engine.stats, context.caller.is_operator
    rows = engine.prompt_tokens + engine.decoded_tokens + engine.encoded_tokens
    figures = {
        "steps": engine.steps,
        "batch_mean": rows / (engine.steps or 1),
        "queued_s": engine.queued,
        "preempted": engine.preempted,
        "drafted_tokens": engine.drafted_tokens,
        "accepted_tokens": engine.accepted_tokens,
    }
    return StatsResponse(
        model=service.model,
        uptime=time.time() - service.started,
        collections=stats.collections,
        requests=requests,
        tokens=dict(record.tokens),
        ttft=record.ttft(),
        series=record.series(),
        engine=figures if operator else {},
        evictions={tier: dict(each) for tier, each in stats.evictions.items()} if operator else {},
    )


@router.get("/tiers")
def list_tiers(context: ContextDep) -> PageOf[TierStatus]:
    """List the storage tiers, which all namespaces share."""
    context.caller.require_operator()
    listed = context.rag.tiers()
    return PageOf(items=listed, total=len(listed))


@router.get("/memory")
def get_memory(context: ContextDep) -> MemoryResponse:
    """Return the memory of the process, the machine, the model's GPU, and the tiers."""
    context.caller.require_operator()
    device = context.service.shared.model.causal.device
    return MemoryResponse.model_validate(
        {
            "process": process_memory(),
            "host": host_memory(),
            "tiers": context.rag.tiers(),
            "device": device_memory(device) if device.type == "cuda" else None,
        }
    )


@router.get("/state")
def get_state(context: ContextDep) -> StateResponse:
    """Return the model, and the measured distance of its modes from `exact`.

    A mode is measured before it answers its first question.
    """
    model, gate = context.service.shared.model, context.rag.gate
    causal = model.causal
    return StateResponse.model_validate(
        {
            "model": model.name,
            "device": str(causal.device),
            "window": causal.window,
            "dtype": dtype_name(causal.dtype),
            "states_dtype": dtype_name(causal.states_dtype),
            "default_mode": context.service.shared.default_mode,
            "force_modes": gate.forced,
            "modes": gate.results(),
        }
    )


@router.get("/evictions")
def list_evictions(context: ContextDep, page: PageQuery) -> PageOf[EvictionResponse]:
    """List states that left a tier, latest first."""
    listed = context.rag.modules.evictions(page.cursor, page.limit)
    return PageOf[EvictionResponse].model_validate(listed)


@router.get("/requests")
async def list_requests(context: ContextDep) -> dict[str, Any]:
    """List running requests, and the requests that ended last."""
    record = context.service.recorder.stats_of(context.caller.namespace)
    running = [
        {
            "id": active.id,
            "request": active.request,
            "kind": active.kind,
            "collection": active.collection,
            "age": time.monotonic() - active.started,
            "state": active.state,
            "prompt_tokens": active.prompt_tokens,
            "generated": active.generated,
        }
        for active in _requests_of_caller(context)
    ]
    return {"running": running, "recent": list(reversed(record.recent))}


def _requests_of_caller(context: RequestContext) -> list[ActiveRequest]:
    entries = context.service.requests.active.values()
    return [active for active in entries if active.namespace == context.caller.namespace]


@router.get("/schemas")
def list_schemas(context: ContextDep, page: PageQuery) -> PageOf[SchemaListedResponse]:
    """List hand-written schemas and the schemas of collections."""
    named = [("schema", name) for name in context.rag.schemas.names()]
    named += [("collection", name) for name in context.rag.stats().collections]
    return page.cut(
        [SchemaListedResponse(id=f"{kind}:{name}", name=name, kind=kind) for kind, name in named],
        lambda schema: schema.id,
    )


@router.get("/schemas/{id}")
def get_schema(
    id: Annotated[str, Path(min_length=1, max_length=300)], context: ContextDep
) -> SchemaDetail:
    """Return a schema as PML: as it was written, or generated for a collection with one slot."""
    kind, _, name = id.partition(":")
    if kind == "schema":
        text = find_schema(context, name).text or ""
    elif kind == "collection":
        text = write_schema(context.rag.schemas.generate(name, k=1))
    else:
        raise HTTPProblem(404, "unknown-schema", "ids are schema:NAME or collection:NAME")
    return SchemaDetail(id=id, name=name, kind=kind, text=text)


@router.post("/flush", responses=problems(507))
def flush_ledger(context: ContextDep) -> FlushResponse:
    """Write uses, evictions and the contents of memory to the ledger now.

    The states themselves are on disk already.
    """
    context.caller.require_operator()
    context.service.shared.store.ledger.flush()
    return FlushResponse(flushed=True)


@router.post("/verify", responses=problems(507))
def verify_states(context: ContextDep, repair: Flag = False) -> VerifyResponse:
    """Check each row of the ledger against its blob. `repair` fixes the rows that it can."""
    context.caller.require_operator()
    report = verify(context.service.shared.store, repair=repair)
    return VerifyResponse.model_validate(report)


@router.post("/plan", responses=problems(507))
def plan_cache(body: PlanRequest, context: ContextDep) -> dict[str, Any]:
    """Estimate costs and gains of caching a corpus, from a sample that is measured now."""
    context.caller.require_operator()
    shared = context.service.shared
    if body.texts is not None and body.collection is None:
        texts = [SourceDocument(str(n), text) for n, text in enumerate(body.texts, start=1)]
        limit = shared.model.causal.module_limit(context.service.settings.module_tokens)
        corpus = corpus_of_sources(shared.model, texts, limit)
    elif body.collection is not None and body.texts is None:
        corpus = corpus_of_collection(shared.model, context.rag.internals.catalog, body.collection)
    else:
        raise ConfigurationError("give either a collection or texts")
    budgets = Budgets.parse(body.host_bytes, body.device_bytes, body.disk_bytes)
    plan = make_plan(shared.model, corpus, budgets, shared.store.disk.folder, sample=body.sample)
    return plan.to_dict() | {"advice": advise(plan)}


class HealthResponse(ResponseModel):
    """A passed health check."""

    status: Literal["live", "ready"]


@health_router.get("/health/live")
async def check_live() -> HealthResponse:
    """Check that the process answers."""
    return HealthResponse(status="live")


@health_router.get("/health", name="check_health", responses=problems())
@health_router.get("/health/ready", responses=problems())
async def check_ready(service: ServiceDep) -> HealthResponse:
    """Check that requests may be sent.

    The answer is 503 as soon as the service is asked to stop, although it accepts requests for a
    while longer.
    """
    if service.requests.leaving or service.requests.draining:
        raise stopping()
    if not service.shared.engine.is_open:
        raise HTTPProblem(503, "engine-closed", "the engine takes no requests any longer")
    return HealthResponse(status="ready")


@health_router.get("/metrics", response_class=PlainTextResponse, responses=problems())
def read_metrics(context: ContextDep) -> Response:
    """Return metrics in Prometheus's text format."""
    context.caller.require_operator()
    return Response(context.service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
