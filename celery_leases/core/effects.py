"""Effects: one external action inside an attempt, its intent written before, its reply after. Pure rules.

An effect is keyed by its name within its scope, not by its position in the body. It is *sent* once its intent is
committed and *done* once its reply is; ``sent`` without a reply is in doubt: the process may have died before, during
or after the call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal

from celery_leases.core.classifier.default_rules import REFUSED_HERE
from celery_leases.core.errors import Uncertain
from celery_leases.core.records import Record
from celery_leases.core.rulings import Classification, Reason
from celery_leases.core.texts import shown, storable

OnUncertain = Literal["stop", "rerun"]

NAME_MAX: Final = 255
VERIFY_AFTER: Final = 60.0
"""Seconds after the intent before an effect in doubt is looked up: its request may still be in flight."""

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
    """Where an effect stands."""

    SENT = "sent"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Scope:
    """The work an effect belongs to: within it the effect happens once.

    ``keep``: the effect is remembered for so many seconds from its intent, and for as long as the record is its
    call's; ``None``: for as long as the record is.
    """

    name: str
    keep: float | None = None


def scope_of(record: Record, *, rerun: bool, retention: float) -> Scope:
    """The scope of an attempt on *record*: under *rerun* its call, whoever else takes the record meanwhile.

    Otherwise the record's generation, which all calls share. *retention* is the task's, in seconds.
    """
    return Scope(record.call_id, retention) if rerun else Scope(_generation(record))


def scopes_of(record: Record) -> tuple[str, str]:
    """The names of both scopes that the attempts on *record* can have: its generation's, and its call's."""
    return _generation(record), record.call_id


def _generation(record: Record) -> str:
    return f"#{record.generation}"


@dataclass(frozen=True, slots=True)
class Effect:
    """One row of ``celery_leases_effects``, as it was at ``now``; times are microseconds by the database's clock.

    ``fence``: that of the attempt whose intent it carries, the only one whose reply is accepted. ``result``: the
    reply's JSON text. ``reference``: the other side's own name for it. ``unreadable``: why the row cannot be read,
    where that is shown to an operator.
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
    """The intent is committed under our fence: make the call."""

    effect: Effect


@dataclass(frozen=True, slots=True)
class Found:
    """An earlier attempt has begun it."""

    effect: Effect


@dataclass(frozen=True, slots=True)
class UseSaved:
    """It is done: the saved reply counts, no call is made."""


@dataclass(frozen=True, slots=True)
class Verify:
    """Ask the other side whether it has happened."""


@dataclass(frozen=True, slots=True)
class ComeBack:
    """Too early to ask: come back in ``delay`` seconds, which spends no attempt."""

    delay: float


@dataclass(frozen=True, slots=True)
class CallAgain:
    """Make the call again under the same idempotency key: the other side dedupes it."""


@dataclass(frozen=True, slots=True)
class Park:
    """Nobody can tell: an operator must look."""


def on_found(
    effect: Effect, *, verifies: bool, verify_after: float, uncertain: OnUncertain
) -> UseSaved | Verify | ComeBack | CallAgain | Park:
    """What to do about an effect that an earlier attempt has begun."""
    if effect.state is EffectState.DONE:
        return UseSaved()
    if verifies:
        early = verify_after - effect.age()
        return ComeBack(early) if early > 0 else Verify()
    return CallAgain() if uncertain == "rerun" else Park()


def was_executed(known: Classification, said: Classification) -> bool | None:
    """Whether a call that raised was carried out: ``False`` when that is sure, ``None`` when unknown.

    *known* is what the default rules make of the error, *said* what the task's own do. The facts come first: a task
    may well call a timeout permanent, or retry a refusal, and says nothing of what the other side did with that.
    """
    if known.rule == REFUSED_HERE:  # by a database or a file system, which no request was for
        return None
    if known.reason is Reason.ERROR:  # the defaults know no such error
        return _judged(said)
    return _judged(known)


def _judged(judgement: Classification) -> bool | None:
    return False if judgement.reason in _NOT_EXECUTED and not judgement.ruling.ambiguous else None


def idempotency_key(prefix: str, stored_key: str, name: str, scope: str) -> str:
    """The key under which the other side dedupes an effect: the same on every attempt, without personal data."""
    text = f"{prefix}\x1f{stored_key}\x1f{name}\x1f{scope}"
    return hashlib.sha256(text.encode()).hexdigest()[:48]


def in_doubt(key: str, effect: Effect, why: str) -> Uncertain:
    """What is raised for an effect of *key* of which nobody can tell whether it has happened."""
    message = (
        f"{key}: whether effect {effect.name!r} was carried out is not known ({why}); look for idempotency key "
        f"{effect.idempotency_key} there, then: leases resolve"
    )
    return Uncertain(message, key, effect.name, effect.idempotency_key)


def unkept(key: str, effect: Effect, why: str) -> Uncertain:
    """What is raised for an effect of *key* that is done, and of whose reply nothing is kept."""
    message = (
        f"{key}: effect {effect.name!r} HAS happened, but its reply is not kept ({why}); let the callable return plain "
        f"values of moderate size, or pass reference=. Look for idempotency key {effect.idempotency_key} there, then: "
        f"leases resolve {key} --done [--result …], or --retry once verify= finds the reply"
    )
    return Uncertain(message, key, effect.name, effect.idempotency_key)


def unreadable(stored_key: str, name: str, column: str, value: object, error: Exception) -> str:
    """What is said of a column of an effect that holds what cannot be read."""
    return (
        f"{stored_key}: effect {name!r} cannot be read: its column {column} has {shown(value)} "
        f"({type(error).__name__}); repair it in celery_leases_effects, or find out on the other side whether it has "
        f"happened, then write: leases resolve {stored_key} --done [--result …]"
    )


def usable_name(name: object) -> bool:
    """Whether an effect can be named so: by a text of at most ``NAME_MAX`` characters that any database takes."""
    if not isinstance(name, str) or not name.strip() or len(name) > NAME_MAX:
        return False
    return name == storable(name)


def reference_of(find: Callable[[Any], Any], reply: Any) -> str | None:
    """The other side's own name for an effect, as *find* gets it out of the reply; raises what that raises."""
    found = find(reply)
    return storable(str(found)) if found is not None else None
