"""The operator's page in headless Chromium over the service in this process.

Each test has its own copy of ten modules, or reads one ledger of ten thousand.
"""

from __future__ import annotations

import hashlib
import json
import re
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
from ragcache.modes import ROOTED
from ragcache.pipeline import gate
from ragcache.pipeline.gate_measurement import GateResult, SizeResult
from ragcache_api.http.browser import PAGE
from ragcache_api.http.service import Service
from tests.api.page import seeding
from tests.api.page.conftest import VIEWS, Page, ask, get, open_view
from tests.api.page.proxy import prefixed
from tests.ragcache.test_recurrence import passage

pytestmark = [pytest.mark.allow_hosts(["127.0.0.1", "::1"]), pytest.mark.slow]
Opened = Callable[[str], Page]
MODULES = 10_000


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
        page = opened(address)
        for view in VIEWS:
            open_view(page, view)
        page.open("modules")
        page.click(".empty a", "Add documents")
        assert page.find("h1").text == "Jobs"
        page.open_ask()
        page.find(".empty", "Nothing to ask yet")
        assert page.faults() == []


def test_overview_shows_figures_tiers_and_series(page: Page, service: tuple[str, Service]) -> None:
    seeding.record_hour(service[1])
    page.open("overview")
    assert page.find("[data-figure=finished] dd").text == "18,234"
    assert [each.get_attribute("data-tier") for each in page.all("[data-tier]")] == ["host", "disk"]
    assert len(page.all(".plot canvas")) == 2
    assert page.find(".readout li", "Computed").text == "Computed"
    page.find(".plot").send_keys(Keys.ARROW_LEFT)
    page.until(lambda: page.find(".readout li", "Computed").find_element(By.TAG_NAME, "b"))
    assert re.fullmatch(r"Computed\s[\d.]+( k)?", page.find(".readout li", "Computed").text)
    bar = page.find("[data-memory=host] [role=img]").get_attribute("aria-label")
    for part in ("This process", "Mapped files", "Others", "Free"):
        assert re.search(rf"{part} [\d.,]+ [KMGT]iB", bar), bar
    assert "available of" in page.find("[data-memory=host]").text


def test_a_limit_is_set_and_lifted_in_the_drawer(page: Page, server: httpx.Client) -> None:
    page.open("modules?search=travel")
    page.click(".c-name .link")
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
    page.click(".modal [name=hours] option[value=never]")
    page.click(".modal [type=submit]", "Set")
    page.find(".toast.ok", "Limit lifted")
    page.until(lambda: "Expires\nnever" in page.find(".drawer .facts").text)
    assert row(server, "travel.md#1")["expires_at"] is None


def test_many_are_warmed_at_once(page: Page, server: httpx.Client) -> None:
    server.post("/admin/evict", json={})
    page.open("modules")
    page.find(".c-name .link")
    page.click("thead input")
    page.click(".bulk [data-act=warm]")
    page.find(".toast.ok", "Warmed 10 modules")
    for each in get(server, "/admin/modules")["items"]:
        assert set(each["tiers"]) == {"host", "disk"}


def test_evict_a_collection_after_a_dry_run(page: Page, server: httpx.Client) -> None:
    page.open("modules?collection=handbook&tier=disk")
    page.find(".c-name .link")
    page.click("[data-act=evict-scope]")
    assert "10 states would go" in page.find(".modal .sum").text
    assert get(server, "/admin/modules", tier="disk")["total"] == 10
    page.click(".modal [type=submit]", "Evict")
    page.find(".toast.ok", "Evicted 10 states")
    page.find(".empty", "No module fits")
    assert get(server, "/admin/modules", tier="disk")["total"] == 0


def test_a_refusal_is_shown_in_the_servers_words(page: Page, server: httpx.Client) -> None:
    page.open("modules?search=travel")
    page.click(".c-name .link")
    page.click(".drawer [data-act=move]")
    page.find(".modal [name=tier]")
    server.delete("/v1/collections/handbook/documents/travel.md")
    page.click(".modal [type=submit]", "Move")
    assert "there is no module" in page.find(".toast.error", "Not found").text


