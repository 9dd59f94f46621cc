"""Alembic's environment, as Flask-Migrate has it, without its logging."""

from alembic import context
from flask import current_app

db = current_app.extensions["migrate"].db

with db.engine.connect() as connection:
    context.configure(
        connection=connection,
        target_metadata=db.metadata,
        **current_app.extensions["migrate"].configure_args,
    )
    with context.begin_transaction():
        context.run_migrations()
