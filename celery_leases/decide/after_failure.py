"""The outcome of an attempt whose body raised: a cooldown, a quick retry, or failed for good. Pure
functions of the classification and of the counts in the record.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, assert_never

from celery_leases.call import Call
from celery_leases.decide.after_run import (
    NO_RESULT,
    crashes_of_another_call,
    finished,
    unchanged,
    with_retention,
    without_failures,
)
from celery_leases.decide.endings import Raised
from celery_leases.errors import Uncertain
from celery_leases.failures.actions import Classification, Reason, Ruling, cooldown
from celery_leases.failures.cooldown_policies import CooldownPolicy
from celery_leases.groups.group import Closing
from celery_leases.options import LeaseOptions
from celery_leases.record import Ended, Outcome, Record, State

JITTER: Final = 0.1
LONGEST_JITTER: Final = 5.0
"""A delay from a server is made longer by up to a tenth, at most 5 s. In a simulation with a limit
that counts rejected calls too, 600 keys that ran again exactly at the given time never finished.
"""
SHORTEST_SERVER_DELAY: Final = 1.0
"""Seconds of a cooldown at least. Some servers send delays of milliseconds, which do not grow."""

_AMBIGUOUS: Final = cooldown("60s", ambiguous=True)
"""The action for an ambiguous failure whose rule has none, if the task is not idempotent."""
_RETRIES_USED_UP: Final = cooldown()
"""The action after the last quick retry, if the rule has none."""


def after_failure(call: Call, record: Record, raised: Raised, rand: float) -> Outcome:
    """The outcome of an attempt whose body has raised; *rand* is a random number in [0, 1) for
    jitter.

    A cooldown is ``cooling``, a quick retry ``pending``, and the end ``failed``, or ``uncertain``
    if the outcome or the reply of an effect is unknown.
    """
    classification = raised.classification
    closed = replace(
        unchanged(call, record), ended=Ended.FAILED, failed=True, traceback=raised.traceback
    )
    if not crashes_of_another_call(call, record):
        closed = replace(closed, crashes=0)
    if _was_quiet(call, record, classification):
        closed = without_failures(closed)
    if isinstance(raised.error, Uncertain):
        reason = Reason.UNCERTAIN.value
        failure = replace(raised.failure, rule=reason, reason=reason, ambiguous=True, operator=True)
        return replace(
            closed, state=State.UNCERTAIN, retention=None, failure=failure, reason=reason
        )
    ruling, reason = _effective(call, classification, closed)
    in_group = ruling.scope == "group" and call.group is not None
    failure = replace(
        raised.failure,
        rule=classification.rule,
        reason=reason,
        group=call.group if in_group else None,
        ambiguous=ruling.ambiguous,
        operator=ruling.operator,
    )
    closed = replace(closed, failure=failure, reason=reason)
    match ruling.kind:
        case "permanent":
            return replace(
                closed,
                state=State.FAILED,
                failures=closed.failures + 1,
                finished=finished(call, record, NO_RESULT),
            )
        case "retry":
            number = closed.quick_retries + 1
            policy = ruling.policy or call.options.failures.cooldown
            delay = _delay(ruling, policy, classification, number, rand)
            again = replace(
                closed, quick_retries=number, retry_after=delay, resumes=call.reschedulable
            )
            return with_retention(call, again)
        case "cooldown":
            return with_retention(call, _cool_down(call, ruling, classification, closed, rand))
        case _ as never:
            assert_never(never)


def resumes_after_cooldown(
    options: LeaseOptions, classification: Classification, ruling: Ruling
) -> bool:
    """Whether a call runs again by itself after a cooldown; *ruling* is the action that applies.

    With ``Failures(resume="transient")`` it does if the failure is transient: its rule says retry,
    or the group failed, or the server or the body has given a delay. A call that may have been
    executed runs again only with ``Failures(idempotent=True)``.
    """
    if options.failures.resume != "transient":
        return options.failures.resume == "always"
    if ruling.ambiguous and not options.failures.idempotent:
        return False
    timed = classification.delay is not None and ruling.server_delay != "ignore"
    asked = classification.reason is Reason.ASKED
    return classification.ruling.kind == "retry" or ruling.scope == "group" or timed or asked


def leaves_gate_half_open(outcome: Outcome) -> bool:
    """Whether a probe that failed so leaves its gate half-open: the failure does not show whether
    the group works.
    """
    failure = outcome.failure
    assert failure is not None
    unrelated = failure.reason in (Reason.INFRASTRUCTURE, Reason.RETRIES_USED_UP)
    return outcome.state is State.PENDING or failure.ambiguous or unrelated


def _was_quiet(call: Call, record: Record, classification: Classification) -> bool:
    """Whether the last failure was so long ago that the counts start again at zero."""
    if record.failed_at is None:
        return False
    return (record.started_at - record.failed_at) / 1e6 > _quiet(call, classification)


def _quiet(call: Call, classification: Classification) -> float:
    """Seconds without a failure after which the counts start again at zero: longer than any wait
    that the key may have had.
    """
    ruling = classification.ruling
    rulings = [one for one in (ruling, ruling.if_not_idempotent, ruling.then) if one is not None]
    policies = [
        call.options.failures.cooldown,
        *(one.policy for one in rulings if one.policy is not None),
    ]
    return max(2 * (classification.delay or 0.0), *(policy.quiet for policy in policies))


def _effective(
    call: Call, classification: Classification, counts: Outcome
) -> tuple[Ruling, Reason]:
    """The action that applies to this task now, and its reason: an ambiguous failure, a failure
    after the last retry and the last failure that is allowed get another action than their rule's.
    """
    ruling, reason = classification.ruling, classification.reason
    while ruling.kind == "retry":
        if ruling.ambiguous and not call.options.failures.idempotent:
            ruling = ruling.if_not_idempotent or _AMBIGUOUS
            continue
        retries = ruling.max if ruling.max is not None else call.options.failures.retries
        if counts.quick_retries < retries:
            break
        ambiguous = ruling.ambiguous
        reason = reason if ruling.then else Reason.RETRIES_USED_UP
        ruling = ruling.then or _RETRIES_USED_UP
        ruling = replace(ruling, ambiguous=ruling.ambiguous or ambiguous)
    # Failures of the group do not count: the key does not cause a rate limit or an empty quota.
    too_many = ruling.scope == "key" and counts.failures + 1 >= call.options.failures.failures
    if ruling.kind == "cooldown" and too_many:
        return Ruling(
            "permanent", ambiguous=ruling.ambiguous, operator=ruling.operator
        ), Reason.TOO_MANY_FAILURES
    return ruling, reason


def _cool_down(
    call: Call, ruling: Ruling, classification: Classification, closed: Outcome, rand: float
) -> Outcome:
    policy, failure = ruling.policy or call.options.failures.cooldown, closed.failure
    resumes = call.reschedulable and resumes_after_cooldown(call.options, classification, ruling)
    cooling = replace(closed, state=State.COOLING, quick_retries=0, resumes=resumes)
    if failure is not None and failure.group is not None:
        given = _server_delay(ruling, classification, rand)
        closing = Closing(
            policy,
            failure.reason or "",
            failure.rule,
            failure.message,
            given,
            ruling.server_delay == "instead",
        )
        return replace(cooling, retry_after=closing.wait(1), closing=closing)
    number = closed.cooldowns + 1
    return replace(
        cooling,
        retry_after=_delay(ruling, policy, classification, number, rand),
        failures=closed.failures + (ruling.scope == "key"),
        cooldowns=number,
    )


def _delay(
    ruling: Ruling, policy: CooldownPolicy, classification: Classification, number: int, rand: float
) -> float:
    given = _server_delay(ruling, classification, rand)
    if given is not None and ruling.server_delay == "instead":
        return given
    return max(policy.delay(number, rand), ruling.at_least, given or 0.0)


def _server_delay(ruling: Ruling, classification: Classification, rand: float) -> float | None:
    """The delay that the server or the body has given; that of a server with jitter added."""
    if classification.delay is None or ruling.server_delay == "ignore":
        return None
    if classification.reason is Reason.ASKED:
        return classification.delay
    given = (
        max(classification.delay, SHORTEST_SERVER_DELAY)
        if ruling.kind == "cooldown"
        else classification.delay
    )
    return given + min(LONGEST_JITTER, JITTER * given) * rand
