"""All errors of celery_leases: picklable, and rebuilt from ``args`` by any result backend."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, ClassVar, Final, Literal

from celery_leases.common.base_errors import DescribedError, LeaseConfigurationError, LeasesError
from celery_leases.common.durations import seconds

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
"""Seconds since the epoch; datetime has no later year."""


class _Asked(DescribedError):
    """A request of a task body. ``args`` has the named details and nothing else, in their order."""

    reason: str | None

    def _ask(self, *values: Any) -> None:
        self.__dict__.update(zip(self.details, values, strict=True))
        BaseException.__init__(self, *values)

    def __str__(self) -> str:
        return f"{self._asked()}: {self.reason}" if self.reason else self._asked()

    def _asked(self) -> str:
        raise NotImplementedError


class LeaseMisuse(LeasesError, ValueError):
    """The code of the task or its caller uses celery_leases in a way that cannot work: a bug to
    correct, not a failure to retry.

    Base of the errors for one kind of misuse each, and raised itself for a wrong argument.
    """


class KeyUnusable(LeasesError):
    """The arguments of this call do not give a usable key."""


class KeyReused(LeasesError):
    """The key belongs to a call with other arguments. Its record was not changed."""

    details = ("key", "differing")
    key: str
    differing: list[str]


class LeaseHeld(LeasesError):
    """Another call holds the key. ``remaining`` is the rest of the holder's lease, in seconds."""

    details = ("key", "remaining", "holder")
    key: str
    remaining: float
    holder: str


class AlreadyDone(LeasesError):
    """Another call has finished this key, and the task has ``lease_on_done="raise"``."""

    details = ("key", "call_id")
    key: str
    call_id: str


class AlreadyQueued(LeasesError):
    """A call of this key is queued, runs, cools down or has ended, and ``lease_on_queued="raise"``
    asks for an error.

    Nothing was published. ``call_id`` is the call that the key belongs to, ``state`` where its
    record stands.
    """

    details = ("key", "call_id", "state")
    key: str
    call_id: str
    state: str


class BrokerUnavailable(LeasesError):
    """``submit()`` could not publish the call: the broker does not answer, or did not confirm the
    message, which it may have all the same.
    """

    details = ("key",)
    key: str


class RescheduleFailed(LeasesError):
    """The call could not be rescheduled: its message cannot be written, or the broker does not
    accept it.
    """

    details = ("key", "reason")
    key: str
    reason: str


class ResultMissing(LeasesError):
    """The work is done, but its result was not stored: it is larger than ``leases_result_max``, or
    not JSON.
    """

    details = ("key", "reason")
    key: str
    reason: str


class PermanentFailure(LeasesError):
    """The work has failed for good, and does not run again until an operator decides so.

    ``rule`` names the rule that decided, ``error`` the class of the original error, if there was
    one.
    """

    details = ("rule", "error")
    rule: str | None
    error: str | None


class Cooldown(_Asked, LeasesError):
    """Raise it in a task body: the work failed, and the key (or its group) must not run for a
    while.

    ``delay`` is a number of seconds, text such as ``"5m"``, a timedelta, or ``None`` for the task's
    own policy; ``until``, instead of it, is an aware datetime or seconds since the epoch. Both are
    stored as seconds. ``scope="group"`` closes the gate of the task's cooldown group. A wrong value
    raises :class:`LeaseConfigurationError` at once.
    """

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
        self._ask(
            None if delay is None else seconds(delay, "Cooldown: delay"),
            None if reason is None else str(reason),
            None if until is None else _epoch(until, "Cooldown: until"),
            scope,
        )

    def _asked(self) -> str:
        span = "" if self.delay is None else f" of {self.delay:g} s"
        span = span if self.until is None else f" until {self.until:.0f} (epoch seconds)"
        return f"the task asked for a cooldown{span} of its {self.scope}"


class RetryLater(_Asked, LeasesError):
    """Raise it in a task body: try again after ``delay`` (any duration, stored as seconds). It
    counts as a quick retry.

    A wrong delay raises :class:`LeaseConfigurationError` at once.
    """

    details = ("delay", "reason")
    delay: float
    reason: str | None

    def __init__(self, delay: float | str | timedelta = 1.0, reason: object = None) -> None:
        self._ask(
            seconds(delay, "RetryLater: delay", zero=True), None if reason is None else str(reason)
        )

    def _asked(self) -> str:
        return f"the task asked to be retried after {self.delay:g} s"


