"""Claims: which session makes or removes the blob of a key, so that no two do at once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from ragcache.errors import LedgerUnavailable
from ragcache.states import KVKey
from ragcache.store.sessions import Sessions
from ragcache.store.statements import chunks, insert_new
from ragcache.store.tables import ClaimTable

_FIRST_WAIT, _LONGEST_WAIT = 0.01, 0.25  # seconds between looks at another session's claims


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims of one session on the ledger's keys.

    Whoever writes or deletes a blob of a shared tier holds the claim on its key, and gives it back
    in the transaction that changes the row, or after it.
    """

    sessions: Sessions

    def take(self, keys: Sequence[KVKey]) -> list[KVKey]:
        """Claims what nobody else has claimed; returns it. Claims of dead sessions do not count."""
        with self.sessions.database.transaction() as session:
            taken = self.take_within(session, keys)
        if len(taken) < len(keys):
            self.sessions.bury()
        return taken

    def take_within(self, session: Session, keys: Sequence[KVKey]) -> list[KVKey]:
        """As `take`, in a transaction of the caller's."""
        me = self.sessions.id
        busy: set[str] = set()
        for chunk in chunks(keys):
            wanted = sorted(chunk)  # in one order everywhere, so that PostgreSQL sees no deadlock
            insert_new(session, ClaimTable, [{"key": key, "session": me} for key in wanted])
            others = select(ClaimTable.key).where(
                ClaimTable.key.in_(wanted), ClaimTable.session != me
            )
            busy |= set(session.scalars(others))
        return [key for key in keys if str(key) not in busy]

    def drop(self, keys: Iterable[KVKey]) -> None:
        """Gives claims back."""
        keys = list(keys)
        if keys:
            with self.sessions.database.transaction() as session:
                self.drop_within(session, keys)

    def drop_within(self, session: Session, keys: Iterable[KVKey]) -> None:
        """As `drop`, in a transaction of the caller's."""
        mine = delete(ClaimTable).where(ClaimTable.session == self.sessions.id)
        for chunk in chunks(keys):
            session.execute(mine.where(ClaimTable.key.in_(chunk)))

    def wait_for(self, keys: Sequence[KVKey], seconds: float) -> None:
        """Returns when one of the keys is no longer claimed by others. Raises `LedgerUnavailable`
        after so many seconds."""
        deadline, pause = time.monotonic() + seconds, _FIRST_WAIT
        while len(self._claimed_by_others(keys)) == len(set(keys)):
            if time.monotonic() > deadline:
                raise LedgerUnavailable(
                    f"another process has been encoding {keys[0]} for {seconds:,.0f} seconds; "
                    "look whether it hangs"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT)
            self.sessions.bury()

    def _claimed_by_others(self, keys: Sequence[KVKey]) -> set[str]:
        others = select(ClaimTable.key).where(ClaimTable.session != self.sessions.id)
        with self.sessions.database.reading() as session:
            found: set[str] = set()
            for chunk in chunks(keys):
                found |= set(session.scalars(others.where(ClaimTable.key.in_(chunk))))
        return found
