"""The outcome of an attempt whose body raised: a cooldown, a quick retry, or failed for good. Pure
functions of the rule that matches and of the counts in the record.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, assert_never

from celery_leases.call import Call
from celery_leases.decide.after_run import (
    crashes_of_another_call,
    failed_for_good,
    unchanged,
    with_retention,
    without_failures,
)
from celery_leases.decide.endings import Raised
from celery_leases.errors import Uncertain
from celery_leases.failures.actions import Action, Reason, RuleMatch, cooldown
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
    matched = raised.matched
    closed = replace(
        unchanged(call, record), ended=Ended.FAILED, failed=True, traceback=raised.traceback
    )
    if not crashes_of_another_call(call, record):
        closed = replace(closed, crashes=0)
    if _was_quiet(call, record, matched):
        closed = without_failures(closed)
    if isinstance(raised.error, Uncertain):
        reason = Reason.UNCERTAIN.value
        failure = replace(raised.failure, rule=reason, reason=reason, ambiguous=True, operator=True)
        return replace(
            closed, state=State.UNCERTAIN, retention=None, failure=failure, reason=reason
        )
    action, reason = _effective(call, matched, closed)
    in_group = action.scope == "group" and call.group is not None
    failure = replace(
        raised.failure,
        rule=matched.rule,
        reason=reason,
        group=call.group if in_group else None,
        ambiguous=action.ambiguous,
        operator=action.operator,
    )
    closed = replace(closed, failure=failure, reason=reason)
    match action.kind:
        case "permanent":
            return replace(
                closed,
                state=State.FAILED,
                failures=closed.failures + 1,
                finished=failed_for_good(call, record, failure),
            )
        case "retry":
            number = closed.quick_retries + 1
            policy = action.policy or call.options.failures.cooldown
            delay = _delay(action, policy, matched, number, rand)
            again = replace(
                closed, quick_retries=number, retry_after=delay, resumes=call.reschedulable
            )
            return with_retention(call, again)
        case "cooldown":
            return with_retention(call, _cool_down(call, action, matched, closed, rand))
        case _ as never:
            assert_never(never)


def resumes_after_cooldown(options: LeaseOptions, matched: RuleMatch, action: Action) -> bool:
    """Whether a call runs again by itself after a cooldown; *action* is the action that applies.

    With ``Failures(resume="transient")`` it does if the failure is transient: its rule says retry,
    or the group failed, or the server or the body has given a delay. A call that may have been
    executed runs again only with ``Failures(idempotent=True)``. A row that quick retries did not
    find does not exist, so its call ends.
    """
    if options.failures.resume != "transient":
        return options.failures.resume == "always"
    if action.ambiguous and not options.failures.idempotent:
        return False
    if matched.reason is Reason.NOT_FOUND:
        return False
    timed = matched.delay is not None and action.server_delay != "ignore"
    asked = matched.reason is Reason.ASKED
    return matched.action.kind == "retry" or action.scope == "group" or timed or asked


def leaves_probe_due(outcome: Outcome) -> bool:
    """Whether a probe that failed so leaves its group due for a probe: the failure does not show
    whether the group works.
    """
    failure = outcome.failure
    assert failure is not None
    unrelated = failure.reason in (Reason.INFRASTRUCTURE, Reason.RETRIES_USED_UP)
    return outcome.state is State.PENDING or failure.ambiguous or unrelated


def _was_quiet(call: Call, record: Record, matched: RuleMatch) -> bool:
    """Whether the last failure was so long ago that the counts start again at zero."""
    if record.failed_at is None:
        return False
    return (record.started_at - record.failed_at) / 1e6 > _quiet(call, matched)


def _quiet(call: Call, matched: RuleMatch) -> float:
    """Seconds without a failure after which the counts start again at zero: longer than any wait
    that the key may have had.
    """
    action = matched.action
    actions = [one for one in (action, action.if_not_idempotent, action.then) if one is not None]
    policies = [
        call.options.failures.cooldown,
        *(one.policy for one in actions if one.policy is not None),
    ]
    return max(2 * (matched.delay or 0.0), *(policy.quiet for policy in policies))


def _effective(call: Call, matched: RuleMatch, counts: Outcome) -> tuple[Action, Reason]:
    """The action that applies to this task now, and its reason: an ambiguous failure, a failure
    after the last retry and the last failure that is allowed get another action than their rule's.
    """
    action, reason = matched.action, matched.reason
    while action.kind == "retry":
        if action.ambiguous and not call.options.failures.idempotent:
            action = action.if_not_idempotent or _AMBIGUOUS
            continue
        retries = action.max if action.max is not None else call.options.failures.retries
        if counts.quick_retries < retries:
            break
        ambiguous = action.ambiguous
        reason = reason if action.then else Reason.RETRIES_USED_UP
        action = action.then or _RETRIES_USED_UP
        action = replace(action, ambiguous=action.ambiguous or ambiguous)
    # Failures of the group do not count: the key does not cause a rate limit or an empty quota.
    too_many = action.scope == "key" and counts.failures + 1 >= call.options.failures.failures
    if action.kind == "cooldown" and too_many:
        return Action(
            "permanent", ambiguous=action.ambiguous, operator=action.operator
        ), Reason.TOO_MANY_FAILURES
    return action, reason


def _cool_down(
    call: Call, action: Action, matched: RuleMatch, closed: Outcome, rand: float
) -> Outcome:
    policy, failure = action.policy or call.options.failures.cooldown, closed.failure
    resumes = call.reschedulable and resumes_after_cooldown(call.options, matched, action)
    cooling = replace(closed, state=State.COOLING, quick_retries=0, resumes=resumes)
    if failure is not None and failure.group is not None:
        given = _server_delay(action, matched, rand)
        closing = Closing(
            policy,
            failure.reason or "",
            failure.rule,
            failure.message,
            given,
            action.server_delay == "instead",
        )
        return replace(cooling, retry_after=closing.wait(1), closing=closing)
    number = closed.cooldowns + 1
    return replace(
        cooling,
        retry_after=_delay(action, policy, matched, number, rand),
        failures=closed.failures + (action.scope == "key"),
        cooldowns=number,
    )


def _delay(
    action: Action, policy: CooldownPolicy, matched: RuleMatch, number: int, rand: float
) -> float:
    given = _server_delay(action, matched, rand)
    if given is not None and action.server_delay == "instead":
        return given
    return max(policy.delay(number, rand), action.at_least, given or 0.0)


def _server_delay(action: Action, matched: RuleMatch, rand: float) -> float | None:
    """The delay that the server or the body has given; that of a server with jitter added."""
    if matched.delay is None or action.server_delay == "ignore":
        return None
    if matched.reason is Reason.ASKED:
        return matched.delay
    given = (
        max(matched.delay, SHORTEST_SERVER_DELAY) if action.kind == "cooldown" else matched.delay
    )
    return given + min(LONGEST_JITTER, JITTER * given) * rand
