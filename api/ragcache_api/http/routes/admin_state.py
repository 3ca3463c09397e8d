"""What the operator sees: statistics, tiers, requests, evictions, heat, schemas."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from ragcache_api.http.cursors import decrypted, encrypted, page_of
from ragcache_api.http.errors import Refusal
from ragcache_api.http.running import Entry
from ragcache_api.http.service import Call, CallDep, off_loop
from ragcache_api.http.wire.admin import EvictionTold, StatsTold, TierTold
from ragcache_api.http.wire.common import Cursor, Limit, PageOf, Told, problems

router = APIRouter(prefix="/admin", tags=["admin"], responses=problems(500))
HEAT_CELLS = 100_000  # a day of 69 modules


class SchemaListed(Told):
    """id: `collection:NAME` or `schema:NAME`."""

    id: str
    name: str
    kind: str


@router.get("/stats")
async def stats(call: CallDep) -> StatsTold:
    """What is kept and what happened since the service began."""
    told = await off_loop(call.rag.stats)
    service = call.service
    record = service.recorder.of(call.caller.namespace)
    computing = [entry.computes for entry in _mine(call)]
    operator = call.caller.is_operator
    evictions = told.evictions if operator else {}
    return StatsTold(
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
async def tiers(call: CallDep) -> PageOf[TierTold]:
    """Every tier with its fill, which all namespaces share."""
    call.operator()
    listed = await off_loop(call.rag.tiers)
    return PageOf(items=[TierTold.model_validate(each) for each in listed], total=len(listed))


@router.get("/evictions")
async def evictions(
    call: CallDep, cursor: Cursor = None, limit: Limit = 100
) -> PageOf[EvictionTold]:
    """States that left a tier, the latest first."""
    page = await off_loop(call.rag.evictions, decrypted(call, cursor), limit)
    return encrypted(call, PageOf[EvictionTold].model_validate(page))


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
        raise Refusal(
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
    raise Refusal(404, "unknown-schema", "ids are schema:NAME or collection:NAME")


def _schemas(call: Call) -> list[SchemaListed]:
    named = [("schema", name) for name in call.rag.schemas()]
    named += [("collection", name) for name in call.rag.stats().collections]
    return [SchemaListed(id=f"{kind}:{name}", name=name, kind=kind) for kind, name in named]


def _mine(call: Call) -> list[Entry]:
    entries = call.service.running.entries.values()
    return [entry for entry in entries if entry.namespace == call.caller.namespace]


def _told(entry: Entry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "kind": entry.kind,
        "collection": entry.collection,
        "age": time.monotonic() - entry.started,
        "prompt_tokens": entry.prompt_tokens,
        "generated": entry.generated,
        "state": entry.state,
    }
