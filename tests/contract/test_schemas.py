"""Names of schemas that a statement written as text must quote."""

import pytest

from celery_leases.core.errors import LeaseConfigurationError
from celery_leases.core.ports import Kept, Renewal
from celery_leases.core.records import State
from celery_leases.stores.database import engine_for
from celery_leases.stores.schema import Tables
from celery_leases.stores.sql import SqlRecordStore
from celery_leases.stores.sql_effects import SqlEffectStore
from celery_leases.stores.sql_leases import DatabaseLeaseStore
from celery_leases.testing.contracts.bids import fresh_key, make_bid
from celery_leases.testing.contracts.effect_case import sent
from celery_leases.testing.contracts.record_case import closed, outcome, won
from tests.contract.sql_stores import server_url

__all__ = ["server_url"]


@pytest.mark.parametrize("schema", ["50%", "a  b", "a:b", "%(x)s", "now = 1", "{records}", "Ä`\"'"])
def test_a_schema_of_any_name_keeps_records(server_url: str, schema: str) -> None:
    """A claim with a group and without, an effect, a renewal and an outcome; and a migration."""
    engine = engine_for(server_url)
    quoted = engine.dialect.identifier_preparer.quote_identifier(schema)
    with engine.connect() as connection:
        connection.exec_driver_sql(f"DROP SCHEMA IF EXISTS {quoted}")
        connection.exec_driver_sql(f"CREATE SCHEMA {quoted}")
    records = SqlRecordStore(engine, Tables(schema))
    records.migrate()
    records.check()
    leases, effects = DatabaseLeaseStore(records), SqlEffectStore(records.database, records.tables)
    for group in (None, "group"):
        key = fresh_key()
        bid = make_bid(key, group=group)
        leases.acquire(bid)
        record = records.read(key)
        assert record is not None
        assert record.owner == bid.token
        assert sent(effects, record).fence == record.fence
        for guarded in (True, False):
            assert leases.renew([Renewal(key, bid.token, 15.0, guarded=guarded)]) == [Kept.OURS]
        assert records.settle(record, outcome(record, State.PENDING))
        assert closed(records, won(records, make_bid(key), "database")).state is State.DONE
    assert records.purge(10) == 0
    for version in (1, 2):
        assert records.migrate(version).rows == 2
        found = records.read(key)
        assert found is not None
        assert found.state is State.DONE
    with engine.connect() as connection:
        connection.exec_driver_sql(f"DROP SCHEMA {quoted}" + (" CASCADE" if engine.name == "postgresql" else ""))
    engine.dispose()


@pytest.mark.parametrize("schema", ["", "a\\b", "a\nb", "x" * 64, 7])
def test_what_no_database_calls_a_schema_is_refused(schema: str) -> None:
    """When the stores are opened, with the setting's name."""
    with pytest.raises(LeaseConfigurationError, match="leases_database_schema="):
        Tables(schema)
