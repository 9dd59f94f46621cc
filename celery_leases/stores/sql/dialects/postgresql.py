"""PostgreSQL: connection parameters and timeouts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator
from functools import cache
from typing import Any, Final

from sqlalchemy import URL, Dialect

from celery_leases.concurrency import wait_limit

DRIVERS: Final = ("psycopg", "psycopg2")

SILENCE: Final = 15.0
"""Seconds that a statement may take. Then its connection is closed, as ``read_timeout`` does on
MySQL.
"""

LOCK_TIMEOUT: Final = 1500
"""Milliseconds for which a statement waits for a locked row. Then the delivery is rescheduled."""

LOCK_TIMEOUT_OF_STEPS: Final = 1000
"""The same for a step between two versions of the tables. It is shorter, because all statements on
the table wait behind it.
"""

LOCK_NOT_AVAILABLE: Final = "55P03"
UNDEFINED_COLUMN: Final = "42703"
UNIQUE_VIOLATION: Final = "23505"
UNDEFINED_TABLE: Final = "42P01"
DEADLOCK: Final = "40P01"
_READ_ONLY: Final = "25006"
_STATEMENT_INVALID: Final = {"0A000", "26000", "42P05"}
"""The columns of its table have changed, it does not exist, or its name is in use."""

PREPARE_THRESHOLD: Final = "prepare_threshold"
"""The parameter of psycopg that says after how many executions a statement is prepared."""

_REFUSES_OPTIONS: Final = re.compile("unsupported startup parameter|command-line options")
"""What PgBouncer, and what Amazon's RDS Proxy say to ``options``."""

_LIBPQ: Final = {
    # With the encoding SQL_ASCII, which is none, the server would leave it to the client.
    "client_encoding": "utf8",
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}


def connect_args(url: URL) -> dict[str, Any]:
    """The parameters of libpq for the encoding, and to detect a dead server; parameters in the URL
    have precedence.
    """
    return {name: value for name, value in _LIBPQ.items() if name not in url.query}


def refused_threshold(url: URL) -> str | None:
    """Why ``prepare_threshold`` in the URL cannot be used; ``None`` if it can, or is not there."""
    given = str(url.query.get(PREPARE_THRESHOLD, 0))
    if given == "None" or (given.isascii() and given.isdigit()):
        return None
    return f"{PREPARE_THRESHOLD} is {given!r}; write a number of executions, or None for never"


def connect(dialect: Dialect, _: Any, args: list[Any], given: dict[str, Any]) -> Any:
    """Connect as SQLAlchemy does, with a timeout for row locks and one for a server that does not
    answer.

    ``lock_timeout`` is ``LOCK_TIMEOUT``, unless the ``options`` in the URL set another value, or a
    connection pooler refuses the parameter. Behind a pooler no statement is prepared, unless the
    URL has ``prepare_threshold``.
    """
    opened = _timed_connection().connect if _wakes_while_waiting(dialect) else dialect.connect
    return _with_lock_timeout(_preparing(dialect, opened), args, given)


def _preparing(dialect: Dialect, opened: Callable[..., Any]) -> Callable[..., Any]:
    """*opened* with psycopg's ``prepare_threshold``: that of the URL, or none behind a pooler."""
    if dialect.driver != "psycopg":
        return opened  # psycopg2 prepares no statements

    def connect(*args: Any, **given: Any) -> Any:
        chosen = given.pop(PREPARE_THRESHOLD, None)
        connection = opened(*args, **given)
        try:
            if chosen is not None:
                connection.prepare_threshold = None if chosen == "None" else int(chosen)
            elif _is_pooled(connection):
                connection.prepare_threshold = None
        except BaseException:
            connection.close()
            raise
        return connection

    return connect


def _is_pooled(connection: Any) -> bool:
    """Whether a pooler stands between psycopg and the server: it gives its clients process ids of
    its own.

    A pooler may execute each transaction on another connection of the server. All clients prepare
    statements under the same names, so a client would find no statement, or one of another client.
    """
    connection.autocommit = True
    (server,) = connection.execute("SELECT pg_backend_pid()").fetchone()
    connection.autocommit = False
    return bool(server != connection.info.backend_pid)


def _with_lock_timeout(opened: Callable[..., Any], args: list[Any], given: dict[str, Any]) -> Any:
    own = str(given.get("options") or "")
    if "lock_timeout" in own:
        return opened(*args, **given)
    try:
        return opened(
            *args, **{**given, "options": f"{own} -c lock_timeout={LOCK_TIMEOUT}".strip()}
        )
    except Exception as error:
        if own or not _REFUSES_OPTIONS.search(str(error)):
            raise
        return opened(*args, **given)


def state_of(error: BaseException) -> str | None:
    """The SQLSTATE of a driver's error, also of one inside an error of SQLAlchemy."""
    cause = getattr(error, "orig", None) or error
    found = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    return str(found) if found is not None else None


def is_read_only(error: BaseException) -> bool:
    """Whether the server refused to write. It may be a former primary, whose connections a proxy
    leaves open, so a new connection may lead to the new primary.
    """
    return state_of(error) == _READ_ONLY


def is_outdated(error: BaseException) -> bool:
    """Whether a prepared statement is not valid on its connection. It was not executed, and works
    on a new connection.
    """
    return state_of(error) in _STATEMENT_INVALID


def _wakes_while_waiting(dialect: Dialect) -> bool:
    """Whether the driver wakes up every 0.1 s while it waits for data, as psycopg does since
    3.2.11.
    """
    return dialect.driver == "psycopg" and getattr(dialect, "psycopg_version", (0,)) >= (3, 2, 11)


@cache
def _timed_connection() -> Any:
    """The class of psycopg's connections with a time limit for each statement. TCP does not
    detect a server that accepts data and never answers.
    """
    import psycopg

    class StatementTimedOut(psycopg.OperationalError, TimeoutError):
        """No answer within the time limit. The statement is not repeated, because it could take as
        long again.
        """

    class TimedConnection(psycopg.Connection[Any]):
        def wait(self, gen: Any, *args: Any, **given: Any) -> Any:
            # After a timeout, a late reply would be read as that to the next statement.
            return super().wait(within(gen, SILENCE, self.close), *args, **given)

        @classmethod
        def _connect_gen(cls, *args: Any, **given: Any) -> Any:
            # The limit for connecting is that of libpq, or less for a delivery with a time limit.
            return within(super()._connect_gen(*args, **given), SILENCE, _nothing_to_close)

    def within(
        gen: Generator[Any, Any, Any], longest: float, close: Callable[[], None]
    ) -> Generator[Any, Any, Any]:
        """Pass values on between *gen* and psycopg, which sends 0 for each 0.1 s without data."""
        seconds = wait_limit.bounded(longest) if wait_limit.in_use else longest
        deadline = time.monotonic() + seconds
        try:
            wanted = next(gen)
            while True:
                came = yield wanted
                if not came and time.monotonic() > deadline:
                    close()
                    raise StatementTimedOut(f"the server has not answered for {seconds:.3g} s")
                wanted = gen.send(came)
        except StopIteration as end:
            return end.value

    return TimedConnection


def _nothing_to_close() -> None:
    pass
