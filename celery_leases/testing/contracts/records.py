"""The contract of record stores: subclass it, and override the fixture ``records``."""

from __future__ import annotations

from celery_leases.testing.contracts.claims import ClaimContract
from celery_leases.testing.contracts.failures import FailureContract
from celery_leases.testing.contracts.repair import RepairContract
from celery_leases.testing.contracts.settling import SettleContract


class RecordStoreContract(ClaimContract, SettleContract, FailureContract, RepairContract):
    """For every ``SqlRecordStore``: claims, settling, failures, repair.

    Override the fixture ``records``. Also override ``pass_time``, a function of seconds, if the
    store's clock can be moved; otherwise the tests wait ``short`` seconds. The store may be shared,
    but no other test may purge it meanwhile.
    """
