"""After a failure: what each action means, for how long, how waits grow, and whether the call comes
back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases.decide.after_failure import (
    LONGEST_JITTER,
    SHORTEST_SERVER_DELAY,
    leaves_probe_due,
)
from celery_leases.decide.endings import Raised
from celery_leases.errors import Uncertain
from celery_leases.failures.actions import (
    Action,
    Reason,
    cooldown,
    permanent,
    retry,
    retry_exactly,
)
from celery_leases.failures.cooldown_policies import CooldownPolicy
from celery_leases.options import Resume
from celery_leases.record import Outcome, State
from tests.unit.decision_inputs import (
    FAILURE,
    FRESH,
    GROUP,
    MOST,
    NOW,
    SECOND,
    after,
    classified,
    cooled,
    delay_of,
    failure_in,
    in_a_row,
    raised,
)

DAY = 86_400.0
CHANCES = st.floats(0, 1, exclude_max=True)
AGAIN, COOLS, FAILED = State.PENDING, State.COOLING, State.FAILED


def counts(outcome: Outcome) -> tuple[int, int, int]:
    return outcome.failures, outcome.quick_retries, outcome.cooldowns


class TestEachKind:
    @pytest.mark.parametrize("told", ["instead", "at_least", "ignore"])
    @pytest.mark.parametrize("group", [None, GROUP])
    @pytest.mark.parametrize("idempotent", [False, True])
    @pytest.mark.parametrize("scope", ["key", "group"])
    @pytest.mark.parametrize("delay", [None, 200.0])
    @pytest.mark.parametrize("kind", ["retry", "cooldown", "permanent"])
    def test_every_combination(self, kind, told, group, idempotent, scope, delay) -> None:
        action = Action(kind, CooldownPolicy(100.0, jitter=0.0), scope=scope, server_delay=told)
        outcome = after(raised(action, delay), group=group, idempotent=idempotent)
        assert outcome.state is {"retry": AGAIN, "cooldown": COOLS, "permanent": FAILED}[kind]
        in_group = scope == "group" and group is not None
        assert failure_in(outcome).group == (GROUP if in_group else None)
        if kind != "permanent":
            assert outcome.retry_after == (200.0 if delay and told != "ignore" else 100.0)
        assert (outcome.closing is not None) is (in_group and kind == "cooldown")

    def test_the_failure_is_remembered_with_what_decided(self) -> None:
        action = cooldown("60s", ambiguous=True, operator=True)
        outcome = after(raised(action, reason=Reason.UNAUTHORIZED, rule="status:401"))
        failure = failure_in(outcome)
        assert (failure.type, failure.message) == ("ValueError", "boom")
        assert (failure.rule, failure.reason) == ("status:401", "unauthorized")
        assert (failure.ambiguous, failure.operator, failure.group) == (True, True, None)
        assert outcome.reason == "unauthorized"
        traced = replace(raised(action), traceback="  File x")
        assert after(traced).traceback == "  File x"


class TestWhatTheAnswerTold:
    """A wait the other side asked for is only ever made longer."""

    @given(CHANCES, st.floats(SHORTEST_SERVER_DELAY, 21_600))
    @pytest.mark.parametrize("told", ["instead", "at_least"])
    @pytest.mark.parametrize("group", [None, GROUP])
    def test_jitter_never_cuts_it(self, told, group, rand, delay) -> None:
        action = replace(cooldown("1s", scope="group"), server_delay=told)
        wait = delay_of(cooled(raised(action, delay), rand=rand, group=group))
        assert delay <= wait <= delay + min(LONGEST_JITTER, 0.1 * delay)

    @given(CHANCES)
    def test_a_server_delay_may_shorten_the_wait_of_the_policy(self, rand: float) -> None:
        action = replace(cooldown("1h"), server_delay="instead")
        assert 20.0 <= delay_of(cooled(raised(action, 20.0), rand=rand)) <= 22.0

    @given(CHANCES)
    def test_a_minimal_server_delay_never_shortens_the_wait_of_the_policy(self, rand) -> None:
        assert delay_of(cooled(raised(cooldown("1h"), 20.0), rand=rand)) >= 1800.0
        assert delay_of(cooled(raised(cooldown("1s"), 20.0), rand=rand)) >= 20.0

    @pytest.mark.parametrize(
        ("delay", "longest"), [(0.012, 1.1), (1.0, 1.1), (40.0, 44.0), (50.0, 55.0), (100.0, 105.0)]
    )
    def test_a_tenth_is_added_at_most_and_not_more_than_five_seconds(self, delay, longest) -> None:
        action = replace(cooldown("1s"), server_delay="instead")
        assert delay_of(cooled(raised(action, delay), rand=MOST)) == pytest.approx(longest)
        assert delay_of(cooled(raised(action, delay), rand=0.0)) == max(delay, 1.0)

    def test_a_wait_that_the_body_asked_for_is_exact(self) -> None:
        action = replace(cooldown(), server_delay="instead")
        assert delay_of(cooled(raised(action, 300.0, Reason.ASKED), rand=MOST)) == 300.0

    @pytest.mark.parametrize("group", [None, GROUP])
    def test_a_wait_of_milliseconds_leaves_the_dependency_alone_for_a_second(self, group) -> None:
        """Server waits do not grow, so nothing else would ever slow this key down."""
        action = replace(cooldown("30s", scope="group"), server_delay="instead")
        assert delay_of(cooled(raised(action, 0.012), group=group)) == SHORTEST_SERVER_DELAY

    def test_a_retry_that_the_body_asked_for_is_exact(self) -> None:
        assert delay_of(after(raised(retry_exactly(0), 0.0, Reason.ASKED))) == pytest.approx(
            0.0, abs=0.002
        )
        assert delay_of(after(raised(retry_exactly(10), 10.0, Reason.ASKED), rand=0.3)) == 10.0


class TestGrowth:
    """Without a server delay the waits double; the values are upper bounds."""

    @given(CHANCES)
    def test_jitter_only_shortens_a_wait_of_the_policy(self, rand: float) -> None:
        record = replace(FRESH, cooldowns=1)
        assert 300.0 <= delay_of(cooled(raised(cooldown()), record, rand)) <= 600.0

    def test_a_group_grows_by_its_own_closings(self) -> None:
        record = replace(FRESH, failures=4, cooldowns=4)
        outcome = cooled(raised(cooldown("30s", scope="group", cap="1h")), record, group=GROUP)
        assert outcome.closing is not None
        assert outcome.closing.reason == "error"
        assert [outcome.closing.wait(in_a_row) for in_a_row in (1, 2, 3, 8)] == [
            30.0, 60.0, 120.0, 3600.0,
        ]  # fmt: skip
        assert outcome.retry_after == 30.0, (
            "what counts for the key while the store of groups does not answer"
        )

    def test_growth_starts_again_after_a_quiet_time(self) -> None:
        record = replace(FRESH, failures=3, quick_retries=2, cooldowns=3)
        quiet = replace(record, failed_at=NOW - int(DAY * SECOND) - 1)
        lately = replace(record, failed_at=NOW - int(DAY * SECOND))
        assert counts(cooled(raised(cooldown()), quiet)) == (1, 0, 1)
        assert counts(cooled(raised(cooldown()), lately)) == (4, 0, 4)
        assert counts(cooled(raised(cooldown()), record)) == (4, 0, 4)
        asked = raised(cooldown("1m"), 2 * DAY, Reason.ASKED)
        for days, failures in ((3.9, 4), (4.1, 1)):
            failed = replace(record, failed_at=NOW - int(days * DAY * SECOND))
            assert cooled(asked, failed).failures == failures

    @pytest.mark.parametrize(
        "failing",
        [
            raised(cooldown("2d")),
            raised(replace(cooldown("1m"), server_delay="instead"), 2 * DAY, Reason.ASKED),
            raised(retry("1s", max=0, then=cooldown("2d"))),
            raised(Action("retry", ambiguous=True, if_not_idempotent=cooldown("2d"))),
        ],
        ids=["policy", "asked", "then", "otherwise"],
    )
    def test_a_wait_of_days_is_no_quiet_time(self, failing: Raised) -> None:
        """Else a key that fails each time it may run would never fail for good."""
        record = replace(FRESH, failures=3, failed_at=NOW - int(2.1 * DAY * SECOND))
        assert cooled(failing, record).failures == 4


class TestAnEffectInDoubt:
    """It is unknown whether it has happened, so an operator must check."""

    @pytest.mark.parametrize("action", [cooldown(), retry(), permanent(), cooldown(scope="group")])
    def test_it_becomes_uncertain_with_any_rules(self, action: Action) -> None:
        doubt = Raised(Uncertain("in doubt", "k", "charge", "i"), FAILURE, classified(action))
        record = replace(FRESH, failures=9, quick_retries=1, cooldowns=2)
        outcome = after(doubt, record, group=GROUP)
        failure = failure_in(outcome)
        assert (outcome.state, counts(outcome)) == (State.UNCERTAIN, (9, 1, 2))
        assert (failure.reason, failure.rule, failure.group) == ("uncertain", "uncertain", None)
        assert outcome.reason == "uncertain"
        assert (failure.ambiguous, failure.operator) == (True, True)
        assert leaves_probe_due(outcome)


class TestComingBack:
    """Whether the call is rescheduled, or its caller gets the error."""

    @pytest.mark.parametrize("reschedulable", [True, False])
    @pytest.mark.parametrize("resume", ["transient", "always", "never"])
    @pytest.mark.parametrize("group", [None, GROUP])
    def test_a_groups_failure_resumes_if_the_option_allows_it(self, reschedulable, resume, group):
        action = cooldown("60s", scope="group")
        outcome = cooled(raised(action), reschedulable=reschedulable, resume=resume, group=group)
        assert outcome.resumes is (reschedulable and resume != "never")

    @pytest.mark.parametrize(
        ("failing", "transient"),
        [
            (raised(cooldown("60s")), False),
            (raised(cooldown("60s"), 20.0), True),
            (raised(replace(cooldown("60s"), server_delay="ignore"), 20.0), False),
            (raised(cooldown(), None, Reason.ASKED), True),
            (raised(cooldown(), 20.0, Reason.ASKED), True),
            (raised(cooldown("60s", scope="group")), True),
            (raised(retry("1s", max=0)), True),
            (raised(retry("1s", max=0, then=cooldown("60s"))), True),
            (raised(retry("1s", max=0, then=cooldown("60s")), None, Reason.NOT_FOUND), False),
            (raised(retry("1s", ambiguous=True)), False),
            (raised(retry("1s", ambiguous=True), 20.0), False),
            (raised(cooldown("60s", scope="group", ambiguous=True)), False),
            (raised(cooldown("60s", ambiguous=True), 20.0, Reason.ASKED), False),
        ],
        ids=[
            *("no rule's", "told", "told and ignored", "asked", "asked for a time", "the group's"),
            *("retries used up", "used up, then", "not found"),
            *("ambiguous", "ambiguous and told"),
            *("the group's, ambiguous", "asked, ambiguous"),
        ],
    )
    @pytest.mark.parametrize("resume", ["transient", "always", "never"])
    def test_what_is_transient_resumes_by_default(
        self, failing: Raised, resume: Resume, *, transient: bool
    ) -> None:
        assert cooled(failing, resume=resume).resumes is (
            resume == "always" or (transient and resume == "transient")
        )

    @pytest.mark.parametrize("then", [None, cooldown("60s")])
    def test_an_ambiguous_failure_of_an_idempotent_task_is_transient(self, then) -> None:
        outcome = cooled(raised(retry("1s", max=0, ambiguous=True, then=then)), idempotent=True)
        assert (outcome.resumes, failure_in(outcome).ambiguous) == (True, True)


class TestWhatAProbeFound:
    """Whether a probe's failure is about its group at all."""

    @pytest.mark.parametrize(
        ("failing", "nothing"),
        [
            (raised(retry("1s")), True),
            (raised(cooldown("60s", ambiguous=True)), True),
            (raised(cooldown("60s")), False),
            (raised(permanent()), False),
        ],
        ids=["quick retry", "ambiguous", "key", "permanent"],
    )
    def test_a_retry_or_an_unknown_outcome_does_not_affect_the_group(
        self, failing, nothing
    ) -> None:
        assert leaves_probe_due(after(failing, group=GROUP)) is nothing


