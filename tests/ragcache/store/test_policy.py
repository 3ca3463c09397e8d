"""The policy of eviction, with plain values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache.states import KVKey
from ragcache.store import KVEntry, choose_victims

entry_lists = st.lists(
    st.builds(
        KVEntry,
        key=st.integers(0, 500).map(lambda n: KVKey(f"{n:064x}")),
        nbytes=st.integers(1, 50),
        last_use=st.integers(0, 8),  # few values, so that there are ties
        leased=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda entry: entry.key,
)
needs = st.integers(-5, 300)


def chosen(entries: list[KVEntry], need: int) -> list[KVEntry]:
    by_key = {entry.key: entry for entry in entries}
    return [by_key[key] for key in choose_victims(entries, need)]


@given(entries=entry_lists, need=needs)
def test_a_leased_entry_is_never_a_victim(entries: list[KVEntry], need: int) -> None:
    assert not any(entry.leased for entry in chosen(entries, need))


@given(entries=entry_lists, need=needs)
def test_enough_bytes_are_freed_whenever_that_is_possible(
    entries: list[KVEntry], need: int
) -> None:
    possible = sum(entry.nbytes for entry in entries if not entry.leased)
    assert sum(entry.nbytes for entry in chosen(entries, need)) >= min(need, possible)


@given(entries=entry_lists, need=needs)
def test_the_least_recently_used_go_first(entries: list[KVEntry], need: int) -> None:
    victims = chosen(entries, need)
    assert [v.last_use for v in victims] == sorted(v.last_use for v in victims)
    spared = [e.last_use for e in entries if not e.leased and e not in victims]
    assert not victims or not spared or victims[-1].last_use <= min(spared)


@given(entries=entry_lists, need=needs)
def test_no_victim_more_than_needed(entries: list[KVEntry], need: int) -> None:
    victims = chosen(entries, need)
    assert len(set(victims)) == len(victims)
    assert not victims or sum(entry.nbytes for entry in victims[:-1]) < need


@given(entries=entry_lists, need=needs, order=st.randoms())
def test_the_order_of_the_entries_does_not_matter(
    entries: list[KVEntry], need: int, order: object
) -> None:
    shuffled = list(entries)
    order.shuffle(shuffled)
    assert choose_victims(shuffled, need) == choose_victims(entries, need)


def test_where_the_others_do_not_suffice_all_of_them_are_named() -> None:
    one, two, three = (KVKey(digit * 64) for digit in "123")
    entries = [KVEntry(one, 10, 2), KVEntry(two, 10, 1), KVEntry(three, 99, 0, leased=True)]
    assert choose_victims(entries, 50) == (two, one)
