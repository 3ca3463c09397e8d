"""OpenDocument, RTF, mail of Outlook, mailboxes, archives, and files that have others in them."""

from __future__ import annotations

import io
import zipfile

import pytest

from ragcache.documents.formats import read_document
from ragcache.documents.formats.base import DEPTH, OMITTED
from ragcache.errors import UnreadableDocument
from tests.ragcache.documents import more_files


def test_opendocument_text_has_headings_lists_notes_and_tables() -> None:
    assert read_document("a.odt", more_files.text_document()).text == (
        "# Dredger\n\nThe dredger digs 12 m deep[1].\n\n- Mud\n- Sand\n\n"
        "| North | Ines |\n| --- | --- |\n| North | Tom |\n\n[1] At low tide."
    )


def test_slides_of_opendocument_have_titles_pages_and_notes() -> None:
    [slide] = read_document("a.odp", more_files.slides()).sections
    assert slide.metadata == {"page": 1}
    assert slide.text == "# Buoys\n\nThe north buoy is green.\n\nNotes: It has a bell."


@pytest.mark.parametrize("name", ["a.rtf", "renamed.doc"])
def test_rich_text_has_its_tables_and_no_pictures(name: str) -> None:
    assert read_document(name, more_files.RICH_TEXT).text == (
        "The sluice´s key is brass.\n\n| Gate | Width |\n| --- | --- |\n| East | 9 m |"
    )


@pytest.mark.parametrize("name", ["a.msg", "without suffix"])
def test_message_of_outlook_has_headers_and_attachments(name: str) -> None:
    document = read_document(name, more_files.outlook_message())
    message, menu = document.sections
    assert message.text == (
        "# Dredging\n\nFrom: Ines <ines@harbour.example>\nTo: crew@harbour.example\n"
        "Attachment: menu.txt\n\nThe dredger arrives on Thursday."
    )
    assert (menu.text, menu.metadata["attachment"]) == ("Soup, then cod.", "menu.txt")
    assert document.metadata["subject"] == "Dredging"


def test_mailbox_has_a_part_for_each_message() -> None:
    tides, pilot = read_document("a.mbox", more_files.mailbox()).sections
    assert (tides.metadata["subject"], pilot.metadata["subject"]) == ("Tides", "Pilot")
    assert tides.text.endswith("High water at noon.")
    assert pilot.text.endswith("\nFrom dawn, Tom pilots.")


def test_archive_has_its_readable_files_and_names_the_others() -> None:
    document = read_document("a.zip", more_files.archive())
    assert [part.metadata["attachment"] for part in document.sections] == [
        "letter.rtf", "more.zip/deep.md", "notes/keys.md",
    ]  # fmt: skip
    assert document.metadata[OMITTED] == ["map.png: a binary file: a picture"]


def test_attachments_of_a_pdf_are_read() -> None:
    letter, prices = read_document("a.pdf", more_files.pdf_with_attachment()).sections
    assert letter.text.startswith("The prices of buoys")
    assert prices.text.splitlines()[-1] == "| Buoy | 40 |"
    assert prices.metadata["attachment"] == "prices.csv"


def test_files_within_files_count_towards_the_limit() -> None:
    saved = io.BytesIO()
    with zipfile.ZipFile(saved, "w", zipfile.ZIP_DEFLATED) as made:
        for number in range(3):
            made.writestr(f"{number}.txt", "x" * 4000)
    with pytest.raises(UnreadableDocument, match="unpacks to 12,000 bytes, more than the 10,000"):
        read_document("a.zip", saved.getvalue(), max_bytes=10_000)


def test_archives_within_archives_end() -> None:
    raw = b"The innermost file."
    name = "a.txt"
    for _ in range(DEPTH + 1):
        saved = io.BytesIO()
        with zipfile.ZipFile(saved, "w") as made:
            made.writestr(name, raw)
        name, raw = "a.zip", saved.getvalue()
    with pytest.raises(UnreadableDocument, match="more than 4 levels of files within files"):
        read_document(name, raw)


@pytest.mark.parametrize(
    ("stream", "advice"),
    [
        ("WordDocument", "an old Word; save it as .docx"),
        ("PowerPoint Document", "an old PowerPoint; save it as .pptx"),
        ("EncryptedPackage", "needs a password"),
    ],
)
def test_old_files_of_office_get_advice_by_their_content(stream: str, advice: str) -> None:
    raw = more_files.compound_file({stream: b"content"})
    with pytest.raises(UnreadableDocument, match=advice):
        read_document("a.docx", raw)
