"""When states were last used, for people: the logical clock orders uses, and gives no time."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Adds a column with an index; code before this does not write it."""
    op.add_column("states", sa.Column("used_at", sa.Double, nullable=False, server_default="0"))
    op.create_index("states_by_used_at", "states", ["used_at", "key"])
