"""Alembic migrations of the ledger, and the revision that this code reads and writes."""

from __future__ import annotations

HEAD = "0004"
FIRST = "0001"
"""The tables of before there were migrations: what a ledger without a revision holds."""
