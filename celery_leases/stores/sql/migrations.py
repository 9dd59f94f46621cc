"""Creates the tables, and applies the steps from an earlier version to the newest one while workers
run. See :mod:`celery_leases.stores.sql.versions`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Engine, select, update
from sqlalchemy.exc import DBAPIError

from celery_leases.errors import StoreUnavailable
from celery_leases.stores.sql.dialects import Fault, dialect_of
from celery_leases.stores.sql.schema import RELEASE, Tables
from celery_leases.stores.sql.versions import STEPS, Step
from celery_leases.stores.urls import display_database_url

RETRY_TIME: Final = 60.0
"""Seconds for which a step is retried while other transactions lock what it needs."""
RETRY_PAUSE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Migrated:
    """The result of a migration. ``before`` is ``None`` if there were no tables."""

    before: int | None
    after: int


def migrate(engine: Engine, tables: Tables, steps: Sequence[Step] = STEPS) -> Migrated:
    """Create missing tables and indexes, and apply those of *steps* that the tables do not have.

    Raises :class:`SchemaOutdated` for tables of a later version, and :class:`StoreUnavailable` if
    other transactions lock the tables for too long.
    """
    newest = 1 + len(steps)
    before = tables.existing_version(engine, newest)
    if before is not None:
        with engine.connect() as connection:
            for version in range(before + 1, newest + 1):
                _apply(connection, tables, version, steps[version - 2])
    tables.create(engine)
    return Migrated(before, newest)


def _apply(connection: Connection, tables: Tables, version: int, step: Step) -> None:
    """Run *step* and write *version*, unless another process has done so. Retries while another
    transaction holds a lock that the step needs.
    """
    until, dialect = time.monotonic() + RETRY_TIME, dialect_of(connection.dialect)
    while True:
        try:
            with dialect.migrating(connection) as alone:
                if alone:
                    return _apply_once(connection, tables, version, step)
            reason = "another migration is running"
        except DBAPIError as error:
            if dialect.fault(error) not in (Fault.LOCKED, Fault.DEADLOCK):
                raise
            reason = f"other transactions have locked the tables ({error.orig})"
        if time.monotonic() > until:
            raise StoreUnavailable(
                f"{display_database_url(connection.engine.url)}: {reason}; nothing is lost, run the migration again "
                "later",
                False,
            )
        time.sleep(RETRY_PAUSE)


def _apply_once(connection: Connection, tables: Tables, version: int, step: Step) -> None:
    noted = tables.version
    found = connection.execute(select(noted.c.version).with_for_update()).scalar_one()
    if found < version:
        step(connection, tables)
        connection.execute(update(noted).values(version=version, made_by=RELEASE))
