"""Modules are found where a search for each of them finds them, at a bisection a place."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from math import log2
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ragcache.db import Catalog, Database, ModuleRow, NewDocument, NewModule
from ragcache.recognition import (
    WINDOW,
    Fingerprints,
    FingerprintTable,
    PrefixGroup,
    RecognizedModule,
    Recognizer,
    find,
    window_hashes,
)
from ragcache.recurrence import GRAM
from ragcache.states import KVKey

BOATS = "The survey boat Pipit is moored at the north quay.\n\n"
KEYS = "The spare key hangs in the red cupboard of the boathouse.\n\n"


def document(name: str, text: str) -> NewDocument:
    key = KVKey(f"{abs(hash((name, text))):064x}")
    return NewDocument(name, "", text, [NewModule(f"{name}#1", text, [1, 2], key, None)], {})


class Reading(Catalog):
    """A catalog that tells which collections were read."""

    def __init__(self, database: Database, namespace: str = "default") -> None:
        super().__init__(database, "tokens", None, namespace)
        self.read: list[str] = []

    def modules(self, collection: str):  # type: ignore[no-untyped-def]
        self.read.append(collection)
        return super().modules(collection)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database.open(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


def names(recognizer: Recognizer, text: str = BOATS + KEYS) -> list[str]:
    return [found.module.name for found in recognizer.find(text)]


def test_modules_of_every_collection_are_found(database: Database) -> None:
    catalog = Reading(database)
    recognizer = Recognizer(catalog)
    assert names(recognizer) == []
    catalog.replace_documents("a", [document("boats", BOATS)])
    assert names(recognizer) == ["boats#1"]
    catalog.replace_documents("b", [document("keys", KEYS)])
    assert names(recognizer) == ["boats#1", "keys#1"]
    assert names(recognizer) == ["boats#1", "keys#1"]
    assert catalog.read == ["a", "b"], "each was read once, when it had changed"


def test_deleted_and_renamed_modules_are_not_found(database: Database) -> None:
    catalog = Reading(database)
    recognizer = Recognizer(catalog)
    catalog.replace_documents("a", [document("boats", BOATS), document("keys", KEYS)])
    assert names(recognizer) == ["boats#1", "keys#1"]
    catalog.rename_document("a", "keys", "locks")
    assert names(recognizer) == ["boats#1", "locks#1"]
    catalog.delete_documents("a", ["boats"])
    assert names(recognizer) == ["locks#1"]


def test_another_namespace_is_not_seen(database: Database) -> None:
    mine, theirs = Reading(database, "mine"), Reading(database, "theirs")
    theirs.replace_documents("a", [document("boats", BOATS)])
    assert names(Recognizer(mine)) == []
    assert mine.read == []
    assert names(Recognizer(theirs)) == ["boats#1"]


def test_a_collection_that_goes_while_it_is_read_is_empty(database: Database) -> None:
    catalog = Reading(database)
    catalog.replace_documents("a", [document("boats", BOATS)])
    versions = {**catalog.versions(), "gone": (99, 1)}
    catalog.versions = lambda: versions  # type: ignore[method-assign]
    assert names(Recognizer(catalog)) == ["boats#1"]


def test_threads_that_ask_at_once_build_one_index(database: Database) -> None:
    catalog = Reading(database)
    catalog.replace_documents("a", [document("boats", BOATS), document("keys", KEYS)])
    recognizer = Recognizer(catalog)
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda _: names(recognizer), range(24)))
    assert all(each == ["boats#1", "keys#1"] for each in found)
    assert catalog.read == ["a"]


HEAD = "# The handbook of the harbour\n\n## Boats\n\n"  # longer than a fingerprint
FOOT = "\n\nPrinted at the harbour office; not to be taken aboard.\n"


def rows_of(texts: list[str]) -> list[ModuleRow]:
    return [ModuleRow(n, f"d#{n}", "d", "", text) for n, text in enumerate(texts)]


def table_of(texts: list[str]) -> FingerprintTable:
    return FingerprintTable(Fingerprints.of(rows_of(texts)))


def places(found: list[RecognizedModule]) -> list[tuple[int, int, int]]:
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


def trimmed(found: list[RecognizedModule], text: str) -> list[tuple[int, int, int]]:
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


def test_hashes_that_agree_by_chance_find_nothing() -> None:
    text = "The survey boat Pipit is moored at the quay."
    true = Fingerprints.of(rows_of([text]))
    other = replace(true, modules=tuple(rows_of(["The survey boat Pipit is moored at the pier."])))
    assert find(text, FingerprintTable(true)) != []
    assert find(text, FingerprintTable(other)) == []


TITLE = "Title: The handbook of the harbour, third edition\n\n"
COUNT = 10_000


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The modules whose texts were looked at, in turn."""
    seen: list[int] = []
    read = PrefixGroup._text

    def text(self: PrefixGroup, number: int) -> str:
        seen.append(number)
        return read(self, number)

    monkeypatch.setattr(PrefixGroup, "_text", text)
    return seen


