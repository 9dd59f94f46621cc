"""PostgreSQL: connection parameters, timeouts, codes of errors, and SQL of its own."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import cache
from typing import Any, ClassVar, Final

import sqlalchemy
from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Table,
    Text,
    any_,
    bindparam,
    event,
    func,
    select,
)
from sqlalchemy.dialects import postgresql

from celery_leases.concurrency import wait_limit
from celery_leases.stores.sql.dialects.dialect import Dialect, Fault, Mark, transaction

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

PREPARE_THRESHOLD: Final = "prepare_threshold"
"""The parameter of psycopg that says after how many executions a statement is prepared."""

IN_PROGRESS: Final = "in progress"

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


class PostgreSQL(Dialect):
    """PostgreSQL."""

    NAMES = ("postgresql",)
    DRIVERS = ("psycopg", "psycopg2")
    FAULTS: ClassVar[Mapping[Any, Fault]] = {
        # A prepared statement: the columns of its table have changed, it does not exist, or its
        # name is in use.
        **dict.fromkeys(("0A000", "26000", "42P05"), Fault.STALE),
        "25006": Fault.READ_ONLY,
        "55P03": Fault.LOCKED,
        "40P01": Fault.DEADLOCK,
        "23505": Fault.DUPLICATE,
        "42501": Fault.NO_RIGHT,
        "42P01": Fault.NO_TABLE,
        "42703": Fault.NO_COLUMN,
    }
    NOW = "CAST(extract(epoch from statement_timestamp()) * 1000000 AS BIGINT)"
    BEGIN = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = 5000"
    UNLOCK = "look for an idle one in pg_stat_activity"
    reads_or_inserts = True
    joint_index = True
    # Psycopg looks up the converters of all values again for each cursor, and for each change of
    # its statement.
    keeps_cursors = True

    @classmethod
    def engine_options(cls, url: URL) -> dict[str, Any]:
        given = str(url.query.get(PREPARE_THRESHOLD, 0))
        if given != "None" and not (given.isascii() and given.isdigit()):
            raise ValueError(
                f"{PREPARE_THRESHOLD} is {given!r}; write a number of executions, or None for never"
            )
        wanted = {name: value for name, value in _LIBPQ.items() if name not in url.query}
        return {"connect_args": wanted}

    def listen(self, engine: Engine) -> None:
        event.listen(engine, "do_connect", connect)

    @staticmethod
    def code_of(error: BaseException) -> str | None:
        cause = getattr(error, "orig", None) or error
        found = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
        return str(found) if found is not None else None

    def insert(self, table: Table) -> postgresql.Insert:
        return postgresql.insert(table)

    def is_one_of(self, column: Column[Any], name: str) -> ColumnElement[bool]:
        # One array, so that the statement is the same for lists of any length, and is compiled and
        # prepared once.
        return column == any_(bindparam(name, type_=postgresql.ARRAY(Text)))

    def position(self, text: ColumnElement[str], part: str) -> ColumnElement[int]:
        return func.strpos(text, part)

    @contextmanager
    def migrating(self, connection: Connection) -> Iterator[bool]:
        limit = f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_OF_STEPS}"
        yield from transaction(connection, "BEGIN", limit)

    def mark(self, driver: Any, engine: Engine) -> Mark:
        return _TransactionId(driver, engine)


class _TransactionId(Mark):
    """The id of a transaction, whose status any connection can read."""

    def __init__(self, driver: Any, engine: Engine) -> None:
        self._driver, self._engine = driver, engine
        self._number: int | None = None

    def set(self) -> None:
        if self._number is None:
            with closing(self._driver.cursor()) as cursor:
                cursor.execute("SELECT txid_current() AS number")
                row = cursor.fetchone()
                with suppress(Exception):  # a row factory of the user's may hide the column
                    self._number = int(row["number"] if isinstance(row, Mapping) else row[0])

    def is_over(self) -> bool:
        return self._status() not in (None, IN_PROGRESS)

    def is_surely_open(self) -> bool:
        return self._status() == IN_PROGRESS

    def _status(self) -> str | None:
        """The status; ``None`` if it is not known now."""
        if self._number is None:
            return None
        asked = select(func.txid_status(bindparam("number", self._number, BigInteger)))
        with suppress(Exception), self._engine.connect() as connection:
            return str(connection.execute(asked).scalar_one())
        return None


def connect(dialect: sqlalchemy.Dialect, _: Any, args: list[Any], given: dict[str, Any]) -> Any:
    """Connect as SQLAlchemy does, with a timeout for row locks and one for a server that does not
    answer.

    ``lock_timeout`` is ``LOCK_TIMEOUT``, unless the ``options`` in the URL set another value, or a
    connection pooler refuses the parameter. Behind a pooler no statement is prepared, unless the
    URL has ``prepare_threshold``.
    """
    opened = _timed_connection().connect if _wakes_while_waiting(dialect) else dialect.connect
    return _with_lock_timeout(_preparing(dialect, opened), args, given)


def _preparing(dialect: sqlalchemy.Dialect, opened: Callable[..., Any]) -> Callable[..., Any]:
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


def _wakes_while_waiting(dialect: sqlalchemy.Dialect) -> bool:
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
