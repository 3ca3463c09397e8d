"""The operator's page in headless Chromium over a server process: its figures are the service's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from ragcache import RagCache
from ragcache.models import LoadedModel
from ragcache.params import REFUSAL
from tests.api.http.server_process import Started, start_server
from tests.api.page.conftest import Page, asked, get, module, tier
from tests.conftest import write_notes
from tests.ragcache.documents.sample_files import FACTS, WRITERS

pytestmark = [pytest.mark.allow_hosts(["127.0.0.1", "::1"]), pytest.mark.slow]
Opened = Callable[[str], Page]
QUESTION = "How many days of leave does everybody have?"


def drop(page: Page, *files: Path) -> None:
    """Drags files from outside the browser into the zone, as the browser itself sees it."""
    zone = page.find(".drop").rect
    where = {"x": zone["x"] + zone["width"] / 2, "y": zone["y"] + zone["height"] / 2}
    held = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        page.window.execute_cdp_cmd(
            "Input.dispatchDragEvent", {"type": kind, "data": held, **where}
        )


def test_an_answer_streams_and_is_accounted_for(page: Page, server: httpx.Client) -> None:
    before = get(server, "/admin/stats")
    asked(page, QUESTION, "notes")
    last = get(server, "/admin/requests")["recent"][0]
    shown = page.find("[aria-label='Modules used']").find_elements(By.CSS_SELECTOR, "tbody tr")
    cells = [[each.text for each in row.find_elements(By.CSS_SELECTOR, "td")] for row in shown]
    assert [{"name": name, "tier": tiers.split()[0].lower()} for name, tiers, _ in cells] == last[
        "modules"
    ]
    tokens = last["cached_tokens"] + last["computed_tokens"]
    assert page.find(".headline").text.endswith("tokens not computed")
    assert f"{last['cached_tokens']:,}" in page.find(".panel", "Prompt tokens").text
    pieces = int(page.find("[data-figure=tokens]").text.split()[0])
    assert 1 < pieces <= 12
    assert len(page.all(".tokenbars rect")) == pieces - 1
    assert "first token" in page.find(".waterfall + p").text
    after = get(server, "/admin/stats")
    assert sum(after["tokens"].values()) - sum(before["tokens"].values()) >= tokens
    assert after["ttft"]["hit"]["count"] == before["ttft"]["hit"]["count"] + 1
    assert after["ttft"]["miss"] == before["ttft"]["miss"]
    assert page.find(".said").text


def test_a_pin_is_marked_and_shades_its_tier(page: Page, server: httpx.Client) -> None:
    number = module(server, "boats.md")["id"]
    page.open("modules?search=boats")
    page.click(f".grid tr[data-id='{number}'] .pinbox[aria-pressed=false]")
    page.find(f".grid tr[data-id='{number}'] .pinbox[aria-pressed=true]")
    assert module(server, "boats.md")["pinned"]
    disk = tier(server, "disk")
    assert 0 < disk["pinned_bytes"] < disk["used_bytes"]
    page.open("overview")
    bar = page.find("[data-tier=disk] .fillbar")
    assert bar.find_element(By.CSS_SELECTOR, ".pinned").rect["width"] > 1
    assert "0 B pinned" not in bar.get_attribute("aria-label")
    page.open("modules?pinned=true")
    page.find(".gridbox footer", "1 in all")
    page.click(f".grid tr[data-id='{number}'] .pinbox[aria-pressed=true]")
    page.until(lambda: not module(server, "boats.md")["pinned"])
    assert tier(server, "disk")["pinned_bytes"] == 0


def test_an_eviction_is_shown_before_and_after(page: Page, server: httpx.Client) -> None:
    row = module(server, "keys.md")
    page.open("modules?search=keys")
    page.click(f".grid tr[data-id='{row['id']}'] .name")
    page.click(".drawer [data-act=evict]")
    would = server.delete(f"/admin/modules/{row['id']}", params={"dry_run": True}).json()["changes"]
    assert f"{len(would)} state" in page.find(".modal .sum").text
    assert module(server, "keys.md")["tiers"] == row["tiers"]
    page.click(".modal [type=submit]", "Evict")
    page.find(f".grid tr[data-id='{row['id']}'] .chips", "none")
    assert module(server, "keys.md")["tiers"] == []
    listed = get(server, "/admin/evictions")["items"]
    gone = [(each["tier"], each["reason"]) for each in listed if each["module"] == row["name"]]
    assert ("disk", "manual") in gone
    page.open("overview")
    assert "Disk" in page.find("[aria-label='Evictions by tier and reason']").text
    latest = page.find("[aria-label='Latest evictions'] tbody tr")
    assert row["name"] in latest.text


def test_the_page_works_with_the_key_it_asked_for(
    reader: LoadedModel, opened: Opened, tmp_path: Path
) -> None:
    with RagCache.open(tmp_path / "state", reader) as rag:
        rag.ingest("notes", write_notes(tmp_path / "notes"))
        _, secret = rag.keys.create("me", role="admin")
        _, theirs = rag.keys.create("them", role="admin", namespace="them")
    started = start_server(tmp_path / "state")
    try:
        assert httpx.get(f"{started.url}/admin/stats").status_code == 401
        page = opened(f"{started.url}/admin/")
        page.open("overview")
        page.find("[name=key]").send_keys("rk-wrong", Keys.ENTER)
        page.find(".modal .fault", "did not accept")
        page.find("[name=key]").send_keys(secret, Keys.ENTER)
        assert page.find("[data-figure=documents] dd").text == "3"
        page.open("modules")
        page.find(".grid tr[data-id]")
        assert page.all(".modal") == []
        assert page.window.execute_script("return localStorage.length") == 0
        page.click("[data-action=forget]")
        page.click(".modal footer button", "Cancel")
        assert "Unauthorized" in page.find(".fault strong").text
        page = opened(f"{started.url}/admin/")
        page.open("overview")
        page.find("[name=key]").send_keys(theirs, Keys.ENTER)
        assert page.find("[data-figure=documents] dd").text == "0"
        page.find(".tiers .empty", "Not for this key")
        page.open("requests")
        page.find(".empty", "No request is running")
    finally:
        started.stop()


def test_the_address_of_the_page_is_told_at_the_start(served: tuple[Started, str]) -> None:
    started, address = served
    until = time.monotonic() + 60  # it follows the line that the server listens
    while f"operator's page: {address}" not in "".join(started.log):
        assert time.monotonic() < until, started.log
        time.sleep(0.01)


def test_what_nothing_fits_is_no_miss(page: Page, server: httpx.Client) -> None:
    before = get(server, "/admin/stats")["ttft"]
    asked(page, "zzqx wvvk", "notes")
    assert page.find(".said").text == REFUSAL
    assert get(server, "/admin/stats")["ttft"] == before
    assert get(server, "/admin/requests")["recent"][0]["ttft"] is None


def test_a_schema_is_shown_as_pml(page: Page, server: httpx.Client) -> None:
    page.open("schemas?id=collection:notes")
    told = get(server, "/admin/schemas/collection:notes")["text"]
    assert page.find(".stage pre").text.strip() == told.strip()


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


def test_requests_are_seen_as_they_run_and_end(page: Page, server: httpx.Client) -> None:
    name = module(server, "leave.md")["name"]
    page.open("requests")
    page.find(".empty", "No request is running")
    with load(server, 4):
        page.find("[aria-label='Running requests'] .state")
    page.find(".empty", "No request is running")
    ended = page.find("[aria-label='Requests that ended lately'] tbody tr").text
    last = get(server, "/admin/requests")["recent"][0]
    assert name in ended
    assert str(last["cached_tokens"]) in ended.split()


def test_the_share_of_tokens_that_were_kept(page: Page, server: httpx.Client) -> None:
    page.open("overview")
    page.find("[data-figure=finished]")
    body = {"question": QUESTION, "collection": "notes", "max_tokens": 2}
    server.post("/v1/answers", json=body)
    stats = get(server, "/admin/stats")
    finished = f"{stats['requests']['finished']:,}"
    page.until(lambda: page.find("[data-figure=finished] dd").text == finished)
    tokens = stats["tokens"]
    computed = tokens.get("computed", 0) + tokens.get("encoded", 0)
    share = 100 - 100 * computed / sum(tokens.values())
    assert page.find("[data-figure=kept] dd").text == f"{share:.0f} %"


def test_files_are_dropped_asked_and_cited_with_their_pages(
    page: Page, server: httpx.Client, tmp_path: Path
) -> None:
    names = ("guide/handbook.pdf", "slides.pptx", "notes.md")
    files = [tmp_path / Path(name).name for name in names]
    for file, name in zip(files, names, strict=True):
        file.write_bytes(WRITERS[name]())
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.7")
    page.open("ingestion")
    page.find("[name=collection]").send_keys("papers")
    drop(page, *files, tmp_path / "broken.pdf")
    page.click(".ingestform [type=submit]", f"Ingest {len(files) + 1} files")
    job = page.find(".job[data-status=done]", "papers").text
    assert "broken.pdf: it is damaged, or no PDF" in job
    listed = get(server, "/admin/modules", collection="papers", sort="name")["items"]
    assert {each["document"] for each in listed} == {file.name for file in files}
    page.open("modules?collection=papers&sort=name&descending=false")
    page.find(".gridbox footer", f"{len(listed)} in all")
    assert page.names() == [each["name"] for each in listed]
    page.click(".grid tr[data-id] .name")
    told = get(server, f"/admin/modules/{listed[0]['id']}")["text"]
    assert page.find(".drawer pre").text.split() == told.split()
    for name in names:
        question, _ = FACTS[name]
        asked(page, question, "papers")
        first = page.find("[aria-label='Modules used'] tbody tr").text
        assert first.startswith(f"{Path(name).name}#"), question
        assert (" page 2" in first) == name.endswith((".pdf", ".pptx"))
