"""The database, SQLite or PostgreSQL: documents, modules, jobs, API keys, the ledger."""

from ragcache.db.api_keys import ApiKeyRow, ApiKeys
from ragcache.db.catalog import Catalog, CollectionContents
from ragcache.db.conversations import ConversationDeletion, ConversationStates
from ragcache.db.database import Database
from ragcache.db.documents import (
    CollectionTexts,
    CollectionVersion,
    Deletion,
    DocumentRow,
    ModuleRow,
    MovedDocument,
    NewDocument,
    NewModule,
)
from ragcache.db.jobs import JobRequest, JobRow, Jobs, RunningJob, TakenJob, collection_target
from ragcache.db.ledger import Ledger
from ragcache.db.listing import (
    CollectionRow,
    EvictionRow,
    HeldState,
    ModuleDetail,
    ModuleFilter,
    ModuleListing,
    collection_page,
    document_page,
    eviction_page,
    held_keys,
    list_modules,
    module_detail,
    module_page,
)
from ragcache.db.namespaces import NamespaceDeletion, NamespaceRows
from ragcache.db.objects import StoredObject, StoredObjects
from ragcache.db.records import Records
from ragcache.db.residency import LocatedStates, Residency
from ragcache.db.schemas import Members, ScaffoldRows, SchemaText, SchemaTexts
from ragcache.db.sessions import LedgerStatus, LivingSession, SessionWatch, ledger_status
from ragcache.db.sql import Page
from ragcache.db.vectors import Vectors

__all__ = [
    "ApiKeyRow",
    "ApiKeys",
    "Catalog",
    "CollectionContents",
    "CollectionRow",
    "CollectionTexts",
    "CollectionVersion",
    "ConversationDeletion",
    "ConversationStates",
    "Database",
    "Deletion",
    "DocumentRow",
    "EvictionRow",
    "HeldState",
    "JobRequest",
    "JobRow",
    "Jobs",
    "Ledger",
    "LedgerStatus",
    "LivingSession",
    "LocatedStates",
    "Members",
    "ModuleDetail",
    "ModuleFilter",
    "ModuleListing",
    "ModuleRow",
    "MovedDocument",
    "NamespaceDeletion",
    "NamespaceRows",
    "NewDocument",
    "NewModule",
    "Page",
    "Records",
    "Residency",
    "RunningJob",
    "ScaffoldRows",
    "SchemaText",
    "SchemaTexts",
    "SessionWatch",
    "StoredObject",
    "StoredObjects",
    "TakenJob",
    "Vectors",
    "collection_page",
    "collection_target",
    "document_page",
    "eviction_page",
    "held_keys",
    "ledger_status",
    "list_modules",
    "module_detail",
    "module_page",
]
