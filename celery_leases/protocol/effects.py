"""Effects: one external action inside an attempt; its intent is written before the call, its reply
after. Pure rules.

An effect is identified by its name within its scope, not by its position in the body. It is *sent*
once its intent is committed and *done* once its reply is. The outcome of a ``sent`` effect without
a reply is unknown: the process may have died before, during or after the call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal

from celery_leases.common.texts import shown, storable
from celery_leases.errors import Uncertain
from celery_leases.failures.actions import Classification, Reason
from celery_leases.failures.default_rules import REFUSED_HERE
from celery_leases.protocol.records import Record

OnUncertain = Literal["stop", "rerun"]

NAME_MAX: Final = 255
VERIFY_AFTER: Final = 60.0
"""Seconds after the intent before an effect with unknown outcome is looked up: its request may
still be in progress.
"""

_NOT_EXECUTED: Final = frozenset(
    {
        Reason.REFUSED,
        Reason.OUT_OF_QUOTA,
        Reason.DECLINED,
        Reason.UNAUTHORIZED,
        Reason.RATE_LIMITED,
        Reason.CONFLICT,
        Reason.UNREACHABLE,
    }
)


class EffectState(StrEnum):
    """The state of an effect."""

    SENT = "sent"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Scope:
    """The work an effect belongs to: within it the effect happens once.

    ``keep``: the effect is stored for that many seconds from its intent, and as long as the record
    belongs to its call. ``None``: as long as the record is stored.
    """

    name: str
    keep: float | None = None


def scope_of(record: Record, *, rerun: bool, retention: float) -> Scope:
    """The scope of an attempt on *record*: under *rerun* its call, even if other calls use the
    record meanwhile.

    Otherwise it is the record's generation, which all calls share. *retention* is the task's, in
    seconds.
    """
    return Scope(record.call_id, retention) if rerun else Scope(_generation(record))


def scopes_of(record: Record) -> tuple[str, str]:
    """The names of both scopes that the attempts on *record* can have: that of its generation, and
    that of its call.
    """
    return _generation(record), record.call_id


def _generation(record: Record) -> str:
    return f"#{record.generation}"


@dataclass(frozen=True, slots=True)
class Effect:
    """One row of ``celery_leases_effects``, as it was at ``now``; times are microseconds by the
    database's clock.

    ``fence``: that of the attempt that wrote the intent; only the reply of that attempt is
    accepted. ``result``: the reply's JSON text. ``reference``: the other system's own name for the
    effect. ``unreadable``: why the row cannot be read, for operators.
    """

    stored_key: str
    name: str
    scope: str
    state: EffectState
    fence: int
    idempotency_key: str
    sent_at: int
    now: int
    reference: str | None = None
    result: str | None = None
    done_at: int | None = None
    unreadable: str | None = None

    def age(self) -> float:
        """Seconds since its intent was committed."""
        return max(0.0, (self.now - self.sent_at) / 1e6)


@dataclass(frozen=True, slots=True)
class Begun:
    """The intent is committed under this attempt's fence: make the call."""

    effect: Effect


@dataclass(frozen=True, slots=True)
class Found:
    """An earlier attempt has begun the effect."""

    effect: Effect


@dataclass(frozen=True, slots=True)
class UseSaved:
    """The effect is done: return the saved reply, make no call."""


@dataclass(frozen=True, slots=True)
class Verify:
    """Call ``verify`` to find out whether the effect has happened."""


@dataclass(frozen=True, slots=True)
class VerifyLater:
    """Too early to call ``verify``: reschedule by ``delay`` seconds, which spends no attempt."""

    delay: float


@dataclass(frozen=True, slots=True)
class RepeatCall:
    """Make the call again with the same idempotency key: the other system deduplicates by it."""


@dataclass(frozen=True, slots=True)
class AskOperator:
    """The outcome cannot be found out: an operator must look."""


def on_found(
    effect: Effect, *, verifies: bool, verify_after: float, uncertain: OnUncertain
) -> UseSaved | Verify | VerifyLater | RepeatCall | AskOperator:
    """What to do about an effect that an earlier attempt has begun."""
    if effect.state is EffectState.DONE:
        return UseSaved()
    if verifies:
        early = verify_after - effect.age()
        return VerifyLater(early) if early > 0 else Verify()
    return RepeatCall() if uncertain == "rerun" else AskOperator()


def was_executed(known: Classification, said: Classification) -> bool | None:
    """Whether a call that raised was executed: ``False`` when it certainly was not, ``None`` when
    that is unknown.

    *known* is the classification of the error by the default rules, *said* that by the task's own
    rules. The default rules take precedence: a task may classify a timeout as permanent, or retry a
    refusal, but that does not show what the other system did.
    """
    if (
        known.rule == REFUSED_HERE
    ):  # a database or a file system raised it, but the request was for neither
        return None
    if known.reason is Reason.ERROR:  # the default rules do not know the error
        return _is_known_unexecuted(said)
    return _is_known_unexecuted(known)


def _is_known_unexecuted(classification: Classification) -> bool | None:
    return (
        False
        if classification.reason in _NOT_EXECUTED and not classification.ruling.ambiguous
        else None
    )


def idempotency_key(prefix: str, stored_key: str, name: str, scope: str) -> str:
    """The idempotency key of an effect: the same on every attempt, without personal data."""
    text = f"{prefix}\x1f{stored_key}\x1f{name}\x1f{scope}"
    return hashlib.sha256(text.encode()).hexdigest()[:48]


def outcome_unknown(key: str, effect: Effect, why: str) -> Uncertain:
    """The error for an effect of *key* whose outcome is unknown."""
    message = (
        f"{key}: it is not known whether effect {effect.name!r} was executed ({why}); look for idempotency key "
        f"{effect.idempotency_key} in the other system, then: leases resolve"
    )
    return Uncertain(message, key, effect.name, effect.idempotency_key)


def reply_not_stored(key: str, effect: Effect, why: str) -> Uncertain:
    """The error for an effect of *key* that is done, but whose reply is not stored."""
    message = (
        f"{key}: effect {effect.name!r} HAS happened, but its reply is not stored ({why}); let the callable return "
        "plain values of moderate size, or pass reference=. Look for idempotency key "
        f"{effect.idempotency_key} in the other system, then: "
        f"leases resolve {key} --done [--result …], or --retry once verify= finds the reply"
    )
    return Uncertain(message, key, effect.name, effect.idempotency_key)


def unreadable(stored_key: str, name: str, column: str, value: object, error: Exception) -> str:
    """The message about a column of an effect that cannot be read."""
    return (
        f"{stored_key}: effect {name!r} cannot be read: its column {column} has {shown(value)} "
        f"({type(error).__name__}); repair it in celery_leases_effects, or find out in the other system whether it has "
        f"happened, then write: leases resolve {stored_key} --done [--result …]"
    )


def is_valid_name(name: object) -> bool:
    """Whether *name* is valid for an effect: a text of at most ``NAME_MAX`` characters that every
    database accepts.
    """
    if not isinstance(name, str) or not name.strip() or len(name) > NAME_MAX:
        return False
    return name == storable(name)


def reference_of(find: Callable[[Any], Any], reply: Any) -> str | None:
    """The other system's own name for an effect, as *find* gets it from the reply; raises the
    errors of *find*.
    """
    found = find(reply)
    return storable(str(found)) if found is not None else None
