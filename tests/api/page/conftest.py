"""A headless Chromium, and the two pages as a person uses them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service as DriverService
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from ragcache import RagCache
from ragcache.models import LoadedModel
from ragcache_api.http.service import Service
from tests.api.http.server_process import Started, start_server
from tests.api.page import seeding
from tests.conftest import write_notes

SECONDS = 20
VIEWS = (
    "overview", "requests", "collections", "modules", "kept", "jobs", "modes", "replicas", "keys",
)  # fmt: skip
# One process draws every page: others would be started ahead of each visit, and not be needed.
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--in-process-gpu",
    "--disable-dev-shm-usage", "--disable-site-isolation-trials", "--renderer-process-limit=1",
    "--disable-features=BackForwardCache,SpareRendererForSitePerProcess,"
    "ProactivelySwapBrowsingInstance",
)  # fmt: skip


@pytest.fixture(scope="session")
def chromium() -> Iterator[webdriver.Chrome]:
    """RAGCACHE_TEST_CHROMIUM names the browser; where it is not set, one on the path will do."""
    named = os.environ.get("RAGCACHE_TEST_CHROMIUM")
    browser, driver = named or shutil.which("chromium"), shutil.which("chromedriver")
    if named is None and (browser is None or driver is None):
        pytest.skip("no chromium with its driver here (.ci/chromium installs them)")
    options = webdriver.ChromeOptions()
    options.binary_location = str(browser)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in FLAGS:
        options.add_argument(flag)
    window = webdriver.Chrome(options=options, service=DriverService(driver))
    window.set_window_size(1440, 1000)
    yield window
    window.quit()


# One script rather than several of the driver's for each element.
_FIND = """
const [selector, text] = arguments;
const isVisible = (node) =>
  node.checkVisibility({ opacityProperty: true, visibilityProperty: true }) &&
  node.getClientRects().length;
return [...document.querySelectorAll(selector)].find((each) =>
  isVisible(each.closest('select') ?? each) && (each.innerText ?? each.textContent).includes(text));
