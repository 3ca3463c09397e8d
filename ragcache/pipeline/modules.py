"""Operations on modules: list them, and warm, pin, expire, move and evict their states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ragcache.config import check_numbers, check_texts
from ragcache.db import (
    Catalog,
    Database,
    EvictionRow,
    ModuleDetail,
    ModuleFilter,
    ModuleListing,
    ModuleRow,
    Page,
    eviction_page,
    held_keys,
    list_modules,
    module_detail,
    module_page,
)
from ragcache.errors import ConfigurationError
from ragcache.modes import AFTER_OTHER_TEXT, ReuseMode
from ragcache.pipeline.companions import Companions
from ragcache.pipeline.conversations import Conversations
from ragcache.pipeline.module_states import ModuleEncoder, ModuleTokens, portions
from ragcache.pipeline.observed import ObservedModules
from ragcache.states import KVKey
from ragcache.store import KVStore, admin
from ragcache.store.admin import StateChange


@dataclass(frozen=True, slots=True)
class ModulePlacement:
    """Length of a module, and where its states are."""

    tokens: int
    tier: str | None
    """First tier that holds the states. Without one, a question encodes them."""


@dataclass(frozen=True, slots=True)
class Modules:
    """The modules of one namespace; `RagCache.modules`.

    Methods act on all modules of a collection, or on fewer: `documents` (ids of documents) and
    `names` (names of modules) each restrict them. `dry_run` returns the changes without making
    them. A method that takes a collection raises `UnknownCollection` if there is none of that name.

    Example:
        >>> changes = rag.modules.warm("handbook")
        >>> changes = rag.modules.pin("handbook", ["leave.md"])
    """

    catalog: Catalog
    store: KVStore
    encoder: ModuleEncoder
    tokens: ModuleTokens
    observed: ObservedModules
    """Texts that recur in prompts, which no document has."""
    conversations: Conversations
    """States of chats: their sizes, and their deletion."""
    default_mode: ReuseMode
    """Mode of questions that name none."""
    companions: Companions
    """Similar modules that modules in later places are encoded behind."""

    def page(
        self,
        collection: str | None = None,
        document: str | None = None,
        tier: str | None = None,
        pinned: bool | None = None,
        search: str | None = None,
        sort: str = "id",
        descending: bool = False,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[ModuleListing]:
        """List a page of the modules that match.

        The order and the filters may be those of some seconds ago. The rows themselves are current.

        Args:
            collection: Only modules of this collection.
            document: Only modules of the document with this id.
            tier: Only modules with states in this tier.
            pinned: Only modules whose states are pinned, or are not.
            search: Only modules with this text in their name or in their document's name.
            sort: `id`, `name`, `nbytes`, `hits` or `used_at`. Modules without states come last.
            descending: Largest first.
            cursor: `next` of the previous page, which had the same order.
            limit: Most modules of a page.

        Raises:
            InvalidRequest: The order, the cursor or the limit cannot be used.
        """
        wanted = ModuleFilter(collection, document, tier, pinned, search)
        return module_page(
            self._database,
            self.catalog.namespace,
            wanted,
            sort,
            descending=descending,
            cursor=cursor,
            limit=limit,
        )

    def all(self, collection: str | None = None) -> list[ModuleListing]:
        """List all modules of a collection, with size, tiers and uses of their states.

        Without a collection, lists all modules of the namespace.
        """
        self.store.ledger.flush()
        return list_modules(self._database, collection, self.catalog.namespace)

    def named(self, collection: str, names: Sequence[str]) -> list[ModuleRow]:
        """Return modules by name, in the order of the names. Unknown names are skipped."""
        check_texts("names", names)
        return self.catalog.modules(collection, names)

    def get(self, module: int | str) -> ModuleDetail:
        """Return the details of a module by its id or public id. Raises `UnknownModule`."""
        self.store.ledger.flush()
        return module_detail(self._database, module, self.catalog.namespace)

    def warm(
        self,
        collection: str,
        documents: Sequence[str] | None = None,
        *,
        mode: str | ReuseMode | None = None,
        dry_run: bool = False,
        names: Sequence[str] | None = None,
    ) -> list[StateChange]:
        """Bring states to the first tier, and encode states that no tier holds.

        Args:
            collection: The collection.
            documents: Only modules of these documents.
            mode: The mode whose questions are to find their states. `primed` has two of each
                module. Defaults to the folder's mode.
            dry_run: Return the changes without making them.
            names: Only modules with these names.

        Returns:
            A change for each state that is moved or encoded.

        Raises:
            ConfigurationError: The mode reads no states.
        """
        asked = self.default_mode if mode is None else ReuseMode.parse(mode)
        encodings = asked.encodings
        if not encodings:
            raise ConfigurationError(f"mode {str(asked)!r} reads no states that could be warmed")
        rows = [
            row
            for row in self.catalog.modules(collection)
            if (documents is None or row.document in documents)
            and (names is None or row.name in names)
        ]
        tokens = self.tokens.of(rows)
        version = self.catalog.version(collection)
        encoder = self.encoder.with_texts(version.texts)
        later = rows if AFTER_OTHER_TEXT in encodings else ()
        found = self.companions.find(collection, version, [row.id for row in later])
        behind = [found.get(row.id) for row in rows]
        wanted = {
            encoder.key(ids, encoding, behind=other): (row.id, encoding, other)
            for encoding in encodings
            for ids, row, other in zip(tokens, rows, behind, strict=True)
        }
        first = self.store.memory.top.name
        done = admin.move(self.store, list(wanted), first, dry_run=True)
        missing = self.store.memory.unknown(wanted)
        done += [StateChange(key, "encode", first, "", 0) for key in missing]
        if dry_run:
            return done
        for key in missing:
            number, encoding, other = wanted[key]
            behind_id = other.module if other and encoding == AFTER_OTHER_TEXT else None
            self.catalog.add_key(number, key, behind_id)
        for encoding, part in product(encodings, portions([*zip(tokens, behind, strict=True)])):
            every, others = zip(*part, strict=True)
            with encoder.lease(every, encoding, "warm", behind=others):
                pass
        if version.similar:  # documents may have been deleted meanwhile
            self.store.retire(missing)
        return done

    def pin(
        self,
        collection: str,
        documents: Sequence[str] | None = None,
        *,
        dry_run: bool = False,
        names: Sequence[str] | None = None,
    ) -> list[StateChange]:
        """Protect states from eviction, for lack of room or by a time limit, until `unpin`."""
        return admin.pin(self.store, self._keys(collection, documents, names), dry_run=dry_run)

    def unpin(
        self,
        collection: str,
        documents: Sequence[str] | None = None,
        *,
        dry_run: bool = False,
        names: Sequence[str] | None = None,
    ) -> list[StateChange]:
        """Allow states to be evicted again."""
        keys = self._keys(collection, documents, names)
        return admin.pin(self.store, keys, False, dry_run=dry_run)

    def expire(
        self, ids: Sequence[int], seconds: float | None, *, dry_run: bool = False
    ) -> list[StateChange]:
        """Limit how long the states of modules are kept.

        The documents stay: a later question encodes its modules again, without a limit. States that
        are pinned or in use stay longer, until they are neither.

        Args:
            ids: Ids of modules, as in listings.
            seconds: Seconds from now. None lifts the limit.

        Returns:
            A change for each state and tier: `expire`, or `keep` if the limit is lifted.

        Raises:
            UnknownModule: There is no module of an id.
            ConfigurationError: `seconds` is negative or not finite, or `ids` are not numbers.
        """
        check_numbers("ids", ids)
        self.store.ledger.flush()
        keys = held_keys(self._database, ids, self.catalog.namespace)
        return admin.expire(self.store, keys, seconds, dry_run=dry_run)

    def move(
        self,
        collection: str,
        tier: str,
        documents: Sequence[str] | None = None,
        *,
        dry_run: bool = False,
        names: Sequence[str] | None = None,
    ) -> list[StateChange]:
        """Bring states to a tier, and remove them from the tiers above it."""
        keys = self._keys(collection, documents, names)
        return admin.move(self.store, keys, tier, dry_run=dry_run)

    def evict(
        self,
        collection: str,
        documents: Sequence[str] | None = None,
        *,
        tier: str | None = None,
        dry_run: bool = False,
        names: Sequence[str] | None = None,
    ) -> list[StateChange]:
        """Remove states from a tier or, by default, from all tiers.

        The documents stay. A later question encodes their modules again.
        """
        keys = self._keys(collection, documents, names)
        return admin.evict(self.store, keys, tier, dry_run=dry_run)

    def evictions(self, cursor: str | None = None, limit: int = 100) -> Page[EvictionRow]:
        """List a page of the states that left a tier, the newest first.

        States that left within the last second may be missing.

        Args:
            cursor: `next` of the previous page.
            limit: Most evictions of a page.

        Raises:
            InvalidRequest: The cursor or the limit cannot be used.
        """
        return eviction_page(self._database, self.catalog.namespace, cursor, limit)

    @property
    def _database(self) -> Database:
        return self.store.ledger.database

    def locate(
        self, modules: Sequence[ModuleRow], collection: str | None = None
    ) -> list[ModulePlacement]:
        """Return the length and the tier of each module's states, in the order of the modules.

        Args:
            modules: The modules.
            collection: Collection whose preamble the states follow. Defaults to the preamble of
                `RagCache.open`.
        """
        encoder = self.encoder
        if collection is not None:
            encoder = encoder.with_texts(self.catalog.collection_texts(collection))
        indexes = self.store.memory.every
        found = []
        for ids in self.tokens.of(modules):
            key = encoder.key(ids)
            holding = (index.name for index in indexes if key in index.entries)
            found.append(ModulePlacement(len(ids), next(holding, None)))
        return found

    def _keys(
        self, collection: str, documents: Sequence[str] | None, names: Sequence[str] | None
    ) -> list[KVKey]:
        return list(self.catalog.keys(collection, documents, names))
