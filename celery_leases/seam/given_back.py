"""Deliveries that are given back to the broker as they are, and how often that may be done."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import Any, Final, NoReturn

from celery.exceptions import Reject

from celery_leases.seam.routes import Routes, deliveries_of
from celery_leases.signals import logger

KEPT: Final = 1000

_given_back: OrderedDict[str, int] = OrderedDict()
"""How often this process has given back the deliveries of calls whose copies the broker did not take."""


def spent(request: Any, call_id: str, routes: Routes) -> tuple[int, int | None]:
    """How often this message has been given back, and how often its queue allows that, if it has a limit."""
    before = max(deliveries_of(request), _given_back.get(call_id, 0))
    return before, routes.delivery_limit(request)


def taken(call_id: str) -> None:
    """Forget how often the deliveries of a call were given back: the broker has taken a copy."""
    _given_back.pop(call_id, None)


def give_back(task: str, call_id: str, what: str, why: str) -> NoReturn:
    """Give the delivery back to the broker, which delivers it again; the log says *what* has happened, and *why*."""
    times = _given_back.pop(call_id, 0) + 1
    _given_back[call_id] = times
    with suppress(KeyError):  # other threads do the same
        while len(_given_back) > KEPT:
            _given_back.popitem(last=False)
    said = "%s[%s] %s, given to the broker again (time %d in this process): %s"
    logger.error(said, task, call_id, what, times, why)
    raise Reject(what, requeue=True) from None
