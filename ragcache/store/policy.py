"""Eviction, decided purely: no I/O, no clock of its own, no store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from ragcache.errors import ConfigurationError
from ragcache.states import KVKey
from ragcache.store.entries import Entries, KVEntry

__all__ = [
    "POLICIES",
    "Entries",
    "KVEntry",
    "Policy",
    "Victims",
    "check_policy",
    "choose_victims",
    "expired",
]

Policy = Literal["lru", "gdsf", "lfu"]
"""Who goes first. `lru`: the least recently used. `lfu`: the least often used. `gdsf`:
GreedyDual-Size-Frequency, what is least used and cheapest to encode again for its size."""

POLICIES: tuple[str, ...] = get_args(Policy)


@dataclass(frozen=True, slots=True)
class Victims:
    """What is to go, in this order.

    keys: the first `expired` of them are past their time, the others go for pressure. freed: bytes
    of all of them. missing: bytes that could not be found. clock: GreedyDual's after they went, to
    be given to the next choice and to every `Entries.touch` and `KVEntry` from now on.
    """

    keys: tuple[KVKey, ...]
    expired: int
    freed: int
    missing: int
    clock: float


def choose_victims(
    entries: Entries | Iterable[KVEntry],
    need_bytes: int,
    policy: Policy = "lru",
    *,
    now: float = 0.0,
    clock: float = 0.0,
) -> Victims:
    """The entries with the lowest priorities whose bytes together reach `need_bytes`.

    Priorities are the last use (`lru`), the hits (`lfu`), or, for `gdsf`,

        clock at the last use + (1 + hits) · cost / nbytes

    with the measured seconds of encoding as cost (Cherkasova 1998; RAGCache, where the cost is that
    of computing what the prefix before it does not hold: states are encoded after their root, so
    that the seconds measured are these). The clock is the highest priority that was ever evicted,
    by which entries that are no longer used grow old.

    Leased and pinned entries stay. Expired ones go first (`expires_at <= now`). States that others
    were encoded after have at least the priority of each of these, and go after them, as only the
    leaves of RAGCache's tree do. Ties: the least recently used, then the smaller key.
    """
    table = entries if isinstance(entries, Entries) else Entries.of(entries)
    free = np.flatnonzero(table["resident"] & (table["leases"] == 0) & ~table["pinned"])
    if need_bytes <= 0 or free.size == 0:
        return Victims((), 0, 0, max(0, need_bytes), clock)
    score, depth = _raise_roots(table, _priorities(table, policy, now))
    nbytes = table["nbytes"]
    order = free[np.argsort(score[free])]
    last = min(_count(nbytes[order], need_bytes), order.size) - 1
    tied = np.searchsorted(score[order], score[order[last]], side="right")
    order = _break_ties(table, order[:tied], score, depth)
    order = order[: _count(nbytes[order], need_bytes)]
    freed = int(nbytes[order].sum())
    expired = int((score[order] == -np.inf).sum())
    return Victims(
        tuple(map(table.key, order.tolist())),
        expired,
        freed,
        max(0, need_bytes - freed),
        max(clock, float(score[order[-1]])) if policy == "gdsf" else clock,
    )


def expired(entries: Entries, now: float) -> tuple[KVKey, ...]:
    """The entries whose time is over and that nothing holds, in the order of their keys."""
    over = (entries["expires_at"] <= now) & (entries["leases"] == 0) & ~entries["pinned"]
    return tuple(sorted(map(entries.key, np.flatnonzero(entries["resident"] & over).tolist())))


def check_policy(policy: str) -> Policy:
    """Raises `ConfigurationError` for an unknown policy."""
    for known in get_args(Policy):
        if policy == known:
            checked: Policy = known
            return checked
    raise ConfigurationError(f"unknown policy {policy!r}; policies: {', '.join(POLICIES)}")


def _priorities(table: Entries, policy: Policy, now: float) -> np.ndarray:
    """[N] float64, smaller goes first; -inf for what is expired or not there."""
    if policy == "gdsf":
        worth = (1 + table["hits"]) * table["cost"] / np.maximum(table["nbytes"], 1)
        score: np.ndarray = table["clock"] + worth
    else:
        score = table["last_use" if policy == "lru" else "hits"].astype(np.float64)
    score[~table["resident"] | (table["expires_at"] <= now)] = -np.inf
    return score


def _raise_roots(table: Entries, score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gives every root the highest priority of what was encoded after it, and tells how many
    states stand before each, [N]."""
    depth = np.zeros(score.size, np.int64)
    children = np.flatnonzero(table["resident"] & (table["root"] >= 0))
    roots = table["root"][children]
    held = table["resident"][roots]
    children, roots = children[held], roots[held]
    live = score[roots] != -np.inf  # what is expired goes, whatever stands on it
    for _ in range(children.size):  # as often as the deepest chain is long, which is once as a rule
        before = score.copy(), depth.copy()
        np.maximum.at(score, roots[live], score[children[live]])
        depth[children] = depth[roots] + 1
        if np.array_equal(before[0], score) and np.array_equal(before[1], depth):
            break
    return score, depth


def _break_ties(
    table: Entries, order: np.ndarray, score: np.ndarray, depth: np.ndarray
) -> np.ndarray:
    """Orders slots by priority, then the deeper, the less recently used, the smaller key."""
    ranked = score[order]
    if not (ranked[1:] == ranked[:-1]).any():
        return order
    columns = (table["prefix"][order], table["last_use"][order], -depth[order], ranked)
    order = order[np.lexsort(columns)]
    rows = np.stack([c[order] for c in (score, depth, table["last_use"])]), table["prefix"][order]
    same = (rows[0][:, 1:] == rows[0][:, :-1]).all(axis=0) & (rows[1][1:] == rows[1][:-1])
    if not same.any():
        return order

    def full(slot: int) -> tuple[float, int, int, KVKey]:
        return score[slot], -depth[slot], table["last_use"][slot], table.key(slot)

    return np.array(sorted(order.tolist(), key=full))  # keys alike in their first 16 digits


def _count(nbytes: np.ndarray, need_bytes: int) -> int:
    """How many of the first rows it takes to reach a sum; one more than all where it is not."""
    return int(np.searchsorted(np.cumsum(nbytes), need_bytes)) + 1
