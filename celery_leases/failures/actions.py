"""The actions that failure rules can choose, and the rule that matches one failure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from celery_leases.errors import LeaseConfigurationError
from celery_leases.failures.cooldown_policies import SIX_HOURS, CooldownPolicy
from celery_leases.text.durations import Duration, seconds

Kind = Literal["retry", "cooldown", "permanent"]
Scope = Literal["key", "group"]
DelayUse = Literal["instead", "at_least", "ignore"]

RETRY_CAP = 300.0
"""Seconds of the longest delay of :func:`retry` by default."""


class Reason(StrEnum):
    """Why a key cools down, is retried or has failed: stable codes, stored in the record."""

    #: The body raised ``Cooldown``, ``RetryLater`` or ``PermanentFailure``; for a group also: an
    #: operator closed it.
    ASKED = "asked"
    #: The input's fault: the other system, or the database, will never accept it.
    REFUSED = "refused"
    #: The account's: a person must pay, or raise a limit.
    OUT_OF_QUOTA = "out_of_quota"
    #: The input's: the payment was declined.
    DECLINED = "declined"
    #: The account's: a key is wrong, expired or revoked.
    UNAUTHORIZED = "unauthorized"
    #: The account's: too many requests at once; nothing to do.
    RATE_LIMITED = "rate_limited"
    #: Nobody's: another process uses the resource at this moment.
    CONFLICT = "conflict"
    #: Your own: a database or Redis is unavailable or busy.
    INFRASTRUCTURE = "infrastructure"
    #: The dependency's, or the network's; nothing was executed.
    UNREACHABLE = "unreachable"
    #: Most likely the caller's: a row is not there; publish after the commit.
    NOT_FOUND = "not_found"
    #: The dependency's; the request may have been executed.
    OUTCOME_UNKNOWN = "outcome_unknown"
    #: The last of ``Failures.retries`` quick retries failed; ``rule`` names the cause.
    RETRIES_USED_UP = "retries_used_up"
    #: The input's: the soft time limit, or memory.
    LIMIT_HIT = "limit_hit"
    #: Nobody's: as many calls of the group run as its ``limit`` allows.
    GROUP_FULL = "group_full"
    #: Nobody's: the ``rate`` of the group lets no call begin yet.
    GROUP_RATE = "group_rate"
    #: Most likely the task's: an exception that no rule knows, or one of your own rules.
    ERROR = "error"
    #: The key is ``failed`` after ``Failures.failures``.
    TOO_MANY_FAILURES = "too_many_failures"
    #: The key is ``failed`` after ``Failures.crashes``.
    CRASH_LOOP = "crash_loop"
    #: It is unknown whether an effect has happened: an operator must decide.
    UNCERTAIN = "uncertain"


@dataclass(frozen=True, slots=True)
class Action:
    """The action for one kind of failure. Written with :func:`retry`, :func:`cooldown` or
    :func:`permanent`.
    """

    kind: Kind
    #: The delays; ``None``: those of the task's ``Failures.cooldown``.
    policy: CooldownPolicy | None = None
    #: How many quick retries; ``None``: the task's ``Failures.retries``.
    max: int | None = None
    #: What cools down. For a task without ``lease_group``, *group* means the key.
    scope: Scope = "key"
    #: The call may have been executed.
    ambiguous: bool = False
    #: Waiting does not help: a person must act.
    operator: bool = False
    #: How a delay from the response is combined with that of the policy: it replaces the delay
    #: (``instead``), or is a minimum (``at_least``), or is ignored.
    server_delay: DelayUse = "at_least"
    #: The minimum of the policy's delay, in seconds.
    at_least: float = 0.0
    #: The action instead of an ambiguous retry, unless ``Failures.idempotent``; ``None``:
    #: a cooldown of the key.
    if_not_idempotent: Action | None = None
    #: The action after the last quick retry; ``None``: a cooldown of the key by the task's policy.
    then: Action | None = None


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """The rule that matches one failure, and what it takes from the failure."""

    #: The name of the rule that matched.
    rule: str
    action: Action
    reason: Reason
    #: Seconds from the response or the exception, at most 6 h; ``None``: it gives no delay.
    delay: float | None = None
    #: The source of that delay, such as ``"retry-after"``.
    source: str | None = None
    #: The delay was longer, and was cut to 6 h.
    clamped: bool = False
    #: What matched, in a few words.
    why: str = ""


def retry(
    delay: Duration = 1.0,
    *,
    max: int | None = None,  # noqa: A002 - it is a maximum; ``Failures.retries`` is the default
    factor: float = 2.0,
    cap: Duration | None = None,
    jitter: float = 0.5,
    ambiguous: bool = False,
    then: Action | None = None,
) -> Action:
    """Retry soon: after *delay*, times *factor* at each retry, up to *cap* (5 minutes, or *delay*
    if that is longer).

    After *max* retries the action *then* applies. *ambiguous*: the call may have been executed, so
    only an idempotent task is retried (``Failures.idempotent``). A wrong value raises
    :class:`LeaseConfigurationError`.
    """
    _check_retry(max, then)
    policy = _policy("retry", delay, factor, cap, RETRY_CAP, jitter)
    return Action("retry", policy, max, ambiguous=ambiguous, then=then)


def cooldown(
    delay: Duration | None = None,
    *,
    scope: Scope = "key",
    factor: float | None = None,
    cap: Duration | None = None,
    jitter: float | None = None,
    ambiguous: bool = False,
    operator: bool = False,
) -> Action:
    """Do not run the key for a while, or with ``scope="group"`` no key of its cooldown group.

    For *delay*, times *factor* (2) at each failure, up to *cap* (6 hours, or *delay* if that is
    longer), with *jitter* (0.5). Without a *delay*, ``Failures.cooldown`` applies. A wrong value
    raises :class:`LeaseConfigurationError`.
    """
    if scope not in ("key", "group"):
        raise LeaseConfigurationError(
            f"cooldown: scope={scope!r} is not usable; write 'key' or 'group'"
        )
    if delay is None:
        for name, value in (("factor", factor), ("cap", cap), ("jitter", jitter)):
            if value is not None:
                raise LeaseConfigurationError(
                    f"cooldown: {name}={value!r} needs a delay; add a delay"
                )
        policy = None
    else:
        factor, jitter = 2.0 if factor is None else factor, 0.5 if jitter is None else jitter
        policy = _policy("cooldown", delay, factor, cap, SIX_HOURS, jitter)
    return Action("cooldown", policy, scope=scope, ambiguous=ambiguous, operator=operator)


def permanent(*, operator: bool = False) -> Action:
    """Do not run the key again until an operator allows it."""
    return Action("permanent", operator=operator)


def retry_exactly(span: Duration, what: str = "a retry") -> Action:
    """A retry after exactly *span*: without growth, jitter and the delay of a response.

    Zero is allowed. A wrong value raises :class:`LeaseConfigurationError`, in which it is called
    *what*.
    """
    delay = max(seconds(span, what, zero=True), 1e-3)
    return Action("retry", CooldownPolicy(delay, 1.0, delay, 0.0), server_delay="ignore")


def exact_delay(action: Action) -> float | None:
    """The seconds of an action made by :func:`retry_exactly`; ``None`` for another action."""
    exact = action.kind == "retry" and action.server_delay == "ignore" and action.policy is not None
    return action.policy.base if exact and action.policy else None


def reason_of(action: Action) -> Reason:
    """The reason of a failure to which a rule of the user gives *action*."""
    return Reason.REFUSED if action.kind == "permanent" else Reason.ERROR


def _check_retry(most: object, then: object) -> None:
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
        raise LeaseConfigurationError(
            f"retry: max={most!r} is not usable; write a whole number of at least 0"
        )
    if then is not None and not isinstance(then, Action):
        raise LeaseConfigurationError(
            f"retry: then={then!r} is not usable; write cooldown(...) or permanent()"
        )


def _policy(
    word: str, delay: Duration, factor: float, cap: Duration | None, usual_cap: float, jitter: float
) -> CooldownPolicy:
    base = seconds(delay, f"{word}: delay")
    top = max(base, usual_cap) if cap is None else seconds(cap, f"{word}: cap")
    return CooldownPolicy(base, factor, top, jitter)