class CoolingDown(LeasesError):
    """The key or its cooldown group is cooling down after a failure; nothing was run.

    ``retry_at`` is in seconds since the epoch, ``retry_after`` in seconds from the moment of
    raising. ``rule`` names the rule that decided the cooldown, ``reason`` is a code of
    :class:`~celery_leases.failures.actions.Reason`. ``scope`` is ``"key"`` if the key itself cools
    down, ``"group"`` if its group does.
    """

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

    Raised by ``lease.effect()``, and by a ``verify`` callable that finds no answer.
    """

    details = ("key", "effect", "idempotency_key")
    key: str
    effect: str
    idempotency_key: str


class EffectMisused(LeaseMisuse):
    """An effect or progress that cannot be stored: a name was used twice in one attempt, or a value
    is not JSON.
    """

    details = ("key", "effect")
    key: str
    effect: str


class ForkedLease(LeaseMisuse):
    """A process that the body has forked used its lease. Only the process of the body may
    use it.
    """

    details = ("key",)
    key: str


class GuardOpen(LeaseMisuse):
    """Nothing else can be written for this key while the transaction of ``complete()`` or
    ``guard()`` is open.
    """

    details = ("key",)
    key: str


class AlreadyCompleted(LeaseMisuse):
    """``complete()`` was called before in this attempt. Its transaction was committed, or, for a
    second ``complete()``, may be committed.
    """

    details = ("key",)
    key: str


class CompletionNotCommitted(LeaseMisuse):
    """The body returned after ``complete()`` or ``guard()``, but its transaction was not
    committed.
    """

    details = ("key",)
    key: str


class WrongDatabase(LeaseMisuse):
    """The session or connection given to ``complete()`` or ``guard()`` cannot commit the record
    together with the caller's rows.
    """


class StoreUnavailable(LeasesError):
    """A lease or record store did not answer; ``executed`` says whether the command may have been
    executed.
    """

    details: ClassVar[tuple[str, ...]] = ("executed",)
    executed: bool | None


class ValueRefused(StoreUnavailable):
    """The database refuses a value: it is too long for its column, or not in its encoding. Nothing
    was written.
    """

    details = ("executed",)
    executed: bool | None


class ColumnMissing(StoreUnavailable):
    """The table does not have the columns of the statement, because it was migrated or changed by
    hand. Nothing was written.
    """

    details = ("executed",)
    executed: bool | None


class RecordUnreadable(StoreUnavailable):
    """A column of a record or of an effect has a value that cannot be read. The delivery is not
    lost; the message says what to do.

    ``key`` is the record's key (of an effect: its stored form), ``column`` the name of the column.
    """

    details = ("executed", "key", "column")
    executed: bool | None
    key: str
    column: str


class LeaseStoreMismatch(LeasesError):
    """The stores of two workers do not match: the key runs under another lease store than this
    worker uses, or its lease belongs to a worker with another records database.
    """

    details = ("key", "ours", "theirs")
    key: str
    ours: str
    theirs: str


class SchemaOutdated(LeasesError):
    """The tables are missing or of another version; the message names the command to run."""


class LeaseIsLive(LeasesError):
    """A live lease holds the key; repeat with force to take the key from its holder."""

    details = ("key", "remaining")
    key: str
    remaining: float


class UnknownKey(LeasesError):
    """The key has neither a lease nor a record."""

    details = ("key",)
    key: str


class LeaseLost(DescribedError):
    """This attempt no longer holds its lease: stop. The outcome of this attempt is refused.

    A ``BaseException``, so ``except Exception`` in a task body does not catch it. It never reaches
    Celery.
    """

    details = ("key", "reason")
    key: str
    reason: str


class Snooze(_Asked):
    """Raise it in a task body: not now, try again after ``delay`` (any duration, stored as
    seconds).

    It counts neither as an attempt nor as a failure. A ``BaseException``, so ``except Exception``
    in a task body does not catch it; it never reaches Celery. A wrong delay raises
    :class:`LeaseConfigurationError` at once.
    """

    details = ("delay", "reason")
    delay: float
    reason: str | None

    def __init__(self, delay: float | str | timedelta, reason: object = None) -> None:
        self._ask(seconds(delay, "Snooze: delay"), None if reason is None else str(reason))

    def _asked(self) -> str:
        return f"the task asked to be rescheduled in {self.delay:g} s"


def _epoch(value: object, what: str) -> float:
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < YEAR_10000:
        raise LeaseConfigurationError(
            f"{what}={value!r} is not usable; write a datetime with a time zone, or seconds since the epoch"
        )
    return float(value)
