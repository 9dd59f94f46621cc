"""After a failure: cool down, retry soon, or fail for good. Pure functions of what the rules say and of the counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, assert_never

from celery_leases.core.endings import Raised
from celery_leases.core.errors import Uncertain
from celery_leases.core.gates import Closing
from celery_leases.core.options import LeaseOptions
from celery_leases.core.policies import CooldownPolicy
from celery_leases.core.records import Failure, Record
from celery_leases.core.rulings import Classification, Reason, Ruling, cooldown
from celery_leases.core.verdicts import Call

SPREAD: Final = 0.1
LONGEST_SPREAD: Final = 5.0
"""A wait that the other side asked for is only ever made longer, by up to a tenth of it and 5 s: in simulation, 600
keys that came back exactly when they were told, behind a limit that counts rejected calls, never drained."""
SHORTEST_TOLD: Final = 1.0
"""Limits tell waits of milliseconds too, and such a wait does not grow: below a second, nobody would be left alone."""

_UNSURE: Final = cooldown("60s", ambiguous=True)
_USED_UP: Final = cooldown()


@dataclass(frozen=True, slots=True)
class Counts:
    """What a row counts: failures and cooldowns in a row, and quick retries since the last cooldown."""

    failures: int = 0
    quick_retries: int = 0
    cooldowns: int = 0


@dataclass(frozen=True, slots=True)
class CoolDown:
    """Let nobody run the key for ``delay`` seconds; ``closing``: close the gate of its group too, which may say longer.

    ``resume``: the call comes back by itself; else its caller gets the error now.
    """

    delay: float
    failure: Failure
    counts: Counts
    resume: bool
    closing: Closing | None = None


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """Put the call back for ``delay`` seconds."""

    delay: float
    failure: Failure
    counts: Counts


@dataclass(frozen=True, slots=True)
class Fail:
    """The key has failed for good."""

    failure: Failure
    counts: Counts


@dataclass(frozen=True, slots=True)
class Parked:
    """Whether an effect has happened, or what came of it, is not known: an operator must look."""

    failure: Failure
    counts: Counts


AfterFailure = CoolDown | RetryAfter | Fail | Parked


def after_failure(call: Call, record: Record, raised: Raised, chance: float) -> AfterFailure:
    """Decide what a failed attempt means for its key; *chance* is a random number in [0, 1) for jitter."""
    judgement, counts = raised.judgement, _counted(call, record, raised.judgement)
    if isinstance(raised.error, Uncertain):
        known = {"rule": Reason.UNCERTAIN.value, "reason": Reason.UNCERTAIN.value}
        return Parked(replace(raised.failure, **known, ambiguous=True, operator=True), counts)
    ruling, reason = _in_force(call, judgement, counts)
    in_group = ruling.scope == "group" and call.group is not None
    failure = replace(
        raised.failure,
        rule=judgement.rule,
        reason=reason,
        group=call.group if in_group else None,
        ambiguous=ruling.ambiguous,
        operator=ruling.operator,
    )
    match ruling.kind:
        case "permanent":
            return Fail(failure, replace(counts, failures=counts.failures + 1))
        case "retry":
            delay = _delay(ruling, ruling.policy or call.options.cooldown, judgement, counts.quick_retries + 1, chance)
            return RetryAfter(delay, failure, replace(counts, quick_retries=counts.quick_retries + 1))
        case "cooldown":
            return _cool_down(call, ruling, judgement, failure, counts, chance)
        case _ as never:
            assert_never(never)


def comes_back(options: LeaseOptions, judgement: Classification, ruling: Ruling) -> bool:
    """Whether a call comes back by itself after the cooldown that *ruling* has made of *judgement*.

    ``lease_resume="transient"``: where the rules know that the failure passes. They say retry, or that it is the
    group's, or somebody has named the time: the server, or the body. A call that may have been executed is repeated
    only for a task that says it is ``lease_idempotent``.
    """
    if options.resume != "transient":
        return options.resume == "always"
    if ruling.ambiguous and not options.idempotent:
        return False
    timed = judgement.delay is not None and ruling.told != "ignore"
    asked = judgement.reason is Reason.ASKED
    return judgement.ruling.kind == "retry" or ruling.scope == "group" or timed or asked


def says_nothing_of_the_group(verdict: AfterFailure) -> bool:
    """Whether a probe that failed so leaves its gate half-open: neither the group's failure nor clearly another's."""
    beside_it = verdict.failure.reason in (Reason.INFRASTRUCTURE, Reason.RETRIES_USED_UP)
    return isinstance(verdict, RetryAfter) or verdict.failure.ambiguous or beside_it


def _counted(call: Call, record: Record, judgement: Classification) -> Counts:
    """The counts of the row, as if there were none after a quiet time."""
    if record.failed_at is not None and (record.started_at - record.failed_at) / 1e6 > _quiet(call, judgement):
        return Counts()
    return Counts(record.failures, record.quick_retries, record.cooldowns)


def _quiet(call: Call, judgement: Classification) -> float:
    """Seconds without a failure that make a key forget its counts: longer than it may have been told to wait."""
    ruling = judgement.ruling
    rulings = [one for one in (ruling, ruling.otherwise, ruling.then) if one is not None]
    policies = [call.options.cooldown, *(one.policy for one in rulings if one.policy is not None)]
    return max(2 * (judgement.delay or 0.0), *(policy.quiet for policy in policies))


def _in_force(call: Call, judgement: Classification, counts: Counts) -> tuple[Ruling, Reason]:
    """The ruling that counts for this task, now: ambiguous retries and used up ones are others."""
    ruling, reason = judgement.ruling, judgement.reason
    while ruling.kind == "retry":
        if ruling.ambiguous and not call.options.idempotent:
            ruling = ruling.otherwise or _UNSURE
            continue
        tries = ruling.max if ruling.max is not None else call.options.max_retries
        if counts.quick_retries < tries:
            break
        unsure = ruling.ambiguous
        reason = reason if ruling.then else Reason.RETRIES_USED_UP
        ruling = ruling.then or _USED_UP
        ruling = replace(ruling, ambiguous=ruling.ambiguous or unsure)
    # A limit or a quota is not this input's fault, however often it is met.
    last_straw = ruling.scope == "key" and counts.failures + 1 >= call.options.max_failures
    if ruling.kind == "cooldown" and last_straw:
        return Ruling("permanent", ambiguous=ruling.ambiguous, operator=ruling.operator), Reason.TOO_MANY_FAILURES
    return ruling, reason


def _cool_down(
    call: Call, ruling: Ruling, judgement: Classification, failure: Failure, counts: Counts, chance: float
) -> CoolDown:
    policy = ruling.policy or call.options.cooldown
    resume = call.comes_back and comes_back(call.options, judgement, ruling)
    if failure.group is not None:
        told = _told(ruling, judgement, chance)
        closing = Closing(policy, failure.reason or "", failure.rule, failure.message, told, ruling.told == "instead")
        return CoolDown(closing.wait(1), failure, replace(counts, quick_retries=0), resume, closing)
    delay = _delay(ruling, policy, judgement, counts.cooldowns + 1, chance)
    own = counts.failures + (ruling.scope == "key")
    return CoolDown(delay, failure, Counts(own, 0, counts.cooldowns + 1), resume)


def _delay(ruling: Ruling, policy: CooldownPolicy, judgement: Classification, number: int, chance: float) -> float:
    told = _told(ruling, judgement, chance)
    if told is not None and ruling.told == "instead":
        return told
    return max(policy.delay(number, chance), ruling.at_least, told or 0.0)


def _told(ruling: Ruling, judgement: Classification, chance: float) -> float | None:
    """What the answer or the body asked for; made a little longer, unless the body itself said it."""
    if judgement.delay is None or ruling.told == "ignore":
        return None
    if judgement.reason is Reason.ASKED:
        return judgement.delay
    told = max(judgement.delay, SHORTEST_TOLD) if ruling.kind == "cooldown" else judgement.delay
    return told + min(LONGEST_SPREAD, SPREAD * told) * chance
