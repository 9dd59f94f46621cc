"""The worker's main process: an owner token for each delivery, and no expiry for a call that may be running."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from celery.worker.request import Request

TOKEN = "celery_leases_token"  # noqa: S105 - the name of a field, not a password
"""Where the token travels to the pool child: a field of the request, and so of ``task.request``."""

WATCHED = "celery_leases_watched"
"""Tells the pool child, in the same way, whether the worker sends task events now."""

HEADER = "celery_leases"
"""The message header that pins key and fingerprint of a call, and names its copies."""


class LeaseRequest(Request):
    """A Celery request that carries the owner token of the attempt it may become.

    The token is made here, not in the child, so that the process that outlives a killed child knows whose lease it was.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request_dict[TOKEN] = uuid4().hex
        events = self._eventer
        # Without -E the dispatcher sends events of workers only; Flower may switch it at any time.
        self._request_dict[WATCHED] = bool(events and events.enabled and (not events.groups or "task" in events.groups))

    def maybe_expire(self) -> Any:
        """Leave the expiry of a copy to the child, which can see whether the call has begun.

        Expiring a copy would revoke the call while it runs: both have one id.
        """
        if self.delivery_info.get("redelivered") or HEADER in self._request_dict:
            return None
        return super().maybe_expire()
