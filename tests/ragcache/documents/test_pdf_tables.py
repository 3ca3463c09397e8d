"""Tables of PDFs: ruled, partly ruled and unruled ones keep their rows and columns."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from fpdf import FPDF
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.documents.formats import read_document
from ragcache.documents.markdown import write_table
from ragcache.documents.pdf_tables import Rule, Word, find_tables

INVOICE = (
    ("Item", "Article", "Pieces", "Price"),
    ("A-12", "Brass shackle", "450", "12.50"),
    ("B-07", "Hemp rope, tarred", "", "289.00"),
    ("B-09", "Return of a buoy", "-1", "-23.00"),
    ("C-31", "Lamp oil", "6", ""),
)
PROSE = "The harbour master writes the log of the tides each morning before the pilots come. "


def page() -> FPDF:
    made = FPDF()
    made.add_page()
    made.set_font("helvetica", size=11)
    made.multi_cell(0, 6, PROSE * 3)
    made.ln(8)
    return made


def text_of(made: FPDF) -> str:
    return read_document("a.pdf", bytes(made.output())).text


def write(made: FPDF, rows: Sequence[Sequence[str]], *, border: int | str = 0) -> None:
    for row in rows:
        for number, cell in enumerate(row):
            align = "R" if number > 1 else "L"
            made.cell((20, 60, 30, 30)[number], 7, cell, border=border, align=align)
        made.ln()


@pytest.mark.parametrize("border", [0, 1, "LR", "TB", "B"])
def test_cells_stay_in_their_rows_and_columns(border: int | str) -> None:
    made = page()
    write(made, INVOICE, border=border)
    made.ln(8)
    made.multi_cell(0, 6, PROSE * 2)
    text = text_of(made)
    assert write_table(INVOICE) in text
    assert text.startswith("The harbour master")
    assert text.endswith("before the pilots come.")


def test_merged_cells_of_a_ruled_table_stand_in_each_place() -> None:
    made = page()
    with made.table(col_widths=(20, 20, 20), num_heading_rows=2) as table:
        first = table.row()
        first.cell("Ward", rowspan=2)
        first.cell("Beds", colspan=2)
        table.row(("free", "taken"))
        table.row(("North", "4", "9"))
    assert (
        "| Ward | Beds | Beds |\n| --- | --- | --- |\n| Ward | free | taken |\n| North | 4 | 9 |"
    ) in text_of(made)


def test_lines_of_one_ruled_cell_are_joined() -> None:
    made = page()
    with made.table(col_widths=(20, 40), width=80) as table:
        table.row(("Key", "Meaning"))
        table.row(("red", "no ship may enter the harbour before the tide has turned"))
        table.row(("green", "all may enter"))
    assert "| red | no ship may enter the harbour before the tide has turned |" in text_of(made)


def test_table_of_text_that_runs_upwards_is_read() -> None:
    made = FPDF()
    made.add_page()
    made.set_font("helvetica", size=11)
    with made.rotation(90, x=100, y=150):
        for line, row in enumerate(INVOICE):
            made.set_xy(40, 100 + 7 * line)
            for number, cell in enumerate(row):
                made.cell((20, 60, 30, 30)[number], 7, cell, border=1)
    assert write_table(INVOICE) in text_of(made)


def test_prose_in_columns_and_lists_are_no_tables() -> None:
    made = FPDF()
    made.add_page()
    made.set_font("helvetica", size=10)
    with made.text_columns(ncols=2, gutter=8) as columns:
        columns.write(PROSE * 30)
    made.add_page()
    for number in range(1, 9):
        made.cell(8, 6, f"{number}.")
        made.cell(0, 6, "The pilot reads the list of ships.", new_x="LMARGIN", new_y="NEXT")
    assert "|" not in text_of(made)


def test_boxes_of_a_drawing_are_no_table() -> None:
    made = page()
    chance = random.Random(7)
    for _ in range(14):
        left, top = chance.uniform(20, 140), chance.uniform(80, 220)
        made.rect(left, top, chance.uniform(20, 50), chance.uniform(15, 40))
        made.text(left + 2, top + 6, "boat")
    assert "|" not in text_of(made)


CELL = st.sampled_from(("buoy", "4.20", "tide 3", "North", "17", "n/a", "Ines Quill"))


ROWS = st.integers(3, 7).flatmap(
    lambda n: st.lists(st.lists(CELL, min_size=n, max_size=n), min_size=3, max_size=8)
)


@settings(deadline=None)
@given(ROWS)
def test_full_ruled_tables_are_read_whole(rows: list[list[str]]) -> None:
    words: list[Word] = []
    for line, row in enumerate(rows):
        for column, cell in enumerate(row):
            left = 50.0 + 80 * column
            for piece in cell.split():
                width = 5.0 * len(piece)
                low = 700.0 - 20 * line
                at = len(words)
                words.append(Word(piece, left, low, left + width, low + 10, at, at + 1))
                left += width + 2.5
    wide, high = 80 * len(rows[0]), 20 * len(rows)
    rules = [Rule(715.0 - 20 * n, 45, 45 + wide, False) for n in range(len(rows) + 1)]
    rules += [Rule(45.0 + 80 * n, 715 - high, 715, True) for n in range(len(rows[0]) + 1)]
    [table] = find_tables(words, rules)
    assert table.rows == rows
    assert len(table.words) == len(words)
