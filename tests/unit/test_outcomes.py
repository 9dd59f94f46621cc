"""How an attempt is closed, what it leaves of the counts, and how long to wait when a store
fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from celery_leases.decide import after_run as settlement
from celery_leases.decide.after_run import (
    CRASH_LOOP,
    child_exited,
    closed_for_celery,
    crash_pause,
    settle_pause,
    settle_until,
    stopped_by_crash_loop,
    store_pause,
    unrun,
)
from celery_leases.decide.before_run import after_claim
from celery_leases.decide.endings import (
    ControlFlow,
    Ending,
    ExitCause,
    Interrupted,
    Lost,
    Raised,
    Returned,
    Snoozed,
    Terminated,
)
from celery_leases.decide.verdicts import Raise
from celery_leases.errors import PermanentFailure, Snooze, Uncertain
from celery_leases.failures.actions import cooldown, permanent, retry
from celery_leases.record import Attempt, Ended, Outcome, Record, State
from celery_leases.results import NOT_JSON
from tests.unit import decision_inputs
from tests.unit.decision_inputs import (
    FAILURE,
    GROUP,
    NOW,
    OURS,
    RUNNING,
    THEIRS,
    a_call,
    a_record,
    classified,
    decide,
    raised,
    refusal,
)

WEEK = 7 * 86_400.0
DAY = 86_400.0


def closed(ending: Ending, record: Record = RUNNING, **changes: Any) -> Outcome:
    """The outcome of an attempt of ours that ended so."""
    return decision_inputs.closed(a_call(**changes), ending, record)


ENDINGS: dict[str, Ending] = {
    "returned": Returned(1, "1"),
    "raised, cooldown": raised(cooldown("60s")),
    "raised, retry": raised(retry("1s")),
    "raised, permanent": raised(permanent()),
    "snoozed": Snoozed(Snooze(60), 60.0, "not yet"),
    "lost": Lost("taken"),
    "interrupted": Interrupted(SystemExit()),
    "terminated": Terminated(SystemExit(), "hard time limit"),
    "retried": ControlFlow(Exception(), runs_again=True),
    "ignored": ControlFlow(Exception(), runs_again=False, ended=Ended.IGNORED),
}


COUNTED = replace(RUNNING, quick_retries=3, cooldowns=2, retries=4, crashed_call=THEIRS)
UNCHANGED: dict[str, Any] = {
    "failures": 2,
    "crashes": 1,
    "quick_retries": 3,
    "cooldowns": 2,
    "failed": False,
}


def died(cause: ExitCause, **row: Any) -> Outcome:
    """The outcome that the main process writes for a dead child."""
    return child_exited(a_call(), replace(RUNNING, **row), cause)


def killed_while_closed(ended: Ended) -> Outcome | None:
    """What the main process writes if the hard time limit has killed the child after it closed its
    attempt so.
    """
    row = replace(RUNNING, state=State.PENDING, ended=ended, resumes=True)
    limit, failure = ExitCause.TIME_LIMIT, FAILURE
    return closed_for_celery(a_call(), row, row.owner, limit, final=True, failure=failure)


def test_a_child_that_was_killed_after_it_published_a_retry_changes_nothing() -> None:
    assert killed_while_closed(Ended.RETRIED) is None


@pytest.mark.parametrize("ended", [Ended.FAILED, Ended.SNOOZED, Ended.LOST])
def test_a_child_that_was_killed_before_it_published_a_copy_ends_the_call(ended: Ended) -> None:
    closed = killed_while_closed(ended)
    assert closed is not None
    assert (closed.state, closed.ended, closed.resumes) == (State.PENDING, Ended.FAILED, False)


def case(name: str, outcome: Callable[[], Outcome], **expected: Any) -> Any:
    return pytest.param(outcome, expected, id=name)


CASES = [
    case("a value is done and clears the counts", partial(closed, Returned({"a": 1}, '{"a": 1}'), COUNTED),
         state=State.DONE, ended=Ended.RETURNED, result='{"a": 1}', attempt=4, failures=0, crashes=0,
         retry_after=None, quick_retries=0, cooldowns=0, retries=4, crashed_call=THEIRS),
    case("a value that cannot be stored is done", partial(closed, Returned(object(), None, NOT_JSON)),
         state=State.DONE, result=None, reason=NOT_JSON),
    case("a lost attempt is given back and counts as nothing", partial(closed, Lost("taken"), COUNTED),
         state=State.PENDING, ended=Ended.LOST, reason="taken", attempt=3, retry_after=None, crashed_call=THEIRS,
         retries=4, **UNCHANGED),
    case("so is an interrupted one", partial(closed, Interrupted(SystemExit()), COUNTED),
         state=State.PENDING, ended=Ended.INTERRUPTED, attempt=3, retry_after=None, **UNCHANGED),
    case("a snooze spends no attempt and no count", partial(closed, ENDINGS["snoozed"], COUNTED),
         state=State.PENDING, ended=Ended.SNOOZED, reason="not yet", attempt=3, retry_after=60.0,
         failure=None, **UNCHANGED),
    *(case(f"a hard limit after {before} crashes is a crash with its pause",
           partial(closed, ENDINGS["terminated"], replace(RUNNING, crashes=before), max_crashes=9),
           state=State.PENDING, ended=Ended.TERMINATED, reason="hard time limit", crashes=before + 1, retry_after=pause)
      for before, pause in ((0, None), (1, 5.0), (2, 30.0))),
    case("the last crash allowed fails for good", partial(closed, ENDINGS["terminated"], replace(RUNNING, crashes=2)),
         state=State.FAILED, crashes=3, reason=CRASH_LOOP),
    *(case(f"{ended} by the user waits {delay}",
           partial(closed, ControlFlow(Exception(), runs_again=True, delay=delay, ended=ended), COUNTED),
           state=State.PENDING, ended=ended, retry_after=delay, attempt=4, retries=4 + (ended is Ended.RETRIED),
           **(UNCHANGED | {"crashes": 0}))
      for delay in (None, 0.0, 30.0) for ended in (Ended.RETRIED, Ended.REJECTED)),
    *(case(f"{ended} by the user is done without a result",
           partial(closed, ControlFlow(Exception(), runs_again=False, ended=ended)),
           state=State.DONE, result=None, reason=ended.value)
      for ended in (Ended.IGNORED, Ended.REPLACED)),
    *(case(f"{ended} by the user is over if each call runs",
           partial(closed, ControlFlow(Exception(), runs_again=False, ended=ended), runs="each"),
           finished={OURS: settlement.NO_RESULT})
      for ended in (Ended.IGNORED, Ended.REPLACED)),
    case("the retries of a message that the body has published count", partial(
             closed, ControlFlow(Exception(), runs_again=True, ended=Ended.RETRIED, retries=7), COUNTED),
         retries=7),
    *(case(f"a result of {length} characters is listed: {listed}",
           partial(closed, Returned(0, "0" * length), runs="each"),
           finished={OURS: "0" * length if listed else None})
      for length, listed in ((4096, True), (4097, False))),
    *(case(f"{ended} without its work leaves the key to the next one",
           partial(closed, ControlFlow(Exception(), runs_again=False, ended=ended, failure=FAILURE)),
           state=State.PENDING, ended=ended, failure=FAILURE, resumes=False, retry_after=None, failures=2)
      for ended in (Ended.REJECTED, Ended.FAILED, Ended.RETRIED)),
    case("a killed child is a crash and its call resumes", partial(died, ExitCause.KILLED, crashes=0, quick_retries=3),
         state=State.PENDING, ended=Ended.CRASHED, reason="its process died", attempt=4, crashes=1, retry_after=None,
         failures=2, quick_retries=3, resumes=True),
    case("a child killed by the hard limit is a crash whose call is over", partial(died, ExitCause.TIME_LIMIT),
         state=State.PENDING, ended=Ended.TERMINATED, resumes=False, attempt=4, crashes=2, retry_after=5.0),
    case("a revoked child is given back and counts as nothing", partial(died, ExitCause.REVOKED),
         state=State.PENDING, ended=Ended.TERMINATED, resumes=False, attempt=3, crashes=1, retry_after=None),
    case("a child killed by a cold shutdown is given back and resumes", partial(died, ExitCause.STOPPED),
         state=State.PENDING, ended=Ended.INTERRUPTED, resumes=True, attempt=3, crashes=1, retry_after=None),
    case("the last child of a crash loop fails for good", partial(died, ExitCause.KILLED, crashes=2),
         state=State.FAILED, crashes=3, reason=CRASH_LOOP),
    case("under rerun another call's crashes are not added",
         partial(child_exited, a_call(runs="each"), replace(RUNNING, crashes=2, crashed_call="another"),
                 ExitCause.KILLED),
         crashes=1, crashed_call=OURS),
    *(case(f"under rerun the crashes are those of the call that died: {name}",
           partial(closed, ENDINGS[name], replace(RUNNING, crashes=2, crashed_call="another"), runs="each"),
           crashes=crashes, crashed_call=call)
      for name, crashes, call in (("returned", 2, "another"), ("terminated", 1, OURS))),
    case("a cooldown waits and stores the failure", partial(closed, raised(cooldown("60s", jitter=0.0))),
         state=State.COOLING, ended=Ended.FAILED, retry_after=60.0, attempt=4, failures=3, cooldowns=1, crashes=0,
         failed=True, reason="error", failure=replace(FAILURE, rule="row", reason="error")),
    case("a quick retry waits as pending and is no failure",
         partial(closed, raised(retry("1s", jitter=0.0)), replace(RUNNING, cooldowns=2)),
         state=State.PENDING, ended=Ended.FAILED, retry_after=1.0, attempt=4, failures=2, quick_retries=1, cooldowns=2,
         crashes=0, failed=True),
    case("a permanent failure waits for nothing", partial(closed, raised(permanent())),
         state=State.FAILED, ended=Ended.FAILED, retry_after=None, failures=3, crashes=0, resumes=False),
    case("an effect in doubt waits for an operator",
         partial(closed, Raised(Uncertain("in doubt", "k", "charge", "i"), FAILURE, classified(cooldown("60s")))),
         state=State.UNCERTAIN, retry_after=None, retention=None, failures=2, resumes=False, finished=None),
    case("a failure of the group counts neither as failure nor as retry",
         partial(closed, raised(cooldown("60s", scope="group")), replace(RUNNING, quick_retries=1, cooldowns=2),
                 group=GROUP),
         state=State.COOLING, failures=2, quick_retries=0, cooldowns=2, crashes=0),
    *(case(f"a call resumes after {action.kind} if it can be rescheduled: {can}",
           partial(closed, raised(action), reschedulable=can, resume="always"), resumes=can)
      for action in (cooldown("60s"), retry("1s")) for can in (True, False)),
    case("a call with resume never does not resume",
         partial(closed, raised(cooldown("60s")), resume="never"), resumes=False),
    case("but is retried quickly all the same", partial(closed, raised(retry("1s")), resume="never"), resumes=True),
    case("under rerun a call that failed for good is over", partial(closed, raised(permanent()), runs="each"),
         finished={OURS: "!" + raised(permanent()).failure.text}),
    case("and one that cools is not", partial(closed, raised(cooldown("60s")), runs="each"), finished=None),
    case("giving up fails for good and gives the attempt back",
         partial(stopped_by_crash_loop, a_call(), replace(RUNNING, crashes=3)),
         state=State.FAILED, ended=Ended.CRASHED, reason=CRASH_LOOP, attempt=3, crashes=3),
    case("a pause after a crash retains how the attempt before it ended",
         partial(unrun, a_call(), replace(RUNNING, crashes=2, previous=Attempt(Ended.CRASHED, FAILURE, "host-b/9")),
                 5.0),
         state=State.PENDING, ended=Ended.CRASHED, failure=FAILURE, attempt=3, crashes=2, retry_after=5.0),
    case("it retains the counts and resumes, because this caller has got nothing",
         partial(unrun, a_call(), replace(COUNTED, previous=Attempt(Ended.FAILED, FAILURE, "host-b/9")), 0.0),
         retry_after=None, resumes=True, **UNCHANGED),
    case("without rerun no calls are remembered", partial(closed, Returned(1, "1")), finished=None),
]  # fmt: skip


@pytest.mark.parametrize(("outcome", "expected"), CASES)
def test_an_outcome_has_the_fields_of_its_ending(outcome, expected) -> None:
    found = outcome()
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_no_ending_leaves_the_row_running(ending: Ending) -> None:
    """A row found running would be counted as a crash."""
    assert closed(ending).state is not State.RUNNING


class TestResumes:
    @pytest.mark.parametrize("name", ["snoozed", "lost", "interrupted", "retried"])
    @pytest.mark.parametrize("reschedulable", [True, False])
    def test_a_rescheduled_call_resumes(self, name: str, reschedulable: bool) -> None:
        assert closed(ENDINGS[name], reschedulable=reschedulable).resumes is reschedulable

    @pytest.mark.parametrize("name", ["returned", "raised, permanent", "terminated", "ignored"])
    def test_what_is_over_does_not(self, name: str) -> None:
        assert not closed(ENDINGS[name]).resumes


class TestRetention:
    def test_an_ended_record_stays_for_the_retention(self) -> None:
        for name in ("returned", "ignored", "raised, permanent"):
            assert closed(ENDINGS[name], retention=60.0).retention == 60.0

    @pytest.mark.parametrize(
        "name", ["raised, cooldown", "raised, retry", "snoozed", "lost", "interrupted", "retried"]
    )
    @pytest.mark.parametrize("retention", [60.0, WEEK])
    def test_a_waiting_record_stays_until_it_may_run_and_as_long_as_its_counts_matter(
        self, name: str, retention: float
    ) -> None:
        """Else a key with a short retention forgot its failures during each cooldown, and never
        failed for good.
        """
        outcome = closed(ENDINGS[name], retention=retention)
        assert outcome.retention == (outcome.retry_after or 0.0) + max(retention, DAY)

    def test_the_record_of_an_attempt_given_back_unrun_stays_as_long(self) -> None:
        assert unrun(a_call(retention=60.0), RUNNING, 30.0).retention == 30.0 + DAY


class TestUnrunAttempts:
    def test_the_caller_and_the_record_agree_on_why(self) -> None:
        record = replace(RUNNING, crashes=3, crashed_at=NOW, started_at=NOW)
        verdict = after_claim(a_call(), record)
        outcome = stopped_by_crash_loop(a_call(), record)
        assert isinstance(verdict, Raise)
        assert isinstance(verdict.error, PermanentFailure)
        failed = a_record(State.FAILED, OURS, failure=outcome.failure)
        told = refusal(decide(a_call(), failed))
        assert isinstance(told, PermanentFailure)
        assert told.rule == verdict.error.rule

    @pytest.mark.parametrize(
        ("crashes", "pause"), [(0, 0.0), (1, 0.0), (2, 5.0), (3, 30.0), (99, 30.0)]
    )
    def test_crashes_pause_from_the_second_on(self, crashes: int, pause: float) -> None:
        assert crash_pause(crashes) == pause


class TestStoresAway:
    @pytest.mark.parametrize(
        ("tries", "most"), [(0, 5), (1, 10), (2, 20), (3, 40), (4, 60), (5, 60), (10_000, 60)]
    )
    def test_a_delivery_is_rescheduled_after_5_s_doubling_to_60(self, tries, most) -> None:
        assert store_pause(tries, 1.0) == pytest.approx(most)
        assert store_pause(tries, 0.0) == pytest.approx(0.8 * most)

    def test_an_outcome_is_tried_again_soon_and_then_every_two_seconds(self) -> None:
        pauses = [settle_pause(tries) for tries in range(8)]
        assert pauses == sorted(pauses)
        assert (*pauses[:3], pauses[-1], settle_pause(10_000)) == (0.05, 0.1, 0.2, 2.0, 2.0)

    def test_an_outcome_is_tried_for_a_minute(self) -> None:
        assert settle_until(a_call(), now=100.0) == 160.0

    def test_a_hard_limit_cuts_it_short(self) -> None:
        call = a_call(time_limit=30.0, received_at=90.0)
        assert settle_until(call, now=100.0) == 119.0
        assert settle_until(replace(call, time_limit=300.0), now=100.0) == 160.0
