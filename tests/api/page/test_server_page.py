"""The pages in headless Chromium over a server process: their figures are the service's."""

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
from tests.api.page.conftest import Page, asked, chosen, drop, get, give_key, module, tier
from tests.conftest import write_notes
from tests.ragcache.documents.sample_files import FACTS, WRITERS

pytestmark = [pytest.mark.allow_hosts(["127.0.0.1", "::1"]), pytest.mark.slow]
Opened = Callable[[str], Page]
QUESTION = "How many days of leave does everybody have?"


@pytest.fixture
def address(served: Started) -> str:
    return served.url


def test_an_answer_streams_and_is_accounted_for(page: Page, server: httpx.Client) -> None:
    before = get(server, "/admin/stats")
    asked(page, QUESTION, "notes")
    last = get(server, "/admin/requests")["recent"][0]
    page.click(".sources summary")
    shown = page.find("[aria-label='Modules used']").find_elements(By.CSS_SELECTOR, "li")
    read = [
        {
            "name": row.get_attribute("data-module"),
            "tier": row.find_element(By.CSS_SELECTOR, ".chip").text.lower(),
        }
        for row in shown
    ]
    assert read == last["modules"]
    tokens = last["cached_tokens"] + last["computed_tokens"]
    assert f"of {tokens:,} prompt tokens" in page.find("[data-figure=cost]").text
    page.click(".cost summary")
    assert f"Cached {last['cached_tokens']}" in page.find(".cost").text
    assert "First token" in page.find(".cost").text
    after = get(server, "/admin/stats")
    assert sum(after["tokens"].values()) - sum(before["tokens"].values()) >= tokens
    assert after["ttft"]["hit"]["count"] == before["ttft"]["hit"]["count"] + 1
    assert after["ttft"]["miss"] == before["ttft"]["miss"]
    assert page.find(".said").text


def test_a_pin_is_marked_and_shades_its_tier(page: Page, server: httpx.Client) -> None:
    number = module(server, "boats.md")["id"]
    page.open("modules?search=boats")
    page.click(f"tr[data-id='{number}'] .c-name .link")
    page.click(".drawer [data-act=pin]")
    page.find(".drawer [data-act=unpin]")
    assert module(server, "boats.md")["pinned"]
    disk = tier(server, "disk")
    assert 0 < disk["pinned_bytes"] < disk["used_bytes"]
    page.open("overview")
    bar = page.find("[data-tier=disk] .bar")
    assert bar.find_element(By.CSS_SELECTOR, ".pinned").rect["width"] > 1
    assert "Pinned" in bar.get_attribute("aria-label")
    page.open("modules?pinned=true")
    page.find("[data-figure=range]", "of 1")
    page.click(f"tr[data-id='{number}'] .c-name .link")
    page.click(".drawer [data-act=unpin]")
    page.until(lambda: not module(server, "boats.md")["pinned"])
    assert tier(server, "disk")["pinned_bytes"] == 0


def test_an_eviction_is_shown_before_and_after(page: Page, server: httpx.Client) -> None:
    row = module(server, "keys.md")
    page.open("modules?search=keys")
    page.click(f"tr[data-id='{row['id']}'] .c-name .link")
    page.click(".drawer [data-act=evict]")
    would = server.delete(f"/admin/modules/{row['id']}", params={"dry_run": True}).json()["changes"]
    assert f"{len(would)} state" in page.find(".modal .sum").text
    assert module(server, "keys.md")["tiers"] == row["tiers"]
    page.click(".modal [type=submit]", "Evict")
    page.find(".drawer .empty", "No states")
    page.click(".drawer [aria-label=Close]")
    page.find(f"tr[data-id='{row['id']}'] .chips", "none")
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
        _, user = rag.keys.create("reader")
        _, theirs = rag.keys.create("them", role="admin", namespace="them")
    started = start_server(tmp_path / "state")
    try:
        assert httpx.get(f"{started.url}/admin/stats").status_code == 401
        page = opened(started.url)
        page.open("overview")
        give_key(page, "rk-wrong")
        page.find(".modal .fault", "did not accept")
        give_key(page, secret)
        assert page.find("[data-figure=documents] dd").text == "3"
        page.open("modules")
        page.find(".c-name .link")
        assert page.all(".modal") == []
        assert page.window.execute_script("return localStorage.length") == 0
        asked(page, QUESTION, "notes")
        page.click("[data-action=forget]")
        page.find(".modal [name=key]")
        assert page.window.execute_script("return sessionStorage.length") == 0
        page.click(".modal footer button", "Cancel")
        assert "Unauthorized" in page.find(".fault strong").text
        assert page.all(".exchange") == []
        page.click("[data-action=key]")
        give_key(page, user)
        page.until(lambda: chosen(page) == "notes")
        page.open("overview")
        page.find(".empty", "Not for this key")
        page = opened(started.url)
        page.open("overview")
        give_key(page, theirs)
        assert page.find("[data-figure=documents] dd").text == "0"
        page.find("[aria-label=Tiers] .empty", "Not for this key")
        page.open("requests")
        page.find(".empty", "No request is running")
    finally:
        started.stop()


