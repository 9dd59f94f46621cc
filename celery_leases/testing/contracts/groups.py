"""The contract of group stores: subclass it, and override the fixture ``store``."""

from __future__ import annotations

from celery_leases.testing.contracts.group_closing import GroupClosingContract
from celery_leases.testing.contracts.group_probes import GroupProbeContract
from celery_leases.testing.contracts.group_slots import GroupSlotsContract


class GroupStoreContract(GroupClosingContract, GroupProbeContract, GroupSlotsContract):
    """For every lease store with groups: a ``LeaseStore`` whose ``groups`` are a ``GroupStore``,
    and whose ``acquire()`` asks the group of the call.
    """
