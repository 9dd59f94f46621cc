"""The databases with the published suites, and what only databases do: snapshots of a claim, and
the schema.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from celery_leases.decide import claim as claim_rules
from celery_leases.decide.answers import (
    Acquired,
    Refusal,
    Refused,
    Renewal,
    RenewalResult,
)
from celery_leases.errors import LeaseConfigurationError, SchemaOutdated, StoreUnavailable
from celery_leases.record import (
    Ended,
    Record,
    State,
)
from celery_leases.stores.sql import records
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.records import CLAIM_TRIES, SqlRecordStore
from celery_leases.testing.contracts import (
    LeaseStoreContract,
    MarkStoreContract,
    RecordStoreContract,
)
from celery_leases.testing.contracts.calls import acquired, claimed, fresh_key, make_call
from celery_leases.testing.contracts.record_case import closed, outcome, refused, row, timeless, won
from celery_leases.testing.waits import wait_until
from tests.contract.sql_stores import wait_for_locks


class TestRecords(RecordStoreContract):
    @pytest.fixture
    def records(self, sql_records: SqlRecordStore) -> SqlRecordStore:
        return sql_records


class TestLeases(LeaseStoreContract):
    """The published suite for lease stores. The claimed row is the lease."""

    @pytest.fixture
    def store(self, sql_records: SqlRecordStore) -> DatabaseLeaseStore:
        return DatabaseLeaseStore(sql_records)


class TestMarks(MarkStoreContract):
    @pytest.fixture
    def marks(self, sql_records: SqlRecordStore) -> DatabaseLeaseStore:
        return DatabaseLeaseStore(sql_records)


def test_of_many_claims_of_an_absent_row_one_wins(sql_records: SqlRecordStore) -> None:
    """The snapshots of the others may not have the row."""
    for _ in range(20):
        key = fresh_key()
        together = threading.Barrier(8)

        def claim(
            _: int, key: str = key, together: threading.Barrier = together
        ) -> Acquired | Refused:
            together.wait(10)
            return sql_records.claim(make_call(key), "database")

        with ThreadPoolExecutor(8) as threads:
            claims = list(threads.map(claim, range(8)))
        assert sum(isinstance(answer, Acquired) for answer in claims) == 1


def test_a_claim_that_waited_answers_as_committed(server_records: SqlRecordStore) -> None:
    """PostgreSQL returns the snapshot's row."""
    records = server_records
    call = make_call(fresh_key())
    record = won(records, call)
    rival = make_call(call.key.stored)
    with ThreadPoolExecutor(1) as threads, records.database.engine.connect() as other:
        other.execute(text("BEGIN"))
        other.execute(text("SELECT 1 FROM celery_leases_records FOR UPDATE"))
        claim = threads.submit(records.claim, rival, "redis:one")
        wait_for_locks(records)
        other.execute(text("UPDATE celery_leases_records SET state = 'done', result = '1'"))
        other.execute(text("COMMIT"))
        answer = claim.result(10)
    assert isinstance(answer, Refused)
    assert row(records, call.key.stored).owner == record.owner


@pytest.mark.parametrize("state", [State.RUNNING, State.DONE])
def test_a_refused_claim_waits_for_no_lock(sql_records: SqlRecordStore, state: State) -> None:
    record = won(sql_records, make_call(fresh_key()), "database")
    if state is State.DONE:
        closed(sql_records, record, state, result="1")
    sqlite = sql_records.database.host_now
    with sql_records.database.engine.connect() as other:
        other.execute(text("BEGIN IMMEDIATE" if sqlite else "BEGIN"))
        other.execute(text("UPDATE celery_leases_records SET attempt = 7"))
        began = time.monotonic()
        assert refused(sql_records, make_call(record.stored_key), "database").attempt == 1
        assert time.monotonic() - began < 1.0
        other.execute(text("ROLLBACK"))


def before_the_write(
    records: SqlRecordStore,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[Record], object],
    times: int = 1,
) -> list[Record]:
    """Call something between the read and the write of a claim; returns what was read."""
    seen: list[Record] = []
    swap = records.swap

    def swapped(before: Record, after: Record) -> bool:
        seen.append(before)
        if len(seen) <= times:
            happens(before)
        return swap(before, after)

    monkeypatch.setattr(records, "swap", swapped)
    return seen


