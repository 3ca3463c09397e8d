"""The operator's routes."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from sqlalchemy import delete
from starlette.testclient import TestClient

from ragcache import RagCache, SourceDocument
from ragcache.db.tables import EvictionTable
from ragcache.models import LoadedModel
from ragcache.pipeline import gate
from ragcache.pipeline.gate_measurement import GateResult
from ragcache_api.http import ServiceSettings, create_app
from ragcache_api.http.stats_recorder import SOURCES
from ragcache_api.http.telemetry import Metrics
from tests.api.http.asgi import Caller
from tests.api.http.conftest import LEAVE, client_of
from tests.ragcache.test_recurrence import passage

ASK = {"question": LEAVE, "collection": "notes", "max_tokens": 2}


def module(client: TestClient, name: str) -> dict[str, object]:
    items = client.get("/admin/modules", params={"search": name}).json()["items"]
    [found] = [each for each in items if each["name"] == name]
    return found


def test_modules_are_paged_filtered_and_sorted(client: TestClient) -> None:
    wanted = {"limit": 2, "sort": "name", "descending": "", "tier": "disk"}
    page = client.get("/admin/modules", params=wanted).json()
    assert [each["name"] for each in page["items"]] == ["leave.md#1", "keys.md#1"]
    rest = client.get("/admin/modules", params={**wanted, "cursor": page["next"]}).json()
    assert ([each["name"] for each in rest["items"]], rest["next"]) == (["boats.md#1"], None)


def test_a_module_is_told_with_its_text_and_states(client: TestClient) -> None:
    number = module(client, "keys.md#1")["id"]
    told = client.get(f"/admin/modules/{number}").json()
    assert "spare key" in told["text"]
    assert told["collection"] == "notes"
    assert {state["tier"] for state in told["states"]} >= {"disk"}
    assert client.get("/admin/modules/999999").status_code == 404


def test_a_module_is_pinned_moved_evicted_and_warmed(client: TestClient) -> None:
    number = module(client, "boats.md#1")["id"]
    dry = client.post(f"/admin/modules/{number}/pin", params={"dry_run": True}).json()
    assert dry["dry_run"]
    assert not module(client, "boats.md#1")["pinned"]
    pinned = client.post(f"/admin/modules/{number}/pin").json()
    assert {each["action"] for each in pinned["changes"]} == {"pin"}
    assert pinned["bytes"] == sum(each["nbytes"] for each in pinned["changes"])
    assert module(client, "boats.md#1")["pinned"]
    client.delete(f"/admin/modules/{number}/pin")
    assert not module(client, "boats.md#1")["pinned"]
    gone = client.delete(f"/admin/modules/{number}").json()
    assert {each["action"] for each in gone["changes"]} == {"evict"}
    assert module(client, "boats.md#1")["tiers"] == []
    warmed = client.post(f"/admin/modules/{number}/warm").json()
    assert [each["action"] for each in warmed["changes"]] == ["encode"]
    moved = client.post(f"/admin/modules/{number}/move", json={"tier": "disk"})
    assert moved.status_code == 200
    assert client.post(f"/admin/modules/{number}/move", json={"tier": "x"}).status_code == 400


def test_a_module_expires(client: TestClient) -> None:
    path = f"/admin/modules/{module(client, 'boats.md#1')['id']}/expire"
    dry = client.post(path, params={"dry_run": True}, json={"seconds": 60}).json()
    assert (dry["dry_run"], {each["action"] for each in dry["changes"]}) == (True, {"expire"})
    assert module(client, "boats.md#1")["expires_at"] is None
    assert client.post(path, json={"seconds": 60}).json()["changes"] == dry["changes"]
    assert module(client, "boats.md#1")["expires_at"] == pytest.approx(time.time() + 60, abs=30)
    lifted = client.post(path, json={"seconds": None}).json()
    assert {each["action"] for each in lifted["changes"]} == {"keep"}
    assert module(client, "boats.md#1")["expires_at"] is None
    for odd in ({}, {"seconds": -1}, {"seconds": "soon"}):
        assert client.post(path, json=odd).status_code == 422
    assert client.post("/admin/modules/999999/expire", json={"seconds": 1}).status_code == 404


def test_evicting_tells_what_would_go_and_then_what_went(client: TestClient) -> None:
    body = {"collection": "notes", "documents": ["keys.md"], "tier": "disk"}
    dry = client.post("/admin/evict", params={"dry_run": True}, json=body).json()
    assert [each["tier"] for each in dry["changes"]] == ["disk"]
    done = client.post("/admin/evict", json=body).json()
    assert [each["key"] for each in done["changes"]] == [each["key"] for each in dry["changes"]]
    assert client.post("/admin/evict", json=body).json()["changes"] == []
    client.post("/admin/flush")
    told = client.get("/admin/evictions", params={"limit": 1}).json()["items"]
    assert told[0]["reason"] == "manual"
    number = module(client, "keys.md#1")["id"]
    client.post(f"/admin/modules/{number}/warm")


def test_operators_see_and_forget_recurring_texts(client: TestClient) -> None:
    texts = [passage(seed, 5) for seed in range(4)]
    observing = client.app.state.service.shared.observing  # type: ignore[attr-defined]
    for number in range(1, 4):
        content = f"Read this.\n{texts[number]}\n{texts[0]}\nQuestion {number}?"
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        told = client.post("/v1/chat/completions", json=body).json()
        observing.submit(int).result()
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] > 90
    [item] = client.get("/admin/observed").json()["items"]
    assert (item["hits"], item["excerpt"]) == (1, texts[0][:80])
    plain = client.post("/v1/chat/completions", json={**body, "recognize_recurring": False})
    assert plain.status_code == 200
    assert client.get("/admin/observed").json()["items"][0]["hits"] == 1
    assert client.delete("/admin/observed", params={"id": "other"}).json() == {"forgotten": 0}
    assert client.delete("/admin/observed").json() == {"forgotten": 1}
    assert client.get("/admin/observed").json() == {"items": [], "next": None, "total": 0}


def test_a_flag_without_a_value_is_true(client: TestClient) -> None:
    for query, dry in (("dry_run", True), ("dry_run=", True), ("dry_run=0", False), ("", False)):
        told = client.post(f"/admin/evict?{query}", json={"collection": "notes", "documents": []})
        assert told.json()["dry_run"] is dry, query
    assert client.post("/admin/evict?dry_run=maybe", json={}).status_code == 422
    assert client.get("/admin/modules?pinned").json()["items"] == []


def test_statistics_count_what_the_service_answered(client: TestClient) -> None:
    before = client.get("/admin/stats").json()
    prompts = 0
    for mode in ("rooted", "exact", "primed:4"):
        told = client.post("/v1/answers", json={**ASK, "mode": mode}).json()
        prompts += told["reuse"]["prompt_tokens"]
    after = client.get("/admin/stats").json()
    tokens = sum(after["tokens"].values())
    assert tokens - sum(before["tokens"].values()) == prompts
    assert tokens == sum(sum(point["tokens"].values()) for point in after["series"])
    assert set(after["tokens"]) <= set(SOURCES)
    assert after["requests"]["finished"] == before["requests"]["finished"] + 3
    assert after["ttft"]["hit"]["count"] == before["ttft"]["hit"]["count"] + 2
    assert after["ttft"]["miss"]["count"] == before["ttft"]["miss"]["count"] + 1
    assert after["tokens"]["computed"] > before["tokens"].get("computed", 0)
    assert after["engine"]["steps"] > before["engine"]["steps"]
    assert after["collections"]["notes"] == 3


def test_requests_name_the_modules_that_were_read(client: TestClient) -> None:
    client.post("/v1/answers", json={**ASK, "k": 1})
    told = client.get("/admin/requests").json()
    assert told["running"] == []
    assert told["recent"][0]["kind"] == "answer"
    assert told["recent"][0]["modules"][0]["name"] == "leave.md#1"


def test_tiers_tell_their_fill(client: TestClient, rag: RagCache) -> None:
    tiers = {each["name"]: each for each in client.get("/admin/tiers").json()["items"]}
    assert set(tiers) == {"host", "disk"}
    assert tiers["disk"]["persistent"]
    assert tiers["host"]["budget_bytes"] == rag.stats().host_budget_bytes
    assert tiers["host"]["used_bytes"] > 0


def test_schemas_are_shown_as_pml(client: TestClient) -> None:
    text = (
        '<schema name="t"><module name="a">One two.</module><module name="b">Six.</module></schema>'
    )
    assert client.post("/v1/schemas", json={"text": text}).status_code == 201
    listed = {each["id"] for each in client.get("/admin/schemas").json()["items"]}
    assert {"schema:t", "collection:notes"} <= listed
    assert client.get("/admin/schemas/schema:t").json()["text"] == text
    generated = client.get("/admin/schemas/collection:notes").json()
    assert (generated["kind"], generated["name"]) == ("collection", "notes")
    assert '<union slot="1" collection="notes"/>' in generated["text"]
    assert client.get("/v1/schemas/t").json()["text"] == text
    assert client.delete("/v1/schemas/t").json() == {"deleted": 1}
    assert client.delete("/v1/schemas/t").status_code == 404
    gone = client.post("/v1/prompts", json={"prompt": '<prompt schema="t"><a/>x</prompt>'})
    assert gone.status_code == 404


def test_a_plan_and_a_verification(client: TestClient) -> None:
    plan = client.post("/admin/plan", json={"texts": ["A short text."], "sample": 1}).json()
    assert plan["modules"] == 1
    assert plan["advice"]
    assert client.post("/admin/plan", json={}).status_code == 400
    report = client.post("/admin/verify").json()
    assert report["clean"]
    assert report["states"] >= 1


def test_metrics_name_everything_that_an_operator_watches(client: TestClient) -> None:
    client.post("/v1/answers", json=ASK)
    text = client.get("/metrics").text
    for name in (
        "ragcache_requests_total", "ragcache_prompt_tokens_total", "ragcache_hits_total",
        "ragcache_misses_total", "ragcache_tier_used_bytes", "ragcache_first_token_seconds_bucket",
        "ragcache_queue_seconds_bucket", "ragcache_evictions_total",
        "ragcache_steps_total", "ragcache_step_rows_total",
    ):  # fmt: skip
        assert re.search(rf"^{name}\b", text, re.MULTILINE), name
    assert 'cache="hit"' in text


def test_evictions_are_totals_whatever_the_ledger_forgets(
    client: TestClient, rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evicted(reason: str) -> float:
        label = f'^ragcache_evictions_total{{reason="{reason}",tier="disk"}} (\\S+)$'
        found = re.search(label, client.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    number, before = module(client, "keys.md#1")["id"], evicted("manual")
    for _ in range(2):
        client.post(f"/admin/modules/{number}/warm")
        changes = client.delete(f"/admin/modules/{number}").json()["changes"]
        before += sum(change["tier"] == "disk" for change in changes)
    rag.ingest("gone", [SourceDocument("a", "The old lamp is green and stands in the hall.")])
    superseded = evicted("superseded")
    assert client.delete("/v1/collections/gone").json() == {"deleted": 1}
    with rag.internals.shared.database.transaction() as session:
        session.execute(delete(EvictionTable))
    monkeypatch.setattr(type(rag.internals.shared.store.ledger), "evictions", None)
    assert (evicted("manual"), evicted("superseded")) == (before, superseded + 1)
    client.post(f"/admin/modules/{number}/warm")


def test_metrics_are_computed_beside_the_loop(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def noting(made: Any) -> Any:
        def call(*arguments: Any) -> Any:
            with suppress(RuntimeError):
                seen.append(str(asyncio.get_running_loop()))
            return made(*arguments)

        return call

    monkeypatch.setattr(Metrics, "text", noting(Metrics.text))
    assert client.get("/metrics").status_code == 200
    assert not seen


def test_health_tells_when_the_service_is_ending(rag: RagCache) -> None:
    with client_of(rag) as ending:
        assert ending.get("/health/ready").json() == {"status": "ready"}
        ending.app.state.service.requests.drain()  # type: ignore[attr-defined]
        assert ending.get("/health/ready").status_code == 503
        assert ending.get("/health/live").status_code == 200
        refused = ending.post("/v1/answers", json=ASK)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/answers", "/v1/chat/completions"])
def test_a_request_that_nobody_streams_is_seen_generating(rag: RagCache, path: str) -> None:
    body = {**ASK, "max_tokens": 2500, "ignore_eos": True, "extractive": False}
    if path != "/v1/answers":
        model = rag.internals.shared.model.name
        body |= {"model": model, "messages": [{"role": "user", "content": LEAVE}]}
        del body["question"]
    app = create_app(rag, ServiceSettings.read(deadline=60))
    caller, service = Caller(json.dumps(body).encode()), app.state.service

    async def watched() -> tuple[dict[str, Any], dict[str, int]]:
        call = asyncio.create_task(caller.call(app, "POST", path))
        while not any(active.generated > 2 for active in service.requests.active.values()):
            await asyncio.sleep(0.01)
        told = []
        for looked in ("/admin/requests", "/admin/stats"):
            look = Caller()
            await look.call(app, "GET", looked)
            told.append(json.loads(look.told[1]["body"]))
        service.requests.stop()
        await call
        [seen] = told[0]["running"]
        assert seen["prompt_tokens"] > 0
        return seen, told[1]["requests"]

    seen, counts = asyncio.run(asyncio.wait_for(watched(), 60))
    assert seen["state"] == "generating"
    assert seen["generated"] > 2
    assert (counts["running"], counts["waiting"]) == (1, 0)
    assert caller.status == 503


def test_modes_are_told_once_measured_and_refused_where_far(
    tiny_reader: LoadedModel, tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = GateResult("rooted", 24, 4.5, 0.25, 2.0, 6.0, 1.0, 0.75)
    monkeypatch.setattr(gate, "measure_modes", lambda *_: [far])
    with RagCache.open(tmp_path / "state", tiny_reader, embedding="none", force_modes=False) as rag:
        rag.ingest("notes", [notes])
        client = client_of(rag)
        state = client.get("/admin/state").json()
        assert (state["model"], state["dtype"], state["window"]) == ("tiny", "float32", 512)
        assert (state["modes"], state["force_modes"]) == ([], False)
        asked = {"question": LEAVE, "collection": "notes"}
        problem = client.post("/v1/answers", json=asked)
        assert problem.status_code == 400
        assert problem.json()["type"] == "urn:ragcache:problem:mode-refused"
        assert client.get("/admin/state").json()["modes"] == [{
            "mode": "rooted", "prompts": 24, "kl_divergence": 4.5, "agreement": 0.25, "limit": 2.0,
            "other_documents": 6.0, "equal_answers": 0.75, "sizes": [],
            "passes": False,
        }]  # fmt: skip


def test_no_request_waits_for_the_gate(
    tiny_reader: LoadedModel, tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, finish = GateResult("rooted", 24, 0.05, 0.95, 2.0, 6.0, 1.0, 0.75), Event()
    monkeypatch.setattr(gate, "measure_modes", lambda *_: [near] if finish.wait(60) else [])
    with RagCache.open(tmp_path / "state", tiny_reader, embedding="none", force_modes=False) as rag:
        rag.ingest("notes", [notes])
        asked = {"question": LEAVE, "collection": "notes"}
        with client_of(rag) as client:
            assert client.get("/health/ready").status_code == 200
            early = client.post("/v1/answers", json=asked).json()
            assert (early["mode"], early["reuse"]["replaced_mode"]) == ("exact", "rooted")
            finish.set()
            rag.gate.join()
            late = client.post("/v1/answers", json=asked).json()
            assert (late["mode"], late["reuse"]["replaced_mode"]) == ("rooted", None)


def test_memory_is_told_by_process_host_and_tier(client: TestClient) -> None:
    memory = client.get("/admin/memory").json()
    process, host = memory["process"], memory["host"]
    assert 0 <= process["mapped_bytes"] < process["rss_bytes"] < host["total_bytes"]
    assert 0 < host["available_bytes"] < host["total_bytes"]
    assert memory["device"] is None
    assert memory["tiers"] == client.get("/admin/tiers").json()["items"]
