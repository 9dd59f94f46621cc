"""When the handler of the loss signal raises in a body, and when it does not."""

import pytest

from celery_leases.attempt.held_lease import CLEANUP_TIME, HeldLease
from celery_leases.errors import LeaseLost
from celery_leases.testing.contracts.calls import make_call
from celery_leases.worker.interrupts import SignalGuard
from tests.unit.memory_stores import ManualClock


def test_a_body_that_was_just_interrupted_is_interrupted_again_only_later() -> None:
    """A second exception at once would prevent the clean-up; without a second one the body might
    continue, because it may have swallowed the first.
    """
    clock, interrupt_guard = ManualClock(), SignalGuard()
    held_lease = HeldLease(make_call("t:task|key"), clock.now(), clock)
    with interrupt_guard:
        interrupt_guard.body_begins(held_lease, "interrupt")
        interrupt_guard._on_loss(0, None)  # nothing is lost
        held_lease.lost = "held by another owner"
        with pytest.raises(LeaseLost):
            held_lease.check()
        interrupt_guard._on_loss(0, None)  # it was just interrupted
        clock.sleep(1.01 * CLEANUP_TIME)
        with pytest.raises(LeaseLost):
            interrupt_guard._on_loss(0, None)
        interrupt_guard.body_ended()
        interrupt_guard._on_loss(0, None)  # the body is over
