"""Which sessions and connections of the user can be joined, and the errors for the others."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django import setup
from django.conf import settings
from django.db.utils import ConnectionHandler
from sqlalchemy import URL, Connection, Engine, String, create_engine, event, make_url, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool

from celery_leases.decide.repairs import NewCall
from celery_leases.errors import WrongDatabase
from celery_leases.keys import CallKey
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.outbox import Outbox
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.sql.transactions import JoinedTransaction
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.record_case import outcome, row, won
from tests.contract.sql_stores import migrated


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[SqlRecordStore]:
    with migrated(f"sqlite:///{tmp_path / 'records.db'}") as store:
        yield store


ON_DJANGO = pytest.mark.only(server=("sqlite", "postgresql"))
"""Django requires mysqlclient for MySQL and MariaDB."""


@pytest.fixture(params=["plain", "debug"])
def django(sql_records: SqlRecordStore, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Django's connection to the records. With ``DEBUG`` its cursors record the statements."""
    if not settings.configured:
        settings.configure(LOGGING_CONFIG=None)
        setup()
    url = sql_records.database.engine.url
    where = {"HOST": url.host, "PORT": url.port, "USER": url.username, "NAME": url.database}
    kind = {"sqlite": "sqlite3"}.get(url.get_backend_name(), url.get_backend_name())
    made = ConnectionHandler({"default": {"ENGINE": f"django.db.backends.{kind}", **where}})[
        "default"
    ]
    made.force_debug_cursor = request.param == "debug"
    yield made
    made.close()


@ON_DJANGO
def test_djangos_connections_are_joined(sql_records: SqlRecordStore, django: Any) -> None:
    record = won(sql_records, make_call(fresh_key()), DatabaseLeaseStore(sql_records).name)
    django.set_autocommit(False)
    transaction = JoinedTransaction(django, sql_records)
    transaction.guard(record)
    transaction.complete(record, outcome(record, result='"50%"'))
    key = CallKey("k", fresh_key(), None)
    writes = Outbox(sql_records).enqueue_writes(
        NewCall("contract", key, "first", '["50%"]', 15.0, 60.0)
    )
    assert transaction.write(writes, "k")
    django.commit()
    assert row(sql_records, record.stored_key).result == '"50%"'
    assert row(sql_records, key.stored).message == '["50%"]'


@ON_DJANGO
def test_a_cursor_is_not_taken_for_a_connection(sql_records: SqlRecordStore, django: Any) -> None:
    with (
        django.cursor() as cursor,
        pytest.raises(WrongDatabase, match="is not a SQLAlchemy Session"),
    ):
        JoinedTransaction(cursor, sql_records).join("invoice:1")


SHORT = 0.3
ENGINES = ("psycopg", "psycopg2", "pg8000")


@pytest.fixture
def postgres(leases_postgres_url: str) -> Iterator[SqlRecordStore]:
    with migrated(leases_postgres_url) as store:
        yield store


def engine_by(store: SqlRecordStore, driver: str, **options: Any) -> Engine:
    url = store.database.engine.url.set(drivername=f"postgresql+{driver}")
    return create_engine(url, poolclass=NullPool, **options)


@pytest.mark.parametrize("driver", ENGINES)
def test_an_engine_in_autocommit_mode_is_refused(postgres: SqlRecordStore, driver: str) -> None:
    engine = engine_by(postgres, driver, isolation_level="AUTOCOMMIT")
    for given in (
        engine,
        engine.execution_options(logging_token="reports"),
        engine_by(postgres, driver),
    ):
        with Session(given) as session, session.begin():
            if given.dialect is not engine.dialect:
                session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
            with pytest.raises(WrongDatabase, match="autocommit mode"):
                JoinedTransaction(session, postgres).join("invoice:1")


@pytest.mark.parametrize("driver", ENGINES)
def test_a_connection_with_its_own_level_is_joined(postgres: SqlRecordStore, driver: str) -> None:
    record = won(postgres, make_call(fresh_key()), DatabaseLeaseStore(postgres).name)
    engine = engine_by(postgres, driver, isolation_level="AUTOCOMMIT")
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
        JoinedTransaction(connection, postgres).complete(record, outcome(record, result="1"))
        connection.rollback()
    assert row(postgres, record.stored_key).result is None


def test_on_sqlite_autocommit_with_a_begin_of_its_own_is_joined(sqlite: SqlRecordStore) -> None:
    record = won(sqlite, make_call(fresh_key()), DatabaseLeaseStore(sqlite).name)
    engine = create_engine(
        sqlite.database.engine.url, poolclass=NullPool, isolation_level="AUTOCOMMIT"
    )
    with engine.connect() as connection, pytest.raises(WrongDatabase, match="autocommit mode"):
        JoinedTransaction(connection, sqlite).join("invoice:1")
    event.listen(engine, "begin", lambda connection: connection.execute(text("BEGIN IMMEDIATE")))
    with engine.connect() as connection:
        connection.begin()
        JoinedTransaction(connection, sqlite).complete(record, outcome(record, result="1"))
        connection.rollback()
    assert row(sqlite, record.stored_key).result is None


def by_query(url: URL) -> URL:
    """The same database, named only in the options of the URL."""
    return url.set(database=None).update_query_dict({"dbname": str(url.database)})


def plainly(url: URL) -> str:
    """With the plain arguments of the driver."""
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


def made(url: URL, where: URL) -> Session:
    """A session that connects by a creator, whatever its URL is."""
    return Session(
        create_engine(url, poolclass=NullPool, creator=lambda: psycopg.connect(plainly(where)))
    )


