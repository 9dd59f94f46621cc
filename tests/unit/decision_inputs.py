"""Calls, rows, holders, groups and failures as inputs of the decisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from celery_leases.call import Call
from celery_leases.decide.after_failure import after_failure
from celery_leases.decide.after_run import after_run
from celery_leases.decide.answers import Holder
from celery_leases.decide.before_run import before_run
from celery_leases.decide.endings import Ending, Raised
from celery_leases.decide.verdicts import Facts, Raise, Reschedule, Verdict
from celery_leases.failures.actions import Action, Reason, RuleMatch
from celery_leases.groups.group import ClosedGroup
from celery_leases.keys import CallKey
from celery_leases.options import OPTION_NAMES, LeaseOptions, OnBusy, OnDone
from celery_leases.record import Failure, Outcome, Record, State

NOW = 1_000_000_000_000
SECOND = 1_000_000
TODAY = 1_800_000_000.0
"""The wall clock, for times in messages."""
OURS, THEIRS = "call-ours", "call-theirs"
GROUP = "openai:large"
KEY = CallKey("invoice:1842", "t:billing.send|invoice:1842", "v1:same", {"month": "m1"})
ON_BUSY: tuple[OnBusy, ...] = (None, "wait", "raise", "ignore")
ON_DONE: tuple[OnDone, ...] = ("replay", "ignore", "raise")
WHEN_DONE: list[dict[str, Any]] = [*({"on_done": value} for value in ON_DONE), {"runs": "each"}]
"""Options that say what happens if another call has finished the key."""
FAILURE = Failure("ValueError", "boom")
FAILURES = {
    **{name: name for name in ("rules", "cooldown", "idempotent", "resume")},
    **{f"max_{name}": name for name in ("retries", "failures", "crashes")},
}
"""Names for the parts of ``lease_failures``: a call has ``retries`` too."""


def a_call(**changes: Any) -> Call:
    """A call of ours; a name of an option, or of :data:`FAILURES`, among *changes* changes that
    option, any other the call.
    """
    options = changes.pop("options", LeaseOptions(key="invoice:{id}"))
    parts = {part: changes.pop(name) for name, part in FAILURES.items() if name in changes}
    if parts:
        options = replace(options, failures=replace(options.failures, **parts))
    chosen = {
        name: changes.pop(name)
        for name in list(changes)
        if name in OPTION_NAMES and name not in ("key", "group")
    }
    options = replace(options, **chosen)
    key = replace(KEY, fingerprint=None, digests=None) if options.each_runs else KEY
    return Call(
        **({"task": "billing.send", "call_id": OURS, "key": key, "options": options} | changes)
    )


def a_record(state: State, call_id: str = THEIRS, **changes: Any) -> Record:
    """A row of the key, claimed by another call nine seconds ago."""
    defaults: dict[str, Any] = {
        "stored_key": KEY.stored, "task": "billing.send", "key": KEY.key, "state": state,
        "fence": NOW - 9 * SECOND, "owner": "token-1", "call_id": call_id, "holder": "host-a/17",
        "attempt": 1, "generation": 0, "failures": 0, "crashes": 0, "retries": 0,
        "lease_store": "redis://one", "lease_ttl": 15.0, "created_at": NOW - 9 * SECOND,
        "started_at": NOW - 9 * SECOND, "now": NOW, "fingerprint": KEY.fingerprint,
        "digests": KEY.digests,
    }  # fmt: skip
    return Record(**(defaults | changes))


def waiting(state: State, seconds: float, call_id: str = THEIRS, **changes: Any) -> Record:
    """A row that may run again in so many seconds."""
    return a_record(state, call_id, retry_at=NOW + round(seconds * SECOND), **changes)


RUNNING = a_record(State.RUNNING, OURS, attempt=4, failures=2, crashes=1)
FRESH = a_record(State.RUNNING, OURS, started_at=NOW)
MOST = 1 - 1e-9
"""The random number that makes a wait as long as possible."""


def held_by(call_id: str, remaining: float = 9.0) -> Holder:
    return Holder("token-1", call_id, "host-a/17", 15.0, remaining)


def a_closed_group(seconds: float, **changes: Any) -> ClosedGroup:
    """The group, closed for so many seconds; 0: due for a probe."""
    given: dict[str, Any] = {
        "group": GROUP, "in_a_row": 1, "closed_for": seconds, "reason": "rate_limited", "rule": "r",
    }  # fmt: skip
    return ClosedGroup(**(given | changes))


def probed(seconds: float) -> ClosedGroup:
    """The group, due for a probe, its probe's slot taken by another attempt for so many
    seconds.
    """
    return a_closed_group(0.0, probe="probe", probe_for=seconds)


def classified(
    action: Action, delay: float | None = None, reason: Reason = Reason.ERROR, rule: str = "row"
) -> RuleMatch:
    """A classification of a failure; *delay* is the server delay."""
    return RuleMatch(rule, action, reason, delay)


def raised(
    action: Action, delay: float | None = None, reason: Reason = Reason.ERROR, rule: str = "row"
) -> Raised:
    """A body that raised what the rules judge so."""
    return Raised(ValueError("boom"), FAILURE, classified(action, delay, reason, rule))


def decide(
    call: Call, record: Record | None = None, holder: Holder | None = None, **facts: Any
) -> Verdict:
    return before_run(call, Facts(record=record, holder=holder, **({"wall_time": TODAY} | facts)))


def refusal(verdict: Verdict) -> BaseException:
    """The error of a call that is refused."""
    assert isinstance(verdict, Raise), verdict
    return verdict.error


def reschedule(verdict: object) -> Reschedule:
    """The verdict, which must be a reschedule."""
    assert isinstance(verdict, Reschedule), verdict
    return verdict


def closed(call: Call, ending: Ending, record: Record = FRESH, rand: float = 0.0) -> Outcome:
    """The outcome of an attempt that ended so."""
    if isinstance(ending, Raised):
        return after_failure(call, record, ending, rand)
    return after_run(call, record, ending)


def after(raised_: Raised, record: Record = FRESH, rand: float = 0.0, **changes: Any) -> Outcome:
    """The outcome of a failure of a call of ours."""
    return after_failure(a_call(**changes), record, raised_, rand)


def cooled(raised_: Raised, record: Record = FRESH, rand: float = 0.0, **changes: Any) -> Outcome:
    """The outcome, which is to be a cooldown."""
    outcome = after(raised_, record, rand, **changes)
    assert outcome.state is State.COOLING, outcome
    return outcome


def delay_of(outcome: Outcome) -> float:
    """The seconds until the key may run again."""
    assert outcome.retry_after is not None, outcome
    return outcome.retry_after


def failure_in(outcome: Outcome) -> Failure:
    assert outcome.failure is not None, outcome
    return outcome.failure


def in_a_row(raised_: Raised, times: int, rand: float = MOST, **changes: Any) -> list[Outcome]:
    """The outcomes of the same failure, so many times one after the other."""
    record, outcomes = FRESH, []
    for _ in range(times):
        outcome = after(raised_, record, rand, **changes)
        outcomes.append(outcome)
        record = replace(
            record,
            failures=outcome.failures,
            quick_retries=outcome.quick_retries,
            cooldowns=outcome.cooldowns,
            failed_at=NOW,
        )
    return outcomes
