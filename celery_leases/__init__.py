"""Celery tasks that are safe to run twice: leases with owner tokens, and a durable record per key.

This module has the names that a project with leased tasks uses every day. All exceptions are in
:mod:`celery_leases.errors`, failure rules in :mod:`celery_leases.rules`, and signals in
:mod:`celery_leases.signals`.

Celery is imported when the first name that needs it is used: a process that only reads a status
does not import it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery_leases.client import LeaseClient
    from celery_leases.errors import (
        Cooldown,
        CoolingDown,
        LeaseLost,
        PermanentFailure,
        RetryLater,
        Snooze,
        Uncertain,
    )
    from celery_leases.lease import current_lease
    from celery_leases.options import Failures, Group
    from celery_leases.status import LeaseStatus
    from celery_leases.task import LeasedMixin, LeasedTask, leased_task

__all__ = [
    "Cooldown",
    "CoolingDown",
    "Failures",
    "Group",
    "LeaseClient",
    "LeaseLost",
    "LeaseStatus",
    "LeasedMixin",
    "LeasedTask",
    "PermanentFailure",
    "RetryLater",
    "Snooze",
    "Uncertain",
    "current_lease",
    "leased_task",
]

_LAZY = {
    "Cooldown": "celery_leases.errors",
    "CoolingDown": "celery_leases.errors",
    "Failures": "celery_leases.options",
    "Group": "celery_leases.options",
    "LeaseClient": "celery_leases.client",
    "LeaseLost": "celery_leases.errors",
    "LeaseStatus": "celery_leases.status",
    "LeasedMixin": "celery_leases.task",
    "LeasedTask": "celery_leases.task",
    "PermanentFailure": "celery_leases.errors",
    "RetryLater": "celery_leases.errors",
    "Snooze": "celery_leases.errors",
    "Uncertain": "celery_leases.errors",
    "current_lease": "celery_leases.lease",
    "leased_task": "celery_leases.task",
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    """All public names, even those that are not imported yet."""
    return __all__
