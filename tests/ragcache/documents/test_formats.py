"""Files of all types: what of them becomes text, and what is refused."""

from __future__ import annotations

import io
import sys
import zipfile

import pytest

from ragcache.documents import SourceDocument
from ragcache.documents.formats import excel, read_document
from ragcache.errors import MissingExtra, UnreadableDocument
from tests.ragcache.documents.sample_files import CODE, FACTS, WRITERS


def read(name: str) -> SourceDocument:
    return read_document(name, WRITERS[name]())


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_every_type_gives_its_fact_and_no_markup(name: str) -> None:
    text = read(name).text
    assert FACTS[name][1] in text
    for markup in ("</", "{color", "alert(", "\\u", "PK\x03", "&nbsp;"):
        assert markup not in text


def test_pages_of_a_pdf_know_their_number_and_headings() -> None:
    document = read("guide/handbook.pdf")
    assert [part.metadata for part in document.sections] == [{"page": 1}, {"page": 2}]
    assert [part.text.split("\n")[0] for part in document.sections] == ["# Harbour", "# Lighthouse"]


def test_larger_lines_of_a_pdf_without_outline_are_headings() -> None:
    from fpdf import FPDF

    made = FPDF()
    made.add_page()
    lines = [("Annual report", 24), ("Boats", 16), ("The boats are blue and float well.", 11)]
    for text, size in [*lines, ("They are washed in May, and again in June.", 11)]:
        made.set_font("helvetica", size=size)
        made.cell(0, 12, text, new_x="LMARGIN", new_y="NEXT")
    [page] = read_document("a.pdf", bytes(made.output())).sections
    assert page.text.startswith("# Annual report\n\n## Boats\n\nThe boats are blue")


def test_a_pdf_without_text_says_so() -> None:
    from fpdf import FPDF

    made = FPDF()
    made.add_page()
    with pytest.raises(
        UnreadableDocument, match="holds no text: page 1: no text; scanned pages need OCR"
    ):
        read_document("scan.pdf", bytes(made.output()))
    locked = FPDF()
    locked.set_encryption("owner", "user")
    locked.add_page()
    with pytest.raises(UnreadableDocument, match="needs a password"):
        read_document("locked.pdf", bytes(locked.output()))


def test_slides_have_pages_tables_and_notes() -> None:
    first, second = read("slides.pptx").sections
    assert first.text == "# Gulls\n\nGulls feed themselves."
    assert second.metadata == {"page": 2}
    assert "| Albatross | 3 |" in second.text
    assert second.text.endswith("Notes: The albatross eats squid.")


def test_sheets_are_tables_under_their_names() -> None:
    landings, prices = read("figures.xlsx").sections
    assert landings.text.startswith("# Landings\n\n| Quay | Lobsters |\n| --- | --- |\n")
    assert prices.metadata == {"sheet": "Prices"}
    assert "| Cod | 7.5 |" in prices.text


