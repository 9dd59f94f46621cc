"""A web process of a demo: publishes calls for invoices, and writes their ids into the journal.

``python -m example_project.demo.web web-1 delay 2026-04 1842 1843``. With ``send_task`` it imports
no task, like a process that shares no code with the workers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from celery.result import AsyncResult

from example_project.celery import app
from example_project.demo import journal


def publisher(how: str) -> Callable[[int, str], AsyncResult]:
    """The function that publishes one call."""
    if how == "delay":
        from example_project.tasks import send_invoice

        delay: Callable[[int, str], AsyncResult] = send_invoice.delay
        return delay
    name = "example_project.tasks.send_invoice"
    return lambda customer, month: app.send_task(
        name, kwargs={"customer_id": customer, "month": month}
    )


def main(web: str, how: str, month: str, *customers: str) -> None:
    """Publish the calls, and write time and ids into the journal."""
    publish = publisher(how)
    began = time.monotonic()
    calls = [
        (f"invoice:{customer}:{month}", publish(int(customer), month).id) for customer in customers
    ]
    journal.write("Asked", t=began, worker=web, how=f"{how}()", key=calls[0][0], calls=calls)


if __name__ == "__main__":
    main(*sys.argv[1:])
