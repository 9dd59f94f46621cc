"""The records in partitions, as docs/how-to/partitions.md makes them, with the published suites."""

from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import text

from celery_leases.alembic import include_object
from celery_leases.record import State
from celery_leases.stores.sql.effects import SqlEffectStore
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts import (
    EffectStoreContract,
    LeaseStoreContract,
    RecordStoreContract,
)
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.effect_case import sent
from celery_leases.testing.contracts.record_case import closed, won
from tests.contract.sql_stores import migrated, new_database
from tests.unit.doc_pages import blocks, page

PARTITIONED, SETTINGS, DROPPED = blocks(page("partitions"), "sql")
PARTITIONS = 16


def run(records: SqlRecordStore, script: str) -> None:
    """Run a script of the page, as psql does."""
    url = records.database.engine.url.render_as_string(hide_password=False)
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(script.encode())


@pytest.fixture(scope="module")
def partitioned(request: pytest.FixtureRequest) -> Iterator[SqlRecordStore]:
    """Partitions made from a table that has rows, and then all that leases migrate adds."""
    with migrated(new_database(request, "postgresql")) as store:
        before = closed(store, won(store, make_call("t:contract|before")), result="1")
        run(store, PARTITIONED)
        # For this database alone, as others of the server belong to other tests.
        name = store.database.engine.url.database
        run(store, SETTINGS.replace("ALTER ROLE worker", f"ALTER DATABASE {name}"))
        store.database.engine.dispose()  # the settings of a role are those of new connections
        assert store.migrate().before == store.migrate().after
        assert (store.read("t:contract|before") or before).result == "1"
        yield store


class TestRecords(RecordStoreContract):
    @pytest.fixture
    def records(self, partitioned: SqlRecordStore) -> SqlRecordStore:
        return partitioned


@pytest.mark.nightly
class TestLeases(LeaseStoreContract):
    @pytest.fixture
    def store(self, partitioned: SqlRecordStore) -> DatabaseLeaseStore:
        return DatabaseLeaseStore(partitioned)


@pytest.mark.nightly
class TestEffects(EffectStoreContract):
    @pytest.fixture
    def records(self, partitioned: SqlRecordStore) -> SqlRecordStore:
        return partitioned

    @pytest.fixture
    def effects(self, records: SqlRecordStore) -> SqlEffectStore:
        return SqlEffectStore(records.database, records.tables)


def test_the_partitions_have_the_indexes_of_a_plain_table(
    partitioned: SqlRecordStore, leases_postgres_url: str
) -> None:
    with migrated(leases_postgres_url) as plain:
        expected, found = (
            [index["name"] for index in _indexes(store)] for store in (plain, partitioned)
        )
    assert expected == found
    assert len(expected) > 1
    # The rows of each index are those of a plain table, so none was made twice in a partition.
    with partitioned.database.engine.connect() as connection:
        counted = "SELECT count(*) FROM pg_indexes WHERE tablename = 'celery_leases_records_3'"
        assert connection.execute(text(counted)).scalar_one() == len(expected)


def _indexes(store: SqlRecordStore) -> list[dict[str, str]]:
    with store.database.engine.connect() as connection:
        found = "SELECT indexname AS name FROM pg_indexes WHERE tablename = 'celery_leases_records' ORDER BY 1"
        return [dict(row) for row in connection.execute(text(found)).mappings()]


def test_a_backlog_is_dropped_with_its_effects_and_nothing_else(
    partitioned: SqlRecordStore,
) -> None:
    records, effects = partitioned, SqlEffectStore(partitioned.database, partitioned.tables)
    kept, gone, running = [], [], []
    for number in range(60):
        record = won(records, make_call(fresh_key()))
        sent(effects, record)
        if number % 3:
            closed(records, record, State.DONE, result="1")
        else:
            running.append(record.stored_key)
        (gone if number % 3 == 1 else kept).append(record.stored_key)
    over = "UPDATE celery_leases_records SET expires_at = 1 WHERE stored_key = ANY(:keys)"
    with records.database.engine.connect() as connection:
        connection.execute(text(over), {"keys": gone + running})
    for number in range(PARTITIONS):
        run(records, DROPPED.replace("celery_leases_records_7", f"celery_leases_records_{number}"))
    assert [records.read(key) is None for key in gone] == [True] * len(gone)
    assert [records.read(key) is None for key in kept] == [False] * len(kept)
    with records.database.engine.connect() as connection:
        left = "SELECT DISTINCT stored_key FROM celery_leases_effects WHERE stored_key = ANY(:keys)"
        found = connection.execute(text(left), {"keys": gone + kept}).scalars()
        assert set(found) == set(kept)


def test_autogenerate_leaves_the_partitions_out() -> None:
    assert not include_object(None, "celery_leases_records_7", "table", True, None)  # type: ignore[arg-type]
    assert include_object(None, "orders_7", "table", True, None)  # type: ignore[arg-type]


def test_the_plans_of_statements_are_kept(partitioned: SqlRecordStore) -> None:
    with partitioned.database.engine.connect() as connection:
        for name, value in (("plan_cache_mode", "force_generic_plan"), ("jit", "off")):
            assert connection.execute(text(f"SHOW {name}")).scalar_one() == value
