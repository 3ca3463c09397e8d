"""The tables of the ledger."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, LargeBinary, UniqueConstraint, literal, select
from sqlalchemy.dialects.sqlite import Insert, insert
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The root of all tables."""


class CollectionTable(Base):
    """A named set of documents that questions are asked of."""

    __tablename__ = "collections"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)


class DocumentTable(Base):
    """A document, as it was last ingested. `source_id` names it within its collection."""

    __tablename__ = "documents"
    __table_args__ = (UniqueConstraint("collection_id", "source_id"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    collection_id: Mapped[int] = mapped_column(ForeignKey("collections.id", ondelete="CASCADE"))
    source_id: Mapped[str]
    uri: Mapped[str]
    digest: Mapped[str]
    attributes: Mapped[dict[str, Any]] = mapped_column(JSON)


class ModuleTable(Base):
    """A nested module of a document: what retrieval selects. Ids are never used again."""

    __tablename__ = "modules"
    __table_args__ = (
        UniqueConstraint("document_id", "ordinal"),
        {"sqlite_autoincrement": True},
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    document_id: Mapped[int] = mapped_column(ForeignKey("documents.id", ondelete="CASCADE"))
    ordinal: Mapped[int]
    name: Mapped[str]
    text: Mapped[str]


class TokenTable(Base):
    """A module's token ids under one tokenizer, little-endian int32."""

    __tablename__ = "module_tokens"
    module_id: Mapped[int] = mapped_column(
        ForeignKey("modules.id", ondelete="CASCADE"), primary_key=True
    )
    tokenizer: Mapped[str] = mapped_column(primary_key=True)
    token_ids: Mapped[bytes] = mapped_column(LargeBinary)


class VectorTable(Base):
    """A module's embedding under one embedder, little-endian float32."""

    __tablename__ = "vectors"
    module_id: Mapped[int] = mapped_column(
        ForeignKey("modules.id", ondelete="CASCADE"), primary_key=True
    )
    embedder: Mapped[str] = mapped_column(primary_key=True)
    vector: Mapped[bytes] = mapped_column(LargeBinary)


class StateTable(Base):
    """States in one tier. `last_use` is a logical clock."""

    __tablename__ = "states"
    __table_args__ = (Index("states_by_use", "tier", "last_use"),)
    key: Mapped[str] = mapped_column(primary_key=True)
    tier: Mapped[str] = mapped_column(primary_key=True)
    nbytes: Mapped[int]
    tokens: Mapped[int]
    hits: Mapped[int] = mapped_column(default=0)
    last_use: Mapped[int] = mapped_column(default=0)


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
    name: Mapped[str] = mapped_column(primary_key=True)
    text: Mapped[str]
    placement: Mapped[str]


def insert_for_module(table: type[Base], module_id: int, **values: Any) -> Insert:
    """Puts a row of a module, unless another process deleted the module meanwhile."""
    chosen = select(ModuleTable.id, *map(literal, values.values()))
    rows = chosen.where(ModuleTable.id == module_id)
    statement = insert(table).from_select(["module_id", *values], rows)
    primary = list(table.__table__.primary_key)
    return statement.on_conflict_do_update(index_elements=primary, set_=values)
