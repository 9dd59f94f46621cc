"""MySQL and MariaDB: connection parameters, clock, error codes, and table options.

Statements run in autocommit mode at READ COMMITTED, which takes no gap locks. Correctness does not
depend on that level: a statement that needs an unchanged row locks the row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Final

import sqlalchemy
from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Engine,
    Executable,
    Index,
    Insert,
    Table,
    Text,
    and_,
    event,
    func,
    insert,
    update,
)
from sqlalchemy.dialects.mysql import LONGTEXT
from sqlalchemy.dialects.mysql import insert as mysql_insert
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateIndex, CreateTable, ExecutableDDLElement
from sqlalchemy.sql.compiler import DDLCompiler

from celery_leases.concurrency import wait_limit
from celery_leases.stores.sql.dialects.dialect import Dialect, Fault, Writes

FAMILY: Final = ("mysql", "mariadb")
PYMYSQL: Final = "pymysql"

# Keys that differ only in case, accents or trailing spaces must be different keys. The collation
# for that has different names in MariaDB and MySQL. Each server executes only one of these
# comments. Older servers execute none, which is a syntax error.
_COLLATION: Final = "/*M!100600 utf8mb4_nopad_bin */ /*!80017 utf8mb4_0900_bin */"

TABLE_OPTIONS: Final[dict[str, Any]] = {
    f"{name}_{option}": value
    for name in FAMILY
    for option, value in (
        ("engine", "InnoDB"),
        ("row_format", "DYNAMIC"),
        ("default_charset", "utf8mb4"),
        ("collate", _COLLATION),
    )
}

LONG: Final = Text().with_variant(LONGTEXT(), *FAMILY)
"""The type of a text of any length."""

MAY_BE_TOO_LARGE: Final = 100_000
"""Bytes of a statement after whose failure the server is asked what it allows."""
MIN_MARIADB: Final = (10, 6)
MIN_MYSQL: Final = (8, 0, 17)

_ESCAPED: Final = re.compile(r"""[\0\n\r\x1a"'\\]""")

_IN_TRANSACTION: Final = 1
"""The bit ``SERVER_STATUS_IN_TRANS`` of the server's status."""

_READ: Final = "read_timeout"
_TIMEOUTS: Final = {"connect_timeout": 5, _READ: 15, "write_timeout": 15}

_SESSION: Final = (
    # A value that is too long is an error instead of being truncated. Lock timeouts are in seconds.
    "SET SESSION sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES')",
    # MariaDB ends an idle transaction, whose process may stand still; MySQL has no such limit.
    "SET SESSION innodb_lock_wait_timeout = 1, lock_wait_timeout = 5 /*M!100301 , idle_transaction_timeout = 5 */",
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
)


