"""What MySQL and MariaDB need: how they are connected to, their clock, their error codes, and the
form of the tables.

Statements are committed by themselves, at READ COMMITTED, which takes no locks on gaps between
keys; nothing here is right only there. Rows that must not change meanwhile are locked by the
statement that looks at them.
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

# Keys differ in case, accents and trailing spaces. The two servers name the collation for that
# differently, and each reads one of the comments only; so the tables are the same text for both,
# and older servers refuse it.
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
"""Errors that took the whole statement back: lock waits that were too long, and collisions with
other transactions.
"""

TOO_LARGE: Final = frozenset({1153, 1301, 1366})
"""Errors for a value above ``max_allowed_packet``, and for one not in the encoding of its
column.
"""

NO_SUCH_TABLE: Final = 1146
UNDEFINED_COLUMN: Final = 1054
_DUPLICATE: Final = 1062

_IN_TRANSACTION: Final = 1
"""The bit of the server's status that says so: ``SERVER_STATUS_IN_TRANS``."""

_TIMEOUTS: Final = {"connect_timeout": 5, "read_timeout": 15, "write_timeout": 15}
_READ: Final = "read_timeout"

STRICT: Final = (
    # What is too long is an error and not cut; a row is waited for whole seconds here, and a table
    # too.
    "SET SESSION sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES')",
    "SET SESSION innodb_lock_wait_timeout = 1, lock_wait_timeout = 5",
)
SESSION_NAMES: Final = ("sql_mode", "innodb_lock_wait_timeout", "lock_wait_timeout")
"""The variables of a session that those, and a migration, set."""
_SESSION: Final = (*STRICT, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")


def is_mysql(dialect: Dialect) -> bool:
    """Whether it is one of the two."""
    return dialect.name in FAMILY


def connect_args(url: URL, *, migrates: bool = False) -> dict[str, Any]:
    """What bounds how long a server may be silent; the URL's own parameters come first."""
    wanted = _TIMEOUTS | {"charset": "utf8mb4"}
    return {
        name: value
        for name, value in wanted.items()
        if name not in url.query and not (migrates and name == _READ)
    }


def without_end(url: URL) -> URL:
    """*url* without what it says of how long a statement may take."""
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
    """Whether a DB-API connection passes on what the server says about its transaction: PyMySQL's
    do.
    """
    return hasattr(connection, "server_status")


def commits_by_itself(connection: Any) -> bool:
    """Whether a DB-API connection of one of the drivers is in autocommit mode; ``False`` for any
    other.
    """
    return hasattr(connection, "get_autocommit") and bool(connection.get_autocommit())


def in_transaction(connection: Any) -> bool:
    """Whether a DB-API connection of one of the drivers is inside a transaction.

    MySQLdb cannot tell; whoever begins and ends transactions by its autocommit mode, as Django
    does, says it by that.
    """
    if not getattr(connection, "open", True):
        return False
    if not tells_transactions(connection):
        return not connection.get_autocommit()
    return bool(int(connection.server_status) & _IN_TRANSACTION)
