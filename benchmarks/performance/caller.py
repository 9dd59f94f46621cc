"""The caller of one contender, and a tracer of its tasks: a process that runs actions from stdin.

Each line is a JSON object with ``do``, the name of an action, and its arguments. The answer is one
line of JSON.
"""

import cProfile
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from uuid import uuid4

from benchmarks.performance import settings

SETTLED_WITHIN = 60.0
LOOKS = 2
"""How often the queue must be found empty: for a moment, a message that a worker has taken is
neither in the queue nor recorded as unacknowledged.
"""


class Publisher(Protocol):
    """Publishes the jobs of a contender."""

    def publish(self, task: str, key: str, seconds: float) -> None:
        """Publish one job."""

    def settle(self) -> None:
        """Return when no job is left."""

    def answered(self, keys: list[str]) -> dict[str, float]:
        """When each job was done, if the contender itself records that."""


class CeleryPublisher:
    """The publisher of a contender that uses Celery."""

    def __init__(self) -> None:
        from benchmarks.performance.app import app

        self._app = app
        self._channel: Any = app.connection_for_write().channel()

    def publish(self, task: str, key: str, seconds: float) -> None:
        """Publish one message."""
        self._app.tasks[task].apply_async((key, seconds) if task != "other" else (key,))

    def settle(self) -> None:
        """Return when every message is acknowledged; raises TimeoutError."""
        until, empty = time.monotonic() + SETTLED_WITHIN, 0
        while empty < LOOKS:
            left = self._channel.client.llen("celery") or self._channel.client.hlen("unacked")
            empty = 0 if left else empty + 1
            if time.monotonic() > until:
                raise TimeoutError("messages are left")
            time.sleep(0.01)

    def answered(self, keys: list[str]) -> dict[str, float]:
        """Nothing: the journal has these times."""
        return {}


class Tracer:
    """Runs tasks as a pool child does, without a worker."""

    def __init__(self) -> None:
        from celery.app.trace import build_tracer, setup_worker_optimizations

        from benchmarks.performance.app import app, contender

        app.set_current()
        app.finalize()
        setup_worker_optimizations(app)
        self._trace = build_tracer("job", app.tasks["job"], app=app)
        self._more: Callable[[], Mapping[str, object]] = getattr(contender, "in_request", dict)

    def run(self, key: str) -> None:
        """One task without work in its body; raises RuntimeError when it does not succeed."""
        request = {
            "id": str(uuid4()),
            "task": "job",
            "lang": "py",
            "args": [key, 0.0],
            "kwargs": {},
            "argsrepr": "()",
            "kwargsrepr": "{}",
            "retries": 0,
            "timelimit": [None, None],
            **dict.fromkeys(
                ("expires", "eta", "group", "chain", "chord", "callbacks", "errbacks", "parent_id")
            ),
            "root_id": "root",
            "ignore_result": True,
            "is_eager": False,
            "called_directly": False,
            "hostname": "here",
            "replaced_task_nesting": 0,
            "stamped_headers": None,
            "stamps": {},
            "delivery_info": {
                "exchange": "",
                "routing_key": "celery",
                "priority": 0,
                "redelivered": False,
            },
            **self._more(),
        }
        traced = self._trace(request["id"], request["args"], {}, request)
        if traced.info is not None:
            raise RuntimeError(f"the task did not succeed: {traced}")


class Caller:
    """The actions."""

    def __init__(self) -> None:
        self._publisher: Publisher | None = None
        self._tracer: Tracer | None = None

    @property
    def publisher(self) -> Publisher:
        """Created when it is first used."""
        if self._publisher is None:
            if settings.given(settings.CONTENDER) == "dbos":
                self._publisher = importlib.import_module(
                    "benchmarks.performance.contenders.dbos"
                ).Publisher()
            else:
                self._publisher = CeleryPublisher()
        return self._publisher

    @property
    def tracer(self) -> Tracer:
        """Created when it is first used."""
        if self._tracer is None:
            self._tracer = Tracer()
        return self._tracer

    def publish(self, keys: list[str], task: str = "job", seconds: float = 0.0) -> dict[str, float]:
        """Publish one job for each key; returns the start (epoch) and the CPU used, in seconds."""
        publisher = self.publisher
        cpu, began = time.process_time(), time.time()
        for key in keys:
            publisher.publish(task, key, seconds)
        return {"began": began, "cpu": time.process_time() - cpu}

    def settle(self) -> None:
        """Return when no job is left."""
        self.publisher.settle()

    def answered(self, keys: list[str]) -> dict[str, float]:
        """When each job was done, if the contender itself records that."""
        return self.publisher.answered(keys)

    def trace(self, keys: list[str]) -> dict[str, float]:
        """Run one task for each key in this process; returns CPU of all threads and time, both in
        seconds per task.
        """
        tracer = self.tracer
        cpu, wall = time.process_time(), time.perf_counter()
        for key in keys:
            tracer.run(key)
        return {
            "cpu": (time.process_time() - cpu) / len(keys),
            "wall": (time.perf_counter() - wall) / len(keys),
        }

    def calls(self, keys: list[str]) -> float:
        """Run one task for each key; returns Python and built-in calls per task, by cProfile."""
        profile = cProfile.Profile()
        for key in keys:
            profile.runcall(self.tracer.run, key)
        counts = (entry.callcount for entry in profile.getstats())
        return sum(counts) / len(keys) - 1  # ``runcall`` itself is one


def main() -> None:
    """Run actions until stdin ends."""
    caller = Caller()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        action = json.loads(line)
        print(json.dumps(getattr(caller, action.pop("do"))(**action)), flush=True)
    os._exit(0)  # without waiting for the renewing threads


if __name__ == "__main__":
    main()
