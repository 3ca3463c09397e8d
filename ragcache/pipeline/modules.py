"""An operator's view of modules: list them, and warm, pin, expire, move and evict their states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcache.config import check_texts
from ragcache.db import (
    Catalog,
    Database,
    ModuleDetail,
    ModuleFilter,
    ModuleListing,
    ModuleRow,
    Page,
    held_keys,
    list_modules,
    module_detail,
    module_page,
)
from ragcache.errors import ConfigurationError
from ragcache.modes import ISOLATED, ROOTED, ReuseMode
from ragcache.pipeline.module_states import ModuleEncoder, ModuleTokens, portions
from ragcache.states import KVKey
from ragcache.store import KVStore, admin
from ragcache.store.admin import StateChange


@dataclass(frozen=True, slots=True)
class ModulePlacement:
    """Length of a module, and where its states are."""

    tokens: int
    tier: str | None
    """First tier that holds the states. None if no tier does: a question then encodes them."""


@dataclass(frozen=True, slots=True)
class Modules:
    """The modules of one namespace. `documents` names documents of a collection, `names` modules;
    None is all, and of both given both count.

    With `dry_run` nothing changes: the changes that would be made are returned. All methods raise
    `UnknownCollection`.
    """

    catalog: Catalog
    store: KVStore
    encoder: ModuleEncoder
    tokens: ModuleTokens

    def page(
        self, collection: str | None = None, document: str | None = None,
        tier: str | None = None, pinned: bool | None = None, search: str | None = None,
        sort: str = "id", descending: bool = False, cursor: str | None = None, limit: int = 100,
    ) -> Page[ModuleListing]:  # fmt: skip
        """A page of the modules that match; uses of the last second may lack.

        search: a part of their name or of their document's. sort: `id`, `name`, `nbytes`, `hits`
        or `used_at`; modules without states come last. cursor: `next` of the page before, in the
        same order. Raises `InvalidRequest`.
        """
        wanted = ModuleFilter(collection, document, tier, pinned, search)
        return module_page(
            self._database, self.catalog.namespace, wanted, sort, descending=descending,
            cursor=cursor, limit=limit,
        )  # fmt: skip

    def all(self, collection: str | None = None) -> list[ModuleListing]:
        """List all modules of a collection or, by default, of the namespace, with size, tiers and
        uses of their states."""
        self.store.ledger.flush()
        return list_modules(self._database, collection, self.catalog.namespace)

    def named(self, collection: str, names: Sequence[str]) -> list[ModuleRow]:
        """Return the modules with these names, in the order of the names; unknown names are
        skipped."""
        check_texts("names", names)
        return self.catalog.modules(collection, names)

    def get(self, module: int | str) -> ModuleDetail:
        """All that is known of a module, by its id or its public id. Raises `UnknownModule`."""
        self.store.ledger.flush()
        return module_detail(self._database, module, self.catalog.namespace)

    def warm(
        self, collection: str, documents: Sequence[str] | None = None, *,
        mode: str | ReuseMode = ROOTED, dry_run: bool = False, names: Sequence[str] | None = None,
    ) -> list[StateChange]:  # fmt: skip
        """Brings states to the first tier, encoding those that no tier has, and keeps them. mode:
        `rooted` or `isolated`. Raises `ConfigurationError` for another mode."""
        parsed = ReuseMode.parse(mode)
        encoding = parsed.encoding
        if parsed not in (ROOTED, ISOLATED) or encoding is None:
            raise ConfigurationError(
                f"states are encoded {ROOTED} or {ISOLATED}, not {str(parsed)!r}"
            )
        rows = [
            row
            for row in self.catalog.modules(collection)
            if (documents is None or row.document in documents)
            and (names is None or row.name in names)
        ]
        tokens = self.tokens.of(rows)
        encoder = self.encoder.with_instruction(self.catalog.instruction(collection))
        wanted = {encoder.key(ids, encoding): row for ids, row in zip(tokens, rows, strict=True)}
        first = self.store.memory.top.name
        done = admin.move(self.store, list(wanted), first, dry_run=True)
        indexes = self.store.memory.every
        missing = [key for key in wanted if not any(key in each.entries for each in indexes)]
        done += [StateChange(key, "encode", first, "", 0) for key in missing]
        if dry_run:
            return done
        for key in missing:
            self.catalog.add_key(wanted[key].id, key)
        for part in portions(tokens):
            with encoder.lease(part, encoding, "warm"):
                pass
        return done

    def pin(
        self, collection: str, documents: Sequence[str] | None = None, *, dry_run: bool = False,
        names: Sequence[str] | None = None,
    ) -> list[StateChange]:  # fmt: skip
        """Keeps states from being evicted for pressure or time."""
        return admin.pin(self.store, self._keys(collection, documents, names), dry_run=dry_run)

    def unpin(
        self, collection: str, documents: Sequence[str] | None = None, *, dry_run: bool = False,
        names: Sequence[str] | None = None,
    ) -> list[StateChange]:  # fmt: skip
        """Lets states be evicted again."""
        keys = self._keys(collection, documents, names)
        return admin.pin(self.store, keys, False, dry_run=dry_run)

    def expire(
        self, ids: Sequence[int], seconds: float | None, *, dry_run: bool = False
    ) -> list[StateChange]:
        """Evicts the states of modules `seconds` from now; None lifts the limit. Returns a change
        per state and tier: `expire`, or `keep` where the limit is lifted.

        The documents stay: what a question needs afterwards is encoded again, without a limit.
        Pinned states and those in use stay beyond it, until they are neither. ids: as listings give
        them (`id`). Raises `UnknownModule`, or `ConfigurationError` where `seconds` is negative or
        not finite.
        """
        self.store.ledger.flush()
        keys = held_keys(self._database, ids, self.catalog.namespace)
        return admin.expire(self.store, keys, seconds, dry_run=dry_run)

    def move(
        self, collection: str, tier: str, documents: Sequence[str] | None = None, *,
        dry_run: bool = False, names: Sequence[str] | None = None,
    ) -> list[StateChange]:  # fmt: skip
        """Brings states to a tier, and takes them from those above it."""
        keys = self._keys(collection, documents, names)
        return admin.move(self.store, keys, tier, dry_run=dry_run)

    def evict(
        self, collection: str, documents: Sequence[str] | None = None, *, tier: str | None = None,
        dry_run: bool = False, names: Sequence[str] | None = None,
    ) -> list[StateChange]:  # fmt: skip
        """Removes states from a tier, or from all; the documents stay, and are encoded again when
        a question needs them."""
        keys = self._keys(collection, documents, names)
        return admin.evict(self.store, keys, tier, dry_run=dry_run)

    @property
    def _database(self) -> Database:
        return self.store.ledger.database

    def locate(
        self, modules: Sequence[ModuleRow], collection: str | None = None
    ) -> list[ModulePlacement]:
        """Return the length and the tier of each module's states.

        Args:
            modules: The modules.
            collection: Collection whose preamble the states follow. By default, the preamble of
                `RagCache.open`.
        """
        encoder = self.encoder
        if collection is not None:
            encoder = encoder.with_instruction(self.catalog.instruction(collection))
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
