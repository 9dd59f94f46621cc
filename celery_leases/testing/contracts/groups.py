"""The contract of gate stores: subclass it, and override the fixture ``store``."""

from __future__ import annotations

from celery_leases.testing.contracts.group_closing import GateClosingContract
from celery_leases.testing.contracts.group_probes import GateProbeContract


class GroupStoreContract(GateClosingContract, GateProbeContract):
    """For every lease store with gates: a ``LeaseStore`` that is also a ``GroupStore``, and whose
    ``acquire()`` reads the gate.
    """
