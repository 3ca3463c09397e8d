"""Requests and encodings, run to their end in the caller's own thread: to measure, in scripts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from ragcache.engine.contiguous import runner_of
from ragcache.engine.core import Answers, EngineCore
from ragcache.engine.encoder import EncodeJob, Encoding
from ragcache.engine.handle import Handle
from ragcache.engine.request import Completion, Request
from ragcache.engine.settings import EngineSettings
from ragcache.models import LanguageModel
from ragcache.states import KVStates

TOKENS_A_PASS = 2048


def complete(
    model: LanguageModel, requests: Sequence[Request], settings: EngineSettings | None = None
) -> list[Completion]:
    """Runs the requests together and returns their completions, in order. See `Engine.submit`."""
    core = EngineCore(runner_of(model), settings or EngineSettings())
    handles = []
    for request in requests:
        core.check(request)
        channel = Answers(lambda: None)
        core.add(request, channel, time.perf_counter())
        handles.append(Handle(channel))
    while core.busy:
        core.step()
    return [handle.result() for handle in handles]


def encode(model: LanguageModel, jobs: Sequence[EncodeJob]) -> Iterator[KVStates]:
    """Yields the states of each job, in order. Each run sees its root and, causally, itself."""
    runner = runner_of(model)
    for batch in _batches(jobs):
        under_way = [Encoding(model, job) for job in batch]
        works = [each.work(each.pending) for each in under_way if each.pending]
        if works:
            runner.prepare(works)()
        for each in under_way:
            each.computed(each.pending)
            yield each.states()


def _batches(jobs: Sequence[EncodeJob]) -> Iterator[list[EncodeJob]]:
    batch: list[EncodeJob] = []
    size = 0
    for job in jobs:
        if batch and size + len(job.token_ids) > TOKENS_A_PASS:
            yield batch
            batch, size = [], 0
        batch.append(job)
        size += len(job.token_ids)
    if batch:
        yield batch
