"""Every error of celery_leases, in one place: picklable, and rebuilt from ``args`` by any result backend."""

from __future__ import annotations

import inspect
from datetime import datetime, timedelta
from typing import Any, ClassVar, Final, Literal

from celery_leases.core.texts import printable

YEAR_10000: Final = 253_402_300_800.0
"""Seconds since the epoch; no datetime lies behind it."""


class _Described(BaseException):
    """Message first, then the named details, all of them in ``args``.

    ``args`` alone rebuilds the error, which is what pickle and Celery's JSON result backends do.
    """

    details: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str = "", *values: Any, **named: Any) -> None:
        unknown = named.keys() - set(self.details)
        if unknown or len(values) > len(self.details):
            raise TypeError(f"{type(self).__name__} takes a message and {', '.join(self.details) or 'nothing else'}")
        given = dict(zip(self.details, values, strict=False)) | named
        key = given.get("key")
        if isinstance(key, str) and key and (shown := printable(key)) != key:
            message = message.replace(key, shown)  # messages end in logs; the detail has the key as it is
        self.__dict__.update({name: given.get(name) for name in self.details})
        super().__init__(message or inspect.cleandoc(type(self).__doc__ or ""), *self.__dict__.values())

    def __str__(self) -> str:
        return str(self.args[0])


class _Asked(_Described):
    """What a task body asks for: the named details are the whole of ``args``, in their order."""

    reason: str | None

    def _ask(self, *values: Any) -> None:
        self.__dict__.update(zip(self.details, values, strict=True))
        BaseException.__init__(self, *values)

    def __str__(self) -> str:
        return f"{self._asked()}: {self.reason}" if self.reason else self._asked()

    def _asked(self) -> str:
        raise NotImplementedError


class LeasesError(_Described, Exception):
    """Something about a leased task went wrong."""


class LeaseConfigurationError(LeasesError):
    """An option or a setting of celery_leases is wrong; the message says what to write instead."""


class KeyUnusable(LeasesError):
    """The key of this call could not be made from its arguments."""


class KeyReused(LeasesError):
    """The key already stands for a call with other arguments; its record was left untouched."""

    details = ("key", "differing")
    key: str
    differing: list[str]


class LeaseHeld(LeasesError):
    """Another call holds the key. ``remaining`` is in seconds, as the holder's lease stands now."""

    details = ("key", "remaining", "holder")
    key: str
    remaining: float
    holder: str


class AlreadyDone(LeasesError):
    """Another call has finished this key, and ``lease_on_done="raise"`` asks for an error."""

    details = ("key", "call_id")
    key: str
    call_id: str


class PutBackFailed(LeasesError):
    """The call was to come back later, and cannot: no message of it can be written, or the broker takes none."""

    details = ("key", "reason")
    key: str
    reason: str


class ResultMissing(LeasesError):
    """The work is done, but its result was not kept: larger than ``leases_result_max``, or not JSON."""

    details = ("key", "reason")
    key: str
    reason: str


class PermanentFailure(LeasesError):
    """The work has failed for good and will not be tried again until an operator says so.

    ``rule`` names what decided it, ``error`` the class of the original error, if there was one.
    """

    details = ("rule", "error")
    rule: str | None
    error: str | None


