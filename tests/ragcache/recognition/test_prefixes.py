"""Which of some texts begin with which."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache.recognition.prefixes import Prefixes, common_prefix

TEXTS = st.sets(st.text(st.sampled_from("ab"), min_size=1, max_size=9), max_size=40).map(sorted)


@given(TEXTS)
def test_the_parent_is_the_longest_other_text_that_a_text_begins_with(texts: list[str]) -> None:
    for text, parent in zip(texts, Prefixes.of(texts).parents, strict=True):
        begun = [other for other in texts if other != text and text.startswith(other)]
        assert (texts[parent] if parent >= 0 else "") == max(begun, key=len, default="")


@given(TEXTS, st.text(st.sampled_from("ab"), max_size=9))
def test_the_longest_that_fits_is_found(texts: list[str], here: str) -> None:
    prefixes = Prefixes.of(texts)
    for number, text in enumerate(texts):
        found = prefixes.longest(number, lambda n: here.startswith(texts[n]))
        fitting = [t for t in texts if text.startswith(t) and here.startswith(t)]
        assert (texts[found] if found >= 0 else "") == max(fitting, key=len, default="")


def test_a_chain_of_thousands_is_climbed_in_few_steps() -> None:
    prefixes = Prefixes.of(["a" * size for size in range(1, 4001)])
    for limit in (0, 1, 2, 1000, 2048, 3998, 4000):
        asked: list[int] = []
        found = prefixes.longest(3999, lambda n: not asked.append(n) and n < limit)  # noqa: B023
        assert found == limit - 1
        assert len(asked) <= 60, "5 log2(4000)"


@given(st.text("ab", max_size=20), st.text("ab", max_size=20), st.text("ab", max_size=20))
def test_common_prefix(shared: str, one: str, other: str) -> None:
    first, second = shared + one, shared + other
    found = common_prefix(first, second)
    assert first.startswith(found)
    assert second.startswith(found)
    after = len(found)
    assert first[after : after + 1] != second[after : after + 1] or first == second == found
