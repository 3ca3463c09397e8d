"""Instructions of collections."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Adds a column; code before this, which does not read it, asks with that of the folder."""
    op.add_column("collections", sa.Column("instruction", sa.String, nullable=True))
