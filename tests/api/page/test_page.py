"""The operator's page in headless Chromium over the service in this process.

Each test has its own copy of ten modules, or reads one ledger of ten thousand.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import httpx
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from ragcache import RagCache, SourceDocument
from ragcache.contents import Collections
from ragcache.models import LoadedModel
from ragcache.pipeline import gate
from ragcache.pipeline.gate import GateResult
from ragcache_api.http.service import Service
from tests.api.page import seeding
from tests.api.page.conftest import VIEWS, Page, get, open_view

pytestmark = [pytest.mark.allow_hosts(["127.0.0.1", "::1"]), pytest.mark.slow]
Opened = Callable[[str], Page]
MODULES = 10_000


@pytest.fixture(scope="session")
def handbook(reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("handbook") / "state"
    seeding.seed_handbook(folder, reader)
    return folder


@pytest.fixture
def rag(handbook: Path, reader: LoadedModel, tmp_path: Path) -> Iterator[RagCache]:
    """A copy of the handbook."""
    shutil.copytree(handbook, tmp_path / "state")
    with RagCache.open(tmp_path / "state", reader, module_tokens=64) as opened:
        yield opened


@pytest.fixture
def service(rag: RagCache) -> Iterator[tuple[str, Service]]:
    with seeding.serve_page(rag) as address_and_service:
        yield address_and_service


@pytest.fixture
def server(service: tuple[str, Service]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service[0], timeout=60) as client:
        yield client


@pytest.fixture
def page(service: tuple[str, Service], opened: Opened) -> Page:
    return opened(f"{service[0]}/admin/")


@pytest.fixture(scope="module")
def many(
    reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:  # fmt: skip
    """A service of ten thousand modules."""
    folder = tmp_path_factory.mktemp("many") / "state"
    seeding.seed_modules(folder, MODULES)
    with (
        RagCache.open(folder, reader) as rag,
        seeding.serve_page(rag) as (address, _),
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        yield client


def row(server: httpx.Client, name: str) -> dict[str, object]:
    """A module as the service lists it."""
    items = get(server, "/admin/modules", search=name)["items"]
    [found] = [each for each in items if each["name"] == name]
    return dict(found)


def test_every_view_opens_without_documents(
    reader: LoadedModel, tmp_path: Path, opened: Opened
) -> None:
    with RagCache.open(tmp_path / "empty", reader) as rag, seeding.serve_page(rag) as (address, _):
        page = opened(f"{address}/admin/")
        for view in VIEWS:
            open_view(page, view)
        page.open("modules")
        page.click(".empty a", "Ingest documents")
        assert page.find("h1").text == "Ingestion"
        assert page.faults() == []


def test_overview_shows_figures_tiers_and_series(page: Page, service: tuple[str, Service]) -> None:
    seeding.record_hour(service[1])
    page.open("overview")
    assert page.find("[data-figure=finished] dd").text == "18,234"
    assert [each.get_attribute("data-tier") for each in page.all("[data-tier]")] == ["host", "disk"]
    assert len(page.all(".plot rect")) > 60 * 5
    page.find(".plot").send_keys(Keys.ARROW_LEFT)
    assert "Computed" in page.find(".readout").text
    bar = page.find("[data-memory=host] [role=img]").get_attribute("aria-label")
    for part in ("This process", "Mapped files", "Others", "Free"):
        assert re.search(rf"{part} [\d.]+ [KMGT]iB", bar), bar
    assert "available of" in page.find("[data-memory=host]").text


def test_a_question_shows_the_modules_that_it_reads(page: Page, server: httpx.Client) -> None:
    page.open("ask")
    page.until(lambda: page.find("[name=collection]").get_attribute("value") == "handbook")
    page.find("[name=question]").send_keys("What is the grace period of annual leave?", Keys.ENTER)
    assert page.find(".headline", "%").text.endswith("tokens not computed")
    used = [each.text.split("\n")[0] for each in page.all("[aria-label='Modules used'] td a")]
    quoted = page.find("[data-figure=quotation] mark").text
    assert page.find(".said").text.startswith(quoted)
    page.until(lambda: get(server, "/admin/requests")["recent"])
    [asked] = get(server, "/admin/requests")["recent"]
    assert 1 <= len(used) <= 4, "those far below the best are left out"
    assert used == [each["name"] for each in asked["modules"]]
    assert (asked["kind"], asked["collection"]) == ("answer", "handbook")


def test_a_quotation_is_marked_in_its_document(page: Page, rag: RagCache) -> None:
    text = "# Mooring 🛶\n\n" + "The quay is long.\n\n" * 200 + "The pelican ferry is orange.\n"
    rag.ingest("boats", [SourceDocument("sheets/ferry 1.md", text)])
    page.open("ask?collection=boats")
    page.until(lambda: page.find("[name=collection]").get_attribute("value") == "boats")
    page.find("[name=question]").send_keys("Which color has the pelican ferry?", Keys.ENTER)
    quoted = page.find("[data-figure=quotation] mark").text
    page.click("[data-figure=quotation] button", "sheets/ferry 1.md, characters")
    mark = page.find(".modal .reader mark")
    assert (page.find(".modal h2").text, mark.text) == ("sheets/ferry 1.md", quoted)
    assert page.find(".modal .reader").text.count("The quay is long.") == 200
    box, at = page.find(".modal .reader").rect, mark.rect
    assert box["y"] <= at["y"] <= box["y"] + box["height"] - at["height"], "it is in sight"
    page.click(".modal [type=submit]", "Close")
    page.click("[aria-label='Modules used'] td a")
    assert "The pelican ferry is orange." in page.find(".modal pre").text
    page.click(".modal .link", "Whole document")
    page.find(".modal h2", "sheets/ferry 1.md")
    page.open("modules?collection=boats&document=sheets%2Fferry+1.md")
    page.click(".filters button", "Read it")
    assert page.find(".modal pre").text.startswith("# Mooring 🛶")
    assert page.faults() == []


def test_questions_are_filtered_and_keep_their_collection(page: Page, rag: RagCache) -> None:
    sheets = [
        SourceDocument(f"{year}.md", f"The ferry of {year} is {color}.", metadata={"year": year})
        for year, color in ((2019, "orange"), (2024, "green"))
    ]
    rag.ingest("boats", sheets)
    open_view(page, "ask")
    page.find("[name=collection] option[value=boats]").click()
    assert page.window.current_url.endswith("#/ask?collection=boats")
    filters = page.find("[name=filters]")
    filters.send_keys("[1]")
    page.find("[name=question]").send_keys("Which color is the ferry?", Keys.ENTER)
    assert "JSON object" in filters.get_attribute("validationMessage")
    assert not page.all(".question")
    filters.clear()
    filters.send_keys('{"year": {"$lt": 2020}}')
    page.click(".askform [type=submit]")
    page.find(".headline")
    assert [each.text for each in page.all("[aria-label='Modules used'] td a")] == ["2019.md#1"]
    page.window.refresh()
    page.until(lambda: page.find("[name=collection]").get_attribute("value") == "boats")


def test_an_answer_is_in_sight_on_a_telephone(page: Page) -> None:
    page.resize(390, 667)
    page.open("ask?collection=handbook")
    page.until(lambda: page.find("[name=collection]").get_attribute("value") == "handbook")
    assert not any(each.is_displayed() for each in page.all("[name=mode]"))
    page.find("[name=question]").send_keys("How long is the grace period?", Keys.ENTER)
    page.find(".headline")
    said = page.find(".said")
    top = page.window.execute_script("return arguments[0].getBoundingClientRect().top", said)
    assert 0 < top < 667 - 80


def test_a_limit_is_set_and_lifted_in_the_drawer(page: Page, server: httpx.Client) -> None:
    page.open("modules?search=travel")
    page.click(".grid tr[data-id] .name")
    facts = page.find(".drawer .facts")
    assert "Expires\nnever" in facts.text
    page.click(".drawer [data-act=expire]")
    page.click(".modal [type=submit]", "Set")
    page.find(".toast.ok", "Limit set")
    page.until(lambda: "Expires\nnever" not in page.find(".drawer .facts").text)
    expires = row(server, "travel.md#1")["expires_at"]
    assert isinstance(expires, float)
    assert 3500 < expires - time.time() <= 3600
    page.click(".drawer [data-act=expire]")
    page.click(".modal .choice", "Never")
    page.click(".modal [type=submit]", "Set")
    page.find(".toast.ok", "Limit lifted")
    page.until(lambda: "Expires\nnever" in page.find(".drawer .facts").text)
    assert row(server, "travel.md#1")["expires_at"] is None


def test_many_are_warmed_at_once(page: Page, server: httpx.Client) -> None:
    server.post("/admin/evict", json={})
    page.open("modules")
    page.find(".grid tr[data-id]")
    page.click(".grid thead input")
    page.click(".bulk [data-act=warm]")
    page.find(".toast.ok", "Warmed 10 modules")
    for each in get(server, "/admin/modules")["items"]:
        assert set(each["tiers"]) == {"host", "disk"}


def test_evict_a_collection_after_a_dry_run(page: Page, server: httpx.Client) -> None:
    page.open("modules?collection=handbook&tier=disk")
    page.find(".grid tr[data-id]")
    page.click("[data-act=evict-scope]")
    assert "10 states would go" in page.find(".modal .sum").text
    assert get(server, "/admin/modules", tier="disk")["total"] == 10
    page.click(".modal [type=submit]", "Evict")
    page.find(".toast.ok", "Evicted 10 states")
    page.find(".empty", "No module fits")
    assert get(server, "/admin/modules", tier="disk")["total"] == 0


def test_a_refusal_is_shown_in_the_servers_words(page: Page, server: httpx.Client) -> None:
    page.open("modules?search=travel")
    page.click(".grid tr[data-id] .name")
    page.click(".drawer [data-act=move]")
    server.delete("/v1/collections/handbook/documents/travel.md")
    page.click(".modal [type=submit]", "Move")
    assert "there is no module" in page.find(".toast.error", "Not found").text


def test_ten_thousand_modules_are_searched_sorted_and_scrolled(
    many: httpx.Client, opened: Opened
) -> None:
    page = opened(f"{many.base_url}/admin/")
    page.open("modules")
    by_hits = get(many, "/admin/modules", sort="hits", descending=True, limit=3)["items"]
    page.until(lambda: page.names()[:3] == [each["name"] for each in by_hits])
    assert by_hits[0]["hits"] == 9972
    assert len(page.all(".grid tbody tr")) < 60
    page.click("[data-sort=nbytes] button")
    largest = get(many, "/admin/modules", sort="nbytes", descending=True, limit=1)["items"][0]
    page.until(lambda: page.names()[0] == largest["name"])
    assert largest["nbytes"] == 4096 + 10_006
    assert page.find("[data-sort=nbytes]").get_attribute("aria-sort") == "descending"
    page.window.execute_script("document.querySelector('.gridview').scrollTop = 300 * 38")
    page.until(lambda: page.all(".grid tr[aria-rowindex='302'][data-id]"))
    page.window.execute_script("document.querySelector('.gridview').scrollTop = 1e9")
    smallest = get(many, "/admin/modules", sort="nbytes", limit=1)["items"][0]
    page.find(f".grid tr[aria-rowindex='{MODULES + 1}'][data-id='{smallest['id']}']")
    page.find("[type=search]").send_keys("m17")
    found = sum("m17" in f"m{number}" for number in range(MODULES))
    page.find(".gridbox footer", f"{found} in all")
    assert all("m17" in name for name in page.names())
    assert "search=m17" in page.window.current_url


def test_the_modules_of_one_document(page: Page) -> None:
    page.open("modules?search=leave")
    page.click(".grid tr[data-id] .name")
    page.click(".drawer dd a", "leave.md")
    page.find(".gridbox footer", "2 in all")
    page.click(".filters .only")
    page.find(".gridbox footer", f"{len(seeding.SUBJECTS) + 2} in all")


def test_rows_are_walked_by_keyboard(page: Page) -> None:
    page.open("modules")
    first, second = (page.names() if page.find(".grid tr[data-id]") else [])[:2]
    page.find(".grid tr[data-id]").send_keys(Keys.ARROW_DOWN)
    focused = page.window.switch_to.active_element
    assert second in focused.text
    assert first not in focused.text
    focused.send_keys(Keys.ENTER)
    assert page.find(".drawer h2").text == second


def test_dark_mode_follows_the_system_until_it_is_chosen(page: Page) -> None:
    page.prefer("dark")
    page.open("overview")
    dark = page.color("html")
    page.click("[data-action=appearance]", "System")
    page.find("[data-action=appearance]", "Light")
    light = page.color("html")
    assert dark == "rgba(14, 17, 22, 1)"
    assert light == "rgba(246, 247, 249, 1)"
    page.open("overview")
    assert page.color("html") == light


def test_documents_and_their_collection_are_deleted(page: Page, server: httpx.Client) -> None:
    page.open("documents?collection=handbook")
    page.click("[aria-label='Delete leave.md']")
    said = page.find(".modal .sum").text
    assert "1 document with 2 modules, and 2 states of" in said
    assert "KiB" in page.find(".modal .preview table").text
    assert page.window.switch_to.active_element.text == "Cancel"
    page.window.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.until(lambda: not page.all(".modal"))
    assert get(server, "/v1/collections/handbook/documents")["total"] == len(seeding.SUBJECTS) + 1
    page.click("[aria-label='Delete leave.md']")
    page.click(".modal [type=submit]:enabled", "Delete")
    page.find(".toast.ok", "Deleted leave.md")
    page.find(".gridbox footer", f"{len(seeding.SUBJECTS)} in all")
    assert server.get("/v1/collections/handbook/documents/leave.md").status_code == 404
    for name in seeding.SUBJECTS[:2]:
        page.click(f".grid tr[data-id='{name}.md'] input")
    page.click(".bulk [data-act=delete]")
    page.find(".modal .sum", "2 documents with 2 modules")
    page.click(".modal [type=submit]:enabled", "Delete")
    page.find(".gridbox footer", "6 in all")
    page.click("[data-act=delete-collection]")
    assert "6 documents with 6 modules" in page.find(".modal .sum").text
    page.click(".modal [type=submit]:enabled", "Delete")
    page.find(".empty", "No collections yet")
    assert get(server, "/v1/collections")["items"] == []
    assert get(server, "/admin/modules")["total"] == 0


def test_keys_are_made_shown_once_and_revoked(page: Page, rag: RagCache) -> None:
    page.open("keys")
    page.click("[data-act=create-key]")
    page.find(".modal [name=name]").send_keys("ada", Keys.ENTER)
    ada = page.find(".modal .secret").get_attribute("value")
    assert rag.keys.check(str(ada)).key is not None
    page.click(".modal [type=submit]", "Done")
    assert "this page" in page.find("[aria-label='API keys'] tbody tr", "ada").text
    assert ada not in page.window.page_source
    page.click("[data-act=create-key]")
    page.find(".modal [name=name]").send_keys("bob")
    page.find(".modal [name=namespace]").send_keys(Keys.CONTROL, "a")
    page.find(".modal [name=namespace]").send_keys("harbour", Keys.ENTER)
    page.click(".modal [type=submit]", "Done")
    bob = page.find("[aria-label='API keys'] tbody tr", "bob")
    assert [bob.text.split()[i] for i in (1, 2)] == ["user", "harbour"]
    page.click("[aria-label='Revoke bob']")
    page.click(".modal [type=submit]", "Revoke")
    page.find("[aria-label='API keys'] tbody tr", "revoked")
    assert [bool(row.revoked_at) for row in rag.keys.list()] == [False, True]
    assert page.faults() == []


def test_a_failure_is_shown_with_the_id_that_the_log_has(
    page: Page, server: httpx.Client, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def fail(*_: object) -> None:
        raise RuntimeError("the lamp is out")

    monkeypatch.setattr(Collections, "page", fail)
    page.open("documents")
    name = page.find(".fault code").text
    assert f"request {name}: GET /v1/collections failed" in caplog.text


def test_last_uses_are_times(page: Page, server: httpx.Client) -> None:
    body = {"question": "Where do requests of leave go?", "collection": "handbook", "k": 1}
    name = server.post("/v1/answers", json={**body, "max_tokens": 1}).json()["sources"][0]["module"]
    at = get(server, f"/admin/modules/{row(server, name)['id']}")["used_at"]
    page.open("modules?sort=used_at")
    first, *others = page.until(lambda: page.all(".grid tr[data-id] .c-used_at"))
    assert first.text.endswith(("ago", "now"))
    assert {each.text for each in others} == {"never"}
    exact = first.find_element(By.CSS_SELECTOR, "time").get_attribute("title")
    assert datetime.fromisoformat(exact).timestamp() == int(at)
    page.click(".grid tr[data-id] .name")
    assert str(datetime.fromtimestamp(at).year) in page.find(".drawer .facts").text
    assert "#" not in page.find(".drawer .facts time").text


def test_modes_tell_how_far_they_are_from_exact(
    page: Page, rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.open("overview")
    assert page.find("[aria-label=Modes] .empty", "Every mode serves")
    far = GateResult("isolated", 24, 4.5, 0.25, 2.0, 6.0, 1.0, 0.75)
    near = GateResult("rooted", 24, 0.03, 0.96, 2.0, 6.0, 1.0, 0.75)
    monkeypatch.setattr(gate, "measure_modes", lambda *_: [near, far])
    rag.gate.measure(["rooted", "isolated"])
    name, distance, agreement, equal = page.find("[data-mode=rooted]").text.splitlines()
    assert (name, agreement) == ("rooted", "96 % of 24 first tokens agree")
    assert equal == "75 % of the answers are those of exact"
    assert distance.startswith("0.03 nats of 2.00 at most")
    assert page.find("[data-mode=rooted] b").text == "serves"
    assert page.find("[data-mode=isolated] b").text == "forced"


def test_refused_files_are_named_with_their_reasons(page: Page, tmp_path: Path) -> None:
    for name, content in (
        ("a.md", b"The lamp is green."),
        ("b.pdf", b"%PDF-1.7"),
        ("c.bin", b"\0"),
    ):
        (tmp_path / name).write_bytes(content)
    page.open("ingestion")
    page.find("[name=collection]").send_keys("mixed")
    picker = page.window.find_element(By.CSS_SELECTOR, "input[type=file]")
    picker.send_keys("\n".join(str(tmp_path / name) for name in ("a.md", "b.pdf", "c.bin")))
    page.click(".ingestform [type=submit]", "Ingest 3 files")
    assert "damaged" in page.find(".picked .refused", "b.pdf").text
    assert page.find(".picked .refused", "c.bin").find_element(By.CSS_SELECTOR, ".fault").text
    assert "a.md" not in page.find(".picked").text
    page.find(".job[data-status=done]", "mixed")
    page.click("[aria-label='Remove c.bin']")
    page.click("[aria-label='Remove b.pdf']")
    picker.send_keys(str(tmp_path / "b.pdf"))
    page.click(".ingestform [type=submit]", "Ingest 1 file")
    page.find(".toast.error", "1 file cannot be read")
    assert "damaged" in page.find(".picked .refused", "b.pdf").text


def test_names_from_outside_are_never_markup(
    page: Page, rag: RagCache, server: httpx.Client
) -> None:
    name = "<img src=x onerror=alert(1)>"
    rag.ingest(name, [SourceDocument(name, "The zeppelin is moored in hall four.", name)])
    question = {"question": "Where is the zeppelin moored?", "collection": name, "max_tokens": 1}
    assert server.post("/v1/answers", json=question).json()["sources"][0]["document"] == name
    for view in ("documents", "modules", "requests", "schemas"):
        page.open(view)
        page.until(lambda: name in page.window.execute_script("return document.body.textContent"))
        assert page.all("main img") == []


def test_the_description_of_the_api_asks_nobody_else(
    service: tuple[str, Service], opened: Opened
) -> None:
    page = opened(f"{service[0]}/docs")
    page.find(".opblock-summary-path", "/v1/answers")
    loaded = "return performance.getEntriesByType('resource').map(each => each.name)"
    addresses = page.window.execute_script(loaded)
    assert len(addresses) >= 3
    assert all(each.startswith((service[0], "data:")) for each in addresses)
    assert page.faults() == []


def test_the_page_asks_nobody_else() -> None:
    folder = Path(__file__).parents[3] / "api/ragcache_api/http/page"
    files = [each for each in folder.rglob("*") if each.suffix in (".html", ".css", ".js")]
    assert len(files) > 20
    for each in files:
        text = each.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, each
        assert "https://" not in text, each
        assert "innerHTML" not in text, each
