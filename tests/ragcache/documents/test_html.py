"""Tables of HTML and Word as grids: merged cells stand in each place that they cover."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from ragcache.documents.formats import read_document
from ragcache.documents.html import read_html


class Cell(NamedTuple):
    """A cell of a table with its place and size."""

    top: int
    left: int
    height: int
    width: int


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, list[Cell]]:
    """Draw a table: its rows, its columns, and cells that cover each place once."""
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(2, 6))
    free = {(row, column) for row in range(rows) for column in range(columns)}
    cells = []
    while free:
        top, left = min(free)
        height = draw(st.integers(1, rows - top))
        width = draw(st.integers(1, columns - left))
        while not {(top, left + column) for column in range(width)} <= free:
            width -= 1
        while not _places(Cell(top, left, height, width)) <= free:
            height -= 1
        cells.append(Cell(top, left, height, width))
        free -= _places(cells[-1])
    return rows, columns, cells


def _places(cell: Cell) -> set[tuple[int, int]]:
    rows = range(cell.top, cell.top + cell.height)
    return {(row, left) for row in rows for left in range(cell.left, cell.left + cell.width)}


def _markup(rows: int, cells: Sequence[Cell]) -> str:
    lines = [""] * rows
    for number, cell in enumerate(cells):
        lines[cell.top] += f'<td rowspan="{cell.height}" colspan="{cell.width}">c{number}</td>'
    return "<table><tr>" + "</tr><tr>".join(lines) + "</tr></table>"


def _grid(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if not line.startswith("| ---")]
    return [line.strip("| ").split(" | ") for line in lines]


@given(layouts())
def test_each_place_of_a_table_has_the_cell_that_covers_it(
    layout: tuple[int, int, list[Cell]],
) -> None:
    rows, columns, cells = layout
    owners = {place: f"c{number}" for number, cell in enumerate(cells) for place in _places(cell)}
    expected = [[owners[row, column] for column in range(columns)] for row in range(rows)]
    titles = {cell.top: f"c{n}" for n, cell in enumerate(cells) if cell.width == columns}
    for cell in cells:  # a cell across the table stands once in each of its rows
        if cell.width == columns:
            for row in range(cell.top, cell.top + cell.height):
                expected[row] = [titles[cell.top], *[""] * (columns - 1)]
    if all(cell.width == columns for cell in cells):
        return  # a table of one column is layout
    found = [
        [*row, *[""] * (columns - len(row))] for row in _grid(read_html(_markup(rows, cells)).text)
    ]
    assert [[cell.strip() for cell in row] for row in found] == expected


def test_a_value_beside_a_rowspan_stays_with_its_person() -> None:
    page = (
        "<table><tr><th>Ward</th><th>Name</th><th>Bed</th></tr>"
        "<tr><td rowspan=2>North</td><td>Ines</td><td>4</td></tr>"
        "<tr><td>Tom</td><td>9</td></tr></table>"
    )
    assert read_html(page).text.splitlines()[2:] == ["| North | Ines | 4 |", "| North | Tom | 9 |"]


def test_merged_cells_of_word_keep_their_neighbors_in_place() -> None:
    import docx

    made = docx.Document()
    table = made.add_table(3, 3)
    for row, texts in enumerate(
        (("Ward", "Name", "Bed"), ("North", "Ines", "4"), ("", "Tom", "9"))
    ):
        for column, text in enumerate(texts):
            table.cell(row, column).text = text
    table.cell(1, 0).merge(table.cell(2, 0))
    saved = io.BytesIO()
    made.save(saved)
    assert "| North | Tom | 9 |" in read_document("a.docx", saved.getvalue()).text


def test_a_rowspan_ends_with_its_group_of_rows() -> None:
    page = (
        "<table><thead><tr><th rowspan=9>A</th><th>B</th></tr></thead>"
        "<tbody><tr><td rowspan=0>1</td><td>2</td></tr><tr><td>3</td></tr></tbody></table>"
    )
    assert _grid(read_html(page).text) == [["A", "B"], ["1", "2"], ["1", "3"]]
