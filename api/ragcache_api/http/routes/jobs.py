"""Ingestion jobs, which run in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from fastapi import APIRouter
from starlette.responses import Response

from ragcache_api.http.cursors import PageDep
from ragcache_api.http.errors import stream_error
from ragcache_api.http.protocol import JobResponse, PageOf, PublicId, event_stream, problems
from ragcache_api.http.requests import stopping
from ragcache_api.http.service import ContextDep, RequestContext, off_loop
from ragcache_api.http.streaming import EventStream, format_event

router = APIRouter(prefix="/v1/jobs", tags=["documents"], responses=problems())
POLL_SECONDS = 0.25
_OPEN = ("queued", "running")


@router.get("")
async def list_jobs(context: ContextDep, page: PageDep) -> PageOf[JobResponse]:
    """The ingestion jobs, the newest first."""
    listed = await off_loop(context.rag.jobs.list, page.ledger_cursor, page.limit)
    return page.encrypt_next(PageOf[JobResponse].model_validate(listed))


@router.get("/{job}", response_model=JobResponse, responses=event_stream("The job"))
async def get_job(job: PublicId, context: ContextDep) -> JobResponse | Response:
    """An ingestion job. With `Accept: text/event-stream`, an event `progress` for each change until
    it has ended, or `error`."""
    found = await _job(context, job)
    if "text/event-stream" in context.request.headers.get("accept", ""):
        return EventStream(_progress(context, found))
    return found


async def _job(context: RequestContext, public_id: str) -> JobResponse:
    return JobResponse.model_validate(await off_loop(context.rag.jobs.get, public_id))


async def _progress(context: RequestContext, job: JobResponse) -> AsyncGenerator[bytes, None]:
    """Events until the job ends, or an error: also where the service ends before the job does."""
    yield format_event(job.model_dump(), "progress")
    try:
        async with aclosing(_changes(context, job)) as changes:
            async for changed in changes:
                yield format_event(changed.model_dump(), "progress")
    except Exception as error:  # a response that has begun can only end with an event
        yield format_event(stream_error(error).problem(context.request.url.path), "error")


async def _changes(context: RequestContext, job: JobResponse) -> AsyncGenerator[JobResponse, None]:
    """The job after each change. Raises `HTTPProblem` (503) if the service ends first."""
    draining = asyncio.Event()
    with context.service.requests.on_drain(draining.set):
        while job.status in _OPEN:
            if context.service.requests.draining:
                raise stopping()
            with suppress(TimeoutError):
                await asyncio.wait_for(draining.wait(), POLL_SECONDS)
            now = await _job(context, job.id)
            if now != job:
                job = now
                yield job