SOON, AMBIGUOUS = raised(retry("1s")), raised(retry("1s", ambiguous=True))
OF_THE_GROUP = raised(cooldown("60s", scope="group"))


def case(name: str, outcome: Callable[[], Outcome], state: State, **expected: Any) -> Any:
    """What an outcome and its failure must be."""
    return pytest.param(outcome, state, expected, id=name)


CASES = [
    case("a permanent failure counts",
         partial(after, raised(permanent()), replace(FRESH, failures=2, quick_retries=1, cooldowns=2)),
         FAILED, counts=(3, 1, 2)),
    case("an action without a policy takes that of the task",
         partial(after, raised(cooldown()), rand=MOST, cooldown=CooldownPolicy(77.0)),
         COOLS, delay=pytest.approx(77.0)),
    case("a delay is raised to a minimum",
         partial(after, raised(replace(cooldown("1s"), at_least=15.0))), COOLS, delay=15.0),
    case("a longer one is not",
         partial(after, raised(replace(cooldown("1s"), at_least=15.0), 40.0)), COOLS, delay=40.0),
    # Quick retries count apart from Celery's, and apart from failures.
    case("celery's retries are not counted",
         partial(after, SOON, replace(FRESH, retries=9), retries=9, max_retries=1), AGAIN, counts=(0, 1, 0)),
    case("an action may have a lower limit of its own",
         partial(after, raised(retry("1s", max=2)), replace(FRESH, quick_retries=2), max_retries=9), COOLS),
    case("or a higher one",
         partial(after, raised(retry("1s", max=3)), replace(FRESH, quick_retries=2), max_retries=0), AGAIN),
    case("none are made where none are allowed", partial(after, SOON, max_retries=0), COOLS),
    case("an action may define what follows them",
         partial(after, raised(retry("1s", max=0, then=cooldown("60s", scope="group")), reason=Reason.UNREACHABLE),
                 group=GROUP),
         COOLS, reason="unreachable", group=GROUP),
    case("which may be the end", partial(after, raised(retry("1s", max=0, then=permanent()))), FAILED),
    case("a failure of the group gives new ones, and counts for nothing else",
         partial(after, OF_THE_GROUP, replace(FRESH, quick_retries=3), group=GROUP), COOLS, counts=(0, 0, 0)),
    # A call that may have been executed is repeated only if an option says it is harmless.
    case("an idempotent task is retried", partial(after, AMBIGUOUS, idempotent=True), AGAIN, ambiguous=True),
    case("any other cools down and says so", partial(after, AMBIGUOUS, rand=MOST),
         COOLS, delay=pytest.approx(60.0), ambiguous=True, counts=(1, 0, 1)),
    case("for its own time, also after the last retry",
         partial(after, AMBIGUOUS, replace(FRESH, quick_retries=5), rand=MOST),
         COOLS, delay=pytest.approx(60.0), ambiguous=True, reason="error"),
    *(case(f"a rule may define the result, {idempotent=}",
           partial(after, raised(replace(retry("1s", ambiguous=True), if_not_idempotent=permanent())),
                   idempotent=idempotent),
           kind)
      for idempotent, kind in ((False, FAILED), (True, AGAIN))),
    case("used up retries stay ambiguous", partial(after, AMBIGUOUS, replace(FRESH, quick_retries=5), idempotent=True),
         COOLS, ambiguous=True),
    case("a clear failure is retried without being idempotent", partial(after, SOON, idempotent=False), AGAIN),
    # Deterministic failures end.
    case("used up retries may be the last straw",
         partial(after, SOON, replace(FRESH, failures=9, quick_retries=5)), FAILED),
    case("a quick retry never is", partial(after, SOON, replace(FRESH, failures=9)), AGAIN),
    case("the last straw retains what is known about the failure",
         partial(after, raised(cooldown(ambiguous=True, operator=True)), replace(FRESH, failures=9)),
         FAILED, ambiguous=True, operator=True),
    *(case(f"a failure of the group is none, {group=}",
           partial(after, OF_THE_GROUP, replace(FRESH, failures=9), group=group), COOLS)
      for group in (None, GROUP)),
]  # fmt: skip


