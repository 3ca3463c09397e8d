"""Namespaces, sessions and claims, jobs, evictions, and what the policies know of states."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_NAMES = {"uq": "uq_%(table_name)s_%(column_0_name)s"}  # of what the first tables left unnamed


def upgrade() -> None:
    """Collections and schemas move into the namespace `default`; states of disks stay."""
    op.create_table(
        "namespaces",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("name", sa.String, nullable=False, unique=True),
    )
    op.execute("INSERT INTO namespaces (id, name) VALUES (1, 'default')")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SELECT setval(pg_get_serial_sequence('namespaces', 'id'), 1)")
    with op.batch_alter_table("collections", naming_convention=_NAMES) as table:
        table.add_column(sa.Column("namespace_id", _NUMBER, nullable=False, server_default="1"))
        table.add_column(sa.Column("revision", _NUMBER, nullable=False, server_default="0"))
        table.drop_constraint("uq_collections_name", type_="unique")
        table.create_unique_constraint("uq_collections_namespace_id", ["namespace_id", "name"])
        table.create_foreign_key(
            "fk_collections_namespace_id", "namespaces", ["namespace_id"], ["id"],
            ondelete="CASCADE",
        )  # fmt: skip
    _rebuild_states()
    _rebuild_schemas()
    _create_scaffolds()
    _create_jobs()
    _create_evictions_and_sessions()


def _rebuild_states() -> None:
    op.drop_index("states_by_use", "states")
    op.rename_table("states", "states_before")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER INDEX states_pkey RENAME TO states_before_pkey")
    op.create_table(
        "states",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("tier", sa.String, primary_key=True),
        sa.Column("place", sa.String, primary_key=True, server_default=""),
        sa.Column("nbytes", _NUMBER, nullable=False),
        sa.Column("tokens", _NUMBER, nullable=False),
        sa.Column("hits", _NUMBER, nullable=False),
        sa.Column("last_use", _NUMBER, nullable=False),
        sa.Column("encode_seconds", sa.Double, nullable=False, server_default="0"),
        sa.Column("pinned", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("expires_at", sa.Double),
        sa.Column("mode", sa.String, nullable=False, server_default=""),
        sa.Column("kv_dtype", sa.String, nullable=False, server_default="model"),
        sa.Column("root", sa.String, nullable=False, server_default=""),
        sa.Column("model", sa.String, nullable=False, server_default=""),
        sa.Column("format", _NUMBER, nullable=False, server_default="0"),
    )
    op.create_index("states_by_tier", "states", ["tier", "key"])
    op.execute(
        "INSERT INTO states (key, tier, nbytes, tokens, hits, last_use, format) SELECT key, tier,"
        " nbytes, tokens, hits, last_use, 1 FROM states_before WHERE tier = 'disk'"
    )
    op.drop_table("states_before")


def _rebuild_schemas() -> None:
    op.rename_table("schemas", "schemas_before")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER INDEX schemas_pkey RENAME TO schemas_before_pkey")
    op.create_table(
        "schemas",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("namespace_id", _NUMBER, _cascade("namespaces.id"), nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("text", sa.String, nullable=False),
        sa.Column("placement", sa.String, nullable=False),
        sa.UniqueConstraint("namespace_id", "name"),
    )
    op.execute(
        "INSERT INTO schemas (namespace_id, name, text, placement) SELECT 1, name, text,"
        " placement FROM schemas_before"
    )
    op.drop_table("schemas_before")
    op.create_table(
        "schema_states",
        sa.Column("schema_id", _NUMBER, _cascade("schemas.id"), primary_key=True),
        sa.Column("key", sa.String, primary_key=True),
    )
    op.create_index("ix_schema_states_key", "schema_states", ["key"])


def _create_scaffolds() -> None:
    op.create_table(
        "scaffolds",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("schema_id", _NUMBER, _cascade("schemas.id")),
        sa.Column("collection_id", _NUMBER, _cascade("collections.id")),
        sa.Column("key", sa.String, nullable=False),
        sa.Column("members", sa.JSON, nullable=False),
    )
    op.create_index("scaffolds_by_key", "scaffolds", ["key"])
    op.create_table(
        "co_retrievals",
        sa.Column("first_id", _NUMBER, _cascade("modules.id"), primary_key=True),
        sa.Column("second_id", _NUMBER, _cascade("modules.id"), primary_key=True),
        sa.Column("count", _NUMBER, nullable=False),
    )


def _create_jobs() -> None:
    op.create_table(
        "ingestion_jobs",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("target", sa.String, nullable=False),
        sa.Column("session", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("finished_at", sa.Double),
        sa.Column("modules", _NUMBER, nullable=False),
        sa.Column("error", sa.String, nullable=False),
    )
    op.create_table(
        "job_states",
        sa.Column("job_id", _NUMBER, _cascade("ingestion_jobs.id"), primary_key=True),
        sa.Column("key", sa.String, primary_key=True),
    )
    op.create_index("ix_job_states_key", "job_states", ["key"])


def _create_evictions_and_sessions() -> None:
    op.create_table(
        "evictions",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("key", sa.String, nullable=False),
        sa.Column("tier", sa.String, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("nbytes", _NUMBER, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("fetched_again", sa.Boolean, nullable=False),
    )
    op.create_index("evictions_by_key", "evictions", ["key", "tier"])
    op.create_table(
        "sessions",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("machine", sa.String, nullable=False),
        sa.Column("pid", _NUMBER, nullable=False),
        sa.Column("started", sa.String, nullable=False),
        sa.Column("heartbeat", sa.Double, nullable=False),
    )
    op.create_table(
        "claims",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("session", sa.String, nullable=False),
        sa.Column("tier", sa.String, nullable=False, server_default=""),
        sa.Column("place", sa.String, nullable=False, server_default=""),
        sa.Column("nbytes", _NUMBER, nullable=False, server_default="0"),
    )
    op.create_index("ix_claims_session", "claims", ["session"])


def _cascade(column: str) -> sa.ForeignKey:
    return sa.ForeignKey(column, ondelete="CASCADE")
