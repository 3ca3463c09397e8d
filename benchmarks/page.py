"""Measures the two pages in Chromium, and takes pictures of every view.

    python benchmarks/page.py measure
    python benchmarks/page.py pictures docs/images/page

`measure` reports the lines of the pages, the first paint with an empty cache, the layout shifts and
the frames while 50 tokens a second arrive (by the browser's tracing), and the time of a page of a
long table in every order and filter. Each figure is a time of this machine. Both commands need
chromium and chromedriver on the path.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import uvicorn
from harness import empty_schema
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from starlette.types import ASGIApp, Receive, Scope, Send
from tiers import fill_ledger, vary_states
from websocket import create_connection

from ragcache import RagCache
from ragcache_api.http import ServiceSettings, create_app
from ragcache_api.http.browser import PAGE

app = typer.Typer(add_completion=False, no_args_is_help=True)
HANDBOOK = Path(__file__).parent.parent / "examples" / "handbook"
QUESTION = "Who do I ring first if the cold store alarm goes off?"
SIZES = {"1440": (1440, 900), "390": (390, 844)}
VIEWS = (
    "overview", "requests", "collections", "modules", "kept", "jobs", "modes", "replicas", "keys",
)  # fmt: skip
TOKENS_A_SECOND = 50
TRACED = "toplevel,devtools.timeline,disabled-by-default-devtools.timeline.frame"
TEXT = (
    "## Part {n}\n\nThe **ferry** leaves the quay at *seven*, see [1].\n\n- one rope\n- two "
    "fenders\n\n| ferry | leaves |\n|---|---|\n| pelican | 7:40 |\n\n"
)
WATCH = """
const frame = () => requestAnimationFrame(frame);
frame();
window.shifts = 0;
new PerformanceObserver((list) => {
  for (const each of list.getEntries()) if (!each.hadRecentInput) window.shifts += each.value;
}).observe({ type: 'layout-shift', buffered: true });
"""
"""Script that counts layout shifts, and asks for frames where nothing is drawn."""
ORDERS = ("id", "name", "nbytes", "hits", "used_at")
FILTERS: dict[str, dict[str, str]] = {
    "all": {},
    "a collection": {"collection": "bench"},
    "a tier": {"tier": "disk"},
    "pinned": {"pinned": "true"},
    "a search that few fit": {"search": "m777"},
    "a search that all fit": {"search": "m"},
    "a tier and a search": {"tier": "disk", "search": "m"},
}
TURN = """
const [button, done] = arguments;
const range = document.querySelector('[data-figure=range]');
const [before, begun] = [range.textContent, performance.now()];
const look = () => range.textContent === before ? requestAnimationFrame(look)
  : requestAnimationFrame(() => done(performance.now() - begun));
button.click();
look();
"""


class PacedChat:
    """ASGI middleware that answers chats itself, with so many tokens a second."""

    def __init__(self, service: ASGIApp, tokens: int) -> None:
        self._service, self._tokens = service, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") != "/v1/chat/completions":
            await self._service(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        text = "".join(TEXT.format(n=n) for n in range(self._tokens))
        begun = time.monotonic()
        for number in range(self._tokens):
            piece = {"choices": [{"delta": {"content": text[number * 5 : number * 5 + 5]}}]}
            await self._event(send, json.dumps(piece))
            await asyncio.sleep(max(0, begun + number / TOKENS_A_SECOND - time.monotonic()))
        end: dict[str, Any] = {
            "mode": "rooted",
            "finish_reason": "stop",
            "spans": [],
            "confidence": None,
        }
        await self._event(send, json.dumps({"choices": [], "ragcache": end, "sources": []}))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _event(self, send: Send, data: str) -> None:
        body = f"data: {data}\n\n".encode()
        await send({"type": "http.response.body", "body": body, "more_body": True})


@contextmanager
def served(rag: RagCache, around: Callable[[ASGIApp], ASGIApp] = lambda app: app) -> Iterator[str]:
    """Serve a folder in a thread, and yield the address."""
    application = around(create_app(rag, ServiceSettings.read()))
    server = uvicorn.Server(uvicorn.Config(application, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def browser() -> Iterator[webdriver.Chrome]:
    """Open a Chromium with an empty profile."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    window = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        resize(window, *SIZES["1440"])
        yield window
    finally:
        window.quit()


def resize(window: webdriver.Chrome, width: int, height: int) -> None:
    """Give the page a size, which may be smaller than a window's."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def wait(holds: Callable[[], Any], seconds: float = 60) -> None:
    """Wait until something holds. Raises `TimeoutError`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(Exception):  # the page is being drawn
            if holds():
                return
        time.sleep(0.05)
    raise TimeoutError("the page did not come to show what was waited for")


