"""DBOS: a queue in PostgreSQL; each job is a workflow of one step. As a program: one executor."""

import sys
import threading
import time
from typing import Any

import psycopg
from dbos import DBOS, DBOSClient

from benchmarks.performance import settings
from benchmarks.performance.body import work

QUEUE = "jobs"
VERSION = "1"
POLL = 0.02
"""The seconds between two polls of an executor; the default is 1."""
AT_ONCE = 32
"""How many workflows an executor runs at the same time."""


def launch(executor: str) -> None:
    """Consume the queue in threads of this process."""
    DBOS(
        config={
            "name": "bench",
            "system_database_url": settings.postgres_url(),
            "application_version": VERSION,
            "executor_id": executor,
            "log_level": "WARNING",
        }
    )

    @DBOS.step(name="step")
    def step(key: str, seconds: float) -> int:
        return work(key, seconds)

    @DBOS.workflow(name="job")
    def job(key: str, seconds: float) -> object:
        return step(key, seconds)

    DBOS.launch()
    DBOS.register_queue(
        QUEUE, worker_concurrency=AT_ONCE, polling_interval_sec=POLL, on_conflict="always_update"
    )


def prepare() -> None:
    """Create the tables."""
    launch("prepare")
    DBOS.destroy()


class Publisher:
    """The publisher."""

    def __init__(self) -> None:
        self._client = DBOSClient(
            system_database_url=settings.postgres_url(), application_name="bench"
        )
        self._database = psycopg.connect(settings.postgres_url(), autocommit=True)

    def publish(self, task: str, key: str, seconds: float) -> None:
        """Enqueue one job."""
        options: Any = {
            "workflow_name": task,
            "queue_name": QUEUE,
            "workflow_id": key,
            "app_version": VERSION,
        }
        self._client.enqueue(options, key, seconds)

    def settle(self) -> None:
        """Return when no job is left."""
        left = "SELECT count(*) FROM dbos.workflow_status WHERE status IN ('PENDING', 'ENQUEUED')"
        while self._database.execute(left).fetchone() != (0,):
            time.sleep(0.02)

    def answered(self, keys: list[str]) -> dict[str, float]:
        """When each job was done, in seconds since the epoch."""
        found = self._database.execute(
            "SELECT workflow_uuid, updated_at FROM dbos.workflow_status WHERE status = 'SUCCESS'"
        ).fetchall()
        return {key: moment / 1000 for key, moment in found if key in keys}


if __name__ == "__main__":
    launch(sys.argv[1])
    threading.Event().wait()
