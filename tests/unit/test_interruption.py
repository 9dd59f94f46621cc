"""When the handler of the loss signal raises into a body, and when it leaves it alone."""

import pytest

from celery_leases.attempt.held_lease import LEFT_ALONE, HeldLease
from celery_leases.errors import LeaseLost
from celery_leases.testing.contracts.claim_requests import make_claim_request
from celery_leases.worker.pools.signals import SignalGuard
from tests.unit.memory_stores import ManualClock


def test_a_body_that_was_just_told_is_left_alone_and_reminded_later() -> None:
    """Told twice at once, it could not clean up; told only once, it might go on, as the first may
    have vanished.
    """
    clock, interrupt_guard = ManualClock(), SignalGuard()
    held_lease = HeldLease(make_claim_request("t:task|key"), clock.now(), clock)
    with interrupt_guard:
        interrupt_guard.open(held_lease, "interrupt")
        interrupt_guard._on_loss(0, None)  # nothing is lost
        held_lease.lost = "taken by another owner"
        with pytest.raises(LeaseLost):
            held_lease.check()
        interrupt_guard._on_loss(0, None)  # it has just been told
        clock.sleep(1.01 * LEFT_ALONE)
        with pytest.raises(LeaseLost):
            interrupt_guard._on_loss(0, None)
        interrupt_guard.shut()
        interrupt_guard._on_loss(0, None)  # the body is over
