"""Schedules of beat that are stored in a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery
from celery.schedules import schedule

from celery_leases.worker.checks.periodic import all_entries

redbeat = pytest.importorskip("redbeat", reason="celery-redbeat is not installed")


@pytest.fixture
def app(leases_redis_url: str) -> Iterator[Celery]:
    app = Celery("periodic", broker=leases_redis_url, set_as_current=False)
    app.conf.update(
        beat_scheduler="redbeat.RedBeatScheduler",
        redbeat_redis_url=leases_redis_url,
        redbeat_redis_options={"retry_period": -1},
    )
    yield app
    app.redbeat_redis.close()


def test_entries_of_redbeat_are_read(app: Celery) -> None:
    """Those that are enabled; none if its server does not answer."""
    for name, enabled in (("hourly", True), ("off", False)):
        entry = redbeat.RedBeatSchedulerEntry(
            name, "report", schedule(3600), args=["eu"], enabled=enabled, app=app
        )
        entry.save()
    [found] = all_entries(app)
    assert (found.name, found.task, found.args) == ("hourly", "report", ["eu"])
    app.redbeat_redis.connection_pool.reset()
    app.redbeat_redis.connection_pool.connection_kwargs.update(port=9, retry=None)
    assert list(all_entries(app)) == []
