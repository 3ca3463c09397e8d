"""Open WebUI's page in Chromium: it lists the collections and shows an answer with its source."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from tests.api.page.conftest import Page
from tests.clients.conftest import Service
from tests.clients.environments import Environments, prepare_scripts
from tests.clients.table import ANSWER, CLIENTS, COLLECTION, MODEL, QUESTION, SOURCE
from tests.cluster.machines import wait_until

pytestmark = [
    pytest.mark.clients,
    pytest.mark.enable_socket,
    pytest.mark.allow_hosts(["127.0.0.1", "::1"]),
]


@pytest.fixture
def address(service: Service, environments: Environments, tmp_path: Path) -> Iterator[str]:
    """The address of an Open WebUI that its guide's `serve.sh` started."""
    [client] = [client for client in CLIENTS if client.name == "open-webui"]
    environment = environments.install(client)
    prepare_scripts(client, environment, tmp_path, service.url, service.key)
    [port] = re.findall(r"--port (\d+)", (tmp_path / "serve.sh").read_text(encoding="utf-8"))
    with (tmp_path / "serve.log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "serve.sh"],
            cwd=tmp_path,
            env=environment.variables(tmp_path),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(client.seconds, lambda: is_ready(process, f"http://127.0.0.1:{port}/health"))
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait(60)
        print((tmp_path / "serve.log").read_text(encoding="utf-8")[-4000:])


def is_ready(process: subprocess.Popen[bytes], health: str) -> bool:
    """Whether a program answers. Fails if its process has ended."""
    assert process.poll() is None, "open-webui has ended"
    try:
        return httpx.get(health).is_success
    except httpx.TransportError:
        return False


def collections_asked(service: Service) -> dict[str, str]:
    """The collections of the last requests by their ids, "" for none."""
    told = httpx.get(f"{service.url}/admin/requests", headers={"x-api-key": service.admin_key})
    return {each["id"]: each["collection"] for each in told.json()["recent"]}


def test_page_shows_an_answer_and_its_source(
    chromium: webdriver.Chrome, address: str, service: Service
) -> None:
    page, before = Page(chromium, address, seconds=180), collections_asked(service)
    page.window.get(address)
    page.click("button", "Okay, Let's Go!")
    page.click("#model-selector-model-button")
    page.click(f"[role=option][data-value='{MODEL}/{COLLECTION}']")
    page.find("#chat-input").send_keys(QUESTION, Keys.ENTER)

    assert ANSWER in page.find(".chat-assistant", ANSWER).text
    page.find("button[aria-label=Regenerate]")  # offered once the message has ended
    page.until(lambda: not page.all("button[aria-label=Stop]"))  # title and tags have ended, too
    page.click("button", "Source")
    page.find("button", SOURCE)
    listed = [each.text.split("\n")[-1] for each in page.all("button") if ".md" in each.text]
    assert sorted(set(listed)) == sorted(listed), "an annotation joins the source of its document"
    page.click("button", SOURCE)
    excerpt = page.find("[role=dialog]", "pool car").text
    assert SOURCE in excerpt
    assert page.faults() == []

    now = collections_asked(service)
    asked = Counter(now[each] for each in now.keys() - before.keys())
    assert asked[COLLECTION] == 1, "titles and tags search no documents"
    assert asked[""] >= 1
