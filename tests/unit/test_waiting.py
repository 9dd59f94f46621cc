"""The answer for another call that comes too early, and the countdown of a reschedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases.decide.before_run import before_run
from celery_leases.decide.verdicts import (
    Drop,
    Facts,
    Raise,
    Reschedule,
    Return,
    Run,
    TaskEvent,
    Verdict,
    Wait,
)
from celery_leases.decide.waiting import (
    SHORTEST_DELAY,
    after_lapsed_lease,
    after_store_was_emptied,
)
from celery_leases.errors import CoolingDown
from celery_leases.groups.group import ClosedGroup
from celery_leases.groups.slots import Ask, Room
from celery_leases.options import OnBusy
from celery_leases.record import Ended, Failure, State
from celery_leases.text.durations import in_words
from tests.unit.decision_inputs import (
    GROUP,
    KEY,
    NOW,
    ON_BUSY,
    OURS,
    SECOND,
    THEIRS,
    TODAY,
    a_call,
    a_closed_group,
    a_record,
    decide,
    held_by,
    probed,
    refusal,
    reschedule,
    waiting,
)

LIMITED = Failure("openai.RateLimitError", "slow down", "status:429", "rate_limited")
COOLING = waiting(State.COOLING, 300, ended=Ended.FAILED, resumes=True, failure=LIMITED)
ITS_OWN = replace(COOLING, call_id=OURS)
CLOSED: list[dict[str, Any]] = [
    {"record": COOLING},
    {"closed_group": a_closed_group(300)},
    {"closed_group": probed(14)},
]
"""What blocks another call: the key's own cooldown, its group's, and its group's probe."""
NAMES = ["cooling", "shut", "probed"]


def cooling_down(verdict: Verdict) -> CoolingDown:
    error = refusal(verdict)
    assert isinstance(error, CoolingDown)
    return error


class TestWaitingForItsRetryTime:
    def test_another_call_waits_until_then(self) -> None:
        verdict = reschedule(decide(a_call(), waiting(State.PENDING, 30), rand=0.0))
        assert verdict.delay == pytest.approx(30.1)
        assert not verdict.started
        assert isinstance(verdict.refusal, CoolingDown), "for an eager caller"
        assert verdict.refusal.retry_after == 30.0

    @pytest.mark.parametrize("state", [State.PENDING, State.COOLING])
    def test_the_call_that_waits_is_rescheduled_until_then(self, state: State) -> None:
        verdict = reschedule(decide(a_call(), waiting(state, 30, OURS), rand=0.0))
        assert verdict.delay == pytest.approx(30.1)
        assert verdict.started

    @pytest.mark.parametrize("state", [State.PENDING, State.COOLING])
    @pytest.mark.parametrize("retry_at", [None, NOW, NOW - SECOND])
    def test_it_runs_once_the_time_is_over(self, state: State, retry_at: int | None) -> None:
        assert decide(a_call(), a_record(state, retry_at=retry_at)) == Run()

    @pytest.mark.parametrize("state", [State.PENDING, State.COOLING])
    def test_the_call_that_waits_is_granted_the_travel_time_of_its_message(self, state) -> None:
        """Celery sends its retry before the row is closed; nothing else may come early."""
        early = a_record(state, OURS, retry_at=NOW + SECOND, ended=Ended.RETRIED)
        for ended in set(Ended) - {Ended.RETRIED}:
            assert not isinstance(decide(a_call(), replace(early, ended=ended, resumes=True)), Run)
        assert decide(a_call(), early) == Run()
        assert isinstance(decide(a_call(), replace(early, retry_at=NOW + SECOND + 1)), Reschedule)
        assert not isinstance(decide(a_call(), replace(early, call_id=THEIRS)), Run)

    @pytest.mark.parametrize("on_busy", ON_BUSY)
    def test_a_countdown_is_no_cooldown_and_no_holder(self, on_busy: OnBusy) -> None:
        verdict = reschedule(decide(a_call(on_busy=on_busy), waiting(State.PENDING, 30)))
        assert verdict.event_type == "backoff"

    @pytest.mark.parametrize("state", [State.RUNNING, State.DONE])
    def test_other_states_ignore_a_leftover_time(self, state: State) -> None:
        leftover = a_record(state, retry_at=NOW + 30 * SECOND, result="7")
        assert isinstance(decide(a_call(), leftover), Run | Return)


