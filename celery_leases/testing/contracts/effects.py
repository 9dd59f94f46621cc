"""What every store of effects and progress must do: subclass, and give it as the fixture
``effects``.
"""

from __future__ import annotations

from celery_leases.testing.contracts.effect_intents import IntentContract
from celery_leases.testing.contracts.effect_replies import ReplyContract
from celery_leases.testing.contracts.effect_scopes import ScopeContract
from celery_leases.testing.contracts.progress import ProgressContract


class EffectStoreContract(IntentContract, ReplyContract, ScopeContract, ProgressContract):
    """For every ``EffectStore``, beside the record store it belongs to.

    Override the fixtures ``records`` and ``effects``; and ``pass_time`` where the store's clock can
    be turned.
    """
