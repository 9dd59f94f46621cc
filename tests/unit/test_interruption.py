"""When the handler of the loss signal raises into a body, and when it leaves it alone."""

import pytest

from celery_leases.attempt.held_lease import LEFT_ALONE, HeldLease
from celery_leases.errors import LeaseLost
from celery_leases.testing.contracts.claim_requests import make_claim_request
from celery_leases.worker.pools.signals import SignalGuard


class StillClock:
    """Time passes when the test says so."""

    time = 0.0

    def now(self) -> float:
        """The time it was set to."""
        return self.time

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.time += seconds


def test_a_body_that_was_just_told_is_left_alone_and_reminded_later() -> None:
    """Told twice at once, it could not clean up; told only once, it might go on, as the first may
    have vanished.
    """
    clock, interrupt_guard = StillClock(), SignalGuard()
    held_lease = HeldLease(make_claim_request("t:task|key"), 0.0, clock)
    with interrupt_guard:
        interrupt_guard.open(held_lease, "interrupt")
        interrupt_guard._on_loss(0, None)  # nothing is lost
        held_lease.lost = "taken by another owner"
        with pytest.raises(LeaseLost):
            held_lease.check()
        interrupt_guard._on_loss(0, None)  # it has just been told
        clock.sleep(LEFT_ALONE)
        with pytest.raises(LeaseLost):
            interrupt_guard._on_loss(0, None)
        interrupt_guard.shut()
        interrupt_guard._on_loss(0, None)  # the body is over