def words(n: int) -> str:
    return f"{random.Random(n).getrandbits(600):x} {n}"


CORPORA = {
    "nothing": words,
    "a heading": lambda n: TITLE + words(n),
    "a footer": lambda n: words(n) + FOOT,
    "both": lambda n: TITLE + words(n) + FOOT,
    "all but a number": lambda n: f"{TITLE}{n:05}{FOOT}",
    "a line of rules": lambda n: "=" * 80 + "\n" + words(n),
}


@pytest.mark.slow
@pytest.mark.parametrize("shared", CORPORA)
def test_ten_thousand_modules_cost_a_bisection_a_place(shared: str, compared: list[int]) -> None:
    texts = [CORPORA[shared](n) for n in range(COUNT)]
    table = FingerprintTable(Fingerprints.of(rows_of(texts)))
    chosen = random.Random(3).sample(range(COUNT), 100)
    text = "\n\n".join(texts[n] for n in chosen)
    assert [each.module.id for each in find(text, table)] == chosen
    rules = 49 if shared == "a line of rules" else 1  # windows of a line that are its beginning
    places, _ = table.pairs(text)
    assert len(chosen) <= len(places) <= len(chosen) * rules
    assert len(compared) <= len(chosen) * (log2(COUNT) + 2), "whatever its windows"


def test_a_text_that_repeats_itself_costs_a_bisection_a_place(compared: list[int]) -> None:
    sizes = range(WINDOW, 1000)
    table = FingerprintTable(Fingerprints.of(rows_of(["a" * size for size in sizes])))
    text = "a" * 5000
    assert [each.end - each.begin for each in find(text, table)] == [999] * 5  # 5 are left over
    assert len(table.pairs(text)[0]) == len(text) - WINDOW + 1
    assert len(compared) <= len(text) * (log2(len(sizes)) + 2)


