"""Helpers of the tests of the outbox: a worker, transactions that enqueue calls, and records."""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.pool import NullPool

from celery_leases.keys import stored_key
from celery_leases.outbox import calls as outbox
from tests.integration.deployments import Stage, got, stages
from tests.integration.terminal import Terminal

ORDERING = "tests.apps.outbox_tasks"
PG_REDIS = ("redis", "redis", "postgres")
PG_DATABASE = ("rabbit", "database", "postgres")
LITE_DATABASE = ("redis", "database", "sqlite")
TTL = 2.0


module_stage = stages(PG_REDIS, PG_DATABASE, LITE_DATABASE, home=ORDERING, env={"TTL": f"{TTL:g}"})
"""A worker of :mod:`tests.apps.outbox_tasks`."""


@pytest.fixture(scope="module")
def operator(module_stage: Stage) -> Terminal:
    return Terminal(ORDERING, module_stage.env)


@pytest.fixture(scope="module")
def engine(module_stage: Stage) -> Iterator[Engine]:
    made = create_engine(module_stage.database_url, poolclass=NullPool)
    if module_stage.record_store == "sqlite":
        event.listen(
            made, "connect", lambda connection, _: setattr(connection, "isolation_level", None)
        )
        event.listen(
            made, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE")
        )
    yield made
    made.dispose()


def driver(stage: Stage) -> Any:
    if stage.record_store == "sqlite":
        return sqlite3.connect(str(make_url(stage.database_url).database))
    url = make_url(stage.database_url).set(drivername="postgresql")
    return psycopg.connect(url.render_as_string(hide_password=False))


def record(stage: Stage, name: str, task: str = "order") -> dict[str, Any]:
    return stage.row(task, f"{task}:{name}")


def change(stage: Stage, name: str, values: str, task: str = "order") -> None:
    key = {"key": stored_key(f"{stage.home}.{task}", f"{task}:{name}")}
    with stage._engine.connect() as connection:
        written = f"UPDATE celery_leases_records SET {values} WHERE stored_key = :key"  # noqa: S608
        done = connection.execute(text(written), key)
        assert done.rowcount == 1


def let_be_due(stage: Stage, name: str) -> None:
    """As if the process that should publish had died some time ago."""
    change(stage, name, "publish_at = publish_at - 60000000")


def let_be_old(stage: Stage, name: str, task: str = "kept", *, unpublished: bool = False) -> None:
    """As if a record had not changed for an hour."""
    ago = "{0} = {0} - 3600000000"
    times = ", ".join(
        ago.format(column) for column in ("started_at", "finished_at", "retry_at", "published_at")
    )
    change(stage, name, times + ("" if unpublished else ", publish_at = NULL"), task)


def relayed(stage: Stage) -> int:
    """Run a relay; returns how many messages it has published."""
    return len(outbox.relay(stage.app).published)


def begins(stage: Stage, name: str) -> list[str]:
    """The calls that have run, in their order."""
    return [seen["id"] for seen in stage.events("begin", name=name)]


def by(name: str, call_id: str) -> str:
    return f"{name} by {call_id}"


def at_once(*steps: Callable[[], Any]) -> list[Any]:
    barrier, answers = threading.Barrier(len(steps)), {}

    def go(number: int, step: Callable[[], Any]) -> None:
        barrier.wait()
        answers[number] = step()

    threads = [threading.Thread(target=go, args=given) for given in enumerate(steps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[number] for number in range(len(steps))]


def rescued(stage: Stage, name: str, *, dry_run: bool = False) -> int:
    """Run a rescue; returns how many messages of a name it has published, or would publish."""
    found = outbox.stranded(stage.app) if dry_run else outbox.rescue(stage.app).published
    return sum(name in record.key or name in (record.call_id or "") for record in found)


def doubtful(stage: Stage, name: str) -> str:
    with pytest.raises(Exception, match="is not known"):
        got(stage.tasks.order.delay(name, None, "doubt"))
    assert record(stage, name)["state"] == "uncertain"
    return f"order:{name}"
