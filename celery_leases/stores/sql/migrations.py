"""Migrates the tables from one version to another while workers run.

A migration adds the new columns, fills them in rows that are not running, and creates the new
indexes if the server can do so without blocking writes. Then it locks the table, fills the new
columns in rows that have changed since, drops the old columns, and writes the version. PostgreSQL
and SQLite do this second part in one transaction. MySQL and MariaDB change the columns by one
statement under a table lock. The existing columns and indexes show which steps are left, so a
migration that was killed at any point can be run again, in either direction.

The statements of a worker fail after a migration, because they name a missing column; then the
worker reads the layout again: see
:meth:`celery_leases.stores.sql.claim_statements.SqlClaims.on_layout`.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar
from typing import cast as cast_to

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Engine,
    Index,
    String,
    cast,
    column,
    func,
    literal,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateColumn, CreateIndex

from celery_leases.errors import SchemaOutdated, StoreUnavailable
from celery_leases.protocol import record_document
from celery_leases.protocol.records import State
from celery_leases.stores.sql.compiled_statements import Row
from celery_leases.stores.sql.dialects import mysql, postgresql
from celery_leases.stores.sql.dialects.names import in_text
from celery_leases.stores.sql.rows import to_record
from celery_leases.stores.sql.schema import LONG, RELEASE, Tables, indexes_of
from celery_leases.stores.sql.table_versions import DOCUMENT, NARROW, NEWEST, WIDE, Migrated
from celery_leases.stores.urls import display_database_url

T = TypeVar("T")
BATCH: Final = 500
RETRY_TIME: Final = 60.0
"""Seconds for which a migration retries while other transactions lock the table."""
RETRY_PAUSE: Final = 0.5
LOCK_TIMEOUT: Final = "1s"
"""The lock timeout of one try on PostgreSQL. It is shorter than that of the workers, which queue
behind the table lock.
"""

NEXT_DOCUMENT: Final = f"{DOCUMENT}_next"
"""The name of the document column while the table also has the columns of version 1, which are
authoritative then.
"""
DOCUMENT_OF: Final = f"{DOCUMENT}_of"
"""A column that identifies the state of the row from which its document was made."""
_RESTORED: Final = {name: f"next_{name}" for name in WIDE.columns}
"""The names of the columns of version 1 while the table also has the document, which is
authoritative then.
"""
COMING_SUFFIX: Final = "_next"
"""The suffix of a new index that is built while the old index exists."""
BY_STATE: Final = "ix_celery_leases_records_state_started_at"
"""An index of version 1."""
BY_EXPIRY: Final = "ix_celery_leases_records_expires_at"
"""An index of version 1, and of version 2 except on PostgreSQL."""
BY_START: Final = "ix_celery_leases_records_started_at_expires_at"
"""An index of version 2 on PostgreSQL."""


_RAW: Final = {
    "retries": "retries",
    "generation": "generation",
    "failures": "failures",
    "quick": "quick_retries",
    "cooldowns": "cooldowns",
    "failed_at": "failed_at",
    "crashed_at": "crashed_at",
    "ttl": "lease_ttl",
    "keep": "retention",
    "results": "finished_results",
}
"""Names in the document, and the columns of version 1 in which an unreadable value is copied
unchanged.
"""


class Migration(ABC):
    """The migration of the tables of one database."""

    #: The indexes that only version 1 has, with their columns.
    _old_indexes: Mapping[str, str] = {BY_STATE: "state, started_at"}
    #: The indexes that only version 2 has.
    _added_indexes: Sequence[str] = ()

    def __init__(self, engine: Engine, tables: Tables) -> None:
        self.engine = engine
        self.tables = tables
        self.wide, self.narrow = tables.layouts[WIDE.version], tables.layouts[NARROW.version]
        self._new_indexes = indexes_of(self.narrow, engine.dialect)
        self._table = in_text(tables.records, engine.dialect)
        self._version_table = in_text(tables.version, engine.dialect)

    def upgrade(self, to: int) -> Migrated:
        """Migrate the tables to version *to*, unless they have a later one. Creates missing tables.

        Raises the errors of :meth:`run`.
        """
        before = self.tables.existing_version(self.engine)
        if before is not None and before > to:
            return Migrated(before, before)
        if before is None:
            self.tables.create(self.engine)
        return Migrated(before, to, self.run(to).rows)

    def downgrade(self, to: int) -> Migrated:
        """Migrate the tables back to version *to*, unless they have an earlier one or do not exist.
        Version 0 drops the tables.
        """
        before = self.tables.existing_version(self.engine)
        if to == 0:
            self.tables.drop(self.engine)
            return Migrated(before, 0)
        if before is None or before <= to:
            return Migrated(before, before or 0)
        return self.run(to)

    def run(self, to: int = NEWEST) -> Migrated:
        """Migrate the tables to version *to*, and create missing tables and indexes.

        Raises :class:`SchemaOutdated` for tables of a later version, and for a record that version
        *to* cannot store; :class:`StoreUnavailable` if other transactions lock the table for too
        long.
        """
        before = self.tables.existing_version(self.engine)
        if before is None:
            if to != NEWEST:
                raise SchemaOutdated(
                    f"there are no tables in {display_database_url(self.engine.url)} to downgrade"
                )
            self.tables.create(self.engine)
            return Migrated(None, NEWEST)
        with self.engine.connect() as connection, self._exclusively(connection):
            rows = (
                0
                if before == to and self._is_complete(connection, to)
                else self._steps[to](connection)
            )
        if to == NEWEST:
            self.tables.create(self.engine)
        return Migrated(before, to, rows)

    @property
    def _steps(self) -> Mapping[int, Callable[[Connection], int]]:
        """For each version, the function that migrates to it and returns the number of converted
        rows.
        """
        return {NARROW.version: self._narrowed, WIDE.version: self._widened}

    def _is_complete(self, connection: Connection, version: int) -> bool:
        """Whether the columns are exactly those of *version*: no interrupted migration is left to
        finish.
        """
        columns = self._columns(connection)
        return set(self.tables.layouts[version].c.keys()) == set(columns)

    # -- the steps ---------------------------------------------------------------------------------

    def _narrowed(self, connection: Connection) -> int:
        """Migrate from version 1 to version 2; returns the number of converted rows."""
        rows = 0
        if DOCUMENT not in self._columns(connection):
            self._retry_while_locked(connection, self._expand)
            rows = self._in_batches(connection, self.wide.c.state != State.RUNNING, _document)
        self._prepare_indexes(connection)
        return rows + self._retry_while_locked(connection, self._contract)

    def _expand(self, connection: Connection) -> None:
        columns = self._columns(connection)
        if DOCUMENT not in columns:
            self._alter(
                connection,
                self._added(
                    columns, [Column(NEXT_DOCUMENT, LONG), Column(DOCUMENT_OF, String(64))]
                ),
            )
        if "made_by" not in self._version_columns(connection):
            connection.execute(
                text(f"ALTER TABLE {self._version_table} ADD COLUMN made_by VARCHAR(32)")
            )

    def _contract(self, connection: Connection) -> int:
        """The part under the table lock. If the document column exists, this only drops what an
        interrupted downgrade has left.
        """
        for name in self._old_indexes:
            self._drop_index(connection, name)
        columns, rows = self._columns(connection), 0
        clauses = [
            f"DROP COLUMN {name}"
            for name in (*WIDE.columns, *_RESTORED.values())
            if name in columns
        ]
        if DOCUMENT not in columns:
            rows = self._convert(connection, None, _document)
            clauses += [f"DROP COLUMN {DOCUMENT_OF}"]
        self._alter(
            connection,
            clauses,
            {NEXT_DOCUMENT: self.narrow.c[DOCUMENT]} if DOCUMENT not in columns else {},
        )
        self._replace_indexes(connection)
        self._write_version(connection, NARROW.version)
        return rows

    def _widened(self, connection: Connection) -> int:
        """Migrate from version 2 to version 1; returns the number of converted rows."""

        def expand(connection: Connection) -> None:
            columns = self._columns(connection)
            coming = [self._renamed(self.wide.c[name], new) for name, new in _RESTORED.items()]
            self._alter(connection, self._added(columns, coming))

        def contract(connection: Connection) -> int:
            rows = 0
            if DOCUMENT in self._columns(connection):
                rows = self._convert_back(connection)
                # In version 1 the column is NULL while an attempt runs.
                running = update(self.narrow).where(self.narrow.c.state == State.RUNNING)
                connection.execute(running.values(expires_at=None))
                renamed = {new: self.wide.c[name] for name, new in _RESTORED.items()}
                self._alter(connection, [f"DROP COLUMN {DOCUMENT}"], renamed)
            for name in self._added_indexes:
                self._drop_index(connection, name)
            self._write_version(connection, WIDE.version)
            return rows

        if DOCUMENT in self._columns(connection):
            self._retry_while_locked(connection, expand)
        rows = self._retry_while_locked(connection, contract)
        self._drop_coming_indexes(connection)
        for name, over in self._old_indexes.items():
            with suppress(DBAPIError):  # it exists
                connection.execute(text(f"CREATE INDEX {name} ON {self._table} ({over})"))
        return rows

    # -- rows --------------------------------------------------------------------------------------

    def _in_batches(
        self,
        connection: Connection,
        where: ColumnElement[bool],
        document: Callable[[Row], str | None],
    ) -> int:
        """Convert rows before the table is locked, with a transaction for each batch; returns the
        number of rows.
        """
        rows, last = 0, ""
        while True:

            def batch(connection: Connection, last: str = last) -> tuple[int, str]:
                if NEXT_DOCUMENT not in self._columns(connection):
                    return 0, last  # another migration has finished
                return self._batch(connection, last, where, document)

            converted, last = self._retry_while_locked(connection, batch, lock=False)
            rows += converted
            if converted < BATCH:
                return rows

    def _convert(
        self,
        connection: Connection,
        where: ColumnElement[bool] | None,
        document: Callable[[Row], str | None],
    ) -> int:
        """Convert the rows that are not converted, or have changed since; returns their number."""
        rows, converted, last = 0, BATCH, ""
        while converted == BATCH:
            converted, last = self._batch(connection, last, where, document)
            rows += converted
        return rows

    def _batch(
        self,
        connection: Connection,
        last: str,
        where: ColumnElement[bool] | None,
        document: Callable[[Row], str | None],
    ) -> tuple[int, str]:
        columns, of = self.wide.c, column(DOCUMENT_OF, String)
        now = cast(columns.fence, String) + ":" + columns.state + ":"
        now = now + cast(func.coalesce(columns.finished_at, 0), String)
        stale = select(*columns, now.label(DOCUMENT_OF), literal(0).label("now")).where(
            columns.stored_key > last, or_(of.is_(None), of != now)
        )
        if where is not None:
            stale = stale.where(where)
        found = connection.execute(stale.order_by(columns.stored_key).limit(BATCH)).mappings().all()
        if not found:
            return 0, last
        written = text(
            f"UPDATE {self._table} SET {NEXT_DOCUMENT} = :document, {DOCUMENT_OF} = :of WHERE stored_key = :stored_key"  # noqa: S608
        )
        values = [
            {"document": document(row), "of": row[DOCUMENT_OF], "stored_key": row["stored_key"]}
            for row in found
        ]
        connection.execute(written, values)
        return len(found), found[-1]["stored_key"]

    def _convert_back(self, connection: Connection) -> int:
        columns, rows, last = self.narrow.c, 0, ""
        values = ", ".join(f"{new} = :{new}" for new in _RESTORED.values())
        written = text(f"UPDATE {self._table} SET {values} WHERE stored_key = :for_key")  # noqa: S608
        while True:
            some = select(*columns, literal(0).label("now")).where(columns.stored_key > last)
            found = (
                connection.execute(some.order_by(columns.stored_key).limit(BATCH)).mappings().all()
            )
            if not found:
                return rows
            connection.execute(written, [self._columns_of(row) for row in found])
            rows, last = rows + len(found), found[-1]["stored_key"]

    def _columns_of(self, row: Row) -> dict[str, Any]:
        """The columns of version 1 for a row of version 2; raises :class:`SchemaOutdated` if a
        value would be lost.
        """
        values = WIDE.details_values(to_record(row, lenient=True))
        try:
            document = json.loads(row[DOCUMENT] or "{}").items()
            values |= {
                _RAW[short]: value
                for short, value in document
                if not record_document.is_readable(short, value)
            }
        except (AttributeError, KeyError, ValueError) as error:
            raise SchemaOutdated(
                f"{row['key']}: version {WIDE.version} of the tables cannot hold what its column {DOCUMENT} has "
                f"({error}); repair it, or write: leases forget {row['key']} --task {row['task']}"
            ) from None
        return {_RESTORED[name]: value for name, value in values.items()} | {
            "for_key": row["stored_key"]
        }

    # -- columns -----------------------------------------------------------------------------------

    def _columns(self, connection: Connection) -> Sequence[str]:
        return list(connection.execute(self.tables.any_column()).keys())

    def _renamed(self, column: Column[Any], name: str) -> Column[Any]:
        """*column* under another name."""
        given: Any = column.server_default
        default = given.arg if given is not None else None
        return Column(name, column.type, nullable=column.nullable, server_default=default)

    def _added(self, columns: Sequence[str], wanted: Sequence[Column[Any]]) -> list[str]:
        dialect = self.engine.dialect
        missing = [column for column in wanted if column.name not in columns]
        return [f"ADD COLUMN {CreateColumn(column).compile(dialect=dialect)}" for column in missing]

    def _write_version(self, connection: Connection, version: int) -> None:
        connection.execute(update(self.tables.version).values(version=version, made_by=RELEASE))

    def _version_columns(self, connection: Connection) -> Sequence[str]:
        return list(connection.execute(text(f"SELECT * FROM {self._version_table}")).keys())  # noqa: S608

    def _prepare_indexes(self, connection: Connection) -> None:  # noqa: B027 - most servers do it under the lock
        """Create the indexes that can be created before the table is locked."""

    def _drop_coming_indexes(self, connection: Connection) -> None:  # noqa: B027 - as above
        """Drop the indexes that an interrupted upgrade has left."""

    def _replace_indexes(self, connection: Connection) -> None:
        """Recreate the indexes that are partial in version 2."""
        for index in self._new_indexes:
            self._drop_index(connection, str(index.name))
            connection.execute(CreateIndex(index))

    # -- differences between the servers -----------------------------------------------------------

    @contextmanager
    def _exclusively(self, connection: Connection) -> Iterator[None]:
        """Exclude other migrations, on servers whose transactions do not."""
        yield

    @abstractmethod
    def _alter(
        self,
        connection: Connection,
        clauses: Sequence[str],
        renamed: Mapping[str, Column[Any]] | None = None,
    ) -> None:
        """Change the columns of the records by *clauses* of ALTER TABLE, and rename columns:
        *renamed* has the new column for each old name.
        """

    @abstractmethod
    def _drop_index(self, connection: Connection, name: str) -> None:
        """Drop an index if it exists."""

    @contextmanager
    @abstractmethod
    def _transaction(self, connection: Connection, *, lock: bool) -> Iterator[None]:
        """A transaction; with *lock*, no other connection can use the table meanwhile."""
        yield

    def _retry_while_locked(
        self, connection: Connection, step: Callable[[Connection], T], *, lock: bool = True
    ) -> T:
        """Run *step* in a transaction; retry while another transaction holds a lock that it
        needs.
        """
        until = time.monotonic() + RETRY_TIME
        while True:
            try:
                with self._transaction(connection, lock=lock):
                    return step(connection)
            except DBAPIError as error:
                if not self._is_locked(error):
                    raise
                if time.monotonic() > until:
                    raise self._locked_error(error) from error
            time.sleep(RETRY_PAUSE)

    def _locked_error(self, error: DBAPIError) -> StoreUnavailable:
        return StoreUnavailable(
            f"{display_database_url(self.engine.url)}: other transactions have locked the records; nothing "
            f"is lost, run the migration again when they have ended ({error.orig})",
            False,
        )

    @abstractmethod
    def _is_locked(self, error: DBAPIError) -> bool:
        """Whether the error is a lock timeout or a deadlock."""


class _Transactional(Migration):
    """For databases with transactional DDL, where each rename is a separate statement."""

    def _rename(self, connection: Connection, renamed: Mapping[str, Column[Any]] | None) -> None:
        for old, new in (renamed or {}).items():
            connection.execute(text(f"ALTER TABLE {self._table} RENAME COLUMN {old} TO {new.name}"))

    def _drop_index(self, connection: Connection, name: str) -> None:
        connection.execute(text(f"DROP INDEX IF EXISTS {self._schema_prefix()}{name}"))

    def _schema_prefix(self) -> str:
        """The schema prefix of the name of an existing index."""
        schema = self.tables.metadata.schema
        quote = self.engine.dialect.identifier_preparer.quote
        return (
            f"{quote(schema)}.".replace("%%", "%").replace(":", "\\:") if schema is not None else ""
        )

    @contextmanager
    def _transaction(self, connection: Connection, *, lock: bool) -> Iterator[None]:
        try:
            self._begin(connection, lock=lock)
            yield
            connection.exec_driver_sql("COMMIT")
        except BaseException:
            with suppress(Exception):  # the transaction ends with its connection
                connection.exec_driver_sql("ROLLBACK")
            raise

    @abstractmethod
    def _begin(self, connection: Connection, *, lock: bool) -> None: ...


_IN_SCHEMA: Final = (
    "JOIN pg_namespace AS n ON n.oid = c.relnamespace "
    "WHERE c.relname = :name AND n.nspname = COALESCE(CAST(:schema AS TEXT), current_schema())"
)
_IS_READY: Final = (
    f"SELECT 1 FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid {_IN_SCHEMA} "  # noqa: S608
    "AND i.indisvalid AND (i.indpred IS NOT NULL) = :partial"
)
_BEING_BUILT: Final = (
    f"SELECT 1 FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation {_IN_SCHEMA} "  # noqa: S608
    "AND l.mode = 'ShareUpdateExclusiveLock' AND l.pid <> pg_backend_pid()"
)


class _OnPostgres(_Transactional):
    _old_indexes: Mapping[str, str] = {BY_STATE: "state, started_at", BY_EXPIRY: "expires_at"}
    _added_indexes: Sequence[str] = (BY_START,)

    def _begin(self, connection: Connection, *, lock: bool) -> None:
        connection.exec_driver_sql("BEGIN")
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
        if lock:
            connection.execute(text(f"SELECT version FROM {self._version_table} FOR UPDATE"))  # noqa: S608
            connection.execute(text(f"LOCK TABLE {self._table} IN ACCESS EXCLUSIVE MODE"))

    def _alter(
        self,
        connection: Connection,
        clauses: Sequence[str],
        renamed: Mapping[str, Column[Any]] | None = None,
    ) -> None:
        if clauses:
            connection.execute(text(f"ALTER TABLE {self._table} {', '.join(clauses)}"))
        self._rename(connection, renamed)

    def _is_locked(self, error: DBAPIError) -> bool:
        return postgresql.state_of(error) in (
            postgresql.LOCK_NOT_AVAILABLE,
            postgresql.DEADLOCK,
        )

    def _prepare_indexes(self, connection: Connection) -> None:
        """Create the new indexes under temporary names, without blocking writes. They are renamed
        under the table lock.
        """
        for index in self._new_indexes:
            coming = f"{index.name}{COMING_SUFFIX}"
            if any(self._is_ready(connection, index, name) for name in (str(index.name), coming)):
                continue
            if not self._index_is_being_built(connection):
                connection.execute(
                    text(f"DROP INDEX CONCURRENTLY IF EXISTS {self._schema_prefix()}{coming}")
                )
            over = ", ".join(column.name for column in index.columns)
            made = f"CREATE INDEX CONCURRENTLY IF NOT EXISTS {coming} ON {self._table} ({over})"
            if (where := index.dialect_options["postgresql"]["where"]) is not None:
                made += f" WHERE {where.compile(compile_kwargs={'include_table': False})}"
            try:
                connection.execute(text(made))
            except DBAPIError as error:
                if not self._is_locked(error):
                    raise
                raise self._locked_error(error) from error

    def _drop_coming_indexes(self, connection: Connection) -> None:
        for index in self._new_indexes:
            with suppress(DBAPIError):  # the next upgrade uses the index
                connection.execute(
                    text(
                        f"DROP INDEX CONCURRENTLY IF EXISTS {self._schema_prefix()}{index.name}{COMING_SUFFIX}"
                    )
                )

    def _replace_indexes(self, connection: Connection) -> None:
        for index in self._new_indexes:
            coming = f"{index.name}{COMING_SUFFIX}"
            if self._is_ready(connection, index, coming):
                self._drop_index(connection, str(index.name))
                connection.execute(
                    text(f"ALTER INDEX {self._schema_prefix()}{coming} RENAME TO {index.name}")
                )
            elif not self._is_ready(connection, index, str(index.name)):
                self._drop_index(connection, coming)
                self._drop_index(connection, str(index.name))
                connection.execute(CreateIndex(index))

    def _is_ready(self, connection: Connection, index: Index, name: str) -> bool:
        """Whether *index* exists under that name, complete and with a condition if it has one."""
        partial = index.dialect_options["postgresql"]["where"] is not None
        values = {"name": name, "schema": self.tables.metadata.schema, "partial": partial}
        return connection.execute(text(_IS_READY), values).first() is not None

    def _index_is_being_built(self, connection: Connection) -> bool:
        """Whether another migration may be building an index: it holds the lock of CREATE INDEX
        CONCURRENTLY on the table.
        """
        values = {"name": self.tables.records.name, "schema": self.tables.metadata.schema}
        return connection.execute(text(_BEING_BUILT), values).first() is not None


class _OnSQLite(_Transactional):
    def _begin(self, connection: Connection, *, lock: bool) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    def _alter(
        self,
        connection: Connection,
        clauses: Sequence[str],
        renamed: Mapping[str, Column[Any]] | None = None,
    ) -> None:
        for clause in clauses:
            connection.execute(text(f"ALTER TABLE {self._table} {clause}"))
        self._rename(connection, renamed)

    def _is_locked(self, error: DBAPIError) -> bool:
        return "locked" in str(error.orig)


class _OnMySQL(Migration):
    """MySQL commits at each DDL statement. So the session locks the table, and one statement
    changes all columns.
    """

    @contextmanager
    def _exclusively(self, connection: Connection) -> Iterator[None]:
        name = "SELECT {}(CONCAT('celery_leases.', LEFT(SHA1(DATABASE()), 20)){})"
        if not connection.exec_driver_sql(name.format("GET_LOCK", f", {RETRY_TIME:g}")).scalar():
            raise StoreUnavailable(
                f"{display_database_url(self.engine.url)}: another migration is running", False
            )
        try:
            yield
        finally:
            with suppress(Exception):  # the lock ends with its session
                connection.exec_driver_sql(name.format("RELEASE_LOCK", ""))

    def _alter(
        self,
        connection: Connection,
        clauses: Sequence[str],
        renamed: Mapping[str, Column[Any]] | None = None,
    ) -> None:
        specified = {
            old: CreateColumn(new).compile(dialect=self.engine.dialect)
            for old, new in (renamed or {}).items()
        }
        changes = [*clauses, *(f"CHANGE {old} {new}" for old, new in specified.items())]
        if changes:
            connection.execute(text(f"ALTER TABLE {self._table} {', '.join(changes)}"))

    def _drop_index(self, connection: Connection, name: str) -> None:
        """Drop an index by a separate statement: MySQL copies the table if one statement drops an
        index and columns.
        """
        found = connection.execute(
            text(f"SHOW INDEX FROM {self._table} WHERE Key_name = '{name}'")
        ).first()
        if found is not None:
            connection.execute(text(f"ALTER TABLE {self._table} DROP INDEX {name}"))

    def _replace_indexes(self, connection: Connection) -> None:
        """Do nothing: MySQL has no partial indexes, so both versions have the same indexes."""

    @contextmanager
    def _transaction(self, connection: Connection, *, lock: bool) -> Iterator[None]:
        connection.exec_driver_sql("SET autocommit = 0")
        connection.exec_driver_sql(
            "SET SESSION lock_wait_timeout = 1"
        )  # all writes queue behind the lock
        try:
            if lock:
                connection.execute(
                    text(f"LOCK TABLES {self._table} WRITE, {self._version_table} WRITE")
                )
            yield
            connection.exec_driver_sql("COMMIT")
        finally:
            with suppress(Exception):  # transaction and locks end with their session
                connection.exec_driver_sql("ROLLBACK")
                connection.exec_driver_sql("UNLOCK TABLES")
                connection.exec_driver_sql("SET autocommit = 1")

    def _is_locked(self, error: DBAPIError) -> bool:
        return mysql.code_of(error) in mysql.NOT_EXECUTED


def _document(row: Row) -> str | None:
    """The document for a row of version 1. An unreadable value is copied unchanged, so that it does
    not become an absent one.
    """
    record = to_record(row, lenient=True)
    written = record_document.dump(record)
    raw = {short: row[name] for short, name in _RAW.items() if isinstance(row[name], str)}
    if record.finished_results is not None:
        raw.pop("results", None)
    return json.dumps({**json.loads(written or "{}"), **raw}) if raw else written


class OneConnection:
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


@contextmanager
def migrating_on(connection: Connection) -> Iterator[Engine]:
    """A context manager with an engine for *connection*, whose session has the lock timeouts of a
    migration meanwhile.
    """
    on_mysql, on_postgres = (
        mysql.is_mysql(connection.dialect),
        connection.dialect.name == "postgresql",
    )
    names: Sequence[str] = (
        mysql.SESSION_NAMES if on_mysql else ("lock_timeout",) if on_postgres else ()
    )
    show = "SELECT @@SESSION.{}" if on_mysql else "SHOW {}"
    before = {name: connection.exec_driver_sql(show.format(name)).scalar() for name in names}
    if on_mysql:
        for statement in mysql.STRICT:
            connection.exec_driver_sql(statement)
    elif on_postgres:
        connection.exec_driver_sql(f"SET lock_timeout = {postgresql.LOCK_TIMEOUT_OF_MIGRATIONS}")
    try:
        yield cast_to(Engine, OneConnection(connection))
    finally:
        for name, value in before.items():
            written = f"'{value}'" if isinstance(value, str) else value
            connection.exec_driver_sql(f"SET SESSION {name} = {written}")


def migration(engine: Engine, tables: Tables) -> Migration:
    """The migration of *tables* for the server of *engine*."""
    if mysql.is_mysql(engine.dialect):
        return _OnMySQL(engine, tables)
    return (
        _OnSQLite(engine, tables)
        if engine.dialect.name == "sqlite"
        else _OnPostgres(engine, tables)
    )
