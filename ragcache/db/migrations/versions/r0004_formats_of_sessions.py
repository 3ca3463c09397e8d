"""What code a session runs: the format of its states, and the revision of its tables."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Adds two columns; code before this, which writes neither, uses format 2."""
    op.add_column("sessions", sa.Column("format", _NUMBER, nullable=False, server_default="2"))
    op.add_column(
        "sessions", sa.Column("revision", sa.String, nullable=False, server_default="0003")
    )
