"""The states of a namespace's conversations: who owns them, and until when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, delete, func, select, true

from ragcache.db.database import Database
from ragcache.db.references import expire, retire
from ragcache.db.sql import namespace_id, namespace_number, upsert
from ragcache.db.tables import (
    DEFAULT_NAMESPACE,
    ConversationStateTable,
    StateTable,
)
from ragcache.states import KVKey


@dataclass(frozen=True, slots=True)
class ConversationDeletion:
    """States that a deletion of conversations removes."""

    conversations: int
    """Number of conversations."""
    states: int
    """Number of states that no other conversation has."""
    freed: dict[str, int]
    """Bytes by tier, on all machines."""
    keys: tuple[KVKey, ...] = ()
    """Keys of the states, whose rows are deleted. Empty for a dry run."""


class ConversationStates:
    """Conversations of one namespace. Every method is one transaction."""

    def __init__(self, database: Database, namespace: str = DEFAULT_NAMESPACE) -> None:
        self._database, self._namespace = database, namespace

    def own(self, conversation: str, keys: Sequence[KVKey], expires_at: float) -> None:
        """Let a conversation own states until `expires_at`, in Unix seconds."""
        with self._database.transaction() as session:
            number = namespace_id(session, self._namespace)
            rows = [
                {
                    "namespace_id": number,
                    "conversation": conversation,
                    "key": key,
                    "expires_at": expires_at,
                }
                for key in sorted(set(keys))
            ]
            upsert(session, ConversationStateTable, rows, ["expires_at"])

    def delete(self, conversation: str | None = None, *, dry_run: bool) -> ConversationDeletion:
        """Delete a conversation of the namespace, or all of them.

        Args:
            conversation: Name of the conversation. Defaults to all.
            dry_run: Count what would be deleted, and change nothing.
        """
        table = ConversationStateTable
        named = true() if conversation is None else table.conversation == conversation
        chosen = and_(self._own(), named)
        kept = select(table.key).where(~chosen)
        ended = select(table.key).where(chosen, table.key.not_in(kept))
        sizes = select(StateTable.tier, func.sum(StateTable.nbytes)).group_by(StateTable.tier)
        with self._database.reading() as session:
            count = select(func.count(table.conversation.distinct())).where(chosen)
            number = session.scalar(count) or 0
            states = session.scalar(select(func.count()).select_from(ended.subquery())) or 0
            freed = {
                tier: int(n) for tier, n in session.execute(sizes.where(StateTable.key.in_(ended)))
            }
        gone = () if dry_run else tuple(_delete(self._database, chosen))
        return ConversationDeletion(number, states, freed, gone)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the namespace's conversations by tier, on all machines."""
        table = ConversationStateTable
        owned = select(table.key).where(self._own())
        sizes = select(StateTable.tier, func.sum(StateTable.nbytes)).group_by(StateTable.tier)
        return {
            tier: int(n) for tier, n in self._database.fetch(sizes.where(StateTable.key.in_(owned)))
        }

    def _own(self) -> ColumnElement[bool]:
        return ConversationStateTable.namespace_id == namespace_number(self._namespace)


def expire_conversations(database: Database) -> list[KVKey]:
    """Delete the expired rows of all namespaces. Returns keys as `expire` does."""
    return expire(database, ConversationStateTable.expires_at, _delete)


def _delete(database: Database, chosen: ColumnElement[bool]) -> list[KVKey]:
    table = ConversationStateTable
    with database.transaction() as session:
        keys = session.scalars(delete(table).where(chosen).returning(table.key)).all()
        return retire(session, keys)
