"""Documents' own texts, the records of indexings, and values that callers keep."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Documents of before have no text of their own until they are ingested again."""
    op.create_table(
        "document_texts",
        sa.Column("document_id", _NUMBER, _cascade("documents.id"), primary_key=True),
        sa.Column("text", sa.String, nullable=False),
    )
    op.create_table(
        "records",
        sa.Column("namespace_id", _NUMBER, _cascade("namespaces.id"), primary_key=True),
        sa.Column("space", sa.String, primary_key=True),
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("group_id", sa.String),
        sa.Column("updated_at", sa.Double, nullable=False),
    )
    op.create_index("records_by_time", "records", ["namespace_id", "space", "updated_at"])
    op.create_table(
        "kept_values",
        sa.Column("namespace_id", _NUMBER, _cascade("namespaces.id"), primary_key=True),
        sa.Column("space", sa.String, primary_key=True),
        sa.Column("key", sa.LargeBinary, primary_key=True),
        sa.Column("value", sa.LargeBinary, nullable=False),
    )


def _cascade(column: str) -> sa.ForeignKey:
    return sa.ForeignKey(column, ondelete="CASCADE")