@pytest.mark.parametrize(("judged", "state", "expected"), CASES)
def test_a_failure_is_judged(judged, state, expected) -> None:
    outcome = judged()
    assert outcome.state is state
    known = {"counts": counts(outcome), "delay": outcome.retry_after}
    found = {name: known.get(name, getattr(outcome.failure, name, None)) for name in expected}
    assert found == expected


ENDS = [
    (SOON, 7, {"max_retries": 5}, [*[AGAIN] * 5, COOLS, AGAIN]),
    (raised(retry("1s", max=3, then=retry("1m", max=10))), 11, {}, [*[AGAIN] * 10, COOLS]),
    *((raised(cooldown()), most, {"max_failures": most}, [*[COOLS] * (most - 1), FAILED]) for most in (1, 2, 10)),
    *((OF_THE_GROUP, 30, {"max_failures": 2, "group": group}, [COOLS] * 30) for group in (None, GROUP)),
]  # fmt: skip


@pytest.mark.parametrize(("failing", "times", "options", "states"), ENDS)
def test_a_failure_that_repeats_itself_comes_to_an_end(failing, times, options, states) -> None:
    outcomes = in_a_row(failing, times, **options)
    assert [outcome.state for outcome in outcomes] == states
    if states[-1] is FAILED:
        last = outcomes[-1]
        assert (last.failures, failure_in(last).rule) == (times, "row")
        assert failure_in(last).reason == last.reason == Reason.TOO_MANY_FAILURES
    elif failing is SOON:
        assert [outcome.failures for outcome in outcomes] == [0, 0, 0, 0, 0, 1, 1]
        assert [outcome.quick_retries for outcome in outcomes] == [1, 2, 3, 4, 5, 0, 1]
        assert outcomes[5].reason == Reason.RETRIES_USED_UP
    elif failing is OF_THE_GROUP:
        assert {outcome.failures for outcome in outcomes} == {0}


@pytest.mark.parametrize(
    ("failing", "waits"),
    [
        (raised(cooldown()), [300, 600, 1200, 2400, 4800, 9600, 19_200, 21_600, 21_600]),
        (raised(retry("1s")), [1, 2, 4, 8, 16]),
        (
            raised(cooldown("30s", scope="group", cap="1h")),
            [30, 60, 120, 240, 480, 960, 1920, 3600, 3600],
        ),
    ],
    ids=["cooldown", "retry", "without a group"],
)
def test_waits_double_up_to_their_cap(failing, waits) -> None:
    found = [outcome.retry_after for outcome in in_a_row(failing, len(waits))]
    assert found == pytest.approx(waits)
