"""What every gate store must do: subclass, and give it as the fixture ``store``."""

from __future__ import annotations

from celery_leases.testing.contracts.group_closing import GateClosingContract
from celery_leases.testing.contracts.group_probes import GateProbeContract


class GateStoreContract(GateClosingContract, GateProbeContract):
    """For every lease store that keeps gates: a ``LeaseStore`` whose bids are asked at them, and a
    ``GateStore``.
    """
