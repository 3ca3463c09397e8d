"""The tables of before there were migrations."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Creates collections, documents, modules and what belongs to them, states and schemas."""
    op.create_table(
        "collections",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.UniqueConstraint("name", name="uq_collections_name"),
    )
    op.create_table(
        "documents",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("collection_id", _NUMBER, _cascade("collections.id"), nullable=False),
        sa.Column("source_id", sa.String, nullable=False),
        sa.Column("uri", sa.String, nullable=False),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("attributes", sa.JSON, nullable=False),
        sa.UniqueConstraint("collection_id", "source_id"),
    )
    op.create_table(
        "modules",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("document_id", _NUMBER, _cascade("documents.id"), nullable=False),
        sa.Column("ordinal", _NUMBER, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("text", sa.String, nullable=False),
        sa.UniqueConstraint("document_id", "ordinal"),
        sqlite_autoincrement=True,
    )
    _create_parts_of_modules()
    op.create_table(
        "states",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("tier", sa.String, primary_key=True),
        sa.Column("nbytes", _NUMBER, nullable=False),
        sa.Column("tokens", _NUMBER, nullable=False),
        sa.Column("hits", _NUMBER, nullable=False),
        sa.Column("last_use", _NUMBER, nullable=False),
    )
    op.create_index("states_by_use", "states", ["tier", "last_use"])
    op.create_table(
        "schemas",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("text", sa.String, nullable=False),
        sa.Column("placement", sa.String, nullable=False),
    )


def _create_parts_of_modules() -> None:
    op.create_table(
        "module_tokens",
        sa.Column("module_id", _NUMBER, _cascade("modules.id"), primary_key=True),
        sa.Column("tokenizer", sa.String, primary_key=True),
        sa.Column("token_ids", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "vectors",
        sa.Column("module_id", _NUMBER, _cascade("modules.id"), primary_key=True),
        sa.Column("embedder", sa.String, primary_key=True),
        sa.Column("vector", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "encodings",
        sa.Column("module_id", _NUMBER, _cascade("modules.id"), primary_key=True),
        sa.Column("key", sa.String, primary_key=True),
    )
    op.create_index("ix_encodings_key", "encodings", ["key"])


def _cascade(column: str) -> sa.ForeignKey:
    return sa.ForeignKey(column, ondelete="CASCADE")