def test_a_claim_whose_row_keeps_changing_is_refused_in_the_end(
    sql_records: SqlRecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = closed(
        sql_records, won(sql_records, make_call(fresh_key())), State.PENDING, ended=Ended.LOST
    )

    def moves(_: Record) -> None:
        with sql_records.database.engine.connect() as connection:
            connection.execute(text("UPDATE celery_leases_records SET fence = fence + 1"))

    seen = before_the_write(sql_records, monkeypatch, moves, times=CLAIM_TRIES)
    answer = sql_records.claim(make_call(record.stored_key), "redis:one")
    assert isinstance(answer, Refused)
    assert (answer.why, len(seen)) == (Refusal.CHANGED, CLAIM_TRIES)
    assert (
        row(sql_records, record.stored_key).owner,
        row(sql_records, record.stored_key).attempt,
    ) == (record.owner, 1)


@pytest.mark.parametrize(
    "happens", ["renewed", "settled", "released", "claimed", "forgotten", "purged", "repeated"]
)
def test_a_change_between_the_read_and_the_write_of_a_claim_counts(
    sql_records: SqlRecordStore, monkeypatch: pytest.MonkeyPatch, happens: str
) -> None:
    leases = DatabaseLeaseStore(sql_records)
    first = make_call(fresh_key(), ttl=0.001)
    record, key = won(sql_records, first, "database"), first.key.stored
    wait_until(lambda: leases.holder(key) is None, 10, "the lease to end")
    call, rival = make_call(key), make_call(key)
    swap = sql_records.swap
    actions: dict[str, Callable[[Record], object]] = {
        "renewed": lambda _: leases.renew([Renewal(key, first.token, 60.0)]),
        "settled": lambda _: sql_records.settle(record, outcome(record, result="1")),
        "released": lambda _: leases.release(key, first.token),
        "claimed": lambda seen: swap(seen, claim_rules.claimed(seen, rival, "database", seen.now)),
        "forgotten": lambda _: sql_records.reset(key, keep=False),
        "purged": lambda _: (
            sql_records.reset(key, keep=False, retention=0.0),
            sql_records.purge(10),
        ),
        "repeated": lambda seen: swap(seen, claim_rules.claimed(seen, call, "database", seen.now)),
    }
    seen = before_the_write(sql_records, monkeypatch, actions[happens])
    answer = sql_records.claim(call, "database")
    now = row(sql_records, key)
    refusals = {"renewed": Refusal.HELD, "settled": Refusal.DONE, "claimed": Refusal.HELD}
    if happens in refusals:
        assert isinstance(answer, Refused)
        assert answer.why is refusals[happens]
        assert now.owner == (rival.token if happens == "claimed" else first.token)
    else:
        assert timeless(claimed(answer)) == now
        assert now.fence > record.fence
        counts = {"released": (2, 0), "repeated": (2, 1)}
        assert (now.attempt, now.crashes) == counts.get(happens, (1, 0))
    assert len(seen) == (2 if happens in ("released", "forgotten") else 1)


def test_an_expired_lease_is_taken_if_the_database_was_there(database_url: str) -> None:
    """A new process does not know that."""
    holder, rival = (DatabaseLeaseStore(SqlRecordStore(engine_for(database_url))) for _ in range(2))
    holder.records.migrate()
    rival.records.availability.grace = 0.6
    key = fresh_key()
    assert acquired(holder.acquire(make_call(key, ttl=0.1)))
    wait_until(lambda: holder.holder(key) is None, 10, "the lease to end")
    began, call = time.monotonic(), make_call(key)
    assert not acquired(rival.acquire(call))
    wait_until(lambda: acquired(rival.acquire(call)), 10, "the database to count as available")
    assert time.monotonic() - began >= 0.6
    for store in (holder, rival):
        store.records.database.close()


@pytest.mark.parametrize("late", [True, False])
def test_a_claim_that_is_executed_late_takes_no_expired_lease(
    sql_records: SqlRecordStore, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """A third of the row's ttl is added for the transport; a holder has twice as much left."""
    leases, key = DatabaseLeaseStore(sql_records), fresh_key()
    assert acquired(leases.acquire(make_call(key, ttl=0.9)))
    wait_until(lambda: leases.holder(key) is None, 10, "the lease to end")
    lapsed = sql_records.read(key)
    assert lapsed is not None
    sent = lapsed.now + (-310_000 if late else 10_000_000)
    monkeypatch.setattr(sql_records.availability, "takeover_until", lambda *_: sent)
    assert acquired(leases.acquire(make_call(key))) is not late


def test_all_processes_read_the_same_identity_of_a_database(
    sql_records: SqlRecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sql_records.database.engine.connect() as connection:
        connection.execute(text("DELETE FROM celery_leases_marks"))
    stores = [
        SqlRecordStore(engine_for(sql_records.database.engine.url.render_as_string(False)))
        for _ in range(4)
    ]
    monkeypatch.setattr(records, "_identities", _Forgetful())
    with ThreadPoolExecutor(4) as threads:
        names = set(threads.map(lambda store: store.identity(), stores))
    sql_records.purge(100)
    assert {sql_records.identity()} == names
    assert len(names) == 1


class _Forgetful(dict[str, str]):
    """Behaves as if each read were done by another process."""

    def __contains__(self, _: object) -> bool:
        return False


def test_the_settled_row_is_the_cooldown(sql_records: SqlRecordStore) -> None:
    leases = DatabaseLeaseStore(sql_records)
    key = fresh_key()
    record = won(sql_records, make_call(key), leases.name)
    closed(sql_records, record, State.COOLING, ended=Ended.FAILED, retry_after=60.0)
    assert leases.cool(key, record.owner, 60.0)
    assert leases.renew([Renewal(key, record.owner, 60.0)]) != [RenewalResult.OURS]
    assert leases.holder(key) is None
    assert not leases.end_cooldown(key)
    assert refused(sql_records, make_call(key), leases.name).waits > 50


FORKS = """
import ctypes, os, sys
from celery_leases.client import LeaseClient

url, how = sys.argv[1:]
fork = {"with hooks": os.fork, "without hooks": ctypes.PyDLL(None).fork}[how]
client = LeaseClient("database", url)
client._records.migrate()
client.status("x", task="t")
children = []
for _ in range(3):
    pid = fork()
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
"""


@pytest.mark.parametrize("how", ["with hooks", "without hooks"])
def test_a_client_used_before_a_fork_may_be_used_after_it(server_url: str, how: str) -> None:
    """The process that forks has no other threads."""
    command = [sys.executable, "-c", FORKS, server_url, how]
    subprocess.run(command, check=True, timeout=60)


WRITES_AND_FORKS = """
import os, sys, threading
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.database import Database
from celery_leases.testing.waits import wait_until

database = Database(engine_for(sys.argv[1]))
writing, forked = threading.Event(), threading.Event()

def write():
    with database.transaction():
        writing.set()
        wait_until(lambda: forked.is_set() or database.engine.pool._waiting, 20, "the fork")

writer = threading.Thread(target=write)
writer.start()
writing.wait()
pid = os.fork()
if pid == 0:
    try:
        with database.transaction():
            os._exit(0)
    finally:
        os._exit(1)
forked.set()
assert os.waitpid(pid, 0)[1] == 0
writer.join()
with database.transaction():
    pass
"""


def test_a_child_can_write_that_was_forked_while_another_thread_wrote(database_url: str) -> None:
    """As a worker's main process, in which one thread closes the row of a dead child, and another
    one forks the next child.
    """
    command = [sys.executable, "-W", "ignore", "-c", WRITES_AND_FORKS, database_url]
    subprocess.run(command, check=True, timeout=60)


def test_a_database_without_tables_stops_with_the_command_to_run(server_url: str) -> None:
    records = SqlRecordStore(engine_for(server_url))
    with pytest.raises(SchemaOutdated, match="leases migrate"):
        records.check()
    records.migrate()
    records.migrate()
    records.check()


def test_tables_of_a_later_version_are_refused_and_named(sql_records: SqlRecordStore) -> None:
    with sql_records.database.engine.connect() as connection:
        connection.execute(text("UPDATE celery_leases_version SET version = 99, made_by = '9.9'"))
    for refuses in (sql_records.check, sql_records.migrate):
        with pytest.raises(
            SchemaOutdated, match=r"version 99, this release .* supports 1: .* 9.9 or later"
        ):
            refuses()


def test_many_processes_may_make_the_tables_of_one_database(database_url: str) -> None:
    stores = [SqlRecordStore(engine_for(database_url)) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda store: store.migrate(), stores))
    stores[0].check()


@pytest.mark.parametrize("scheme", ["postgresql+psycopg", "mysql+pymysql", "mariadb+pymysql"])
def test_an_unavailable_database_is_reported_without_its_password(scheme: str) -> None:
    records = SqlRecordStore(engine_for(f"{scheme}://me:secret@127.0.0.1:1/x?connect_timeout=2"))
    for call in (
        lambda: records.read("t:x|y"),
        records.check,
        lambda: records.claim(make_call("t:x|y"), "database"),
    ):
        with pytest.raises(StoreUnavailable) as caught:
            call()
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "mssql://x/y",
        "nonsense",
        "redis://localhost",
        "postgresql+nodriver://x/y",
        "mysql+asyncmy://x/y",
    ],
)
def test_a_database_that_cannot_hold_records_is_refused_with_what_to_write(url: str) -> None:
    with pytest.raises(LeaseConfigurationError, match="leases_database_url"):
        engine_for(url)
