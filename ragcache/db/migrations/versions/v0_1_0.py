"""The tables of ragcache 0.1.0, and the namespace `default`."""

from functools import partial
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0.1.0"
down_revision = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def _column(kind: Any, name: str, *constraints: Any, **options: Any) -> sa.Column[Any]:
    return sa.Column(name, kind, *constraints, **{"nullable": False, **options})


_id = partial(_column, _NUMBER, "id", primary_key=True)
_key = partial(_column, sa.String, primary_key=True)
_text = partial(_column, sa.String)
_number = partial(_column, _NUMBER)
_real = partial(_column, sa.Double)
_flag = partial(_column, sa.Boolean)
_json = partial(_column, sa.JSON)
_bytes = partial(_column, sa.LargeBinary)


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
    op.create_table("namespaces", _id(), _text("name", unique=True))
    op.execute("INSERT INTO namespaces (id, name) VALUES (1, 'default')")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SELECT setval(pg_get_serial_sequence('namespaces', 'id'), 1)")
    op.create_table(
        "collections", _id(), _owner("namespace_id", "namespaces"), _text("name"),
        _number("revision"), _text("instruction", nullable=True),
        _text("calibrations", nullable=True), sa.UniqueConstraint("namespace_id", "name"),
    )  # fmt: skip
    op.create_table(
        "documents", _id(), _owner("collection_id", "collections"), _text("source_id"),
        _text("uri"), _text("digest"), _json("attributes"),
        sa.UniqueConstraint("collection_id", "source_id"),
    )  # fmt: skip
    op.create_table("document_texts", _owner_key("document_id", "documents"), _text("text"))
    op.create_table(
        "modules", _id(), _text("public_id", unique=True), _owner("document_id", "documents"),
        _number("ordinal"), _text("name"), _text("text"), _json("details"), _json("places"),
        sa.UniqueConstraint("document_id", "ordinal"), sqlite_autoincrement=True,
    )  # fmt: skip
    op.create_index("modules_by_name", "modules", ["name", "id"])


def _create_parts_of_modules() -> None:
    module = ("module_id", "modules")
    op.create_table("module_tokens", _owner_key(*module), _key("tokenizer"), _bytes("token_ids"))
    op.create_table("vectors", _owner_key(*module), _key("embedder"), _bytes("vector"))
    op.create_table("encodings", _owner_key(*module), _key("key"), sqlite_with_rowid=False)
    op.create_index("ix_encodings_key", "encodings", ["key"])


def _create_states() -> None:
    op.create_table(
        "states", _key("key"), _key("tier"), _key("place"), _number("nbytes"), _number("tokens"),
        _number("hits"), _number("last_use"), _real("used_at"),
        _flag("pinned"), _real("expires_at", nullable=True), _text("mode"), _text("kv_dtype"),
        _text("root"), _text("model"), sqlite_with_rowid=False,
    )  # fmt: skip
    op.create_index("states_by_last_use", "states", ["last_use", "key"])
    op.create_index("states_by_tier", "states", ["tier", "key"])
    limited = "expires_at IS NOT NULL"
    op.create_index("states_expiring", "states", ["expires_at"], **_where(limited, limited))
    op.create_table("store_clock", _id(), _number("tick"))
    op.execute("INSERT INTO store_clock (id, tick) VALUES (1, 0)")
    op.create_table("retirements", _id(), _text("key"), _real("at"))
    op.create_table("ledger_facts", _key("name"), _text("value"))
    op.create_table(
        "evictions", _id(), _text("public_id", unique=True), _text("key"), _text("tier"),
        _text("reason"), _number("nbytes"), _real("at"),
    )  # fmt: skip


def _create_schemas() -> None:
    op.create_table(
        "schemas", _id(), _owner("namespace_id", "namespaces"), _text("name"), _text("text"),
        _text("placement"), sa.UniqueConstraint("namespace_id", "name"),
    )  # fmt: skip
    op.create_table("schema_states", _owner_key("schema_id", "schemas"), _key("key"))
    op.create_index("ix_schema_states_key", "schema_states", ["key"])
    op.create_table(
        "scaffolds", _id(), _owner("schema_id", "schemas", nullable=True),
        _owner("collection_id", "collections", nullable=True), _text("key"),
        _json("members"),
    )  # fmt: skip
    op.create_index("scaffolds_by_key", "scaffolds", ["key"])
    op.create_index("scaffolds_by_collection", "scaffolds", ["collection_id"])
    op.create_index("scaffolds_by_schema", "scaffolds", ["schema_id"])


def _create_sessions() -> None:
    op.create_table(
        "sessions", _key("id"), _text("machine"), _number("pid"), _text("started"),
        _real("heartbeat"), _number("generation"),
    )  # fmt: skip
    op.create_table(
        "claims", _key("key"), _text("session"), _text("tier"), _text("place"),
        _number("nbytes"),
    )  # fmt: skip
    op.create_index("ix_claims_session", "claims", ["session"])


def _create_jobs() -> None:
    op.create_table(
        "ingestion_jobs", _id(), _text("public_id", unique=True), _text("target"),
        _text("session"), _text("status"), _real("started_at", nullable=True),
        _real("finished_at", nullable=True), _number("modules"), _text("error"),
        _text("namespace"), _real("created_at"), _number("done"),
        _text("idempotency_key", nullable=True), _text("request_digest"),
        _number("nbytes"), _json("options"), _json("report"),
    )  # fmt: skip
    op.create_index("jobs_by_namespace", "ingestion_jobs", ["namespace", "id"])
    op.create_index("jobs_by_status", "ingestion_jobs", ["status", "id"])
    op.create_index("jobs_by_turn", "ingestion_jobs", ["namespace", "started_at"])
    request = ["namespace", "idempotency_key"]
    op.create_index("jobs_by_request", "ingestion_jobs", request, unique=True)
    op.create_table(
        "job_documents", _owner_key("job_id", "ingestion_jobs"),
        _number("ordinal", primary_key=True), _text("content"),
    )  # fmt: skip
    op.create_table("job_states", _owner_key("job_id", "ingestion_jobs"), _key("key"))
    op.create_index("ix_job_states_key", "job_states", ["key"])


def _create_service() -> None:
    op.create_table(
        "records", _owner_key("namespace_id", "namespaces"), _key("space"), _key("key"),
        _text("group_id", nullable=True), _real("updated_at"),
    )  # fmt: skip
    op.create_index("records_by_time", "records", ["namespace_id", "space", "updated_at"])
    op.create_table(
        "api_keys", _id(), _text("name"), _text("role"), _owner("namespace_id", "namespaces"),
        _text("prefix"), _text("digest", unique=True), _real("created_at"),
        _real("last_used", nullable=True), _real("revoked_at", nullable=True),
    )  # fmt: skip


def _owner(name: str, table: str, **options: Any) -> sa.Column[Any]:
    """A reference to the row with which this one is deleted."""
    return _number(name, sa.ForeignKey(f"{table}.id", ondelete="CASCADE"), **options)


def _owner_key(name: str, table: str) -> sa.Column[Any]:
    return _owner(name, table, primary_key=True)


def _where(sqlite: str, postgresql: str) -> dict[str, Any]:
    """The condition of a partial index in either database."""
    return {"sqlite_where": sa.text(sqlite), "postgresql_where": sa.text(postgresql)}
