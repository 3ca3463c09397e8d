"""Requests run to their end in the caller's own thread: for measuring, and for scripts."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ragcache.engine.contiguous import runner_of
from ragcache.engine.core import Answers, EngineCore
from ragcache.engine.handle import Handle
from ragcache.engine.request import Completion, Request
from ragcache.engine.settings import EngineSettings
from ragcache.models import LanguageModel


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
