"""The tasks of :mod:`tests.apps.cooling` in a worker that writes to the journal what Celery's
signals and Sentry report about them.
"""

import json
import os
from functools import partial

import sentry_sdk
from celery import signals
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.transport import Transport

from tests.apps.cooling import *  # noqa: F403
from tests.apps.cooling import app  # noqa: F401


def _signalled(name, sender=None, task_id=None, request=None, exception=None, reason=None, **_):
    error = repr(exception) if exception is not None else str(reason)
    _write_down(what="signal", name=name, id=task_id or (request or sender.request).id, error=error)


def _write_down(**event):
    line = json.dumps(event)
    fd = os.open(os.environ["JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(fd, f"{line}\n".encode())
    finally:
        os.close(fd)


for name in ("task_failure", "task_retry", "task_success"):
    getattr(signals, name).connect(partial(_signalled, name), weak=False)


class _Reports(Transport):
    """A Sentry transport that writes to the journal."""

    def capture_envelope(self, envelope):
        for event in filter(None, (item.get_event() for item in envelope.items)):
            types = [error["type"] for error in event.get("exception", {}).get("values", ())]
            call = event.get("tags", {}).get("celery_task_id")
            _write_down(what="sentry", id=call, types=types, level=event["level"])


sentry_sdk.init(
    dsn="http://key@127.0.0.1:9/1",
    transport=_Reports,
    integrations=[CeleryIntegration()],
    auto_enabling_integrations=False,  # each imports its library
)
