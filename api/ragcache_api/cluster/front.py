"""The front: the one address of a service with several replicas.

It checks keys and counts rates, finds out which modules a request reads (retrieval, recognition,
PML), and passes the request on to the replica that should have it. No model is loaded here. A
replica that is lost costs no request that had not begun: another one gets it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ragcache.config import DEFAULT_K
from ragcache.db import ApiKeys, Catalog, Database, LocatedStates, Residency
from ragcache.errors import RagCacheError
from ragcache.recognition import Recognizer
from ragcache.retrieval import Reranker, Retriever, Retrievers, SearchParams, embedder_name
from ragcache.retrieval.resolve import resolve_embedder, resolve_reranker
from ragcache_api.cluster.replicas import ForwardedRequest, ReplicaLost, ReplicaSet, RoutingTable
from ragcache_api.cluster.selection import SELECTION_HEADER, SelectionCipher
from ragcache_api.cluster.streams import ResumableResponse, error_event, is_resumable
from ragcache_api.http.auth import AccessMiddleware, APIKeyAuth, Caller, RateLimit
from ragcache_api.http.browser import open_paths
from ragcache_api.http.errors import HTTPProblem, error_info, error_response
from ragcache_api.http.request_ids import REQUEST_ID_HEADER, RequestIds, request_id
from ragcache_api.settings import ServiceSettings
from ragcache_schemas import PMLError, parse_prompt

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

logger = logging.getLogger(__name__)

_RETRIES = 3  # replicas that a request may lose
_ASKS = re.compile(r"/v1/(answers|prompts|chat/completions|completions)$")
_REPEATABLE = ("GET", "HEAD", "PUT", "DELETE")
_UPLOADS = re.compile(r"/v1/collections/[^/]+/documents$")
_REPLICAS = re.compile(r"/admin/replicas(?:/(?P<name>[^/]+)/(?P<change>drain|resume))?$")
_SEARCH = ("filters", "threshold", "relative_threshold", "rerank")
_SELECTION, _REQUEST_ID = SELECTION_HEADER.encode(), REQUEST_ID_HEADER.lower().encode()
_OWN_HEADERS = (_SELECTION, _REQUEST_ID)  # which clients cannot set for replicas
_SAMPLE = re.compile(rb"^([a-zA-Z_:][\w:]*)(\{.*?\})?( .*)$")


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Finds out which states a request of one namespace reads."""

    namespace: str
    retriever: Retriever
    recognizer: Recognizer
    residency: Residency
    cipher: SelectionCipher

    def read(self, path: str, body: Mapping[str, Any]) -> tuple[LocatedStates, str]:
        """The states that the answer to a body will read, and the sealed selection, "" where none
        was made. May read rows, and raises what these and a wrong body raise."""
        if path.endswith("/prompts"):
            schema = parse_prompt(body["prompt"], source="prompt").schema
            return self.residency.locate_schema(schema, self.namespace), ""
        if (collection := body.get("collection")) is None:
            texts = [str(each.get("content")) for each in body.get("messages", ())]
            found = {match.module.id for text in texts for match in self.recognizer.find(text)}
            return self.residency.locate_modules(sorted(found)), ""
        given = {name: body[name] for name in _SEARCH if body.get(name) is not None}
        params = SearchParams(body.get("k") or DEFAULT_K, **given)
        selection = self.retriever.retrieve(_question(body), collection, params)
        located = self.residency.locate_modules([hit.module.id for hit in selection.hits])
        return located, self.cipher.seal(selection, collection, self.namespace)


def _question(body: Mapping[str, Any]) -> str:
    """The text that is searched for: a question, a completion's prompt, or the last message."""
    text = body.get("question") or body.get("prompt")
    if text is None:
        text = body["messages"][-1]["content"]
    if not isinstance(text, str) or not text.strip():
        raise TypeError("no single text")
    return text


