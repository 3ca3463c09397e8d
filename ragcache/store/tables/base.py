"""The root of all tables, and what they share."""

from __future__ import annotations

from sqlalchemy import BigInteger, Double, Integer
from sqlalchemy.orm import DeclarativeBase

from ragcache.config import NAMESPACE

DEFAULT_NAMESPACE = NAMESPACE
SHARED = ""  # the place of a tier of which the ledger knows one alone

Number = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up integers alone


class Base(DeclarativeBase):
    """The root of all tables."""

    type_annotation_map = {int: Number, float: Double()}  # noqa: RUF012  # SQLAlchemy's own attribute
