"""Run by Alembic, inside the transaction of the connection that `upgrade` hands over."""

from alembic import context

from ragcache.db.tables import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
context.run_migrations()
