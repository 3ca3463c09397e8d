"""The page that asks, in headless Chromium over the service in this process."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from ragcache import RagCache, SourceDocument
from ragcache.models import LoadedModel
from ragcache.params import REFUSAL
from ragcache_api.http.routes import openai
from tests.api.page import seeding
from tests.api.page.conftest import Page, ask, asked, chosen, get, show_sources

pytestmark = [pytest.mark.allow_hosts(["127.0.0.1", "::1"]), pytest.mark.slow]
Opened = Callable[[str], Page]
QUESTION = "What is the grace period of annual leave?"
HOSTILE = """# <img src=x onerror=alert(1)>

<script>document.title = "owned"</script>

The zeppelin is moored in hall four. <b onclick="alert(1)">Press here</b>

<svg onload="document.title='owned'"><circle r=9></circle></svg>

[press](javascript:document.title='owned') and [data](data:text/html,<script>alert(1)</script>)
![picture](https://example.com/picture.png) <https://example.com/plain>

| <iframe src="//example.com"></iframe> | b |
|---|---|
| `<style>body { display: none }</style>` | \u202egnp.exe |
"""


def test_a_question_shows_the_modules_that_it_reads(page: Page, server: httpx.Client) -> None:
    page.open_ask()
    page.until(lambda: chosen(page) == "handbook")
    ask(page, QUESTION)
    assert "prompt tokens not computed" in page.find("[data-figure=cost]").text
    page.click(".sources summary")
    used = [
        each.get_attribute("data-module") for each in page.all("[aria-label='Modules used'] li")
    ]
    quoted = page.find("[data-figure=quotation] mark").text
    assert page.find(".said").text.startswith(quoted)
    page.until(lambda: get(server, "/admin/requests")["recent"])
    [last] = get(server, "/admin/requests")["recent"]
    assert 1 <= len(used) <= 4, "those far below the best are left out"
    assert used == [each["name"] for each in last["modules"]]
    assert (last["kind"], last["collection"]) == ("chat", "handbook")


def test_a_quotation_is_marked_in_its_document(page: Page, rag: RagCache) -> None:
    text = "# Mooring 🛶\n\n" + "The quay is long.\n\n" * 900 + "The pelican ferry is orange.\n"
    rag.ingest("boats", [SourceDocument("sheets/ferry 1.md", text)])
    asked(page, "Which color has the pelican ferry?", "boats")
    quoted = page.find("[data-figure=quotation] mark").text
    page.click("[data-figure=quotation] button", "sheets/ferry 1.md")
    mark = page.find(".reader mark", quoted)
    assert (page.find(".reader h2").text, mark.text) == ("sheets/ferry 1.md", quoted)
    box, at = page.find(".beside").rect, mark.rect
    assert box["y"] <= at["y"] <= box["y"] + box["height"] - at["height"], "it is in sight"
    page.click(".reader button", "Show what stands before")
    page.until(lambda: len(page.all(".reader .block")) > 400)
    page.find(".reader .text").send_keys(Keys.ESCAPE)
    page.until(lambda: not page.all(".reader"))
    page.click(".sources summary")
    page.click("[aria-label='Modules used'] .link")
    marked = (
        "return [...document.querySelectorAll('.reader mark')].map(e => e.textContent).join('')"
    )
    page.find(".reader mark")
    assert "The pelican ferry is orange." in page.window.execute_script(marked)
    assert page.faults() == []


def test_a_quotation_is_read_by_keyboard_alone(page: Page) -> None:
    asked(page, QUESTION, "handbook")
    for _ in range(20):
        focused = page.window.switch_to.active_element
        if focused.get_attribute("title") == "Read it in the document":
            break
        focused.send_keys(Keys.SHIFT, Keys.TAB)
    focused.send_keys(Keys.ENTER)
    page.find(".reader mark")
    page.window.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.until(lambda: not page.all(".reader"))
    assert page.window.switch_to.active_element == focused


def test_the_original_of_a_file_is_downloaded(page: Page, rag: RagCache, tmp_path: Path) -> None:
    folder, saved = tmp_path / "sheets", tmp_path / "saved"
    (folder / "2026").mkdir(parents=True)
    file = folder / "2026" / "ferry 1.html"
    file.write_text("<p>The pelican ferry is orange.</p><script>document.title = 'owned'</script>")
    rag.ingest("boats", folder)
    behavior = {"behavior": "allow", "downloadPath": str(saved)}
    page.window.execute_cdp_cmd("Browser.setDownloadBehavior", behavior)
    asked(page, "Which color has the pelican ferry?", "boats")
    page.click("[data-figure=quotation] button")
    page.click(".reader [data-act=original]", "Download original")
    page.until((saved / "ferry 1.html").exists)
    page.until(lambda: (saved / "ferry 1.html").read_bytes() == file.read_bytes())
    assert "owned" not in page.window.title
    file.write_text("<p>The pelican ferry is green.</p>")
    page.click(".reader [data-act=original]")
    page.find(".toast.error", "has changed since it was ingested")
    rag.ingest("boats", [SourceDocument("s.md", "The heron ferry is red.", "file:///etc/passwd")])
    asked(page, "Which color has the heron ferry?", "boats")
    page.click("[data-figure=quotation] button")
    page.find(".reader button", "Download text")
    assert page.all(".reader [data-act=original]") == []
    sent = tmp_path / "sent.html"
    sent.write_text("<p>The gannet ferry is yellow.</p><script>document.title = 'owned'</script>")
    page.open_ask("boats")
    page.click("[data-act=add]")
    picker = page.window.find_element(By.CSS_SELECTOR, "input[type=file]")
    picker.send_keys(str(sent))
    page.click(".upload [type=submit]", "Add 1 file")
    page.click(".modal [data-act=ask-now]")
    ask(page, "Which color has the gannet ferry?")
    page.click(".exchange:last-of-type [data-figure=quotation] button")
    page.click(".reader [data-act=original]", "Download original")
    page.until((saved / "sent.html").exists)
    page.until(lambda: (saved / "sent.html").read_bytes() == sent.read_bytes())
    assert "owned" not in page.window.title


def test_headings_and_pages_lead_to_their_places(page: Page, rag: RagCache) -> None:
    text = "".join(f"## Part {n}\n\n" + "It rains.\n\n" * 30 for n in range(1, 30))
    rag.ingest("parts", [SourceDocument("parts.md", text)])
    asked(page, "When does it rain?", "parts")
    show_sources(page)
    page.click("[aria-label='Modules used'] .link")
    page.click(".outline summary")
    page.click(".outline a", "Part 27")
    part = page.find(".reader h3", "Part 27")
    page.until(lambda: page.window.switch_to.active_element == part)
    assert 0 < part.rect["y"] < 1000


def test_hostile_documents_stay_text(page: Page, rag: RagCache) -> None:
    rag.ingest("hostile", [SourceDocument("zeppelin.md", HOSTILE)])
    asked(page, "Where is the zeppelin moored?", "hostile")
    page.click(".sources summary")
    page.click("[aria-label='Modules used'] .link")
    shown = page.find(".reader .text").text
    for written in ("<script>", "onerror=alert(1)", "<svg onload=", "<iframe", "<style>"):
        assert written in shown
    inside = "return document.querySelector('.reader .text').querySelectorAll(arguments[0]).length"
    for tag in ("script", "img", "iframe", "style", "b", "circle", "svg"):
        assert page.window.execute_script(inside, tag) == 0, tag
    links = page.window.find_elements(By.CSS_SELECTOR, ".reader .text a")
    hrefs = ["https://example.com/picture.png", "https://example.com/plain"]
    assert [each.get_attribute("href") for each in links] == hrefs, "and nothing is fetched"
    assert {each.get_attribute("rel") for each in links} == {"noopener noreferrer nofollow"}
    assert "\u202e" not in shown
    assert "\ufffdgnp.exe" in shown
    assert "owned" not in page.window.title
    assert page.faults() == []


def test_hostile_answers_questions_and_names_stay_text(page: Page, server: httpx.Client) -> None:
    name = "\u202egnp.exe<img src=x onerror=alert(1)>"
    source = {"document": name, "module": name, "text": HOSTILE, "tier": "disk"}
    span = {"document": name, "mark": 1, "start": 0, "end": 3, "headings": [name]}
    answer = {"text": f"{HOSTILE}\n\nSee [1].", "finish": "stop", "spans": [span]}
    ended = {"kind": "ask", "collection": "handbook", "status": "done", "question": HOSTILE + name}
    search = {**ended, "id": "2", "kind": "search"}
    hit = {"document": name, "score": 1, "text": HOSTILE}
    exchanges = [
        {**ended, "id": "1", "answer": {**answer, "sources": [source]}},
        {**search, "hits": [hit]},
        {**ended, "id": "3", "error": {"status": 400, "title": name, "message": HOSTILE}},
    ]
    page.open_ask("handbook")
    page.window.execute_script(
        "sessionStorage.setItem('ragcache.conversation', JSON.stringify(arguments[0]))",
        {"name": "page-1", "exchanges": exchanges},
    )
    page.window.refresh()
    page.until(lambda: len(page.all(".exchange")) == 3)
    page.click(".sources summary")
    main = "return document.querySelector('main')"
    tags = "script, img, iframe, style, b, circle, [onerror], [onload], [onclick]"
    assert page.window.execute_script(f"{main}.querySelectorAll('{tags}').length") == 0
    text = page.window.execute_script(f"{main}.textContent")
    assert "\u202e" not in text
    assert text.count("\ufffdgnp.exe<img src=x onerror=alert(1)>") >= 6
    links = page.window.execute_script(
        f"return [...{main[7:]}.querySelectorAll('a')].map(e => e.href)"
    )
    assert set(links) == {"https://example.com/picture.png", "https://example.com/plain"}
    assert page.find(".cite").text == "1"
    assert "owned" not in page.window.title
    assert page.faults() == []


def test_the_browser_refuses_to_parse_html(page: Page) -> None:
    page.open_ask()
    page.find(".composer")
    parse = """
    try { document.body.insertAdjacentHTML('beforeend', '<i>x</i>'); return 'parsed'; }
    catch (error) { return error.name; }
    """
    assert page.window.execute_script(parse) == "TypeError"


def test_questions_are_filtered_and_keep_their_collection(page: Page, rag: RagCache) -> None:
    sheets = [
        SourceDocument(f"{year}.md", f"The ferry of {year} is {color}.", metadata={"year": year})
        for year, color in ((2019, "orange"), (2024, "green"))
    ]
    rag.ingest("boats", sheets)
    page.open_ask()
    page.find("[name=collection] option[value=boats]").click()
    page.until(lambda: page.window.current_url.endswith("?collection=boats"))
    page.click(".options summary")
    page.click("[data-act=filter]")
    page.find("[name=field]").send_keys(Keys.CONTROL, "a")
    page.find("[name=field]").send_keys("year")
    page.find("[name=operator] option[value='lt']").click()
    years = "return [...document.querySelectorAll('#values-0 option')].map((each) => each.value)"
    page.until(lambda: "2019" in page.window.execute_script(years))
    page.find("[name=value]").send_keys("2020")
    page.click(".options summary", "1 filter")
    ask(page, "Which color is the ferry?")
    page.click(".sources summary")
    used = page.all("[aria-label='Modules used'] li")
    assert [each.get_attribute("data-module") for each in used] == ["2019.md#1"]
    page.find("[name=question]").send_keys("Which color is the ferry?")
    page.click("[data-act=search]")
    hits = page.until(lambda: page.all(".hits li"))
    assert [each.find_element(By.CSS_SELECTOR, ".link").text for each in hits] == ["2019.md"]
    page.window.refresh()
    page.until(lambda: chosen(page) == "boats")
    assert len(page.all(".exchange")) == 2, "what was said stays in the tab"


def test_a_search_finds_without_an_answer(page: Page, server: httpx.Client) -> None:
    page.open_ask("handbook")
    page.find("[data-act=search]:enabled")
    page.find("[name=question]").send_keys("grace period")
    page.click("[data-act=search]")
    hit = page.find(".hits li", "leave.md")
    hit.find_element(By.CSS_SELECTOR, ".link").click()
    page.find(".reader mark", "grace period")
    assert get(server, "/admin/requests")["recent"] == []


def test_an_answer_is_in_sight_on_a_telephone(page: Page) -> None:
    page.resize(390, 667)
    asked(page, "How long is the grace period?", "handbook")
    assert not any(each.is_displayed() for each in page.all("[name=mode]"))
    said = page.find(".said")
    top = page.window.execute_script("return arguments[0].getBoundingClientRect().top", said)
    assert 0 < top < 667 - 80


def test_refusals_are_told_in_words(page: Page, rag: RagCache) -> None:
    asked(page, "zzqx wvvk", "handbook")
    assert page.find(".said.refused .markdown").text == REFUSAL
    assert "Nothing in the collection fits" in page.find(".said .why").text


def test_sources_begin_with_their_texts(page: Page) -> None:
    source = {"document": "leave.md", "module": "leave.md#1", "text": "# Leave\n\nIn writing."}
    refused = {"text": REFUSAL, "finish": "no_answer", "confidence": 0.004, "spans": []}
    ended = {"id": "1", "kind": "ask", "collection": "handbook", "status": "done", "question": "?"}
    page.open_ask("handbook")
    page.window.execute_script(
        "sessionStorage.setItem('ragcache.conversation', JSON.stringify(arguments[0]))",
        {
            "name": "page-1",
            "exchanges": [
                {**ended, "answer": {**refused, "sources": [{**source, "tier": "disk"}]}}
            ],
        },
    )
    page.window.refresh()
    page.find(".said.refused .why", "0.4 %")
    assert "In writing. …" in page.find(".sources li").text, "shown at once, without a quotation"


def marked(page: Page) -> str:
    """Return what is marked in the document in sight, line after line."""
    marks = "return [...document.querySelectorAll('.reader mark')].map((each) => each.textContent)"
    return " ".join(" ".join(page.window.execute_script(marks)).split())


def test_a_free_answer_leads_to_its_sentence(page: Page, rag: RagCache) -> None:
    text = (
        "# Ferries\n\nThe office is open all year. The pelican ferry\nleaves quay 7 at noon, "
        "unless it rains. Tickets are sold on board.\n\n- Dogs travel free.\n"
    )
    rag.ingest("boats", [SourceDocument("ferries.md", text)])
    source = {"document": "ferries.md", "module": "ferries.md#1", "text": text, "tier": "disk"}
    answer = {"text": "It leaves quay 7 at noon.", "finish": "stop", "spans": []}
    ended = {"kind": "ask", "collection": "boats", "status": "done"}
    asked_for = {**ended, "id": "1", "question": "When?", "answer": {**answer, "sources": [source]}}
    refused = {"text": REFUSAL, "finish": "no_answer", "spans": [], "sources": [source]}
    other = {**ended, "id": "2", "question": "Are tickets sold on board?", "answer": refused}
    vague = {
        **ended,
        "id": "3",
        "kind": "search",
        "question": "rain",
        "hits": [{**source, "score": 1}],
    }
    page.open_ask("boats")
    page.window.execute_script(
        "sessionStorage.setItem('ragcache.conversation', JSON.stringify(arguments[0]))",
        {"name": "page-1", "exchanges": [asked_for, other, vague]},
    )
    page.window.refresh()
    page.until(lambda: len(page.all(".exchange")) == 3)
    page.click(".exchange:nth-of-type(1) .sources .link")
    page.until(lambda: marked(page) == "The pelican ferry leaves quay 7 at noon, unless it rains.")
    page.click(".exchange:nth-of-type(2) .sources .link")
    page.until(lambda: marked(page) == "Tickets are sold on board.")
    assert not page.all(".reader .whole")
    page.click(".hits .link")
    page.find(".reader .whole mark", "Dogs travel free.")
    page.open_ask("none")
    page.until(lambda: len(page.all(".exchange")) == 3)
    assert not page.find(".exchange [aria-label='Ask again']").is_enabled(), "of no collection"


def test_questions_are_edited_and_asked_again(page: Page) -> None:
    asked(page, "How long is the grace period of annual leave?", "handbook")
    ask(page, "And of parental leave?")
    assert len(page.all(".exchange")) == 2
    page.click(".exchange:last-of-type [aria-label='Edit and ask again']")
    box = page.find("[name=question]")
    page.until(lambda: box.get_attribute("value") == "And of parental leave?")
    assert len(page.all(".exchange")) == 1
    box.send_keys(Keys.CONTROL, "a")
    ask(page, "Where do requests of travel go?")
    assert "travel" in page.all(".exchange")[-1].text
    page.click(".exchange:first-of-type [aria-label='Ask again']")
    page.until(lambda: len(page.all(".exchange")) == 1)
    page.until(lambda: page.find(".exchange").get_attribute("data-status") == "done")
    page.click("[data-act=new]")
    page.find(".empty", "Ask about handbook")


def test_a_conversation_is_sent_whole_under_its_name(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = []
    addressed = openai.addressed
    monkeypatch.setattr(openai, "addressed", lambda b, c: bodies.append(b) or addressed(b, c))
    asked(page, "How long is the grace period of annual leave?", "handbook")
    answer = page.find(".said .markdown").text
    ask(page, "And of parental leave?")
    first, second = bodies
    said = [(each.role, each.content) for each in second.messages]
    assert said[:2] == [("user", first.messages[0].content), ("assistant", answer)]
    assert said[2] == ("user", "And of parental leave?")
    assert first.prompt_cache_key == second.prompt_cache_key != None  # noqa: E711


def test_an_answer_is_seen_as_it_arrives(
    page: Page, rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "# Ferries\n\nThe pelican ferry is orange.\n\n- one rope\n- two fenders\n\nIt leaves."
    shown, chunks = threading.Semaphore(0), openai._CompletionWriter.chunks

    async def pieces(self, active, stream):  # type: ignore[no-untyped-def]
        for at in range(0, len(text), 5):
            piece = {"choices": [{"delta": {"content": text[at : at + 5]}}]}
            yield f"data: {json.dumps(piece)}\n\n".encode()
            while at % 25 == 20 and not shown.acquire(blocking=False):
                await asyncio.sleep(0.01)
        async for chunk in chunks(self, active, stream):
            if b'"content"' not in chunk:
                yield chunk

    monkeypatch.setattr(openai._CompletionWriter, "chunks", pieces)
    page.open_ask("handbook")
    page.find(".composer [type=submit]:enabled")
    page.find("[name=question]").send_keys(QUESTION, Keys.ENTER)
    for end in range(25, len(text), 25):
        expected = [each for each in text[:end].split("\n") if each.strip("#- ")]
        page.until(
            lambda told=expected: (
                page.find(".streaming").text.split("\n")
                == [each.lstrip("#- ").rstrip() for each in told]
            )
        )
        assert page.find(".heard").get_attribute("aria-busy") == "true"
        shown.release()
    shown.release()
    page.until(lambda: page.all(".exchange[data-status=done]"))
    assert page.find(".said h3").text == "Ferries"
    assert [each.text for each in page.all(".said li")] == ["one rope", "two fenders"]
    assert page.find(".heard").get_attribute("aria-busy") == "false"


def test_an_answer_is_stopped(
    page: Page, server: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, chunks = threading.Event(), openai._CompletionWriter.chunks

    async def slowly(self, active, stream):  # type: ignore[no-untyped-def]
        async for chunk in chunks(self, active, stream):
            yield chunk
            while b"content" in chunk and not held.is_set():
                await asyncio.sleep(0.01)

    monkeypatch.setattr(openai._CompletionWriter, "chunks", slowly)
    page.open_ask("handbook")
    page.find(".composer [type=submit]:enabled")
    page.find("[name=question]").send_keys(QUESTION, Keys.ENTER)
    page.click("[data-act=stop]")
    page.find(".stopped", "Stopped")
    page.until(lambda: get(server, "/admin/requests")["recent"])
    held.set()
    assert get(server, "/admin/requests")["recent"][0]["outcome"] == "cancelled"
    page.find(".composer [type=submit]:enabled")


def test_refused_files_are_named_with_their_reasons(page: Page, tmp_path: Path) -> None:
    for name, content in (
        ("a.md", b"The lamp is green."),
        ("b.pdf", b"%PDF-1.7"),
        ("c.bin", b"\0"),
    ):
        (tmp_path / name).write_bytes(content)
    page.open_ask()
    page.click("[data-act=add]")
    into = page.find("[name=into]")
    into.send_keys(Keys.CONTROL, "a")
    into.send_keys("mixed")
    picker = page.window.find_element(By.CSS_SELECTOR, "input[type=file]")
    picker.send_keys("\n".join(str(tmp_path / name) for name in ("a.md", "b.pdf", "c.bin")))
    page.click(".upload [type=submit]", "Add 3 files")
    assert "damaged" in page.find(".picked .refused", "b.pdf").text
    assert page.find(".picked .refused", "c.bin").find_element(By.CSS_SELECTOR, ".fault").text
    page.find(".picked .done", "a.md")
    page.find(".job[data-status=done]", "mixed")
    page.click("[aria-label='Remove b.pdf']")
    picker.send_keys(str(tmp_path / "b.pdf"))
    page.click(".upload [type=submit]", "Add 1 file")
    page.find(".toast.error", "1 file cannot be read")
    page.click(".modal [aria-label=Close]")
    page.until(lambda: chosen(page) == "mixed")
    ask(page, "Which color is the lamp?")
    assert "green" in page.find(".said").text


def test_two_tabs_ask_side_by_side(page: Page) -> None:
    asked(page, "How long is the grace period of annual leave?", "handbook")
    first = page.window.current_window_handle
    page.window.switch_to.new_window("tab")
    try:
        page.open_ask("handbook")
        page.find(".empty", "Ask about handbook")
        ask(page, "Where do requests of travel go?")
        assert len(page.all(".exchange")) == 1
    finally:
        page.window.close()
        page.window.switch_to.window(first)
    assert len(page.all(".exchange")) == 1
    ask(page, "And of parental leave?")
    assert len(page.all(".exchange")) == 2


def test_a_first_collection_is_made_and_asked(
    reader: LoadedModel, tmp_path: Path, opened: Opened
) -> None:
    (tmp_path / "lamp.md").write_text("The lamp of the quay is green.")
    with RagCache.open(tmp_path / "empty", reader) as rag, seeding.serve_page(rag) as (address, _):
        page = opened(address)
        page.open_ask()
        page.click(".empty button", "Add documents")
        page.find("[name=into]").send_keys("quay")
        picker = page.window.find_element(By.CSS_SELECTOR, "input[type=file]")
        picker.send_keys(str(tmp_path / "lamp.md"))
        page.click(".upload [type=submit]", "Add 1 file")
        page.find(".job[data-status=done]")
        page.click(".modal [aria-label=Close]")
        page.until(lambda: chosen(page) == "quay")
        ask(page, "Which color is the lamp of the quay?")
        assert "green" in page.find(".said").text
        assert page.faults() == []


def test_an_error_of_the_service_is_shown_in_place(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the lamp is out")

    page.open_ask("handbook")
    page.find(".composer [type=submit]:enabled")
    monkeypatch.setattr(openai, "open_conversation", fail)
    page.find("[name=question]").send_keys(QUESTION, Keys.ENTER)
    assert page.find(".exchange .fault code").text
    monkeypatch.undo()
    page.click("[aria-label='Ask again']")
    until = time.monotonic() + 20
    while page.all(".exchange .fault") and time.monotonic() < until:
        time.sleep(0.05)
    page.find(".said .markdown")
