"""What the operator asks for besides modules: flush, verify, plan."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from ragcache_api.http.service import CallDep, off_loop
from ragcache_api.http.wire.admin import Flushed, PlanSent, VerifyTold
from ragcache_api.http.wire.common import Flag, problems

router = APIRouter(prefix="/admin", tags=["admin"], responses=problems(500, 507))


@router.post("/flush")
async def flush(call: CallDep) -> Flushed:
    """Writes to the ledger what has happened: uses, evictions, what memory holds. States
    themselves are on disk already."""
    call.operator()
    await off_loop(call.service.looking.flush)
    return Flushed(flushed=True)


@router.post("/verify")
async def verify(call: CallDep, repair: Flag = False) -> VerifyTold:
    """Checks every row of the ledger against every blob; `repair` mends what can be mended."""
    call.operator()
    report = await off_loop(call.service.looking.verify, repair=repair)
    return VerifyTold(
        states=report.states, modules=report.modules, clean=report.clean,
        found=[asdict(each) for each in report.found], interrupted=report.interrupted,
    )  # fmt: skip


@router.post("/plan")
async def plan(body: PlanSent, call: CallDep) -> dict[str, Any]:
    """What caching a corpus will take and bring; a sample is measured beside what runs."""
    call.operator()
    tokens = call.service.settings.module_tokens
    return await off_loop(call.service.looking.plan, call.caller.namespace, body, tokens)
