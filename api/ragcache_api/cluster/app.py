"""Replicas and their gateway on Ray Serve (extra `ray`).

Used by `ragcache serve --replicas N`, by `serve run ragcache_api.cluster.app:build`, and by
KubeRay's RayService. A replica is the whole service in a process of its own. The gateway calls it
through a handle that `ModuleRouter` routes, and passes on the ASGI messages of its response.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from contextvars import Context
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import AutoscalingConfig, HTTPOptions, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp, Message

from ragcache.db import ApiKeys, Database
from ragcache.machine import release_freed_memory_regularly
from ragcache.routing import RoutingCosts
from ragcache_api.cluster import replicas as shared
from ragcache_api.cluster.gateway import create_gateway
from ragcache_api.cluster.replicas import (
    ForwardedRequest,
    ReplicaLost,
    ReplicaStatus,
    run_app,
)
from ragcache_api.http.server import check_exposure
from ragcache_api.settings import ServiceSettings

logger = logging.getLogger(__name__)
_APPLICATION = "ragcache"
_ROUTER = "ragcache_api.cluster.app.ModuleRouter"
_STATS_SECONDS = 1.0  # period in which Ray reads the statistics of replicas
_HEALTH_SECONDS = 2.0
_CALL_SECONDS = 5.0  # timeout of calls other than requests
_MOST_REQUESTS = 10_000  # that Ray hands to a replica, whose own queue has a lower limit
_OBJECT_STORE_BYTES = 256 * 2**20  # for the bodies of uploads, in a Ray that is started here
_PROXY_PATIENCE = "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"
_GATEWAY_CPUS = 2  # in Ray's count: the gateway, and room for a replacement replica


class ModuleRouter(RequestRouter):  # type: ignore[misc]  # Ray is not typed
    """Router of Ray Serve that chooses a replica by the states that a request reads.

    Ray makes the router in the gateway's process; the two share only module-level objects.
    """

    def initialize_state(self) -> None:
        """Let the gateway list the replicas. Called by Ray."""
        shared.PROCESS_TABLE.list_replicas = self.statuses

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the cheapest replica, then the other available ones as a second choice."""
        if not candidate_replicas:
            return []
        given = {} if pending_request is None else pending_request.kwargs
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        if named := by_name.get(given.get("only", "")):
            return [[named]]
        request: ForwardedRequest | None = given.get("request")
        if request is None:
            return [candidate_replicas]
        statuses = [self.status_of(each) for each in candidate_replicas]
        name = shared.PROCESS_TABLE.choose(request.reads.located, statuses)
        available = shared.PROCESS_TABLE.available(statuses)
        request.route.sessions = frozenset(each.session for each in available)
        others = [by_name[each.name] for each in available if each.name != name]
        return [[by_name[name]], others] if others else [[by_name[name]]]

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ReplicaID,
        result: Any,  # noqa: ARG002  # Ray passes it
    ) -> None:
        """Note the replica that has taken a request. Called by Ray."""
        request: ForwardedRequest | None = pending_request.kwargs.get("request")
        replica = self.curr_replicas.get(replica_id)
        if request is not None and replica is not None:
            request.route.sessions = frozenset((self.status_of(replica).session,))

    def status_of(self, replica: RunningReplica) -> ReplicaStatus:
        """Return the last known status of a replica."""
        name, stats = replica.replica_id.unique_id, replica.routing_stats
        return ReplicaStatus(
            name,
            stats.get("session", name),
            self.replica_queue_len_cache.get(replica.replica_id) or 0,
            stats.get("draining", False),
            stats.get("costs", {}),
        )

    def statuses(self) -> list[ReplicaStatus]:
        """List the running replicas by name."""
        found = map(self.status_of, list(self.curr_replicas.values()))
        return sorted(found, key=lambda each: each.name)


