"""One SQL database: its clock, statements in autocommit mode, and since when it answers.

SQLAlchemy takes several times as long to execute a statement as the driver alone. All preparation
depends only on the statement, so it is done once: the SQL text, the order of the parameters, the
statement's own values, and the type conversions. The first execution of a statement connects, so
that SQLAlchemy knows the version of the server; the statement is compiled for the second one. A
prefork worker compiles the usual statements before it forks its pool.
SQLAlchemy executes all others: statements that are built for one call, and statements whose text
depends on their values, such as ``IN`` with a variable number of values.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from mmap import mmap
from operator import itemgetter
from struct import Struct
from typing import Any, Final, Self, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet
from zlib import crc32

import sqlalchemy
from sqlalchemy import ColumnElement, Engine, Executable
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.sql.compiler import SQLCompiler

from celery_leases.concurrency import wait_limit
from celery_leases.decide.after_run import LONGEST_SETTLE_PAUSE
from celery_leases.decide.claim import ALWAYS
from celery_leases.errors import StoreUnavailable, ValueRefused
from celery_leases.stores.python_errors import PYTHON_ERRORS
from celery_leases.stores.sql.connections import BoundedPool
from celery_leases.stores.sql.dialects import Fault, Writes, dialect_of, touched
from celery_leases.stores.sql.rows import Row
from celery_leases.stores.urls import display_database_url, without_secrets

T = TypeVar("T")
Convert = Callable[[Any], Any]
CURSORS: Final = "celery_leases_cursors"
"""The name under which a connection of the pool has its idle cursors."""
DATABASE_ERRORS: Final = (SQLAlchemyError, *PYTHON_ERRORS)
"""Errors of SQLAlchemy, a driver or Python."""
NOT_EXECUTED: Final = {Fault.STALE, Fault.READ_ONLY, Fault.LOCKED, Fault.DEADLOCK}

_open: WeakSet[Database] = WeakSet()
_fork: Final = threading.RLock()
_closed_for_fork: Final[list[tuple[BoundedPool, Any]]] = []


def _close_files() -> None:
    """Close the connections to SQLite's files before a fork, once no thread uses them.

    SQLite notes in the memory of a process which locks its connections have. A child that inherits
    these notes takes a writing thread of its parent for one of its own, which never ends.
    """
    _fork.acquire()
    files = [each.engine.pool for each in list(_open) if not each.dialect.has_server]
    for pool in {each for each in files if isinstance(each, BoundedPool)}:
        with suppress(StoreUnavailable):  # another thread uses a connection for long
            for _ in range(pool.size):
                record = pool.acquire()
                _closed_for_fork.append((pool, record))
                record.close()


def _open_files() -> None:
    while _closed_for_fork:
        pool, record = _closed_for_fork.pop()
        pool.release(record)
    _fork.release()


def _drop_inherited_connections() -> None:
    _closed_for_fork.clear()
    _fork.release()
    for database in list(_open):
        database.close(inherited=True)


# Two processes on one connection would read each other's replies.
os.register_at_fork(
    before=_close_files, after_in_parent=_open_files, after_in_child=_drop_inherited_connections
)


def host_now() -> int:
    """The time of this machine, in microseconds since the epoch."""
    return time.time_ns() // 1000


class CompiledStatement:
    """A statement compiled for a dialect, with the conversions of its parameters and result
    columns.
    """

    def __init__(
        self,
        compiled: SQLCompiler,
        columns: Iterable[ColumnElement[Any]],
        dialect: sqlalchemy.Dialect,
    ) -> None:
        self.text: Final = str(compiled)
        names = compiled.positiontup or ()
        # For a single name, ``itemgetter`` returns the value alone.
        self._in_order: Callable[[Mapping[str, Any]], Sequence[Any]] = (
            itemgetter(*names) if len(names) > 1 else lambda given: [given[name] for name in names]
        )
        self._own: dict[str, Any] = {}
        self._inward: list[tuple[str, Convert]] = []
        for bind, name in compiled.bind_names.items():
            if not bind.required:
                self._own[name] = bind.effective_value
            if (convert := bind.type.dialect_impl(dialect).bind_processor(dialect)) is not None:
                self._inward.append((name, convert))
        self._types: dict[str, Convert] = {}
        for column in columns:
            kind = column.type.dialect_impl(dialect)
            if (convert := kind.result_processor(dialect, None)) is not None:
                self._types[column.name] = convert
        self._columns: tuple[str, ...] = ()
        self._outward: list[tuple[str, Convert]] = []

    def parameters(self, values: Mapping[str, Any]) -> Sequence[Any]:
        """The parameters for the driver: *values*, and the statement's own values."""
        given = {**self._own, **values}
        for name, convert in self._inward:
            given[name] = convert(given[name])
        return self._in_order(given)

    def named(self, cursor: Any, row: Sequence[Any]) -> Row:
        """A *row* of the result on *cursor*.

        To read the column names of a result is slow, so it is done for the first result, and again
        if the number of columns changes.
        """
        if len(row) != len(self._columns):
            self._columns = columns = tuple(map(itemgetter(0), cursor.description))
            self._outward = [(name, self._types[name]) for name in columns if name in self._types]
        found = dict(zip(self._columns, row, strict=True))
        for name, convert in self._outward:
            found[name] = convert(found[name])
        return found


