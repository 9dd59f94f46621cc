"""What eager calls leave in the memory of their process."""

from __future__ import annotations

from typing import Any

from celery import Celery
from sqlalchemy import func, select

from celery_leases import LeasedTask
from celery_leases.stores import memory
from celery_leases.worker import processes


def test_eager_calls_keep_the_records_of_the_latest_keys_only(monkeypatch) -> None:
    app = Celery("eager", broker="memory://", set_as_current=False)
    runs: list[Any] = []

    @app.task(base=LeasedTask, bind=True, name="eager.work", lease_key="k:{number}", shared=False)
    def work(self: Any, number: int, calls: int = 0) -> int:
        runs.append(number)
        self.lease.effect("note", lambda _: number)
        for other in range(calls):
            work.apply((other,)).get()
        self.lease.check()
        return number

    app.finalize()
    kept, more = 20, 15
    monkeypatch.setattr(memory, "MAX_RECORDS", kept)
    assert app.tasks["eager.work"].apply((-1, kept + more)).get() == -1
    latest = kept + more - 1
    assert app.tasks["eager.work"].apply((latest,)).get() == latest
    assert runs.count(latest) == runs.count(-1) == 1
    records = processes.process_of(app, eager=True).records
    with records.database.engine.connect() as connection:
        for table in (records.tables.records, records.tables.effects):
            assert (
                kept
                <= connection.execute(select(func.count()).select_from(table)).scalar_one()
                <= kept + 1
            )
    processes.close_all()


def test_nothing_is_purged_beside_an_eager_call() -> None:
    """Its records have one connection: a thread that purged would use it in the middle of a
    statement.
    """
    app = Celery("eager", broker="memory://", set_as_current=False)
    assert processes.process_of(app, eager=True).renewer._purged is None