class RayReplicas:
    """The `ReplicaSet` behind a handle of Ray Serve."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._streams = handle.options(stream=True)
        self._calls = handle

    async def open(self, request: ForwardedRequest, **only: str) -> AsyncGenerator[Message, None]:
        response = self._streams.asgi.remote(request=request, **only)
        ended = False
        try:
            with _lost_replicas():
                async for messages in response:
                    for message in messages:
                        yield message
            ended = True
        finally:
            if not ended:
                response.cancel()

    async def statuses(self) -> list[ReplicaStatus]:
        if shared.PROCESS_TABLE.list_replicas is None:  # the first call makes the router
            await self._call("record_routing_stats")
        listing = shared.PROCESS_TABLE.list_replicas
        return [] if listing is None else listing()

    async def drain(self, name: str, *, draining: bool) -> bool:
        if name not in {each.name for each in await self.statuses()}:
            return False
        await self._call("set_draining", draining=draining, only=name)
        await asyncio.sleep(2 * _STATS_SECONDS)  # until the routers know
        return True

    async def call_all(self, request: ForwardedRequest) -> dict[str, list[Message]]:
        """Call all replicas, and skip replicas that do not answer in time.

        Late calls are not awaited: Ray's router may hold on to a canceled call.
        """

        async def call(name: str) -> list[Message]:
            return [message async for message in self.open(request, only=name)]

        names = [each.name for each in await self.statuses()]
        tasks = {
            # without a context of its own each call would have the request's id, and Ray's
            # router keeps one call of an id
            name: asyncio.create_task(call(name), context=Context())
            for name in names
        }
        if tasks:
            await asyncio.wait(tasks.values(), timeout=_CALL_SECONDS)
        answered: dict[str, list[Message]] = {}
        for name, task in tasks.items():
            if not task.done():
                task.cancel()
            elif not task.cancelled() and task.exception() is None:
                answered[name] = task.result()
        return answered

    async def _call(self, method: str, **given: Any) -> Any:
        try:
            with _lost_replicas():
                async with asyncio.timeout(_CALL_SECONDS):
                    return await getattr(self._calls, method).remote(**given)
        except TimeoutError:
            raise ReplicaLost(f"no replica answered within {_CALL_SECONDS} s") from None


@contextmanager
def _lost_replicas() -> Iterator[None]:
    """Turn Ray's own errors into `ReplicaLost`. Errors of a replica's code stay as they are."""
    try:
        yield
    except RayTaskError:
        raise
    except (RayError, RayServeException) as error:
        raise ReplicaLost(f"the replica has ended: {type(error).__name__}") from error


class Replica:
    """One of several services with the same settings.

    Its state folder is a subfolder named for its rank, so that a replacement opens the same one.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from ragcache import RagCache
        from ragcache_api.http.app import create_app

        release_freed_memory_regularly()
        rank = serve.get_replica_context().rank.rank
        every = ServiceSettings(**settings)
        folder = every.state / f"replica-{rank}"
        own = every.model_copy(update={"rate": None, "state": folder})  # the gateway counts rates
        self._rag = RagCache.open(own.state, **own.open_options() | {"warm_up": True})
        self._app = create_app(self._rag, own)
        self._session = self._rag.internals.shared.store.ledger.sessions.id
        self._draining = False
        self._lifespan: AsyncExitStack | None = None

    async def asgi(
        self,
        request: ForwardedRequest,
        only: str = "",  # noqa: ARG002  # the router reads it
    ) -> AsyncGenerator[list[Message], None]:
        """Run a request through the service. `only` names the replica for `ModuleRouter`."""
        if self._lifespan is None:
            self._lifespan = AsyncExitStack()
            await self._lifespan.enter_async_context(self._app.router.lifespan_context(self._app))
        async for messages in run_app(self._app, request):
            yield messages

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the statistics that Ray passes to `ModuleRouter` once a second."""
        counters = self._rag.internals.shared.store.counters
        return {
            "session": self._session,
            "draining": self._draining,
            "costs": counters.measured_costs(),
        }

    def set_draining(self, draining: bool, only: str) -> None:  # noqa: ARG002
        """Tell routers with the next statistics. `only` names the replica for `ModuleRouter`."""
        self._draining = draining

    def check_health(self) -> None:
        """Fail if the engine has ended, so that Ray replaces the replica."""
        if not self._app.state.service.shared.engine.is_open:
            raise RuntimeError("the engine takes no requests any longer")

    def __del__(self) -> None:
        """Close the folder. Ray calls this after the replica's last request."""
        if hasattr(self, "_rag"):
            self._rag.close()


