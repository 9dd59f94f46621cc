"""Forks while a prefork worker prepares its pool, and runs tasks in each child.

``python -m tests.apps.forked_children`` prints on one line of JSON what the children have seen. The
stores are those of ``LEASES_URL`` and ``LEASES_DATABASE_URL``.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import uuid4

from celery import signals
from celery.app.trace import setup_worker_optimizations

from celery_leases import Cooldown, LeasedTask
from tests.apps.count_calls import app, runner

STEPS = (
    *("check_before_work", "_make", "open_process", "SqlRecordStore.check", "Database._once"),
    *("SqlRecordStore.identity", "Process.share_statements", "Database._compile", "Process.close"),
    *("prepare_forks", "Database.with_engine", "_before_pool"),
)
"""A child is forked at the first call of each of these functions."""

OF_MAIN_PROCESS = ("celery_leases.worker.request", "celery_leases.worker.fetching")
"""Modules that the main process uses after its forks."""


@app.task(name="rich", bind=True, base=LeasedTask, lease_key="{key}")
def rich(self: Any, key: str) -> Any:
    self.lease.save_progress(1)
    return self.lease.effect("charge", lambda _: len(key))


@app.task(name="failing", base=LeasedTask, lease_key="{key}")
def failing(key: str) -> None:
    raise ValueError(key)


@app.task(name="cooling", base=LeasedTask, lease_key="{key}")
def cooling(key: str) -> None:
    raise Cooldown("1h", reason=key)


class Worker:
    """The attributes of a starting worker that are read."""

    pool_cls = "prefork"
    soft_time_limit = time_limit = None
    concurrency = 1
    app = app


def in_child(ask: Callable[[], Any]) -> Any:
    """What *ask* returns in a forked process; ``None`` if it fails or hangs."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        signal.alarm(20)
        try:
            os.write(writing, json.dumps(ask()).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    return json.loads(said) if os.waitpid(pid, 0)[1] == 0 else None


def run_tasks() -> bool:
    for _ in range(2):  # the second one on statements that are compiled in any case
        runner("counted")(uuid4().hex)
    return True


def fork_at_each_step(prepare: Callable[[], None]) -> dict[str, Any]:
    """Prepare, and return for each step whether a child could run tasks."""
    seen: dict[str, Any] = dict.fromkeys(STEPS)

    def hook(frame: Any, event: str, _: Any) -> None:
        step = frame.f_code.co_qualname
        if event == "call" and step in seen and seen[step] is None:
            sys.setprofile(None)
            seen[step] = in_child(run_tasks) is not None
            sys.setprofile(hook)

    sys.setprofile(hook)
    try:
        prepare()
    finally:
        sys.setprofile(None)
    return seen


def prepare() -> None:
    worker = Worker()
    signals.worker_init.send(sender=worker)
    signals.celeryd_after_setup.send(sender="here", instance=worker, conf=app.conf)


def state_of_child() -> dict[str, Any]:
    """What a child has before its first task, and what its first tasks make."""
    from celery_leases.stores.sql.database import Database
    from celery_leases.worker.processes import process_of

    files = [
        str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()
    ]
    found = {
        "sockets": sum(name.startswith("socket:") for name in files),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "frozen": gc.get_freeze_count() > 0,
    }
    process = process_of(app, eager=False)
    modules = set(sys.modules)
    with mock.patch.object(Database, "_by_sqlalchemy", side_effect=AssertionError("compile it")):
        run_tasks()
    runner("rich")(uuid4().hex)
    runner("failing", succeeds=False)(uuid4().hex)
    runner("cooling", succeeds=False)(uuid4().hex)
    return found | {
        "shares trips": process.records._trips is not None,
        "own host": process.host.endswith(f"/{os.getpid()}"),
        "random": process.rand(),
        "imported": [
            name
            for name in sorted(set(sys.modules) - modules)
            if name.partition(".")[0] not in ("celery", "kombu")
        ],
    }


def with_other_settings() -> str:
    from celery_leases.worker.processes import process_of

    app.conf.leases_prefix = "another"
    run_tasks()
    return process_of(app, eager=False).settings.prefix


if __name__ == "__main__":
    from celery_leases.worker import processes

    app.finalize()
    setup_worker_optimizations(app)
    processes.process_of(app).records.migrate()
    processes.close_all()
    steps = fork_at_each_step(prepare)
    children = [in_child(state_of_child) for _ in range(2)]
    said = {"steps": steps, "children": children, "prefix": in_child(with_other_settings)}
    said["unloaded"] = [name for name in OF_MAIN_PROCESS if name not in sys.modules]
    said["main"] = run_tasks()
    print(json.dumps(said), flush=True)
    os._exit(0)  # without waiting for the renewing threads
