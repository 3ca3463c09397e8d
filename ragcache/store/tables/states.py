"""States in tiers, and who needs them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, UniqueConstraint, false, text
from sqlalchemy.orm import Mapped, mapped_column

from ragcache.store.tables.base import SHARED, Base, PublicIdMixin


class StateTable(Base):
    """States in one tier.

    place: which one of the tier: for memory the session, with which it ends; for a disk its folder,
    where the ledger is shared by machines; else empty. `last_use` is a logical clock. expires_at:
    Unix seconds. mode, root, model and format: what the states depend on, of which their key is the
    digest.
    """

    __tablename__ = "states"
    __table_args__ = (
        Index("states_by_tier", "tier", "key"),
        Index("states_by_size", "nbytes", "key"),
        Index("states_by_hits", "hits", "key"),
        Index("states_by_last_use", "last_use", "key"),
        Index("states_pinned", "key", sqlite_where=text("pinned = 1"),
              postgresql_where=text("pinned")),
        Index("states_expiring", "expires_at", sqlite_where=text("expires_at IS NOT NULL"),
              postgresql_where=text("expires_at IS NOT NULL")),
    )  # fmt: skip
    key: Mapped[str] = mapped_column(primary_key=True)
    tier: Mapped[str] = mapped_column(primary_key=True)
    place: Mapped[str] = mapped_column(primary_key=True, default=SHARED, server_default=SHARED)
    nbytes: Mapped[int]
    tokens: Mapped[int]
    hits: Mapped[int] = mapped_column(default=0)
    last_use: Mapped[int] = mapped_column(default=0)
    encode_seconds: Mapped[float] = mapped_column(default=0.0, server_default="0")
    pinned: Mapped[bool] = mapped_column(default=False, server_default=false())
    expires_at: Mapped[float | None]
    mode: Mapped[str] = mapped_column(default="", server_default="")
    kv_dtype: Mapped[str] = mapped_column(default="model", server_default="model")
    root: Mapped[str] = mapped_column(default="", server_default="")
    model: Mapped[str] = mapped_column(default="", server_default="")
    format: Mapped[int] = mapped_column(default=0, server_default="0")


class EncodingTable(Base):
    """Which states belong to which module; states without a module left are deleted."""

    __tablename__ = "encodings"
    module_id: Mapped[int] = mapped_column(
        ForeignKey("modules.id", ondelete="CASCADE"), primary_key=True
    )
    key: Mapped[str] = mapped_column(primary_key=True, index=True)


class SchemaTable(Base):
    """A hand-written schema, as its author wrote it."""

    __tablename__ = "schemas"
    __table_args__ = (UniqueConstraint("namespace_id", "name"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    namespace_id: Mapped[int] = mapped_column(ForeignKey("namespaces.id", ondelete="CASCADE"))
    name: Mapped[str]
    text: Mapped[str]
    placement: Mapped[str]


class SchemaStateTable(Base):
    """Which states belong to which schema's modules."""

    __tablename__ = "schema_states"
    schema_id: Mapped[int] = mapped_column(
        ForeignKey("schemas.id", ondelete="CASCADE"), primary_key=True
    )
    key: Mapped[str] = mapped_column(primary_key=True, index=True)


class ScaffoldTable(Base):
    """Modules that were encoded together (Prompt Cache §3.3): of a schema, by their paths, or of
    a collection, by their ids. `key` names their joint states."""

    __tablename__ = "scaffolds"
    __table_args__ = (Index("scaffolds_by_key", "key"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    schema_id: Mapped[int | None] = mapped_column(ForeignKey("schemas.id", ondelete="CASCADE"))
    collection_id: Mapped[int | None] = mapped_column(
        ForeignKey("collections.id", ondelete="CASCADE")
    )
    key: Mapped[str]
    members: Mapped[list[Any]] = mapped_column(JSON)


class EvictionTable(PublicIdMixin, Base):
    """States that left a tier. reason: pressure, ttl, manual, superseded or corrupt; at: Unix
    seconds; fetched_again: whether they were wanted in that tier once more."""

    __tablename__ = "evictions"
    __table_args__ = (Index("evictions_by_key", "key", "tier"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str]
    tier: Mapped[str]
    reason: Mapped[str]
    nbytes: Mapped[int]
    at: Mapped[float]
    fetched_again: Mapped[bool] = mapped_column(default=False)
