"""The answer for another call that comes too early, and the countdown of a reschedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases.decide.before_run import before_run
from celery_leases.decide.verdicts import Drop, Facts, Raise, Reschedule, Return, Run, Verdict
from celery_leases.decide.waiting import RETRY_GRACE, SHORTEST_DELAY, after_store_was_emptied
from celery_leases.errors import CoolingDown
from celery_leases.groups.group import Gate
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
    a_record,
    closed_gate,
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
    {"gate": closed_gate(300)},
    {"gate": probed(14)},
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
        grace = int(RETRY_GRACE * SECOND)
        early = a_record(state, OURS, retry_at=NOW + grace, ended=Ended.RETRIED)
        for ended in set(Ended) - {Ended.RETRIED}:
            assert not isinstance(decide(a_call(), replace(early, ended=ended, resumes=True)), Run)
        assert decide(a_call(), early) == Run()
        assert isinstance(decide(a_call(), replace(early, retry_at=NOW + grace + 1)), Reschedule)
        assert not isinstance(decide(a_call(), replace(early, call_id=THEIRS)), Run)

    @pytest.mark.parametrize("on_busy", ON_BUSY)
    def test_a_countdown_is_no_cooldown_and_no_holder(self, on_busy: OnBusy) -> None:
        verdict = reschedule(decide(a_call(on_busy=on_busy), waiting(State.PENDING, 30)))
        assert verdict.event_type == "backoff"

    def test_an_eager_call_gets_the_end_of_a_countdown(self) -> None:
        verdict = reschedule(decide(a_call(), waiting(State.PENDING, 30)))
        assert isinstance(verdict.refusal, CoolingDown)
        assert verdict.refusal.retry_after == 30.0

    @pytest.mark.parametrize("state", [State.RUNNING, State.DONE])
    def test_other_states_ignore_a_leftover_time(self, state: State) -> None:
        leftover = a_record(state, retry_at=NOW + 30 * SECOND, result="7")
        assert isinstance(decide(a_call(), leftover), Run | Return)


class TestAnotherCallMeetsACooldown:
    @pytest.mark.parametrize(
        "facts",
        [{}, {"gate": closed_gate(60)}, {"gate": closed_gate(600)}, {"gate": probed(14)}],
        ids=str,
    )
    def test_by_default_it_gets_the_time_of_the_next_try(self, facts: dict[str, Any]) -> None:
        assert isinstance(refusal(decide(a_call(), COOLING, **facts)), CoolingDown)

    @pytest.mark.parametrize("gate", [closed_gate(300), probed(14)], ids=["shut", "probed"])
    @pytest.mark.parametrize(
        "record",
        [None, waiting(State.COOLING, 0, failure=LIMITED), waiting(State.PENDING, 600)],
        ids=["fresh", "cooled", "pending"],
    )
    def test_by_default_it_waits_at_the_gate_of_its_group(self, record, gate) -> None:
        """A limit that another key has met is no failure of this call, which would leave no
        record.
        """
        verdict = reschedule(decide(a_call(), record, gate=gate))
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

    @pytest.mark.parametrize("on_busy", ON_BUSY)
    def test_it_may_run_once_the_time_is_over(self, on_busy: OnBusy) -> None:
        assert decide(a_call(on_busy=on_busy), waiting(State.COOLING, 0)) == Run()


class TestItsOwnCooldown:
    """The options speak of another call; a delivery of the same call may be its last copy."""

    @pytest.mark.parametrize("on_busy", ON_BUSY)
    @pytest.mark.parametrize("canvas", [False, True])
    @pytest.mark.parametrize("repeat", [False, True])
    @pytest.mark.parametrize(
        "gate", [None, closed_gate(60), probed(14)], ids=["open", "shut", "probed"]
    )
    def test_the_same_call_is_rescheduled_with_any_options(self, on_busy, canvas, repeat, gate):
        verdict = reschedule(
            decide(
                a_call(on_busy=on_busy, canvas=canvas, repeat=repeat),
                ITS_OWN,
                gate=gate,
                rand=0.0,
            )
        )
        assert verdict.started
        assert verdict.delay == pytest.approx(300.1)

    @pytest.mark.parametrize("gate", [closed_gate(60), probed(14)], ids=["shut", "probed"])
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
    def test_a_copy_without_a_trace_of_its_run_is_rescheduled_at_a_closed_gate(self, record, gate):
        """Its process died before it could publish a new copy: the row shows that the call has
        begun.
        """
        verdict = reschedule(decide(a_call(repeat=True), record, gate=gate, rand=0.0))
        assert verdict.started
        assert verdict.delay <= gate.blocked_for + 0.1

    def test_a_row_past_its_retention_is_ignored(self) -> None:
        gone = replace(ITS_OWN, expires_at=NOW)
        assert decide(a_call(), gone) == Run()
        assert isinstance(
            refusal(decide(a_call(on_busy="raise"), gone, gate=closed_gate(60))), CoolingDown
        )


class TestAShutGateStopsBodiesOnly:
    def test_a_call_whose_callbacks_are_out_is_dropped(self) -> None:
        assert isinstance(
            decide(a_call(canvas=True), None, gate=closed_gate(60), callbacks_sent=True), Drop
        )


class TestHowLong:
    @pytest.mark.parametrize(
        ("own", "gate", "waits"), [(300, 60, 300), (60, 300, 300), (0, 60, 60), (60, 0, 60)]
    )
    def test_a_body_starts_at_the_later_of_its_own_time_and_its_groups(self, own, gate, waits):
        record = waiting(State.COOLING, own, failure=LIMITED)
        error = cooling_down(
            decide(a_call(on_busy="raise"), record, gate=closed_gate(gate) if gate else None)
        )
        assert error.retry_after == waits
        verdict = reschedule(
            decide(
                a_call(on_busy="wait"),
                record,
                gate=closed_gate(gate) if gate else None,
                rand=0.0,
            )
        )
        assert verdict.delay == pytest.approx(waits + 0.1)

    def test_a_call_that_waits_for_a_probe_is_rescheduled_for_less_than_its_slot(self) -> None:
        delays = [
            reschedule(decide(a_call(canvas=True, reschedules=n), gate=probed(14), rand=0.0)).delay
            for n in range(5)
        ]
        assert delays == pytest.approx([1.1, 2.1, 4.1, 8.1, 14.1])

    def test_who_waits_for_its_own_time_does_not_come_before_it_for_a_probe(self) -> None:
        verdict = reschedule(decide(a_call(canvas=True), COOLING, gate=probed(14), rand=0.0))
        assert verdict.delay == pytest.approx(300.1)

    @given(st.floats(0, 1, exclude_max=True))
    def test_no_copy_arrives_early_and_the_keys_of_a_group_are_spread(self, rand: float) -> None:
        by_key = reschedule(decide(a_call(canvas=True), COOLING, rand=rand)).delay
        by_gate = reschedule(decide(a_call(canvas=True), gate=closed_gate(300), rand=rand)).delay
        assert 300.1 <= by_key <= 300.5
        assert 300.1 <= by_gate <= 302.0

    @pytest.mark.parametrize("gate", [None, closed_gate(7_200)], ids=["key", "gate"])
    def test_a_long_wait_goes_in_hops(self, gate: Gate | None) -> None:
        verdict = reschedule(
            decide(
                a_call(longest_countdown=30.0),
                replace(ITS_OWN, retry_at=NOW + 7_200 * SECOND),
                gate=gate,
            )
        )
        assert verdict.delay == 30.0


class TestWhatIsTold:
    def test_the_error_carries_everything_a_program_needs(self) -> None:
        error = cooling_down(decide(a_call(), COOLING))
        assert (error.key, error.retry_at, error.retry_after) == (KEY.key, TODAY + 300.0, 300.0)
        assert (error.reason, error.rule) == ("rate_limited", "status:429")
        assert (
            str(error)
            == "Retry available in 5 minutes: invoice:1842 is cooling down (rate_limited)"
        )

    @pytest.mark.parametrize(
        ("record", "gate", "scope"),
        [
            (COOLING, None, "key"),
            (replace(COOLING, failure=replace(LIMITED, group="g")), None, "group"),
            (None, closed_gate(300), "group"),
            (COOLING, closed_gate(2), "key"),
            (COOLING, closed_gate(900), "group"),
        ],
    )
    def test_it_names_the_key_or_the_group_that_waits(self, record, gate, scope) -> None:
        assert cooling_down(decide(a_call(on_busy="raise"), record, gate=gate)).scope == scope

    def test_a_closed_gate_names_its_group(self) -> None:
        error = cooling_down(
            decide(
                a_call(on_busy="raise"),
                gate=closed_gate(300, reason="out_of_quota", rule="quota"),
            )
        )
        assert (error.key, error.retry_after, error.reason, error.rule) == (
            KEY.key, 300.0, "out_of_quota", "quota",
        )  # fmt: skip
        assert f"cooldown group {GROUP}" in str(error)

    @pytest.mark.parametrize(
        ("own", "gate", "by"), [(300, 60, "row"), (60, 300, "gate"), (60, 60, "gate")]
    )
    def test_the_longer_wait_has_the_reason(self, own: int, gate: int, by: str) -> None:
        record = waiting(State.COOLING, own, failure=replace(LIMITED, rule="row"))
        assert (
            cooling_down(decide(a_call(), record, gate=closed_gate(gate, rule="gate"))).rule == by
        )

    def test_an_ambiguous_failure_is_named_as_such(self) -> None:
        record = waiting(
            State.COOLING,
            60,
            failure=Failure("TimeoutError", "", "u", "outcome_unknown", ambiguous=True),
        )
        assert "(outcome_unknown; the call may have been executed)" in str(
            cooling_down(decide(a_call(), record))
        )

    def test_a_row_without_a_failure_still_says_when(self) -> None:
        error = cooling_down(decide(a_call(), waiting(State.COOLING, 300)))
        assert (error.reason, error.rule) == (None, None)
        assert str(error) == "Retry available in 5 minutes: invoice:1842 is cooling down"

    @given(st.floats(0.001, 30_000))
    def test_no_shown_time_is_too_short(self, seconds: float) -> None:
        record = waiting(State.COOLING, seconds, failure=LIMITED)
        error = cooling_down(decide(a_call(), record))
        assert error.retry_after == record.waits
        assert f"Retry available in {in_words(record.waits)}:" in str(error)
        at_that_time = replace(record, now=record.now + round(error.retry_after * SECOND))
        assert decide(a_call(), at_that_time) == Run()

    @pytest.mark.parametrize(
        ("seconds", "words"),
        [
            (0.4, "1 second"), (1.0, "1 second"), (44.2, "45 seconds"), (66.0, "2 minutes"),
            (299.2, "5 minutes"), (300.0, "5 minutes"), (304.9, "5 minutes"), (305.1, "6 minutes"),
            (3606.0, "2 hours"),
        ],
    )  # fmt: skip
    def test_times_are_rounded_up(self, seconds: float, words: str) -> None:
        error = cooling_down(decide(a_call(), waiting(State.COOLING, seconds)))
        assert str(error).startswith(f"Retry available in {words}: ")

    def test_events_and_eager_callers_of_a_reschedule_get_the_same_text(self) -> None:
        verdict = reschedule(decide(a_call(on_busy="wait"), COOLING))
        assert isinstance(verdict.refusal, CoolingDown)
        assert verdict.reason == str(verdict.refusal)
        assert verdict.refusal.retry_after == 300.0


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
