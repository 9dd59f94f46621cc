"""The databases against the published suites, and what is their own: the claim's snapshot, the schema."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from celery_leases.client import LeaseClient
from celery_leases.core.errors import LeaseConfigurationError, SchemaOutdated, StoreUnavailable
from celery_leases.core.ports import Kept, Renewal
from celery_leases.core.records import Ended, Refused, State, Won
from celery_leases.stores.claims import claim_of
from celery_leases.stores.database import engine_for
from celery_leases.stores.schema import Tables
from celery_leases.stores.sql import SqlRecordStore
from celery_leases.stores.sql_leases import DatabaseLeaseStore
from celery_leases.testing.contracts import LeaseStoreContract, MarkStoreContract, RecordStoreContract
from celery_leases.testing.contracts.bids import fresh_key, make_bid
from celery_leases.testing.contracts.record_case import closed, outcome, refused, row, won
from tests.contract.sql_stores import (
    database_url,
    end_other_connections,
    server_records,
    server_url,
    sql_records,
    wait_for_locks,
)

__all__ = ["database_url", "server_records", "server_url", "sql_records"]


class TestRecords(RecordStoreContract):
    """The published suite for record stores."""

    @pytest.fixture
    def records(self, sql_records: SqlRecordStore) -> SqlRecordStore:
        """One of the databases."""
        return sql_records


class TestLeases(LeaseStoreContract):
    """The published suite for lease stores, where the claimed row is the lease."""

    @pytest.fixture
    def store(self, sql_records: SqlRecordStore) -> DatabaseLeaseStore:
        """One of the databases."""
        return DatabaseLeaseStore(sql_records)


class TestMarks(MarkStoreContract):
    """The published suite for mark stores."""

    @pytest.fixture
    def marks(self, sql_records: SqlRecordStore) -> DatabaseLeaseStore:
        """One of the databases."""
        return DatabaseLeaseStore(sql_records)


def test_of_many_claims_of_an_absent_row_at_once_one_wins_and_the_others_say_so(sql_records: SqlRecordStore) -> None:
    """On PostgreSQL the losers' snapshots may lack the row: they answer with nothing, never with a win."""
    for _ in range(20):
        key = fresh_key()
        together = threading.Barrier(8)

        def claim(_: int, key: str = key, together: threading.Barrier = together) -> Won | Refused:
            together.wait(10)
            return sql_records.claim(make_bid(key), "database")

        with ThreadPoolExecutor(8) as threads:
            claims = list(threads.map(claim, range(8)))
        assert sum(isinstance(answer, Won) for answer in claims) == 1


def test_a_claim_that_waited_for_a_row_lock_answers_with_what_was_committed(server_records: SqlRecordStore) -> None:
    """PostgreSQL re-checks the condition on the newest row, but reads it back from the statement's snapshot."""
    records = server_records
    bid = make_bid(fresh_key())
    record = won(records, bid)
    rival = make_bid(bid.stored_key)
    with ThreadPoolExecutor(1) as threads, records.database.engine.connect() as other:
        other.execute(text("BEGIN"))
        other.execute(text("SELECT 1 FROM celery_leases_records FOR UPDATE"))
        claim = threads.submit(records.claim, rival, "redis:one")
        wait_for_locks(records)
        other.execute(text("UPDATE celery_leases_records SET state = 'done', result = '1'"))
        other.execute(text("COMMIT"))
        answer = claim.result(10)
    assert isinstance(answer, Refused)
    assert row(records, bid.stored_key).owner == record.owner


def test_the_claim_is_short_enough_for_psycopg_to_keep_it_parsed() -> None:
    """Above 4096 characters it would be taken apart anew for every task, which costs more than the round trip."""
    engine = engine_for("postgresql+psycopg://127.0.0.1/x")
    claim = claim_of(Tables("celery_leases").records, engine.dialect).answer
    assert len(str(claim.compile(dialect=engine.dialect))) < 4096


def test_a_settled_outcome_whose_reply_was_lost_counts_as_written(sql_records: SqlRecordStore) -> None:
    """Writing it again matches no row, and the row says that it was ours."""
    record = won(sql_records, make_bid(fresh_key()))
    assert sql_records.settle(record, outcome(record, result="1"))
    assert sql_records.settle(record, outcome(record, result="1"))


