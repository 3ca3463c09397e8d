"""Metadata of single modules, and what jobs report."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Adds a column to modules and two to jobs."""
    for table, name in (
        ("modules", "details"), ("ingestion_jobs", "options"), ("ingestion_jobs", "report"),
    ):  # fmt: skip
        op.add_column(table, sa.Column(name, sa.JSON, nullable=False, server_default="{}"))