class TestAnotherCallMeetsACooldown:
    @pytest.mark.parametrize(
        "facts",
        [
            {},
            {"closed_group": a_closed_group(60)},
            {"closed_group": a_closed_group(600)},
            {"closed_group": probed(14)},
        ],
        ids=str,
    )
    def test_by_default_it_gets_the_time_of_the_next_try(self, facts: dict[str, Any]) -> None:
        assert isinstance(refusal(decide(a_call(), COOLING, **facts)), CoolingDown)

    @pytest.mark.parametrize(
        "closed_group", [a_closed_group(300), probed(14)], ids=["shut", "probed"]
    )
    @pytest.mark.parametrize(
        "record",
        [None, waiting(State.COOLING, 0, failure=LIMITED), waiting(State.PENDING, 600)],
        ids=["fresh", "cooled", "pending"],
    )
    def test_by_default_it_waits_at_the_group_of_its_group(self, record, closed_group) -> None:
        """A limit that another key has met is no failure of this call, which would leave no
        record.
        """
        verdict = reschedule(decide(a_call(), record, closed_group=closed_group))
        assert (verdict.event_type, verdict.started) == ("cooldown", False)

    @pytest.mark.parametrize("facts", CLOSED, ids=NAMES)
    def test_by_default_it_is_rescheduled_if_a_canvas_waits_for_it(self, facts) -> None:
        """A chain, chord or group would end with the error."""
        verdict = reschedule(decide(a_call(canvas=True), **facts))
        assert (verdict.event_type, verdict.started) == ("cooldown", False)

    @pytest.mark.parametrize("facts", CLOSED, ids=NAMES)
    @pytest.mark.parametrize("canvas", [False, True])
    def test_the_option_decides(self, facts: dict[str, Any], canvas: bool) -> None:
        told = decide(a_call(on_busy="raise", canvas=canvas), **facts)
        back = decide(a_call(on_busy="wait", canvas=canvas), **facts)
        dropped = decide(a_call(on_busy="ignore", canvas=canvas), **facts)
        assert isinstance(told, Raise)
        assert isinstance(back, Reschedule)
        assert isinstance(dropped, Reschedule if canvas else Drop), (
            "a dropped member would hang the chord"
        )

    @pytest.mark.parametrize("facts", CLOSED, ids=NAMES)
    @pytest.mark.parametrize("on_busy", ON_BUSY)
    @pytest.mark.parametrize("canvas", [False, True])
    def test_a_call_that_has_begun_is_always_rescheduled(self, facts, on_busy, canvas) -> None:
        call = a_call(started=True, on_busy=on_busy, canvas=canvas)
        assert isinstance(decide(call, **facts), Reschedule)


