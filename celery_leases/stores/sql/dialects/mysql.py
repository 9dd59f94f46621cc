"""MySQL and MariaDB: connection parameters, clock, error codes, and table options.

Statements run in autocommit mode at READ COMMITTED, which takes no gap locks. Correctness does not
depend on that level: a statement that needs an unchanged row locks the row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from sqlalchemy import URL, Connection, Dialect

from celery_leases.concurrency import wait_limit

FAMILY: Final = ("mysql", "mariadb")
PYMYSQL: Final = "pymysql"
DRIVERS: Final = (PYMYSQL, "mysqldb")

NOW: Final = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
"""The time of the statement in microseconds since the epoch, in any time zone of the session."""

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

DEADLOCK: Final = 1213
NOT_EXECUTED: Final = frozenset({1205, DEADLOCK, 1020, 3572})
"""Errors after which no part of the statement was executed: lock timeouts, and conflicts with other
transactions.
"""

TOO_LARGE: Final = frozenset({1153, 1301, 1366, 2020})
"""Errors for a value that is larger than ``max_allowed_packet``, or cannot be encoded for its
column.
"""

_LOST: Final = frozenset({2006, 2013, 2055})
"""The server has closed the connection. It does so too while it receives a statement that is much
larger than ``max_allowed_packet``.
"""

MAX_PACKET: Final = "SELECT @@max_allowed_packet AS size"

_READ_ONLY: Final = frozenset({1290, 1792, 1836})
"""The server, or the session, only reads."""

NO_SUCH_TABLE: Final = 1146
UNDEFINED_COLUMN: Final = 1054
_DUPLICATE: Final = 1062

_ESCAPED: Final = re.compile(r"""[\0\n\r\x1a"'\\]""")

_IN_TRANSACTION: Final = 1
"""The bit ``SERVER_STATUS_IN_TRANS`` of the server's status."""

_READ: Final = "read_timeout"
_TIMEOUTS: Final = {"connect_timeout": 5, _READ: 15, "write_timeout": 15}

_SESSION: Final = (
    # A value that is too long is an error instead of being truncated. Lock timeouts are in seconds.
    "SET SESSION sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES')",
    "SET SESSION innodb_lock_wait_timeout = 1, lock_wait_timeout = 5",
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
)


def is_lost(error: BaseException) -> bool:
    """Whether the server has closed the connection."""
    return code_of(error) in _LOST


def size_of(values: Iterable[object]) -> int:
    """The number of bytes that the driver sends for the texts among *values*."""
    texts = [value for value in values if isinstance(value, str)]
    return sum(len(text.encode(errors="replace")) + len(_ESCAPED.findall(text)) for text in texts)


def is_mysql(dialect: Dialect) -> bool:
    """Whether *dialect* is that of MySQL or MariaDB."""
    return dialect.name in FAMILY


def connect_args(url: URL) -> dict[str, Any]:
    """The driver's timeouts and charset; parameters in the URL have precedence."""
    wanted = _TIMEOUTS | {"charset": "utf8mb4"}
    return {name: value for name, value in wanted.items() if name not in url.query}


def connect(dialect: Dialect, _: Any, args: list[Any], given: dict[str, Any]) -> Any:
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


@contextmanager
def migration_lock(connection: Connection) -> Iterator[bool]:
    """Take the lock for migrations of this database; ``False`` if another session has it.

    Meanwhile a statement waits at most a second for a table, because all writes to the table wait
    behind it.
    """
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


def code_of(error: BaseException) -> int | None:
    """The number of a driver's error, also of one inside an error of SQLAlchemy."""
    given = (getattr(error, "orig", None) or error).args
    return given[0] if given and isinstance(given[0], int) else None


def is_read_only(error: BaseException) -> bool:
    """Whether the server refused to write. It may be a former primary, whose connections it leaves
    open, so a new connection may lead to the new primary.
    """
    return code_of(error) in _READ_ONLY


def is_duplicate(error: BaseException) -> bool:
    """Whether a row was refused because its key exists."""
    return code_of(error) == _DUPLICATE


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
