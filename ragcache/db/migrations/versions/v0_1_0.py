"""The tables of ragcache 0.1.0, the namespace `default`, and the clock of uses.

`ragcache.db.tables` declares the tables. Before they change after the release of 0.1.0, write them
out here as they were: Alembic's autogenerate does, run at the tag on an empty database.
"""

from alembic import op
from sqlalchemy import insert

from ragcache.db.tables import DEFAULT_NAMESPACE, Base, ClockTable, NamespaceTable

revision = "0.1.0"
down_revision = None


def upgrade() -> None:
    """Create every table of an empty ledger."""
    Base.metadata.create_all(op.get_bind())
    op.execute(insert(NamespaceTable).values(name=DEFAULT_NAMESPACE))
    op.execute(insert(ClockTable).values(id=1, tick=0))