class TestItsOwnCooldown:
    """The options speak of another call; a delivery of the same call may be its last copy."""

    @pytest.mark.parametrize("on_busy", ON_BUSY)
    @pytest.mark.parametrize("canvas", [False, True])
    @pytest.mark.parametrize("repeat", [False, True])
    @pytest.mark.parametrize(
        "closed_group", [None, a_closed_group(60), probed(14)], ids=["open", "shut", "probed"]
    )
    def test_the_same_call_is_rescheduled_with_any_options(
        self, on_busy, canvas, repeat, closed_group
    ):
        verdict = reschedule(
            decide(
                a_call(on_busy=on_busy, canvas=canvas, repeat=repeat),
                ITS_OWN,
                closed_group=closed_group,
                rand=0.0,
            )
        )
        assert verdict.started
        assert verdict.delay == pytest.approx(300.1)

    @pytest.mark.parametrize(
        "closed_group", [a_closed_group(60), probed(14)], ids=["shut", "probed"]
    )
    @pytest.mark.parametrize(
        "record",
        [
            replace(ITS_OWN, retry_at=NOW),
            replace(ITS_OWN, retry_at=NOW + SECOND // 2),
            a_record(State.PENDING, OURS, ended=Ended.SNOOZED, resumes=True),
            a_record(State.PENDING, OURS, ended=Ended.LOST),
            a_record(State.RUNNING, OURS),
        ],
        ids=["cooled", "nearly cooled", "snoozed", "lost", "crashed"],
    )
    def test_a_copy_without_a_trace_of_its_run_is_rescheduled_at_a_closed_group(
        self, record, closed_group
    ):
        """Its process died before it could publish a new copy: the row shows that the call has
        begun.
        """
        verdict = reschedule(
            decide(a_call(repeat=True), record, closed_group=closed_group, rand=0.0)
        )
        assert verdict.started
        assert verdict.delay <= closed_group.blocked_for + 0.1

    def test_a_row_past_its_retention_is_ignored(self) -> None:
        gone = replace(ITS_OWN, expires_at=NOW)
        assert decide(a_call(), gone) == Run()
        assert isinstance(
            refusal(decide(a_call(on_busy="raise"), gone, closed_group=a_closed_group(60))),
            CoolingDown,
        )


class TestAClosedGroupStopsBodiesOnly:
    def test_a_call_whose_callbacks_are_out_is_dropped(self) -> None:
        assert isinstance(
            decide(a_call(canvas=True), None, closed_group=a_closed_group(60), callbacks_sent=True),
            Drop,
        )


HOPS = {"longest_countdown": 30.0, "reschedules": 20, "on_busy": "wait"}
"""A broker that can be trusted with 30 s at a time."""
DELAYS = [
    *((f"a body starts at the later of its own time, {own}, and its group's, {group}", {"on_busy": "wait"},
       {"record": waiting(State.COOLING, own, failure=LIMITED),
        "closed_group": a_closed_group(group) if group else None},
       waits + 0.1)
      for own, group, waits in (
          (300, 60, 300), (60, 300, 300), (0, 60, 60), (60, 0, 60), (0.5, 0, 0.5), (0, 0.5, 0.5))),
    *((f"the {n}. wait for a probe is shorter than its slot", {"canvas": True, "reschedules": n},
       {"closed_group": probed(14)}, delay) for n, delay in enumerate((1.1, 2.1, 4.1, 8.1, 14.1))),
    ("who waits for its own time does not come before it for a probe", {"canvas": True},
     {"record": COOLING, "closed_group": probed(14)}, 300.1),
    ("a hop to the end of its own lease", HOPS, {"holder": held_by(OURS, 7_200.0)}, 30.0),
    ("to that of another call", HOPS, {"holder": held_by(THEIRS, 7_200.0)}, 30.0),
    ("to its retry time", HOPS, {"record": waiting(State.PENDING, 7_200)}, 30.0),
    ("to the end of its cooldown", HOPS, {"record": waiting(State.COOLING, 7_200, OURS)}, 30.0),
    ("to that of its group's", HOPS, {"closed_group": a_closed_group(7_200)}, 30.0),
    ("to that of both", HOPS, {"record": waiting(State.COOLING, 7_200, OURS),
     "closed_group": a_closed_group(7_200)}, 30.0),
    ("a hop is never no hop", {}, {"holder": held_by(OURS, -5.0)}, SHORTEST_DELAY),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "facts", "delay"), [row[1:] for row in DELAYS], ids=[row[0] for row in DELAYS]
)
def test_a_call_comes_back_after(call, facts, delay) -> None:
    verdict = reschedule(decide(a_call(**call), rand=0.0, **facts))
    assert verdict.delay == pytest.approx(delay)


@given(st.floats(0, 1, exclude_max=True))
def test_no_copy_arrives_early_and_the_keys_of_a_group_are_spread(rand: float) -> None:
    by_key = reschedule(decide(a_call(canvas=True), COOLING, rand=rand)).delay
    by_group = reschedule(
        decide(a_call(canvas=True), closed_group=a_closed_group(300), rand=rand)
    ).delay
    assert 300.1 <= by_key <= 300.5
    assert 300.1 <= by_group <= 302.0