class Cooldown(_Asked, LeasesError):
    """Raised in a task body: the work failed, and the key (or its group) is left alone for a while.

    ``delay`` is a number of seconds, text such as ``"5m"``, a timedelta, or ``None`` for the task's own policy;
    ``until``, instead of it, is an aware datetime or seconds since the epoch. ``scope="group"`` closes the gate of
    the task's cooldown group. Kept as seconds. A wrong value raises :class:`LeaseConfigurationError` here.
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
            raise LeaseConfigurationError(f"Cooldown: scope={scope!r} is not usable; write 'key' or 'group'")
        if delay is not None and until is not None:
            raise LeaseConfigurationError(f"Cooldown: delay={delay!r} and until={until!r} clash; write one of them")
        self._ask(
            None if delay is None else _seconds(delay, "Cooldown: delay"),
            None if reason is None else str(reason),
            None if until is None else _epoch(until, "Cooldown: until"),
            scope,
        )

    def _asked(self) -> str:
        span = "" if self.delay is None else f" of {self.delay:g} s"
        span = span if self.until is None else f" until {self.until:.0f} (epoch seconds)"
        return f"the task asked for a cooldown{span} of its {self.scope}"


class RetryLater(_Asked, LeasesError):
    """Raised in a task body: try again after ``delay`` (any duration, kept as seconds); counts as a quick retry.

    A wrong delay raises :class:`LeaseConfigurationError` here.
    """

    details = ("delay", "reason")
    delay: float
    reason: str | None

    def __init__(self, delay: float | str | timedelta = 1.0, reason: object = None) -> None:
        self._ask(_seconds(delay, "RetryLater: delay", zero=True), None if reason is None else str(reason))

    def _asked(self) -> str:
        return f"the task asked to be retried after {self.delay:g} s"


class CoolingDown(LeasesError):
    """The key or its cooldown group is cooling down after a failure; nothing was run.

    ``retry_at`` is in seconds since the epoch, ``retry_after`` in seconds from the moment of raising; ``rule`` names
    what decided the cooldown, ``reason`` is a code of :class:`~celery_leases.core.rulings.Reason`.
    """

    details = ("key", "retry_at", "retry_after", "reason", "rule")
    key: str
    retry_at: float
    retry_after: float
    reason: str | None
    rule: str | None


class Uncertain(LeasesError):
    """Whether an effect was carried out is not known, or what it replied; an operator must look: ``leases resolve``.

    Raised by ``lease.effect()``, and by a ``verify`` callable that cannot tell.
    """

    details = ("key", "effect", "idempotency_key")
    key: str
    effect: str
    idempotency_key: str


class EffectMisused(LeasesError):
    """An effect or progress that cannot be kept: a name twice in one attempt, or a value that is no JSON."""

    details = ("key", "effect")
    key: str
    effect: str


class ForkedLease(LeasesError):
    """A process that the body has forked used its lease: only the process of the body itself may."""

    details = ("key",)
    key: str


class GuardOpen(LeasesError):
    """Nothing else can be written for this key while the transaction of ``complete()`` or ``guard()`` is open."""

    details = ("key",)
    key: str


class AlreadyCompleted(LeasesError):
    """``complete()`` was called before in this attempt, and that has been committed or, for a second one, may be."""

    details = ("key",)
    key: str


class CompletionNotCommitted(LeasesError):
    """The body returned after ``complete()`` or ``guard()``, but had not committed the transaction it gave to it."""

    details = ("key",)
    key: str


class WrongDatabase(LeasesError):
    """What was given to ``complete()`` or ``guard()`` cannot commit the record together with the caller's rows."""


class StoreUnavailable(LeasesError):
    """A lease or record store did not answer; ``executed`` says whether the command may have been carried out."""

    details: ClassVar[tuple[str, ...]] = ("executed",)
    executed: bool | None


class ValueRefused(StoreUnavailable):
    """The database refuses a value, which is too long for its column or not in its encoding; nothing was written."""

    details = ("executed",)
    executed: bool | None


class ColumnMissing(StoreUnavailable):
    """A table has other columns than the statement: it was migrated meanwhile, or changed by hand. Nothing was done."""

    details = ("executed",)
    executed: bool | None


class RecordUnreadable(StoreUnavailable):
    """A column of a record or of an effect holds a value that cannot be read. The delivery stays; the message says what
    to do.

    ``key`` is the record's key (of an effect: as it is stored), ``column`` the name of the column.
    """

    details = ("executed", "key", "column")
    executed: bool | None
    key: str
    column: str


class LeaseStoreMismatch(LeasesError):
    """Two stores cannot share one database, nor two databases one store: the key is running under another lease store
    than this worker uses, or its lease belongs to a worker with another records database.
    """

    details = ("key", "ours", "theirs")
    key: str
    ours: str
    theirs: str


class SchemaOutdated(LeasesError):
    """The tables are missing or of another version; the message names the command to run."""


class LeaseIsLive(LeasesError):
    """The key is held by a live lease; repeat with force to take it away from its holder."""

    details = ("key", "remaining")
    key: str
    remaining: float


class UnknownKey(LeasesError):
    """There is neither a lease nor a record for this key."""

    details = ("key",)
    key: str


class LeaseLost(_Described):
    """This attempt no longer holds its lease: stop, nothing it says about the outcome is believed any more.

    A ``BaseException``, so that ``except Exception`` in a task body cannot swallow it. It never reaches Celery.
    """

    details = ("key", "reason")
    key: str
    reason: str


class Snooze(_Asked):
    """Raised in a task body: not now, ask again after ``delay`` (any duration, kept as seconds).

    Counts neither as an attempt nor as a failure. A ``BaseException``, so that ``except Exception`` in a task body
    cannot swallow it; it never reaches Celery. A wrong delay raises :class:`LeaseConfigurationError` here.
    """

    details = ("delay", "reason")
    delay: float
    reason: str | None

    def __init__(self, delay: float | str | timedelta, reason: object = None) -> None:
        self._ask(_seconds(delay, "Snooze: delay"), None if reason is None else str(reason))

    def _asked(self) -> str:
        return f"the task asked to be put back for {self.delay:g} s"


def _seconds(value: object, what: str, *, zero: bool = False) -> float:
    # Durations raise our errors, so that module can only be imported once this one is there.
    from celery_leases.core.durations import seconds

    return seconds(value, what, zero=zero)


def _epoch(value: object, what: str) -> float:
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < YEAR_10000:
        raise LeaseConfigurationError(
            f"{what}={value!r} is not usable; write a datetime with a time zone, or seconds since the epoch"
        )
    return float(value)
