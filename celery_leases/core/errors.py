"""Every error of celery_leases, in one place: picklable, and rebuilt from ``args`` by any result backend."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar


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
        self.__dict__.update({name: given.get(name) for name in self.details})
        super().__init__(message or inspect.cleandoc(type(self).__doc__ or ""), *self.__dict__.values())

    def __str__(self) -> str:
        return str(self.args[0])


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
    """Another call has finished this key, and ``lease_on_done="fail"`` asks for an error."""

    details = ("key", "call_id")
    key: str
    call_id: str


class ResultMissing(LeasesError):
    """The work is done, but its result was not kept: larger than ``lease_result_max``, or not JSON."""

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


class StoreUnavailable(LeasesError):
    """A lease or record store did not answer; ``executed`` says whether the command may have been carried out."""

    details = ("executed",)
    executed: bool | None


class LeaseStoreMismatch(LeasesError):
    """The key is running under another lease store than this worker uses; two stores cannot share one database."""

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
