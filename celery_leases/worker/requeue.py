"""Returns deliveries to the broker unchanged, and counts how often that was done for a call."""

from __future__ import annotations

import inspect
import sys
import time
import traceback as tracebacks
from collections import OrderedDict
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, NoReturn

from celery.app.task import Context, Task
from celery.exceptions import Reject

from celery_leases.body.effects import DEFAULT_RULES
from celery_leases.concurrency import os_threads
from celery_leases.decide.waiting import may_be_returned
from celery_leases.failures.default_rules import ANYTHING_ELSE
from celery_leases.text.notices import logger
from celery_leases.worker.headers import call_id_of
from celery_leases.worker.routes import Routes, earlier_deliveries_of

MAX_COUNTED: Final = 1000
MAX_REFUSED: Final = 3
"""How often this process returns a call whose outcome the result backend refuses."""
LONGEST_PAUSE: Final = 60.0
SHORT_PAUSE: Final = 0.5
UNSTORED: Final = "celery_leases_unstored"
"""The attribute of the error because of which Celery could not store an outcome."""

_STORING: Final = frozenset({"mark_as_done", "mark_as_failure", "mark_as_retry", "store_result"})

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
    raise _counted(task, call_id, what, why) from None


def _counted(task: str, call_id: str, what: str, why: str) -> Reject:
    times = _requeued.pop(call_id, 0) + 1
    _requeued[call_id] = times
    with suppress(KeyError):  # another thread may remove the same entry
        while len(_requeued) > MAX_COUNTED:
            _requeued.popitem(last=False)
    logger.error(
        "%s[%s] %s, returned to the broker (time %d in this process): %s",
        task,
        call_id,
        what,
        times,
        why,
        code="delivery-returned",
    )
    return Reject(what, requeue=True)


class NoBackend:
    """Stands for the result backend while Celery handles the error that it could not store an
    outcome: nothing more is stored, and Celery returns the message to the broker.
    """

    def __init__(self, reject: Reject) -> None:
        self._reject = reject

    def prepare_exception(self, *_: Any) -> Reject:
        """What Celery passes to the worker's main process instead of the error."""
        return self._reject

    def mark_as_failure(self, *_: Any, **__: Any) -> None:
        """Store nothing."""


def _backend(task: Any) -> Any:
    """The result backend of *task*, or what stands for it while Celery handles an error because of
    which it could not store an outcome.
    """
    stand_in = getattr(sys.exception(), UNSTORED, None)
    if stand_in is not None:
        return stand_in
    return vars(Task)["backend"].fget(task)


_BACKEND: Final = property(_backend, vars(Task)["backend"].fset)
"""Replaces the property of Celery's task when it is needed for the first time."""


def return_unstored(
    task: Any, fields: dict[str, Any], error: Exception, traceback: TracebackType | None
) -> None:
    """Let Celery return a delivery to the broker whose outcome it could not store; *fields* are
    those of its message.

    When it is delivered again, the answer is in the record, and Celery stores that. Waits first,
    because the backend may be unavailable for long.
    """
    storing = any(frame.f_code.co_name in _STORING for frame, _ in tracebacks.walk_tb(traceback))
    if not storing or fields.get("is_eager", True):
        return
    request, name = Context(fields), task.name
    call_id = call_id_of(request.id, request.replaced_task_nesting)
    before, limit = requeue_count(request, call_id, Routes(task.app))
    rule = DEFAULT_RULES.classify(error, 0.0, os_threads.boot_clock).rule
    refused = rule == ANYTHING_ELSE.name and before >= MAX_REFUSED
    if refused or not may_be_returned(before, limit):
        return
    if inspect.getattr_static(task, "backend") is vars(Task)["backend"]:
        type(task).backend = _BACKEND
    limited = any(request.timelimit or ()) or task.time_limit or task.soft_time_limit
    time.sleep(SHORT_PAUSE if limited else min(LONGEST_PAUSE, 2.0 ** min(before, 6)))
    why = f"{type(error).__name__}: {error}"
    reject = _counted(name, call_id, "has ended, but Celery could not store that", why)
    setattr(error, UNSTORED, NoBackend(reject))
