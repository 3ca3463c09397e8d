"""What the page tells of the real service is what the service knows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.api.page.conftest import Page
from tests.api.page.service import QUESTION, SOURCES, asked, get, module

pytestmark = pytest.mark.allow_hosts(["127.0.0.1", "::1"])


def test_what_nothing_fits_is_no_miss(page: Page, server: httpx.Client) -> None:
    before = get(server, "/admin/stats")["ttft"]
    asked(page, "zzqx wvvk", "notes")
    assert page.find(".said").text == "Nothing in this collection fits the question."
    assert get(server, "/admin/stats")["ttft"] == before
    assert get(server, "/admin/requests")["recent"][0]["ttft"] is None


def test_what_was_evicted_is_encoded_anew(page: Page, server: httpx.Client) -> None:
    number = module(server, "keys.md")["id"]
    assert server.delete(f"/admin/modules/{number}").status_code == 200
    before = get(server, "/admin/stats")["tokens"].get("encoded", 0)
    asked(page, "Where does the spare key of the boathouse hang?", "notes")
    assert "encoded" in page.find("[aria-label='Modules used']").text.lower()
    assert get(server, "/admin/stats")["tokens"]["encoded"] > before
    assert module(server, "keys.md")["tiers"]


def test_reuse_and_schema_tell_of_the_same_modules(page: Page, server: httpx.Client) -> None:
    server.post("/v1/answers", json={"question": QUESTION, "collection": "notes", "max_tokens": 1})
    name = module(server, "leave.md")["name"]
    heat = get(server, "/admin/heat")
    assert sum(heat["counts"][heat["modules"].index(name)]) >= 1
    page.open("reuse")
    page.until(lambda: name in page.find(".heathost").text)
    page.open("schemas?id=collection:notes")
    told = get(server, "/admin/schemas/collection:notes/tree")
    assert f"{told['tokens']:,} tokens" in page.find(".stage .panel").text
    page.click(".tree [role=treeitem]", "of 3")
    for each in get(server, "/admin/modules", collection="notes")["items"]:
        page.find(".tree [role=treeitem]", each["document"])


@contextmanager
def load(server: httpx.Client, clients: int) -> Iterator[None]:
    """Clients that ask the same question again and again."""
    over = threading.Event()
    body = {"question": QUESTION, "collection": "notes", "k": 2, "max_tokens": 12}

    def ask_on() -> None:
        while not over.is_set():
            server.post("/v1/answers", json=body)

    threads = [threading.Thread(target=ask_on) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_requests_are_seen_to_share_what_they_read(page: Page, server: httpx.Client) -> None:
    name = module(server, "leave.md")["name"]
    page.open("batch")
    page.find(".figures")
    with load(server, 4):
        page.until(lambda: shared(get(server, "/admin/requests")["batch"], name))
        page.until(lambda: int(page.find(".segments li", name).text.split()[-3]) > 1)
        page.find("[aria-label='Running requests'] .state")
    page.find(".empty", "The engine is idle")
    page.find(".empty", "No request is running")
    ended = page.find("[aria-label='Requests that ended lately'] tbody tr").text
    last = get(server, "/admin/requests")["recent"][0]
    assert name in ended
    assert str(last["cached_tokens"]) in ended.split()
    assert get(server, "/admin/requests")["batch"]["rows"] == 0


def shared(batch: dict[str, Any], name: str) -> bool:
    """Whether several requests of a step read a module; each has a row at least."""
    for each in batch["segments"]:
        assert each["rows"] >= each["requests"] <= batch["requests"]
        assert each["rows"] <= batch["rows"]
    return any(each["module"] == name and each["requests"] > 1 for each in batch["segments"])


def test_tokens_by_source_add_up_to_the_prompts(page: Page, server: httpx.Client) -> None:
    page.open("overview")
    page.find("[data-figure=finished]")
    before = get(server, "/admin/stats")
    prompts = 0
    for mode in ("rooted", "rooted", "exact", "linked:4"):
        body = {"question": QUESTION, "collection": "notes", "mode": mode, "max_tokens": 2}
        prompts += server.post("/v1/answers", json=body).json()["reuse"]["prompt_tokens"]
    after = get(server, "/admin/stats")
    assert sum(after["tokens"].values()) - sum(before["tokens"].values()) == prompts
    assert set(after["tokens"]) <= SOURCES
    series = [sum(point["tokens"].values()) for point in after["series"]]
    assert sum(series) == sum(after["tokens"].values())
    finished = f"{after['requests']['finished']:,}"
    page.until(lambda: page.find("[data-figure=finished] dd").text == finished)
    kept = sum(after["tokens"].get(name, 0) for name in SOURCES - {"computed", "encoded"})
    share = 100 * kept / sum(after["tokens"].values())
    assert page.find("[data-figure=kept] dd").text == f"{share:.0f} %"
