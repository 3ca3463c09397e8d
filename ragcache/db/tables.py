"""The tables: documents and their modules, states and their owners, processes and jobs."""

from __future__ import annotations

from secrets import token_urlsafe
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from ragcache.config import NAMESPACE
from ragcache.states import KVKey

DEFAULT_NAMESPACE = NAMESPACE
SHARED = ""  # the place of a tier that there is only one of

Number = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up only integers


def owned_by(table: str) -> ForeignKey:
    """Return a reference to a row with which this one is deleted."""
    return ForeignKey(f"{table}.id", ondelete="CASCADE")


class Base(DeclarativeBase):
    """The root of all tables."""

    # SQLAlchemy's own attribute
    type_annotation_map = {int: Number, float: Double(), KVKey: String()}  # noqa: RUF012


class PublicIdMixin:
    """public_id: a random id, which does not give away how many rows there are."""

    public_id: Mapped[str] = mapped_column(default=lambda: token_urlsafe(12), unique=True)


class NamespaceTable(Base):
    """A tenant: collections and schemas are named within it."""

    __tablename__ = "namespaces"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)


class CollectionTable(Base):
    """A named set of documents. `revision` counts its changes. instruction: before its documents
    in prompts; None means the folder's. calibrations: JSON, by model; None without any."""

    __tablename__ = "collections"
    __table_args__ = (UniqueConstraint("namespace_id", "name"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    namespace_id: Mapped[int] = mapped_column(owned_by("namespaces"))
    name: Mapped[str]
    revision: Mapped[int] = mapped_column(default=0)
    instruction: Mapped[str | None]
    calibrations: Mapped[str | None]


class DocumentTable(Base):
    """A document as last ingested. `source_id` names it within its collection."""

    __tablename__ = "documents"
    __table_args__ = (UniqueConstraint("collection_id", "source_id"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    collection_id: Mapped[int] = mapped_column(owned_by("collections"))
    source_id: Mapped[str]
    uri: Mapped[str]
    digest: Mapped[str]
    attributes: Mapped[dict[str, Any]] = mapped_column(JSON)


class DocumentTextTable(Base):
    """A document's whole text: modules may repeat headings and leave out space."""

    __tablename__ = "document_texts"
    document_id: Mapped[int] = mapped_column(owned_by("documents"), primary_key=True)
    text: Mapped[str]


class ModuleTable(PublicIdMixin, Base):
    """A module of a document, which retrieval selects. Ids are never used again. details: metadata
    of its own, such as its page and the headings above it. places: where runs of its text stand
    in the document's: pairs of characters, in the module and in the document."""

    __tablename__ = "modules"
    __table_args__ = (
        UniqueConstraint("document_id", "ordinal"),
        Index("modules_by_name", "name", "id"),
        {"sqlite_autoincrement": True},
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    document_id: Mapped[int] = mapped_column(owned_by("documents"))
    ordinal: Mapped[int]
    name: Mapped[str]
    text: Mapped[str]
    details: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)
    places: Mapped[list[tuple[int, int]]] = mapped_column(JSON, default=list)


class TokenTable(Base):
    """A module's token ids under one tokenizer, little-endian int32."""

    __tablename__ = "module_tokens"
    module_id: Mapped[int] = mapped_column(owned_by("modules"), primary_key=True)
    tokenizer: Mapped[str] = mapped_column(primary_key=True)
    token_ids: Mapped[bytes] = mapped_column(LargeBinary)


class VectorTable(Base):
    """A module's embedding under one embedder, little-endian float32."""

    __tablename__ = "vectors"
    module_id: Mapped[int] = mapped_column(owned_by("modules"), primary_key=True)
    embedder: Mapped[str] = mapped_column(primary_key=True)
    vector: Mapped[bytes] = mapped_column(LargeBinary)


class RecordTable(Base):
    """A document that an indexing has written. space: names the indexing; updated_at: Unix
    seconds."""

    __tablename__ = "records"
    __table_args__ = (Index("records_by_time", "namespace_id", "space", "updated_at"),)
    namespace_id: Mapped[int] = mapped_column(owned_by("namespaces"), primary_key=True)
    space: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    group_id: Mapped[str | None]
    updated_at: Mapped[float]


class StateTable(Base):
    """States in one tier.

    place: for memory the session, with which it ends; for a disk its name, where several machines
    share the ledger; else empty. last_use: on a logical clock. used_at: the same in Unix seconds,
    0 for never. expires_at: Unix seconds. mode, root, model: what the states depend on, of
    which their key is the digest.
    """

    __tablename__ = "states"
    __table_args__ = (
        Index("states_by_tier", "tier", "key"),
        Index("states_by_last_use", "last_use", "key"),
        Index("states_expiring", "expires_at", sqlite_where=text("expires_at IS NOT NULL"),
              postgresql_where=text("expires_at IS NOT NULL")),
        {"sqlite_with_rowid": False},
    )  # fmt: skip
    key: Mapped[KVKey] = mapped_column(primary_key=True)
    tier: Mapped[str] = mapped_column(primary_key=True)
    place: Mapped[str] = mapped_column(primary_key=True, default=SHARED)
    nbytes: Mapped[int]
    tokens: Mapped[int]
    hits: Mapped[int] = mapped_column(default=0)
    last_use: Mapped[int] = mapped_column(default=0)
    used_at: Mapped[float] = mapped_column(default=0.0)
    pinned: Mapped[bool] = mapped_column(default=False)
    expires_at: Mapped[float | None]
    mode: Mapped[str] = mapped_column(default="")
    kv_dtype: Mapped[str] = mapped_column(default="model")
    root: Mapped[str] = mapped_column(default="")
    model: Mapped[str] = mapped_column(default="")


class EncodingTable(Base):
    """The states that belong to a module."""

    __tablename__ = "encodings"
    __table_args__ = ({"sqlite_with_rowid": False},)
    module_id: Mapped[int] = mapped_column(owned_by("modules"), primary_key=True)
    key: Mapped[KVKey] = mapped_column(primary_key=True, index=True)


class SchemaTable(Base):
    """A hand-written schema."""

    __tablename__ = "schemas"
    __table_args__ = (UniqueConstraint("namespace_id", "name"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    namespace_id: Mapped[int] = mapped_column(owned_by("namespaces"))
    name: Mapped[str]
    text: Mapped[str]
    placement: Mapped[str]


class SchemaStateTable(Base):
    """The states that belong to a schema."""

    __tablename__ = "schema_states"
    schema_id: Mapped[int] = mapped_column(owned_by("schemas"), primary_key=True)
    key: Mapped[KVKey] = mapped_column(primary_key=True, index=True)


class ScaffoldTable(Base):
    """Modules that were encoded together (Prompt Cache §3.3): of a schema, by their paths, or of
    a collection, by their ids. `key` names their joint states."""

    __tablename__ = "scaffolds"
    __table_args__ = (
        Index("scaffolds_by_key", "key"),
        Index("scaffolds_by_collection", "collection_id"),
        Index("scaffolds_by_schema", "schema_id"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    schema_id: Mapped[int | None] = mapped_column(owned_by("schemas"))
    collection_id: Mapped[int | None] = mapped_column(owned_by("collections"))
    key: Mapped[KVKey]
    members: Mapped[list[Any]] = mapped_column(JSON)


class FactTable(Base):
    """What all processes over the ledger must agree by: `remote`, the identity of the remote tier;
    `gate/...`, how far a mode is from `exact` on a model (`GateResult`)."""

    __tablename__ = "ledger_facts"
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]


class ClockTable(Base):
    """The logical clock of uses, one row: all sessions' uses until now."""

    __tablename__ = "store_clock"
    id: Mapped[int] = mapped_column(primary_key=True)
    tick: Mapped[int]


class EvictionTable(PublicIdMixin, Base):
    """States that left a tier. reason: pressure, ttl, manual, superseded or corrupt; at: Unix
    seconds."""

    __tablename__ = "evictions"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[KVKey]
    tier: Mapped[str]
    reason: Mapped[str]
    nbytes: Mapped[int]
    at: Mapped[float]


class RetirementTable(Base):
    """States that lost their last owner: every process forgets its own. at: Unix
    seconds on the database's clock."""

    __tablename__ = "retirements"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[KVKey]
    at: Mapped[float]


class SessionTable(Base):
    """A process that has the store open. machine, pid, started: which process; heartbeat: Unix
    seconds on the database's clock, by which other machines see that it lives; generation: how
    often it has begun, which is again where others ended it while it was silent."""

    __tablename__ = "sessions"
    id: Mapped[str] = mapped_column(primary_key=True)
    machine: Mapped[str]
    pid: Mapped[int]
    started: Mapped[str]
    heartbeat: Mapped[float]
    generation: Mapped[int] = mapped_column(default=1)


class ClaimTable(Base):
    """A session's lock on a key whose blob it writes or deletes. tier, place, nbytes: the bytes
    that are reserved for it, and where."""

    __tablename__ = "claims"
    key: Mapped[KVKey] = mapped_column(primary_key=True)
    session: Mapped[str] = mapped_column(index=True)
    tier: Mapped[str] = mapped_column(default="")
    place: Mapped[str] = mapped_column(default="")
    nbytes: Mapped[int] = mapped_column(default=0)


class JobTable(PublicIdMixin, Base):
    """An ingestion. session: which may run it, empty for any; status: queued, running, done,
    failed, canceled or interrupted; times in Unix seconds; done: modules. idempotency_key: names a
    request, whose content has the `request_digest`, empty for a direct call. nbytes: of its
    documents; options: how it is to be run; report: what became of files and documents that were
    not simply stored."""

    __tablename__ = "ingestion_jobs"
    __table_args__ = (
        Index("jobs_by_namespace", "namespace", "id"),
        Index("jobs_by_status", "status", "id"),
        Index("jobs_by_turn", "namespace", "started_at"),
        Index("jobs_by_request", "namespace", "idempotency_key", unique=True),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    target: Mapped[str]  # `collection NAME` or `schema NAME`
    session: Mapped[str]
    status: Mapped[str]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    modules: Mapped[int]
    error: Mapped[str] = mapped_column(default="")
    namespace: Mapped[str] = mapped_column(default=DEFAULT_NAMESPACE)
    created_at: Mapped[float] = mapped_column(default=0.0)
    done: Mapped[int] = mapped_column(default=0)
    idempotency_key: Mapped[str | None]
    request_digest: Mapped[str] = mapped_column(default="")
    nbytes: Mapped[int] = mapped_column(default=0)
    options: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)
    report: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)


class JobDocumentTable(Base):
    """A document of a queued request, until that has ended: any process can go on with it. content:
    the `SourceDocument` as JSON."""

    __tablename__ = "job_documents"
    job_id: Mapped[int] = mapped_column(owned_by("ingestion_jobs"), primary_key=True)
    ordinal: Mapped[int] = mapped_column(primary_key=True)
    content: Mapped[str]


class JobStateTable(Base):
    """States that an ingestion needs and that nothing else may own yet."""

    __tablename__ = "job_states"
    job_id: Mapped[int] = mapped_column(owned_by("ingestion_jobs"), primary_key=True)
    key: Mapped[KVKey] = mapped_column(primary_key=True, index=True)


class ApiKeyTable(Base):
    """A key of the HTTP service. digest: SHA-256 of the secret, which is stored nowhere; prefix:
    its first characters, for people. Times in Unix seconds."""

    __tablename__ = "api_keys"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    role: Mapped[str]
    namespace_id: Mapped[int] = mapped_column(owned_by("namespaces"))
    prefix: Mapped[str]
    digest: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[float]
    last_used: Mapped[float | None]
    revoked_at: Mapped[float | None]
