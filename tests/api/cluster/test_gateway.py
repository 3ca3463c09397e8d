"""The gateway over two services in this process, which share a ledger and a remote tier."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
from sqlalchemy import update
from starlette.testclient import TestClient

from ragcache import SourceDocument
from ragcache.db import Catalog, Database, Residency
from ragcache.db.sessions import DEAD_SECONDS, Sessions
from ragcache.db.tables import SessionTable
from ragcache.errors import LedgerUnavailable
from ragcache.models import LoadedModel
from ragcache_api.cluster import gateway
from ragcache_api.cluster.replicas import RoutingTable
from tests.api.cluster.local import LocalCluster, LocalReplicas, flush, recorded_searches
from tests.api.http.asgi import events
from tests.conftest import write_notes
from tests.ragcache.test_recurrence import passage

LEAVE = {"question": "How many days of leave does everybody have?", "collection": "notes", "k": 1}
CHAT = {"model": "x", "messages": [{"role": "user", "content": LEAVE["question"]}]}


@pytest.fixture(scope="module")
def cluster(
    quick_reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    made = LocalCluster(folder, quick_reader)
    made.rags[0].ingest("notes", write_notes(folder / "notes"))
    yield made
    made.close()


@pytest.fixture
def replicas(cluster: LocalCluster) -> LocalReplicas:
    return cluster.replicas()


@pytest.fixture
def client(cluster: LocalCluster, replicas: LocalReplicas) -> TestClient:
    return cluster.client(replicas)


def test_questions_go_where_the_states_are(
    cluster: LocalCluster,
    client: TestClient,
    replicas: LocalReplicas,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Retrieval runs once, in the gateway, and nothing is encoded twice."""
    searched = recorded_searches(monkeypatch)
    flush(cluster)
    encoded = replicas.encoded
    for _ in range(3):
        answered = client.post("/v1/answers", json={**LEAVE, "max_tokens": 2}).json()
    [source] = answered["sources"]
    assert source["document"].endswith("leave.md")
    assert source["tier"] == "host"
    assert replicas.table.routed == {"a": 3}  # which has ingested them
    assert replicas.table.routed_bytes["held"] > 0 == replicas.table.routed_bytes["moved"]
    assert len(searched) == 3
    assert replicas.encoded == encoded
    replicas.replicas[0].draining = True
    again = client.post("/v1/answers", json={**LEAVE, "max_tokens": 2}).json()
    assert again["text"] == answered["text"]
    assert again["sources"][0]["tier"] in ("remote", "host")
    assert replicas.table.routed == {"a": 3, "b": 1}
    measured = [rag.internals.shared.store.counters.measured_costs() for rag in cluster.rags]
    assert measured[0]["encode_rate"] > 0
    assert measured[1]["remote_bandwidth"] > 0
    assert replicas.encoded == encoded


def test_what_a_request_reads_is_known_for_chats_and_schemas(
    cluster: LocalCluster, client: TestClient, replicas: LocalReplicas
) -> None:
    """A text that a chat quotes is recognized; a prompt reads its schema's states."""
    rag = cluster.rags[0]
    [leave] = rag.modules.named("notes", ["leave.md#1"])
    rag.schemas.add('<schema name="trip"><module name="rules">Pack light.</module></schema>')
    flush(cluster)
    model = client.get("/v1/models").json()["data"][0]["id"]
    asked = f"{leave.text}\n\nHow many days?"
    chat = {"model": model, "messages": [{"role": "user", "content": asked}], "max_tokens": 1}
    assert client.post("/v1/chat/completions", json=chat).status_code == 200
    prompt = '<prompt schema="trip"><rules/>What to pack?</prompt>'
    answered = client.post("/v1/prompts", json={"prompt": prompt, "max_tokens": 1})
    assert answered.status_code == 200, answered.text
    listed = {**chat, "messages": [{"role": "user", "content": LEAVE["question"]}]}
    found = client.post("/v1/chat/completions", json={**listed, "collection": "notes", "k": 1})
    assert found.json()["sources"][0]["source"]["name"].endswith("leave.md")
    reads = {
        each.path: [module.key for module in each.reads.located.modules]
        for replica in replicas.replicas
        for each in replica.seen
    }
    assert len(reads["/v1/prompts"]) >= 1
    assert len(reads["/v1/chat/completions"]) == 1
    assert replicas.table.routed_bytes["held"] > 0