def test_ten_thousand_modules_are_searched_sorted_and_paged(
    many: httpx.Client, opened: Opened
) -> None:
    page = opened(str(many.base_url))
    page.open("modules")
    by_hits = get(many, "/admin/modules", sort="hits", descending=True, limit=3)["items"]
    page.until(lambda: page.names()[:3] == [each["name"] for each in by_hits])
    assert by_hits[0]["hits"] == 9972
    assert len(page.names()) == 100
    page.click("[data-sort=nbytes] button")
    largest = get(many, "/admin/modules", sort="nbytes", descending=True, limit=1)["items"][0]
    page.until(lambda: page.names()[0] == largest["name"])
    assert largest["nbytes"] == 4096 + 10_006
    assert page.find("[data-sort=nbytes]").get_attribute("aria-sort") == "descending"
    page.click("[data-page=on]")
    page.find("[data-figure=range]", "101–200 of 10,000")
    third = get(many, "/admin/modules", sort="nbytes", descending=True, cursor=200, limit=1)
    page.click("[data-page=on]")
    page.until(lambda: page.names()[0] == third["items"][0]["name"])
    page.click("[data-page=last]")
    page.find("[data-figure=range]", "9,901–10,000 of 10,000")
    smallest = get(many, "/admin/modules", sort="nbytes", limit=1)["items"][0]
    assert page.names()[-1] == smallest["name"]
    page.click("[data-page=back]")
    page.find("[data-figure=range]", "9,801–9,900 of 10,000")
    page.click("[data-page=first]")
    page.find("[data-figure=range]", "1–100 of 10,000")
    page.find("[type=search]").send_keys("m17")
    found = sum("m17" in f"m{number}" for number in range(MODULES))
    page.find("[data-figure=range]", f"of {found}")
    assert all("m17" in name for name in page.names())
    assert "search=m17" in page.window.current_url


def test_the_modules_of_one_document(page: Page) -> None:
    page.open("modules?search=leave")
    page.click(".c-name .link")
    page.click(".drawer dd a", "leave.md")
    page.find("[data-figure=range]", "of 2")
    page.click(".filters .only button", "Read it")
    assert page.find(".reader h3").text == "Leave"
    page.click(".modal [aria-label=Close]")
    page.click(".filters .only [aria-label='All documents']")
    page.find("[data-figure=range]", f"of {len(seeding.SUBJECTS) + 2}")


def test_a_module_is_opened_and_left_by_keyboard(page: Page) -> None:
    page.open("modules")
    page.find(".c-name .link")
    name = page.names()[0]
    page.find("[type=search]").click()
    for _ in range(30):
        focused = page.window.switch_to.active_element
        if focused.text == name:
            break
        focused.send_keys(Keys.TAB)
    focused.send_keys(Keys.ENTER)
    assert page.find(".drawer h2").text == name
    page.window.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.until(lambda: not page.all(".drawer"))
    assert page.window.switch_to.active_element.text == name


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
    page.open("collections?collection=handbook")
    page.click("[aria-label='Delete leave.md']")
    said = page.find(".modal .sum").text
    assert "1 document with 2 modules, and 2 states of" in said
    assert "KiB" in page.find(".modal .legend", "Disk").text
    assert page.window.switch_to.active_element.text == "Cancel"
    page.window.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.until(lambda: not page.all(".modal"))
    assert get(server, "/v1/collections/handbook/documents")["total"] == len(seeding.SUBJECTS) + 1
    page.click("[aria-label='Delete leave.md']")
    page.click(".modal [type=submit]:enabled", "Delete")
    page.find(".toast.ok", "Deleted leave.md")
    page.find("[data-figure=range]", f"of {len(seeding.SUBJECTS)}")
    assert server.get("/v1/collections/handbook/documents/leave.md").status_code == 404
    for name in seeding.SUBJECTS[:2]:
        page.click(f"tr[data-id='{name}.md'] input")
    page.click(".bulk [data-act=delete]")
    page.find(".modal .sum", "2 documents with 2 modules")
    page.click(".modal [type=submit]:enabled", "Delete")
    page.find("[data-figure=range]", "of 6")
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
    assert "this page" in page.find(".view.keys tbody tr", "ada").text
    assert ada not in page.window.page_source
    page.click("[data-act=create-key]")
    page.find(".modal [name=name]").send_keys("bob")
    page.find(".modal [name=namespace]").send_keys(Keys.CONTROL, "a")
    page.find(".modal [name=namespace]").send_keys("harbour", Keys.ENTER)
    page.click(".modal [type=submit]", "Done")
    bob = page.find(".view.keys tbody tr", "bob")
    assert [bob.text.split()[i] for i in (1, 2)] == ["user", "harbour"]
    page.click("[aria-label='Revoke bob']")
    page.click(".modal [type=submit]", "Revoke")
    page.find(".view.keys tbody tr", "revoked")
    assert [bool(row.revoked_at) for row in rag.keys.list()] == [False, True]
    assert page.faults() == []


