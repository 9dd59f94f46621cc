"""Failure rules: ``Rules``, the actions that rules choose, and what a classification contains. See
docs/failures.md.
"""

from celery_leases.failures.actions import (
    Classification,
    Reason,
    Ruling,
    cooldown,
    permanent,
    retry,
)
from celery_leases.failures.classifier import Rules
from celery_leases.failures.cooldown_policies import CooldownPolicy
from celery_leases.failures.error_facts import ErrorFacts

__all__ = [
    "Classification",
    "CooldownPolicy",
    "ErrorFacts",
    "Reason",
    "Rules",
    "Ruling",
    "cooldown",
    "permanent",
    "retry",
]