@pytest.mark.parametrize("named", [{}, {"prompt_cache_key": "mine"}], ids=["unnamed", "named"])
def test_a_conversation_goes_where_its_states_are(
    cluster: LocalCluster,
    replicas: LocalReplicas,
    named: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A router that knows nothing of it would send the turns to both replicas."""
    monkeypatch.setattr(gateway, "Residency", partial(Residency, seconds=0.0))
    client, replicas.table.rng = cluster.client(replicas), Random(1)
    messages: list[dict[str, str]] = []
    cached = []
    for turn in range(5):
        seed = 10 * turn + len(named)
        messages.append({"role": "user", "content": passage(seed, 9)})
        body = {"messages": messages, "max_tokens": 2, "model": "ragcache-reader", **named}
        told = client.post("/v1/chat/completions", json=body)
        assert told.status_code == 200, told.text
        cached.append(told.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        messages.append({"role": "assistant", "content": passage(seed + 1, 3)})
        for rag in cluster.rags:
            rag.internals.shared.keeping.submit(lambda: None).result()
        flush(cluster)
    assert sorted(len(each.seen) for each in replicas.replicas) == [0, 5]
    assert cached == sorted(set(cached)), "each turn starts from the one before"


def test_a_replica_lost_before_its_first_byte_costs_nothing(
    client: TestClient, replicas: LocalReplicas
) -> None:
    for replica in replicas.replicas:
        replica.loses = 0
    answered = client.post("/v1/answers", json={**LEAVE, "max_tokens": 1})
    assert answered.status_code == 200, answered.text
    assert client.get("/admin/replicas").json()["retried"] in (1, 2)


def test_a_request_with_a_possible_effect_is_not_sent_again(
    client: TestClient, replicas: LocalReplicas
) -> None:
    for replica in replicas.replicas:
        replica.loses = 0
    answered = client.post("/v1/schemas", json={"text": "<schema name='x'/>"})
    assert (answered.status_code, answered.headers["retry-after"]) == (503, "2")
    assert "replica-lost" in answered.text
    assert sum(len(each.seen) for each in replicas.replicas) == 1


@pytest.fixture
def silent(cluster: LocalCluster) -> Iterator[None]:
    """The first replica was silent for too long, as its row in the ledger says."""
    sessions = cluster.rags[0].internals.shared.store.ledger.sessions
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Sessions, "heartbeat", bool)
        silent = SessionTable.heartbeat - 2 * DEAD_SECONDS
        row = SessionTable.id == sessions.id
        with cluster.database.transaction() as session:
            session.execute(update(SessionTable).where(row).values(heartbeat=silent))
        yield
    sessions.heartbeat()


@pytest.mark.usefixtures("silent")
def test_a_question_at_a_halted_replica_goes_elsewhere(
    client: TestClient, replicas: LocalReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later requests do not go there."""
    monkeypatch.setattr(gateway, "_LOOK_SECONDS", 0.01)
    halted, other = replicas.replicas
    halted.loses, halted.halted, other.draining = 0, True, True
    answered = client.post("/v1/answers", json={**LEAVE, "max_tokens": 1})
    assert answered.status_code == 200, answered.text
    assert [len(each.seen) for each in replicas.replicas] == [1, 1]
    assert client.post("/v1/answers", json={**LEAVE, "max_tokens": 1}).status_code == 200
    assert [len(each.seen) for each in replicas.replicas] == [1, 2]


STREAMED = {**LEAVE, "stream": True, "max_tokens": 8, "extractive": False}


def told(text: str) -> list[tuple[str, Any]]:
    """The events without times and the sources' tiers."""
    return [
        (name, value["text"] if name in ("token", "answer") else None)
        for name, value in events(text)
    ]


@pytest.mark.parametrize("after", [2, 4])
def test_a_greedy_stream_goes_on_elsewhere(
    client: TestClient, replicas: LocalReplicas, after: int
) -> None:
    whole = told(client.post("/v1/answers", json=STREAMED).text)
    for replica in replicas.replicas:
        replica.loses = after
    replicas.replicas[1].loses = None
    replicas.replicas[1].draining = True
    cut = told(client.post("/v1/answers", json=STREAMED).text)
    assert replicas.gone == {"a": 1}
    assert [name for name, _ in cut].count("sources") == 1
    assert "".join(text for name, text in cut if name == "token") == "".join(
        text for name, text in whole if name == "token"
    )
    assert cut[-1] == whole[-1]


def test_a_sampled_stream_ends_with_an_error(client: TestClient, replicas: LocalReplicas) -> None:
    for replica in replicas.replicas:
        replica.loses = 3
    sampled = client.post("/v1/answers", json={**STREAMED, "temperature": 1.0})
    name, value = events(sampled.text)[-1]
    assert (name, value["status"]) == ("error", 503)
    assert value["type"] == "urn:ragcache:problem:replica-lost"


def test_chunks_of_one_completion_keep_their_id(
    client: TestClient, replicas: LocalReplicas
) -> None:
    model = client.get("/v1/models").json()["data"][0]["id"]
    chat = {**CHAT, "model": model, "collection": "notes", "k": 1, "stream": True, "max_tokens": 8}
    for replica in replicas.replicas:
        replica.loses = 4
    replicas.replicas[1].loses = None
    text = client.post("/v1/chat/completions", json={**chat, "extractive": False}).text
    chunks = [value for _, value in events(text)]
    whole = client.post("/v1/chat/completions", json={**chat, "extractive": False}).text
    assert chunks[-1] == "[DONE]"
    assert len({chunk["id"] for chunk in chunks[:-1]}) == 1
    assert content(chunks) == content([value for _, value in events(whole)])


def content(chunks: list[Any]) -> str:
    deltas = [c["choices"][0]["delta"] for c in chunks[:-1] if c["choices"]]
    assert sum("role" in delta for delta in deltas) == 1
    return "".join(delta.get("content") or "" for delta in deltas)


def test_a_selection_comes_from_the_gateway_alone(
    cluster: LocalCluster, client: TestClient, replicas: LocalReplicas,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Nothing that a client sends is taken for one, by a gateway or by a replica: not a header, nor
    a field of the body, nor what it says of the scope."""
    question = {**LEAVE, "max_tokens": 1}
    client.post("/v1/answers", json=question)
    [sent] = [each for replica in replicas.replicas for each in replica.seen]
    selection = sent.reads.selection
    assert selection is not None
    assert [hit.module.document for hit in selection.hits] == ["leave.md"]
    assert pickle.loads(pickle.dumps(sent)) == sent, "it travels between processes"
    [keys] = cluster.rags[0].modules.named("notes", ["keys.md#1"])
    other = replace(selection, hits=(replace(selection.hits[0], module=keys),))
    forged = {
        name: base64.b64encode(pickle.dumps(other)).decode()
        for name in ("X-Ragcache-Selection", "Selection", "State")
    }
    searched = recorded_searches(monkeypatch)
    direct = TestClient(replicas.replicas[0].app, base_url="http://localhost")
    for asked in (client, direct):
        answered = asked.post("/v1/answers", json=question, headers=forged)
        assert [each["document"] for each in answered.json()["sources"]] == ["leave.md"]
        refused = asked.post("/v1/answers", json=question | {"selection": [keys.id]})
        assert refused.status_code == 422
    assert searched == [LEAVE["question"]] * 2  # the gateway's, and the replica's own


def test_a_replica_answers_from_a_selection_without_the_ledger(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads no rows of the modules that the gateway has chosen."""

    def unread(*_: object) -> None:
        raise LedgerUnavailable("the ledger is away")

    client.post("/v1/answers", json={**LEAVE, "max_tokens": 1})
    monkeypatch.setattr(Catalog, "_rows", unread)
    answered = client.post("/v1/answers", json={**LEAVE, "max_tokens": 1})
    assert [each["document"] for each in answered.json()["sources"]] == ["leave.md"]


def away(*_: object, **__: object) -> None:
    raise LedgerUnavailable("the ledger is away")


def test_an_outage_of_the_ledger_interrupts_no_replica(
    client: TestClient, replicas: LocalReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a single service does, replicas answer for `stale_seconds` from what is in memory."""
    question = {**LEAVE, "max_tokens": 1}
    client.post("/v1/answers", json=question)
    for name in ("reading", "transaction", "fetch"):
        monkeypatch.setattr(Database, name, away)
    answers = [client.post("/v1/answers", json=question) for _ in range(8)]
    assert [each.status_code for each in answers] == [200] * 8, answers[0].text
    assert sum(len(each.seen) for each in replicas.replicas) == 9


def test_without_the_ledger_requests_go_where_all_states_are(
    cluster: LocalCluster,
    client: TestClient,
    replicas: LocalReplicas,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other replica could not fetch them, however idle it is."""
    cluster.rags[0].ingest("boats", [SourceDocument("pipit.md", "The Pipit is at the north quay.")])
    flush(cluster)
    question = {"question": "Where is the Pipit?", "collection": "boats", "k": 1, "max_tokens": 1}
    assert client.post("/v1/answers", json=question).status_code == 200
    assert replicas.table.routed == {"a": 1}
    replicas.replicas[0].running = 100
    for name in ("reading", "transaction", "fetch"):
        monkeypatch.setattr(Database, name, away)
    answers = [client.post("/v1/answers", json=question) for _ in range(4)]
    assert [each.status_code for each in answers] == [200] * 4, answers[0].text
    assert replicas.table.routed == {"a": 5}


def test_the_gateway_leaves_the_confidence_of_answers_as_it_is(
    client: TestClient, replicas: LocalReplicas
) -> None:
    direct = TestClient(replicas.replicas[0].app, base_url="http://localhost")
    asked = {**LEAVE, "mode": "exact"}
    through, alone = (each.post("/v1/answers", json=asked).json() for each in (client, direct))
    assert through["text"] == alone["text"]
    assert through["confidence"] == pytest.approx(alone["confidence"], abs=1e-3)


def test_metrics_and_the_list_name_each_replica(
    client: TestClient, replicas: LocalReplicas
) -> None:
    client.post("/v1/answers", json={**LEAVE, "max_tokens": 1})
    text = client.get("/metrics").text
    for name in "ab":
        assert f'ragcache_steps_total{{replica="{name}"}} ' in text
        assert f'ragcache_tier_states{{replica="{name}",tier="host"}} ' in text
    assert text.count("# TYPE ragcache_steps_total ") == 1
    assert 'ragcache_routed_bytes_total{kind="held"}' in text
    assert 'ragcache_replica_up{replica="b"} 1' in text
    drained = client.post("/admin/replicas/a/drain").json()["items"]
    assert [each["draining"] for each in drained] == [True, False]
    before = len(replicas.replicas[0].seen)
    assert client.post("/v1/answers", json={**LEAVE, "max_tokens": 1}).is_success
    assert len(replicas.replicas[0].seen) == before
    client.post("/admin/replicas/a/resume")
    assert not replicas.replicas[0].draining
    assert client.post("/admin/replicas/c/drain").status_code == 404
    assert client.post("/admin/replicas").status_code == 405


def test_without_replicas_the_gateway_says_so(cluster: LocalCluster) -> None:
    client = cluster.client(LocalReplicas([], RoutingTable()))
    assert client.get("/health/live").status_code == 200
    assert client.get("/health/ready").status_code == 503
    answered = client.get("/v1/models")
    assert (answered.status_code, answered.json()["error"]["code"]) == (503, "no_replica")


def test_keys_rates_and_tenants(cluster: LocalCluster, replicas: LocalReplicas) -> None:
    """The last test of this file: from the first key on, each request needs one."""
    keys = cluster.rags[0].keys
    a, b = (keys.create(name, namespace=name)[1] for name in ("tenant-a", "tenant-b"))
    as_a, as_b = ({"Authorization": f"Bearer {key}"} for key in (a, b))
    cluster.rags[0].within("tenant-a").ingest("notes", cluster.folder / "notes" / "leave.md")
    flush(cluster)
    client = cluster.client(replicas, rate="2/minute")
    short = {**LEAVE, "max_tokens": 1}
    assert client.post("/v1/answers", json=short).status_code == 401
    assert client.post("/v1/answers", json=short, headers=as_a).is_success
    refused = client.post("/v1/answers", json=short, headers=as_b)
    assert refused.status_code == 404
    [of_a, of_b] = [each for replica in replicas.replicas for each in replica.seen]
    if dict(of_a.scope["headers"])[b"authorization"].decode() != as_a["Authorization"]:
        of_a, of_b = of_b, of_a
    assert of_a.reads.located.modules
    assert not of_b.reads.located.modules
    quoted = f"{cluster.rags[0].modules.named('notes', ['leave.md#1'])[0].text}\n\nAnd?"
    chat = {**CHAT, "messages": [{"role": "user", "content": quoted}], "max_tokens": 1}
    chat["model"] = client.get("/v1/models", headers=as_b).json()["data"][0]["id"]
    assert client.post("/v1/chat/completions", json=chat, headers=as_b).status_code == 429
    other = cluster.client(replicas)
    assert other.post("/v1/chat/completions", json=chat, headers=as_b).is_success
    [quoting] = [
        each for replica in replicas.replicas for each in replica.seen
        if each.path == "/v1/chat/completions"
    ]  # fmt: skip
    assert not quoting.reads.located.modules
    assert client.get("/metrics", headers=as_a).status_code == 403
    assert client.get("/v1/models", headers=as_a).is_success
    limited = client.get("/v1/models", headers=as_a)
    assert limited.status_code == 429
