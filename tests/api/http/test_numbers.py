"""Ids over the wire: those of a tenant tell nothing of what others did."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from ragcache import RagCache, SourceDocument
from ragcache.errors import InvalidRequest
from ragcache.models import LoadedModel
from ragcache.store.paging import cursor_of, values_of
from ragcache_api.http.numbers import Numbering, Numbers
from tests.api.http.conftest import client_of
from tests.api.http.events import events

KEYED = Numbers(b"k" * 32)


@given(st.integers(0, 2**63 - 1))
def test_every_id_has_one_that_is_told_and_leads_back(number: int) -> None:
    told = KEYED.told(number)
    assert KEYED.meant(told) == number
    assert KEYED.told(KEYED.meant(number)) == number
    assert (told < 2**52) == (number < 2**52), "a whole number in JavaScript too"


def test_ids_that_follow_each_other_lie_anywhere() -> None:
    told = [KEYED.told(number) for number in range(1, 400)]
    assert len(set(told)) == 399
    assert min(told) < 2**48 < 2**51 < max(told)
    steps = {b - a for a, b in pairwise(told)}
    assert len(steps) == 398, "no two steps are alike"
    assert told[:9] != [Numbers(b"other").told(number) for number in range(1, 10)]


def test_cursors_hold_the_id_that_is_told() -> None:
    kept = cursor_of("hits", 1, 7, "key", 12)
    page = KEYED._cursor(kept, KEYED.told)
    assert values_of(page) == ["hits", 1, 7, "key", KEYED.told(12)]
    assert KEYED.cursor(page) == kept
    assert KEYED.cursor(None) is None
    for odd in ("", "!", cursor_of("a"), cursor_of(True), cursor_of(None)):
        with pytest.raises(InvalidRequest):
            KEYED.cursor(odd)


def test_cursors_do_not_hold_the_clock_of_uses() -> None:
    kept = cursor_of("last_use", 1, 7, "key", 12)
    page = KEYED._cursor(kept, KEYED.told)
    assert values_of(page) == ["last_use", 1, KEYED.told(7), "key", KEYED.told(12)]
    assert KEYED.cursor(page) == kept
    unused = cursor_of("last_use", 1, None, "", 12)
    assert KEYED.cursor(KEYED._cursor(unused, KEYED.told)) == unused


@pytest.fixture(scope="module")
def two(
    reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TestClient, RagCache, dict[str, str]]]:
    """A service in which `red` has three documents, each its own job, and headers of red."""
    with RagCache.open(tmp_path_factory.mktemp("numbers") / "state", reader) as rag:
        for name in "abc":
            rag.within("red").ingest("notes", [SourceDocument(name, f"The leaf {name} is red.")])
        with client_of(rag) as client:
            secret = rag.keys.create("red", "admin", "red")[1]
            yield client, rag, {"Authorization": f"Bearer {secret}"}


def listed(client: TestClient, path: str, headers: dict[str, str], **query: Any) -> list[Any]:
    items: list[Any] = []
    query |= {"limit": 1}
    while True:
        page = client.get(path, params=query, headers=headers).json()
        items += page["items"]
        if page["next"] is None:
            return items
        query["cursor"] = page["next"]


def test_pages_and_things_are_reached_by_the_ids_that_are_told(
    two: tuple[TestClient, RagCache, dict[str, str]],
) -> None:
    client, rag, red = two
    tenant, public = rag.within("red"), Numbering(rag).of("red")
    jobs = listed(client, "/v1/jobs", red)
    assert [each["id"] for each in jobs] == [public.told(r.id) for r in tenant.jobs.list().items]
    assert client.get(f"/v1/jobs/{jobs[0]['id']}", headers=red).json() == jobs[0]
    stream = client.get(f"/v1/jobs/{jobs[0]['id']}", headers={**red, "Accept": "text/event-stream"})
    assert events(stream.text)[-1][1]["id"] == jobs[0]["id"]
    for sort in ("id", "name", "hits", "last_use"):
        modules = listed(client, "/admin/modules", red, sort=sort)
        assert {each["name"] for each in modules} == {"a#1", "b#1", "c#1"}
    one = client.get(f"/admin/modules/{modules[0]['id']}", headers=red).json()
    assert (one["id"], one["name"]) == (modules[0]["id"], modules[0]["name"])
    done = client.post(f"/admin/modules/{one['id']}/pin", headers=red)
    assert done.json()["changes"]
    client.delete(f"/admin/modules/{one['id']}", headers=red)
    left = listed(client, "/admin/evictions", red)
    assert [each["id"] for each in left] == [public.told(r.id) for r in tenant.evictions().items]


def test_a_tenant_sorts_by_the_last_use_and_is_not_told_it(
    two: tuple[TestClient, RagCache, dict[str, str]],
) -> None:
    client, rag, red = two
    tenant = rag.within("red")
    for name in "cab":
        tenant.ask(f"What of leaf {name}?", collection="notes", k=1)
        rag.parts.store.ledger.flush()
    wanted = [each.name for each in tenant.modules.page(sort="last_use", descending=True).items]
    modules = listed(client, "/admin/modules", red, sort="last_use", descending=True)
    assert [each["name"] for each in modules] == wanted
    assert {each["last_use"] for each in modules} == {None}
    one = client.get(f"/admin/modules/{modules[0]['id']}", headers=red).json()
    assert {state["last_use"] for state in (one, *one["states"])} == {None}
    assert len(one["states"]) > 0


def test_a_new_job_is_told_with_its_own_id(
    two: tuple[TestClient, RagCache, dict[str, str]],
) -> None:
    client, rag, red = two
    sent = {"documents": [{"id": "d", "text": "The leaf d is red."}]}
    made = client.post("/v1/collections/more/documents", json=sent, headers=red)
    assert made.headers["location"] == f"/v1/jobs/{made.json()['id']}"
    number = Numbering(rag).of("red").meant(made.json()["id"])
    assert rag.within("red").jobs.wait(number, 20).status == "done"


def test_an_id_that_nothing_has_is_told_as_it_was_sent(
    two: tuple[TestClient, RagCache, dict[str, str]],
) -> None:
    client, _, red = two
    for path in ("/v1/jobs/1", "/admin/modules/1"):
        missing = client.get(path, headers=red)
        assert missing.status_code == 404
        assert missing.json()["detail"] == "nothing has the id 1"


def test_the_secret_is_the_ledgers(two: tuple[TestClient, RagCache, dict[str, str]]) -> None:
    _, rag, _ = two
    first, again = Numbering(rag), Numbering(rag)
    assert first.of("red") == again.of("red") != first.of("blue")
    assert first.of("default").told(7) == 7
