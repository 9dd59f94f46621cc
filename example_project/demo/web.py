"""A web process of a demo: ask for the invoices of some customers, and note the ids of the calls in
the journal.

``python -m example_project.demo.web web-1 delay 2026-04 1842 1843``. With ``send_task`` it imports
no task, as a process that shares no code with the workers would.
"""

from __future__ import annotations

import sys
import time

from example_project import app
from example_project.demo import journal


def ask(how: str, month: str, customers: list[int]) -> list[tuple[str, str]]:
    """Publish one call per customer; key and id of each."""
    calls = []
    for customer in customers:
        if how == "delay":
            from example_project.tasks import send_invoice

            call = send_invoice.delay(customer, month)
        else:
            call = app.send_task(
                "example_project.tasks.send_invoice",
                kwargs={"customer_id": customer, "month": month},
            )
        calls.append((f"invoice:{customer}:{month}", call.id))
    return calls


def main(web: str, how: str, month: str, *customers: str) -> None:
    """Ask, and note when and under which ids."""
    began = time.monotonic()
    calls = ask(how, month, [int(customer) for customer in customers])
    journal.write("Asked", t=began, worker=web, how=f"{how}()", key=calls[0][0], calls=calls)


if __name__ == "__main__":
    main(*sys.argv[1:])
