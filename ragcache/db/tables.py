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
SHARED = ""  # place of a tier that exists once

Number = BigInteger().with_variant(Integer, "sqlite")  # SQLite increments only INTEGER keys


def owned_by(table: str) -> ForeignKey:
    """Return a reference to a row with which this one is deleted."""
    return ForeignKey(f"{table}.id", ondelete="CASCADE")


class Base(DeclarativeBase):
    """The root of all tables."""

    # attribute of SQLAlchemy
    type_annotation_map = {int: Number, float: Double(), KVKey: String()}  # noqa: RUF012


class PublicIdMixin:
    """A row with a random id, which does not reveal how many rows there are."""

    public_id: Mapped[str] = mapped_column(default=lambda: token_urlsafe(12), unique=True)


class NamespaceTable(Base):
    """A tenant: collections and schemas are named within it. Its id is never used again."""

    __tablename__ = "namespaces"
    __table_args__ = ({"sqlite_autoincrement": True},)
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)


class CollectionTable(Base):
    """A named set of documents."""

    __tablename__ = "collections"
    __table_args__ = (UniqueConstraint("namespace_id", "name"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    namespace_id: Mapped[int] = mapped_column(owned_by("namespaces"))
    name: Mapped[str]
    revision: Mapped[int] = mapped_column(default=0)
    """Number that every change of the collection raises."""
    instruction: Mapped[str | None]
    """Instruction before the documents in prompts. Defaults to the folder's instruction."""
    priming: Mapped[str | None]
    """Text that modules in later places see when they are encoded. Defaults to the built-in one."""
    similar: Mapped[bool] = mapped_column(default=False)
    """Whether they see the most similar other module instead, where there is one."""
    calibrations: Mapped[str | None]
    """Calibrations of answers by model, as JSON."""
    description: Mapped[str] = mapped_column(default="")
    """Contents of the collection, in words for people and for models that choose among several."""


class DocumentTable(Base):
    """A document as last ingested."""

    __tablename__ = "documents"
    __table_args__ = (
        UniqueConstraint("collection_id", "source_id"),
        Index("documents_by_original", "collection_id", "original"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    collection_id: Mapped[int] = mapped_column(owned_by("collections"))
    source_id: Mapped[str]
    """Name of the document within its collection."""
    uri: Mapped[str]
    digest: Mapped[str]
    attributes: Mapped[dict[str, Any]] = mapped_column(JSON)
    original: Mapped[str] = mapped_column(default="")
    """Digest of the content of the file that the document was read from, if any."""


class DocumentTextTable(Base):
    """The whole text of a document: modules may repeat headings and leave out space."""

    __tablename__ = "document_texts"
    document_id: Mapped[int] = mapped_column(owned_by("documents"), primary_key=True)
    text: Mapped[str]


class OriginalTable(Base):
    """The content of an uploaded file, which goes with its document."""

    __tablename__ = "originals"
    document_id: Mapped[int] = mapped_column(owned_by("documents"), primary_key=True)
    nbytes: Mapped[int]
    content: Mapped[bytes] = mapped_column(LargeBinary)


class ModuleTable(PublicIdMixin, Base):
    """A module of a document, which retrieval selects. Its id is never used again."""

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
    """Metadata of the module itself, such as its page and the headings above it."""
    places: Mapped[list[tuple[int, int]]] = mapped_column(JSON, default=list)
    """Positions of runs of its text, as pairs of characters: in the module, in the document."""


_FILTERED = ("collection_id", "document_id", "tiers", "pinned", "name")


class ModuleSummaryTable(Base):
    """The figures of a module by which long lists are sorted and filtered.

    `ragcache.db.summaries` computes them. The indexes begin with `held`, since modules without
    states come last in both directions. They hold all columns of filters: a page in the middle of
    a list skips many rows, which are then read in a row.
    """

    __tablename__ = "module_summaries"
    __table_args__ = tuple(
        Index(f"summaries_by_{order[-1]}", *dict.fromkeys((*order, "module_id", *_FILTERED)))
        for order in (("name",), ("held", "nbytes"), ("held", "hits"), ("held", "used_at"))
    )
    module_id: Mapped[int] = mapped_column(owned_by("modules"), primary_key=True)
    document_id: Mapped[int]
    collection_id: Mapped[int]
    name: Mapped[str]
    """Name of the module."""
    held: Mapped[int]
    """1 if any tier has states of the module, else 0."""
    nbytes: Mapped[int]
    """Bytes of its largest states."""
    hits: Mapped[int]
    """Uses of its most used states."""
    used_at: Mapped[float]
    """Time of the last use in Unix seconds. 0 if never used."""
    tiers: Mapped[int]
    """Sum of the `TIER_BITS` of the tiers that have states of the module."""
    pinned: Mapped[int]
    """1 if any of its states are pinned, else 0."""


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
    """A document that an indexing has written."""

    __tablename__ = "records"
    __table_args__ = (Index("records_by_time", "namespace_id", "space", "updated_at"),)
    namespace_id: Mapped[int] = mapped_column(owned_by("namespaces"), primary_key=True)
    space: Mapped[str] = mapped_column(primary_key=True)
    """Name of the indexing."""
    key: Mapped[str] = mapped_column(primary_key=True)
    group_id: Mapped[str | None]
    updated_at: Mapped[float]
    """Unix seconds."""


class StateTable(Base):
    """States in one tier."""

    __tablename__ = "states"
    __table_args__ = (
        Index("states_by_tier", "tier", "key"),
        Index("states_by_last_use", "last_use", "key"),
        Index(
            "states_expiring",
            "expires_at",
            sqlite_where=text("expires_at IS NOT NULL"),
            postgresql_where=text("expires_at IS NOT NULL"),
        ),
        {"sqlite_with_rowid": False},
    )
    key: Mapped[KVKey] = mapped_column(primary_key=True)
    tier: Mapped[str] = mapped_column(primary_key=True)
    place: Mapped[str] = mapped_column(primary_key=True, default=SHARED)
    """Session of a memory tier, whose rows end with it. Name of a disk, if several machines share
    the ledger. Empty for every other tier."""
    nbytes: Mapped[int]
    tokens: Mapped[int]
    hits: Mapped[int] = mapped_column(default=0)
    last_use: Mapped[int] = mapped_column(default=0)
    """Tick of the ledger's logical clock."""
    used_at: Mapped[float] = mapped_column(default=0.0)
    """Time of the last use in Unix seconds. 0 if never used."""
    pinned: Mapped[bool] = mapped_column(default=False)
    expires_at: Mapped[float | None]
    """Unix seconds. Unset without a limit."""
    mode: Mapped[str] = mapped_column(default="")
    """Encoding mode. The key is a digest of mode, model, root and tokens (`state_key`)."""
    kv_dtype: Mapped[str] = mapped_column(default="model")
    root: Mapped[str] = mapped_column(default="")
    model: Mapped[str] = mapped_column(default="")


class EncodingTable(Base):
    """The states that belong to a module."""

    __tablename__ = "encodings"
    __table_args__ = (
        Index(
            "encodings_behind",
            "behind_id",
            sqlite_where=text("behind_id IS NOT NULL"),
            postgresql_where=text("behind_id IS NOT NULL"),
        ),
        {"sqlite_with_rowid": False},
    )
    module_id: Mapped[int] = mapped_column(owned_by("modules"), primary_key=True)
    key: Mapped[KVKey] = mapped_column(primary_key=True, index=True)
    behind_id: Mapped[int | None]
    """Id of the similar module that the states were encoded behind, and are deleted with."""


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
    """Modules that were encoded together (Prompt Cache §3.3), of a schema or of a collection."""

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
    """Key of their joint states."""
    members: Mapped[list[Any]] = mapped_column(JSON)
    """Paths of modules of the schema, or ids of modules of the collection."""


class ConversationStateTable(Base):
    """States of a conversation's own tokens."""

    __tablename__ = "conversation_states"
    __table_args__ = (Index("conversation_states_by_end", "expires_at"),)
    namespace_id: Mapped[int] = mapped_column(owned_by("namespaces"), primary_key=True)
    conversation: Mapped[str] = mapped_column(primary_key=True)
    """Name that the client gave the conversation, or the key of its first states."""
    key: Mapped[KVKey] = mapped_column(primary_key=True, index=True)
    expires_at: Mapped[float]
    """Unix seconds."""


class ObservedModuleTable(Base):
    """A text that recurred in prompts, of a folder that keeps such texts on the disk."""

    __tablename__ = "observed_modules"
    __table_args__ = (
        UniqueConstraint("namespace_id", "digest"),
        Index("observed_modules_by_end", "expires_at"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    namespace_id: Mapped[int] = mapped_column(owned_by("namespaces"))
    digest: Mapped[str]
    text: Mapped[str]
    expires_at: Mapped[float]
    """Unix seconds."""


class ObservedStateTable(Base):
    """States of a text that recurred in prompts."""

    __tablename__ = "observed_states"
    module_id: Mapped[int] = mapped_column(owned_by("observed_modules"), primary_key=True)
    key: Mapped[KVKey] = mapped_column(primary_key=True, index=True)


class FactTable(Base):
    """A fact that all processes over the ledger agree on.

    `remote` is the identity of the remote tier. `gate/...` is the distance of a mode from `exact`
    on a model (`GateResult`).
    """

    __tablename__ = "ledger_facts"
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]


class ClockTable(Base):
    """The logical clock of uses: one row, which counts the uses of all sessions."""

    __tablename__ = "store_clock"
    id: Mapped[int] = mapped_column(primary_key=True)
    tick: Mapped[int]


class EvictionTable(PublicIdMixin, Base):
    """States that left a tier."""

    __tablename__ = "evictions"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[KVKey]
    tier: Mapped[str]
    reason: Mapped[str]
    """`pressure`, `ttl`, `manual`, `superseded` or `corrupt`."""
    nbytes: Mapped[int]
    at: Mapped[float]
    """Unix seconds."""


class RetirementTable(Base):
    """States that lost their last owner: every process removes its own copies."""

    __tablename__ = "retirements"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[KVKey]
    at: Mapped[float]
    """Unix seconds on the database's clock."""


DEAD_SECONDS = 10.0
"""Silence after which a session of another machine counts as ended."""


class SessionTable(Base):
    """A process that has the store open, identified by machine, process number and start."""

    __tablename__ = "sessions"
    id: Mapped[str] = mapped_column(primary_key=True)
    machine: Mapped[str]
    pid: Mapped[int]
    started: Mapped[str]
    heartbeat: Mapped[float]
    """Unix seconds on the database's clock, from which other machines see that the process
    lives."""
    generation: Mapped[int] = mapped_column(default=1)
    """Number of times that the session has begun: again after others ended it while it was
    silent."""


class ClaimTable(Base):
    """A session's lock on a key whose blob it writes or deletes."""

    __tablename__ = "claims"
    key: Mapped[KVKey] = mapped_column(primary_key=True)
    session: Mapped[str] = mapped_column(index=True)
    tier: Mapped[str] = mapped_column(default="")
    place: Mapped[str] = mapped_column(default="")
    nbytes: Mapped[int] = mapped_column(default=0)
    """Bytes that are reserved for the key in `tier` and `place`."""


class JobTable(PublicIdMixin, Base):
    """An ingestion. Times are Unix seconds. Its id is never used again."""

    __tablename__ = "ingestion_jobs"
    __table_args__ = (
        Index("jobs_by_namespace", "namespace", "id"),
        Index("jobs_by_status", "status", "id"),
        Index("jobs_by_turn", "namespace", "started_at"),
        Index("jobs_by_request", "namespace", "idempotency_key", unique=True),
        {"sqlite_autoincrement": True},
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    target: Mapped[str]  # `collection NAME` or `schema NAME`
    session: Mapped[str]
    """Session that may run it. Empty for any session."""
    status: Mapped[str]
    """`queued`, `running`, `done`, `failed`, `canceled` or `interrupted`."""
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    modules: Mapped[int]
    error: Mapped[str] = mapped_column(default="")
    namespace: Mapped[str] = mapped_column(default=DEFAULT_NAMESPACE)
    created_at: Mapped[float] = mapped_column(default=0.0)
    done: Mapped[int] = mapped_column(default=0)
    """Number of its `modules` that are stored."""
    idempotency_key: Mapped[str | None]
    """Name that the client gave the request, if any."""
    request_digest: Mapped[str] = mapped_column(default="")
    """Digest of the request's content. Empty for a direct call."""
    nbytes: Mapped[int] = mapped_column(default=0)
    """Bytes of its documents."""
    options: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)
    """How to run it."""
    report: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)
    """Files and documents that were not simply stored, and the reasons."""


class JobDocumentTable(Base):
    """A document of a queued request, kept until the request has ended."""

    __tablename__ = "job_documents"
    job_id: Mapped[int] = mapped_column(owned_by("ingestion_jobs"), primary_key=True)
    ordinal: Mapped[int] = mapped_column(primary_key=True)
    content: Mapped[str]
    """A `SourceDocument` as JSON, for the process that runs the request."""


class JobOriginalTable(Base):
    """The content of a file that a job brings, kept until the job has ended."""

    __tablename__ = "job_originals"
    job_id: Mapped[int] = mapped_column(owned_by("ingestion_jobs"), primary_key=True)
    digest: Mapped[str] = mapped_column(primary_key=True)
    nbytes: Mapped[int]
    content: Mapped[bytes] = mapped_column(LargeBinary)


class JobStateTable(Base):
    """States that an ingestion needs and that no document owns yet."""

    __tablename__ = "job_states"
    job_id: Mapped[int] = mapped_column(owned_by("ingestion_jobs"), primary_key=True)
    key: Mapped[KVKey] = mapped_column(primary_key=True, index=True)


class ApiKeyTable(Base):
    """A key of the HTTP service. Times are Unix seconds."""

    __tablename__ = "api_keys"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    role: Mapped[str]
    namespace_id: Mapped[int] = mapped_column(owned_by("namespaces"))
    prefix: Mapped[str]
    """First characters of the secret, for people."""
    digest: Mapped[str] = mapped_column(unique=True)
    """SHA-256 of the secret, which is stored nowhere."""
    pin_bytes: Mapped[int] = mapped_column(default=0)
    """Most bytes of states that its holder keeps from eviction."""
    recognize_recurring: Mapped[bool] = mapped_column(default=True)
    """Whether texts that recur in its holder's prompts are read from states."""
    created_at: Mapped[float]
    last_used: Mapped[float | None]
    revoked_at: Mapped[float | None]


class ObjectTable(Base):
    """An object of the interfaces of others, such as a response or a file (`StoredObjects`)."""

    __tablename__ = "objects"
    __table_args__ = (
        UniqueConstraint("namespace_id", "kind", "public_id"),
        Index("objects_by_owner", "namespace_id", "kind", "owner"),
        Index("objects_by_expiry", "namespace_id", "expires_at"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    namespace_id: Mapped[int] = mapped_column(owned_by("namespaces"))
    kind: Mapped[str]
    public_id: Mapped[str]
    owner: Mapped[str] = mapped_column(default="")
    """Id of the object or name of the collection that it belongs to."""
    value: Mapped[dict[str, Any]] = mapped_column(JSON)
    content: Mapped[bytes | None] = mapped_column(LargeBinary)
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    """Unix seconds. Unset without a limit."""