class MySQL(Dialect):
    """MySQL and MariaDB."""

    NAMES = FAMILY
    DRIVERS = (PYMYSQL, "mysqldb")
    MODULES: ClassVar[Mapping[str, str]] = {"mysqldb": "MySQLdb"}
    FAULTS: ClassVar[Mapping[Any, Fault]] = {
        **dict.fromkeys((1205, 1020, 3572), Fault.LOCKED),  # 1020: the row has changed
        1213: Fault.DEADLOCK,
        # The server closes the connection too while it receives a statement that is much larger
        # than ``max_allowed_packet``.
        **dict.fromkeys((2006, 2013, 2055), Fault.LOST),
        # Larger than ``max_allowed_packet``, or not to be encoded for its column.
        **dict.fromkeys((1153, 1301, 1366, 2020), Fault.VALUE_REFUSED),
        **dict.fromkeys((1290, 1792, 1836), Fault.READ_ONLY),
        1062: Fault.DUPLICATE,
        **dict.fromkeys((1044, 1142, 1143), Fault.NO_RIGHT),
        1146: Fault.NO_TABLE,
        1054: Fault.NO_COLUMN,
    }
    NOW = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"  # in any time zone
    BIG_INTEGER = "SIGNED"
    UNLOCK = "look for an idle one in SHOW ENGINE INNODB STATUS"
    writes_return = False
    reads_snapshots = True

    def __init__(self, sqlalchemy: sqlalchemy.Dialect) -> None:
        super().__init__(sqlalchemy)
        self.limit_wait = limit_read_timeout if sqlalchemy.driver == PYMYSQL else None
        self.inserted_at = lambda executed, _: int(executed.lastrowid)

    @classmethod
    def engine_options(cls, url: URL) -> dict[str, Any]:
        wanted = _TIMEOUTS | {"charset": "utf8mb4"}
        given = {name: value for name, value in wanted.items() if name not in url.query}
        return {"connect_args": given}

    def listen(self, engine: Engine) -> None:
        event.listen(engine, "do_connect", connect)
        event.listen(engine, "connect", prepare)
        # In autocommit mode a ROLLBACK is unnecessary and would cost a round trip.
        self.sqlalchemy.do_rollback = _nothing  # type: ignore[assignment, method-assign]

    @property
    def product(self) -> str:
        name = "MariaDB" if self._is_mariadb else self.sqlalchemy.name
        return f"{name} {'.'.join(map(str, self.version))}".strip()

    @property
    def too_old(self) -> str | None:
        name, least = ("MariaDB", MIN_MARIADB) if self._is_mariadb else ("MySQL", MIN_MYSQL)
        return None if self.version >= least else f"{name} {'.'.join(map(str, least))}"

    @property
    def _is_mariadb(self) -> bool:
        return bool(getattr(self.sqlalchemy, "is_mariadb", False))

    @staticmethod
    def code_of(error: BaseException) -> int | None:
        given = (getattr(error, "orig", None) or error).args
        return given[0] if given and isinstance(given[0], int) else None

    def is_too_large(self, error: BaseException, values: Mapping[str, Any], engine: Engine) -> str:
        if self.fault(error) is not Fault.LOST:
            return ""
        size = size_of(values.values())
        if size < MAY_BE_TOO_LARGE:
            return ""
        with suppress(Exception), engine.connect() as connection:  # otherwise it is an outage
            allowed = connection.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one()
            if size > int(allowed):
                return f"{size} bytes are more than max_allowed_packet"
        return ""

    def insert(self, table: Table) -> Insert:
        return insert(table)

    def upsert(
        self,
        table: Table,
        key: Mapping[str, Any],
        values: Mapping[str, Any],
        *,
        where: ColumnElement[bool],
    ) -> Writes:
        # The first statement is an insert, because an update of a missing row may take a gap lock.
        # The last is an insert again, because the row may have been deleted after the first one.
        same = and_(*(table.c[name] == value for name, value in key.items()))
        inserted = insert(table).values({**key, **values})
        return inserted, update(table).where(same, where).values(values), inserted

    def insert_absent(self, table: Table, key: Sequence[str], values: Mapping[str, Any]) -> Writes:
        return (insert(table).values(values),)

    def insert_now(self, table: Table, values: Mapping[str, Any], name: str) -> Executable:
        return insert(table).values({**values, name: func.last_insert_id(self.now)})

    def raised(
        self,
        table: Table,
        key: Mapping[str, Any],
        new: Mapping[str, Any],
        changed: Mapping[str, Any],
        name: str,
    ) -> Executable:
        inserted = mysql_insert(table).values({**key, **new, name: func.last_insert_id(new[name])})
        # The assignments are made in this order.
        numbered = [
            (column, func.last_insert_id(value) if column == name else value)
            for column, value in changed.items()
        ]
        raised: Executable = inserted.on_duplicate_key_update(numbered)
        return raised

    @staticmethod
    def raised_to(executed: Any) -> int:
        return int(executed.lastrowid)

    def create_table(self, table: Table) -> list[ExecutableDDLElement]:
        return [_CreateWithIndexes(table, if_not_exists=True)]

    def create_index(self, index: Index) -> ExecutableDDLElement:
        return CreateIndex(index)

    @contextmanager
    def migrating(self, connection: Connection) -> Iterator[bool]:
        # Each statement commits, so this is a lock. Meanwhile a statement waits at most a second
        # for a table, because all writes to the table wait behind it.
        name = "SELECT {}(CONCAT('celery_leases.', LEFT(SHA1(DATABASE()), 20)){})"
        if not connection.exec_driver_sql(name.format("GET_LOCK", ", 0")).scalar():
            yield False
            return
        waited = connection.exec_driver_sql("SELECT @@SESSION.lock_wait_timeout").scalar()
        try:
            connection.exec_driver_sql("SET SESSION lock_wait_timeout = 1")
            yield True
        finally:
            with suppress(Exception):  # both end with the session
                connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {waited}")
                connection.exec_driver_sql(name.format("RELEASE_LOCK", ""))

    def hides_transactions(self, driver: Any) -> bool:
        return not reports_status(driver)


