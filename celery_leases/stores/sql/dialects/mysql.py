"""MySQL and MariaDB: connection parameters, clock, error codes, and table options.

Statements run in autocommit mode at READ COMMITTED, which takes no gap locks; correctness does not
depend on that level. A statement that needs a row unchanged locks it.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import URL, Dialect

FAMILY: Final = ("mysql", "mariadb")
DRIVERS: Final = ("pymysql", "mysqldb")

NOW: Final = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
"""Microseconds since the epoch, one value for the whole statement, whatever the session's time
zone.
"""

# Keys that differ only in case, accents or trailing spaces are different keys. The two servers have
# different names for that collation. Each server reads only one of these comments, so one text
# serves both, and older servers refuse it.
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
"""Errors after which nothing of the statement was executed: lock timeouts, and conflicts with other
transactions.
"""

TOO_LARGE: Final = frozenset({1153, 1301, 1366})
"""Errors for a value above ``max_allowed_packet``, and for a value that its column's encoding
cannot hold.
"""

NO_SUCH_TABLE: Final = 1146
UNDEFINED_COLUMN: Final = 1054
_DUPLICATE: Final = 1062

_IN_TRANSACTION: Final = 1
"""The bit ``SERVER_STATUS_IN_TRANS`` of the server's status."""

_TIMEOUTS: Final = {"connect_timeout": 5, "read_timeout": 15, "write_timeout": 15}
_READ: Final = "read_timeout"

STRICT: Final = (
    # A value that is too long is an error, not truncated. Lock timeouts are whole seconds here.
    "SET SESSION sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES')",
    "SET SESSION innodb_lock_wait_timeout = 1, lock_wait_timeout = 5",
)
SESSION_NAMES: Final = ("sql_mode", "innodb_lock_wait_timeout", "lock_wait_timeout")
"""The session variables that ``STRICT`` and a migration set."""
_SESSION: Final = (*STRICT, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")


def is_mysql(dialect: Dialect) -> bool:
    """Whether *dialect* is that of MySQL or MariaDB."""
    return dialect.name in FAMILY


def connect_args(url: URL, *, migrates: bool = False) -> dict[str, Any]:
    """The driver's timeouts and charset; parameters in the URL have precedence."""
    wanted = _TIMEOUTS | {"charset": "utf8mb4"}
    return {
        name: value
        for name, value in wanted.items()
        if name not in url.query and not (migrates and name == _READ)
    }


def without_end(url: URL) -> URL:
    """*url* without a limit on the time of a statement."""
    return url.difference_update_query([_READ])


def prepare(connection: Any, _: Any) -> None:
    """Set up the session of a new connection."""
    with connection.cursor() as cursor:
        for statement in _SESSION:
            cursor.execute(statement)


def code_of(error: BaseException) -> int | None:
    """The number of a driver's error, also inside one of SQLAlchemy's."""
    given = (getattr(error, "orig", None) or error).args
    return given[0] if given and isinstance(given[0], int) else None


def is_duplicate(error: BaseException) -> bool:
    """Whether a row was refused because its key is there already."""
    return code_of(error) == _DUPLICATE


def tells_transactions(connection: Any) -> bool:
    """Whether a DB-API connection exposes the server's transaction status, as PyMySQL's do."""
    return hasattr(connection, "server_status")


def commits_by_itself(connection: Any) -> bool:
    """Whether a DB-API connection of one of the drivers is in autocommit mode; ``False`` for any
    other.
    """
    return hasattr(connection, "get_autocommit") and bool(connection.get_autocommit())


def in_transaction(connection: Any) -> bool:
    """Whether a DB-API connection of one of the drivers is inside a transaction.

    MySQLdb does not expose the status. Then autocommit mode decides: Django switches it off while a
    transaction is open.
    """
    if not getattr(connection, "open", True):
        return False
    if not tells_transactions(connection):
        return not connection.get_autocommit()
    return bool(int(connection.server_status) & _IN_TRANSACTION)
