"""One real file of each type, with a fact of its own, made by the libraries that write them."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Callable
from email.message import EmailMessage

FACTS = {
    "guide/handbook.pdf": ("Where does the lighthouse keeper sleep?", "cellar"),
    "report.docx": ("What colour is the pelican ferry?", "orange"),
    "slides.pptx": ("Who feeds the albatross?", "Marlow"),
    "figures.xlsx": ("How many lobsters were landed at Quay North?", "417"),
    "page.html": ("How long is the granite breakwater?", "7 km"),
    "book.epub": ("What does the cartographer carry?", "sextant"),
    "people.csv": ("Which desk has Ines Quill?", "K12"),
    "settings.json": ("Which voltage has the winch?", "48"),
    "letter.eml": ("When is the regatta dinner?", "Saturday"),
    "study.ipynb": ("What did the plankton study count?", "9182"),
    "crane.py": ("What does the function hoist_anchor return?", "fathoms"),
    "notes.md": ("Where hangs the spare key of the boathouse?", "red cupboard"),
    "old.txt": ("Was trinkt der Schleusenwärter?", "Kräutertee"),
}
"""By file a question that only it answers, and a word of the answer."""


def pdf() -> bytes:
    from fpdf import FPDF

    made = FPDF()
    for title, text in (
        ("Harbour", "The harbour opens at eight and closes when the tide turns."),
        ("Lighthouse", "The lighthouse keeper sleeps in the cellar below the lamp room."),
    ):
        made.add_page()
        made.set_font("helvetica", size=22)
        made.start_section(title)
        made.cell(0, 14, title, new_x="LMARGIN", new_y="NEXT")
        made.set_font("helvetica", size=11)
        made.multi_cell(0, 6, text)
    return bytes(made.output())


def docx() -> bytes:
    import docx as library

    made = library.Document()
    made.add_heading("Ferries", 0)
    made.add_heading("Pelican", 1)
    made.add_paragraph("The pelican ferry is painted orange.")
    table = made.add_table(2, 2)
    cells = (cell for row in table.rows for cell in row.cells)
    for cell, text in zip(cells, ("Ferry", "Seats", "Pelican", "60"), strict=True):
        cell.text = text
    return _saved(made.save)


def pptx() -> bytes:
    from pptx import Presentation
    from pptx.util import Inches

    made = Presentation()
    for title, text in (("Gulls", "Gulls feed themselves."), ("Albatross", "Fed by Tom Marlow.")):
        slide = made.slides.add_slide(made.slide_layouts[1])
        slide.shapes.title.text = title
        slide.placeholders[1].text = text
    slide.notes_slide.notes_text_frame.text = "The albatross eats squid."
    shape = slide.shapes.add_table(2, 2, Inches(1), Inches(4), Inches(4), Inches(1))
    cells = (cell for row in shape.table.rows for cell in row.cells)
    for cell, text in zip(cells, ("Bird", "Span", "Albatross", "3"), strict=True):
        cell.text = text
    return _saved(made.save)


def xlsx() -> bytes:
    from openpyxl import Workbook

    made = Workbook()
    sheet = made.active
    assert sheet is not None
    sheet.title = "Landings"
    for row in (("Quay", "Lobsters"), ("Quay North", 417), ("Quay South", 23)):
        sheet.append(row)
    other = made.create_sheet("Prices")
    other.append(("Fish", "Price"))
    other.append(("Cod", 7.5))
    return _saved(made.save)


def epub() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        made.writestr("mimetype", "application/epub+zip")
        made.writestr(
            "META-INF/container.xml",
            '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
            '<rootfile full-path="OPS/book.opf"/></rootfiles></container>',
        )
        made.writestr(
            "OPS/book.opf",
            '<package xmlns="http://www.idpf.org/2007/opf"><manifest>'
            '<item id="two" href="ch%202.xhtml" media-type="application/xhtml+xml"/>'
            '<item id="one" href="ch1.xhtml" media-type="application/xhtml+xml"/></manifest>'
            '<spine><itemref idref="one"/><itemref idref="two"/></spine></package>',
        )
        page = (
            '<?xml version="1.0" encoding="utf-8"?><html xmlns="http://www.w3.org/1999/xhtml">'
            "<head><title>{0}</title></head><body><h1>{0}</h1><p>{1}</p></body></html>"
        )
        made.writestr("OPS/ch1.xhtml", page.format("Departure", "They left at dawn."))
        made.writestr("OPS/ch 2.xhtml", page.format("Maps", "The cartographer carries a sextant."))
    return buffer.getvalue()


def html() -> bytes:
    return (
        b"<!doctype html><html><head><title>Breakwater</title><style>p{color:red}</style>"
        b"<script>alert('no')</script></head><body><nav>Home</nav><h1>Breakwater</h1>"
        b"<p>The granite breakwater is <b>7&nbsp;km</b> long.</p>"
        b"<table><tr><th>Pier</th><th>Depth</th></tr><tr><td>East</td><td>4 m</td></tr></table>"
        b"</body></html>"
    )


def mail() -> bytes:
    made = EmailMessage()
    made["Subject"], made["From"] = "Regatta dinner", "Ines Marlow <ines@harbour.example>"
    made["To"], made["Date"] = "crew@harbour.example", "Tue, 03 Mar 2026 10:00:00 +0000"
    made.set_content("The regatta dinner is on Saturday in the sail loft.")
    made.add_alternative("<p>The regatta dinner is on <b>Saturday</b>.</p>", subtype="html")
    made.add_attachment("Soup, then cod.", filename="menu.txt")
    made.add_attachment(b"\x89PNG", maintype="image", subtype="png", filename="map.png")
    return bytes(made)


def notebook() -> bytes:
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# Plankton study"]},
        {
            "cell_type": "code", "metadata": {}, "execution_count": 1,
            "source": ["# not a heading\n", "print(count())"],
            "outputs": [{"output_type": "stream", "name": "stdout", "text": ["9182 plankton\n"]}],
        },
    ]  # fmt: skip
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}).encode()


def table() -> bytes:
    written = io.StringIO()
    rows = [("Name", "Desk"), ("Tom Hartley", "A3"), ("Ines Quill", "K12")]
    csv.writer(written, delimiter=";").writerows(rows)
    return written.getvalue().encode()


CODE = b'''# The crane of the shipyard.
def hoist_anchor(chain: int) -> float:
    """Returns the length of the chain in fathoms."""
    return chain / 1.83
'''
WRITERS: dict[str, Callable[[], bytes]] = {
    "guide/handbook.pdf": pdf,
    "report.docx": docx,
    "slides.pptx": pptx,
    "figures.xlsx": xlsx,
    "page.html": html,
    "book.epub": epub,
    "people.csv": table,
    "settings.json": lambda: json.dumps(
        {"winch": {"voltage": 48, "maker": "Quill & Sons"}, "lamps": [{"id": 1, "watts": 5}]}
    ).encode(),
    "letter.eml": mail,
    "study.ipynb": notebook,
    "crane.py": lambda: CODE,
    "notes.md": lambda: b"# Keys\n\nThe spare key of the boathouse hangs in the red cupboard.",
    "old.txt": lambda: "Der Schleusenwärter trinkt Kräutertee, früh und spät.".encode("cp1252"),
}


def _saved(save: Callable[[io.BytesIO], object]) -> bytes:
    buffer = io.BytesIO()
    save(buffer)
    return buffer.getvalue()
