"""Alembic migrations of the ledger, and the revision that this code reads and writes."""

from __future__ import annotations

HEAD = "0001"
