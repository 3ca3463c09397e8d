"""The operator's routes: health checks, metrics, and `/admin` with modules, statistics, tiers,
requests, schemas and maintenance."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from ragcache import RagCache, SourceDocument
from ragcache.engine import EngineStats
from ragcache.errors import ConfigurationError
from ragcache.machine import device_memory, host_memory, process_memory
from ragcache.models import dtype_name
from ragcache.planning import (
    Budgets,
    Corpus,
    advise,
    corpus_of_collection,
    corpus_of_sources,
    make_plan,
)
from ragcache.store.admin import StateChange, TierStatus
from ragcache.store.verify import verify
from ragcache_api.http.bodies import CollectionName
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.protocol import (
    ChangesResponse,
    EvictionResponse,
    EvictRequest,
    ExpireRequest,
    Flag,
    FlushResponse,
    MemoryResponse,
    ModuleResponse,
    ModuleTextResponse,
    MoveRequest,
    PageDep,
    PageOf,
    PlanRequest,
    PublicId,
    ResponseModel,
    StateResponse,
    StatsResponse,
    VerifyResponse,
    problems,
)
from ragcache_api.http.requests import ActiveRequest, stopping
from ragcache_api.http.routes.answers import schema_of
from ragcache_api.http.service import ContextDep, RequestContext, ServiceDep, off_loop
from ragcache_schemas import write_schema

router = APIRouter(prefix="/admin", tags=["admin"], responses=problems(500))
health_router = APIRouter(tags=["health"])
Sort = Literal["id", "name", "nbytes", "hits", "used_at"]
Word = Annotated[str | None, Query(max_length=1000)]


class SchemaListedResponse(ResponseModel):
    """id: `collection:NAME` or `schema:NAME`."""

    id: str
    name: str
    kind: str


class SchemaDetail(SchemaListedResponse):
    """A schema with its text in PML."""

    text: str


class ReplicaResponse(ResponseModel):
    """session: under which the ledger has its memory; requests: that it holds; routed: those that
    the gateway has sent it; draining: whether it gets no more."""

    name: str
    session: str
    requests: int
    routed: int
    draining: bool


class ReplicasResponse(ResponseModel):
    """Of the gateway that answers. retried: requests that it sent again; bytes: of the modules that
    requests read, `held` where they were sent, or `moved` there."""

    items: list[ReplicaResponse]
    retried: int
    bytes: dict[str, int]


@router.get("/replicas")
async def list_replicas(context: ContextDep) -> ReplicasResponse:
    """The replicas behind a gateway, which answers this itself; a service by itself has none. There
    `POST /admin/replicas/NAME/drain` keeps requests from one, and `resume` ends that."""
    context.caller.require_operator()
    return ReplicasResponse(items=[], retried=0, bytes={"held": 0, "moved": 0})


@router.get("/modules")
async def list_modules(
    context: ContextDep, page: PageDep, collection: CollectionName | None = None,
    document: Word = None, tier: Word = None, pinned: Flag | None = None, search: Word = None,
    sort: Sort = "id", descending: Flag = False,
) -> PageOf[ModuleResponse]:  # fmt: skip
    """Modules, with the tiers that hold their states."""
    rows = await off_loop(
        context.rag.modules.page, collection=collection, document=document, tier=tier,
        pinned=pinned, search=search, sort=sort, descending=descending,
        cursor=page.cursor, limit=page.limit,
    )  # fmt: skip
    return PageOf[ModuleResponse].model_validate(rows)


@router.get("/modules/{module}")
async def get_module(module: PublicId, context: ContextDep) -> ModuleTextResponse:
    """A module with its text."""
    detail = await off_loop(context.rag.modules.get, module)
    return ModuleTextResponse(
        **asdict(detail.listing), text=detail.text, uri=detail.uri,
        metadata=dict(detail.attributes), states=[asdict(state) for state in detail.states],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """A change of one module's states; `dry_run` lists what it would do."""

    context: RequestContext
    module: str
    dry_run: bool

    def apply(self, action: str, **options: Any) -> ChangesResponse:
        """Calls a verb of the modules with the module's name."""
        modules = self.context.rag.modules
        row = modules.get(self.module).listing
        options |= {"names": [row.name], "dry_run": self.dry_run}
        changes = getattr(modules, action)(row.collection, **options)
        return _changes(self.context, changes, self.dry_run)

    def expire(self, seconds: float | None) -> ChangesResponse:
        modules = self.context.rag.modules
        row = modules.get(self.module).listing
        changes = modules.expire([row.id], seconds, dry_run=self.dry_run)
        return _changes(self.context, changes, self.dry_run)


async def _change(module: PublicId, context: ContextDep, dry_run: Flag = False) -> ModuleChange:
    return ModuleChange(context, module, dry_run)


ChangeDep = Annotated[ModuleChange, Depends(_change)]


@router.delete("/modules/{module}")
async def evict_module(change: ChangeDep, tier: Word = None) -> ChangesResponse:
    """Evicts a module's states. Its document stays, and they are encoded again when a question
    needs them."""
    return await off_loop(change.apply, "evict", tier=tier)


