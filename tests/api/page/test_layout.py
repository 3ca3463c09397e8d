"""How every view looks: axe's rules, contrast, and that everything fits and can be read."""

from __future__ import annotations

import httpx
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.api.http.server_process import Started
from tests.api.page import layout_checks
from tests.api.page.conftest import VIEWS, Page, asked, get, open_view, show_sources

pytestmark = [pytest.mark.allow_hosts(["127.0.0.1", "::1"]), pytest.mark.slow]
NARROW = 390
LONG = "minutes/2026/a-rather-long-name-of-a-protocol-of-the-commission-in-november.md"
COLLECTION = "minutes-of-the-commission-for-boats-and-quays-of-2026"
QUESTION = "Which ferry is orange?"
TEXT = """# Ferries

The pelican ferry is orange. See [the timetable](https://example.com/times).

## Times

| ferry | leaves |
|---|---|
| pelican | 7:40 |

1. Buy a ticket.
2. Go aboard with `ticket 7`.

> Bicycles travel free.

```
quay 3
```
"""


# A color does not depend on the width, nor does what overflows on the scheme.
LOOKS = [(1440, "dark"), (NARROW, "light")]
every_look = pytest.mark.parametrize(
    ("width", "scheme"),
    [
        pytest.param(width, scheme, marks=() if (width, scheme) in LOOKS else pytest.mark.nightly)
        for width in (1440, 768, NARROW)
        for scheme in ("light", "dark")
    ],
)


@pytest.fixture
def address(served: Started) -> str:
    return served.url


@pytest.fixture(scope="module")
def stored(served: Started) -> None:
    """A document with a long name that was asked for."""
    body = {"documents": [{"id": LONG, "text": TEXT, "metadata": {"year": 2026}}]}
    with httpx.Client(base_url=served.url, timeout=60) as client:
        job = client.post(f"/v1/collections/{COLLECTION}/documents", json=body).json()["id"]
        client.get(f"/v1/jobs/{job}", headers={"Accept": "text/event-stream"})  # until it has ended
        question = {"question": QUESTION, "collection": COLLECTION, "max_tokens": 1}
        assert client.post("/v1/answers", json=question).json()["sources"]


def fits(page: Page, view: str, width: int) -> None:
    assert layout_checks.axe_violations(page) == [], view
    assert layout_checks.overflow(page) <= 0, view
    assert layout_checks.pale_texts(page) == [], view
    assert layout_checks.unnamed_controls(page) == [], view
    assert width > NARROW or layout_checks.cut_texts(page) == [], view


@every_look
def test_every_view_fits_and_can_be_read(page: Page, stored: None, width: int, scheme: str) -> None:
    page.resize(width)
    page.prefer(scheme)
    for view in VIEWS:
        open_view(page, view)
        fits(page, view, width)
    page.open(f"collections?collection={COLLECTION}")
    page.click("td .link", LONG)
    page.find("dialog .reader h3", "Ferries")
    fits(page, "document", width)
    page.open(f"modules?search={LONG[:20]}")
    page.click(".c-name .link", LONG)
    page.find(".drawer table")
    fits(page, "module", width)
    assert page.faults() == []


@every_look
def test_asking_fits_and_can_be_read(page: Page, stored: None, width: int, scheme: str) -> None:
    page.resize(width)
    page.prefer(scheme)
    page.open_ask()
    page.find(".empty")
    fits(page, "welcome", width)
    asked(page, QUESTION, COLLECTION)
    show_sources(page)
    page.click(".cost summary")
    assert LONG in page.find("[aria-label='Modules used']").text
    fits(page, "answer", width)
    page.click("[aria-label='Modules used'] .link")
    page.find(".reader mark")
    fits(page, "document", width)
    page.find(".reader .text").send_keys(Keys.ESCAPE)
    page.until(lambda: not page.all(".reader"))
    page.click(".options summary")
    page.click("[data-act=filter]")
    fits(page, "options", width)
    page.click(".options summary")
    page.click("[data-act=add]")
    page.find("dialog .drop")
    fits(page, "upload", width)
    assert page.faults() == []


@every_look
def test_dialogs_and_refusals_fit_and_can_be_read(
    page: Page, stored: None, width: int, scheme: str
) -> None:
    page.resize(width)
    page.prefer(scheme)
    page.open(f"modules?search={LONG[:20]}")
    page.click(".c-name .link", LONG)
    for act in ("expire", "move", "evict"):
        page.click(f".drawer [data-act={act}]")
        page.find(".modal [type=submit]")
        fits(page, act, width)
        page.find(".modal [type=submit]").send_keys(Keys.ESCAPE)
        page.until(lambda: len(page.all("dialog")) == 1)
    page.open(f"modules?search={LONG[:20]}")
    page.click("tbody input")
    page.find(".bulk")
    fits(page, "bulk", width)
    page.open("keys")
    page.click("[data-act=create-key]")
    page.find(".modal [name=name]")
    fits(page, "key", width)
    page.open(f"collections?collection={COLLECTION}")
    page.click("[data-act=delete-collection]")
    page.find(".modal .sum")
    fits(page, "deletion", width)
    page.open_ask(COLLECTION)
    page.find(".composer [type=submit]:enabled")
    page.find("[name=question]").send_keys("ferry")
    page.click("[data-act=search]")
    page.find(".hits li")
    asked(page, "zzqx wvvk", COLLECTION)
    page.find(".said.refused")
    fits(page, "refusal", width)
    page.window.execute_script("sessionStorage.clear()")
    page.open_ask("none")
    page.find(".empty", "Choose a collection")
    fits(page, "choice", width)


def test_a_telephone_has_a_menu(page: Page) -> None:
    page.resize(NARROW)
    open_view(page, "overview")
    menu = page.find(".menubutton")
    assert not any(each.is_displayed() for each in page.all(".menu nav a"))
    menu.click()
    assert menu.get_attribute("aria-expanded") == "true"
    page.find(".menu nav a", "Modules").send_keys(Keys.ESCAPE)
    page.until(lambda: menu.get_attribute("aria-expanded") == "false")
    assert page.window.switch_to.active_element == menu
    menu.click()
    page.click(".menu nav a", "Modules")
    page.find(".view.modules")
    assert not page.all(".menu.open")


def test_names_and_counts_of_modules_stay_on_a_telephone(
    page: Page, stored: None, server: httpx.Client
) -> None:
    page.resize(NARROW)
    page.open(f"modules?search={LONG[:20]}")
    [module] = get(server, "/admin/modules", search=LONG)["items"]
    row = page.find(f"tr[data-id='{module['id']}']")
    assert row.rect["x"] + row.rect["width"] <= NARROW
    cells = {
        each.get_attribute("class").split()[-1]: each
        for each in row.find_elements(By.CSS_SELECTOR, "td")
    }
    shown = {name: cell.text for name, cell in cells.items() if cell.is_displayed()}
    assert shown["c-hits"].endswith(str(module["hits"]))
    assert shown["c-nbytes"].endswith(" KiB")
    assert shown["c-used_at"].endswith(("ago", "now"))
    assert shown["c-tiers"]
    page.click(f"tr[data-id='{module['id']}'] .c-name .link")
    assert page.find(".drawer h2").text == module["name"]
