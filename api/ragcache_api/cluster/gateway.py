"""The gateway, which is the one address of a service with several replicas.

It checks keys and counts rates, finds the modules that a request reads (by retrieval, recognition,
or PML), and passes the request on to the best replica. It loads no model. A request whose replica
is lost before the response began goes to another replica.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ragcache.db import ApiKeys, Catalog, Database, NamespaceRows, Residency, SessionWatch
from ragcache.errors import InvalidRequest, RagCacheError
from ragcache.params import SearchParams
from ragcache.recognition import Recognizer
from ragcache.retrieval import Reranker, Retriever, Retrievers, embedder_name
from ragcache.retrieval.follow_ups import search_query
from ragcache.retrieval.resolve import resolve_embedder, resolve_reranker
from ragcache_api.cluster.replicas import (
    ForwardedRequest,
    ReplicaLost,
    ReplicaSet,
    RequestReads,
    Route,
    RoutingTable,
)
from ragcache_api.cluster.streams import ResumableResponse, error_event, is_resumable
from ragcache_api.http.access_log import AccessLog
from ragcache_api.http.auth import ARCHIVES, UPLOADS, AccessMiddleware, Caller
from ragcache_api.http.bodies import (
    AnswerRequest,
    ChatRequest,
    CompletionRequest,
    PromptRequest,
)
from ragcache_api.http.dispatch import AnsweredRequest, answered_by, parse_body
from ragcache_api.http.envelope import REQUEST_ID_HEADER, Envelope, request_id, stream_error
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.incoming import wait_for_disconnect
from ragcache_api.http.model_ids import served_name_of
from ragcache_api.settings import ServiceSettings
from ragcache_schemas import PMLError, parse_prompt

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

logger = logging.getLogger(__name__)

_RETRIES = 3  # lost replicas until a request fails
_LOOK_SECONDS = 1.0  # between two looks for silent replicas
_REPEATABLE = ("GET", "HEAD", "PUT", "DELETE")
_REPLICAS = re.compile(r"/admin/replicas(?:/(?P<name>[^/]+)/(?P<change>drain|resume))?$")
_REQUEST_ID = REQUEST_ID_HEADER.lower().encode()


@dataclass(frozen=True, slots=True)
class RequestInspector:
    """Finds the states that a request of one namespace reads."""

    namespace: str
    catalog: Catalog
    retriever: Retriever
    recognizer: Recognizer
    residency: Residency

    def read(self, body: AnsweredRequest) -> RequestReads:
        """Find the states that the answer to a request will read.

        Reads the ledger, and raises its errors and the errors of an invalid request.
        """
        reads = self._find(body)
        return replace(reads, located=replace(reads.located, away=self.catalog.ledger_is_away))

    def _find(self, body: AnsweredRequest) -> RequestReads:
        if isinstance(body, PromptRequest):
            schema = parse_prompt(body.prompt, source="prompt").schema
            return RequestReads(self.residency.locate_schema(schema, self.namespace))
        if body.collection is None:
            messages = body.messages if isinstance(body, ChatRequest) else ()
            texts = [str(each.plain()["content"]) for each in messages]
            found = {match.module.id for text in texts for match in self.recognizer.find(text)}
            located = self.residency.locate_modules(sorted(found))
            if isinstance(body, ChatRequest):
                kept = self.residency.locate_conversation(body.conversation, self.namespace)
                located = located.joined_with(kept)
            return RequestReads(located)
        params = SearchParams.part_of(body)
        selection = self.retriever.retrieve(_query(body), body.collection, params)
        located = self.residency.locate_modules([hit.module.id for hit in selection.hits])
        return RequestReads(located, selection)


def _query(body: AnswerRequest | ChatRequest | CompletionRequest) -> str:
    """Return the text to search for. Raises `InvalidRequest` or `HTTPProblem` without one."""
    texts = body.prompts if isinstance(body, CompletionRequest) else [body.question]
    if len(texts) != 1 or not isinstance(texts[0], str) or not texts[0].strip():
        raise InvalidRequest("a collection is searched for one text")
    if isinstance(body, ChatRequest):
        return search_query([each.plain() for each in body.messages])
    return texts[0]


@dataclass(slots=True)
class Gateway:
    """ASGI application that passes requests to replicas, behind `AccessMiddleware`."""

    database: Database
    """Ledger that all replicas share."""
    replicas: ReplicaSet
    table: RoutingTable
    """Chooses replicas, and counts their requests and bytes."""
    residency: Residency
    """Finds the replicas that hold a state."""
    stale_seconds: float
    """Seconds that catalogs stay usable while the ledger does not answer."""
    embedder: Embeddings | None
    reranker: Reranker | None
    served_name: str
    """Id of the served model for clients."""
    watch: SessionWatch
    """Finds replicas that are halted, or that ended unnoticed."""
    keys: ApiKeys
    """Keys of the callers, which are read again after a namespace was deleted."""
    retried: int = 0
    """Number of requests that were sent again."""
    _inspectors: dict[str, RequestInspector] = field(default_factory=dict)
    _looked: float = -math.inf  # when `watch` was asked last
    _look: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path == "/health/live":
            response: Response = JSONResponse({"status": "live"})
        elif path in ("/health", "/health/ready"):
            if not await self.replicas.statuses():
                raise HTTPProblem(503, "no-replica", "no replica is ready", {"Retry-After": "2"})
            response = JSONResponse({"status": "ready"})
        elif path == "/metrics":
            scope["state"]["caller"].require_operator()
            response = Response(await self._metrics(scope), media_type="text/plain; version=0.0.4")
        elif found := _REPLICAS.match(path):
            scope["state"]["caller"].require_operator()
            response = JSONResponse(await self._replicas(scope["method"], found))
        elif ARCHIVES.match(path):
            text = "archives do not pass a gateway; `ragcache export` and `import` read the ledger"
            raise HTTPProblem(501, "no-archives", text)
        else:
            await self._forward(scope, receive, send)
            return
        await response(scope, receive, send)

    async def _replicas(self, method: str, found: re.Match[str]) -> dict[str, Any]:
        """List the replicas, after draining or resuming one if the path asks for it."""
        name, change = found["name"], found["change"]
        if method != ("POST" if name else "GET"):
            raise HTTPProblem(405, "method-not-allowed", f"{method} is not for this path")
        if name and not await self.replicas.drain(name, draining=change == "drain"):
            raise HTTPProblem(404, "unknown-replica", f"there is no replica {name!r:.80}")
        listed = [
            {
                "name": each.name,
                "session": each.session,
                "requests": each.requests,
                "draining": each.draining,
                "routed": self.table.routed.get(each.name, 0),
            }
            for each in await self.replicas.statuses()
        ]
        return {"items": listed, "retried": self.retried, "bytes": self.table.routed_bytes}

    async def _metrics(self, scope: Scope) -> bytes:
        """Join the metrics of all replicas, labeled by replica, and the gateway's own."""
        texts = await self.replicas.call_all(ForwardedRequest.of(scope))
        bodies = {
            name: b"".join(message.get("body", b"") for message in messages)
            for name, messages in texts.items()
        }
        up = GaugeMetricFamily(
            "ragcache_replica_up", "Whether a replica answered.", labels=["replica"]
        )
        for each in await self.replicas.statuses():
            up.add_metric([each.name], each.name in bodies)
        text = "Bytes of modules that requests read, held where they were sent or moved there."
        routed = CounterMetricFamily("ragcache_routed_bytes", text, labels=["kind"])
        for kind, count in self.table.routed_bytes.items():
            routed.add_metric([kind], count)
        text = "Requests that were sent again."
        retries = CounterMetricFamily("ragcache_gateway_retries", text, value=self.retried)
        return generate_latest(_ReplicaMetrics(bodies, (up, routed, retries)))

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            raise HTTPProblem(499, "client-gone", "the client went away") from None
        posted = scope["method"] == "POST"
        asked = parse_body(scope["path"], body, self.served_name) if posted else None
        reads = RequestReads()
        if asked is not None:
            reads = await asyncio.to_thread(self._locate, scope["state"]["caller"], asked)
        headers = [pair for pair in scope["headers"] if pair[0].lower() != _REQUEST_ID]
        headers.append((_REQUEST_ID, (request_id() or "").encode()))
        request = ForwardedRequest.of(scope, body, reads, headers)
        response = ResumableResponse(request.path, is_resumable(asked))
        passing = asyncio.create_task(self._pass_on(request, response, send))
        leaving = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait((passing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            for task in (passing, leaving):
                task.cancel()
            await asyncio.gather(passing, leaving, return_exceptions=True)

    def _locate(self, caller: Caller, body: AnsweredRequest) -> RequestReads:
        """Find the states that a request reads. Reads the ledger.

        The result is empty for an invalid request, which the replica refuses.
        """
        try:
            return self._inspector(caller.namespace).read(body)
        except (RagCacheError, HTTPProblem, PMLError, LookupError, ValueError) as error:
            logger.debug("a request is not routed by modules: %s", error)
            return RequestReads()

    def _inspector(self, namespace: str) -> RequestInspector:
        if namespace not in self._inspectors:
            NamespaceRows(self.database).use(namespace)
            vectors = None if self.embedder is None else embedder_name(self.embedder)
            catalog = Catalog(self.database, "", vectors, namespace, self.stale_seconds)
            retrievers = Retrievers(catalog, self.database, self.embedder, self.reranker)
            self._inspectors[namespace] = RequestInspector(
                namespace, catalog, retrievers.retriever_for(), Recognizer(catalog), self.residency
            )
        return self._inspectors[namespace]

    async def _pass_on(
        self, request: ForwardedRequest, response: ResumableResponse, send: Send
    ) -> None:
        """Pass a response on. If its replica is lost, another one continues or repeats it."""
        for attempt in range(_RETRIES + 1):
            try:
                await self._pass_on_once(replace(request, route=Route()), response, send)
                return
            except ReplicaLost as error:
                lost = error
            try:
                response.begin_again()
            except ReplicaLost as error:
                lost = error
                break
            if attempt == _RETRIES or not _can_move(request, response):
                break
            self.retried += 1
        if not response.started:
            raise lost
        if not response.is_stream:
            raise ConnectionError(lost.detail)  # the server closes the connection
        last = error_event(stream_error(lost), request.path)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _pass_on_once(
        self, request: ForwardedRequest, response: ResumableResponse, send: Send
    ) -> None:
        """Pass on the response of one replica.

        Raises `ReplicaLost` if the replica ends, or if it is silent and another one can answer.
        """
        self._look_for_silent()
        try:
            async with asyncio.timeout(None) as limit:
                watching = asyncio.create_task(self._expire_if_silent(limit, request, response))
                try:
                    async with aclosing(self.replicas.open(request)) as messages:
                        async for message in messages:
                            for passed in response.take(message):
                                await send(passed)
                finally:
                    watching.cancel()
        except TimeoutError:
            if not limit.expired():
                raise
            raise ReplicaLost("the replica does not answer any longer") from None

    async def _expire_if_silent(
        self, limit: asyncio.Timeout, request: ForwardedRequest, response: ResumableResponse
    ) -> None:
        """Expire a request once its replica is silent and another one can answer."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self._look_for_silent()
            if request.route.sessions & self.table.silent and _can_move(request, response):
                heard = {each.session for each in await self.replicas.statuses()}
                if heard - self.table.silent:
                    limit.reschedule(asyncio.get_running_loop().time())
                    return

    def _look_for_silent(self) -> None:
        """Begin to read the silent sessions from the ledger, if they were not read just now.

        No request waits for the ledger here.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS or not (self._look is None or self._look.done()):
            return
        self._looked = now

        async def look() -> None:
            self.table.silent = await asyncio.to_thread(self.watch.find_silent)
            await asyncio.to_thread(self._forget_deleted)

        self._look = asyncio.create_task(look())

    def _forget_deleted(self) -> None:
        """Forget the indexes and keys of namespaces that were deleted. Reads the ledger."""
        for name in NamespaceRows(self.database).find_deleted():
            self._inspectors.pop(name, None)
            self.database.namespaces.pop(name, None)
            self.keys.forget()


def _can_move(request: ForwardedRequest, response: ResumableResponse) -> bool:
    """Tell whether another replica can give the rest of a response."""
    return response.resumable if response.started else _is_repeatable(request)


def _is_repeatable(request: ForwardedRequest) -> bool:
    """Tell whether a request that a replica may have seen can be sent again.

    Questions can, and uploads, whose documents have names. Other requests need an idempotent method
    or an idempotency key.
    """
    names = {name.lower() for name, _ in request.scope["headers"]}
    return (
        request.scope["method"] in _REPEATABLE
        or b"idempotency-key" in names
        or answered_by(request.path)[0] is not None
        or UPLOADS.search(request.path) is not None
    )


@dataclass(frozen=True, slots=True)
class _ReplicaMetrics(Collector):
    """Metrics of replicas with a label `replica`, and the gateway's own metrics."""

    texts: Mapping[str, bytes]
    """Metrics in Prometheus's text format, by replica."""
    own: Sequence[Metric]

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for replica, text in sorted(self.texts.items()):
            for family in text_string_to_metric_families(text.decode()):
                known = merged.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {"replica": replica, **sample.labels}
                    known.samples.append(sample._replace(labels=labels))
        yield from (*merged.values(), *self.own)


def create_gateway(
    database: Database, replicas: ReplicaSet, table: RoutingTable, settings: ServiceSettings
) -> ASGIApp:
    """Make the gateway's ASGI application, with keys, rates and limits for the whole service.

    Args:
        database: The ledger. The caller closes it.
        replicas: The replicas that answer.
        table: The table by which `replicas` chooses.
        settings: Settings of all replicas.
    """
    keys = ApiKeys(database, stale_seconds=settings.stale_seconds)
    gateway = Gateway(
        database,
        replicas,
        table,
        Residency(database),
        settings.stale_seconds,
        resolve_embedder(settings.embedding),
        resolve_reranker(settings.reranker),
        served_name_of(settings),
        SessionWatch(database),
        keys,
    )
    logged = AccessLog.around(AccessMiddleware(gateway, keys, settings), settings.access_log)
    return Envelope(logged, settings.cors_origins)
