"""Deployments whose workers and servers a test may kill or pause."""

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from celery_leases.decide.answers import Holder
from celery_leases.errors import StoreUnavailable
from celery_leases.keys import stored_key
from celery_leases.ops.client import OperatorClient
from celery_leases.testing.waits import wait_until
from tests.integration.deployments import PATIENCE, Stage
from tests.support.workers import LocalWorker

FAILING = "tests.apps.leased_failpoints"
RESCHEDULE_DELAY = 0.5
"""How long after the end of the lease a copy of the holder's call arrives at the latest."""


class Scene(Stage):
    """A :class:`Stage` with leases of *ttl* and a visibility timeout of *visibility* seconds.

    ``workers`` are all started workers; they are stopped at the end. ``failpoint`` is a step of
    :mod:`tests.apps.leased_failpoints` at which one process dies or waits, once.
    """

    def __init__(
        self,
        combination: tuple[str, ...],
        urls: Mapping[str, str],
        directory: Path,
        *,
        ttl: float = 2,
        visibility: float = 2,
        concurrency: int = 1,
        log_level: str = "INFO",
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        given = {"TTL": f"{ttl:g}", "VISIBILITY": f"{visibility:g}", "PREFETCH": "1"}
        self.ttl = ttl
        super().__init__(
            combination,
            urls,
            directory,
            env=given | dict(env or {}),
            worker={"concurrency": concurrency, "log_level": log_level},
            **options,
        )
        self.concurrency = concurrency
        self.workers = [self.worker]

    def start(self) -> LocalWorker:
        return self.worker.start()

    def another(self, *, env: Mapping[str, str] | None = None, **options: Any) -> LocalWorker:
        made = self.new_worker(
            **{"concurrency": self.concurrency, "env": self.env | dict(env or {})} | options
        )
        self.workers.append(made)
        return made.start()

    def kill_worker(self) -> None:
        """SIGKILL the first worker's main process, and wait until its children have ended too."""
        children = [Path(f"/proc/{pid}") for pid in self.worker.children()]
        self.worker.kill()
        self.worker.wait(20)
        wait_until(
            lambda: not any(child.exists() for child in children),
            20,
            "the children of a dead worker to end",
        )

    def close(self) -> None:
        for worker in self.workers:
            worker.teardown()
        super().close()

    @cached_property
    def client(self) -> OperatorClient:  # type: ignore[override]
        return OperatorClient(self.env["LEASES_URL"], self.database_url)

    # -- failpoints --------------------------------------------------------------------------------

    def failpoint(self, step: str, *, times: int = 1) -> dict[str, str]:
        """The environment for a worker of ``tests.apps.leased_failpoints`` that dies at *step*."""
        return {
            "FAILPOINT": step,
            "FAILPOINT_TIMES": str(times),
            "FAILPOINT_FILE": str(self.directory / "failed"),
        }

    def wait_until_failed(self, step: str, number: int = 1) -> None:
        """Return when *number* processes have reached the failpoint."""
        self.wait_for("failpoint", number, step=step)

    # -- logs and records --------------------------------------------------------------------------

    def logs(self) -> str:
        return "\n".join(worker.full_log() for worker in self.workers)

    def log(self, about: str) -> list[str]:
        return [line for line in self.logs().splitlines() if about in line]

    def known(self, task: str, name: str) -> dict[str, Any]:
        """The row without its history, with a column for each field of its details."""
        row = self.row(task, f"{task}:{name}")
        return {field: value for field, value in row.items() if field not in ("details", "history")}

    def holder(self, task: str, key: str) -> Holder | None:
        """The holder of a live lease of the key; ``None`` if the stores do not answer."""
        with contextlib.suppress(RedisError, SQLAlchemyError, OSError, StoreUnavailable):
            return self.client._leases.holder(stored_key(f"{self.home}.{task}", key))
        return None

    def wait_until_free(self, task: str, key: str, timeout: float = PATIENCE) -> float:
        """Wait until the key has no lease; returns the time (``time.monotonic``)."""
        wait_until(lambda: not self.is_held(task, key), timeout, f"the lease of {key} to end")
        return time.monotonic()

    def done_once(self, task: str, name: str, *, ends: int = 1, crashes: int = 0) -> dict[str, Any]:
        """Wait until the row is done, the queue is empty, and *ends* bodies have ended."""
        row = self.wait_for_state(task, f"{task}:{name}", "done")
        assert len(self.events("end", name=name)) == ends, self.events(name=name)
        assert row["crashes"] == 0  # a success resets the crash count
        seen = [
            line
            for line in self.log(f"key {task}:{name}:")
            if "without reporting an outcome" in line or "nothing was heard of it" in line
        ]
        assert len(seen) == crashes, seen
        return row


def corrected(row: dict[str, Any]) -> dict[str, Any]:
    """*row* of :meth:`Scene.known` after the lost attempt was heard of."""
    return {**row, "previous_ended": "lost"}


def kill(pid: int) -> float:
    """SIGKILL one process; returns the time."""
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()
