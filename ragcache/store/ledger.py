"""The ledger of states: what is kept in which tier, how large it is and when it was last used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects.sqlite import insert

from ragcache.states import KVKey, KVStates
from ragcache.store.database import CHUNK, Database
from ragcache.store.tables import EncodingTable, StateTable


@dataclass(frozen=True, slots=True)
class TierTotals:
    """What one tier holds."""

    states: int
    nbytes: int
    tokens: int
    hits: int


class Ledger:
    """Rows of (key, tier). Every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, tier: str, key: KVKey, states: KVStates, nbytes: int) -> None:
        """Notes that a tier holds these states now."""
        row = {"key": str(key), "tier": tier, "nbytes": nbytes, "tokens": states.length}
        statement = insert(StateTable).values(hits=0, last_use=0, **row)
        statement = statement.on_conflict_do_update(
            index_elements=["key", "tier"], set_={"nbytes": nbytes, "tokens": states.length}
        )
        with self._database.transaction() as session:
            session.execute(statement)

    def remove(self, tier: str, keys: Iterable[KVKey]) -> None:
        """Notes that a tier no longer holds these keys."""
        with self._database.transaction() as session:
            for chunk in _chunks(keys):
                session.execute(
                    delete(StateTable).where(StateTable.tier == tier, StateTable.key.in_(chunk))
                )

    def touch(self, keys: Iterable[KVKey]) -> None:
        """Counts a use of the keys in every tier that holds them, at one tick of the clock.

        The row of the disk tier so counts all uses of states, that of a memory tier those since
        they were admitted.
        """
        with self._database.transaction() as session:
            tick = (session.scalar(select(func.max(StateTable.last_use))) or 0) + 1
            for chunk in _chunks(keys):
                session.execute(
                    update(StateTable)
                    .where(StateTable.key.in_(chunk))
                    .values(hits=StateTable.hits + 1, last_use=tick)
                )

    def keys(self, tier: str) -> set[KVKey]:
        with self._database.transaction() as session:
            rows = session.scalars(select(StateTable.key).where(StateTable.tier == tier))
            return {KVKey(key) for key in rows}

    def holds(self, tier: str, key: KVKey) -> bool:
        with self._database.transaction() as session:
            return session.get(StateTable, (str(key), tier)) is not None

    def clear(self, tier: str) -> None:
        """Forgets a tier that does not outlive the process."""
        with self._database.transaction() as session:
            session.execute(delete(StateTable).where(StateTable.tier == tier))

    def unowned(self, keys: Iterable[KVKey]) -> list[KVKey]:
        """Those of the keys that no module refers to."""
        wanted = [str(key) for key in keys]
        owned: set[str] = set()
        with self._database.transaction() as session:
            for chunk in _chunks(map(KVKey, wanted)):
                owned |= set(
                    session.scalars(select(EncodingTable.key).where(EncodingTable.key.in_(chunk)))
                )
        return [KVKey(key) for key in wanted if key not in owned]

    def totals(self) -> dict[str, TierTotals]:
        """Sums by tier."""
        columns = (
            StateTable.tier,
            func.count(),
            func.sum(StateTable.nbytes),
            func.sum(StateTable.tokens),
            func.sum(StateTable.hits),
        )
        with self._database.transaction() as session:
            rows = session.execute(select(*columns).group_by(StateTable.tier))
            return {tier: TierTotals(*map(int, sums)) for tier, *sums in rows}


def _chunks(keys: Iterable[KVKey]) -> Iterable[list[str]]:
    texts = [str(key) for key in keys]
    return (texts[i : i + CHUNK] for i in range(0, len(texts), CHUNK))
