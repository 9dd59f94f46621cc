"""Failure rules: ``Rules``, the actions that rules choose, and the rule that matches a failure. See
docs/explanation/failures.md.
"""

from celery_leases.failures.actions import (
    Action,
    Reason,
    RuleMatch,
    cooldown,
    permanent,
    retry,
)
from celery_leases.failures.classifier import Rules
from celery_leases.failures.cooldown_policies import CooldownPolicy
from celery_leases.failures.error_facts import ErrorFacts

__all__ = [
    "Action",
    "CooldownPolicy",
    "ErrorFacts",
    "Reason",
    "RuleMatch",
    "Rules",
    "cooldown",
    "permanent",
    "retry",
]
