"""The tasks of the example: invoices that are mailed once, and document summaries that are paid for
once.

One invoice per customer and month is mailed, however often the task is called. A summary comes from
a paid model that is rate limited now and then. During a rate limit the model is not called, and
callers learn when they may call again.
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

from celery_leases import Failures, LeasedTask
from celery_leases.rules import CooldownPolicy
from example_project.celery import app

OUTBOX = Path(os.environ.get("OUTBOX") or Path(tempfile.gettempdir()) / "outbox.jsonl")
"""The mailed invoices, one JSON object per line."""

RENDER_SECONDS = float(os.environ.get("RENDER_SECONDS", "2"))
MODEL_URL = os.environ.get("MODEL_URL", "http://localhost:8099")
COOLDOWN_SECONDS = float(os.environ.get("COOLDOWN_SECONDS", "300"))
PATIENCE = 30.0
"""Seconds to wait for the model."""


@app.task(base=LeasedTask, bind=True, lease_key="invoice:{customer_id}:{month}")
def send_invoice(self: Any, customer_id: int, month: str) -> dict[str, Any]:
    """Render one invoice and mail it; every caller gets the result of the run that mailed it."""
    pages = render(customer_id, month)
    self.lease.check()  # a process that was paused for longer than its lease stops here, before the mail is sent
    mail({"customer": customer_id, "month": month, "pages": pages, "fence": self.lease.fence})
    return {
        "mailed_by": f"{socket.gethostname()}/{os.getpid()}",
        "customer": customer_id,
        "month": month,
    }


@app.task(
    base=LeasedTask,
    lease_key="document:{document_id}",
    lease_group="model:{model}",  # a rate limit concerns all documents of the model
    lease_failures=Failures(
        resume="never"
    ),  # a person waits, and presses the button again after the cooldown
)
def write_summary(document_id: int, model: str) -> dict[str, Any]:
    """Let the model summarise one document, for the person who pressed the button."""
    return ask_model(document_id, model, account="leases")


@app.task(
    base=LeasedTask,
    lease_key="document:{document_id}",
    lease_group="model:{model}",
    lease_failures=Failures(
        cooldown=CooldownPolicy(COOLDOWN_SECONDS, jitter=0), resume="always"
    ),  # nobody waits: every failed call runs again by itself
    lease_on_busy="wait",  # calls that arrive during a cooldown wait too
)
def write_summary_overnight(document_id: int, model: str) -> dict[str, Any]:
    """Let the model summarise one document, some time this night."""
    return ask_model(document_id, model, account="leases")


def render(customer_id: int, month: str) -> list[str]:
    """Make the pages; this takes some time."""
    time.sleep(RENDER_SECONDS)
    return [f"Invoice {month} for customer {customer_id}"]


def mail(letter: dict[str, Any]) -> None:
    """Append a letter to the outbox in one write: a killed process leaves a whole line or none."""
    with OUTBOX.open("ab", buffering=0) as outbox:
        outbox.write(json.dumps(letter).encode() + b"\n")


def ask_model(document_id: int, model: str, account: str) -> dict[str, Any]:
    """Call the paid model once. Raises the errors of urllib, and KeyError or ValueError for an
    unusable response.
    """
    question = json.dumps({"document": document_id, "model": model}).encode()
    request = Request(f"{MODEL_URL}/summaries", question, {"Authorization": f"Bearer {account}"})  # noqa: S310 - http
    with urlopen(request, timeout=PATIENCE) as answer:  # noqa: S310 - the address is ours
        return {"document": document_id, "summary": json.load(answer)["summary"]}