WHOLE = {
    "report.docx": "# Ferries\n\n## Pelican\n\nThe pelican ferry is painted orange.\n\n"
    "| Ferry | Seats |\n| --- | --- |\n| Pelican | 60 |",
    "page.html": "# Breakwater\n\nThe granite breakwater is 7 km long.\n\n"
    "| Pier | Depth |\n| --- | --- |\n| East | 4 m |",
    "study.ipynb": "# Plankton study\n\n```python\n# not a heading\nprint(count())\n```\n\n"
    "```output\n9182 plankton\n```",
    "settings.json": "# winch\n\nvoltage: 48\nmaker: Quill & Sons\n\n# lamps\n\n"
    "| id | watts |\n| --- | --- |\n| 1 | 5 |",
    "crane.py": CODE.decode(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_structure_becomes_markdown(name: str) -> None:
    assert read(name).text == WHOLE[name]
    assert read(name).metadata == ({"title": "Breakwater"} if name == "page.html" else {})
    [part] = read(name).sections
    assert part.language == ("python" if name == "crane.py" else "")


def test_html_is_read_in_the_encoding_that_it_declares() -> None:
    page = '<meta charset="iso-8859-5"><p>Ключ</p>'.encode("iso-8859-5")
    assert read_document("a.html", page).text == "Ключ"


def test_chapters_follow_the_spine() -> None:
    assert [part.text.split("\n")[0] for part in read("book.epub").sections] == [
        "# Departure", "# Maps",
    ]  # fmt: skip


def test_json_becomes_lines_and_tables() -> None:
    deep = b'{"a": {"b": {"c": {"d": [1, {"e": "x", "f": [2]}]}}}}'
    assert read_document("a.json", deep).text.endswith("d:\n  - 1\n  - e: x\n    f:\n      - 2")
    rows = b'{"id": 1, "on": true}\n{"id": 2, "note": null}\n'
    assert read_document("a.jsonl", rows).text.splitlines()[2:] == [
        "| 1 | true |  |",
        "| 2 |  |  |",
    ]
    assert read_document("a.json", b"// no JSON\n{}").text == "// no JSON\n{}"


def test_mail_has_headers_and_readable_attachments() -> None:
    document = read("letter.eml")
    message, menu = document.sections
    assert message.text.startswith("# Regatta dinner\n\nFrom: Ines Marlow <ines@harbour.example>\n")
    assert "Attachment: menu.txt\nAttachment: map.png (not read)" in message.text
    assert message.text.endswith("on Saturday in the sail loft.")
    assert (menu.text.strip(), menu.metadata) == ("Soup, then cod.", {"attachment": "menu.txt"})
    assert document.metadata["subject"] == "Regatta dinner"


@pytest.mark.parametrize("name", ["a.docx", "a.pptx", "a.xlsx", "a.epub", "a.pdf", "a.ipynb"])
def test_damaged_files_are_named_as_such(name: str) -> None:
    whole = WRITERS[next(each for each in WRITERS if each.endswith(name[1:]))]()
    for damaged in (whole[: len(whole) // 3], b"just words"):
        with pytest.raises(UnreadableDocument, match=r"damaged|cannot be read as"):
            read_document(name, damaged)


def test_an_archive_that_unpacks_to_too_much_is_refused() -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", "x" * 100_000)
    with pytest.raises(UnreadableDocument, match="unpacks to 100,000 bytes, more than the 1,000"):
        read_document("bomb.docx", packed.getvalue(), max_bytes=1000)


@pytest.mark.parametrize("name", ["a.md", "a.html", "a.json"])
def test_a_document_of_too_much_text_is_refused(name: str) -> None:
    with pytest.raises(UnreadableDocument, match=r"of text, more than the 5 .*document_bytes"):
        read_document(name, b'"words of a text"', max_bytes=5)


def test_a_sheet_that_says_it_is_huge_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from openpyxl import Workbook

    monkeypatch.setattr(excel, "MAX_SHEET", 900)
    book, saved = Workbook(), io.BytesIO()
    book.active["A1"], book.active["CV11"] = "a", "b"
    book.save(saved)
    with pytest.raises(UnreadableDocument, match="more than 900 cells"):
        read_document("wide.xlsx", saved.getvalue())


def test_objects_of_different_keys_are_no_table() -> None:
    lines = "\n".join(f'{{"berth {n}": {n}}}' for n in range(300))
    text = read_document("berths.jsonl", lines.encode()).text
    assert "berth 299: 299" in text
    assert len(text) < 3 * len(lines)


def test_a_table_that_grows_quadratically_is_refused() -> None:
    rows = "a\n" * 5000 + "," * 1000
    with pytest.raises(UnreadableDocument, match="more than 4,000,000 cells"):
        read_document("sparse.csv", (rows + "x\n").encode())


@pytest.mark.parametrize("filler", ["", "x,y,z\n" * 20_000])
def test_quotes_in_quoted_cells_of_a_csv_file_are_doubled(filler: str) -> None:
    raw = f'a,b,c\n{filler}1,"he said ""hi, there"" today",2\n'
    assert '| 1 | he said "hi, there" today | 2 |' in read_document("q.csv", raw.encode()).text
    raw = 'name;note\nAnna;"says ""a; b"" now"\n'
    assert '| Anna | says "a; b" now |' in read_document("q.csv", raw.encode()).text


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("a.pdf", "pypdfium2"),
        ("a.docx", "mammoth"),
        ("a.pptx", "pptx"),
        ("a.xlsx", "python_calamine"),
        ("a.rtf", "striprtf.striprtf"),
        ("a.msg", "oxmsg"),
    ],
)
def test_a_type_without_its_library_names_the_extra(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtra, match=r"pip install 'ragcache\[documents\]'"):
        read_document(name, b"%PDF-" if name == "a.pdf" else b"PK\x03\x04")


def test_a_pdf_of_another_name_is_still_a_pdf() -> None:
    assert "cellar" in read_document("notes.txt", WRITERS["guide/handbook.pdf"]()).text
