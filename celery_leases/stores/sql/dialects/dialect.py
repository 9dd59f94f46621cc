"""What differs between SQLite, PostgreSQL, and MySQL or MariaDB. Nothing else asks which of them it
is.

:class:`Dialect` has what is equal for most of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, suppress
from enum import Enum, auto
from importlib import import_module
from typing import Any, ClassVar, Final

import sqlalchemy
from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    CursorResult,
    Engine,
    Executable,
    Index,
    Table,
    bindparam,
    func,
    literal_column,
)
from sqlalchemy.schema import CreateIndex, CreateSchema, CreateTable, ExecutableDDLElement

Writes = tuple[Executable, ...]
"""Statements that are run in order until one of them touches a row. An insert whose key exists
touches none.
"""
JOINT: Final = "celery_leases_joint"
"""The key in the ``info`` of an index that only some servers have: whether it is for those that
find the latest and the expired records by one index.
"""


class Fault(Enum):
    """What an error of a driver means.

    ``STALE`` and ``READ_ONLY``: the statement was not executed, and may be on a new connection; a
    former primary only reads, and leaves connections open. ``LOCKED`` and ``DEADLOCK``: it was not
    executed because of other transactions. ``LOST``: the server has closed the connection.
    """

    STALE = auto()
    READ_ONLY = auto()
    LOCKED = auto()
    DEADLOCK = auto()
    LOST = auto()
    DUPLICATE = auto()
    VALUE_REFUSED = auto()
    NO_RIGHT = auto()
    NO_TABLE = auto()
    NO_COLUMN = auto()


class Mark:
    """Identifies a transaction of a DB-API connection, so that it is not confused with a later one.
    On MySQL there is nothing to identify it by.
    """

    def set(self) -> None:
        """Mark the current transaction of the connection, unless it is marked."""

    def is_over(self) -> bool:
        """Whether the transaction has certainly ended; asks on another connection."""
        return False

    def is_surely_open(self) -> bool:
        """Whether the transaction is certainly open. Call it only once, right before a rollback."""
        return False


class Dialect:
    """How to use one kind of database; *sqlalchemy* is SQLAlchemy's dialect."""

    #: The names in URLs; the first one is also that of the extra which brings the first driver.
    NAMES: ClassVar[Sequence[str]]
    #: The supported drivers. If the URL names none, the first installed one is used.
    DRIVERS: ClassVar[Sequence[str]] = ()
    #: The modules of drivers that have another name.
    MODULES: ClassVar[Mapping[str, str]] = {}
    #: What the codes of the driver's errors mean; see :meth:`code_of`.
    FAULTS: ClassVar[Mapping[Any, Fault]]
    #: SQL for the time of the statement, in microseconds since the epoch.
    NOW: ClassVar[str]
    BIG_INTEGER: ClassVar[str] = "BIGINT"
    #: Begins a short transaction. If its process stands still meanwhile, the server ends it after
    #: about 5 s where it can, so that its locks do not hold up other processes.
    BEGIN: ClassVar[str] = "BEGIN"
    #: Appended to a SELECT that locks its rows.
    ROW_LOCK: ClassVar[str] = "FOR UPDATE"
    #: What to do about rows that stay locked.
    UNLOCK: ClassVar[str]

    #: Whether there is a server. SQLite has none: its clock is that of the host, and is the
    #: parameter ``now`` of statements; a writer locks all rows; tables are created at first use.
    has_server: ClassVar[bool] = True
    #: Whether writes return rows (``RETURNING``), and an insert may have ``ON CONFLICT``.
    writes_return: ClassVar[bool] = True
    #: Whether one statement can read a row that exists, or insert a missing one.
    reads_or_inserts: ClassVar[bool] = False
    #: Whether the latest and the expired records are found by one index.
    joint_index: ClassVar[bool] = False
    #: Whether it pays to keep a driver's cursor open for the next execution of its statement.
    keeps_cursors: ClassVar[bool] = False
    #: Whether a transaction reads older rows than it writes, and a driver counts changed rows
    #: instead of matched ones.
    reads_snapshots: ClassVar[bool] = False

    def __init__(self, sqlalchemy: sqlalchemy.Dialect) -> None:
        self.sqlalchemy = sqlalchemy
        #: The time of the statement in microseconds since the epoch.
        self.now: ColumnElement[int] = literal_column(self.NOW, BigInteger)
        #: Reads the time of an insert of :meth:`insert_now` from its cursor, if it returns no row.
        self.inserted_at: Callable[[Any, object], int] | None = None
        #: Shortens the wait for a reply on a connection, if the driver does not do that itself.
        self.limit_wait: Callable[[Any, MutableMapping[Any, Any]], None] | None = None

    # -- connections -------------------------------------------------------------------------------

    @classmethod
    def has_driver(cls, driver: str) -> bool:
        """Whether *driver* is installed."""
        try:
            import_module(cls.MODULES.get(driver, driver))
        except ImportError:
            return False
        return True

    @classmethod
    def engine_options(cls, url: URL) -> dict[str, Any]:  # noqa: ARG003 - for those that override it
        """Options of ``create_engine`` for *url*; raises ``ValueError`` for a parameter in it that
        cannot be used.
        """
        return {}

    def listen(self, engine: Engine) -> None:
        """Prepare *engine* and its future connections."""

    @property
    def product(self) -> str:
        """The name and version of the server; the version is known once it was connected."""
        return f"{self.sqlalchemy.name} {'.'.join(map(str, self.version))}".strip()

    @property
    def version(self) -> tuple[int, ...]:
        """The version of the server; empty if it is not known."""
        found = getattr(self.sqlalchemy, "server_version_info", None) or ()
        return tuple(each for each in found if isinstance(each, int))

    @property
    def too_old(self) -> str | None:
        """The oldest supported version, if that of the server is lower."""
        return None

    # -- errors ------------------------------------------------------------------------------------

    @staticmethod
    def code_of(error: BaseException) -> Any:
        """The code of an error of the driver, also of one inside an error of SQLAlchemy."""
        raise NotImplementedError

    def fault(self, error: BaseException) -> Fault | None:
        """What *error* means, if that is known."""
        return self.FAULTS.get(self.code_of(error))

    def is_too_large(self, error: BaseException, values: Mapping[str, Any], engine: Engine) -> str:
        """Why the server has closed the connection because of *values*; empty if it has not."""
        return ""

    # -- statements --------------------------------------------------------------------------------

    def insert(self, table: Table) -> Any:
        """An insert that may have ``ON CONFLICT``."""
        raise NotImplementedError

    def upsert(
        self,
        table: Table,
        key: Mapping[str, Any],
        values: Mapping[str, Any],
        *,
        where: ColumnElement[bool],
    ) -> Writes:
        """Insert the row of *key* with *values*, or update an existing row for which *where* is
        true.
        """
        places = [table.c[name] for name in key]
        written = self.insert(table).values({**key, **values})
        written = written.on_conflict_do_update(index_elements=places, set_=values, where=where)
        return (written.returning(*places),)

    def insert_absent(self, table: Table, key: Sequence[str], values: Mapping[str, Any]) -> Writes:
        """Insert a row unless there is one with the same *key* columns."""
        written = self.insert(table).values(values).on_conflict_do_nothing(index_elements=key)
        return (written.returning(*(table.c[name] for name in key)),)

    def insert_now(self, table: Table, values: Mapping[str, Any], name: str) -> Executable:
        """Insert a row unless there is one. Its column *name* is the time of the insert, which is
        returned unless :attr:`inserted_at` reads it.
        """
        inserted: Executable = (
            self.insert(table).values(values).on_conflict_do_nothing().returning(table.c[name])
        )
        return inserted

    def raised(
        self,
        table: Table,
        key: Mapping[str, Any],
        new: Mapping[str, Any],
        changed: Mapping[str, Any],
        name: str,
    ) -> Executable:
        """Insert the row of *key* with the values *new*, or change those of an existing row to
        *changed*; see :meth:`raised_to`. Column *name* is the first one that changes.
        """
        places = [table.c[name] for name in key]
        written = self.insert(table).values({**key, **new})
        written = written.on_conflict_do_update(index_elements=places, set_=changed)
        raised: Executable = written.returning(table.c[name])
        return raised

    @staticmethod
    def raised_to(executed: Any) -> int:
        """The value of the named column from the result or cursor of :meth:`raised`."""
        return int(executed.fetchone()[0])

    def is_one_of(self, column: Column[Any], name: str) -> ColumnElement[bool]:
        """Whether *column* has one of the values in the list that is the parameter *name*."""
        return column.in_(bindparam(name, expanding=True))

    def position(self, text: ColumnElement[str], part: str) -> ColumnElement[int]:
        """Where *part* begins in *text*, from 1; 0 if it is not in there."""
        return func.instr(text, part)

    def in_text(self, table: Table) -> str:
        """The quoted name of *table* for ``text()``, which doubles percent signs itself and reads
        colons as parameters.
        """
        preparer = self.sqlalchemy.identifier_preparer
        named = preparer.format_table(table)
        if preparer._double_percents:  # noqa: SLF001 - whether the driver reads %
            named = named.replace("%%", "%")
        return named.replace(":", "\\:")

    # -- tables ------------------------------------------------------------------------------------

    def create_schema(self, name: str) -> list[ExecutableDDLElement]:
        """Create a schema unless it exists."""
        return [CreateSchema(name, if_not_exists=True)]

    def create_table(self, table: Table) -> list[ExecutableDDLElement]:
        """Create a table and its indexes unless they exist."""
        created = CreateTable(table, if_not_exists=True)
        return [created, *map(self.create_index, self.indexes_of(table))]

    def create_index(self, index: Index) -> ExecutableDDLElement:
        """Create an index, if possible unless it exists."""
        return CreateIndex(index, if_not_exists=True)

    @classmethod
    def indexes_of(cls, table: Table) -> list[Index]:
        """The indexes that *table* has here, in the order of their names."""
        own = cls.joint_index
        found = [index for index in table.indexes if index.info.get(JOINT, own) is own]
        return sorted(found, key=lambda index: str(index.name))

    def migrating(self, connection: Connection) -> AbstractContextManager[bool]:
        """A transaction for one step of a migration, which waits at most about a second for each
        lock; ``False`` if another migration is running.
        """
        raise NotImplementedError

    # -- transactions of the user's ----------------------------------------------------------------

    def mark(self, driver: Any, engine: Engine) -> Mark:
        """A mark for transactions of the DB-API connection *driver*."""
        return Mark()

    def hides_transactions(self, driver: Any) -> bool:
        """Whether a DB-API connection does not show whether it is in a transaction."""
        return False

    def has_no_writer(self, engine: Engine) -> bool:
        """Whether no connection has an open transaction that locks all rows."""
        return True


def touched(executed: Any) -> bool:
    """Whether a write has inserted, changed or deleted a row, from its result or DB-API cursor."""
    returns = (
        executed.returns_rows
        if isinstance(executed, CursorResult)
        else executed.description is not None
    )
    return executed.fetchone() is not None if returns else bool(executed.rowcount > 0)


def transaction(connection: Connection, *begin: str) -> Iterator[bool]:
    """Run the statements *begin*, then the caller's block, and commit; for ``@contextmanager``."""
    for statement in begin:
        connection.exec_driver_sql(statement)
    try:
        yield True
        connection.exec_driver_sql("COMMIT")
    except BaseException:
        with suppress(Exception):  # the transaction ends with its connection
            connection.exec_driver_sql("ROLLBACK")
        raise
