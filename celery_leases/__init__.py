"""Celery tasks that are safe to run twice: leases with owner tokens, and a durable record per key."""

from celery_leases.client import LeaseClient, LeaseStatus
from celery_leases.core.errors import (
    AlreadyDone,
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
    SchemaOutdated,
    StoreUnavailable,
    UnknownKey,
)
from celery_leases.handle import current_lease
from celery_leases.task import LeasedMixin, LeasedTask

__all__ = [
    "AlreadyDone",
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
    "SchemaOutdated",
    "StoreUnavailable",
    "UnknownKey",
    "current_lease",
]