@router.post("/modules/{module}/pin")
async def pin_module(change: ChangeDep) -> ChangesResponse:
    """Keeps a module's states from being evicted for pressure or time."""
    return await off_loop(change.apply, "pin")


@router.delete("/modules/{module}/pin")
async def unpin_module(change: ChangeDep) -> ChangesResponse:
    """Lets a module's states be evicted again."""
    return await off_loop(change.apply, "unpin")


@router.post("/modules/{module}/warm")
async def warm_module(change: ChangeDep) -> ChangesResponse:
    """Brings a module's states to the first tier, and encodes them if no tier has them."""
    return await off_loop(change.apply, "warm")


@router.post("/modules/{module}/move")
async def move_module(body: MoveRequest, change: ChangeDep) -> ChangesResponse:
    """Moves a module's states to a tier, away from those above it."""
    return await off_loop(change.apply, "move", tier=body.tier)


@router.post("/modules/{module}/expire")
async def expire_module(body: ExpireRequest, change: ChangeDep) -> ChangesResponse:
    """Evicts a module's states after a time, unless they are pinned; null lifts the limit."""
    return await off_loop(change.expire, body.seconds)


@router.post("/evict")
async def evict_modules(
    body: EvictRequest, context: ContextDep, dry_run: Flag = False
) -> ChangesResponse:
    """Evicts states of a collection or of all; lists each that went, or would go."""
    return await off_loop(_evict, context, body, dry_run)


def _evict(context: RequestContext, body: EvictRequest, dry_run: bool) -> ChangesResponse:
    rag, changes = context.rag, list[StateChange]()
    names = list(rag.stats().collections) if body.collection is None else [body.collection]
    for name in names:
        changes += rag.modules.evict(name, body.documents, tier=body.tier, dry_run=dry_run)
    return _changes(context, changes, dry_run)


def _changes(
    context: RequestContext, changes: Sequence[StateChange], dry_run: bool
) -> ChangesResponse:
    context.service.shared.store.ledger.flush()  # so that the next listing shows the changes
    return ChangesResponse.of(changes, dry_run=dry_run)


@router.get("/stats")
async def get_stats(context: ContextDep) -> StatsResponse:
    """Statistics since the service began."""
    stats = await off_loop(context.rag.stats)
    service = context.service
    record = service.recorder.stats_of(context.caller.namespace)
    computing = [active.computes for active in _mine(context)]
    requests = {"running": sum(computing), "waiting": len(computing) - sum(computing)}
    operator = context.caller.is_operator
    evictions = {tier: dict(each) for tier, each in stats.evictions.items() if operator}
    return StatsResponse(
        model=service.model, uptime=time.time() - service.started, collections=stats.collections,
        requests=requests | {
            name: record.outcomes[name] for name in ("finished", "failed", "cancelled")
        },
        tokens=dict(record.tokens), ttft=record.ttft(), series=record.series(),
        engine=_engine_figures(service.shared.engine.stats) if operator else {},
        evictions=evictions,
    )  # fmt: skip


def _engine_figures(stats: EngineStats) -> dict[str, float]:
    """Steps, batches and waits of the engine since it began."""
    rows = stats.prompt_tokens + stats.decoded_tokens + stats.encoded_tokens
    mean = rows / stats.steps if stats.steps else 0.0
    return {
        "steps": stats.steps, "batch_mean": mean, "queued_s": stats.queued,
        "preempted": stats.preempted,
    }  # fmt: skip


@router.get("/tiers")
async def list_tiers(context: ContextDep) -> PageOf[TierStatus]:
    """The tiers, which all namespaces share."""
    context.caller.require_operator()
    listed = await off_loop(context.rag.tiers)
    return PageOf(items=listed, total=len(listed))


@router.get("/memory")
async def get_memory(context: ContextDep) -> MemoryResponse:
    """The memory of the process, of its machine or control group, of the model's GPU and of the
    tiers."""
    context.caller.require_operator()
    return await off_loop(_memory, context.rag)


def _memory(rag: RagCache) -> MemoryResponse:
    device = rag.internals.shared.model.causal.device
    return MemoryResponse.model_validate({
        "process": process_memory(), "host": host_memory(), "tiers": rag.tiers(),
        "device": device_memory(device) if device.type == "cuda" else None,
    })  # fmt: skip


@router.get("/state")
async def get_state(context: ContextDep) -> StateResponse:
    """The model, and how far its modes are from `exact` as far as they were measured: with the
    first question of each."""
    return await off_loop(_state, context.rag)


def _state(rag: RagCache) -> StateResponse:
    model = rag.internals.shared.model
    causal = model.causal
    return StateResponse.model_validate({
        "model": model.name, "device": str(causal.device), "window": causal.window,
        "dtype": dtype_name(causal.dtype), "states_dtype": dtype_name(causal.states_dtype),
        "force_modes": rag.gate.forced, "modes": rag.gate.results(),
    })  # fmt: skip


@router.get("/evictions")
async def list_evictions(context: ContextDep, page: PageDep) -> PageOf[EvictionResponse]:
    """States that left a tier, the latest first."""
    listed = await off_loop(context.rag.evictions, page.cursor, page.limit)
    return PageOf[EvictionResponse].model_validate(listed)


