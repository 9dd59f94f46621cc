"""The tasks of the example: invoices that are mailed once, and document summaries that are paid for
once.

One invoice per customer and month is mailed, however often it is asked for. A summary comes from a
paid model that is rate limited now and then: whoever asks meanwhile is told when to ask again, and
the model is left alone.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from celery_leases import LeasedTask
from celery_leases.rules import CooldownPolicy
from example_project import app, jsonlines

OUTBOX = Path(os.environ.get("OUTBOX") or Path(tempfile.gettempdir()) / "outbox.jsonl")
"""What has been mailed, one JSON object per line."""

RENDER_SECONDS = float(os.environ.get("RENDER_SECONDS", "2"))
MODEL_URL = os.environ.get("MODEL_URL", "http://localhost:8099")
COOLDOWN_SECONDS = float(os.environ.get("COOLDOWN_SECONDS", "300"))
PATIENCE = 30.0
"""Seconds to wait for the model."""


@app.task(base=LeasedTask, bind=True, lease_key="invoice:{customer_id}:{month}")
def send_invoice(self: Any, customer_id: int, month: str) -> dict[str, Any]:
    """Render one invoice and mail it; every caller gets the same answer, from the one run that
    mailed it.
    """
    pages = render(customer_id, month)
    self.lease.check()  # still ours? A process that slept through its lease stops here, before the mail leaves
    jsonlines.append(
        OUTBOX, {"customer": customer_id, "month": month, "pages": pages, "fence": self.lease.fence}
    )
    return {
        "mailed_by": f"{socket.gethostname()}/{os.getpid()}",
        "customer": customer_id,
        "month": month,
    }


@app.task(
    base=LeasedTask,
    lease_key="document:{document_id}",
    lease_cooldown_group="model:{model}",  # a rate limit is the model's, whichever document meets it
    lease_resume="never",  # a person waits: tell them when to press the button again
)
def write_summary(document_id: int, model: str) -> dict[str, Any]:
    """Have one document summarised, for the person who has pressed the button."""
    return ask_model(document_id, model, account="leases")


@app.task(
    base=LeasedTask,
    lease_key="document:{document_id}",
    lease_cooldown_group="model:{model}",
    lease_resume="always",  # nobody waits: what fails comes back, also of an answer that nobody understands,
    lease_on_cooling="reschedule",  # and what comes while the model cools down waits as well
    lease_cooldown=CooldownPolicy(COOLDOWN_SECONDS, jitter=0),
)
def write_summary_overnight(document_id: int, model: str) -> dict[str, Any]:
    """Have one document summarised, sometime this night."""
    return ask_model(document_id, model, account="leases")


def render(customer_id: int, month: str) -> list[str]:
    """Make the pages, which takes a while."""
    time.sleep(RENDER_SECONDS)
    return [f"Invoice {month} for customer {customer_id}"]


def ask_model(document_id: int, model: str, account: str) -> dict[str, Any]:
    """One call of the paid model. Raises what urllib raises, and KeyError or ValueError for an
    unusable answer.
    """
    question = json.dumps({"document": document_id, "model": model}).encode()
    request = Request(f"{MODEL_URL}/summaries", question, {"Authorization": f"Bearer {account}"})  # noqa: S310 - http
    with urlopen(request, timeout=PATIENCE) as answer:  # noqa: S310 - the address is ours
        return {"document": document_id, "summary": json.load(answer)["summary"]}
