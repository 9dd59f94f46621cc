"""When the handler of the loss signal raises into a body, and when it leaves it alone."""

import pytest

from celery_leases.core.errors import LeaseLost
from celery_leases.interruption.by_signal import SignalShield
from celery_leases.tenure import LEFT_ALONE, Tenure
from celery_leases.testing.contracts.bids import make_bid


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
    """Told twice at once, it could not clean up; told only once, it might go on, as the first may have vanished."""
    clock, shield = StillClock(), SignalShield()
    tenure = Tenure(make_bid("t:task|key"), 0.0, clock)
    with shield:
        shield.open(tenure, "interrupt")
        shield._on_loss(0, None)  # nothing is lost
        tenure.lost = "taken by another owner"
        with pytest.raises(LeaseLost):
            tenure.check()
        shield._on_loss(0, None)  # it has just been told
        clock.sleep(LEFT_ALONE)
        with pytest.raises(LeaseLost):
            shield._on_loss(0, None)
        shield.shut()
        shield._on_loss(0, None)  # the body is over