@dataclass(slots=True)
class Front:
    """An ASGI app behind `AccessMiddleware`.

    Attributes:
        database: The ledger that all replicas share.
        replicas: Who answers.
        table: Counts what was routed.
    """

    database: Database
    replicas: ReplicaSet
    table: RoutingTable
    residency: Residency
    cipher: SelectionCipher
    stale_seconds: float = 60.0
    embedder: Embeddings | None = None
    reranker: Reranker | None = None
    retried: int = 0
    _readers: dict[str, RequestReader] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                try:
                    await self._answer(scope, receive, send)
                except ReplicaLost as lost:
                    raise _lost(lost) from None
            except (HTTPProblem, RagCacheError) as problem:
                error = error_info(problem)
                assert error is not None
                await error_response(error, scope["path"])(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path == "/health/live":
            response: Response = JSONResponse({"status": "live"})
        elif path == "/health/ready":
            response = JSONResponse(await self._ready())
        elif path == "/metrics":
            self._require_operator(scope)
            response = Response(await self._metrics(scope), media_type="text/plain; version=0.0.4")
        elif found := _REPLICAS.match(path):
            self._require_operator(scope)
            response = JSONResponse(await self._replicas(scope["method"], found))
        else:
            await self._forward(scope, receive, send)
            return
        await response(scope, receive, send)

    async def _ready(self) -> dict[str, str]:
        if not await self.replicas.statuses():
            raise HTTPProblem(503, "no-replica", "no replica is ready", {"Retry-After": "2"})
        return {"status": "ready"}

    def _require_operator(self, scope: Scope) -> None:
        if not scope["state"]["caller"].is_operator:
            text = "this concerns all namespaces: it takes a key of the role `admin` in `default`"
            raise HTTPProblem(403, "forbidden", text)

    async def _replicas(self, method: str, found: re.Match[str]) -> dict[str, Any]:
        """The list of replicas, after a change if one is asked for."""
        name, change = found["name"], found["change"]
        if method != ("POST" if name else "GET"):
            raise HTTPProblem(405, "method-not-allowed", f"{method} is not for this path")
        if name and not await self.replicas.drain(name, draining=change == "drain"):
            raise HTTPProblem(404, "unknown-replica", f"there is no replica {name!r:.80}")
        listed = [
            {
                "name": each.name, "session": each.session, "requests": each.requests,
                "draining": each.draining, "routed": self.table.routed.get(each.name, 0),
            }
            for each in await self.replicas.statuses()
        ]  # fmt: skip
        return {"items": listed, "retried": self.retried, "bytes": self.table.routed_bytes}

    async def _metrics(self, scope: Scope) -> bytes:
        """The metrics of all replicas, each with its name, and the front's own."""
        request = ForwardedRequest.of(scope, b"", LocatedStates(), scope["headers"])
        texts = await self.replicas.call_all(request)
        bodies = {
            name: b"".join(message.get("body", b"") for message in messages)
            for name, messages in texts.items()
        }
        own = [b"# TYPE ragcache_replica_up gauge"]
        for each in await self.replicas.statuses():
            up = each.name in bodies
            own.append(b'ragcache_replica_up{replica="%s"} %d' % (each.name.encode(), up))
        own.append(b"# TYPE ragcache_routed_bytes_total counter")
        for kind, count in self.table.routed_bytes.items():
            own.append(b'ragcache_routed_bytes_total{kind="%s"} %d' % (kind.encode(), count))
        own += [b"# TYPE ragcache_front_retries_total counter",
                b"ragcache_front_retries_total %d" % self.retried]  # fmt: skip
        return label_metrics(bodies) + b"\n".join(own) + b"\n"

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        asked = _ASKS.search(scope["path"]) is not None and scope["method"] == "POST"
        value = parse_json(body) if asked else None
        located, sealed = LocatedStates(), ""
        if isinstance(value, dict):
            caller: Caller = scope["state"]["caller"]
            located, sealed = await asyncio.to_thread(self.locate, caller, scope["path"], value)
        headers = [pair for pair in scope["headers"] if pair[0].lower() not in _OWN_HEADERS]
        headers.append((_REQUEST_ID, (request_id() or "").encode()))
        if sealed:
            headers.append((_SELECTION, sealed.encode()))
        request = ForwardedRequest.of(scope, body, located, headers)
        response = ResumableResponse(request.path, is_resumable(value))
        passing = asyncio.create_task(self._pass_on(request, response, send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((passing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            for task in (passing, leaving):
                task.cancel()
            await asyncio.gather(passing, leaving, return_exceptions=True)

    def locate(
        self, caller: Caller, path: str, body: Mapping[str, Any]
    ) -> tuple[LocatedStates, str]:  # fmt: skip
        """What a request reads, and the sealed selection; nothing where it is wrong, which the
        replica will say. May read rows."""
        try:
            return self._reader(caller.namespace).read(path, body)
        except (RagCacheError, PMLError, LookupError, TypeError, ValueError, AttributeError) as no:
            logger.debug("%s is not routed by modules: %s", path, no)
            return LocatedStates(), ""

    def _reader(self, namespace: str) -> RequestReader:
        if namespace not in self._readers:
            vectors = None if self.embedder is None else embedder_name(self.embedder)
            catalog = Catalog(self.database, "", vectors, namespace, self.stale_seconds)
            retrievers = Retrievers(catalog, self.database, self.embedder, self.reranker)
            self._readers[namespace] = RequestReader(
                namespace, retrievers.retriever_for(), Recognizer(catalog), self.residency,
                self.cipher,
            )  # fmt: skip
        return self._readers[namespace]

    async def _pass_on(
        self, request: ForwardedRequest, response: ResumableResponse, send: Send
    ) -> None:
        """Passes a response on, from another replica where one is lost."""
        for attempt in range(_RETRIES + 1):
            try:
                async with aclosing(self.replicas.open(request)) as messages:
                    async for message in messages:
                        for passed in response.take(message):
                            await send(passed)
                return
            except ReplicaLost as error:
                lost = error
            try:
                response.begin_again()
            except ReplicaLost as error:
                lost = error
                break
            if attempt == _RETRIES or not (response.started or _is_repeatable(request)):
                break
            self.retried += 1
        if response.started and not response.is_stream:
            raise ConnectionError(str(lost))  # the server closes the connection
        problem = _lost(lost)
        info = error_info(problem)
        if info is None or not response.started:
            raise problem
        last = error_event(info, request.path)
        await send({"type": "http.response.body", "body": last, "more_body": False})


def is_operator_path(path: str) -> bool:
    """Whether a path is about all replicas together."""
    return path == "/metrics" or _REPLICAS.match(path) is not None


def _lost(error: ReplicaLost) -> HTTPProblem:
    return HTTPProblem(503, "replica-lost", str(error), {"Retry-After": "2"})


def _is_repeatable(request: ForwardedRequest) -> bool:
    """Whether a request that a replica may have seen can be sent again: questions, documents, which
    have names, and what a method or the client's own key makes idempotent."""
    names = {name.lower() for name, _ in request.scope["headers"]}
    return (
        request.scope["method"] in _REPEATABLE
        or b"idempotency-key" in names
        or _ASKS.search(request.path) is not None
        or _UPLOADS.search(request.path) is not None
    )


async def read_body(receive: Receive) -> bytes:
    """The whole body of a request."""
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HTTPProblem(499, "client-gone", "the client went away")
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def parse_json(body: bytes) -> Any:
    """The value of a body; None for one that is no JSON."""
    try:
        return json.loads(body)
    except ValueError:
        return None


def label_metrics(texts: Mapping[str, bytes]) -> bytes:
    """Metrics of several replicas in Prometheus's text format, each with a label `replica`; what a
    metric is stands once before all its samples."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for replica, text in sorted(texts.items()):
        family = b""
        label = b'replica="%s"' % replica.encode()
        for line in text.splitlines():
            if line.startswith(b"# "):
                family = line.split(b" ", 3)[2]
                known = heads.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif found := _SAMPLE.match(line):
                name, labels, value = found.groups()
                inner = label if labels is None else label + b"," + labels[1:-1]
                samples.setdefault(family, []).append(name + b"{" + inner + b"}" + value)
    lines = (each for name in heads for each in (*heads[name], *samples.get(name, ())))
    return b"".join(line + b"\n" for line in lines)


def open_front(
    database: Database, replicas: ReplicaSet, table: RoutingTable, settings: ServiceSettings
) -> tuple[Front, APIKeyAuth]:
    """The front over a ledger, and what checks its keys; the arguments of `create_front`."""
    keys = ApiKeys(database, stale_seconds=settings.stale_seconds)
    front = Front(
        database, replicas, table, Residency(database), SelectionCipher(keys.service_secret()),
        settings.stale_seconds, resolve_embedder(settings.embedding),
        resolve_reranker(settings.reranker),
    )  # fmt: skip
    return front, APIKeyAuth(keys)


def guard_front(front: Front, auth: APIKeyAuth, settings: ServiceSettings) -> ASGIApp:
    """A front with keys, rates and limits for the whole service."""
    access = AccessMiddleware(
        front, auth=auth, rate=RateLimit(settings.rate, settings.rate_storage),
        body_bytes=settings.body_bytes, upload_bytes=settings.upload_bytes,
        deadline=settings.deadline, open_paths=open_paths() if settings.page else frozenset(),
        allowed_hosts=frozenset((*settings.allowed_hosts, settings.host)),
    )  # fmt: skip
    return RequestIds(access)


def create_front(
    database: Database, replicas: ReplicaSet, table: RoutingTable, settings: ServiceSettings
) -> ASGIApp:
    """The front over a ledger, with keys, rates and limits for the whole service.

    Args:
        database: Stays the caller's to close.
        replicas: Who answers.
        table: That by which the replicas choose.
        settings: Those of all replicas.
    """
    return guard_front(*open_front(database, replicas, table, settings), settings)
