"""Which states leases admit: documents stay, whatever is asked once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache.states import KVKey
from ragcache.store.leases import AdmissionFilter, admits


def key(number: int) -> KVKey:
    return KVKey(f"{number:064x}")


def test_ingestion_and_warm_calls_always_admit() -> None:
    assert admits("ingest", None, 1, 1)
    assert admits("warm", None, 1, 1)


def test_a_question_admits_at_the_second_use_within_the_window() -> None:
    assert not admits("question", None, 5, 10)
    assert admits("question", 0, 10, 10)
    assert not admits("question", 0, 11, 10)


def test_one_off_questions_admit_nothing_however_many() -> None:
    uses_seen = AdmissionFilter(window=100)
    assert not any(uses_seen.admits("question", key(n), n) for n in range(10_000))
    assert len(uses_seen) <= 100


def test_a_second_use_is_admitted_amid_one_off_questions() -> None:
    uses_seen = AdmissionFilter(window=100)
    uses_seen.admits("question", key(0), 0)
    for tick in range(1, 50):
        uses_seen.admits("question", key(tick), tick)
    assert uses_seen.admits("question", key(0), 50)


@given(uses=st.lists(st.integers(0, 9), max_size=60), window=st.integers(1, 20))
def test_a_key_enters_exactly_when_it_was_used_at_most_a_window_ago(
    uses: list[int], window: int
) -> None:
    uses_seen = AdmissionFilter(window)
    last: dict[int, int] = {}
    for tick, number in enumerate(uses):
        expected = number in last and tick - last[number] <= window
        assert uses_seen.admits("question", key(number), tick) == expected
        assert len(uses_seen) <= window
        last[number] = tick
