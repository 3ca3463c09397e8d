"""Where states and documents are kept: tiers, ledger, catalogue, and the policy of eviction."""

from ragcache.store.catalogue import Catalogue
from ragcache.store.database import Database
from ragcache.store.document_pages import CollectionRow, collection_page, document_page
from ragcache.store.documents import DocumentRow, ModuleRow, NewDocument, NewModule
from ragcache.store.entries import KVEntry
from ragcache.store.evictions import EvictionRow, eviction_page
from ragcache.store.jobs import JobRow, Jobs
from ragcache.store.keys import KeyRow, Keys
from ragcache.store.leases import Lease, LeaseRequest, Origin
from ragcache.store.ledger import Ledger
from ragcache.store.listing import (
    HeldState,
    ModuleDetail,
    ModuleListing,
    held_keys,
    list_modules,
    module_detail,
)
from ragcache.store.module_filters import ModuleFilter
from ragcache.store.module_pages import module_page
from ragcache.store.options import TierOptions, open_tiers
from ragcache.store.paging import Page
from ragcache.store.policy import choose_victims
from ragcache.store.records import Records
from ragcache.store.scaffolds import Members, ScaffoldRows
from ragcache.store.schemas import SchemaText, SchemaTexts
from ragcache.store.status import TierStatus, tier_status
from ragcache.store.store import KVStore
from ragcache.store.tiers import DeviceTier, DiskTier, HostTier, RemoteTier, Tier
from ragcache.store.vectors import Vectors

__all__ = [
    "Catalogue",
    "CollectionRow",
    "Database",
    "DeviceTier",
    "DiskTier",
    "DocumentRow",
    "EvictionRow",
    "HeldState",
    "HostTier",
    "JobRow",
    "Jobs",
    "KVEntry",
    "KVStore",
    "KeyRow",
    "Keys",
    "Lease",
    "LeaseRequest",
    "Ledger",
    "Members",
    "ModuleDetail",
    "ModuleFilter",
    "ModuleListing",
    "ModuleRow",
    "NewDocument",
    "NewModule",
    "Origin",
    "Page",
    "Records",
    "RemoteTier",
    "ScaffoldRows",
    "SchemaText",
    "SchemaTexts",
    "Tier",
    "TierOptions",
    "TierStatus",
    "Vectors",
    "choose_victims",
    "collection_page",
    "document_page",
    "eviction_page",
    "held_keys",
    "list_modules",
    "module_detail",
    "module_page",
    "open_tiers",
    "tier_status",
]