def test_the_settled_row_is_the_cooldown(sql_records: SqlRecordStore) -> None:
    """There is nothing to cool or to end, and no renewal of its lease matches it."""
    leases = DatabaseLeaseStore(sql_records)
    key = fresh_key()
    record = won(sql_records, make_bid(key), leases.name)
    closed(sql_records, record, State.COOLING, ended=Ended.FAILED, retry_after=60.0)
    assert leases.cool(key, record.owner, 60.0)
    assert leases.renew([Renewal(key, record.owner, 60.0)]) != [Kept.OURS]
    assert leases.holder(key) is None
    assert not leases.end_cooldown(key)
    assert refused(sql_records, make_bid(key), leases.name).waits > 50


def test_a_connection_that_died_is_replaced_within_the_call(server_records: SqlRecordStore) -> None:
    """The server was restarted while the pool slept; no task should notice."""
    record = won(server_records, make_bid(fresh_key()))
    assert end_other_connections(SqlRecordStore(engine_for(str(server_records.database.engine.url))))
    assert server_records.settle(record, outcome(record))


def test_a_client_used_before_a_fork_may_be_used_after_it(server_url: str) -> None:
    """As in a web server that loads the application first: no connection is shared between its processes."""
    client = LeaseClient("database", server_url)
    client._records.migrate()
    client.status("x", task="t")
    children = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            try:
                for _ in range(50):
                    client.status("x", task="t")
                os._exit(0)
            finally:
                os._exit(1)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    assert client.status("x", task="t").state == "absent"


def test_a_database_without_tables_stops_with_the_command_to_run(server_url: str) -> None:
    """Tables are made by an operator, except on SQLite."""
    records = SqlRecordStore(engine_for(server_url))
    with pytest.raises(SchemaOutdated, match="leases migrate"):
        records.check()
    records.migrate()
    records.migrate()
    records.check()


def test_tables_of_another_version_are_refused_and_named(sql_records: SqlRecordStore) -> None:
    """Both versions are in the message."""
    with sql_records.database.engine.connect() as connection:
        connection.execute(text("UPDATE celery_leases_version SET version = 99"))
    with pytest.raises(SchemaOutdated, match="version 99, this release needs 1"):
        sql_records.check()


def test_the_printed_sql_makes_the_tables_that_migrate_makes(server_url: str) -> None:
    """An operator may run it by hand, and migrate afterwards."""
    records = SqlRecordStore(engine_for(server_url))
    with records.database.engine.connect() as connection:
        for statement in records.tables.ddl(records.database.engine).strip().removesuffix(";").split(";\n"):
            connection.execute(text(statement))
    records.check()
    records.migrate()
    assert won(records, make_bid(fresh_key())).attempt == 1


def test_many_processes_may_make_the_tables_of_one_database(database_url: str) -> None:
    """Workers that start at once do not stop one another, nor do operators."""
    stores = [SqlRecordStore(engine_for(database_url)) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda store: store.migrate(), stores))
    stores[0].check()


@pytest.mark.parametrize("scheme", ["postgresql+psycopg", "mysql+pymysql", "mariadb+pymysql"])
def test_a_database_that_is_away_is_told_as_such_without_its_password(scheme: str) -> None:
    """Nothing of SQLAlchemy or the driver gets out."""
    records = SqlRecordStore(engine_for(f"{scheme}://me:secret@127.0.0.1:1/x?connect_timeout=2"))
    for call in (lambda: records.read("t:x|y"), records.check, lambda: records.claim(make_bid("t:x|y"), "database")):
        with pytest.raises(StoreUnavailable) as caught:
            call()
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["mssql://x/y", "nonsense", "redis://localhost", "postgresql+nodriver://x/y", "mysql+asyncmy://x/y"]
)
def test_a_database_that_cannot_hold_records_is_refused_with_what_to_write(url: str) -> None:
    """At once, not at the first task."""
    with pytest.raises(LeaseConfigurationError, match="leases_database_url"):
        engine_for(url)
