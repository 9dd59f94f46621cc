"""All errors of celery_leases: picklable, and rebuilt from ``args`` by any result backend."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, ClassVar, Final, Literal

from celery_leases.text.base_errors import DescribedError, LeaseConfigurationError, LeasesError
from celery_leases.text.durations import seconds

__all__ = [
    "AlreadyCompleted",
    "AlreadyDone",
    "AlreadyQueued",
    "BrokerUnavailable",
    "CompletionNotCommitted",
    "Cooldown",
    "CoolingDown",
    "EffectMisused",
    "ForkedLease",
    "GuardOpen",
    "KeyReused",
    "KeyUnusable",
    "LeaseConfigurationError",
    "LeaseHeld",
    "LeaseIsLive",
    "LeaseLost",
    "LeaseMisuse",
    "LeaseStoreMismatch",
    "LeasesError",
    "PermanentFailure",
    "RescheduleFailed",
    "ResultMissing",
    "RetryLater",
    "SchemaOutdated",
    "Snooze",
    "StoreUnavailable",
    "Uncertain",
    "UnknownKey",
    "WrongDatabase",
]

YEAR_10000: Final = 253_402_300_800.0
"""Seconds since the epoch; a datetime cannot be later."""


class _RaisedByBody(DescribedError):
    """An exception by which a task body asks for a delay. ``args`` are the ``details`` in their
    order, without a message.
    """

    reason: str | None

    def _set(self, *values: Any) -> None:
        self.__dict__.update(zip(self.details, values, strict=True))
        BaseException.__init__(self, *values)

    def __str__(self) -> str:
        return f"{self._request()}: {self.reason}" if self.reason else self._request()

    def _request(self) -> str:
        raise NotImplementedError


class LeaseMisuse(LeasesError, ValueError):
    """The task or its caller uses celery_leases in a way that cannot work. A retry does not help:
    correct the code.

    The base of more specific errors; raised itself for a wrong argument.
    """

    advice = "correct the call that the traceback shows; a retry meets the same error"


class KeyUnusable(LeasesError):
    """The arguments of this call do not make a usable key."""

    advice = "correct the arguments, or name others in lease_key"


class KeyReused(LeasesError):
    """The key belongs to a call with other arguments. Its record was not changed."""

    advice = (
        "name what makes the work another one in lease_key, or what need not be equal "
        "in lease_fingerprint"
    )

    details = ("key", "differing")
    key: str
    differing: list[str]


class LeaseHeld(LeasesError):
    """Another call holds the key; its lease expires in ``remaining`` seconds."""

    advice = 'call again when the key is free, or write lease_on_busy="wait"'

    details = ("key", "remaining", "holder")
    key: str
    remaining: float
    holder: str


class AlreadyDone(LeasesError):
    """Another call has finished this key, and the task has ``lease_on_done="raise"``."""

    advice = (
        'use the saved result with lease_on_done="replay", or allow another run with '
        "`leases forget`"
    )

    details = ("key", "call_id")
    key: str
    call_id: str


class AlreadyQueued(LeasesError):
    """A call of this key is queued, runs, cools down or has ended, and the task has
    ``lease_outbox="once"`` and ``lease_on_busy="raise"``.

    Nothing was published. ``call_id`` is the call of the key's record, ``state`` the state of that
    record.
    """

    advice = "wait for the call in call_id: AsyncResult(error.call_id), or task.lease_status(…)"

    details = ("key", "call_id", "state")
    key: str
    call_id: str
    state: str


class BrokerUnavailable(LeasesError):
    """``submit()`` could not publish the call: the broker did not answer, or did not confirm the
    message. It may have the message nevertheless.
    """

    advice = "repeat the request; a second message does no harm"

    details = ("key",)
    key: str


class RescheduleFailed(LeasesError):
    """The call could not be rescheduled: its message cannot be written, or the broker does not
    accept it.
    """

    advice = "look for the cause in reason, then call the task again"

    details = ("key", "reason")
    key: str
    reason: str


class ResultMissing(LeasesError):
    """The work is done, but its result was not stored: it is larger than 1 MiB, or
    not JSON.
    """

    advice = "return JSON of at most 1 MiB, such as the id of a row or of a file"

    details = ("key", "reason")
    key: str
    reason: str


class PermanentFailure(LeasesError):
    """The work has failed for good, and does not run again until an operator allows it.

    ``rule`` is the name of the rule that decided, ``error`` the class of the original error, if
    there was one.
    """

    advice = "mend the cause, then run `leases retry`; change the rule with Failures(rules)"

    details = ("rule", "error")
    rule: str | None
    error: str | None


class Cooldown(_RaisedByBody, LeasesError):
    """Raise it in a task body: the work failed, and the key (or its group) must not run for a
    while.

    ``delay`` is a number of seconds, text such as ``"5m"``, a timedelta, or ``None`` for the task's
    ``Failures.cooldown``. ``until``, instead of a delay, is an aware datetime or seconds since the
    epoch. Both are converted to seconds. ``scope="group"`` closes the call's ``lease_group``.
    A wrong value raises :class:`LeaseConfigurationError`.
    """

    advice = "raise it in the body of a leased task only, and let it propagate"

    details = ("delay", "reason", "until", "scope")
    delay: float | None
    reason: str | None
    until: float | None
    scope: Literal["key", "group"]

    def __init__(
        self,
        delay: float | str | timedelta | None = None,
        reason: object = None,
        until: datetime | float | None = None,
        scope: Literal["key", "group"] = "key",
    ) -> None:
        if scope not in ("key", "group"):
            raise LeaseConfigurationError(
                f"Cooldown: scope={scope!r} is not usable; write 'key' or 'group'"
            )
        if delay is not None and until is not None:
            raise LeaseConfigurationError(
                f"Cooldown: delay={delay!r} and until={until!r} clash; write one of them"
            )
        self._set(
            None if delay is None else seconds(delay, "Cooldown: delay"),
            None if reason is None else str(reason),
            None if until is None else _epoch(until, "Cooldown: until"),
            scope,
        )

    def _request(self) -> str:
        span = "" if self.delay is None else f" of {self.delay:g} s"
        span = span if self.until is None else f" until {self.until:.0f} (epoch seconds)"
        return f"the task asked for a cooldown{span} of its {self.scope}"


class RetryLater(_RaisedByBody, LeasesError):
    """Raise it in a task body: run again after ``delay`` (a duration, converted to seconds). It
    counts as a quick retry.

    A wrong delay raises :class:`LeaseConfigurationError`.
    """

    advice = "raise it in the body of a leased task only, and let it propagate"

    details = ("delay", "reason")
    delay: float
    reason: str | None

    def __init__(self, delay: float | str | timedelta = 1.0, reason: object = None) -> None:
        self._set(
            seconds(delay, "RetryLater: delay", zero=True), None if reason is None else str(reason)
        )

    def _request(self) -> str:
        return f"the task asked to be retried after {self.delay:g} s"


class CoolingDown(LeasesError):
    """The key or its cooldown group cools down after a failure; the body did not run.

    ``retry_at`` is in seconds since the epoch, ``retry_after`` in seconds from when it was raised.
    ``rule`` is the name of the rule that decided, ``reason`` a code of
    :class:`~celery_leases.failures.actions.Reason`. ``scope`` is ``"key"`` if the key itself cools
    down, ``"group"`` if its group does.
    """

    advice = 'call again at retry_at, or write lease_on_busy="wait"'

    details = ("key", "retry_at", "retry_after", "reason", "rule", "scope")
    key: str
    retry_at: float
    retry_after: float
    reason: str | None
    rule: str | None
    scope: Literal["key", "group"] | None


class Uncertain(LeasesError):
    """It is not known whether an effect was executed, or what its reply was. An operator must look
    in the other system: ``leases resolve``.

    Raised by ``lease.effect()``, and by a ``verify`` callable that cannot find it out.
    """

    advice = (
        "look in the other system, then run `leases resolve`; a verify= of the effect "
        "does it for you"
    )

    details = ("key", "effect", "idempotency_key")
    key: str
    effect: str
    idempotency_key: str


class EffectMisused(LeaseMisuse):
    """An effect or progress that cannot be stored: a name was used twice in one attempt, or a value
    is not JSON.
    """

    advice = "give each effect of the body a name of its own, and save only JSON"

    details = ("key", "effect")
    key: str
    effect: str


class ForkedLease(LeaseMisuse):
    """A process that the body has forked used its lease. Only the process of the body may use
    it.
    """

    advice = "call the lease in the process of the body; let a child return its result"

    details = ("key",)
    key: str


class GuardOpen(LeaseMisuse):
    """Nothing else can be written for this key while the transaction of ``complete()`` or
    ``guard()`` is open.
    """

    advice = "end the transaction of complete() or guard() before you use the lease again"

    details = ("key",)
    key: str


class AlreadyCompleted(LeaseMisuse):
    """``complete()`` was called before in this attempt, and its transaction was committed, or (for
    a second ``complete()``) may be committed.
    """

    advice = "call complete() once, as the last step that uses the lease"

    details = ("key",)
    key: str


class CompletionNotCommitted(LeaseMisuse):
    """The body returned after ``complete()`` or ``guard()``, but its transaction was not
    committed.
    """

    advice = "commit the session that you gave to complete() or guard() before the body returns"

    details = ("key",)
    key: str


class WrongDatabase(LeaseMisuse):
    """The session or connection given to ``complete()`` or ``guard()`` cannot commit the record
    together with the caller's rows.
    """

    advice = "give a session or connection of leases_database_url, inside a transaction"


class StoreUnavailable(LeasesError):
    """A lease or record store did not answer; ``executed`` says whether the command may have been
    executed.
    """

    advice = "repeat the call when the server answers; `leases doctor` says which one does not"

    details: ClassVar[tuple[str, ...]] = ("executed",)
    executed: bool | None


class ValueRefused(StoreUnavailable):
    """The database refuses a value that is too long for its column, or not in its encoding. Nothing
    was written.
    """

    advice = "shorten the value that the message names, or use an encoding that has its characters"

    details = ("executed",)
    executed: bool | None


class RecordUnreadable(StoreUnavailable):
    """A column of a record or of an effect has a value that cannot be read. The delivery is not
    lost; the message says what to do.

    ``key`` is the record's key (of an effect: its stored form), ``column`` the name of the column.
    """

    advice = "run `leases show`, then `leases forget` or a correction of the column"

    details = ("executed", "key", "column")
    executed: bool | None
    key: str
    column: str


class LeaseStoreMismatch(LeasesError):
    """Two workers use different stores: the key runs under another lease store than that of this
    worker, or its lease belongs to a worker with another records database.
    """

    advice = "write the same leases_url and leases_database_url for all workers"

    details = ("key", "ours", "theirs")
    key: str
    ours: str
    theirs: str


class SchemaOutdated(LeasesError):
    """The tables are missing, or have another version; the message names the command to run."""

    advice = "run `leases migrate`, in a Django project `manage.py migrate`"


class LeaseIsLive(LeasesError):
    """An attempt holds the key under a live lease; ``force=True`` takes the key from it."""

    advice = "wait for the end of the attempt, or write force=True"

    details = ("key", "remaining")
    key: str
    remaining: float


class UnknownKey(LeasesError):
    """The key has neither a lease nor a record."""

    advice = "compare the key and the task with those that `leases list` shows"

    details = ("key",)
    key: str


class LeaseLost(DescribedError):
    """This attempt no longer holds its lease, and its outcome will be refused: stop.

    A ``BaseException``, so that ``except Exception`` in a task body does not catch it. Celery does
    not see it.
    """

    advice = "let it propagate: another attempt continues; a pause of half a lease_ttl causes it"

    details = ("key", "reason")
    key: str
    reason: str


class Snooze(_RaisedByBody):
    """Raise it in a task body: run again after ``delay`` (a duration, converted to seconds).

    It counts neither as an attempt nor as a failure. A ``BaseException``, so that ``except
    Exception`` in a task body does not catch it; Celery does not see it. A wrong delay raises
    :class:`LeaseConfigurationError`.
    """

    advice = "raise it in the body of a leased task only, and let it propagate"

    details = ("delay", "reason")
    delay: float
    reason: str | None

    def __init__(self, delay: float | str | timedelta, reason: object = None) -> None:
        self._set(seconds(delay, "Snooze: delay"), None if reason is None else str(reason))

    def _request(self) -> str:
        return f"the task asked to be rescheduled in {self.delay:g} s"


def _epoch(value: object, what: str) -> float:
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < YEAR_10000:
        raise LeaseConfigurationError(
            f"{what}={value!r} is not usable; write a datetime with a time zone, or seconds since the epoch"
        )
    return float(value)