"""


class Page:
    """The page as a person sees and uses it. Finding waits until there is something to find.

    `address` is the service's, without a slash at its end.
    """

    def __init__(self, window: webdriver.Chrome, address: str, seconds: float = SECONDS) -> None:
        self.window, self.address, self.seconds = window, address, seconds

    def open(self, view: str) -> None:
        """Open a view of the operator's page."""
        self.window.get("about:blank")
        self.window.get(f"{self.address}/admin/#/{view}")

    def open_ask(self, collection: str = "") -> None:
        """Open the page that asks, with a collection that its address holds."""
        self.window.get("about:blank")
        query = urlencode({"collection": collection}) if collection else ""
        self.window.get(f"{self.address}/?{query}")

    def until(self, holds: Callable[[], Any]) -> Any:
        wait = WebDriverWait(self.window, self.seconds, 0.05, ignored_exceptions=[Exception])
        return wait.until(lambda _: holds())

    def all(self, selector: str) -> list[WebElement]:
        return self.window.find_elements(By.CSS_SELECTOR, selector)

    def find(self, selector: str, text: str = "") -> WebElement:
        """The first visible element of a selector that holds a text."""
        element: WebElement = self.until(lambda: self.window.execute_script(_FIND, selector, text))
        return element

    def click(self, selector: str, text: str = "") -> None:
        """Once it can be clicked."""

        def clicked() -> bool:
            self.find(selector, text).click()
            return True

        self.until(clicked)

    def names(self) -> list[str]:
        """Return the names of the listed modules, in order."""
        rows = "[...document.querySelectorAll('.view.modules .c-name .name')]"
        names: list[str] = self.window.execute_script(f"return {rows}.map(e => e.textContent)")
        return names

    def color(self, selector: str, name: str = "background-color") -> str:
        return str(self.find(selector).value_of_css_property(name))

    def resize(self, width: int, height: int = 1000) -> None:
        """As wide as a telephone, too: a window cannot be."""
        self.window.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`, as the system would say; "" for what it says."""
        features = [{"name": "prefers-color-scheme", "value": scheme}] if scheme else []
        self.window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def faults(self) -> list[str]:
        """Return the browser's complaints: failed scripts, and requests refused by the policy."""
        severe = [each for each in self.window.get_log("browser") if each["level"] == "SEVERE"]
        told = [str(each["message"]) for each in severe]
        return [each for each in told if "/favicon.ico" not in each]  # of a bare picture


def get(server: httpx.Client, path: str, **parameters: Any) -> Any:
    response = server.get(path, params=parameters)
    assert response.status_code == 200, response.text
    return response.json()


def tier(server: httpx.Client, name: str) -> dict[str, Any]:
    [found] = [each for each in get(server, "/admin/tiers")["items"] if each["name"] == name]
    return dict(found)


def module(server: httpx.Client, document: str) -> dict[str, Any]:
    [found] = get(server, "/admin/modules", document=document)["items"]
    return dict(found)


def give_key(page: Page, secret: str) -> None:
    """Type a key into the dialog that asks for one, once it can be typed into."""

    def typed() -> bool:
        page.find("dialog [name=key]").send_keys(secret, Keys.ENTER)
        return True

    page.until(typed)


def open_view(page: Page, view: str) -> None:
    """Opens a view of operators and waits until it shows what it read, without a fault."""
    page.open(view)
    # the view may be drawn again meanwhile, so that an element found before would be stale
    page.until(lambda: page.find(f".view.{view}").text and not page.all(".loading"))
    current = page.all("nav a[aria-current=page]")
    assert [each.get_attribute("data-view") for each in current] == [view]
    assert [fault.text for fault in page.all(".fault[role=alert]")] == [], view


def chosen(page: Page) -> str:
    """Return the collection that the page asks."""
    return str(page.window.find_element(By.NAME, "collection").get_attribute("value"))


def ask(page: Page, question: str) -> None:
    """Ask the chosen collection, and wait until the answer has ended."""
    before = len(page.all(".exchange"))
    page.find("[name=question]").send_keys(question, Keys.ENTER)
    page.until(lambda: len(page.all(".exchange")) == before + 1)
    page.until(lambda: page.all(".exchange")[-1].get_attribute("data-status") != "streaming")


def asked(page: Page, question: str, collection: str) -> None:
    """Open the page, ask, and wait until the answer has ended."""
    page.window.execute_script("sessionStorage.removeItem('ragcache.conversation')")
    page.open_ask(collection)
    page.until(lambda: chosen(page) == collection)
    page.find(".composer [type=submit]:enabled")
    ask(page, question)
    page.find(".question", question)


def show_sources(page: Page) -> None:
    """Unfold the sources of the answer, which are unfolded already without a quotation."""
    page.window.execute_script("arguments[0].open = true", page.find(".sources"))


def drop(page: Page, *files: Path, onto: str = ".drop") -> None:
    """Drag files or folders from outside the browser, as the browser itself sees it."""
    zone = page.find(onto).rect
    where = {"x": zone["x"] + zone["width"] / 2, "y": zone["y"] + zone["height"] / 2}
    held = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        page.window.execute_cdp_cmd(
            "Input.dispatchDragEvent", {"type": kind, "data": held, **where}
        )


@pytest.fixture
def opened(chromium: webdriver.Chrome) -> Iterator[Callable[[str], Page]]:
    """Opens the pages of a service in a tab without memory of the tests before."""
    chromium.get_log("browser")

    def open_page(address: str) -> Page:
        address = address.rstrip("/")
        chromium.get(f"{address}/page/icon.svg")
        chromium.execute_script("sessionStorage.clear(); localStorage.clear()")
        return Page(chromium, address)

    yield open_page
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    Page(chromium, "").prefer("")
    chromium.get("about:blank")


@pytest.fixture(scope="session")
def served(
    reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:  # fmt: skip
    """A server process over three documents."""
    folder = tmp_path_factory.mktemp("console")
    with RagCache.open(folder / "state", reader) as opened:
        opened.ingest("notes", write_notes(folder / "notes"))
    started = start_server(folder / "state", "--set", "max_tokens=12")
    yield started
    started.stop()


@pytest.fixture(scope="session")
def handbook(reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder of ten modules, of which tests get copies."""
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
    """The service over the handbook, in this process, and its address."""
    with seeding.serve_page(rag) as address_and_service:
        yield address_and_service


@pytest.fixture
def address(service: tuple[str, Service]) -> str:
    """Address of the service that `server` and `page` talk to.

    A file whose tests talk to `served` has a fixture of this name.
    """
    return service[0]


@pytest.fixture
def server(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client


@pytest.fixture
def page(address: str, opened: Callable[[str], Page]) -> Page:
    return opened(address)
