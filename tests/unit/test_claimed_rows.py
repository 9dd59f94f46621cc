"""What a claimed row is answered with: a run, a pause after a crash, or the end of a crash loop."""

from __future__ import annotations

from typing import Any

import pytest

from celery_leases.decide import after_run as settlement
from celery_leases.decide.before_run import after_claim
from celery_leases.decide.verdicts import Raise, Reschedule, Run
from celery_leases.errors import PermanentFailure
from celery_leases.record import Record, State
from tests.unit.decision_inputs import (
    NOW,
    OURS,
    SECOND,
    a_call,
    a_record,
)


class TestClaimed:
    def claimed(self, crashes: int = 0, *, just_now: bool = True, **changes: Any) -> Record:
        crashed_at = NOW if just_now else NOW - 60 * SECOND
        return a_record(
            State.RUNNING,
            OURS,
            crashes=crashes,
            crashed_at=crashed_at if crashes else None,
            started_at=NOW,
            **changes,
        )

    def verdict(self, record: Record, **options: Any) -> Run | Reschedule | Raise:
        return after_claim(a_call(**options), record)

    def test_a_claimed_key_runs(self) -> None:
        assert self.verdict(self.claimed(), max_crashes=3) == Run()

    def test_the_lease_in_the_claimed_row_is_our_own(self) -> None:
        assert self.verdict(self.claimed(lease_until=NOW + 15 * SECOND)) == Run()

    @pytest.mark.parametrize(("crashes", "delay"), [(1, None), (2, 5.0), (3, 30.0), (8, 30.0)])
    def test_after_a_crash_it_runs_at_once_then_in_5_then_in_30_seconds(self, crashes, delay):
        died = f"its process died {crashes} times in a row"
        verdict = Reschedule(delay, died, started=True) if delay else Run()
        assert self.verdict(self.claimed(crashes), max_crashes=9) == verdict

    @pytest.mark.parametrize("limit", [1, 2, 3])
    def test_it_gives_up_after_so_many_crashes_in_a_row(self, limit: int) -> None:
        assert not isinstance(self.verdict(self.claimed(limit - 1), max_crashes=limit), Raise)
        verdict = self.verdict(self.claimed(limit), max_crashes=limit)
        assert isinstance(verdict, Raise)
        assert isinstance(verdict.error, PermanentFailure)
        assert verdict.error.rule == settlement.CRASH_LOOP
        assert f"{limit} times in a row" in str(verdict.error)

    @pytest.mark.parametrize("crashes", [2, 3, 8])
    def test_a_crash_is_answered_once(self, crashes: int) -> None:
        assert self.verdict(self.claimed(crashes, just_now=False), max_crashes=9) == Run()

    def test_it_gives_up_if_an_earlier_claim_could_not_write_it(self) -> None:
        assert isinstance(self.verdict(self.claimed(9, just_now=False), max_crashes=9), Raise)

    def test_a_row_claimed_after_its_retention_runs(self) -> None:
        assert self.verdict(self.claimed(expires_at=None)) == Run()
