"""A process that holds many leases: ``python -m benchmarks.performance.holder LEASES SECONDS
SPREAD``.

Prints on one line of JSON the share of a core that it used, and its calls to the lease store.
"""

import json
import os
import sys
import threading
import time
from typing import Any

from benchmarks.performance.app import app
from celery_leases import LeasedTask
from celery_leases.worker.processes import process_of

TTL = 15.0


class Calls:
    """The calls of a lease store's ``renew``, and the last renewal of each lease."""

    def __init__(self, store: Any) -> None:
        self._renew = store.renew
        self._last: dict[str, float] = {}
        self.calls = self.renewals = 0
        self.latest = 0.0
        store.renew = self._noted

    def _noted(self, renewals: Any) -> Any:
        now = time.monotonic()
        self.calls += 1
        self.renewals += len(renewals)
        for renewal in renewals:
            self.latest = max(self.latest, now - self._last.get(renewal.token, now) - TTL / 3)
            self._last[renewal.token] = now
        return self._renew(renewals)


def main(leases: int, seconds: float, spread: float) -> None:
    """Hold *leases* leases, acquired within *spread* seconds, and observe their renewals."""
    app.conf.leases_eager_stores = True
    threading.stack_size(256 * 1024)
    over, begun = threading.Event(), threading.Semaphore(0)

    @app.task(name="held", base=LeasedTask, lease_key="{key}", lease_ttl=TTL, lease_on_lost="flag")
    def held(key: str) -> None:
        begun.release()
        over.wait()

    calls = Calls(process_of(app, eager=True).renewer._stores.leases)  # noqa: SLF001
    start = time.monotonic()
    for number in range(leases):
        threading.Thread(target=held.apply, args=[[f"{os.getpid()}-{number}"]], daemon=True).start()
        begun.acquire()
        time.sleep(max(0.0, start + spread * (number + 1) / leases - time.monotonic()))
    time.sleep(TTL / 3)
    calls.calls = calls.renewals = 0
    calls.latest = 0.0
    cpu, wall = time.process_time(), time.monotonic()
    time.sleep(seconds)
    share = (time.process_time() - cpu) / (time.monotonic() - wall)
    print(
        json.dumps(
            {"cpu": share, "calls": calls.calls, "renewals": calls.renewals, "latest": calls.latest}
        )
    )
    sys.stdout.flush()
    os._exit(0)  # without waiting for the bodies


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(float, sys.argv[2:4]))
