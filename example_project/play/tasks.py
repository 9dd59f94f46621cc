"""The task of ``make play``: reads a document page by page, then pays for its summary. It exists
once with leases and once on plain Celery.
"""

from __future__ import annotations

import os
import time
from typing import Any
from uuid import uuid4

from celery.utils.log import get_task_logger

from celery_leases import Failures, LeasedTask, Uncertain
from celery_leases.rules import Rules, cooldown
from example_project.celery import app
from example_project.demo.json_over_http import Refused, ask

PROVIDER_URL = os.environ.get("PROVIDER_URL", "http://localhost:8099")
log = get_task_logger(__name__)

PAGES = 6
SECONDS_PER_PAGE = 0.4
PATIENCE = 6.0
"""Seconds to wait for the provider, which takes up to 5."""

GROUP = "provider"
KEY = "summary:{document}"

# By the default rules a key whose request may have been executed cools down for a minute. Here the
# wait is shorter, because a person watches.
RULES = (
    Rules.default()
    .on(exc=TimeoutError, to=cooldown("4s", ambiguous=True), name="no answer")
    .on(status=500, to=cooldown("4s", ambiguous=True), name="server error")
)


@app.task(
    base=LeasedTask,
    bind=True,
    lease_key=KEY,
    lease_outbox="once",  # a second press gets the first call, and a lost message can be published again
    lease_group=GROUP,  # a rate limit concerns all documents
    lease_failures=Failures(RULES, resume="always"),  # a call that failed runs again by itself
)
def summarise(self: Any, document: int) -> dict[str, Any]:
    """Read the document, then pay for its summary once."""
    for page in self.lease.each(range(PAGES), name="pages", every=1):
        read(page)
    summary = self.lease.effect(
        "summary",
        lambda key: buy_summary(document, key, account="leases"),
        reference=lambda reply: reply["id"],
        verify=look_up,
        verify_after=2,
    )
    return {"document": document, "summary": summary.value["summary"]}


@app.task(
    acks_late=True,
    reject_on_worker_lost=True,
    autoretry_for=(Exception,),
    retry_backoff=True,  # after 1, 2, 4 and 8 s
    retry_jitter=False,
    max_retries=4,
)
def summarise_plain(document: int) -> dict[str, Any]:
    """The same on plain Celery, with its late acknowledgement and its own retries."""
    for page in range(PAGES):
        read(page)
    reply = buy_summary(document, uuid4().hex, account="plain")
    return {"document": document, "summary": reply["summary"]}


def read(page: int) -> None:
    """Read one page; this takes some time."""
    log.info("reads page %d", page + 1)
    time.sleep(SECONDS_PER_PAGE)


def buy_summary(document: int, key: str, account: str) -> Any:
    """Make one paid call. Raises Refused, and TimeoutError if there is no answer."""
    headers = {"Authorization": f"Bearer {account}", "Idempotency-Key": key}
    question = {"document": document}
    return ask(
        f"{PROVIDER_URL}/summaries", question, method="POST", headers=headers, timeout=PATIENCE
    )


def look_up(key: str) -> Any:
    """The summary that was charged under an idempotency key, or ``None``. Raises Uncertain if the
    provider offers no look-up.
    """
    try:
        return ask(f"{PROVIDER_URL}/summaries/{key}", timeout=PATIENCE)
    except Refused as error:
        if error.status == 404:
            return None
        if error.status == 501:
            raise Uncertain("the provider offers no look-up") from error
        raise
