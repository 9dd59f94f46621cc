"""The tables of the records database: their columns, their version, and their creation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import sqlalchemy
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    inspect,
    select,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import (
    DropTable,
    ExecutableDDLElement,
)

from celery_leases.errors import LeaseConfigurationError, SchemaOutdated
from celery_leases.stores.sql.dialects import dialect_of
from celery_leases.stores.sql.dialects.dialect import JOINT
from celery_leases.stores.sql.dialects.mysql import LONG, TABLE_OPTIONS
from celery_leases.stores.sql.rows import DETAILS
from celery_leases.stores.urls import display_database_url

CREATE_TRIES: Final = 10
MIGRATE: Final = "celery -A <your app> leases migrate"

NEWEST: Final = 1
"""The version of these tables; see :mod:`celery_leases.stores.sql.versions`."""
RELEASE: Final = "0.1.0"
RECORDS: Final = "celery_leases_records"


class Tables:
    """The tables in *schema*, or in the default schema of the connection. Times are microseconds
    since the epoch.
    """

    def __init__(self, schema: str | None = None) -> None:
        if schema is not None and not _is_usable_name(schema):
            raise LeaseConfigurationError(
                f"leases_database_schema={schema!r}: write the name of a schema, of 1 to 63 printable characters and "
                "without a backslash"
            )
        self.metadata = MetaData(
            schema=schema,
            naming_convention={
                "pk": "pk_%(table_name)s",
                "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            },
        )
        self.records = Table(
            RECORDS,
            self.metadata,
            # The columns that an outcome changes come last, because PostgreSQL leaves the unchanged
            # beginning of a row out of its write-ahead log.
            Column("stored_key", String(255), primary_key=True),
            Column("task", String(255), nullable=False),
            Column("key", LONG, nullable=False),
            Column("call_id", String(255), nullable=False),
            Column("owner", String(64), nullable=False),
            Column("holder", String(255), nullable=False),
            Column("fence", BigInteger, nullable=False),
            Column("created_at", BigInteger, nullable=False),
            Column("started_at", BigInteger, nullable=False),
            Column("attempt", Integer, nullable=False),
            Column("crashes", Integer, nullable=False, server_default="0"),
            Column("resumes", SmallInteger, nullable=False, server_default="0"),
            # The lease store of a running row; and the end of the lease if the row is the lease.
            Column("lease_store", String(255), nullable=False),
            Column("lease_until", BigInteger),
            Column("state", String(16), nullable=False),
            # How the attempt ended; NULL if it returned and the row is done.
            Column("ended", String(16)),
            Column("reason", String(255)),
            Column("result", LONG),
            Column("error", Text),
            Column("retry_at", BigInteger),
            Column("finished_at", BigInteger),
            Column("expires_at", BigInteger),
            # When the message is due, NULL if it must not be published; and when a message of the
            # row was last published.
            Column("publish_at", BigInteger),
            Column("published_at", BigInteger),
            # The last saved progress and its generation, as JSON.
            Column("progress", LONG),
            # The call's message as a signature in JSON.
            Column("message", LONG),
            # The fields that only decisions read; see celery_leases.stores.sql.rows.
            Column(DETAILS, LONG),
            **TABLE_OPTIONS,
        )
        self.effects = Table(
            "celery_leases_effects",
            self.metadata,
            Column("stored_key", String(255), primary_key=True),
            Column("name", String(255), primary_key=True),
            # The record's generation, such as "#0", or the id of a call with its own effects.
            Column("scope", String(255), primary_key=True),
            Column("state", String(16), nullable=False),
            Column("fence", BigInteger, nullable=False),
            Column("idempotency_key", String(64), nullable=False),
            Column("reference", Text),
            Column("result", LONG),
            Column("sent_at", BigInteger, nullable=False),
            Column("done_at", BigInteger),
            # NULL for effects of a generation, which are deleted with their record.
            Column("expires_at", BigInteger),
            **TABLE_OPTIONS,
        )
        self.marks = Table(
            "celery_leases_marks",
            self.metadata,
            Column("stored_key", String(255), primary_key=True),
            Column("name", String(255), primary_key=True),
            Column("value", String(255), nullable=False),
            Column("expires_at", BigInteger, nullable=False),
            **TABLE_OPTIONS,
        )
        # The slots of a group, and whether it is closed: JSON, compared by its version.
        self.groups = Table(
            "celery_leases_groups",
            self.metadata,
            Column("name", String(255), primary_key=True),
            Column("version", BigInteger, nullable=False),
            # Until then the group is not open; the row remains for its history, until it expires.
            Column("limited_until", BigInteger, nullable=False),
            Column("slots", LONG, nullable=False),
            Column("history", LONG, nullable=False),
            Column("expires_at", BigInteger, nullable=False),
            **TABLE_OPTIONS,
        )
        self.version = Table(
            "celery_leases_version",
            self.metadata,
            Column("version", Integer, primary_key=True, autoincrement=False),
            # The release that created or last migrated the tables.
            Column("made_by", String(32)),
            **TABLE_OPTIONS,
        )
        started_at, expires_at = self.records.c.started_at, self.records.c.expires_at
        Index(None, started_at, expires_at, info={JOINT: True})
        for column, info in ((expires_at, {JOINT: False}), (self.records.c.publish_at, None)):
            given = column.is_not(None)
            Index(None, column, postgresql_where=given, sqlite_where=given, info=info)
        Index(None, self.effects.c.expires_at)
        Index(None, self.marks.c.expires_at)

    def check(self, engine: Engine) -> None:
        """Raise :class:`SchemaOutdated` unless the tables have the version of this release.

        Missing tables are created if there is no server.
        """
        found = self.existing_version(engine)
        if found is None and not dialect_of(engine.dialect).has_server:
            self.create(engine)
            found = NEWEST
        if found is None or found < NEWEST:
            state = "are missing" if found is None else f"have version {found}, not {NEWEST},"
            raise SchemaOutdated(
                f"the tables of celery_leases {state} in {display_database_url(engine.url)}; run: {MIGRATE}"
            )

    def create(self, engine: Engine) -> None:
        """Create missing tables and indexes. Several processes may call it at the same time, and
        repeatedly. Existing tables are not changed.
        """
        for _ in range(CREATE_TRIES - 1):
            # Another process may be creating the same tables. The next try creates those that are
            # still missing, or fails again.
            with suppress(DBAPIError):
                return self._create(engine)
        return self._create(engine)

    def existing_version(self, engine: Engine, newest: int = NEWEST) -> int | None:
        """The version of the tables, ``None`` if there are none. Raises :class:`SchemaOutdated` for
        a later version than *newest*.
        """
        with engine.connect() as connection:
            if not inspect(connection).has_table(self.version.name, schema=self.metadata.schema):
                return None
            row = connection.execute(select(self.version)).mappings().first()
        if row is not None and row["version"] > newest:
            raise SchemaOutdated(
                f"the tables of celery_leases in {display_database_url(engine.url)} have version {row['version']}, "
                f"this release ({RELEASE}) supports {newest}: install celery_leases "
                f"{row['made_by'] or 'of a later release'} or later"
            )
        return row["version"] if row is not None else None

    def ddl(self, engine: Engine) -> str:
        """The SQL that creates the tables. It may be run again."""
        return ";\n\n".join(self.ddl_statements(engine.dialect)) + ";\n"

    def ddl_statements(self, dialect: sqlalchemy.Dialect) -> list[str]:
        """The statements of :meth:`ddl`."""
        statements = [
            str(statement.compile(dialect=dialect)).strip()
            for statement in self.create_statements(dialect)
        ]
        version = dialect.identifier_preparer.format_table(self.version)
        once = f"SELECT {NEWEST}, '{RELEASE}' FROM (SELECT 1) AS one WHERE NOT EXISTS (SELECT * FROM {version})"  # noqa: S608
        statements.append(f"INSERT INTO {version} (version, made_by) {once}")
        if dialect.identifier_preparer._double_percents:  # noqa: SLF001
            statements = [statement.replace("%%", "%") for statement in statements]
        return statements

    def drop(self, engine: Engine) -> None:
        """Drop the tables with all records, but not their schema. May be called again."""
        with engine.connect() as connection:
            for statement in self.drop_statements():
                connection.execute(statement)

    def drop_statements(self) -> Sequence[ExecutableDDLElement]:
        """The statements that drop the tables if they exist. The version is dropped last, so an
        interrupted drop can be repeated.
        """
        first = [table for table in self.metadata.sorted_tables if table is not self.version]
        return [DropTable(table, if_exists=True) for table in (*first, self.version)]

    def create_statements(self, dialect: sqlalchemy.Dialect) -> list[ExecutableDDLElement]:
        """The statements that create the schema, if it has a name, and the tables, unless they
        exist.
        """
        ours, schema = dialect_of(dialect), self.metadata.schema
        made = ours.create_schema(schema) if schema is not None else []
        for table in self.metadata.sorted_tables:
            made += ours.create_table(table)
        return made

    def _missing_statements(
        self, connection: Connection, table: Table
    ) -> list[ExecutableDDLElement]:
        """The statements that create a table if it is missing, otherwise its missing indexes."""
        found, dialect = inspect(connection), dialect_of(connection.dialect)
        if not found.has_table(table.name, schema=table.schema):
            return dialect.create_table(table)
        there = {index["name"] for index in found.get_indexes(table.name, schema=table.schema)}
        missing = [index for index in dialect.indexes_of(table) if index.name not in there]
        return [dialect.create_index(index) for index in missing]

    def _create(self, engine: Engine) -> None:
        with engine.connect() as connection:
            self._create_schema(connection)
            # CREATE TABLE IF NOT EXISTS would wait for other transactions and block writes, even if
            # the table exists.
            for table in self.metadata.sorted_tables:
                for statement in self._missing_statements(connection, table):
                    connection.execute(statement)
            if connection.execute(select(self.version.c.version)).first() is None:
                connection.execute(self.version.insert().values(version=NEWEST, made_by=RELEASE))

    def _create_schema(self, connection: Connection) -> None:
        """Create the schema if it is missing. Checks first, because the user may have the right to
        use the schema but not to create one.
        """
        schema = self.metadata.schema
        if schema is not None and not inspect(connection).has_schema(schema):
            for statement in dialect_of(connection.dialect).create_schema(schema):
                connection.execute(statement)


def _is_usable_name(schema: object) -> bool:
    return (
        isinstance(schema, str)
        and 0 < len(schema) < 64
        and schema.isprintable()
        and "\\" not in schema
    )
