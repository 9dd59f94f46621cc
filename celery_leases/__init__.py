"""Celery tasks that are safe to run twice: leases with owner tokens, and a durable record per key."""

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
