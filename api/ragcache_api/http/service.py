"""The service over one open state folder, and the context of a request."""

from __future__ import annotations

import math
from asyncio import AbstractEventLoop
from collections import Counter
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Annotated, Any

from anyio import CapacityLimiter
from fastapi import Depends, Path, Request

from ragcache import RagCache
from ragcache.db import StoredObjects
from ragcache.errors import DeadlineExceeded
from ragcache.pipeline import Keeper
from ragcache.pipeline.namespace import SharedServices
from ragcache.retrieval import Selection
from ragcache_api.http.admission import LOOKAHEAD, AdmissionQueue
from ragcache_api.http.auth import Caller
from ragcache_api.http.bodies import CollectionName
from ragcache_api.http.model_ids import served_name_of
from ragcache_api.http.requests import RequestRegistry, namespace_deleted
from ragcache_api.http.stats_recorder import StatsRecorder
from ragcache_api.http.telemetry import Metrics
from ragcache_api.settings import ServiceSettings

_READING = 8  # uploads that are read at the same time; each of their files waits for a worker


@dataclass(slots=True)
class Service:
    """The state folder, the running requests, and their statistics, for all routes."""

    rag: RagCache
    """The state folder, seen from the namespace `default`."""
    settings: ServiceSettings
    requests: RequestRegistry = field(init=False)
    recorder: StatsRecorder = field(default_factory=StatsRecorder)
    started: float = field(default_factory=time)
    """Start of the service, in Unix seconds."""
    readers: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_READING))
    """Threads in which uploads are read, apart from the threads of the other routes."""
    metrics: Metrics = field(init=False)
    _namespaces: dict[str, RagCache] = field(default_factory=dict)
    _deletions: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        running, settings = self.shared.engine.config.running, self.settings
        slots = running + math.ceil(running * LOOKAHEAD)
        admission = AdmissionQueue(slots, settings.queue_seconds, settings.queue)
        self.requests = RequestRegistry(admission)
        self.metrics = Metrics(self.rag, self.requests)
        self.requests.on_end += [self.recorder.record_request, self.metrics.count_request]

    @property
    def shared(self) -> SharedServices:
        """Model, engine and store, which all namespaces share."""
        return self.rag.internals.shared

    @property
    def model(self) -> str:
        """Name of the served model."""
        return self.shared.model.name

    @property
    def served_name(self) -> str:
        """The model's id for OpenAI's clients, which names no folder of the machine."""
        return served_name_of(self.settings, self.model)

    @property
    def tokenizer(self) -> Any:
        return self.shared.model.tokenizer

    def deletions_of(self, namespace: str) -> int:
        """Return how often a namespace has been deleted since the service began."""
        return self._deletions[namespace]

    def end_namespace(self, loop: AbstractEventLoop, namespace: str) -> None:
        """End the requests of a deleted namespace. At return, none of them can store anything.

        Args:
            loop: The event loop that runs the requests.
            namespace: The namespace.
        """
        self._deletions[namespace] += 1
        loop.call_soon_threadsafe(self.requests.end_namespace, namespace)
        loop.call_soon_threadsafe(self.recorder.forget, namespace)

    def rag_of(self, namespace: str) -> RagCache:
        """Return the state folder as seen from a namespace. Call it in the event loop only."""
        if namespace not in self._namespaces:
            self._namespaces[namespace] = self.rag.within(namespace)
        return self._namespaces[namespace]


@dataclass(frozen=True, slots=True)
class RequestContext:
    """A request with its caller."""

    request: Request
    service: Service
    caller: Caller
    _rag: RagCache
    _deletions: int
    """`Service.deletions_of` the caller's namespace when the request came."""

    @classmethod
    def of(cls, request: Request, service: Service, caller: Caller) -> RequestContext:
        """Return the context of a request that has just come. Call it in the event loop only."""
        name = caller.namespace
        return cls(request, service, caller, service.rag_of(name), service.deletions_of(name))

    @property
    def rag(self) -> RagCache:
        """Collections, schemas and modules of the caller's namespace.

        Raises:
            NamespaceDeleted: The namespace was deleted since the request came.
        """
        if self.service.deletions_of(self.caller.namespace) != self._deletions:
            raise namespace_deleted()
        return self._rag

    @property
    def deadline(self) -> float:
        """Seconds left to answer the request. Raises `DeadlineExceeded` if there are none."""
        left: float = self.request.state.end - monotonic()
        if left <= 0:
            raise DeadlineExceeded("the request's time was over before it was read")
        return left

    @property
    def keeper(self) -> Keeper:
        """The caller as the owner of pins. Administrators have no budget."""
        caller = self.caller
        name = "" if caller.key is None else f"key {caller.key}"
        options = caller.options
        return Keeper(name, None if options.role == "admin" else options.pin_bytes)

    @property
    def objects(self) -> StoredObjects:
        """Responses, files and other objects of the caller's namespace. Raises as `rag`."""
        return StoredObjects(self.service.shared.database, self.rag.namespace)

    @property
    def base_collection(self) -> str | None:
        """The collection that the base URL of OpenAI's interface names."""
        name: str | None = self.request.path_params.get("collection")
        return name

    @property
    def selection(self) -> dict[str, Any]:
        """The option `selection` of `RagCache.ask`, if a gateway has retrieved already.

        The selection comes from the process that called the app (`ForwardedRequest`), never with
        HTTP.
        """
        found: Selection | None = getattr(self.request.state, "selection", None)
        return {} if found is None else {"selection": found}


# FastAPI runs dependencies that are not coroutines in a thread.
async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(_service)]


async def _context(request: Request, service: ServiceDep) -> RequestContext:
    caller: Caller = request.state.caller
    return RequestContext.of(request, service, caller)


ContextDep = Annotated[RequestContext, Depends(_context)]


async def declare_base_collection(collection: Annotated[CollectionName, Path()]) -> None:
    """Check the collection of a base URL, and describe it in OpenAPI."""
