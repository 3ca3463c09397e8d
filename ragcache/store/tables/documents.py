"""Collections, documents and modules, and what is derived from them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, LargeBinary, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from ragcache.store.tables.base import Base, PublicIdMixin


class NamespaceTable(Base):
    """A tenant: collections and schemas are named within it."""

    __tablename__ = "namespaces"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)


class CollectionTable(Base):
    """A named set of documents that questions are asked of. `revision` counts its changes."""

    __tablename__ = "collections"
    __table_args__ = (UniqueConstraint("namespace_id", "name"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    namespace_id: Mapped[int] = mapped_column(ForeignKey("namespaces.id", ondelete="CASCADE"))
    name: Mapped[str]
    revision: Mapped[int] = mapped_column(default=0)


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


class DocumentTextTable(Base):
    """A document's text as it came, to give it back whole."""

    __tablename__ = "document_texts"
    document_id: Mapped[int] = mapped_column(
        ForeignKey("documents.id", ondelete="CASCADE"), primary_key=True
    )
    text: Mapped[str]


class ModuleTable(PublicIdMixin, Base):
    """A nested module of a document: what retrieval selects. Ids are never used again."""

    __tablename__ = "modules"
    __table_args__ = (
        UniqueConstraint("document_id", "ordinal"),
        Index("modules_by_name", "name", "id"),
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


class RecordTable(Base):
    """What an indexing has written, and when: `space` names the indexing, updated_at is in Unix
    seconds."""

    __tablename__ = "records"
    __table_args__ = (Index("records_by_time", "namespace_id", "space", "updated_at"),)
    namespace_id: Mapped[int] = mapped_column(
        ForeignKey("namespaces.id", ondelete="CASCADE"), primary_key=True
    )
    space: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    group_id: Mapped[str | None]
    updated_at: Mapped[float]
