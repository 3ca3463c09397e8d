"""Settings of collections: their instruction, priming text, description and calibrations."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import delete, select, update

from ragcache.db.database import Database
from ragcache.db.references import retire
from ragcache.db.sql import collection_id, from_modules
from ragcache.db.summaries import lock_summaries, sum_up
from ragcache.db.tables import (
    CollectionTable,
    DocumentTable,
    EncodingTable,
    ModuleTable,
    StateTable,
)
from ragcache.modes import AFTER_OTHER_TEXT
from ragcache.states import KVKey


class CollectionSettings:
    """Settings of the collections of one namespace. Every method is one transaction.

    Every method raises `UnknownCollection` for a name without a collection.
    """

    def __init__(self, database: Database, namespace: str) -> None:
        self._database, self._namespace = database, namespace

    def set_instruction(self, collection: str, instruction: str | None) -> None:
        """Change the instruction of a collection's prompts."""
        self._set(collection, instruction=instruction)

    def set_priming(
        self, collection: str, priming: str | None, *, similar: bool = False
    ) -> list[KVKey]:
        """Change the text that a collection's modules in later places are encoded behind.

        States behind the earlier text leave their modules. Returns keys as
        `Catalog.replace_documents` does.

        Args:
            collection: The collection.
            priming: The text. Defaults to the built-in text.
            similar: Each module follows the most similar other module, where there is one.
        """
        with self._database.transaction() as session:
            owner = collection_id(session, collection, self._namespace)
            changed = update(CollectionTable).where(CollectionTable.id == owner)
            session.execute(changed.values(priming=priming, similar=similar))
            behind = select(StateTable.key).where(StateTable.mode == AFTER_OTHER_TEXT)
            modules = from_modules(ModuleTable.id).where(DocumentTable.collection_id == owner)
            later = EncodingTable.key.in_(behind) | EncodingTable.behind_id.is_not(None)
            primed = EncodingTable.module_id.in_(modules) & later
            keys = list(session.scalars(select(EncodingTable.key).where(primed)))
            if keys:
                lock_summaries(session)
                session.execute(delete(EncodingTable).where(primed))
                left = select(EncodingTable.key).where(EncodingTable.module_id.in_(modules))
                sum_up(session, map(KVKey, session.scalars(left)))
            return retire(session, map(KVKey, keys))

    def set_description(self, collection: str, description: str) -> None:
        """Change the description of a collection."""
        self._set(collection, description=description)

    def description(self, collection: str) -> str:
        """Return the description of a collection."""
        with self._database.reading() as session:
            own = CollectionTable.id == collection_id(session, collection, self._namespace)
            found: str = session.scalars(select(CollectionTable.description).where(own)).one()
        return found

    def _set(self, collection: str, **settings: str | None) -> None:
        """Change columns of a collection."""
        with self._database.transaction() as session:
            owner = collection_id(session, collection, self._namespace)
            changed = update(CollectionTable).where(CollectionTable.id == owner)
            session.execute(changed.values(settings))

    def change_calibrations(
        self, collection: str, change: Callable[[str | None], str | None]
    ) -> None:
        """Replace a collection's calibrations with a function of the current ones."""
        with self._database.transaction() as session:
            owner = collection_id(session, collection, self._namespace)
            own = CollectionTable.id == owner
            kept = select(CollectionTable.calibrations).where(own).with_for_update()
            before = session.scalar(kept)
            session.execute(update(CollectionTable).where(own).values(calibrations=change(before)))