Name = Callable[[Any, Any], Row]
"""Gives the values of a row their names, from its result or the driver's cursor."""


def _by_sqlalchemy(_: Any, row: Any) -> Row:
    found: Row = row._mapping  # noqa: SLF001 - its public name
    return found


# Each of these reads a value after a statement, from SQLAlchemy's result or the driver's cursor.


def _first(executed: Any, name: Name) -> Row | None:
    row = executed.fetchone()
    return name(executed, row) if row is not None else None


def first_value(executed: Any, _: Name) -> Any:
    """The first value of the first row; ``None`` if there is no row."""
    row = executed.fetchone()
    return row[0] if row is not None else None


def _all(executed: Any, name: Name) -> Sequence[Row]:
    return [name(executed, row) for row in executed.fetchall()]


def _count(executed: Any, _: Name) -> int:
    return int(executed.rowcount)


def _touched(executed: Any, _: Name) -> bool:
    return touched(executed)


class _KeyPresentError(StoreUnavailable):
    """An insert failed because its key exists. For a statement that does not expect this, it is an
    error of the store.
    """


class Database:
    """Executes statements in autocommit mode. After a deadlock, or on a dead connection, a
    statement is executed a second time, so every statement must be repeatable.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.dialect = dialect_of(engine.dialect)
        self.now = self.dialect.now
        #: The clock for statements on a database without a server.
        self.host_now: Callable[[], int] | None = None if self.dialect.has_server else host_now
        self._executed: WeakSet[Executable] = WeakSet()
        self._compiled: WeakKeyDictionary[Executable, CompiledStatement | None] = (
            WeakKeyDictionary()
        )
        self._made: dict[str, Any] = {}
        # A driver would look up each parameter by its name each time.
        self._positional = copy(engine.dialect)
        if not self._positional.positional:
            self._positional.paramstyle, self._positional.positional = "format", True
        self._driver_error: type[Exception] = engine.dialect.loaded_dbapi.Error
        _open.add(self)

    def first(self, statement: Executable, values: Mapping[str, Any]) -> Row | None:
        """Run *statement*; returns its first row. Raises :class:`StoreUnavailable`, as do the other
        methods.
        """
        return self._run(statement, values, _first)

    def all(self, statement: Executable, values: Mapping[str, Any]) -> Sequence[Row]:
        """Run *statement*; returns all its rows."""
        return self._run(statement, values, _all)

    def count(self, statement: Executable, values: Mapping[str, Any]) -> int:
        """Run *statement*; returns how many rows it touched."""
        return self._run(statement, values, _count)

    def touch(self, writes: Writes, values: Mapping[str, Any]) -> bool:
        """Run *writes* in order until one touches a row; returns whether one did so."""
        return any(self.unless_present(write, values, _touched) for write in writes)

    def unless_present(
        self,
        write: Executable,
        values: Mapping[str, Any],
        read: Callable[[Any, Name], Any] = _first,
    ) -> Any:
        """Run a statement that inserts a row; returns what *read* finds, by default the first row
        of the result, or ``None`` if the key exists.
        """
        try:
            return self._run(write, values, read)
        except _KeyPresentError:
            return None

    def raised_to(self, statement: Executable, values: Mapping[str, Any]) -> int:
        """Run a statement of :meth:`Dialect.raised`; returns the value that it has written."""
        return self._run(statement, values, lambda executed, _: self.dialect.raised_to(executed))

    def timed(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """*values*, with the time if there is no server that has one."""
        return values if self.host_now is None else {**values, "now": self.host_now()}

    def has_no_writer(self) -> bool:
        """Whether no connection has an open transaction that locks all rows."""
        with self.errors():
            return self.dialect.has_no_writer(self.engine)

    @contextmanager
    def transaction(self) -> Iterator[Callable[[Executable, Mapping[str, Any]], Row | None]]:
        """A transaction for statements that must see no other write between them; gives the
        function that executes one, and returns its first row if it has rows.

        Other processes wait for the rows that it locks, so nothing may wait in it.
        """
        with self.errors(), self.engine.connect() as connection:
            if wait_limit.in_use and self.dialect.limit_wait is not None:
                self.dialect.limit_wait(connection.connection.dbapi_connection, connection.info)

            def run(statement: Executable, values: Mapping[str, Any]) -> Row | None:
                executed = connection.execute(statement, self.timed(values))
                return _first(executed, _by_sqlalchemy) if executed.returns_rows else None

            try:
                connection.exec_driver_sql(self.dialect.BEGIN)
                yield run
                connection.exec_driver_sql("COMMIT")
            except BaseException as error:
                if isinstance(error, SQLAlchemyError) or self._is_reusable(error):
                    with suppress(Exception):  # the transaction ends with its connection
                        connection.exec_driver_sql("ROLLBACK")
                else:
                    connection.invalidate(error)
                raise

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Convert errors of the database to :class:`StoreUnavailable`, or to :class:`ValueRefused`
        if the database refused a value.
        """
        try:
            yield
        except DATABASE_ERRORS as error:
            raise self._converted(error) from error

    def with_engine(self, engine: Engine) -> Self:
        """The same database over the connections of *engine*, which shares the dialect. Statements
        that are compiled for one of the two are compiled for both.
        """
        other = copy(self)
        other.engine = engine
        _open.add(other)
        return other

    def once(self, make: Callable[[], T]) -> T:
        """What the method *make* of a store returns: statements, which do not depend on the
        connections. It is called once for this database and those of :meth:`with_engine`.
        """
        name = make.__qualname__
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]  # type: ignore[no-any-return]

    def compile(self, *statements: Executable) -> None:
        """Compile *statements*, and those of :meth:`once`, before their first execution. The
        database has answered, so its version is known.
        """
        for statement in _executables((*statements, *self._made.values())):
            self._executed.add(statement)
            self._compile(statement)

    def close(self, *, inherited: bool = False) -> None:
        """Close the connections. *inherited*: only forget them, because they belong to the parent
        process.
        """
        self.engine.dispose(close=not inherited)

    def _run(
        self, statement: Executable, values: Mapping[str, Any], read: Callable[[Any, Name], T]
    ) -> T:
        if self.host_now is not None:
            values = {**values, "now": self.host_now()}
        try:
            try:
                return self._once(statement, values, read)
            except DBAPIError as error:
                if not self._may_repeat(error):
                    raise
            return self._once(statement, values, read)
        except DATABASE_ERRORS as error:
            if why := self.dialect.is_too_large(error, values, self.engine):
                raise ValueRefused(f"the database refuses a value: {why}", False) from error
            raise self._converted(error) from error

    def _may_repeat(self, error: DBAPIError) -> bool:
        """Whether the statement is worth repeating: after a deadlock, or on a new connection if its
        own was closed. After a timeout it is not, because it could take as long again.
        """
        silent = isinstance(error.orig, TimeoutError) or "timed out" in str(error.orig)
        closed = error.connection_invalidated and not silent
        return closed or self.dialect.fault(error) is Fault.DEADLOCK

    def _once(
        self, statement: Executable, values: Mapping[str, Any], read: Callable[[Any, Name], T]
    ) -> T:
        try:
            compiled = self._compiled[statement]
        except KeyError:
            compiled = self._compile(statement)
        if compiled is None:
            return self._by_sqlalchemy(statement, values, read)
        pool: BoundedPool = self.engine.pool  # type: ignore[assignment]
        value: T = pool.use(self._on_cursor, pool, compiled, compiled.parameters(values), read)
        return value

    def _on_cursor(
        self,
        record: Any,
        pool: BoundedPool,
        compiled: CompiledStatement,
        parameters: Any,
        read: Callable[[Any, Name], T],
    ) -> T:
        """Execute *compiled* on the driver's own cursor; raises the same errors as SQLAlchemy."""
        dialect, cursor = self.dialect, None
        try:
            connection = record.get_connection()
            if wait_limit.in_use and dialect.limit_wait is not None:
                dialect.limit_wait(connection, record.info)
            cursors = _cursors_of(record) if dialect.keeps_cursors else {}
            cursor = cursors.pop(compiled, None) or connection.cursor()
            cursor.execute(compiled.text, parameters)
            value = read(cursor, compiled.named)
            if dialect.keeps_cursors:
                cursors[compiled] = cursor
            else:
                cursor.close()
        except self._driver_error as error:
            dead = self._is_dead(error, record.dbapi_connection)
            if dead:
                pool.invalidate_dead(record, error)
            raise DBAPIError.instance(
                compiled.text,
                parameters,
                error,
                self._driver_error,
                connection_invalidated=dead,
                dialect=self.engine.dialect,
            ) from error
        except BaseException as error:
            if not self._is_reusable(error):
                record.invalidate(error)
            elif cursor is not None:
                cursor.close()
            raise
        return value

    def _compile(self, statement: Any) -> CompiledStatement | None:
        """*statement* in its compiled form; ``None`` if SQLAlchemy must execute it."""
        if statement not in self._executed:
            return None
        made, compiled = statement.compile(dialect=self._positional), None
        if not made.post_compile_params and not made.literal_execute_params:
            columns = getattr(statement, "exported_columns", ())
            compiled = CompiledStatement(made, columns, self._positional)
        self._compiled[statement] = compiled
        return compiled

    def _by_sqlalchemy(
        self, statement: Executable, values: Mapping[str, Any], read: Callable[[Any, Name], T]
    ) -> T:
        with self.engine.connect() as connection:
            if wait_limit.in_use and self.dialect.limit_wait is not None:
                self.dialect.limit_wait(connection.connection.dbapi_connection, connection.info)
            try:
                value = read(connection.execute(statement, values), _by_sqlalchemy)
            except SQLAlchemyError:
                raise
            except BaseException as error:
                if not self._is_reusable(error):
                    connection.invalidate(error)
                raise
        self._executed.add(statement)
        return value

    def _is_dead(self, error: Exception, connection: Any) -> bool:
        """Whether an error of the driver means that *connection*, which is ``None`` if connecting
        failed, is unusable.
        """
        dialect: Any = self.engine.dialect
        outdated = self.dialect.fault(error) in (Fault.STALE, Fault.READ_ONLY)
        return outdated or bool(dialect.is_disconnect(error, connection, None))

    def _is_reusable(self, error: BaseException) -> bool:
        """Whether a connection may be used again after *error* interrupted its statement.

        It may not be if data were sent to a server, because the next statement would read the reply
        to this one. Without a server, a database in memory would be lost with its connection.
        """
        refused = isinstance(error, Exception) and self._refuses_a_value(error)
        return refused or not self.dialect.has_server

    def _refuses_a_value(self, error: Exception) -> bool:
        """Whether the database or its driver refuses a value, so that the error would repeat."""
        cause = getattr(error, "orig", None) or error
        without_nul = isinstance(cause, ValueError) and "NUL" in str(cause)  # psycopg2
        return (
            isinstance(error, DataError)
            or isinstance(cause, UnicodeEncodeError | OverflowError)
            or without_nul
            or self.dialect.fault(error) is Fault.VALUE_REFUSED
        )

    def _converted(self, error: Exception) -> StoreUnavailable | ValueRefused:
        cause = getattr(error, "orig", None) or error
        said, shown = " ".join(str(cause).split()), display_database_url(self.engine.url)
        if self._refuses_a_value(error):
            return ValueRefused(f"the database refuses a value: {said}", False)
        fault = self.dialect.fault(error)
        if fault is Fault.DUPLICATE and isinstance(error, IntegrityError):
            return _KeyPresentError(f"{shown}: a row with this key exists", False)
        text = f"{type(cause).__name__}: {without_secrets(said, self.engine.url)}"
        if fault in (Fault.LOCKED, Fault.DEADLOCK):
            text = (
                "another transaction has locked the row, or this statement was part of a deadlock; "
                f"try again, or {self.dialect.UNLOCK} ({text})"
            )
        return StoreUnavailable(f"{shown}: {text}", False if fault in NOT_EXECUTED else None)


