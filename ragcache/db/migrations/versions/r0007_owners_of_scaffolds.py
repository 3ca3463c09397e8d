"""Scaffolds are found by what owns them."""

from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Adds two indexes, which are nothing to code before this."""
    op.create_index("scaffolds_by_collection", "scaffolds", ["collection_id"])
    op.create_index("scaffolds_by_schema", "scaffolds", ["schema_id"])
