"""What every record store must do: subclass, and give it as the fixture ``records``."""

from __future__ import annotations

from celery_leases.testing.contracts.claims import ClaimContract
from celery_leases.testing.contracts.failures import FailureContract
from celery_leases.testing.contracts.repair import RepairContract
from celery_leases.testing.contracts.settling import SettleContract


class RecordStoreContract(ClaimContract, SettleContract, FailureContract, RepairContract):
    """For every ``RecordStore``.

    Override the fixture ``records``; and ``pass_time``, a callable of seconds, where the store's
    clock can be turned, else the tests wait. ``short`` is how long, in seconds. The store may be
    shared, but not purged by others meanwhile.
    """
