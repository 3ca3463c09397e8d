"""Processes, what they are doing, and who may ask them."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, LargeBinary
from sqlalchemy.orm import Mapped, mapped_column

from ragcache.store.tables.base import DEFAULT_NAMESPACE, Base, PublicIdMixin


class SessionTable(Base):
    """A process that has the store open. machine, pid and started: to see whether it lives;
    heartbeat: Unix seconds, for those who cannot see it."""

    __tablename__ = "sessions"
    id: Mapped[str] = mapped_column(primary_key=True)
    machine: Mapped[str]
    pid: Mapped[int]
    started: Mapped[str]
    heartbeat: Mapped[float]


class ClaimTable(Base):
    """A key whose states one session is making or removing; it ends with the session. tier, place
    and nbytes: where bytes are taken for it meanwhile, and how many at most."""

    __tablename__ = "claims"
    key: Mapped[str] = mapped_column(primary_key=True)
    session: Mapped[str] = mapped_column(index=True)
    tier: Mapped[str] = mapped_column(default="", server_default="")
    place: Mapped[str] = mapped_column(default="", server_default="")
    nbytes: Mapped[int] = mapped_column(default=0, server_default="0")


class JobTable(PublicIdMixin, Base):
    """An ingestion. status: queued, running, done, failed or interrupted; times in Unix seconds;
    done: of its modules. idempotency_key: by which a caller knows a request again, whose content
    is `request_digest`."""

    __tablename__ = "ingestion_jobs"
    __table_args__ = (
        Index("jobs_by_namespace", "namespace", "id"),
        Index("jobs_by_request", "namespace", "idempotency_key", unique=True),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    target: Mapped[str]  # `collection NAME` or `schema NAME`
    session: Mapped[str]
    status: Mapped[str]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    modules: Mapped[int]
    error: Mapped[str] = mapped_column(default="")
    namespace: Mapped[str] = mapped_column(
        default=DEFAULT_NAMESPACE, server_default=DEFAULT_NAMESPACE
    )
    created_at: Mapped[float] = mapped_column(default=0.0, server_default="0")
    done: Mapped[int] = mapped_column(default=0, server_default="0")
    idempotency_key: Mapped[str | None]
    request_digest: Mapped[str] = mapped_column(default="", server_default="")


class JobStateTable(Base):
    """States that an ingestion needs and that nothing else may own yet."""

    __tablename__ = "job_states"
    job_id: Mapped[int] = mapped_column(
        ForeignKey("ingestion_jobs.id", ondelete="CASCADE"), primary_key=True
    )
    key: Mapped[str] = mapped_column(primary_key=True, index=True)


class ApiKeyTable(Base):
    """A key of the HTTP service. digest: SHA-256 of the secret, which is kept nowhere; prefix: its
    first characters, for people. Times in Unix seconds."""

    __tablename__ = "api_keys"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    role: Mapped[str]
    namespace_id: Mapped[int] = mapped_column(ForeignKey("namespaces.id", ondelete="CASCADE"))
    prefix: Mapped[str]
    digest: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[float]
    last_used: Mapped[float | None]
    revoked_at: Mapped[float | None]


class SecretTable(Base):
    """Random bytes that every service over the ledger shares."""

    __tablename__ = "secrets"
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[bytes] = mapped_column(LargeBinary)
