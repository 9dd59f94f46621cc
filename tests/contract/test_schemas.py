"""Names of schemas that must be quoted in textual statements."""

from uuid import uuid4

import pytest
from sqlalchemy import make_url, select, text

from celery_leases.decide.answers import Renewal, RenewalResult
from celery_leases.errors import LeaseConfigurationError
from celery_leases.record import State
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.effects import SqlEffectStore
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.sql.schema import NEWEST, Tables
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.effect_case import sent
from celery_leases.testing.contracts.record_case import closed, outcome, won


@pytest.mark.parametrize("schema", ["50%", "a  b", "a:b", "%(x)s", "now = 1", "{records}", "Ä`\"'"])
def test_a_schema_of_any_name_keeps_records(server_url: str, schema: str) -> None:
    engine = engine_for(server_url)
    quoted = engine.dialect.identifier_preparer.quote_identifier(schema)
    with engine.connect() as connection:
        connection.exec_driver_sql(f"DROP SCHEMA IF EXISTS {quoted}")
    records = SqlRecordStore(engine, Tables(schema))
    records.migrate()  # also creates the schema
    records.check()
    leases, effects = DatabaseLeaseStore(records), SqlEffectStore(records.database, records.tables)
    for group in (None, "group"):
        key = fresh_key()
        call = make_call(key, group=group)
        leases.acquire(call)
        record = records.read(key)
        assert record is not None
        assert record.owner == call.token
        assert sent(effects, record).fence == record.fence
        for guarded in (True, False):
            assert leases.renew([Renewal(key, call.token, 15.0, guarded=guarded)]) == [
                RenewalResult.OURS
            ]
        assert records.settle(record, outcome(record, State.PENDING))
        assert closed(records, won(records, make_call(key), "database")).state is State.DONE
    assert records.purge(10) == 0
    assert records.migrate().before == NEWEST
    with engine.connect() as connection:
        connection.exec_driver_sql(
            f"DROP SCHEMA {quoted}" + (" CASCADE" if engine.name == "postgresql" else "")
        )
    engine.dispose()


def test_the_printed_sql_makes_the_schema_and_may_be_run_again(server_url: str) -> None:
    schema = "50% of leases"
    engine = engine_for(server_url)
    quoted = engine.dialect.identifier_preparer.quote_identifier(schema)
    records = SqlRecordStore(engine, Tables(schema))
    with engine.connect() as connection:
        for statement in 2 * records.tables.ddl(engine).strip().removesuffix(";").split(";\n"):
            connection.execute(text(statement))
    records.check()
    assert records.migrate().before == NEWEST
    with engine.connect() as connection:
        found = connection.execute(select(records.tables.version.c.version)).all()
        assert found == [(NEWEST,)]
        connection.exec_driver_sql(
            f"DROP SCHEMA {quoted}" + (" CASCADE" if engine.name == "postgresql" else "")
        )
    engine.dispose()


def test_a_schema_that_is_there_needs_no_right_to_make_one(leases_postgres_url: str) -> None:
    admin = engine_for(leases_postgres_url)
    name = f"mover_{uuid4().hex[:8]}"
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {name} LOGIN PASSWORD 'p'")
        connection.exec_driver_sql(f"CREATE SCHEMA {name} AUTHORIZATION {name}")
    try:
        theirs = (
            make_url(leases_postgres_url).set(username=name, password="p").render_as_string(False)
        )
        records = SqlRecordStore(engine_for(theirs), Tables(name))
        records.migrate()
        records.check()
        records.database.close()
    finally:
        with admin.connect() as connection:
            connection.exec_driver_sql(f"DROP SCHEMA {name} CASCADE")
            connection.exec_driver_sql(f"DROP ROLE {name}")
        admin.dispose()


@pytest.mark.parametrize("schema", ["", "a\\b", "a\nb", "x" * 64, 7])
def test_what_no_database_calls_a_schema_is_refused(schema: str) -> None:
    with pytest.raises(LeaseConfigurationError, match="leases_database_schema="):
        Tables(schema)
