"""The table that chooses replicas, and what they measure for it."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from ragcache.db import LocatedStates
from ragcache.routing import RoutedModule
from ragcache.store.memory_tiers import Counters
from ragcache_api.cluster.replicas import ForwardedRequest, ReplicaStatus, RoutingTable, run_app

LEAVE = LocatedStates((RoutedModule("leave", 50_000_000, 384),), {"leave": {"a": "host"}})


@pytest.mark.parametrize(("bandwidth", "chosen"), [(1e8, "a"), (1e12, "b")])
def test_what_replicas_measured_decides(bandwidth: float, chosen: str) -> None:
    """The median of the two: a is busy, and has the states that b would have to bring."""
    costs = [{"remote_bandwidth": bandwidth * share, "encode_rate": 100.0} for share in (0.5, 1.5)]
    busy = ReplicaStatus("a", "a", 3, costs=costs[0])
    idle = ReplicaStatus("b", "b", 0, costs=costs[1])
    assert RoutingTable().choose(LEAVE, [busy, idle]) == chosen


def test_a_store_measures_its_remote_tier_and_its_encodings() -> None:
    counters = Counters()
    assert counters.measured_costs() == {}
    counters.encoded_tokens, counters.encode_seconds = 400, 2.0
    counters.read_bytes["remote"], counters.read_seconds["remote"] = 3_000, 0.5
    counters.read_bytes["disk"], counters.read_seconds["disk"] = 9_000, 0.1
    assert counters.measured_costs() == {"remote_bandwidth": 6_000.0, "encode_rate": 200.0}


def test_what_an_app_sends_at_once_comes_at_once() -> None:
    """Each list of messages is a call between processes."""

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        asked = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": asked["body"], "more_body": True})
        await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def sent() -> list[list[str]]:
        request = ForwardedRequest({"path": "/"}, b"asked")
        return [[each["type"] for each in batch] async for batch in run_app(app, request)]

    start, body = "http.response.start", "http.response.body"
    assert asyncio.run(sent()) == [[start, body], [body]]
