"""The keyboard alone: everything that can be clicked is reached by Tab, and shows that it is."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from ragcache import RagCache
from tests.api.page.conftest import VIEWS, Page, asked, chosen, get, open_view

pytestmark = [pytest.mark.allow_hosts(["127.0.0.1", "::1"]), pytest.mark.slow]
QUESTION = "What is the grace period of annual leave?"

# Numbers what can be used, and returns how much there is. Radios of a group and options of a select
# are one stop; what a modal dialog or a closed part hides cannot be used.
_NUMBERED = """
const dialogs = document.querySelectorAll('dialog[open]');
const within = [...dialogs].at(-1) ?? document.body;
const uses = 'a[href], button, input, select, textarea, summary, [tabindex="0"]';
const usable = (node) => !node.matches(':disabled, [tabindex="-1"]')
  && node.checkVisibility({ checkVisibilityCSS: true });
const stops = [...within.querySelectorAll(uses)].filter(usable);
document.querySelectorAll('[data-stop]').forEach((node) => delete node.dataset.stop);
stops.forEach((node, index) => { node.dataset.stop = index; });
return stops.length;
"""

# What listens to clicks without being a control. Preact keeps the listeners of a node in `l`.
_DEAF = """
const control = 'a, button, input, select, textarea, summary, label, option, [tabindex]';
const own = (node) => Object.values(node)
  .filter((each) => each && typeof each === 'object' && !(each instanceof Node))
  .flatMap(Object.keys).some((name) => /^(on)?click(false|true)?$/i.test(name));
return [...document.body.querySelectorAll('*')]
  .filter((node) => own(node) && !node.matches(control) && !node.matches('.menu'))
  .map((node) => node.outerHTML.slice(0, 100));
"""

_FOCUSED = """
const node = document.activeElement;
const style = getComputedStyle(node);
const box = node.getBoundingClientRect();
return {
  stop: node.dataset.stop ?? null,
  shown: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2,
  seen: box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth,
  what: node.outerHTML.slice(0, 100),
};
"""


def press(page: Page, *keys: str) -> None:
    ActionChains(page.window, duration=0).send_keys(*keys).perform()


def walk(page: Page, view: str) -> None:
    """Press Tab until everything that can be used was focused, in sight and with an outline."""
    assert page.window.execute_script(_DEAF) == [], view
    left = {str(n) for n in range(page.window.execute_script(_NUMBERED))}
    for _ in range(2 * len(left) + 20):
        press(page, Keys.TAB)
        now: dict[str, Any] = page.window.execute_script(_FOCUSED)
        if now["stop"] is not None:
            assert now["shown"], f"{view}: no outline on {now['what']}"
            assert now["seen"], f"{view}: out of sight: {now['what']}"
            left.discard(now["stop"])
        if not left:
            return
    missed = page.window.execute_script(
        "return arguments[0].map((n) => document.querySelector(`[data-stop='${n}']`)?.outerHTML)",
        sorted(left),
    )
    raise AssertionError(f"{view}: never focused: {missed}")


def test_every_control_of_the_operators_page_is_reached(page: Page, server: httpx.Client) -> None:
    body = {"question": QUESTION, "collection": "handbook", "max_tokens": 1}
    assert server.post("/v1/answers", json=body).status_code == 200
    for view in VIEWS:
        open_view(page, view)
        walk(page, view)


def test_every_control_of_asking_is_reached(page: Page) -> None:
    page.open_ask("handbook")
    page.find(".empty")
    walk(page, "welcome")
    asked(page, QUESTION, "handbook")
    for closed in (".sources summary", ".cost summary", ".options summary"):
        page.click(closed)
    page.click("[data-act=filter]")
    walk(page, "answer")
    page.click(".options summary")
    page.click("[data-figure=quotation] button")
    page.find(".reader mark")
    walk(page, "document")
    page.click(".reader [aria-label=Close]")
    page.click("[data-act=add]")
    page.find("dialog .drop")
    walk(page, "upload")


def test_a_question_and_its_sentence_need_no_pointer(page: Page) -> None:
    page.open_ask()
    page.until(lambda: chosen(page) == "handbook")
    reach(page, "[name=question]")
    press(page, QUESTION, Keys.ENTER)
    page.until(lambda: page.all(".exchange[data-status=done]"))
    reach(page, ".quotation button", Keys.SHIFT)
    press(page, Keys.ENTER)
    mark = page.find(".reader mark")
    assert "The grace period of annual leave is" in page.find(".reader .text").text
    page.until(lambda: 0 < mark.rect["y"] < 1000)
    press(page, Keys.ESCAPE)
    page.until(lambda: not page.all(".reader"))
    reach(page, "[data-act=new]", Keys.SHIFT)
    press(page, Keys.ENTER)
    page.find(".empty", "Ask about handbook")


def reach(page: Page, selector: str, *held: str) -> None:
    """Press Tab until an element has the focus. held: keys such as Shift."""
    focused = "return document.activeElement.matches(arguments[0])"
    for _ in range(60):
        chain = ActionChains(page.window, duration=0)
        for key in held:
            chain.key_down(key)
        chain.send_keys(Keys.TAB)
        for key in held:
            chain.key_up(key)
        chain.perform()
        if page.window.execute_script(focused, selector):
            return
    raise AssertionError(f"{selector} was not reached by Tab")


def test_modules_are_sorted_ticked_and_pinned_without_a_pointer(
    page: Page, server: httpx.Client, rag: RagCache
) -> None:
    page.open("modules")
    page.find(".c-name .link")
    reach(page, "[data-sort=nbytes] button")
    press(page, Keys.ENTER)
    page.until(lambda: page.all("th[data-sort=nbytes][aria-sort]"))
    reach(page, "[aria-label='Select leave.md#1']")
    press(page, Keys.SPACE)
    reach(page, "[data-act=pin]", Keys.SHIFT)
    press(page, Keys.ENTER)
    page.find(".toast.ok", "Pinned 1 module")
    [pinned] = get(server, "/admin/modules", pinned=True)["items"]
    assert pinned["name"] == "leave.md#1"