def test_groups_are_put_in_order_once_and_by_need(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    of = PrefixGroup.of
    monkeypatch.setattr(PrefixGroup, "of", lambda rows: made.append(len(rows)) or of(rows))
    texts = [TITLE + "The boats.", TITLE + "The keys.", words(1), words(2)]
    table = FingerprintTable(Fingerprints.of(rows_of(texts)))
    assert made == []
    for _ in range(2):
        assert [each.module.id for each in find(words(2) + texts[1], table)] == [3, 1]
    assert sorted(made) == [1, 2]


def test_of_equal_texts_the_first_part_has_the_one() -> None:
    one, other = TITLE + "The boats.", TITLE + "The keys."
    parts = [
        Fingerprints.of(rows_of([other, one + "\n", one])),
        Fingerprints.of(rows_of([one, other])),
    ]
    for joined in (parts, parts[::-1]):
        table = FingerprintTable(Fingerprints.joined(joined))
        ours = {row.text.strip(): row for row in reversed(joined[0].modules)}
        found = [each.module for each in find(other + one, table)]
        assert found[0] is ours[other]
        assert found[1] is ours[one]


@pytest.mark.parametrize("between", [[], ["L" * 40]])
def test_windows_whose_hashes_agree_by_chance_hide_nothing(between: list[str]) -> None:
    texts = ["A" * 40, *between, "Z" * 40]  # neighbors or not, in order
    prints = Fingerprints.of(rows_of(texts))
    for number, text in ((0, texts[0]), (len(texts) - 1, texts[-1])):
        firsts = prints.firsts.copy()
        firsts[[0, -1]] = firsts[number]
        [found] = find(f"It says: {text}", FingerprintTable(replace(prints, firsts=firsts)))
        assert found.module.id == number


WORDS = st.text(st.sampled_from("ab\u4e00"), max_size=8)
WITH_ONE_BEGINNING = st.lists(WORDS.map("=".__add__), min_size=1, max_size=20)


def group_of(texts: list[str]) -> PrefixGroup:
    return PrefixGroup.of([ModuleRow(n, f"d#{n}", "d", "", text) for n, text in enumerate(texts)])


@given(WITH_ONE_BEGINNING, WORDS, st.integers(0, 3))
def test_the_longest_that_stands_there(texts: list[str], after: str, place: int) -> None:
    group = group_of(texts)
    for text in (" " * place + "=" + after, " " * place + texts[0] + after):
        number = group.at(text, place)
        standing = [t for t in texts if text.startswith(t, place)]
        assert (group.modules[number].text if number >= 0 else "") == max(
            standing, key=len, default=""
        )


@given(WITH_ONE_BEGINNING, st.integers(0, 9))
def test_the_longest_that_begins_a_text_and_has_room(texts: list[str], size: int) -> None:
    group = group_of(texts)
    for number, module in enumerate(group.modules):
        shorter = group.within(number, size)
        fitting = [t for t in texts if module.text.startswith(t) and len(t) <= size]
        assert (group.modules[shorter].text if shorter >= 0 else "") == max(
            fitting, key=len, default=""
        )


def test_of_equal_texts_the_first_is_kept() -> None:
    group = group_of(["=b", "=a\n", "=b\n", " =a", "=a"])
    assert [module.id for module in group.modules] == [1, 0]
    assert group.lengths == [2, 2]
    assert group.shared == "="


HASHED = st.text(st.sampled_from("ab\n \u00e9\U0001f600\ud800"), max_size=60)


@given(HASHED, st.lists(HASHED, min_size=2, max_size=2))
def test_windows_share_a_hash_only_if_their_texts_are_equal(shared: str, around: list[str]) -> None:
    text = shared.join(["", *around, ""])
    hashes = window_hashes(text).tolist()
    windows = [text[at : at + WINDOW] for at in range(len(text) - WINDOW + 1)]
    assert len(hashes) == len(windows)
    assert len({*zip(windows, hashes, strict=True)}) == len({*windows}) == len({*hashes})


@given(
    st.text(st.sampled_from("ab \u00e9"), min_size=GRAM, max_size=99), st.sampled_from("a\u20ac")
)
def test_a_window_has_one_hash_in_any_text(text: str, after: str) -> None:
    """A character that takes more than a byte changes the hashes of its own windows alone."""
    for window in (WINDOW, GRAM):
        alone = window_hashes(text, window)
        assert window_hashes(text + after, window)[: len(alone)].tolist() == alone.tolist()


@pytest.mark.parametrize(
    ("one", "other"),
    [("a", "b"), ("\u00e9", "\u00e8"), ("\u4e00", "\u4e01"), ("\U0001f600", "\U0001f601")],
)
def test_letters_of_all_planes_are_told_apart(one: str, other: str) -> None:
    [whole] = window_hashes(one * WINDOW)
    for at in range(WINDOW):
        text = one * at + other + one * (WINDOW - at - 1)
        assert window_hashes(text) != whole


def test_a_text_of_wide_letters_is_found_among_others() -> None:
    texts = ["\u4e16\u754c" * 30 + f" number {n}, \u20ac" for n in range(3)]
    rows = [ModuleRow(n, str(n), "", "", text) for n, text in enumerate(texts)]
    table = FingerprintTable(Fingerprints.of(rows))
    found = find(f"Ask: {texts[2]}, {texts[0]}", table)
    assert [each.module.id for each in found] == [2, 0]
