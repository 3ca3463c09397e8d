"""Eviction by 2Q (Johnson and Shasha, 1994), as pure bookkeeping without I/O or a clock.

States that were used once wait in a short first-in, first-out queue. States that were used again
are kept in order of their last use. Neither ingestion nor one-time questions therefore evict
popular documents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ragcache.states import KVKey

ONCE_SHARE = 0.05
"""Fraction of a tier's bytes above which states used once are evicted first."""
GONE_SHARE = 0.5
"""Maximum size of evicted states whose keys are remembered, as a fraction of the tier's bytes."""


class KVEntry(NamedTuple):
    """States in one tier."""

    nbytes: int
    """Allocated bytes."""
    last_use: int
    """Tick of the ledger's logical clock."""


class EvictionIndex:
    """The states of one tier in eviction order. Every change is O(1). Not thread-safe.

    There are three queues: states used once, states used again, and keys that were evicted after
    one use. States enter the second queue when they are used again, or when they return while their
    key is in the third queue.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self._once: OrderedDict[KVKey, KVEntry] = OrderedDict()
        self._again: OrderedDict[KVKey, KVEntry] = OrderedDict()
        self._gone: OrderedDict[KVKey, int] = OrderedDict()
        self._once_bytes = self._gone_bytes = 0

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._again

    def __iter__(self) -> Iterator[KVKey]:
        """Iterate over the keys, in eviction order within each queue."""
        yield from self._once
        yield from self._again

    def get(self, key: KVKey) -> KVEntry:
        """Return the entry of a key. Raises `KeyError` if it is missing."""
        return self._once[key] if key in self._once else self._again[key]

    def find(self, key: KVKey) -> KVEntry | None:
        """Return the entry of a key, or None if it is missing."""
        return self._once.get(key) or self._again.get(key)

    def is_reused(self, key: KVKey) -> bool:
        """Return whether states have been used again."""
        return key in self._again

    def add(self, key: KVKey, nbytes: int, last_use: int, *, reused: bool = False) -> bool:
        """Add states, in place of earlier states of the key.

        Args:
            key: Key of the states.
            nbytes: Allocated bytes.
            last_use: Tick of the logical clock.
            reused: The states were used again in another tier or by another process.

        Returns:
            Whether the states have just become states that were used again.
        """
        known = key in self._again
        reused = reused or known or key in self._gone
        self.remove(key)
        self._gone_bytes -= self._gone.pop(key, 0)
        self.used_bytes += nbytes
        if reused:
            self._again[key] = KVEntry(nbytes, last_use)
        else:
            self._once[key] = KVEntry(nbytes, last_use)
            self._once_bytes += nbytes
        return reused and not known

    def touch(self, key: KVKey, last_use: int) -> bool:
        """Count a use of present states. Returns as `add` does."""
        known = self._again.pop(key, None)
        if known is None:
            return self.add(key, self._once[key].nbytes, last_use, reused=True)
        self._again[key] = KVEntry(known.nbytes, last_use)
        return False

    def remove(self, key: KVKey, *, remember: bool = False) -> int:
        """Remove states. Returns their bytes, or 0 if they are missing.

        Args:
            key: Key of the states.
            remember: The reason is pressure. The next use of the key then counts as being used
                again.
        """
        once = key in self._once
        nbytes = (self._once if once else self._again).pop(key, KVEntry(0, 0)).nbytes
        self.used_bytes -= nbytes
        self._once_bytes -= nbytes if once else 0
        if once and remember:
            self._gone[key] = nbytes
            self._gone_bytes += nbytes
            while self._gone_bytes > GONE_SHARE * self.used_bytes:
                self._gone_bytes -= self._gone.popitem(last=False)[1]
        return nbytes

    def victims(self, stays: Callable[[KVKey], bool] = lambda _: False) -> Iterator[KVKey]:
        """Yield the states to evict, the first one first.

        Args:
            stays: Returns whether a state must stay, because it is leased or pinned.
        """
        once = (key for key in self._once if not stays(key))
        again = (key for key in self._again if not stays(key))
        waiting, limit = self._once_bytes, ONCE_SHARE * self.used_bytes
        while True:
            queues = (once, again) if waiting > limit else (again, once)
            key = next(queues[0], None) or next(queues[1], None)
            if key is None:
                return
            waiting -= self._once[key].nbytes if key in self._once else 0
            yield key

    def choose_victims(
        self, need_bytes: int, stays: Callable[[KVKey], bool] = lambda _: False
    ) -> list[KVKey] | None:
        """Choose states to evict, in order, until `need_bytes` become free.

        Returns:
            Keys of the states. None, if all states that may go are not enough.
        """
        return _take(self.victims(stays), need_bytes, self.get)


class TierEntries:
    """The states of one tier, of documents and of conversations, each in eviction order.

    When the tier is full, conversations keep a share of its bytes and documents the rest, so that
    neither evicts the other. Not thread-safe.
    """

    def __init__(self, documents: EvictionIndex | None = None) -> None:
        self.documents = EvictionIndex() if documents is None else documents
        self.conversations = EvictionIndex()

    def _of(self, key: object) -> EvictionIndex:
        return self.conversations if key in self.conversations else self.documents

    def __len__(self) -> int:
        return len(self.documents) + len(self.conversations)

    def __contains__(self, key: object) -> bool:
        return key in self.documents or key in self.conversations

    def __iter__(self) -> Iterator[KVKey]:
        """Iterate over the keys, those of documents first."""
        yield from self.documents
        yield from self.conversations

    @property
    def used_bytes(self) -> int:
        """Allocated bytes of all states."""
        return self.documents.used_bytes + self.conversations.used_bytes

    def get(self, key: KVKey) -> KVEntry:
        """Return the entry of a key. Raises `KeyError` if it is missing."""
        return self._of(key).get(key)

    def find(self, key: KVKey) -> KVEntry | None:
        """Return the entry of a key, or None if it is missing."""
        return self.documents.find(key) or self.conversations.find(key)

    def is_reused(self, key: KVKey) -> bool:
        """Return whether states have been used again."""
        return self._of(key).is_reused(key)

    def add(
        self,
        key: KVKey,
        nbytes: int,
        last_use: int,
        *,
        reused: bool = False,
        conversation: bool = False,
    ) -> bool:
        """Add states of a document or of a conversation; see `EvictionIndex.add`."""
        index = self.conversations if conversation else self.documents
        return index.add(key, nbytes, last_use, reused=reused)

    def touch(self, key: KVKey, last_use: int) -> bool:
        """Count a use of present states. Returns as `add` does."""
        return self._of(key).touch(key, last_use)

    def remove(self, key: KVKey, *, remember: bool = False) -> int:
        """Remove states; see `EvictionIndex.remove`."""
        return self._of(key).remove(key, remember=remember)

    def choose_victims(
        self, need_bytes: int, stays: Callable[[KVKey], bool], conversation_bytes: int
    ) -> list[KVKey] | None:
        """Choose states to evict, in order, until `need_bytes` become free.

        Args:
            need_bytes: Bytes to free.
            stays: Returns whether a state must stay, because it is leased or pinned.
            conversation_bytes: Share of conversations, above which they are evicted first.

        Returns:
            Keys of the states. None, if all states that may go are not enough.
        """
        return _take(self._victims(stays, conversation_bytes), need_bytes, self.get)

    def _victims(self, stays: Callable[[KVKey], bool], conversation_bytes: int) -> Iterator[KVKey]:
        documents, conversations = self.documents.victims(stays), self.conversations.victims(stays)
        held = self.conversations.used_bytes
        while True:
            above = held > conversation_bytes
            queues = (conversations, documents) if above else (documents, conversations)
            key = next(queues[0], None) or next(queues[1], None)
            if key is None:
                return
            held -= self.get(key).nbytes if key in self.conversations else 0
            yield key


def _take(
    victims: Iterator[KVKey], need_bytes: int, entry_of: Callable[[KVKey], KVEntry]
) -> list[KVKey] | None:
    """Take victims until `need_bytes` become free. Returns None if all of them are not enough."""
    chosen: list[KVKey] = []
    while need_bytes > 0:
        key = next(victims, None)
        if key is None:
            return None
        need_bytes -= entry_of(key).nbytes
        chosen.append(key)
    return chosen
