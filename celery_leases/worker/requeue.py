"""Deliveries that are returned to the broker unchanged, and how often that may be done."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import Any, Final, NoReturn

from celery.exceptions import Reject

from celery_leases.signals import logger
from celery_leases.worker.return_routes import Routes, deliveries_of

KEPT: Final = 1000

_given_back: OrderedDict[str, int] = OrderedDict()
"""How often this process has returned the deliveries of calls whose copies the broker did not
accept.
"""


def spent(request: Any, call_id: str, routes: Routes) -> tuple[int, int | None]:
    """How often this message has been returned, and how often its queue allows that, if it has a
    limit.
    """
    before = max(deliveries_of(request), _given_back.get(call_id, 0))
    return before, routes.delivery_limit(request)


def taken(call_id: str) -> None:
    """Forget how often the deliveries of a call were returned: the broker has accepted a copy."""
    _given_back.pop(call_id, None)


def give_back(task: str, call_id: str, what: str, why: str) -> NoReturn:
    """Return the delivery to the broker, which delivers it again; the log has *what* happened, and
    *why*.
    """
    times = _given_back.pop(call_id, 0) + 1
    _given_back[call_id] = times
    with suppress(KeyError):  # other threads do the same
        while len(_given_back) > KEPT:
            _given_back.popitem(last=False)
    said = "%s[%s] %s, returned to the broker (time %d in this process): %s"
    logger.error(said, task, call_id, what, times, why)
    raise Reject(what, requeue=True) from None
