"""The arguments of ``lease.effect()``, checked before anything is written, and its result."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery_leases.effect import OnUncertain, reference_of
from celery_leases.errors import LeaseMisuse
from celery_leases.text.durations import seconds


@dataclass(frozen=True, slots=True)
class EffectReply:
    """The result of an effect.

    ``value`` is the reply after a round trip through JSON; ``None`` if the reply is not JSON, or
    too large, and has a reference. ``reference`` is the other system's name for the action.
    ``saved``: an earlier attempt made the call, and this one did not.
    """

    value: Any
    reference: str | None
    idempotency_key: str
    saved: bool = False


@dataclass(frozen=True, slots=True)
class EffectArguments:
    """The arguments of one effect."""

    call: Callable[[str], Any]
    reference: Callable[[Any], Any] | None
    verify: Callable[[str], Any] | None
    verify_after: float
    uncertain: OnUncertain


def checked_arguments(
    call: Callable[[str], Any],
    reference: Callable[[Any], Any] | None,
    verify: Callable[[str], Any] | None,
    verify_after: float,
    uncertain: object,
) -> EffectArguments:
    """The checked arguments of one effect.

    Raises :class:`LeaseMisuse`, and :class:`LeaseConfigurationError` for a wrong *verify_after*.
    """
    for name, given in (("call", call), ("reference", reference), ("verify", verify)):
        optional = name != "call" and given is None
        if not (optional or callable(given)):
            raise LeaseMisuse(f"effect({name}={given!r}): give a callable")
        if given is not None:
            _check_callable(name, given)
    if uncertain not in ("stop", "rerun"):
        raise LeaseMisuse(f"effect(uncertain={uncertain!r}): write 'stop' or 'rerun'")
    after = seconds(verify_after, "effect: verify_after", zero=True)
    return EffectArguments(
        call, reference, verify, after, "rerun" if uncertain == "rerun" else "stop"
    )


def _check_callable(name: str, given: Callable[[Any], Any]) -> None:
    """Refuse a callable that cannot be called with one argument."""
    if (
        inspect.iscoroutinefunction(given)
        or inspect.isasyncgenfunction(given)
        or inspect.isgeneratorfunction(given)
    ):
        raise LeaseMisuse(
            f"effect({name}={given!r}): give an ordinary function, which may call asyncio.run()"
        )
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):
        return  # some functions written in C have no signature
    try:
        signature.bind("")
    except TypeError as error:
        what = "the reply" if name == "reference" else "the idempotency key"
        raise LeaseMisuse(
            f"effect({name}={given!r}): it is called with {what} as its only argument: {error}"
        ) from None


def call_without_lease(key: str, arguments: EffectArguments) -> EffectReply:
    """Perform an effect in a body without a lease: only make the call."""
    reply = arguments.call(key)
    return EffectReply(
        reply,
        reference_of(arguments.reference, reply) if arguments.reference is not None else None,
        key,
    )
