"""The tasks of the example: one invoice per customer and month is mailed, whoever asks and however often."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from celery_leases import LeasedTask
from example_project import app

OUTBOX = Path(os.environ.get("OUTBOX") or Path(tempfile.gettempdir()) / "outbox.jsonl")
"""What has been mailed, one JSON object per line."""

RENDER_SECONDS = float(os.environ.get("RENDER_SECONDS", "2"))


@app.task(base=LeasedTask, bind=True, lease_key="invoice:{customer_id}:{month}")
def send_invoice(self: Any, customer_id: int, month: str) -> dict[str, Any]:
    """Render one invoice and mail it; every caller gets the same answer, from the one run that mailed it."""
    pages = render(customer_id, month)
    self.lease.check()  # still ours? A process that slept through its lease stops here, before the mail leaves
    mail({"customer": customer_id, "month": month, "pages": pages, "fence": self.lease.fence})
    return {"mailed_by": f"{socket.gethostname()}/{os.getpid()}", "customer": customer_id, "month": month}


def render(customer_id: int, month: str) -> list[str]:
    """Make the pages, which takes a while."""
    time.sleep(RENDER_SECONDS)
    return [f"Invoice {month} for customer {customer_id}"]


def mail(letter: dict[str, Any]) -> None:
    """Append *letter* to the outbox in one write, so that a process that is killed leaves a whole line or none."""
    line = json.dumps(letter).encode() + b"\n"
    outbox = os.open(OUTBOX, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(outbox, line)
    finally:
        os.close(outbox)
