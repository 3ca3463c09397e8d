"""What a service needs: API keys, jobs in a queue, and pages of modules in any order."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Jobs of before belong to the namespace `default`."""
    op.create_table(
        "api_keys",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("role", sa.String, nullable=False),
        sa.Column(
            "namespace_id", _NUMBER, sa.ForeignKey("namespaces.id", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("prefix", sa.String, nullable=False),
        sa.Column("digest", sa.String, nullable=False, unique=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("last_used", sa.Double),
        sa.Column("revoked_at", sa.Double),
    )  # fmt: skip
    with op.batch_alter_table("ingestion_jobs") as table:
        table.alter_column("started_at", existing_type=sa.Double, nullable=True)
        table.add_column(_text("namespace", "default"))
        table.add_column(sa.Column("created_at", sa.Double, nullable=False, server_default="0"))
        table.add_column(sa.Column("done", _NUMBER, nullable=False, server_default="0"))
        table.add_column(sa.Column("idempotency_key", sa.String))
        table.add_column(_text("request_digest", ""))
    op.execute("UPDATE ingestion_jobs SET created_at = started_at")
    op.execute("UPDATE ingestion_jobs SET done = modules WHERE status = 'done'")
    op.create_index("jobs_by_namespace", "ingestion_jobs", ["namespace", "id"])
    op.create_index(
        "jobs_by_request", "ingestion_jobs", ["namespace", "idempotency_key"], unique=True
    )
    op.create_index("modules_by_name", "modules", ["name", "id"])
    op.create_index("states_by_size", "states", ["nbytes", "key"])
    op.create_index("states_by_hits", "states", ["hits", "key"])
    op.create_index("states_by_last_use", "states", ["last_use", "key"])
    op.create_index(
        "states_pinned", "states", ["key"], sqlite_where=sa.text("pinned = 1"),
        postgresql_where=sa.text("pinned"),
    )  # fmt: skip


def _text(name: str, default: str) -> sa.Column[str]:
    return sa.Column(name, sa.String, nullable=False, server_default=default)
