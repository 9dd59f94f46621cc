"""External actions of an attempt: commits the intent, makes the call, writes the reply. The
arguments are checked before anything is written.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar, assert_never

from celery_leases.attempt.held_lease import HeldLease
from celery_leases.attempt.process import Process
from celery_leases.attempt.run import retrying
from celery_leases.call import Call
from celery_leases.decide import after_run
from celery_leases.effect import (
    AskOperator,
    Begun,
    Effect,
    Found,
    OnUncertain,
    RepeatCall,
    Scope,
    UseSaved,
    Verify,
    VerifyLater,
    idempotency_key,
    on_found,
    outcome_unknown,
    reference_of,
    reply_not_stored,
    scope_of,
    was_executed,
)
from celery_leases.errors import (
    Cooldown,
    EffectMisused,
    LeaseLost,
    LeaseMisuse,
    PermanentFailure,
    RetryLater,
    Snooze,
    StoreUnavailable,
    Uncertain,
)
from celery_leases.failures.classifier import Rules
from celery_leases.record import Record
from celery_leases.results import NOT_JSON, decode, encode
from celery_leases.text.durations import seconds

T = TypeVar("T")
RECORD_CHANGED: Final = "the record was changed by another attempt or an operator"
DEFAULT_RULES: Final = Rules.default()
LATE_INTENT: Final = 0.5
"""Seconds after which a reply to an intent is late, also if half of ``verify_after`` is less."""


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


@dataclass(frozen=True)
class Effects:
    """Performs the effects of one attempt. ``interrupts_deferred`` defers signals during a step."""

    process: Process
    call: Call
    held_lease: HeldLease
    record: Record
    interrupts_deferred: Callable[[], AbstractContextManager[None]]

    def perform(self, name: str, arguments: EffectArguments) -> EffectReply:
        """Make the effect *name* happen once; see :meth:`celery_leases.lease.Lease.effect`."""
        key = idempotency_key(
            self.process.settings.prefix, self.record.stored_key, name, self._scope.name
        )
        begun = self._begin(name, key, arguments)
        if isinstance(begun, Found):
            return self._settle_found(begun.effect, arguments)
        return self._call(begun.effect, arguments)

    @property
    def _scope(self) -> Scope:
        options = self.call.options
        return scope_of(self.record, each_runs=options.reruns, retention=options.retention)

    def _retrying(
        self, step: Callable[[], T], repeatable: Callable[[Any, int], bool] | None = None
    ) -> T:
        until = self.process.clock.now() + after_run.SETTLE_TIMEOUT
        return retrying(step, lambda: until, self.process.clock, repeatable=repeatable)

    def _begin(
        self, name: str, key: str, arguments: EffectArguments, take_over: int | None = None
    ) -> Begun | Found:
        """Commit the intent, and repeat that while its outcome is unknown. Repeating does no harm;
        an intent that was committed unnoticed would be an effect with an unknown outcome.

        ``verify_after`` counts from the intent. If the reply came late, the intent is committed
        again, so that a later attempt does not ask before the call has arrived.

        *take_over*: the fence of an earlier attempt whose intent this attempt takes over.
        """
        began = self.process.clock.now()

        def may_be_open(error: StoreUnavailable, _: int) -> bool:
            return error.executed is not False

        begun = self._retrying(lambda: self._begin_once(name, key, take_over), may_be_open)
        late = self.process.clock.now() - began > max(LATE_INTENT, arguments.verify_after / 2)
        if late and arguments.verify is not None and isinstance(begun, Begun):
            return self._begin(name, key, arguments, begun.effect.fence)
        return begun

    def _begin_once(self, name: str, key: str, take_over: int | None) -> Begun | Found:
        self.held_lease.check()
        begun: Begun | Found | None = None
        try:
            with self.interrupts_deferred():
                begun = self.process.effects.begin(self.record, name, key, self._scope, take_over)
        except BaseException:  # an interrupt that was deferred ends the body, so no call is made
            if isinstance(begun, Begun) and take_over is None:
                self._withdraw(begun.effect)
            raise
        if begun is None:
            raise LeaseLost(
                f"{self.record.key}: the lease is lost: {RECORD_CHANGED}",
                self.record.key,
                RECORD_CHANGED,
            )
        return begun

    def _take_over(self, effect: Effect, arguments: EffectArguments) -> Effect:
        begun = self._begin(effect.name, effect.idempotency_key, arguments, effect.fence)
        if isinstance(begun, Found):  # the attempt that made the call has just written the reply
            message = f"{self.record.key}: another attempt has changed effect {effect.name!r}"
            raise Snooze(1.0, message)
        return begun.effect

    def _settle_found(self, effect: Effect, arguments: EffectArguments) -> EffectReply:
        what = on_found(
            effect,
            verifies=arguments.verify is not None,
            verify_after=arguments.verify_after,
            uncertain=arguments.uncertain,
        )
        match what:
            case UseSaved():
                return self._saved_reply(effect, arguments)
            case VerifyLater(delay):
                raise Snooze(
                    delay,
                    f"the outcome of effect {effect.name!r} is unknown, and verify_after has not passed yet",
                )
            case Verify():
                return self._verify(effect, arguments)
            case RepeatCall():
                return self._call(self._take_over(effect, arguments), arguments, doubted=True)
            case AskOperator():
                raise outcome_unknown(self.record.key, effect, "no verify was given")
            case _ as never:
                assert_never(never)

    def _saved_reply(self, effect: Effect, arguments: EffectArguments) -> EffectReply:
        if effect.result is None and effect.reference is None:
            return self._reply_by_verify(effect, arguments)
        value, reference = decode(effect.result), effect.reference
        if reference is None and arguments.reference is not None:  # it raised an error before
            reference = reference_of(arguments.reference, value)
        return EffectReply(value, reference, effect.idempotency_key, saved=True)

    def _reply_by_verify(self, effect: Effect, arguments: EffectArguments) -> EffectReply:
        """The reply that ``verify`` returns for a done effect without a stored reply; writes
        nothing.
        """
        if arguments.verify is None:
            raise reply_not_stored(self.record.key, effect, "no verify was given to look it up")
        try:
            found = self._call_verify(effect, arguments)
        except Uncertain as error:
            raise reply_not_stored(self.record.key, effect, str(error)) from error
        if found is None:
            raise reply_not_stored(self.record.key, effect, "verify did not find it")
        self.held_lease.check()
        text, missing = encode(found)
        reference = (
            reference_of(arguments.reference, found) if arguments.reference is not None else None
        )
        if missing is not None and reference is None:
            raise reply_not_stored(self.record.key, effect, missing)
        return EffectReply(decode(text), reference, effect.idempotency_key, saved=True)

    def _verify(self, effect: Effect, arguments: EffectArguments) -> EffectReply:
        try:
            found = self._call_verify(effect, arguments)
        except Uncertain as error:
            raise outcome_unknown(self.record.key, effect, str(error)) from error
        ours = self._take_over(effect, arguments)
        if found is None:
            return self._call(ours, arguments)
        return replace(self._write_reply(ours, found, arguments), saved=True)

    def _call_verify(self, effect: Effect, arguments: EffectArguments) -> Any:
        """The result of ``verify``. A value that cannot be a reply is refused; the effect stays
        unchanged.
        """
        assert arguments.verify is not None
        found = arguments.verify(effect.idempotency_key)
        if found is False or _has_not_run(found):
            raise EffectMisused(
                f"{self.record.key}: effect {effect.name!r}: verify returned {found!r}; return the reply that the "
                "call would have returned, or None if the other system has none",
                self.record.key,
                effect.name,
            )
        return found

    def _call(
        self, effect: Effect, arguments: EffectArguments, *, doubted: bool = False
    ) -> EffectReply:
        """Make the call. *doubted*: an earlier call may have been executed, so the intent stays
        whatever the outcome of this call.
        """
        outside = sys.exc_info()[1]
        try:
            self.held_lease.check()  # committing the intent may have taken long
        except (LeaseLost, StoreUnavailable):
            if not doubted:
                self._withdraw(effect)
            raise
        try:
            reply = arguments.call(effect.idempotency_key)
        except (Exception, Snooze) as error:
            # Deferred, so that an exception in here comes from the error's attributes and is not an
            # interrupt.
            with self.interrupts_deferred():
                if not doubted and self._was_executed(error, outside) is False:
                    self._withdraw(effect)
            raise
        if _has_not_run(reply):
            if not doubted:
                self._withdraw(effect)
            raise EffectMisused(
                f"{self.record.key}: effect {effect.name!r}: the callable returned a {type(reply).__name__}, so "
                "nothing was called yet; run it to its end, for example with asyncio.run(), and return the reply",
                self.record.key,
                effect.name,
            )
        return self._write_reply(effect, reply, arguments)

    def _was_executed(self, error: BaseException, outside: BaseException | None) -> bool | None:
        """Whether a call that raised was executed; ``None``: unknown.

        If the callable raised Cooldown, RetryLater or the like, classify the error it was raised
        from. An error that existed *outside* the call proves nothing about the call.
        """
        while isinstance(error, Cooldown | RetryLater | Snooze | PermanentFailure):
            cause = error.__cause__ or error.__context__
            if cause is None or cause is outside:
                return None  # it may have been raised before the request, or after a reply
            error = cause
        process, classifier = self.process, self.call.options.failures.classifier
        return was_executed(
            DEFAULT_RULES.classify(error, 0.0, process.clock.now),
            classifier.classify(error, process.wall_time(), process.clock.now),
        )

    def _withdraw(self, effect: Effect) -> None:
        # If the store does not answer, the outcome stays unknown, and the next attempt verifies it.
        with suppress(StoreUnavailable), self.interrupts_deferred():
            self.process.effects.withdraw(effect)

    def _write_reply(self, effect: Effect, reply: Any, arguments: EffectArguments) -> EffectReply:
        """Write the reply, even if the lease is lost: the call has been executed."""
        with self.interrupts_deferred():
            try:
                text, missing = encode(reply)
            except BaseException:  # noqa: BLE001 - a method of the reply raised; the call was made
                text, missing = None, NOT_JSON
            reference: str | None = None
            reference_error: BaseException | None = None
            if arguments.reference is not None:
                try:
                    reference = reference_of(arguments.reference, reply)
                except BaseException as error:  # noqa: BLE001 - raised below, once the reply is written
                    reference_error = error
            accepted = self._retrying(lambda: self.process.effects.finish(effect, text, reference))
            counts = self.record.crashes and not self.held_lease.body_state.progressed
            others = after_run.crashes_of_another_call(self.call, self.record)
            if accepted and counts and not others:
                with suppress(StoreUnavailable):  # the next step of the body raises it
                    self.process.effects.clear_crashes(self.record)
            self.held_lease.body_state.progressed |= accepted
        if not accepted:
            message = f"{self.record.key}: a later attempt has taken over effect {effect.name!r}"
            raise LeaseLost(message, self.record.key, RECORD_CHANGED)
        if reference_error is not None:
            raise reference_error
        if missing is not None and reference is None:
            raise reply_not_stored(self.record.key, effect, missing)
        self.held_lease.check()
        return EffectReply(decode(text), reference, effect.idempotency_key)


def _has_not_run(given: object) -> bool:
    """Whether *given* is a coroutine or generator, which has called nothing yet."""
    return inspect.isawaitable(given) or inspect.isgenerator(given) or inspect.isasyncgen(given)
