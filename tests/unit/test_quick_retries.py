"""After a failure: quick retries and what comes after them, unknown outcomes, and the last failure
allowed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_leases.decide.after_failure import Counts, EnterCooldown, Fail, RetryAfter
from celery_leases.failures.actions import Reason, cooldown, permanent, retry
from tests.unit.decision_inputs import FRESH, GROUP, MOST, after, cooled, in_a_row, raised, retried


class TestQuickRetries:
    """They count apart from Celery's, and apart from failures."""

    def test_after_the_last_one_the_key_cools_down(self) -> None:
        verdicts = in_a_row(raised(retry("1s")), 7, max_retries=5)
        assert [type(verdict) for verdict in verdicts] == [
            *[RetryAfter] * 5,
            EnterCooldown,
            RetryAfter,
        ]
        assert [verdict.counts.failures for verdict in verdicts] == [0, 0, 0, 0, 0, 1, 1]
        assert [verdict.counts.quick_retries for verdict in verdicts] == [1, 2, 3, 4, 5, 0, 1]
        assert verdicts[5].failure.reason == Reason.RETRIES_USED_UP
        assert verdicts[5].failure.rule == "row"

    def test_celerys_retries_are_not_counted(self) -> None:
        verdict = retried(raised(retry("1s")), replace(FRESH, retries=9), retries=9, max_retries=1)
        assert verdict.counts.quick_retries == 1

    def test_a_ruling_may_have_a_limit_of_its_own(self) -> None:
        used = replace(FRESH, quick_retries=2)
        assert isinstance(after(raised(retry("1s", max=2)), used, max_retries=9), EnterCooldown)
        assert isinstance(after(raised(retry("1s", max=3)), used, max_retries=0), RetryAfter)

    def test_none_are_made_where_none_are_allowed(self) -> None:
        assert isinstance(after(raised(retry("1s")), max_retries=0), EnterCooldown)

    def test_a_ruling_may_define_what_follows_them(self) -> None:
        ruling = retry("1s", max=0, then=cooldown("60s", scope="group"))
        verdict = cooled(raised(ruling, reason=Reason.UNREACHABLE), group=GROUP)
        assert (verdict.failure.reason, verdict.failure.group) == ("unreachable", GROUP)
        assert isinstance(after(raised(retry("1s", max=0, then=permanent()))), Fail)

    def test_retries_after_retries_come_to_an_end(self) -> None:
        verdicts = in_a_row(raised(retry("1s", max=3, then=retry("1m", max=10))), 11)
        assert [type(verdict) for verdict in verdicts] == [*[RetryAfter] * 10, EnterCooldown]

    def test_a_failure_of_the_group_gives_new_ones(self) -> None:
        """A cooldown is a cooldown; the group's counts for nothing else."""
        verdict = cooled(
            raised(cooldown("60s", scope="group")), replace(FRESH, quick_retries=3), group=GROUP
        )
        assert verdict.counts == Counts(0, 0, 0)


class TestUnknownOutcomes:
    """A call that may have been executed is repeated only if an option says it is harmless."""

    def test_an_idempotent_task_is_retried(self) -> None:
        assert retried(raised(retry("1s", ambiguous=True)), idempotent=True).failure.ambiguous

    def test_any_other_cools_down_and_says_so(self) -> None:
        verdict = cooled(raised(retry("1s", ambiguous=True)), rand=MOST)
        assert verdict.delay == pytest.approx(60.0)
        assert (verdict.failure.ambiguous, verdict.counts) == (True, Counts(1, 0, 1))

    def test_a_rule_may_define_the_result(self) -> None:
        """``otherwise``."""
        ruling = replace(retry("1s", ambiguous=True), if_not_idempotent=permanent())
        assert isinstance(after(raised(ruling)), Fail)
        assert isinstance(after(raised(ruling), idempotent=True), RetryAfter)

    def test_used_up_retries_stay_ambiguous(self) -> None:
        verdict = cooled(
            raised(retry("1s", ambiguous=True)), replace(FRESH, quick_retries=5), idempotent=True
        )
        assert verdict.failure.ambiguous

    def test_a_clear_failure_is_retried_without_being_idempotent(self) -> None:
        assert isinstance(after(raised(retry("1s")), idempotent=False), RetryAfter)


class TestTheLastStraw:
    """Deterministic failures end."""

    @pytest.mark.parametrize("limit", [1, 2, 10])
    def test_after_so_many_failures_the_key_has_failed_for_good(self, limit: int) -> None:
        verdicts = in_a_row(raised(cooldown()), limit, max_failures=limit)
        assert [type(verdict) for verdict in verdicts] == [*[EnterCooldown] * (limit - 1), Fail]
        assert verdicts[-1].counts.failures == limit
        assert (verdicts[-1].failure.reason, verdicts[-1].failure.rule) == (
            Reason.TOO_MANY_FAILURES,
            "row",
        )

    def test_used_up_retries_may_be_the_last_straw(self) -> None:
        record = replace(FRESH, failures=9, quick_retries=5)
        assert isinstance(after(raised(retry("1s")), record), Fail)

    def test_a_quick_retry_never_is(self) -> None:
        assert isinstance(after(raised(retry("1s")), replace(FRESH, failures=9)), RetryAfter)

    def test_it_retains_what_is_known_about_the_failure(self) -> None:
        failure = after(
            raised(cooldown(ambiguous=True, operator=True)), replace(FRESH, failures=9)
        ).failure
        assert (failure.ambiguous, failure.operator) == (True, True)

    @pytest.mark.parametrize("group", [None, GROUP])
    def test_failures_of_the_group_never_count_towards_it(self, group: str | None) -> None:
        assert isinstance(
            after(raised(cooldown(scope="group")), replace(FRESH, failures=9), group=group),
            EnterCooldown,
        )
        verdicts = in_a_row(raised(cooldown("30s", scope="group")), 30, max_failures=2, group=group)
        assert {type(verdict) for verdict in verdicts} == {EnterCooldown}
        assert {verdict.counts.failures for verdict in verdicts} == {0}

    def test_without_a_group_its_failures_make_the_key_wait_longer_each_time(self) -> None:
        verdicts = in_a_row(raised(cooldown("30s", scope="group", cap="1h")), 9)
        waits = [verdict.delay for verdict in verdicts if isinstance(verdict, EnterCooldown)]
        assert waits == pytest.approx([30, 60, 120, 240, 480, 960, 1920, 3600, 3600])
