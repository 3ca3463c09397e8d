"""Modules are found where a search for every one of them would find them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from ragcache.recognition import WINDOW, Found, find
from ragcache.recognition.prints import Prints
from ragcache.recognition.table import Table
from ragcache.store import ModuleRow

HEAD = "# The handbook of the harbour\n\n## Boats\n\n"  # longer than a fingerprint
FOOT = "\n\nPrinted at the harbour office; not to be taken aboard.\n"


def rows_of(texts: list[str]) -> list[ModuleRow]:
    return [ModuleRow(n, f"d#{n}", "d", "", text) for n, text in enumerate(texts)]


def table_of(texts: list[str]) -> Table:
    return Table(Prints.of(rows_of(texts)))


def places(found: list[Found]) -> list[tuple[int, int, int]]:
    return [(each.begin, each.end, each.module.id) for each in found]


def naive(text: str, texts: list[str]) -> list[tuple[int, int, int]]:
    """By `str.find` for every module: where it stands without outer whitespace."""
    seen = []
    for number, module in enumerate(map(str.strip, texts)):
        at = text.find(module) if len(module) >= WINDOW else -1
        while at >= 0:
            seen.append((-len(module), at, number))
            at = text.find(module, at + 1)
    taken: list[tuple[int, int, int]] = []
    for length, at, number in sorted(seen):
        if all(at - length <= begin or end <= at for begin, end, _ in taken):
            taken.append((at, at - length, number))
    return sorted(taken)


def trimmed(found: list[Found], text: str) -> list[tuple[int, int, int]]:
    """The places of what was found, without outer whitespace."""
    result = []
    for each in found:
        here = text[each.begin : each.end]
        begin = each.begin + len(here) - len(here.lstrip())
        result.append((begin, begin + len(here.strip()), each.module.id))
    return result


LETTERS = st.text(st.sampled_from("ab \n"), min_size=20, max_size=50)
FEW = st.text(st.sampled_from("a\u4e00"), max_size=4)
PLAIN = st.builds("{}{}{}{}".format, st.sampled_from(["", HEAD]), LETTERS, LETTERS,
                  st.sampled_from(["", FOOT]))  # fmt: skip
ALIKE = st.builds("{}{}{}".format, st.just(HEAD), FEW, st.sampled_from(["", FOOT, "\n"]))
RUNS = st.builds("{}{}".format, st.integers(30, 60).map("a".__mul__), st.sampled_from(["", "b"]))
BASE = st.one_of(PLAIN, ALIKE, RUNS)


@st.composite
def modules(draw: st.DrawFn) -> list[str]:
    """With parts of one another: beginnings, ends and middles, which overlap where they stand."""
    texts = draw(st.lists(BASE, max_size=6))
    for text in draw(st.lists(st.sampled_from(texts), max_size=4)) if texts else ():
        begin = draw(st.sampled_from([0, 0, 5, 17]))
        texts.append(text[begin : len(text) - draw(st.sampled_from([0, 1, 9, 23]))])
    return texts


@given(modules(), st.data())
@example(["a" * 40, "a" * 33, "a" * 40 + "\n"], None)
def test_it_finds_what_a_naive_search_finds(texts: list[str], data: st.DataObject | None) -> None:
    if data is None:
        text = "b" + "a" * 120
    else:
        known = st.sampled_from(texts or ["b"])
        cut = st.builds(lambda t, a, b: t[a:b], known, st.integers(0, 40), st.integers(40, 150))
        part = st.one_of(LETTERS, known, known.map(str.strip), known.map(lambda t: t[:-7]), cut)
        text = "".join(data.draw(st.lists(part, max_size=8)))
    found = find(text, table_of(texts))
    assert trimmed(found, text) == naive(text, texts)
    for each, after in pairwise(found):
        assert each.end <= after.begin
    for each in found:
        assert each.whole == (text[each.begin : each.end] == each.module.text)


def test_outer_whitespace_belongs_to_a_module_where_it_stands() -> None:
    module = "The survey boat Pipit is moored at the quay.\n\n"
    table = table_of([module])
    size = len(module.strip())
    [whole] = find(f"Read: {module}Now", table)
    assert (whole.begin, whole.end, whole.whole) == (6, 6 + len(module), True)
    for after in ("", "\n", "\r\n\r\n", " and"):
        [bare] = find(f"Read: {module.strip()}{after}", table)
        assert (bare.begin, bare.end, bare.whole) == (6, 6 + size, False)


def test_whitespace_that_two_modules_claim_goes_to_the_first() -> None:
    one, other = (
        "The first of two modules that meet.\n\n",
        "\n\nThe second one of them, which follows.",
    )
    text = one + other.lstrip()
    first, second = find(text, table_of([one, other]))
    assert (first.end, first.whole) == (len(one), True)
    assert (second.begin, second.whole) == (len(one), False)


def test_short_modules_and_texts_are_passed_over() -> None:
    assert find("x" * (WINDOW - 1), table_of(["x" * (WINDOW - 1)])) == []
    assert find("", table_of(["x" * 40])) == []
    assert find("x" * 40, table_of([])) == []
    assert places(find("x" * WINDOW, table_of(["x" * WINDOW]))) == [(0, WINDOW, 0)]


def test_of_equal_texts_the_first_is_meant() -> None:
    text = "The same words in two documents of one kind."
    assert places(find(text, table_of([text + "\n", text]))) == [(0, len(text), 0)]


def test_hashes_that_agree_by_chance_find_nothing() -> None:
    text = "The survey boat Pipit is moored at the quay."
    true = Prints.of(rows_of([text]))
    other = replace(true, modules=tuple(rows_of(["The survey boat Pipit is moored at the pier."])))
    assert find(text, Table(true)) != []
    assert find(text, Table(other)) == []


def test_many_modules_of_one_beginning_are_told_apart() -> None:
    texts = [f"{HEAD}The boat of berth {n} is moored at the north quay." for n in range(40)]
    text = "".join(reversed(texts))
    assert trimmed(find(text, table_of(texts)), text) == naive(text, texts)
    assert len(find(text, table_of(texts))) == 40


def test_a_text_that_repeats_itself_is_searched_to_its_end() -> None:
    texts = ["a" * (WINDOW + n) for n in range(20)]
    text = "a" * 400 + "b" + "a" * 60
    assert trimmed(find(text, table_of(texts)), text) == naive(text, texts)


def test_where_the_longest_has_no_room_a_shorter_one_is_found() -> None:
    short = "The survey boat Pipit is moored at the"
    longer = short + " north quay."
    longest = "north quay. The crew meets at eight, aboard, in oilskins and boots."
    text = short + " " + longest
    assert places(find(text, table_of([short, longer, longest]))) == [
        (0, len(short), 0),
        (len(short) + 1, len(text), 2),
    ]