class _CreateWithIndexes(CreateTable):
    """Creates a table and its indexes in one statement, because MySQL has no CREATE INDEX IF NOT
    EXISTS.
    """


@compiles(_CreateWithIndexes, *FAMILY)
def _with_indexes(create: _CreateWithIndexes, compiler: DDLCompiler, **_: Any) -> str:
    table: Table = create.element
    columns, end, options = compiler.visit_create_table(create).rpartition("\n)")  # type: ignore[no-untyped-call]
    quote = compiler.preparer.quote
    for index in MySQL.indexes_of(table):
        over = ", ".join(quote(column.name) for column in index.columns)
        columns = f"{columns.rstrip()}, \n\tINDEX {compiler.preparer.format_index(index)} ({over})"
    return f"{columns}{end}{options}"


def _nothing(_: Any) -> None:
    pass


def size_of(values: Iterable[object]) -> int:
    """The number of bytes that the driver sends for the texts among *values*."""
    texts = [value for value in values if isinstance(value, str)]
    return sum(len(text.encode(errors="replace")) + len(_ESCAPED.findall(text)) for text in texts)


def connect(dialect: sqlalchemy.Dialect, _: Any, args: list[Any], given: dict[str, Any]) -> Any:
    """Connect as SQLAlchemy does, for as long as this delivery may wait.

    PyMySQL waits for the server's greeting as for any reply. MySQLdb's limits are whole seconds,
    and stay for the life of the connection.
    """
    longest = given.get(_READ)
    limits = {"connect_timeout": max(1, int(wait_limit.bounded(int(given["connect_timeout"]))))}
    if dialect.driver != PYMYSQL or longest is None:
        return dialect.connect(*args, **given | limits)
    connection: Any = dialect.connect(
        *args, **given | limits | {_READ: wait_limit.bounded(longest)}
    )
    connection._read_timeout = longest  # noqa: SLF001 - see limit_read_timeout
    return connection


def limit_read_timeout(connection: Any, info: MutableMapping[Any, Any]) -> None:
    """Let a statement of PyMySQL wait for its reply as long as this delivery may.

    MySQLdb reads its timeout only when it connects.
    """
    longest = info.setdefault(_READ, connection._read_timeout)  # noqa: SLF001 - PyMySQL reads it before each reply, and has no setter
    if longest is not None:
        connection._read_timeout = wait_limit.bounded(longest)  # noqa: SLF001


def prepare(connection: Any, _: Any) -> None:
    """Set up the session of a new connection."""
    with connection.cursor() as cursor:
        for statement in _SESSION:
            cursor.execute(statement)


def reports_status(connection: Any) -> bool:
    """Whether a DB-API connection exposes the server's status flags, as those of PyMySQL do."""
    return hasattr(connection, "server_status")


def commits_by_itself(connection: Any) -> bool:
    """Whether a DB-API connection of a MySQL driver is in autocommit mode; ``False`` for any other
    driver.
    """
    return hasattr(connection, "get_autocommit") and bool(connection.get_autocommit())


def in_transaction(connection: Any) -> bool:
    """Whether a DB-API connection of a MySQL driver is in a transaction.

    MySQLdb does not expose the status flags. Then the autocommit mode decides, which Django
    switches off during a transaction.
    """
    if not getattr(connection, "open", True):
        return False
    if not reports_status(connection):
        return not connection.get_autocommit()
    return bool(int(connection.server_status) & _IN_TRANSACTION)
