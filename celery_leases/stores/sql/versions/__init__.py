"""The versions of the tables, with one numbered file for each step from a version to the next.

:mod:`celery_leases.stores.sql.schema` defines the tables of the newest version, and ``leases
migrate`` creates missing tables in that form. To add version 2, change the schema and its
``NEWEST``, write the file ``v2.py`` with a function ``up(connection, tables)``, and add ``v2.up``
to ``STEPS``.

A step changes existing tables while workers of the previous release run:

- Their statements name the columns that they know, so a step may add tables, indexes, and columns
  that are NULL or have a default. What they use it must not rename, remove or fill differently.
- All later statements on a table wait behind the one that changes it, so each statement must be
  short.
- PostgreSQL and SQLite run a step and write the version in one transaction. MySQL and MariaDB
  commit each statement. A step that was interrupted there runs again, so it must skip what exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from sqlalchemy import Connection

from celery_leases.stores.sql.schema import Tables

Step: TypeAlias = Callable[[Connection, Tables], None]

STEPS: Final[Sequence[Step]] = ()
"""The steps: the first one leads from version 1 to version 2."""
