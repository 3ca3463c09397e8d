"""The root of all tables, and what they share."""

from __future__ import annotations

from secrets import token_urlsafe

from sqlalchemy import BigInteger, Double, Integer
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from ragcache.config import NAMESPACE

DEFAULT_NAMESPACE = NAMESPACE
SHARED = ""  # the place of a tier of which the ledger knows one alone

Number = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up integers alone


class Base(DeclarativeBase):
    """The root of all tables."""

    type_annotation_map = {int: Number, float: Double()}  # noqa: RUF012  # SQLAlchemy's own attribute


class PublicIdMixin:
    """public_id: a row's id for those who may not learn how many rows there are."""

    public_id: Mapped[str] = mapped_column(default=lambda: token_urlsafe(12), unique=True)