def _executables(found: Any) -> Iterator[Executable]:
    """The statements in nested tuples."""
    if isinstance(found, tuple):
        for each in found:
            yield from _executables(each)
    elif isinstance(found, Executable):
        yield found


def _cursors_of(record: Any) -> MutableMapping[CompiledStatement, Any]:
    """The idle cursors of a connection. SQLAlchemy forgets them when it reconnects; the cursor of a
    statement that no longer exists goes with it.
    """
    cursors: MutableMapping[CompiledStatement, Any] | None = record.info.get(CURSORS)
    if cursors is None:
        cursors = record.info[CURSORS] = WeakKeyDictionary()
    return cursors


# -- since when it answers -------------------------------------------------------------------------

GRACE: Final = LONGEST_SETTLE_PAUSE + 1.0
"""Seconds for which the database must have answered: a live holder retries its outcome within
``LONGEST_SETTLE_PAUSE`` and its renewal within 1 s, and either takes some time.

After a late answer, no row is taken over for as long if the answer was late by more than a third of
the row's ttl: a renewal of its holder may have failed meanwhile.
"""

SILENCE: Final = 1.0
"""The longest pause in seconds between two answers that counts as availability. Of an answer that
took longer, only so much counts.
"""

NEVER: Final = -ALWAYS
"""A time before every other time."""


