"""Alembic and Flask-Migrate: exclude the tables of celery_leases from autogenerate, and create or
migrate them in a revision of the project. See ``docs/alembic.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import text

from celery_leases.errors import LeaseConfigurationError
from celery_leases.stores.sql.migrations import migrating_on, migration
from celery_leases.stores.sql.schema import Tables
from celery_leases.stores.sql.table_versions import NEWEST, OLDEST

if TYPE_CHECKING:
    from sqlalchemy.schema import SchemaItem

__all__ = ["NEWEST", "downgrade", "include_object", "upgrade"]

_TABLES: Final = frozenset(table.name for table in Tables().metadata.tables.values())


def include_object(
    object: SchemaItem,  # noqa: A002 - Alembic's name for it
    name: str | None,
    type_: str,
    reflected: bool,  # noqa: ARG001 - Alembic passes it
    compare_to: SchemaItem | None,  # noqa: ARG001 - as above
) -> bool:
    """Whether autogenerate compares *object*: not the tables of celery_leases, nor their columns,
    indexes and constraints.

    Pass this function to ``context.configure(include_object=…)``, or to Flask-Migrate's
    ``Migrate(app, db, include_object=…)``.
    """
    if type_ == "table":
        return name not in _TABLES
    table = getattr(object, "table", None)
    return getattr(table, "name", None) not in _TABLES


def upgrade(op: Any, to: int = NEWEST, *, schema: str | None = None) -> None:
    """Create the tables of celery_leases, or migrate them to version *to*, in a revision of your
    project.

    *op* is Alembic's ``op``. *schema* is that of ``leases_database_schema``; it is created too.
    Tables of a later version are not changed. Rows are converted while workers run. Earlier
    operations of the revision are committed first, because some steps cannot run in a transaction.
    Running it again is harmless. With ``--sql`` it prints the statements that create new tables.

    Raises :class:`~celery_leases.errors.LeaseConfigurationError` for a version that this release
    does not know, and in a transaction that Alembic has not begun;
    :class:`~celery_leases.errors.SchemaOutdated` and
    :class:`~celery_leases.errors.StoreUnavailable` as ``leases migrate`` does.
    """
    _check_version("upgrade", to, OLDEST)
    tables = Tables(schema)
    if _prints(op):
        if to != NEWEST:
            raise LeaseConfigurationError(
                f"upgrade(op, to={to}) with --sql: only the statements for new tables of version {NEWEST} can be "
                "printed, because rows are read and converted; run the revision on the database"
            )
        for statement in tables.ddl_statements(op.get_context().dialect):
            op.execute(text(statement.replace(":", "\\:")))
        return
    with _block(op, "upgrade"), migrating_on(op.get_bind()) as engine:
        migration(engine, tables).upgrade(to)


def downgrade(op: Any, to: int, *, schema: str | None = None) -> None:
    """Migrate the tables of celery_leases back to version *to*, or with ``to=0`` drop them with all
    records.

    Tables of an earlier version are not changed. Everything else is as in :func:`upgrade`.
    """
    _check_version("downgrade", to, 0)
    tables = Tables(schema)
    if _prints(op):
        if to != 0:
            raise LeaseConfigurationError(
                f"downgrade(op, to={to}) with --sql: only to=0 can be printed, because rows are read and converted; "
                "run the revision on the database"
            )
        for statement in tables.drop_statements():
            op.execute(statement)
        return
    with _block(op, "downgrade"), migrating_on(op.get_bind()) as engine:
        migration(engine, tables).downgrade(to)


def _check_version(what: str, to: object, least: int) -> None:
    if isinstance(to, bool) or not isinstance(to, int) or not least <= to <= NEWEST:
        raise LeaseConfigurationError(
            f"{what}(op, to={to!r}): this release knows the versions {least} to {NEWEST} of its tables; write one of "
            "them, or install a later release of celery_leases"
        )


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
