"""What the user gives for one effect, checked before anything is written for it, and what he gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery_leases.core.durations import seconds
from celery_leases.core.effects import OnUncertain, reference_of


@dataclass(frozen=True, slots=True)
class EffectReply:
    """What an effect has come to: the reply as JSON gives it back, and the other side's own name for it.

    ``saved``: it was made by an earlier attempt, and no call was made now. ``value`` is ``None`` where the reply is
    no JSON, or too large, and has a reference to be known by.
    """

    value: Any
    reference: str | None
    idempotency_key: str
    saved: bool = False


@dataclass(frozen=True, slots=True)
class Calls:
    """What the user gives for one effect."""

    call: Callable[[str], Any]
    reference: Callable[[Any], Any] | None
    verify: Callable[[str], Any] | None
    verify_after: float
    uncertain: OnUncertain


def calls_of(
    call: Callable[[str], Any],
    reference: Callable[[Any], Any] | None,
    verify: Callable[[str], Any] | None,
    verify_after: float,
    uncertain: object,
) -> Calls:
    """What the user gave for one effect, checked; raises TypeError or ValueError."""
    for name, given in (("call", call), ("reference", reference), ("verify", verify)):
        optional = name != "call" and given is None
        if not (optional or callable(given)):
            raise TypeError(f"effect({name}={given!r}): give a callable")
        if given is not None:
            _check_callable(name, given)
    if uncertain not in ("stop", "rerun"):
        raise ValueError(f"effect(uncertain={uncertain!r}): write 'stop' or 'rerun'")
    after = seconds(verify_after, "effect: verify_after", zero=True)
    return Calls(call, reference, verify, after, "rerun" if uncertain == "rerun" else "stop")


def _check_callable(name: str, given: Callable[[Any], Any]) -> None:
    """Refuse what could not be called as we call it before an intent is written for it."""
    if inspect.iscoroutinefunction(given) or inspect.isasyncgenfunction(given) or inspect.isgeneratorfunction(given):
        raise TypeError(f"effect({name}={given!r}): give an ordinary function; within it, asyncio.run() what is not")
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):
        return  # some of C's have none that can be looked at
    try:
        signature.bind("")
    except TypeError as error:
        what = "the reply" if name == "reference" else "the idempotency key"
        raise TypeError(f"effect({name}={given!r}): it is called with {what} as its only argument: {error}") from None


def unleased(key: str, calls: Calls) -> EffectReply:
    """An effect in a body that runs without a lease: the call, and nothing around it."""
    reply = calls.call(key)
    return EffectReply(reply, reference_of(calls.reference, reply) if calls.reference is not None else None, key)