def test_a_failure_is_shown_with_the_id_that_the_log_has(
    page: Page, server: httpx.Client, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def fail(*_: object) -> None:
        raise RuntimeError("the lamp is out")

    monkeypatch.setattr(Collections, "page", fail)
    page.open("collections")
    name = page.find(".fault code").text
    assert f"request {name}: GET /v1/collections failed" in caplog.text


def test_last_uses_are_times(page: Page, server: httpx.Client) -> None:
    body = {"question": "Where do requests of leave go?", "collection": "handbook", "k": 1}
    name = server.post("/v1/answers", json={**body, "max_tokens": 1}).json()["sources"][0]["module"]
    at = get(server, f"/admin/modules/{row(server, name)['id']}")["used_at"]
    page.open("modules?sort=used_at")
    first, *others = page.until(lambda: page.all("tbody .c-used_at"))
    assert first.text.endswith(("ago", "now"))
    assert {each.text for each in others} == {"never"}
    shown = first.find_element(By.CSS_SELECTOR, "time")
    exact = datetime.fromisoformat(shown.get_attribute("datetime"))
    assert exact.timestamp() == int(at)
    assert f"{exact.astimezone():%Y, %H:%M}" in shown.get_attribute("title")
    page.click(".c-name .link")
    assert str(datetime.fromtimestamp(at).year) in page.find(".drawer .facts").text
    assert "#" not in page.find(".drawer .facts time").text


def test_modes_tell_how_far_they_are_from_exact(
    page: Page, rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.open("modes")
    assert page.find(".view.modes .empty", "Every mode serves")
    far = GateResult("isolated", 24, 4.5, 0.25, 2.0, 6.0, 1.0, 0.75)
    near = GateResult("rooted", 24, 0.03, 0.96, 2.0, 6.0, 1.0, 0.75)
    size = SizeResult(4, 384, 8, 0.05, 0.5)
    monkeypatch.setattr(gate, "measure_modes", lambda *_: [near, far])
    monkeypatch.setattr(gate, "measure_sizes", lambda *_: {ROOTED: (size,)})
    rag.gate.measure_sizes(["rooted", "isolated"])
    cells = page.find("[data-mode=rooted]").find_elements(By.CSS_SELECTOR, "td")
    told = ["rooted", "serves", "0.030", "2.00", "6.00", "96 % of 24", "75 %", "4 × 384: 50 %"]
    assert [each.text for each in cells] == told
    assert page.find("[data-mode=isolated] .state").text == "forced"


def test_names_from_outside_are_never_markup(
    page: Page, rag: RagCache, server: httpx.Client
) -> None:
    name = "<img src=x onerror=alert(1)>"
    rag.ingest(name, [SourceDocument(name, "The zeppelin is moored in hall four.", name)])
    question = {"question": "Where is the zeppelin moored?", "collection": name, "max_tokens": 1}
    assert server.post("/v1/answers", json=question).json()["sources"][0]["document"] == name
    for view in ("collections", "modules", "requests"):
        page.open(view)
        page.until(lambda: name in page.window.execute_script("return document.body.textContent"))
        assert page.all("main img") == []
    page.open_ask()
    page.find("[name=collection] option", name)
    assert page.all("main img") == []


def test_the_description_of_the_api_asks_nobody_else(
    service: tuple[str, Service], opened: Opened
) -> None:
    page = opened(service[0])
    page.window.get(f"{service[0]}/docs")
    page.find(".opblock-summary-path", "/v1/answers")
    loaded = "return performance.getEntriesByType('resource').map(each => each.name)"
    addresses = page.window.execute_script(loaded)
    assert len(addresses) >= 3
    assert all(each.startswith((service[0], "data:")) for each in addresses)
    assert page.faults() == []


def test_users_pins_are_seen_and_ended(page: Page, rag: RagCache, server: httpx.Client) -> None:
    body = {"collection": "handbook", "documents": ["travel.md"]}
    assert server.post("/v1/pins", json=body).status_code == 201
    page.open("kept")
    assert "travel.md" in page.find('[aria-label="Users\' pins"] tbody tr').text
    page.click("[data-act=end-pin]")
    page.click(".modal [type=submit]", "End pin")
    page.find(".toast.ok", "The pin has ended")
    page.find(".empty", "No pins")
    assert rag.pins.list() == []


def test_conversations_bytes_and_read_tokens_by_tier(
    page: Page, rag: RagCache, server: httpx.Client
) -> None:
    messages = [{"role": "user", "content": passage(1, 9)}]
    for question in ("Who?", "Why?"):
        body = {"messages": messages, "max_tokens": 2}
        told = server.post("/v1/chat/completions", json=body)
        rag.internals.shared.keeping.submit(lambda: None).result()
        answer = told.json()["choices"][0]["message"]["content"]
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": question},
        ]
    page.open("kept")
    [(tier, tokens)] = rag.modules.conversations.resumed_tokens().items()
    assert tier == "host"
    assert f"{tokens:,}" in page.find("[data-bar=resumed] .legend").text
    assert "iB" in page.find('[aria-label^="Conversations:"]').get_attribute("aria-label")
    rag.modules.conversations.delete()


def test_a_second_language_is_whole_and_stays(page: Page) -> None:
    page.open("modules")
    page.find("[name=language] option[value=de]").click()
    page.find("h1", "Module")
    page.find("nav a", "Überblick")
    assert page.window.execute_script("return document.documentElement.lang") == "de"
    page.open_ask()
    page.find(".composer [type=submit]", "Fragen")


def test_both_pages_work_below_any_prefix(service: tuple[str, Service], opened: Opened) -> None:
    with prefixed(service[0], "/tools/rag") as address:
        page = opened(address)
        page.open("collections")
        page.click("td a.button", "Ask")
        page.until(lambda: "collection=handbook" in page.window.current_url)
        ask(page, "Where do requests of leave go?")
        page.find(".said .markdown")
        page.click(".top a", "Operate")
        page.find("[data-figure=documents]")
        assert page.window.current_url.startswith(f"{address}/admin/")
        assert page.faults() == []


def test_strings_are_whole_in_both_languages() -> None:
    strings = json.loads((PAGE / "js/strings.json").read_text(encoding="utf-8"))
    code = "\n".join(path.read_text(encoding="utf-8") for path in (PAGE / "js").rglob("*.js"))
    for name, (english, german) in strings.items():
        assert min(len(english), len(german)) > 0, name
        assert english.count("|") == german.count("|"), name
        fields = [sorted(set(re.findall(r"{\w+}", text))) for text in (english, german)]
        assert fields[0] == fields[1], name
    called = set(re.findall(r'\bt\("([\w:]+)"', code))
    assert called <= strings.keys(), called - strings.keys()
    made = re.findall(r"\bt\(`(\w+_)\$", code) + re.findall(r'word(?:ed)?\("(\w+)"', code)
    unused = [name for name in strings if not re.search(rf"\b{name}\b", code)]
    assert [name for name in unused if not name.startswith(("drain_", "resume_", *made))] == []


def test_the_files_of_others_are_those_of_their_digests() -> None:
    for folder in (PAGE / "vendor", Path(__file__).parent / "vendor"):
        listed = (folder / "SHA256SUMS").read_text().splitlines()
        digests = {name: digest for digest, name in (line.split() for line in listed)}
        files = [*folder.glob("*.js"), *folder.glob("*.css")]
        assert {each.name for each in files} == digests.keys()
        for each in files:
            assert hashlib.sha256(each.read_bytes()).hexdigest() == digests[each.name], each


def test_the_page_asks_nobody_else_and_parses_no_text_as_html() -> None:
    files = [
        each
        for each in PAGE.rglob("*")
        if each.suffix in (".html", ".css", ".js") and each.parent.name != "vendor"
    ]
    assert len(files) > 20
    lines = 0
    for each in files:
        text = each.read_text(encoding="utf-8")
        lines += text.count("\n")
        assert not re.search(r"https?://\w", text), each
        for parses in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert parses not in text, each
    assert lines <= 3000