GIVEN: dict[str, Callable[[URL, URL], Any]] = {
    "created": lambda _, where: made(make_url("postgresql+psycopg://"), where),
    "renamed": made,
    "by query": lambda _, where: Session(create_engine(by_query(where), poolclass=NullPool)),
    "driver": lambda _, where: psycopg.connect(plainly(where)),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("records", ["by name", "by query"])
def test_the_connections_say_what_it_is(leases_postgres_url: str, records: str, given: str) -> None:
    """Whatever the URL of an engine is."""
    url = make_url(leases_postgres_url)
    with migrated(
        (by_query(url) if records == "by query" else url).render_as_string(hide_password=False)
    ) as store:
        with GIVEN[given](url, url) as joined:
            JoinedTransaction(joined, store).join("invoice:1")
        with (
            GIVEN[given](url, url.set(database="postgres")) as joined,
            pytest.raises(WrongDatabase, match="rows of its own database"),
        ):
            JoinedTransaction(joined, store).join("invoice:1")


@pytest.mark.parametrize("records", ["", "file:"])
@pytest.mark.parametrize("given", ["", "file:"])
def test_a_file_is_the_same_however_it_is_named(tmp_path: Path, records: str, given: str) -> None:

    def named(kind: str, name: str) -> str:
        return f"sqlite:///{kind}{tmp_path / name}" + ("?uri=true" if kind else "")

    with migrated(named(records, "records.db")) as store:
        with Session(create_engine(named(given, "records.db"), poolclass=NullPool)) as session:
            JoinedTransaction(session, store).join("invoice:1")
        for other in (named(given, "other.db"), "sqlite://"):
            with (
                Session(create_engine(other)) as session,
                pytest.raises(WrongDatabase, match="rows of its own"),
            ):
                JoinedTransaction(session, store).join("invoice:1")


class Base(DeclarativeBase):
    """The base class of the user's tables."""


class Book(Base):
    __tablename__ = "books"
    name: Mapped[str] = mapped_column(String(99), primary_key=True)


class Routed(Session):
    """A session with its own ``get_bind``, like that of Flask-SQLAlchemy."""

    def get_bind(self, *args: Any, **kwargs: Any) -> Engine | Connection:
        return super().get_bind(*args, **kwargs)


def test_a_session_on_several_engines_is_refused(sql_records: SqlRecordStore) -> None:
    """Its rows and the record would be committed one after the other."""
    record = won(sql_records, make_call(fresh_key()), DatabaseLeaseStore(sql_records).name)
    url = sql_records.database.engine.url
    own, other = create_engine(url, poolclass=NullPool), create_engine(url, poolclass=NullPool)
    Base.metadata.create_all(other)
    for message, session in {
        "several engines": Session(own, binds={Book: other}),
        "no engine of its own": Session(binds={Book: other}),
    }.items():
        with session, pytest.raises(WrongDatabase, match=f"{message}.*bind_arguments"):
            JoinedTransaction(session, sql_records).join("invoice:1")
    with Session(own, binds={Book: other}) as session:
        session.add(Book(name=record.key))
        session.flush()
        connection = session.connection(bind_arguments={"mapper": Book})
        JoinedTransaction(connection, sql_records).complete(record, outcome(record, result="1"))
        assert row(sql_records, record.stored_key).result is None
        session.commit()
    assert row(sql_records, record.stored_key).result == "1"


def test_a_session_that_knows_one_engine_only_is_joined(sql_records: SqlRecordStore) -> None:
    engine, other = (
        create_engine(sql_records.database.engine.url, poolclass=NullPool) for _ in range(2)
    )
    with engine.connect() as connection:
        for session in (
            Session(engine, binds={Book: engine}),
            Session(connection, binds={Book: connection}),
            Session(engine, binds={Book: connection}),
            Routed(engine, binds={Book: other}),
        ):
            with session:
                JoinedTransaction(session, sql_records).join("invoice:1")


def test_a_session_in_two_phases_may_have_several_engines(server_records: SqlRecordStore) -> None:
    url = server_records.database.engine.url
    engine, other = (create_engine(url, poolclass=NullPool) for _ in range(2))
    with Session(engine, binds={Book: other}, twophase=True) as session:
        JoinedTransaction(session, server_records).join("invoice:1")
    with (
        other.connect() as connection,
        Session(engine, binds={Book: connection}, twophase=True) as session,
        pytest.raises(WrongDatabase, match="several engines"),
    ):
        JoinedTransaction(session, server_records).join("invoice:1")


def test_schemas_that_the_session_translates_are_not_ours(postgres: SqlRecordStore) -> None:
    """Records stay in their configured schema."""
    record = won(postgres, make_call(fresh_key(), ttl=SHORT), DatabaseLeaseStore(postgres).name)
    engine = engine_by(postgres, "psycopg").execution_options(schema_translate_map={None: "tenant"})
    with Session(engine) as session:
        session.execute(text("CREATE SCHEMA tenant"))
        JoinedTransaction(session, postgres).guard(record)
        time.sleep(SHORT)
        session.commit()
        Base.metadata.create_all(session.connection())
        session.add(Book(name="one"))
        JoinedTransaction(session, postgres).complete(record, outcome(record, result="1"))
        session.commit()
        assert session.execute(text("SELECT name FROM tenant.books")).scalars().all() == ["one"]
    assert row(postgres, record.stored_key).result == "1"
