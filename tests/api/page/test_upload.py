"""Folders on their way into a collection: progress, and questions before all of it is read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from ragcache import RagCache, SourceDocument
from ragcache.models import LoadedModel
from ragcache.pipeline.ingest import Ingestor
from ragcache_api.http.routes import documents
from tests.api.page import seeding
from tests.api.page.conftest import Page, ask, chosen, drop, get

pytestmark = [pytest.mark.allow_hosts(["127.0.0.1", "::1"]), pytest.mark.slow]
FILES = 30
FIRST = 8  # files of the first portion that the page sends
NETWORK = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}

PICK = """
const given = new DataTransfer();
for (const name of arguments) {
  const file = new File(["The lamp is green."], name.split("/").at(-1));
  Object.defineProperty(file, "webkitRelativePath", { value: name.includes("/") ? name : "" });
  given.items.add(file);
}
const input = document.querySelector(".upload input[type=file]");
input.files = given.files;
input.dispatchEvent(new Event("change"));
"""
"""Script that chooses files by names, or by paths within a folder, as the browser's dialog does."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of many sheets, which say their colors."""
    given = tmp_path / "sheets"
    for number in range(FILES):
        file = given / f"part {number // 10}" / f"sheet-{number:02}.md"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# Sheet {number}\n\nThe lamp of quay {number} is green.\n")
    (given / ".hidden").mkdir()
    (given / ".hidden" / "secret.md").write_text("The hidden lamp is red.")
    return given


def choose_folder(page: Page, folder: Path, into: str) -> None:
    page.click("[data-act=add]")
    page.find("[name=into]").send_keys(Keys.CONTROL, "a")
    page.find("[name=into]").send_keys(into)
    drop(page, folder)
    page.click(".upload [type=submit]", f"Add {FILES} files")


