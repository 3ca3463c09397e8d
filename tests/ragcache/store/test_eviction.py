"""Eviction by 2Q: the queues against a plain list, and who goes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ragcache.states import KVKey
from ragcache.store.eviction import GONE_SHARE, EvictionIndex, KVEntry, TierEntries


def none_stays(_: KVKey) -> bool:
    return False


def key(number: int) -> KVKey:
    return KVKey(f"{number:064x}")


def keys(*numbers: int) -> list[KVKey]:
    return [key(number) for number in numbers]


def index_of(once: list[int], again: list[int], nbytes: int = 10) -> EvictionIndex:
    """States in the order of these numbers: used once, and used again."""
    index = EvictionIndex()
    for tick, number in enumerate(once + again):
        index.add(key(number), nbytes, tick, reused=number in again)
    return index


def evict(index: EvictionIndex, need: int) -> list[KVKey]:
    """Removes states as a store does."""
    victims = index.choose_victims(need) or []
    for victim in victims:
        index.remove(victim, remember=True)
    return victims


def test_states_used_once_go_before_states_used_again() -> None:
    index = index_of([1, 2], [3, 4])
    assert index.choose_victims(30) == keys(1, 2, 3)
    assert index.choose_victims(20, keys(1).__contains__) == keys(2, 3)
    assert index.choose_victims(0) == []


def test_states_used_once_stay_within_their_share() -> None:
    """A twentieth of the tier: two of forty."""
    index = index_of([1, 2], list(range(10, 48)))
    assert index.choose_victims(20) == keys(10, 11)
    index.add(key(3), 10, 99)
    assert index.choose_victims(20) == keys(1, 10)


def test_a_scan_pushes_out_no_states_that_were_used_again() -> None:
    index = index_of([], [1, 2, 3])
    for number in range(100, 200):
        evict(index, index.used_bytes + 10 - 50)
        index.add(key(number), 10, number)
    assert all(number in index for number in keys(1, 2, 3))


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    used=st.sets(st.integers(0, 11)),
    held=st.sets(st.integers(0, 11)),
    need=st.integers(-5, 300),
)
def test_no_victim_is_held_and_none_is_more_than_needed(
    sizes: list[int], used: set[int], held: set[int], need: int
) -> None:
    index = EvictionIndex()
    for number, nbytes in enumerate(sizes):
        index.add(key(number), nbytes, number, reused=number in used)
    victims = index.choose_victims(need, {key(number) for number in held}.__contains__)
    free = [nbytes for number, nbytes in enumerate(sizes) if number not in held]
    assert (victims is None) == (need > sum(free))
    if victims:
        freed = [index.get(victim).nbytes for victim in victims]
        assert sum(freed[:-1]) < need <= sum(freed)
        assert len(set(victims)) == len(victims)
        assert not set(victims) & {key(number) for number in held}


def entries_of(documents: int, conversations: int) -> TierEntries:
    """States of ten bytes: documents from 1 on, conversations from 101 on."""
    entries = TierEntries()
    for number in range(1, documents + 1):
        entries.add(key(number), 10, number)
    for number in range(101, 101 + conversations):
        entries.add(key(number), 10, number, conversation=True)
    return entries


def test_conversations_above_their_share_go_first() -> None:
    entries = entries_of(3, 3)
    assert entries.choose_victims(20, none_stays, 20) == keys(101, 1)
    assert entries.choose_victims(20, none_stays, 0) == keys(101, 102)


def test_documents_go_while_conversations_keep_to_their_share() -> None:
    entries = entries_of(3, 3)
    assert entries.choose_victims(20, none_stays, 30) == keys(1, 2)


def test_where_one_kind_is_not_enough_the_other_goes_as_well() -> None:
    entries = entries_of(1, 2)
    assert entries.choose_victims(30, none_stays, 20) == keys(1, 101, 102)
    assert entries.choose_victims(31, none_stays, 20) is None


def test_a_conversation_keeps_its_kind() -> None:
    entries = entries_of(1, 1)
    assert list(entries) == keys(1, 101)
    assert entries.touch(key(101), 9)
    assert entries.is_reused(key(101))
    assert (entries.used_bytes, entries.conversations.used_bytes) == (20, 10)
    assert entries.remove(key(101)) == 10
    assert key(101) not in entries
    assert entries.remove(key(101)) == 0


numbers = st.integers(0, 30)


class IndexMachine(RuleBasedStateMachine):
    """The index beside two lists of what is here, the next to go first."""

    def __init__(self) -> None:
        super().__init__()
        self.index = EvictionIndex()
        self.once: dict[KVKey, KVEntry] = {}
        self.again: dict[KVKey, KVEntry] = {}
        self.gone: dict[KVKey, int] = {}
        self.tick = 0

    @rule(number=numbers, nbytes=st.integers(0, 9), reused=st.booleans())
    def add(self, number: int, nbytes: int, reused: bool) -> None:
        self.tick += 1
        name, known = key(number), key(number) in self.again
        reused = reused or known or name in self.gone
        assert self.index.add(name, nbytes, self.tick, reused=reused) == (reused and not known)
        for queue in (self.once, self.again, self.gone):
            queue.pop(name, None)  # type: ignore[attr-defined]
        (self.again if reused else self.once)[name] = KVEntry(nbytes, self.tick)

    @rule(number=numbers)
    def touch(self, number: int) -> None:
        if key(number) in self.index:
            self.add(number, self.index.get(key(number)).nbytes, True)

    @rule(number=numbers, remember=st.booleans())
    def remove(self, number: int, remember: bool) -> None:
        name = key(number)
        entry = self.once.get(name) or self.again.pop(name, KVEntry(0, 0))
        assert self.index.remove(name, remember=remember) == entry.nbytes
        if self.once.pop(name, None) is not None and remember:
            self.gone[name] = entry.nbytes
            here = sum(each.nbytes for each in (self.once | self.again).values())
            while sum(self.gone.values()) > GONE_SHARE * here:
                del self.gone[next(iter(self.gone))]

    @invariant()
    def agrees(self) -> None:
        assert list(self.index) == [*self.once, *self.again]
        assert [self.index.is_reused(each) for each in self.once] == [False] * len(self.once)
        expected = self.once | self.again
        assert {each: self.index.get(each) for each in self.index} == expected
        assert len(self.index) == len(expected)
        assert self.index.used_bytes == sum(entry.nbytes for entry in expected.values())


TestIndex = IndexMachine.TestCase
