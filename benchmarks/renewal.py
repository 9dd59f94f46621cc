"""How late renewals are while a body blocks its process: ``python -m benchmarks.renewal [ttl]``.

It takes minutes. A renewal is due a third of the ttl after the previous one was sent. Each line is
one process with one body and leases in SQLite; it shows by how many milliseconds renewals were
late. *main* is the main thread, as in a prefork child or solo. *python* computes, *held* holds the
GIL in calls of 2 s, and *blocked* blocks gevent's hub in calls of 3 s that let threads run.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SITUATIONS = [
    (pool, what) for pool in ("main", "threads", "gevent") for what in ("idle", "python", "held")
]
SITUATIONS.append(("gevent", "blocked"))
SECONDS = 12.0
HELD = 2
BLOCKED = 3.0


def main(ttl: float) -> None:
    """Run each situation in its own process, and print a table."""
    print(f"ttl {ttl:g} s, renewed every {ttl / 3:.2f} s; late by, in ms:")
    for pool, what in SITUATIONS:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.renewal", str(ttl), pool, what]
        late = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[
                -1
            ]
        )
        figures = (
            f"median {statistics.median(late):7.1f}  max {max(late):7.1f}" if late else "no renewal"
        )
        print(f"  {pool:8}{what:9}{len(late):3} renewals  {figures}", flush=True)


def measure(ttl: float, pool: str, what: str) -> list[float]:
    """By how many milliseconds each renewal was late."""
    if pool == "gevent":
        from gevent import monkey

        monkey.patch_all()
    import threading

    from celery import Celery

    from celery_leases import LeasedTask
    from celery_leases.concurrency import os_threads
    from celery_leases.worker.processes import process_of

    app = Celery("renewal", broker="memory://", backend="cache+memory://")
    app.conf.update(leases_url="database", leases_eager_stores=True)
    app.conf.leases_database_url = f"sqlite:///{Path(tempfile.mkdtemp()) / 'leases.db'}"
    busy = _busy(what, os_threads.allocate_lock())

    @app.task(base=LeasedTask, lease_ttl=ttl, lease_on_lost="flag")
    def body() -> None:
        over = time.monotonic() + SECONDS
        while time.monotonic() < over:
            busy()

    process = process_of(app, eager=True)
    leases = process.renewer._stores.leases  # noqa: SLF001
    renew = leases.renew
    late: list[float] = []

    def timed(renewals: Any) -> Any:
        now = os_threads.boot_clock()
        late.extend(
            1000 * (now - held_lease.due)
            for held_lease in list(process.renewer._held_leases.values())  # noqa: SLF001
        )
        return renew(renewals)

    leases.renew = timed  # type: ignore[method-assign]
    if pool == "threads":
        thread = threading.Thread(target=body.apply)
        thread.start()
        thread.join()
    else:
        body.apply()
    return late


def _busy(what: str, lock: Any) -> Callable[[], object]:
    """What the body does in its loop."""
    lock.acquire()
    if what == "held":
        return _hold
    if what == "blocked":
        return lambda: lock.acquire(timeout=BLOCKED)
    if what == "python":
        return lambda: sum(range(1000))
    return lambda: time.sleep(0.1)


def _hold() -> None:
    ctypes.PyDLL(None).sleep(HELD)
    time.sleep(0.1)


if __name__ == "__main__":
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    if len(sys.argv) > 2:
        print(json.dumps(measure(seconds, *sys.argv[2:4])))
    else:
        main(seconds)