def ask(window: webdriver.Chrome) -> None:
    """Ask the question, without waiting for the answer."""
    wait(lambda: window.find_element(By.CSS_SELECTOR, ".composer [type=submit]").is_enabled())
    window.find_element(By.NAME, "question").send_keys(QUESTION, Keys.ENTER)


@app.command()
def measure(
    runs: Annotated[int, typer.Option(help="First paints, and turns of the table.")] = 9,
    seconds: Annotated[int, typer.Option(help="Seconds of the streamed answer.")] = 10,
    modules: Annotated[int, typer.Option(help="Modules of the long table.")] = 100_000,
    ledger: Annotated[str, typer.Option(help="A PostgreSQL database for the table, too.")] = "",
) -> None:
    """Measure first paint, layout shifts, frames and the long table."""
    figures: dict[str, Any] = {"lines of JavaScript, CSS and HTML": count_lines()}
    with tempfile.TemporaryDirectory() as folder:
        with RagCache.open(Path(folder) / "handbook") as rag:
            rag.ingest("handbook", [HANDBOOK])
            with served(rag) as address:
                _prepare(address)
                for path in ("/", "/admin/"):
                    figures[f"first paint {path}"] = _paint(address + path, runs)
            with served(rag, lambda app: PacedChat(app, TOKENS_A_SECOND * seconds)) as address:
                figures |= _streaming(address, seconds)
        figures |= _long(Path(folder) / "long", modules, runs)
        if ledger:
            with empty_schema(ledger) as url:
                figures |= _long(Path(folder) / "shared", modules, runs, url)
    for name, value in figures.items():
        typer.echo(f"{name}: {value}")


def count_lines() -> int:
    """Return the lines of the pages' own files."""
    own = (file for file in PAGE.rglob("*.*") if file.suffix in (".js", ".css", ".html"))
    return sum(file.read_text().count("\n") for file in own if file.parent.name != "vendor")


def _paint(address: str, runs: int) -> str:
    script = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    times = []
    for _ in range(runs):
        with browser() as window:  # a new profile: nothing is cached
            window.get(address)
            wait(lambda: window.execute_script(script))
            times.append(window.execute_script(script))
    return f"{statistics.median(times):.0f} ms (most {max(times):.0f})"


def _streaming(address: str, seconds: int) -> dict[str, str]:
    with browser() as window:
        window.get(address)
        ask(window)
        time.sleep(1)  # the first piece, and the layout of a new exchange
        window.execute_script(WATCH)
        events = trace(window, seconds - 2)
        shifts = window.execute_script("return window.shifts")
    [page] = {each["pid"] for each in events if each["name"] == "UpdateLayoutTree"}
    begun = sorted(
        each["ts"]
        for each in events
        if each["name"] == "BeginMainThreadFrame" and each["pid"] == page
    )
    span = (begun[-1] - begun[0]) / 1e6
    gaps = [(after - before) / 1e3 for before, after in pairwise(begun)]
    work = [each for each in events if each["name"].endswith("RunTask") and each["pid"] == page]
    busy = sum(each.get("tdur", each.get("dur", 0)) for each in work) / 1e6
    return {
        "frames a second": f"{len(gaps) / span:.1f}, {sum(g > 25 for g in gaps)} of {len(gaps)} "
        f"late (longest gap {max(gaps):.0f} ms)",
        "work of the page's process": f"{busy / span:.1%} of a core",
        "layout shift (CLS)": f"{shifts:.4f}",
    }


def trace(window: webdriver.Chrome, seconds: float) -> list[dict[str, Any]]:
    """Return the browser's own trace of some seconds."""
    debugger = window.capabilities["goog:chromeOptions"]["debuggerAddress"]
    version = httpx.get(f"http://{debugger}/json/version").json()
    events: list[dict[str, Any]] = []
    address = version["webSocketDebuggerUrl"]
    with closing(create_connection(address, suppress_origin=True)) as socket:
        start = {"traceConfig": {"includedCategories": TRACED.split(",")}}
        socket.send(json.dumps({"id": 1, "method": "Tracing.start", "params": start}))
        time.sleep(seconds)
        socket.send(json.dumps({"id": 2, "method": "Tracing.end"}))
        while (message := json.loads(socket.recv())).get("method") != "Tracing.tracingComplete":
            events += message.get("params", {}).get("value", [])
    return events


def _long(folder: Path, modules: int, runs: int, ledger: str | None = None) -> dict[str, str]:
    """Measure the long table over a ledger, which defaults to a file."""
    folder.mkdir()
    fill_ledger(folder, modules, ledger)
    vary_states(folder, ledger)
    with RagCache.open(folder, ledger=ledger) as rag, served(rag) as address:
        figures = _listing(address, modules, runs) | _table(address)
    kind = "PostgreSQL" if ledger else "SQLite"
    return {f"{name}, {kind}": told for name, told in figures.items()}