@router.get("/requests")
async def list_requests(context: ContextDep) -> dict[str, Any]:
    """Requests under way, and those that ended last."""
    record = context.service.recorder.stats_of(context.caller.namespace)
    running = [_active_fields(active) for active in _mine(context)]
    return {"running": running, "recent": list(reversed(record.recent))}


@router.get("/schemas")
async def list_schemas(context: ContextDep, page: PageDep) -> PageOf[SchemaListedResponse]:
    """Hand-written schemas, and those of collections."""
    return page.cut(await off_loop(_schemas, context), lambda s: s.id)


@router.get("/schemas/{id}")
async def get_schema(
    id: Annotated[str, Path(min_length=1, max_length=300)], context: ContextDep
) -> SchemaDetail:
    """A schema as PML: as it was written, or generated for a collection with one slot."""
    kind, _, name = id.partition(":")
    if kind == "schema":
        text = (await off_loop(schema_of, context, name)).text or ""
    elif kind == "collection":
        text = write_schema(await off_loop(context.rag.schemas.generate, name, k=1))
    else:
        raise HTTPProblem(404, "unknown-schema", "ids are schema:NAME or collection:NAME")
    return SchemaDetail(id=id, name=name, kind=kind, text=text)


def _schemas(context: RequestContext) -> list[SchemaListedResponse]:
    named = [("schema", name) for name in context.rag.schemas.names()]
    named += [("collection", name) for name in context.rag.stats().collections]
    return [SchemaListedResponse(id=f"{kind}:{name}", name=name, kind=kind) for kind, name in named]


def _mine(context: RequestContext) -> list[ActiveRequest]:
    entries = context.service.requests.active.values()
    return [active for active in entries if active.namespace == context.caller.namespace]


def _active_fields(active: ActiveRequest) -> dict[str, Any]:
    return {
        "id": active.id, "request": active.request, "kind": active.kind,
        "collection": active.collection, "age": time.monotonic() - active.started,
        "state": active.state, "prompt_tokens": active.prompt_tokens, "generated": active.generated,
    }  # fmt: skip


@router.post("/flush", responses=problems(507))
async def flush_ledger(context: ContextDep) -> FlushResponse:
    """Writes uses, evictions and the contents of memory to the ledger. States themselves are on
    disk already."""
    context.caller.require_operator()
    await off_loop(context.service.shared.store.ledger.flush)
    return FlushResponse(flushed=True)


@router.post("/verify", responses=problems(507))
async def verify_states(context: ContextDep, repair: Flag = False) -> VerifyResponse:
    """Checks each row of the ledger against its blob; `repair` mends the rows that it can."""
    context.caller.require_operator()
    report = await off_loop(verify, context.service.shared.store, repair=repair)
    return VerifyResponse.model_validate(report)


@router.post("/plan", responses=problems(507))
async def plan_cache(body: PlanRequest, context: ContextDep) -> dict[str, Any]:
    """Costs and gains of caching a corpus; a sample is measured while requests run."""
    context.caller.require_operator()
    return await off_loop(_plan, context, body)


def _plan(context: RequestContext, wanted: PlanRequest) -> dict[str, Any]:
    shared, corpus = context.service.shared, _corpus(context, wanted)
    budgets = Budgets.parse(wanted.host_bytes, wanted.device_bytes, wanted.disk_bytes)
    folder = shared.store.disk.folder
    made = make_plan(shared.model, corpus, budgets, folder, sample=wanted.sample)
    return made.to_dict() | {"advice": advise(made)}


def _corpus(context: RequestContext, wanted: PlanRequest) -> Corpus:
    model = context.service.shared.model
    if wanted.texts is not None and wanted.collection is None:
        texts = [SourceDocument(str(n), text) for n, text in enumerate(wanted.texts, start=1)]
        return corpus_of_sources(model, texts, context.service.settings.module_tokens)
    if wanted.collection is not None and wanted.texts is None:
        return corpus_of_collection(model, context.rag.internals.catalog, wanted.collection)
    raise ConfigurationError("give either a collection or texts")


class HealthResponse(ResponseModel):
    status: Literal["live", "ready"]


@health_router.get("/health/live")
async def check_live() -> HealthResponse:
    """Whether the process answers."""
    return HealthResponse(status="live")


@health_router.get("/health/ready", responses=problems())
async def check_ready(service: ServiceDep) -> HealthResponse:
    """Whether requests may be sent: 503 from when the service is being stopped, which still takes
    them for a while."""
    if service.requests.leaving or service.requests.draining:
        raise stopping()
    if not service.shared.engine.is_open:
        raise HTTPProblem(503, "engine-closed", "the engine takes no requests any longer")
    return HealthResponse(status="ready")


@health_router.get("/metrics", response_class=PlainTextResponse, responses=problems())
async def read_metrics(context: ContextDep) -> Response:
    """Metrics in Prometheus's text format."""
    context.caller.require_operator()
    return Response(await off_loop(context.service.metrics.text), media_type=CONTENT_TYPE_LATEST)
