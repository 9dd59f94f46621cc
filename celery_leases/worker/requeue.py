"""Returns deliveries to the broker unchanged, and counts how often that was done for a call."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import Any, Final, NoReturn

from celery.exceptions import Reject

from celery_leases.signals import logger
from celery_leases.worker.delivery_queue import Routes, earlier_deliveries_of

MAX_COUNTED: Final = 1000

_requeued: OrderedDict[str, int] = OrderedDict()
"""By call id: how often this process has returned its deliveries, because the broker did not accept
a copy.
"""


def requeue_count(request: Any, call_id: str, routes: Routes) -> tuple[int, int | None]:
    """How often this message was returned to the broker, and how often its queue allows that;
    ``None``: no limit.
    """
    before = max(earlier_deliveries_of(request), _requeued.get(call_id, 0))
    return before, routes.delivery_limit(request)


def clear_count(call_id: str) -> None:
    """Forget the count of a call, because the broker has accepted a copy."""
    _requeued.pop(call_id, None)


def requeue_delivery(task: str, call_id: str, what: str, why: str) -> NoReturn:
    """Return the delivery to the broker, which delivers it again; *what* and *why* are logged."""
    times = _requeued.pop(call_id, 0) + 1
    _requeued[call_id] = times
    with suppress(KeyError):  # another thread may remove the same entry
        while len(_requeued) > MAX_COUNTED:
            _requeued.popitem(last=False)
    text = "%s[%s] %s, returned to the broker (time %d in this process): %s"
    logger.error(text, task, call_id, what, times, why)
    raise Reject(what, requeue=True) from None
