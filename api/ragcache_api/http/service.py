"""What the routes work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from ragcache import RagCache
from ragcache.engine import LogprobFormat
from ragcache.errors import DeadlineExceeded
from ragcache_api.http.admin_view import AdminQueries
from ragcache_api.http.auth import Caller
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.metrics import Metrics
from ragcache_api.http.requests import RequestRegistry
from ragcache_api.http.stats_recorder import StatsRecorder
from ragcache_api.settings import ServiceSettings

T = TypeVar("T")


@dataclass(slots=True)
class Service:
    """One open state folder, served."""

    rag: RagCache
    settings: ServiceSettings
    running: RequestRegistry = field(default_factory=RequestRegistry)
    recorder: StatsRecorder = field(default_factory=StatsRecorder)
    started: float = field(default_factory=time)
    looking: AdminQueries = field(init=False)
    metrics: Metrics = field(init=False)
    _within: dict[str, RagCache] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.looking = AdminQueries.of(self.rag)
        self.metrics = Metrics(self.looking, self.running)
        self.running.ended += [self.recorder.ended, self.metrics.ended]

    @property
    def model(self) -> str:
        """The name of the model that is served."""
        return self.looking.model.name

    @property
    def fingerprint(self) -> str:
        """Of the model's weights and configuration, as OpenAI tells its own."""
        return f"fp_{self.looking.model.causal.fingerprint[:10]}"

    @property
    def tokenizer(self) -> Any:
        return self.looking.model.tokenizer

    @property
    def logprobs(self) -> LogprobFormat:
        return LogprobFormat(self.tokenizer)

    def within(self, namespace: str) -> RagCache:
        """The collections, schemas and modules of a namespace."""
        if namespace not in self._within:
            self._within[namespace] = self.rag.within(namespace)
        return self._within[namespace]


@dataclass(frozen=True, slots=True)
class Call:
    """A request with who made it."""

    request: Request
    service: Service
    caller: Caller

    @property
    def rag(self) -> RagCache:
        """Of the caller's namespace."""
        return self.service.within(self.caller.namespace)

    @property
    def deadline(self) -> float:
        """Seconds that are left of the request's time, which began when it came. Raises
        `DeadlineExceeded`."""
        left: float = self.request.state.end - monotonic()
        if left <= 0:
            raise DeadlineExceeded("the request's time was over before it was read")
        return left

    def operator(self) -> None:
        """Raises `HTTPProblem` (403) unless the caller may see what all namespaces share."""
        if not self.caller.is_operator:
            raise HTTPProblem(
                403, "forbidden",
                "this concerns all namespaces: it takes a key of the role `admin` in `default`",
            )  # fmt: skip


# FastAPI calls dependencies that are no coroutines in a thread.
async def _call(request: Request) -> Call:
    return Call(request, request.app.state.service, request.state.caller)


CallDep = Annotated[Call, Depends(_call)]


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(_service)]


async def off_loop(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Calls what may block, in a thread."""
    return await run_in_threadpool(function, *arguments, **options)