Answers = tuple[float, int, float, float, int, int]
"""What the answers of a database have shown, times of the database in microseconds: when the last
claim was answered, and the database's clock in that answer; for how long the database had been
answering; how late it executed a statement, at most, since a time (the fourth and fifth) and in the
``GRACE`` before that.
"""
_NO_ANSWERS: Final[Answers] = (-math.inf, 0, 0.0, -math.inf, 0, 0)


_FORM: Final = Struct("<?LdQddQQ")
_memory: Final = mmap(-1, _FORM.size + 4)
"""Shared by a process and its forks: true once the main process of the worker has seen something,
what that was last, and a checksum, because a child may read while it is written.
"""


class Availability:
    """For how long a database has been answering this process, or the main process of its worker.
    Local times are in seconds, times of the database in microseconds.

    With database leases, an expired lease proves that its holder died only if the database was
    available: during an outage no process can renew a lease or write an outcome. So a process takes
    over a running row only after the database has answered for so long that every live holder has
    retried.

    Threads share an instance without a lock: if two threads write at once, the database counts as
    available for less time, never for more. *database* identifies it among the forks of a process.
    """

    def __init__(self, grace: float = GRACE, database: str = "") -> None:
        self.grace = grace
        self._database = crc32(database.encode())
        self._last = _NO_ANSWERS
        self._failed = -math.inf

    def answered(self, sent: float, at: float, now: int) -> int:
        """A statement that was sent at *sent* was answered at *at*; the database's clock said
        *now*. Returns :meth:`takeover_until` as it was without this answer.
        """
        until = self.takeover_until(sent, now)
        if self._broken(sent):
            self._last = at, now, 0.0, at, 0, 0
        else:
            last, then, answering, since, late, before = self._last
            answering += min(max(0.0, at - last), SILENCE)
            if at - since > self.grace:
                since, late, before = at, 0, late
            late = max(late, now - then - int((sent - last) * 1e6))
            self._last = at, now, answering, since, late, before
        return until

    def failed(self, at: float) -> None:
        """A statement failed without an answer."""
        self._failed = at

    def takeover_until(self, sent: float, now: int | None = None) -> int:
        """The time by the database's clock until which a claim sent at *sent* may take over a
        running row.

        This is the time of sending, as this process estimates it, or an earlier one. So a claim
        that a frozen database executes later takes over nothing. The claim adds a third of the
        row's ttl, which is the least that a live holder has left.

        *now*: the database's clock in the answer, once it is there. Then the time is also so much
        before *now* as another answer of the last ``GRACE`` was late.
        """
        if not self.grace:
            return ALWAYS
        last, then, answering, _, late, before = self._last
        if self._broken(sent) or answering < self.grace:
            if not _memory[0]:
                return NEVER
            last, then, answering, _, late, before = self._seen_by_main_process()
            if sent - last > SILENCE or answering < self.grace:
                return NEVER
        until = then + int((sent - last) * 1e6)  # another thread may have got its answer since
        return until if now is None else min(until, now - late, now - before)

    def share(self) -> None:
        """Let the forks of this process use what it has seen. Only one thread of a worker's main
        process may call this.
        """
        seen = _FORM.pack(True, self._database, *self._last)
        _memory[:] = seen + crc32(seen).to_bytes(4, "little")

    def _seen_by_main_process(self) -> Answers:
        read = _memory[:]
        seen, checksum = read[: _FORM.size], int.from_bytes(read[_FORM.size :], "little")
        found: tuple[Any, ...] = _FORM.unpack(seen)
        ours = crc32(seen) == checksum and found[1] == self._database
        return cast("Answers", found[2:]) if ours else _NO_ANSWERS

    def _broken(self, sent: float) -> bool:
        last = self._last[0]
        return sent - last > SILENCE or self._failed >= last
