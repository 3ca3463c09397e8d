"""Eviction, decided purely: no I/O, no clock, no store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ragcache.states import KVKey


@dataclass(frozen=True, slots=True)
class KVEntry:
    """States in one tier, as the ledger sees them. last_use: a logical clock, larger is later."""

    key: KVKey
    nbytes: int
    last_use: int
    leased: bool = False


def choose_victims(entries: Iterable[KVEntry], need_bytes: int) -> tuple[KVKey, ...]:
    """The least recently used entries whose bytes together reach `need_bytes`.

    Entries that are leased stay. Where the others do not suffice, all of them are returned: the
    caller sees that the sum falls short.
    """
    victims = []
    freed = 0
    for entry in sorted((e for e in entries if not e.leased), key=lambda e: (e.last_use, e.key)):
        if freed >= need_bytes:
            break
        victims.append(entry.key)
        freed += entry.nbytes
    return tuple(victims)
