"""The contract of effect stores: subclass it, and override the fixture ``effects``."""

from __future__ import annotations

from celery_leases.testing.contracts.effect_intents import IntentContract
from celery_leases.testing.contracts.effect_replies import ReplyContract
from celery_leases.testing.contracts.effect_scopes import ScopeContract
from celery_leases.testing.contracts.progress import ProgressContract


class EffectStoreContract(IntentContract, ReplyContract, ScopeContract, ProgressContract):
    """For every ``SqlEffectStore``, together with its record store: effects and saved progress.

    Override the fixtures ``records`` and ``effects``. Also override ``pass_time`` if the store's
    clock can be moved.
    """
