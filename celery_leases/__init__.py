"""Celery tasks that are safe to run twice: leases with owner tokens, and a durable record per key.

Celery is imported when the first name that needs it is used, so that a process which only asks for a status does not
pay for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery_leases.body.effect_calls import EffectReply
    from celery_leases.client import LeaseClient
    from celery_leases.core.classifier.errorfacts import ErrorFacts
    from celery_leases.core.classifier.rules import Rules
    from celery_leases.core.errors import (
        AlreadyCompleted,
        AlreadyDone,
        CompletionNotCommitted,
        Cooldown,
        CoolingDown,
        EffectMisused,
        ForkedLease,
        GuardOpen,
        KeyReused,
        KeyUnusable,
        LeaseConfigurationError,
        LeaseHeld,
        LeaseIsLive,
        LeaseLost,
        LeasesError,
        LeaseStoreMismatch,
        PermanentFailure,
        PutBackFailed,
        ResultMissing,
        RetryLater,
        SchemaOutdated,
        Snooze,
        StoreUnavailable,
        Uncertain,
        UnknownKey,
        WrongDatabase,
    )
    from celery_leases.core.policies import CooldownPolicy
    from celery_leases.core.rulings import Judgement, Reason, Ruling, cooldown, permanent, retry
    from celery_leases.core.status import EffectStatus, GroupStatus, LeaseStatus
    from celery_leases.handle import current_lease
    from celery_leases.seam.outgoing import relay, rescue
    from celery_leases.task import LeasedMixin, LeasedTask

__all__ = [
    "AlreadyCompleted",
    "AlreadyDone",
    "CompletionNotCommitted",
    "Cooldown",
    "CooldownPolicy",
    "CoolingDown",
    "EffectMisused",
    "EffectReply",
    "EffectStatus",
    "ErrorFacts",
    "ForkedLease",
    "GroupStatus",
    "GuardOpen",
    "Judgement",
    "KeyReused",
    "KeyUnusable",
    "LeaseClient",
    "LeaseConfigurationError",
    "LeaseHeld",
    "LeaseIsLive",
    "LeaseLost",
    "LeaseStatus",
    "LeaseStoreMismatch",
    "LeasedMixin",
    "LeasedTask",
    "LeasesError",
    "PermanentFailure",
    "PutBackFailed",
    "Reason",
    "ResultMissing",
    "RetryLater",
    "Rules",
    "Ruling",
    "SchemaOutdated",
    "Snooze",
    "StoreUnavailable",
    "Uncertain",
    "UnknownKey",
    "WrongDatabase",
    "cooldown",
    "current_lease",
    "permanent",
    "relay",
    "rescue",
    "retry",
]

_LAZY = {
    "AlreadyCompleted": "celery_leases.core.errors",
    "AlreadyDone": "celery_leases.core.errors",
    "CompletionNotCommitted": "celery_leases.core.errors",
    "Cooldown": "celery_leases.core.errors",
    "CooldownPolicy": "celery_leases.core.policies",
    "CoolingDown": "celery_leases.core.errors",
    "EffectMisused": "celery_leases.core.errors",
    "EffectReply": "celery_leases.body.effect_calls",
    "EffectStatus": "celery_leases.core.status",
    "ErrorFacts": "celery_leases.core.classifier.errorfacts",
    "ForkedLease": "celery_leases.core.errors",
    "GroupStatus": "celery_leases.core.status",
    "GuardOpen": "celery_leases.core.errors",
    "Judgement": "celery_leases.core.rulings",
    "KeyReused": "celery_leases.core.errors",
    "KeyUnusable": "celery_leases.core.errors",
    "LeaseClient": "celery_leases.client",
    "LeaseConfigurationError": "celery_leases.core.errors",
    "LeaseHeld": "celery_leases.core.errors",
    "LeaseIsLive": "celery_leases.core.errors",
    "LeaseLost": "celery_leases.core.errors",
    "LeaseStatus": "celery_leases.core.status",
    "LeaseStoreMismatch": "celery_leases.core.errors",
    "LeasedMixin": "celery_leases.task",
    "LeasedTask": "celery_leases.task",
    "LeasesError": "celery_leases.core.errors",
    "PermanentFailure": "celery_leases.core.errors",
    "PutBackFailed": "celery_leases.core.errors",
    "Reason": "celery_leases.core.rulings",
    "ResultMissing": "celery_leases.core.errors",
    "RetryLater": "celery_leases.core.errors",
    "Rules": "celery_leases.core.classifier.rules",
    "Ruling": "celery_leases.core.rulings",
    "SchemaOutdated": "celery_leases.core.errors",
    "Snooze": "celery_leases.core.errors",
    "StoreUnavailable": "celery_leases.core.errors",
    "Uncertain": "celery_leases.core.errors",
    "UnknownKey": "celery_leases.core.errors",
    "WrongDatabase": "celery_leases.core.errors",
    "cooldown": "celery_leases.core.rulings",
    "current_lease": "celery_leases.handle",
    "permanent": "celery_leases.core.rulings",
    "relay": "celery_leases.seam.outgoing",
    "rescue": "celery_leases.seam.outgoing",
    "retry": "celery_leases.core.rulings",
}


def __getattr__(name: str) -> Any:
    """Import what is used for the first time."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    """All public names, whether they have been used or not."""
    return __all__
