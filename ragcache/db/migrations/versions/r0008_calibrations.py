"""Calibrations of collections."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Adds a column; code before this, which does not read it, refuses no answers."""
    op.add_column("collections", sa.Column("calibrations", sa.String, nullable=True))