def test_the_copy_of_a_failed_call_is_its_retry_and_has_the_fence_of_its_failure() -> None:
    for resumes in (True, False):
        row = replace(ITS_OWN, resumes=resumes)
        verdict = reschedule(decide(a_call(), row))
        assert (verdict.retrying, verdict.failure_fence) == (
            resumes,
            None if resumes else row.fence,
        )
    another = reschedule(decide(a_call(on_busy="wait"), COOLING))
    assert (another.retrying, another.failure_fence) == (False, None)
    new = reschedule(decide(a_call(), closed_group=a_closed_group(300)))
    assert (new.retrying, new.failure_fence) == (False, None)


@pytest.mark.parametrize(("waited", "verdict"), [(0.0, Wait), (14.9, Wait), (15.0, Reschedule)])
def test_the_holder_of_an_expired_lease_gets_fifteen_seconds(waited, verdict) -> None:
    for rand, delay in ((0.0, 0.2), (1.0, 0.5)) if verdict is Wait else ((0.0, 1.0), (1.0, 2.0)):
        again = after_lapsed_lease(waited, rand)
        assert isinstance(again, verdict)
        assert again.delay == pytest.approx(delay)


def test_a_running_key_is_left_alone_until_its_holder_has_had_its_ttl() -> None:
    running = a_record(State.RUNNING, lease_ttl=15.0)
    for rand, delay in ((0.0, 11.0), (1.0, 11.4)):
        verdict = reschedule(after_store_was_emptied(a_call(), running, 4.0, rand))
        assert verdict.delay == pytest.approx(delay)


UNSURE = Failure("TimeoutError", "", "u", "outcome_unknown", ambiguous=True)
OF_ROW = replace(LIMITED, rule="row")
WAITS = "Retry available in 5 minutes: invoice:1842 is cooling down"
TOLD: list[tuple[Any, ClosedGroup | None, dict[str, Any]]] = [
    (COOLING, None, {"key": KEY.key, "retry_at": TODAY + 300.0, "retry_after": 300.0, "reason": "rate_limited",
                     "rule": "status:429", "scope": "key", "text": f"{WAITS} (rate_limited)"}),
    (replace(COOLING, failure=replace(LIMITED, group="g")), None, {"scope": "group"}),
    (None, a_closed_group(300), {"scope": "group"}),
    (COOLING, a_closed_group(2), {"scope": "key"}),
    (COOLING, a_closed_group(900), {"scope": "group"}),
    (None, a_closed_group(300, reason="out_of_quota", rule="quota"),
     {"key": KEY.key, "retry_after": 300.0, "reason": "out_of_quota", "rule": "quota",
     "text": f"cooldown group {GROUP}"}),
    *((None, a_closed_group(300, reason=reason, message=message), {"text": f"cooling down ({told})"})
      for reason, message, told in (("asked", "until noon", "until noon"), ("asked", "", "asked"),
                                    ("rate_limited", "slow", "rate_limited"))),
    # The longer wait has the reason.
    (waiting(State.COOLING, 300, failure=OF_ROW), a_closed_group(60, rule="group"), {"rule": "row",
    "retry_after": 300.0}),
    (waiting(State.COOLING, 60, failure=OF_ROW), a_closed_group(300, rule="group"), {"rule": "group",
    "retry_after": 300.0}),
    (waiting(State.COOLING, 60, failure=OF_ROW), a_closed_group(60, rule="group"),
    {"rule": "group", "retry_after": 60.0}),
    (waiting(State.COOLING, 60, failure=UNSURE), None,
    {"text": "(outcome_unknown; the call may have been executed)"}),
    (waiting(State.COOLING, 300), None, {"reason": None, "rule": None, "text": WAITS}),
    *((waiting(State.COOLING, seconds), None, {"text": f"Retry available in {words}: "}) for seconds, words in (
        (0.4, "1 second"), (1.0, "1 second"), (44.2, "45 seconds"), (66.0, "2 minutes"), (299.2, "5 minutes"),
        (300.0, "5 minutes"), (304.9, "5 minutes"), (305.1, "6 minutes"), (3606.0, "2 hours"))),
]  # fmt: skip


