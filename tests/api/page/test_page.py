"""The operator's page in headless Chromium, against a stand-in that remembers what it was told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.api.page.conftest import Page
from tests.api.page.fake_server import ANSWER, FakeServer

pytestmark = pytest.mark.allow_hosts(["127.0.0.1", "::1"])
Opened = Callable[[str], Page]
VIEWS = ["overview", "modules", "reuse", "batch", "schemas", "ingestion", "ask"]


@pytest.fixture
def server() -> FakeServer:
    return FakeServer(10, pause=0.01)


@pytest.fixture
def page(server: FakeServer, opened: Opened) -> Iterator[Page]:
    with server.running() as address:
        yield opened(address)


@pytest.mark.parametrize("modules", [0, 10])
def test_every_view_opens_without_a_fault(opened: Opened, modules: int) -> None:
    with FakeServer(modules).running() as address:
        page = opened(address)
        for view in VIEWS:
            page.open(view)
            shown = page.find(f".view.{view}")
            page.until(
                lambda shown=shown: (
                    shown.text and not shown.find_elements(By.CSS_SELECTOR, ".loading")
                )
            )
            assert page.find("nav a[aria-current=page]").get_attribute("data-view") == view
            assert not shown.find_elements(By.CSS_SELECTOR, ".fault")
        assert page.faults() == []


def test_overview_shows_figures_tiers_and_series(page: Page) -> None:
    page.open("overview")
    assert page.find("[data-figure=finished] dd").text == "18,234"
    assert [each.get_attribute("data-tier") for each in page.all(".tier")] == [
        "device",
        "host",
        "disk",
    ]
    assert len(page.all(".plot rect")) > 60 * 5
    page.find(".plot").send_keys(Keys.ARROW_LEFT)
    assert "Computed" in page.find(".readout").text


def test_an_empty_service_gives_advice(opened: Opened) -> None:
    with FakeServer(0).running() as address:
        page = opened(address)
        page.open("modules")
        page.click(".empty a", "Ingest documents")
        assert page.find("h1").text == "Ingestion"


def test_ingest(page: Page, server: FakeServer, tmp_path: Path) -> None:
    for name in ("a.md", "b.md"):
        (tmp_path / name).write_text(f"The text of {name}.")
    page.open("ingestion")
    page.find("[name=collection]").send_keys("handbook")
    picker = page.window.find_element(By.CSS_SELECTOR, "input[type=file]")
    picker.send_keys(f"{tmp_path / 'a.md'}\n{tmp_path / 'b.md'}")
    page.click(".ingestform [type=submit]", "Ingest 2 files")
    assert "2 of 2" in page.find(".job[data-status=done]").text
    [call] = server.calls("POST", "/v1/collections/handbook/documents")
    assert call["files"] == [("a.md", "The text of a.md."), ("b.md", "The text of b.md.")]
    assert len(call["key"]) == 32


def test_ask_streams_an_answer_and_accounts_for_it(page: Page, server: FakeServer) -> None:
    page.open("ask")
    page.until(lambda: page.find("[name=collection]").get_attribute("value") == "handbook")
    page.find("[name=question]").send_keys("How long is the grace period?", Keys.ENTER)
    assert page.find(".headline", "%").text.endswith("tokens not computed")
    assert page.find(".said").text == ANSWER
    assert len(page.all(".tokenbars rect")) == len(ANSWER.split()) - 1
    used = [each.text.split("\n")[0] for each in page.all("[aria-label='Modules used'] td a")]
    [asked] = server.calls("POST", "/v1/answers")
    assert len(used) == asked["k"] == 4
    assert asked == {
        "question": "How long is the grace period?", "collection": "handbook", "k": 4,
        "mode": "rooted", "stream": True,
    }  # fmt: skip


def test_pin_and_unpin_in_the_table(page: Page, server: FakeServer) -> None:
    page.open("modules")
    row = page.find(".grid tr[data-id]").get_attribute("data-id")
    box = f".grid tr[data-id='{row}'] .pinbox"
    page.click(f"{box}[aria-pressed=false]")
    page.find(f"{box}[aria-pressed=true]")
    page.click(f"{box}[aria-pressed=true]")
    page.find(f"{box}[aria-pressed=false]")
    asked = [(method, path) for method, path, _ in server.received]
    assert asked == [("POST", f"/admin/modules/{row}/pin"), ("DELETE", f"/admin/modules/{row}/pin")]


def test_a_limit_is_set_and_lifted_in_the_drawer(page: Page, server: FakeServer) -> None:
    page.open("modules?search=leave")
    page.click(".grid tr[data-id='3'] .name")
    facts = page.find(".drawer .facts")
    assert "Expires\nnever" in facts.text
    page.click(".drawer [data-act=expire]")
    page.click(".modal [type=submit]", "Set")
    page.find(".toast.ok", "Limit set")
    page.until(lambda: "Expires\nnever" not in page.find(".drawer .facts").text)
    page.click(".drawer [data-act=expire]")
    page.click(".modal .choice", "Never")
    page.click(".modal [type=submit]", "Set")
    page.find(".toast.ok", "Limit lifted")
    page.until(lambda: "Expires\nnever" in page.find(".drawer .facts").text)
    asked = server.calls("POST", "/admin/modules/3/expire")
    assert asked == [{"seconds": 3600}, {"seconds": None}]


def test_many_are_warmed_at_once(page: Page, server: FakeServer) -> None:
    page.open("modules")
    page.find(".grid tr[data-id]")
    page.click(".grid thead input")
    page.click(".bulk [data-act=warm]")
    page.find(".toast.ok", "Warmed 10 modules")
    assert {path for _, path, _ in server.received} == {
        f"/admin/modules/{id}/warm" for id in range(1, 11)
    }


def test_evict_one_module_from_its_drawer(page: Page, server: FakeServer) -> None:
    page.open("modules?search=leave")
    page.click(".grid tr[data-id='3'] .name")
    assert "grace period" in page.find(".drawer pre").text
    page.click(".drawer [data-act=evict]")
    assert "disk" in page.find(".modal .preview table").text
    page.click(".modal footer button", "Cancel")
    assert server.calls("DELETE", "/admin/modules/3") == []
    page.click(".drawer [data-act=evict]")
    page.click(".modal [type=submit]", "Evict")
    page.find(".grid tr[data-id='3'] .chips", "none")
    assert server.calls("DELETE", "/admin/modules/3") == [None]


def test_evict_a_collection_after_a_dry_run(page: Page, server: FakeServer) -> None:
    page.open("modules?collection=handbook&tier=disk")
    page.find(".grid tr[data-id]")
    page.click("[data-act=evict-scope]")
    assert "10 states would go" in page.find(".modal .sum").text
    scope = {"collection": "handbook", "tier": "disk"}
    assert server.calls("POST", "/admin/evict?dry_run=true") == [scope]
    assert server.calls("POST", "/admin/evict") == []
    page.click(".modal [type=submit]", "Evict")
    page.find(".toast.ok", "Evicted 10 states")
    assert server.calls("POST", "/admin/evict") == [scope]
    page.find(".empty", "No module fits")


def test_a_refusal_is_shown_in_the_servers_words(page: Page) -> None:
    page.open("modules")
    page.click(".grid tr[data-id] .name")
    page.click(".drawer [data-act=move]")
    page.click(".modal [type=submit]", "Move")
    assert "device holds pinned states only" in page.find(".toast.error", "Tier full").text


def test_ten_thousand_modules_are_searched_sorted_and_scrolled(opened: Opened) -> None:
    server = FakeServer(10_000)
    by_hits = sorted(server.modules.values(), key=lambda each: -each["hits"])
    with server.running() as address:
        page = opened(address)
        page.open("modules")
        page.until(lambda: page.names()[:3] == [each["name"] for each in by_hits[:3]])
        assert len(page.all(".grid tbody tr")) < 60
        page.click("[data-sort=nbytes] button")
        largest = max(server.modules.values(), key=lambda each: each["nbytes"])
        page.until(lambda: page.names()[0] == largest["name"])
        assert page.find("[data-sort=nbytes]").get_attribute("aria-sort") == "descending"
        page.window.execute_script("document.querySelector('.gridview').scrollTop = 300 * 38")
        page.until(lambda: page.all(".grid tr[aria-rowindex='302'][data-id]"))
        page.find("[type=search]").send_keys("travel-17")
        found = sum("travel-17" in each["name"] for each in server.modules.values())
        page.find(".gridbox footer", f"{found} in all")
        assert all("travel-17" in name for name in page.names())
        assert "search=travel-17" in page.window.current_url


def test_the_last_of_ten_thousand_is_reached(opened: Opened) -> None:
    server = FakeServer(10_000)
    with server.running() as address:
        page = opened(address)
        page.open("modules?sort=id&descending=false")
        page.find(".grid tr[data-id]")
        page.window.execute_script("document.querySelector('.gridview').scrollTop = 1e9")
        page.find(".grid tr[aria-rowindex='10001'][data-id='10000']")


def test_the_modules_of_one_document(page: Page, server: FakeServer) -> None:
    server.modules[7]["document"] = server.modules[3]["document"]
    page.open("modules")
    page.click(".grid tr[data-id='3'] .name")
    page.click(".drawer dd a", "leave-000.md")
    page.find(".gridbox footer", "2 in all")
    page.click(".filters .only")
    page.find(".gridbox footer", "10 in all")


def test_rows_are_walked_by_keyboard(page: Page) -> None:
    page.open("modules")
    first, second = (page.names() if page.find(".grid tr[data-id]") else [])[:2]
    page.find(".grid tr[data-id]").send_keys(Keys.ARROW_DOWN)
    focused = page.window.switch_to.active_element
    assert second in focused.text
    assert first not in focused.text
    focused.send_keys(Keys.ENTER)
    assert page.find(".drawer h2").text == second


def test_the_key_is_asked_for_once_and_kept_in_the_tab(opened: Opened) -> None:
    with FakeServer(10, key="rk-right").running() as address:
        page = opened(address)
        page.open("overview")
        page.find("[name=key]").send_keys("rk-wrong", Keys.ENTER)
        page.find(".modal .fault", "did not accept")
        page.find("[name=key]").send_keys("rk-right", Keys.ENTER)
        page.find("[data-figure=kept]")
        page.open("modules")
        page.find(".grid tr[data-id]")
        assert page.all(".modal") == []
        assert page.window.execute_script("return localStorage.length") == 0
        page.click("[data-action=forget]")
        page.click(".modal footer button", "Cancel")
        assert "Unauthorized" in page.find(".fault strong").text


def test_dark_mode_follows_the_system_until_it_is_chosen(page: Page) -> None:
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    page.open("overview")
    dark = page.color("html")
    page.click("[data-action=appearance]", "System")
    page.find("[data-action=appearance]", "Light")
    light = page.color("html")
    assert dark == "rgba(14, 17, 22, 1)"
    assert light == "rgba(246, 247, 249, 1)"
    page.open("overview")
    assert page.color("html") == light
    page.window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_names_from_outside_are_never_markup(page: Page, server: FakeServer) -> None:
    name = "<img src=x onerror=alert(1)>"
    server.modules[1] |= {"name": name, "document": name, "hits": 10**6}
    for view in ("modules", "reuse", "batch", "schemas"):
        page.open(view)
        page.until(lambda: name in page.window.execute_script("return document.body.textContent"))
        assert page.all("main img") == []


def test_the_page_asks_nobody_else() -> None:
    folder = Path(__file__).parents[3] / "api/ragcache_api/http/page"
    files = [each for each in folder.rglob("*") if each.suffix in (".html", ".css", ".js")]
    assert len(files) > 20
    for each in files:
        text = each.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, each
        assert "https://" not in text, each
        assert "innerHTML" not in text, each
