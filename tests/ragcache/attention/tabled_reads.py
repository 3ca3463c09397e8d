"""Definition of the tokens that the rows of a step read: a slow walk over its tables."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ragcache.attention.triton.tables import TableViews


class SeenKey(NamedTuple):
    """A key that a row sees: the address of the base's keys and the token in it; by how much its
    states were moved, and at which position the row sees it."""

    address: int
    token: int
    delta: int
    position: int


def items_of(tables: TableViews) -> list[list[int]]:
    """The items that the kernels walk, plain ones first."""
    plain, quantized = tables.counts[:2].tolist()
    items: list[list[int]] = tables.items[: plain + quantized].tolist()
    assert [item[5] for item in items] == [0] * plain + [1] * quantized
    return items


def keys_of_rows(tables: TableViews, rows: int) -> list[Counter[SeenKey]]:
    """For each row, how often it sees which keys through the items."""
    seen: list[Counter[SeenKey]] = [Counter() for _ in range(rows)]
    bases, row_of, delta, limit, origin = (
        table.tolist()
        for table in (
            tables.bases, tables.entry_row, tables.entry_delta, tables.entry_limit,
            tables.entry_origin,
        )
    )  # fmt: skip
    for base, begin, end, first, count, *_ in items_of(tables):
        for entry in range(first, first + count):
            for token in range(begin, min(end, limit[entry])):
                key = SeenKey(bases[base][0], token, delta[entry], origin[entry] + token)
                seen[row_of[entry]][key] += 1
    return seen


def assert_partials_reach_their_rows(tables: TableViews, rows: int) -> None:
    """Every entry of an item is a partial result of its row, once; padding has none."""
    entries = [e for item in items_of(tables) for e in range(item[3], item[3] + item[4])]
    assert sorted(entries) == list(range(len(entries))), "each entry is in one item"
    begins, rows_entries = tables.row_ptr.tolist(), tables.row_entries.tolist()
    row_of = tables.entry_row.tolist()
    assert begins[0] == 0
    assert set(begins[rows:]) == {len(entries)}, "rows of padding have no entries"
    found = []
    for row in range(rows):
        own = rows_entries[begins[row] : begins[row + 1]]
        assert [row_of[entry] for entry in own] == [row] * len(own)
        found += own
    assert sorted(found) == sorted(entries)
