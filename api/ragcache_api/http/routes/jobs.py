"""Ingestions in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from fastapi import APIRouter
from starlette.responses import Response

from ragcache_api.http.cursors import decrypted, encrypted
from ragcache_api.http.errors import fault_in_stream
from ragcache_api.http.protocol import (
    Cursor,
    JobResponse,
    Limit,
    PageOf,
    PublicId,
    event_stream,
    problems,
)
from ragcache_api.http.requests import stopping
from ragcache_api.http.service import Call, CallDep, off_loop
from ragcache_api.http.streaming import Events, event

router = APIRouter(prefix="/v1/jobs", tags=["documents"], responses=problems())
POLL_SECONDS = 0.25
_OPEN = ("queued", "running")


@router.get("")
async def list_jobs(
    call: CallDep, cursor: Cursor = None, limit: Limit = 100
) -> PageOf[JobResponse]:
    """The ingestions, the newest first."""
    page = await off_loop(call.rag.jobs.list, decrypted(call, cursor), limit)
    return encrypted(call, PageOf[JobResponse].model_validate(page))


@router.get("/{job}", response_model=JobResponse, responses=event_stream("The job"))
async def get_job(job: PublicId, call: CallDep) -> JobResponse | Response:
    """An ingestion. With `Accept: text/event-stream`, an event `progress` whenever it changes,
    until it has ended, or `error`."""
    found = await _job(call, job)
    if "text/event-stream" in call.request.headers.get("accept", ""):
        return Events(_progress(call, found))
    return found


async def _job(call: Call, public_id: str) -> JobResponse:
    return JobResponse.model_validate(await off_loop(call.rag.jobs.get, public_id))


async def _progress(call: Call, job: JobResponse) -> AsyncGenerator[bytes, None]:
    """Ends with the job, or with an error: of the service's end, or of what could not be read."""
    yield event(job.model_dump(), "progress")
    try:
        async with aclosing(_changes(call, job)) as changes:
            async for changed in changes:
                yield event(changed.model_dump(), "progress")
    except Exception as error:  # the answer has begun: only an event can tell of it
        fault = fault_in_stream(error)
        yield event(fault.problem(call.request.url.path), "error")


async def _changes(call: Call, job: JobResponse) -> AsyncGenerator[JobResponse, None]:
    """Raises `HTTPProblem` (503) where the service ends before the job does."""
    draining = asyncio.Event()
    with call.service.running.watching(draining.set):
        while job.status in _OPEN:
            if call.service.running.draining:
                raise stopping()
            with suppress(TimeoutError):
                await asyncio.wait_for(draining.wait(), POLL_SECONDS)
            now = await _job(call, job.id)
            if now != job:
                job = now
                yield job