def test_the_first_documents_are_asked_while_the_rest_is_read(
    page: Page, server: httpx.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, parse, calls = threading.Event(), documents._parse_files, list[int]()

    def parse_slowly(files: list[tuple[str, bytes]], *rest: Any) -> Any:
        calls.append(len(files))
        assert len(calls) == 1 or held.wait(60)
        return parse(files, *rest)

    monkeypatch.setattr(documents, "_parse_files", parse_slowly)
    page.open_ask()
    choose_folder(page, folder, "sheets")
    page.find(".modal .job[data-status=done]", "sheets")
    page.until(lambda: len(calls) == 2)
    assert calls == [FIRST, FILES - FIRST]
    states = [each.get_attribute("class") for each in page.all(".picked li")]
    assert (states.count("done"), states.count("sent")) == (FIRST, FILES - FIRST)
    assert page.find(".modal [role=progressbar]").get_attribute("aria-valuenow") == str(FIRST)
    page.click(".modal [aria-label=Close]")
    page.until(lambda: chosen(page) == "sheets")
    ask(page, "Which color is the lamp of quay 3?")
    assert "green" in page.find(".said").text
    assert get(server, "/v1/collections/sheets/documents")["total"] == FIRST
    held.set()
    page.until(lambda: get(server, "/v1/collections/sheets/documents")["total"] == FILES)
    ask(page, f"Which color is the lamp of quay {FILES - 1}?")
    page.click(".exchange:last-of-type .sources summary")
    assert f"sheet-{FILES - 1}.md" in page.all(".exchange")[-1].text
    assert page.faults() == []


def test_documents_are_asked_before_their_job_has_ended(
    page: Page, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, make = threading.Event(), Ingestor._row

    def make_slowly(self: Ingestor, document: SourceDocument, *rest: Any) -> Any:
        assert document.id == "sheets/part 0/sheet-00.md" or held.wait(60)
        return make(self, document, *rest)

    monkeypatch.setattr(Ingestor, "_is_batch", lambda _self, rows, _seconds: bool(rows))
    monkeypatch.setattr(Ingestor, "_row", make_slowly)
    monkeypatch.setattr("ragcache.db.jobs.PROGRESS_SECONDS", 0.0)
    page.open_ask()
    choose_folder(page, folder, "sheets")
    page.click(".modal [data-act=ask-now]", "Ask about them")
    page.until(lambda: not page.all(".modal"))
    assert page.find(".strip .job").get_attribute("data-status") == "running", "not the one behind"
    ask(page, "Which color is the lamp of quay 0?")
    assert "green" in page.find(".said").text
    held.set()
    page.until(lambda: not page.all(".strip .job"))


def test_an_upload_goes_on_after_the_service_was_away(
    page: Page, server: httpx.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, prepare = threading.Event(), Ingestor._prepare

    def prepare_slowly(*given: Any) -> Any:
        assert held.wait(60)
        return prepare(*given)

    monkeypatch.setattr(Ingestor, "_prepare", prepare_slowly)
    page.window.execute_cdp_cmd("Network.enable", {})
    page.open_ask()
    choose_folder(page, folder, "sheets")
    page.until(lambda: len(page.all(".modal .job")) == 2)
    page.window.execute_cdp_cmd("Network.emulateNetworkConditions", NETWORK | {"offline": True})
    page.find(".gone", "does not answer")
    page.window.execute_cdp_cmd("Network.emulateNetworkConditions", NETWORK)
    page.find(".toast.ok", "The service is back")
    held.set()
    page.until(lambda: len(page.all(".picked .done")) == FILES)
    assert len(page.all(".job[data-status=done]")) == 2
    assert get(server, "/v1/collections/sheets/documents")["total"] == FILES


def test_a_first_folder_is_dropped_on_the_page_itself(
    reader: LoadedModel, tmp_path: Path, folder: Path, opened: Callable[[str], Page]
) -> None:
    with RagCache.open(tmp_path / "empty", reader) as rag, seeding.serve_page(rag) as (address, _):
        page = opened(address)
        page.open_ask()
        page.find(".empty", "Nothing to ask yet")
        drop(page, folder, onto=".thread")
        page.find(".modal .picked", f"sheet-{FILES - 1}.md")
        assert len(page.all(".picked li")) == FILES, "without hidden files"
        assert page.find("[name=into]").get_attribute("value") == "sheets", "as the folder"
        page.click(".upload [type=submit]", f"Add {FILES} files")
        page.until(lambda: len(page.all(".picked .done")) == FILES)
        assert page.find(".picked li").text.startswith("sheets/part 0/sheet-00.md")
        page.click(".modal [data-act=ask-now]", "Ask about them")
        page.until(lambda: chosen(page) == "sheets")
        focused = "return document.activeElement.name"
        page.until(lambda: page.window.execute_script(focused) == "question")
        ask(page, "Which color is the lamp of quay 7?")
        assert "green" in page.find(".said").text


def test_chosen_files_need_no_name_of_a_collection(page: Page, server: httpx.Client) -> None:
    page.open_ask("none")
    page.click("[data-act=add]")
    page.window.execute_script(PICK, "lamp.md")
    page.until(lambda: page.find("[name=into]").get_attribute("value") == "documents")
    page.click(".upload [type=submit]", "Add 1 file")
    page.find(".picked .done", "lamp.md")
    assert not page.window.find_elements(By.CSS_SELECTOR, ".picked button"), (
        "it is not deleted here"
    )
    assert get(server, "/v1/collections/documents/documents")["total"] == 1


def test_hidden_files_of_a_chosen_folder_are_left_out(page: Page) -> None:
    page.open_ask("none")
    page.click("[data-act=add]")
    page.window.execute_script(PICK, "quay/.git/config", "quay/.env", "quay/lamp.md")
    page.find(".upload [type=submit]", "Add 1 file")
    assert page.find(".picked li").text.startswith("quay/lamp.md")
    assert page.find("[name=into]").get_attribute("value") == "quay"
