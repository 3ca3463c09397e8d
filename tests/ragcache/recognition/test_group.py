"""Of modules that begin alike, the longest that stands at a place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache.recognition.group import Group
from ragcache.store import ModuleRow

LETTERS = st.text(st.sampled_from("ab\u4e00"), max_size=8)
TEXTS = st.lists(LETTERS.map("=".__add__), min_size=1, max_size=20)


def group_of(texts: list[str]) -> Group:
    return Group.of([ModuleRow(n, f"d#{n}", "d", "", text) for n, text in enumerate(texts)])


@given(TEXTS, LETTERS, st.integers(0, 3))
def test_the_longest_that_stands_there(texts: list[str], after: str, place: int) -> None:
    group = group_of(texts)
    for text in (" " * place + "=" + after, " " * place + texts[0] + after):
        number = group.at(text, place)
        standing = [t for t in texts if text.startswith(t, place)]
        assert (group.modules[number].text if number >= 0 else "") == max(
            standing, key=len, default=""
        )


@given(TEXTS, st.integers(0, 9))
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
