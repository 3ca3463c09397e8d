"""What a search costs does not grow with the modules, and nothing is lost for it."""

from __future__ import annotations

import random
from dataclasses import replace
from math import log2

import pytest

from ragcache.recognition import WINDOW, find
from ragcache.recognition.group import Group
from ragcache.recognition.prints import Prints
from ragcache.recognition.table import Table
from ragcache.store import ModuleRow

HEAD = "Title: The handbook of the harbour, third edition\n\n"
FOOT = "\n\nPrinted at the harbour office; not to be taken aboard.\n"
COUNT = 10_000


def rows_of(texts: list[str]) -> list[ModuleRow]:
    return [ModuleRow(n, f"d#{n}", "d", "", text) for n, text in enumerate(texts)]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The modules whose texts were looked at, in turn."""
    seen: list[int] = []
    read = Group._text

    def text(self: Group, number: int) -> str:
        seen.append(number)
        return read(self, number)

    monkeypatch.setattr(Group, "_text", text)
    return seen


def words(n: int) -> str:
    return f"{random.Random(n).getrandbits(600):x} {n}"


CORPORA = {
    "nothing": words,
    "a heading": lambda n: HEAD + words(n),
    "a footer": lambda n: words(n) + FOOT,
    "both": lambda n: HEAD + words(n) + FOOT,
    "all but a number": lambda n: f"{HEAD}{n:05}{FOOT}",
    "a line of rules": lambda n: "=" * 80 + "\n" + words(n),
}


@pytest.mark.parametrize("shared", CORPORA)
def test_ten_thousand_modules_cost_a_bisection_a_place(shared: str, compared: list[int]) -> None:
    texts = [CORPORA[shared](n) for n in range(COUNT)]
    table = Table(Prints.of(rows_of(texts)))
    chosen = random.Random(3).sample(range(COUNT), 100)
    text = "\n\n".join(texts[n] for n in chosen)
    assert [each.module.id for each in find(text, table)] == chosen
    rules = 49 if shared == "a line of rules" else 1  # windows of a line that are its beginning
    places, _ = table.pairs(text)
    assert len(chosen) <= len(places) <= len(chosen) * rules
    assert len(compared) <= len(chosen) * (log2(COUNT) + 2), "whatever its windows"


def test_a_text_that_repeats_itself_costs_a_bisection_a_place(compared: list[int]) -> None:
    sizes = range(WINDOW, 1000)
    table = Table(Prints.of(rows_of(["a" * size for size in sizes])))
    text = "a" * 5000
    assert [each.end - each.begin for each in find(text, table)] == [999] * 5  # 5 are left over
    assert len(table.pairs(text)[0]) == len(text) - WINDOW + 1
    assert len(compared) <= len(text) * (log2(len(sizes)) + 2)


def test_groups_are_put_in_order_once_and_by_need(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    of = Group.of
    monkeypatch.setattr(Group, "of", lambda rows: made.append(len(rows)) or of(rows))
    texts = [HEAD + "The boats.", HEAD + "The keys.", words(1), words(2)]
    table = Table(Prints.of(rows_of(texts)))
    assert made == []
    for _ in range(2):
        assert [each.module.id for each in find(words(2) + texts[1], table)] == [3, 1]
    assert sorted(made) == [1, 2]


def test_of_equal_texts_the_first_part_has_the_one() -> None:
    one, other = HEAD + "The boats.", HEAD + "The keys."
    parts = [Prints.of(rows_of([other, one + "\n", one])), Prints.of(rows_of([one, other]))]
    for joined in (parts, parts[::-1]):
        table = Table(Prints.joined(joined))
        ours = {row.text.strip(): row for row in reversed(joined[0].modules)}
        found = [each.module for each in find(other + one, table)]
        assert found[0] is ours[other]
        assert found[1] is ours[one]


@pytest.mark.parametrize("between", [[], ["L" * 40]])
def test_windows_whose_hashes_agree_by_chance_hide_nothing(between: list[str]) -> None:
    texts = ["A" * 40, *between, "Z" * 40]  # neighbours or not, in order
    prints = Prints.of(rows_of(texts))
    for number, text in ((0, texts[0]), (len(texts) - 1, texts[-1])):
        firsts = prints.firsts.copy()
        firsts[[0, -1]] = firsts[number]
        [found] = find(f"It says: {text}", Table(replace(prints, firsts=firsts)))
        assert found.module.id == number
