"""The tables of the records database, their version, and how they come to be."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    Dialect,
    Engine,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    inspect,
)
from sqlalchemy.dialects.mysql import LONGTEXT
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateIndex, CreateTable, ExecutableDDLElement
from sqlalchemy.sql.compiler import DDLCompiler

from celery_leases.core.errors import SchemaOutdated
from celery_leases.stores import mysql

VERSION: Final = 1
CREATE_TRIES: Final = 10
MIGRATE: Final = "celery -A <your app> leases migrate"

_LONG: Final = Text().with_variant(LONGTEXT(), *mysql.FAMILY)


class Tables:
    """The tables, in one schema of the database or its default one. Times are microseconds since the epoch."""

    def __init__(self, schema: str | None = None) -> None:
        self.metadata = MetaData(
            schema=schema,
            naming_convention={"pk": "pk_%(table_name)s", "ix": "ix_%(table_name)s_%(column_0_N_name)s"},
        )
        self.records = Table(
            "celery_leases_records",
            self.metadata,
            Column("stored_key", String(255), primary_key=True),
            Column("task", String(255), nullable=False),
            Column("key", Text, nullable=False),
            Column("state", String(16), nullable=False),
            Column("fence", BigInteger, nullable=False),
            Column("owner", String(64), nullable=False),
            Column("call_id", String(255), nullable=False),
            Column("retries", Integer, nullable=False),
            Column("holder", String(255), nullable=False),
            Column("attempt", Integer, nullable=False),
            Column("generation", Integer, nullable=False, server_default="0"),
            Column("crashes", Integer, nullable=False, server_default="0"),
            # The next four are of the generation ``counted`` and read as 0 in any other: whoever begins a generation
            # needs to raise ``generation`` only, which keeps the claim short.
            Column("failures", Integer, nullable=False, server_default="0"),
            Column("quick_retries", Integer, nullable=False, server_default="0"),
            Column("cooldowns", Integer, nullable=False, server_default="0"),
            Column("failed_at", BigInteger),
            Column("counted", Integer, nullable=False, server_default="0"),
            Column("resumes", SmallInteger, nullable=False, server_default="0"),
            Column("fingerprint", String(80)),
            Column("digests", Text),
            Column("lease_store", String(255), nullable=False),
            Column("lease_ttl", BigInteger, nullable=False),
            Column("lease_until", BigInteger),
            Column("retry_at", BigInteger),
            Column("result", _LONG),
            Column("reason", String(255)),
            Column("ended", String(16)),
            Column("error", Text),
            Column("previous_ended", String(16)),
            Column("previous_error", Text),
            Column("previous_host", String(255)),
            Column("finished_calls", Text, nullable=False),
            Column("finished_results", _LONG),
            # JSON of the last saved progress and the generation it belongs to.
            Column("progress", _LONG),
            # The call's message as a signature in JSON, and when the relay may publish it, if it is still to be.
            Column("message", _LONG),
            Column("publish_at", BigInteger),
            # When a message of the row was published last.
            Column("published_at", BigInteger),
            Column("created_at", BigInteger, nullable=False),
            Column("started_at", BigInteger, nullable=False),
            Column("finished_at", BigInteger),
            Column("crashed_at", BigInteger),
            Column("crashed_call", String(255)),
            Column("expires_at", BigInteger),
            # The task's, for whoever closes the row without knowing the task.
            Column("retention", BigInteger),
            **mysql.TABLE_OPTIONS,
        )
        self.effects = Table(
            "celery_leases_effects",
            self.metadata,
            Column("stored_key", String(255), primary_key=True),
            Column("name", String(255), primary_key=True),
            # The record's generation as "#0", or the id of a call that has effects of its own.
            Column("scope", String(255), primary_key=True),
            Column("state", String(16), nullable=False),
            Column("fence", BigInteger, nullable=False),
            Column("idempotency_key", String(64), nullable=False),
            Column("reference", Text),
            Column("result", _LONG),
            Column("sent_at", BigInteger, nullable=False),
            Column("done_at", BigInteger),
            # Those of a generation go with their record.
            Column("expires_at", BigInteger),
            **mysql.TABLE_OPTIONS,
        )
        self.marks = Table(
            "celery_leases_marks",
            self.metadata,
            Column("stored_key", String(255), primary_key=True),
            Column("name", String(255), primary_key=True),
            Column("value", String(255), nullable=False),
            Column("expires_at", BigInteger, nullable=False),
            **mysql.TABLE_OPTIONS,
        )
        self.gates = Table(
            "celery_leases_gates",
            self.metadata,
            Column("name", String(255), primary_key=True),
            Column("trips", Integer, nullable=False),
            Column("why", Text, nullable=False),
            Column("closed_until", BigInteger, nullable=False),
            # Never null, as the claim asks whether they are *not* those of its own probe.
            Column("probe", String(64), nullable=False, server_default=""),
            Column("probe_until", BigInteger, nullable=False, server_default="0"),
            Column("expires_at", BigInteger, nullable=False),
            **mysql.TABLE_OPTIONS,
        )
        self.version = Table(
            "celery_leases_version",
            self.metadata,
            Column("version", Integer, primary_key=True, autoincrement=False),
            **mysql.TABLE_OPTIONS,
        )
        Index(None, self.records.c.expires_at)
        Index(None, self.records.c.publish_at)
        Index(None, self.records.c.state, self.records.c.started_at)
        Index(None, self.effects.c.expires_at)
        Index(None, self.marks.c.expires_at)

    def check(self, engine: Engine) -> None:
        """Raise :class:`SchemaOutdated` unless the tables are there in this version; SQLite gets them made."""
        if engine.dialect.name == "sqlite":
            self.create(engine)
        found = self._found(engine)
        if found != VERSION:
            what = "are missing" if found is None else f"have version {found}, this release needs {VERSION}"
            raise SchemaOutdated(f"the tables of celery_leases {what} in {engine.url!r}; run: {MIGRATE}")

    def create(self, engine: Engine) -> None:
        """Create what is missing. Safe to run at once from many processes, and again."""
        for _ in range(CREATE_TRIES - 1):
            # Another process was creating the same tables; what it left unfinished is made now, or the error is real.
            with suppress(DBAPIError):
                return self._create(engine)
        return self._create(engine)

    def ddl(self, engine: Engine) -> str:
        """The SQL that :meth:`create` would run."""
        made = self._statements(engine.dialect)
        statements = [str(statement.compile(dialect=engine.dialect)).strip() for statement in made]
        statements.append(f"INSERT INTO {self.version} (version) VALUES ({VERSION})")  # noqa: S608 - its own words
        return ";\n\n".join(statements) + ";\n"

    def _statements(self, dialect: Dialect) -> list[ExecutableDDLElement]:
        tables = self.metadata.sorted_tables
        if mysql.is_mysql(dialect):
            return [_CreateWithIndexes(table, if_not_exists=True) for table in tables]
        made: list[ExecutableDDLElement] = [CreateTable(table, if_not_exists=True) for table in tables]
        return made + [CreateIndex(index, if_not_exists=True) for table in tables for index in _indexes(table)]

    def _create(self, engine: Engine) -> None:
        with engine.connect() as connection:
            for statement in self._statements(engine.dialect):
                connection.execute(statement)
            if connection.execute(self.version.select()).first() is None:
                connection.execute(self.version.insert().values(version=VERSION))

    def _found(self, engine: Engine) -> int | None:
        if not inspect(engine).has_table(self.version.name, schema=self.metadata.schema):
            return None
        with engine.connect() as connection:
            row = connection.execute(self.version.select()).first()
        return int(row[0]) if row else None


class _CreateWithIndexes(CreateTable):
    """A table with its indexes: MySQL cannot leave out those that are there by a statement of their own."""


@compiles(_CreateWithIndexes, *mysql.FAMILY)
def _with_indexes(create: _CreateWithIndexes, compiler: DDLCompiler, **_: Any) -> str:
    table: Table = create.element
    columns, end, options = compiler.visit_create_table(create).rpartition("\n)")  # type: ignore[no-untyped-call]
    quote = compiler.preparer.quote
    for index in _indexes(table):
        over = ", ".join(quote(column.name) for column in index.columns)
        columns = f"{columns.rstrip()}, \n\tINDEX {compiler.preparer.format_index(index)} ({over})"
    return f"{columns}{end}{options}"


def _indexes(table: Table) -> list[Index]:
    return sorted(table.indexes, key=lambda index: str(index.name))
