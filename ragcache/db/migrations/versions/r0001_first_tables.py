"""The first tables, and the namespace `default`."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Creates every table of an empty ledger."""
    _create_documents()
    _create_parts_of_modules()
    _create_states()
    _create_schemas()
    _create_sessions()
    _create_jobs()
    _create_service()


def _create_documents() -> None:
    op.create_table(
        "namespaces",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("name", sa.String, nullable=False, unique=True),
    )
    op.execute("INSERT INTO namespaces (id, name) VALUES (1, 'default')")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SELECT setval(pg_get_serial_sequence('namespaces', 'id'), 1)")
    op.create_table(
        "collections",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("namespace_id", _NUMBER, _cascade("namespaces.id"), nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("revision", _NUMBER, nullable=False),
        sa.UniqueConstraint("namespace_id", "name"),
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
        "document_texts",
        sa.Column("document_id", _NUMBER, _cascade("documents.id"), primary_key=True),
        sa.Column("text", sa.String, nullable=False),
    )
    op.create_table(
        "modules",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("public_id", sa.String, nullable=False, unique=True),
        sa.Column("document_id", _NUMBER, _cascade("documents.id"), nullable=False),
        sa.Column("ordinal", _NUMBER, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("text", sa.String, nullable=False),
        sa.UniqueConstraint("document_id", "ordinal"),
        sqlite_autoincrement=True,
    )
    op.create_index("modules_by_name", "modules", ["name", "id"])


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


def _create_states() -> None:
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
    op.create_index("states_by_hits", "states", ["hits", "key"])
    op.create_index("states_by_last_use", "states", ["last_use", "key"])
    op.create_index("states_by_size", "states", ["nbytes", "key"])
    op.create_index("states_by_tier", "states", ["tier", "key"])
    op.create_index(
        "states_pinned",
        "states",
        ["key"],
        sqlite_where=sa.text("pinned = 1"),
        postgresql_where=sa.text("pinned"),
    )
    op.create_index(
        "states_expiring",
        "states",
        ["expires_at"],
        sqlite_where=sa.text("expires_at IS NOT NULL"),
        postgresql_where=sa.text("expires_at IS NOT NULL"),
    )
    op.create_table(
        "evictions",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("public_id", sa.String, nullable=False, unique=True),
        sa.Column("key", sa.String, nullable=False),
        sa.Column("tier", sa.String, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("nbytes", _NUMBER, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("fetched_again", sa.Boolean, nullable=False),
    )
    op.create_index("evictions_by_key", "evictions", ["key", "tier"])


def _create_schemas() -> None:
    op.create_table(
        "schemas",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("namespace_id", _NUMBER, _cascade("namespaces.id"), nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("text", sa.String, nullable=False),
        sa.Column("placement", sa.String, nullable=False),
        sa.UniqueConstraint("namespace_id", "name"),
    )
    op.create_table(
        "schema_states",
        sa.Column("schema_id", _NUMBER, _cascade("schemas.id"), primary_key=True),
        sa.Column("key", sa.String, primary_key=True),
    )
    op.create_index("ix_schema_states_key", "schema_states", ["key"])
    op.create_table(
        "scaffolds",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("schema_id", _NUMBER, _cascade("schemas.id")),
        sa.Column("collection_id", _NUMBER, _cascade("collections.id")),
        sa.Column("key", sa.String, nullable=False),
        sa.Column("members", sa.JSON, nullable=False),
    )
    op.create_index("scaffolds_by_key", "scaffolds", ["key"])


def _create_sessions() -> None:
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


def _create_jobs() -> None:
    op.create_table(
        "ingestion_jobs",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("public_id", sa.String, nullable=False, unique=True),
        sa.Column("target", sa.String, nullable=False),
        sa.Column("session", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("started_at", sa.Double),
        sa.Column("finished_at", sa.Double),
        sa.Column("modules", _NUMBER, nullable=False),
        sa.Column("error", sa.String, nullable=False),
        sa.Column("namespace", sa.String, nullable=False, server_default="default"),
        sa.Column("created_at", sa.Double, nullable=False, server_default="0"),
        sa.Column("done", _NUMBER, nullable=False, server_default="0"),
        sa.Column("idempotency_key", sa.String),
        sa.Column("request_digest", sa.String, nullable=False, server_default=""),
    )
    op.create_index("jobs_by_namespace", "ingestion_jobs", ["namespace", "id"])
    op.create_index(
        "jobs_by_request", "ingestion_jobs", ["namespace", "idempotency_key"], unique=True
    )
    op.create_table(
        "job_states",
        sa.Column("job_id", _NUMBER, _cascade("ingestion_jobs.id"), primary_key=True),
        sa.Column("key", sa.String, primary_key=True),
    )
    op.create_index("ix_job_states_key", "job_states", ["key"])


def _create_service() -> None:
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
        "api_keys",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("role", sa.String, nullable=False),
        sa.Column("namespace_id", _NUMBER, _cascade("namespaces.id"), nullable=False),
        sa.Column("prefix", sa.String, nullable=False),
        sa.Column("digest", sa.String, nullable=False, unique=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("last_used", sa.Double),
        sa.Column("revoked_at", sa.Double),
    )
    op.create_table(
        "secrets",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("value", sa.LargeBinary, nullable=False),
    )


def _cascade(column: str) -> sa.ForeignKey:
    return sa.ForeignKey(column, ondelete="CASCADE")
