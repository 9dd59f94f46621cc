"""The countdown of one reschedule, and which rows are not taken over after the loss of a store's
data.
"""

from __future__ import annotations

import pytest

from celery_leases.decide.before_run import before_run
from celery_leases.decide.verdicts import Facts, Reschedule
from celery_leases.decide.waiting import SHORTEST_DELAY, after_store_was_emptied
from celery_leases.record import State
from tests.unit.decision_inputs import (
    OURS,
    THEIRS,
    a_call,
    a_record,
    closed_gate,
    decide,
    held_by,
    waiting,
)


class TestHops:
    @pytest.mark.parametrize(
        "facts",
        [
            Facts(holder=held_by(OURS, 7_200.0)),
            Facts(holder=held_by(THEIRS, 7_200.0)),
            Facts(record=waiting(State.PENDING, 7_200)),
            Facts(record=waiting(State.COOLING, 7_200, OURS)),
            Facts(gate=closed_gate(7_200)),
        ],
        ids=["own copy", "another call", "retry time", "cooldown", "gate"],
    )
    def test_no_wait_is_longer_than_the_broker_can_be_trusted_with(self, facts: Facts) -> None:
        verdict = before_run(a_call(longest_countdown=30.0, reschedules=20, on_busy="wait"), facts)
        assert isinstance(verdict, Reschedule)
        assert verdict.delay == 30.0

    def test_a_hop_is_never_no_hop(self) -> None:
        verdict = decide(a_call(), holder=held_by(OURS, -5.0))
        assert isinstance(verdict, Reschedule)
        assert verdict.delay == SHORTEST_DELAY


class TestAStoreThatCameUpEmpty:
    def test_a_running_key_is_left_alone_until_its_holder_has_had_its_ttl(self) -> None:
        running = a_record(State.RUNNING, lease_ttl=15.0)
        verdict = after_store_was_emptied(a_call(), running, 4.0, 0.0)
        assert isinstance(verdict, Reschedule)
        assert verdict.delay == pytest.approx(11.0)
