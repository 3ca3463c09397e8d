"""The tables of the ledger, the same on SQLite and PostgreSQL.

What changes here needs a migration (`migrations/versions`); a test compares the two.
"""

from ragcache.store.tables.base import DEFAULT_NAMESPACE, SHARED, Base
from ragcache.store.tables.documents import (
    CollectionTable,
    DocumentTable,
    DocumentTextTable,
    ModuleTable,
    NamespaceTable,
    RecordTable,
    TokenTable,
    VectorTable,
)
from ragcache.store.tables.states import (
    EncodingTable,
    EvictionTable,
    ScaffoldTable,
    SchemaStateTable,
    SchemaTable,
    StateTable,
)
from ragcache.store.tables.work import (
    ApiKeyTable,
    ClaimTable,
    JobStateTable,
    JobTable,
    SecretTable,
    SessionTable,
)

__all__ = [
    "DEFAULT_NAMESPACE",
    "SHARED",
    "ApiKeyTable",
    "Base",
    "ClaimTable",
    "CollectionTable",
    "DocumentTable",
    "DocumentTextTable",
    "EncodingTable",
    "EvictionTable",
    "JobStateTable",
    "JobTable",
    "ModuleTable",
    "NamespaceTable",
    "RecordTable",
    "ScaffoldTable",
    "SchemaStateTable",
    "SchemaTable",
    "SecretTable",
    "SessionTable",
    "StateTable",
    "TokenTable",
    "VectorTable",
]
