"""What a started service says over REST, to hold the page against."""

from __future__ import annotations

from typing import Any

import httpx
from selenium.webdriver.common.keys import Keys

from tests.api.page.conftest import Page

QUESTION = "How many days of leave does everybody have?"
SOURCES = {"device", "host", "disk", "remote", "encoded", "shared", "computed"}


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


def asked(page: Page, question: str, collection: str) -> None:
    """Asks through the form and waits until the answer has ended."""
    page.open("ask")
    page.find(f"[name=collection] option[value={collection}]").click()
    page.find("[name=question]").send_keys(question, Keys.ENTER)
    page.find(".question", question)
    page.until(lambda: not page.all(".said .caret"))
    page.find(".askform [type=submit]:enabled")
