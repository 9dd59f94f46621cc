"""Alembic and Flask-Migrate: exclude the tables of celery_leases from autogenerate, and create,
migrate or drop them in a revision of the project. See ``docs/how-to/alembic.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import Connection, Engine, text

from celery_leases.errors import LeaseConfigurationError
from celery_leases.stores.sql.migrations import migrate
from celery_leases.stores.sql.schema import RECORDS, Tables

if TYPE_CHECKING:
    from sqlalchemy.schema import SchemaItem

__all__ = ["downgrade", "include_object", "upgrade"]

_TABLES: Final = frozenset(table.name for table in Tables().metadata.tables.values())


def include_object(
    object: SchemaItem,  # noqa: A002 - Alembic's name for it
    name: str | None,
    type_: str,
    reflected: bool,  # noqa: ARG001 - Alembic passes it
    compare_to: SchemaItem | None,  # noqa: ARG001 - as above
) -> bool:
    """Whether autogenerate compares *object*: not the tables of celery_leases and their partitions,
    nor their columns, indexes and constraints.

    Pass this function to ``context.configure(include_object=…)``, or to Flask-Migrate's
    ``Migrate(app, db, include_object=…)``.
    """
    if type_ != "table":
        name = getattr(getattr(object, "table", None), "name", None)
    return name not in _TABLES and not (name or "").startswith(f"{RECORDS}_")


def upgrade(op: Any, *, schema: str | None = None) -> None:
    """Create the tables of celery_leases, or migrate them to the version of this release, in a
    revision of your project.

    *op* is Alembic's ``op``. *schema* is that of ``leases_database_schema``; it is created too.
    Workers may run meanwhile. Earlier operations of the revision are committed first, because a
    migration has transactions of its own. Running it again is harmless. With ``--sql`` it prints
    the statements that create new tables.

    Raises :class:`~celery_leases.errors.LeaseConfigurationError` in a transaction that Alembic has
    not begun; :class:`~celery_leases.errors.SchemaOutdated` and
    :class:`~celery_leases.errors.StoreUnavailable` as ``leases migrate`` does.
    """
    tables = Tables(schema)
    if _prints(op):
        for statement in tables.ddl_statements(op.get_context().dialect):
            op.execute(text(statement.replace(":", "\\:")))
        return
    with _block(op, "upgrade"):
        migrate(cast(Engine, _OneConnection(op.get_bind())), tables)


def downgrade(op: Any, *, schema: str | None = None) -> None:
    """Drop the tables of celery_leases with all records in them."""
    for statement in Tables(schema).drop_statements():
        op.execute(statement)


class _OneConnection:
    """A replacement for an engine whose statements all run on one given connection, in autocommit
    mode.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.dialect = connection.dialect
        self.url = connection.engine.url

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        """The connection, which stays open."""
        yield self._connection


def _prints(op: Any) -> bool:
    return bool(op.get_context().as_sql)


def _block(op: Any, what: str) -> Any:
    """Alembic's block without a transaction; refuses a connection on which the caller has begun
    one.
    """
    context = op.get_context()
    if getattr(context, "_in_external_transaction", False):  # there is no public attribute for it
        raise LeaseConfigurationError(
            f"{what}(op): the connection was in a transaction before Alembic began its own, but some steps cannot run "
            "in a transaction; pass context.configure() a connection without one"
        )
    return context.autocommit_block()
