"""What several processes agree by: one clock of uses, generations of sessions, which
remote, the documents of ingestions,
which states were retired."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Adds tables and columns only: what the code before this reads and writes stays."""
    _create_clock()
    op.create_table(
        "retirements", sa.Column("id", _NUMBER, primary_key=True, nullable=False),
        sa.Column("key", sa.String, nullable=False), sa.Column("at", sa.Double, nullable=False),
    )  # fmt: skip
    op.create_table(
        "job_documents",
        sa.Column(
            "job_id", _NUMBER, sa.ForeignKey("ingestion_jobs.id", ondelete="CASCADE"),
            primary_key=True, nullable=False,
        ),
        sa.Column("ordinal", _NUMBER, primary_key=True, nullable=False),
        sa.Column("source_id", sa.String, nullable=False),
        sa.Column("content", sa.String, nullable=False),
    )  # fmt: skip
    op.create_table(
        "ledger_facts", sa.Column("name", sa.String, primary_key=True, nullable=False),
        sa.Column("value", sa.String, nullable=False),
    )  # fmt: skip
    generation = sa.Column("generation", _NUMBER, nullable=False, server_default="1")
    op.add_column("sessions", generation)


def _create_clock() -> None:
    op.create_table(
        "store_clock", sa.Column("id", _NUMBER, primary_key=True, nullable=False),
        sa.Column("tick", _NUMBER, nullable=False),
    )  # fmt: skip
    op.execute("INSERT INTO store_clock SELECT 1, COALESCE(MAX(last_use), 0) FROM states")
