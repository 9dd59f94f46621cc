"""Effects: external actions inside an attempt, whose intent is committed before the call and whose
reply after it. Pure.

An effect is identified by its name within its scope, not by its position in the body. It is *sent*
once its intent is committed, and *done* once its reply is committed. The outcome of an effect that
is only *sent* is unknown: the process may have died before, during or after the call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal

from celery_leases.errors import Uncertain
from celery_leases.failures.actions import Reason, RuleMatch
from celery_leases.failures.default_rules import REFUSED_HERE
from celery_leases.record import Record
from celery_leases.text.cleaning import shown, storable

OnUncertain = Literal["stop", "rerun"]

NAME_MAX: Final = 255
VERIFY_AFTER: Final = 60.0
"""Seconds after the intent before ``verify`` is called: until then the request may still be in
progress.
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
    """The work within which an effect happens once.

    ``keep``: the effect is stored for that many seconds after its intent, and as long as the record
    belongs to its call. ``None``: as long as the record is stored.
    """

    name: str
    keep: float | None = None


def scope_of(record: Record, *, each_runs: bool, retention: float) -> Scope:
    """The scope of the effects of an attempt on *record*.

    It is the generation of the record, which all calls share; with *each_runs* it is the call, even
    if another call takes the record meanwhile. *retention* is that of the task, in seconds.
    """
    return Scope(record.call_id, retention) if each_runs else Scope(_generation(record))


def scopes_of(record: Record) -> tuple[str, str]:
    """The names of both scopes that effects of *record* can have: its generation, and its call."""
    return _generation(record), record.call_id


def _generation(record: Record) -> str:
    return f"#{record.generation}"


@dataclass(frozen=True, slots=True)
class Effect:
    """One row of ``celery_leases_effects``, as it was at ``now``; times are microseconds by the
    database's clock.

    ``fence`` is that of the attempt that wrote the intent; only that attempt can write the reply.
    ``result`` is the reply as JSON text, ``reference`` the other system's own name for the effect.
    ``unreadable`` says why the row cannot be read; only operators get such an effect.
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
    """The intent was committed with the fence of this attempt: make the call."""

    effect: Effect


@dataclass(frozen=True, slots=True)
class Found:
    """An earlier attempt has committed the intent."""

    effect: Effect


@dataclass(frozen=True, slots=True)
class UseSaved:
    """The effect is done: return the saved reply without a call."""


@dataclass(frozen=True, slots=True)
class Verify:
    """Call ``verify`` to find out whether the effect has happened."""


@dataclass(frozen=True, slots=True)
class VerifyLater:
    """Reschedule the task by ``delay`` seconds, which counts no attempt: it is too early for
    ``verify``.
    """

    delay: float


@dataclass(frozen=True, slots=True)
class RepeatCall:
    """Make the call again with the same idempotency key, by which the other system deduplicates."""


@dataclass(frozen=True, slots=True)
class AskOperator:
    """Raise ``Uncertain``: an operator must look in the other system."""


def on_found(
    effect: Effect, *, verifies: bool, verify_after: float, uncertain: OnUncertain
) -> UseSaved | Verify | VerifyLater | RepeatCall | AskOperator:
    """Decide about an effect whose intent an earlier attempt has committed."""
    if effect.state is EffectState.DONE:
        return UseSaved()
    if verifies:
        early = verify_after - effect.age()
        return VerifyLater(early) if early > 0 else Verify()
    return RepeatCall() if uncertain == "rerun" else AskOperator()


def was_executed(by_default: RuleMatch, by_task: RuleMatch) -> bool | None:
    """Whether a call that raised was executed: ``False`` if it certainly was not, ``None`` if that
    is unknown.

    The error is classified by the default rules and by the task's own rules. The default rules take
    precedence: a task may call a timeout permanent, or retry a refusal, but that does not show what
    the other system did.
    """
    # A database or a file system on this side raised the error, not the system that was called.
    if by_default.rule == REFUSED_HERE:
        return None
    if by_default.reason is Reason.ERROR:  # no default rule knows the error
        return _was_executed(by_task)
    return _was_executed(by_default)


def _was_executed(matched: RuleMatch) -> bool | None:
    refused = matched.reason in _NOT_EXECUTED and not matched.action.ambiguous
    return False if refused else None


def idempotency_key(prefix: str, stored_key: str, name: str, scope: str) -> str:
    """The idempotency key of an effect: the same on every attempt, and a hash, because the key of
    the task may contain personal data.
    """
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
    """The message about a column of an effect with a value that cannot be read."""
    return (
        f"{stored_key}: effect {name!r} cannot be read: its column {column} has {shown(value)} "
        f"({type(error).__name__}); repair it in celery_leases_effects, or find out in the other system whether it has "
        f"happened, then write: leases resolve {stored_key} --done [--result …]"
    )


def is_valid_name(name: object) -> bool:
    """Whether *name* can be the name of an effect: a str that is not blank, of at most
    :data:`NAME_MAX` characters, without NUL and lone surrogates.
    """
    if not isinstance(name, str) or not name.strip() or len(name) > NAME_MAX:
        return False
    return name == storable(name)


def reference_of(find: Callable[[Any], Any], reply: Any) -> str | None:
    """The other system's own name for an effect, which *find* returns for the reply; raises the
    errors of *find*.
    """
    found = find(reply)
    return storable(str(found)) if found is not None else None
