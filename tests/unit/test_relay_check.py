"""A worker warns about messages that wait for a relay, if no relay runs."""

import itertools
import logging
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from celery import Celery

from celery_leases import LeaseClient, LeasedTask
from celery_leases.errors import StoreUnavailable
from celery_leases.worker import processes
from celery_leases.worker.checks import relay, startup


@pytest.fixture
def app(tmp_path: Path) -> Celery:
    """An app whose records are in a file."""
    made = Celery("unrelayed", broker="memory://", set_as_current=False)
    made.conf.update(
        leases_url="database", leases_database_url=f"sqlite:///{tmp_path / 'records.db'}"
    )
    return made


@pytest.mark.parametrize("minutes", [4, 6])
def test_a_message_that_has_waited_for_five_minutes_is_reported(
    app: Celery,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    minutes: int,
) -> None:
    """A relay that runs each minute would have published it."""

    @app.task(base=LeasedTask, name="ship", shared=False, lease_key="order:{number}")
    def ship(number: int) -> None: ...

    records = processes.process_of(app).records
    with closing(sqlite3.connect(tmp_path / "records.db")) as connection:
        connection.execute("BEGIN IMMEDIATE")
        ship.delay_in(connection, 7)  # the commit of this connection cannot be observed
        connection.commit()
    later = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: later() + minutes * 60 * 10**9)
    with caplog.at_level(logging.WARNING, "celery_leases"):
        relay.warn_of_waiting(records)
    told = "the oldest for 6 minutes (ship, key order:7)" in caplog.text
    assert told is (minutes == 6)
    caplog.clear()
    processes.process_of(app).publisher.publish = lambda _: None
    assert LeaseClient.from_app(app).relay()
    relay.warn_of_waiting(records)
    assert not caplog.records
    processes.close_all()


class AWorker:
    """As much of Celery's worker as is asked for."""

    pool_cls = "celery.concurrency.solo:TaskPool"
    time_limit = soft_time_limit = None

    def __init__(self, app: Celery) -> None:
        self.app = app


def test_a_worker_looks_when_it_starts(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task(base=LeasedTask, name="ship", shared=False)
    def ship() -> None: ...

    looked: list[object] = []
    monkeypatch.setattr(relay, "warn_of_waiting", looked.append)
    startup.check_before_work(AWorker(app))
    assert len(looked) == 1


def test_a_worker_goes_on_looking_until_it_ends(app, monkeypatch) -> None:
    @app.task(base=LeasedTask, name="ship", shared=False)
    def ship() -> None: ...

    twice, looks = threading.Event(), itertools.count(1)

    def look(_: object) -> None:
        if next(looks) == 2:
            twice.set()
        raise StoreUnavailable("away", False)

    monkeypatch.setattr(relay, "CHECK_EVERY", 0.01)
    monkeypatch.setattr(relay, "warn_of_waiting", look)
    worker = AWorker(app)
    relay.watch(worker)
    relay.watch(worker)
    (thread,) = (one for one in threading.enumerate() if one.name == "celery_leases unrelayed")
    assert twice.wait(60)
    relay.stop(worker)
    thread.join(60)
    assert not thread.is_alive()
