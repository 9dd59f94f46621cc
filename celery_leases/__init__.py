"""Celery tasks that are safe to run twice: leases with owner tokens, and a durable record per key."""

from celery_leases.client import LeaseClient
from celery_leases.core.errors import (
    AlreadyDone,
    Cooldown,
    CoolingDown,
    KeyReused,
    KeyUnusable,
    LeaseConfigurationError,
    LeaseHeld,
    LeaseIsLive,
    LeaseLost,
    LeasesError,
    LeaseStoreMismatch,
    PermanentFailure,
    ResultMissing,
    RetryLater,
    SchemaOutdated,
    Snooze,
    StoreUnavailable,
    UnknownKey,
)
from celery_leases.core.policies import CooldownPolicy
from celery_leases.core.rules import Rules
from celery_leases.core.rulings import cooldown, permanent, retry
from celery_leases.core.status import GroupStatus, LeaseStatus
from celery_leases.handle import current_lease
from celery_leases.task import LeasedMixin, LeasedTask

__all__ = [
    "AlreadyDone",
    "Cooldown",
    "CooldownPolicy",
    "CoolingDown",
    "GroupStatus",
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
    "ResultMissing",
    "RetryLater",
    "Rules",
    "SchemaOutdated",
    "Snooze",
    "StoreUnavailable",
    "UnknownKey",
    "cooldown",
    "current_lease",
    "permanent",
    "retry",
]