def _listing(address: str, modules: int, runs: int) -> dict[str, str]:
    """Ask for pages at the begin, in the middle and at the end of every list."""
    times: dict[str, float] = {}
    with httpx.Client(base_url=address, timeout=60) as client:
        for (name, chosen), order in product(FILTERS.items(), ORDERS):
            query = {**chosen, "sort": order, "limit": "100"}
            total = client.get("/admin/modules", params=query).json()["total"]
            assert 0 < total <= modules
            for share, descending in product((0, 0.25, 0.5, 0.75, 1), ("true", "false")):
                cursor = str(int(max(0, total - 100) * share))
                place = {"cursor": cursor, "descending": descending}
                taken = [_seconds(client, query | place) for _ in range(min(3, runs))]
                way = "down" if descending == "true" else "up"
                times[f"{name}, {way} by {order}, from {cursor}"] = statistics.median(taken)
    slowest = max(times, key=lambda each: times[each])
    median, most = statistics.median(times.values()), times[slowest]
    told = f"{median * 1e3:.0f} ms of the service (most {most * 1e3:.0f}: {slowest})"
    return {f"a page of {modules:,} modules, {len(times)} lists and places": told}


def _seconds(client: httpx.Client, query: dict[str, str]) -> float:
    begun = time.perf_counter()
    client.get("/admin/modules", params=query).raise_for_status()
    return time.perf_counter() - begun


def _table(address: str) -> dict[str, str]:
    """Turn pages in the browser, in each order, until the new page is drawn."""
    times = []
    with browser() as window:
        for order, chosen in product(ORDERS[1:], ("", "&tier=disk", "&search=m")):
            window.get("about:blank")
            window.get(f"{address}/admin/#/modules?sort={order}{chosen}")
            wait(lambda: "of" in window.find_element(By.CSS_SELECTOR, "[data-figure=range]").text)
            shown = window.find_element(By.CSS_SELECTOR, "[data-figure=range]").text
            for turn in ("on", "on", "last", "back", "back"):
                button = window.find_element(By.CSS_SELECTOR, f"[data-page={turn}]")
                times.append(window.execute_async_script(TURN, button))
                time.sleep(0.1)
    text = f"{statistics.median(times):.0f} ms in the browser (most {max(times):.0f})"
    return {f"turning a page, {len(times)} times ({shown})": text}


@app.command()
def pictures(folder: Path) -> None:
    """Take a picture of every view, in both themes and two widths."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as state, RagCache.open(Path(state) / "state") as rag:
        rag.ingest("handbook", [HANDBOOK])
        with served(rag) as address, browser() as window:
            _prepare(address)
            for size, (width, height) in SIZES.items():
                for scheme in ("light", "dark"):
                    resize(window, width, height)
                    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
                    window.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
                    for name in _scenes(window, address):
                        _picture(window, folder / f"{name}-{size}-{scheme}.png")


def _prepare(address: str) -> None:
    """Ask some questions, so that the figures are those of use."""
    body = {"question": QUESTION, "collection": "handbook"}
    for _ in range(12):
        httpx.post(f"{address}/v1/answers", json=body, timeout=120).raise_for_status()


def _scenes(window: webdriver.Chrome, address: str) -> Iterator[str]:
    """Show one view after the other, and yield its name once it is drawn."""

    def click(selector: str) -> None:
        def clicked() -> bool:
            window.find_element(By.CSS_SELECTOR, selector).click()
            return True

        wait(clicked)

    def shown(selector: str) -> None:
        wait(lambda: window.find_element(By.CSS_SELECTOR, selector).is_displayed())

    window.get("about:blank")
    window.get(address)
    window.execute_script("sessionStorage.clear()")
    window.refresh()
    shown(".empty")
    yield "welcome"
    ask(window)
    shown(".quotation")
    yield "answer"
    click(".quotation button")
    shown(".reader mark")
    yield "document"
    click(".reader [aria-label=Close]")
    click("[data-act=add]")
    shown("dialog .drop")
    yield "upload"
    for view in VIEWS:
        window.get("about:blank")
        window.get(f"{address}/admin/#/{view}")
        shown(f".view.{view}")
        wait(lambda: not window.find_elements(By.CSS_SELECTOR, ".loading"))
        yield view
    window.get("about:blank")
    window.get(f"{address}/admin/#/modules")
    click(".c-name .link")
    shown(".drawer table, .drawer .empty")
    yield "module"


def _picture(window: webdriver.Chrome, file: Path) -> None:
    time.sleep(0.6)  # charts and fonts
    window.save_screenshot(str(file))
    Image.open(file).convert("RGB").quantize(160).save(file, optimize=True)


if __name__ == "__main__":
    app()
