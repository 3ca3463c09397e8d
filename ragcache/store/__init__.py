"""Where states and documents are kept: tiers, ledger, catalogue, and the policy of eviction."""

from ragcache.store.admission import Origin
from ragcache.store.catalogue import Catalogue
from ragcache.store.database import Database
from ragcache.store.documents import DocumentRow, ModuleRow, NewDocument, NewModule
from ragcache.store.entries import KVEntry
from ragcache.store.filling import Wish
from ragcache.store.jobs import Jobs
from ragcache.store.lease import Lease
from ragcache.store.ledger import Ledger
from ragcache.store.listing import ModuleListing, list_modules
from ragcache.store.options import TierOptions, open_tiers
from ragcache.store.policy import choose_victims
from ragcache.store.records import Records
from ragcache.store.scaffolds import Members, ScaffoldRows
from ragcache.store.schemas import SchemaText, SchemaTexts
from ragcache.store.store import KVStore
from ragcache.store.tiers import DeviceTier, DiskTier, HostTier, RemoteTier, Tier
from ragcache.store.values import Values
from ragcache.store.vectors import Vectors

__all__ = [
    "Catalogue",
    "Database",
    "DeviceTier",
    "DiskTier",
    "DocumentRow",
    "HostTier",
    "Jobs",
    "KVEntry",
    "KVStore",
    "Lease",
    "Ledger",
    "Members",
    "ModuleListing",
    "ModuleRow",
    "NewDocument",
    "NewModule",
    "Origin",
    "Records",
    "RemoteTier",
    "ScaffoldRows",
    "SchemaText",
    "SchemaTexts",
    "Tier",
    "TierOptions",
    "Values",
    "Vectors",
    "Wish",
    "choose_victims",
    "list_modules",
    "open_tiers",
]
