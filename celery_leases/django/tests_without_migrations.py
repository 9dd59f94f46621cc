"""Tables without migrations: in tests that switch those off, Django would make its own tables from
the models.
"""

from __future__ import annotations

from typing import Any

from django.db import connections
from django.db.migrations.loader import MigrationLoader

from celery_leases.django import configuration, tables
from celery_leases.errors import LeaseConfigurationError


def make_tables(sender: Any, using: str, **_: Any) -> None:
    """Make the tables before Django does, where ``MIGRATION_MODULES`` has no migrations for this
    app.
    """
    if MigrationLoader.migrations_module(sender.label)[0] is not None:
        return
    try:
        if using != configuration.alias_of_records():
            return
    except LeaseConfigurationError:  # the checks tell of it
        return
    tables.migrate(connections[using])