def test_a_service_that_was_restarted_is_noticed_and_asked_on(
    reader: LoadedModel, opened: Opened, tmp_path: Path
) -> None:
    with RagCache.open(tmp_path / "state", reader) as rag:
        rag.ingest("notes", write_notes(tmp_path / "notes"))
    started = start_server(tmp_path / "state")
    port = started.url.rpartition(":")[2]
    page = opened(started.url)
    asked(page, QUESTION, "notes")
    started.stop()
    page.find("[name=question]").send_keys("How many boats are there?", Keys.ENTER)
    page.find(".exchange[data-status=failed] .fault", "cannot be reached")
    page.find(".gone", "does not answer")
    again = start_server(tmp_path / "state", "--port", port)
    try:
        page.find(".toast.ok", "The service is back")
        page.until(lambda: not any(each.is_displayed() for each in page.all(".gone")))
        page.click(".exchange[data-status=failed] [aria-label='Ask again']")
        page.until(lambda: not page.all(".exchange[data-status=failed]"))
        page.until(lambda: len(page.all(".exchange[data-status=done]")) == 2)
    finally:
        again.stop()


def test_the_address_of_the_page_is_told_at_the_start(served: Started) -> None:
    until = time.monotonic() + 60  # it follows the line that the server listens
    told = f"page: {served.url}/ (operators: {served.url}/admin/)"
    while told not in "".join(served.log):
        assert time.monotonic() < until, served.log
        time.sleep(0.01)


def test_what_nothing_fits_is_no_miss(page: Page, server: httpx.Client) -> None:
    before = get(server, "/admin/stats")["ttft"]
    asked(page, "zzqx wvvk", "notes")
    assert page.find(".said .markdown").text == REFUSAL
    assert get(server, "/admin/stats")["ttft"] == before
    assert get(server, "/admin/requests")["recent"][0]["ttft"] is None


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
    page.open("jobs")
    page.find("[name=into]").send_keys("papers")
    drop(page, *files, tmp_path / "broken.pdf")
    page.click(".upload [type=submit]", f"Add {len(files) + 1} files")
    job = page.find(".job[data-status=done]", "papers").text
    assert "broken.pdf: it is damaged, or no PDF" in job
    listed = get(server, "/admin/modules", collection="papers", sort="name")["items"]
    assert {each["document"] for each in listed} == {file.name for file in files}
    page.open("modules?collection=papers&sort=name&descending=false")
    page.find("[data-figure=range]", f"of {len(listed)}")
    assert page.names() == [each["name"] for each in listed]
    page.click(".c-name .link")
    told = get(server, f"/admin/modules/{listed[0]['id']}")["text"]
    assert page.find(".drawer pre").text.split() == told.split()
    for name in names:
        question, _ = FACTS[name]
        asked(page, question, "papers")
        page.click(".sources summary")
        first = page.find("[aria-label='Modules used'] li").text
        assert first.startswith(Path(name).name), question
        assert ("Page 2" in first) == name.endswith((".pdf", ".pptx"))
