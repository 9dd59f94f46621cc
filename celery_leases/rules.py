"""What failure rules are written with, and what they say of a failure: docs/failures.md."""

from celery_leases.core.classifier.errorfacts import ErrorFacts
from celery_leases.core.classifier.rules import Rules
from celery_leases.core.policies import CooldownPolicy
from celery_leases.core.rulings import Classification, Reason, Ruling, cooldown, permanent, retry

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
