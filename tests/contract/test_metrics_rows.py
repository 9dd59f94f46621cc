"""The counts of all processes in each database: written, folded, and computed from the records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from sqlalchemy import select

from celery_leases import metrics_totals as counted
from celery_leases.events import AttemptSettled, CrashSeen, Event, Subject
from celery_leases.metrics_counting import Counting
from celery_leases.metrics_totals import Tally, Written
from celery_leases.record import Ended, Failure, Outcome, Record, State
from celery_leases.stores.sql import metrics as rows
from celery_leases.stores.sql.metrics import SqlMetrics, tag
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import make_call
from celery_leases.testing.contracts.record_case import won
from tests.contract.sql_stores import database_url, sql_records

__all__ = ["database_url", "sql_records"]

DONE = Outcome(State.DONE, Ended.RETURNED, attempt=1, failures=0, crashes=0, retention=3600.0)
SUBJECT = {"task": "t", "key": "k", "call_id": "c"}


class Deaf:
    """An observer that ignores events."""

    def observe(self, event: Event) -> None:
        """Do nothing."""

    def wants(self, kind: type[Event]) -> bool:
        """Return ``False``."""
        return False


@pytest.fixture
def store(sql_records: SqlRecordStore) -> SqlMetrics:
    return SqlMetrics(sql_records.database, sql_records.tables)


@pytest.fixture
def counting(store: SqlMetrics, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Counting]:
    """Makes the counting of a process, without its thread."""
    monkeypatch.setattr(Counting, "_start", lambda _: None)
    return lambda: Counting(Deaf(), store, tag)


def some(**attempts: int) -> Written:
    """That many attempts for each outcome, each of one second."""
    tally = Tally()
    for outcome, number in attempts.items():
        for _ in range(number):
            tally.closed("t", outcome, None, 1.0, 1.0)
    return Written(tally)


def attempts(store: SqlMetrics) -> dict[str, int]:
    """The attempts that all processes have counted, by outcome."""
    found = store.read().tally.counts
    return {series[2]: count for series, count in found.items() if series[0] == "attempts"}


def run(records: SqlRecordStore, counting: Counting, key: str, outcome: Outcome = DONE) -> Record:
    """Run an attempt whose outcome *counting* has not yet counted."""
    records.tag = counting.tag
    request = replace(make_call(f"t:t|{key}", task="t", key=key), call_id=key)
    record = won(records, request)
    assert records.settle(record, outcome)
    return record


def count_outcome(counting: Counting, record: Record, outcome: Outcome = DONE) -> None:
    subject: Subject = {"task": record.task, "key": record.key, "call_id": record.call_id}
    counting.observe(AttemptSettled.by(subject, record, outcome, 0.5, 0.6))


def test_folding_changes_no_count_and_leaves_a_row(
    store: SqlMetrics, sql_records: SqlRecordStore
) -> None:
    assert store.write("a" * 12, some(returned=2), first=True, closed=False)
    for _ in range(2):
        assert store.write("a" * 12, some(returned=3), first=False, closed=True)
    assert store.write("b" * 12, some(failed=1), first=True, closed=False)
    before = store.read()
    assert (attempts(store), before.processes) == ({"returned": 3, "failed": 1}, 1)
    assert store.fold() == 1
    assert (store.read().tally, store.read().processes) == (before.tally, 1)
    assert store.fold(silent=0.0) == 1
    assert store.fold(silent=0.0) == 0
    assert (store.read().tally, store.read().processes) == (before.tally, 0)
    effects = sql_records.tables.effects
    assert [row["scope"] for row in sql_records.database.all(select(effects.c.scope), {})] == [
        "total"
    ]
    assert sql_records.purge(100) == 0
    assert store.read().tally == before.tally


@pytest.mark.parametrize("step", ["before the total", "after it"])
def test_an_interrupted_fold_is_done_by_the_next(
    store: SqlMetrics, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for process in ("a" * 12, "b" * 12):
        store.write(process, some(returned=2), first=True, closed=False)

    class Killed(Exception):
        pass

    added = store._add_to_total

    def dies(*given: object) -> bool:
        if step == "after it":
            assert added(*given)  # type: ignore[arg-type]
        raise Killed

    monkeypatch.setattr(store, "_add_to_total", dies)
    with pytest.raises(Killed):
        store.fold(silent=0.0)
    monkeypatch.undo()
    assert attempts(store) == {"returned": 4}
    store.fold(silent=0.0)
    assert attempts(store) == {"returned": 4}
    assert not store.write("a" * 12, some(returned=3), first=False, closed=False)


def test_many_rows_are_folded_in_one_go(store: SqlMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "BATCH_SIZE", 2)
    for number in range(5):
        store.write(f"{number:012}", some(returned=1), first=True, closed=True)
    assert store.fold() == 5
    assert attempts(store) == {"returned": 5}


def test_two_folds_at_once_count_once(store: SqlMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write("a" * 12, some(returned=2), first=True, closed=True)
    store.write("b" * 12, some(returned=1), first=True, closed=False)
    total = store._read_total

    def beaten() -> object:
        found = total()
        monkeypatch.setattr(store, "_read_total", total)
        assert store.fold(silent=0.0) == 2
        return found

    monkeypatch.setattr(store, "_read_total", beaten)
    assert store.fold(silent=0.0) == 0
    assert attempts(store) == {"returned": 3}


def test_what_a_killed_process_had_not_written_is_counted_from_the_records(
    store: SqlMetrics, sql_records: SqlRecordStore, counting: Callable[[], Counting]
) -> None:
    """Each outcome is counted once, also one that began before the last write."""
    mine, other = counting(), counting()
    failed = Outcome(
        State.COOLING,
        Ended.FAILED,
        attempt=1,
        failures=1,
        crashes=0,
        retention=3600.0,
        retry_after=40.0,
        failure=Failure("E", "no", "a-rule", "why"),
    )
    count_outcome(mine, run(sql_records, mine, "written"))
    run(sql_records, mine, "begun")
    mine.observe(CrashSeen(**SUBJECT, crashes=1, host=None))
    mine.flush()
    run(sql_records, mine, "later")
    run(sql_records, mine, "failed", failed)
    count_outcome(other, run(sql_records, other, "of another"))
    other.flush()
    assert attempts(store) == {"returned": 2}
    store.fold(silent=0.0)
    found = store.read().tally
    assert found.counts["attempts", "t", "failed", "a-rule"] == 1
    assert found.counts["attempts", "t", "returned", ""] == 4
    assert found.counts["crashes", "t"] == 1
    assert sum(found.spans["run", "t"][:-1]) == 5
    assert found.spans["cooldown", "t"][-1] == 40 * counted.MICROSECONDS


def test_a_process_that_counted_as_dead_counts_nothing_twice(
    store: SqlMetrics, sql_records: SqlRecordStore, counting: Callable[[], Counting]
) -> None:
    mine = counting()
    count_outcome(mine, run(sql_records, mine, "one"))
    mine.flush()
    two = run(sql_records, mine, "two")
    count_outcome(mine, two)
    mine.observe(CrashSeen(**SUBJECT, crashes=1, host=None))
    store.fold(silent=0.0)
    assert attempts(store) == {"returned": 2}
    mine.flush()
    mine.flush()
    count_outcome(mine, run(sql_records, mine, "three"))
    mine.flush(closing=True)
    count_outcome(mine, run(sql_records, mine, "four"))
    mine.flush()
    assert attempts(store) == {"returned": 4}
    assert store.read().tally.counts["crashes", "t"] == 1


def test_a_claim_does_not_see_the_tag(
    sql_records: SqlRecordStore, counting: Callable[[], Counting]
) -> None:
    mine = counting()
    record = run(sql_records, mine, "k")
    assert sql_records.settle(record, DONE)
    tagged = sql_records.read(record.stored_key)
    assert tagged is not None
    assert tagged.lease_store == tag(mine._process, 1)
    again = make_call(record.stored_key, task="t", key="k", rerun=True)
    assert won(sql_records, again).generation == 1