@pytest.mark.parametrize(("record", "closed_group", "expected"), TOLD, ids=range(len(TOLD)))
def test_the_error_says_who_waits_for_how_long_and_why(record, closed_group, expected) -> None:
    error = cooling_down(decide(a_call(on_busy="raise"), record, closed_group=closed_group))
    told = {"text": str(error)} | vars(error)
    assert expected.get("text", "") in told["text"]
    assert {name: told[name] for name in expected if name != "text"} == {
        name: value for name, value in expected.items() if name != "text"
    }
    back = reschedule(decide(a_call(on_busy="wait"), record, closed_group=closed_group))
    assert (back.reason, repr(back.refusal)) == (str(error), repr(error)), "eager callers"
    assert back.task_event == TaskEvent("cooldown", error.retry_after, str(error))
    dropped = decide(a_call(on_busy="ignore"), record, closed_group=closed_group)
    assert isinstance(dropped, Drop)
    assert dropped.why == str(error)


@given(st.floats(0.001, 30_000))
def test_no_shown_time_is_too_short(seconds: float) -> None:
    record = waiting(State.COOLING, seconds, failure=LIMITED)
    error = cooling_down(decide(a_call(), record))
    assert error.retry_after == record.waits
    assert f"Retry available in {in_words(record.waits)}:" in str(error)
    at_that_time = replace(record, now=record.now + round(error.retry_after * SECOND))
    assert decide(a_call(), at_that_time) == Run()


class TestAFullGroup:
    """A call whose group is full waits for its turn."""

    @pytest.mark.parametrize(
        ("room", "reason", "why", "wait"),
        [
            (Room(0, 0.0, 3, 3, 1_000.4), "group_full", "3 of 3 calls run", 1.0),
            (Room(0, 0.0, 1, 3, 1_000.4), "group_full", "the turn of earlier calls", 1.0),
            (Room(0, 7.5, 0, 0, 1_000.4), "group_rate", "as many have begun as its rate", 7.5),
            # The rate alone would let it begin at once, or soon.
            (Room(0, 0.15, 3, 3, 1_000.4), "group_full", "3 of 3 calls run", 1.0),
            (Room(0, 7.5, 3, 3, 1_000.4), "group_full", "3 of 3 calls run", 7.5),
            (Room(0, 0.4, 1, 3, 1_000.4), "group_full", "the turn of earlier calls", 1.0),
        ],
    )
    def test_it_is_rescheduled_with_its_place(self, room, reason, why, wait) -> None:
        call = a_call(group="g", ask=Ask(3))
        verdict = reschedule(decide(call, room=room))
        assert why in verdict.reason
        assert verdict.full_since == 1_000.0
        assert isinstance(verdict.refusal, CoolingDown)
        refusal = verdict.refusal
        assert (refusal.reason, refusal.scope, refusal.retry_after) == (reason, "group", wait)
        assert refusal.retry_at == TODAY + wait
        kept = before_run(replace(call, ask=Ask(3, since=5.0)), Facts(room=room))
        assert isinstance(kept, Reschedule)
        assert (kept.full_since, kept.event_type) == (5.0, "held")

    @pytest.mark.parametrize(
        ("changes", "wait", "delay"),
        [
            *(({"reschedules": n}, 0.0, d) for n, d in enumerate((1.0, 2.0, 4.0, 8.0, 15.0))),
            ({}, 7.5, 7.5),
            ({"starts_when_free": True}, 0.0, 45.0),
            ({"starts_when_free": True}, 70.0, 70.0),
        ],
    )
    def test_it_tries_again_when_the_rate_allows_it_and_less_and_less_often(
        self, changes, wait, delay
    ) -> None:
        verdict = before_run(
            a_call(group="g", ask=Ask(3), **changes), Facts(room=Room(0, wait, 3, 3, 1.0))
        )
        assert isinstance(verdict, Reschedule)
        assert verdict.delay == pytest.approx(delay + 0.1)

    def test_lease_on_busy_decides_for_a_call_that_has_not_begun(self) -> None:
        facts = Facts(room=Room(0, 0.0, 3, 3, 1.0))
        assert isinstance(before_run(a_call(on_busy="raise"), facts), Raise)
        assert isinstance(before_run(a_call(on_busy="ignore"), facts), Drop)
        assert isinstance(before_run(a_call(on_busy="raise", started=True), facts), Reschedule)
