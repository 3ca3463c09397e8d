"""Where states and documents are kept: tiers, ledger, catalogue, and the policy of eviction."""

from ragcache.store.catalogue import Catalogue, DocumentRow, ModuleRow, NewDocument, NewModule
from ragcache.store.database import Database
from ragcache.store.disk import DiskTier
from ragcache.store.host import HostTier
from ragcache.store.ledger import Ledger
from ragcache.store.listing import ModuleListing, list_modules
from ragcache.store.policy import KVEntry, choose_victims
from ragcache.store.schemas import SchemaText, SchemaTexts
from ragcache.store.store import KVStore, Lease
from ragcache.store.vectors import Vectors

__all__ = [
    "Catalogue",
    "Database",
    "DiskTier",
    "DocumentRow",
    "HostTier",
    "KVEntry",
    "KVStore",
    "Lease",
    "Ledger",
    "ModuleListing",
    "ModuleRow",
    "NewDocument",
    "NewModule",
    "SchemaText",
    "SchemaTexts",
    "Vectors",
    "choose_victims",
    "list_modules",
]
