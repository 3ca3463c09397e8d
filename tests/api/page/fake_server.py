"""A stand-in for the HTTP service, for the tests of the page and for looking at it.

    python -m tests.api.page.fake_server --modules 10000 --port 8100

keeps everything in memory, remembers what it was asked for, and answers as the service does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tests.api.page import fake_data
from tests.api.page.fake_wire import changed, event, fits, paged, problem

PAGE = Path(__file__).parents[3] / "api/ragcache_api/http/page"
POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
TIERS = ["device", "host", "disk", "remote"]
ANSWER = "The grace period is fourteen days after the due date, as the handbook says."


class FakeServer:
    """key: what calls must bring, or None; received: (method, path, body) of every call that may
    change something; pause: seconds between the tokens of an answer and the steps of a job."""

    def __init__(self, modules: int = 10, *, key: str | None = None, pause: float = 0.02) -> None:
        self.modules = {each["id"]: each for each in fake_data.modules(modules)}
        self.jobs: dict[int, dict[str, Any]] = {}
        self.received: list[tuple[str, str, Any]] = []
        self.key, self.pause, self.started = key, pause, time.time()
        self.app = Starlette(routes=self._routes(), middleware=[Middleware(_Guard, server=self)])

    @contextmanager
    def running(self, port: int = 0) -> Iterator[str]:
        """Serves in a thread on the loopback; the address of the page."""
        config = uvicorn.Config(self.app, "127.0.0.1", port, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/admin/"
        finally:
            server.should_exit = server.force_exit = True
            thread.join(10)

    def calls(self, method: str, path: str) -> list[Any]:
        """The bodies of the calls of a method to a path, in the order in which they came."""
        return [body for verb, where, body in self.received if (verb, where) == (method, path)]

    def _routes(self) -> list[Route | Mount]:
        one = "/admin/modules/{id:int}"
        return [
            Route("/", lambda _: RedirectResponse("/admin/")),
            Route("/v1/collections", self.collections),
            Route("/v1/collections/{name}/documents", self.ingest, methods=["POST"]),
            Route("/v1/jobs", self.list_jobs),
            Route("/v1/jobs/{id:int}", self.job),
            Route("/v1/answers", self.answer, methods=["POST"]),
            Route("/admin/stats", self.stats),
            Route("/admin/tiers", self.tiers),
            Route("/admin/modules", self.page_of_modules),
            Route(one, self.module, methods=["GET", "DELETE"]),
            Route(one + "/pin", self.pin, methods=["POST", "DELETE"]),
            Route(one + "/expire", self.expire, methods=["POST"]),
            Route(one + "/warm", self.warm, methods=["POST"]),
            Route(one + "/move", self.move, methods=["POST"]),
            Route("/admin/evict", self.evict, methods=["POST"]),
            Route("/admin/evictions", self.evictions),
            Route("/admin/requests", self.requests),
            Route("/admin/heat", self.heat),
            Route("/admin/schemas", self.schemas),
            Route("/admin/schemas/{id}/tree", self.tree),
            Mount("/admin", StaticFiles(directory=PAGE, html=True)),
        ]

    def _items(self) -> list[dict[str, Any]]:
        return list(self.modules.values())

    def _names(self) -> list[str]:
        return sorted({each["collection"] for each in self._items()})

    async def collections(self, request: Request) -> Response:
        items = [{"name": name, "documents": 1, "modules": 1} for name in self._names()]
        return paged(items, request)

    async def stats(self, request: Request) -> Response:
        points = fake_data.series(time.time()) if self.modules else []
        return JSONResponse(
            fake_data.stats(self._items(), points, time.time() - self.started + 90061)
        )

    async def tiers(self, request: Request) -> Response:
        return JSONResponse({"items": fake_data.tiers(self._items())})

    async def page_of_modules(self, request: Request) -> Response:
        query = request.query_params
        found = [each for each in self._items() if fits(each, query)]
        order = query.get("sort", "id")
        found.sort(key=lambda each: each[order] or 0, reverse=query.get("descending") == "true")
        return paged(found, request)

    async def module(self, request: Request) -> Response:
        each = self.modules.get(request.path_params["id"])
        if each is None:
            return problem(
                404, "No such module", f"module {request.path_params['id']} is not there"
            )
        if request.method == "DELETE":
            await self._note(request)
            tier = request.query_params.get("tier")
            dry = request.query_params.get("dry_run") == "true"
            return JSONResponse(self._evicted([each], [tier] if tier else TIERS, dry=dry))
        states = [
            {
                "tier": tier,
                "key": f"{each['id']:064x}",
                "nbytes": each["nbytes"],
                "hits": each["hits"],
            }
            for tier in each["tiers"]
        ]
        return JSONResponse(
            {**each, "states": states, "text": fake_data.TEXT, "attributes": {"year": 2026}}
        )

    async def pin(self, request: Request) -> Response:
        await self._note(request)
        each = self.modules[request.path_params["id"]]
        each["pinned"] = request.method == "POST"
        return changed("pin", each)

    async def expire(self, request: Request) -> Response:
        seconds = (await self._note(request))["seconds"]
        each = self.modules[request.path_params["id"]]
        each["expires_at"] = None if seconds is None else time.time() + seconds
        return changed("keep" if seconds is None else "expire", each)

    async def warm(self, request: Request) -> Response:
        await self._note(request)
        each = self.modules[request.path_params["id"]]
        each["tiers"] = sorted({*each["tiers"], "host"})
        return changed("encode", each)

    async def move(self, request: Request) -> Response:
        tier = (await self._note(request))["tier"]
        if tier == "device":
            return problem(409, "Tier full", "device holds pinned states only; unpin some first")
        each = self.modules[request.path_params["id"]]
        each["tiers"] = [tier]
        return changed("move", each)

    async def evict(self, request: Request) -> Response:
        scope = await self._note(request)
        found = [
            each
            for each in self._items()
            if each["collection"] == scope.get("collection", each["collection"])
            and each["document"] in scope.get("documents", [each["document"]])
        ]
        tiers = [scope["tier"]] if "tier" in scope else TIERS
        return JSONResponse(
            self._evicted(found, tiers, dry=request.query_params.get("dry_run") == "true")
        )

    async def evictions(self, request: Request) -> Response:
        return paged(fake_data.evictions(self._items(), time.time()), request)

    def _evicted(
        self, found: list[dict[str, Any]], tiers: list[str], *, dry: bool
    ) -> dict[str, Any]:
        changes = [
            {
                "key": f"{each['id']:064x}",
                "action": "evict",
                "tier": tier,
                "to": "",
                "nbytes": each["nbytes"],
            }
            for each in found
            for tier in each["tiers"]
            if tier in tiers
        ]
        if not dry:
            for each in found:
                each["tiers"] = [tier for tier in each["tiers"] if tier not in tiers]
        return {
            "dry_run": dry,
            "changes": changes,
            "bytes": sum(each["nbytes"] for each in changes),
        }

    async def requests(self, request: Request) -> Response:
        return JSONResponse(fake_data.requests(self._items(), time.time()))

    async def heat(self, request: Request) -> Response:
        minutes, number = (int(request.query_params[name]) for name in ("minutes", "modules"))
        return JSONResponse(fake_data.heat(self._items(), minutes, number, time.time()))

    async def schemas(self, request: Request) -> Response:
        return paged([{"id": f"collection:{name}"} for name in self._names()], request)

    async def tree(self, request: Request) -> Response:
        name = request.path_params["id"].partition(":")[2]
        return JSONResponse(fake_data.tree(name, self._items()))

    async def ingest(self, request: Request) -> Response:
        form = await request.form()
        files = [(each.filename, (await each.read()).decode()) for each in form.getlist("files")]
        self.received.append(
            ("POST", request.url.path, {"files": files, "key": request.headers["idempotency-key"]})
        )
        job = fake_data.job(len(self.jobs) + 1, request.path_params["name"], len(files))
        self.jobs[job["id"]] = job
        return JSONResponse(job, 202, headers={"Location": f"/v1/jobs/{job['id']}"})

    async def list_jobs(self, request: Request) -> Response:
        return paged(list(self.jobs.values())[::-1], request)

    async def job(self, request: Request) -> Response:
        job = self.jobs[request.path_params["id"]]
        if "text/event-stream" not in request.headers["accept"]:
            return JSONResponse(job)
        return StreamingResponse(self._progress(job), media_type="text/event-stream")

    async def _progress(self, job: dict[str, Any]) -> AsyncIterator[str]:
        job |= {"status": "running", "started_at": job["started_at"] or time.time()}
        while job["status"] == "running":
            yield event("progress", job)
            await asyncio.sleep(self.pause)
            job["done"] += job["done"] < job["total"]
            if job["done"] == job["total"]:
                job |= {"status": "done", "finished_at": time.time()}
        yield event("progress", job)

    async def answer(self, request: Request) -> Response:
        asked = await self._note(request)
        return StreamingResponse(self._pieces(asked), media_type="text/event-stream")

    async def _pieces(self, asked: dict[str, Any]) -> AsyncIterator[str]:
        used = fake_data.sources(self._items(), asked["k"])
        yield event("sources", used)
        start = time.time() - 0.03
        for word in ANSWER.split():
            await asyncio.sleep(self.pause)
            yield event("token", {"text": f"{word} ", "at": time.time() - start})
        total = time.time() - start
        yield event("answer", fake_data.answer(asked, ANSWER, used, 0.03 + self.pause, total))

    async def _note(self, request: Request) -> Any:
        body = json.loads(await request.body() or b"null")
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        self.received.append((request.method, path, body))
        return body


class _Guard(BaseHTTPMiddleware):
    """Asks for the key everywhere but on the page's files, and sends a strict policy with them."""

    def __init__(self, app: Any, server: FakeServer) -> None:
        super().__init__(app)
        self.server = server

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        name = request.url.path.removeprefix("/admin/")
        if not name or (PAGE / name).is_file():
            response = await call_next(request)
            response.headers["Content-Security-Policy"] = POLICY
            return response
        if self.server.key and request.headers.get("authorization") != f"Bearer {self.server.key}":
            return problem(401, "Unauthorized", "an API key is needed")
        return await call_next(request)


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--modules", type=int, default=10)
    options.add_argument("--port", type=int, default=8100)
    options.add_argument("--key")
    given = options.parse_args()
    with FakeServer(given.modules, key=given.key, pause=0.15).running(given.port) as address:
        print(address, flush=True)
        threading.Event().wait()