class GatewayDeployment:
    """The gateway as an ingress deployment of Ray Serve."""

    def __init__(self, settings: Mapping[str, Any], replicas: DeploymentHandle) -> None:
        release_freed_memory_regularly()
        self._settings, self._replicas = ServiceSettings(**settings), RayReplicas(replicas)
        self._database = Database.open(self._settings.cluster_ledger())
        check_exposure(ApiKeys(self._database), self._settings)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return create_gateway(self._database, self._replicas, shared.PROCESS_TABLE, self._settings)


def build(args: Mapping[str, Any]) -> serve.Application:
    """Build the application of `serve run ragcache_api.cluster.app:build NAME=VALUE ...`.

    Args:
        args: Settings of the service by name. All others come from the environment and
            `ragcache.toml`.

    Raises:
        ConfigurationError: A setting cannot be used, or not with several replicas.
    """
    settings = ServiceSettings.read(**args)
    settings.cluster_ledger()
    return application(settings)


def application(settings: ServiceSettings) -> serve.Application:
    """Build the deployments of the replicas and their gateway."""
    values = settings.model_dump(mode="json")
    quiet = LoggingConfig(enable_access_log=False)  # the service logs its requests itself
    options: dict[str, Any] = {
        "max_ongoing_requests": _MOST_REQUESTS,
        "logging_config": quiet,
        "health_check_period_s": _HEALTH_SECONDS,
        "graceful_shutdown_timeout_s": settings.grace,
        "request_router_config": RequestRouterConfig(
            request_router_class=_ROUTER,
            request_routing_stats_period_s=_STATS_SECONDS,
        ),
        "ray_actor_options": {"num_cpus": 1, "num_gpus": int(settings.device.startswith("cuda"))},
    }
    if (scale := settings.autoscale_bounds) is not None:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=scale[0],
            max_replicas=scale[1],
            target_ongoing_requests=RoutingCosts().slots,
        )
    else:
        options["num_replicas"] = settings.replicas or 1
    replicas = serve.deployment(Replica, name="Replica", **options).bind(values)
    gateway = serve.deployment(
        serve.ingress()(GatewayDeployment),
        name="Gateway",
        max_ongoing_requests=_MOST_REQUESTS,
        health_check_period_s=_HEALTH_SECONDS,
        ray_actor_options={"num_cpus": 0},
        logging_config=quiet,
    )
    return gateway.bind(values, replicas)


def serve_cluster(settings: ServiceSettings) -> None:
    """Serve with replicas until SIGTERM or SIGINT.

    They run on the Ray of `RAY_ADDRESS`, or on a Ray that is started on this machine.

    Raises:
        ConfigurationError: As `build`.
        KeyRequired: The address is public, and no key exists.
    """
    database = Database.open(settings.cluster_ledger())
    try:
        check_exposure(ApiKeys(database), settings)
    finally:
        database.close()
    ending = threading.Event()
    with ray_serve(settings):
        for number in (signal.SIGTERM, signal.SIGINT):  # `ray.init` has set handlers of its own
            signal.signal(number, lambda *_: ending.set())
        deploy(application(settings))
        ending.wait()


def deploy(served: serve.Application) -> None:
    """Replace the served application replica by replica, and wait until all are ready."""
    serve.run(served, name=_APPLICATION)


@contextmanager
def ray_serve(settings: ServiceSettings) -> Iterator[None]:
    """Run Ray Serve at the address of the settings within the block."""
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report its use
        os.environ.setdefault(_PROXY_PATIENCE, "60")  # Ray's 5 s are too short on a busy machine
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray would lower replicas' priority
        # a worker has more threads with arenas than `keep_freed_memory` can limit
        os.environ.setdefault("MALLOC_ARENA_MAX", "2")
        bounds = settings.autoscale_bounds
        most = bounds[1] if bounds else settings.replicas or 1
        ray.init(
            include_dashboard=False,
            num_cpus=most + _GATEWAY_CPUS,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=True,
        )
    try:
        serve.start(http_options=HTTPOptions(host=settings.host, port=settings.port))
        yield
    finally:
        serve.shutdown()
        ray.shutdown()
